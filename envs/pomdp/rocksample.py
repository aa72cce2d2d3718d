"""RockSample(n, k): a rover among rocks, some worth sampling, which it can only sense from afar.

The rover starts in the middle of the west edge of an n x n map with k rocks at known places, each good or bad with
equal odds. It moves north, east, south or west, samples the rock under it, or checks a rock, whose quality it then
reads rightly with probability (1 + 2^(-d / half_efficiency)) / 2 at Euclidean distance d. A good rock pays 10 and is
bad from then on, a bad one costs 10; leaving by the east edge pays 10 and ends the episode.

Source: Smith and Simmons (2004), "Heuristic search value iteration for POMDPs"; start, maps of (7, 8) and (11, 11) and
the price of 100 for moving off the map or sampling where no rock is are those of the DESPOT solver and of the files of
SARSOP. RockSample.jl and pomdp-py charge 0 there (`illegal_reward=0`). Both are masked as illegal. Other sizes have
maps drawn by `layout`.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, picture
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["VARIANTS", "RockSample", "RockSampleParams", "RockSampleState"]

STANDARD = {
    (7, 8): ((2, 0), (0, 1), (3, 1), (6, 3), (2, 4), (3, 4), (5, 5), (1, 6)),
    (11, 11): (
        (0, 3),
        (0, 7),
        (1, 8),
        (2, 4),
        (3, 3),
        (3, 8),
        (4, 3),
        (5, 8),
        (6, 1),
        (9, 3),
        (9, 9),
    ),
}
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))
SAMPLE = 4
NOTHING, BAD, GOOD = 0, 1, 2


@flax.struct.dataclass
class RockSampleState:
    """The rover, int32 (x eastwards, y northwards), x = n once it has left; which rocks are good, bool `[k]`."""

    place: Array
    good: Array


@flax.struct.dataclass
class RockSampleParams:
    """Rewards, the distance (cells) at which a sensor is right three times in four, and the discount.

    `nearest_reward` is what `heuristic` grants for the nearest good rock: more than that rock pays, for the others.
    """

    half_efficiency: Any = 20.0
    good_reward: Any = 10.0
    bad_reward: Any = -10.0
    exit_reward: Any = 10.0
    illegal_reward: Any = -100.0
    nearest_reward: Any = 12.0
    discount: Any = 0.95


def check_rocks(rocks: tuple[tuple[int, int], ...] | None, num_rocks: int, size: int) -> None:
    """Refuses rocks, if any are given, that are not `num_rocks` different cells of the map."""
    if rocks is not None and (
        len(set(rocks)) != num_rocks or not all(0 <= c < size for rock in rocks for c in rock)
    ):
        raise UsageError(
            f"rocks must be {num_rocks} different cells (x, y), each from 0 to {size - 1}"
        )


@dataclasses.dataclass(frozen=True)
class RockSample:
    """Actions: north, east, south, west, sample, check rock 0 .. k - 1. Observations: nothing, bad, good.

    Attributes:
        size: n.
        num_rocks: k.
        layout: seed of the map, for sizes without a standard one.
        rocks: k places (x, y); None takes the standard map or the seed's.
    """

    size: int = field(7, AtLeast(1))
    num_rocks: int = field(8, AtLeast(1))
    layout: int = field(0, AtLeast(0))
    rocks: tuple[tuple[int, int], ...] | None = None

    absorbing = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_rocks > self.size**2:
            raise UsageError(
                f"{self.num_rocks} rocks have no place on {self.size} x {self.size} cells; take 1 to all"
            )
        check_rocks(self.rocks, self.num_rocks, self.size)

    @property
    def name(self) -> str:
        """RockSample-n-k."""
        return f"RockSample-{self.size}-{self.num_rocks}"

    @property
    def default_params(self) -> RockSampleParams:
        """The published ones."""
        return RockSampleParams()

    @property
    def map(self) -> np.ndarray:
        """The rocks' places, int32 `[k, 2]`."""
        if self.rocks is not None:
            return np.asarray(self.rocks, np.int32)
        if (self.size, self.num_rocks) in STANDARD:
            return np.asarray(STANDARD[self.size, self.num_rocks], np.int32)
        cells = np.random.default_rng(self.layout).choice(
            self.size**2, self.num_rocks, replace=False
        )
        return np.stack([cells % self.size, cells // self.size], axis=1).astype(np.int32)

    def with_rocks(self, state: RockSampleState, good: Array) -> RockSampleState:
        """The same rover among other rocks, bool `[k]`: for beliefs that treat each rock by itself."""
        return state.replace(good=good)

    def observation_space(self, params: RockSampleParams) -> Discrete:
        """Nothing, bad, good."""
        return Discrete(3, names=("nothing", "bad", "good"))

    def action_space(self, params: RockSampleParams) -> Discrete:
        """Four moves, sample, k checks."""
        names = (
            "north",
            "east",
            "south",
            "west",
            "sample",
            *(f"check {i}" for i in range(self.num_rocks)),
        )
        return Discrete(len(names), names=names)

    def init(self, key: PRNGKey, params: RockSampleParams) -> RockSampleState:
        """West edge, every rock good or bad."""
        return RockSampleState(
            jnp.asarray([0, self.size // 2], jnp.int32),
            jax.random.bernoulli(key, shape=(self.num_rocks,)),
        )

    def _moved(self, state: RockSampleState, action: Array) -> tuple[Array, Array]:
        """Where a move would lead, and whether that is off the map (leaving eastwards is not)."""
        steps = jnp.asarray((*MOVES, (0, 0)), jnp.int32)
        place = state.place + steps[jnp.minimum(action, SAMPLE)]
        return place, (place[0] < 0) | (place[1] < 0) | (place[1] >= self.size)

    def _under(self, state: RockSampleState) -> Array:
        """Which rock the rover is on, bool `[k]`."""
        return jnp.all(jnp.asarray(self.map) == state.place[None], axis=1)

    def transition(
        self, key: PRNGKey, state: RockSampleState, action: Array, params: RockSampleParams
    ) -> RockSampleState:
        """Deterministic."""
        place, off = self._moved(state, action)
        over = self.terminal(state, params)
        place = jnp.where(off | over, state.place, place)
        taken = self._under(state) & (action == SAMPLE) & ~over
        return RockSampleState(place, state.good & ~taken)

    def _accuracy(self, place: Array, action: Array, params: RockSampleParams) -> Array:
        rocks = jnp.asarray(self.map)
        rock = rocks[jnp.clip(action - SAMPLE - 1, 0, self.num_rocks - 1)]
        distance = jnp.linalg.norm((rock - place).astype(jnp.float32))
        return 0.5 * (1 + 2.0 ** (-distance / params.half_efficiency))

    def _truth(self, state: RockSampleState, action: Array) -> Array:
        """The quality of the rock that is checked."""
        return state.good[jnp.clip(action - SAMPLE - 1, 0, self.num_rocks - 1)]

    def _silent(self, state: RockSampleState, action: Array, params: RockSampleParams) -> Array:
        return (action <= SAMPLE) | self.terminal(state, params)

    def observe(
        self, key: PRNGKey, state: RockSampleState, action: Array | None, params: RockSampleParams
    ) -> Array:
        """Nothing but after a check."""
        if action is None:
            return jnp.asarray(NOTHING, jnp.int32)
        right = jax.random.bernoulli(key, self._accuracy(state.place, action, params))
        seen = jnp.where(right == self._truth(state, action), GOOD, BAD)
        return jnp.where(self._silent(state, action, params), NOTHING, seen).astype(jnp.int32)

    def log_likelihood(
        self,
        obs: Array,
        state: RockSampleState,
        action: Array,
        next_state: RockSampleState,
        params: RockSampleParams,
    ) -> Array:
        """Of a reading; no check, no reading."""
        accuracy = self._accuracy(next_state.place, action, params)
        right = obs == jnp.where(self._truth(next_state, action), GOOD, BAD)
        chance = jnp.where(obs == NOTHING, 0.0, jnp.where(right, accuracy, 1 - accuracy))
        silent = self._silent(next_state, action, params)
        return jnp.log(jnp.where(silent, jnp.where(obs == NOTHING, 1.0, 0.0), chance))

    def reward(
        self,
        state: RockSampleState,
        action: Array,
        next_state: RockSampleState,
        params: RockSampleParams,
    ) -> Array:
        """See the module."""
        under = self._under(state)
        sampled = jnp.where(jnp.any(under & state.good), params.good_reward, params.bad_reward)
        sampled = jnp.where(jnp.any(under), sampled, params.illegal_reward)
        moved = jnp.where(self._moved(state, action)[1], params.illegal_reward, 0.0)
        moved = jnp.where(next_state.place[0] >= self.size, params.exit_reward, moved)
        earned = jnp.where(action < SAMPLE, moved, jnp.where(action == SAMPLE, sampled, 0.0))
        return jnp.where(self.terminal(state, params), 0.0, earned).astype(jnp.float32)

    def terminal(self, state: RockSampleState, params: RockSampleParams) -> Array:
        """The rover has left."""
        return state.place[0] >= self.size

    def action_mask(self, state: RockSampleState, params: RockSampleParams) -> Array:
        """No move off the map but eastwards, no sampling where there is no rock; everything once it is over."""
        x, y = state.place[0], state.place[1]
        moves = jnp.stack([y < self.size - 1, x >= 0, y > 0, x > 0, jnp.any(self._under(state))])
        return jnp.concatenate(
            [moves | self.terminal(state, params), jnp.ones((self.num_rocks,), bool)]
        )

    def heuristic(self, state: RockSampleState, params: RockSampleParams) -> Array:
        """Discounted: the nearest good rock, else the way out.

        Not what all good rocks together would pay: a planner that is promised those never fetches one.
        """
        discount = jnp.asarray(params.discount, jnp.float32)
        steps = jnp.where(
            state.good, jnp.abs(jnp.asarray(self.map) - state.place[None]).sum(1), 4 * self.size
        ).min()
        rock = params.nearest_reward * discount ** steps.astype(jnp.float32)
        out = params.exit_reward * discount ** (self.size - 1 - state.place[0]).astype(jnp.float32)
        value = jnp.where(jnp.any(state.good), rock, out)
        return jnp.where(self.terminal(state, params), 0.0, value).astype(jnp.float32)

    def upper_bound(self, state: RockSampleState, params: RockSampleParams) -> Array:
        """What one earns at most who knows the rocks, of rewards with the published signs.

        All good rocks and the way out, each as soon as it can be: of good rocks at d_0 <= d_1 <= ... steps, the j-th is
        sampled at t_j = max(d_j, t_{j-1} + 2), for between two there are a move and a sample.
        """
        discount = jnp.asarray(params.discount, jnp.float32)
        steps = jnp.abs(jnp.asarray(self.map) - state.place[None]).sum(1)
        order = jnp.sort(
            jnp.where(state.good, steps, 8 * self.size * self.num_rocks)
        )  # bad ones never
        wait = 2 * jnp.arange(self.num_rocks)
        times = jax.lax.cummax(order - wait) + wait
        paid = jnp.arange(self.num_rocks) < jnp.sum(state.good)
        rocks = jnp.sum(jnp.where(paid, discount ** times.astype(jnp.float32), 0.0))
        out = discount ** (self.size - 1 - state.place[0]).astype(jnp.float32)
        value = params.good_reward * rocks + params.exit_reward * out
        return jnp.where(self.terminal(state, params), 0.0, value).astype(jnp.float32)

    def tabular(self, params: RockSampleParams) -> dict[str, Any]:
        """All n^2 2^k states, ordered by y, x and the rocks' bits, and one for having left; for small sizes."""
        cells, kinds = self.size**2, 2**self.num_rocks
        count = cells * kinds + 1
        if count > 5000:
            raise UsageError(f"{self.name} has {count} states, too many for arrays; at most 5000")
        index = np.arange(count - 1)
        cell, bits = index // kinds, index % kinds
        good = (bits[:, None] >> np.arange(self.num_rocks)) & 1
        place = np.stack([cell % self.size, cell // self.size], axis=1)
        place = np.concatenate([place, [[self.size, self.size // 2]]])
        good = np.concatenate([good, np.zeros((1, self.num_rocks), int)])
        actions = 5 + self.num_rocks
        transition = np.zeros((actions, count, count))
        observation = np.zeros((actions, count, 3))
        reward = np.zeros((actions, count))
        observation[:, :, NOTHING] = 1
        for action in range(actions):
            for s in range(count - 1):
                target, earned = self._tabular_move(place[s], good[s], bits[s], action, params)
                transition[action, s, count - 1 if target is None else target] = 1
                reward[action, s] = earned
                if action > SAMPLE:
                    rock = action - SAMPLE - 1
                    distance = np.linalg.norm(self.map[rock] - place[s])
                    accuracy = 0.5 * (1 + 2.0 ** (-distance / float(params.half_efficiency)))
                    chance = accuracy if good[s, rock] else 1 - accuracy
                    observation[action, s] = [0, 1 - chance, chance]
            transition[action, count - 1, count - 1] = 1
        start = np.zeros(count)
        first = (self.size // 2) * self.size * kinds
        start[first : first + kinds] = 1 / kinds
        return {
            "transition": transition,
            "observation": observation,
            "reward": reward,
            "start": start,
            "discount": float(params.discount),
        }

    def _tabular_move(
        self, place: Any, good: Any, bits: Any, action: int, params: RockSampleParams
    ) -> tuple[Any, Any]:
        """The next state's index (None: left) and the reward, by plain rules."""
        kinds, (x, y) = 2**self.num_rocks, place
        here = (y * self.size + x) * kinds
        if action > SAMPLE:
            return here + bits, 0.0
        if action == SAMPLE:
            for rock, at in enumerate(self.map.tolist()):
                if at == [x, y]:
                    earned = params.good_reward if good[rock] else params.bad_reward
                    return here + (bits & ~(1 << rock)), earned
            return here + bits, params.illegal_reward
        x, y = x + MOVES[action][0], y + MOVES[action][1]
        if x == self.size:
            return None, params.exit_reward
        if x < 0 or not 0 <= y < self.size:
            return here + bits, params.illegal_reward
        return (y * self.size + x) * kinds + bits, 0.0

    def render(self, state: RockSampleState, params: RockSampleParams) -> Array:
        """The map with north up, good rocks green and bad ones red, uint8 `[16 n, 16 (n + 1), 3]`; the exit is gray."""
        cell, side = 16, 16 * self.size
        image = picture.canvas(side, side + cell)
        image = picture.rectangle(image, (side, 0.0), (side + cell, side), picture.GRAY)
        for rock, (x, y) in enumerate(self.map.tolist()):
            center = ((x + 0.5) * cell, side - (y + 0.5) * cell)
            image = picture.disc(image, center, 6.0, picture.RED, visible=~state.good[rock])
            image = picture.disc(image, center, 6.0, picture.GREEN, visible=state.good[rock])
        x, y = state.place[0].astype(jnp.float32), state.place[1].astype(jnp.float32)
        center = jnp.stack([(x + 0.5) * cell, side - (y + 0.5) * cell])
        return picture.to_uint8(picture.rectangle(image, center - 3, center + 3, picture.BLUE))


VARIANTS = {
    "RockSample-2-2": lambda **fields: RockSample(2, 2, **fields),
    "RockSample-7-8": lambda **fields: RockSample(7, 8, **fields),
    "RockSample-11-11": lambda **fields: RockSample(11, 11, **fields),
    "RockSample-15-15": lambda **fields: RockSample(15, 15, **fields),
}
"""Names and the environments behind them."""
