r"""The particle filter tree with double progressive widening (PFT-DPW), for observations that never come twice.

A search of the belief process: a node is a small weighted particle set, made once, by one filter step; a visit to it
costs one step of one of its states. How many observations an edge has is limited by its visits (`widening.py`); where
observations have keys, nodes are those of the keys and nothing is widened. Actions are taken by UCB1 with virtual
visits, as by `Pomcp`; `num_simulations=1` is the published algorithm.

Source: Sunberg and Kochenderfer (2018), "Online algorithms for POMDPs with continuous state, action, and observation
spaces", algorithm 3. Ours: the reward of a new node is the mean over its particles' steps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.pomdp.model import where_rows
from jaxpar.pomdp.planners import clock, planner
from jaxpar.pomdp.planners.leaves import LEAVES, evaluation
from jaxpar.pomdp.planners.particle_search import ExpandParticles, ParticleTreeSearch
from jaxpar.pomdp.planners.pomcp import (
    BACKUPS,
    best_mean,
    one_deeper,
    ranks,
    upper_confidence,
)
from jaxpar.pomdp.planners.simulations import Simulations, is_waiting
from jaxpar.pomdp.planners.tree import (
    EMPTY,
    ROWS,
    DenseChildren,
    HashedChildren,
    Tree,
    check_children,
    random_order,
)
from jaxpar.pomdp.planners.tree_search import Depth
from jaxpar.pomdp.planners.widening import (
    Descent,
    NodeBeliefs,
    ParticleBatch,
    ParticleState,
    drawn_index,
    filter_step,
    is_first_at_node,
    open_slots,
)
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Pft"]


@dataclasses.dataclass(frozen=True)
class FilterNodes:
    """Nodes that are filled once, by one filter step; a visit draws one of their states."""

    def has_ended(self, descent: Descent, is_keyed: bool) -> Array:
        """Simulations whose step ended the episode. Without keys an ended episode is a child like any other."""
        return descent.result.terminated if is_keyed else jnp.zeros_like(descent.result.terminated)

    def visit(
        self, key: PRNGKey, batch: ParticleBatch, state: ParticleState, descent: Descent
    ) -> tuple[NodeBeliefs, PyTree, Array, Array]:
        """As `ExpandParticles.visit`: a known node gives one of its states and its reward, a new one stops."""
        beliefs = state.beliefs
        moved = descent.edge != EMPTY
        known = (descent.child != EMPTY) & ~descent.fresh
        over = beliefs.terminal.at[descent.child].get(mode="clip") & known
        chosen = drawn_index(key, beliefs.log_weights.at[descent.child].get(mode="clip"))
        states = jax.tree.map(
            lambda x: x.at[descent.child, chosen].get(mode="clip"), beliefs.states
        )
        reward = descent.result.reward
        if not batch.is_keyed:
            # That of the node, if it has one; of a new one it comes with the filter step.
            reward = jnp.where(known, beliefs.reward.at[descent.child].get(mode="clip"), reward)
            reward = jnp.where(descent.fresh, 0.0, reward)
        reward = jnp.where(moved, reward, 0.0)
        kept = jax.tree.map(
            lambda new, old: where_rows(moved, new, old),
            descent.result.state,
            state.simulations.states,
        )
        states = jax.tree.map(lambda new, old: where_rows(known, new, old), states, kept)
        return beliefs, states, reward, known & ~over

    def fill(
        self, key: PRNGKey, batch: ParticleBatch, state: ParticleState
    ) -> tuple[ParticleState, Array]:
        """As `ExpandParticles.fill`: one filter step for every new node, by the first simulation that reached it."""
        root_key, filter_key, leaf_key = jax.random.split(key, 3)
        _, beliefs, path, simulations, last = state
        count = last.fresh.shape[0]
        size = beliefs.log_weights.shape[1]
        drawn = batch.belief.sample(root_key, count * size)
        at_root = last.node == 0

        def prior(fresh: Array, held: Array) -> Array:
            # Systematic samples are in the order of the particles: row i takes every n-th, and so a share of all.
            fresh = jnp.swapaxes(fresh.reshape(size, count, *fresh.shape[1:]), 0, 1)
            return where_rows(at_root, fresh, held.at[last.node].get(mode="clip"))

        states = jax.tree.map(prior, drawn, beliefs.states)
        weights = jnp.where(
            at_root[:, None], 0.0, beliefs.log_weights.at[last.node].get(mode="clip")
        )
        keys = jax.random.split(filter_key, count)
        states, weights, reward, wrong = jax.vmap(
            lambda key, *row: filter_step(key, batch.model, *row)
        )(keys, states, weights, last.action, last.result)

        first = is_first_at_node(last, batch.before)
        mine = jnp.where(first, last.child, EMPTY)
        beliefs = dataclasses.replace(
            beliefs,
            states=jax.tree.map(
                lambda old, new: old.at[mine].set(new, mode="drop"), beliefs.states, states
            ),
            log_weights=beliefs.log_weights.at[mine].set(weights, mode="drop"),
            obs=jax.tree.map(
                lambda old, new: old.at[mine].set(new, mode="drop"), beliefs.obs, last.result.obs
            ),
            reward=beliefs.reward.at[mine].set(reward, mode="drop"),
            terminal=beliefs.terminal.at[mine].set(last.result.terminated, mode="drop"),
            invalid=beliefs.invalid + jnp.sum(jnp.where(first, wrong, 0), dtype=jnp.int32),
        )
        if not batch.is_keyed:
            own = beliefs.reward.at[last.child].get(mode="clip")
            here = (path.edges == last.edge[None]) & last.fresh[None]
            path = path._replace(rewards=path.rewards + jnp.where(here, own[None], 0.0))
        chosen = drawn_index(leaf_key, beliefs.log_weights.at[simulations.node].get(mode="clip"))
        # The root holds no particles of its own.
        inside = (simulations.node != EMPTY) & (simulations.node != 0)
        believed = jax.tree.map(
            lambda x: x.at[simulations.node, chosen].get(mode="clip"), beliefs.states
        )
        states = jax.tree.map(
            lambda new, old: where_rows(inside, new, old), believed, simulations.states
        )
        over = beliefs.terminal.at[simulations.node].get(mode="clip") & inside
        state = state._replace(
            beliefs=beliefs, path=path, simulations=simulations._replace(states=states)
        )
        return state, is_waiting(simulations) & ~over


@dataclasses.dataclass(frozen=True)
class Pft:
    """The particle filter tree with double progressive widening; each simulation adds at most one node.

    A batch costs n steps a level, and one filter step of n m particles in all. At the root, filter steps start from
    fresh draws of the belief itself.

    Attributes:
        num_simulations: n, in parallel, with virtual visits among them.
        iterations: batches of n; the k-th can be k + 1 deep.
        max_depth: steps within the tree.
        num_particles: m, of a node.
        exploration: the constant of UCB1, in units of return.
        k_observations: of the widening to #C(ba) <= k N(ba)^alpha; positive.
        alpha_observations: in [0, 1]; k = alpha = 1 draws a new observation at every visit.
        k_actions: of the widening to #C(b) <= k N(b)^alpha, of actions drawn without
            replacement; None opens all legal actions at once.
        alpha_actions: in [0, 1].
        keyed: whether nodes are those of observation keys, without widening; None: if observations are Discrete.
        discount: in (0, 1]; None takes `params.discount`.
        leaf: value of a new node: "rollout" (uniform over legal actions), "heuristic" or "zero".
        rollout_depth: steps of a rollout.
        backup: what a node is worth to the edge above, as in `Pomcp`: "mean" or "best".
        max_nodes: capacity in nodes, of m particles each.
        max_edges: capacity in action nodes; None is `max_nodes`.
        children: `DenseChildren(O)` or `HashedChildren()`; None picks by the number of observations.
    """

    num_simulations: int = field(32, AtLeast(1))
    iterations: int = field(64, AtLeast(1))
    max_depth: int = field(20, AtLeast(1))
    num_particles: int = field(16, AtLeast(1))
    exploration: Any = field(20.0, AtLeast(0))
    k_observations: Any = field(4.0, Positive())
    alpha_observations: Any = field(0.5, Between(0, 1))
    k_actions: Any = field(None, Positive())
    alpha_actions: Any = field(0.5, Between(0, 1))
    keyed: bool | None = None
    discount: Any = field(None, Between(0, 1, "(]"))
    leaf: str = field("rollout", OneOf(LEAVES))
    rollout_depth: int = field(20, AtLeast(1))
    backup: str = field("mean", OneOf(tuple(BACKUPS)))
    max_nodes: int = field(1 << 16, ROWS)
    max_edges: int | None = field(None, ROWS)
    children: DenseChildren | HashedChildren | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_children(self.children)
        if self.keyed is not None and not isinstance(self.keyed, bool):
            raise UsageError(f"keyed={self.keyed!r}: unknown; expected True, False or None.")

    # Functions that all planners share, as methods (see `planners.planner`).
    plan = planner.plan
    plan_until = clock.plan_until
    search = planner.search
    decide = staticmethod(best_mean)

    def tree_search(self) -> ParticleTreeSearch:
        """The search with its parts and sizes."""
        return ParticleTreeSearch(
            select=self.select,
            expand=self.expansion(),
            evaluate=evaluation(self.leaf, self.rollout_depth),
            back_up=BACKUPS[self.backup],
            decide=best_mean,
            depth_of=self.depth_of,
            num_simulations=self.num_simulations,
            iterations=self.iterations,
            max_depth=self.max_depth,
            num_particles=self.num_particles,
            k_observations=self.k_observations,
            alpha_observations=self.alpha_observations,
            keyed=self.keyed,
            discount=self.discount,
            max_nodes=self.max_nodes,
            max_edges=self.max_edges,
            children=self.children,
            ranked_by="values",
        )

    def expansion(self) -> ExpandParticles:
        """Contents of nodes: one filter step."""
        return FilterNodes()

    def depth_of(self, k: Depth) -> Depth:
        """At most one level more than the batches so far."""
        return one_deeper(k, self.max_depth)

    def select(self, key: PRNGKey, tree: Tree, simulations: Simulations, legal: Array) -> Array:
        """UCB1 with virtual visits among the actions that widening has opened; int32 `[n]`. The key is not used."""
        rank = jnp.where(
            simulations.live, ranks(jnp.where(simulations.live, simulations.node, EMPTY)), 0
        )
        legal = self._opened(tree, simulations.node, rank, legal)
        return upper_confidence(tree, simulations.node, rank, legal, self.exploration)

    def _opened(self, tree: Tree, node: Array, rank: Array, legal: Array) -> Array:
        """Returns the legal actions that widening has opened, drawn without replacement.

        Each node has a random order of its actions, in which they open.
        """
        if self.k_actions is None:
            return legal
        row = tree.edges.at[node].get(mode="clip")
        visits = (
            jnp.sum(jnp.where(row != EMPTY, tree.edge_visits.at[row].get(mode="clip"), 0), axis=1)
            + rank
        )
        opened = open_slots(visits + 1, self.k_actions, self.alpha_actions)
        words = random_order(tree.salt, node, legal.shape[1])
        # Illegal actions have the largest word, and are opened last.
        words = jnp.where(legal, words, jnp.uint32(2**32 - 1))
        last = jnp.clip(opened - 1, 0, legal.shape[1] - 1)
        bound = jnp.take_along_axis(jnp.sort(words, axis=1), last[:, None], axis=1)
        return legal & (words <= bound)
