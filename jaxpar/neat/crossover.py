"""Crossover: genes of two parents lined up by their identities."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.draws import Draws
from jaxpar.neat.genome import Genomes
from jaxpar.types import Array

__all__ = ["crossover", "match"]

_PAIRWISE = 256
"""Genes up to which comparing all pairs beats sorting and searching."""
_NARROW = 24
"""Genes that most populations get along with for long."""


def match(keys: Array, on: Array, others: Array, others_on: Array) -> tuple[Array, Array]:
    """Finds each gene's homologue in another genome.

    Args:
        keys: int32 `[P, K]`, identities, unique where `on`.
        on: bool `[P, K]`.
        others: int32 `[P, K]`, those of the other genome.
        others_on: bool `[P, K]`.

    Returns:
        int32 `[P, K]`, the place in the other genome (0 where there is none), and bool `[P, K]`, whether there is one.
    """
    width = keys.shape[1]
    compare = _pairwise if width <= _PAIRWISE else _searched
    if width <= 64:
        return compare(keys, on, others, others_on)

    def narrow(*genes):
        found = _pairwise(*(x[:, :_NARROW] for x in genes))
        return tuple(jnp.pad(x, ((0, 0), (0, width - _NARROW))) for x in found)

    is_narrow = ~jnp.any(on[:, _NARROW:] | others_on[:, _NARROW:])
    return jax.lax.cond(is_narrow, narrow, compare, keys, on, others, others_on)


def _pairwise(keys: Array, on: Array, others: Array, others_on: Array) -> tuple[Array, Array]:
    keys, others = jnp.where(on, keys, -1), jnp.where(others_on, others, -2)
    place = jnp.arange(1, others.shape[1] + 1, dtype=jnp.int32)[None, :, None]
    # The reduced axis is not the last one, so that a CPU compares many genes at once.
    found = jnp.max(jnp.where(others[:, :, None] == keys[:, None], place, 0), 1)
    return jnp.maximum(found - 1, 0), found > 0


def _searched(keys: Array, on: Array, others: Array, others_on: Array) -> tuple[Array, Array]:
    largest = jnp.iinfo(jnp.int32).max
    place = jnp.broadcast_to(jnp.arange(others.shape[1], dtype=jnp.int32), others.shape)
    ordered, place = jax.lax.sort((jnp.where(others_on, others, largest), place), num_keys=1)
    at = jax.vmap(lambda rows, wanted: jnp.searchsorted(rows, wanted, method="scan_unrolled"))(ordered, keys)
    at = jnp.minimum(at, others.shape[1] - 1)
    found = on & (jnp.take_along_axis(ordered, at, 1) == keys)
    return jnp.where(found, jnp.take_along_axis(place, at, 1), 0), found


def crossover(config: NeatConfig, rates: Rates, draws: Draws, fitter: Genomes, other: Genomes) -> Genomes:
    """Children with the structure of the fitter parents, `[P]` pairs.

    Matching genes come from either parent with equal chance; with the chance `rates.average` a child, their weights are
    the means of both. One that is disabled in either parent is disabled with the chance `rates.disable`, and as where
    it comes from otherwise. A genome with itself gives itself.
    """
    place, found = match(fitter.mark, fitter.on, other.mark, other.on)
    theirs = jnp.take_along_axis(other.weight, place, 1)
    from_other = found & (draws.take(config.max_conns) < 0.5)
    blend = (draws.one() < rates.average)[:, None] & found
    weight = jnp.where(blend, (fitter.weight + theirs) / 2, jnp.where(from_other, theirs, fitter.weight))
    switched = jnp.take_along_axis(other.enabled, place, 1)
    off = found & ~(fitter.enabled & switched) & (draws.take(config.max_conns) < rates.disable)
    enabled = jnp.where(from_other, switched, fitter.enabled) & ~off
    changed = {"weight": weight, "enabled": enabled}
    nodes = _evolving(config)
    if nodes:
        place, found = match(fitter.node_id, fitter.node_on, other.node_id, other.node_on)
        from_other = found & (draws.take(config.max_nodes) < 0.5)
        for name in nodes:
            theirs = jnp.take_along_axis(getattr(other, name), place, 1)
            changed[name] = jnp.where(from_other, theirs, getattr(fitter, name))
    return dataclasses.replace(fitter, **changed)


def _evolving(config: NeatConfig) -> tuple[str, ...]:
    """Fields of nodes in which genomes may differ."""
    assert config.activations is not None and config.evolved is not None
    functions = (("activation", config.activations), ("aggregation", config.aggregations))
    return (*config.evolved, *(name for name, names in functions if len(names) > 1))
