"""What every environment of `envs` keeps, one row an environment; other sizes of the same class are slow rows."""

import inspect

import jax
import jax.numpy as jnp
from environment_rows import ALL, each_row, family_of, types

import envs
from envs.registry import _variants
from jaxpar.env import reset, step

PARTS = {
    "init": ["key", "params"],
    "transition": ["key", "state", "action", "params"],
    "observe": ["key", "state", "action", "params"],
    "reward": ["state", "action", "next_state", "params"],
    "terminal": ["state", "params"],
    "observation_space": ["params"],
    "action_space": ["params"],
}
OPTIONAL = {
    "truncated": ["state", "params"],
    "action_mask": ["state", "params"],
    "render": ["state", "params"],
    "sample_level": ["key", "params"],
    "init_level": ["key", "level", "params"],
    "log_likelihood": ["obs", "state", "action", "next_state", "params"],
    "heuristic": ["state", "params"],
    "upper_bound": ["state", "params"],
    "rollout_action": ["key", "state", "params"],
    "trial": ["state", "params"],
    "obs_key": ["obs", "params"],
    "tabular": ["params"],
}


@each_row()
def test_argument_names(name):
    env, _ = envs.make(name)
    for part, names in PARTS.items():
        assert list(inspect.signature(getattr(env, part)).parameters) == names, part
    for part, names in OPTIONAL.items():
        if hasattr(env, part):
            found = list(inspect.signature(getattr(env, part)).parameters)
            assert found == names or (part == "heuristic" and found == [*names, "action"]), part
    assert hasattr(env, "render"), "every environment of ours has a picture"


@each_row()
def test_parameters_are_traced(name):
    env, params = envs.make(name)
    key, arrays = jax.random.key(0), jax.tree.map(jnp.asarray, params)

    def both(params):
        _, state = reset(key, env, params)
        action = env.action_space(params).sample(key)
        return state, step(key, env, state, action, params).state

    first, second = jax.eval_shape(both, arrays)
    assert types(first) == types(second)


def test_every_family_has_rows():
    assert {family_of(type(make())) for make in _variants().values()} == set(ALL)
