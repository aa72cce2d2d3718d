"""Four small games in pixels, each with a fully and a partially observed twin of one state.

Own games in the manner of POPGym Arcade (Z. Wang et al., 2025), where each game has two views of the same state;
`tetris`, `pixels`, `mine_sweeper` and `brick_breaker` have more. Boards are square, a cell is 4 x 4 pixels.

| game | what to do | earns | `partial` hides |
| --- | --- | --- | --- |
| `Catcher` | be below each of 5 fruit, one after another, when it is down | a fifth, or minus that | rows 2 to 6 |
| `Skittles` | step aside of what comes down; being hit ends the episode | 1 / 64 a step survived | rows 5 and 6 |
| `Navigator` | go to the flag around the pits; both end the episode | 1 at the flag, -1 in a pit | both, but at first |
| `BattleShip` | hit ships of 3 and 2 cells; no cell twice, by the mask | a fifth a hit, -1 / 31 a miss | older shots |

In each the best return is 1, in Skittles as far as luck lets one. The full views are Markov: that of BattleShip shows
the ships, too. Pits have odd rows and columns, so that the flag can always be reached; a fruit falls so slowly that
each can be caught. Time limits truncate, but for Catcher, which is over when its fruit are.
"""

import dataclasses
import itertools
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, distinct, picture
from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey

from . import sprites

__all__ = ["GAMES", "VARIANTS", "Arcade", "BattleShip", "Catcher", "Navigator", "Skittles"]

TILE = 4
EMPTY, PLAYER, THING, GOAL, PIT, SHIP, HIT, MISS, HIDDEN = range(9)
"""Sprites."""
MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]], np.int32)  # up, down, left, right


@flax.struct.dataclass
class Params:
    """What a reward of 1 is worth."""

    pay: Any = 1.0


@flax.struct.dataclass
class CatcherState:
    """Row and column of the fruit, column of the player, int32; fruit that came down; steps made."""

    row: Array
    column: Array
    player: Array
    fallen: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Catcher:
    """Left (0), stay (1), right (2); the player is in the last row."""

    names = ("left", "stay", "right")
    side, actions, steps, fruit = 8, 3, 1000, 5  # the last fruit ends it long before

    def start(self, key: PRNGKey) -> CatcherState:
        """A fruit in the first row; consumes `key`."""
        column, zero = jax.random.randint(key, (), 0, self.side), jnp.zeros((), jnp.int32)
        return CatcherState(zero, column, zero + self.side // 2, zero, zero)

    def move(self, key: PRNGKey, state: CatcherState, action: Array) -> CatcherState:
        """The player moves, then the fruit; one that is down is followed by another; consumes `key`."""
        player = jnp.clip(state.player + action - 1, 0, self.side - 1).astype(jnp.int32)
        down = state.row == self.side - 2
        return CatcherState(
            row=jnp.where(down, 0, state.row + 1),
            column=jnp.where(down, jax.random.randint(key, (), 0, self.side), state.column),
            player=player,
            fallen=state.fallen + down,
            time=state.time + 1,
        )

    def earned(self, state: CatcherState, action: Array, following: CatcherState) -> Array:
        """A share for each fruit that came down."""
        caught = jnp.where(state.column == following.player, 1.0, -1.0)
        return jnp.where(following.fallen > state.fallen, caught / self.fruit, 0.0)

    def over(self, state: CatcherState) -> Array:
        """All fruit are down."""
        return state.fallen >= self.fruit

    def board(self, state: CatcherState, full: bool) -> Array:
        """The fruit, the player, and the curtain."""
        rows, columns = _places(self.side)
        board = jnp.where((rows == state.row) & (columns == state.column), THING, EMPTY)
        board = jnp.where((rows == self.side - 1) & (columns == state.player), PLAYER, board)
        return board if full else jnp.where((rows >= 2) & (rows <= 6), HIDDEN, board)


@flax.struct.dataclass
class SkittlesState:
    """What comes down, bool `[8, 8]`; column of the player, int32; whether it was hit; steps made."""

    rocks: Array
    player: Array
    hit: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Skittles:
    """Left (0), stay (1), right (2); the player is in the last row. A cell that comes into sight has a rock in 15 %."""

    names = ("left", "stay", "right")
    side, actions, steps, density = 8, 3, 64, 0.15

    def start(self, key: PRNGKey) -> SkittlesState:
        """Nothing has come yet; `key` is not used."""
        zero = jnp.zeros((), jnp.int32)
        return SkittlesState(
            jnp.zeros((self.side,) * 2, bool), zero + self.side // 2, zero > 0, zero
        )

    def move(self, key: PRNGKey, state: SkittlesState, action: Array) -> SkittlesState:
        """The player moves as all comes down by a row, of which the first is drawn; consumes `key`."""
        player = jnp.clip(state.player + action - 1, 0, self.side - 1).astype(jnp.int32)
        new = jax.random.uniform(key, (1, self.side)) < self.density
        rocks = jnp.concatenate([new, state.rocks[:-1]])
        return SkittlesState(rocks, player, state.hit | rocks[-1, player], state.time + 1)

    def earned(self, state: SkittlesState, action: Array, following: SkittlesState) -> Array:
        """A share for every step without being hit."""
        return jnp.where(following.hit, 0.0, 1.0 / self.steps)

    def over(self, state: SkittlesState) -> Array:
        """It was hit."""
        return state.hit

    def board(self, state: SkittlesState, full: bool) -> Array:
        """Rocks, the player over them, and the curtain."""
        rows, columns = _places(self.side)
        board = jnp.where(state.rocks, THING, EMPTY)
        board = jnp.where((rows == self.side - 1) & (columns == state.player), PLAYER, board)
        return board if full else jnp.where((rows == 5) | (rows == 6), HIDDEN, board)


@flax.struct.dataclass
class NavigatorState:
    """Cells of player and flag, int32 `[2]`; pits, bool `[6, 6]`; steps made."""

    player: Array
    goal: Array
    pits: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Navigator:
    """Up (0), down (1), left (2), right (3); walls stop. Four of the nine cells with odd row and column are pits."""

    names = ("up", "down", "left", "right")
    side, actions, steps, num_pits = 6, 4, 30, 4

    def start(self, key: PRNGKey) -> NavigatorState:
        """Pits, player and flag anywhere that they may be, apart; consumes `key`."""
        pits_key, cells_key = jax.random.split(key)
        odd = np.all(np.indices((self.side,) * 2) % 2 == 1, 0)
        corners, free = np.argwhere(odd), np.argwhere(~odd)
        chosen = jax.random.permutation(pits_key, len(corners)) < self.num_pits
        pits = jnp.zeros((self.side,) * 2, bool).at[corners[:, 0], corners[:, 1]].set(chosen)
        player, goal = jnp.asarray(free, jnp.int32)[distinct(cells_key, len(free), 2)]
        return NavigatorState(player, goal, pits, jnp.zeros((), jnp.int32))

    def move(self, key: PRNGKey, state: NavigatorState, action: Array) -> NavigatorState:
        """One cell on; `key` is not used."""
        player = jnp.clip(state.player + jnp.asarray(MOVES)[action], 0, self.side - 1)
        return state.replace(player=player, time=state.time + 1)

    def earned(self, state: NavigatorState, action: Array, following: NavigatorState) -> Array:
        """1 at the flag, -1 in a pit."""
        fell, found = self._met(following)
        return found.astype(jnp.float32) - fell

    def over(self, state: NavigatorState) -> Array:
        """At the flag, or in a pit."""
        return jnp.any(jnp.stack(self._met(state)))

    def board(self, state: NavigatorState, full: bool) -> Array:
        """The player over pits and flag, which the partial view shows at first alone."""
        rows, columns = _places(self.side)
        board = jnp.where(state.pits, PIT, EMPTY)
        board = jnp.where((rows == state.goal[0]) & (columns == state.goal[1]), GOAL, board)
        board = board if full else jnp.where(state.time == 0, board, EMPTY)
        return jnp.where((rows == state.player[0]) & (columns == state.player[1]), PLAYER, board)

    def _met(self, state: NavigatorState) -> tuple[Array, Array]:
        return state.pits[state.player[0], state.player[1]], jnp.all(state.player == state.goal)


@flax.struct.dataclass
class BattleShipState:
    """Ships and cells that were shot at, bool `[6, 6]`; the last of these, int32, -1 at first; steps made."""

    ships: Array
    shot: Array
    last: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class BattleShip:
    """An action is the cell to shoot at, row by row; a second shot at one is a miss."""

    side, actions, steps = 6, 36, 36

    def start(self, key: PRNGKey) -> BattleShipState:
        """Both ships anywhere, along rows or columns, apart; consumes `key`."""
        fleets = _fleets(self.side)
        ships = jnp.asarray(fleets)[jax.random.randint(key, (), 0, len(fleets))]
        return BattleShipState(
            ships, jnp.zeros_like(ships), jnp.full((), -1, jnp.int32), jnp.zeros((), jnp.int32)
        )

    def move(self, key: PRNGKey, state: BattleShipState, action: Array) -> BattleShipState:
        """Shoots; `key` is not used."""
        shot = state.shot.at[action // self.side, action % self.side].set(True)
        return state.replace(shot=shot, last=jnp.asarray(action, jnp.int32), time=state.time + 1)

    def earned(self, state: BattleShipState, action: Array, following: BattleShipState) -> Array:
        """A share for a cell of a ship, another back for what is none or no more."""
        hit = jnp.any(state.ships & following.shot & ~state.shot)
        return jnp.where(hit, 1 / 5, -1 / (self.actions - 5))

    def over(self, state: BattleShipState) -> Array:
        """All is sunk."""
        return ~jnp.any(state.ships & ~state.shot)

    def legal(self, state: BattleShipState) -> Array:
        """Cells that were not shot at, bool `[36]`."""
        return ~state.shot.reshape(-1)

    def board(self, state: BattleShipState, full: bool) -> Array:
        """Ships and shots, or the last shot."""
        board = jnp.where(
            state.shot, jnp.where(state.ships, HIT, MISS), jnp.where(state.ships, SHIP, EMPTY)
        )
        place = jnp.arange(self.actions).reshape(self.side, self.side)
        return board if full else jnp.where(place == state.last, board, EMPTY)


@runtime_checkable
class Masked(Protocol):
    """A game some of whose choices are illegal now and then."""

    def legal(self, state: Any) -> Array:
        """Which are legal, bool `[actions]`."""
        ...


@dataclasses.dataclass(frozen=True)
class Arcade:
    """A game, seen in one of two ways. Observation: uint8 `[4 n, 4 n, 3]`. Action: int32, as the game says.

    Attributes:
        game: its rules.
        observed: "full" or "partial"; states, rewards and ends are the same.
    """

    game: Any = Catcher()
    observed: str = field("full", OneOf(("full", "partial")))

    def __post_init__(self):
        check_fields(self)

    def __getattr__(self, name: str) -> Any:
        # There where the game has it, and missing where it has none.
        if name == "action_mask" and isinstance(self.game, Masked):
            return self._action_mask
        raise AttributeError(name)

    @property
    def name(self) -> str:
        """That of the game, with the view."""
        return f"{type(self.game).__name__}-{self.observed}"

    @property
    def default_params(self) -> Params:
        """1."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Pixels."""
        return Box(0, 255, (self.game.side * TILE, self.game.side * TILE, 3), jnp.uint8)

    def action_space(self, params: Params) -> Discrete:
        """Choices."""
        return Discrete(self.game.actions, names=getattr(self.game, "names", ()))

    def init(self, key: PRNGKey, params: Params) -> Any:
        """The game's start; consumes `key`."""
        return self.game.start(key)

    def transition(self, key: PRNGKey, state: Any, action: Array, params: Params) -> Any:
        """The game's move; consumes `key`."""
        return self.game.move(key, state, action)

    def observe(self, key: PRNGKey, state: Any, action: Array | None, params: Params) -> Array:
        """The board, or what the twin sees of it; `key` is not used."""
        return picture.tiles(self.game.board(state, self.observed == "full"), SPRITES)

    def reward(self, state: Any, action: Array, next_state: Any, params: Params) -> Array:
        """See the module's table."""
        return params.pay * self.game.earned(state, action, next_state)

    def terminal(self, state: Any, params: Params) -> Array:
        """The game is over."""
        return self.game.over(state)

    def truncated(self, state: Any, params: Params) -> Array:
        """After the game's most steps."""
        return state.time >= self.game.steps

    def render(self, state: Any, params: Params) -> Array:
        """The full view, four times as large."""
        return (
            picture.tiles(self.game.board(state, True), SPRITES).repeat(4, axis=0).repeat(4, axis=1)
        )

    def _action_mask(self, state: Any, params: Params) -> Array:
        return self.game.legal(state)


def _places(side: int) -> tuple[Array, Array]:
    return jnp.arange(side)[:, None], jnp.arange(side)[None]


def _fleets(side: int) -> np.ndarray:
    """Every way in which a ship of 3 cells and one of 2 can lie, bool `[F, side, side]`."""

    def lying(length):
        for row, column in itertools.product(range(side), range(side - length + 1)):
            ship = np.zeros((side, side), bool)
            ship[row, column : column + length] = True
            yield from (ship, ship.T)

    return np.stack(
        [
            long | short
            for long, short in itertools.product(lying(3), lying(2))
            if not (long & short).any()
        ]
    )


def _sprites() -> np.ndarray:
    night = (25, 25, 45)
    colors = (
        night,
        picture.WHITE,
        picture.RED,
        picture.GREEN,
        picture.PURPLE,
        picture.BLUE,
        picture.ORANGE,
    )
    return np.stack(
        [sprites.plain(color, TILE) for color in (*colors, picture.GRAY, (90, 90, 110))]
    )


SPRITES = _sprites()

GAMES = (Catcher, Skittles, Navigator, BattleShip)


def _variant(game: Any, observed: str) -> Any:
    return lambda: Arcade(game(), observed)


VARIANTS = {
    f"{game.__name__}{suffix}": _variant(game, observed)
    for game in GAMES
    for observed, suffix in (("full", ""), ("partial", "-Partial"))
}
