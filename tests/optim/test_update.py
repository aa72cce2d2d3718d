"""What every gradient step ends with: nothing that is not finite is kept, whoever trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fast import jit

from jaxpar.nn import SequenceNetwork, SequenceTrainer
from jaxpar.optim import finite_or_old, in_widest_float
from jaxpar.rl.optimizer import SCALES, Optimizer

OLD = {"w": jnp.ones(3), "b": jnp.zeros(2)}, {"mu": jnp.ones(3), "count": jnp.int32(4)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["params", "gradient", "nowhere", "loss"])
def test_a_step_is_taken_whole_or_not_at_all(where, bad):
    new = {"w": jnp.full(3, 2.0), "b": jnp.ones(2)}, {"mu": jnp.zeros(3), "count": jnp.int32(5)}
    if where == "params":
        new[0]["b"] = new[0]["b"].at[1].set(bad)
    norm = jnp.float32(bad if where == "gradient" else 1.0)
    kept, good = finite_or_old(new, OLD, norm, jnp.isfinite(jnp.float32(bad)) if where == "loss" else True)
    jax.tree.map(np.testing.assert_array_equal, kept, new if where == "nowhere" else OLD)
    assert bool(good) == (where == "nowhere") and kept[1]["count"].dtype == jnp.int32


@pytest.mark.parametrize("name", SCALES)
def test_no_optimizer_of_a_learner_takes_what_is_not_finite(name):
    optimizer, weights, grads = Optimizer(name, 1e-8), {"w": jnp.ones(3)}, {"w": jnp.array([0.0, 1.0, -2.0])}
    state = optimizer.init(weights)
    for grad, rate, is_bad in ((grads, 1.0, 0), (grads, jnp.inf, 1), ({"w": grads["w"].at[0].set(jnp.nan)}, 1.0, 1)):
        kept, moved, said = optimizer.update(weights, state, grad, jnp.float32(rate), jnp.float32(1.0))
        assert said["skipped"] == is_bad and np.isfinite(kept["w"]).all()
        if is_bad:
            jax.tree.map(np.testing.assert_array_equal, (kept, moved), (weights, state))


def test_a_sequence_trainer_takes_no_step_that_is_not_finite():
    """Loss and gradient are finite; the rate times the decay is not."""
    network = SequenceNetwork(2, 1, "min_gru", size=4, layers=1, classes=False)
    trainer = SequenceTrainer(network, learning_rate=1e38, weight_decay=1e3, warmup_steps=0)
    first = jit(trainer.init)(jax.random.key(0))
    batch = {"inputs": jnp.ones((2, 3, 2)), "targets": jnp.ones((2, 3)), "weights": jnp.ones((2, 3))}
    state, info = jit(trainer.step)(jax.random.key(1), first, batch)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (first.params, first.opt_state))
    assert np.isfinite(info["loss"]) and np.isfinite(info["grad_norm"]) and info["skipped"] == 1 and state.step == 1


def test_schedules_are_computed_in_the_widest_float(x64):
    plain = optax.linear_schedule(0.1, 0.7, 9)
    assert abs(float(in_widest_float(plain)(jnp.int32(4))) - (0.1 + 0.6 * 4 / 9)) < 1e-16
