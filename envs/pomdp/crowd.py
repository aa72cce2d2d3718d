"""Crowd: a robot crosses a hall of people, some curious and some shy, and cannot know which until they move.

The robot starts in the middle of the west side of a hall of 9 x 5 cells and wants to the middle of the east side.
People stand where `layout` puts them; each is curious or shy with equal odds. After the robot's step everybody within
2 cells of it (in either direction) moves with probability 0.9: a curious one to the neighbouring cell towards the
robot, a shy one away; they may share cells. Actions: north, east, south, west, stay, call; a call sends all within
reach away for sure. A step costs 1, a call 2 more, a person in the robot's cell 20; the goal pays 50 and ends the
episode. All places are seen; characters are not.

Source: own, in the manner of the crowd of VOPP (arXiv 2510.27191): there 300 people in a continuous hall of which the
six nearest are seen, here few enough that every place is a part of the observation.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, MultiDiscrete, picture
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["VARIANTS", "Crowd", "CrowdParams", "CrowdState"]

MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0), (0, 0), (0, 0))
CALL = 5


@flax.struct.dataclass
class CrowdState:
    """Places (x, y) of the robot, int32 `[2]`, and of the people, `[N, 2]`; who is curious, bool `[N]`."""

    robot: Array
    people: Array
    curious: Array


@flax.struct.dataclass
class CrowdParams:
    """Rewards, chances that a person is curious and that one in reach moves, the discount."""

    step_reward: Any = -1.0
    call_reward: Any = -2.0
    hit_reward: Any = -20.0
    goal_reward: Any = 50.0
    curious: Any = 0.5
    follow: Any = 0.9
    discount: Any = 0.95


@dataclasses.dataclass(frozen=True)
class Crowd:
    """See the module.

    Attributes:
        width: cells from the west to the east.
        height: cells from the south to the north.
        num_people: N.
        reach: cells within which people mind the robot.
        layout: seed of where they stand.
    """

    width: int = field(9, AtLeast(3))
    height: int = field(5, AtLeast(1))
    num_people: int = field(4, AtLeast(1))
    reach: int = field(2, AtLeast(0))
    layout: int = field(0, AtLeast(0))

    absorbing = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.num_people <= (self.width - 2) * self.height:
            raise UsageError(
                f"{self.num_people} people have no place in a hall of {self.width} x {self.height} cells"
            )
        if (self.width * self.height) ** self.num_people >= 2**31:
            raise UsageError(
                f"{self.num_people} people on {self.width} x {self.height} cells stand in too many ways"
            )

    @property
    def name(self) -> str:
        """Crowd."""
        return "Crowd"

    @property
    def default_params(self) -> CrowdParams:
        """Those of the module."""
        return CrowdParams()

    @property
    def places(self) -> np.ndarray:
        """Where people stand at first, int32 `[N, 2]`."""
        return _places(self)

    def observation_space(self, params: CrowdParams) -> MultiDiscrete:
        """Everybody's cell, y width + x."""
        return MultiDiscrete((self.width * self.height,) * self.num_people)

    def action_space(self, params: CrowdParams) -> Discrete:
        """North, east, south, west, stay, call."""
        return Discrete(6, names=("north", "east", "south", "west", "stay", "call"))

    def init(self, key: PRNGKey, params: CrowdParams) -> CrowdState:
        """Draws characters."""
        robot = jnp.asarray([0, self.height // 2], jnp.int32)
        curious = jax.random.bernoulli(key, params.curious, (self.num_people,))
        return CrowdState(robot, jnp.asarray(self.places, jnp.int32), curious)

    def transition(
        self, key: PRNGKey, state: CrowdState, action: Array, params: CrowdParams
    ) -> CrowdState:
        """The robot moves, then the people around it."""
        corner = jnp.asarray([self.width - 1, self.height - 1], jnp.int32)
        robot = jnp.clip(state.robot + jnp.asarray(MOVES, jnp.int32)[action], 0, corner)
        toward = robot[None] - state.people
        near = jnp.max(jnp.abs(toward), axis=1) <= self.reach
        moves = near & (
            (jax.random.uniform(key, (self.num_people,)) < params.follow) | (action == CALL)
        )
        sign = jnp.where(state.curious & (action != CALL), 1, -1)
        step = jnp.where(moves[:, None], sign[:, None] * jnp.sign(toward), 0)
        people = jnp.clip(state.people + step, 0, corner[None])
        over = self.terminal(state, params)
        return CrowdState(
            jnp.where(over, state.robot, robot),
            jnp.where(over, state.people, people),
            state.curious,
        )

    def _cells(self, state: CrowdState) -> Array:
        return state.people[:, 1] * self.width + state.people[:, 0]

    def observe(
        self, key: PRNGKey, state: CrowdState, action: Array | None, params: CrowdParams
    ) -> Array:
        """Where everybody stands."""
        return self._cells(state)

    def log_likelihood(
        self,
        obs: Array,
        state: CrowdState,
        action: Array,
        next_state: CrowdState,
        params: CrowdParams,
    ) -> Array:
        """0 or -inf."""
        return jnp.where(jnp.all(obs == self._cells(next_state)), 0.0, -jnp.inf)

    def obs_key(self, obs: Array, params: CrowdParams) -> Array:
        """The cells as digits of one number."""
        digits = (self.width * self.height) ** np.arange(self.num_people)
        return jnp.sum(obs * jnp.asarray(digits, jnp.int32), dtype=jnp.int32)

    def reward(
        self, state: CrowdState, action: Array, next_state: CrowdState, params: CrowdParams
    ) -> Array:
        """See the module."""
        hit = jnp.any(jnp.all(next_state.people == next_state.robot[None], axis=1))
        earned = params.step_reward + jnp.where(action == CALL, params.call_reward, 0.0)
        earned = earned + jnp.where(hit, params.hit_reward, 0.0)
        earned = earned + jnp.where(self.terminal(next_state, params), params.goal_reward, 0.0)
        return jnp.where(self.terminal(state, params), 0.0, earned).astype(jnp.float32)

    def terminal(self, state: CrowdState, params: CrowdParams) -> Array:
        """The robot is at the goal."""
        return jnp.all(state.robot == jnp.asarray([self.width - 1, self.height // 2], jnp.int32))

    def heuristic(self, state: CrowdState, params: CrowdParams) -> Array:
        """What the way to the goal earns in an empty hall."""
        goal = jnp.asarray([self.width - 1, self.height // 2], jnp.int32)
        steps, discount = (
            jnp.abs(goal - state.robot).sum().astype(jnp.float32),
            jnp.asarray(params.discount, jnp.float32),
        )
        paid = jnp.where(
            discount < 1, (1 - discount**steps) / jnp.maximum(1 - discount, 1e-6), steps
        )
        value = params.step_reward * paid + params.goal_reward * discount ** (steps - 1)
        return jnp.where(self.terminal(state, params), 0.0, value).astype(jnp.float32)

    def render(self, state: CrowdState, params: CrowdParams) -> Array:
        """North up, the goal green, the curious red, the shy gray; uint8 `[12 height, 12 width, 3]`."""
        image = picture.canvas(12 * self.height, 12 * self.width)
        left, top = 12.0 * (self.width - 1), 12.0 * (self.height - 1 - self.height // 2)
        image = picture.rectangle(image, (left, top), (left + 12, top + 12), picture.GREEN)

        def center(place: Array) -> Array:
            x, y = place.astype(jnp.float32)
            return jnp.stack([12 * x + 6, 12 * (self.height - 1 - y) + 6])

        for i in range(self.num_people):
            color = jnp.where(state.curious[i], jnp.asarray(picture.RED), jnp.asarray(picture.GRAY))
            image = picture.disc(image, center(state.people[i]), 5.0, color)
        return picture.to_uint8(picture.disc(image, center(state.robot), 3.0, picture.BLUE))


@functools.cache
def _places(env: Crowd) -> np.ndarray:
    cells = np.random.default_rng(env.layout).permutation((env.width - 2) * env.height)[
        : env.num_people
    ]
    return np.stack([1 + cells % (env.width - 2), cells // (env.width - 2)], axis=1).astype(
        np.int32
    )


VARIANTS = {"Crowd": Crowd}
"""Names and the environments behind them."""
