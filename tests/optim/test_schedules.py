"""Learning rates against plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.optim import OptimizerConfig, annealed, learning_rate
from jaxpar.optim.schedules import in_widest_float
from jaxpar.types import UsageError

SCHEDULES = ("cosine", "linear", "constant", "wsd")


def slow_rate(config, step, last):
    if step < config.warmup_steps:  # from 1 / warmup_steps unless said, so that no step is lost
        first = 1 / config.warmup_steps if config.warmup_start is None else config.warmup_start
        return config.learning_rate * (first + step / config.warmup_steps * (1 - first))
    span = max(1, last - config.warmup_steps)
    share = min(1.0, (step - config.warmup_steps) / span)
    low, fall = config.final_ratio, max(1, span // 5)
    factor = {
        "constant": 1.0,
        "linear": 1 - share * (1 - low),
        "cosine": low + (1 - low) * (1 + math.cos(math.pi * share)) / 2,
        "wsd": 1 - max(0.0, share * span - (span - fall)) / fall * (1 - low),
    }[config.schedule]
    return config.learning_rate * factor


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule(schedule, warmup):
    config = OptimizerConfig(
        schedule=schedule, warmup_steps=warmup, learning_rate=0.3, final_ratio=0.2
    )
    steps = np.arange(130)
    got = jax.vmap(learning_rate(config, 100))(steps)
    np.testing.assert_allclose(got, [slow_rate(config, step, 100) for step in steps], rtol=2e-6)
    assert got[0] > 0, "the first step must not be lost"
    np.testing.assert_allclose(got[warmup], 0.3, rtol=1e-6)
    np.testing.assert_allclose(got[100], 0.3 if schedule == "constant" else 0.06, rtol=1e-6)


@pytest.mark.parametrize("start", [0.0, 0.5, 1.0])
def test_a_warm_up_begins_where_it_is_told(start):
    config = OptimizerConfig(warmup_steps=8, warmup_start=start, learning_rate=0.4)
    got = jax.vmap(learning_rate(config, 20))(np.arange(20))
    np.testing.assert_allclose(got, [slow_rate(config, step, 20) for step in range(20)], rtol=2e-6)
    np.testing.assert_allclose(got[0], 0.4 * start, rtol=1e-6)


def test_decay_steps_end_a_schedule_before_the_run():
    config = OptimizerConfig(
        schedule="linear", warmup_steps=0, learning_rate=1.0, final_ratio=0.0, decay_steps=50
    )
    np.testing.assert_allclose(learning_rate(config, 100)(25), 0.5, rtol=1e-6)
    assert learning_rate(config, 100)(50) == 0


@pytest.mark.parametrize("steps", [1, 5])
def test_a_run_that_is_shorter_than_its_warm_up_has_rates(steps):
    config = OptimizerConfig(warmup_steps=5, learning_rate=0.3)
    got = jax.vmap(learning_rate(config, steps))(np.arange(8))
    np.testing.assert_allclose(
        got, [slow_rate(config, step, steps) for step in range(8)], rtol=2e-6
    )


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_exact_in_double_precision(schedule, warmup, x64):
    config = OptimizerConfig(
        schedule=schedule, warmup_steps=warmup, learning_rate=0.3, final_ratio=0.2
    )
    steps = np.arange(130)
    got = jax.vmap(learning_rate(config, 100))(steps.astype(np.int32))
    np.testing.assert_allclose(got, [slow_rate(config, step, 100) for step in steps], rtol=1e-14)


def test_schedules_are_computed_in_the_widest_float(x64):
    plain = optax.linear_schedule(0.1, 0.7, 9)
    assert abs(float(in_widest_float(plain)(jnp.int32(4))) - (0.1 + 0.6 * 4 / 9)) < 1e-16


def test_traced_rates_are_annealed_to_0_or_stay():
    """All three numbers swept at once."""
    rows = [
        (rate, over, step) for rate in (0.5, 2.0) for over in (0, 1, 4) for step in (0, 1, 3, 4, 9)
    ]
    want = [rate * (max(1 - step / over, 0) if over else 1) for rate, over, step in rows]
    np.testing.assert_allclose(jax.vmap(annealed)(*np.float32(rows).T), want, rtol=1e-6)


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="optimizer.name='sgd' is unknown; legal are adamw, muon"):
        OptimizerConfig("sgd")
    with pytest.raises(UsageError, match="optimizer.schedule='step' is unknown; legal are cosine"):
        OptimizerConfig(schedule="step")
