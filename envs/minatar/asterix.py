"""MinAtar's Asterix: 1 for each gold that is met; meeting an enemy ends the episode.

In each of eight rows at most one thing, gold in one of three, crosses from one side to the other, a cell every few
steps; every few steps a new one comes. Both intervals shrink as time goes on.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array, PRNGKey

__all__ = ["Asterix"]

SLOTS, SIDE = 8, 10


@flax.struct.dataclass
class AsterixParams:
    """Steps between things that come and between their moves at first, until both shrink, and of an episode at most."""

    ramping: Any = True
    ramp_interval: Any = 100
    spawn_interval: Any = 10
    move_interval: Any = 5
    max_steps: Any = 1000


@flax.struct.dataclass
class AsterixState:
    """The player, int32; in each row the column (int32), whether it goes right, is gold, and is there: bool `[8]`.

    Then the intervals of coming and moving, the steps left of each and to the next shrinking, and how many there were.
    """

    y: Array
    x: Array
    columns: Array
    right: Array
    gold: Array
    there: Array
    spawn_interval: Array
    move_interval: Array
    spawn_timer: Array
    move_timer: Array
    ramp_timer: Array
    ramps: Array
    score: Array
    over: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Asterix:
    """Stay (0), left (1), up (2), right (3), down (4). Channels: player, enemies, where things were, gold."""

    names = ("stay", "left", "up", "right", "down")
    actions, channels, params = 5, 4, AsterixParams()

    def start(self, key: PRNGKey, params: AsterixParams) -> AsterixState:
        """The player alone, in the middle; `key` is not used."""
        none, zero = jnp.zeros(SLOTS, bool), jnp.zeros((), jnp.int32)
        spawn, move, ramp = (
            zero + jnp.asarray(z, jnp.int32)
            for z in (params.spawn_interval, params.move_interval, params.ramp_interval)
        )
        empty = jnp.zeros(SLOTS, jnp.int32), none, none, none
        return AsterixState(
            zero + 5, zero + 5, *empty, spawn, move, spawn, move, ramp, zero, zero, zero > 0, zero
        )

    def move(
        self, key: PRNGKey, state: AsterixState, action: Array, params: AsterixParams
    ) -> AsterixState:
        """Something may come; the player moves, then all else; consumes `key`."""
        columns, right, gold, there = self._spawned(key, state)
        y = jnp.clip(state.y + (action == 4) - (action == 2), 1, 8).astype(jnp.int32)
        x = jnp.clip(state.x + (action == 3) - (action == 1), 0, 9).astype(jnp.int32)

        met = there & (np.arange(1, SLOTS + 1) == y) & (columns == x)
        score, over = state.score + jnp.any(met & gold), jnp.any(met & ~gold)
        there = there & ~(met & gold)
        moves = state.move_timer == 0
        columns = columns + jnp.where(moves & there, jnp.where(right, 1, -1), 0)
        there = there & (columns >= 0) & (columns < SIDE)
        met = moves & there & (np.arange(1, SLOTS + 1) == y) & (columns == x)
        score, over = score + jnp.any(met & gold), over | jnp.any(met & ~gold)
        there = there & ~(met & gold)

        ramping = jnp.asarray(params.ramping, bool) & (
            (state.spawn_interval > 1) | (state.move_interval > 1)
        )
        waits, shrinks = ramping & (state.ramp_timer >= 0), ramping & (state.ramp_timer < 0)
        move_timer = jnp.where(moves, state.move_interval, state.move_timer) - 1
        spawn_timer = jnp.where(state.spawn_timer == 0, state.spawn_interval, state.spawn_timer) - 1
        faster = shrinks & (state.move_interval > 1) & (state.ramps % 2 == 1)
        ramp_timer = jnp.where(
            waits, state.ramp_timer - 1, jnp.asarray(params.ramp_interval, jnp.int32)
        )
        return AsterixState(
            y=y,
            x=x,
            columns=columns.astype(jnp.int32),
            right=right,
            gold=gold,
            there=there,
            spawn_interval=state.spawn_interval - (shrinks & (state.spawn_interval > 1)),
            move_interval=state.move_interval - faster,
            spawn_timer=spawn_timer,
            move_timer=move_timer,
            ramp_timer=jnp.where(ramping, ramp_timer, state.ramp_timer).astype(jnp.int32),
            ramps=state.ramps + shrinks,
            score=score,
            over=over,
            time=state.time + 1,
        )

    def _spawned(self, key: PRNGKey, state: AsterixState) -> tuple[Array, Array, Array, Array]:
        """Columns, directions, gold and presence after something may have come into a free row; gymnax's draws."""
        side_key, gold_key, slot_key = jax.random.split(key, 3)
        right = jax.random.choice(side_key, jnp.array([1, 0])) == 1
        gold = jax.random.choice(gold_key, jnp.array([1, 0]), p=jnp.array([1 / 3, 2 / 3])) == 1
        # gymnax begins at the second of the order; the first is looked at last, so that no free row is overlooked.
        order = jnp.roll(jax.random.permutation(slot_key, SLOTS), -1)
        slot = order[jnp.argmax(~state.there[order])]
        new = (state.spawn_timer == 0) & ~jnp.all(state.there) & (np.arange(SLOTS) == slot)
        return (
            jnp.where(new, jnp.where(right, 0, SIDE - 1), state.columns),
            jnp.where(new, right, state.right),
            jnp.where(new, gold, state.gold),
            state.there | new,
        )

    def layers(self, state: AsterixState) -> Array:
        """What is where, bool `[10, 10, 4]`."""
        columns, behind = np.arange(SIDE)[None], state.columns + jnp.where(state.right, -1, 1)
        things = state.there[:, None] & (columns == state.columns[:, None])
        trail = state.there[:, None] & (columns == behind[:, None])
        rows = [things & ~state.gold[:, None], trail, things & state.gold[:, None]]
        player = jnp.zeros((SIDE, SIDE), bool).at[state.y, state.x].set(True)
        return jnp.stack([player, *(jnp.pad(row, ((1, 1), (0, 0))) for row in rows)], -1)
