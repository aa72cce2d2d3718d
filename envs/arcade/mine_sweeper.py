"""MineSweeper in pixels or in numbers: three views of one state, of which one shows all.

An own, small game in the manner of POPGym Arcade (Z. Wang et al., 2025), where each game has two views of the same
state, and with the rules of POPGym's MineSweeper (ICLR 2023). On n x n cells with m mines, an action opens one cell.

| an action opens | earns | |
| --- | --- | --- |
| a safe cell for the first time | 1 / (n^2 - m) | the episode ends when all are open |
| a mine | -0.5 | the episode ends |
| a cell that is open | -0.5 / n^2 | the mask forbids it |

`observed="full"` shows numbers of all open cells and where the mines are, a Markov decision process, whose best return
is 1. `"numbers"` shows the numbers and no mine, the game as people play it. `"partial"` shows nothing but the number of
the cell opened last: what was seen must be remembered. `first_safe` moves a mine away, to any other closed cell, that
the first action would open. `rewards="sparse"` pays at the end what `"dense"` pays on the way.
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

from jaxpar.env import Box, Discrete, distinct, picture
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from ..puzzles.rewards import REWARDS, unless
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
    """Mines and open cells, bool `[n, n]`; the cell opened last (int32, -1 at first); steps made.

    `spare`, int32, is the safe cell to which a mine goes that the first action would open; -1 where it stays.
    """

    mines: Array
    opened: Array
    last: Array
    time: Array
    spare: Array


@dataclasses.dataclass(frozen=True)
class MineSweeper:
    """Observation: uint8 `[8 n, 8 n, 3]`, or int32 `[n, n]`. Action: a cell, int32, row by row.

    Attributes:
        size: n.
        num_mines: m.
        observed: "full", "numbers" or "partial"; states, rewards and ends are the same.
        first_safe: whether the first cell to be opened never is a mine.
        rewards: "dense" or "sparse".
        pixels: whether the view is drawn; otherwise every cell is told: 0 closed, 1 closed over a mine that is seen,
            2 a mine that went off, 3 + i open with i mines around it.
    """

    size: int = field(6, AtLeast(2))
    num_mines: int = field(6, AtLeast(1))
    observed: str = field("full", OneOf(("full", "numbers", "partial")))
    first_safe: bool = False
    rewards: str = field("dense", OneOf(REWARDS))
    pixels: bool = True
    absorbing = True  # `unless`

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
        return (
            f"MineSweeper-{self.size}x{self.size}-{self.observed}{'' if self.pixels else '-cells'}"
        )

    @property
    def default_params(self) -> Params:
        """A mine costs 0.5."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Pixels, or what there is of every cell."""
        if not self.pixels:
            return Box(0, NUMBER + 8, (self.size, self.size), jnp.int32)
        return Box(0, 255, (self.size * TILE, self.size * TILE, 3), jnp.uint8)

    def action_space(self, params: Params) -> Discrete:
        """A cell."""
        return Discrete(self.size**2)

    def action_mask(self, state: State, params: Params) -> Array:
        """Closed cells, bool `[n^2]`."""
        return ~state.opened.reshape(-1)

    def init(self, key: PRNGKey, params: Params) -> State:
        """All closed, mines drawn uniformly; consumes `key`."""
        level_key, spare_key = jax.random.split(key)
        return self.init_level(spare_key, self.sample_level(level_key, params), params)

    def sample_level(self, key: PRNGKey, params: Params) -> Array:
        """Where the mines are, bool `[n, n]`; consumes `key`."""
        here = (
            jnp.arange(self.size**2)[:, None] == distinct(key, self.size**2, self.num_mines)[None]
        )
        return jnp.any(here, axis=1).reshape(self.size, self.size)

    def init_level(self, key: PRNGKey, level: Array, params: Params) -> State:
        """All closed over the given mines; consumes `key` if `first_safe`."""
        nowhere, safe = jnp.full((), -1, jnp.int32), jnp.cumsum(~level.reshape(-1))
        spare = (
            jnp.argmax(safe > jax.random.randint(key, (), 0, safe[-1]))
            if self.first_safe
            else nowhere
        )
        return State(
            level, jnp.zeros_like(level), nowhere, jnp.zeros((), jnp.int32), spare.astype(jnp.int32)
        )

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Opens a cell; deterministic."""
        cells = np.arange(self.size**2).reshape(self.size, self.size)
        here, mines = cells == action, state.mines
        if self.first_safe:
            moved = (mines & ~here) | (cells == state.spare)
            mines = jnp.where((state.time == 0) & jnp.any(mines & here), moved, mines)
        after = State(
            mines, state.opened | here, jnp.asarray(action, jnp.int32), state.time + 1, state.spare
        )
        return unless(self.terminal(state, params), after, state)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """The board, or what is seen of it."""
        board = self.board(state)
        return picture.tiles(board, SPRITES) if self.pixels else board

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table."""
        row, column = action // self.size, action % self.size
        earned = jnp.where(
            next_state.mines[row, column], -params.mine_cost, 1 / (self.size**2 - self.num_mines)
        )
        earned = jnp.where(state.opened[row, column], -params.repeat_cost / self.size**2, earned)
        if self.rewards == "sparse":
            ends = self.terminal(next_state, params) | self.truncated(next_state, params)
            earned = jnp.where(ends, self.outcome(next_state, params), 0.0)
        return jnp.where(self.terminal(state, params), 0.0, earned).astype(jnp.float32)

    def outcome(self, state: State, params: Params) -> Array:
        """All that an episode has earned so far, float32 `[]`."""
        safe, repeats = jnp.sum(state.opened & ~state.mines), state.time - jnp.sum(state.opened)
        lost = (
            jnp.any(state.opened & state.mines) * params.mine_cost
            + repeats * params.repeat_cost / self.size**2
        )
        return (safe / (self.size**2 - self.num_mines) - lost).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """What safe cells still earn; where mines are not seen, times the share of closed cells that are safe."""
        left = jnp.sum(~state.opened & ~state.mines)
        sure = 1.0 if self.observed == "full" else left / jnp.maximum(jnp.sum(~state.opened), 1)
        paid = self.outcome(state, params) if self.rewards == "sparse" else 0.0
        guess = left / (self.size**2 - self.num_mines) * sure + paid
        return jnp.where(self.terminal(state, params), 0.0, guess).astype(jnp.float32)

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
        counts = sum(
            around[i : i + n, j : j + n] for i in range(3) for j in range(3) if (i, j) != (1, 1)
        )
        number = jnp.where(state.mines, BLOWN, NUMBER + counts)
        if self.observed == "full":
            return jnp.where(state.opened, number, jnp.where(state.mines, MINE, CLOSED))
        if self.observed == "numbers":
            return jnp.where(state.opened, number, CLOSED)
        return jnp.where(jnp.arange(n * n).reshape(n, n) == state.last, number, CLOSED)

    def render(self, state: State, params: Params) -> Array:
        """The full view, twice as large."""
        full = picture.tiles(dataclasses.replace(self, observed="full").board(state), SPRITES)
        return full.repeat(2, axis=0).repeat(2, axis=1)


def _sprites() -> np.ndarray:
    edge, open_cell = (110, 110, 110), (225, 225, 225)
    colors = (
        open_cell,
        picture.BLUE,
        picture.GREEN,
        picture.RED,
        picture.PURPLE,
        picture.BROWN,
        picture.ORANGE,
    )
    colors += (picture.BLACK, picture.GRAY)
    pages = [
        sprites.plain((165, 165, 165), TILE),
        sprites.stamp(sprites.MINE, picture.BLACK, (165, 165, 165), TILE),
    ]
    pages.append(sprites.stamp(sprites.MINE, picture.BLACK, picture.RED, TILE))
    pages += [sprites.stamp(sprites.FIGURES[str(i)], colors[i], open_cell, TILE) for i in range(9)]
    return np.stack([sprites.framed(page, edge) for page in pages])


SPRITES = _sprites()

VARIANTS = {
    "MineSweeper-4x4": lambda: MineSweeper(4, 2),
    "MineSweeper-4x4-Partial": lambda: MineSweeper(4, 2, "partial"),
    "MineSweeper-6x6": MineSweeper,
    "MineSweeper-6x6-Numbers": lambda: MineSweeper(observed="numbers", first_safe=True),
    "MineSweeper-6x6-Cells": lambda: MineSweeper(observed="numbers", first_safe=True, pixels=False),
    "MineSweeper-6x6-Partial": lambda: MineSweeper(observed="partial"),
    "MineSweeper-8x8": lambda: MineSweeper(8, 10),
    "MineSweeper-8x8-Partial": lambda: MineSweeper(8, 10, "partial"),
}
