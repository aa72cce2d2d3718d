"""Every learner makes updates in every environment whose actions it can take, without a NaN, in one trace."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from envs.registry import MODULES
from jaxpar.rl import A2c, Dqn, Network, Ppo, Pqn
from jaxpar.types import UsageError

NAMES = [next(iter(importlib.import_module(f"envs.{module}").VARIANTS)) for module in MODULES]
SMALL = Network(hidden=(8,))
SIZES = {"num_envs": 2, "num_steps": 4}
LEARNERS = {
    "ppo": lambda env: Ppo(env, SMALL, minibatches=2, **SIZES),
    "ppo-central": lambda env: Ppo(env, SMALL, minibatches=2, central=True, **SIZES),
    "ppo-min-gru": lambda env: Ppo(
        env, Network((8,), (8,), memory="min_gru", memory_size=8), minibatches=2, **SIZES
    ),
    "a2c": lambda env: A2c(env, SMALL, **SIZES),
    "pqn": lambda env: Pqn(env, SMALL, minibatches=2, **SIZES),
    "qmix": lambda env: Pqn(env, SMALL, minibatches=2, decomposition="qmix", **SIZES),
    "dqn": lambda env: Dqn(
        env, SMALL, gradient_steps=2, batch_size=4, capacity=16, warmup=8, **SIZES
    ),
}
IN_CI = {
    ("ppo", "multi.combat"),
    ("qmix", "multi.combat"),
}  # masks, agents that end before the others


@pytest.mark.parametrize(  # 25 minutes for all on busy cores
    "learner, name",
    [
        pytest.param(learner, name, marks=() if (learner, module) in IN_CI else pytest.mark.slow)
        for learner in LEARNERS
        for module, name in zip(MODULES, NAMES, strict=True)
    ],
)
def test_a_few_updates(learner, name):
    env, params = envs.make(name)
    try:
        made = LEARNERS[learner](env)
    except UsageError as error:
        pytest.skip(str(error))
    traces = []

    def update(key, state):
        traces.append(1)
        return made.step(key, state, params)

    step, state = jit(update), jit(made.init)(jax.random.key(0), params)
    for number in range(4):
        state, info = step(jax.random.key(number), state)
    assert len(traces) == 1
    for leaf in jax.tree.leaves(state.weights):
        assert np.isfinite(leaf).all()
    losses = [x for key, x in info.items() if "loss" in key or key == "grad_norm"]
    assert losses and np.isfinite(jnp.stack(losses)).all(), info
