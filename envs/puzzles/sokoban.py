"""Sokoban: push every box onto a goal; boxes are pushed one at a time and never pulled.

The game of H. Imabayashi, 1981. Actions are up, right, down, left; what would push two boxes, or a box or oneself into
a wall, is illegal.

| an episode ends | outcome |
| --- | --- |
| when every box stands on a goal | 1 |
| after `max_steps`, cut | 0 |
| by an action that the mask forbids | `-illegal_cost` |

`rewards="sparse"` pays the outcome at the end. `"dense"` pays for every box that comes onto a goal half of its share,
takes it back when it leaves, and at the end pays what is missing to the outcome.

Levels, drawn or given, are in `sokoban_levels.py`.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey

from .given import Generator, check_generator
from .rewards import REWARDS, earned, unless
from .sokoban_levels import ReversePlay, Room, home, neighbours, walled

__all__ = ["VARIANTS", "Sokoban"]


@flax.struct.dataclass
class Params:
    """The limit of steps, and what an action that the mask forbids costs."""

    max_steps: Any = 120
    illegal_cost: Any = 1.0


@flax.struct.dataclass
class State(Room):
    """A `Room`, and `first` int32, how many boxes stood on goals at the start.

    `illegal` says whether an action that the mask forbids has ended it; `time` is moves made, int32.
    """

    first: Array
    illegal: Array
    time: Array


def ways(room: Room) -> tuple[Array, Array, Array, Array]:
    """Of every direction `[4]`: the next cell, the one beyond, whether a box is pushed, whether it is legal."""
    table = jnp.asarray(neighbours(*room.walls.shape))
    first = table[room.player]
    second = table[first, np.arange(4)]
    walls, boxes = walled(room.walls, True), walled(room.boxes, False)
    pushes = boxes[first]
    return first, second, pushes, ~walls[first] & ~(pushes & (walls[second] | boxes[second]))


@dataclasses.dataclass(frozen=True)
class Sokoban:
    """Observation: walls, goals, boxes and player, 0 or 1, int8 `[H, W, 4]`. Action: up, right, down, left.

    Attributes:
        generator: `ReversePlay`, what `given_levels` makes, or any that draws a `Room`.
        rewards: "dense" or "sparse".
    """

    generator: Generator = ReversePlay()
    rewards: str = field("sparse", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of a `Room`."""
        check_fields(self)
        check_generator("Sokoban", self.generator, Room, "ReversePlay, given_levels(...)")

    @property
    def shape(self) -> tuple[int, int]:
        """H and W."""
        return check_generator(
            "Sokoban", self.generator, Room, "ReversePlay, given_levels(...)"
        ).walls.shape

    @property
    def name(self) -> str:
        """With its size."""
        return "Sokoban-{}x{}".format(*self.shape)

    @property
    def default_params(self) -> Params:
        """120 steps; an illegal action costs 1."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Four layers."""
        return Box(0, 1, (*self.shape, 4), jnp.int8)

    def action_space(self, params: Params) -> Discrete:
        """Up, right, down, left."""
        return Discrete(4, names=("up", "right", "down", "left"))

    def sample_level(self, key: PRNGKey, params: Params) -> Room:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Room, params: Params) -> State:
        """No move made; deterministic."""
        walls, goals, boxes = (
            jnp.asarray(grid, bool) for grid in (level.walls, level.goals, level.boxes)
        )
        no, zero = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        return State(
            walls, goals, boxes, jnp.asarray(level.player, jnp.int32), home(level), no, zero
        )

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Steps and pushes that are possible, bool `[4]`."""
        return ways(state)[3]

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Steps, and pushes what is in the way; deterministic."""
        first, second, pushes, legal = (each[action] for each in ways(state))
        cells = np.arange(state.walls.size).reshape(state.walls.shape)
        boxes = state.boxes ^ (pushes & ((cells == first) | (cells == second)))
        over = self.terminal(state, params)
        moved = state.replace(boxes=boxes, player=first, time=state.time + 1)
        return unless(over | ~legal, moved, state).replace(illegal=state.illegal | (~legal & ~over))

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """All of the level."""
        player = np.arange(state.walls.size).reshape(state.walls.shape) == state.player
        return jnp.stack([state.walls, state.goals, state.boxes, player], axis=-1).astype(jnp.int8)

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table."""
        ends = self.terminal(next_state, params) | self.truncated(next_state, params)
        before, after = self.outcome(state, params), self.outcome(next_state, params)
        return earned(self.rewards, before, after, self.terminal(state, params), ends)

    def terminal(self, state: State, params: Params) -> Array:
        """All boxes on goals, ended by an illegal action, or no move from the start."""
        return state.illegal | jnp.all(state.boxes == state.goals) | ~jnp.any(ways(state)[3])

    def truncated(self, state: State, params: Params) -> Array:
        """After `params.max_steps`."""
        return state.time >= params.max_steps

    def outcome(self, state: State, params: Params) -> Array:
        """What dense rewards have paid so far, float32 `[]`."""
        solved = jnp.all(state.boxes == state.goals)
        last = jnp.where(state.illegal, -params.illegal_cost, jnp.where(solved, 1.0, 0.0))
        ends = self.terminal(state, params) | self.truncated(state, params)
        return jnp.where(
            ends, last, (home(state) - state.first) / (2 * jnp.sum(state.goals))
        ).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """1 / (1 + d / 8), where d is the way of all boxes to their nearest goals, less what is already paid."""
        row, column = np.divmod(np.arange(state.walls.size), state.walls.shape[1])
        apart = (abs(row[:, None] - row[None]) + abs(column[:, None] - column[None])).astype(
            np.int32
        )
        nearest = jnp.min(jnp.where(state.goals.reshape(1, -1), apart, state.walls.size), axis=1)
        way = jnp.sum(jnp.where(state.boxes.reshape(-1), nearest, 0))
        paid = self.outcome(state, params) if self.rewards == "dense" else 0.0
        return jnp.where(self.terminal(state, params), 0.0, 1 / (1 + way / 8) - paid).astype(
            jnp.float32
        )

    def render(self, state: State, params: Params) -> Array:
        """Walls gray, goals red, boxes brown, green where they belong, the player blue; uint8 `[16 H, 16 W, 3]`."""
        player = np.arange(state.walls.size).reshape(state.walls.shape) == state.player
        kind = jnp.where(player, 2, jnp.where(state.boxes, 1, 0)) + 3 * state.goals
        return picture.tiles(jnp.where(state.walls, 6, kind), SPRITES)


def _sprites() -> np.ndarray:
    y, x = np.mgrid[:16, :16] - 7.5
    pages = np.full((7, 16, 16, 3), 225, np.uint8)
    pages[3:6, x**2 + y**2 < 10] = picture.RED
    square = np.maximum(abs(x), abs(y)) < 6
    pages[1, square], pages[4, square] = picture.BROWN, picture.GREEN
    pages[1:5:3, square & ((abs(x) > 4.5) | (abs(y) > 4.5))] = 70
    pages[2:6:3, (x**2 + y**2 < 40) & (x**2 + y**2 >= 10)] = picture.BLUE
    pages[2, x**2 + y**2 < 10] = picture.BLUE
    pages[6] = 110
    pages[6, [0, 8]], pages[6, :8, 8], pages[6, 8:, 0] = 80, 80, 80
    return pages


SPRITES = _sprites()

VARIANTS = {
    "Sokoban-8x8": Sokoban,
    "Sokoban-6x6": lambda: Sokoban(ReversePlay(6, 1, 40, 50)),
    "Sokoban-10x10": lambda: Sokoban(ReversePlay(10, 4, 200, 200)),
}
