"""Distributions over actions: numbers of a policy's head -> draws, log probabilities, entropies.

| space | head | distribution |
| --- | --- | --- |
| `Discrete`, `MultiDiscrete` | `[*space.shape, choices]` logits | independent categorical ones, illegal choices at 0 |
| `Box` | `[n]` means, and `[n]` log standard deviations | independent normal ones, in units of the box |

A draw from a box is kept as drawn, and acted on after scaling to the bounds and clipping: the density is the draw's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, MultiDiscrete, mask_shape
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["action_of", "check_actions", "draw", "entropy", "head_size", "log_prob", "masked", "mode"]


def check_actions(space: Any, name: str) -> None:
    """Refuses spaces that no policy here acts in."""
    if not isinstance(space, Discrete | MultiDiscrete | Box) or (
        isinstance(space, Box) and not jnp.issubdtype(space.dtype, jnp.floating)
    ):
        raise UsageError(f"{name} takes actions of {space}; learners act by Discrete, MultiDiscrete or float Box.")


def head_size(space: Any) -> int:
    """How many numbers a policy's head gives."""
    return math.prod(space.shape if isinstance(space, Box) else mask_shape(space) or ())


def masked(space: Any, outputs: Array, mask: Array | None) -> Array:
    """Logits `[..., *space.shape, choices]` with illegal choices at -1e9; outputs as they are for boxes.

    Finite, so that no gradient is lost to an infinity less itself.
    """
    if isinstance(space, Box):
        return outputs
    shape: Any = mask_shape(space)
    logits = outputs.reshape(*outputs.shape[:-1], *shape)
    if isinstance(space, MultiDiscrete):
        exists = np.arange(shape[-1]) < np.asarray(space.ns)[:, None]
        logits = jnp.where(jnp.broadcast_to(exists, logits.shape), logits, -1e9)
    return logits if mask is None else jnp.where(mask, logits, -1e9)


def draw(key: PRNGKey, space: Any, head: Array) -> Array:
    """Draws from what `masked` returned, for every leading index; consumes `key`."""
    if isinstance(space, Box):
        mean, log_std = jnp.split(head, 2, -1)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape, mean.dtype)
    return jax.random.categorical(key, head).astype(space.dtype)


def mode(space: Any, head: Array) -> Array:
    """The likeliest draw."""
    if isinstance(space, Box):
        return jnp.split(head, 2, -1)[0]
    return jnp.argmax(head, -1).astype(space.dtype)


def action_of(space: Any, drawn: Array) -> Array:
    """The action that a draw stands for: within bounds, -1 to 1 spans a box; unbounded ones are taken as drawn."""
    if not isinstance(space, Box):
        return drawn
    low, high = space.bounds()
    x = drawn.reshape(*drawn.shape[:-1], *space.shape)
    finite = np.isfinite(low) & np.isfinite(high)
    middle, half = np.where(finite, (low + high) / 2, 0), np.where(finite, (high - low) / 2, 1)
    lead = (1,) * (x.ndim - low.ndim)
    middle, half, low, high = (jnp.asarray(v, x.dtype).reshape(lead + v.shape) for v in (middle, half, low, high))
    return jnp.clip(middle + half * x, low, high).astype(space.dtype)


def log_prob(space: Any, head: Array, drawn: Array) -> Array:
    """Log density of draws, summed over what one action consists of."""
    if isinstance(space, Box):
        mean, log_std = jnp.split(head, 2, -1)
        z = (drawn - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi), -1)
    one = jnp.take_along_axis(jax.nn.log_softmax(head), drawn[..., None].astype(jnp.int32), -1)[..., 0]
    return one.sum(tuple(range(one.ndim - len(space.shape), one.ndim)))


def entropy(space: Any, head: Array) -> Array:
    """Entropy, in nats, of the draw."""
    if isinstance(space, Box):
        log_std = jnp.split(head, 2, -1)[1]
        return jnp.sum(log_std + 0.5 * math.log(2 * math.pi * math.e), -1)
    log_p = jax.nn.log_softmax(head)
    one = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    return one.sum(tuple(range(one.ndim - len(space.shape), one.ndim)))
