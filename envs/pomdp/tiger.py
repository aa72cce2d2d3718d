"""The tiger behind one of two doors: listen, or open and be done with it until the next one.

Kaelbling, Littman and Cassandra (1998), "Planning and acting in partially observable domains", section 5.1, with the
numbers of the benchmark: a listen costs 1 and hears the right side with 0.85, the tiger's door costs 100, the other one
earns 10, and after a door is opened the tiger is placed anew and what is heard means nothing. The process never ends.
The best value from no knowledge is 19.3714 with discount 0.95, and 1.9334 with 0.75 (the "aaai" benchmark).
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, picture
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "Tiger", "TigerParams", "TigerState"]

LISTEN, OPEN_LEFT, OPEN_RIGHT = range(3)


@flax.struct.dataclass
class TigerState:
    """Where the tiger is, int32: 0 left, 1 right."""

    tiger: Array


@flax.struct.dataclass
class TigerParams:
    """Rewards of a listen, of the tiger's door and of the other; how often a listen is right; the discount."""

    listen: Any = -1.0
    eaten: Any = -100.0
    free: Any = 10.0
    accuracy: Any = 0.85
    discount: Any = 0.95


@dataclasses.dataclass(frozen=True)
class Tiger:
    """Listen (0), open left (1), open right (2); observations: heard left (0), heard right (1)."""

    @property
    def name(self) -> str:
        """Tiger."""
        return "Tiger"

    @property
    def default_params(self) -> TigerParams:
        """The benchmark's."""
        return TigerParams()

    def observation_space(self, params: TigerParams) -> Discrete:
        """Heard left, heard right."""
        return Discrete(2, names=("heard left", "heard right"))

    def action_space(self, params: TigerParams) -> Discrete:
        """Listen, open left, open right."""
        return Discrete(3, names=("listen", "open left", "open right"))

    def init(self, key: PRNGKey, params: TigerParams) -> TigerState:
        """Either door."""
        return TigerState(jax.random.bernoulli(key).astype(jnp.int32))

    def transition(
        self, key: PRNGKey, state: TigerState, action: Array, params: TigerParams
    ) -> TigerState:
        """The tiger stays while one listens, else it is placed anew."""
        return TigerState(jnp.where(action == LISTEN, state.tiger, self.init(key, params).tiger))

    def observe(
        self, key: PRNGKey, state: TigerState, action: Array | None, params: TigerParams
    ) -> Array:
        """The tiger's side, if one listened and heard right; either side after a door or a reset."""
        right = self._accuracy(action, params)
        return jnp.where(jax.random.bernoulli(key, right), state.tiger, 1 - state.tiger).astype(
            jnp.int32
        )

    def reward(
        self, state: TigerState, action: Array, next_state: TigerState, params: TigerParams
    ) -> Array:
        """Of the side on which the tiger was."""
        opened = jnp.where(action - OPEN_LEFT == state.tiger, params.eaten, params.free)
        return jnp.where(action == LISTEN, params.listen, opened).astype(jnp.float32)

    def terminal(self, state: TigerState, params: TigerParams) -> Array:
        """Never."""
        return jnp.zeros((), bool)

    def log_likelihood(
        self,
        obs: Array,
        state: TigerState,
        action: Array,
        next_state: TigerState,
        params: TigerParams,
    ) -> Array:
        """Of hearing `obs` with the tiger at `next_state`."""
        right = self._accuracy(action, params)
        return jnp.log(jnp.where(obs == next_state.tiger, right, 1 - right)).astype(jnp.float32)

    def obs_key(self, obs: Array, params: TigerParams) -> Array:
        """The side."""
        return obs.astype(jnp.int32)

    def upper_bound(self, state: TigerState, params: TigerParams) -> Array:
        """The return if the tiger is seen: the other door at every step, or a listen if that is better."""
        most = jnp.maximum(jnp.asarray(params.free, jnp.float32), params.listen)
        return jnp.where(
            params.discount < 1, most / jnp.maximum(1 - params.discount, 1e-6), jnp.inf
        )

    def tabular(self, params: TigerParams) -> dict[str, Any]:
        """The whole model."""
        right, wrong = float(params.accuracy), 1 - float(params.accuracy)
        opened = np.full((2, 2), 0.5)
        eaten, free, listen = (float(x) for x in (params.eaten, params.free, params.listen))
        return {
            "transition": np.stack([np.eye(2), opened, opened]),
            "observation": np.stack([np.asarray([[right, wrong], [wrong, right]]), opened, opened]),
            "reward": np.asarray([[listen, listen], [eaten, free], [free, eaten]]),
            "start": np.full(2, 0.5),
            "discount": params.discount,
            "states": ("tiger-left", "tiger-right"),
            "actions": ("listen", "open-left", "open-right"),
            "observations": ("heard-left", "heard-right"),
        }

    def render(self, state: TigerState, params: TigerParams) -> Array:
        """Both doors and what is behind them, uint8 `[64, 96, 3]`."""
        image = picture.canvas(64, 96, picture.GRAY)
        for door in range(2):
            left = 12.0 + 40.0 * door
            image = picture.rectangle(image, (left, 8.0), (left + 32.0, 64.0), picture.BROWN)
            here, center = state.tiger == door, jnp.asarray([left + 16.0, 34.0])
            image = picture.disc(image, center, 10.0, picture.ORANGE, visible=here)
            for side in (-4.0, 4.0):
                image = picture.disc(
                    image, center + jnp.asarray([side, -2.0]), 2.0, picture.BLACK, visible=here
                )
            image = picture.disc(image, center, 7.0, picture.YELLOW, visible=~here)
        return picture.to_uint8(image)

    def _accuracy(self, action: Array | None, params: TigerParams) -> Array:
        listened = False if action is None else action == LISTEN
        return jnp.where(listened, params.accuracy, 0.5)


VARIANTS = {"Tiger": Tiger}
