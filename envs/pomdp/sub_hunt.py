"""SubHunt: a submarine hunts another one that crosses the sea, and may warn it by looking too closely.

On 20 x 20 cells the hunter starts in the middle and the target somewhere along one edge, bound for the opposite one,
where it escapes and the episode ends. The target moves 2 cells ahead with probability 0.5, or 1 ahead and 1 to the
left or right with 0.25 each, within the map. Actions: 3 cells north, east, south or west, ping, engage. An engagement
within 2 cells kills, for 100 and the end; but a target that was ever pinged is aware, and then only with probability
0.6. Eight sonar beams, 45 degrees each from the east counterclockwise, show numbers with normal noise: after a ping
the target's beam its distance and the others 20, with a standard deviation of 0.5; otherwise all show 3 with a noise
of 5, but the target's beam its distance with one of 0.5 where that is at most 3.

Source: Sunberg and Kochenderfer (2018), as in their SubHunt.jl; discount 0.99.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "SubHunt", "SubHuntParams", "SubHuntState"]

DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))
PING, ENGAGE = 4, 5


@flax.struct.dataclass
class SubHuntState:
    """Both places, int32 `[2]` (x eastwards, y northwards); where the target goes; what it knows; whether it lives.

    Attributes:
        own: of the hunter.
        target: of the target.
        bound: int32, 0 .. 3 for north, east, south, west.
        aware: bool, it was pinged.
        killed: bool.
    """

    own: Array
    target: Array
    bound: Array
    aware: Array
    killed: Array


@flax.struct.dataclass
class SubHuntParams:
    """The reward, ranges (cells), what a kill of an aware target succeeds with, noise of beams, the discount."""

    kill_reward: Any = 100.0
    kill_radius: Any = 2.0
    aware_kill: Any = 0.6
    passive_radius: Any = 3.0
    passive_noise: Any = 5.0
    detected_noise: Any = 0.5
    active_noise: Any = 0.5
    key_width: Any = 2.0
    discount: Any = 0.99


@dataclasses.dataclass(frozen=True)
class SubHunt:
    """See the module.

    Attributes:
        size: n, cells a side.
        speed: cells of one move of the hunter.
    """

    size: int = field(20, AtLeast(3))
    speed: int = field(3, AtLeast(1))

    absorbing = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """SubHunt."""
        return "SubHunt"

    @property
    def default_params(self) -> SubHuntParams:
        """The published ones."""
        return SubHuntParams()

    def observation_space(self, params: SubHuntParams) -> Box:
        """Eight numbers."""
        return Box(-np.inf, np.inf, (8,))

    def action_space(self, params: SubHuntParams) -> Discrete:
        """North, east, south, west, ping, engage."""
        return Discrete(6, names=("north", "east", "south", "west", "ping", "engage"))

    def init(self, key: PRNGKey, params: SubHuntParams) -> SubHuntState:
        """The target along the edge from which it is bound for the other."""
        bound_key, place_key = jax.random.split(key)
        bound = jax.random.randint(bound_key, (), 0, 4)
        along = jax.random.randint(place_key, (), 0, self.size)
        ahead = jnp.asarray(DIRECTIONS, jnp.int32)[bound]
        target = jnp.where(ahead == 0, along, jnp.where(ahead > 0, 0, self.size - 1))
        middle = jnp.full((2,), (self.size + 1) // 2 - 1, jnp.int32)
        return SubHuntState(middle, target, bound, jnp.zeros((), bool), jnp.zeros((), bool))

    def outcomes(
        self, state: SubHuntState, action: Array, params: SubHuntParams
    ) -> tuple[Array, Array]:
        """What a step can bring: three next places of the target, int32 `[3, 2]`, and chances `[4]`, last of a kill."""
        ahead, left, right = (
            jnp.asarray(DIRECTIONS, jnp.int32)[(state.bound + turn) % 4] for turn in (0, -1, 1)
        )
        places = jnp.clip(
            state.target[None] + ahead[None] + jnp.stack([ahead, left, right]), 0, self.size - 1
        )
        near = jnp.linalg.norm((state.target - state.own).astype(jnp.float32)) <= params.kill_radius
        kills = jnp.where(
            near & (action == ENGAGE), jnp.where(state.aware, params.aware_kill, 1.0), 0.0
        )
        return places, jnp.append(jnp.asarray([0.5, 0.25, 0.25]) * (1 - kills), kills)

    def transition(
        self, key: PRNGKey, state: SubHuntState, action: Array, params: SubHuntParams
    ) -> SubHuntState:
        """Both move, unless the target is killed."""
        places, chances = self.outcomes(state, action, params)
        drawn = jnp.sum(jax.random.uniform(key) >= jnp.cumsum(chances[:3]))
        steps = jnp.asarray((*DIRECTIONS, (0, 0), (0, 0)), jnp.int32) * self.speed
        over, killed = self.terminal(state, params), drawn == 3
        own = jnp.clip(state.own + steps[action], 0, self.size - 1)
        return SubHuntState(
            own=jnp.where(over, state.own, own),
            target=jnp.where(over | killed, state.target, places[jnp.minimum(drawn, 2)]),
            bound=state.bound,
            aware=state.aware | ((action == PING) & ~over),
            killed=state.killed | (killed & ~over),
        )

    def _beams(
        self, state: SubHuntState, action: Array, params: SubHuntParams
    ) -> tuple[Array, Array]:
        """Mean and standard deviation of each beam, `[8]`."""
        offset = state.target - state.own
        distance = jnp.linalg.norm(offset.astype(jnp.float32))
        beam = jnp.asarray(_beam_of(self.size))[
            offset[0] + self.size - 1, offset[1] + self.size - 1
        ]
        pinged = action == PING
        seen = (jnp.arange(8) == beam) & (pinged | (distance <= params.passive_radius))
        mean = jnp.where(seen, distance, jnp.where(pinged, float(self.size), params.passive_radius))
        found = jnp.where(pinged, params.active_noise, params.detected_noise)
        return mean, jnp.where(
            seen, found, jnp.where(pinged, params.active_noise, params.passive_noise)
        )

    def observe(
        self, key: PRNGKey, state: SubHuntState, action: Array | None, params: SubHuntParams
    ) -> Array:
        """Eight beams, float32 `[8]`; after a reset without a ping."""
        mean, noise = self._beams(state, jnp.asarray(ENGAGE) if action is None else action, params)
        return mean + noise * jax.random.normal(key, (8,))

    def log_likelihood(
        self,
        obs: Array,
        state: SubHuntState,
        action: Array,
        next_state: SubHuntState,
        params: SubHuntParams,
    ) -> Array:
        """Of eight independent normal numbers."""
        mean, noise = self._beams(next_state, action, params)
        return jnp.sum(jax.scipy.stats.norm.logpdf(obs, mean, noise))

    def obs_key(self, obs: Array, params: SubHuntParams) -> Array:
        """The beam with the lowest number, and that number in steps of `key_width` from -size to size."""
        low = jnp.clip(obs.min(), -self.size, self.size) + self.size
        return (8 * jnp.floor(low / params.key_width) + jnp.argmin(obs)).astype(jnp.int32)

    def reward(
        self, state: SubHuntState, action: Array, next_state: SubHuntState, params: SubHuntParams
    ) -> Array:
        """Of a kill."""
        return jnp.where(next_state.killed & ~state.killed, params.kill_reward, 0.0).astype(
            jnp.float32
        )

    def _ahead(self, state: SubHuntState) -> Array:
        """Cells between the target and the edge it is bound for."""
        axis = jnp.where(state.bound % 2 == 0, state.target[1], state.target[0])
        return jnp.where(state.bound < 2, self.size - 1 - axis, axis)

    def terminal(self, state: SubHuntState, params: SubHuntParams) -> Array:
        """Killed or escaped."""
        return state.killed | (self._ahead(state) == 0)

    def heuristic(self, state: SubHuntState, params: SubHuntParams) -> Array:
        """What a hunter earns that sails to a target that waits, if it is there before the target could escape."""
        away = jnp.abs(state.target - state.own).sum().astype(jnp.float32)
        steps = jnp.ceil(jnp.maximum(away - params.kill_radius, 0.0) / self.speed)
        discount = jnp.asarray(params.discount, jnp.float32)
        again = params.aware_kill / (1 - discount * (1 - params.aware_kill))
        value = params.kill_reward * discount**steps * jnp.where(state.aware, again, 1.0)
        late = 2 * steps >= self._ahead(state).astype(jnp.float32)
        return jnp.where(self.terminal(state, params) | late, 0.0, value).astype(jnp.float32)

    def render(self, state: SubHuntState, params: SubHuntParams) -> Array:
        """The sea with north up, the hunter white, the target orange or, once aware, red; uint8 `[8 n, 8 n, 3]`."""
        image = picture.canvas(8 * self.size, 8 * self.size, picture.BLUE)
        color = jnp.where(state.aware, jnp.asarray(picture.RED), jnp.asarray(picture.ORANGE))
        for place, radius, shade, shown in (
            (state.target, 4.0, color, ~state.killed),
            (state.own, 3.0, picture.WHITE, jnp.ones((), bool)),
        ):
            x, y = place.astype(jnp.float32)
            center = jnp.stack([8 * x + 4, 8 * (self.size - 1 - y) + 4])
            image = picture.disc(image, center, radius, shade, visible=shown)
        return picture.to_uint8(image)


@functools.cache
def _beam_of(size: int) -> np.ndarray:
    """The beam in which an offset (x, y) lies, int32 `[2 size - 1, 2 size - 1]`: (0, 45] degrees are 0, (45, 90] 1."""
    x, y = np.meshgrid(np.arange(1 - size, size), np.arange(1 - size, size), indexing="ij")
    angle = np.degrees(np.arctan2(y, x))
    angle = np.where(angle <= 0, angle + 360, angle)
    return (np.ceil(np.round(angle, 6) / 45) - 1).astype(np.int32)


VARIANTS = {"SubHunt": SubHunt}
"""Names and the environments behind them."""
