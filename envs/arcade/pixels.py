"""Card games and cart poles in pixels: states, rewards and ends of `memory` and `classic`, a full and a partial view.

What POPGym Arcade (Z. Wang et al., 2025) plays of POPGym's control and memory, drawn small; its views are our own.

| environment | rules | `full` shows | `partial` shows |
| --- | --- | --- | --- |
| `CardPixels(Autoencode(12))` | `memory.card_games` | all cards, on gold the one to name | card in sight, phase |
| `CardPixels(CountRecall(12))` | likewise | counts of cards and queries dealt, by kind | card and query in sight |
| `CartPolePixels` | `memory.MaskedCartPole` | cart, pole, bars for both velocities | cart and pole |
| `NoisyCartPolePixels` | likewise | the same | cart and pole, moved by noise |

The full views are Markov but for rounding to pixels. In each the best return is 1. A cart pole's noise is drawn with
the picture and is no part of the state, so that its twins, too, differ in nothing but what is seen.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from ..classic.cart_pole import CartPoleParams, CartPoleState
from ..memory.card_games import Autoencode, AutoencodeState, CountRecall, CountRecallState
from ..memory.masked_cart_pole import MaskedCartPole, NoisyParams
from . import sprites

__all__ = ["CARDS", "VARIANTS", "CardPixels", "CartPolePixels", "NoisyCartPolePixels"]

TWINS = ("full", "partial")
TILE, SIDE = 8, 32
MAX_KINDS, MAX_CARDS = 4, 99
TABLE, BACK, ANSWER, SUIT, GOLD, FIGURE = 0, 1, 2, 3, 7, 11
"""Sprites: of the empty table, a card's back, the sign to answer, four suits, four on gold, ten figures."""


@dataclasses.dataclass(frozen=True)
class CardPixels:
    """A card game in sprites of 8 x 8 pixels. Observation: uint8 `[8 rows, 8 columns, 3]`. Action: as the game says.

    Attributes:
        game: `Autoencode` or `CountRecall`, with at most 4 kinds and 99 cards.
        observed: "full" or "partial"; states, rewards and ends are the same.
    """

    game: Any = Autoencode(12)
    observed: str = field("full", OneOf(TWINS))

    def __post_init__(self):
        check_fields(self)
        if not isinstance(self.game, Autoencode | CountRecall):
            raise UsageError(
                f"CardPixels draws Autoencode and CountRecall, not {type(self.game).__name__}"
            )
        if self.game.num_kinds > MAX_KINDS or self.game.num_cards > MAX_CARDS:
            raise UsageError(
                f"CardPixels draws at most {MAX_KINDS} kinds and {MAX_CARDS} cards, "
                f"not {self.game.num_kinds} and {self.game.num_cards}"
            )

    @property
    def name(self) -> str:
        """The game's, with the view."""
        return f"{self.game.name}-pixels-{self.observed}"

    @property
    def default_params(self) -> Any:
        """The game's."""
        return self.game.default_params

    def observation_space(self, params: Any) -> Box:
        """Pixels."""
        if isinstance(self.game, Autoencode):
            rows, columns = 1 + -(-self.game.num_cards // 4), 4
        else:
            rows, columns = 1 + self.game.num_kinds, 5
        return Box(0, 255, (rows * TILE, columns * TILE, 3), jnp.uint8)

    def action_space(self, params: Any) -> Discrete:
        """The game's."""
        return self.game.action_space(params)

    def init(self, key: PRNGKey, params: Any) -> Any:
        """The game's; consumes `key`."""
        return self.game.init(key, params)

    def transition(self, key: PRNGKey, state: Any, action: Array, params: Any) -> Any:
        """The game's; consumes `key`."""
        return self.game.transition(key, state, action, params)

    def observe(self, key: PRNGKey, state: Any, action: Array | None, params: Any) -> Array:
        """The table, or what is in sight; `key` is not used."""
        return picture.tiles(self.board(state), CARDS)

    def reward(self, state: Any, action: Array, next_state: Any, params: Any) -> Array:
        """The game's."""
        return self.game.reward(state, action, next_state, params)

    def terminal(self, state: Any, params: Any) -> Array:
        """The game's."""
        return self.game.terminal(state, params)

    def board(self, state: Any) -> Array:
        """The sprite of every cell, int32 `[rows, columns]`: in the first row what is in sight, below what was."""
        front, below = (
            self._coding(state) if isinstance(self.game, Autoencode) else self._counting(state)
        )
        below = below if self.observed == "full" else jnp.full_like(below, BACK)
        return jnp.concatenate([front[None], below])

    def _coding(self, state: AutoencodeState) -> tuple[Array, Array]:
        n = self.game.num_cards
        cards, place = state.cards.astype(jnp.int32), np.arange(n)
        answers = self.game.answering(state)
        seen = jnp.where(state.time < n, SUIT + cards.at[state.time].get(mode="clip"), BACK)
        named = answers & (place == self.game.turn(state))
        table = jnp.where(place <= state.time, cards + jnp.where(named, GOLD, SUIT), BACK)
        table = jnp.pad(table, (0, -n % 4), constant_values=TABLE).reshape(-1, 4)
        return jnp.stack([seen, jnp.where(answers, ANSWER, TABLE), *[jnp.int32(TABLE)] * 2]), table

    def _counting(self, state: CountRecallState) -> tuple[Array, Array]:
        queries = self.game.num_cards // self.game.num_kinds - state.queries_left
        dealt = [
            FIGURE + count // power % 10 for count in (state.counts, queries) for power in (10, 1)
        ]
        front = jnp.full(5, TABLE).at[0].set(SUIT + state.card).at[2].set(GOLD + state.query)
        return front, jnp.stack([SUIT + jnp.arange(self.game.num_kinds), *dealt], 1)

    def render(self, state: Any, params: Any) -> Array:
        """The full view, four times as large."""
        full = picture.tiles(dataclasses.replace(self, observed="full").board(state), CARDS)
        return full.repeat(4, axis=0).repeat(4, axis=1)


@dataclasses.dataclass(frozen=True)
class CartPolePixels(MaskedCartPole):
    """A pole on a cart as a picture, uint8 `[32, 32, 3]`; angles are drawn four times as large, so that they are seen.

    Attributes:
        observed: "full" or "partial"; states, rewards and ends are the same.
    """

    observed: str = field("full", OneOf(TWINS))

    def observation_space(self, params: CartPoleParams) -> Box:
        """Pixels."""
        return Box(0, 255, (SIDE, SIDE, 3), jnp.uint8)

    def observe(
        self, key: PRNGKey, state: CartPoleState, action: Array | None, params: CartPoleParams
    ) -> Array:
        """The picture; `key` is not used."""
        return drawn(state, params, self.observed == "full")


@dataclasses.dataclass(frozen=True)
class NoisyCartPolePixels(CartPolePixels):
    """Seen in part, position and angle are drawn with Gaussian noise of standard deviation `params.noise`."""

    @property
    def default_params(self) -> NoisyParams:
        """200 steps, noise 0.1."""
        return NoisyParams()

    def observe(
        self, key: PRNGKey, state: CartPoleState, action: Array | None, params: NoisyParams
    ) -> Array:
        """The picture; consumes `key` if `observed` is "partial"."""
        if self.observed == "full":
            return drawn(state, params, True)
        x, theta = params.noise * jax.random.normal(key, (2,))
        return drawn(state.replace(x=state.x + x, theta=state.theta + theta), params, False)


def drawn(state: CartPoleState, params: CartPoleParams, velocities: bool) -> Array:
    """Cart and pole, and with `velocities` bars of length tanh(x' / 2) and tanh(theta' / 2), uint8 `[32, 32, 3]`."""
    cart = jnp.stack([16 + 12 * state.x / params.max_x, jnp.asarray(27.0, state.x.dtype)])
    tip = cart + 18 * jnp.stack([jnp.sin(4 * state.theta), -jnp.cos(4 * state.theta)])
    image = picture.rectangle(
        picture.canvas(SIDE, SIDE),
        cart - jnp.asarray([4.0, 2.0]),
        cart + jnp.asarray([4.0, 2.0]),
        picture.BLACK,
    )
    image = picture.line(image, cart, tip, 2.0, picture.RED)
    if velocities:
        for y, speed, color in (
            (1.0, state.x_dot, picture.BLUE),
            (4.0, state.theta_dot, picture.GREEN),
        ):
            ends = jnp.sort(jnp.stack([jnp.zeros_like(speed), 14 * jnp.tanh(speed / 2)])) + 16
            low, high = (jnp.stack([ends[i], jnp.asarray(y + 2 * i, ends.dtype)]) for i in range(2))
            image = picture.rectangle(image, low, high, color)
    return picture.to_uint8(image)


def _cards() -> np.ndarray:
    table, pages = (40, 110, 70), []
    for ground in (picture.WHITE, picture.YELLOW):
        for suit, bitmap in sprites.SUITS.items():
            color = picture.RED if suit in ("diamonds", "hearts") else picture.BLACK
            pages.append(sprites.stamp(bitmap, color, ground, TILE))
    figures = [
        sprites.stamp(sprites.FIGURES[str(i)], picture.WHITE, table, TILE) for i in range(10)
    ]
    answer = sprites.stamp("### ..# .## ... .#.", picture.WHITE, picture.PURPLE, TILE)
    return np.stack(
        [sprites.plain(table, TILE), sprites.plain(picture.BLUE, TILE), answer, *pages, *figures]
    )


CARDS = _cards()

VARIANTS = {
    "Autoencode-Pixels": CardPixels,
    "Autoencode-Pixels-Partial": lambda: CardPixels(observed="partial"),
    "CountRecall-Pixels": lambda: CardPixels(CountRecall(12)),
    "CountRecall-Pixels-Partial": lambda: CardPixels(CountRecall(12), "partial"),
    "CartPole-Pixels": CartPolePixels,
    "CartPole-Pixels-Partial": lambda: CartPolePixels("partial"),
    "NoisyCartPole-Pixels": NoisyCartPolePixels,
    "NoisyCartPole-Pixels-Partial": lambda: NoisyCartPolePixels("partial"),
}
