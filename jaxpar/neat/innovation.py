"""Innovations: equal changes of structure in one generation get the same identities."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.types import Array

__all__ = ["Counters", "NOTHING", "Requests", "assign_innovations"]

NOTHING, SPLIT = -2, -1
"""What `Requests.first` holds for no change, and for the split of a connection."""


class Requests(NamedTuple):
    """The change that each of G children wants, if any.

    Attributes:
        first: int32 `[G]`: `NOTHING`; or `SPLIT`; or, for a new connection, the identity of its source.
        second: int32 `[G]`: the innovation of the connection to split; or the identity of the new one's target.
    """

    first: Array
    second: Array


class Counters(NamedTuple):
    """The next unused identities: int32 `[]` each."""

    node: Array
    innovation: Array


def assign_innovations(requests: Requests, counters: Counters) -> tuple[Array, Array, Counters]:
    """Numbers the changes of one generation; equal requests get equal numbers.

    A split takes one node and two innovations, a new connection one innovation, in the order of the sorted requests:
    it depends on the set of requests alone. Costs one sort of G.

    Returns:
        For each child its new node (of a split) and its first new innovation, int32 `[G]`, and the counters after.
    """
    index = jnp.arange(len(requests.first), dtype=jnp.int32)
    first, second, child = jax.lax.sort((requests.first, requests.second, index), num_keys=2)
    is_new = jnp.concatenate(
        [jnp.ones(1, bool), (first[1:] != first[:-1]) | (second[1:] != second[:-1])]
    )
    is_new &= first != NOTHING
    nodes = (is_new & (first == SPLIT)).astype(jnp.int32)
    innovations = jnp.where(is_new, 1, 0) + nodes
    last_node, last_innovation = jnp.cumsum(jnp.stack([nodes, innovations]), 1)
    # Within a group of equal requests only the first adds to the sums, so all of them read the same numbers.
    node = counters.node + last_node - 1
    innovation = counters.innovation + last_innovation - jnp.where(first == SPLIT, 2, 1)
    back = jnp.zeros_like(index)
    new = Counters(counters.node + last_node[-1], counters.innovation + last_innovation[-1])
    return (
        back.at[child].set(node, unique_indices=True),
        back.at[child].set(innovation, unique_indices=True),
        new,
    )
