"""What every environment of `envs` keeps, one row an environment; other sizes of the same class are slow rows."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from envs.registry import _variants
from jaxpar.env import check_environment, legal_sample, reset, step

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


def rows():
    """One name of every class, and the others as slow ones."""
    seen = set()
    for name, make in _variants().items():  # without parameters, which some compile
        kind = type(make())
        yield pytest.param(name, marks=[pytest.mark.slow] if kind in seen else [])
        seen.add(kind)


each_row = pytest.mark.parametrize("name", list(rows()))


@functools.cache
def compiled(name):
    """Jitted resets and legal steps of several environments, and how often the step was traced."""
    (env, params), traces = envs.make(name), []

    def advance(key, state):
        traces.append(1)
        action_key, step_key = jax.random.split(key)
        mask = env.action_mask(state, params) if hasattr(env, "action_mask") else None
        action = legal_sample(action_key, env.action_space(params), mask)
        return action, step(step_key, env, state, action, params)

    begin = jit(jax.vmap(lambda key: reset(key, env, params)))
    return begin, jit(jax.vmap(advance)), traces


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def assert_same(got, want):
    """Integers and flags to the bit, floats to rounding."""
    assert types(jax.tree.map(jax.typeof, got)) == types(jax.tree.map(jax.typeof, want))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_equal(one, other)
    if any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(got)):
        assert_close(got, want, EXACT_MATHS["float32"])


@each_row
def test_argument_names(name):
    env, _ = envs.make(name)
    for part, names in PARTS.items():
        assert list(inspect.signature(getattr(env, part)).parameters) == names, part
    for part, names in OPTIONAL.items():
        if hasattr(env, part):
            found = list(inspect.signature(getattr(env, part)).parameters)
            assert found == names or (part == "heuristic" and found == [*names, "action"]), part
    assert hasattr(env, "render"), "every environment of ours has a picture"


@each_row
def test_promises_hold(name):
    env, params = envs.make(name)
    report = check_environment(env, params, num_envs=4, num_steps=50)
    assert report.steps == 200 and {"identity", "types", "walk"} <= set(report.checks)


@each_row
def test_a_batch_equals_an_eager_loop(name):
    (env, params), (begin, advance, _) = envs.make(name), compiled(name)
    keys, more_keys = jax.random.split(jax.random.key(2), (2, 2))
    obs, states = begin(keys)
    actions, made = advance(more_keys, states)
    for b in range(2):  # a row is cut on the host: nothing to compile
        here = functools.partial(jax.tree.map, lambda x, b=b: jnp.asarray(np.asarray(x)[b]))
        assert_same(reset(keys[b], env, params), here((obs, states)))
        step_key = jax.random.split(more_keys[b])[1]
        one = step(step_key, env, here(states), here(actions), params)
        assert_same(one, here(made))


@each_row
def test_same_key_same_bits_in_one_trace(name):
    begin, advance, traces = compiled(name)
    runs = []
    for _ in range(2):
        _, states = begin(jax.random.split(jax.random.key(3), 2))
        kinds = types(jax.tree.map(jax.typeof, states))
        for number in range(5):
            _, made = advance(jax.random.split(jax.random.key(number), 2), states)
            states = made.state
            assert types(jax.tree.map(jax.typeof, states)) == kinds
        runs.append(made)
    jax.tree.map(np.testing.assert_array_equal, *runs)
    assert len(traces) == 1, "ten calls should trace once: a type of the state changes"


@each_row
def test_parameters_are_traced(name):
    env, params = envs.make(name)
    key, arrays = jax.random.key(0), jax.tree.map(jnp.asarray, params)

    def both(params):
        _, state = reset(key, env, params)
        action = env.action_space(params).sample(key)
        return state, step(key, env, state, action, params).state

    first, second = jax.eval_shape(both, arrays)
    assert types(first) == types(second)
