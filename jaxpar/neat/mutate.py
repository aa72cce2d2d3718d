"""Mutation: numbers of genes, and at most one change of structure a child, as index arithmetic over the population."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.genome import Genomes, count, first, pick_random
from jaxpar.neat.graph import reachable, singleton, unpack_set
from jaxpar.neat.innovation import NOTHING, SPLIT, Requests
from jaxpar.neat.uniforms import Uniforms, normal
from jaxpar.types import Array, Scalar

__all__ = ["Edit", "apply_edit", "choose_edit", "mutate_numbers", "noise"]


def noise(config: NeatConfig, uniform: Array) -> Array:
    """A step of size 1: normal in the mode "fast", uniform in [-1, 1) in the mode "canonical", as in the paper."""
    return normal(uniform) if config.mode == "fast" else 2 * uniform - 1


def mutate_numbers(
    config: NeatConfig, rates: Rates, uniforms: Uniforms, genomes: Genomes, may: Array
) -> Genomes:
    """Mutates weights, evolved attributes, functions and `enabled`, of the children that `may`, bool `[G]`."""
    chosen = may & (uniforms.one() < rates.weights)
    perturb, step = uniforms.take(config.max_conns), noise(config, uniforms.take(config.max_conns))
    size = rates.weight_power, rates.weight_init
    weight = _perturbed(
        genomes.weight, perturb, step, rates.weight_perturb, rates.weight_replace, size, 0.0
    )
    weight = jnp.clip(weight, -rates.weight_limit, rates.weight_limit)
    found: dict[str, Array] = {
        "weight": jnp.where(chosen[:, None] & genomes.on, weight, genomes.weight)
    }
    # Attributes of inputs mutate as well: nothing reads them, and a mask would cost more.
    nodes = may[:, None] & genomes.node_on
    for name in config.evolved or ():
        perturb, step = uniforms.take(config.max_nodes), normal(uniforms.take(config.max_nodes))
        size, centre = (rates.node_power, rates.bias_init), 0.0 if name == "bias" else 1.0
        value = _perturbed(
            getattr(genomes, name),
            perturb,
            step,
            rates.node_perturb,
            rates.node_replace,
            size,
            centre,
        )
        least = 1e-2 if name == "time_constant" else -rates.weight_limit
        found[name] = jnp.where(
            nodes, jnp.clip(value, least, rates.weight_limit), getattr(genomes, name)
        )
    for name, names in (("activation", config.activations), ("aggregation", config.aggregations)):
        if names is not None and len(names) > 1:
            redraw, choice = (
                uniforms.take(config.max_nodes) < rates.redraw,
                uniforms.take(config.max_nodes),
            )
            new = jnp.minimum((choice * len(names)).astype(jnp.int32), len(names) - 1)
            found[name] = jnp.where(nodes & redraw, new, getattr(genomes, name))
    return dataclasses.replace(
        genomes, **found, enabled=_toggle_enabled(rates, uniforms, genomes, may)
    )


def _perturbed(
    old: Array,
    perturb: Array,
    step: Array,
    chance: Scalar,
    replace: Scalar,
    size: tuple,
    centre: float,
) -> Array:
    moved = jnp.where(perturb < chance, old + size[0] * step, old)
    return jnp.where(perturb >= 1 - replace, centre + size[1] * step, moved)


def _toggle_enabled(rates: Rates, uniforms: Uniforms, genomes: Genomes, may: Array) -> Array:
    """`enabled` with one gene flipped, and the first disabled one enabled, by their chances."""
    gene, column = jnp.arange(genomes.on.shape[1])[None], lambda x: x[:, None]
    place, found = pick_random(genomes.on, uniforms.one())
    flip = may & found & (uniforms.one() < rates.toggle)
    enabled = genomes.enabled ^ (column(flip) & (gene == column(place)))
    place, found = first(genomes.on & ~enabled)
    return enabled | (
        column(may & found & (uniforms.one() < rates.reenable)) & (gene == column(place))
    )


class Edit(NamedTuple):
    """The change of structure of each of G children: int32 `[G]` unless said otherwise.

    Attributes:
        adds_node: bool `[G]`; the connection `old` is disabled, `row` and `row2` become its halves.
        adds_conn: bool `[G]`; `row` becomes a connection from `source` to `target`.
        del_node: bool `[G]`; of the node `slot`, with its connections.
        del_conn: bool `[G]`; of the connection `old`.
        old: a connection.
        row: the first free connection.
        row2: the second.
        slot: the first free node, or the node to delete.
        source: a node slot.
        target: a node slot.
        weight: float32 `[G]`, of a new connection.
        refused: bool `[G]`; capacity forbade it.
    """

    adds_node: Array
    adds_conn: Array
    del_node: Array
    del_conn: Array
    old: Array
    row: Array
    row2: Array
    slot: Array
    source: Array
    target: Array
    weight: Array
    refused: Array

    @property
    def is_change(self) -> Array:
        """Bool `[G]`."""
        return self.adds_node | self.adds_conn | self.del_node | self.del_conn

    def requests(self, genomes: Genomes) -> Requests:
        """The innovations that these changes need."""
        first = jnp.where(
            self.adds_node,
            SPLIT,
            jnp.where(self.adds_conn, _at(genomes.node_id, self.source), NOTHING),
        )
        second = jnp.where(
            self.adds_node, _at(genomes.innovation, self.old), _at(genomes.node_id, self.target)
        )
        return Requests(first, jnp.where(first == NOTHING, 0, second))


def choose_edit(
    config: NeatConfig, rates: Rates, uniforms: Uniforms, genomes: Genomes, may: Array
) -> Edit:
    """Draws the change of structure of the children that `may`: the first of the four whose chance comes."""
    chances = uniforms.take(4)
    wants = []
    for column, chance in enumerate(
        (rates.add_node, rates.add_conn, rates.del_node, rates.del_conn)
    ):
        wants.append(may & (chances[:, column] < chance))
        may = may & ~wants[-1]
    adds_node, adds_conn, del_node, del_conn = wants
    may_split = genomes.on & genomes.enabled
    if (
        config.mode == "canonical"
    ):  # as in the paper's program, never a connection from the constant input
        may_split &= genomes.source != config.num_inputs - 1
    c = lambda x: x[:, None]  # noqa: E731
    draw = uniforms.one()
    old, has_old = pick_random(jnp.where(c(adds_node), may_split, genomes.on), draw)
    if config.mode == "canonical":
        older, has_older = _early_connection(may_split, draw)
        is_small = adds_node & (count(genomes.on) < _SMALL)
        old, has_old = jnp.where(is_small, older, old), jnp.where(is_small, has_older, has_old)
    row, has_row = first(~genomes.on)
    row2, has_row2 = first(~genomes.on & (jnp.arange(config.max_conns)[None] > c(row)))
    hidden = genomes.node_on & (jnp.arange(config.max_nodes)[None] >= config.num_io)
    free, has_free = first(~genomes.node_on)
    removed, has_hidden = pick_random(hidden, uniforms.one())
    source, target, has_pair = _pair(config, uniforms, genomes)
    fits = has_free & has_row2
    adds_node, full_node = adds_node & has_old & fits, adds_node & has_old & ~fits
    adds_conn, full_conn = adds_conn & has_pair & has_row, adds_conn & has_pair & ~has_row
    return Edit(
        adds_node, adds_conn, del_node & has_hidden, del_conn & has_old, old=old, row=row, row2=row2,
        slot=jnp.where(adds_node, free, removed),
        source=source, target=target, weight=rates.weight_init * noise(config, uniforms.one()),
        refused=full_node | full_conn,
    )  # fmt: skip


_SMALL = 15
"""Connections below which the paper's program splits old ones: new nodes then lie side by side, not in chains."""


def _early_connection(mask: Array, draw: Array) -> tuple[Array, Array]:
    """The first True of a row, but past each with the chance 0.3; int32 `[G]`, and bool `[G]`, False past the last."""
    passed = jnp.floor(jnp.log(jnp.maximum(draw, 1e-30)) / jnp.log(0.3))
    rank = jnp.cumsum(mask.astype(jnp.float32), 1)
    return first(mask & (rank == passed[:, None] + 1))


def _pair(config: NeatConfig, uniforms: Uniforms, genomes: Genomes) -> tuple[Array, Array, Array]:
    """A target at random of those that lack an edge, then a source at random: no edge yet, no cycle if feed-forward."""
    slots, nodes = jnp.arange(config.max_nodes)[None], config.max_nodes
    forward = config.kind == "feedforward"
    sources = genomes.node_on & (
        (slots < config.num_inputs) | (slots >= config.num_io) | (not forward)
    )
    row = jnp.arange(len(genomes.on))[:, None]
    degree = (
        jnp.zeros(genomes.node_on.shape).at[row, genomes.target].add(genomes.on.astype(jnp.float32))
    )
    itself = forward & (slots >= config.num_io)
    lacks = degree + itself < count(sources)[:, None]
    target, has_target = pick_random(
        genomes.node_on & (slots >= config.num_inputs) & lacks, uniforms.one()
    )
    into = genomes.on & (genomes.target == target[:, None])
    known = (
        jnp.zeros_like(sources)
        .at[row, jnp.where(into, genomes.source, nodes)]
        .set(True, mode="drop")
    )
    if forward:
        after = reachable(
            singleton(target, nodes), genomes.source, genomes.target, genomes.on, nodes
        )
        sources &= ~unpack_set(after, nodes)
    source, found = pick_random(sources & ~known, uniforms.one())
    return source, target, found & has_target


def apply_edit(genomes: Genomes, edit: Edit, node: Array, innovation: Array) -> Genomes:
    """Makes the changes, with the identities of `assign_innovations`: int32 `[G]` each."""
    gene, slot = jnp.arange(genomes.on.shape[1])[None], jnp.arange(genomes.node_on.shape[1])[None]
    c = lambda x: x[:, None]  # noqa: E731
    adds = edit.adds_node | edit.adds_conn
    first, second = c(adds) & (gene == c(edit.row)), c(edit.adds_node) & (gene == c(edit.row2))
    is_old, is_slot = gene == c(edit.old), slot == c(edit.slot)
    born, dies = c(edit.adds_node) & is_slot, c(edit.del_node) & is_slot
    touches = (genomes.source == c(edit.slot)) | (genomes.target == c(edit.slot))
    lost = (c(edit.del_conn) & is_old) | (c(edit.del_node) & touches & genomes.on)
    ends = {name: _at(getattr(genomes, name), edit.old) for name in ("source", "target", "weight")}
    split = edit.adds_node

    def changed(name, at_first, at_second):
        value = jnp.where(
            first, c(at_first), jnp.where(second, c(at_second), getattr(genomes, name))
        )
        return jnp.where(lost, jnp.zeros_like(value), value)

    on = (genomes.on | first | second) & ~lost
    return dataclasses.replace(
        genomes,
        node_id=jnp.where(born, c(node), jnp.where(dies, 0, genomes.node_id)),
        node_on=(genomes.node_on | born) & ~dies,
        **{name: jnp.where(born | dies, born.astype(float) * new, getattr(genomes, name))
           for name, new in (("bias", 0.0), ("response", 1.0), ("time_constant", 1.0))},
        **{name: jnp.where(born | dies, 0, getattr(genomes, name)) for name in ("activation", "aggregation")},
        innovation=changed("innovation", innovation, innovation + 1),
        source=changed("source", jnp.where(split, ends["source"], edit.source), edit.slot),
        target=changed("target", jnp.where(split, edit.slot, edit.target), ends["target"]),
        weight=changed("weight", jnp.where(split, 1.0, edit.weight), ends["weight"]),
        enabled=(genomes.enabled & ~(c(split) & is_old) | first | second) & on,
        on=on,
    )  # fmt: skip


def _at(values: Array, place: Array) -> Array:
    return jnp.take_along_axis(values, place[:, None], 1)[:, 0]
