"""Distributions over actions: numbers of a policy's head -> raw actions, log probabilities, entropies.

| space | head | distribution |
| --- | --- | --- |
| `Discrete`, `MultiDiscrete` | `[*space.shape, choices]` logits | independent categorical ones, illegal choices at 0 |
| `Box` | `[n]` means, and `[n]` log standard deviations | independent normal ones, in units of the box |
| `Box` with bounds | the same, by `draw_squashed` | the tanh of those: never beyond -1 and 1, density and all |

A raw action is what was sampled. In a box the environment gets it scaled to the bounds and clipped (`scale_action`),
while the density stays that of the raw action.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Adapter, Box, Discrete, Environment, MultiDiscrete, Space, mask_shape
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = [
    "check_actions",
    "draw_squashed",
    "entropy",
    "head_size",
    "log_prob",
    "masked",
    "mode",
    "sample_action",
    "scale_action",
]

LOG_STD = (-20.0, 2.0)  # what `draw_squashed` holds log standard deviations to, as in its source


ActionSpace = Discrete | MultiDiscrete | Box
"""Spaces that `check_actions` accepts."""

Mask = Array | None
"""Legal actions, bool; None where all are."""


def check_actions(env: Environment | Adapter, space: Space) -> None:
    """Refuses spaces that no policy of this package acts in."""
    if not isinstance(space, Discrete | MultiDiscrete | Box) or (
        isinstance(space, Box) and not jnp.issubdtype(space.dtype, jnp.floating)
    ):
        raise UsageError(
            f"{env.name} takes actions of {space}; learners act by Discrete, MultiDiscrete or float Box."
        )


def head_size(space: ActionSpace) -> int:
    """How many numbers a policy's head gives."""
    return math.prod(space.shape if isinstance(space, Box) else mask_shape(space) or ())


def masked(space: ActionSpace, outputs: Array, mask: Mask) -> Array:
    """Logits `[..., *space.shape, choices]` with illegal choices at -1e9; outputs as they are for boxes.

    Finite: an infinite logit would make the gradient of a log probability NaN (infinity less infinity).
    """
    if isinstance(space, Box):
        return outputs
    shape = mask_shape(space)
    assert shape is not None  # the space is discrete
    logits = outputs.reshape(*outputs.shape[:-1], *shape)
    if isinstance(space, MultiDiscrete):
        exists = np.arange(shape[-1]) < np.asarray(space.ns)[:, None]
        logits = jnp.where(jnp.broadcast_to(exists, logits.shape), logits, -1e9)
    return logits if mask is None else jnp.where(mask, logits, -1e9)


def sample_action(key: PRNGKey, space: ActionSpace, head: Array) -> Array:
    """Samples from what `masked` returned, for every leading index; consumes `key`."""
    if isinstance(space, Box):
        mean, log_std = jnp.split(head, 2, -1)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape, mean.dtype)
    return jax.random.categorical(key, head).astype(space.dtype)


def draw_squashed(head: Array, noise: Array) -> tuple[Array, Array]:
    """The tanh of a normal draw, and its log density (Haarnoja et al. 2018, arXiv:1812.05905, appendix C).

        u = mean + std noise,    a = tanh(u),    log p(a) = log normal(u) - sum(log(1 - a^2))

    with log(1 - a^2) as 2 (log 2 - u - softplus(-2 u)), which has no end where a rounds to 1. Gradients flow through
    the draw.

    Args:
        head: means, and log standard deviations, which are held to -20 to 2 `[..., 2 n]`.
        noise: standard normal `[..., n]`.

    Returns:
        Actions `[..., n]` and log densities `[...]`.
    """
    mean, log_std = jnp.split(head, 2, -1)
    log_std = jnp.clip(log_std, *LOG_STD)
    u = mean + jnp.exp(log_std) * noise
    bend = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))
    return jnp.tanh(u), jnp.sum(-0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - bend, -1)


def mode(space: ActionSpace, head: Array) -> Array:
    """The likeliest raw action."""
    if isinstance(space, Box):
        return jnp.split(head, 2, -1)[0]
    return jnp.argmax(head, -1).astype(space.dtype)


def scale_action(space: ActionSpace, raw_action: Array) -> Array:
    """The action for the environment: within bounds, -1 to 1 spans a box; unbounded numbers stay as they are."""
    if not isinstance(space, Box):
        return raw_action
    low, high = space.bounds()
    x = raw_action.reshape(*raw_action.shape[:-1], *space.shape)
    finite = np.isfinite(low) & np.isfinite(high)
    middle, half = np.where(finite, (low + high) / 2, 0), np.where(finite, (high - low) / 2, 1)
    lead = (1,) * (x.ndim - low.ndim)
    middle, half, low, high = (
        jnp.asarray(v, x.dtype).reshape(lead + v.shape) for v in (middle, half, low, high)
    )
    return jnp.clip(middle + half * x, low, high).astype(space.dtype)


def log_prob(space: ActionSpace, head: Array, raw_action: Array) -> Array:
    """Log density of raw actions, summed over the numbers or choices of one action."""
    if isinstance(space, Box):
        mean, log_std = jnp.split(head, 2, -1)
        z = (raw_action - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi), -1)
    one = jnp.take_along_axis(
        jax.nn.log_softmax(head), raw_action[..., None].astype(jnp.int32), -1
    )[..., 0]
    return one.sum(tuple(range(one.ndim - len(space.shape), one.ndim)))


def entropy(space: ActionSpace, head: Array) -> Array:
    """Entropy of the raw action, in nats."""
    if isinstance(space, Box):
        log_std = jnp.split(head, 2, -1)[1]
        return jnp.sum(log_std + 0.5 * math.log(2 * math.pi * math.e), -1)
    log_p = jax.nn.log_softmax(head)
    one = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    return one.sum(tuple(range(one.ndim - len(space.shape), one.ndim)))
