import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import assert_pictures, steps_of, travel
from twin_double_pole import DoublePoleTwin, slope

import envs
from envs.classic.double_pole import (
    SCALES,
    VARIANTS,
    DoublePole,
    Motion,
    State,
    damping_fitness,
    generalisation_starts,
    wobble,
)
from jaxpar.env import reset, step


def follow(env, params, num_steps, act=None):
    """Every step of a journey against the twin, which restarts from the recorded motion: poles amplify rounding."""
    twin = DoublePoleTwin(env.velocities, env.discrete, env.damping, params.max_steps)
    ends = 0
    for record in steps_of(env, params, num_steps, **({} if act is None else {"act": act})):
        if record["start"]:
            twin.begin()
        after = record["after"]
        motion, obs, reward, failed, cut = twin.step(record["before"].motion, record["action"])
        np.testing.assert_allclose(after.state.motion, motion, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(after.obs, obs, rtol=2e-5, atol=4e-5)
        edge = min(abs(abs(motion[0]) - 2.4), *(abs(abs(motion[i]) - 0.628329) for i in (2, 4)))
        if edge > 1e-4:  # nearer, rounding decides
            assert after.terminated == failed
            np.testing.assert_allclose(after.reward, reward, rtol=1e-3, atol=1e-5)
        assert after.truncated == cut
        ends += record["done"]
    return ends


def gentle(key, env, state, params):
    """Feedback that balances for long, found by linear-quadratic regulation, with noise: long episodes."""
    gains = jnp.asarray(lqr_gains(), jnp.float32)
    force = -gains @ jnp.stack(state.motion) + 0.1 * jax.random.normal(key)
    return (
        (force > 0).astype(jnp.int32)
        if env.discrete
        else jnp.clip(force / params.max_force, -1, 1)[None]
    )


@functools.cache
def lqr_gains():
    """Discrete-time Riccati recursion on a linearisation of the twin at the upright point."""
    a, b, h = np.zeros((6, 6)), np.zeros((6, 1)), 1e-5
    for i in range(6):
        e = np.eye(6)[i] * h
        a[:, i] = (slope(e, 0.0) - slope(-e, 0.0)) / (2 * h)
    b[:, 0] = (slope(np.zeros(6), h) - slope(np.zeros(6), -h)) / (2 * h)
    a, b = np.eye(6) + 0.02 * a + 0.0002 * a @ a, 0.02 * b + 0.0002 * a @ b
    p = np.eye(6)
    for _ in range(3000):
        k = np.linalg.solve(0.1 * np.eye(1) + b.T @ p @ b, b.T @ p @ a)
        p = np.eye(6) + a.T @ p @ (a - b @ k)
    return k[0]


@pytest.mark.parametrize("discrete", [False, True])
def test_twin(discrete):
    env = DoublePole(discrete=discrete)
    assert follow(env, env.default_params, 1000) > 5


def test_twin_with_damping_over_long_episodes():
    env = DoublePole(velocities=False, damping=True)
    assert follow(env, env.default_params.replace(max_steps=300), 1000, gentle) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    env, _ = envs.make(name)
    assert env == VARIANTS[name]() and env.name == name
    assert_pictures(env)
    assert follow(env, env.default_params, 100_000, gentle if env.damping else None) > 50


def test_rk4_has_order_four(x64):
    env = DoublePole()

    def ahead(dt):
        motion = Motion(*(jnp.asarray(number) for number in (0.0, 0.0, 0.07, 0.0, 0.0, 0.0)))
        state = State(motion, jnp.zeros((), jnp.int32), jnp.zeros(0))
        for _ in range(round(0.08 / (2 * dt))):
            state = env.transition(
                jax.random.key(0), state, jnp.ones(1), env.default_params.replace(dt=dt)
            )
        assert state.motion.x.dtype == jnp.float64
        return np.array(state.motion)

    coarse, fine, truth = ahead(0.02), ahead(0.01), ahead(0.00125)
    ratio = np.abs(coarse - truth) / np.abs(fine - truth)
    assert np.all(ratio > 8) and np.all(ratio < 40), ratio


def test_frictionless_cart_conserves_energy():
    """An oracle that knows no equation of motion: kinetic plus potential energy of rods and cart."""
    env = DoublePole()
    params = env.default_params.replace(hinge_friction=0.0)

    def energy(motion):
        x_dot = float(motion.x_dot)
        total = 0.5 * x_dot**2
        for m, half, theta, spin in (
            (0.1, 0.5, motion.theta1, motion.theta1_dot),
            (0.01, 0.05, motion.theta2, motion.theta2_dot),
        ):
            theta, spin = float(theta), float(spin)
            vx, vy = x_dot + half * spin * np.cos(theta), -half * spin * np.sin(theta)
            total += (
                0.5 * m * (vx**2 + vy**2)
                + m * half**2 / 6 * spin**2
                + m * 9.8 * half * np.cos(theta)
            )
        return total

    state = env.init_level(jax.random.key(0), Motion(0.0, 0.3, 0.2, -0.5, 0.1, 0.4), params)
    first = energy(state.motion)
    move = jax.jit(lambda state: env.transition(jax.random.key(0), state, jnp.zeros(1), params))
    for _ in range(50):
        state = move(state)
        assert abs(energy(state.motion) - first) < 2e-4


def test_velocities_change_the_view_only():
    full, partial = DoublePole(), DoublePole(velocities=False)
    a, b = (travel(jax.random.key(3), env, env.default_params, 1000) for env in (full, partial))
    jax.tree.map(np.testing.assert_array_equal, a["before"], b["before"])
    np.testing.assert_array_equal(a["after"].reward, b["after"].reward)
    np.testing.assert_array_equal(a["seen"][:, ::2], b["seen"])


def test_bang_bang_is_full_force():
    params = DoublePole().default_params
    for action in (0, 1):
        key = jax.random.key(0)
        (_, state), soft, hard = (
            reset(key, DoublePole(), params),
            DoublePole(),
            DoublePole(discrete=True),
        )
        want = step(key, soft, state, jnp.full(1, 2.0 * action - 1), params)
        got = step(key, hard, state, jnp.asarray(action), params)
        jax.tree.map(np.testing.assert_array_equal, got.state, want.state)


def test_generalisation_starts():
    starts = generalisation_starts()
    assert starts.x.shape == (625,) and len(np.unique(np.stack(starts), axis=1).T) == 625
    corner = [0.05 * w - w / 2 for w in (4.32, 2.70, 0.12566304, 0.30019504)]
    np.testing.assert_allclose([axis[0] for axis in starts], [*corner, 0, 0], rtol=1e-6)
    np.testing.assert_allclose([axis[312] for axis in starts], np.zeros(6), atol=1e-9)
    env = DoublePole()

    @jax.jit
    @jax.vmap
    def failed(level):
        return env.terminal(
            env.init_level(jax.random.key(0), level, env.default_params), env.default_params
        )

    assert not np.any(failed(starts))
    draw = jax.jit(jax.vmap(lambda key: env.sample_level(key, env.default_params)))
    level = draw(jax.random.split(jax.random.key(1), 512))
    np.testing.assert_allclose(
        [np.abs(axis).max() for axis in level[:4]], [2.16, 1.35, 0.0628, 0.150], rtol=0.02
    )


def test_a_regulator_balances_and_its_return_is_the_damping_fitness():
    """The published start can be held for 1,000 steps by linear feedback, and the return telescopes to the fitness."""
    env = DoublePole(damping=True)
    record = travel(jax.random.key(0), env, env.default_params, 1000, gentle)
    np.testing.assert_array_equal(np.flatnonzero(record["done"]), [999])
    assert bool(record["after"].truncated[-1]) and not bool(record["after"].terminated[-1])
    wobbles = jax.vmap(wobble)(record["after"].state.motion)
    want = 0.1 + 0.9 * 0.75 / np.sum(np.asarray(wobbles[-100:], np.float64))
    np.testing.assert_allclose(np.sum(record["after"].reward), want, rtol=1e-4)
    assert float(damping_fitness(wobbles[:100], jnp.asarray(99))) == pytest.approx(0.0099)


def test_observation_is_scaled():
    env = DoublePole()
    state = env.init_level(
        jax.random.key(0), Motion(1.0, 2.0, 0.1, 0.2, 0.3, 0.4), env.default_params
    )
    np.testing.assert_allclose(
        env.observe(jax.random.key(0), state, None, env.default_params),
        np.divide([1, 2, 0.1, 0.2, 0.3, 0.4], SCALES),
    )


def test_what_is_no_number_has_failed():
    env = DoublePole()
    state = env.init_level(
        jax.random.key(0), Motion(0.0, 0.0, jnp.nan, 0.0, 0.0, 0.0), env.default_params
    )
    assert bool(env.terminal(state, env.default_params))
