"""A batch of every environment equals a loop without jit, and the same keys give the same bits in one trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from environment_rows import each_row, types
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from jaxpar.env import reset, step
from jaxpar.env.spaces import legal_sample


@functools.cache
def compiled(name):
    """Jitted resets and legal steps of several environments, and how often the step was traced."""
    (env, params), traces = envs.make(name), []

    def advance(key, state):
        traces.append(1)
        action_key, step_key = jax.random.split(key)
        mask = None
        if hasattr(env, "action_mask"):
            mask = env.action_mask(state, params)
        action = legal_sample(action_key, env.action_space(params), mask)
        return action, step(step_key, env, state, action, params)

    begin = jit(jax.vmap(lambda key: reset(key, env, params)))
    return begin, jit(jax.vmap(advance)), traces


def assert_same(got, want):
    """Integers and flags to the bit, floats to rounding."""
    assert types(jax.tree.map(jax.typeof, got)) == types(jax.tree.map(jax.typeof, want))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_equal(one, other)
    if any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(got)):
        assert_close(got, want, EXACT_MATHS["float32"])


@each_row()
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


@each_row()
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
