"""The crying baby: feed it, or guess from its crying whether it is hungry.

Kochenderfer (2015), "Decision making under uncertainty", with the numbers of POMDPModels.jl: a feed costs 5, a hungry
baby costs 10 a step, a fed one becomes hungry with 0.1, a hungry one stays so until fed; it cries with 0.8 when hungry
and with 0.1 when not. The process never ends. The best value from a baby that is not hungry is -16.3055 with discount
0.9; feeding whenever it cries has -17.14.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, picture
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "BabyParams", "BabyState", "CryingBaby"]

IGNORE, FEED = range(2)


@flax.struct.dataclass
class BabyState:
    """Whether the baby is hungry, int32."""

    hungry: Array


@flax.struct.dataclass
class BabyParams:
    """Rewards of a feed and of hunger, chances to become hungry and to cry, the discount."""

    feed: Any = -5.0
    hunger: Any = -10.0
    becomes_hungry: Any = 0.1
    cries_when_hungry: Any = 0.8
    cries_when_not: Any = 0.1
    discount: Any = 0.9


@dataclasses.dataclass(frozen=True)
class CryingBaby:
    """Ignore (0) or feed (1); observations: quiet (0), crying (1)."""

    @property
    def name(self) -> str:
        """CryingBaby."""
        return "CryingBaby"

    @property
    def default_params(self) -> BabyParams:
        """The benchmark's."""
        return BabyParams()

    def observation_space(self, params: BabyParams) -> Discrete:
        """Quiet, crying."""
        return Discrete(2)

    def action_space(self, params: BabyParams) -> Discrete:
        """Ignore, feed."""
        return Discrete(2, names=("ignore", "feed"))

    def init(self, key: PRNGKey, params: BabyParams) -> BabyState:
        """Not hungry."""
        return BabyState(jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: BabyState, action: Array, params: BabyParams
    ) -> BabyState:
        """A fed baby is not hungry, a hungry one stays so, and any other may become so."""
        ignored = jnp.where(state.hungry == 1, 1.0, params.becomes_hungry)
        return BabyState(
            jax.random.bernoulli(key, jnp.where(action == FEED, 0.0, ignored)).astype(jnp.int32)
        )

    def observe(
        self, key: PRNGKey, state: BabyState, action: Array | None, params: BabyParams
    ) -> Array:
        """Whether it cries."""
        return jax.random.bernoulli(key, self._cries(state, params)).astype(jnp.int32)

    def reward(
        self, state: BabyState, action: Array, next_state: BabyState, params: BabyParams
    ) -> Array:
        """Of the hunger before the action, and of the action."""
        cost = jnp.where(state.hungry == 1, params.hunger, 0.0) + jnp.where(
            action == FEED, params.feed, 0.0
        )
        return cost.astype(jnp.float32)

    def terminal(self, state: BabyState, params: BabyParams) -> Array:
        """Never."""
        return jnp.zeros((), bool)

    def log_likelihood(
        self, obs: Array, state: BabyState, action: Array, next_state: BabyState, params: BabyParams
    ) -> Array:
        """Of crying, or not, with the hunger of `next_state`."""
        cries = self._cries(next_state, params)
        return jnp.log(jnp.where(obs == 1, cries, 1 - cries)).astype(jnp.float32)

    def obs_key(self, obs: Array, params: BabyParams) -> Array:
        """Whether it cries."""
        return obs.astype(jnp.int32)

    def tabular(self, params: BabyParams) -> dict[str, Any]:
        """The whole model."""
        feed, hunger, new, cries, errs = (
            float(x)
            for x in (
                params.feed,
                params.hunger,
                params.becomes_hungry,
                params.cries_when_hungry,
                params.cries_when_not,
            )
        )
        seen = np.asarray([[1 - errs, errs], [1 - cries, cries]])
        return {
            "transition": np.asarray([[[1 - new, new], [0, 1]], [[1, 0], [1, 0]]]),
            "observation": np.stack([seen, seen]),
            "reward": np.asarray([[0, hunger], [feed, hunger + feed]]),
            "start": np.asarray([1, 0]),
            "discount": params.discount,
            "states": ("fed", "hungry"),
            "actions": ("ignore", "feed"),
            "observations": ("quiet", "crying"),
        }

    def render(self, state: BabyState, params: BabyParams) -> Array:
        """A face, red when hungry, uint8 `[64, 64, 3]`."""
        hungry = state.hungry == 1
        image = picture.canvas(64, 64)
        color = jnp.where(hungry, jnp.asarray(picture.RED), jnp.asarray(picture.YELLOW)).astype(
            jnp.float32
        )
        image = picture.disc(image, (32.0, 32.0), 24.0, color)
        for side in (24.0, 40.0):
            image = picture.disc(image, (side, 26.0), 3.0, picture.BLACK)
        image = picture.disc(image, (32.0, 42.0), 6.0, picture.BLACK, visible=hungry)
        return picture.to_uint8(
            picture.line(image, (26.0, 42.0), (38.0, 42.0), 2.0, picture.BLACK, visible=~hungry)
        )

    def _cries(self, state: BabyState, params: BabyParams) -> Array:
        return jnp.where(state.hungry == 1, params.cries_when_hungry, params.cries_when_not)


VARIANTS = {"CryingBaby": CryingBaby}
