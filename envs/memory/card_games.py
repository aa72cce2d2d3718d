"""Card games that only memory wins: RepeatFirst, RepeatPrevious, CountRecall, Autoencode, of any length.

Rules of S. Morad, R. Kortvelesy, M. Bettini, S. Liwicki and A. Prorok, "POPGym: Benchmarking Partially Observable
Reinforcement Learning", ICLR 2023, and its program (version 1.0). A deck holds equally many cards of each kind (four
suits unless said) and is dealt one card a step, the first at reset. Every rewarded answer earns +s or -s, with s so
that perfect play returns 1; uniformly random answers return 2/A - 1 in expectation, A the number of answers: -0.5
with four suits.

| game | what is asked | rewarded | steps |
| --- | --- | --- | --- |
| RepeatFirst | the kind of the first card | each step | n - 1 |
| RepeatPrevious | the kind of the card k cards ago; k = 1 is the one in sight | from the k-th card on | n - 1 |
| CountRecall | how many cards of the queried kind were dealt so far | each step | n - 1 |
| Autoencode | first watch n cards, then name them, the last one first | each of the n answers | 2n - 1 |

Deviations: the deck is not in the state, where a planner would read the future; a card is drawn when it is dealt, from
what is left, which has the same distribution. The end of the deck terminates every game (POPGym truncates the first two
although nothing is earned after it). CountRecall has one answer more, since POPGym's cannot name a full count. Episodes
of POPGym's three difficulties have the numbers of cards in `VARIANTS`.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, MultiDiscrete, picture
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from ..arcade import sprites

__all__ = ["VARIANTS", "Autoencode", "CountRecall", "RepeatFirst", "RepeatPrevious"]

CARD = 16
RANKS = "A23456789TJQK"


@flax.struct.dataclass
class Params:
    """The return of perfect play, by which rewards are scaled."""

    best_return: Any = 1.0


def deal(key: PRNGKey, left: Array) -> tuple[Array, Array]:
    """Draws a card from a deck with `left[i]` cards of kind i: its kind (int32) and what is left; consumes `key`.

    An empty deck deals its last kind.
    """
    place = jax.random.randint(key, (), 0, jnp.maximum(jnp.sum(left), 1))
    card = jnp.minimum(jnp.sum(place >= jnp.cumsum(left), dtype=jnp.int32), left.shape[0] - 1)
    return card, left - (jnp.arange(left.shape[0]) == card)


def check_deck(name: str, num_cards: int, num_kinds: int) -> None:
    """Raises `UsageError` unless the deck holds equally many cards, at least one, of each of at least two kinds."""
    if num_cards % num_kinds:
        raise UsageError(
            f"{name} needs two or more kinds and a multiple of their number of cards, "
            f"not {num_cards} cards of {num_kinds} kinds"
        )


def full_deck(num_cards: int, num_kinds: int) -> Array:
    """The number of cards of each kind before the first is dealt, int32 `[num_kinds]`."""
    return jnp.full(num_kinds, num_cards // num_kinds, jnp.int32)


def judged(right: Array, share: float, params: Params) -> Array:
    """The reward of one answer: `share` of the best return, or minus that."""
    return jnp.where(right, 1.0, -1.0) * share * params.best_return


@flax.struct.dataclass
class RepeatFirstState:
    """The card in sight and the first one (int32), the deck `[kinds]`, steps made."""

    card: Array
    first: Array
    left: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class RepeatFirst:
    """Name the first card at every step. Observation and action: a kind, int32."""

    num_cards: int = field(52, AtLeast(2))
    num_kinds: int = field(4, AtLeast(2))

    def __post_init__(self):
        check_fields(self)
        check_deck("RepeatFirst", self.num_cards, self.num_kinds)

    @property
    def name(self) -> str:
        """With its number of cards."""
        return f"RepeatFirst-{self.num_cards}"

    @property
    def default_params(self) -> Params:
        """Perfect play returns 1."""
        return Params()

    def observation_space(self, params: Params) -> Discrete:
        """The card in sight."""
        return Discrete(self.num_kinds)

    def action_space(self, params: Params) -> Discrete:
        """A kind."""
        return Discrete(self.num_kinds)

    def init(self, key: PRNGKey, params: Params) -> RepeatFirstState:
        """Deals the first card; consumes `key`."""
        card, left = deal(key, full_deck(self.num_cards, self.num_kinds))
        return RepeatFirstState(card, card, left, jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: RepeatFirstState, action: Array, params: Params
    ) -> RepeatFirstState:
        """Deals the next card; consumes `key`."""
        card, left = deal(key, state.left)
        return RepeatFirstState(card, state.first, left, state.time + 1)

    def observe(
        self, key: PRNGKey, state: RepeatFirstState, action: Array | None, params: Params
    ) -> Array:
        """The card in sight."""
        return state.card

    def reward(
        self, state: RepeatFirstState, action: Array, next_state: RepeatFirstState, params: Params
    ) -> Array:
        """For naming the first card."""
        return judged(action == state.first, 1 / (self.num_cards - 1), params)

    def terminal(self, state: RepeatFirstState, params: Params) -> Array:
        """The deck is empty."""
        return state.time >= self.num_cards - 1

    def render(self, state: RepeatFirstState, params: Params) -> Array:
        """The card in sight and, on gold, the answer; uint8 `[48, 80, 3]`."""
        table = jnp.zeros((3, 5), jnp.int32)
        table = table.at[1, 1].set(face(state.card)).at[1, 3].set(face(state.first, GOLD))
        return picture.tiles(table, faces(self.num_kinds))


@flax.struct.dataclass
class RepeatPreviousState:
    """The last k cards, int32 `[k]`, card number i at i mod k; the deck `[kinds]`; steps made."""

    recent: Array
    left: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class RepeatPrevious:
    """Name the card k cards ago (1: the one in sight). Observation and action: a kind, int32."""

    num_cards: int = field(52, AtLeast(2))
    k: int = field(4, AtLeast(1))
    num_kinds: int = field(4, AtLeast(2))

    def __post_init__(self):
        check_fields(self)
        check_deck("RepeatPrevious", self.num_cards, self.num_kinds)
        if not self.k < self.num_cards:
            raise UsageError(
                f"RepeatPrevious looks back k = 1 to {self.num_cards - 1} cards, not {self.k}"
            )

    @property
    def name(self) -> str:
        """With its number of cards and k."""
        return f"RepeatPrevious-{self.num_cards}-{self.k}"

    @property
    def default_params(self) -> Params:
        """Perfect play returns 1."""
        return Params()

    def observation_space(self, params: Params) -> Discrete:
        """The card in sight."""
        return Discrete(self.num_kinds)

    def action_space(self, params: Params) -> Discrete:
        """A kind."""
        return Discrete(self.num_kinds)

    def init(self, key: PRNGKey, params: Params) -> RepeatPreviousState:
        """Deals the first card; consumes `key`."""
        card, left = deal(key, full_deck(self.num_cards, self.num_kinds))
        return RepeatPreviousState(
            jnp.zeros(self.k, jnp.int32).at[0].set(card), left, jnp.zeros((), jnp.int32)
        )

    def transition(
        self, key: PRNGKey, state: RepeatPreviousState, action: Array, params: Params
    ) -> RepeatPreviousState:
        """Deals the next card over the oldest; consumes `key`."""
        card, left = deal(key, state.left)
        time = state.time + 1
        return RepeatPreviousState(state.recent.at[time % self.k].set(card), left, time)

    def observe(
        self, key: PRNGKey, state: RepeatPreviousState, action: Array | None, params: Params
    ) -> Array:
        """The card in sight."""
        return state.recent[state.time % self.k]

    def reward(
        self,
        state: RepeatPreviousState,
        action: Array,
        next_state: RepeatPreviousState,
        params: Params,
    ) -> Array:
        """For naming the oldest of the last k cards; 0 until there are k."""
        earned = judged(action == self.sought(state), 1 / (self.num_cards - self.k), params)
        return jnp.where(state.time + 1 >= self.k, earned, 0.0)

    def terminal(self, state: RepeatPreviousState, params: Params) -> Array:
        """The deck is empty."""
        return state.time >= self.num_cards - 1

    def sought(self, state: RepeatPreviousState) -> Array:
        """The answer, once k cards are dealt: the next card will lie over it."""
        return state.recent[(state.time + 1) % self.k]

    def render(self, state: RepeatPreviousState, params: Params) -> Array:
        """The last k cards, newest at the right, the answer on gold; uint8 `[48, 16 (k + 2), 3]`."""
        age = jnp.arange(self.k - 1, -1, -1)
        row = face(
            state.recent[(state.time - age) % self.k], jnp.where(age == self.k - 1, GOLD, PLAIN)
        )
        row = jnp.where(age <= state.time, row, BACK)
        return picture.tiles(
            jnp.zeros((3, self.k + 2), jnp.int32).at[1, 1:-1].set(row), faces(self.num_kinds)
        )


@flax.struct.dataclass
class CountRecallState:
    """Card and query in sight (int32); both decks and how many of each kind were dealt, `[kinds]`; steps made."""

    card: Array
    query: Array
    left: Array
    queries_left: Array
    counts: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class CountRecall:
    """Say how many cards of the queried kind were dealt so far, the one in sight included.

    Observation: (card, query), int32 `[2]`. Action: a count from 0 to all cards of a kind, int32. Queries are dealt
    from a second deck.
    """

    num_cards: int = field(52, AtLeast(2))
    num_kinds: int = field(2, AtLeast(2))

    def __post_init__(self):
        check_fields(self)
        check_deck("CountRecall", self.num_cards, self.num_kinds)

    @property
    def name(self) -> str:
        """With its numbers of cards and kinds."""
        return f"CountRecall-{self.num_cards}-{self.num_kinds}"

    @property
    def default_params(self) -> Params:
        """Perfect play returns 1."""
        return Params()

    def observation_space(self, params: Params) -> MultiDiscrete:
        """Card and query."""
        return MultiDiscrete((self.num_kinds, self.num_kinds))

    def action_space(self, params: Params) -> Discrete:
        """A count."""
        return Discrete(self.num_cards // self.num_kinds + 1)

    def init(self, key: PRNGKey, params: Params) -> CountRecallState:
        """Deals the first card and query; consumes `key`."""
        deck = full_deck(self.num_cards, self.num_kinds)
        return self._dealt(key, deck, deck, jnp.zeros_like(deck), jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: CountRecallState, action: Array, params: Params
    ) -> CountRecallState:
        """Deals the next card and query; consumes `key`."""
        return self._dealt(key, state.left, state.queries_left, state.counts, state.time + 1)

    def _dealt(self, key, left, queries_left, counts, time) -> CountRecallState:
        card_key, query_key = jax.random.split(key)
        card, left = deal(card_key, left)
        query, queries_left = deal(query_key, queries_left)
        counts = counts + (jnp.arange(self.num_kinds) == card)
        return CountRecallState(card, query, left, queries_left, counts, time)

    def observe(
        self, key: PRNGKey, state: CountRecallState, action: Array | None, params: Params
    ) -> Array:
        """Card and query."""
        return jnp.stack([state.card, state.query])

    def reward(
        self, state: CountRecallState, action: Array, next_state: CountRecallState, params: Params
    ) -> Array:
        """For the count of the query in sight when the answer was given."""
        return judged(action == state.counts[state.query], 1 / (self.num_cards - 1), params)

    def terminal(self, state: CountRecallState, params: Params) -> Array:
        """The deck is empty."""
        return state.time >= self.num_cards - 1

    def render(self, state: CountRecallState, params: Params) -> Array:
        """Card, query on gold, and the answer in figures; uint8 `[48, 128, 3]`."""
        count = state.counts[state.query]
        figures = DIGIT + jnp.stack([count // 100 % 10, count // 10 % 10, count % 10])
        table = (
            jnp.zeros((3, 8), jnp.int32)
            .at[1, 1]
            .set(face(state.card))
            .at[1, 3]
            .set(face(state.query, GOLD))
        )
        return picture.tiles(table.at[1, 4:7].set(figures), faces(self.num_kinds))


@flax.struct.dataclass
class AutoencodeState:
    """The cards dealt so far, int8 `[n]`, 0 beyond; the deck `[kinds]`; steps made."""

    cards: Array
    left: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Autoencode:
    """Watch all cards, then name them backwards.

    Observation: (whether to answer, card), int32 `[2]`; the card is 0 once the first answer is given. Action: a kind,
    int32, ignored while watching.
    """

    num_cards: int = field(52, AtLeast(2))
    num_kinds: int = field(4, Between(2, 127))

    def __post_init__(self):
        check_fields(self)
        check_deck("Autoencode", self.num_cards, self.num_kinds)

    @property
    def name(self) -> str:
        """With its number of cards."""
        return f"Autoencode-{self.num_cards}"

    @property
    def default_params(self) -> Params:
        """Perfect play returns 1."""
        return Params()

    def observation_space(self, params: Params) -> MultiDiscrete:
        """Phase and card."""
        return MultiDiscrete((2, self.num_kinds))

    def action_space(self, params: Params) -> Discrete:
        """A kind."""
        return Discrete(self.num_kinds)

    def init(self, key: PRNGKey, params: Params) -> AutoencodeState:
        """Deals the first card; consumes `key`."""
        card, left = deal(key, full_deck(self.num_cards, self.num_kinds))
        cards = jnp.zeros(self.num_cards, jnp.int8).at[0].set(card.astype(jnp.int8))
        return AutoencodeState(cards, left, jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: AutoencodeState, action: Array, params: Params
    ) -> AutoencodeState:
        """Deals the next card while there is one; consumes `key`."""
        card, left = deal(key, state.left)
        time = state.time + 1
        cards = state.cards.at[time].set(
            card.astype(jnp.int8), mode="drop"
        )  # out of bounds after the last card
        return AutoencodeState(cards, jnp.where(time < self.num_cards, left, state.left), time)

    def observe(
        self, key: PRNGKey, state: AutoencodeState, action: Array | None, params: Params
    ) -> Array:
        """Phase and card."""
        card = state.cards.at[state.time].get(mode="fill", fill_value=0)
        return jnp.stack([self.answering(state).astype(jnp.int32), card.astype(jnp.int32)])

    def reward(
        self, state: AutoencodeState, action: Array, next_state: AutoencodeState, params: Params
    ) -> Array:
        """For the card whose turn it was; 0 while watching."""
        earned = judged(action == state.cards[self.turn(state)], 1 / self.num_cards, params)
        return jnp.where(self.answering(state), earned, 0.0)

    def terminal(self, state: AutoencodeState, params: Params) -> Array:
        """All cards are named."""
        return state.time >= 2 * self.num_cards - 1

    def answering(self, state: AutoencodeState) -> Array:
        """Whether all cards are dealt."""
        return state.time >= self.num_cards - 1

    def turn(self, state: AutoencodeState) -> Array:
        """The place of the card to be named next, int32."""
        return jnp.clip(2 * (self.num_cards - 1) - state.time, 0, self.num_cards - 1)

    def render(self, state: AutoencodeState, params: Params) -> Array:
        """All cards in rows of 13, the one to name on gold, others face down while answers are given."""
        place = jnp.arange(self.num_cards)
        answering, turn = self.answering(state), self.turn(state)
        row = face(
            state.cards.astype(jnp.int32), jnp.where(answering & (place == turn), GOLD, PLAIN)
        )
        row = jnp.where((place <= state.time) & ~(answering & (place < turn)), row, BACK)
        table = (
            jnp.zeros(-(-self.num_cards // 13) * 13, jnp.int32)
            .at[: self.num_cards]
            .set(row)
            .reshape(-1, 13)
        )
        return picture.tiles(jnp.pad(table, 1), faces(self.num_kinds))


PLAIN, GOLD, BACK, DIGIT = 2, 15, 1, 28
"""Where sprites of 13 plain faces, 13 faces on gold, the back of a card and ten figures begin; 0 is the table."""


def face(kind: Array, style: Any = PLAIN) -> Array:
    """The sprite of a kind; from the fourteenth on, pictures repeat."""
    return style + kind % 13


def faces(num_kinds: int) -> np.ndarray:
    """Sprites uint8 `[38, 16, 16, 3]`: four suits, or ranks where there are more kinds."""
    table = (40, 110, 70)
    pages = []
    for ground in (picture.WHITE, picture.YELLOW):
        for kind in range(13):
            suit = list(sprites.SUITS)[kind % 4]
            bitmap = sprites.SUITS[suit] if num_kinds <= 4 else sprites.FIGURES[RANKS[kind]]
            red = num_kinds <= 4 and suit in ("diamonds", "hearts")
            color = picture.RED if red else picture.BLACK
            pages.append(
                sprites.framed(
                    sprites.stamp(bitmap, color, ground, CARD, 1 + (num_kinds > 4)), table
                )
            )
    back = sprites.framed(sprites.plain(picture.BLUE, CARD), table)
    figures = [
        sprites.stamp(sprites.FIGURES[str(i)], picture.WHITE, table, CARD, 2) for i in range(10)
    ]
    return np.stack([sprites.plain(table, CARD), back, *pages, *figures])


VARIANTS = {
    "RepeatFirst-Easy": RepeatFirst,
    "RepeatFirst-Medium": lambda: RepeatFirst(416),
    "RepeatFirst-Hard": lambda: RepeatFirst(832),
    "RepeatPrevious-Easy": RepeatPrevious,
    "RepeatPrevious-Medium": lambda: RepeatPrevious(104, 32),
    "RepeatPrevious-Hard": lambda: RepeatPrevious(156, 64),
    "CountRecall-Easy": CountRecall,
    "CountRecall-Medium": lambda: CountRecall(104, 4),
    "CountRecall-Hard": lambda: CountRecall(208, 13),
    "Autoencode-Easy": Autoencode,
    "Autoencode-Medium": lambda: Autoencode(104),
    "Autoencode-Hard": lambda: Autoencode(156),
}
