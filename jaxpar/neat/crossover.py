"""Crossover: genes of two parents lined up by their identities."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.draws import Draws
from jaxpar.neat.genome import Genomes
from jaxpar.neat.graph import cyclic
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


def crossover(
    config: NeatConfig, rates: Rates, draws: Draws, fitter: Genomes, other: Genomes, alone: Array, equal: Array
) -> Genomes:
    """Children with the structure of the fitter parents, `[P]` pairs.

    Matching genes come from either parent with equal chance; with the chance `rates.average` a child, their weights are
    the means of both. A gene that is disabled in either parent is disabled with the chance `rates.disable`, and enabled
    otherwise. In the mode "canonical", children of parents of equal fitness have each disjoint or excess gene of either
    parent with the chance 1/2, unless that closes a circle in a feed-forward network: then, as in the mode "fast", all
    of the first parent's and none of the second's.

    Args:
        config: static.
        rates: `average`, `disable`.
        draws: of the children.
        fitter: the first parents.
        other: the second parents.
        alone: bool `[P]`, whether both are the same genome, of which the child is then a copy.
        equal: bool `[P]`, whether both are equally fit.
    """
    place, found = match(fitter.mark, fitter.on, other.mark, other.on)
    theirs = jnp.take_along_axis(other.weight, place, 1)
    from_other = found & (draws.take(config.max_conns) < 0.5)
    blend = (draws.one() < rates.average)[:, None] & found
    weight = jnp.where(blend, (fitter.weight + theirs) / 2, jnp.where(from_other, theirs, fitter.weight))
    both = fitter.enabled & (jnp.take_along_axis(other.enabled, place, 1) | ~found)
    again = draws.take(config.max_conns) >= rates.disable
    enabled = jnp.where(alone[:, None], fitter.enabled, fitter.on & (both | again))
    changed: dict[str, Any] = {"weight": weight, "enabled": enabled}
    nodes = _evolving(config)
    if nodes:
        place, same = match(fitter.node_id, fitter.node_on, other.node_id, other.node_on)
        from_other = same & (draws.take(config.max_nodes) < 0.5)
        for name in nodes:
            theirs = jnp.take_along_axis(getattr(other, name), place, 1)
            changed[name] = jnp.where(from_other, theirs, getattr(fitter, name))
    child = dataclasses.replace(fitter, **changed)
    return _mixed(config, draws, child, found, other, equal & ~alone) if config.mode == "canonical" else child


def _mixed(config: NeatConfig, draws: Draws, child: Genomes, found: Array, other: Genomes, equal: Array) -> Genomes:
    """Children of equals: half of the genes of either parent that the other lacks; `child` has all of the first's."""
    count, coins = config.max_nodes, draws.take(2 * config.max_conns) < 0.5
    keeps = child.on & (found | coins[:, : config.max_conns])
    wants = other.on & ~match(other.mark, other.on, child.mark, child.on)[1] & coins[:, config.max_conns :]
    spot, known = match(other.node_id, other.node_on, child.node_id, child.node_on)
    needs = _touched(other.source, other.target, wants, count) & ~known
    # The k-th node that is needed takes the k-th free slot.
    rank, free = jnp.maximum(jnp.cumsum(needs, 1) - 1, 0), ~child.node_on
    spot = jnp.where(known, spot, jnp.take_along_axis(_first(free), rank, 1))
    fits = known | (needs & (rank < jnp.sum(free, 1, keepdims=True)))
    ends = [jnp.take_along_axis(spot, x, 1) for x in (other.source, other.target)]
    wants &= jnp.take_along_axis(fits, other.source, 1) & jnp.take_along_axis(fits, other.target, 1)
    edge = ends[0] * count + ends[1]
    wants &= ~match(edge, wants, child.source * count + child.target, keeps)[1]
    gene, takes = _poured(wants, ~keeps)
    node, born = _poured(needs, free)
    theirs = dataclasses.replace(other, source=ends[0], target=ends[1])

    def poured(name, from_other, index, keep):
        value = jnp.take_along_axis(getattr(theirs, name), index, 1)
        own = getattr(child, name)
        return jnp.where(from_other, value, jnp.where(keep, own, jnp.zeros_like(own)))

    nodes = {name: poured(name, born, node, child.node_on) for name in _NODE_FIELDS}
    conns = {name: poured(name, takes, gene, keeps) for name in _CONN_FIELDS}
    ends_on = jnp.arange(count)[None] < config.num_ends
    used = ends_on | _touched(conns["source"], conns["target"], conns["on"], count)
    nodes = {name: jnp.where(used, value, jnp.zeros_like(value)) for name, value in nodes.items()}
    if config.kind == "feedforward":
        equal &= ~cyclic(conns["source"], conns["target"], conns["on"], count)
    mixed = Genomes(**nodes, **conns)
    return jax.tree.map(lambda new, old: jnp.where(equal[:, None], new, old), mixed, child)


_NODE_FIELDS = ("node_id", "node_on", "bias", "response", "time_constant", "activation", "aggregation")
_CONN_FIELDS = ("mark", "source", "target", "weight", "enabled", "on")


def _touched(source: Array, target: Array, on: Array, num_nodes: int) -> Array:
    """The nodes that an edge begins or ends at: bool `[P, N]`."""
    row = jnp.arange(len(on))[:, None]
    none = jnp.zeros((len(on), num_nodes), bool)
    return none.at[row, source].max(on).at[row, target].max(on)


def _first(mask: Array) -> Array:
    """The places where `mask` is true in their order, then the others: int32 of its shape."""
    return jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)


def _poured(things: Array, room: Array) -> tuple[Array, Array]:
    """For each place, which of the `things` it gets when the k-th of them goes to the k-th place of `room`; if any."""
    rank = jnp.cumsum(room, 1) - 1
    index = jnp.take_along_axis(_first(things), jnp.minimum(rank, things.shape[1] - 1), 1)
    return index, room & (rank < jnp.sum(things, 1, keepdims=True))


def _evolving(config: NeatConfig) -> tuple[str, ...]:
    """Fields of nodes in which genomes may differ."""
    assert config.activations is not None and config.evolved is not None
    functions = (("activation", config.activations), ("aggregation", config.aggregations))
    return (*config.evolved, *(name for name, names in functions if len(names) > 1))
