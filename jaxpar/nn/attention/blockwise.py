"""Attention by blocks of queries and of keys, forward and backward: linear memory where there is no kernel.

A block of queries adds up its sums over the blocks of keys that it sees (`attend`, `merge`); the backward pass makes
each block's weights anew from the log-sum-exp of all. So the scores of one pair of blocks exist at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.nn.attention.gradient import Done, block_gradient
from jaxpar.nn.attention.state import attend, finish, merge, slopes_bias
from jaxpar.nn.attention.visibility import Visibility, Visible
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import PyTree

__all__ = ["attention_by_blocks"]

QUERIES, KEYS = 512, 512
"""Most queries, and most keys, whose scores exist at the same time: any two sizes give the same numbers.

More queries read the keys less often, and more keys add to a block's sums less often; the scores grow with both.
"""

CAUSAL = Visibility()


def attention_by_blocks(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    *,
    segments: Int[Array, "B T"] | None = None,
    visibility: Visibility = CAUSAL,
) -> Float[Array, "B T H K"]:
    """Computes what dense attention does, of which no array has two axes of tokens (arXiv:2305.19370, section 3).

    Blocks that the rule hides whole are left out: half the work of causal attention, all but the window's of a window.

    Args:
      q: Queries.
      k: Keys; G divides H.
      v: Values.
      segments: Document numbers; positions of another document are not seen.
      visibility: Rule, slopes and cap; a mask of its own it cannot have.

    Cost: 4 B H T^2 K operations forward, 10 backward, half of both where causal. Memory: O(B T H K), and the scores of
    one pair of blocks, B H QUERIES KEYS. Reverse mode only. The gradient is FlashAttention-2's (arXiv:2307.08691,
    algorithm 2).
    """
    assert visibility.among is None  # else `attention` takes the dense form
    return _attention(visibility.rule, visibility.cap, q, k, v, segments, visibility.slopes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    visible: Visible,
    cap: float,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    slopes: Array | None,
) -> Array:
    return _forward(visible, cap, q, k, v, segments, slopes)[0]


class _Piece(NamedTuple):
    """One block's tokens, or all blocks' along a new first axis."""

    x: PyTree  # of arrays [B, b, ...]
    number: Int[Array, ""]
    places: Int[Array, "1 b"]
    segments: Int[Array, "B b"] | None


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How T tokens are cut into blocks of one size; what fills the last one up has place -1, which none sees."""

    length: int
    count: int
    size: int

    @classmethod
    def of(cls, length: int, most: int) -> "_Cut":
        count = -(-length // most)
        return cls(length, count, -(-length // count))

    def blocks(self, x: PyTree, segments: Array | None) -> _Piece:
        def cut(x, fill=0):
            missing = self.count * self.size - self.length
            x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
            return jnp.moveaxis(x.reshape(x.shape[0], self.count, self.size, *x.shape[2:]), 1, 0)

        # Else JAX finds that masks depend on nothing in a loop over layers, and makes those of all blocks before it.
        counts = jnp.arange(self.count), jnp.arange(self.length)[None]
        x, (numbers, places) = jax.lax.optimization_barrier((x, counts))
        return _Piece(
            jax.tree.map(cut, x),
            numbers,
            cut(places, -1),
            None if segments is None else cut(segments),
        )

    def whole(self, x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """Blocks of the queries beside those of the keys."""

    queries: _Cut
    keys: _Cut

    @classmethod
    def of(cls, length: int) -> "_Pairs":
        return cls(_Cut.of(length, QUERIES), _Cut.of(length, KEYS))

    def over_keys(
        self,
        block: Array,
        visible: Visible,
        of_keys: Callable,
        nothing: PyTree,
        add: Callable,
        sums: PyTree,
    ) -> PyTree:
        """Returns the sums with `of_keys(j)` of each block of keys of which this block of queries sees anything."""

        def one(sums, j):
            if not visible.causal:
                return add(sums, j, of_keys(j)), None
            # Sums stay out of the conditional, through which they would be copied.
            more = jax.lax.cond(self.is_seen(block, j, visible), of_keys, lambda _: nothing, j)
            return add(sums, j, more), None

        # Of known length, so that estimates count it.
        return jax.lax.scan(one, sums, jnp.arange(self.keys.count))[0]

    def is_seen(self, i: Array, j: Array, visible: Visible) -> Array:
        """Whether a causal rule lets a block of queries see anything of a block of keys."""
        seen = j * self.keys.size < (i + 1) * self.queries.size
        nearest = (
            i * self.queries.size - (j + 1) * self.keys.size + 1
        )  # of the first query and the last key
        return seen & (nearest < visible.window) if visible.window else seen


def _at(piece: _Piece, index: Array) -> _Piece:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), piece)


def _seen(queries: _Piece, keys: _Piece, visible: Visible) -> Bool[Array, "B t s"]:
    seen = visible(queries.places, keys.places)
    if queries.segments is not None and keys.segments is not None:
        seen = seen & (queries.segments[:, :, None] == keys.segments[:, None, :])
    return seen


def _bias(queries: _Piece, keys: _Piece, slopes: Array | None) -> Array | None:
    return None if slopes is None else slopes_bias(slopes, queries.places, keys.places)


def _forward(
    visible: Visible,
    cap: float,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    slopes: Array | None,
):
    pairs = _Pairs.of(q.shape[1])
    keys = pairs.keys.blocks((k, v), segments)

    def some(_, queries):
        def of_keys(j):
            part = _at(keys, j)
            (k, v), seen, bias = part.x, _seen(queries, part, visible), _bias(queries, part, slopes)
            return attend(queries.x, k, v, seen, bias=bias, cap=cap)

        wide = jnp.promote_types(q.dtype, jnp.float32)
        zero = jnp.zeros(queries.x.shape, wide)
        nothing = LogSumExp(jnp.full(zero.shape[:-1], -jnp.inf, wide), zero[..., 0], zero)
        add = lambda state, _, more: merge(state, more)  # noqa: E731
        state = pairs.over_keys(queries.number, visible, of_keys, nothing, add, nothing)
        return None, (finish(state).astype(q.dtype), state.log_sum)

    _, (out, log_sum) = jax.lax.scan(some, None, pairs.queries.blocks(q, segments))
    out = pairs.queries.whole(out)
    return out, (q, k, v, segments, slopes, out, pairs.queries.whole(log_sum))


def _backward(visible: Visible, cap: float, kept: tuple, g: Array):
    q, k, v, segments, slopes, out, log_sum = kept
    pairs, wide = _Pairs.of(q.shape[1]), jnp.promote_types(q.dtype, jnp.float32)
    known = Done(out=out, log_sum=log_sum, gradient=g).output_gradient()
    keys, none = (
        pairs.keys.blocks((k, v), segments),
        None if slopes is None else jnp.zeros(slopes.shape, wide),
    )

    def some(sums, queries):
        q, known = queries.x

        def of_keys(j):
            part = _at(keys, j)
            (k, v), seen, bias = part.x, _seen(queries, part, visible), _bias(queries, part, slopes)
            dq, dk, dv, dscores = block_gradient(q, k, v, seen, known, bias=bias, cap=cap)
            if slopes is None:
                return dq, dk, dv, None
            distance = slopes_bias(-jnp.ones_like(slopes), queries.places, part.places)
            return dq, dk, dv, -(dscores * distance).sum((0, 2, 3))

        def add(sums, j, more):
            dq, dk, dv, dslopes = sums
            total = None if slopes is None else dslopes + more[3]
            return dq + more[0], dk.at[j].add(more[1]), dv.at[j].add(more[2]), total

        zero = jnp.zeros(q.shape, wide)
        nothing = zero, *(jnp.zeros(x.shape[1:], wide) for x in keys.x), none
        dq, *sums = pairs.over_keys(queries.number, visible, of_keys, nothing, add, (zero, *sums))
        return tuple(sums), dq.astype(q.dtype)

    queries = pairs.queries.blocks((q, known), segments)
    zeros = [jnp.zeros(x.shape, wide) for x in keys.x]
    (dk, dv, dslopes), dq = jax.lax.scan(some, (*zeros, none), queries)
    dk, dv = (pairs.keys.whole(x).astype(k.dtype) for x in (dk, dv))
    return (
        pairs.queries.whole(dq),
        dk,
        dv,
        None,
        None if slopes is None else jnp.asarray(dslopes, slopes.dtype),
    )


_attention.defvjp(_forward, _backward)
