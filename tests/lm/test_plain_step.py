"""The plain step is the trainer's own on one device, to rounding, and refuses what it lacks."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import EXACT_MATHS, assert_close

from jaxpar.lm import OptimizerConfig, Trainer
from jaxpar.lm.objectives import ObjectiveConfig
from jaxpar.lm.plain_step import plain_optimizer, plain_state, plain_step
from jaxpar.lm.tuning import TuningConfig
from jaxpar.types import UsageError

ROWS = 4
STEPS = 2
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, eps=1e-6, clip_norm=0.05)
"""The norm of a gradient of the tiny model is far over its limit: clipping bites."""
TRAINER = Trainer(
    tiny.exact(with_fields(tiny.LLAMA, z_loss=1e-3)),
    OPTIMIZER,
    num_steps=10,
    tuning=TuningConfig(ema=0.9),
)
MORE = {"dropout": 0.2, "num_experts": 4}


def with_model(trainer=TRAINER, **changes):
    return dataclasses.replace(trainer, model=with_fields(trainer.model, **changes))


def batch_of(step):
    """Returns a batch with uneven weights; all weights of a row are zero."""
    weights = np.random.default_rng(step).integers(0, 9, (ROWS, tiny.LENGTH)) / 4
    weights[1] = 0
    return tiny.batch_of(batch=ROWS, seed=step) | {"weights": weights}


def compare_steps(trainer):
    """Returns what the plain step and the trainer's made of the same batches, and the norms."""
    state = trainer.begin(tiny.params_of(trainer.model))
    plain = plain_state(trainer, state.params)
    own_step = jit(trainer.step)
    twin_step = jit(functools.partial(plain_step, trainer))
    norms = []
    for step in range(STEPS):
        key = jax.random.fold_in(jax.random.key(0), step)
        batch = batch_of(step)
        state, info = own_step(key, state, batch)
        loss, gradient, plain = twin_step(key, plain, batch)
        norms.append(float(optax.tree.norm(gradient)))
        # The trainer's step reports its loss in float32.
        assert float(info["loss"]) == pytest.approx(float(loss), rel=1e-6)
    return plain, state, norms


@pytest.mark.parametrize("changes", [{}, MORE], ids=["plain", "dropout and experts"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_trainers_step(accumulate, changes, x64):
    trainer = dataclasses.replace(with_model(**changes), accumulate=accumulate)
    plain, state, norms = compare_steps(trainer)
    assert min(norms) > 2 * OPTIMIZER.clip_norm
    got = {"params": plain["params"], "average": plain["average"]}
    want = {"params": state.params, "average": state.average}
    assert_close(got, want, EXACT_MATHS["float64"])


def test_dropout_draws_and_microbatches_draw_apart(x64):
    """Otherwise the comparison would say nothing of keys."""
    trainer = with_model(dropout=0.2)
    plain = plain_state(trainer, tiny.params_of(trainer.model))
    losses = []
    for count, seed in ((1, 0), (1, 1), (2, 0)):
        step = functools.partial(plain_step, dataclasses.replace(trainer, accumulate=count))
        losses.append(float(step(jax.random.key(seed), plain, batch_of(0))[0]))
    assert len(set(losses)) == 3


def test_without_an_average_it_keeps_none(x64):
    trainer = dataclasses.replace(TRAINER, tuning=TuningConfig())
    plain = plain_state(trainer, tiny.params_of(trainer.model))
    _, _, after = plain_step(trainer, jax.random.key(0), plain, batch_of(0))
    assert plain["average"] == after["average"] == {}


def test_another_rule_is_the_trainers_own():
    trainer = dataclasses.replace(TRAINER, optimizer=dataclasses.replace(OPTIMIZER, name="muon"))
    params = tiny.params_of(with_model(dtype="float32").model)
    shapes = jax.eval_shape(plain_optimizer(trainer).init, params)
    own = jax.eval_shape(trainer.make_optimizer().init, params)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(own)


@pytest.mark.parametrize(
    "changes",
    [
        {"tuning": TuningConfig(freeze=["embed*"])},
        {"tuning": TuningConfig(layer_decay=0.9)},
        {"objective": ObjectiveConfig(kind="dpo")},
        {"teacher": TRAINER.model},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_it_refuses_what_it_does_not_have(changes):
    trainer = dataclasses.replace(TRAINER)
    for name, value in changes.items():
        object.__setattr__(trainer, name, value)  # past the checks of the trainer
    with pytest.raises(UsageError, match="the plain step trains all of a model on tokens"):
        plain_step(trainer, jax.random.key(0), {}, {})
