"""Genomes of a whole population: one array a field, with identities and masks."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.neat.config import NeatConfig
from jaxpar.types import Array, UsageError

__all__ = ["Genomes", "check_genomes", "empty", "initial", "kth"]


@flax.struct.dataclass
class Genomes:
    """P genomes of N node slots and C connection slots; what is not `on` is padding, and zero.

    The first I node slots are inputs, the next O outputs; hidden nodes have any of the others. Connections name their
    ends by slot; identities, which persist over generations and genomes, are `node_id` and `mark`.

    Attributes:
        node_id: int32 `[P, N]`: the slot's number for inputs and outputs, an innovation for hidden nodes.
        node_on: bool `[P, N]`.
        bias: float32 `[P, N]`.
        response: float32 `[P, N]`, multiplies the aggregated inputs.
        time_constant: float32 `[P, N]`, seconds; read by "ctrnn" alone.
        activation: int32 `[P, N]`, index into `NeatConfig.activations`.
        aggregation: int32 `[P, N]`, index into `NeatConfig.aggregations`.
        mark: int32 `[P, C]`: historical mark, the connection's identity.
        source: int32 `[P, C]`, a node slot.
        target: int32 `[P, C]`, a node slot, never an input's.
        weight: float32 `[P, C]`.
        enabled: bool `[P, C]`; only enabled connections are in the network.
        on: bool `[P, C]`.
    """

    node_id: Array
    node_on: Array
    bias: Array
    response: Array
    time_constant: Array
    activation: Array
    aggregation: Array
    mark: Array
    source: Array
    target: Array
    weight: Array
    enabled: Array
    on: Array

    def rows(self, index: Any) -> "Genomes":
        """The genomes of these numbers, in their order."""
        return jax.tree.map(lambda x: x[index], self)


def empty(config: NeatConfig, count: int) -> Genomes:
    """Genomes of inputs and outputs alone."""
    nodes, conns = (count, config.max_nodes), (count, config.max_conns)
    slots = jnp.broadcast_to(jnp.arange(config.max_nodes, dtype=jnp.int32), nodes)
    is_end, is_output = slots < config.num_ends, (slots >= config.num_inputs) & (slots < config.num_ends)
    assert config.activations is not None and config.output_activation is not None
    zeros = jnp.zeros(conns, jnp.int32)
    return Genomes(
        node_id=jnp.where(is_end, slots, 0),
        node_on=is_end,
        bias=jnp.zeros(nodes, float),
        response=is_end.astype(float),
        time_constant=is_end.astype(float),
        activation=jnp.where(is_output, jnp.int32(config.activations.index(config.output_activation)), 0),
        aggregation=jnp.zeros(nodes, jnp.int32),
        mark=zeros,
        source=zeros,
        target=zeros,
        weight=jnp.zeros(conns, float),
        enabled=jnp.zeros(conns, bool),
        on=jnp.zeros(conns, bool),
    )


def initial(config: NeatConfig, weights: Array, biases: Array) -> Genomes:
    """The first generation, of one structure: connection j has mark j, from input j // O to output j % O.

    Args:
        config: sizes; `initial` says whether there are connections.
        weights: float32 `[P, C]`, of which the first I O are used.
        biases: float32 `[P, N]`, of which those of outputs are used.
    """
    genomes = empty(config, len(weights))
    count = config.num_inputs * config.num_outputs if config.initial == "full" else 0
    gene = jnp.broadcast_to(jnp.arange(config.max_conns, dtype=jnp.int32), weights.shape)
    on, outputs = gene < count, config.num_outputs
    slots = jnp.arange(config.max_nodes)[None]
    is_output = (slots >= config.num_inputs) & (slots < config.num_ends)
    return dataclasses.replace(
        genomes,
        bias=jnp.where(is_output, biases, 0),
        mark=jnp.where(on, gene, 0),
        source=jnp.where(on, gene // outputs, 0),
        target=jnp.where(on, config.num_inputs + gene % outputs, 0),
        weight=jnp.where(on, weights, 0),
        enabled=on,
        on=on,
    )


def kth(mask: Array, share: Array) -> tuple[Array, Array]:
    """The place of one True in each row, chosen by `share` in [0, 1), and whether there is any.

    Args:
        mask: bool `[P, K]`.
        share: float32 `[P]`; 0 takes the first.

    Returns:
        int32 `[P]` (0 where there is none) and bool `[P]`.
    """
    rank = jnp.cumsum(mask, 1, dtype=jnp.int32)
    count = rank[:, -1]
    wanted = jnp.minimum((share * count).astype(jnp.int32), count - 1) + 1
    return jnp.argmax(mask & (rank == wanted[:, None]), 1).astype(jnp.int32), count > 0


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


def _faults(config: NeatConfig, one: Any):
    ids, marks = one.node_id[one.node_on], one.mark[one.on]
    source, target = one.source[one.on], one.target[one.on]
    yield not one.node_on[: config.num_ends].all(), "lacks an input or output"
    yield (one.node_id[: config.num_ends] != np.arange(config.num_ends)).any(), "misnames an input or output"
    yield len(set(ids)) < len(ids), "has a node identity twice"
    yield len(set(marks)) < len(marks), "has a mark twice"
    yield len(set(zip(source, target, strict=True))) < len(source), "has an edge twice"
    yield not (one.node_on[source].all() and one.node_on[target].all()), "has a connection to a node that is not there"
    yield (target < config.num_inputs).any(), "has a connection into an input"
    yield (one.enabled & ~one.on).any() or (one.weight[~one.on] != 0).any(), "has padding that is not zero"
    yield config.kind == "feedforward" and _has_cycle(source, target), "has a cycle"


def _has_cycle(source: np.ndarray, target: np.ndarray) -> bool:
    while len(source):
        inner = np.isin(source, target)  # an edge whose source has no edge into it is in no cycle
        if inner.all():
            return True
        source, target = source[inner], target[inner]
    return False
