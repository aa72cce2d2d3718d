"""Sliding tiles, the 8- and the 15-puzzle: move the gap until the numbers are in order and it is last.

| an episode ends | outcome |
| --- | --- |
| solved | 1 |
| after `max_steps`, cut | 0 |
| by an action that the mask forbids: a tile from outside of the board | `-illegal_cost` |

`rewards="sparse"` pays the outcome at the end. `"dense"` pays at every step half of what the distance of all tiles from
their places shrank by, as a share of the longest, and at the end what is missing to the outcome.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import Between, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from ..arcade.sprites import FIGURES, framed, stamp
from .given import Generator, Given, check_generator
from .rewards import REWARDS, earned, unless

__all__ = [
    "VARIANTS",
    "Shuffle",
    "SlidingTile",
    "Tiles",
    "given_tiles",
    "manhattan",
    "slide",
    "slides",
]


@flax.struct.dataclass
class Tiles:
    """A level: `tiles` int8 `[n, n]`, from 1, and 0 for the gap."""

    tiles: Array


@flax.struct.dataclass
class Params:
    """The limit of steps, and what an action that the mask forbids costs."""

    max_steps: Any = 500
    illegal_cost: Any = 1.0


@flax.struct.dataclass
class State:
    """`tiles` int8 `[n, n]`; `first` and `wrong` int32, their `manhattan` distance at the start and now.

    `illegal` says whether an action that the mask forbids has ended it; `time` is moves made, int32.
    """

    tiles: Array
    first: Array
    wrong: Array
    illegal: Array
    time: Array


@functools.cache
def slides(size: int) -> np.ndarray:
    """Where the gap goes, int8 `[size^2, 4]`, from a cell up, right, down, left; -1 outside of the board."""
    row, column = np.divmod(np.arange(size**2)[:, None], size)
    row, column = row + np.array([[-1, 0, 1, 0]]), column + np.array([[0, 1, 0, -1]])
    inside = (np.minimum(row, column) >= 0) & (np.maximum(row, column) < size)
    return np.where(inside, row * size + column, -1).astype(np.int8)


def manhattan(tiles: Array) -> Array:
    """Steps that all tiles are away from their places, int32 `[]` of int8 `[n^2]`; never more than moves are needed."""
    size = round(len(tiles) ** 0.5)
    row, column = np.divmod(np.arange(size**2), size)
    apart = abs(row[:, None] - row[None]) + abs(column[:, None] - column[None])
    apart = np.concatenate(
        [np.zeros((1, size**2), np.int32), apart[:-1].astype(np.int32)]
    )  # the gap has none
    return jnp.sum(jnp.asarray(apart)[tiles.astype(jnp.int32), np.arange(size**2)])


def farthest(size: int) -> int:
    """A bound of `manhattan`: every tile in the corner that is farthest from its place."""
    row, column = np.divmod(np.arange(size**2 - 1), size)
    return int(np.sum(np.maximum(row, size - 1 - row) + np.maximum(column, size - 1 - column)))


def slide(tiles: Array, action: Array) -> tuple[Array, Array]:
    """Tiles int8 `[n^2]` after the gap has moved, and whether that was legal; otherwise they are the same."""
    cells = np.arange(len(tiles), dtype=np.int8)
    gap = jnp.argmin(tiles).astype(jnp.int8)
    target = jnp.asarray(slides(round(len(tiles) ** 0.5)))[gap, action]
    number = jnp.sum(jnp.where(cells == target, tiles, jnp.int8(0)), dtype=jnp.int8)
    moved = jnp.where(cells == gap, number, jnp.where(cells == target, jnp.int8(0), tiles))
    return jnp.where(target < 0, tiles, moved), target >= 0


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """Tiles of `size` x `size` in any order that can be solved but the solved one, all alike likely.

    Half of all orders can: those whose permutation is as even as the way of the gap to its corner is long.
    """

    size: int = field(3, Between(2, 8))

    __post_init__ = check_fields

    def __call__(self, key: PRNGKey) -> Tiles:
        """Draws; consumes `key`."""
        tiles = jax.random.permutation(key, self.size**2).astype(jnp.int8)
        one_two = jnp.where((tiles == 1) | (tiles == 2), 3 - tiles, tiles)
        tiles = jnp.where(_is_odd(tiles), one_two, tiles)
        again = jnp.where(
            manhattan(tiles) == 0, slide(tiles, jnp.int32(0))[0], tiles
        )  # one of 181,440 and more
        return Tiles(again.reshape(self.size, self.size))


def _is_odd(tiles: Array | np.ndarray) -> Array:
    """Whether no moves solve tiles int8 `[n^2]`."""
    size, later = round(len(tiles) ** 0.5), np.triu(np.ones((len(tiles),) * 2, bool), 1)
    # Methods of arrays, so that what is given as NumPy's stays known under jit.
    inversions = ((tiles[:, None] > tiles[None]) & later & (tiles[None] > 0)).sum()
    rows_below = size - 1 - tiles.argmin() // size
    return (inversions + (rows_below if size % 2 == 0 else 0)) % 2 == 1


def given_tiles(*boards: np.ndarray) -> Given:
    """A generator of given boards `[n, n]` of tiles 1 to n^2 - 1 and 0 for the gap.

    Raises:
        UsageError: a board is not square, lacks a tile, is solved, or cannot be.
    """
    levels = []
    for board in boards:
        tiles = np.asarray(board, np.int8)
        if (
            tiles.ndim != 2
            or tiles.shape[0] != tiles.shape[1]
            or sorted(tiles.flat) != list(range(tiles.size))
        ):
            raise UsageError(
                f"sliding tiles take a board [n, n] of the numbers 0 to n^2 - 1, not {tiles.tolist()}"
            )
        if bool(_is_odd(tiles.reshape(-1))):
            raise UsageError(
                f"no moves solve the tiles {tiles.tolist()}: two of them would have to change places"
            )
        if np.array_equal(tiles.flat[:-1], np.arange(1, tiles.size)):
            raise UsageError(
                f"the tiles {tiles.tolist()} are in order, so that there is nothing to do"
            )
        levels.append(Tiles(tiles))
    return Given.of(*levels)


@dataclasses.dataclass(frozen=True)
class SlidingTile:
    """Observation: the tiles, int8 `[n, n]`. Action: the gap goes up, right, down, left.

    Attributes:
        generator: `Shuffle`, what `given_tiles` makes, or any that draws `Tiles`; n is its size.
        rewards: "dense" or "sparse".
    """

    generator: Generator = Shuffle()
    rewards: str = field("sparse", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of `Tiles`."""
        check_fields(self)
        if not 2 <= self.size <= 8:
            raise UsageError(f"SlidingTile takes boards of 2 to 8 tiles a side, not {self.size}")

    @property
    def size(self) -> int:
        """N."""
        return check_generator(
            "SlidingTile", self.generator, Tiles, "Shuffle, given_tiles(...)"
        ).tiles.shape[-1]

    @property
    def name(self) -> str:
        """With its size."""
        return f"SlidingTile-{self.size}x{self.size}"

    @property
    def default_params(self) -> Params:
        """500 steps; an illegal action costs 1."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Numbers, 0 for the gap."""
        return Box(0, self.size**2 - 1, (self.size, self.size), jnp.int8)

    def action_space(self, params: Params) -> Discrete:
        """Up, right, down, left."""
        return Discrete(4, names=("up", "right", "down", "left"))

    def sample_level(self, key: PRNGKey, params: Params) -> Tiles:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Tiles, params: Params) -> State:
        """No move made; deterministic."""
        tiles = jnp.asarray(level.tiles, jnp.int8)
        wrong = manhattan(tiles.reshape(-1))
        return State(tiles, wrong, wrong, jnp.zeros((), bool), jnp.zeros((), jnp.int32))

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Moves of the gap within the board, bool `[4]`."""
        return jnp.asarray(slides(self.size))[jnp.argmin(state.tiles)] >= 0

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Moves the gap; deterministic."""
        board, legal = slide(state.tiles.reshape(-1), action)
        over, tiles = self.terminal(state, params), board.reshape(state.tiles.shape)
        moved = State(tiles, state.first, manhattan(board), state.illegal, state.time + 1)
        return unless(over | ~legal, moved, state).replace(illegal=state.illegal | (~legal & ~over))

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """Numbers, 0 for the gap."""
        return state.tiles

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table."""
        ends = self.terminal(next_state, params) | self.truncated(next_state, params)
        before, after = self.outcome(state, params), self.outcome(next_state, params)
        return earned(self.rewards, before, after, self.terminal(state, params), ends)

    def terminal(self, state: State, params: Params) -> Array:
        """Solved, or ended by an illegal action."""
        return (state.wrong == 0) | state.illegal

    def truncated(self, state: State, params: Params) -> Array:
        """After `params.max_steps`."""
        return state.time >= params.max_steps

    def outcome(self, state: State, params: Params) -> Array:
        """What dense rewards have paid so far, float32 `[]`."""
        last = jnp.where(state.illegal, -params.illegal_cost, jnp.where(state.wrong == 0, 1.0, 0.0))
        ends = self.terminal(state, params) | self.truncated(state, params)
        return jnp.where(
            ends, last, (state.first - state.wrong) / (2 * farthest(self.size))
        ).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """The share that is right, as a guess of the chance to solve it, less what dense rewards have already paid."""
        paid = self.outcome(state, params) if self.rewards == "dense" else 0.0
        guess = 1 - state.wrong / farthest(self.size) - paid
        return jnp.where(self.terminal(state, params), 0.0, guess).astype(jnp.float32)

    def render(self, state: State, params: Params) -> Array:
        """Numbers, green where they belong, uint8 `[24 n, 24 n, 3]`."""
        goal = (np.arange(self.size**2, dtype=np.int8) + 1).reshape(self.size, self.size)
        return picture.tiles(state.tiles.astype(jnp.int32) + 64 * (state.tiles == goal), SPRITES)


def _sprites() -> np.ndarray:
    pages = []
    for ground in ((240, 225, 190), (165, 215, 160)):
        pages.append(stamp("...", picture.WHITE, (90, 90, 90), 24))
        for number in range(1, 64):
            digits = [FIGURES[digit].split() for digit in str(number)]
            pages.append(
                stamp(
                    " ".join(".".join(d[row] for d in digits) for row in range(5)),
                    (60, 50, 40),
                    ground,
                    24,
                    2,
                )
            )
    return np.stack([framed(page, (60, 50, 40)) for page in pages])


SPRITES = _sprites()

VARIANTS = {"SlidingTile-3x3": SlidingTile, "SlidingTile-4x4": lambda: SlidingTile(Shuffle(4))}
