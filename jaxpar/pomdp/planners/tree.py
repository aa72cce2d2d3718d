"""The search tree as tensors of fixed capacity, grown by many simulations at once.

Two kinds of rows: *nodes* b (histories that end with an observation; the root is node 0) and *edges* ba (an action
taken at a node). Ids are int32, given in the order of the simulations that first need them, and valid below a count.
The edges of a node are a dense row `[A]`; the nodes below an edge are found in a dense row `[O]` where observations
are few (`DenseChildren`), and in a hash table with verified keys otherwise (`HashedChildren`). What finds no room is
counted.

Terminated simulations end on an edge and reach no node: the edge's visits count them, so that the mean over its
visits gives their future the value 0.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.pomdp.planners._loops import while_live
from jaxpar.pomdp.planners.adding import add_at
from jaxpar.types import Array, PyTree, Scalar, UsageError

__all__ = ["EMPTY", "Children", "DenseChildren", "HashedChildren", "Tree"]

EMPTY = 2**31 - 1
"""What a child table holds where there is no child. The largest int32, so that scatters with it fall outside of every
table and are dropped, and that `min` prefers any id to it."""

ROWS = Between(1, EMPTY - 1)
"""Legal capacities: numbers of rows whose ids are int32."""


@flax.struct.dataclass
class Tree:
    """N nodes, E edges; every row beyond `num_nodes` or `num_edges` is unused.

    Attributes:
        edges: int32 `[N, A]`, the edge of each action, or `EMPTY`.
        children: the table of nodes below edges, which `Children` made and reads.
        node_visits: int32 `[N]`, simulations that arrived.
        node_legal: int32 `[N]`, how many actions are legal, as last seen where one was taken.
        leaf_sum: float32 `[N]`, values of the simulations that stopped here.
        leaf_visits: int32 `[N]`, how many those are.
        weighted: float32 `[N]`, visits times value, as last added to the edge above.
        stamp: int32 `[N]`, scratch: names one of several simulations at a node.
        edge_visits: int32 `[E]`.
        reward_sum: float32 `[E]`.
        future_sum: float32 `[E]`, the sum of `weighted` over the nodes below.
        value: float32 `[E]`, Q(b, a) as of the last visit.
        psi: float32 `[E]`, the preference; infinite before its first backup.
        salt: uint32, a random word of the plan, by which each node orders its actions.
        num_nodes: int32.
        num_edges: int32.
        overflow: int32, simulation steps that found no room for an edge or a node.
        invalid: int32, rewards and leaf values that were not finite.
        stranded: int32, simulations without a legal action where they were, or of a belief without any weight.
        iteration: int32, batches of simulations so far.
        steps: int32, simulated steps on the tree.
        depth: int32, the most steps that a simulation made on the tree.
    """

    edges: Array
    children: PyTree
    node_visits: Array
    node_legal: Array
    leaf_sum: Array
    leaf_visits: Array
    weighted: Array
    stamp: Array
    edge_visits: Array
    reward_sum: Array
    future_sum: Array
    value: Array
    psi: Array
    salt: Array
    num_nodes: Array
    num_edges: Array
    overflow: Array
    invalid: Array
    stranded: Array
    iteration: Array
    steps: Array
    depth: Array


def insert(
    table: Array, slots: Array, wanted: Array, count: Array, capacity: int
) -> tuple[Array, Array, Array, Array]:
    """Finds or makes the children at `slots` of a flat child table, for n simulations at once.

    Simulations that want the same new child get the same id. All claim the slot with their number and the lowest
    wins; new ids follow the order of the winners. Costs 2 scatters and 3 gathers of n, and no sort.

    Args:
        table: int32 `[M]`, ids below `capacity` or `EMPTY`.
        slots: int32 `[n]`.
        wanted: bool `[n]`; the others are left alone.
        count: int32, ids in use.
        capacity: where ids end.

    Returns:
        The table, ids `[n]` (`EMPTY` where not wanted or where there is no room), the new count, and bool `[n]`: which
        simulation made each new child.
    """
    # Claims are numbered from `capacity` on, above all ids, so that `min` never takes a child that is there.
    size = table.shape[0]
    claims = capacity + jnp.arange(slots.shape[0], dtype=jnp.int32)
    # Reads come before writes by this barrier: a read that moves past them has XLA keep a copy of the whole table.
    missing, table = jax.lax.optimization_barrier((wanted & (table[slots] == EMPTY), table))
    claimed = table.at[jnp.where(missing, slots, size)].min(claims, mode="drop")
    first = missing & (claimed[slots] == claims)
    so_far = jnp.cumsum(first, dtype=jnp.int32)
    new = count + so_far - 1
    fits = first & (new < capacity)
    table = claimed.at[jnp.where(first, slots, size)].set(jnp.where(fits, new, EMPTY), mode="drop")
    ids = jnp.where(wanted, table[slots], EMPTY)
    return table, ids, jnp.minimum(count + so_far[-1], capacity), fits


@runtime_checkable
class Children(Protocol):
    """Where the nodes below edges are looked up: makes a table, and finds or makes nodes in it."""

    def empty(self, num_nodes: int, num_edges: int) -> PyTree:
        """A table without nodes: a pytree of int32 arrays, which only this object reads."""
        ...

    def find(
        self, table: PyTree, edges: Array, keys: Array, wanted: Array, count: Array, capacity: int
    ) -> tuple[PyTree, Array, Array]:
        """The nodes of n pairs of an edge and an observation key, made where missing, as by `insert`.

        Returns:
            The table, ids `[n]` (`EMPTY` where not wanted or where there is no room), and the new count of nodes.
        """
        ...

    def links(self, table: PyTree) -> tuple[Array, Array, Array]:
        """The edge, observation key and node of every slot, int32 `[M]`; `EMPTY` nodes are unused slots."""
        ...


def check_children(children: object) -> None:
    """Rejects what is no table of children.

    Raises:
        UsageError: it is neither None nor an object with the methods of `Children`.
    """
    if children is not None and (isinstance(children, type) or not isinstance(children, Children)):
        raise UsageError(
            f"children={children!r}: no table of children; expected DenseChildren(O), "
            "HashedChildren() or None."
        )


@dataclasses.dataclass(frozen=True)
class DenseChildren:
    """The nodes below an edge in a row `[O]`: no search, E x O int32 of memory. For few observations."""

    num_observations: int = field(legal=AtLeast(1))

    def __post_init__(self) -> None:
        check_fields(self)

    def empty(self, num_nodes: int, num_edges: int) -> Array:
        """int32 `[E * O]`."""
        if num_edges * self.num_observations >= EMPTY:
            raise UsageError(
                f"a dense table of {num_edges} edges x {self.num_observations} observations is too large; "
                "lower max_edges, or use observations=None for a hash table"
            )
        return jnp.full((num_edges * self.num_observations,), EMPTY, jnp.int32)

    def find(
        self, table: Array, edges: Array, keys: Array, wanted: Array, count: Array, capacity: int
    ) -> tuple[Array, Array, Array]:
        """As `insert`, for pairs of an edge and an observation key; a key outside `0 .. O - 1` finds no room."""
        wanted = (
            wanted & (keys >= 0) & (keys < self.num_observations)
        )  # else a key would name another edge's slot
        slots = jnp.where(wanted, edges * self.num_observations + keys, 0)
        return insert(table, slots, wanted, count, capacity)[:3]

    def links(self, table: Array) -> tuple[Array, Array, Array]:
        """The edge, observation key and node of every slot, int32 `[M]`; `EMPTY` nodes are unused slots."""
        slot = jnp.arange(table.shape[0], dtype=jnp.int32)
        return slot // self.num_observations, slot % self.num_observations, table


@flax.struct.dataclass
class HashTable:
    """A hash table of M slots: the edge, the observation key and the node id of each, int32 `[M]`."""

    edge: Array
    key: Array
    node: Array


@dataclasses.dataclass(frozen=True)
class HashedChildren:
    """The nodes below edges in one hash table with verified keys: 3 int32 a slot, 4 to 8 slots a node; any int32 key.

    Double hashing in rounds, at most `probes`, while any simulation still searches. Since at most a quarter of the
    slots is ever full, one that has then found none is a rarity (below 1e-8), and is counted as overflow.
    """

    probes: int = field(16, AtLeast(1))

    def __post_init__(self) -> None:
        check_fields(self)

    def empty(self, num_nodes: int, num_edges: int) -> HashTable:
        """A table for `num_nodes` nodes."""
        # A power of two, so that `place & (size - 1)` is the slot, and an odd stride visits all of them.
        none = jnp.full((1 << (4 * num_nodes - 1).bit_length(),), EMPTY, jnp.int32)
        return HashTable(none, none, none)

    def find(
        self,
        table: HashTable,
        edges: Array,
        keys: Array,
        wanted: Array,
        count: Array,
        capacity: int,
    ) -> tuple[HashTable, Array, Array]:
        """As `insert`, for pairs of an edge and an observation key."""
        mixed = _mix(
            edges.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ _mix(keys.astype(jnp.uint32))
        )
        stride = _mix(mixed + jnp.uint32(0x7F4A7C15)) | jnp.uint32(1)
        size = table.node.shape[0]

        def probe(_: Array, carry: tuple) -> tuple:
            table, place, ids, pending, count = carry
            slot = (place & jnp.uint32(size - 1)).astype(jnp.int32)
            nodes, found, count, made = insert(table.node, slot, pending, count, capacity)
            own = jnp.where(
                made, slot, size
            )  # who made the node writes its key; the others' writes are dropped
            table = HashTable(
                table.edge.at[own].set(edges, mode="drop"),
                table.key.at[own].set(keys, mode="drop"),
                nodes,
            )
            match = (
                pending & (found != EMPTY) & (table.edge[slot] == edges) & (table.key[slot] == keys)
            )
            return table, place + stride, jnp.where(match, found, ids), pending & ~match, count

        # A slot that holds another pair is a collision: its searchers stay pending and go on by their stride.
        first = (table, mixed, jnp.full(keys.shape, EMPTY, jnp.int32), wanted, count)
        _, (table, _, ids, _, count) = while_live(
            jnp.asarray(self.probes), probe, first, lambda carry: carry[3]
        )
        return table, ids, count

    def links(self, table: HashTable) -> tuple[Array, Array, Array]:
        """As `DenseChildren.links`."""
        return table.edge, table.key, table.node


def _mix(x: Array) -> Array:
    """A bijection of uint32 that spreads every bit (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def random_order(salt: Array, nodes: Array, num_actions: int) -> Array:
    """Returns distinct random words of the actions of n nodes, uint32 `[n, A]`.

    A node has the same words at each call.

    The actions with the m smallest words are m drawn without replacement. Words are distinct since
    both mixings are bijections.
    """
    node_words = _mix(salt ^ _mix(nodes.astype(jnp.uint32)))
    return _mix(node_words[:, None] + jnp.arange(num_actions, dtype=jnp.uint32)[None])


def insert_edges(tree: Tree, nodes: Array, actions: Array, live: Array) -> tuple[Tree, Array]:
    """The edges of `actions` at `nodes`, made where missing: `(tree, int32 [n])`, `EMPTY` where not live or no room."""
    capacity = tree.edge_visits.shape[0]
    num_actions = tree.edges.shape[1]
    slots = jnp.where(live, nodes * num_actions + actions, 0)  # `EMPTY` times A would leave int32
    flat, edges, count, _ = insert(tree.edges.reshape(-1), slots, live, tree.num_edges, capacity)
    return dataclasses.replace(
        tree,
        edges=flat.reshape(tree.edges.shape),
        num_edges=count,
        edge_visits=tree.edge_visits.at[edges].add(1, mode="drop"),
    ), edges


def insert_nodes(
    tree: Tree, children: Children, edges: Array, keys: Array, live: Array
) -> tuple[Tree, Array, Array]:
    """The nodes of the observations `keys` below `edges`, made where missing: `(tree, int32 [n])`, as `take`.

    And their visits before these, int32 `[n]`, which mean nothing where there is no node.
    """
    table, nodes, count = children.find(
        tree.children, edges, keys, live, tree.num_nodes, tree.node_visits.shape[0]
    )
    earlier = tree.node_visits.at[nodes].get(mode="clip")
    visits = tree.node_visits
    earlier, visits = jax.lax.optimization_barrier(
        (earlier, visits)
    )  # reads before writes, as in `insert`
    return (
        dataclasses.replace(
            tree,
            children=table,
            num_nodes=count,
            node_visits=visits.at[nodes].add(1, mode="drop"),
        ),
        nodes,
        earlier,
    )


def add_counts(
    tree: Tree, steps: Array, overflow: Array, stranded: Array, invalid: Array | None = None
) -> Tree:
    """Adds how many of each of these flags `[n]` are set to the tree's count of that name, by one sum for all."""
    flags = (steps, overflow, stranded) if invalid is None else (steps, overflow, invalid, stranded)
    made, lost, *wrong, stuck = jnp.sum(
        jnp.stack(flags), axis=1, dtype=jnp.int32
    )  # one kernel for all
    return dataclasses.replace(
        tree,
        steps=tree.steps + made,
        overflow=tree.overflow + lost,
        invalid=tree.invalid + wrong[0] if wrong else tree.invalid,
        stranded=tree.stranded + stuck,
    )


def add_leaves(tree: Tree, nodes: Array, edges: Array, values: Array, discount: Scalar) -> Tree:
    """Adds values of simulations that stopped at `nodes`, or, for want of room, below `edges` (`EMPTY`: not there).

    The latter count, discounted, as rewards of their edges, whose means stay those of all their visits.
    """
    return dataclasses.replace(
        tree,
        leaf_sum=add_at(tree.leaf_sum, nodes, values),
        leaf_visits=tree.leaf_visits.at[nodes].add(1, mode="drop"),
        reward_sum=add_at(tree.reward_sum, edges, discount * values),
    )


def representative(stamp: Array, ids: Array) -> tuple[Array, Array]:
    """One simulation of those that share an id, for each of n, int32 `[n]`, and the scratch that names it.

    Whichever writes last represents the id: any will do, since equal ids have equal rows. Of `EMPTY` ids the answer
    means nothing: their writes are dropped, and they read the last row.
    """
    stamp = stamp.at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32), mode="drop")
    return stamp, stamp.at[ids].get(mode="clip")


def back_up(tree: Tree, nodes: Array, parents: Array, values: Array) -> Tree:
    """Replaces what the visited `nodes` count for in `future_sum` of their `parents`, once for each distinct node.

    Args:
        tree: the tree.
        nodes: int32 `[n]`, repeated or `EMPTY`.
        parents: int32 `[n]`, the edges above; `EMPTY` for the root.
        values: float32 `[n]`, equal for equal nodes.
    """
    stamp, who = representative(tree.stamp, nodes)
    number = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    mine = (nodes != EMPTY) & (
        who == number
    )  # one simulation a node; `EMPTY` reads the last node's stamp
    mass = tree.node_visits.at[nodes].get(mode="clip").astype(jnp.float32) * values
    change = mass - tree.weighted.at[nodes].get(mode="clip")
    return dataclasses.replace(
        tree,
        stamp=stamp,
        weighted=tree.weighted.at[nodes].set(mass, mode="drop"),
        future_sum=add_at(tree.future_sum, jnp.where(mine, parents, EMPTY), change),
    )


def empty_tree(
    num_actions: int, max_nodes: int, max_edges: int, children: Children, salt: Array | int = 0
) -> Tree:
    """Returns a tree that holds its root only; `salt` is a random word."""
    if max_nodes < 1 or max_edges < 1 or max_nodes * num_actions >= EMPTY:
        raise UsageError(
            f"a tree of {max_nodes} nodes x {num_actions} actions and {max_edges} edges cannot be indexed by int32; "
            "capacities lie between 1 and 2^31 entries"
        )
    node = (max_nodes,)
    edge = (max_edges,)
    zero = jnp.zeros((), jnp.int32)
    return Tree(
        edges=jnp.full((max_nodes, num_actions), EMPTY, jnp.int32),
        children=children.empty(max_nodes, max_edges),
        node_visits=jnp.zeros(node, jnp.int32),
        node_legal=jnp.full(node, num_actions, jnp.int32),
        leaf_sum=jnp.zeros(node, jnp.float32),
        leaf_visits=jnp.zeros(node, jnp.int32),
        weighted=jnp.zeros(node, jnp.float32),
        stamp=jnp.full(node, -1, jnp.int32),
        edge_visits=jnp.zeros(edge, jnp.int32),
        reward_sum=jnp.zeros(edge, jnp.float32),
        future_sum=jnp.zeros(edge, jnp.float32),
        value=jnp.zeros(edge, jnp.float32),
        psi=jnp.full(edge, jnp.inf, jnp.float32),
        salt=jnp.asarray(salt, jnp.uint32),
        num_nodes=zero + 1,
        num_edges=zero,
        overflow=zero,
        invalid=zero,
        stranded=zero,
        iteration=zero,
        steps=zero,
        depth=zero,
    )


def parents(tree: Tree, children: Children) -> tuple[Array, Array]:
    """The edge above each node, int32 `[N]`, and the node above each edge, int32 `[E]`; `EMPTY` where there is none."""
    max_nodes, num_actions = tree.edges.shape
    edge, _, node = children.links(tree.children)
    above = jnp.full((max_nodes,), EMPTY, jnp.int32).at[node].set(edge, mode="drop")
    slots = jnp.arange(max_nodes * num_actions, dtype=jnp.int32)
    owner = jnp.full(tree.edge_visits.shape, EMPTY, jnp.int32)
    return above, owner.at[tree.edges.reshape(-1)].set(slots // num_actions, mode="drop")
