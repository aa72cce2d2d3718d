"""The simulations of one batch and the state of a search: what all tree searches keep, start and end alike."""

import dataclasses
import functools
from typing import NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import Model, num_actions, root_actions
from jaxpar.pomdp.planners.tree import EMPTY, Children, Tree, add_leaves, empty_tree
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

__all__ = ["Path", "SearchState", "Simulations"]

SALT = 2**31 - 1
"""What the key of a plan is folded with for the salt: a number that no batch has."""


class Simulations(NamedTuple):
    """The n simulations of a batch, on their way down the tree.

    Attributes:
        states: `[n, ...]`.
        node: int32 `[n]`, where it is; `EMPTY` once it ended or found no room below an edge.
        stuck: int32 `[n]`, that edge, else `EMPTY`.
        live: bool `[n]`, it goes on.
        action: int32 `[n]`, what it did last; -1 at the root.
    """

    states: PyTree
    node: Array
    stuck: Array
    live: Array
    action: Array


class Path(NamedTuple):
    """Where the simulations of one batch went, `[D + 1, n]`; ids are `EMPTY` where one was no longer in the tree.

    Attributes:
        nodes: int32, the node of each level.
        edges: int32, the edge taken there.
        rewards: float32, what it earned, with the discounted guess of a simulation that found no room below.
        leaf: float32 `[n]`, the guess where the simulation stopped at a node.
    """

    nodes: Array
    edges: Array
    rewards: Array
    leaf: Array

    def after(self, d: Array, nodes: Array, edges: Array, rewards: Array) -> "Path":
        """The path with the edges of level `d`, what they earned, and the nodes below them; all `[n]`."""
        put = functools.partial(
            jax.lax.dynamic_update_index_in_dim, axis=0
        )  # unlike `.at`, checks no bounds
        return self._replace(
            nodes=put(self.nodes, nodes, d + 1),
            edges=put(self.edges, edges, d),
            rewards=put(self.rewards, rewards, d),
        )


@flax.struct.dataclass
class SearchState:
    """State of a search: its tree and its root.

    Attributes:
        tree: the tree.
        legal: bool `[A]`, the actions that were legal in every state drawn for the root.
        ended: int32, how many of those states were terminal.
        drawn: int32, how many they are.
    """

    tree: Tree
    legal: Array
    ended: Array
    drawn: Array

    @property
    def iteration(self) -> Array:
        """Number of batches so far, int32."""
        return self.tree.iteration

    @property
    def is_finished(self) -> bool:
        """False: another batch always adds to the means."""
        return False


State = TypeVar("State", bound=SearchState)


def empty_search(
    key: PRNGKey, model: Model, belief: Belief, children: Children, max_nodes: int, max_edges: int
) -> SearchState:
    """Returns a search that has only its root, with room for so many nodes and edges.

    The key gives the tree's salt; it may be used for the batches too, which fold it.
    """
    actions = num_actions(model.env, model.params)
    salt = jax.random.bits(jax.random.fold_in(key, SALT), dtype=jnp.uint32)
    tree = empty_tree(actions, max_nodes, max_edges, children, salt)
    tree = dataclasses.replace(tree, invalid=tree.invalid + invalid_weights(belief))
    zero = jnp.zeros((), jnp.int32)
    return SearchState(tree=tree, legal=jnp.ones((actions,), bool), ended=zero, drawn=zero)


def start_simulations(
    key: PRNGKey, model: Model, belief: Belief, search: State, count: int, max_depth: int
) -> tuple[State, Path, Simulations]:
    """`count` simulations at the root, in states drawn from the belief, with an empty path; consumes `key`."""
    tree = search.tree
    states = belief.sample(key, count)
    legal, ended = root_actions(model, states)
    search = dataclasses.replace(
        search,
        legal=search.legal & legal,
        ended=search.ended + jnp.sum(ended, dtype=jnp.int32),
        drawn=search.drawn + count,
        tree=dataclasses.replace(
            tree,
            node_visits=tree.node_visits.at[0].add(jnp.sum(~ended, dtype=jnp.int32)),
            stranded=tree.stranded + samples_without_weight(belief, count),
        ),
    )
    nowhere = jnp.full((max_depth + 1, count), EMPTY, jnp.int32)
    node = jnp.where(ended, EMPTY, 0)
    path = Path(
        nodes=nowhere.at[0].set(node),
        edges=nowhere,
        rewards=jnp.zeros(nowhere.shape),
        leaf=jnp.zeros((count,)),
    )
    simulations = Simulations(
        states=states,
        node=node,
        stuck=jnp.full((count,), EMPTY, jnp.int32),
        live=~ended,
        action=jnp.full((count,), -1, jnp.int32),
    )
    return search, path, simulations


def samples_without_weight(belief: Belief, count: int) -> Array:
    """Number of samples, out of `count`, from a belief without any weight, int32: all of them or none."""
    return jnp.where(belief.weightless, count, 0).astype(jnp.int32)


def invalid_weights(belief: Belief) -> Array:
    """Number of weights of a belief that are no numbers, int32."""
    return jnp.asarray(belief.invalid, jnp.int32)


def stop_stranded(simulations: Simulations, legal: Array) -> tuple[Simulations, Array]:
    """Stops the live simulations whose states allow no action by `legal` `[n, A]`, and says which they are."""
    able = jnp.any(legal, axis=1)
    return simulations._replace(live=simulations.live & able), simulations.live & ~able


def is_waiting(simulations: Simulations) -> Array:
    """Simulations that stopped without having ended, bool `[n]`: those whose states are to be valued."""
    return (simulations.stuck != EMPTY) | (simulations.node != EMPTY)


def record_leaves(
    tree: Tree, path: Path, simulations: Simulations, leaves: tuple[Array, Array], discount: Scalar
) -> tuple[Tree, Path]:
    """Adds the values of where the simulations stopped, and which of them were not finite, and ends the batch."""
    values, wrong = leaves
    tree = add_leaves(tree, simulations.node, simulations.stuck, values, discount)
    # Whoever found no room below an edge has no node to be valued at: its value counts as a reward of that edge.
    beyond = (path.edges == simulations.stuck[None]) & (path.edges != EMPTY)
    path = path._replace(
        rewards=path.rewards + jnp.where(beyond, discount * values[None], 0.0), leaf=values
    )
    return dataclasses.replace(
        tree,
        invalid=tree.invalid + jnp.sum(wrong, dtype=jnp.int32),
        iteration=tree.iteration + 1,
        depth=jnp.maximum(
            tree.depth, jnp.sum(jnp.any(path.edges != EMPTY, axis=1), dtype=jnp.int32)
        ),
    ), path
