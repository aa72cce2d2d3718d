"""Differentiable control: a torque-limited pendulum to swing up, and a point mass to bring to a goal.

Both are smooth in state, action and parameters wherever the action is inside its limits: no wrapped angle, no clipped
speed, no event, integration by one Runge-Kutta step of order 4, so that `jax.grad` through a rollout is the gradient of
the return. Beyond its limits an action is clipped, and its gradient there is 0.

`PendulumSwingUp`: a bob of mass m on a massless rod of length l, hanging at first, with a motor at the hinge too weak
to lift it at once (2 N m against m g l = 9.81): energy must be pumped in. theta = 0 is upright:

    m l^2 theta'' = m g l sin theta - c theta' + u

It is not Gymnasium's Pendulum, which is a uniform rod, integrates by semi-implicit Euler, clips its speed, starts
anywhere and wraps its angle in the cost.

`PointMass`: m p'' = F - c p' in the plane, towards a drawn goal. With the limits of the force out of reach it is a
linear-quadratic problem, whose solution is known.

Rewards are minus a smooth cost, 0 at rest at the goal. Nothing ends an episode but its length.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, picture
from jaxpar.types import Array, PRNGKey

from .integrator import rk4

__all__ = ["VARIANTS", "PendulumSwingUp", "PointMass"]

SIDE = 96


@flax.struct.dataclass
class PendulumParams:
    """Numbers of the pendulum: kg, m, m/s^2, N m s, N m, s; weights of the cost; the start's spread (rad, rad/s)."""

    mass: Any = 1.0
    length: Any = 1.0
    gravity: Any = 9.81
    friction: Any = 0.05
    max_torque: Any = 2.0
    dt: Any = 0.05
    spin_weight: Any = 0.05
    torque_weight: Any = 0.005
    start_spread: Any = 0.1
    max_steps: Any = 200


@flax.struct.dataclass
class PendulumState:
    """Angle from upright (rad, unwrapped) and its rate (rad/s), float32 scalars; steps made, int32."""

    theta: Array
    spin: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class PendulumSwingUp:
    """Action: float32 `[1]` in [-1, 1], the share of the largest torque. Observation: cos, sin, rate, `[3]`."""

    @property
    def name(self) -> str:
        """`PendulumSwingUp`."""
        return "PendulumSwingUp"

    @property
    def default_params(self) -> PendulumParams:
        """10 s of 0.05 s."""
        return PendulumParams()

    def observation_space(self, params: PendulumParams) -> Box:
        """The rate is unbounded."""
        return Box((-1.0, -1.0, -np.inf), (1.0, 1.0, np.inf), (3,))

    def action_space(self, params: PendulumParams) -> Box:
        """A share of the largest torque."""
        return Box(-1.0, 1.0, (1,))

    def init(self, key: PRNGKey, params: PendulumParams) -> PendulumState:
        """Hanging, but for `start_spread`; consumes `key`."""
        theta, spin = jax.random.uniform(key, (2,), jnp.float32, -1, 1) * params.start_spread
        return PendulumState(theta + jnp.pi, spin, jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: PendulumState, action: Array, params: PendulumParams
    ) -> PendulumState:
        """One Runge-Kutta step of `dt` under one torque; deterministic."""
        torque = params.max_torque * jnp.clip(action[0], -1, 1)
        inertia = params.mass * params.length**2

        def derivative(motion):
            theta, spin = motion
            lift = params.mass * params.gravity * params.length * jnp.sin(theta)
            return spin, (lift - params.friction * spin + torque) / inertia

        theta, spin = rk4(derivative, (state.theta, state.spin), params.dt)
        return PendulumState(theta, spin, state.time + 1)

    def observe(
        self, key: PRNGKey, state: PendulumState, action: Array | None, params: PendulumParams
    ) -> Array:
        """The numbers cos theta, sin theta, theta'."""
        return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.spin])

    def reward(
        self, state: PendulumState, action: Array, next_state: PendulumState, params: PendulumParams
    ) -> Array:
        """It is cos theta - 1 - weighted squares of theta' and the torque, the first two after the step."""
        torque = params.max_torque * jnp.clip(action[0], -1, 1)
        effort = params.spin_weight * next_state.spin**2 + params.torque_weight * torque**2
        return jnp.cos(next_state.theta) - 1 - effort

    def terminal(self, state: PendulumState, params: PendulumParams) -> Array:
        """Never."""
        return jnp.zeros((), bool)

    def truncated(self, state: PendulumState, params: PendulumParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: PendulumState, params: PendulumParams) -> Array:
        """Rod and bob; uint8 `[96, 96, 3]`."""
        bob = _plane(jnp.stack([jnp.sin(state.theta), jnp.cos(state.theta)]), 1.3)
        image = picture.line(
            picture.canvas(SIDE, SIDE), (SIDE / 2, SIDE / 2), bob, 5, picture.BROWN
        )
        image = picture.disc(image, bob, 8, picture.RED)
        return picture.to_uint8(picture.disc(image, (SIDE / 2, SIDE / 2), 4, picture.BLACK))


@flax.struct.dataclass
class PointParams:
    """Numbers of the point mass: kg, kg/s, N, s; weights of the cost; the half-width of the arena (m)."""

    mass: Any = 1.0
    friction: Any = 0.1
    max_force: Any = 1.0
    dt: Any = 0.1
    speed_weight: Any = 0.1
    force_weight: Any = 0.1
    arena: Any = 1.0
    max_steps: Any = 100


@flax.struct.dataclass
class PointState:
    """Position (m), velocity (m/s) and goal (m), float32 `[2]` each; steps made, int32."""

    position: Array
    velocity: Array
    goal: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class PointMass:
    """Action: float32 `[2]` in [-1, 1], shares of the largest force. Observation: goal - position, velocity, `[4]`."""

    @property
    def name(self) -> str:
        """`PointMass`."""
        return "PointMass"

    @property
    def default_params(self) -> PointParams:
        """10 s of 0.1 s."""
        return PointParams()

    def observation_space(self, params: PointParams) -> Box:
        """There are no walls: unbounded."""
        return Box(-np.inf, np.inf, (4,))

    def action_space(self, params: PointParams) -> Box:
        """Shares of the largest force along both axes."""
        return Box(-1.0, 1.0, (2,))

    def init(self, key: PRNGKey, params: PointParams) -> PointState:
        """At rest, position and goal uniform in the arena; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def sample_level(self, key: PRNGKey, params: PointParams) -> Array:
        """Position and goal, float32 `[2, 2]`, uniform in the arena; consumes `key`."""
        return jax.random.uniform(key, (2, 2), jnp.float32, -1, 1) * params.arena

    def init_level(self, key: PRNGKey, level: Array, params: PointParams) -> PointState:
        """At rest at `level[0]` with the goal `level[1]`; `key` is not needed."""
        return PointState(level[0], jnp.zeros_like(level[0]), level[1], jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: PointState, action: Array, params: PointParams
    ) -> PointState:
        """One Runge-Kutta step of `dt` under one force; deterministic."""
        force = params.max_force * jnp.clip(action, -1, 1)

        def derivative(motion):
            _, velocity = motion
            return velocity, (force - params.friction * velocity) / params.mass

        position, velocity = rk4(derivative, (state.position, state.velocity), params.dt)
        return PointState(position, velocity, state.goal, state.time + 1)

    def observe(
        self, key: PRNGKey, state: PointState, action: Array | None, params: PointParams
    ) -> Array:
        """The way to go, and the velocity."""
        return jnp.concatenate([state.goal - state.position, state.velocity])

    def reward(
        self, state: PointState, action: Array, next_state: PointState, params: PointParams
    ) -> Array:
        """Minus the squares of distance, weighted speed (both after the step) and weighted force."""
        force = params.max_force * jnp.clip(action, -1, 1)
        distance = jnp.sum((next_state.position - next_state.goal) ** 2)
        speed = jnp.sum(next_state.velocity**2)
        return -(distance + params.speed_weight * speed + params.force_weight * jnp.sum(force**2))

    def terminal(self, state: PointState, params: PointParams) -> Array:
        """Never."""
        return jnp.zeros((), bool)

    def truncated(self, state: PointState, params: PointParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: PointState, params: PointParams) -> Array:
        """The goal as a ring, the mass as a disc with its velocity; uint8 `[96, 96, 3]`."""
        reach = 1.5 * params.arena
        goal, mass, ahead = (
            _plane(point, reach)
            for point in (state.goal, state.position, state.position + 0.5 * state.velocity)
        )
        image = picture.disc(picture.canvas(SIDE, SIDE), goal, 8, picture.GREEN)
        image = picture.disc(image, goal, 5, picture.WHITE)
        image = picture.line(image, mass, ahead, 2, picture.GRAY)
        return picture.to_uint8(picture.disc(image, mass, 4, picture.BLUE))


def _plane(point: Array, reach: Any) -> Array:
    """Pixels of a point of the square [-reach, reach]^2."""
    return picture.to_pixels(point / reach, (-1.0, -1.0), (1.0, 1.0), SIDE, SIDE)


VARIANTS = {"PendulumSwingUp": PendulumSwingUp, "PointMass": PointMass}
