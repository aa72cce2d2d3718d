"""Features of observations for a network: numbers `[F]`, or a picture `[H, W, C]`, by the space."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import (
    Adapter,
    Box,
    Discrete,
    Environment,
    Fields,
    MultiDiscrete,
    Space,
    capabilities,
)
from jaxpar.env.spaces import Bound
from jaxpar.types import Array, PyTree

__all__ = [
    "agent_action_space",
    "agent_obs_space",
    "feature_shape",
    "features",
    "num_agents",
    "num_choices",
    "of_one_agent",
    "zeros_of",
]

MAX_CHOICES = 32  # integers of no more values than this count as names, not as numbers


def num_agents(env: Environment | Adapter) -> int:
    """N, or 0 for a lone agent."""
    return capabilities(env).num_agents or 0


def agent_action_space(env: Environment | Adapter) -> Space:
    """The actions of one agent."""
    return of_one_agent(env.action_space(env.default_params), num_agents(env))


def agent_obs_space(env: Environment | Adapter) -> Space:
    """The observations of one agent."""
    return of_one_agent(env.observation_space(env.default_params), num_agents(env))


def of_one_agent(space: Space, count: int) -> Space:
    """The space of one agent, from that of all: `[N, ...]` without the N; as it is for a count of 0, a lone one."""
    if not count:
        return space
    match space:
        case Discrete():
            return Discrete(space.n, space.shape[1:], space.dtype)
        case MultiDiscrete():
            return Discrete(max(space.ns), (), space.dtype)
        case Fields():
            return Fields(tuple((name, of_one_agent(inner, count)) for name, inner in space.items))
    low, high = (np.unique(end.reshape(count, -1), axis=0) for end in space.bounds())
    shape = space.shape[1:]
    return Box(_bound(low[0], shape), _bound(high[0], shape), shape, space.dtype)


def _bound(end: np.ndarray, shape: tuple[int, ...]) -> Bound:
    """One bound as a hashable value."""
    if np.all(end == end[0]):
        return float(end[0])

    def nested(x):
        return tuple(nested(y) for y in x) if isinstance(x, list) else x

    return nested(end.reshape(shape).tolist())


def features(space: Space, obs: PyTree) -> Array:
    """Reads observations `[*L, ...]` of one agent: float32 `[*L, F]`, or `[*L, H, W, C]` for pictures.

    Choices, and integers of few values, become indicators; bytes up to 255 are divided by it; fields are put side by
    side, flat. Pictures are arrays of three axes that stand alone.
    """
    match space:
        case Discrete():
            return _flat(jax.nn.one_hot(obs, space.n, dtype=jnp.float32), len(space.shape) + 1)
        case MultiDiscrete():
            return jnp.concatenate(
                [jax.nn.one_hot(obs[..., i], n, dtype=jnp.float32) for i, n in enumerate(space.ns)],
                -1,
            )
        case Fields():
            parts = [
                (features(inner, obs[name]), len(feature_shape(inner)))
                for name, inner in space.items
            ]
            return jnp.concatenate([_flat(x, rank) for x, rank in parts], -1)
    rank = len(space.shape)
    choices = num_choices(space)
    if choices:
        low = space.bounds()[0].min().astype(np.int32)
        x = jax.nn.one_hot(obs.astype(jnp.int32) - low, choices, dtype=jnp.float32)
        return x.reshape(*x.shape[:-2], -1) if rank == 3 else _flat(x, rank + 1)
    x = obs.astype(jnp.promote_types(obs.dtype, jnp.float32))
    if jnp.issubdtype(space.dtype, jnp.unsignedinteger):
        x = x / 255.0
    return x if rank == 3 else _flat(x, rank)


def feature_shape(space: Space) -> tuple[int, ...]:
    """`[F]` or `[H, W, C]`."""
    return jax.eval_shape(lambda: features(space, zeros_of(space))).shape


def zeros_of(space: Space) -> PyTree:
    """Zeros of an element's shapes and dtypes."""
    if isinstance(space, Fields):
        return {name: zeros_of(inner) for name, inner in space.items}
    return jnp.zeros(space.shape, space.dtype)


def num_choices(space: Box) -> int:
    """How many values an element has that is read as a name; 0 where it is read as a number."""
    if not jnp.issubdtype(space.dtype, jnp.integer):
        return 0
    low, high = space.bounds()
    choices = int(high.max()) - int(low.min()) + 1 if low.size else 0
    return choices if 2 < choices <= MAX_CHOICES else 0


def _flat(x: Array, rank: int) -> Array:
    return x.reshape(*x.shape[: x.ndim - rank], math.prod(x.shape[x.ndim - rank :]))
