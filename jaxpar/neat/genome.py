"""Genomes of a whole population: one array a field, with identities and masks."""

import dataclasses
from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpar.neat.config import NeatConfig
from jaxpar.types import Array, PyTree, UsageError

__all__ = [
    "Genomes",
    "Packed",
    "check_genomes",
    "count",
    "empty_genomes",
    "first",
    "initial",
    "pick_random",
]


@flax.struct.dataclass
class Genomes:
    """G genomes of N node slots and C connection slots; what is not `on` is padding, and zero.

    The first I node slots are inputs, the next O outputs; hidden nodes have any of the others. Connections name their
    ends by slot; identities, which persist over generations and genomes, are `node_id` and `innovation`.

    Attributes:
        node_id: int32 `[G, N]`: the slot's number for inputs and outputs, an innovation for hidden nodes.
        node_on: bool `[G, N]`.
        bias: float32 `[G, N]`.
        response: float32 `[G, N]`, multiplies the aggregated inputs.
        time_constant: float32 `[G, N]`, seconds; read by "ctrnn" alone.
        activation: int32 `[G, N]`, index into `NeatConfig.activations`.
        aggregation: int32 `[G, N]`, index into `NeatConfig.aggregations`.
        innovation: int32 `[G, C]`: innovation number, the connection's identity.
        source: int32 `[G, C]`, a node slot.
        target: int32 `[G, C]`, a node slot, never an input's.
        weight: float32 `[G, C]`.
        enabled: bool `[G, C]`; only enabled connections are in the network.
        on: bool `[G, C]`.
    """

    node_id: Array
    node_on: Array
    bias: Array
    response: Array
    time_constant: Array
    activation: Array
    aggregation: Array
    innovation: Array
    source: Array
    target: Array
    weight: Array
    enabled: Array
    on: Array

    def rows(self, index: ArrayLike) -> "Genomes":
        """The genomes of these numbers, in their order."""
        return jax.tree.map(lambda x: x[index], self)


@flax.struct.dataclass
class Packed:
    """Genomes side by side in two arrays, so that to copy rows is two gathers and not one a field.

    Attributes:
        whole: int32 `[G, 4 N + 5 C]`: the fields of integers and masks, in the order of `Genomes`.
        real: float32 `[G, 3 N + C]`: the other ones.
    """

    whole: Array
    real: Array

    @classmethod
    def of(cls, genomes: Genomes) -> "Packed":
        """Packs all fields."""
        fields = [
            (field.name, getattr(genomes, field.name)) for field in dataclasses.fields(Genomes)
        ]
        whole = [x.astype(jnp.int32) for name, x in fields if name not in _REAL]
        return cls(
            jnp.concatenate(whole, 1),
            jnp.concatenate([x for name, x in fields if name in _REAL], 1),
        )

    def rows(self, config: NeatConfig, index: Array) -> Genomes:
        """The genomes of these numbers, in their order."""
        whole, real, found, used = self.whole[index], self.real[index], {}, [0, 0]
        for field in dataclasses.fields(Genomes):
            is_real = field.name in _REAL
            width = config.max_conns if field.name in _OF_CONNS else config.max_nodes
            columns = slice(used[is_real], used[is_real] + width)
            used[is_real] += width
            value = (real if is_real else whole)[:, columns]
            found[field.name] = value > 0 if field.name in _MASKS else value
        return Genomes(**found)


_REAL = ("bias", "response", "time_constant", "weight")
_MASKS = ("node_on", "enabled", "on")
_OF_CONNS = ("innovation", "source", "target", "weight", "enabled", "on")


def empty_genomes(config: NeatConfig, count: int) -> Genomes:
    """Genomes of inputs and outputs alone."""
    nodes, conns = (count, config.max_nodes), (count, config.max_conns)
    slots = jnp.broadcast_to(jnp.arange(config.max_nodes, dtype=jnp.int32), nodes)
    is_end, is_output = (
        slots < config.num_io,
        (slots >= config.num_inputs) & (slots < config.num_io),
    )
    assert config.activations is not None and config.output_activation is not None
    zeros = jnp.zeros(conns, jnp.int32)
    return Genomes(
        node_id=jnp.where(is_end, slots, 0),
        node_on=is_end,
        bias=jnp.zeros(nodes, float),
        response=is_end.astype(float),
        time_constant=is_end.astype(float),
        activation=jnp.where(
            is_output, jnp.int32(config.activations.index(config.output_activation)), 0
        ),
        aggregation=jnp.zeros(nodes, jnp.int32),
        innovation=zeros,
        source=zeros,
        target=zeros,
        weight=jnp.zeros(conns, float),
        enabled=jnp.zeros(conns, bool),
        on=jnp.zeros(conns, bool),
    )


def initial(config: NeatConfig, weights: Array, biases: Array) -> Genomes:
    """The first generation, of one structure: connection j has innovation j, from input j // O to output j % O.

    Args:
        config: sizes; `initial` says whether there are connections.
        weights: float32 `[G, C]`, of which the first I O are used.
        biases: float32 `[G, N]`, of which those of outputs are used.
    """
    genomes = empty_genomes(config, len(weights))
    count = config.num_inputs * config.num_outputs if config.initial == "full" else 0
    gene = jnp.broadcast_to(jnp.arange(config.max_conns, dtype=jnp.int32), weights.shape)
    on, outputs = gene < count, config.num_outputs
    slots = jnp.arange(config.max_nodes)[None]
    is_output = (slots >= config.num_inputs) & (slots < config.num_io)
    return dataclasses.replace(
        genomes,
        bias=jnp.where(is_output, biases, 0),
        innovation=jnp.where(on, gene, 0),
        source=jnp.where(on, gene // outputs, 0),
        target=jnp.where(on, config.num_inputs + gene % outputs, 0),
        weight=jnp.where(on, weights, 0),
        enabled=on,
        on=on,
    )


def first(mask: Array, axis: int = 1) -> tuple[Array, Array]:
    """The place of the first True along an axis, and whether there is any: int32 (0 where there is none) and bool.

    On a CPU one reduction of both, which compiles to one loop without branches, however `mask` is computed; on a GPU of
    places alone, into which XLA fuses what computes `mask`.
    """
    places = jax.lax.broadcasted_iota(jnp.int32, mask.shape, axis)
    nowhere = jnp.int32(mask.shape[axis])
    if jax.default_backend() == "gpu":
        place = jnp.min(jnp.where(mask, places, nowhere), axis)
        return jnp.where(place < nowhere, place, 0), place < nowhere

    def least(one, two):
        return one[0] | two[0], jnp.minimum(one[1], two[1])

    found, place = jax.lax.reduce(
        (mask, jnp.where(mask, places, nowhere)), (False, nowhere), least, (axis,)
    )
    return jnp.where(found, place, 0), found


def pick_random(mask: Array, uniform: Array) -> tuple[Array, Array]:
    """The place of one True in each row, any with the same chance, and whether there is any.

    Every place gets a number, MurmurHash3's finalizer of the row's random number and the place, and the largest wins.

    Args:
        mask: bool `[G, K]`.
        uniform: float32 `[G]`, random numbers in [0, 1).

    Returns:
        int32 `[G]` (0 where there is none) and bool `[G]`.
    """
    places = jax.lax.broadcasted_iota(jnp.uint32, mask.shape, 1)
    bits = jax.lax.bitcast_convert_type(uniform.astype(jnp.float32), jnp.uint32)[:, None]
    bits = bits + places * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    score = jnp.where(mask, (bits >> 1) + 1, 0)

    def better(one, two):
        wins = (two[0] > one[0]) | ((two[0] == one[0]) & (two[1] < one[1]))
        return tuple(jnp.where(wins, b, a) for a, b in zip(one, two, strict=True))

    best, place = jax.lax.reduce((score, places), (jnp.uint32(0), jnp.uint32(0)), better, (1,))
    return place.astype(jnp.int32), best > 0


def count(mask: Array) -> Array:
    """How many are True of the last axis: float32, exact up to 2^24. A CPU would sum integers in several loops."""
    return jnp.sum(mask, -1, dtype=jnp.float32)


def check_genomes(config: NeatConfig, genomes: Genomes) -> None:
    """Refuses genomes that break a promise: unique identities and edges, ends alive, no cycle; not under jit.

    Raises:
        UsageError: naming the first genome that is wrong and what it breaks.
    """
    host = jax.tree.map(np.asarray, genomes)
    for number in range(len(host.on)):
        one = host.rows(number)
        for wrong, what in _faults(config, one):
            if wrong:
                raise UsageError(f"genome {number} {what}.")


def _faults(config: NeatConfig, one: PyTree) -> Iterator[tuple[bool, str]]:
    ids, innovations = one.node_id[one.node_on], one.innovation[one.on]
    source, target = one.source[one.on], one.target[one.on]
    yield not one.node_on[: config.num_io].all(), "lacks an input or output"
    yield (
        (one.node_id[: config.num_io] != np.arange(config.num_io)).any(),
        "misnames an input or output",
    )
    yield len(set(ids)) < len(ids), "has a node identity twice"
    yield len(set(innovations)) < len(innovations), "has an innovation twice"
    yield len(set(zip(source, target, strict=True))) < len(source), "has an edge twice"
    yield (
        not (one.node_on[source].all() and one.node_on[target].all()),
        "has a connection to a node that is not there",
    )
    yield (target < config.num_inputs).any(), "has a connection into an input"
    yield (
        (one.enabled & ~one.on).any() or (one.weight[~one.on] != 0).any(),
        "has padding that is not zero",
    )
    yield config.kind == "feedforward" and _has_cycle(source, target), "has a cycle"


def _has_cycle(source: np.ndarray, target: np.ndarray) -> bool:
    while len(source):
        inner = np.isin(source, target)  # an edge whose source has no edge into it is in no cycle
        if inner.all():
            return True
        source, target = source[inner], target[inner]
    return False
