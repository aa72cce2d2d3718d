"""Parents of the next generation, in index arithmetic over the children."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.species import Ranking, Species, cumulative
from jaxpar.neat.uniforms import Uniforms
from jaxpar.types import Array

__all__ = ["Parents", "choose_parents"]


class Parents(NamedTuple):
    """Of each child: numbers of its parents among all G genomes, and what may happen to it.

    Attributes:
        fitter: int32 `[G]`, whose structure it has.
        other: int32 `[G]`, the same if there is one parent.
        equal: bool `[G]`, whether both are equally fit.
        may_mutate: bool `[G]`.
    """

    fitter: Array
    other: Array
    equal: Array
    may_mutate: Array


def choose_parents(
    config: NeatConfig, rates: Rates, uniforms: Uniforms, index: Array, species: Species, counts: Array,
    ranking: Ranking, fitness: Array,
) -> Parents:  # fmt: skip
    """Draws the parents of the children of these numbers.

    Children come in the order of the species' slots. The first of a species larger than `rates.champion` is its
    champion, unchanged. Parents are uniform among the best `floor(survival size) + 1` members; the second one is with
    the chance `rates.interspecies` the champion of any species. Of parents of equal fitness either may count as fitter.

    Args:
        config: static.
        rates: chances.
        uniforms: of these children.
        index: int32 `[G]`, numbers of the children.
        species: of the parents.
        counts: int32 `[S]`, from `offspring`.
        ranking: of all genomes.
        fitness: float32, of all genomes.
    """
    until = cumulative(counts)
    pool = jnp.minimum(jnp.floor(rates.survival * species.size).astype(jnp.int32) + 1, species.size)
    mine = jnp.sum(index[:, None] >= until[None], 1)  # the species' slot
    first, size, start, pool = jnp.stack([until - counts, species.size, ranking.start, pool])[
        :, mine
    ]
    is_champion = (index == first) & (size > rates.champion)
    number = _below(uniforms.take(2), pool[:, None])
    one = start + jnp.where(is_champion, 0, number[:, 0])  # positions in the ranking
    two = start + number[:, 1]
    alive = cumulative(species.alive.astype(jnp.int32))
    any_species = jnp.sum(alive[None] <= _below(uniforms.one(), alive[-1])[:, None], 1)
    two = jnp.where(uniforms.one() < rates.interspecies, ranking.start[any_species], two)
    two = jnp.where(is_champion | (uniforms.one() < rates.mutate_only), one, two)
    one, two = ranking.order[jnp.stack([one, two])]
    fitness_one, fitness_two = fitness[jnp.stack([one, two])]
    swap = fitness_two > fitness_one
    equal = fitness_two == fitness_one
    mates_only = (uniforms.one() < rates.mate_only) & (one != two)
    parents = Parents(
        fitter=jnp.where(swap, two, one),
        other=jnp.where(swap, one, two),
        equal=equal,
        may_mutate=~is_champion & ~mates_only,
    )
    return jax.lax.optimization_barrier(parents)


def _below(uniform: Array, count: Array) -> Array:
    return jnp.minimum((uniform * count).astype(jnp.int32), count - 1)
