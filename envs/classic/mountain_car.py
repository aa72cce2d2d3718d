"""Both mountain cars with exactly Gymnasium's transitions.

gymnax's MountainCarContinuous stops the car at the goal in place of the left wall; these do not.

Source: Moore (1990); rules and constants are those of Gymnasium 1.3 (`gymnasium/envs/classic_control`).
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete, picture
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "CarParams", "CarState", "MountainCar", "MountainCarContinuous"]


@flax.struct.dataclass
class CarState:
    """Position and velocity along the track, steps so far."""

    position: Array
    velocity: Array
    time: Array


@flax.struct.dataclass
class CarParams:
    """`power` is what a full push adds to the velocity, `goal` the position to reach at `goal_velocity` or faster."""

    min_position: Any = -1.2
    max_position: Any = 0.6
    max_speed: Any = 0.07
    goal: Any = 0.5
    goal_velocity: Any = 0.0
    power: Any = 0.001
    gravity: Any = 0.0025
    max_steps: Any = 200


@dataclasses.dataclass(frozen=True)
class MountainCar:
    """Rock a weak car out of a valley by pushing left (0), not at all (1) or right (2); -1 for each step."""

    @property
    def name(self) -> str:
        """MountainCar-v0."""
        return "MountainCar-v0"

    @property
    def default_params(self) -> CarParams:
        """Gymnasium's."""
        return CarParams()

    def observation_space(self, params: CarParams) -> Box:
        """Position and velocity, float32 `[2]`."""
        return Box(
            (CarParams.min_position, -CarParams.max_speed),
            (CarParams.max_position, CarParams.max_speed),
            (2,),
        )

    def action_space(self, params: CarParams) -> Any:
        """Left, nothing, right."""
        return Discrete(3, names=("left", "coast", "right"))

    def init(self, key: PRNGKey, params: CarParams) -> CarState:
        """At rest, uniform in -0.6 to -0.4."""
        position = jax.random.uniform(key, (), jnp.float32, -0.6, -0.4)
        return CarState(position, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: CarState, action: Array, params: CarParams
    ) -> CarState:
        """Push, gravity along a cosine of the position, and a wall at the left that stops the car."""
        velocity = (
            state.velocity
            + self._push(action) * params.power
            - params.gravity * jnp.cos(3 * state.position)
        )
        velocity = jnp.clip(velocity, -params.max_speed, params.max_speed)
        position = jnp.clip(state.position + velocity, params.min_position, params.max_position)
        at_wall = (position <= params.min_position) & (velocity < 0)
        return CarState(position, jnp.where(at_wall, 0, velocity), state.time + 1)

    def observe(
        self, key: PRNGKey, state: CarState, action: Array | None, params: CarParams
    ) -> Array:
        """Position and velocity."""
        return jnp.stack([state.position, state.velocity])

    def reward(
        self, state: CarState, action: Array, next_state: CarState, params: CarParams
    ) -> Array:
        """-1."""
        return jnp.full((), -1.0)

    def terminal(self, state: CarState, params: CarParams) -> Array:
        """The car is at the goal and fast enough."""
        return (state.position >= params.goal) & (state.velocity >= params.goal_velocity)

    def truncated(self, state: CarState, params: CarParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: CarState, params: CarParams) -> Array:
        """The valley, the flag and the car, uint8 `[80, 144, 3]`."""
        low, high = (params.min_position, 0.0), (params.max_position, 1.3)

        def at(position):
            height = jnp.sin(3 * position) * 0.45 + 0.55
            return picture.to_pixels(jnp.stack([position, height], axis=-1), low, high, 80, 144)

        share = jnp.arange(144) / 143
        track = at(params.min_position + share * (params.max_position - params.min_position))
        goal = at(jnp.asarray(params.goal, jnp.float32))
        depth = track[:, 1][None] - (jnp.arange(80.0) + 0.5)[:, None]
        ground = jnp.clip(0.5 - depth, 0, 1)[..., None]
        image = (
            picture.canvas(80, 144) * (1 - ground)
            + jnp.asarray(picture.GRAY, jnp.float32).reshape(1, 1, 3) * ground
        )
        image = picture.line(image, goal, goal - jnp.asarray([0.0, 16.0]), 1.5, picture.BLACK)
        flag = jnp.stack(
            [goal + jnp.asarray(corner) for corner in ((0.0, -16.0), (9.0, -12.5), (0.0, -9.0))]
        )
        image = picture.polygon(image, flag, picture.YELLOW)
        return picture.to_uint8(
            picture.disc(image, at(state.position) - jnp.asarray([0.0, 4.0]), 4, picture.RED)
        )

    def _push(self, action: Array) -> Array:
        return action - 1


@dataclasses.dataclass(frozen=True)
class MountainCarContinuous(MountainCar):
    """The mountain car with a push of any strength in ±1; 100 at the goal, less 0.1 of the squared push each step."""

    @property
    def name(self) -> str:
        """MountainCarContinuous-v0."""
        return "MountainCarContinuous-v0"

    @property
    def default_params(self) -> CarParams:
        """Gymnasium's."""
        return CarParams(goal=0.45, power=0.0015, max_steps=999)

    def action_space(self, params: CarParams) -> Box:
        """The push, float32 `[1]`; beyond its bounds it is clipped, though paid for in full."""
        return Box(-1.0, 1.0, (1,))

    def reward(
        self, state: CarState, action: Array, next_state: CarState, params: CarParams
    ) -> Array:
        """100 at the goal, less 0.1 of the squared push."""
        return jnp.where(self.terminal(next_state, params), 100.0, 0.0) - 0.1 * action[0] ** 2

    def _push(self, action: Array) -> Array:
        return jnp.clip(action[0], -1, 1)


VARIANTS = {"MountainCar-v0": MountainCar, "MountainCarContinuous-v0": MountainCarContinuous}
