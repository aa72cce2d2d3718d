"""Navigation against a plain twin: every cell and action of random maps, in each of the two ways a step can go."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from envs.pomdp.navigation import Navigation, NavigationState
from jaxpar.types import UsageError

COMPASS = [(-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (0, 0)]
ENV, PARAMS = Navigation(), Navigation().default_params


def maps(env, count, seed=0):
    """Random starts, as NumPy: places `[count, 2]` and obstacles `[count, n, n]`."""
    states = jit(jax.vmap(lambda key: env.init(key, env.default_params)))(
        jax.random.split(jax.random.key(seed), count)
    )
    bits = np.asarray(states.blocked)[..., None] >> np.arange(env.size) & 1
    return np.asarray(states.place), bits.astype(bool)


def pack(places, grids):
    return NavigationState(
        jnp.asarray(places, jnp.int8), jnp.asarray((grids << np.arange(13)).sum(-1), jnp.uint16)
    )


def every_state(count=3):
    """All cells of a few maps."""
    _, grids = maps(ENV, count)
    places = [(r, c) for r in range(13) for c in range(13)]
    return np.asarray(places * count), np.repeat(grids, 169, axis=0)


def test_equals_its_definition_entry_by_entry():
    places, grids = every_state()
    states = pack(places, grids)
    for slip in (0.0, 1.0):
        params = PARAMS.replace(slip=slip)

        @jit
        @jax.vmap
        def acts(state):
            def one(action):
                following = ENV.transition(jax.random.key(0), state, action, params)  # noqa: B023
                return following.place, ENV.reward(state, action, following, params)  # noqa: B023

            return jax.vmap(one)(jnp.arange(9))

        got_places, got_rewards = map(np.asarray, acts(states))
        for i, (place, grid) in enumerate(zip(places.tolist(), grids, strict=True)):
            for action, (down, right) in enumerate(COMPASS):
                row, column = place[0] + down, place[1] + right
                bumps = action != 8 and not (
                    0 <= row < 13 and 0 <= column < 13 and not grid[row, column]
                )
                want = place if bumps or slip or place == [12, 6] else [row, column]
                reward = -0.2 if action == 8 else -1.0 if bumps and not slip else -0.1
                reward = 0.0 if place == [12, 6] else 20.0 if want == [12, 6] else reward
                assert got_places[i, action].tolist() == want
                np.testing.assert_allclose(got_rewards[i, action], reward, atol=1e-6)


def test_steps_fail_and_looks_err_as_often_as_stated():
    places, grids = every_state(1)
    state = jax.tree.map(lambda x: x[13 * 3 + 5], pack(places, np.zeros_like(grids)))
    keys = jax.random.split(jax.random.key(0), 40000)
    moved = jit(jax.vmap(lambda key: ENV.transition(key, state, jnp.asarray(0), PARAMS).place))(
        keys
    )
    np.testing.assert_allclose(np.mean(np.asarray(moved)[:, 0] == 3), 0.03, atol=0.005)
    seen = np.asarray(
        jit(jax.vmap(lambda key: ENV.observe(key, state, jnp.asarray(8), PARAMS)))(keys)
    )
    np.testing.assert_allclose([np.mean(seen >> bit & 1) for bit in range(8)], 0.03, atol=0.005)
    np.testing.assert_allclose(np.mean(seen == 0), 0.97**8, atol=0.01)


def test_looks_without_errors():
    places, grids = every_state()
    params = PARAMS.replace(blur=0.0)
    seen = jit(jax.vmap(lambda s: ENV.observe(jax.random.key(0), s, jnp.asarray(8), params)))(
        pack(places, grids)
    )
    for got, (row, column), grid in zip(np.asarray(seen), places, grids, strict=True):
        padded = np.pad(grid, 1)
        want = [padded[row + 1 + down, column + 1 + right] for down, right in COMPASS[:8]]
        assert [got >> (7 - i) & 1 for i in range(8)] == want


def test_distances_are_those_of_a_queue():
    places, grids = every_state()
    got = jit(jax.vmap(ENV.distance))(pack(places, grids))
    for i in range(3):
        grid, steps = grids[169 * i], {(12, 6): 0}
        queue = collections.deque(steps)
        while queue:
            row, column = queue.popleft()
            for down, right in COMPASS[:8]:
                cell = (row + down, column + right)
                if min(cell) >= 0 and max(cell) < 13 and cell not in steps and not grid[cell]:
                    steps[cell] = steps[row, column] + 1
                    queue.append(cell)
        for j, place in enumerate(places[:169].tolist()):
            if not grid[tuple(place)]:
                assert got[169 * i + j] == steps.get(tuple(place), -1)
    closed = np.zeros((13, 13), bool)
    closed[6] = True
    stuck = jax.tree.map(lambda x: x[0], pack([(3, 3)], closed[None]))
    assert ENV.distance(stuck) == -1 and ENV.heuristic(stuck, PARAMS) == -100
    near = jax.tree.map(lambda x: x[0], pack([(9, 6)], closed[None]))
    np.testing.assert_allclose(
        ENV.heuristic(near, PARAMS), -0.1 - 0.0983 + 20 * 0.983**2, rtol=1e-5
    )


def test_first_maps():
    places, grids = maps(ENV, 3000)
    known = ENV.known
    assert known.sum() == 31 + 13 and not known[12, 6] and known[6].all()
    assert (places[:, 0] == 0).all() and not grids[np.arange(3000), 0, places[:, 1]].any()
    gates = ~grids[:, 6]
    assert (gates.sum(1) == 1).all() and set(gates.argmax(1)) == {3, 9}
    np.testing.assert_allclose(np.mean(gates.argmax(1) == 3), 0.5, atol=0.04)
    free = ~known
    free[5:8, [3, 9]] = False
    assert not grids[:, 12, 6].any()
    free[12, 6] = False
    np.testing.assert_allclose(grids[:, free].mean(0), 0.1, atol=0.03)
    away = known.copy()
    away[5:8, [3, 9]] = False
    assert grids[:, away].all()
    keys = jax.random.split(jax.random.key(1), 3000)
    state = jax.tree.map(lambda x: x[0], pack(places[:1], grids[:1]))
    flipped = jit(jax.vmap(lambda key: ENV.flipped(key, state, 0.5).blocked))(keys)
    share = (
        (np.asarray(flipped) ^ np.asarray(state.blocked))[..., None] >> np.arange(13) & 1
    ).mean(0)
    fixed = known.copy()
    fixed[6, [3, 9]], fixed[12, 6] = False, True
    np.testing.assert_allclose(share, np.where(fixed, 0, 0.5), atol=0.05)


def test_sizes():
    assert envs.make("Navigation-5")[0].known.sum() == 7
    assert (Navigation(layout=1).known != ENV.known).any()
    with pytest.raises(UsageError, match="odd number"):
        Navigation(size=6)
    with pytest.raises(UsageError, match="between 0 and 15"):
        Navigation(5, 16)
