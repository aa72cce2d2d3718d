"""Innovations: who makes the same change in the same generation gets the same identities."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.types import Array

__all__ = ["Counters", "NOTHING", "Requests", "number"]

NOTHING, SPLIT = -2, -1
"""What `Requests.first` holds for no change, and for the split of a connection."""


class Requests(NamedTuple):
    """The change that each of P children wants, if any.

    Attributes:
        first: int32 `[P]`: `NOTHING`; or `SPLIT`; or, for a new connection, the identity of its source.
        second: int32 `[P]`: the mark of the connection to split; or the identity of the new one's target.
    """

    first: Array
    second: Array


class Counters(NamedTuple):
    """The next identities that nobody had: int32 `[]` each."""

    node: Array
    mark: Array


def number(requests: Requests, counters: Counters) -> tuple[Array, Array, Counters]:
    """Numbers the changes of one generation; equal requests get equal numbers.

    A split takes one node and two marks, a new connection one mark, in the order of the sorted requests: it depends
    on the set of requests alone. Costs one sort of P.

    Returns:
        For each child its new node (of a split) and its first new mark, int32 `[P]`, and the counters after.
    """
    index = jnp.arange(len(requests.first), dtype=jnp.int32)
    first, second, child = jax.lax.sort((requests.first, requests.second, index), num_keys=2)
    is_new = jnp.concatenate([jnp.ones(1, bool), (first[1:] != first[:-1]) | (second[1:] != second[:-1])])
    is_new &= first != NOTHING
    nodes = (is_new & (first == SPLIT)).astype(jnp.int32)
    marks = jnp.where(is_new, 1, 0) + nodes
    last_node, last_mark = jnp.cumsum(jnp.stack([nodes, marks]), 1)
    # Within a group of equals, which follow their first, the running sums stand still.
    node = counters.node + last_node - 1
    mark = counters.mark + last_mark - jnp.where(first == SPLIT, 2, 1)
    back = jnp.zeros_like(index)
    new = Counters(counters.node + last_node[-1], counters.mark + last_mark[-1])
    return back.at[child].set(node, unique_indices=True), back.at[child].set(mark, unique_indices=True), new
