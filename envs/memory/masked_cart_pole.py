"""CartPole seen in part or through noise: control that needs memory.

The dynamics are those of `classic.CartPole`; views and rewards are POPGym's (S. Morad et al., ICLR 2023), whose three
difficulties last 200, 400 and 600 steps, or have noise 0.1, 0.2 and 0.3. Every step earns 1 / max_steps, so that
balancing to the end returns 1.

Deviations from POPGym: its noise comes with positions only, here with any view; its noise is clipped to the space of
observations, here not, so that `log_likelihood` is exact; its velocity-only task shows positions after a reset, here
velocities always.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box
from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey

from ..classic.cart_pole import CartPole, CartPoleParams, CartPoleState

__all__ = ["VARIANTS", "MaskedCartPole", "NoisyCartPole"]

VIEWS = {"all": (0, 1, 2, 3), "positions": (0, 2), "velocities": (1, 3)}


@flax.struct.dataclass
class Params(CartPoleParams):
    """Those of CartPole with POPGym's shortest episodes."""

    max_steps: Any = 200


@flax.struct.dataclass
class NoisyParams(Params):
    """And the standard deviation of the noise on every observed number."""

    noise: Any = 0.1


@dataclasses.dataclass(frozen=True)
class MaskedCartPole(CartPole):
    """CartPole of which only some numbers are seen.

    Attributes:
        observed: "positions", "velocities" or "all" of (x, x', theta, theta').
    """

    observed: str = field("positions", OneOf(VIEWS))

    def __post_init__(self):
        check_fields(self)

    @property
    def name(self) -> str:
        """With its view."""
        return f"{type(self).__name__}-{self.observed}"

    @property
    def default_params(self) -> CartPoleParams:
        """200 steps."""
        return Params()

    def observation_space(self, params: CartPoleParams) -> Box:
        """Unbounded: velocities are, and so is noise."""
        return Box(-np.inf, np.inf, (len(VIEWS[self.observed]),))

    def observe(
        self, key: PRNGKey, state: CartPoleState, action: Array | None, params: CartPoleParams
    ) -> Array:
        """The observed numbers, float32 `[2]` or `[4]`."""
        return observed_numbers(state, self.observed)

    def reward(
        self, state: CartPoleState, action: Array, next_state: CartPoleState, params: CartPoleParams
    ) -> Array:
        """1 / max_steps."""
        return super().reward(state, action, next_state, params) / params.max_steps


@dataclasses.dataclass(frozen=True)
class NoisyCartPole(MaskedCartPole):
    """CartPole whose observed numbers come with Gaussian noise of standard deviation `params.noise`."""

    observed: str = field("all", OneOf(VIEWS))

    @property
    def default_params(self) -> NoisyParams:
        """200 steps, noise 0.1."""
        return NoisyParams()

    def observe(
        self, key: PRNGKey, state: CartPoleState, action: Array | None, params: NoisyParams
    ) -> Array:
        """The observed numbers with noise, float32 `[2]` or `[4]`; consumes `key`."""
        exact = observed_numbers(state, self.observed)
        return exact + params.noise * jax.random.normal(key, exact.shape)

    def log_likelihood(
        self,
        obs: Array,
        state: CartPoleState,
        action: Array,
        next_state: CartPoleState,
        params: NoisyParams,
    ) -> Array:
        """The density log p(obs | action, next state), a sum of normal log densities."""
        exact = observed_numbers(next_state, self.observed)
        return jnp.sum(jax.scipy.stats.norm.logpdf(obs, exact, params.noise))


def observed_numbers(state: CartPoleState, observed: str) -> Array:
    """What one of `VIEWS` shows, without noise."""
    motion = (state.x, state.x_dot, state.theta, state.theta_dot)
    return jnp.stack([motion[i] for i in VIEWS[observed]])


VARIANTS = {
    "MaskedCartPole-Positions": MaskedCartPole,
    "MaskedCartPole-Velocities": lambda: MaskedCartPole("velocities"),
    "NoisyCartPole": NoisyCartPole,
    "NoisyCartPole-Positions": lambda: NoisyCartPole("positions"),
}
