"""LightDark: to stop at 0 on a dark line, one has to look around in the light at 10 first.

The state is an integer from -60 to 60, uniform on -30 .. 30 at first. Actions add -10, -1, 1 or 10 (stopping at the
ends) at a cost of 1; action 2 adds 0 and ends the episode, for 100 at 0 and for -100 elsewhere. What is seen is normal
around the state with standard deviation |s - 10| + 0.0001.

Source: the version of Sunberg and Kochenderfer (2018), "Online algorithms for POMDPs with continuous state, action, and
observation spaces", as their published returns were made with; discount 0.95. A later version of their code has steps
of 3 and at least 0.5 of noise: `big_step=3` and `min_noise=0.5`.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import AtLeast, Finite, check_fields, field
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "LightDark", "LightDarkParams", "LightDarkState"]

STOP = 2


@flax.struct.dataclass
class LightDarkState:
    """Where it is, int32, and whether it has stopped."""

    place: Array
    stopped: Array


@flax.struct.dataclass
class LightDarkParams:
    """Rewards, the noise in the light (states), the width of one observation key (states), and the discount.

    The heuristic's are `search_steps` and `search_noise`: to find the light takes so many steps more than the straight
    way, and one more for every so many states of noise.
    """

    step_reward: Any = -1.0
    right_reward: Any = 100.0
    wrong_reward: Any = -100.0
    min_noise: Any = 1e-4
    key_width: Any = 1.0
    search_steps: Any = 2.0
    search_noise: Any = 20.0
    discount: Any = 0.95


@dataclasses.dataclass(frozen=True)
class LightDark:
    """Actions: -10, -1, stop, 1, 10.

    Attributes:
        radius: the line goes from -radius to radius, and half of it is where one may start.
        light: where it is light.
        big_step: of actions 0 and 4.
    """

    radius: int = field(60, AtLeast(1))
    light: int = field(10, Finite())
    big_step: int = field(10, AtLeast(1))

    absorbing = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """LightDark."""
        return "LightDark"

    @property
    def default_params(self) -> LightDarkParams:
        """The published ones."""
        return LightDarkParams()

    def observation_space(self, params: LightDarkParams) -> Box:
        """One number."""
        return Box(-np.inf, np.inf)

    def action_space(self, params: LightDarkParams) -> Discrete:
        """Five."""
        return Discrete(5, names=(f"-{self.big_step}", "-1", "stop", "+1", f"+{self.big_step}"))

    def init(self, key: PRNGKey, params: LightDarkParams) -> LightDarkState:
        """Anywhere in the middle half."""
        half = self.radius // 2
        return LightDarkState(jax.random.randint(key, (), -half, half + 1), jnp.zeros((), bool))

    def transition(
        self, key: PRNGKey, state: LightDarkState, action: Array, params: LightDarkParams
    ) -> LightDarkState:
        """Deterministic."""
        steps = jnp.asarray((-self.big_step, -1, 0, 1, self.big_step), jnp.int32)
        place = jnp.clip(state.place + steps[action], -self.radius, self.radius)
        stopped = state.stopped | (action == STOP)
        return LightDarkState(jnp.where(stopped, state.place, place), stopped)

    def _noise(self, state: LightDarkState, params: LightDarkParams) -> Array:
        return jnp.abs(state.place - self.light).astype(jnp.float32) + params.min_noise

    def observe(
        self, key: PRNGKey, state: LightDarkState, action: Array | None, params: LightDarkParams
    ) -> Array:
        """The place, with noise; after a reset, too."""
        noise = self._noise(state, params) * jax.random.normal(key)
        return (state.place.astype(jnp.float32) + noise).astype(jnp.float32)

    def log_likelihood(
        self,
        obs: Array,
        state: LightDarkState,
        action: Array,
        next_state: LightDarkState,
        params: LightDarkParams,
    ) -> Array:
        """The normal density."""
        place = next_state.place.astype(jnp.float32)
        return jax.scipy.stats.norm.logpdf(obs, place, self._noise(next_state, params))

    def obs_key(self, obs: Array, params: LightDarkParams) -> Array:
        """The nearest multiple of `key_width`, counted from 0 at -2 `radius` and less."""
        return jnp.round(
            (jnp.clip(obs, -2 * self.radius, 2 * self.radius) + 2 * self.radius) / params.key_width
        ).astype(jnp.int32)

    def reward(
        self,
        state: LightDarkState,
        action: Array,
        next_state: LightDarkState,
        params: LightDarkParams,
    ) -> Array:
        """See the module."""
        stopped = jnp.where(state.place == 0, params.right_reward, params.wrong_reward)
        earned = jnp.where(action == STOP, stopped, params.step_reward)
        return jnp.where(state.stopped, 0.0, earned).astype(jnp.float32)

    def terminal(self, state: LightDarkState, params: LightDarkParams) -> Array:
        """Stopped."""
        return state.stopped

    def _steps(self, distance: Array) -> Array:
        """The fewest steps over a distance, walls apart, int32."""
        big = self.big_step
        under, over = (
            distance // big + distance % big,
            distance // big + 1 + big - distance % big,
        )  # too far, and back
        return jnp.minimum(under, over)

    def _after(self, steps: Array, params: LightDarkParams) -> Array:
        """What is earned by that many steps and a stop at 0, float32."""
        steps, discount = steps.astype(jnp.float32), jnp.asarray(params.discount, jnp.float32)
        paid = jnp.where(
            discount < 1, (1 - discount**steps) / jnp.maximum(1 - discount, 1e-6), steps
        )
        return params.step_reward * paid + params.right_reward * discount**steps

    def heuristic(self, state: LightDarkState, params: LightDarkParams) -> Array:
        """The return by way of the light, where the place becomes known: the fewest steps there, then to 0, then stop.

        It is not the value of a known place, the straight way to 0: with that, the light has no advantage to a planner,
        which never stops. Nor is it the straight way to the light, which an agent that does not know its place cannot
        take: without `search_steps` more, and what the noise adds, the start has 72.8 where about 60 is reached. The
        search takes no step at the light itself, and nearly all of its steps one cell away from it: a higher value near
        the light would keep the planner there.
        """
        away = jnp.abs(state.place - self.light)
        straight = self._steps(away) + self._steps(jnp.asarray(abs(self.light)))
        search = params.search_steps + away.astype(jnp.float32) / params.search_noise
        steps = straight.astype(jnp.float32) + jnp.where(away > 0, search, 0.0)
        return jnp.where(state.stopped, 0.0, self._after(steps, params)).astype(jnp.float32)

    def upper_bound(self, state: LightDarkState, params: LightDarkParams) -> Array:
        """What one earns who knows the place and whom no step leads past 0; of rewards with the published signs."""
        steps = (jnp.abs(state.place) + self.big_step - 1) // self.big_step
        return jnp.where(state.stopped, 0.0, self._after(steps, params)).astype(jnp.float32)

    def render(self, state: LightDarkState, params: LightDarkParams) -> Array:
        """The line, light at the light and at 0 a mark; uint8 `[32, 2 (2 radius + 1), 3]`."""
        places = np.arange(-self.radius, self.radius + 1)
        shade = 255 * np.exp(-np.abs(places - self.light) / 15)
        image = jnp.asarray(
            np.broadcast_to(np.repeat(shade, 2)[None, :, None], (32, 2 * len(places), 3)),
            jnp.float32,
        )
        zero = 2.0 * self.radius + 1
        image = picture.rectangle(image, (zero - 1, 0.0), (zero + 1, 32.0), picture.GREEN)
        x = 2 * (state.place + self.radius).astype(jnp.float32) + 1
        color = jnp.where(state.stopped, jnp.asarray(picture.RED), jnp.asarray(picture.BLUE))
        return picture.to_uint8(picture.disc(image, jnp.stack([x, jnp.asarray(16.0)]), 5.0, color))


VARIANTS = {"LightDark": LightDark}
"""Names and the environments behind them."""
