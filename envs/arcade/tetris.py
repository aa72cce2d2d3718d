"""Tetris in pixels: seven pieces of four cells fall, full rows vanish; a full and a partial view of one state.

An own, small game in the manner of POPGym Arcade (Z. Wang et al., 2025); `games.Arcade` draws it. Pieces fall through
ten rows of `width` columns.

- A step first moves the piece left (0), right (2) or not (1), or turns it by a quarter, clockwise (3), if it then fits.
  A turned piece keeps the upper row and the left column of the box around it.
- Then it falls by one row, or comes to rest where it cannot. Dropped (4), it falls as far as it can, and rests at once.
- When it rests, full rows vanish, what is above moves down, and the next piece, drawn uniformly, starts in the first
  row. Where that one does not fit, the episode ends.
- Each row earns a tenth; ten end the episode with the best return, 1. After 500 steps it is cut.

`observed="full"` shows everything, the rows that have vanished as lights at the right: a Markov decision process.
`observed="partial"` shows the falling piece and the lights: what has come to rest where must be remembered.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import Between, check_fields, field
from jaxpar.types import Array, PRNGKey

from .games import EMPTY, GOAL, HIDDEN, PLAYER, THING, Arcade

__all__ = ["SHAPES", "VARIANTS", "Tetris"]

ROWS = 10
LEFT, STAY, RIGHT, TURN, DROP = range(5)


@flax.struct.dataclass
class TetrisState:
    """What rests, bool `[10, width]`; kind, quarter turns, row, column of the piece, int32; rows gone; lost; steps."""

    stack: Array
    kind: Array
    turns: Array
    row: Array
    column: Array
    lines: Array
    lost: Array
    time: Array


def _shapes() -> np.ndarray:
    """Cells of every piece after 0 to 3 turns, from its box's upper left corner, int32 `[7, 4, 4, 2]`."""
    pieces = ("####", "## ##", "### .#.", ".## ##.", "##. .##", "### #..", "### ..#")
    grids = [np.array([[mark == "#" for mark in row] for row in piece.split()]) for piece in pieces]
    return np.array(
        [[np.argwhere(np.rot90(grid, -turns)) for turns in range(4)] for grid in grids], np.int32
    )


SHAPES = _shapes()


@dataclasses.dataclass(frozen=True)
class Tetris:
    """Left (0), stay (1), right (2), turn (3), drop (4).

    Attributes:
        width: columns; the fewer, the easier.
    """

    width: int = field(6, Between(4, ROWS - 1))
    names = ("left", "stay", "right", "turn", "drop")
    side, actions, steps, goal = ROWS, 5, 500, 10

    def __post_init__(self):
        check_fields(self)

    def start(self, key: PRNGKey) -> TetrisState:
        """An empty box and the first piece; consumes `key`."""
        zero = jnp.zeros((), jnp.int32)
        stack, kind = (
            jnp.zeros((ROWS, self.width), bool),
            jax.random.randint(key, (), 0, len(SHAPES)),
        )
        return TetrisState(stack, kind, zero, zero, zero + self.entry, zero, zero > 0, zero)

    @property
    def entry(self) -> int:
        """The column in which a piece's box begins at first."""
        return (self.width - 3) // 2

    def move(self, key: PRNGKey, state: TetrisState, action: Array) -> TetrisState:
        """Moves or turns the piece and lets it fall; consumes `key`."""
        column = state.column + (action == RIGHT) - (action == LEFT)
        turns = (state.turns + (action == TURN)) % 4
        fits = self.fits(state.stack, state.kind, turns, state.row, column)
        column, turns = jnp.where(fits, column, state.column), jnp.where(fits, turns, state.turns)

        rows = jnp.arange(ROWS + 1)  # in the last of which no piece fits
        below = jax.vmap(lambda row: self.fits(state.stack, state.kind, turns, row, column))(rows)
        depth = jnp.argmax(~below & (rows > state.row)).astype(jnp.int32) - 1 - state.row
        rests = (action == DROP) | (depth == 0)
        row = state.row + jnp.where(action == DROP, depth, jnp.minimum(depth, 1))

        cells = jnp.asarray(SHAPES)[state.kind, turns]
        landed = state.stack.at[row + cells[:, 0], column + cells[:, 1]].set(True)
        full = jnp.all(landed, 1)
        order = jnp.argsort(~full, stable=True)  # full rows to the top, where they are emptied
        landed = (landed & ~full[:, None])[order]

        kind = jnp.where(rests, jax.random.randint(key, (), 0, len(SHAPES)), state.kind)
        stack = jnp.where(rests, landed, state.stack)
        stuck = ~self.fits(stack, kind, jnp.int32(0), jnp.int32(0), jnp.int32(self.entry))
        return TetrisState(
            stack=stack,
            kind=kind,
            turns=jnp.where(rests, 0, turns),
            row=jnp.where(rests, 0, row).astype(jnp.int32),
            column=jnp.where(rests, self.entry, column).astype(jnp.int32),
            lines=state.lines + jnp.where(rests, jnp.sum(full, dtype=jnp.int32), 0),
            lost=state.lost | (rests & stuck),
            time=state.time + 1,
        )

    def fits(self, stack: Array, kind: Array, turns: Array, row: Array, column: Array) -> Array:
        """Whether a piece there lies inside the box and on nothing that rests, bool `[]`."""
        rows, columns = jnp.moveaxis(jnp.asarray(SHAPES)[kind, turns], -1, 0)
        rows, columns = rows + row, columns + column
        inside = (rows < ROWS) & (columns >= 0) & (columns < self.width)
        taken = stack[jnp.clip(rows, 0, ROWS - 1), jnp.clip(columns, 0, self.width - 1)]
        return jnp.all(inside & ~taken)

    def earned(self, state: TetrisState, action: Array, following: TetrisState) -> Array:
        """A tenth for each row, until ten have vanished."""
        return (
            jnp.minimum(following.lines, self.goal) - jnp.minimum(state.lines, self.goal)
        ) / self.goal

    def over(self, state: TetrisState) -> Array:
        """Ten rows have vanished, or the next piece does not fit."""
        return state.lost | (state.lines >= self.goal)

    def board(self, state: TetrisState, full: bool) -> Array:
        """What rests, which the partial view hides, the piece, the wall beside the box, and the lights."""
        stack = jnp.where(state.stack & full, THING, EMPTY)
        cells = jnp.asarray(SHAPES)[state.kind, state.turns]
        stack = stack.at[state.row + cells[:, 0], state.column + cells[:, 1]].set(PLAYER)
        wall = jnp.full((ROWS, ROWS - self.width), HIDDEN)
        lights = jnp.where(jnp.arange(ROWS) >= ROWS - state.lines, GOAL, HIDDEN)
        return jnp.concatenate([stack, wall.at[:, -1].set(lights)], 1)


VARIANTS = {
    "Tetris": lambda: Arcade(Tetris()),
    "Tetris-Partial": lambda: Arcade(Tetris(), "partial"),
}
