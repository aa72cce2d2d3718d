"""The tree search of `Pft` and `Pomcpow`: as `TreeSearch`, with a weighted particle set at every node.

Select, evaluate, back_up and decide are those of `jaxpar.pomdp.planners.tree_search`. What differs is
`expand`, an object of three methods (`ExpandParticles`): which simulations end on their edge, what a
node that is visited does to a simulation, and what the batch's new nodes are filled with at its end.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxpar.env import Environment, PartiallyObserved, capabilities, step
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import (
    discount_of,
    is_usable,
    legal_actions,
    num_observations,
    where_rows,
    with_likelihood,
)
from jaxpar.pomdp.planners import clock as clocks
from jaxpar.pomdp.planners import planner
from jaxpar.pomdp.planners._loops import while_live
from jaxpar.pomdp.planners.adding import add_at
from jaxpar.pomdp.planners.leaves import Evaluate, leaf_values
from jaxpar.pomdp.planners.planner import PlanInfo
from jaxpar.pomdp.planners.pomcp import ranks
from jaxpar.pomdp.planners.simulations import (
    Path,
    Simulations,
    empty_search,
    record_leaves,
    start_simulations,
    stop_stranded,
)
from jaxpar.pomdp.planners.tree import (
    EMPTY,
    Children,
    HashedChildren,
    Tree,
    add_counts,
    insert_edges,
    insert_nodes,
)
from jaxpar.pomdp.planners.tree_search import BackUp, Decide, DepthOf, Select, children_of
from jaxpar.pomdp.planners.widening import (
    Descent,
    NodeBeliefs,
    ParticleSearchState,
    no_descent,
    slot_of_visit,
)
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

__all__ = ["ExpandParticles", "ParticleTreeSearch"]


class ExpandParticles(Protocol):
    """What nodes hold, and what they do to the simulations that reach them."""

    def has_ended(self, descent: Descent, is_keyed: bool) -> Array:
        """Which simulations end on their edge and reach no node, bool `[n]`.

        Args:
            descent: the level's steps.
            is_keyed: whether nodes are those of observation keys, else of slots.
        """
        ...

    def visit(
        self, key: PRNGKey, env: PartiallyObserved, params: PyTree, beliefs: NodeBeliefs, simulations: Simulations,
        descent: Descent, before: Array, is_keyed: bool,
    ) -> tuple[NodeBeliefs, PyTree, Array, Array]:  # fmt: skip
        """The beliefs, the states to go on with `[n, ...]`, what the step earned `[n]`, and who goes on, bool `[n]`.

        Args:
            key: consumed.
            env: the model.
            params: its parameters.
            beliefs: of the nodes.
            simulations: as they were above.
            descent: the level's steps.
            before: int32, the number of nodes before the batch.
            is_keyed: as above.
        """
        ...

    def fill(
        self, key: PRNGKey, env: PartiallyObserved, params: PyTree, belief: Belief, beliefs: NodeBeliefs, path: Path,
        simulations: Simulations, last: Descent, before: Array, is_keyed: bool,
    ) -> tuple[NodeBeliefs, Path, Simulations, Array]:  # fmt: skip
        """Fills the batch's new nodes; the simulations at their leaves, and whose leaves are valued, bool `[n]`.

        Args:
            key: consumed.
            env: the model.
            params: its parameters.
            belief: of the root.
            beliefs: of the nodes.
            path: where the simulations went.
            simulations: where they are.
            last: for each simulation the step that led to a new node, if one did.
            before: int32, the number of nodes before the batch.
            is_keyed: as above.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ParticleTreeSearch:
    """A tree over particle sets, grown by simulations; a planner itself.

    Attributes:
        select: the action of each simulation at its node.
        expand: what nodes hold, and what they do to simulations.
        evaluate: values of states where simulations stop.
        back_up: what a batch says of the edges on its way.
        decide: the action of the root, and the report.
        depth_of: how deep batch k goes.
        num_simulations: n, of a batch.
        iterations: batches of a plan.
        max_depth: of a batch, at most.
        num_particles: m, of a node.
        k_observations: of the widening to `#C(ba) <= k N(ba)^alpha`.
        alpha_observations: of it.
        keyed: whether nodes are those of observation keys, without widening; None: if observations are Discrete.
        discount: of one step; None takes `params.discount`.
        max_nodes: capacity in nodes, of m particles each.
        max_edges: capacity in edges; None is `max_nodes`.
        children: where the nodes below an edge are looked up; None picks by the number of observations.
        ranked_by: which column of the report orders actions, "values" or "preferences".
    """

    select: Select
    expand: ExpandParticles
    evaluate: Evaluate
    back_up: BackUp
    decide: Decide
    depth_of: DepthOf
    num_simulations: int
    iterations: int
    max_depth: int
    num_particles: int
    k_observations: Scalar
    alpha_observations: Scalar
    keyed: bool | None
    discount: Scalar | None
    max_nodes: int
    max_edges: int | None
    children: Children | None
    ranked_by: str

    def tree_search(self) -> "ParticleTreeSearch":
        """Itself, so that it stands wherever a planner does."""
        return self

    def plan(
        self, key: PRNGKey, env: Environment, params: PyTree, belief: Belief
    ) -> tuple[Array, PlanInfo]:
        """As `Planner.plan`."""
        return planner.plan(key, self, env, params, belief)

    def plan_until(
        self,
        key: PRNGKey,
        env: Environment,
        params: PyTree,
        belief: Belief,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[Array, PlanInfo]:
        """As `AnytimePlanner.plan_until`."""
        return clocks.plan_until(key, self, env, params, belief, deadline, clock)

    def search(
        self, key: PRNGKey, env: Environment, params: PyTree, belief: Belief
    ) -> ParticleSearchState:
        """The search that `plan` decides by, with the whole tree."""
        return planner.search(key, self, env, params, belief)

    def is_keyed(self, env: Environment, params: PyTree) -> bool:
        """Whether nodes are those of observation keys, else of slots that open with the visits."""
        return num_observations(env, params) is not None if self.keyed is None else self.keyed

    def children_of(self, env: Environment, params: PyTree) -> Children:
        """Where the nodes below an edge are looked up; slots, of which there may be many, in a hash table."""
        if self.is_keyed(env, params):
            return children_of(self.children, env, params)
        return HashedChildren() if self.children is None else self.children

    def init_search(self, env: Environment, params: PyTree, belief: Belief) -> ParticleSearchState:
        """A root, with room for `iterations` batches; `UsageError` without a likelihood."""
        env = with_likelihood(env)
        discount_of(params, self.discount)
        # A simulation adds at most one edge a level, and one node in all.
        most = 1 + sum(self.num_simulations * self.depth_of(k) for k in range(self.iterations))
        nodes = min(1 + self.num_simulations * self.iterations, self.max_nodes)
        edges = min(most, nodes if self.max_edges is None else self.max_edges)
        search = empty_search(env, params, belief, self.children_of(env, params), nodes, edges)

        def example(key: PRNGKey) -> tuple[PyTree, PyTree]:
            state = jax.tree.map(lambda x: x[0], belief.sample(key, 1))
            return state, step(key, env, state, jnp.zeros((), jnp.int32), params).obs

        state, obs = jax.eval_shape(example, jax.random.key(0))
        size = self.num_particles
        beliefs = NodeBeliefs(
            states=jax.tree.map(lambda x: jnp.zeros((nodes, size, *x.shape), x.dtype), state),
            log_weights=jnp.full((nodes, size), -jnp.inf, jnp.float32),
            obs=jax.tree.map(lambda x: jnp.zeros((nodes, *x.shape), x.dtype), obs),
            reward=jnp.zeros((nodes,), jnp.float32),
            terminal=jnp.zeros((nodes,), bool),
            num_added=jnp.zeros((nodes,), jnp.int32),
            invalid=jnp.zeros((), jnp.int32),
        )
        return ParticleSearchState(search.tree, search.legal, search.ended, search.drawn, beliefs)

    def grow(
        self,
        key: PRNGKey,
        env: Environment,
        params: PyTree,
        belief: Belief,
        search: ParticleSearchState,
        iterations: int,
    ) -> ParticleSearchState:
        """`iterations` batches more; pure. The key of a batch is folded with its number."""

        def batch(_: Array, search: ParticleSearchState) -> ParticleSearchState:
            own = jax.random.fold_in(key, search.tree.iteration)
            return self._batch(own, with_likelihood(env), params, belief, search)

        return jax.lax.fori_loop(0, iterations, batch, search)

    def _batch(
        self,
        key: PRNGKey,
        env: PartiallyObserved,
        params: PyTree,
        belief: Belief,
        search: ParticleSearchState,
    ) -> ParticleSearchState:
        """One batch from the root to the leaves and back."""
        sample_key, level_key, node_key, leaf_key = jax.random.split(key, 4)
        discount, keyed = discount_of(params, self.discount), self.is_keyed(env, params)
        children = self.children_of(env, params)
        started, path, simulations = start_simulations(
            sample_key, env, params, belief, search, self.num_simulations, self.max_depth
        )
        depth, before = self.depth_of(started.tree.iteration), started.tree.num_nodes

        def level(d: Array, carry: tuple) -> tuple:
            tree, beliefs, path, simulations, last = carry
            own_key = jax.random.fold_in(level_key, d)
            step_key, visit_key = jax.random.split(own_key)
            select_key = jax.random.fold_in(own_key, 2)  # a third child beside the two of `split`
            tree, descent = self._descend(
                select_key, step_key, env, params, children, tree, simulations, before
            )
            beliefs, states, reward, live = self.expand.visit(
                visit_key, env, params, beliefs, simulations, descent, before, keyed
            )
            moved = descent.edge != EMPTY
            stuck = moved & (descent.child == EMPTY) & ~self.expand.has_ended(descent, keyed)
            path = path.after(d, jnp.where(moved, descent.child, EMPTY), descent.edge, reward)
            simulations = Simulations(
                states=states,
                node=jnp.where(moved, descent.child, simulations.node),
                stuck=jnp.where(stuck, descent.edge, simulations.stuck),
                live=live,
                action=jnp.where(moved, descent.action, simulations.action),
            )
            last = jax.tree.map(lambda new, old: where_rows(descent.fresh, new, old), descent, last)
            return tree, beliefs, path, simulations, last

        first = (
            started.tree,
            search.beliefs,
            path,
            simulations,
            no_descent(env, params, simulations),
        )
        depth, (tree, beliefs, path, simulations, last) = while_live(
            depth, level, first, lambda carry: carry[3].live
        )
        beliefs, path, simulations, waiting = self.expand.fill(
            node_key, env, params, belief, beliefs, path, simulations, last, before, keyed
        )
        leaves = leaf_values(
            leaf_key,
            self.evaluate,
            env,
            params,
            simulations.states,
            simulations.action,
            waiting,
            discount,
        )
        # Rewards are added here and not on the way down, since those of new nodes are known only now.
        usable = is_usable(path.rewards)
        path = path._replace(rewards=jnp.where(usable, path.rewards, 0.0))
        tree = dataclasses.replace(
            tree,
            reward_sum=add_at(tree.reward_sum, path.edges.reshape(-1), path.rewards.reshape(-1)),
            invalid=tree.invalid
            + jnp.sum(~usable, dtype=jnp.int32)
            + beliefs.invalid
            - search.beliefs.invalid,
        )
        tree, path = record_leaves(tree, path, simulations, leaves, discount)
        tree = self.back_up(tree, children, path, depth, discount)
        return dataclasses.replace(started, tree=tree, beliefs=beliefs)

    def _descend(
        self,
        select_key: PRNGKey,
        step_key: PRNGKey,
        env: PartiallyObserved,
        params: PyTree,
        children: Children,
        tree: Tree,
        simulations: Simulations,
        before: Array,
    ) -> tuple[Tree, Descent]:
        """Every live simulation takes an action and finds its child, by key or by slot; consumes both keys."""
        step_key, slot_key = jax.random.split(step_key)
        legal = legal_actions(env, params, simulations.states)
        simulations, stranded = stop_stranded(simulations, legal)
        action = self.select(select_key, tree, simulations, legal)
        earlier = tree.edges.at[simulations.node, action].get(mode="fill", fill_value=EMPTY)
        visits = tree.edge_visits.at[earlier].get(mode="fill", fill_value=0)
        visits, edges = jax.lax.optimization_barrier(
            (visits, tree.edges)
        )  # reads before writes, as in `insert`
        tree = dataclasses.replace(tree, edges=edges)
        tree, edge = insert_edges(tree, simulations.node, action, simulations.live)
        keys, keyed = jax.random.split(step_key, action.shape[0]), self.is_keyed(env, params)
        result = jax.vmap(lambda key, state, action: step(key, env, state, action, params))(
            keys, simulations.states, action
        )
        if keyed:
            obs_key = capabilities(env).obs_key
            name = (
                result.obs
                if obs_key is None
                else jax.vmap(lambda obs: obs_key(obs, params))(result.obs)
            )
        else:
            draws = jax.random.uniform(slot_key, action.shape)
            name = slot_of_visit(
                draws, visits + ranks(edge), self.k_observations, self.alpha_observations
            )
        descent = Descent(simulations.node, edge, edge, action, result, simulations.live)
        on = (edge != EMPTY) & ~self.expand.has_ended(descent, keyed)
        tree, child, _ = insert_nodes(tree, children, edge, name.astype(jnp.int32), on)
        lost = (simulations.live & (edge == EMPTY)) | (on & (child == EMPTY))
        tree = add_counts(tree, steps=edge != EMPTY, overflow=lost, stranded=stranded)
        return tree, descent._replace(child=child, fresh=(child != EMPTY) & (child >= before))
