"""The tree search of `Pomcp` and `Vopp`: batches of simulations, all of a batch one level down at a time.

A batch is made of four parts, as each simulation of mctx is, and a fifth decides at the end:

    select     which action each simulation takes at its node            a field: `Select`
    expand     the edge of it, one step of the model, the node below     `expand`
    evaluate   what the states are worth where simulations stop          a field: `leaves.Evaluate`
    back_up    what the batch says of the edges on its way               a field: `BackUp`
    decide     the action of the root, and the report                    a field: `Decide`

A planner's `tree_search()` puts them together, and `dataclasses.replace` exchanges one.
"""

import dataclasses
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.env import Environment, capabilities
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import (
    Model,
    legal_actions,
    num_observations,
    simulate_steps,
    where_rows,
)
from jaxpar.pomdp.planners import clock, planner
from jaxpar.pomdp.planners._loops import while_live
from jaxpar.pomdp.planners.adding import add_at
from jaxpar.pomdp.planners.leaves import Evaluate, leaf_values
from jaxpar.pomdp.planners.planner import PlanInfo
from jaxpar.pomdp.planners.simulations import (
    Path,
    SearchState,
    Simulations,
    empty_search,
    is_waiting,
    record_leaves,
    start_simulations,
    stop_stranded,
)
from jaxpar.pomdp.planners.tree import (
    EMPTY,
    Children,
    DenseChildren,
    HashedChildren,
    Tree,
    add_counts,
    insert_edges,
    insert_nodes,
)
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

__all__ = ["BackUp", "Decide", "DepthOf", "Select", "TreeSearch", "expand"]

Depth = TypeVar("Depth", int, Array)


class Select(Protocol):
    """Chooses the actions of a level."""

    def __call__(self, key: PRNGKey, tree: Tree, simulations: Simulations, legal: Array) -> Array:
        """An action for each simulation, int32 `[n]`; of those that are not live it means nothing.

        Args:
            key: consumed.
            tree: with the visits, values and preferences of the edges so far.
            simulations: where they are.
            legal: bool `[n, A]`.
        """
        ...


class BackUp(Protocol):
    """Learns from a batch."""

    def __call__(
        self, tree: Tree, children: Children, path: Path, depth: Array, discount: Scalar
    ) -> Tree:
        """The tree with new values of the edges on the path, deepest level first.

        Args:
            tree: with the batch's visits, rewards and leaf values added.
            children: where the nodes below an edge are looked up.
            path: where the simulations went.
            depth: int32, the levels that were gone down.
            discount: of one step.
        """
        ...


class Decide(Protocol):
    """Chooses the action that is played."""

    def __call__(self, search: SearchState) -> tuple[Array, PlanInfo]:
        """The action, int32, and the report."""
        ...


class DepthOf(Protocol):
    """Depth of batch k: an int of an int, an int32 of a traced number."""

    def __call__(self, k: Depth) -> Depth:
        """Levels of batch `k`."""
        ...


class BatchState(NamedTuple):
    """Arrays that a batch changes on its way down.

    Attributes:
        tree: the tree.
        path: where the simulations went so far.
        simulations: where they are.
    """

    tree: Tree
    path: Path
    simulations: Simulations


@dataclasses.dataclass(frozen=True)
class TreeSearch:
    """A tree over histories, grown by simulations that hold one state each; a planner itself.

    Attributes:
        select: the action of each simulation at its node.
        evaluate: values of states where simulations stop.
        back_up: what a batch says of the edges on its way.
        decide: the action of the root, and the report.
        depth_of: how deep batch k goes.
        num_simulations: n, of a batch.
        iterations: batches of a plan.
        max_depth: of a batch, at most.
        expand_after: visits that a node needs for simulations to go on from it; before, they stop there. 0: none.
        discount: of one step; None takes `params.discount`.
        max_nodes: capacity in nodes.
        max_edges: capacity in edges; None is `max_nodes`.
        children: where the nodes below an edge are looked up; None picks by the number of observations.
        ranked_by: which column of the report orders actions, "values" or "preferences".
    """

    select: Select
    evaluate: Evaluate
    back_up: BackUp
    decide: Decide
    depth_of: DepthOf
    num_simulations: int
    iterations: int
    max_depth: int
    expand_after: int
    discount: Scalar | None
    max_nodes: int
    max_edges: int | None
    children: Children | None
    ranked_by: str

    def tree_search(self) -> "TreeSearch":
        """Itself, so that it stands wherever a planner does."""
        return self

    # Functions that all planners share, as methods (see `planners.planner`).
    plan = planner.plan
    plan_until = clock.plan_until
    search = planner.search
    grow = planner.grow_by_batches
    inspect_root = clock.inspect_root

    def init_search(self, key: PRNGKey, model: Model, belief: Belief) -> SearchState:
        """A root, with room for `iterations` batches, within the capacities."""
        # A simulation adds at most one node and one edge a level.
        most = 1 + sum(self.num_simulations * self.depth_of(k) for k in range(self.iterations))
        max_edges = self.max_nodes if self.max_edges is None else self.max_edges
        children = children_of(self.children, model.env, model.params)
        return empty_search(
            key, model, belief, children, min(most, self.max_nodes), min(most, max_edges)
        )

    def batch(self, key: PRNGKey, model: Model, belief: Belief, search: SearchState) -> SearchState:
        """One batch from the root to the leaves and back; consumes `key`."""
        sample_key, level_key, leaf_key = jax.random.split(key, 3)
        children = children_of(self.children, model.env, model.params)
        search, path, simulations = start_simulations(
            sample_key, model, belief, search, self.num_simulations, self.max_depth
        )
        # All keys at once: fewer launches.
        keys = jax.vmap(lambda d: jax.random.split(jax.random.fold_in(level_key, d)))(
            jnp.arange(self.max_depth)
        )

        def level(d: Array, state: BatchState) -> BatchState:
            select_key, expand_key = keys[d]
            state, legal, stranded = _legal_and_stranded(model, state)
            actions = self.select(select_key, state.tree, state.simulations, legal)
            return expand(
                expand_key, model, children, state, actions, stranded, d, self.expand_after
            )

        first = BatchState(tree=search.tree, path=path, simulations=simulations)
        depth = self.depth_of(search.tree.iteration)
        depth, (tree, path, simulations) = while_live(
            depth, level, first, lambda state: state.simulations.live
        )

        waiting = is_waiting(simulations)
        values = leaf_values(
            leaf_key, self.evaluate, model, simulations.states, simulations.action, waiting
        )
        tree, path = record_leaves(tree, path, simulations, values, model.discount)
        tree = self.back_up(tree, children, path, depth, model.discount)
        return dataclasses.replace(search, tree=tree)


def children_of(children: Children | None, env: Environment, params: PyTree) -> Children:
    """Where the nodes below an edge are looked up: `children`, else in dense rows for up to 64 observations."""
    if children is not None:
        return children
    known = num_observations(env, params)
    return DenseChildren(known) if known is not None and known <= 64 else HashedChildren()


def _legal_and_stranded(model: Model, state: BatchState) -> tuple[BatchState, Array, Array]:
    """The legal actions of each state, bool `[n, A]`, counted in the tree, and who has none and stops, bool `[n]`."""
    tree, path, simulations = state
    legal = legal_actions(model, simulations.states)
    if capabilities(model.env).action_mask is None:
        return state, legal, jnp.zeros(simulations.live.shape, bool)

    simulations, stranded = stop_stranded(simulations, legal)
    at = jnp.where(simulations.live, simulations.node, EMPTY)
    counts = jnp.sum(legal, axis=1, dtype=jnp.int32)
    tree = dataclasses.replace(tree, node_legal=tree.node_legal.at[at].set(counts, mode="drop"))
    return BatchState(tree=tree, path=path, simulations=simulations), legal, stranded


def expand(
    key: PRNGKey,
    model: Model,
    children: Children,
    state: BatchState,
    actions: Array,
    stranded: Array,
    d: Array,
    expand_after: int,
) -> BatchState:
    """One level down: the edges of the actions, one step of each state, and the nodes of what is seen.

    Args:
        key: consumed.
        model: environment, parameters and discount.
        children: where the nodes below an edge are looked up.
        state: tree, path and simulations above.
        actions: int32 `[n]`.
        stranded: bool `[n]`, simulations that have just stopped since no action is legal, which are counted.
        d: int32, the level.
        expand_after: visits that a node needs for a simulation to go on from it.
    """
    tree, path, simulations = state
    tree, edges = insert_edges(tree, simulations.node, actions, simulations.live)
    moved = edges != EMPTY
    result = simulate_steps(key, model, simulations.states, actions)
    on = moved & ~result.terminated
    tree, node, earlier = insert_nodes(tree, children, edges, result.obs_key, on)
    lost = (simulations.live & ~moved) | (on & (node == EMPTY))
    tree = add_counts(
        tree, steps=moved, overflow=lost, invalid=moved & result.invalid, stranded=stranded
    )
    tree = dataclasses.replace(tree, reward_sum=add_at(tree.reward_sum, edges, result.reward))

    # Whoever found no edge stays where it is, and so does whoever had stopped before.
    simulations = Simulations(
        states=jax.tree.map(
            lambda new, old: where_rows(moved, new, old), result.state, simulations.states
        ),
        node=jnp.where(moved, node, simulations.node),
        stuck=jnp.where(on & (node == EMPTY), edges, simulations.stuck),
        live=on & (node != EMPTY) & (earlier >= expand_after),
        action=jnp.where(moved, actions, simulations.action),
    )
    path = path.after(d, jnp.where(moved, node, EMPTY), edges, jnp.where(moved, result.reward, 0.0))
    return BatchState(tree=tree, path=path, simulations=simulations)
