"""The gradient of attention over a part of the keys, from the log-sum-exp over all of them."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.nn.attention.state import capped
from jaxpar.nn.attention.visibility import Visible, Where
from jaxpar.nn.linear import wide_einsum

__all__ = ["Done", "OutputGradient", "attend_gradient", "block_gradient"]

QUERIES = 256
"""Queries whose scores with the keys exist at the same time."""


class OutputGradient(NamedTuple):
    """Gradient of queries' outputs, with two numbers of each that make weights and scores of it.

    Attributes:
      log_sum: Log-sum-exp over all keys there are; minus infinity of a query that sees none.
      delta: Sum over K of the gradient times the output.
      gradient: Gradient of the outputs.
    """

    log_sum: Float[Array, "B T H"]
    delta: Float[Array, "B T H"]
    gradient: Float[Array, "B T H K"]


class Done(NamedTuple):
    """Results of the forward pass of queries over all keys, and the gradient of their outputs.

    Attributes:
      out: Outputs over all keys that the queries see, here or elsewhere.
      log_sum: Log-sum-exp over all those keys.
      gradient: Gradient of the outputs.
    """

    out: Float[Array, "B T H K"]
    log_sum: Float[Array, "B T H"]
    gradient: Float[Array, "B T H K"]

    def output_gradient(self) -> OutputGradient:
        """Returns the gradient with its sums over K, in float32 at least."""
        wide = jnp.promote_types(self.out.dtype, jnp.float32)
        delta = (self.out.astype(wide) * self.gradient.astype(wide)).sum(-1)
        return OutputGradient(log_sum=self.log_sum, delta=delta, gradient=self.gradient)


def attend_gradient(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    queries: Where,
    keys: Where,
    known: OutputGradient,
    visible: Visible,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Computes what these keys add to the gradients of `in_blocks`, in float32 at least.

    The weights are those of the *whole* softmax, exp(score - log_sum): the log-sum-exp of these keys alone would give
    another function's gradient (FlashAttention-2, arXiv:2307.08691, algorithm 2).

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Positions of the queries, and their documents: keys of another one are unseen.
      keys: Positions of the keys, negative where there is none, and their documents.
      known: Gradient of the outputs, and log-sum-exp over all keys there are.
      visible: The rule.

    Returns:
      Terms of the gradients by q, k and v.

    Cost: 10 B H T S K operations; memory B H QUERIES S.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def some(sums, part):
        q, block, known = part
        dq, dk, dv, _ = block_gradient(q, k, v, visible.mask(block, keys), known)
        return (sums[0] + dk, sums[1] + dv), dq

    zero = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    assert queries.positions is not None
    positions = jnp.broadcast_to(queries.positions, q.shape[:2])
    parts = q, queries._replace(positions=positions), known
    if q.shape[1] <= QUERIES:
        (dk, dv), dq = some(zero, parts)
        return dq, dk, dv
    (dk, dv), dq = jax.lax.scan(some, zero, jax.tree.map(_cut, parts))
    return _whole(dq, q.shape[1]), dk, dv


def block_gradient(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    seen: Bool[Array, "B T S"],
    known: OutputGradient,
    *,
    bias: Float[Array, "B H T S"] | None = None,
    cap: float = 0.0,
) -> tuple[
    Float[Array, "B T H K"],
    Float[Array, "B S G K"],
    Float[Array, "B S G K"],
    Float[Array, "B H T S"],
]:
    """Computes what these keys add to the gradients of attention, in float32 at least.

    The weights are those of the whole softmax, exp(score - log_sum): the log-sum-exp of these keys alone would give
    another function's gradient.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      seen: Where a query may look.
      known: Gradient of the outputs, and log-sum-exp over all keys there are.
      bias: Added to the scores.
      cap: c of `capped`, for the scores before the bias.

    Returns:
      Terms of the gradients by q, k and v, and the gradient by the scores.
    """
    wide, width, groups = jnp.promote_types(q.dtype, jnp.float32), q.shape[-1], k.shape[2]

    def grouped(x):  # [B, T, H, ...] -> [B, T, G, H/G, ...]
        return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])

    def heads(x):  # [B, G, H/G, T, S] -> [B, H, T, S]
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    q = grouped(q)
    g = grouped(known.gradient).astype(v.dtype)
    log_sum, delta = (
        jnp.moveaxis(grouped(x), 1, -1)[..., None] for x in (known.log_sum, known.delta)
    )  # [B, G, H/G, T, 1]
    scores = wide_einsum("btgrk,bsgk->bgrts", q, k, wide) / math.sqrt(width)
    slope, scores = 1 - jnp.square(jnp.tanh(scores / cap)) if cap else 1.0, capped(scores, cap)
    if bias is not None:
        scores = scores + bias.reshape(bias.shape[0], groups, -1, *bias.shape[2:]).astype(wide)
    weights = jnp.exp(scores - jnp.where(log_sum > -jnp.inf, log_sum, 0))
    weights = jnp.where(seen[:, None, None], weights, 0)
    dv = wide_einsum("bgrts,btgrk->bsgk", weights.astype(v.dtype), g, wide)
    dweights = wide_einsum("btgrk,bsgk->bgrts", g, v, wide)
    dscores = weights * (dweights - delta)
    narrow = (dscores * slope / math.sqrt(width)).astype(q.dtype)
    dq = wide_einsum("bgrts,bsgk->btgrk", narrow, k, wide)
    dk = wide_einsum("bgrts,btgrk->bsgk", narrow, q, wide)
    return dq.reshape(*dq.shape[:2], -1, width), dk, dv, heads(dscores)


def _cut(x: Array) -> Array:
    """[B, T, ...] -> [T / QUERIES, B, QUERIES, ...]; places that fill the last piece up are of nothing."""
    x = jnp.pad(
        x, [(0, 0), (0, -x.shape[1] % QUERIES)] + [(0, 0)] * (x.ndim - 2), constant_values=-1
    )
    return jnp.moveaxis(x.reshape(x.shape[0], -1, QUERIES, *x.shape[2:]), 1, 0)


def _whole(x: Array, length: int) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]
