"""MinAtar's Freeway: 1 for each crossing of a road of eight lanes, in each of which a car moves at its own pace.

A car that is met sends the player back to the start; each crossing draws paces and directions anew. The player moves in
one of three steps at most.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array, PRNGKey

__all__ = ["Freeway"]

LANES, SIDE, COLUMN = 8, 10, 4


@flax.struct.dataclass
class FreewayParams:
    """Steps between two moves of the player, and of an episode."""

    player_interval: Any = 3
    max_steps: Any = 2500


@flax.struct.dataclass
class FreewayState:
    """The player's row, int32; of each car the column, the steps to its next move and its velocity, int32 `[8]`.

    A velocity's sign is the direction, its size the number of steps between two moves.
    """

    y: Array
    columns: Array
    timers: Array
    speeds: Array
    move_timer: Array
    score: Array
    over: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Freeway:
    """Stay (0), up (1), down (2). Channels: player, cars, and where those of each of five paces were."""

    names = ("stay", "up", "down")
    actions, channels, params = 3, 7, FreewayParams()

    def start(self, key: PRNGKey, params: FreewayParams) -> FreewayState:
        """The player below the road; consumes `key`."""
        speeds, zero = self._speeds(key), jnp.zeros((), jnp.int32)
        timer = zero + jnp.asarray(params.player_interval, jnp.int32)
        return FreewayState(
            zero + 9, jnp.zeros_like(speeds), jnp.abs(speeds), speeds, timer, zero, zero > 0, zero
        )

    def move(
        self, key: PRNGKey, state: FreewayState, action: Array, params: FreewayParams
    ) -> FreewayState:
        """The player moves, then the cars; consumes `key`."""
        moves = (state.move_timer == 0) & (action > 0)
        y = jnp.clip(state.y + jnp.where(moves, jnp.where(action == 1, -1, 1), 0), 0, SIDE - 1)
        move_timer = jnp.where(
            moves, jnp.asarray(params.player_interval, jnp.int32), state.move_timer
        )
        crossed = y == 0
        speeds = jnp.where(crossed, self._speeds(key), state.speeds)
        timers = jnp.where(crossed, jnp.abs(speeds), state.timers)
        y = jnp.where(crossed, SIDE - 1, y)

        # A player who is hit is where no lane is: each car can be looked at for itself.
        turn = timers == 0
        columns = jnp.where(turn, (state.columns + jnp.sign(speeds)) % SIDE, state.columns)
        hit = (np.arange(1, LANES + 1) == y) & ((state.columns == COLUMN) | (columns == COLUMN))
        return FreewayState(
            y=jnp.where(jnp.any(hit), SIDE - 1, y).astype(jnp.int32),
            columns=columns.astype(jnp.int32),
            timers=jnp.where(turn, jnp.abs(speeds), timers - 1).astype(jnp.int32),
            speeds=speeds.astype(jnp.int32),
            move_timer=(move_timer - (move_timer > 0)).astype(jnp.int32),
            score=state.score + crossed,
            over=state.over,
            time=state.time + 1,
        )

    def _speeds(self, key: PRNGKey) -> Array:
        size_key, sign_key = jax.random.split(key)
        size = jax.random.randint(size_key, (LANES,), 1, 6)
        return (size * jax.random.choice(sign_key, jnp.array([-1, 1]), (LANES,))).astype(jnp.int32)

    def layers(self, state: FreewayState) -> Array:
        """What is where, bool `[10, 10, 7]`."""
        columns, behind = np.arange(SIDE)[None], (state.columns - jnp.sign(state.speeds)) % SIDE
        cars, trails = (columns == at[:, None] for at in (state.columns, behind))
        paces = np.arange(1, 6)[None] == jnp.abs(state.speeds)[:, None]
        rows = jnp.concatenate([cars[..., None], trails[..., None] & paces[:, None]], -1)
        player = jnp.zeros((SIDE, SIDE, 1), bool).at[state.y, COLUMN, 0].set(True)
        return jnp.concatenate([player, jnp.pad(rows, ((1, 1), (0, 0), (0, 0)))], -1)
