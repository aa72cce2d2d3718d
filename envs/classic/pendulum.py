"""The pendulum with exactly Gymnasium's transitions: rules and constants are those of Gymnasium 1.3."""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, picture
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "Pendulum", "PendulumParams", "PendulumState"]


@flax.struct.dataclass
class PendulumState:
    """Angle from upright and its velocity (rad, rad/s), steps so far."""

    theta: Array
    theta_dot: Array
    time: Array


@flax.struct.dataclass
class PendulumParams:
    """SI units; `dt` is the length of a step."""

    gravity: Any = 10.0
    mass: Any = 1.0
    length: Any = 1.0
    dt: Any = 0.05
    max_speed: Any = 8.0
    max_torque: Any = 2.0
    max_steps: Any = 200


@dataclasses.dataclass(frozen=True)
class Pendulum:
    """Swing a pendulum up with a torque too weak to lift it; costs angle, speed and torque. Never ends by itself."""

    @property
    def name(self) -> str:
        """Pendulum-v1."""
        return "Pendulum-v1"

    @property
    def default_params(self) -> PendulumParams:
        """Gymnasium's."""
        return PendulumParams()

    def observation_space(self, params: PendulumParams) -> Box:
        """Cosine, sine, angular velocity, float32 `[3]`."""
        high = (1.0, 1.0, PendulumParams.max_speed)
        return Box(tuple(-end for end in high), high, (3,))

    def action_space(self, params: PendulumParams) -> Box:
        """The torque, float32 `[1]`; beyond its bounds it is clipped."""
        return Box(-PendulumParams.max_torque, PendulumParams.max_torque, (1,))

    def init(self, key: PRNGKey, params: PendulumParams) -> PendulumState:
        """Any angle, velocity uniform in ±1."""
        theta, theta_dot = jax.random.uniform(key, (2,), jnp.float32, -1, 1)
        return PendulumState(theta * math.pi, theta_dot, jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: PendulumState, action: Array, params: PendulumParams
    ) -> PendulumState:
        """One semi-implicit Euler step."""
        gravity = 3 * params.gravity / (2 * params.length) * jnp.sin(state.theta)
        drive = 3.0 / (params.mass * params.length**2) * self._torque(action, params)
        theta_dot = state.theta_dot + (gravity + drive) * params.dt
        theta_dot = jnp.clip(theta_dot, -params.max_speed, params.max_speed)
        return PendulumState(state.theta + theta_dot * params.dt, theta_dot, state.time + 1)

    def observe(
        self, key: PRNGKey, state: PendulumState, action: Array | None, params: PendulumParams
    ) -> Array:
        """Cosine, sine, angular velocity."""
        return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])

    def reward(
        self, state: PendulumState, action: Array, next_state: PendulumState, params: PendulumParams
    ) -> Array:
        """Minus the squared angle from upright, 0.1 of the squared velocity, 0.001 of the squared torque."""
        angle = (state.theta + math.pi) % (2 * math.pi) - math.pi
        return -(angle**2 + 0.1 * state.theta_dot**2 + 0.001 * self._torque(action, params) ** 2)

    def terminal(self, state: PendulumState, params: PendulumParams) -> Array:
        """Never."""
        return jnp.zeros((), bool)

    def truncated(self, state: PendulumState, params: PendulumParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: PendulumState, params: PendulumParams) -> Array:
        """The rod, uint8 `[96, 96, 3]`."""
        pivot = jnp.full(2, 48.0)
        tip = pivot + 36 * jnp.stack([jnp.sin(-state.theta), -jnp.cos(state.theta)])
        image = picture.line(picture.canvas(96, 96), pivot, tip, 9.0, picture.RED)
        return picture.to_uint8(picture.disc(image, pivot, 2.5, picture.BLACK))

    def _torque(self, action: Array, params: PendulumParams) -> Array:
        return jnp.clip(action[0], -params.max_torque, params.max_torque)


VARIANTS = {"Pendulum-v1": Pendulum}
