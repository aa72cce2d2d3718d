"""MinAtar's SpaceInvaders: 1 for each alien that is shot; being shot or met ends the episode.

Aliens move all together to the side, at an edge down and back; the fewer are left, the faster. The one in the column
nearest to the player shoots. A wave that is gone is followed by a faster one.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array, PRNGKey

__all__ = ["SpaceInvaders"]

SIDE = 10
WAVE = np.zeros((SIDE, SIDE), bool)
WAVE[0:4, 2:8] = True
LEAST_INTERVAL = 6
"""Later waves are no faster than that."""


@flax.struct.dataclass
class SpaceInvadersParams:
    """Steps between shots, moves of a whole first wave and the aliens' shots at least; of an episode at most."""

    shot_interval: Any = 5
    move_interval: Any = 12
    enemy_shot_interval: Any = 10
    ramping: Any = True
    max_steps: Any = 1000


@flax.struct.dataclass
class SpaceInvadersState:
    """The player's column, int32; shots of both sides and aliens, bool `[10, 10]`; the aliens' direction, 1 or -1.

    Then the steps between moves of a whole wave, and those left to move, to shoot and to be shot at.
    """

    x: Array
    shots: Array
    enemy_shots: Array
    aliens: Array
    direction: Array
    move_interval: Array
    move_timer: Array
    enemy_shot_timer: Array
    shot_timer: Array
    score: Array
    over: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class SpaceInvaders:
    """Stay (0), left (1), right (2), shoot (3). Channels: player, aliens, those going left, right, shots of both."""

    names = ("stay", "left", "right", "shoot")
    actions, channels, params = 4, 6, SpaceInvadersParams()

    def start(self, key: PRNGKey, params: SpaceInvadersParams) -> SpaceInvadersState:
        """A wave above, the player below; `key` is not used."""
        none, zero = jnp.zeros((SIDE, SIDE), bool), jnp.zeros((), jnp.int32)
        moves, shot = (
            zero + jnp.asarray(z, jnp.int32)
            for z in (params.move_interval, params.enemy_shot_interval)
        )
        wave = none | WAVE
        return SpaceInvadersState(
            zero + 5, none, none, wave, zero - 1, moves, moves, shot, zero, zero, zero > 0, zero
        )

    def move(
        self, key: PRNGKey, state: SpaceInvadersState, action: Array, params: SpaceInvadersParams
    ) -> SpaceInvadersState:
        """The player moves or shoots, then shots move, then the aliens; deterministic."""
        fires = (action == 3) & (state.shot_timer == 0)
        x = jnp.clip(state.x + (action == 2) - (action == 1), 0, SIDE - 1).astype(jnp.int32)
        shots = state.shots.at[SIDE - 1, state.x].max(fires)
        shots = jnp.concatenate([shots[1:], jnp.zeros_like(shots[:1])])
        enemy_shots = jnp.concatenate([jnp.zeros_like(shots[:1]), state.enemy_shots[:-1]])
        over = enemy_shots[SIDE - 1, x] | state.aliens[SIDE - 1, x]

        moves, left = state.move_timer == 0, state.direction < 0
        edge = moves & jnp.any(jnp.where(left, state.aliens[:, 0], state.aliens[:, SIDE - 1]))
        over = over | (edge & jnp.any(state.aliens[SIDE - 1]))
        aside = jnp.where(left, jnp.roll(state.aliens, -1, 1), jnp.roll(state.aliens, 1, 1))
        aliens = jnp.where(
            edge, jnp.roll(state.aliens, 1, 0), jnp.where(moves, aside, state.aliens)
        )
        over = over | (moves & aliens[SIDE - 1, x])
        crowd = jnp.sum(state.aliens, dtype=jnp.int32)

        shoots = state.enemy_shot_timer == 0
        y_shot, x_shot = self._nearest(aliens, x)
        enemy_shots = enemy_shots.at[y_shot, x_shot].max(shoots)
        hits = aliens & shots
        aliens, shots = aliens & ~hits, shots & ~hits
        cleared = ~jnp.any(aliens)
        faster = (
            cleared & jnp.asarray(params.ramping, bool) & (state.move_interval > LEAST_INTERVAL)
        )
        shot_timer = jnp.where(
            fires, jnp.asarray(params.shot_interval, jnp.int32), state.shot_timer
        )
        enemy_interval = jnp.asarray(params.enemy_shot_interval, jnp.int32)
        return SpaceInvadersState(
            x=x,
            shots=shots,
            enemy_shots=enemy_shots,
            aliens=aliens | (cleared & WAVE),
            direction=jnp.where(edge, -state.direction, state.direction),
            move_interval=state.move_interval - faster,
            move_timer=jnp.where(moves, jnp.minimum(crowd, state.move_interval), state.move_timer)
            - 1,
            enemy_shot_timer=jnp.where(shoots, enemy_interval, state.enemy_shot_timer) - 1,
            shot_timer=(shot_timer - (shot_timer > 0)).astype(jnp.int32),
            score=state.score + jnp.sum(hits, dtype=jnp.int32),
            over=over,
            time=state.time + 1,
        )

    def _nearest(self, aliens: Array, x: Array) -> tuple[Array, Array]:
        """The lowest alien of the nearest column that has one, the left of two."""
        far = jnp.where(jnp.any(aliens, 0), jnp.abs(np.arange(SIDE) - x), SIDE)
        column = jnp.argmin(far)
        return jnp.max(jnp.where(aliens[:, column], np.arange(SIDE), 0)), column

    def layers(self, state: SpaceInvadersState) -> Array:
        """What is where, bool `[10, 10, 6]`."""
        player = jnp.zeros((SIDE, SIDE), bool).at[SIDE - 1, state.x].set(True)
        left = state.direction < 0
        going = (state.aliens & left, state.aliens & ~left)
        return jnp.stack([player, state.aliens, *going, state.shots, state.enemy_shots], -1)
