"""MineSweeper in pixels: a fully and a partially observed twin of one state.

An own, small game in the manner of POPGym Arcade (Z. Wang et al., 2025), where each game has two views of the same
state, and with the rules of POPGym's MineSweeper (ICLR 2023). On n x n cells with m mines, an action opens one cell.

| an action opens | earns | |
| --- | --- | --- |
| a safe cell for the first time | 1 / (n^2 - m) | the episode ends when all are open |
| a mine | -0.5 | the episode ends |
| a cell that is open | -0.5 / n^2 | the mask forbids it |

`observed="full"` shows numbers of all open cells and where the mines are, a Markov decision process, whose best return
is 1. `observed="partial"` shows nothing but the number of the cell opened last: what was seen must be remembered.
Uniformly random legal play returns 1 / (m + 1) - (1 - 1 / C(n^2, m)) / 2 in expectation.

Deviations from POPGym: pixels; actions are cell numbers; nothing is revealed at reset; a mine costs 0.5; n^2 steps are
allowed.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from . import sprites

__all__ = ["VARIANTS", "MineSweeper"]

TILE = 8
CLOSED, MINE, BLOWN, NUMBER = 0, 1, 2, 3
"""Sprites; that of number i is `NUMBER + i`."""


@flax.struct.dataclass
class Params:
    """What opening a mine costs, and opening all cells again."""

    mine_cost: Any = 0.5
    repeat_cost: Any = 0.5


@flax.struct.dataclass
class State:
    """Mines and open cells, bool `[n, n]`; the cell opened last (int32, -1 at first); steps made."""

    mines: Array
    opened: Array
    last: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class MineSweeper:
    """Observation: uint8 `[8 n, 8 n, 3]`. Action: a cell, int32, row by row.

    Attributes:
        size: n.
        num_mines: m.
        observed: "full" or "partial"; states, rewards and ends are the same.
    """

    size: int = field(6, AtLeast(2))
    num_mines: int = field(6, AtLeast(1))
    observed: str = field("full", OneOf(("full", "partial")))

    def __post_init__(self):
        check_fields(self)
        if not self.num_mines < self.size**2:
            raise UsageError(
                f"MineSweeper of size {self.size} takes 1 to {self.size**2 - 1} mines on 2 x 2 cells or more, "
                f"not {self.num_mines}"
            )

    @property
    def name(self) -> str:
        """With its size and view."""
        return f"MineSweeper-{self.size}x{self.size}-{self.observed}"

    @property
    def default_params(self) -> Params:
        """A mine costs 0.5."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Pixels."""
        return Box(0, 255, (self.size * TILE, self.size * TILE, 3), jnp.uint8)

    def action_space(self, params: Params) -> Discrete:
        """A cell."""
        return Discrete(self.size**2)

    def action_mask(self, state: State, params: Params) -> Array:
        """Closed cells, bool `[n^2]`."""
        return ~state.opened.reshape(-1)

    def init(self, key: PRNGKey, params: Params) -> State:
        """All closed, mines drawn uniformly; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def sample_level(self, key: PRNGKey, params: Params) -> Array:
        """Where the mines are, bool `[n, n]`; consumes `key`."""
        return (jax.random.permutation(key, self.size**2) < self.num_mines).reshape(self.size, self.size)

    def init_level(self, key: PRNGKey, level: Array, params: Params) -> State:
        """All closed over the given mines; `key` is not needed."""
        return State(level, jnp.zeros_like(level), jnp.full((), -1, jnp.int32), jnp.zeros((), jnp.int32))

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Opens a cell; deterministic."""
        opened = state.opened.at[action // self.size, action % self.size].set(True)
        return State(state.mines, opened, jnp.asarray(action, jnp.int32), state.time + 1)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """The board, or of it the cell opened last."""
        return picture.tiles(self.board(state), SPRITES)

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table."""
        row, column = action // self.size, action % self.size
        earned = jnp.where(state.mines[row, column], -params.mine_cost, 1 / (self.size**2 - self.num_mines))
        return jnp.where(state.opened[row, column], -params.repeat_cost / self.size**2, earned)

    def terminal(self, state: State, params: Params) -> Array:
        """A mine is open, or everything else is."""
        return jnp.any(state.opened & state.mines) | jnp.all(state.opened | state.mines)

    def truncated(self, state: State, params: Params) -> Array:
        """After n^2 steps."""
        return state.time >= self.size**2

    def board(self, state: State) -> Array:
        """The sprite of every cell as the twin sees it, int32 `[n, n]`."""
        around = jnp.pad(state.mines.astype(jnp.int32), 1)
        n = self.size
        counts = sum(around[i : i + n, j : j + n] for i in range(3) for j in range(3) if (i, j) != (1, 1))
        number = jnp.where(state.mines, BLOWN, NUMBER + counts)
        if self.observed == "full":
            return jnp.where(state.opened, number, jnp.where(state.mines, MINE, CLOSED))
        return jnp.where(jnp.arange(n * n).reshape(n, n) == state.last, number, CLOSED)

    def render(self, state: State, params: Params) -> Array:
        """The full view, twice as large."""
        full = picture.tiles(dataclasses.replace(self, observed="full").board(state), SPRITES)
        return full.repeat(2, axis=0).repeat(2, axis=1)


def _sprites() -> np.ndarray:
    edge, open_cell = (110, 110, 110), (225, 225, 225)
    colors = (open_cell, picture.BLUE, picture.GREEN, picture.RED, picture.PURPLE, picture.BROWN, picture.ORANGE)
    colors += (picture.BLACK, picture.GRAY)
    pages = [sprites.plain((165, 165, 165), TILE), sprites.stamp(sprites.MINE, picture.BLACK, (165, 165, 165), TILE)]
    pages.append(sprites.stamp(sprites.MINE, picture.BLACK, picture.RED, TILE))
    pages += [sprites.stamp(sprites.FIGURES[str(i)], colors[i], open_cell, TILE) for i in range(9)]
    return np.stack([sprites.framed(page, edge) for page in pages])


SPRITES = _sprites()

VARIANTS = {
    "MineSweeper-4x4": lambda: MineSweeper(4, 2),
    "MineSweeper-4x4-Partial": lambda: MineSweeper(4, 2, "partial"),
    "MineSweeper-6x6": MineSweeper,
    "MineSweeper-6x6-Partial": lambda: MineSweeper(observed="partial"),
    "MineSweeper-8x8": lambda: MineSweeper(8, 10),
    "MineSweeper-8x8-Partial": lambda: MineSweeper(8, 10, "partial"),
}
