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
        int32 `[G, K]`, the index in the other genome (0 where there is none), and bool `[G, K]`,
        whether there is one.
    """
    if keys.shape[1] > _PAIRWISE:
        return _match_sorted(keys, on, others, others_on)

    keys = jnp.where(on, keys, -1)
    others = jnp.where(others_on, others, -2)
    # The axis is not the last, so a CPU compares many at once.
    return first(others[:, :, None] == keys[:, None])


def _match_sorted(keys: Array, on: Array, others: Array, others_on: Array) -> tuple[Array, Array]:
    largest = jnp.iinfo(jnp.int32).max
    index = jnp.broadcast_to(jnp.arange(others.shape[1], dtype=jnp.int32), others.shape)
    ordered, index = jax.lax.sort((jnp.where(others_on, others, largest), index), num_keys=1)

    def search(row, wanted):
        return jnp.searchsorted(row, wanted, method="scan_unrolled")

    at = jax.vmap(search)(ordered, keys)
    at = jnp.minimum(at, others.shape[1] - 1)
    found = on & (jnp.take_along_axis(ordered, at, 1) == keys)
    return jnp.where(found, jnp.take_along_axis(index, at, 1), 0), found


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

    Matching genes come from either parent with equal chance; with the chance `rates.average` a
    child, their weights are the means of both. A gene that is disabled in either parent is disabled
    with the chance `rates.disable`, and enabled otherwise.

    Where `ModeRules.crosses_equals` holds, children of equally fit parents have each disjoint or
    excess gene of either with the chance 1/2. All other children have all of the first parent's and
    none of the second's, and so have those in which a feed-forward network would get a cycle.

    Args:
        config: static.
        rates: `average`, `disable`.
        uniforms: of the children.
        fitter: the first parents.
        other: the second parents.
        alone: bool `[G]`, whether both are the same genome, which the child then copies.
        equal: bool `[G]`, whether both are equally fit.
    """
    index, found = match(fitter.innovation, fitter.on, other.innovation, other.on)

    theirs = jnp.take_along_axis(other.weight, index, 1)
    from_other = found & (uniforms.take(config.max_conns) < 0.5)
    blend = (uniforms.one() < rates.average)[:, None] & found
    mean = (fitter.weight + theirs) / 2
    weight = jnp.where(blend, mean, jnp.where(from_other, theirs, fitter.weight))

    both = fitter.enabled & (jnp.take_along_axis(other.enabled, index, 1) | ~found)
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
    if not config.rules.crosses_equals:
        return child

    return _cross_equals(config, uniforms, child, index, found, other, equal & ~alone)


def _cross_equals(
    config: NeatConfig,
    uniforms: Uniforms,
    child: Genomes,
    index: Array,
    found: Array,
    other: Genomes,
    equal: Array,
) -> Genomes:
    """Children of equals: half of the genes of either parent that the other lacks.

    `child` has all of the first parent's. `index` and `found` are results of `match`, for the
    child's genes in the other parent.
    """
    num_nodes = config.max_nodes
    coins = uniforms.take(2 * config.max_conns) < 0.5
    keeps = child.on & (found | coins[:, : config.max_conns])

    row = jnp.arange(len(found))[:, None]
    nothing = jnp.zeros_like(found)
    column = jnp.where(found, index, config.max_conns)
    shared = nothing.at[row, column].set(True, mode="drop")
    wants = other.on & ~shared & coins[:, config.max_conns :]

    # Slots of the other parent's nodes in the child: their own, or free ones.
    slot, known = match(other.node_id, other.node_on, child.node_id, child.node_on)
    needs = _endpoints(other.source, other.target, wants, num_nodes) & ~known
    node, born, free, has_free = _move_into(needs, ~child.node_on)
    slot = jnp.where(known, slot, free)
    fits = known | has_free

    source = jnp.take_along_axis(slot, other.source, 1)
    target = jnp.take_along_axis(slot, other.target, 1)
    wants &= jnp.take_along_axis(fits, other.source, 1) & jnp.take_along_axis(fits, other.target, 1)

    # Two genes of other innovations may be one edge, which a genome has once.
    edge = source * num_nodes + target
    wants &= ~match(edge, wants, child.source * num_nodes + child.target, keeps)[1]
    gene, takes, _, _ = _move_into(wants, ~keeps)
    theirs = dataclasses.replace(other, source=source, target=target)

    def mix(name, from_other, index, keep):
        value = jnp.take_along_axis(getattr(theirs, name), index, 1)
        own = getattr(child, name)
        return jnp.where(from_other, value, jnp.where(keep, own, jnp.zeros_like(own)))

    nodes = {name: mix(name, born, node, child.node_on) for name in _NODE_FIELDS}
    conns = {name: mix(name, takes, gene, keeps) for name in _CONN_FIELDS}

    # Hidden nodes without a connection go.
    is_io = jnp.arange(num_nodes)[None] < config.num_io
    used = is_io | _endpoints(conns["source"], conns["target"], conns["on"], num_nodes)
    nodes = {name: jnp.where(used, value, jnp.zeros_like(value)) for name, value in nodes.items()}

    if config.kind == "feedforward":
        equal &= ~has_cycle(conns["source"], conns["target"], conns["on"], num_nodes)

    mixed = Genomes(**nodes, **conns)
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
    ends = jnp.concatenate([source, target], 1)
    either = jnp.concatenate([on, on], 1)
    none = jnp.zeros((len(on), num_nodes), bool)
    return none.at[row, jnp.where(either, ends, num_nodes)].set(True, mode="drop")


def _move_into(things: Array, room: Array) -> tuple[Array, Array, Array, Array]:
    """Moves the k-th of the `things` to the k-th free slot of `room`, both bool `[G, K]`.

    Returns:
        For each slot, the index of the thing that it gets, int32, and whether it gets one; for each
        thing, the index of its slot, and whether it has one.
    """
    ranks = jnp.cumsum(jnp.stack([things, room]), 2, dtype=jnp.int32) - 1
    fits = jnp.stack(
        [room & (ranks[1] < count(things)[:, None]), things & (ranks[0] < count(room)[:, None])]
    )
    row = jnp.arange(len(room))[:, None]
    indices = jax.lax.broadcasted_iota(jnp.int32, room.shape, 1)

    def partner(mask, own, others):
        """The index where `mask` has its k-th True, for k the rank in `others`."""
        zeros = jnp.zeros_like(indices)
        column = jnp.where(mask, own, room.shape[1])
        ordered = zeros.at[row, column].set(indices, mode="drop")
        return jnp.take_along_axis(ordered, jnp.maximum(others, 0), 1)

    thing = partner(things, *ranks)
    gets_one = fits[0]
    slot = partner(room, ranks[1], ranks[0])
    has_slot = fits[1]
    return thing, gets_one, slot, has_slot


def _evolving_fields(config: NeatConfig) -> tuple[str, ...]:
    """Fields of nodes in which genomes may differ."""
    assert config.activations is not None and config.evolved is not None
    functions = (("activation", config.activations), ("aggregation", config.aggregations))
    return (*config.evolved, *(name for name, names in functions if len(names) > 1))
