"""Distances between all genomes and all centres of species, in one pass over slot ids.

Only the marks of the S centres can match, at most S C of them. They get dense ids, the centres' weights become the rows
of one table, and a pair costs C look-ups: no sort of the population, no comparison of genes with genes.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.genome import Genomes
from jaxpar.types import Array

__all__ = ["Centres", "centres_of", "distances", "slot_ids"]

_NONE = jnp.iinfo(jnp.int32).max


@flax.struct.dataclass
class Centres:
    """What distances need of S genomes: int32, bool and float32 `[S, C]`."""

    mark: Array
    on: Array
    weight: Array


def centres_of(genomes: Genomes) -> Centres:
    """Every genome as a centre."""
    return Centres(genomes.mark, genomes.on, genomes.weight)


def slot_ids(centres: Centres, marks: Array) -> tuple[Array, Array]:
    """Dense ids below S C of the centres' marks; every other mark gets S C.

    Marks are looked up in a hash table, by their low bits; where two marks of centres fall together, which takes marks
    that are thousands of innovations apart, by binary search.

    Returns:
        Ids of the centres' genes, int32 `[S, C]`, and of `marks`, of their shape.
    """
    ordered = jnp.sort(jnp.where(centres.on, centres.mark, _NONE).reshape(-1))
    count = len(ordered)
    is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (ordered != _NONE)
    size = 1 << max(10, (4 * count - 1).bit_length())
    place = jnp.arange(count, dtype=jnp.int32)
    table = jnp.full(size, count, jnp.int32).at[jnp.where(is_first, ordered % size, size)].set(place, mode="drop")
    padded = jnp.concatenate([ordered, jnp.full(1, _NONE)])
    collides = jnp.any(is_first & (table[ordered % size] != place))

    def hashed(marks):
        return table[marks % size]

    def searched(marks):
        return jnp.searchsorted(ordered, marks, method="scan_unrolled").astype(jnp.int32)

    asked = jnp.concatenate([centres.mark.reshape(-1), marks.reshape(-1)])
    at = jax.lax.cond(collides, searched, hashed, asked)
    found = jnp.where(padded[at] == asked, at, count)
    own = jnp.where(centres.on, found[: centres.mark.size].reshape(centres.mark.shape), count)
    return own, found[centres.mark.size :].reshape(marks.shape)


def distances(config: NeatConfig, rates: Rates, genomes: Genomes, centres: Centres) -> Array:
    """c1 E / N + c2 D / N + c3 mean abs(w - w') of all pairs, float32 `[P, S]`.

    E counts excess genes, with marks beyond the other genome's last, and D disjoint ones; N is the larger genome's
    number of genes, or 1 where both have fewer than `rates.small`. Stanley and Miikkulainen 2002, equation 1. The mode
    "fast" counts excess genes as disjoint.

    Cost: P S C look-ups.
    """
    centre_slots, slots = slot_ids(centres, genomes.mark)
    width = centres.mark.size + 1
    row = jnp.arange(len(centres.on))[:, None]
    weights = jnp.zeros((len(centres.on), width), float).at[row, centre_slots].set(centres.weight)
    present = jnp.zeros((len(centres.on), width), bool).at[row, centre_slots].set(True).at[:, -1].set(False)
    slots = jnp.where(genomes.on, slots, width - 1)

    def to_one(weights, present):
        same = present[slots]
        return jnp.sum(same, 1), jnp.sum(jnp.where(same, jnp.abs(genomes.weight - weights[slots]), 0), 1)

    matching, difference = (x.T for x in jax.vmap(to_one)(weights, present))
    mine, theirs = jnp.sum(genomes.on, 1)[:, None], jnp.sum(centres.on, 1)[None]
    apart = (mine + theirs - 2 * matching).astype(float)
    unlike = rates.disjoint * apart
    if config.mode == "canonical":
        excess = _excess(genomes, centres).astype(float)
        unlike = rates.excess * excess + rates.disjoint * (apart - excess)
    most = jnp.maximum(mine, theirs).astype(float)
    divisor = jnp.where(most < rates.small, 1.0, jnp.maximum(most, 1.0))
    return unlike / divisor + rates.difference * difference / jnp.maximum(matching, 1)


def _excess(genomes: Genomes, centres: Centres) -> Array:
    """Genes of either beyond the last mark of the other: int32 `[P, S]`."""
    last = [jnp.max(jnp.where(x.on, x.mark, -1), 1) for x in (genomes, centres)]

    def beyond(one, other_last):
        return jnp.sum(one.on[:, None] & (one.mark[:, None] > other_last[None, :, None]), -1)

    return beyond(genomes, last[1]) + beyond(centres, last[0]).T
