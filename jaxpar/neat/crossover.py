"""Crossover: genes of two parents lined up by their identities."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.genome import Genomes, count, first
from jaxpar.neat.graph import has_cycle
from jaxpar.neat.uniforms import Uniforms
from jaxpar.types import Array

__all__ = ["crossover", "match"]

_PAIRWISE = 256
"""Genes up to which comparing all pairs beats sorting and searching."""


def match(keys: Array, on: Array, others: Array, others_on: Array) -> tuple[Array, Array]:
    """Finds each gene's homologue in another genome.

    Args:
        keys: int32 `[G, K]`, identities, unique where `on`.
        on: bool `[G, K]`.
        others: int32 `[G, K]`, those of the other genome.
        others_on: bool `[G, K]`.

    Returns:
        int32 `[G, K]`, the place in the other genome (0 where there is none), and bool `[G, K]`, whether there is one.
    """
    if keys.shape[1] > _PAIRWISE:
        return _match_sorted(keys, on, others, others_on)
    keys, others = jnp.where(on, keys, -1), jnp.where(others_on, others, -2)
    return first(
        others[:, :, None] == keys[:, None]
    )  # the axis is not the last, so a CPU compares many at once


def _match_sorted(keys: Array, on: Array, others: Array, others_on: Array) -> tuple[Array, Array]:
    largest = jnp.iinfo(jnp.int32).max
    place = jnp.broadcast_to(jnp.arange(others.shape[1], dtype=jnp.int32), others.shape)
    ordered, place = jax.lax.sort((jnp.where(others_on, others, largest), place), num_keys=1)
    at = jax.vmap(lambda rows, wanted: jnp.searchsorted(rows, wanted, method="scan_unrolled"))(
        ordered, keys
    )
    at = jnp.minimum(at, others.shape[1] - 1)
    found = on & (jnp.take_along_axis(ordered, at, 1) == keys)
    return jnp.where(found, jnp.take_along_axis(place, at, 1), 0), found


def crossover(
    config: NeatConfig,
    rates: Rates,
    uniforms: Uniforms,
    fitter: Genomes,
    other: Genomes,
    alone: Array,
    equal: Array,
) -> Genomes:
    """Children with the structure of the fitter parents, `[G]` pairs.

    Matching genes come from either parent with equal chance; with the chance `rates.average` a child, their weights are
    the means of both. A gene that is disabled in either parent is disabled with the chance `rates.disable`, and enabled
    otherwise. In the mode "canonical", children of parents of equal fitness have each disjoint or excess gene of either
    parent with the chance 1/2, unless that closes a cycle in a feed-forward network: then, as in the mode "fast", all
    of the first parent's and none of the second's.

    Args:
        config: static.
        rates: `average`, `disable`.
        uniforms: of the children.
        fitter: the first parents.
        other: the second parents.
        alone: bool `[G]`, whether both are the same genome, of which the child is then a copy.
        equal: bool `[G]`, whether both are equally fit.
    """
    place, found = match(fitter.innovation, fitter.on, other.innovation, other.on)
    theirs = jnp.take_along_axis(other.weight, place, 1)
    from_other = found & (uniforms.take(config.max_conns) < 0.5)
    blend = (uniforms.one() < rates.average)[:, None] & found
    weight = jnp.where(
        blend, (fitter.weight + theirs) / 2, jnp.where(from_other, theirs, fitter.weight)
    )
    both = fitter.enabled & (jnp.take_along_axis(other.enabled, place, 1) | ~found)
    again = uniforms.take(config.max_conns) >= rates.disable
    enabled = jnp.where(alone[:, None], fitter.enabled, fitter.on & (both | again))
    changed: dict[str, Array] = {"weight": weight, "enabled": enabled}
    nodes = _evolving_fields(config)
    if nodes:
        home, same = match(fitter.node_id, fitter.node_on, other.node_id, other.node_on)
        from_other = same & (uniforms.take(config.max_nodes) < 0.5)
        for name in nodes:
            theirs = jnp.take_along_axis(getattr(other, name), home, 1)
            changed[name] = jnp.where(from_other, theirs, getattr(fitter, name))
    child = dataclasses.replace(fitter, **jax.lax.optimization_barrier(changed))
    if config.mode != "canonical":
        return child
    return _cross_equals(config, uniforms, child, place, found, other, equal & ~alone)


def _cross_equals(
    config: NeatConfig,
    uniforms: Uniforms,
    child: Genomes,
    place: Array,
    found: Array,
    other: Genomes,
    equal: Array,
) -> Genomes:
    """Children of equals: half of the genes of either parent that the other lacks; `child` has all of the first's.

    `place` and `found` are of `match`, of the child's genes in the other parent.
    """
    nodes, coins = config.max_nodes, uniforms.take(2 * config.max_conns) < 0.5
    keeps = child.on & (found | coins[:, : config.max_conns])
    row = jnp.arange(len(found))[:, None]
    shared = (
        jnp.zeros_like(found)
        .at[row, jnp.where(found, place, config.max_conns)]
        .set(True, mode="drop")
    )
    wants = other.on & ~shared & coins[:, config.max_conns :]
    spot, known = match(other.node_id, other.node_on, child.node_id, child.node_on)
    needs = _endpoints(other.source, other.target, wants, nodes) & ~known
    node, born, home, placed = _move_into(needs, ~child.node_on)
    spot, fits = jnp.where(known, spot, home), known | placed
    ends = [jnp.take_along_axis(spot, x, 1) for x in (other.source, other.target)]
    wants &= jnp.take_along_axis(fits, other.source, 1) & jnp.take_along_axis(fits, other.target, 1)
    edge = ends[0] * nodes + ends[1]
    wants &= ~match(edge, wants, child.source * nodes + child.target, keeps)[1]
    gene, takes, _, _ = _move_into(wants, ~keeps)
    theirs = dataclasses.replace(other, source=ends[0], target=ends[1])

    def poured(name, from_other, index, keep):
        value = jnp.take_along_axis(getattr(theirs, name), index, 1)
        own = getattr(child, name)
        return jnp.where(from_other, value, jnp.where(keep, own, jnp.zeros_like(own)))

    points = {name: poured(name, born, node, child.node_on) for name in _NODE_FIELDS}
    conns = {name: poured(name, takes, gene, keeps) for name in _CONN_FIELDS}
    ends_on = jnp.arange(nodes)[None] < config.num_io
    used = ends_on | _endpoints(conns["source"], conns["target"], conns["on"], nodes)
    points = {name: jnp.where(used, value, jnp.zeros_like(value)) for name, value in points.items()}
    if config.kind == "feedforward":
        equal &= ~has_cycle(conns["source"], conns["target"], conns["on"], nodes)
    mixed = Genomes(**points, **conns)
    mixed = jax.tree.map(lambda new, old: jnp.where(equal[:, None], new, old), mixed, child)
    return jax.lax.optimization_barrier(mixed)


_NODE_FIELDS = (
    "node_id",
    "node_on",
    "bias",
    "response",
    "time_constant",
    "activation",
    "aggregation",
)
_CONN_FIELDS = ("innovation", "source", "target", "weight", "enabled", "on")


def _endpoints(source: Array, target: Array, on: Array, num_nodes: int) -> Array:
    """The nodes at either end of an edge: bool `[G, N]`."""
    row = jnp.arange(len(on))[:, None]
    ends, either = jnp.concatenate([source, target], 1), jnp.concatenate([on, on], 1)
    return (
        jnp.zeros((len(on), num_nodes), bool)
        .at[row, jnp.where(either, ends, num_nodes)]
        .set(True, mode="drop")
    )


def _move_into(things: Array, room: Array) -> tuple[Array, Array, Array, Array]:
    """The k-th of the `things` goes to the k-th place of `room`, both bool `[G, K]`.

    Returns:
        Of each place, which thing it gets, int32, and whether it gets one; of each thing, which place, and whether any.
    """
    ranks = jnp.cumsum(jnp.stack([things, room]), 2, dtype=jnp.int32) - 1
    fits = jnp.stack(
        [room & (ranks[1] < count(things)[:, None]), things & (ranks[0] < count(room)[:, None])]
    )
    row, places = jnp.arange(len(room))[:, None], jax.lax.broadcasted_iota(jnp.int32, room.shape, 1)

    def met(mask, own, others):
        """Where `mask` has its k-th True, for k the rank in `others`."""
        ordered = (
            jnp.zeros_like(places)
            .at[row, jnp.where(mask, own, room.shape[1])]
            .set(places, mode="drop")
        )
        return jnp.take_along_axis(ordered, jnp.maximum(others, 0), 1)

    return met(things, *ranks), fits[0], met(room, ranks[1], ranks[0]), fits[1]


def _evolving_fields(config: NeatConfig) -> tuple[str, ...]:
    """Fields of nodes in which genomes may differ."""
    assert config.activations is not None and config.evolved is not None
    functions = (("activation", config.activations), ("aggregation", config.aggregations))
    return (*config.evolved, *(name for name, names in functions if len(names) > 1))
