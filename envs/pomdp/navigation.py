"""Navigation in a partly known map: find the gate in a wall, and a way around obstacles that no map shows.

A 13 x 13 map has a wall across row 6 with one gate, in column 3 or 9 with equal odds; 31 obstacles are on the map,
drawn by `layout`, and every other cell is an obstacle with probability 0.1, but never the goal, in the middle of row
12, nor the gate and the cells before and behind it. The robot starts in any free cell of row 0 and does not know
which. It steps to one of 8 neighbours or stays; with probability 0.03 a step fails and it stays. It sees which of the
8 cells around it are obstacles, each wrongly with probability 0.03 (256 observations; cells outside the map look
free). A step costs 0.1, staying 0.2, a bump 1; the goal pays 20 and ends the episode.

Source: the problem of VOPP (arXiv 2510.27191), with its numbers; discount 0.983. A bump and a failed step at an
obstacle lead to the same state, so the reward of trying is its mean. Its leaf value follows the shortest way in the
simulation's own map, and is -100 where there is none; so does `heuristic`, which pays the goal with the last step, not
one step later.
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

__all__ = ["VARIANTS", "Navigation", "NavigationParams", "NavigationState"]

AROUND = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))
"""Rows and columns of north, north-east and so on; bit 7 of an observation is the first."""
STAY = 8


@flax.struct.dataclass
class NavigationState:
    """Where the robot is, int8 `[2]` (row, column), and the obstacles, uint16 `[n]`: bit c of word r."""

    place: Array
    blocked: Array


@flax.struct.dataclass
class NavigationParams:
    """Chances of an unknown obstacle, of a failed step and of a wrong look at a cell; rewards; the discount.

    `stuck_value` is the leaf value of a map without a way.
    """

    density: Any = 0.1
    slip: Any = 0.03
    blur: Any = 0.03
    step_reward: Any = -0.1
    stay_reward: Any = -0.2
    bump_reward: Any = -1.0
    goal_reward: Any = 20.0
    stuck_value: Any = -100.0
    discount: Any = 0.983


@dataclasses.dataclass(frozen=True)
class Navigation:
    """Actions: north, north-east, east, south-east, south, south-west, west, north-west, stay.

    Attributes:
        size: n, odd, from 5 to 15; row 0 is in the north.
        num_obstacles: obstacles that are known beside the wall.
        layout: seed of their places.
    """

    size: int = field(13, Between(5, 15))
    num_obstacles: int = field(31, AtLeast(0))
    layout: int = field(0, AtLeast(0))

    absorbing = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size not in range(5, 16, 2):
            raise UsageError(f"the map has an odd number of rows from 5 to 15, not {self.size}")
        most = self.size * (self.size - 2)
        if self.num_obstacles > most:
            raise UsageError(f"num_obstacles is between 0 and {most}, not {self.num_obstacles}")

    @property
    def name(self) -> str:
        """Navigation-n."""
        return f"Navigation-{self.size}"

    @property
    def default_params(self) -> NavigationParams:
        """VOPP's."""
        return NavigationParams()

    @property
    def goal(self) -> tuple[int, int]:
        """Its row and column."""
        return self.size - 1, self.size // 2

    @property
    def gates(self) -> tuple[int, int]:
        """The columns where the gate may be."""
        return self.size // 4, self.size - 1 - self.size // 4

    @property
    def known(self) -> np.ndarray:
        """What the map shows as obstacles, the whole wall among them, bool `[n, n]`."""
        return _known(self)

    def observation_space(self, params: NavigationParams) -> Discrete:
        """Eight bits."""
        return Discrete(256)

    def action_space(self, params: NavigationParams) -> Discrete:
        """Eight steps, stay."""
        return Discrete(9, names=("N", "NE", "E", "SE", "S", "SW", "W", "NW", "stay"))

    def init(self, key: PRNGKey, params: NavigationParams) -> NavigationState:
        """Draws the obstacles, the gate, and a free cell of row 0 (any, should there be none)."""
        fill, gate, begin = jax.random.split(key, 3)
        size, middle = self.size, self.size // 2
        blocked = jax.random.bernoulli(fill, params.density, (size, size)).at[self.goal].set(False)
        column = jnp.asarray(self.gates)[jax.random.bernoulli(gate).astype(jnp.int32)]
        blocked = (blocked | self.known).at[middle - 1 : middle + 2, column].set(False)
        drawn = jax.random.uniform(begin, (size,)) - blocked[0].astype(jnp.float32)
        place = jnp.stack([jnp.zeros((), jnp.int8), jnp.argmax(drawn).astype(jnp.int8)])
        return NavigationState(place, _packed(blocked))

    def flipped(self, key: PRNGKey, state: NavigationState, chance: Any) -> NavigationState:
        """Another map for a belief that has too few: each cell not known changes with that chance; consumes `key`."""
        unknown = ~self.known
        unknown[self.goal] = False
        unknown[self.size // 2, list(self.gates)] = True
        flips = jax.random.bernoulli(key, chance, unknown.shape) & unknown
        return NavigationState(state.place, state.blocked ^ _packed(flips))

    def _is_blocked(self, state: NavigationState, place: Array) -> tuple[Array, Array]:
        """Of cells `[..., 2]`: an obstacle, outside the map; bool `[...]`."""
        outside = jnp.any((place < 0) | (place >= self.size), axis=-1)
        row, column = (jnp.clip(place[..., i], 0, self.size - 1) for i in range(2))
        return (state.blocked[row].astype(jnp.int32) >> column) & 1 > 0, outside

    def _tried(self, state: NavigationState, action: Array) -> tuple[Array, Array]:
        """Where a step that does not fail leads, int32 `[2]`, and whether it bumps."""
        here = state.place.astype(jnp.int32)
        there = here + jnp.asarray((*AROUND, (0, 0)), jnp.int32)[action]
        obstacle, outside = self._is_blocked(state, there)
        bumps = (obstacle | outside) & (action != STAY)
        return jnp.where(bumps, here, there), bumps

    def transition(
        self, key: PRNGKey, state: NavigationState, action: Array, params: NavigationParams
    ) -> NavigationState:
        """A step, unless it fails."""
        fails = (jax.random.uniform(key) < params.slip) | self.terminal(state, params)
        return state.replace(
            place=jnp.where(fails, state.place, self._tried(state, action)[0].astype(jnp.int8))
        )

    def _look(self, state: NavigationState) -> Array:
        """Which of the eight cells around are obstacles, bool `[8]`."""
        cells = state.place.astype(jnp.int32)[None] + jnp.asarray(AROUND, jnp.int32)
        obstacle, outside = self._is_blocked(state, cells)
        return obstacle & ~outside

    def observe(
        self, key: PRNGKey, state: NavigationState, action: Array | None, params: NavigationParams
    ) -> Array:
        """Each of the eight bits may be wrong; after a reset, too."""
        wrong = jax.random.uniform(key, (8,)) < params.blur
        return jnp.sum(
            jnp.where(self._look(state) ^ wrong, 128 >> np.arange(8), 0), dtype=jnp.int32
        )

    def log_likelihood(
        self,
        obs: Array,
        state: NavigationState,
        action: Array,
        next_state: NavigationState,
        params: NavigationParams,
    ) -> Array:
        """Eight independent looks."""
        seen = (obs >> np.arange(7, -1, -1)) & 1 > 0
        wrong = jnp.sum(seen ^ self._look(next_state)).astype(jnp.float32)
        blur = jnp.asarray(params.blur, jnp.float32)
        return jax.scipy.special.xlogy(wrong, blur) + jax.scipy.special.xlog1py(8 - wrong, -blur)

    def reward(
        self,
        state: NavigationState,
        action: Array,
        next_state: NavigationState,
        params: NavigationParams,
    ) -> Array:
        """See the module."""
        bump = (1 - params.slip) * params.bump_reward + params.slip * params.step_reward
        moved = jnp.where(self._tried(state, action)[1], bump, params.step_reward)
        earned = jnp.where(action == STAY, params.stay_reward, moved)
        earned = jnp.where(self.terminal(next_state, params), params.goal_reward, earned)
        return jnp.where(self.terminal(state, params), 0.0, earned).astype(jnp.float32)

    def terminal(self, state: NavigationState, params: NavigationParams) -> Array:
        """The robot is at the goal."""
        return jnp.all(state.place == jnp.asarray(self.goal, jnp.int8))

    def distance(self, state: NavigationState) -> Array:
        """Steps of the shortest way to the goal in this state's own map, int32; -1 where there is none.

        Floods the map from the goal, all cells of a row in one word; costs 8 operations a row and step.
        """
        full = jnp.uint16(2**self.size - 1)
        column = jnp.uint16(1) << state.place[1].astype(jnp.uint16)
        robot = jnp.where(jnp.arange(self.size) == state.place[0], column, jnp.uint16(0))
        free = (~state.blocked & full) | robot
        goal = jnp.zeros((self.size,), jnp.uint16).at[self.goal[0]].set(1 << self.goal[1])

        def spread(carry: tuple) -> tuple:
            wet, steps, _ = carry
            wide = wet | (wet << 1) | (wet >> 1)
            none = jnp.zeros((1,), jnp.uint16)
            tall = wide | jnp.concatenate([wide[1:], none]) | jnp.concatenate([none, wide[:-1]])
            more = (tall & free) | wet
            return more, steps + 1, jnp.any(more != wet)

        def dry(carry: tuple) -> Array:
            return carry[2] & ~jnp.any(carry[0] & robot)

        wet, steps, _ = jax.lax.while_loop(
            dry, spread, (goal, jnp.zeros((), jnp.int32), jnp.ones((), bool))
        )
        return jnp.where(jnp.any(wet & robot), steps, -1)

    def heuristic(self, state: NavigationState, params: NavigationParams) -> Array:
        """What the shortest way earns whose steps never fail."""
        steps, discount = self.distance(state), jnp.asarray(params.discount, jnp.float32)
        before = jnp.maximum(steps - 1, 0).astype(jnp.float32)
        paid = jnp.where(
            discount < 1, (1 - discount**before) / jnp.maximum(1 - discount, 1e-6), before
        )
        value = params.step_reward * paid + params.goal_reward * discount**before
        value = jnp.where(steps < 0, params.stuck_value, value)
        return jnp.where(self.terminal(state, params), 0.0, value).astype(jnp.float32)

    def render(self, state: NavigationState, params: NavigationParams) -> Array:
        """Known obstacles black, others gray, the goal green and the robot blue, uint8 `[8 n, 8 n, 3]`."""
        bits = (state.blocked[:, None].astype(jnp.int32) >> jnp.arange(self.size)[None]) & 1 > 0
        bits = bits.at[state.place[0], state.place[1]].set(False)
        gray, black = (
            jnp.asarray(picture.GRAY, jnp.float32),
            jnp.asarray(picture.BLACK, jnp.float32),
        )
        shade = jnp.where(self.known[..., None], black.reshape(1, 1, 3), gray.reshape(1, 1, 3))
        cells = jnp.where(bits[..., None], shade, 255.0)
        image = jnp.repeat(jnp.repeat(cells, 8, axis=0), 8, axis=1)
        row, column = self.goal
        image = picture.rectangle(
            image, (8.0 * column, 8.0 * row), (8.0 * column + 8, 8.0 * row + 8), picture.GREEN
        )
        center = 8 * state.place[::-1].astype(jnp.float32) + 4
        return picture.to_uint8(picture.disc(image, center, 3.0, picture.BLUE))


def _packed(cells: Any) -> Array:
    """Bool `[n, n]` as uint16 `[n]`."""
    bits = jnp.asarray(1 << np.arange(cells.shape[1]), jnp.int32)
    return jnp.sum(jnp.where(cells, bits[None], 0), axis=1).astype(jnp.uint16)


@functools.cache
def _known(env: Navigation) -> np.ndarray:
    size = env.size
    known = np.zeros((size, size), bool)
    known[size // 2] = True
    free = [
        cell
        for cell in range(size**2)
        if cell // size != size // 2 and cell != env.goal[0] * size + env.goal[1]
    ]
    cells = np.random.default_rng(env.layout).permutation(free)[: env.num_obstacles]
    known[cells // size, cells % size] = True
    return known


VARIANTS = {
    "Navigation-13": Navigation,
    "Navigation-5": lambda **fields: Navigation(5, 2, **fields),
}
"""Names and the environments behind them."""
