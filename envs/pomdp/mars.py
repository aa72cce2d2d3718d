"""Multi-agent RockSample: two rovers share a map of rocks that they can only sense from afar.

The rovers start on the west edge at heights n/2 + 1 and n/2 - 1; k rocks lie at known places, each good or bad with
equal odds. In each step each rover moves, samples the rock under it or checks a rock, as in `envs.rocksample`, for the
same rewards; of two that sample one good rock together the first is paid and the second finds it bad. Leaving by the
east edge pays 10 and takes that rover out; the episode ends when both have left. One action is a pair, number
(5 + k) a + b, and one observation is a pair, number 3 a + b.

Source: the problem of VOPP (arXiv 2510.27191) and of HyP-DESPOT (Cai et al. 2018), discount 0.983, maps drawn by
`layout` as there: any cells but the two starts. Its states also count checks, which nothing depends on; they are left
out here. Its leaf value grants every rover 12 discounted by the steps to the nearest good rock, or its way out where
none is good, and takes off 1 for each cell beyond 2 that a rock was checked from; so does `heuristic`, but two rovers
never count one rock. Moves off the map and samples without a rock cost 100 and are masked; a rover that has left is
given action 0 only, which does nothing.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, picture
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .rocksample import BAD, GOOD, MOVES, NOTHING, SAMPLE, check_rocks

__all__ = ["VARIANTS", "Mars", "MarsParams", "MarsState"]


@flax.struct.dataclass
class MarsState:
    """Eight bytes for up to 32 rocks: both rovers' places and the good rocks.

    Attributes:
        place: int8 `[2, 2]` (x eastwards, y northwards), x = n for a rover that has left.
        good: uint32 `[ceil(k / 32)]`, bit i % 32 of word i // 32 for rock i.
    """

    place: Array
    good: Array


@flax.struct.dataclass
class MarsParams:
    """Rewards, the distance (cells) at which a sensor is right three times in four, the discount.

    `nearest_reward` is what the leaf value grants for the nearest good rock: more than that rock pays, for the others;
    `far_check` what it takes off for each cell beyond 2 between a rover and the rock that it has just checked.
    """

    half_efficiency: Any = 20.0
    good_reward: Any = 10.0
    bad_reward: Any = -10.0
    exit_reward: Any = 10.0
    illegal_reward: Any = -100.0
    nearest_reward: Any = 12.0
    far_check: Any = 1.0
    discount: Any = 0.983


@dataclasses.dataclass(frozen=True)
class Mars:
    """Each rover: north, east, south, west, sample, check rock 0 .. k - 1; sees nothing, bad or good.

    Attributes:
        size: n, from 3 to 127.
        num_rocks: k.
        layout: seed of the map.
        rocks: k places (x, y) instead of the seed's.
    """

    size: int = field(20, Between(3, 127))
    num_rocks: int = field(20, AtLeast(1))
    layout: int = field(0, AtLeast(0))
    rocks: tuple[tuple[int, int], ...] | None = None

    absorbing = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_rocks > self.size**2 - 2:
            raise UsageError(
                f"{self.num_rocks} rocks have no place beside two rovers on {self.size} x {self.size} cells"
            )
        check_rocks(self.rocks, self.num_rocks, self.size)

    @property
    def name(self) -> str:
        """MARS-n-k."""
        return f"MARS-{self.size}-{self.num_rocks}"

    @property
    def default_params(self) -> MarsParams:
        """VOPP's."""
        return MarsParams()

    @property
    def base(self) -> int:
        """Actions of one rover, 5 + k."""
        return 5 + self.num_rocks

    @property
    def starts(self) -> np.ndarray:
        """The rovers' first places, int8 `[2, 2]`."""
        return np.asarray([(0, self.size // 2 + 1), (0, self.size // 2 - 1)], np.int8)

    @property
    def map(self) -> np.ndarray:
        """The rocks' places, int32 `[k, 2]`."""
        return _layout(self)

    def with_rocks(self, state: MarsState, good: Array) -> MarsState:
        """The same rovers among other rocks, bool `[k]`: for beliefs that treat each rock by itself."""
        words = jnp.where(good[:, None], self._bit(jnp.arange(self.num_rocks)), jnp.uint32(0))
        return state.replace(good=words.sum(0, dtype=jnp.uint32))

    def observation_space(self, params: MarsParams) -> Discrete:
        """Pairs of nothing, bad, good."""
        return Discrete(9)

    def action_space(self, params: MarsParams) -> Discrete:
        """Pairs."""
        own = (
            "north",
            "east",
            "south",
            "west",
            "sample",
            *(f"check {i}" for i in range(self.base - 5)),
        )
        return Discrete(self.base**2, names=tuple(f"{a}, {b}" for a in own for b in own))

    def init(self, key: PRNGKey, params: MarsParams) -> MarsState:
        """Both at the west edge, every rock good or bad."""
        real = self._bit(jnp.arange(self.num_rocks)).sum(0, dtype=jnp.uint32)
        return MarsState(
            jnp.asarray(self.starts), jax.random.bits(key, real.shape, jnp.uint32) & real
        )

    def _bit(self, rock: Array) -> Array:
        """Words `[..., W]` with the bit of that rock; none for a negative one."""
        words = jnp.arange((self.num_rocks + 31) // 32).reshape((1,) * rock.ndim + (-1,))
        bit = jnp.uint32(1) << (rock % 32).astype(jnp.uint32)
        return jnp.where((rock[..., None] // 32) == words, bit[..., None], jnp.uint32(0))

    def _is_good(self, good: Array, rock: Array) -> Array:
        """Bool `[...]` of rocks `[...]`."""
        return jnp.any((self._bit(rock) & good.reshape((1,) * rock.ndim + (-1,))) != 0, axis=-1)

    def _acts(self, action: Array) -> Array:
        """Both rovers' own actions, int32 `[2]`."""
        return jnp.stack([action // self.base, action % self.base])

    def _gone(self, state: MarsState) -> Array:
        return state.place[:, 0] >= self.size

    def _moved(self, state: MarsState, acts: Array) -> tuple[Array, Array]:
        """Where each would be, int32 `[2, 2]`, and whether it ran off the map (and stays)."""
        steps = jnp.asarray((*MOVES, (0, 0)), jnp.int32)[jnp.minimum(acts, SAMPLE)]
        here = state.place.astype(jnp.int32)
        there = here + jnp.where(self._gone(state)[:, None], 0, steps)
        off = (there[:, 0] < 0) | (there[:, 1] < 0) | (there[:, 1] >= self.size)
        return jnp.where(off[:, None], here, there), off

    def _under(self, state: MarsState) -> Array:
        """The rock under each rover, int32 `[2]`, -1 without one."""
        place = state.place.astype(jnp.int32)
        return jnp.asarray(_rock_at(self))[place[:, 1], place[:, 0]]

    def transition(
        self, key: PRNGKey, state: MarsState, action: Array, params: MarsParams
    ) -> MarsState:
        """Deterministic."""
        acts = self._acts(action)
        taken = self._bit(jnp.where(acts == SAMPLE, self._under(state), -1))
        return MarsState(
            self._moved(state, acts)[0].astype(jnp.int8), state.good & ~(taken[0] | taken[1])
        )

    def reward(
        self, state: MarsState, action: Array, next_state: MarsState, params: MarsParams
    ) -> Array:
        """Of both rovers together."""
        acts, under, gone = self._acts(action), self._under(state), self._gone(state)
        samples = (acts == SAMPLE) & ~gone
        first = jnp.stack([jnp.ones((), bool), ~(samples[0] & (under[0] == under[1]))])
        paid = jnp.where(
            self._is_good(state.good, under) & first, params.good_reward, params.bad_reward
        )
        paid = jnp.where(under >= 0, paid, params.illegal_reward)
        place, off = self._moved(state, acts)
        moved = jnp.where(
            off, params.illegal_reward, jnp.where(place[:, 0] >= self.size, params.exit_reward, 0.0)
        )
        earned = jnp.where(samples, paid, jnp.where((acts < SAMPLE) & ~gone, moved, 0.0))
        return jnp.sum(earned).astype(jnp.float32)

    def _reading(
        self, state: MarsState, action: Array, params: MarsParams
    ) -> tuple[Array, Array, Array]:
        """Of each rover `[2]`: it reads nothing, how often it would read rightly, what is right."""
        acts = self._acts(action)
        rock = jnp.clip(acts - SAMPLE - 1, 0, self.num_rocks - 1)
        offset = (jnp.asarray(self.map)[rock] - state.place.astype(jnp.int32)).astype(jnp.float32)
        accuracy = 0.5 * (1 + 2.0 ** (-jnp.linalg.norm(offset, axis=1) / params.half_efficiency))
        truth = jnp.where(self._is_good(state.good, rock), GOOD, BAD)
        return (acts <= SAMPLE) | self._gone(state), accuracy, truth

    def observe(
        self, key: PRNGKey, state: MarsState, action: Array | None, params: MarsParams
    ) -> Array:
        """Both readings; nothing but after a check."""
        if action is None:
            return jnp.asarray(3 * NOTHING + NOTHING, jnp.int32)
        silent, accuracy, truth = self._reading(state, action, params)
        right = jax.random.uniform(key, (2,)) < accuracy
        seen = jnp.where(silent, NOTHING, jnp.where(right, truth, BAD + GOOD - truth))
        return (3 * seen[0] + seen[1]).astype(jnp.int32)

    def log_likelihood(
        self, obs: Array, state: MarsState, action: Array, next_state: MarsState, params: MarsParams
    ) -> Array:
        """Of both readings, which are independent."""
        silent, accuracy, truth = self._reading(next_state, action, params)
        seen = jnp.stack([obs // 3, obs % 3])
        chance = jnp.where(seen == NOTHING, 0.0, jnp.where(seen == truth, accuracy, 1 - accuracy))
        chance = jnp.where(silent, jnp.where(seen == NOTHING, 1.0, 0.0), chance)
        return jnp.sum(jnp.log(chance))

    def terminal(self, state: MarsState, params: MarsParams) -> Array:
        """Both have left."""
        return jnp.all(self._gone(state))

    def action_mask(self, state: MarsState, params: MarsParams) -> Array:
        """Pairs of what each may do: no move off the map but eastwards, no sampling without a rock."""
        x, y = state.place[:, 0], state.place[:, 1]
        moves = jnp.stack(
            [y < self.size - 1, x >= 0, y > 0, x > 0, self._under(state) >= 0], axis=1
        )
        mine = jnp.concatenate([moves, jnp.ones((2, self.num_rocks), bool)], axis=1)
        mine = jnp.where(self._gone(state)[:, None], (jnp.arange(self.base) == 0)[None], mine)
        return (mine[0][:, None] & mine[1][None, :]).reshape(-1)

    def heuristic(self, state: MarsState, params: MarsParams, action: Array | int = -1) -> Array:
        """Discounted, for each rover: the nearest good rock, else the way out, less for far checks. See the module."""
        place, discount = state.place.astype(jnp.int32), jnp.asarray(params.discount, jnp.float32)
        far = 4 * self.size
        good = self._is_good(state.good, jnp.arange(self.num_rocks))
        steps = jnp.where(
            good[None], jnp.abs(place[:, None] - jnp.asarray(self.map)[None]).sum(-1), far
        )
        gone = self._gone(state)
        steps = jnp.where(gone[:, None], far, steps)
        nearest = jnp.argmin(steps, axis=1)
        shared = (nearest[0] == nearest[1]) & ~jnp.any(gone) & jnp.any(good)
        later = jnp.argmax(
            steps.min(axis=1)
        )  # of two at one rock, the one that comes later looks for another
        other = (jnp.arange(2) == later)[:, None] & (jnp.arange(self.num_rocks)[None] == nearest[0])
        steps = jnp.where(shared & other, far, steps).min(axis=1)
        exit_steps = self.size - 1 - place[:, 0]
        rock = params.nearest_reward * discount ** steps.astype(jnp.float32)
        out = params.exit_reward * discount ** exit_steps.astype(jnp.float32)
        checked = jnp.stack([action // self.base, action % self.base]) - SAMPLE - 1
        rocks = jnp.asarray(self.map)[jnp.clip(checked, 0, self.num_rocks - 1)]
        beyond = jnp.maximum(jnp.abs(place - rocks).sum(1) - 2, 0)
        fine = params.far_check * jnp.where((jnp.asarray(action) >= 0) & (checked >= 0), beyond, 0)
        value = jnp.where(steps < far, rock, out) - fine
        return jnp.sum(jnp.where(gone, 0.0, value)).astype(jnp.float32)

    def render(self, state: MarsState, params: MarsParams) -> Array:
        """The map with north up, good rocks green and bad ones red, uint8 `[8 n, 8 (n + 1), 3]`; the exit is gray."""
        cell, side = 8, 8 * self.size
        image = picture.canvas(side, side + cell)
        image = picture.rectangle(image, (side, 0.0), (side + cell, side), picture.GRAY)
        good = self._is_good(state.good, jnp.arange(self.num_rocks))
        for rock, (x, y) in enumerate(self.map.tolist()):
            center = ((x + 0.5) * cell, side - (y + 0.5) * cell)
            image = picture.disc(image, center, 3.0, picture.RED, visible=~good[rock])
            image = picture.disc(image, center, 3.0, picture.GREEN, visible=good[rock])
        for rover, color in enumerate((picture.BLUE, picture.PURPLE)):
            x, y = state.place[rover].astype(jnp.float32)
            center = jnp.stack([(x + 0.5) * cell, side - (y + 0.5) * cell])
            image = picture.rectangle(image, center - 2, center + 2, color)
        return picture.to_uint8(image)


@functools.cache
def _layout(env: Mars) -> np.ndarray:
    if env.rocks is not None:
        return np.asarray(env.rocks, np.int32)
    free = [
        i for i in range(env.size**2) if [i % env.size, i // env.size] not in env.starts.tolist()
    ]
    cells = np.random.default_rng(env.layout).choice(free, env.num_rocks, replace=False)
    return np.stack([cells % env.size, cells // env.size], axis=1).astype(np.int32)


@functools.cache
def _rock_at(env: Mars) -> np.ndarray:
    """The rock at (y, x), int32 `[n, n + 1]`, -1 where there is none."""
    table = np.full((env.size, env.size + 1), -1, np.int32)
    table[_layout(env)[:, 1], _layout(env)[:, 0]] = np.arange(env.num_rocks)
    return table


VARIANTS = {
    "MARS-5-4": lambda **fields: Mars(5, 4, **fields),
    "MARS-20-20": lambda **fields: Mars(20, 20, **fields),
    "MARS-50-50": lambda **fields: Mars(50, 50, **fields),
}
"""Names and the environments behind them."""
