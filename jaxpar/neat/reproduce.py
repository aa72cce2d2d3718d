"""From ranked parents to children: who mates with whom, in index arithmetic over the children."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.draws import Draws
from jaxpar.neat.species import Ranking, Species
from jaxpar.types import Array

__all__ = ["Parents", "parents_of"]


class Parents(NamedTuple):
    """Of each child: numbers of its parents among all P genomes, and what may happen to it.

    Attributes:
        fitter: int32 `[P]`, whose structure it has.
        other: int32 `[P]`, the same if there is one parent.
        equal: bool `[P]`, whether both are equally fit.
        may_mutate: bool `[P]`.
    """

    fitter: Array
    other: Array
    equal: Array
    may_mutate: Array


def parents_of(
    config: NeatConfig, rates: Rates, draws: Draws, index: Array, species: Species, counts: Array, ranking: Ranking,
    fitness: Array,
) -> Parents:  # fmt: skip
    """Draws the parents of the children of these numbers.

    Children come in the order of the species' slots. The first of a species larger than `rates.champion` is its
    champion, unchanged. Parents are uniform among the best `floor(survival size) + 1` members; the second one is with
    the chance `rates.interspecies` the champion of any species. Of parents of equal fitness either may count as fitter.

    Args:
        config: static.
        rates: chances.
        draws: of these children.
        index: int32 `[P]`, numbers of the children.
        species: of the parents.
        counts: int32 `[S]`, from `offspring`.
        ranking: of all genomes.
        fitness: float32, of all genomes.
    """
    until = jnp.cumsum(counts)
    mine = jnp.sum(index[:, None] >= until[None], 1)  # the species' slot
    first = (until - counts)[mine]
    is_champion = (index == first) & (species.size[mine] > rates.champion)
    pool = jnp.floor(rates.survival * species.size).astype(jnp.int32) + 1
    pool = jnp.minimum(pool, species.size)

    def drawn():
        return ranking.order[ranking.start[mine] + _below(draws.one(), pool[mine])]

    one, two = drawn(), drawn()
    alive = jnp.cumsum(species.alive.astype(jnp.int32))
    any_species = jnp.searchsorted(alive, _below(draws.one(), alive[-1]) + 1, method="compare_all")
    stranger = ranking.order[ranking.start[any_species]]
    two = jnp.where(draws.one() < rates.interspecies, stranger, two)
    is_single = is_champion | (draws.one() < rates.mutate_only)
    one = jnp.where(is_champion, ranking.order[ranking.start[mine]], one)
    two = jnp.where(is_single, one, two)
    swap = fitness[two] > fitness[one]
    mates_only = (draws.one() < rates.mate_only) & (one != two)
    equal = fitness[two] == fitness[one]
    return Parents(jnp.where(swap, two, one), jnp.where(swap, one, two), equal, ~is_champion & ~mates_only)


def _below(uniform: Array, count: Array) -> Array:
    return jnp.minimum((uniform * count).astype(jnp.int32), count - 1)
