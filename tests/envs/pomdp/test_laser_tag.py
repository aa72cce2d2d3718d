"""LaserTag against plain loops: its kernel and its beams, entry by entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from scipy.stats import norm

from envs.pomdp.laser_tag import LaserTag, LaserTagState
from jaxpar.types import UsageError

ENV, PARAMS = LaserTag(), LaserTag().default_params
CELLS = [tuple(cell) for cell in ENV.cells.tolist()]
COUNT = len(CELLS)
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))
PAIRS = LaserTagState(
    *(jnp.asarray(x, jnp.int32) for x in divmod(np.arange(COUNT**2), COUNT)),
    jnp.zeros(COUNT**2, bool),
)


def moved(cell, way):
    there = (cell[0] + MOVES[way][0], cell[1] + MOVES[way][1]) if way < 4 else cell
    return there if there in CELLS else cell


def kernel(robot, opponent, action):
    """Probabilities of next cells, by the rules."""
    if action == 4 and robot == opponent:
        return {(robot, opponent): 1.0}
    chances = {(moved(robot, action), opponent): 0.2}
    for axis, ways in ((0, (1, 3)), (1, (0, 2))):
        away = opponent[axis] - robot[axis]
        for way, sign in zip(ways, (1, -1), strict=True):
            share = 0.2 if away == 0 else 0.4 * (sign * away > 0)
            key = (moved(robot, action), moved(opponent, way))
            chances[key] = chances.get(key, 0) + share
    return {key: chance for key, chance in chances.items() if chance}


def test_equals_its_kernel_entry_by_entry():
    """Chances of the opponent's ways give the kernel; every draw is possible in it; and rewards."""
    flight = np.asarray(jit(jax.vmap(lambda s: ENV.flight(s.robot, s.opponent, PARAMS)))(PAIRS))

    @jit
    def act(action):
        following = jax.vmap(lambda s: ENV.transition(jax.random.key(0), s, action, PARAMS))(PAIRS)
        return following, jax.vmap(lambda s: ENV.reward(s, action, s, PARAMS))(PAIRS)

    for action in range(5):
        following, reward = jax.tree.map(np.asarray, act(action))
        for i, (robot, opponent) in enumerate(divmod(i, COUNT) for i in range(COUNT**2)):
            robot, opponent = CELLS[robot], CELLS[opponent]
            want = kernel(robot, opponent, action)
            got = {}
            for way in range(5):
                key = (moved(robot, action), moved(opponent, way))
                if action == 4 and robot == opponent:
                    key = (robot, opponent)
                got[key] = got.get(key, 0) + flight[i, way]
            assert {key for key, chance in got.items() if chance > 0} == set(want)
            np.testing.assert_allclose([got[key] for key in want], list(want.values()), atol=1e-6)
            assert (CELLS[following.robot[i]], CELLS[following.opponent[i]]) in want
            assert reward[i] == (-1 if action < 4 else 10 if robot == opponent else -10)


def test_draws_follow_the_kernel():
    draw = jit(
        lambda keys, s: jax.vmap(lambda key: ENV.transition(key, s, jnp.asarray(1), PARAMS))(keys)
    )
    for i in (0, 30 * COUNT + 31, 40 * COUNT + 40, 68 * COUNT + 3):
        state = jax.tree.map(lambda x: x[i], PAIRS)  # noqa: B023
        keys = jax.random.split(jax.random.key(i), 4000)
        got = draw(keys, state)
        share = np.bincount(np.asarray(got.robot * COUNT + got.opponent), minlength=COUNT**2) / 4000
        want = np.zeros(COUNT**2)
        for (robot, opponent), chance in kernel(*(CELLS[c] for c in divmod(i, COUNT)), 1).items():
            want[CELLS.index(robot) * COUNT + CELLS.index(opponent)] = chance
        np.testing.assert_allclose(share, want, atol=0.04)


def ranges_of(robot, opponent):
    found = []
    for dx, dy in (*MOVES, (1, 1), (1, -1), (-1, -1), (-1, 1)):
        d = 1
        while (cell := (robot[0] + d * dx, robot[1] + d * dy)) in CELLS and cell != opponent:
            d += 1
        found.append(d * np.hypot(dx, dy))
    return found


def test_beams():
    """True ranges without noise; with it, likelihoods by the formula, which sum to one and agree with draws."""
    ends = jit(jax.vmap(ENV._ranges))(PAIRS)
    for i in range(0, COUNT**2, 11):
        np.testing.assert_allclose(
            ends[i], ranges_of(*(CELLS[c] for c in divmod(i, COUNT))), rtol=1e-6
        )
    for i in (10 * COUNT + 60, 33 * COUNT + 35):
        state = jax.tree.map(lambda x: x[i], PAIRS)  # noqa: B023
        keys = jax.random.split(jax.random.key(i), 20000)
        seen = np.asarray(
            jit(jax.vmap(lambda key: ENV.observe(key, state, jnp.asarray(1), PARAMS)))(keys)  # noqa: B023
        )
        chances = []
        for beam, end in enumerate(ranges_of(*(CELLS[c] for c in divmod(i, COUNT)))):
            readings = np.arange(int(np.ceil(end)))
            edges = norm.cdf((np.minimum([*readings, readings[-1] + 1], end) - end) / 2.5)
            edges[0] = 0
            chance = 2 * np.diff(edges)
            np.testing.assert_allclose(chance.sum(), 1)
            np.testing.assert_allclose(
                np.bincount(seen[:, beam] - 1, minlength=len(chance)) / 20000, chance, atol=0.02
            )
            chances.append(chance)
        score = lambda o: ENV.log_likelihood(o, state, 1, state, PARAMS)  # noqa: B023, E731
        got = jit(jax.vmap(score))(jnp.asarray(seen[:40]))
        want = [
            sum(np.log(chances[b][reading - 1]) for b, reading in enumerate(row))
            for row in seen[:40]
        ]
        np.testing.assert_allclose(got, want, rtol=1e-4)
        beyond = jnp.asarray(seen[0]).at[0].set(len(chances[0]) + 1)
        assert ENV.log_likelihood(beyond, state, 1, state, PARAMS) == -jnp.inf
    there = jax.tree.map(lambda x: x[10 * COUNT + 10], PAIRS)
    assert ENV.observe(jax.random.key(0), there, None, PARAMS).tolist() == [0] * 8
    assert ENV.log_likelihood(jnp.zeros(8, jnp.int32), there, 1, there, PARAMS) == 0
    assert ENV.log_likelihood(jnp.zeros(8, jnp.int32), state, 1, state, PARAMS) == -jnp.inf


def test_keys_of_observations_differ():
    rng, ns = np.random.default_rng(0), ENV.observation_space(PARAMS).ns
    rows = np.unique(rng.integers(0, ns, (2000, 8)), axis=0)
    keys = jit(jax.vmap(lambda o: ENV.obs_key(o, PARAMS)))(jnp.asarray(rows))
    assert len(set(keys.tolist())) == len(rows) and keys.min() >= 0
    assert np.prod(np.asarray(ns, float)) < 2**31


def test_the_heuristic_walks_around_obstacles():
    values = np.asarray(jit(jax.vmap(lambda s: ENV.heuristic(s, PARAMS)))(PAIRS)).reshape(
        COUNT, COUNT
    )
    goal = CELLS[5]
    steps, queue = {goal: 0}, [goal]
    for cell in queue:
        for way in range(4):
            if (there := moved(cell, way)) not in steps:
                steps[there] = steps[cell] + 1
                queue.append(there)
    for cell, count in steps.items():
        want = -(1 - 0.95**count) / 0.05 + 10 * 0.95**count
        np.testing.assert_allclose(values[CELLS.index(cell), 5], want, rtol=1e-5)


def test_floors():
    assert COUNT == 69 and LaserTag(layout=1).cells.tolist() != ENV.cells.tolist()
    known = LaserTag(start=7)
    starts = jit(jax.vmap(lambda key: known.init(key, PARAMS)))(
        jax.random.split(jax.random.key(0), 500)
    )
    assert set(starts.robot.tolist()) == {7} and len(set(starts.opponent.tolist())) > 60
    for fields, message in (({"num_obstacles": 76}, "no room"), ({"start": 69}, "0 to 68"),
                            ({"width": 60, "height": 60}, "too many")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            LaserTag(**fields)
