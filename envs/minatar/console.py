"""MinAtar's games as environments: grids of 10 x 10 cells with a channel for each kind of thing.

Rules of K. Young and T. Tian, "MinAtar: An Atari-Inspired Testbed for Thorough and Reproducible Reinforcement Learning
Experiments" (2019), and of their program, without sticky actions, with the actions that each game uses. States are the
games' own arrays; draws are those of gymnax 1.0.1, so that equal keys give equal games.

Where gymnax deviates from MinAtar:

- Asterix: of a random order of the eight slots, gymnax never looks at the first. Where that alone is free, or none, it
  still writes: whoever is in the last slot of the order disappears. MinAtar takes a free slot, or does nothing, and so
  do we.
- Asterix: gymnax lowers the interval of moves to 0 where MinAtar stops at 1. From MinAtar's numbers it never gets
  there.
- Freeway: MinAtar's limit of 2,500 steps ends an episode after 2,501, gymnax's after 2,500, and so does ours.
- All others: MinAtar has no limit, gymnax (and we) cut after 1,000 steps. Limits are truncations here.
"""

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import check_fields
from jaxpar.types import Array, PRNGKey

from .asterix import Asterix
from .breakout import Breakout
from .freeway import Freeway
from .space_invaders import SpaceInvaders

__all__ = ["VARIANTS", "Game", "MinAtar"]

SIDE = 10


class Game(Protocol):
    """What a game gives; its states have `score` (int32), `over` (bool) and `time` (int32)."""

    actions: int
    names: tuple[str, ...]
    channels: int
    params: Any

    def start(self, key: PRNGKey, params: Any) -> Any:
        """The first state; consumes `key`."""
        ...

    def move(self, key: PRNGKey, state: Any, action: Array, params: Any) -> Any:
        """The state after an action; consumes `key`."""
        ...

    def layers(self, state: Any) -> Array:
        """What is where, bool `[10, 10, channels]`."""
        ...


@dataclasses.dataclass(frozen=True)
class MinAtar:
    """Observation: float32 `[10, 10, C]`, 0 or 1. Action: int32, as the game says. Reward: what the score rises by.

    Attributes:
        game: its rules.
    """

    game: Any = Breakout()

    def __post_init__(self):
        check_fields(self)

    @property
    def name(self) -> str:
        """Min, and the game's."""
        return f"Min{type(self.game).__name__}"

    @property
    def default_params(self) -> Any:
        """The game's: MinAtar's numbers."""
        return self.game.params

    def observation_space(self, params: Any) -> Box:
        """Channels of cells."""
        return Box(0, 1, (SIDE, SIDE, self.game.channels))

    def action_space(self, params: Any) -> Discrete:
        """Those that the game uses."""
        return Discrete(self.game.actions, names=self.game.names)

    def init(self, key: PRNGKey, params: Any) -> Any:
        """The game's start; consumes `key`."""
        return self.game.start(key, params)

    def transition(self, key: PRNGKey, state: Any, action: Array, params: Any) -> Any:
        """The game's move; consumes `key`."""
        return self.game.move(key, state, action, params)

    def observe(self, key: PRNGKey, state: Any, action: Array | None, params: Any) -> Array:
        """All channels; `key` is not used."""
        return self.game.layers(state).astype(jnp.float32)

    def reward(self, state: Any, action: Array, next_state: Any, params: Any) -> Array:
        """What the score rose by."""
        return (next_state.score - state.score).astype(jnp.float32)

    def terminal(self, state: Any, params: Any) -> Array:
        """The game is lost."""
        return state.over

    def truncated(self, state: Any, params: Any) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: Any, params: Any) -> Array:
        """A colour a cell, of its first channel with something in it; uint8 `[80, 80, 3]`."""
        layers = self.game.layers(state)
        shown = jnp.where(jnp.any(layers, -1), 1 + jnp.argmax(layers, -1), 0)
        return picture.tiles(shown, COLORS[:, None, None].repeat(8, axis=1).repeat(8, axis=2))


COLORS = np.array(
    [
        picture.BLACK,
        picture.GREEN,
        picture.RED,
        picture.BROWN,
        picture.YELLOW,
        picture.ORANGE,
        picture.PURPLE,
    ]
    + [picture.GRAY],
    np.uint8,
)

VARIANTS = {
    "MinBreakout": MinAtar,
    "MinAsterix": lambda: MinAtar(Asterix()),
    "MinFreeway": lambda: MinAtar(Freeway()),
    "MinSpaceInvaders": lambda: MinAtar(SpaceInvaders()),
}
