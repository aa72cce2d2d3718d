"""Distances between all genomes and all centres of species, in one pass over slot ids.

Only the innovation numbers of the S centres can match, at most S C of them. They get dense ids, the
centres' weights become the rows of one table, and a pair costs C look-ups: no sort of the
population, no comparison of genes with genes.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.genome import Genomes, count
from jaxpar.types import Array

__all__ = ["Centres", "centres_of", "distances", "slot_ids"]

_NONE = jnp.iinfo(jnp.int32).max


@flax.struct.dataclass
class Centres:
    """Genes of S genomes, as far as distances read them: int32, bool and float32 `[S, C]`."""

    innovation: Array
    on: Array
    weight: Array


def centres_of(genomes: Genomes) -> Centres:
    """Every genome as a centre."""
    return Centres(genomes.innovation, genomes.on, genomes.weight)


def slot_ids(centres: Centres, innovations: Array) -> tuple[Array, Array]:
    """Dense ids below S C of the centres' innovations; every other one gets S C.

    They are looked up in a hash table, by their low bits; where two of the centres' collide, which
    takes numbers that are thousands apart, by binary search. A GPU always searches: that is one
    kernel, and a test for collisions would make it wait for its host.

    Returns:
        Ids of the centres' genes, int32 `[S, C]`, and of `innovations`, of their shape.
    """
    on_gpu = jax.default_backend() == "gpu"
    ordered = jnp.sort(jnp.where(centres.on, centres.innovation, _NONE).reshape(-1))
    room = len(ordered)
    is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (
        ordered != _NONE
    )
    size = 1 << max(10, (4 * room - 1).bit_length())
    place = jnp.arange(room, dtype=jnp.int32)
    table = (
        jnp.full(size, room, jnp.int32)
        .at[jnp.where(is_first, ordered % size, size)]
        .set(place, mode="drop")
    )
    padded = jnp.concatenate([ordered, jnp.full(1, _NONE)])
    collides = jnp.any(is_first & (table[ordered % size] != place))

    def hashed(innovations):
        return table[innovations % size]

    def searched(innovations):
        longest = room.bit_length()

        def halve(step, at):  # the first number that is not smaller stands from `at` to `at + size`
            size = jnp.int32(1) << (longest - 1 - step)
            further = at + size
            is_smaller = (further <= room) & (ordered[jnp.minimum(further, room) - 1] < innovations)
            return jnp.where(is_smaller, further, at)

        unroll = longest if on_gpu else 1
        return jax.lax.fori_loop(0, longest, halve, jnp.zeros_like(innovations), unroll=unroll)

    asked = jnp.concatenate([centres.innovation.reshape(-1), innovations.reshape(-1)])
    at = searched(asked) if on_gpu else jax.lax.cond(collides, searched, hashed, asked)
    found = jnp.where(padded[at] == asked, at, room)
    own = jnp.where(
        centres.on, found[: centres.innovation.size].reshape(centres.innovation.shape), room
    )
    return own, found[centres.innovation.size :].reshape(innovations.shape)


def distances(config: NeatConfig, rates: Rates, genomes: Genomes, centres: Centres) -> Array:
    """c1 E / N + c2 D / N + c3 mean abs(w - w') of all pairs, float32 `[G, S]`.

    E counts excess genes, with an innovation beyond the other genome's last, and D disjoint ones. N
    is the larger genome's number of genes, or 1 where both have fewer than `rates.small`. Excess
    genes count as disjoint unless `ModeRules.counts_excess` holds.

    Reference: Stanley and Miikkulainen 2002, equation 1.

    Cost: G S C look-ups.
    """
    centre_slots, slots = slot_ids(centres, genomes.innovation)
    width = centres.innovation.size + 1
    row = jnp.arange(len(centres.on))[:, None]
    absent = jnp.where(centres.on, centres.weight, jnp.inf)
    weights = jnp.full((len(centres.on), width), jnp.inf, float).at[row, centre_slots].set(absent)
    slots = jnp.where(genomes.on, slots, width - 1)
    mine = count(genomes.on)[:, None]
    theirs = count(centres.on)[None]
    counts_excess = config.rules.counts_excess
    last = [jnp.max(jnp.where(x.on, x.innovation, -1), 1) for x in (genomes, centres)]

    def to_one(weights, centre, centre_last):
        apart = jnp.abs(genomes.weight - weights[slots])
        is_same = apart < jnp.inf
        terms = [is_same.astype(float), jnp.where(is_same, apart, 0)]
        if counts_excess:
            mine_beyond = genomes.on & (genomes.innovation > centre_last)
            centres_beyond = centre.on[None] & (centre.innovation[None] > last[0][:, None])
            terms.append(mine_beyond.astype(float) + centres_beyond.astype(float))
        return _sums(*terms)

    matching, difference, *excess = (x.T for x in jax.vmap(to_one)(weights, centres, last[1]))
    apart = mine + theirs - 2 * matching
    unlike = rates.disjoint * apart
    if counts_excess:
        unlike = rates.excess * excess[0] + rates.disjoint * (apart - excess[0])
    most = jnp.maximum(mine, theirs)
    divisor = jnp.where(most < rates.small, 1.0, jnp.maximum(most, 1.0))
    return unlike / divisor + rates.difference * difference / jnp.maximum(matching, 1)


def _sums(*terms: Array) -> tuple[Array, ...]:
    """Sums over the last axis, in one loop, however the terms are computed."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in terms)
    add = lambda one, two: tuple(a + b for a, b in zip(one, two, strict=True))  # noqa: E731
    return jax.lax.reduce(terms, zeros, add, (terms[0].ndim - 1,))
