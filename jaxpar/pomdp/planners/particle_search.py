"""The tree search of `Pft` and `Pomcpow`: as `TreeSearch`, with a weighted particle set at every node.

Select, evaluate, back_up and decide are those of `jaxpar.pomdp.planners.tree_search`. What differs is
`expand`, an object of three methods (`ExpandParticles`): which simulations end on their edge, what a
node that is visited does to a simulation, and what the batch's new nodes are filled with at its end.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxpar.env import Environment, capabilities, step
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import (
    Model,
    is_usable,
    legal_actions,
    num_observations,
    where_rows,
    with_likelihood,
)
from jaxpar.pomdp.planners import clock, planner
from jaxpar.pomdp.planners._loops import while_live
from jaxpar.pomdp.planners.adding import add_at
from jaxpar.pomdp.planners.leaves import Evaluate, leaf_values
from jaxpar.pomdp.planners.pomcp import ranks
from jaxpar.pomdp.planners.simulations import (
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
    ParticleBatch,
    ParticleSearchState,
    ParticleState,
    no_descent,
    slot_of_visit,
)
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

__all__ = ["ExpandParticles", "ParticleTreeSearch"]


class ExpandParticles(Protocol):
    """Contents of nodes, and their effect on the simulations that reach them."""

    def has_ended(self, descent: Descent, is_keyed: bool) -> Array:
        """Simulations that end on their edge and reach no node, bool `[n]`.

        Args:
            descent: the level's steps.
            is_keyed: whether nodes are those of observation keys, else of slots.
        """
        ...

    def visit(
        self, key: PRNGKey, batch: ParticleBatch, state: ParticleState, descent: Descent
    ) -> tuple[NodeBeliefs, PyTree, Array, Array]:
        """The beliefs, the states to go on with `[n, ...]`, what the step earned `[n]`, and who goes on, bool `[n]`.

        Args:
            key: consumed.
            batch: what stays the same throughout the batch.
            state: beliefs, and the simulations as they were above.
            descent: the level's steps.
        """
        ...

    def fill(
        self, key: PRNGKey, batch: ParticleBatch, state: ParticleState
    ) -> tuple[ParticleState, Array]:
        """The state with new nodes filled and simulations at their leaves, and whose leaves are valued, bool `[n]`.

        Args:
            key: consumed.
            batch: what stays the same throughout the batch.
            state: where the simulations went.
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

    # Functions that all planners share, as methods (see `planners.planner`).
    plan = planner.plan
    plan_until = clock.plan_until
    search = planner.search
    grow = planner.grow_by_batches
    inspect_root = clock.inspect_root

    def is_keyed(self, env: Environment, params: PyTree) -> bool:
        """True where nodes are those of observation keys, else of slots that open with the visits."""
        return num_observations(env, params) is not None if self.keyed is None else self.keyed

    def children_of(self, env: Environment, params: PyTree) -> Children:
        """Where the nodes below an edge are looked up; slots, of which there may be many, in a hash table."""
        if self.is_keyed(env, params):
            return children_of(self.children, env, params)
        return HashedChildren() if self.children is None else self.children

    def init_search(self, key: PRNGKey, model: Model, belief: Belief) -> ParticleSearchState:
        """A root, with room for `iterations` batches. `UsageError` without a likelihood."""
        env = with_likelihood(model.env)
        # A simulation adds at most one edge a level, and one node in all.
        most = 1 + sum(self.num_simulations * self.depth_of(k) for k in range(self.iterations))
        nodes = min(1 + self.num_simulations * self.iterations, self.max_nodes)
        edges = min(most, nodes if self.max_edges is None else self.max_edges)
        children = self.children_of(env, model.params)
        search = empty_search(key, model, belief, children, nodes, edges)

        def example(key: PRNGKey) -> tuple[PyTree, PyTree]:
            state = jax.tree.map(lambda x: x[0], belief.sample(key, 1))
            return state, step(key, env, state, jnp.zeros((), jnp.int32), model.params).obs

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
        return ParticleSearchState(
            tree=search.tree,
            legal=search.legal,
            ended=search.ended,
            drawn=search.drawn,
            beliefs=beliefs,
        )

    def batch(
        self, key: PRNGKey, model: Model, belief: Belief, search: ParticleSearchState
    ) -> ParticleSearchState:
        """One batch from the root to the leaves and back; consumes `key`."""
        sample_key, level_key, node_key, leaf_key = jax.random.split(key, 4)
        started, path, simulations = start_simulations(
            sample_key, model, belief, search, self.num_simulations, self.max_depth
        )
        batch = ParticleBatch(
            model=model,
            belief=belief,
            children=self.children_of(model.env, model.params),
            before=started.tree.num_nodes,
            is_keyed=self.is_keyed(model.env, model.params),
        )

        def level(d: Array, state: ParticleState) -> ParticleState:
            own_key = jax.random.fold_in(level_key, d)
            step_key, visit_key = jax.random.split(own_key)
            select_key = jax.random.fold_in(own_key, 2)  # a third child beside the two of `split`
            tree, descent = self._descend(
                select_key, step_key, batch, state.tree, state.simulations
            )
            beliefs, states, reward, live = self.expand.visit(visit_key, batch, state, descent)

            moved = descent.edge != EMPTY
            ended = self.expand.has_ended(descent, batch.is_keyed)
            stuck = moved & (descent.child == EMPTY) & ~ended
            child = jnp.where(moved, descent.child, EMPTY)
            simulations = state.simulations
            return ParticleState(
                tree=tree,
                beliefs=beliefs,
                path=state.path.after(d, child, descent.edge, reward),
                simulations=Simulations(
                    states=states,
                    node=jnp.where(moved, descent.child, simulations.node),
                    stuck=jnp.where(stuck, descent.edge, simulations.stuck),
                    live=live,
                    action=jnp.where(moved, descent.action, simulations.action),
                ),
                last=jax.tree.map(
                    lambda new, old: where_rows(descent.fresh, new, old), descent, state.last
                ),
            )

        first = ParticleState(
            tree=started.tree,
            beliefs=search.beliefs,
            path=path,
            simulations=simulations,
            last=no_descent(model, simulations),
        )
        depth, state = while_live(
            self.depth_of(started.tree.iteration),
            level,
            first,
            lambda state: state.simulations.live,
        )

        state, waiting = self.expand.fill(node_key, batch, state)
        tree, beliefs, path, simulations, _ = state
        leaves = leaf_values(
            leaf_key, self.evaluate, model, simulations.states, simulations.action, waiting
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
        tree, path = record_leaves(tree, path, simulations, leaves, model.discount)
        tree = self.back_up(tree, batch.children, path, depth, model.discount)
        return dataclasses.replace(started, tree=tree, beliefs=beliefs)

    def _descend(
        self,
        select_key: PRNGKey,
        step_key: PRNGKey,
        batch: ParticleBatch,
        tree: Tree,
        simulations: Simulations,
    ) -> tuple[Tree, Descent]:
        """Every live simulation takes an action and finds its child, by key or by slot; consumes both keys."""
        env = batch.model.env
        params = batch.model.params
        step_key, slot_key = jax.random.split(step_key)
        legal = legal_actions(batch.model, simulations.states)
        simulations, stranded = stop_stranded(simulations, legal)
        action = self.select(select_key, tree, simulations, legal)

        earlier = tree.edges.at[simulations.node, action].get(mode="fill", fill_value=EMPTY)
        visits = tree.edge_visits.at[earlier].get(mode="fill", fill_value=0)
        # Reads before writes, as in `insert`.
        visits, edges = jax.lax.optimization_barrier((visits, tree.edges))
        tree = dataclasses.replace(tree, edges=edges)
        tree, edge = insert_edges(tree, simulations.node, action, simulations.live)

        keys = jax.random.split(step_key, action.shape[0])
        result = jax.vmap(lambda key, state, action: step(key, env, state, action, params))(
            keys, simulations.states, action
        )
        obs_key = capabilities(env).obs_key
        if not batch.is_keyed:
            draws = jax.random.uniform(slot_key, action.shape)
            visits = visits + ranks(edge)
            name = slot_of_visit(draws, visits, self.k_observations, self.alpha_observations)
        elif obs_key is None:
            name = result.obs
        else:
            name = jax.vmap(lambda obs: obs_key(obs, params))(result.obs)

        descent = Descent(
            node=simulations.node,
            edge=edge,
            child=edge,  # until it is known
            action=action,
            result=result,
            fresh=simulations.live,
        )
        on = (edge != EMPTY) & ~self.expand.has_ended(descent, batch.is_keyed)
        tree, child, _ = insert_nodes(tree, batch.children, edge, name.astype(jnp.int32), on)
        lost = (simulations.live & (edge == EMPTY)) | (on & (child == EMPTY))
        tree = add_counts(tree, steps=edge != EMPTY, overflow=lost, stranded=stranded)
        fresh = (child != EMPTY) & (child >= batch.before)
        return tree, descent._replace(child=child, fresh=fresh)
