"""Classic control against Gymnasium itself, from random and from boundary states."""

import itertools
import math

import fast
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from jaxpar.env.check import walk

LIMIT = 12 * 2 * math.pi / 360
NEAR = (0.0, 1e-9, -1e-9)


def around(*values):
    """Values, and what lies a hair beside them."""
    return [value + offset for value in values for offset in NEAR]


# For each coordinate: the range of random states, and the places where the rules change.
STATES = {
    "CartPole-v1": (
        [(-2.4, 2.4), (-3, 3), (-LIMIT, LIMIT), (-3, 3)],
        [
            around(-2.4, 2.4 - 0.02, 2.4),
            [-1.0, 0.0, 1.0],
            around(-LIMIT, 0.0, LIMIT - 0.01),
            [-0.5, 0.0, 0.5],
        ],
    ),
    "Pendulum-v1": (
        [(-9, 9), (-8, 8)],
        [around(-math.pi, 0, math.pi, 3 * math.pi), around(-8.0, 0.0, 7.9, 8.0)],
    ),
    "Acrobot-v1": (
        [(-math.pi, math.pi)] * 2 + [(-4 * math.pi, 4 * math.pi), (-9 * math.pi, 9 * math.pi)],
        [[-math.pi, 0.0, math.pi / 3, math.pi], [-math.pi, 0.0, math.pi]]
        + [[-4 * math.pi, 0.0, 4 * math.pi], [-9 * math.pi, 0.0, 9 * math.pi]],
    ),
    "MountainCar-v0": (
        [(-1.2, 0.6), (-0.07, 0.07)],
        [around(-1.2, -1.15, 0.45, 0.5, 0.6), around(-0.07, -0.05, 0.0, 0.05, 0.07)],
    ),
    "MountainCarContinuous-v0": (
        [(-1.2, 0.6), (-0.07, 0.07)],
        [around(-1.2, -1.15, 0.4, 0.45, 0.6), around(-0.07, -0.05, 0.0, 0.05, 0.07)],
    ),
}
PUSHES = {
    "Pendulum-v1": [-3.0, -2.0, -0.3, 0.0, 2.0, 3.0],
    "MountainCarContinuous-v0": [-2.0, -1.0, -0.4, 0.0, 1.0, 2.0],
}
each = pytest.mark.parametrize("name", STATES)


class Twin:
    """Gymnasium's environment, put into any state."""

    def __init__(self, name):
        self.env = gymnasium.make(name, disable_env_checker=True).unwrapped
        self.env.reset(seed=0)

    def step(self, state, action):
        self.env.state = np.array(state, np.float64)
        self.env.steps_beyond_terminated = None
        obs, reward, terminated, _, _ = self.env.step(action)
        return np.asarray(self.env.state, float), obs, float(reward), terminated


def coordinates(state):
    return np.stack([np.asarray(x) for x in jax.tree.leaves(state)[:-1]], axis=-1)


def some_actions(name, count, rng):
    if name in PUSHES:
        return rng.choice(PUSHES[name], (count, 1))
    return rng.integers(0, 2 if name == "CartPole-v1" else 3, count)


@each
def test_transitions_equal_gymnasium_in_double_precision(name, x64):
    rng, (ranges, edges) = np.random.default_rng(0), STATES[name]
    randoms = rng.uniform(*np.transpose(ranges), (200, len(ranges)))
    boundary = np.asarray(list(itertools.product(*edges)), float)
    boundary = rng.permutation(boundary)[:400]
    states, twin = np.concatenate([randoms, boundary]), Twin(name)
    actions = some_actions(name, len(states), rng)
    env, params = envs.make(name)
    first = env.init(jax.random.key(0), params)
    structure, clock = jax.tree.structure(first), jnp.zeros((), jnp.int32)

    def one(state, action):
        state = jax.tree.unflatten(structure, [*state, clock])
        after = env.transition(jax.random.key(0), state, action, params)
        obs, reward = (
            env.observe(jax.random.key(0), after, action, params),
            env.reward(state, action, after, params),
        )
        return after, obs, reward, env.terminal(after, params), env.terminal(state, params)

    after, obs, reward, terminated, was_over = fast.jit(jax.vmap(one))(states, actions)
    assert obs.dtype == jnp.float64
    theirs = [twin.step(state, action) for state, action in zip(states, actions, strict=True)]
    # Gymnasium rounds the continuous car's state, and every observation, to single precision.
    exact = 1e-7 if name == "MountainCarContinuous-v0" else 1e-12
    np.testing.assert_allclose(
        coordinates(after), [row[0] for row in theirs], rtol=exact, atol=exact
    )
    np.testing.assert_allclose(obs, np.stack([row[1] for row in theirs]), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(terminated, [row[3] for row in theirs])
    live = ~np.asarray(was_over)
    np.testing.assert_allclose(
        reward[live], np.asarray([row[2] for row in theirs])[live], rtol=1e-12, atol=1e-12
    )
    assert 0 < np.sum(terminated) < len(states) or name == "Pendulum-v1"


def play_beside_gymnasium(name, num_steps):
    """Single precision along random episodes: the twin starts each step where ours does."""
    (env, params), twin = envs.make(name), Twin(name)
    steps = fast.jit(lambda key: walk(key, env, params, 1, num_steps))(jax.random.key(1))
    steps = jax.tree.map(lambda x: np.asarray(x[:, 0]), steps)
    before, after = coordinates(steps.state), coordinates(steps.next_state)
    for time in range(num_steps):
        state, obs, reward, terminated = twin.step(before[time], steps.action[time])
        np.testing.assert_allclose(after[time], state, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(steps.obs[time], obs, rtol=2e-5, atol=2e-5)
        assert abs(steps.reward[time] - reward) < 1e-4 * max(1, abs(reward))
        assert steps.terminated[time] == terminated
    np.testing.assert_array_equal(steps.truncated, steps.next_state.time == params.max_steps)
    over = steps.terminated | steps.truncated
    np.testing.assert_array_equal(steps.state.time[1:] == 0, over[:-1])
    return over.sum()


@each
def test_episodes_equal_gymnasium(name):
    ends = play_beside_gymnasium(name, 1000)
    assert ends >= (20 if name == "CartPole-v1" else 1)


@pytest.mark.slow
@each
def test_long_episodes_equal_gymnasium(name):
    assert play_beside_gymnasium(name, 100_000) >= 99


def test_time_limits_are_those_of_gymnasium():
    for name in STATES:
        assert envs.make(name)[1].max_steps == gymnasium.spec(name).max_episode_steps


@pytest.mark.parametrize("name", ["MountainCar-v0", "MountainCarContinuous-v0"])
def test_the_left_wall_stops_the_car_and_the_goal_does_not(name):
    env, params = envs.make(name)
    left = jnp.zeros((), jnp.int32) if name == "MountainCar-v0" else -jnp.ones(1)
    state = env.init(jax.random.key(0), params)
    at_wall = env.transition(
        jax.random.key(0),
        state.replace(position=jnp.float32(-1.19), velocity=jnp.float32(-0.05)),
        left,
        params,
    )
    assert (at_wall.position, at_wall.velocity) == (jnp.float32(-1.2), 0)
    past_goal = env.transition(
        jax.random.key(0),
        state.replace(position=jnp.float32(0.48), velocity=jnp.float32(0.04)),
        left,
        params,
    )
    assert past_goal.velocity > 0.03 and env.terminal(past_goal, params)


@each
def test_a_picture_of_every_environment(name):
    env, params = envs.make(name)
    states = jax.vmap(lambda key: env.init(key, params))(jax.random.split(jax.random.key(0), 2))
    pictures = fast.jit(jax.vmap(lambda state: env.render(state, params)))(states)
    assert pictures.dtype == jnp.uint8 and pictures.ndim == 4
    assert (pictures[0] != pictures[1]).any() and (pictures != 255).any()


def test_physics_are_parameters_to_map_over():
    env, params = envs.make("CartPole-v1")
    state = env.init(jax.random.key(0), params)
    push = jax.vmap(
        lambda force: env.transition(jax.random.key(0), state, 1, params.replace(force=force)).x_dot
    )
    speeds = push(jnp.asarray([5.0, 10.0, 20.0]))
    assert (np.diff(speeds) > 0).all()


def test_swing_up_is_differentiable():
    env, params = envs.make("Pendulum-v1")
    state = env.init(jax.random.key(0), params)

    def cost(torques):
        def one(state, torque):
            after = env.transition(jax.random.key(0), state, torque, params)
            return after, env.reward(state, torque, after, params)

        return jax.lax.scan(one, state, torques)[1].sum()

    torques, direction = jnp.linspace(-1, 1, 8)[:, None], jnp.ones((8, 1))
    slope = (cost(torques + 1e-2 * direction) - cost(torques - 1e-2 * direction)) / 2e-2
    assert float(jnp.vdot(jax.grad(cost)(torques), direction)) == pytest.approx(
        float(slope), rel=1e-2
    )
