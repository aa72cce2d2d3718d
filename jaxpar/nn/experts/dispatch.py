"""Rows in the order of their experts, and back; and which choices a capacity keeps. Integers alone decide.

A choice is a token and one of its k experts. Choices are sorted by expert, those of one expert by token, so that each
expert multiplies rows that lie together (arXiv:2403.08245). Both directions read rows where they are and add k of
them: nothing is scattered, forwards or backwards, so sums are in the same order every time.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.fields import Positive, check_value
from jaxpar.nn.norm import wide_dtype

__all__ = [
    "Plan",
    "capacity_of",
    "capacity_rank",
    "combine",
    "count_before",
    "cut_tiles",
    "rows_of",
    "sort_choices",
    "within_capacity",
]


NUM_RANKS = 3
"""Classes of `capacity_rank`."""


class Plan(NamedTuple):
    """Choices in the order of their experts.

    Attributes:
      order: The choices, n k + j for choice j of token n, of expert 0 first; those of no expert last. N k of a row that
        is of no choice, and 0.
      place: Where each choice is in that order: the inverse. M of a choice that is nowhere, and counts nothing.
      sizes: How many each expert has; the sum is under N k where some choices are of no expert.
    """

    order: Int[Array, " M"]
    place: Int[Array, "N k"]
    sizes: Int[Array, " E"]


def sort_choices(expert: Int[Array, "N k"], num_experts: int) -> Plan:
    """Sorts choices by expert, in a stable way; an expert of `num_experts` is none.

    Cost: one sort of N k integers.
    """
    flat = expert.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    ends = jnp.searchsorted(
        flat[order], jnp.arange(num_experts, dtype=jnp.int32), side="right"
    ).astype(jnp.int32)
    return Plan(order, place.reshape(expert.shape), jnp.diff(ends, prepend=0))


def capacity_of(factor: float, num_tokens: int, k: int, num_experts: int) -> int:
    """Returns how many of a group's tokens an expert takes: factor * N k / E, rounded up, and at most N.

    Raises:
      UsageError: Unless the factor is positive and finite.
    """
    check_value("capacity", factor, Positive())
    return min(num_tokens, math.ceil(factor * num_tokens * k / num_experts))


def within_capacity(
    expert: Int[Array, "*G N k"],
    num_experts: int,
    capacity: int,
    rank: Int[Array, "*G N"] | None = None,
) -> Bool[Array, "*G N k"]:
    """Tells which choices are within their expert's capacity, in GShard's order (arXiv:2006.16668, algorithm 1).

    First choices come before second ones, and earlier tokens before later ones. Groups G do not know each other.

    Args:
      expert: What tokens chose.
      num_experts: E.
      capacity: C, choices that an expert takes in each group.
      rank: Class of each token, 0 to 2, as from `capacity_rank`; lower ones come first. None for
        one class.

    Cost: one sort of N k integers a group.
    """
    return count_before(expert, num_experts, rank) < capacity


def capacity_rank(weights: Float[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the class in which tokens take slots: 0, 1 or 2.

    Tokens that count come first. Tokens of weight 0 before one that counts, such as prompts, come
    second, since a causal model reads them. Those behind all that count are padding and come last.
    """
    counts = weights != 0
    is_read = jax.lax.cummax(counts.astype(jnp.int32), axis=1, reverse=True) > 0
    return jnp.where(counts, 0, jnp.where(is_read, 1, 2)).astype(jnp.int32)


def count_before(
    expert: Int[Array, "*G N k"], num_experts: int, rank: Int[Array, "*G N"] | None = None
) -> Int[Array, "*G N k"]:
    """Counts, for each choice, those of the same expert and group that come before it in GShard's order.

    An expert of `num_experts` is none, and counted the same way. For `rank` see `within_capacity`.
    """
    if expert.ndim > 2:
        if rank is None:
            return jax.vmap(lambda group: count_before(group, num_experts))(expert)
        return jax.vmap(lambda group, rank: count_before(group, num_experts, rank))(expert, rank)

    first = expert.T  # in GShard's order
    if rank is None:
        plan = sort_choices(first, num_experts + 1)
        starts = jnp.cumsum(plan.sizes) - plan.sizes
        return (plan.place - starts[first]).T

    # One sort does both: the classes of an expert are its neighbours.
    ranked = NUM_RANKS * first + rank[None]
    plan = sort_choices(ranked, NUM_RANKS * (num_experts + 1))
    starts = jnp.cumsum(plan.sizes) - plan.sizes
    return (plan.place - starts[NUM_RANKS * first]).T


def _read(x: jax.Array, places: jax.Array) -> jax.Array:
    """Rows, and 0 where there is none."""
    return x.at[places].get(mode="fill", fill_value=0)


def cut_tiles(num_rows: int, sizes: Int[Array, " E"], most: int) -> tuple[Array, Array, Array]:
    """Cuts groups of rows into tiles of at most so many: each one's group, first row and count of rows.

    There are as many tiles as any sizes of this sum may need, the last of them without a row, at `num_rows`.
    """
    num_groups = sizes.shape[0]
    count = (num_rows + min(num_groups, num_rows) * (most - 1)) // most
    ends = jnp.cumsum(sizes)
    tiles = -(-sizes // most)
    tile_ends = jnp.cumsum(tiles)
    tile = jnp.arange(count, dtype=sizes.dtype)
    group = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), num_groups - 1).astype(
        jnp.int32
    )
    start = (ends - sizes)[group] + (tile - (tile_ends - tiles)[group]) * most
    start = jnp.where(tile < tile_ends[-1], start, num_rows)
    return group, start, jnp.clip(ends[group] - start, 0, most)


@jax.custom_vjp
def rows_of(x: Float[Array, "N D"], plan: Plan) -> Float[Array, "M D"]:
    """Returns the token of each choice, in the plan's order. Reverse mode only."""
    return _read(x, plan.order // plan.place.shape[1])


def _rows_backward(plan: Plan, g: jax.Array):
    rows = _read(g, plan.place)
    return jnp.sum(rows, 1, dtype=wide_dtype(g)).astype(g.dtype), None


rows_of.defvjp(lambda x, plan: (rows_of(x, plan), plan), _rows_backward)


@jax.custom_vjp
def combine(
    rows: Float[Array, "M D"], weight: Float[Array, "N k"], plan: Plan
) -> Float[Array, "N D"]:
    """Returns of each token the weighted sum of its k rows, summed in the weights' dtype. Reverse mode only.

    Rows of choices that are of no expert count as they are: `grouped_matmul` makes them 0.
    """
    return jnp.einsum("nk,nkd->nd", weight, _read(rows, plan.place).astype(weight.dtype)).astype(
        rows.dtype
    )


def _combine_backward(kept: tuple, g: jax.Array):
    rows, weight, plan = kept
    k = weight.shape[1]
    drows = (
        _read(g, plan.order // k).astype(weight.dtype)
        * _read(weight.reshape(-1), plan.order)[:, None]
    )
    dweight = jnp.einsum(
        "nkd,nd->nk", _read(rows, plan.place).astype(weight.dtype), g.astype(weight.dtype)
    )
    return drows.astype(rows.dtype), dweight, None


combine.defvjp(
    lambda rows, weight, plan: (combine(rows, weight, plan), (rows, weight, plan)),
    _combine_backward,
)
