"""Species: which genome belongs to which, and how many children each has."""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.distance import Centres, centres_of, distances
from jaxpar.neat.genome import Genomes
from jaxpar.types import Array

__all__ = [
    "LOWEST",
    "Ranking",
    "Species",
    "Standing",
    "cumulative",
    "empty_species",
    "offspring_counts",
    "offspring_worth",
    "ordered_sum",
    "rank_genomes",
    "safe_scale",
    "speciate",
    "update_stagnation",
]


LOWEST = float(np.finfo(np.float32).min)
"""The best fitness before any genome was scored; finite, so it can be compared and plotted."""


@flax.struct.dataclass
class Species:
    """S slots of species.

    Attributes:
        alive: bool `[S]`.
        number: int32 `[S]`, in the order of foundation, unique over the run.
        best: float32 `[S]`, the best fitness so far.
        improved: int32 `[S]`, the generation when it last grew.
        size: int32 `[S]`, members.
        next_number: int32 `[]`.
    """

    alive: Array
    number: Array
    best: Array
    improved: Array
    size: Array
    next_number: Array


def empty_species(config: NeatConfig) -> Species:
    """All slots free."""
    zeros = jnp.zeros(config.max_species, jnp.int32)
    return Species(
        zeros > 0, zeros, jnp.full(config.max_species, LOWEST, float), zeros, zeros, jnp.int32(0)
    )


class _Founding(NamedTuple):
    """The loop that founds species; the arrays of genomes are the device's own."""

    species: Species
    member: Array  # int32 [G], the slot, S while none
    nearest: Array  # int32 [G]
    distance: Array  # float32 [G], to the nearest
    founder: Array  # int32 [], the first genome without a species


def speciate(
    config: NeatConfig,
    rates: Rates,
    genomes: Genomes,
    index: Array,
    species: Species,
    centres: Centres,
    generation: Array,
    over: tuple[str, ...],
) -> tuple[Species, Array]:
    """Gives every genome its species, by distance to the centres of the living.

    `ModeRules.choose_species` takes one of the species that are near enough: the first in the order
    of foundation in the mode "canonical", the nearest in the mode "fast". The first genome that no
    species takes founds one, which takes all it can, and so on: as if genomes came one by one. When
    no slot is free, the rest joins the nearest.

    Args:
        config: static.
        rates: thresholds.
        genomes: this device's.
        index: int32 `[G]`, their numbers.
        species: before; `size` and `alive` are computed again.
        centres: of the slots.
        generation: int32 `[]`.
        over: mesh axes that split the population.

    Returns:
        The species, and each genome's slot, int32 `[G]`.
    """
    far = distances(config, rates, genomes, centres)
    far = jnp.where(species.alive[None], far, jnp.inf)
    order = jnp.where(species.alive, species.number, jnp.iinfo(jnp.int32).max)
    near = far < rates.threshold
    pick = config.rules.choose_species(far, near, order)
    member = jnp.where(jnp.any(near, 1), pick, config.max_species).astype(jnp.int32)

    # The slots of species without members are free for new ones.
    alive = _sizes(config, member, over) > 0
    species = dataclasses.replace(species, alive=alive)
    far = jnp.where(alive[None], far, jnp.inf)
    search = _Founding(
        species,
        member,
        nearest=jnp.argmin(far, 1).astype(jnp.int32),
        distance=jnp.min(far, 1),
        founder=_first(member == config.max_species, index, over),
    )

    def go_on(search):
        return (search.founder < _NO_GENOME) & ~jnp.all(search.species.alive)

    def found_one(search):
        return _found_species(config, rates, genomes, index, generation, over, search)

    search = jax.lax.while_loop(go_on, found_one, search)
    member = jnp.where(search.member == config.max_species, search.nearest, search.member)
    size = _sizes(config, member, over)
    return dataclasses.replace(search.species, size=size, alive=size > 0), member


_NO_GENOME = 2**31 - 1


def _sizes(config: NeatConfig, member: Array, over: tuple[str, ...]) -> Array:
    counts = jnp.zeros(config.max_species, jnp.int32).at[member].add(1, mode="drop")
    return jax.lax.psum(counts, over) if over else counts


def _first(mask: Array, index: Array, over: tuple[str, ...]) -> Array:
    first = jnp.min(jnp.where(mask, index, _NO_GENOME))
    return jax.lax.pmin(first, over) if over else first


def _found_species(config, rates, genomes, index, generation, over, search: _Founding) -> _Founding:
    species, slot = search.species, jnp.argmin(search.species.alive)
    is_founder = index == search.founder
    row = jax.tree.map(lambda x: x[jnp.argmax(is_founder)][None], centres_of(genomes))
    if over:  # the row is on one device and zero on the others, so the sum rounds nothing
        own = jax.tree.map(lambda x: jnp.where(jnp.any(is_founder), x, jnp.zeros_like(x)), row)
        row = dataclasses.replace(
            jax.lax.psum(own, over), on=jax.lax.pmax(own.on.astype(jnp.int32), over) > 0
        )
    far = distances(config, rates, genomes, row)[:, 0]
    joins = (search.member == config.max_species) & ((far < rates.threshold) | is_founder)
    member = jnp.where(joins, slot, search.member).astype(jnp.int32)
    here = jnp.arange(config.max_species) == slot
    species = dataclasses.replace(
        species,
        alive=species.alive | here,
        number=jnp.where(here, species.next_number, species.number),
        best=jnp.where(here, LOWEST, species.best),
        improved=jnp.where(here, generation, species.improved),
        next_number=species.next_number + 1,
    )
    closer = far < search.distance
    nearest = jnp.where(closer, slot, search.nearest).astype(jnp.int32)
    founder = _first(member == config.max_species, index, over)
    return _Founding(species, member, nearest, jnp.where(closer, far, search.distance), founder)


class Standing(NamedTuple):
    """Ranks of species in their generation.

    Attributes:
        rank: int32 `[S]`, 0 for the species with the fittest member of all; free slots come last.
        share: float32 `[S]`, of its fitness that counts when children are shared out; 0 if it may
            have none.
    """

    rank: Array
    share: Array


def update_stagnation(
    config: NeatConfig,
    rates: Rates,
    species: Species,
    fitness: Array,
    member: Array,
    generation: Array,
    stalls: Array,
) -> tuple[Species, Standing]:
    """Updates which species improved, and returns how much of their fitness counts.

    All of it counts if they found a better genome within `rates.stagnation` generations, and for
    the two best where `ModeRules.spares_best` holds; otherwise `rates.stale` of it does. When the
    whole search stalls (`stalls`) or no species may have children, only the two best may; after a
    stall they count as new.

    Args:
        config: static.
        rates: `stagnation`, `stale`.
        species: of this generation.
        fitness: float32, of all G genomes, -inf for invalid ones.
        member: int32, of all.
        generation: int32 `[]`.
        stalls: bool `[]`.
    """
    now = jnp.full_like(species.best, -jnp.inf).at[member].max(fitness)
    improved = jnp.where(now > species.best, generation, species.improved)
    is_better = (now[None] > now[:, None]) | (
        (now[None] == now[:, None]) & (species.number[None] < species.number[:, None])
    )
    rank = jnp.sum(
        jnp.where(species.alive[:, None], is_better & species.alive[None], True), 1, dtype=jnp.int32
    )
    counts_fully = generation - improved <= rates.stagnation
    best_two = species.alive & (rank < 2)
    if config.rules.spares_best:
        counts_fully |= best_two

    share = jnp.where(species.alive, jnp.where(counts_fully, 1.0, rates.stale), 0.0)
    share = jnp.where(stalls | ~jnp.any(share > 0), best_two.astype(float), share)
    species = dataclasses.replace(
        species,
        best=jnp.maximum(now, species.best),
        improved=jnp.where(stalls & best_two, generation, improved),
    )
    return species, Standing(rank, share)


def ordered_sum(x: Array) -> Array:
    """The sum over the last axis in one order, halves upon halves, which no compiler changes."""
    x = jnp.pad(
        x, [(0, 0)] * (x.ndim - 1) + [(0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1])]
    )
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


class Ranking(NamedTuple):
    """All genomes by species, and by falling fitness within.

    The k-th genome of species s is `order[start[s] + k]`.

    Attributes:
        order: int32 `[G]`.
        start: int32 `[S]`.
    """

    order: Array
    start: Array


def rank_genomes(species: Species, fitness: Array, member: Array) -> Ranking:
    """Ranks all G genomes by one sort; equals stay in their order."""
    index = jnp.arange(len(fitness), dtype=jnp.int32)
    order = jax.lax.sort((member, -fitness, index), num_keys=2)[2]
    return Ranking(order, cumulative(species.size) - species.size)


def cumulative(counts: Array) -> Array:
    """Running sums of whole numbers, int32 `[S]`: S^2 additions, but a single loop to compile."""
    slot = jnp.arange(len(counts))
    return jnp.sum(jnp.where(slot[None] <= slot[:, None], counts[None], 0), 1)


def offspring_counts(
    config: NeatConfig, species: Species, standing: Standing, fitness: Array, member: Array
) -> Array:
    """Numbers of children of each species: int32 `[S]`, G together.

    Explicit sharing: every member's fitness is divided by the size of its species. So a species has
    children in proportion to the share that counts of the mean of its members' `offspring_worth`.
    Fractions are rounded by running sums, in the order of the slots. So a species may have one
    child less than one that is worse.

    Args:
        config: static.
        species: of this generation.
        standing: from `update_stagnation`.
        fitness: float32, of all G genomes, -inf for invalid ones.
        member: int32, of all.
    """
    worth = offspring_worth(fitness)
    mine = member[None] == jnp.arange(config.max_species)[:, None]
    total = ordered_sum(jnp.where(mine, worth[None], 0))
    mean = standing.share * total / jnp.maximum(species.size, 1)
    # Where every mean is 0, species share equally instead of dividing 0 by 0.
    mean = jnp.where(jnp.sum(mean) > 0, mean, standing.share)
    slot = jnp.arange(config.max_species)
    sums = ordered_sum(jnp.where(slot[None] <= slot[:, None], mean[None], 0))
    until = jnp.round(config.population * (sums / sums[-1])).astype(jnp.int32)
    return jnp.diff(until, prepend=0)


_NEGLIGIBLE = 1e-4
"""Differences below this part of the range move no child, up to some 10,000 children a species."""


def offspring_worth(fitness: Array) -> Array:
    """Fitness as it counts for offspring, float32 `[G]`, at least 0, of sums that do not overflow.

    It is the fitness, minus the least of all where that is negative, times a power of two
    (`safe_scale`). One hugely negative fitness would make all others equal by that. So ranks count
    instead, 0 for the least, where the better half of all genomes differ by less than
    `_NEGLIGIBLE` of the whole range.

    Args:
        fitness: float32 `[G]`; one that is not finite is worth 0.

    Cost: a sort of G where ranks count.
    """
    valid = jnp.isfinite(fitness)
    scaled = jnp.where(valid, fitness, 0) * safe_scale(fitness)
    lowest = jnp.minimum(jnp.min(scaled), 0)
    highest = jnp.max(jnp.where(valid, scaled, -jnp.inf))
    gap = highest - scaled
    near = valid & (gap < _NEGLIGIBLE * (highest - lowest))
    is_hidden = 2 * jnp.sum(near, dtype=jnp.int32) >= jnp.sum(valid, dtype=jnp.int32)
    is_hidden &= (lowest < 0) & jnp.any(near & (gap > 0))

    def ranks():
        ordered = jnp.sort(jnp.where(valid, fitness, jnp.inf))
        return jnp.searchsorted(ordered, fitness, method="sort").astype(fitness.dtype)

    worth = jax.lax.cond(is_hidden, ranks, lambda: scaled - lowest)
    return jnp.where(valid, worth, 0)


def safe_scale(fitness: Array) -> Array:
    """A power of two, `[]`, times which finite `fitness` and its sums neither overflow nor vanish.

    It is 1 unless the largest magnitude is over 2^62 or under 2^-62, of float32.
    """
    half = jnp.finfo(fitness.dtype).maxexp // 2
    largest = jnp.max(jnp.where(jnp.isfinite(fitness), jnp.abs(fitness), 0))
    scale = jnp.where(largest > 2.0 ** (half - 2), 2.0**-half, 1.0)
    scale = jnp.where(largest < 2.0 ** (2 - half), 2.0**half, scale)
    return scale.astype(fitness.dtype)
