"""The gradient of attention over a part of the keys, from the log-sum-exp over all of them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.nn.attention.blockwise import block_gradient
from jaxpar.nn.attention.visibility import Visible

__all__ = ["attend_gradient"]

QUERIES = 256
"""Queries whose scores with the keys exist at the same time."""


def attend_gradient(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    queries: Int[Array, "B T"],
    keys: Int[Array, "B S"],
    log_sum: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
    g: Float[Array, "B T H K"],
    *,
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    visible: Visible,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Computes what these keys add to the gradients, in float32 at least; the derivative of `in_blocks` by places.

    The weights are those of the *whole* softmax, exp(score - log_sum): the log-sum-exp of these keys alone would give
    another function's gradient (FlashAttention-2, arXiv:2307.08691, algorithm 2).

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Places of the queries; B may be 1.
      keys: Places of the keys, negative where there is none; B may be 1.
      log_sum: Of each query over all keys there are; minus infinity of one that sees none.
      delta: Sum over K of g times the output.
      g: Gradient of the output.
      segments: Numbers of documents, of queries and of keys: those of another one are not seen.
      visible: The rule.

    Returns:
      Terms of the gradients by q, k and v.

    Cost: 10 B H T S K operations; memory B H QUERIES S.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def some(sums, part):
        q, places, own, *known = part
        seen = visible(places, keys)
        if segments is not None:
            seen = seen & (own[:, :, None] == segments[1][:, None, :])
        dq, dk, dv, _ = block_gradient(q, k, v, seen, *known)
        return (sums[0] + dk, sums[1] + dv), dq

    zero = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    places = jnp.broadcast_to(queries, q.shape[:2])
    parts = q, places, None if segments is None else segments[0], log_sum, delta, g
    if q.shape[1] <= QUERIES:
        (dk, dv), dq = some(zero, parts)
        return dq, dk, dv
    (dk, dv), dq = jax.lax.scan(some, zero, jax.tree.map(_cut, parts))
    return _whole(dq, q.shape[1]), dk, dv


def _cut(x: Array) -> Array:
    """[B, T, ...] -> [T / QUERIES, B, QUERIES, ...]; places that fill the last piece up are of nothing."""
    x = jnp.pad(
        x, [(0, 0), (0, -x.shape[1] % QUERIES)] + [(0, 0)] * (x.ndim - 2), constant_values=-1
    )
    return jnp.moveaxis(x.reshape(x.shape[0], -1, QUERIES, *x.shape[2:]), 1, 0)


def _whole(x: Array, length: int) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
