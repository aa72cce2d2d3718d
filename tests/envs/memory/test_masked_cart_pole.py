import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import assert_pictures, steps_of, travel
from scipy import integrate
from twin_cart_pole import CartPoleTwin

import envs
from envs.memory.masked_cart_pole import (
    VARIANTS,
    VIEWS,
    CartPoleState,
    MaskedCartPole,
    NoisyCartPole,
)
from jaxpar.types import UsageError


def motion_of(state):
    return state.x, state.x_dot, state.theta, state.theta_dot


def follow(env, num_steps):
    """Each step from the recorded motion; noise is judged by its moments."""
    params, ends, time, noises = env.default_params.replace(max_steps=30), 0, 0, []
    twin = CartPoleTwin(VIEWS[env.observed], 30)
    for record in steps_of(env, params, num_steps):
        time = 1 if record["start"] else time + 1
        after = record["after"]
        motion, seen, over = twin.step(motion_of(record["before"]), record["action"])
        np.testing.assert_allclose(motion_of(after.state), motion, rtol=1e-5, atol=1e-6)
        if min(abs(abs(motion[0]) - 2.4), abs(abs(motion[2]) - np.radians(12))) > 1e-5:
            assert after.terminated == over
        assert after.truncated == (time >= 30)
        np.testing.assert_allclose(after.reward, 1 / 30, rtol=1e-6)
        noises.append(after.obs - seen)
        ends += record["done"]
    noises = np.stack(noises)
    if isinstance(env, NoisyCartPole):
        error = 0.1 / np.sqrt(noises.size)
        assert abs(noises.mean()) < 5 * error and abs(noises.std() - 0.1) < 5 * error
    else:
        np.testing.assert_allclose(noises, 0, atol=1e-5)
    return ends


@pytest.mark.parametrize("env", [MaskedCartPole("velocities"), NoisyCartPole()])
def test_twin(env):
    assert follow(env, 1000) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    assert envs.make(name)[0] == VARIANTS[name]()
    assert_pictures(VARIANTS[name]())
    assert follow(VARIANTS[name](), 100_000) > 2000


def test_balancing_to_the_end_returns_one():
    """A linear feedback holds the pole for 200 steps."""

    def act(key, env, state, params):
        return (jnp.stack(motion_of(state)) @ jnp.array([0.1, 0.3, 10.0, 2.0]) > 0).astype(
            jnp.int32
        )

    record = travel(jax.random.key(0), MaskedCartPole(), MaskedCartPole().default_params, 200, act)
    np.testing.assert_array_equal(np.flatnonzero(record["done"]), [199])
    np.testing.assert_allclose(np.sum(record["after"].reward), 1.0, rtol=1e-5)


def test_views_share_the_state():
    walks = [
        travel(jax.random.key(3), env, env.default_params, 1000)
        for env in (MaskedCartPole(), NoisyCartPole())
    ]
    jax.tree.map(np.testing.assert_array_equal, walks[0]["before"], walks[1]["before"])


def test_likelihood_is_the_density_of_the_noise():
    env = NoisyCartPole("positions")
    params = env.default_params.replace(noise=0.3)
    state = CartPoleState(*jnp.array([0.5, 1.0, -0.1, 0.2]), jnp.zeros((), jnp.int32))

    def log_likelihood(obs):
        return env.log_likelihood(obs, state, jnp.asarray(0), state, params)

    grid = jnp.linspace(-3, 3, 401)
    field = jax.vmap(
        lambda x: jax.vmap(lambda y: jnp.exp(log_likelihood(jnp.stack([x, y]))))(grid)
    )(grid)
    mass = integrate.simpson(integrate.simpson(field, x=grid), x=grid)
    assert mass == pytest.approx(1, rel=1e-4)
    draws = jax.vmap(lambda key: env.observe(key, state, None, params))(
        jax.random.split(jax.random.key(1), 4000)
    )
    entropy = -float(jnp.mean(jax.vmap(log_likelihood)(draws)))
    assert entropy == pytest.approx(np.log(2 * np.pi * np.e * 0.09), abs=0.08)


def test_an_unknown_view_is_refused():
    with pytest.raises(
        UsageError, match="observed='angles' is unknown; legal are .*positions, velocities"
    ):
        MaskedCartPole("angles")
