"""What the tests of all puzzles ask: plain twins beside recorded play, replays of solutions, equal returns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit
from journey import record


def mostly_legal(key, env, state, params):
    """Now and then an action that is illegal."""
    wild_key, any_key, legal_key = jax.random.split(key, 3)
    legal = jax.random.categorical(
        legal_key, jnp.where(env.action_mask(state, params), 0.0, -jnp.inf)
    )
    wild = jax.random.bernoulli(wild_key, 0.03)
    return jnp.where(wild, env.action_space(params).sample(any_key), legal).astype(jnp.int32)


def at(tree, *place):
    """One entry of a record."""
    return jax.tree.map(lambda leaf: leaf[place], tree)


def follow(env, twin_of, num_steps=40, num_envs=20, rtol=1e-5):
    """Walks twins beside recorded play: masks, rewards, ends, and equal returns by both rewards.

    A twin has `legal()`, `step(action) -> (reward, over)` for the rewards that `env` pays, and
    `same(state)`.

    Returns:
        Of every episode that ended its return, whether by an illegal action, and the twin.
    """
    params = env.default_params
    _, states, masks, actions, moved = record(env, params, num_steps, num_envs, policy=mostly_legal)
    other = dataclasses.replace(env, rewards="sparse" if env.rewards == "dense" else "dense")
    pay = jit(jax.vmap(jax.vmap(lambda *step: other.reward(*step, params))))
    others, outcomes = np.asarray(pay(states, actions, moved.state)), []
    for b in range(num_envs):
        twin = None
        for t in range(num_steps):
            if twin is None:
                twin, total, total_by_other = twin_of(at(states, t, b)), 0.0, 0.0
            assert masks[t, b].tolist() == list(twin.legal()), (t, b)
            illegal = not masks[t, b][actions[t, b]]
            reward, over = twin.step(int(actions[t, b]))
            np.testing.assert_allclose(moved.reward[t, b], reward, rtol=rtol, atol=rtol)
            assert moved.terminated[t, b] == over, (t, b)
            assert twin.same(at(moved.state, t, b)), (t, b)
            total, total_by_other = (
                total + float(moved.reward[t, b]),
                total_by_other + float(others[t, b]),
            )
            if over:
                np.testing.assert_allclose(total, total_by_other, rtol=rtol, atol=1e-5)
                outcomes.append((total, illegal, twin))
                twin = None
    assert {illegal for _, illegal, _ in outcomes} == {True, False}
    return outcomes


@functools.cache
def _runner(env):
    params, key = env.default_params, jax.random.key(0)

    def one(state, action):
        after = env.transition(key, state, action, params)
        legal = env.action_mask(state, params)[action] & ~env.terminal(state, params)
        return after, (legal, env.reward(state, action, after, params))

    return jit(lambda state, actions: jax.lax.scan(one, state, actions))


def replay(env, actions, level=None):
    """The return and the last state of actions of which each is legal and the last ends the episode."""
    params, key = env.default_params, jax.random.key(0)
    state = env.init(key, params) if level is None else env.init_level(key, level, params)

    state, (legal, rewards) = _runner(env)(state, jnp.asarray(actions, jnp.int32))
    assert bool(legal.all()) and bool(env.terminal(state, params)) and not bool(state.illegal)
    again = env.transition(key, state, jnp.int32(0), params)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    for kind in ("dense", "sparse"):
        assert (
            float(dataclasses.replace(env, rewards=kind).reward(state, jnp.int32(0), again, params))
            == 0
        )
    return float(rewards.sum()), state
