"""2048: slide all tiles of an n x n board, equal neighbours merge, a new tile appears; play on while a move is left.

The game of G. Cirulli, 2014. Actions are up, right, down, left; legal is what changes the board. Every merge earns the
value of the new tile; then a 2 (nine times of ten) or a 4 appears in an empty cell, all of them alike likely.

| an episode ends | outcome |
| --- | --- |
| when no move changes the board | the score, which is the sum of all merges |
| by an action that the mask forbids | the score less `illegal_cost` |

`rewards="dense"` pays each merge when it is made, `"sparse"` the outcome at the end.

Nothing is looked up and nothing branches: the board is turned so that every move is one to the left, zeros are sorted
to the end of each row by exchanges of neighbours, and whether a move changes the board is seen on pairs of neighbours.
"""

import dataclasses
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

__all__ = ["VARIANTS", "Board", "Start", "Tiles2048", "given_boards", "legal_slides", "slide_left"]

UP, RIGHT, DOWN, LEFT = range(4)


@flax.struct.dataclass
class Board:
    """A level: `tiles` int8 `[n, n]`, powers of two, 0 for an empty cell."""

    tiles: Array


@flax.struct.dataclass
class Params:
    """What an action that the mask forbids costs, and how often a new tile is a 4."""

    illegal_cost: Any = 1.0
    four: Any = 0.1


@flax.struct.dataclass
class State:
    """`tiles` as in `Board`; the `score` int32; whether an `illegal` action has ended it."""

    tiles: Array
    score: Array
    illegal: Array


def slide_left(tiles: Array) -> tuple[Array, Array]:
    """Moves rows int8 `[..., n]` to the left: what they become, and int32 `[...]`, the sum of their merges."""
    cells = _pushed([tiles[..., i] for i in range(tiles.shape[-1])])
    score = jnp.zeros(tiles.shape[:-1], jnp.int32)
    for i in range(
        len(cells) - 1
    ):  # a cell that has merged leaves a zero behind it, so that it merges only once
        same = (cells[i] == cells[i + 1]) & (cells[i] > 0)
        cells[i], cells[i + 1] = (
            cells[i] + same.astype(jnp.int8),
            jnp.where(same, jnp.int8(0), cells[i + 1]),
        )
        score += jnp.where(same, jnp.left_shift(jnp.int32(1), cells[i].astype(jnp.int32)), 0)
    return jnp.stack(_pushed(cells), axis=-1), score


def _pushed(cells: list[Array]) -> list[Array]:
    """Zeros last, the others in their order: bubble sort, n (n - 1) / 2 exchanges."""
    cells = list(cells)
    for end in range(len(cells) - 1, 0, -1):
        for i in range(end):
            empty = cells[i] == 0
            cells[i], cells[i + 1] = (
                jnp.where(empty, cells[i + 1], cells[i]),
                jnp.where(empty, jnp.int8(0), cells[i + 1]),
            )
    return cells


def legal_slides(tiles: Array) -> Array:
    """Which of the four moves change the board, bool `[4]`: where a tile has a gap or its equal on that side."""
    return jnp.stack(_legal_slides(tiles))


def _legal_slides(tiles: Array | np.ndarray) -> list[Array]:
    """The same of up, right, down and left; NumPy's array gives NumPy's bools, under jit too."""

    def towards(first: Array, second: Array) -> tuple[Array, Array]:
        same = first == second
        forth = (second > 0) & (same | (first == 0))
        back = (first > 0) & (same | (second == 0))
        return forth.any(), back.any()

    left, right = towards(tiles[:, :-1], tiles[:, 1:])
    up, down = towards(tiles[:-1], tiles[1:])
    return [up, right, down, left]


def new_tile(key: PRNGKey, tiles: Array, four: Array | float) -> Array:
    """Puts a tile into one of the empty cells, of which there must be one; consumes `key`."""
    where, which = jax.random.uniform(key, (2,))
    empty = (tiles == 0).reshape(-1)
    rank = jnp.cumsum(empty.astype(jnp.int8), dtype=jnp.int8)
    chosen = jnp.minimum(jnp.floor(where * rank[-1]).astype(jnp.int8), rank[-1] - 1)
    here = empty & (rank == chosen + 1)
    return jnp.where(
        here.reshape(tiles.shape), jnp.where(which < four, jnp.int8(2), jnp.int8(1)), tiles
    )


@dataclasses.dataclass(frozen=True)
class Start:
    """Two tiles on an empty board of `size` x `size`, each a 4 with chance 0.1."""

    size: int = field(4, Between(2, 8))

    __post_init__ = check_fields

    def __call__(self, key: PRNGKey) -> Board:
        """Draws; consumes `key`."""
        tiles = jnp.zeros((self.size, self.size), jnp.int8)
        for tile_key in jax.random.split(key):
            tiles = new_tile(tile_key, tiles, 0.1)
        return Board(tiles)


def given_boards(*boards: np.ndarray) -> Given:
    """A generator of given boards, arrays `[n, n]` of tiles as they are read: 0, 2, 4, 8 ...

    Raises:
        UsageError: a board is not square, holds another number, or leaves no move.
    """
    levels = []
    for board in boards:
        board = np.asarray(board, np.int64)
        if board.ndim != 2 or board.shape[0] != board.shape[1] or not 2 <= len(board) <= 8:
            raise UsageError(
                f"2048 takes a board [n, n] with n from 2 to 8, not {list(board.shape)}"
            )
        powers = np.round(np.log2(np.maximum(board, 1))).astype(np.int8)
        if (
            np.any(np.where(powers > 0, 2 ** powers.astype(np.int64), 0) != board)
            or powers.max() > len(board) ** 2 + 1
        ):
            raise UsageError(
                f"tiles are 0 or 2, 4, 8 ... 2^{len(board) ** 2 + 1}, not {sorted(set(board.reshape(-1).tolist()))}"
            )
        if not any(_legal_slides(powers)):
            raise UsageError(
                "no move changes a given board of 2048, so that there is nothing to play"
            )
        levels.append(Board(powers))
    return Given.of(*levels)


@dataclasses.dataclass(frozen=True)
class Tiles2048:
    """Observation: the tiles as powers of two, int8 `[n, n]`. Action: 0 to 3 for up, right, down, left.

    Attributes:
        generator: `Start`, what `given_boards` makes, or any that draws a `Board`; n is its size.
        rewards: "dense" or "sparse".
    """

    generator: Generator = Start()
    rewards: str = field("dense", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of a `Board`."""
        check_fields(self)
        check_generator("2048", self.generator, Board, "Start, given_boards(...)")

    @property
    def size(self) -> int:
        """N."""
        return check_generator(
            "2048", self.generator, Board, "Start, given_boards(...)"
        ).tiles.shape[0]

    @property
    def name(self) -> str:
        """With its size."""
        return f"2048-{self.size}x{self.size}"

    @property
    def default_params(self) -> Params:
        """An illegal action costs 1; a tenth of new tiles are 4."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """No tile is over 2^(n^2 + 1): that needs a 4 in the last empty cell."""
        return Box(0, self.size**2 + 1, (self.size, self.size), jnp.int8)

    def action_space(self, params: Params) -> Discrete:
        """Up, right, down, left."""
        return Discrete(4, names=("up", "right", "down", "left"))

    def sample_level(self, key: PRNGKey, params: Params) -> Board:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Board, params: Params) -> State:
        """Nothing scored; deterministic."""
        return State(
            jnp.asarray(level.tiles, jnp.int8), jnp.zeros((), jnp.int32), jnp.zeros((), bool)
        )

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Moves that change the board, bool `[4]`."""
        return legal_slides(state.tiles)

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Slides, merges and adds a tile; consumes `key`."""
        mask = legal_slides(state.tiles)
        upright, backward = (action == UP) | (action == DOWN), (action == RIGHT) | (action == DOWN)
        turned = jnp.where(upright, state.tiles.T, state.tiles)
        moved, merged = slide_left(jnp.where(backward, turned[:, ::-1], turned))
        moved = jnp.where(backward, moved[:, ::-1], moved)
        tiles = new_tile(key, jnp.where(upright, moved.T, moved), params.four)
        after = State(tiles, state.score + jnp.sum(merged), state.illegal)
        over = self.terminal(state, params)
        return unless(over | ~mask[action], after, state).replace(
            illegal=state.illegal | (~mask[action] & ~over)
        )

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """All tiles."""
        return state.tiles

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table."""
        over, ends = self.terminal(state, params), self.terminal(next_state, params)
        return earned(
            self.rewards, self.outcome(state, params), self.outcome(next_state, params), over, ends
        )

    def terminal(self, state: State, params: Params) -> Array:
        """Nothing moves, or an illegal action was taken."""
        return state.illegal | ~jnp.any(legal_slides(state.tiles))

    def outcome(self, state: State, params: Params) -> Array:
        """The score, less what an illegal action has cost, float32 `[]`."""
        return state.score.astype(jnp.float32) - jnp.where(state.illegal, params.illegal_cost, 0.0)

    def heuristic(self, state: State, params: Params) -> Array:
        """The greatest tile times the share of cells that are empty or equal to the next, and what is to be paid."""
        tiles = state.tiles
        pairs = [
            tiles[:, 1:] * (tiles[:, 1:] == tiles[:, :-1]),
            tiles[1:] * (tiles[1:] == tiles[:-1]),
        ]
        room = (jnp.sum(tiles == 0) + sum(jnp.sum(pair > 0) for pair in pairs)) / self.size**2
        paid = 0.0 if self.rewards == "dense" else self.outcome(state, params)
        guess = room * jnp.exp2(jnp.max(tiles).astype(jnp.float32)) + paid
        return jnp.where(self.terminal(state, params), 0.0, guess).astype(jnp.float32)

    def render(self, state: State, params: Params) -> Array:
        """Tiles with their values, uint8 `[28 n, 28 n, 3]`."""
        return picture.tiles(jnp.minimum(state.tiles, len(SPRITES) - 1), SPRITES)


def _sprites() -> np.ndarray:
    pages = [stamp("...", picture.WHITE, (205, 195, 180), 28)]
    for power in range(1, 20):
        digits = [FIGURES[digit].split() for digit in str(2**power)]
        rows = [".".join(digit[row] for digit in digits) for row in range(5)]
        warm, share = (
            np.array([(238, 228, 218), (240, 130, 50), (90, 20, 60)], float),
            min(power / 8, 2 - 1e-6),
        )
        ground = warm[int(share)] + (share - int(share)) * (warm[int(share) + 1] - warm[int(share)])
        ink = (70, 60, 50) if power < 5 else picture.WHITE
        pages.append(stamp(" ".join(rows), ink, ground, 28, 2 if len(digits) < 4 else 1))
    return np.stack([framed(page, (150, 140, 130)) for page in pages])


SPRITES = _sprites()

VARIANTS = {
    "2048": Tiles2048,
    "2048-2x2": lambda: Tiles2048(Start(2)),
    "2048-3x3": lambda: Tiles2048(Start(3)),
}
