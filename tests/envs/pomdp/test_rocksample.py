"""RockSample against its arrays, entry by entry, and against a plain twin."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs.pomdp.rocksample import RockSample, RockSampleState
from jaxpar.env import check_environment
from jaxpar.pomdp import solve_exact
from jaxpar.pomdp.tabular import from_environment
from jaxpar.types import UsageError


def all_states(env):
    places = [(i % env.size, i // env.size) for i in range(env.size**2)]
    bits = [tuple(bool(b >> r & 1) for r in range(env.num_rocks)) for b in range(2**env.num_rocks)]
    rows = [*itertools.product(places, bits), ((env.size, env.size // 2), (False,) * env.num_rocks)]
    return RockSampleState(jnp.asarray([r[0] for r in rows]), jnp.asarray([r[1] for r in rows]))


def index(env, states):
    bits = (np.asarray(states.good) << np.arange(env.num_rocks)).sum(-1)
    place = np.asarray(states.place)
    inside = (place[..., 1] * env.size + place[..., 0]) * 2**env.num_rocks + bits
    return np.where(place[..., 0] >= env.size, env.size**2 * 2**env.num_rocks, inside)


@pytest.mark.parametrize("size, num_rocks", [(2, 2), (3, 2)])
def test_equals_its_arrays_entry_by_entry(size, num_rocks):
    env = RockSample(size, num_rocks)
    params, states = env.default_params, all_states(env)
    model = env.tabular(params)
    count, actions = model["transition"].shape[1], jnp.arange(5 + num_rocks)

    @jax.jit
    @jax.vmap
    def by_action(action):
        def one(state):
            following = env.transition(jax.random.key(0), state, action, params)
            chances = [
                jnp.exp(env.log_likelihood(o, state, action, state, params)) for o in range(3)
            ]
            return following, env.reward(state, action, following, params), jnp.stack(chances)

        return jax.vmap(one)(states)

    following, reward, chances = by_action(actions)
    kernel = np.zeros_like(model["transition"])
    for action in range(5 + num_rocks):
        kernel[
            action, np.arange(count), index(env, jax.tree.map(lambda x: x[action], following))  # noqa: B023
        ] = 1
    np.testing.assert_array_equal(kernel, model["transition"])
    np.testing.assert_array_equal(reward, model["reward"])
    np.testing.assert_allclose(chances, model["observation"], atol=1e-6)
    starts = index(
        env, jax.vmap(lambda key: env.init(key, params))(jax.random.split(jax.random.key(0), 500))
    )
    assert set(starts) == set(np.flatnonzero(model["start"]))


def test_readings_are_right_as_often_as_the_arrays_say():
    env = RockSample(3, 2)
    params = env.default_params.replace(half_efficiency=1.0)
    state = RockSampleState(jnp.asarray([0, 1]), jnp.asarray([True, False]))
    for action in (5, 6):
        keys = jax.random.split(jax.random.key(action), 20000)
        seen = jax.vmap(lambda key: env.observe(key, state, jnp.asarray(action), params))(keys)  # noqa: B023
        share = np.bincount(seen, minlength=3) / 20000
        want = [
            np.exp(float(env.log_likelihood(o, state, jnp.asarray(action), state, params)))
            for o in range(3)
        ]
        np.testing.assert_allclose(share, want, atol=0.015)


def test_masks_admit_exactly_what_is_not_fined():
    for env in (RockSample(3, 2), RockSample(7, 8)):
        params = env.default_params
        states = all_states(RockSample(3, 2)) if env.size == 3 else None
        if states is None:
            places = jnp.asarray(list(itertools.product(range(7), range(7))))
            states = RockSampleState(places, jnp.zeros((49, 8), bool))
        inside = np.asarray(states.place[:, 0] < env.size)
        mask = np.asarray(jax.vmap(lambda s: env.action_mask(s, params))(states))  # noqa: B023
        for action in range(5 + env.num_rocks):
            fined = jax.vmap(
                lambda s: env.reward(s, action, env.transition(None, s, action, params), params)  # noqa: B023
            )(states)
            np.testing.assert_array_equal(mask[inside, action], np.asarray(fined)[inside] != -100)


def test_the_heuristic_goes_to_the_nearest_good_rock():
    env = RockSample(7, 8)
    rng, params = np.random.default_rng(0), env.default_params
    for share in (0.5, 0.5, 0.5, 0.2, 0.2, 0.0):
        place, good = rng.integers(0, 7, 2), rng.random(8) < share
        got = float(
            env.heuristic(RockSampleState(jnp.asarray(place, jnp.int32), jnp.asarray(good)), params)
        )
        ways = [int(abs(env.map[r] - place).sum()) for r in range(8) if good[r]]
        np.testing.assert_allclose(
            got, 12 * 0.95 ** min(ways) if ways else 10 * 0.95 ** (6 - place[0]), rtol=1e-5
        )


def test_keeps_the_promises_of_environments():
    report = check_environment(*envs.make("RockSample-7-8"), num_envs=64)
    assert {"likelihood", "absorbing"} <= set(report.checks)


def test_layouts():
    assert RockSample(7, 8).map.tolist()[0] == [2, 0] and len(RockSample(11, 11).map) == 11
    assert RockSample(5, 4, layout=1).map.tolist() == RockSample(5, 4, layout=1).map.tolist()
    assert RockSample(5, 4, layout=1).map.tolist() != RockSample(5, 4, layout=2).map.tolist()
    with pytest.raises(UsageError, match="no place"):
        RockSample(2, 5)
    with pytest.raises(UsageError, match="different cells"):
        RockSample(2, 2, rocks=((0, 0), (0, 2)))
    with pytest.raises(UsageError, match="too many"):
        RockSample(7, 8).tabular(RockSample(7, 8).default_params)


def test_the_picture_shows_the_rover():
    env = RockSample(3, 2)
    state = RockSampleState(jnp.asarray([2, 0]), jnp.asarray([True, False]))
    image = env.render(state, env.default_params)
    assert image.shape == (48, 64, 3) and image.dtype == jnp.uint8
    assert tuple(image[40, 40].tolist()) == (58, 110, 190)


def test_a_small_one_has_the_value_of_its_best_plan():
    """One rock beside the start, perfect sensors: check, sample if good, leave."""
    env = RockSample(2, 1, rocks=((0, 1),))
    value = float(
        solve_exact(from_environment(env, env.default_params.replace(half_efficiency=1e9))).value
    )
    leave_now, sampled = 0.95 * 10, 10 + 0.95**2 * 10
    np.testing.assert_allclose(value, 0.95 * (0.5 * leave_now + 0.5 * sampled), atol=1e-2)
