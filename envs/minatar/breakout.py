"""MinAtar's Breakout: 1 for each brick; a ball that is missed ends the episode.

The ball moves along diagonals and is mirrored by walls and ceiling. A brick sends it back where it came from, unless it
struck one in the step before. Where it reaches the last row, the paddle of one cell mirrors it upwards, and back where
it came from if it is met in its new column only; three new rows come when none is left.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array, PRNGKey

__all__ = ["Breakout"]

TOP, ROWS, SIDE = 1, 3, 10
DX, DY = np.array([-1, 1, 1, -1]), np.array([-1, -1, 1, 1])  # of the four directions
FLIPPED, MIRRORED, BACK = np.array([3, 2, 1, 0]), np.array([1, 0, 3, 2]), np.array([2, 3, 0, 1])


@flax.struct.dataclass
class BreakoutParams:
    """The most steps of an episode."""

    max_steps: Any = 1000


@flax.struct.dataclass
class BreakoutState:
    """Bricks, bool `[3, 10]`; the ball, where it was, its direction and the paddle, int32; whether it just struck."""

    bricks: Array
    y: Array
    x: Array
    last_y: Array
    last_x: Array
    direction: Array
    paddle: Array
    strike: Array
    score: Array
    over: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Breakout:
    """Stay (0), left (1), right (2). Channels: paddle, ball, where it was, bricks."""

    names = ("stay", "left", "right")
    actions, channels, params = 3, 4, BreakoutParams()

    def start(self, key: PRNGKey, params: BreakoutParams) -> BreakoutState:
        """All bricks, the ball falling from one side; consumes `key`."""
        right, zero = (
            jax.random.choice(key, jnp.array([0, 1])).astype(jnp.int32),
            jnp.zeros((), jnp.int32),
        )
        y, x, no = zero + 3, 9 * right, zero > 0
        return BreakoutState(
            jnp.ones((ROWS, SIDE), bool), y, x, y, x, 2 + right, zero + 4, no, zero, no, zero
        )

    def move(
        self, key: PRNGKey, state: BreakoutState, action: Array, params: BreakoutParams
    ) -> BreakoutState:
        """Moves the paddle, then the ball; deterministic."""
        paddle = jnp.clip(state.paddle + (action == 2) - (action == 1), 0, SIDE - 1).astype(
            jnp.int32
        )
        x, y = (
            state.x + jnp.asarray(DX)[state.direction],
            state.y + jnp.asarray(DY)[state.direction],
        )
        direction = jnp.where(
            (x < 0) | (x >= SIDE), jnp.asarray(MIRRORED)[state.direction], state.direction
        )
        direction = jnp.where(y < 0, jnp.asarray(FLIPPED)[direction], direction)
        x, ceiling, y = jnp.clip(x, 0, SIDE - 1), y < 0, jnp.maximum(y, 0)

        here = (np.arange(TOP, TOP + ROWS)[:, None] == y) & (np.arange(SIDE)[None] == x)
        brick = ~ceiling & jnp.any(state.bricks & here)
        breaks = brick & ~state.strike
        bricks = state.bricks & ~(here & breaks)
        down = ~ceiling & ~brick & (y == SIDE - 1)
        above, aside = down & (state.x == paddle), down & (state.x != paddle) & (x == paddle)
        direction = jnp.where(breaks | above, jnp.asarray(FLIPPED)[direction], direction)
        direction = jnp.where(aside, jnp.asarray(BACK)[direction], direction)
        return BreakoutState(
            bricks=bricks | (down & ~jnp.any(bricks)),
            y=jnp.where(breaks | above | aside, state.y, y).astype(jnp.int32),
            x=x.astype(jnp.int32),
            last_y=state.y,
            last_x=state.x,
            direction=direction.astype(jnp.int32),
            paddle=paddle,
            strike=brick,
            score=state.score + breaks,
            over=down & ~above & ~aside,
            time=state.time + 1,
        )

    def layers(self, state: BreakoutState) -> Array:
        """What is where, bool `[10, 10, 4]`."""
        places = ((9, state.paddle), (state.y, state.x), (state.last_y, state.last_x))
        cells = [jnp.zeros((SIDE, SIDE), bool).at[y, x].set(True) for y, x in places]
        return jnp.stack([*cells, jnp.pad(state.bricks, ((TOP, SIDE - TOP - ROWS), (0, 0)))], -1)
