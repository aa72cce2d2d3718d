"""Small environments that show one thing each, and policies for them."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete, Transition


@flax.struct.dataclass
class WalkParams:
    noise: float = 0.3
    max_steps: int = 7
    wall: float = 1.5


@flax.struct.dataclass
class WalkState:
    x: jax.Array
    level: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Walk:
    """A noisy walk from a random level: it ends beyond a wall and is cut after some steps; random at every part."""

    num_levels: int = 5

    name = "Walk"
    default_params = WalkParams()

    def observation_space(self, params):
        return Box(-10.0, 10.0, (3,))

    def action_space(self, params):
        return Box(-1.0, 1.0, ())

    def sample_level(self, key, params):
        return jax.random.randint(key, (), 0, self.num_levels)

    def init(self, key, params):
        level_key, key = jax.random.split(key)
        return self.init_level(key, self.sample_level(level_key, params), params)

    def init_level(self, key, level, params):
        return WalkState(jax.random.uniform(key) - 0.5, jnp.asarray(level, jnp.int32), jnp.int32(0))

    def transition(self, key, state, action, params):
        x = state.x + 0.5 * jnp.tanh(action) + params.noise * (4 * jax.random.uniform(key) - 2)
        return WalkState(x, state.level, state.time + 1)

    def observe(self, key, state, action, params):
        return jnp.stack(
            [state.x + jax.random.uniform(key) - 0.5, state.x**2, state.level.astype(jnp.float32)]
        )

    def reward(self, state, action, next_state, params):
        return -(next_state.x**2) - 0.1 * action**2

    def terminal(self, state, params):
        return jnp.abs(state.x) > params.wall

    def truncated(self, state, params):
        return state.time >= params.max_steps


@flax.struct.dataclass
class ClockParams:
    length: int = 4


@dataclasses.dataclass(frozen=True)
class Clock:
    """Nothing but time: the episode terminates or is cut, or both at once, after some steps; reward = time."""

    ends: str = "terminated"

    name = "Clock"
    default_params = ClockParams()

    def observation_space(self, params):
        return Box(0, 100, (), jnp.int32)

    def action_space(self, params):
        return Discrete(3)

    def init(self, key, params):
        return jnp.int32(0)

    def transition(self, key, state, action, params):
        return state + 1

    def observe(self, key, state, action, params):
        return state

    def reward(self, state, action, next_state, params):
        return next_state.astype(jnp.float32)

    def terminal(self, state, params):
        return (state >= params.length) & (self.ends in ("terminated", "both"))

    def truncated(self, state, params):
        return (state >= params.length) & (self.ends in ("truncated", "both"))

    def action_mask(self, state, params):
        return jnp.arange(3) != state % 3


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two agents: the first is done after 2 steps, the second is cut after 3."""

    num_agents: int = 2

    name = "Pair"
    default_params = ClockParams()

    def action_space(self, params):
        return Discrete(3, (2,))

    def init(self, key, params):
        return jax.random.randint(key, (), 0, 1)

    def transition(self, key, state, action, params):
        return state + 1

    def observe(self, key, state, action, params):
        return jnp.stack([state, state + 10])

    def reward(self, state, action, next_state, params):
        return jnp.where(jnp.array([2, 3]) >= next_state, jnp.array([1.0, 10.0]), 0)

    def terminal(self, state, params):
        return jnp.stack([state >= 2, state < 0])

    def truncated(self, state, params):
        return jnp.stack([state < 0, state >= 3])


@dataclasses.dataclass(frozen=True)
class Gymnax:
    """A gymnax environment without its auto-reset, as an object with `reset` and `step`."""

    env: object

    @property
    def name(self):
        return self.env.name

    @property
    def default_params(self):
        return self.env.default_params

    def action_space(self, params):
        return self.env.action_space(params)

    def reset(self, key, params):
        return self.env.reset_env(key, params)

    def step(self, key, state, action, params):
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, params)
        return Transition(obs, state, reward, terminated, self.env.is_truncated(state, params), {})


def linear(key, params, obs, carry):
    """A noisy linear policy that counts its steps in the episode."""
    action = obs @ params["w"] + params["b"] + 0.1 * jax.random.uniform(key)
    return action, carry + 1, {"count": carry}
