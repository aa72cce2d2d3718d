"""Particle and Kalman beliefs against enumeration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from pomdp_worlds import Leaving, Tiger

from envs.pomdp.rocksample import RockSample
from jaxpar.pomdp import Gaussian, KalmanBelief, ParticleBelief, Particles
from jaxpar.pomdp.beliefs.belief import systematic
from jaxpar.types import UsageError

TIGER, PARAMS = Tiger(), Tiger().default_params


@functools.partial(jit, static_argnums=(0, 2))
def begin(model, key, env, params):
    return model.init(key, env, params)


@functools.partial(jit, static_argnums=(0, 5))
def update(model, key, belief, action, obs, env, params):
    return model.update(key, belief, action, obs, env, params)


def posterior(heard):
    weights = [np.prod([0.85 if h == s else 0.15 for h in heard]) for s in (0, 1)]
    return weights[1] / sum(weights), sum(weights) / 2


@pytest.mark.parametrize("below", [0.0, 0.5, 1.0])
def test_particles_follow_the_exact_belief_of_tiger(below):
    model, heard, total = ParticleBelief(4000, resample_below=below), [1, 0, 1, 1], 0.0
    belief = begin(model, jax.random.key(0), TIGER, PARAMS)
    for i, obs in enumerate(heard):
        belief, evidence = update(
            model, jax.random.key(i + 1), belief, jnp.asarray(0), jnp.asarray(obs), TIGER, PARAMS
        )
        total += float(evidence.log_evidence)
        want, chance = posterior(heard[: i + 1])
        np.testing.assert_allclose(
            float(jnp.exp(belief.log_weights) @ belief.states), want, atol=0.03
        )
        np.testing.assert_allclose(total, np.log(chance), atol=0.05)
        assert not bool(evidence.depleted) and bool(evidence.resampled) == (
            float(evidence.ess) < below * 4000
        )
        np.testing.assert_allclose(float(jax.nn.logsumexp(belief.log_weights)), 0, atol=1e-4)


def test_rejection_without_a_likelihood_agrees():
    class Blind(Tiger):
        log_likelihood = property()

    belief = begin(ParticleBelief(8000), jax.random.key(0), Blind(), PARAMS)
    belief, evidence = update(
        ParticleBelief(8000),
        jax.random.key(1),
        belief,
        jnp.asarray(0),
        jnp.asarray(1),
        Blind(),
        PARAMS,
    )
    np.testing.assert_allclose(float(jnp.exp(belief.log_weights) @ belief.states), 0.85, atol=0.02)
    np.testing.assert_allclose(float(evidence.log_evidence), np.log(0.5), atol=0.05)


def test_particles_on_rocks_match_enumeration():
    env = RockSample(3, 2)
    params, model = env.default_params, ParticleBelief(4000)
    belief = begin(model, jax.random.key(0), env, params)
    for i, obs in enumerate((2, 2, 1)):
        belief, _ = update(
            model, jax.random.key(i + 1), belief, jnp.asarray(5), jnp.asarray(obs), env, params
        )
    distance = np.linalg.norm(env.map[0] - np.asarray([0, 1]))
    right = 0.5 * (1 + 2 ** (-distance / 20))
    good = right**2 * (1 - right) / (right**2 * (1 - right) + (1 - right) ** 2 * right)
    np.testing.assert_allclose(
        float(jnp.exp(belief.log_weights) @ belief.states.good[:, 0]), good, atol=0.03
    )
    np.testing.assert_allclose(
        float(jnp.exp(belief.log_weights) @ belief.states.good[:, 1]), 0.5, atol=0.03
    )


def test_equal_particles_lie_side_by_side_and_draws_take_each_as_often_as_it_weighs():
    env = RockSample(3, 2)
    params, model = env.default_params, ParticleBelief(300, resample_below=0.0)
    belief = begin(model, jax.random.key(0), env, params)
    for i in range(2):
        good = np.asarray(belief.states.good)
        assert len(np.unique(good, axis=0)) == 4
        assert (good[1:] != good[:-1]).any(1).sum() == 3
        weights, drawn = (
            np.exp(belief.log_weights),
            np.asarray(belief.sample(jax.random.key(i), 40).good),
        )
        for row in np.unique(good, axis=0):
            assert abs((drawn == row).all(1).sum() - 40 * weights[(good == row).all(1)].sum()) < 2
        belief, _ = update(
            model, jax.random.key(i + 1), belief, jnp.asarray(5), jnp.asarray(2), env, params
        )


def redraw(key, prior, action, obs, posterior, depleted, env, params):
    states = jnp.full_like(posterior.states, obs)
    equal = jnp.full_like(prior.log_weights, -jnp.log(prior.log_weights.shape[0]))
    return Particles(
        jnp.where(depleted, states, posterior.states),
        jnp.where(depleted, equal, posterior.log_weights),
    )


def test_depletion_is_told_and_recovered_by_the_hook():
    perfect, action, obs = PARAMS.replace(accuracy=1.0), jnp.asarray(0), jnp.asarray(1)
    wrong = Particles(jnp.zeros(10, jnp.int32), jnp.log(jnp.arange(1.0, 11.0) / 55))
    kept, evidence = update(
        ParticleBelief(10, 0.0), jax.random.key(0), wrong, action, obs, TIGER, perfect
    )
    assert bool(evidence.depleted) and float(evidence.log_evidence) == -np.inf
    np.testing.assert_allclose(
        kept.log_weights, wrong.log_weights, rtol=1e-6
    )  # the prediction, not uniform
    mended, evidence = update(
        ParticleBelief(10, 0.0, redraw), jax.random.key(0), wrong, action, obs, TIGER, perfect
    )
    assert bool(evidence.depleted) and mended.states.tolist() == [1] * 10
    with pytest.raises(UsageError, match="no particle left"):
        Particles(jnp.zeros(2), jnp.full(2, -jnp.inf)).sample(jax.random.key(0), 3)


@dataclasses.dataclass(frozen=True)
class Nan(Tiger):
    """A likelihood that is no number for the tiger on the left."""

    bad: float = float("nan")

    def log_likelihood(self, obs, state, action, next_state, params):
        return jnp.where(
            next_state == 0,
            self.bad,
            super().log_likelihood(obs, state, action, next_state, params),
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_likelihood_that_is_no_number_costs_its_particle_alone(bad):
    env, states = Nan(bad=bad), jnp.arange(8, dtype=jnp.int32) % 2
    before = Particles(states, jnp.log(jnp.arange(1.0, 9.0) / 36))
    after, told = update(
        ParticleBelief(8, 0.0),
        jax.random.key(0),
        before,
        jnp.asarray(0),
        jnp.asarray(1),
        env,
        PARAMS,
    )
    assert int(told.invalid) == 4 and not bool(told.depleted)
    weights = {int(s): 0.0 for s in states}
    for s, w in zip(after.states.tolist(), np.exp(after.log_weights).tolist(), strict=True):
        weights[s] += w
    np.testing.assert_allclose([weights[0], weights[1]], [0, 1], atol=1e-6)
    np.testing.assert_allclose(
        float(told.log_evidence), np.log(0.85 * (2 + 4 + 6 + 8) / 36), rtol=1e-5
    )
    right = Particles(jnp.ones(8, jnp.int32), before.log_weights)
    _, told = update(
        ParticleBelief(8, 0.0),
        jax.random.key(0),
        right,
        jnp.asarray(0),
        jnp.asarray(1),
        env,
        PARAMS,
    )
    assert int(told.invalid) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_never_drawn(bad):
    belief = Particles(
        jnp.arange(4),
        jnp.log(jnp.asarray([0.5, 0.25, 0.25, 1.0])).at[0].set(bad).at[3].set(-jnp.inf),
    )
    drawn = np.bincount(belief.sample(jax.random.key(0), 40), minlength=4)
    assert (
        drawn.tolist() == [0, 20, 20, 0]
        and int(belief.invalid) == 1
        and not bool(belief.weightless)
    )
    assert bool(Particles(jnp.arange(2), jnp.full(2, bad)).weightless)


def test_ended_particles_keep_no_weight():
    """Neither where one explains the observation, nor in the prediction where none does."""
    env, model = Leaving(), ParticleBelief(64, resample_below=0.0)
    begun = Particles(jnp.zeros(64, jnp.int32), jnp.full(64, -np.log(64), jnp.float32))
    for obs, depleted in ((0, False), (1, True)):  # what is seen is always 0
        after, told = update(
            model, jax.random.key(0), begun, jnp.asarray(0), jnp.asarray(obs), env, PARAMS
        )
        over, weights = np.asarray(after.states) == 9, np.exp(np.asarray(after.log_weights))
        assert 0 < over.sum() < 64 and bool(told.depleted) == depleted
        assert not weights[over].any() and abs(weights.sum() - 1) < 1e-5


def test_weights_are_equal_after_resampling():
    """All the weight in few particles: drawn anew, each copy weighs the same."""
    uneven = Particles(
        jnp.arange(8, dtype=jnp.int32) % 2, jnp.log(jnp.asarray([0.9, *[0.1 / 7] * 7]))
    )
    after, told = update(
        ParticleBelief(8, 1.0),
        jax.random.key(0),
        uneven,
        jnp.asarray(0),
        jnp.asarray(0),
        TIGER,
        PARAMS,
    )
    assert bool(told.resampled)
    np.testing.assert_allclose(after.log_weights, np.full(8, -np.log(8)), rtol=1e-6)


def test_systematic_draws_begin_at_a_random_point():
    """A single draw of four equal weights takes each of them over 64 keys."""
    keys = jax.random.split(jax.random.key(0), 64)
    drawn = jax.vmap(lambda key: systematic(key, jnp.zeros(4), 1)[0])(keys)
    assert sorted(set(drawn.tolist())) == [0, 1, 2, 3]


def test_systematic_counts_are_within_one_and_zero_weights_are_never_drawn():
    weights = jnp.asarray([0.0, 0.2, 0.5, 0.0, 0.3, 0.0])
    for seed in range(20):
        counts = np.bincount(systematic(jax.random.key(seed), jnp.log(weights), 11), minlength=6)
        assert (np.abs(counts - 11 * np.asarray(weights)) < 1).all() and counts[
            [0, 3, 5]
        ].sum() == 0


@dataclasses.dataclass(frozen=True)
class Line:
    name = "Line"

    def gaussian_start(self, params):
        return jnp.asarray([0.0, 1.0]), jnp.diag(jnp.asarray([2.0, 1.0]))

    def linear_gaussian(self, action, params):
        forward, seen = jnp.asarray([[1.0, 0.1], [0.0, 0.9]]), jnp.asarray([[1.0, 0.5]])
        return forward, action * jnp.asarray([0.0, 1.0]), 0.1 * jnp.eye(2), seen, 0.3 * jnp.eye(1)


def test_kalman_conditions_the_joint_normal():
    env, model = Line(), KalmanBelief()
    belief = model.init(jax.random.key(0), env, None)
    after, evidence = model.update(jax.random.key(0), belief, 2.0, jnp.asarray([1.7]), env, None)
    forward, drift, noise, seen, blur = (np.asarray(x) for x in env.linear_gaussian(2.0, None))
    mean = forward @ [0, 1] + drift
    cov = forward @ np.diag([2.0, 1.0]) @ forward.T + noise
    spread = seen @ cov @ seen.T + blur
    gain = cov @ seen.T / spread
    np.testing.assert_allclose(after.mean, mean + gain[:, 0] * (1.7 - (seen @ mean)[0]), rtol=1e-5)
    np.testing.assert_allclose(after.covariance, cov - gain @ seen @ cov, rtol=1e-4, atol=1e-6)
    want = -0.5 * ((1.7 - (seen @ mean)[0]) ** 2 / spread[0, 0] + np.log(2 * np.pi * spread[0, 0]))
    np.testing.assert_allclose(float(evidence.log_evidence), want, rtol=1e-5)
    draws = Gaussian(after.mean, after.covariance).sample(jax.random.key(0), 20000)
    np.testing.assert_allclose(np.cov(draws.T), after.covariance, atol=0.03)
    lost, told = model.update(jax.random.key(0), belief, 2.0, jnp.asarray([jnp.nan]), env, None)
    assert bool(told.depleted) and int(told.invalid) == 1
    np.testing.assert_allclose(lost.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(lost.covariance, cov, rtol=1e-6)
    with pytest.raises(UsageError, match="gaussian_start"):
        model.init(jax.random.key(0), TIGER, PARAMS)
