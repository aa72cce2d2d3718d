"""From ranked parents to children: who mates with whom, in index arithmetic over the children."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.draws import Draws
from jaxpar.neat.species import Ranking, Species, running
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
    until = running(counts)
    pool = jnp.minimum(jnp.floor(rates.survival * species.size).astype(jnp.int32) + 1, species.size)
    mine = jnp.sum(index[:, None] >= until[None], 1)  # the species' slot
    first, size, start, pool = jnp.stack([until - counts, species.size, ranking.start, pool])[:, mine]
    is_champion = (index == first) & (size > rates.champion)
    number = _below(draws.take(2), pool[:, None])
    one, two = start + jnp.where(is_champion, 0, number[:, 0]), start + number[:, 1]  # places in the ranking
    alive = running(species.alive.astype(jnp.int32))
    any_species = jnp.sum(alive[None] <= _below(draws.one(), alive[-1])[:, None], 1)
    two = jnp.where(draws.one() < rates.interspecies, ranking.start[any_species], two)
    two = jnp.where(is_champion | (draws.one() < rates.mutate_only), one, two)
    one, two = ranking.order[jnp.stack([one, two])]
    fitness_one, fitness_two = fitness[jnp.stack([one, two])]
    swap, equal = fitness_two > fitness_one, fitness_two == fitness_one
    mates_only = (draws.one() < rates.mate_only) & (one != two)
    parents = Parents(jnp.where(swap, two, one), jnp.where(swap, one, two), equal, ~is_champion & ~mates_only)
    return Parents(*jax.lax.optimization_barrier(tuple(parents)))


def _below(uniform: Array, count: Array) -> Array:
    return jnp.minimum((uniform * count).astype(jnp.int32), count - 1)
