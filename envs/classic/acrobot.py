"""The acrobot with exactly Gymnasium's transitions.

Source: Sutton (1996) with the equations of Sutton and Barto's book; rules and constants are those of Gymnasium 1.3
(`gymnasium/envs/classic_control`).
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete, picture
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "Acrobot", "AcrobotParams", "AcrobotState"]


@flax.struct.dataclass
class AcrobotState:
    """Angle of the first link from hanging, of the second from the first (rad), their velocities, steps so far."""

    theta1: Array
    theta2: Array
    theta1_dot: Array
    theta2_dot: Array
    time: Array


@flax.struct.dataclass
class AcrobotParams:
    """SI units; both links share length, mass, centre and moment of inertia; `dt` is the length of a step."""

    length: Any = 1.0
    mass: Any = 1.0
    center: Any = 0.5
    inertia: Any = 1.0
    gravity: Any = 9.8
    dt: Any = 0.2
    max_speed1: Any = 4 * math.pi
    max_speed2: Any = 9 * math.pi
    max_steps: Any = 500


@dataclasses.dataclass(frozen=True)
class Acrobot:
    """Swing a hanging chain of two links over a line by a torque of -1, 0 or 1 at the joint; -1 a step until then."""

    @property
    def name(self) -> str:
        """Acrobot-v1."""
        return "Acrobot-v1"

    @property
    def default_params(self) -> AcrobotParams:
        """Gymnasium's."""
        return AcrobotParams()

    def observation_space(self, params: AcrobotParams) -> Box:
        """Cosine and sine of each angle, then both velocities, float32 `[6]`."""
        high = (1.0, 1.0, 1.0, 1.0, AcrobotParams.max_speed1, AcrobotParams.max_speed2)
        return Box(tuple(-end for end in high), high, (6,))

    def action_space(self, params: AcrobotParams) -> Discrete:
        """Torque -1, 0, 1."""
        return Discrete(3, names=("torque -1", "no torque", "torque +1"))

    def init(self, key: PRNGKey, params: AcrobotParams) -> AcrobotState:
        """All four uniform in ±0.1."""
        theta1, theta2, speed1, speed2 = jax.random.uniform(key, (4,), jnp.float32, -0.1, 0.1)
        return AcrobotState(theta1, theta2, speed1, speed2, jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: AcrobotState, action: Array, params: AcrobotParams
    ) -> AcrobotState:
        """One fourth-order Runge-Kutta step, angles wrapped to ±pi, velocities clipped."""
        now = jnp.stack([state.theta1, state.theta2, state.theta1_dot, state.theta2_dot])
        torque = (action - 1).astype(now.dtype)
        k1 = self._derivative(now, torque, params)
        k2 = self._derivative(now + params.dt / 2 * k1, torque, params)
        k3 = self._derivative(now + params.dt / 2 * k2, torque, params)
        k4 = self._derivative(now + params.dt * k3, torque, params)
        theta1, theta2, speed1, speed2 = now + params.dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        return AcrobotState(
            _wrap(theta1),
            _wrap(theta2),
            jnp.clip(speed1, -params.max_speed1, params.max_speed1),
            jnp.clip(speed2, -params.max_speed2, params.max_speed2),
            state.time + 1,
        )

    def observe(
        self, key: PRNGKey, state: AcrobotState, action: Array | None, params: AcrobotParams
    ) -> Array:
        """Cosines, sines and velocities."""
        angles = [f(theta) for theta in (state.theta1, state.theta2) for f in (jnp.cos, jnp.sin)]
        return jnp.stack([*angles, state.theta1_dot, state.theta2_dot])

    def reward(
        self, state: AcrobotState, action: Array, next_state: AcrobotState, params: AcrobotParams
    ) -> Array:
        """-1, and 0 for the step that reaches the line."""
        return jnp.where(self.terminal(next_state, params), 0.0, -1.0)

    def terminal(self, state: AcrobotState, params: AcrobotParams) -> Array:
        """The tip is a link's length above the pivot."""
        return -jnp.cos(state.theta1) - jnp.cos(state.theta2 + state.theta1) > 1.0

    def truncated(self, state: AcrobotState, params: AcrobotParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: AcrobotState, params: AcrobotParams) -> Array:
        """Both links and the line, uint8 `[96, 96, 3]`."""
        pivot, both = jnp.full(2, 48.0), state.theta1 + state.theta2
        joint = pivot + 20 * jnp.stack([jnp.sin(state.theta1), jnp.cos(state.theta1)])
        tip = joint + 20 * jnp.stack([jnp.sin(both), jnp.cos(both)])
        image = picture.line(picture.canvas(96, 96), (0.0, 28.0), (96.0, 28.0), 1.0, picture.GRAY)
        image = picture.line(image, pivot, joint, 6.0, picture.BLUE)
        image = picture.line(image, joint, tip, 6.0, picture.GREEN)
        return picture.to_uint8(
            picture.disc(picture.disc(image, pivot, 3, picture.YELLOW), joint, 3, picture.YELLOW)
        )

    def _derivative(self, now: Array, torque: Array, params: AcrobotParams) -> Array:
        """Velocities and accelerations, by the equations of Sutton and Barto's book."""
        theta1, theta2, speed1, speed2 = now
        m, length, center, inertia, g = (
            params.mass,
            params.length,
            params.center,
            params.inertia,
            params.gravity,
        )
        cos2, sin2 = jnp.cos(theta2), jnp.sin(theta2)
        d1 = m * center**2 + m * (length**2 + center**2 + 2 * length * center * cos2) + 2 * inertia
        d2 = m * (center**2 + length * center * cos2) + inertia
        phi2 = m * center * g * jnp.cos(theta1 + theta2 - math.pi / 2)
        whirl = m * length * center * sin2
        phi1 = (m * center + m * length) * g * jnp.cos(theta1 - math.pi / 2) + phi2
        phi1 -= whirl * speed2**2 + 2 * whirl * speed2 * speed1
        acc2 = (torque + d2 / d1 * phi1 - whirl * speed1**2 - phi2) / (
            m * center**2 + inertia - d2**2 / d1
        )
        return jnp.stack([speed1, speed2, -(d2 * acc2 + phi1) / d1, acc2])


def _wrap(angle: Array) -> Array:
    """The angle within ±pi, both ends included."""
    turns = jnp.ceil((jnp.abs(angle) - math.pi) / (2 * math.pi))
    return angle - jnp.sign(angle) * jnp.maximum(turns, 0) * 2 * math.pi


VARIANTS = {"Acrobot-v1": Acrobot}
