import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from journey import assert_pictures, steps_of
from twin_swing_up import PendulumTwin, PointTwin

import envs
from envs.classic.swing_up import VARIANTS, PendulumState, PendulumSwingUp, PointMass, PointState

CLOSE = {"rtol": 2e-4, "atol": 1e-4}
"""The twins integrate by other schemes, so that the truncation error of one step stays: about 1e-5."""


def follow(env, num_steps):
    params, time, ends = env.default_params, 0, 0
    twin = PendulumTwin() if isinstance(env, PendulumSwingUp) else PointTwin()
    for record in steps_of(env, params, num_steps):
        time = 0 if record["start"] else time
        before, after = record["before"], record["after"]
        if isinstance(before, PendulumState):
            *motion, obs, reward = twin.step(before.theta, before.spin, record["action"])
            got = [after.state.theta, after.state.spin]
        else:
            *motion, obs, reward = twin.step(
                before.position, before.velocity, before.goal, record["action"]
            )
            got = [after.state.position, after.state.velocity]
            np.testing.assert_array_equal(after.state.goal, before.goal)
        for value, want in zip(
            (*got, after.obs, after.reward), (*motion, obs, reward), strict=True
        ):
            np.testing.assert_allclose(value, want, **CLOSE)
        time += 1
        assert after.state.time == time and not after.terminated
        assert after.truncated == (time == params.max_steps)
        ends += record["done"]
    return ends


@pytest.mark.parametrize("name", VARIANTS)
def test_twin(name):
    assert follow(VARIANTS[name](), 1000) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    assert envs.make(name)[0] == VARIANTS[name]()
    assert_pictures(VARIANTS[name]())
    assert follow(VARIANTS[name](), 100_000) >= 500


def total(env, params, state, actions):
    """The return of a sequence of actions."""

    def one(state, action):
        following = env.transition(jax.random.key(0), state, action, params)
        return following, env.reward(state, action, following, params)

    return jnp.sum(jax.lax.scan(one, state, actions)[1])


def starts():
    zero = jnp.zeros((), jnp.int32)
    return {
        PendulumSwingUp(): PendulumState(jnp.asarray(3.0), jnp.asarray(0.2), zero),
        PointMass(): PointState(
            jnp.array([0.3, -0.2]), jnp.array([0.1, 0.0]), jnp.array([-0.5, 0.6]), zero
        ),
    }


@pytest.mark.parametrize("place", [0, 1])
def test_gradient_of_a_rollout_equals_finite_differences(x64, place):
    """With respect to the state, 20 actions and every number of the physics, in float64."""
    env, state = list(starts().items())[place]
    params = jax.tree.map(lambda number: jnp.asarray(number, jnp.float64), env.default_params)
    width = env.action_space(params).shape[0]
    actions = jnp.asarray(np.random.default_rng(0).uniform(-0.9, 0.9, (20, width)))
    start, rebuild = jax.flatten_util.ravel_pytree(
        (state.replace(time=0.0), params.replace(max_steps=0.0), actions)
    )

    def of(vector):
        state, params, actions = rebuild(vector)
        return total(env, params, state, actions)

    value = jax.jit(of)
    gradient = jax.grad(of)(start)
    differences = [
        (value(start.at[i].add(1e-6)) - value(start.at[i].add(-1e-6))) / 2e-6
        for i in range(start.size)
    ]
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-6)
    idle = {PendulumSwingUp(): 3, PointMass(): 3}[
        env
    ]  # time, max_steps, and what only `init` reads
    assert np.count_nonzero(gradient) == start.size - idle


def test_pendulum_conserves_energy():
    env = PendulumSwingUp()
    params = env.default_params.replace(friction=0.0)
    state = PendulumState(jnp.float32(2.0), jnp.float32(1.0), jnp.zeros((), jnp.int32))

    def energy(state):
        return 0.5 * state.spin**2 + 9.81 * jnp.cos(state.theta)

    move = jax.jit(lambda state: env.transition(jax.random.key(0), state, jnp.zeros(1), params))
    first = energy(state)
    for _ in range(200):
        state = move(state)
    assert abs(float(energy(state) - first)) < 1e-2


def test_the_torque_is_too_weak_to_lift_but_pumping_swings_up():
    env = PendulumSwingUp()
    params = env.default_params
    state = PendulumState(jnp.float32(jnp.pi), jnp.float32(0.0), jnp.zeros((), jnp.int32))

    def highest(act):
        def one(state, _):
            state = env.transition(jax.random.key(0), state, act(state), params)
            return state, jnp.cos(state.theta)

        return float(jnp.max(jax.lax.scan(one, state, None, 200)[1]))

    assert highest(lambda state: jnp.ones(1)) < -0.7
    assert highest(lambda state: jnp.where(state.spin >= 0, 1.0, -1.0)[None]) > 0.99


def test_gradient_ascent_finds_the_linear_quadratic_optimum(x64):
    """The best return of 12 steps from backward Riccati recursion, reached by gradients through the environment."""
    env = PointMass()
    params = env.default_params.replace(max_force=100.0)
    steps, drag, h = 12, 0.1, 0.1
    decay = np.exp(-drag * h)
    a = np.array([[1, (1 - decay) / drag], [0, decay]])
    b = np.array([[h / drag - (1 - decay) / drag**2], [(1 - decay) / drag]])
    q, r = np.diag([1.0, 0.1]), np.array([[0.1]])
    p = np.zeros((2, 2))
    for _ in range(steps):
        m = q + p
        gain = np.linalg.solve(r + b.T @ m @ b, b.T @ m @ a)
        p = a.T @ m @ (a - b @ gain)
    state = list(starts().values())[1]
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if leaf.ndim else leaf, state)
    error = np.stack([state.position - state.goal, state.velocity])  # [2, axis]
    best = -np.einsum("ik,ij,jk->", error, p, error)

    def value(actions):
        return total(env, params, state, actions / 100)

    actions = jnp.zeros((steps, 2))
    hessian = jax.hessian(lambda flat: value(flat.reshape(steps, 2)))(actions.ravel())
    actions = actions - jnp.linalg.solve(hessian, jax.grad(value)(actions).ravel()).reshape(
        steps, 2
    )
    np.testing.assert_allclose(value(actions), best, rtol=1e-6)
    assert float(value(jnp.zeros((steps, 2)))) < 1.1 * best
