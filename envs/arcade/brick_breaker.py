"""BrickBreaker: paddle, ball and bricks in pixels, a fully and a partially observed twin of one state.

An own, small game in the manner of POPGym Arcade (Z. Wang et al., 2025), where each game has two views of the same
state. Ball and paddle move over whole cells of a 11 x 10 grid; rows are counted from the top.

- Bricks fill rows 1 to 3. The paddle, 3 cells wide, moves along row 10 by at most one cell a step, before the ball; its
  middle stays on the grid.
- The ball moves by (dy, dx) with dy = +-1 and dx in -1, 0, 1. Walls and ceiling mirror it.
- Where its way leads into a brick, it stays, breaks the brick (1 / bricks earned) and turns dy round.
- Where its way leads onto the paddle, it moves above the cell that it met, and rises with dx = -1, 0 or 1 from the
  left, middle or right cell of the paddle. From there to the ceiling and back it makes 19 moves, so that its column can
  be shifted by one, and no brick stays out of reach.
- The episode ends when the ball reaches row 10, or no brick is left: the best return is 1.
- It starts in row 4, falling, column and dx drawn; nothing else is random. It can always be reached.

`observed="full"` shows everything, the cell that the ball is about to enter marked by a dot: a Markov decision process.
`observed="partial"` shows no dot, and a curtain hides rows 6 to 8: where the ball will come out must be remembered.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey

from . import sprites

__all__ = ["VARIANTS", "BrickBreaker"]

HEIGHT, WIDTH, TILE = 11, 10, 4
TOP, ROWS = 1, 3
CURTAIN = slice(6, 9)
EMPTY, BRICK, PADDLE, BALL, HIDDEN = 0, 1, 4, 5, 6
"""Sprites, those of bricks by row; with the dot, the same + `DOT`."""
DOT = 7


@flax.struct.dataclass
class Params:
    """The most steps of an episode."""

    max_steps: Any = 1000


@flax.struct.dataclass
class State:
    """Bricks, bool `[3, 10]`; ball, its direction and the paddle's middle, int32 scalars; steps made."""

    bricks: Array
    y: Array
    x: Array
    dy: Array
    dx: Array
    paddle: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class BrickBreaker:
    """Observation: uint8 `[44, 40, 3]`. Action, int32: left (0), stay (1), right (2).

    Attributes:
        observed: "full" or "partial"; states, rewards and ends are the same.
    """

    observed: str = field("full", OneOf(("full", "partial")))

    def __post_init__(self):
        check_fields(self)

    @property
    def name(self) -> str:
        """With its view."""
        return f"BrickBreaker-{self.observed}"

    @property
    def default_params(self) -> Params:
        """1,000 steps."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Pixels."""
        return Box(0, 255, (HEIGHT * TILE, WIDTH * TILE, 3), jnp.uint8)

    def action_space(self, params: Params) -> Discrete:
        """Left, stay, right."""
        return Discrete(3, names=("left", "stay", "right"))

    def init(self, key: PRNGKey, params: Params) -> State:
        """All bricks, the ball under them; consumes `key`."""
        x_key, dx_key = jax.random.split(key)
        x = jax.random.randint(x_key, (), 0, WIDTH)
        dx = jax.random.randint(dx_key, (), -1, 2)
        row, one = jnp.full((), TOP + ROWS, jnp.int32), jnp.ones((), jnp.int32)
        return State(jnp.ones((ROWS, WIDTH), bool), row, x, one, dx, WIDTH // 2 * one, 0 * one)

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Moves the paddle, then the ball; deterministic."""
        paddle = jnp.clip(state.paddle + action - 1, 0, WIDTH - 1).astype(jnp.int32)
        y, x, dy, dx = aim(state)
        breaks = broken(state, y, x)
        saved = (y == HEIGHT - 1) & (jnp.abs(x - paddle) <= 1)
        stays = jnp.any(breaks) | saved
        return State(
            bricks=state.bricks & ~breaks,
            y=jnp.where(stays, state.y, y),
            x=jnp.where(jnp.any(breaks), state.x, x),
            dy=jnp.where(stays, -dy, dy),
            dx=jnp.where(saved, x - paddle, dx),
            paddle=paddle,
            time=state.time + 1,
        )

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """The grid, or what the curtain leaves of it."""
        return picture.tiles(self.board(state), SPRITES)

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """The share of bricks broken."""
        return (jnp.sum(state.bricks) - jnp.sum(next_state.bricks)) / jnp.float32(ROWS * WIDTH)

    def terminal(self, state: State, params: Params) -> Array:
        """The ball is lost, or every brick broken."""
        return (state.y >= HEIGHT - 1) | ~jnp.any(state.bricks)

    def truncated(self, state: State, params: Params) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def board(self, state: State) -> Array:
        """The sprite of every cell as the twin sees it, int32 `[11, 10]`."""
        rows, columns = jnp.arange(HEIGHT)[:, None], jnp.arange(WIDTH)[None]
        paddle = (rows == HEIGHT - 1) & (jnp.abs(columns - state.paddle) <= 1)
        board = jnp.where(paddle, PADDLE, EMPTY)
        walls = jnp.where(state.bricks, BRICK + jnp.arange(ROWS)[:, None], EMPTY)
        board = board.at[TOP : TOP + ROWS].set(walls)
        board = jnp.where((rows == state.y) & (columns == state.x), BALL, board)
        if self.observed == "full":
            y, x, *_ = aim(state)
            return board + DOT * ((rows == y) & (columns == x))
        return board.at[CURTAIN].set(HIDDEN)

    def render(self, state: State, params: Params) -> Array:
        """The full view, three times as large."""
        full = picture.tiles(dataclasses.replace(self, observed="full").board(state), SPRITES)
        return full.repeat(3, axis=0).repeat(3, axis=1)


def aim(state: State) -> tuple[Array, Array, Array, Array]:
    """The cell (y, x) that the ball is about to enter, and its direction (dy, dx) mirrored by walls and ceiling."""
    x, y = state.x + state.dx, state.y + state.dy
    dx = jnp.where((x < 0) | (x >= WIDTH), -state.dx, state.dx)
    dy = jnp.where(y < 0, 1, state.dy)
    return state.y + dy, state.x + dx, dy, dx


def broken(state: State, y: Array, x: Array) -> Array:
    """The brick at (y, x), if there is one: bool `[3, 10]`."""
    rows, columns = jnp.arange(TOP, TOP + ROWS)[:, None], jnp.arange(WIDTH)[None]
    return state.bricks & (rows == y) & (columns == x)


def _sprites() -> np.ndarray:
    night = (25, 25, 45)
    colors = (
        night,
        picture.RED,
        picture.ORANGE,
        picture.YELLOW,
        picture.GREEN,
        picture.WHITE,
        (90, 90, 110),
    )
    plain = [sprites.plain(color, TILE) for color in colors]
    dotted = [sprites.stamp("## ##", picture.PURPLE, color, TILE) for color in colors]
    bricks = range(BRICK, BRICK + ROWS)
    pages = [
        sprites.framed(page, night) if i % DOT in bricks else page
        for i, page in enumerate(plain + dotted)
    ]
    return np.stack(pages)


SPRITES = _sprites()

VARIANTS = {"BrickBreaker": BrickBreaker, "BrickBreaker-Partial": lambda: BrickBreaker("partial")}
