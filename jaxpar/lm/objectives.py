"""What training makes smaller besides the loss of the next token, and the likelihoods that judge a model."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.lm.config import LMConfig
from jaxpar.lm.model import head, hidden, logits
from jaxpar.mesh import constrain, mesh_axes
from jaxpar.types import PRNGKey, PyTree

__all__ = ["token_log_likelihoods"]


def token_log_likelihoods(
    params: PyTree, batch: dict[str, Array], config: LMConfig, dropout_key: PRNGKey | None = None
) -> Float[Array, "B T"]:
    """Computes log softmax(logits)[target] of each token, differentiable as often as one likes.

    Cost: 2 B T V D operations and those of the layers; with the gradient 8 B T V D, as logits are made anew in the
    backward pass. Memory: the logits of `config.loss_chunk` tokens a device.

    Args:
      params: As from `jaxpar.lm.init`.
      batch: As `jaxpar.lm.loss` takes it; "weights" are not read.
      config: The model; static.
      dropout_key: Switches dropout on; consumed.
    """

    def chosen(x, target):
        z = _scores(held, x, config)
        hit = jnp.arange(z.shape[-1])[None, None] == target[..., None]  # no gather, as devices may share the symbols
        return jnp.where(hit, z, 0).sum(-1) - jax.nn.logsumexp(z, -1)

    x, held = _features(params, batch, config, dropout_key)
    return _by_chunks(chosen, config.loss_chunk, x, batch["targets"])


def _features(params: PyTree, batch: dict[str, Array], config: LMConfig, key: PRNGKey | None = None):
    """Returns what the head is multiplied by, and the head, gathered once for all chunks."""
    positions, segments, places = (batch.get(name) for name in ("positions", "segments", "places"))
    x, _ = hidden(
        params, batch["tokens"], config, positions=positions, segments=segments, places=places, dropout_key=key
    )
    return x, {"embedding": constrain(head(params).astype(x.dtype), "vocab", None)}


def _scores(held: PyTree, x: Float[Array, "B t D"], config: LMConfig) -> Float[Array, "B t V"]:
    return constrain(logits(held, x, config), "batch", None, "vocab")


def _by_chunks(fn: Callable[..., Array], chunk: int, *arrays: Array) -> Array:
    """Applies fn([B, t, ...], ...) -> [B, t] to some tokens at a time, `chunk` a device; nothing of it is kept."""
    rows, length = arrays[0].shape[:2]
    mesh = jax.sharding.get_abstract_mesh().shape
    share = -(-rows // math.prod(mesh[axis] for axis in mesh_axes("batch")))
    count = -(-length // max(1, chunk // share))
    fn = jax.checkpoint(fn)  # type: ignore[reportPrivateImportUsage]
    if count == 1:
        return fn(*arrays)
    size = -(-length // count)

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(rows, count, size, *x.shape[2:]).swapaxes(0, 1)

    out = jax.lax.map(lambda parts: fn(*parts), tuple(map(cut, arrays)))
    return out.swapaxes(0, 1).reshape(rows, count * size)[:, :length]
