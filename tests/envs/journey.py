"""Random walks through an environment, recorded whole, for twins that follow them on the host."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from fast import OPTIMISED

from jaxpar.env import reset, step
from jaxpar.env.spaces import legal_sample


def legal_action(key, env, state, params):
    """A uniform draw among the legal actions."""
    mask = env.action_mask(state, params) if hasattr(env, "action_mask") else None
    return legal_sample(key, env.action_space(params), mask)


@functools.partial(jax.jit, static_argnums=(1, 3, 4), compiler_options=OPTIMISED)
def travel(key, env, params, num_steps, act=legal_action):
    """`num_steps` steps with a reset where one ends: everything about each, `[T, ...]`.

    Returns:
        A dictionary: `before` (state), `seen` (its observation), `start` (whether an episode began
        there), `action`, `after` (a `Transition`), `done`.
    """

    def one(carry, key):
        state, seen, start = carry
        act_key, step_key, reset_key = jax.random.split(key, 3)
        action = act(act_key, env, state, params)
        after = step(step_key, env, state, action, params)
        done = after.terminated | after.truncated
        fresh_seen, fresh = reset(reset_key, env, params)
        following = jax.tree.map(
            lambda a, b: jnp.where(done, a, b), (fresh, fresh_seen), (after.state, after.obs)
        )
        record = {
            "before": state,
            "seen": seen,
            "start": start,
            "action": action,
            "after": after,
            "done": done,
        }
        return (*following, done), record

    first_key, key = jax.random.split(key)
    seen, state = reset(first_key, env, params)

    # In blocks: where a program is not optimised, each step of a loop copies all that the loop has recorded.
    block = next(size for size in range(math.isqrt(num_steps), 0, -1) if num_steps % size == 0)
    keys = jax.random.split(key, num_steps).reshape(-1, block)
    first = state, seen, jnp.ones((), bool)
    records = jax.lax.scan(lambda carry, keys: jax.lax.scan(one, carry, keys), first, keys)[1]
    return jax.tree.map(lambda x: x.reshape(num_steps, *x.shape[2:]), records)


def steps_of(env, params, num_steps, seed=0, act=legal_action, leg=1000):
    """The steps of journeys of `leg` steps each, one by one, as NumPy pytrees."""
    for place in range(num_steps // leg):
        record = jax.device_get(travel(jax.random.key(seed + 1000 * place), env, params, leg, act))
        leaves, tree = jax.tree.flatten(record)
        leaves = [np.asarray(leaf) for leaf in leaves]
        for t in range(leg):
            yield jax.tree.unflatten(tree, [leaf[t] for leaf in leaves])


def assert_pictures(env):
    """Pictures show something, environment by environment, and change with the state."""
    states = jax.tree.map(
        lambda leaf: leaf[::10], travel(jax.random.key(0), env, env.default_params, 1000)["before"]
    )
    frames = np.asarray(
        jax.jit(jax.vmap(lambda state: env.render(state, env.default_params)))(states)
    )
    assert all(len(np.unique(frame.reshape(-1, 3), axis=0)) > 1 for frame in frames)
    assert len(np.unique(frames.reshape(len(frames), -1), axis=0)) > 3


def assert_only_views_differ(env, other):
    """Asserts that two environments share states and rewards, and show them differently."""
    a, b = (travel(jax.random.key(5), each, env.default_params, 1000) for each in (env, other))
    jax.tree.map(np.testing.assert_array_equal, a["before"], b["before"])
    jax.tree.map(
        np.testing.assert_array_equal, a["after"]._replace(obs=0), b["after"]._replace(obs=0)
    )
    assert np.any(np.asarray(a["seen"]) != np.asarray(b["seen"]))


def record(env, params, num_steps, num_envs, seed=0, policy=legal_action):
    """States, masks and views before, actions, and what every step gave, `[T, B, ...]`; who has ended starts again."""

    def one(before, key):
        obs, state = before
        action_key, step_key, reset_key = jax.random.split(key, 3)
        action = policy(action_key, env, state, params)
        moved = step(step_key, env, state, action, params)
        done = jnp.all(moved.truncated | moved.terminated)
        fresh = reset(reset_key, env, params)
        after = jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, (moved.obs, moved.state))
        return after, (obs, state, env.action_mask(state, params), action, moved)

    def run(key):
        key, first = jax.random.split(key)
        start = jax.vmap(lambda key: reset(key, env, params))(jax.random.split(first, num_envs))
        keys = jax.random.split(key, (num_steps, num_envs))
        return jax.lax.scan(lambda states, keys: jax.vmap(one)(states, keys), start, keys)[1]

    return jax.tree.map(np.asarray, jax.jit(run)(jax.random.key(seed)))
