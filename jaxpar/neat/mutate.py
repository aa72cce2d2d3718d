"""Mutation: numbers of genes, and at most one change of structure a child.

All children are mutated at once, by index arithmetic over the population.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.genome import Genomes, count, first, pick_random
from jaxpar.neat.graph import reachable, singleton, unpack_set
from jaxpar.neat.innovation import NOTHING, SPLIT, Requests
from jaxpar.neat.modes import normal
from jaxpar.neat.uniforms import Uniforms
from jaxpar.types import Array, PRNGKey, Scalar

__all__ = ["Edit", "apply_edit", "choose_edit", "mutate", "mutate_numbers", "noise"]


def mutate(key: PRNGKey, config: NeatConfig, genomes: Genomes) -> Genomes:
    """Mutates G genomes, each on its own; consumes `key`.

    A genome gets at most one change of structure, or else new numbers, by the chances of
    `config.rates`. New nodes and connections continue the genome's own identities. These do not
    agree between genomes, as `Neat.tell` has them: such genomes have one parent each.

    Args:
        key: consumed; genome g has the key folded with g.
        config: static; its population may be another number.
        genomes: G of them.
    """
    rates = config.rates
    assert rates is not None
    count = len(genomes.on)
    uniforms = Uniforms(key, config, jnp.arange(count))
    may = jnp.ones(count, bool)
    edit = choose_edit(config, rates, uniforms, genomes, may)
    children = mutate_numbers(config, rates, uniforms, genomes, may & ~edit.is_change)
    node = jnp.maximum(jnp.max(children.node_id, 1), config.num_io - 1) + 1
    return apply_edit(children, edit, node, jnp.max(children.innovation, 1) + 1)


def noise(config: NeatConfig, uniform: Array) -> Array:
    """Steps of size 1, of the mode's distribution, from uniform numbers in [0, 1)."""
    return config.rules.step(uniform)


def mutate_numbers(
    config: NeatConfig, rates: Rates, uniforms: Uniforms, genomes: Genomes, may: Array
) -> Genomes:
    """Mutates weights, evolved attributes, functions and `enabled`.

    `may` is bool `[G]`, the children that mutate.
    """
    chosen = may & (uniforms.one() < rates.weights)
    perturb = uniforms.take(config.max_conns)
    weight = _perturb(
        genomes.weight,
        perturb,
        step=noise(config, uniforms.take(config.max_conns)),
        chance=rates.weight_perturb,
        power=rates.weight_power,
        replace=rates.weight_replace,
        init=rates.weight_init,
        centre=0.0,
    )
    weight = jnp.clip(weight, -rates.weight_limit, rates.weight_limit)
    changed: dict[str, Array] = {
        "weight": jnp.where(chosen[:, None] & genomes.on, weight, genomes.weight)
    }

    # Attributes of inputs mutate as well: nothing reads them, and a mask would cost more.
    nodes = may[:, None] & genomes.node_on
    for name in config.evolved or ():
        old = getattr(genomes, name)
        perturb = uniforms.take(config.max_nodes)
        new = _perturb(
            old,
            perturb,
            step=normal(uniforms.take(config.max_nodes)),
            chance=rates.node_perturb,
            power=rates.node_power,
            replace=rates.node_replace,
            init=rates.bias_init,
            centre=_CENTRES[name],
        )

        least = -rates.weight_limit
        if name == "time_constant":
            least = 1e-2
        new = jnp.clip(new, least, rates.weight_limit)
        changed[name] = jnp.where(nodes, new, old)

    for name, names in (("activation", config.activations), ("aggregation", config.aggregations)):
        if names is not None and len(names) > 1:
            redraw = uniforms.take(config.max_nodes) < rates.redraw
            choice = uniforms.take(config.max_nodes)
            new = jnp.minimum((choice * len(names)).astype(jnp.int32), len(names) - 1)
            changed[name] = jnp.where(nodes & redraw, new, getattr(genomes, name))

    enabled = _toggle_enabled(rates, uniforms, genomes, may)
    return dataclasses.replace(genomes, **changed, enabled=enabled)


_CENTRES = {"bias": 0.0, "response": 1.0, "time_constant": 1.0}
"""Values of attributes around which new ones are drawn."""


def _perturb(
    old: Array,
    perturb: Array,
    step: Array,
    *,
    chance: Scalar,
    power: Scalar,
    replace: Scalar,
    init: Scalar,
    centre: float,
) -> Array:
    moved = jnp.where(perturb < chance, old + power * step, old)
    return jnp.where(perturb >= 1 - replace, centre + init * step, moved)


def _toggle_enabled(rates: Rates, uniforms: Uniforms, genomes: Genomes, may: Array) -> Array:
    """`enabled` with one gene flipped, and the first disabled one enabled, by their chances."""
    gene = jnp.arange(genomes.on.shape[1])[None]

    index, found = pick_random(genomes.on, uniforms.one())
    flip = may & found & (uniforms.one() < rates.toggle)
    enabled = genomes.enabled ^ (flip[:, None] & (gene == index[:, None]))

    index, found = first(genomes.on & ~enabled)
    reenable = may & found & (uniforms.one() < rates.reenable)
    return enabled | (reenable[:, None] & (gene == index[:, None]))


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
        joined = jnp.where(self.adds_conn, _at(genomes.node_id, self.source), NOTHING)
        first = jnp.where(self.adds_node, SPLIT, joined)
        split = _at(genomes.innovation, self.old)
        second = jnp.where(self.adds_node, split, _at(genomes.node_id, self.target))
        return Requests(first, jnp.where(first == NOTHING, 0, second))


def choose_edit(
    config: NeatConfig, rates: Rates, uniforms: Uniforms, genomes: Genomes, may: Array
) -> Edit:
    """Draws the change of structure of the children that `may`, bool `[G]`.

    Each of the four kinds has its chance, in the order of `Edit`; the first that comes is taken.
    """
    chances = uniforms.take(4)
    wants = []
    for column, chance in enumerate(
        (rates.add_node, rates.add_conn, rates.del_node, rates.del_conn)
    ):
        wants.append(may & (chances[:, column] < chance))
        may = may & ~wants[-1]
    adds_node, adds_conn, del_node, del_conn = wants

    may_split = genomes.on & genomes.enabled
    if config.rules.constant_input:
        may_split &= genomes.source != config.num_inputs - 1

    draw = uniforms.one()
    old, has_old = pick_random(jnp.where(adds_node[:, None], may_split, genomes.on), draw)
    if config.rules.splits_early:
        older, has_older = _early_connection(may_split, draw)
        is_small = adds_node & (count(genomes.on) < _SMALL)
        old = jnp.where(is_small, older, old)
        has_old = jnp.where(is_small, has_older, has_old)

    row, has_row = first(~genomes.on)
    row2, has_row2 = first(~genomes.on & (jnp.arange(config.max_conns)[None] > row[:, None]))
    hidden = genomes.node_on & (jnp.arange(config.max_nodes)[None] >= config.num_io)
    free, has_free = first(~genomes.node_on)
    removed, has_hidden = pick_random(hidden, uniforms.one())
    source, target, has_pair = _pair(config, uniforms, genomes)

    fits = has_free & has_row2
    splits = adds_node & has_old & fits
    full_node = adds_node & has_old & ~fits
    joins = adds_conn & has_pair & has_row
    full_conn = adds_conn & has_pair & ~has_row

    return Edit(
        adds_node=splits,
        adds_conn=joins,
        del_node=del_node & has_hidden,
        del_conn=del_conn & has_old,
        old=old,
        row=row,
        row2=row2,
        slot=jnp.where(splits, free, removed),
        source=source,
        target=target,
        weight=rates.weight_init * noise(config, uniforms.one()),
        refused=full_node | full_conn,
    )


_SMALL = 15
"""Connections below which the paper's program splits old ones.

New nodes then lie side by side, not in chains.
"""


def _early_connection(mask: Array, draw: Array) -> tuple[Array, Array]:
    """The first True of a row, but past each with the chance 0.3.

    Returns:
        int32 `[G]`, and bool `[G]`, False past the last.
    """
    passed = jnp.floor(jnp.log(jnp.maximum(draw, 1e-30)) / jnp.log(0.3))
    rank = jnp.cumsum(mask.astype(jnp.float32), 1)
    return first(mask & (rank == passed[:, None] + 1))


def _pair(config: NeatConfig, uniforms: Uniforms, genomes: Genomes) -> tuple[Array, Array, Array]:
    """A target at random of those that lack an edge, then a source at random.

    There is no edge yet from one to the other, and none closes a cycle in a feed-forward network.
    """
    nodes = config.max_nodes
    slots = jnp.arange(nodes)[None]
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
