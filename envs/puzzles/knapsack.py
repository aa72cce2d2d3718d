"""Knapsack: put items into a sack that carries so much, one at a time, for the greatest value together.

An action packs an item; legal are items that are not packed and that still fit. The episode ends when none does, or
with an item that the mask forbids, which costs `illegal_cost` on top of what is packed. The outcome is the value in the
sack. The three kinds of instances are those of Pisinger, "Where are the hard knapsack problems?", 2005.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import AtLeast, OneOf, Positive, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Generator, Given, check_generator
from .items import as_items
from .rewards import REWARDS, reward_of_outcome, unless

__all__ = ["VARIANTS", "Integer", "Items", "Knapsack", "Level", "given"]

KINDS = ("uniform", "correlated")


@flax.struct.dataclass
class Level:
    """`weight` and `value` `[N]` over 0 and `capacity` `[]`; float32, or int32 where instances are whole numbers."""

    weight: Array
    value: Array
    capacity: Array


@flax.struct.dataclass
class Params:
    """What packing an item that the mask forbids costs."""

    illegal_cost: Any = 1.0


@flax.struct.dataclass
class State:
    """The `level` and its `greatest` weight and value, float32 `[2]`, found once an episode, asked for in every step.

    What is `packed`, bool `[N]`; `room` left; whether an `illegal` action ended it.
    """

    level: Level
    greatest: Array
    packed: Array
    room: Array
    illegal: Array


@dataclasses.dataclass(frozen=True)
class Items:
    """Weights uniform in (0, 1), and values as well, or within 0.1 of the weights if `kind="correlated"`.

    The capacity is `tightness` times the number of items: 12.5 for 50 items by default, half of all weight.
    """

    num_items: int = field(50, AtLeast(1))
    tightness: float = field(0.25, Positive())
    kind: str = field("uniform", OneOf(KINDS))

    def __post_init__(self) -> None:
        """Refuses sacks into which no item may go."""
        check_fields(self)
        if self.tightness * self.num_items < 1:
            raise UsageError(
                f"a sack of capacity tightness * num_items = {self.tightness * self.num_items:g} may take no item; "
                "it must be at least 1"
            )

    def __call__(self, key: PRNGKey) -> Level:
        """Draws; consumes `key`."""
        weight_key, value_key = jax.random.split(key)
        weight = jax.random.uniform(weight_key, (self.num_items,), minval=0.001)
        value = jax.random.uniform(value_key, (self.num_items,), minval=0.001)
        if self.kind == "correlated":
            value = jnp.maximum(weight + 0.2 * value - 0.1, 0.001)
        return Level(weight, value, jnp.float32(self.tightness * self.num_items))


@dataclasses.dataclass(frozen=True)
class Integer:
    """Weights and values uniform from 1 to `most`; the capacity is a share of all weight and takes any one item."""

    num_items: int = field(20, AtLeast(1))
    most: int = field(100, AtLeast(1))
    share: float = field(0.5, Positive())

    def __post_init__(self) -> None:
        """Refuses sums beyond int32 or float32's whole numbers."""
        check_fields(self)
        if self.num_items * self.most > 2**24:
            raise UsageError(
                f"num_items * most = {self.num_items * self.most} must be at most 2^24"
            )

    def __call__(self, key: PRNGKey) -> Level:
        """Draws; consumes `key`."""
        weight, value = jax.random.randint(key, (2, self.num_items), 1, self.most + 1)
        capacity = jnp.floor(self.share * jnp.sum(weight)).astype(jnp.int32)
        return Level(weight, value, jnp.maximum(capacity, jnp.max(weight)))


def given(*problems: tuple[tuple[float, ...], tuple[float, ...], float]) -> Given:
    """A generator of given problems (weights, values, capacity), all with as many items; int32 if all are whole.

    Raises:
        UsageError: lengths differ, a number is not over 0, or no item fits.
    """
    whole = all(isinstance(x, int) for w, v, c in problems for x in (*w, *v, c))
    kind, levels = np.int32 if whole else np.float32, []
    for weights, values, capacity in problems:
        if len(weights) != len(values) or not weights or min(*weights, *values) <= 0:
            raise UsageError(
                f"Knapsack takes as many weights as values, all over 0, not {weights} and {values}"
            )
        if min(weights) > capacity:
            raise UsageError(
                f"no item fits into a sack of capacity {capacity}: the least weight is {min(weights)}"
            )
        levels.append(Level(np.asarray(weights, kind), np.asarray(values, kind), kind(capacity)))
    return Given.of(*levels)


@dataclasses.dataclass(frozen=True)
class Knapsack:
    """Observation: float32 `[N, 5]`, a row for each item. Action: an item.

    Columns: weight and value, as shares of the greatest; weight / room, within 2; packed; fits.

    Attributes:
        generator: `Items`, `Integer`, what `given` makes, or any that draws a `Level` of N items.
        rewards: "dense", the value of each item as it is packed, or "sparse", all of it at the end.
    """

    generator: Generator = Items()
    rewards: str = field("dense", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of a `Level`."""
        check_fields(self)
        _ = self.num_items

    @property
    def num_items(self) -> int:
        """N."""
        return check_generator(
            "Knapsack", self.generator, Level, "Items, Integer, given(...)"
        ).weight.shape[0]

    @property
    def name(self) -> str:
        """With its number of items."""
        return f"Knapsack-{self.num_items}"

    @property
    def default_params(self) -> Params:
        """An illegal item costs 1."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Rows of features."""
        return Box(0.0, 2.0, (self.num_items, 5))

    def action_space(self, params: Params) -> Discrete:
        """An item."""
        return Discrete(self.num_items)

    def sample_level(self, key: PRNGKey, params: Params) -> Level:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Level, params: Params) -> State:
        """An empty sack; deterministic."""
        level = jax.tree.map(jnp.asarray, level)
        greatest = jnp.stack([jnp.max(level.weight), jnp.max(level.value)]).astype(jnp.float32)
        return State(
            level,
            greatest,
            jnp.zeros(level.weight.shape, bool),
            level.capacity,
            jnp.zeros((), bool),
        )

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Items that are not packed and fit, bool `[N]`."""
        return ~state.packed & (state.level.weight <= state.room)

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Packs an item, or ends by an illegal one; deterministic."""
        legal, over = self.action_mask(state, params)[action], self.terminal(state, params)
        packed = state.packed | (np.arange(self.num_items) == action)
        moved = state.replace(packed=packed, room=state.room - state.level.weight[action])
        return unless(over | ~legal, moved, state).replace(illegal=state.illegal | (~legal & ~over))

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """All of the state, scaled."""
        weight, value = (
            state.level.weight.astype(jnp.float32),
            state.level.value.astype(jnp.float32),
        )
        weight_scale, value_scale = 1 / state.greatest
        tight = jnp.clip(weight * (1 / jnp.maximum(state.room.astype(jnp.float32), 1e-6)), 0, 2)
        fits = self.action_mask(state, params)
        return as_items(weight * weight_scale, value * value_scale, tight, state.packed, fits)

    reward = reward_of_outcome

    def terminal(self, state: State, params: Params) -> Array:
        """Nothing fits any more, or an illegal action ended it."""
        return state.illegal | ~jnp.any(self.action_mask(state, params))

    def outcome(self, state: State, params: Params) -> Array:
        """The value in the sack, less the cost of an illegal action; float32."""
        value = jnp.sum(jnp.where(state.packed, state.level.value, 0)).astype(jnp.float32)
        return value - jnp.where(state.illegal, params.illegal_cost, 0.0)

    def upper_bound(self, state: State, params: Params) -> Array:
        """Dantzig's bound: as if items could be cut, in the order of value by weight; float32 `[]`, O(N^2)."""
        weight, value = (
            state.level.weight.astype(jnp.float32),
            state.level.value.astype(jnp.float32),
        )
        free, place = self.action_mask(state, params), np.arange(self.num_items)
        dear = (value / weight)[None] > (value / weight)[:, None]
        same = ((value / weight)[None] == (value / weight)[:, None]) & (
            place[None] < place[:, None]
        )
        ahead = jnp.sum(
            jnp.where((dear | same) & free[None], weight[None], 0.0), axis=1
        )  # weight taken before each
        share = jnp.clip((state.room.astype(jnp.float32) - ahead) / weight, 0, 1)
        more = jnp.sum(jnp.where(free, share * value, 0.0))
        paid = 0.0 if self.rewards == "dense" else self.outcome(state, params)
        return jnp.where(self.terminal(state, params), 0.0, more + paid).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """The upper bound, which is close."""
        return self.upper_bound(state, params)

    def render(self, state: State, params: Params) -> Array:
        """A bar as long as its weight for each item, the darker the dearer by weight; right of it the sack.

        Packed items are blue, those that fit green, others grey; uint8 `[8 N, 168, 3]`.
        """
        n, weight = self.num_items, state.level.weight.astype(jnp.float32)
        worth = state.level.value / weight
        shade = 0.35 + 0.65 * worth / jnp.max(worth)
        fits = self.action_mask(state, params)
        ink = jnp.where(state.packed[:, None], jnp.array([picture.BLUE]), jnp.array([picture.GRAY]))
        ink = jnp.where(fits[:, None], jnp.array([picture.GREEN]), ink).astype(jnp.float32)
        color = 255 - (255 - ink) * shade[:, None]
        x, y = np.arange(128)[None, :, None], np.arange(8 * n)[:, None, None] // 8
        length = 4 + 120 * weight / state.greatest[0]
        gap = (np.arange(8 * n) % 8 == 7)[:, None, None]
        bars = jnp.where((x < length[y]) & ~gap, color[y[:, 0, 0]][:, None], 255.0)
        full = 1 - state.room.astype(jnp.float32) / state.level.capacity
        inside = (np.arange(8 * n)[:, None, None] >= 8 * n * (1 - full)) * np.ones((1, 32, 1), bool)
        sack = jnp.where(inside, jnp.array([[picture.BLUE]], jnp.float32), 225.0)
        edge = jnp.full((8 * n, 8, 3), 255.0)
        return picture.to_uint8(jnp.concatenate([bars, edge, sack], axis=1))


VARIANTS = {
    "Knapsack-20": lambda: Knapsack(Items(20)),
    "Knapsack-50": Knapsack,
    "Knapsack-50-Correlated": lambda: Knapsack(Items(kind="correlated")),
    "Knapsack-20-Integer": lambda: Knapsack(Integer()),
}
