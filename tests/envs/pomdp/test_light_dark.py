"""LightDark against a plain twin, every state and action, and its noise against the density."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from fast import jit

from envs.pomdp.light_dark import LightDark, LightDarkState
from jaxpar.types import UsageError

ENV, PARAMS = LightDark(), LightDark().default_params
ADDS = (-10, -1, 0, 1, 10)


def states(*stopped):
    rows = [(place, over) for place in range(-60, 61) for over in stopped]
    return LightDarkState(
        jnp.asarray([r[0] for r in rows], jnp.int32), jnp.asarray([r[1] for r in rows])
    )


def test_equals_its_definition_entry_by_entry():
    rows = states(False, True)
    for action, add in enumerate(ADDS):
        following = jit(jax.vmap(lambda s: ENV.transition(None, s, action, PARAMS)))(rows)  # noqa: B023
        rewards = jit(jax.vmap(lambda s, n: ENV.reward(s, action, n, PARAMS)))(rows, following)  # noqa: B023
        for i, (place, over) in enumerate(
            zip(rows.place.tolist(), rows.stopped.tolist(), strict=True)
        ):
            there = place if over or add == 0 else min(max(place + add, -60), 60)
            assert (int(following.place[i]), bool(following.stopped[i])) == (
                there,
                over or add == 0,
            )
            assert rewards[i] == (0 if over else -1 if add else 100 if place == 0 else -100)


def test_what_is_seen_has_the_density():
    for place, noise in ((0, 10.0001), (11, 1.0001), (10, 1e-4), (-60, 70.0001)):
        state = LightDarkState(jnp.asarray(place), jnp.asarray(False))
        keys = jax.random.split(jax.random.key(place + 60), 20000)
        seen = np.asarray(
            jit(jax.vmap(lambda key: ENV.observe(key, state, jnp.asarray(1), PARAMS)))(keys)  # noqa: B023
        )
        assert scipy.stats.kstest((seen - place) / noise, "norm").pvalue > 1e-4
        score = lambda o: ENV.log_likelihood(o, state, 1, state, PARAMS)  # noqa: B023, E731
        got = jit(jax.vmap(score))(jnp.asarray(seen[:50]))
        np.testing.assert_allclose(
            got, scipy.stats.norm.logpdf(seen[:50], place, noise), rtol=2e-3, atol=1e-3
        )


def test_keys_are_bins():
    seen = jnp.asarray([-1e9, -120.0, -0.4, 0.4, 0.6, 1.4, 120.0, 1e9])
    keys = jit(jax.vmap(lambda o: ENV.obs_key(o, PARAMS)))(seen)
    assert keys.tolist() == [0, 0, 120, 120, 121, 121, 240, 240]
    assert ENV.obs_key(jnp.asarray(13.0), PARAMS.replace(key_width=10.0)) == 13


def known_values():
    """Of places that are known, `[121]`: value iteration."""
    value = np.full(121, 100 * 0.95**30)
    for _ in range(200):
        moved = [-1 + 0.95 * value[np.clip(np.arange(121) + add, 0, 120)] for add in ADDS if add]
        value = np.max([*moved, np.where(np.arange(121) == 60, 100.0, -100.0)], axis=0)
    return value


def test_the_heuristic_goes_by_the_light_and_searches_for_it():
    """Dynamic programming to the light, two steps more and the noise's, and from there what a known place is worth."""
    value = np.full(121, -np.inf)
    value[70] = known_values()[70]
    for _ in range(40):
        moved = [-1 + 0.95 * value[np.clip(np.arange(121) + add, 0, 120)] for add in ADDS if add]
        value = np.maximum(value, np.max(moved, axis=0))
    away = np.abs(np.arange(121) - 70)
    more = 0.95 ** np.where(
        away > 0, 2 + away / 20, 0
    )  # as if so many steps, whole or not, found out nothing better
    searched = more * value - (1 - more) / 0.05
    inside = slice(16, 105)  # nearer to an end a wall can stop a big step early
    got = np.asarray(jit(jax.vmap(lambda s: ENV.heuristic(s, PARAMS)))(states(False)))
    np.testing.assert_allclose(got[inside], searched[inside], rtol=1e-5)
    assert np.all(got <= value + 1e-3) and got[60] < 100


def test_the_start_promises_what_can_be_earned():
    """Published returns are 56 to 61; what is straight by way of the light is 72.8, which nobody earns."""
    starts = LightDarkState(jnp.arange(-30, 31, dtype=jnp.int32), jnp.zeros(61, bool))
    promised = jit(jax.vmap(lambda s: ENV.heuristic(s, PARAMS)))(starts)
    assert 56 < float(promised.mean()) < 62


def test_the_upper_bound_is_above_what_is_known_to_be_earned():
    got = np.asarray(jit(jax.vmap(lambda s: ENV.upper_bound(s, PARAMS)))(states(False, True)))
    assert (got[::2] >= known_values() - 1e-3).all() and got[120] == 100 and not got[1::2].any()


def test_starts_and_sizes():
    starts = jit(jax.vmap(lambda key: ENV.init(key, PARAMS).place))(
        jax.random.split(jax.random.key(0), 6000)
    )
    count = np.bincount(np.asarray(starts) + 30, minlength=61)
    assert len(count) == 61 and scipy.stats.chisquare(count).pvalue > 1e-4
    assert math.isclose(
        float(ENV._noise(LightDarkState(jnp.asarray(10), False), PARAMS.replace(min_noise=0.5))),
        0.5,
    )
    with pytest.raises(UsageError, match="at least 1"):
        LightDark(big_step=0)
