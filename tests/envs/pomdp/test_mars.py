"""Multi-agent RockSample against a plain twin, every state and action of a small one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from envs.pomdp.mars import Mars, MarsState
from jaxpar.types import UsageError

STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))


def twin_step(env, rovers, good, acts):
    """Plain rules: rovers [[x, y], [x, y]], a set of good rocks -> the same after it, and the reward."""
    rovers, good, earned, n = [list(r) for r in rovers], set(good), 0.0, env.size
    rocks = {tuple(place): i for i, place in enumerate(env.map.tolist())}
    for rover, act in zip(rovers, acts, strict=True):
        if rover[0] == n:
            continue
        if act < 4:
            x, y = rover[0] + STEPS[act][0], rover[1] + STEPS[act][1]
            if x == n:
                earned += 10
                rover[0] = n
            elif x < 0 or not 0 <= y < n:
                earned -= 100
            else:
                rover[:] = x, y
        elif act == 4:
            rock = rocks.get(tuple(rover))
            earned += -100 if rock is None else 10 if rock in good else -10
            good.discard(rock)
    return rovers, good, earned


def pack(rovers, good, num_rocks):
    bits = np.zeros((len(good), (num_rocks + 31) // 32), np.uint32)
    for row, some in enumerate(good):
        for rock in some:
            bits[row, rock // 32] |= np.uint32(1 << rock % 32)
    return MarsState(jnp.asarray(rovers, jnp.int8), jnp.asarray(bits))


def compare(env, rovers, good, actions):
    states = pack(rovers, good, env.num_rocks)

    @jit
    @jax.vmap
    def both(state, action):
        following = env.transition(None, state, action, env.default_params)
        return following, env.reward(state, action, following, env.default_params)

    got, reward = both(states, jnp.asarray(actions))
    wants = [
        twin_step(env, r, g, divmod(int(a), env.base))
        for r, g, a in zip(rovers, good, actions, strict=True)
    ]
    want = pack([w[0] for w in wants], [w[1] for w in wants], env.num_rocks)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(reward, [w[2] for w in wants])
    return states, np.asarray(reward)


def test_equals_its_definition_entry_by_entry():
    env = Mars(3, 2, rocks=((0, 0), (1, 2)))
    places = [(x, y) for x in range(4) for y in range(3)]
    sets = [set(), {0}, {1}, {0, 1}]
    rows = list(itertools.product(places, places, sets, range(env.base**2)))
    states, reward = compare(
        env, [row[:2] for row in rows], [row[2] for row in rows], [row[3] for row in rows]
    )
    mask = jit(jax.vmap(lambda s: env.action_mask(s, env.default_params)))(states)
    gone = np.asarray(states.place)[:, :, 0] == 3
    legal = np.asarray(mask)[np.arange(len(rows)), [row[3] for row in rows]]
    idle = np.stack(
        [np.asarray([row[3] // env.base for row in rows]), [row[3] % env.base for row in rows]], 1
    )
    np.testing.assert_array_equal(legal, (reward > -80) & ((idle == 0) | ~gone).all(1))
    ended = jit(jax.vmap(lambda s: env.terminal(s, env.default_params)))(states)
    np.testing.assert_array_equal(ended, gone.all(1))


def test_many_rocks_take_two_words():
    env, rng = Mars(9, 40, layout=3), np.random.default_rng(0)
    rovers = rng.integers(0, 9, (500, 2, 2)).tolist()
    for i in range(0, 500, 2):
        rovers[i][0] = rovers[i][i // 2 % 2] = env.map[i % 40].tolist()
    good = [set(np.flatnonzero(rng.random(40) < 0.5).tolist()) for _ in range(500)]
    actions = rng.integers(0, env.base**2, 500)
    actions[::2] = 4 * env.base + 4
    compare(env, rovers, good, actions)
    bits = jit(jax.vmap(lambda key: env.init(key, env.default_params)))(
        jax.random.split(jax.random.key(0), 4000)
    ).good
    share = [np.mean(np.asarray(bits)[:, i // 32] >> (i % 32) & 1) for i in range(64)]
    np.testing.assert_allclose(share[:40], 0.5, atol=0.04)
    assert max(share[40:]) == 0


def test_readings():
    """Chances by the formula, and draws that follow them."""
    env = Mars(5, 4, rocks=((0, 0), (4, 4), (2, 2), (3, 0)))
    params = env.default_params.replace(half_efficiency=2.0)
    state = pack([[(0, 0), (2, 3)]], [{0, 3}], 4)
    state = jax.tree.map(lambda x: x[0], state)
    for a, b in ((5, 6), (7, 8), (8, 2), (4, 5)):
        action = jnp.asarray(a * env.base + b)
        want = np.ones((3, 3))
        for axis, (act, place) in enumerate(((a, (0, 0)), (b, (2, 3)))):
            chance = np.array([1.0, 0, 0])
            if act > 4:
                right = 0.5 * (1 + 2.0 ** (-np.linalg.norm(env.map[act - 5] - place) / 2))
                chance = np.array(
                    [0, 1 - right, right] if act - 5 in (0, 3) else [0, right, 1 - right]
                )
            want *= chance[:, None] if axis == 0 else chance[None]
        logs = jit(jax.vmap(lambda o: env.log_likelihood(o, state, action, state, params)))(  # noqa: B023
            jnp.arange(9)
        )
        np.testing.assert_allclose(np.exp(logs), want.reshape(-1), atol=1e-6)
        keys = jax.random.split(jax.random.key(a), 20000)
        seen = jit(jax.vmap(lambda key: env.observe(key, state, action, params)))(keys)  # noqa: B023
        np.testing.assert_allclose(
            np.bincount(seen, minlength=9) / 20000, want.reshape(-1), atol=0.015
        )


def test_the_heuristic_sends_rovers_to_different_rocks():
    env = Mars(20, 20)
    rng, gamma = np.random.default_rng(1), 0.983
    rovers = rng.integers(0, 20, (200, 2, 2))
    rovers[:20, 0, 0] = 20
    rovers[20:60, 1] = rovers[20:60, 0]
    good = [
        set(np.flatnonzero(rng.random(20) < share).tolist())
        for share in rng.choice([0.0, 0.1, 0.5], 200)
    ]
    good[:10] = [set()] * 10
    got = jit(jax.vmap(lambda s: env.heuristic(s, env.default_params)))(
        pack(rovers.tolist(), good, 20)
    )
    for i, value in enumerate(np.asarray(got)):
        best = []
        for rover in rovers[i].tolist():
            ways = sorted((int(np.abs(env.map[rock] - rover).sum()), rock) for rock in good[i])
            best.append(None if rover[0] == 20 else ways)
        if best[0] and best[1] and best[0][0][1] == best[1][0][1]:
            best[int(best[1][0][0] > best[0][0][0])].pop(0)
        want = sum(
            12 * gamma ** ways[0][0] if ways else 10 * gamma ** (19 - rover[0])
            for ways, rover in zip(best, rovers[i].tolist(), strict=True)
            if ways is not None
        )
        np.testing.assert_allclose(value, want, rtol=1e-5)


def test_the_heuristic_takes_off_for_far_checks():
    env, params = Mars(20, 20), Mars(20, 20).default_params
    state = jax.tree.map(lambda x: x[0], pack([[(3, 4), (20, 9)]], [{0, 3}], 20))
    plain = float(env.heuristic(state, params))
    for rock in range(20):
        far = max(0, int(np.abs(env.map[rock] - [3, 4]).sum()) - 2)
        for other in (0, 5 + rock):  # the rover that has left is not fined
            got = float(env.heuristic(state, params, jnp.int32((5 + rock) * env.base + other)))
            np.testing.assert_allclose(got, plain - far, rtol=1e-5)
    assert float(env.heuristic(state, params, jnp.int32(2 * env.base))) == plain


def test_sizes_and_maps():
    env, params = envs.make("MARS-20-20")
    assert (
        env.action_space(params).n == 625
        and envs.make("MARS-50-50")[0].action_space(params).n == 3025
    )
    assert env.init(jax.random.key(0), params).place.tolist() == [[0, 11], [0, 9]]
    assert (
        env.map.tolist() != Mars(20, 20, layout=1).map.tolist()
        and len({tuple(r) for r in env.map.tolist()}) == 20
    )
    for fields, message in (({"size": 2}, "at least 3 and at most 127"), ({"size": 3, "num_rocks": 8}, "no place"),
                            ({"size": 5, "num_rocks": 1, "rocks": ((5, 0),)}, "different cells")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            Mars(**fields)
