"""Attention inside windows: a token sees its own window of W tokens up to itself, and `before` windows before that.

Windows lie at multiples of W of the row, whatever document is there; a document sees nothing of another.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.mesh import local
from jaxpar.nn.attention.cache import LinearCache, PositionRule
from jaxpar.nn.attention.kernels import in_blocks
from jaxpar.nn.attention.state import finish
from jaxpar.nn.attention.visibility import Visibility, Visible, Where
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Alibi, Rope

__all__ = ["attend_windows", "into_windows", "places_of"]

HEADS = ("batch", None, "heads", None)


def places_of(context: Context) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the place in the row of each token, and that at which its document began."""
    length = context.positions.shape[1]
    seen: Any = 0 if context.seen is None or context.fresh else context.seen[:, None]
    places = jnp.broadcast_to(
        seen + jnp.arange(length, dtype=jnp.int32)[None], context.positions.shape
    )
    if context.first is not None:
        return places, context.first
    starts = jnp.zeros(places.shape, bool) if context.starts is None else context.starts
    return places, jax.lax.cummax(jnp.where(starts, places, 0), axis=1)


def into_windows(x: Float[Array, "B T ..."], window: int) -> Float[Array, "B n W ..."]:
    """Cuts a row that begins with a window into windows, the last filled up with zeros."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % window)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, window, *x.shape[2:])


def attend_windows(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    cache: LinearCache | None,
    context: Context,
    *,
    window: int,
    before: int,
    positions: Rope | Alibi | None,
) -> tuple[Float[Array, "B T H K"], LinearCache | None]:
    """Computes softmax attention of each token to what it sees of its own window and of `before` ones before it.

    Args:
      q: Queries.
      k: Keys, as they left their product.
      v: Values.
      cache: Of (before + 1) W slots, with what came before; None for whole rows.
      context: Where documents begin and which tokens count.
      window: W.
      before: 0 or 1.
      positions: How scores depend on places.

    Returns:
      Outputs, and the cache with the tokens that count; None without one.

    Cost: 4 B T (before + 1) W H K operations; memory linear in T.
    """
    places, first = places_of(context)
    first = jnp.maximum(first, (places // window - before) * window)
    rule = PositionRule(Visible(window=(before + 1) * window), positions)
    if cache is not None and not context.fresh:
        state, cache = cache.attend(q, k, v, rule, context._replace(first=first))
        return finish(state).astype(q.dtype), cache
    q, k = (rule.rotate(x, context.positions) for x in (q, k))

    def block(q, k, v, first, *slopes):
        q, k, v, first = (into_windows(x, window) for x in (q, k, v, first))
        count = q.shape[1]
        queries = jnp.arange(count * window).reshape(1, count, window)
        if before:
            k, v = (
                jnp.concatenate([jnp.pad(x, [(0, 0), (1, 0)] + [(0, 0)] * 3)[:, :-1], x], 2)
                for x in (k, v)
            )
        keys = queries[:, :, :1] + jnp.arange(-before * window, window)[None, None]
        rows = [
            jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (q, k, v, queries, keys, first)
        ]
        q, k, v, queries, keys, first = (x.reshape(-1, *x.shape[2:]) for x in rows)
        of_queries = Where(positions=queries, first=first)
        visibility = Visibility(slopes=slopes[0] if slopes else None)
        sums = in_blocks(q, k, v, of_queries, Where(positions=keys), visibility)
        return finish(sums).astype(q.dtype).reshape(-1, count * window, *q.shape[2:])

    slopes = rule.slopes(q.shape[2])
    given = (q, k, v, first) if slopes is None else (q, k, v, first, slopes)
    axes = [HEADS, HEADS, HEADS, ("batch", None), ("heads",)][: len(given)]
    out = local(block, axes, HEADS)(*given)[:, : q.shape[1]]
    return out, None if cache is None else cache.fill(k, v, context)
