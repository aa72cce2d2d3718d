"""SubHunt against a plain twin: the chances of every next state, the beams, the ends."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from fast import jit

from envs.pomdp.sub_hunt import SubHunt, SubHuntState
from jaxpar.types import UsageError

ENV, PARAMS = SubHunt(), SubHunt().default_params
WAYS = ((0, 1), (1, 0), (0, -1), (-1, 0))


def pack(rows):
    own, target, bound, aware, killed = zip(*rows, strict=True)
    return SubHuntState(
        *(jnp.asarray(x, jnp.int32) for x in (own, target, bound)),
        jnp.asarray(aware),
        jnp.asarray(killed),
    )


def random_rows(count, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        own = rng.integers(0, 20, 2)
        target = (
            np.clip(own + rng.integers(-3, 4, 2), 0, 19)
            if rng.random() < 0.6
            else rng.integers(0, 20, 2)
        )
        rows.append(
            (
                tuple(own),
                tuple(target),
                int(rng.integers(4)),
                bool(rng.random() < 0.5),
                bool(rng.random() < 0.1),
            )
        )
    return rows


def inside(x, y):
    return min(max(x, 0), 19), min(max(y, 0), 19)


def ended(row):
    _, (x, y), bound, _, killed = row
    return killed or (19 - y, 19 - x, y, x)[bound] == 0


def kernel(row, action):
    """Next states and their chances, by the rules."""
    (ox, oy), (tx, ty), bound, aware, killed = row
    if ended(row):
        return {row: 1.0}
    own = inside(ox + 3 * WAYS[action][0], oy + 3 * WAYS[action][1]) if action < 4 else (ox, oy)
    found = {}
    kill = (0.6 if aware else 1.0) if action == 5 and math.hypot(tx - ox, ty - oy) <= 2 else 0.0
    if kill:
        found[own, (tx, ty), bound, aware, True] = kill
    for turn, chance in ((0, 0.5), (-1, 0.25), (1, 0.25)):
        side = WAYS[(bound + turn) % 4]
        there = inside(tx + WAYS[bound][0] + side[0], ty + WAYS[bound][1] + side[1])
        after = (own, there, bound, aware or action == 4, False)
        if kill < 1:
            found[after] = found.get(after, 0) + chance * (1 - kill)
    return found


def unpack(states, i):
    pair = lambda x: tuple(int(v) for v in np.asarray(x[i]))  # noqa: E731
    return (
        pair(states.own),
        pair(states.target),
        int(states.bound[i]),
        bool(states.aware[i]),
        bool(states.killed[i]),
    )


def test_outcomes_are_the_kernel_of_many_states():
    rows = random_rows(1500)
    states = pack(rows)

    @jit
    def act(action):
        def one(state):
            following = ENV.transition(jax.random.key(0), state, action, PARAMS)
            return (
                *ENV.outcomes(state, action, PARAMS),
                following,
                ENV.reward(state, action, following, PARAMS),
            )

        return jax.vmap(one)(states)

    for action in range(6):
        places, chances, following, reward = jax.tree.map(np.asarray, act(action))
        for i, row in enumerate(rows):
            want, got = kernel(row, action), {}
            after = unpack(following, i)
            assert after in want and reward[i] == (100 if after[4] and not row[4] else 0)
            if ended(row):
                continue
            for place, chance in zip(
                np.asarray(places[i]).tolist(), np.asarray(chances[i, :3]), strict=True
            ):
                got[tuple(place)] = got.get(tuple(place), 0) + chance
            moved = {key[1]: chance for key, chance in want.items() if not key[4]}
            np.testing.assert_allclose(
                [got[place] for place in moved], list(moved.values()), atol=1e-6
            )
            np.testing.assert_allclose(
                chances[i, 3], sum(c for key, c in want.items() if key[4]), atol=1e-6
            )
            assert sum(c for place, c in got.items() if place not in moved) == 0


def test_draws_follow_the_kernel():
    draw = jit(lambda keys, s, a: jax.vmap(lambda key: ENV.transition(key, s, a, PARAMS))(keys))
    for row, action in (
        (((5, 5), (6, 6), 0, True, False), 5),
        (((5, 5), (1, 19), 1, False, False), 2),
    ):
        state = jax.tree.map(lambda x: x[0], pack([row]))
        keys = jax.random.split(jax.random.key(action), 6000)
        got = draw(keys, state, action)
        seen = [unpack(jax.tree.map(np.asarray, got), i) for i in range(6000)]
        for after, chance in kernel(row, action).items():
            np.testing.assert_allclose(seen.count(after) / 6000, chance, atol=0.03)


def test_beams():
    rows = [row for row in random_rows(300, 1) if not row[4]]
    for action in (0, 4):
        means, noises = jit(jax.vmap(lambda s: ENV._beams(s, jnp.asarray(action), PARAMS)))(  # noqa: B023
            pack(rows)
        )
        for i, ((ox, oy), (tx, ty), *_) in enumerate(rows):
            distance = math.hypot(tx - ox, ty - oy)
            angle = math.degrees(math.atan2(ty - oy, tx - ox))
            beam = math.ceil(round((angle if angle > 0 else angle + 360) / 45, 6)) - 1
            mean, noise = ([20.0] * 8, [0.5] * 8) if action == 4 else ([3.0] * 8, [5.0] * 8)
            if action == 4 or distance <= 3:
                mean[beam], noise[beam] = distance, 0.5
            np.testing.assert_allclose(means[i], mean, rtol=1e-6)
            np.testing.assert_allclose(noises[i], noise, rtol=1e-6)


def test_what_is_seen_has_the_density():
    state = jax.tree.map(lambda x: x[0], pack([((9, 9), (11, 10), 0, False, False)]))
    keys = jax.random.split(jax.random.key(0), 5000)
    for action in (4, 5):
        act = jnp.asarray(action)
        seen = np.asarray(jit(jax.vmap(lambda key: ENV.observe(key, state, act, PARAMS)))(keys))  # noqa: B023
        mean, noise = (np.asarray(x) for x in ENV._beams(state, act, PARAMS))
        assert (
            min(
                scipy.stats.kstest((seen[:, b] - mean[b]) / noise[b], "norm").pvalue
                for b in range(8)
            )
            > 1e-4
        )
        score = lambda o: ENV.log_likelihood(o, state, act, state, PARAMS)  # noqa: B023, E731
        logs = jit(jax.vmap(score))(jnp.asarray(seen[:20]))
        np.testing.assert_allclose(
            logs, scipy.stats.norm.logpdf(seen[:20], mean, noise).sum(1), rtol=1e-4
        )
    row = jnp.full(8, 20.0).at[3].set(4.5)
    assert ENV.obs_key(row, PARAMS) == 8 * 12 + 3 and ENV.obs_key(row - 99, PARAMS) == 3


def test_starts_and_the_heuristic():
    starts = jax.tree.map(
        np.asarray,
        jit(jax.vmap(lambda key: ENV.init(key, PARAMS)))(jax.random.split(jax.random.key(0), 2000)),
    )
    assert (starts.own == 9).all() and not starts.aware.any() and set(starts.bound) == {0, 1, 2, 3}
    for bound, (axis, at) in enumerate(((1, 0), (0, 0), (1, 19), (0, 19))):
        mine = starts.target[starts.bound == bound]
        assert (mine[:, axis] == at).all() and len(set(mine[:, 1 - axis])) == 20
    cases = [((9, 9), (9, 16), 1, False), ((9, 9), (10, 10), 1, True), ((0, 0), (10, 17), 0, False)]
    rows = pack([(*case, False) for case in cases])
    values = jit(jax.vmap(lambda s: ENV.heuristic(s, PARAMS)))(rows)
    np.testing.assert_allclose(values, [100 * 0.99**2, 60 / (1 - 0.99 * 0.4), 0], rtol=1e-5)
    with pytest.raises(UsageError, match="at least 3"):
        SubHunt(size=2)
