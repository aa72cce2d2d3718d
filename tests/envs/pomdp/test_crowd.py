"""Crowd against a plain twin: every next state that can be, with its chance."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from envs.pomdp.crowd import Crowd, CrowdState
from jaxpar.types import UsageError

WAYS = ((0, 1), (1, 0), (0, -1), (-1, 0), (0, 0), (0, 0))


def kernel(env, robot, people, curious, action, follow=0.9):
    """(robot, people) after a step -> its chance, by the rules."""
    width, height = env.width, env.height
    if robot == (width - 1, height // 2):
        return {(robot, people): 1.0}
    inside = lambda x, y: (min(max(x, 0), width - 1), min(max(y, 0), height - 1))  # noqa: E731
    robot = inside(robot[0] + WAYS[action][0], robot[1] + WAYS[action][1])
    choices = []
    for (x, y), friendly in zip(people, curious, strict=True):
        if max(abs(robot[0] - x), abs(robot[1] - y)) > env.reach:
            choices.append([((x, y), 1.0)])
            continue
        sign = 1 if friendly and action != 5 else -1
        there = inside(
            *(a + sign * ((b > a) - (b < a)) for a, b in zip((x, y), robot, strict=True))
        )
        moves = 1.0 if action == 5 else follow
        choices.append([(there, moves), ((x, y), 1 - moves)])
    found = {}
    for combination in itertools.product(*choices):
        key = (robot, tuple(place for place, _ in combination))
        found[key] = found.get(key, 0) + float(np.prod([chance for _, chance in combination]))
    return {key: chance for key, chance in found.items() if chance}


def reward(env, robot, after, action):
    if robot == (env.width - 1, env.height // 2):
        return 0
    value = -1 - 2 * (action == 5) - 20 * (after[0] in after[1])
    return value + 50 * (after[0] == (env.width - 1, env.height // 2))


def test_equals_its_kernel_entry_by_entry():
    """All states of one person in a small hall, in both ways the person's draw can go."""
    env, params = Crowd(4, 3, num_people=1, reach=1), Crowd().default_params
    cells = [(x, y) for x in range(4) for y in range(3)]
    rows = list(itertools.product(cells, cells, (False, True), range(6)))
    states = CrowdState(
        *(
            jnp.asarray(x)
            for x in ([r[0] for r in rows], [[r[1]] for r in rows], [[r[2]] for r in rows])
        )
    )
    actions = jnp.asarray([r[3] for r in rows])
    for follow in (0.0, 1.0):
        these = params.replace(follow=follow)

        @jit
        @jax.vmap
        def both(state, action):
            following = env.transition(jax.random.key(0), state, action, these)  # noqa: B023
            return following, env.reward(state, action, following, these)  # noqa: B023

        following, rewards = jax.tree.map(np.asarray, both(states, actions))
        for i, (robot, person, curious, action) in enumerate(rows):
            (want,) = kernel(env, robot, (person,), (curious,), action, follow)
            assert (tuple(following.robot[i]), (tuple(following.people[i, 0]),)) == want
            assert rewards[i] == reward(env, robot, want, action)
        np.testing.assert_array_equal(following.curious, states.curious)


def test_draws_follow_the_kernel():
    env = Crowd()
    params, rng = env.default_params, np.random.default_rng(0)
    for action in (1, 4, 5):
        people = tuple(
            (int(x), int(y))
            for x, y in zip(rng.integers(2, 7, 4), rng.integers(0, 5, 4), strict=True)
        )
        curious = tuple(bool(c) for c in rng.random(4) < 0.5)
        state = CrowdState(
            jnp.asarray([4, 2]), jnp.asarray(people, jnp.int32), jnp.asarray(curious)
        )
        keys = jax.random.split(jax.random.key(action), 8000)
        got = jit(jax.vmap(lambda key: env.transition(key, state, jnp.asarray(action), params)))(  # noqa: B023
            keys
        )
        want = kernel(env, (4, 2), people, curious, action)
        seen = dict.fromkeys(want, 0)
        for robot, places in zip(
            np.asarray(got.robot).tolist(), np.asarray(got.people).tolist(), strict=True
        ):
            seen[tuple(robot), tuple(map(tuple, places))] += 1
        for key, chance in want.items():
            np.testing.assert_allclose(seen[key] / 8000, chance, atol=0.025)


def test_sight_and_keys():
    env = Crowd()
    params = env.default_params
    state = env.init(jax.random.key(0), params)
    obs = env.observe(None, state, None, params)
    assert obs.tolist() == [y * 9 + x for x, y in env.places.tolist()]
    assert env.log_likelihood(obs, state, 0, state, params) == 0
    assert env.log_likelihood(obs.at[2].add(1), state, 0, state, params) == -jnp.inf
    rows = np.unique(np.random.default_rng(0).integers(0, 45, (3000, 4)), axis=0)
    keys = jit(jax.vmap(lambda o: env.obs_key(o, params)))(jnp.asarray(rows))
    assert len(set(keys.tolist())) == len(rows) and min(keys.tolist()) >= 0
    curious = jit(jax.vmap(lambda key: env.init(key, params).curious))(
        jax.random.split(jax.random.key(0), 4000)
    )
    np.testing.assert_allclose(curious.mean(0), 0.5, atol=0.04)


def test_the_heuristic_is_an_empty_hall():
    env = Crowd()
    state = env.init(jax.random.key(0), env.default_params)
    want = sum(-(0.95**t) for t in range(8)) + 50 * 0.95**7
    np.testing.assert_allclose(env.heuristic(state, env.default_params), want, rtol=1e-5)


def test_halls():
    assert len({tuple(place) for place in Crowd().places.tolist()}) == 4
    assert Crowd().places.tolist() != Crowd(layout=1).places.tolist()
    with pytest.raises(UsageError, match="no place"):
        Crowd(3, 2, num_people=3)
    with pytest.raises(UsageError, match="too many ways"):
        Crowd(20, 20, num_people=4)
