"""Attention as sums that any parts of the keys can be added to: `attend` to a part, `merge` parts, `finish`.

The state of a query is (maximum, sum, weighted values): `jaxpar.scan.LogSumExp`, whose algebra is a commutative monoid.
So keys may be split over blocks, caches or devices, in any order and any sizes, empty ones too; `jaxpar.scan` adds them
up one key after the other (`attention_scan`), and Aaren is that scan with a query that does not change.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.nn.linear import wide_einsum
from jaxpar.scan.monoid import LOGSUMEXP, LogSumExp

__all__ = ["attend", "capped", "finish", "merge", "merge_parts", "slopes_bias"]


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    seen: Bool[Array, "B T S"],
    *,
    bias: Float[Array, "B H T S"] | None = None,
    cap: float = 0.0,
    dropout_rate: float = 0.0,
    seeds: jax.Array | None = None,
) -> LogSumExp:
    """Computes each query's sums over these keys, with the whole [T, S] score matrix; in float32 at least.

    Query head h reads key head h * G // H. Scores are q . k / sqrt(K), capped, + bias. Keys that are not seen are no
    part of any sum, whatever they hold but NaN or infinity.

    Args:
      q: Queries.
      k: Keys; G divides H.
      v: Values.
      seen: Where a query may look; B or T may be 1.
      bias: Added to the scores; any axis may be 1.
      cap: c of `capped`.
      dropout_rate: Share of weights dropped; what is kept counts 1 / (1 - rate).
      seeds: uint32 [B, H], one seed a row and head, so that dropout is the same on any mesh; None for no dropout.

    Returns:
      (maximum [B, T, H], sum [B, T, H], weighted values [B, T, H, K]).

    Cost: 4 B H T S K operations; B H T S scores.
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    shape = (batch, length, groups, heads // groups)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = wide_einsum("btgrk,bsgk->bgrts", q.reshape(*shape, width), k, wide)
    scores = capped(scores / math.sqrt(width), cap)
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(wide), (bias.shape[0], heads, *bias.shape[2:]))
        scores = scores + bias.reshape(bias.shape[0], groups, heads // groups, *bias.shape[2:])
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1))
    # From a finite unit, so that no difference of infinities is made where nothing is seen.
    weights = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0)[..., None])
    total = weights.sum(-1)
    if seeds is not None:
        sizes = weights.shape[3:]
        keep = jax.vmap(
            jax.vmap(lambda s: jax.random.bernoulli(jax.random.key(s), 1 - dropout_rate, sizes))
        )(seeds)
        weights = jnp.where(keep.reshape(weights.shape), weights / (1 - dropout_rate), 0)
    values = wide_einsum("bgrts,bsgk->btgrk", weights.astype(v.dtype), v, wide)
    flat = (batch, length, heads)
    top, total = (jnp.moveaxis(x, 3, 1).reshape(flat) for x in (top, total))
    return LogSumExp(top, total, values.reshape(*flat, width))


def capped(x: jax.Array, cap: float) -> jax.Array:
    """Returns c tanh(x / c), which lies between -c and c (soft-capping: arXiv:2408.00118, section 2); x for c = 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def slopes_bias(
    slopes: Float[Array, " H"], queries: Int[Array, "B T"], keys: Int[Array, "B S"]
) -> Float[Array, "B H T S"]:
    """Returns what is added to the scores of queries and keys at these places: -slope times their distance."""
    distance = (queries[:, :, None] - keys[:, None, :]).astype(slopes.dtype)
    return -slopes[None, :, None, None] * jnp.abs(distance)[:, None]


def merge(a: LogSumExp, b: LogSumExp) -> LogSumExp:
    """Returns the sums over the keys of both: associative, commutative, exact for parts of which nothing is seen."""
    return LOGSUMEXP.combine(a, b)


def merge_parts(states: LogSumExp, axis_name: str | tuple[str, ...] | None = None) -> LogSumExp:
    """Adds up partial states along their first axis, and over the devices of mesh axes inside `jax.shard_map`.

    Exact where some of the parts are of nothing, whose values may be anything, NaN too. Over devices by two
    all-reduces, of the maxima and of sums and values in one array, as large as one state however many keys there are
    (tree attention, arXiv:2408.04093, algorithm 3).
    """
    top = states.max.max(0)
    if axis_name is not None:
        top = jax.lax.pmax(top, axis_name)
    # From a finite unit, so that no difference of infinities is made where nothing is seen.
    scale = jnp.exp(states.max - jnp.where(top > -jnp.inf, top, 0)[None])
    values = jnp.where(states.max[..., None] > -jnp.inf, states.numerator, 0)
    total, values = (states.denominator * scale).sum(0), (values * scale[..., None]).sum(0)
    if axis_name is not None:
        sums = jax.lax.psum(jnp.concatenate([total[..., None], values], -1), axis_name)
        total, values = sums[..., 0], sums[..., 1:]
    return LogSumExp(top, total, values)


def finish(state: LogSumExp) -> Float[Array, "B T H K"]:
    """Returns the weighted means, in the state's dtype; 0 of a query that sees nothing."""
    return state.mean
