"""Attention of one piece of the queries to one piece of the keys: the sums of the forward pass, and its gradient."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.nn.attention import Visible
from jaxpar.nn.attention.kernels import in_blocks
from jaxpar.scan.monoid import LogSumExp

QUERIES = 256
"""Queries whose scores with a piece of the keys exist at the same time in the backward pass."""


class Where(NamedTuple):
    """Where tokens are: they travel with what they belong to, since no device knows it from an index.

    Attributes:
      positions: Places in the sequence; negative ones are of nothing.
      segments: Numbers of documents; None where each row is one.
    """

    positions: Int[Array, "B T"]
    segments: Int[Array, "B T"] | None = None


def attend_piece(q: Array, k: Array, v: Array, queries: Where, keys: Where, visible: Visible) -> LogSumExp:
    """Computes `jaxpar.nn.attention.attend` by places, some queries at a time."""
    return in_blocks(q, k, v, queries.positions, keys.positions, segments=_documents(queries, keys), visible=visible)


def _documents(queries: Where, keys: Where) -> tuple[Array, Array] | None:
    if queries.segments is None or keys.segments is None:
        return None
    return queries.segments, keys.segments


def attend_gradient(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    queries: Where,
    keys: Where,
    visible: Visible,
    log_sum: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
    g: Float[Array, "B T H K"],
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Computes what this piece of the keys adds to the gradients, in float32 at least.

    The weights are those of the *whole* softmax, exp(score - log_sum): the log-sum-exp of this piece alone would give
    another function's gradient. Equations of FlashAttention-2 (arXiv:2307.08691, algorithm 2).

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Where the queries are.
      keys: Where the keys are.
      visible: The rule.
      log_sum: Of each query over all keys there are; minus infinity of one that sees none.
      delta: Sum over K of g times the output.
      g: Gradient of the output.

    Returns:
      Terms of the gradients by q, k and v.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    groups, scale = k.shape[2], 1 / math.sqrt(q.shape[-1])

    def grouped(x):  # [B, T, H, ...] -> [B, T, G, H/G, ...]
        return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])

    def some(carry, part):
        q, at, log_sum, delta, g = part
        q, g = grouped(q), grouped(g).astype(v.dtype)
        log_sum, delta = (jnp.moveaxis(grouped(x), 1, -1)[..., None] for x in (log_sum, delta))  # [B, G, H/G, T, 1]
        scores = jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=wide) * scale
        seen, documents = visible(at.positions, keys.positions), _documents(at, keys)
        if documents is not None:
            seen = seen & (documents[0][:, :, None] == documents[1][:, None, :])
        seen = seen[:, None, None]
        weights = jnp.where(seen, jnp.exp(scores - jnp.where(log_sum > -jnp.inf, log_sum, 0)), 0)
        dv = jnp.einsum("bgrts,btgrk->bsgk", weights.astype(v.dtype), g, preferred_element_type=wide)
        dweights = jnp.einsum("btgrk,bsgk->bgrts", g, v, preferred_element_type=wide)
        dscores = (weights * (dweights - delta) * scale).astype(q.dtype)
        dq = jnp.einsum("bgrts,bsgk->btgrk", dscores, k, preferred_element_type=wide)
        dk = jnp.einsum("bgrts,btgrk->bsgk", dscores, q, preferred_element_type=wide)
        return (carry[0] + dk, carry[1] + dv), dq.reshape(*dq.shape[:2], -1, dq.shape[-1])

    zero = jnp.zeros_like(k, wide) + 0 * k.astype(wide), jnp.zeros_like(v, wide) + 0 * v.astype(wide)
    parts = q, queries, log_sum, delta, g
    if q.shape[1] <= QUERIES:
        (dk, dv), dq = some(zero, parts)
        return dq, dk, dv
    (dk, dv), dq = jax.lax.scan(some, zero, jax.tree.map(_cut, parts))
    return _whole(dq, q.shape[1]), dk, dv


def _cut(x: Array) -> Array:
    """[B, T, ...] -> [T / QUERIES, B, QUERIES, ...]; places that fill the last piece up are of nothing."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % QUERIES)] + [(0, 0)] * (x.ndim - 2), constant_values=-1)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, QUERIES, *x.shape[2:]), 1, 0)


def _whole(x: Array, length: int) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
