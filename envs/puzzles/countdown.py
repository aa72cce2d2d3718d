"""Countdown: make the target from the numbers by + - * /, two numbers at a time; exact fractions in int32.

The numbers round of the television game, and with target 24 the game of 24; as a task for language models in Gandhi et
al., "Stream of Search", 2024. An action takes two of the numbers that are left and puts the result in the place of the
first. `score` judges answers as text by the same rules (`expressions.py`).

| an episode ends | outcome |
| --- | --- |
| when the result is the target (with `use_all`: and no number is left) | 1 |
| when no legal move is left | 0 |
| by an action that the mask forbids | `-illegal_cost` |

`rewards="sparse"` pays the outcome at the end. `"dense"` pays at every step by how much the promise grew, half of the
closeness 1 / (1 + |v - t| / t) of the number v nearest to the target t, and at the end what is missing to the outcome.

A move is legal if its result is (`rules`), and if the fraction before it is reduced, and the products that it is made
of, are at most 2^31 - 1 in size: what would overflow is refused and never wraps.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import AtLeast, Between, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from ..arcade.sprites import FIGURES, stamp
from .answers import score_many
from .arithmetic import apply_move, legal_moves, moves
from .expressions import RULES, score, solve
from .given import Generator, Given, check_generator
from .items import as_items
from .rewards import REWARDS, earned, unless

__all__ = [
    "VARIANTS",
    "Countdown",
    "Level",
    "Reverse",
    "Uniform",
    "given",
    "moves",
    "score",
    "score_many",
    "solve",
]


@flax.struct.dataclass
class Level:
    """`numbers` int32 `[N]` and `target` int32 `[]`, all over 0."""

    numbers: Array
    target: Array


@flax.struct.dataclass
class Params:
    """What an action that the mask forbids costs."""

    illegal_cost: Any = 1.0


@flax.struct.dataclass
class State:
    """What is left, and how it ended.

    Attributes:
        num: int32 `[N]`, numerators of reduced fractions.
        den: int32 `[N]`, denominators over 0.
        left: bool `[N]`, places that are not used up.
        target: int32 `[]`.
        legal: bool `[A]`, the mask.
        solved: bool `[]`.
        illegal: bool `[]`, whether an illegal action ended it.
        time: int32 `[]`, moves made.
    """

    num: Array
    den: Array
    left: Array
    target: Array
    legal: Array
    solved: Array
    illegal: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Numbers from `low` to `high` and a target from `least` to `most`, all uniform; some have no solution."""

    num_numbers: int = field(4, Between(2, 8))
    low: int = field(1, AtLeast(1))
    high: int = field(20, AtLeast(1))
    least: int = field(10, AtLeast(1))
    most: int = field(100, AtLeast(1))

    def __post_init__(self) -> None:
        """Refuses empty ranges."""
        check_fields(self)
        _check_range(self.low, self.high)
        if not self.least <= self.most <= 10**6:
            raise UsageError(
                f"targets are from least to most, at most 10^6, not from {self.least} to {self.most}"
            )

    def __call__(self, key: PRNGKey) -> Level:
        """Draws; consumes `key`."""
        number_key, target_key = jax.random.split(key)
        numbers = jax.random.randint(number_key, (self.num_numbers,), self.low, self.high + 1)
        return Level(numbers, jax.random.randint(target_key, (), self.least, self.most + 1))


@dataclasses.dataclass(frozen=True)
class Reverse:
    """Numbers from `low` to `high`, and as target what random legal moves make of all of them: solvable.

    Moves are drawn uniformly among those of the natural rules whose result is at most `most`, of which there is always
    one: of two numbers the greater less the other, or their quotient if they are equal.
    """

    num_numbers: int = field(4, Between(2, 8))
    low: int = field(1, AtLeast(1))
    high: int = field(20, AtLeast(1))
    most: int = field(100, AtLeast(1))

    def __post_init__(self) -> None:
        """Refuses empty ranges, and numbers that are over `most` from the start."""
        check_fields(self)
        _check_range(self.low, self.high)
        if not self.high <= self.most <= 10**6:
            raise UsageError(
                f"most={self.most} must be at least high={self.high}, and at most 10^6"
            )

    def __call__(self, key: PRNGKey) -> Level:
        """Draws; consumes `key`."""
        key, number_key = jax.random.split(key)
        n, table = self.num_numbers, jnp.asarray(moves(self.num_numbers))
        numbers = jax.random.randint(number_key, (n,), self.low, self.high + 1)
        num, den, left = numbers, jnp.ones_like(numbers), jnp.ones(n, bool)
        result = num[0]
        for move_key in jax.random.split(key, n - 1):
            mask = legal_moves(num, den, left, "natural", self.most)
            move = table[jax.random.categorical(move_key, jnp.where(mask, 0.0, -jnp.inf))]
            result, _ = apply_move(num, den, move, "natural")
            num, left = num.at[move[0]].set(result), left.at[move[1]].set(False)
        return Level(numbers, result)


def _check_range(low: int, high: int) -> None:
    if not low <= high <= 10**6:
        raise UsageError(f"numbers are from low to high, at most 10^6, not from {low} to {high}")


def given(
    *problems: tuple[tuple[int, ...], int],
    rules: str = "rational",
    use_all: bool = True,
    solvable: bool = True,
) -> Given:
    """A generator of given problems `(numbers, target)`, all with as many numbers.

    Raises:
        UsageError: a problem has numbers that are not over 0, or, unless `solvable` is False, no solution by the rules
            (a search of milliseconds for four numbers, seconds for six).
    """
    for numbers, target in problems:
        if len(numbers) < 2 or min(*numbers, target) < 1 or max(*numbers, target) > 10**6:
            raise UsageError(
                f"Countdown takes two numbers or more and a target, from 1 to 10^6, not {numbers}, {target}"
            )
        if solvable and solve(numbers, target, rules=rules, use_all=use_all) is None:
            raise UsageError(f"{target} cannot be made from {numbers} by the {rules} rules")
    return Given.of(
        *(Level(np.asarray(numbers, np.int32), np.int32(target)) for numbers, target in problems)
    )


@dataclasses.dataclass(frozen=True)
class Countdown:
    """Observation: float32 `[N + 1, 6]`, a row for each number and the last for the target. Action: a row of `moves`.

    Columns: whether it is left; whether it is the target; its value / 100, within 10; sign(v) log(1 + |num|); log(den);
    (v - t) / t, within 8. Rows of numbers that are used up are 0.

    Attributes:
        generator: `Reverse`, `Uniform`, what `given` makes, or any that draws a `Level` of N numbers.
        rules: which results are legal: "rational" all, "integer" whole ones, "natural" whole ones over 0.
        use_all: whether every number must be used; otherwise the first result that is the target ends it.
        rewards: "dense" or "sparse".
    """

    generator: Generator = Reverse()
    rules: str = field("natural", OneOf(RULES))
    use_all: bool = True
    rewards: str = field("sparse", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of a `Level`."""
        check_fields(self)
        if not 2 <= self.num_numbers <= 8:
            raise UsageError(f"Countdown takes 2 to 8 numbers, not {self.num_numbers}")

    @property
    def num_numbers(self) -> int:
        """N."""
        return check_generator(
            "Countdown", self.generator, Level, "Reverse, Uniform, given(...)"
        ).numbers.shape[0]

    @property
    def name(self) -> str:
        """With its numbers and rules."""
        return f"Countdown-{self.num_numbers}-{self.rules}"

    @property
    def default_params(self) -> Params:
        """An illegal action costs 1."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Rows of features."""
        return Box(-22.0, 22.0, (self.num_numbers + 1, 6))

    def action_space(self, params: Params) -> Discrete:
        """3 N (N - 1) moves."""
        return Discrete(3 * self.num_numbers * (self.num_numbers - 1))

    def item_moves(self, params: Params) -> np.ndarray:
        """Of each action the operation and the rows of its two numbers, int32 `[A, 3]`."""
        return moves(self.num_numbers)[:, [2, 0, 1]]

    def sample_level(self, key: PRNGKey, params: Params) -> Level:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Level, params: Params) -> State:
        """No move made; deterministic."""
        num = jnp.asarray(level.numbers, jnp.int32)
        den, left, no = jnp.ones_like(num), jnp.ones(num.shape, bool), jnp.zeros((), bool)
        legal, target = (
            legal_moves(num, den, left, self.rules),
            jnp.asarray(level.target, jnp.int32),
        )
        return State(num, den, left, target, legal, no, no, jnp.zeros((), jnp.int32))

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Legal moves, bool `[A]`."""
        return state.legal

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Makes a move, or ends by an illegal one; deterministic."""
        legal, over = state.legal[action], self.terminal(state, params)
        move, slot = jnp.asarray(moves(self.num_numbers))[action], np.arange(self.num_numbers)
        top, low = apply_move(state.num, state.den, move, self.rules)
        left = state.left & (slot != move[1])
        num, den = (
            jnp.where(slot == move[0], top, state.num),
            jnp.where(slot == move[0], low, state.den),
        )
        solved = (top == state.target) & (low == 1)
        if self.use_all:
            solved &= jnp.sum(left) == 1
        mask = legal_moves(num, den, left, self.rules)
        moved = State(num, den, left, state.target, mask, solved, state.illegal, state.time + 1)
        return unless(over | ~legal, moved, state).replace(illegal=state.illegal | (~legal & ~over))

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """All of the state."""
        num, den = jnp.append(state.num, state.target).astype(jnp.float32), jnp.append(state.den, 1)
        value, goal = num / den, state.target.astype(jnp.float32)
        target = jnp.arange(len(num)) == len(num) - 1
        logs = jnp.sign(num) * jnp.log1p(jnp.abs(num)), jnp.log(den.astype(jnp.float32))
        columns = (
            target,
            jnp.clip(value / 100, -10, 10),
            *logs,
            jnp.clip((value - goal) / goal, -8, 8),
        )
        there = jnp.append(state.left, True)
        return jnp.where(there[:, None], as_items(there, *columns), 0.0)

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table."""
        ends = self.terminal(next_state, params), self.terminal(state, params)
        return earned(
            self.rewards,
            self.outcome(state, params),
            self.outcome(next_state, params),
            ends[1],
            ends[0],
        )

    def terminal(self, state: State, params: Params) -> Array:
        """Solved, ended by an illegal action, or no legal move left."""
        return state.solved | state.illegal | ~jnp.any(state.legal)

    def outcome(self, state: State, params: Params) -> Array:
        """What an episode that stood still here would have returned by dense rewards; 0 before the first move."""
        last = jnp.where(state.illegal, -params.illegal_cost, jnp.where(state.solved, 1.0, 0.0))
        begun = jnp.where(state.time > 0, self.promise(state), 0.0)
        return jnp.where(self.terminal(state, params), last, begun)

    def promise(self, state: State) -> Array:
        """Half of how close the nearest number is to the target, float32 from 0 to 0.5."""
        value, goal = state.num.astype(jnp.float32) / state.den, state.target.astype(jnp.float32)
        return 0.5 * jnp.max(jnp.where(state.left, 1 / (1 + jnp.abs(value - goal) / goal), 0.0))

    def heuristic(self, state: State, params: Params) -> Array:
        """The promise as a guess of the chance to solve it, less what dense rewards have already paid."""
        paid = self.outcome(state, params) if self.rewards == "dense" else 0.0
        return jnp.where(self.terminal(state, params), 0.0, self.promise(state) - paid).astype(
            jnp.float32
        )

    def render(self, state: State, params: Params) -> Array:
        """Numbers that are left, below them the target, green if solved, red if over; uint8 `[12 (N + 1), W, 3]`."""
        num, den = jnp.append(state.num, state.target), jnp.append(state.den, 1)
        rows = jnp.concatenate([jnp.where(num < 0, MINUS, BLANK)[None], _figures(jnp.abs(num))])
        if self.rules == "rational":
            below = _figures(den)
            lengths = jnp.sum(below != BLANK, axis=0)
            below = jnp.take_along_axis(
                below, (np.arange(10)[:, None] - lengths[None]) % 10, axis=0
            )  # from the left
            broken = (den > 1)[None]
            rows = jnp.concatenate(
                [rows, jnp.where(broken, SLASH, BLANK), jnp.where(broken, below, BLANK)]
            )
        fate = jnp.where(state.solved, 2, jnp.where(self.terminal(state, params), 3, 1))
        ground = jnp.append(jnp.where(state.left, 0, 4), fate)
        there = jnp.append(state.left, True)
        return picture.tiles(
            jnp.where(there[None], rows, BLANK).T + len(SIGNS) * ground[:, None], SPRITES
        )


def _figures(values: Array) -> Array:
    """The sprites of numbers `[N]` from 0 on, int32 `[10, N]`, to the right."""
    parts = values[None] // POWERS[:, None]
    return jnp.where((parts > 0) | (POWERS == 1)[:, None], parts % 10 + 1, BLANK)


SIGNS = [
    "... ... ... ... ...",
    *(FIGURES[str(i)] for i in range(10)),
    "... ... ### ... ...",
    "..# ..# .#. #.. #..",
]
BLANK, MINUS, SLASH = 0, 11, 12
POWERS = 10 ** np.arange(9, -1, -1, dtype=np.int32)
GROUNDS = ((255, 255, 255), (250, 235, 170), (150, 220, 160), (240, 160, 150), (215, 215, 215))
"""Of a number, of the target as long as it is open, solved and missed, and of a place that is used up."""
SPRITES = np.stack(
    [stamp(sign, picture.BLACK, ground, 12, 2) for ground in GROUNDS for sign in SIGNS]
)

VARIANTS = {
    "Countdown-3": lambda: Countdown(Reverse(3)),
    "Countdown-4": Countdown,
    "Countdown-6": lambda: Countdown(Reverse(6, 1, 100, 999), use_all=False),
    "Game24": lambda: Countdown(Uniform(4, 1, 13, 24, 24), rules="rational"),
}
