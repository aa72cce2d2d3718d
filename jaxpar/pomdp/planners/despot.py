r"""Determinised sparse trees with regularisation (AR-DESPOT): K scenarios, bounds at every node, optimism.

A scenario is a root state and one key, folded with the depth: whatever is done at depth t of scenario i, the same
random numbers decide what follows, so that policies are compared by common random numbers, exactly. A node b holds the
scenarios F_b that reach it; with D_b its depth, every value below carries the weight #F_b/K * discount^D_b:

    l0(b): the default policy, rolled out in every scenario of b until the horizon;    U(b): an upper bound
    mu(b)  = max(l0(b), max_a [rho(b, a) + sum_o mu(bao)]),  at a leaf max(l0(b), U(b) - lambda)
    ell(b) = max(l0(b), max_a [rho(b, a) + sum_o ell(bao)]), at a leaf l0(b)
    rho(b, a) = sum over F_b of discount^D_b r / K - lambda

The published search walks one path a trial: the action of the highest mu, then the observation of the largest excess
uncertainty E(b) = mu(b) - ell(b) - #F_b/K * xi * (mu - ell)(root), until E(b) <= 0, and expands its end. Here all
scenarios go at once, each to the child that is its own, so that one *wave* expands every leaf with E(b) > 0 of the
optimistic policy: K scenarios whatever the tree's shape, K A steps a wave. `wide=False` walks the one path.

Published, too, is a rule that cuts a node where an ancestor's U - l0 is at most lambda for every node between. It is
not needed: each of these nodes has paid its lambda in the ancestor's mu, which then is l0, and no path passes there.

A node's children are a block of A particles a scenario, so that finding a scenario's way takes no search and no sort:
particle (block, a) knows its node and its own block.

Sources: Somani, Ye, Hsu and Lee (2013), "DESPOT: online POMDP planning with regularization"; Ye et al. (2017).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, OneOf, check_fields, field
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import Model, legal_actions, num_actions, root_actions
from jaxpar.pomdp.planners import clock, planner
from jaxpar.pomdp.planners.adding import add_at
from jaxpar.pomdp.planners.scenario_tree import (
    COUNT,
    DEFAULT,
    LOWER,
    UPPER_BOUND,
    DespotInfo,
    ScenarioTree,
    WavePath,
)
from jaxpar.pomdp.planners.scenarios import (
    HORIZON,
    UPPER,
    DefaultPolicy,
    check_default,
    default_actions,
    scenario_bounds,
    scenario_keys,
    scenario_steps,
)
from jaxpar.pomdp.planners.simulations import invalid_weights, samples_without_weight
from jaxpar.pomdp.planners.tree import EMPTY, ROWS, DenseChildren, HashedChildren, check_children
from jaxpar.pomdp.planners.tree_search import children_of
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Despot"]


@dataclasses.dataclass(frozen=True)
class Despot:
    """Anytime regularised DESPOT, all scenarios at once.

    A wave costs K A simulated steps, as many rollouts of the default policy to the horizon, and O(K A) a level of the
    tree; memory is A states and 3 A values a particle.

    Attributes:
        num_scenarios: K.
        iterations: waves (trials).
        max_depth: D, the horizon of tree and rollouts together.
        default: the policy below the tree: an action that is always taken, `(key, state, params) -> action`, which must
            not look at what the agent cannot see, or None: the environment's `rollout_action`, which is such a policy,
            or, without one, uniformly random legal actions.
        upper: bound of what a state is worth: "bound" (`env.upper_bound(state, params)`), "reward" (`max_reward` at
            every step that is left), "heuristic" (`env.heuristic`, if it is a bound); None takes the first there is.
        max_reward: the largest reward of one step, for "reward".
        leaf: what a state at the horizon is worth: "zero" or "heuristic".
        regularization: lambda >= 0, the price of a node of the policy, in units of return.
        gap_ratio: xi in (0, 1], the share of the root's gap that is left alone.
        wide: every branch of the optimistic policy a wave, or the one of largest excess uncertainty.
        discount: in (0, 1]; None takes `params.discount`.
        max_nodes: capacity in nodes.
        max_particles: capacity in scenarios at expanded nodes, at least K; each has A children.
        children: `DenseChildren(O)` or `HashedChildren()`, used for one wave at a time; None picks by the number of
            observations.
    """

    num_scenarios: int = field(100, AtLeast(1))
    iterations: int = field(30, AtLeast(1))
    max_depth: int = field(30, AtLeast(1))
    default: DefaultPolicy | None = None
    upper: str | None = field(None, OneOf(UPPER))
    max_reward: Any = field(None, Finite())
    leaf: str = field("zero", OneOf(HORIZON))
    regularization: Any = field(0.0, AtLeast(0))
    gap_ratio: Any = field(0.95, Between(0, 1, "(]"))
    wide: bool = True
    discount: Any = field(None, Between(0, 1, "(]"))
    max_nodes: int = field(1 << 18, ROWS)
    max_particles: int = field(1 << 16, ROWS)
    children: DenseChildren | HashedChildren | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_children(self.children)
        check_default(self.default)
        if self.max_particles < self.num_scenarios:
            raise UsageError(
                f"max_particles must be at least num_scenarios = {self.num_scenarios}, for the root"
            )

    # Functions that all planners share, as methods (see `planners.planner`).
    plan = planner.plan
    plan_until = clock.plan_until
    search = planner.search
    grow = planner.grow_by_batches

    def tree_search(self) -> "Despot":
        """Itself, whose methods are the parts of its plan."""
        return self

    def decide(self, tree: ScenarioTree) -> tuple[Array, DespotInfo]:
        """The action of the highest lower bound, or the default policy's where none is above what that earns."""
        row = tree.block[0]
        tried = (row != EMPTY) & tree.legal
        values = jnp.where(tried[:, None], tree.edge.at[row].get(mode="clip"), -jnp.inf)
        lower = values[:, LOWER]
        upper = values[:, UPPER_BOUND]
        defaulted = ~(jnp.max(lower) > tree.born[0, DEFAULT])
        action = jnp.where(defaulted, tree.default_action, jnp.argmax(lower)).astype(jnp.int32)
        return action, DespotInfo(
            value=tree.node[0, LOWER],
            values=lower,
            preferences=upper,
            policy=jax.nn.one_hot(action, lower.shape[0]),
            entropy=jnp.zeros(()),
            visits=tree.visits,
            nodes=tree.num_nodes,
            edges=jnp.sum(tree.block != EMPTY, dtype=jnp.int32) * lower.shape[0],
            depth=tree.depth,
            iterations=tree.iteration,
            steps=tree.steps,
            overflow=tree.overflow,
            invalid=tree.invalid,
            stranded=tree.stranded,
            ended=tree.ended,
            legal=tree.legal,
            upper=tree.node[0, UPPER_BOUND],
            defaulted=defaulted,
            inconsistent=tree.inconsistent,
        )

    def init_search(self, key: PRNGKey, model: Model, belief: Belief) -> ScenarioTree:
        """Returns K scenarios and their root; consumes `key`.

        Raises:
            UsageError: the default policy is an action that there is not.
        """
        count = self.num_scenarios
        actions = num_actions(model.env, model.params)
        check_default(self.default, actions)
        draw_key, scenario_key = jax.random.split(key)
        states = belief.sample(draw_key, count)
        keys = jax.random.split(scenario_key, count)
        legal, ended = root_actions(model, states)

        column = jax.tree.map(lambda x: x[:, None], states)
        depth = jnp.zeros((count,), jnp.int32)
        default, upper, invalid, inconsistent = self.evaluate(
            keys, model, column, depth, ~ended[:, None]
        )
        chosen = default_actions(scenario_keys(keys, depth)[:, 1], self.default, model, column)
        chosen = chosen[jnp.argmin(ended), 0]
        default = default.sum()
        utility = jnp.maximum(upper.sum(), default) / count
        default = default / count
        node = jnp.stack([default, jnp.maximum(default, utility - self.regularization)])

        max_nodes = min(self.max_nodes, 1 + self.iterations * count * actions)
        roots = -(-count // actions)  # blocks that hold the K roots, A particles each
        max_blocks = roots + min(self.max_particles, self.iterations * count)
        if max(max_nodes, max_blocks * actions) >= EMPTY:
            raise UsageError(
                f"{max_blocks} blocks of {actions} particles cannot be indexed by int32; lower max_particles"
            )

        def rows(of_root: Array, fill: float = 0) -> Array:
            return jnp.full((max_nodes, *of_root.shape), fill, of_root.dtype).at[0].set(of_root)

        def particles(first: Array) -> Array:
            filled = (
                jnp.zeros((max_blocks * actions, *first.shape[1:]), first.dtype)
                .at[:count]
                .set(first)
            )
            return filled.reshape(max_blocks, actions, *first.shape[1:])

        zero = jnp.zeros((), jnp.int32)
        none = jnp.full((max_blocks, actions), EMPTY, jnp.int32)
        return ScenarioTree(
            keys=keys,
            default_action=jnp.where(legal[chosen], chosen, jnp.argmax(legal)).astype(jnp.int32),
            legal=legal,
            ended=jnp.mean(ended, dtype=jnp.float32),
            first=rows(jnp.argmin(ended).astype(jnp.int32), EMPTY),
            action=jnp.zeros((max_nodes,), jnp.int32),
            block=jnp.full((max_nodes,), EMPTY, jnp.int32),
            born=rows(jnp.stack([jnp.sum(~ended, dtype=jnp.float32), default, utility])),
            node=rows(node),
            edge=jnp.zeros((max_blocks, actions, 2), jnp.float32),
            particle_node=none.reshape(-1)
            .at[:count]
            .set(jnp.where(ended, EMPTY, 0))
            .reshape(none.shape),
            particle_block=none,
            states=jax.tree.map(particles, states),
            visits=jnp.zeros((actions,), jnp.int32),
            num_nodes=zero + 1,
            num_blocks=zero + roots,
            iteration=zero,
            steps=zero,
            overflow=zero,
            invalid=invalid + invalid_weights(belief),
            stranded=samples_without_weight(belief, count),
            inconsistent=inconsistent,
            depth=zero,
            stalled=jnp.zeros((), bool),
        )

    def inspect_root(
        self, key: PRNGKey, model: Model, belief: Belief, search: ScenarioTree
    ) -> tuple[ScenarioTree, Array]:
        """As `Search.inspect_root`, by the scenarios that are there; does not use the key."""
        return search, jnp.stack([search.ended >= 1, search.stranded > 0])

    def batch(
        self, key: PRNGKey, model: Model, belief: Belief, search: ScenarioTree
    ) -> ScenarioTree:
        """One wave more; does not use the key, since all chance is in the scenarios."""
        path = self.select(search)
        return self.back_up(self.expand(model, search, path), path)

    def select(self, tree: ScenarioTree) -> WavePath:
        """Down the optimistic policy, every scenario to its own child, until nothing is left to gain."""
        count = tree.keys.shape[0]
        scenarios = jnp.arange(tree.keys.shape[0], dtype=jnp.int32)
        root_gap = tree.node[0, UPPER_BOUND] - tree.node[0, LOWER]

        def level(d: Array, carry: tuple) -> tuple:
            path, live, particle = carry
            node = tree.particle_node.reshape(-1)[particle]
            live = live & (node != EMPTY)
            values, born = (x.at[node].get(mode="clip") for x in (tree.node, tree.born))
            gap = values[:, UPPER_BOUND] - values[:, LOWER]
            share = born[:, COUNT] / count
            excess = jnp.where(
                live & (root_gap > 0), gap - share * self.gap_ratio * root_gap, -jnp.inf
            )
            if (
                not self.wide
            ):  # only the scenarios at the child with the largest excess uncertainty go on
                live = live & (node == node[jnp.argmax(excess)])
            going = live & (excess > 0) & (d < self.max_depth)
            block = tree.particle_block.reshape(-1)[particle]
            leaf = block == EMPTY
            on = going & ~leaf
            path = WavePath(
                nodes=path.nodes.at[d].set(jnp.where(live, node, EMPTY)),
                particle=jnp.where(live, particle, path.particle),
                depth=jnp.where(live, d, path.depth),
                grow=path.grow | (going & leaf),
            )
            action = tree.action.at[node].get(mode="clip")
            # The child of a particle by an action is the action's particle of its block: no look-up.
            return path, on, jnp.where(on, block * tree.legal.shape[0] + action, particle)

        never = jnp.zeros((count,), bool)
        nodes = jnp.full((self.max_depth + 1, count), EMPTY, jnp.int32)
        path = WavePath(nodes, scenarios, jnp.zeros_like(scenarios), never)
        first = (path, ~never, scenarios)
        # The tree is as deep as there were waves.
        return jax.lax.fori_loop(0, jnp.minimum(tree.iteration, self.max_depth) + 1, level, first)[
            0
        ]

    def expand(self, model: Model, tree: ScenarioTree, path: WavePath) -> ScenarioTree:
        """All actions of all scenarios at the leaves that the wave reached."""
        discount = model.discount
        actions = tree.legal.shape[0]
        count = tree.keys.shape[0]
        max_blocks = tree.particle_node.shape[0]
        wanted = jnp.sum(path.grow, dtype=jnp.int32)
        # All or none: a leaf that only some of its scenarios expand would be a node of fewer scenarios.
        fits = tree.num_blocks + wanted <= max_blocks
        grow = path.grow & fits
        own = jnp.where(grow, tree.num_blocks + jnp.cumsum(grow, dtype=jnp.int32) - 1, EMPTY)
        leaf = jnp.where(grow, tree.particle_node.reshape(-1)[path.particle], EMPTY)
        # Every scenario gets a block of particles; the first of a leaf's blocks is also the row of the leaf's values.
        block = tree.block.at[leaf].min(own, mode="drop")
        edges = block.at[leaf].get(mode="fill", fill_value=EMPTY)

        states = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[path.particle], tree.states)
        legal = legal_actions(model, states)
        rows = jax.tree.map(
            lambda x: jnp.broadcast_to(x[:, None], (count, actions, *x.shape[1:])), states
        )
        choice = jnp.broadcast_to(jnp.arange(actions, dtype=jnp.int32), (count, actions))
        result = scenario_steps(scenario_keys(tree.keys, path.depth)[:, 0], model, rows, choice)
        taken = grow[:, None] & legal
        on = taken & ~result.terminated
        default, upper, wrong, inconsistent = self.evaluate(
            tree.keys, model, result.state, path.depth + 1, on
        )
        children = children_of(self.children, model.env, model.params)
        # Children are distinguished within this wave only, so their table is as large as the wave and not as the tree.
        places = jnp.where(on, (edges - tree.num_blocks)[:, None] * actions + choice, 0)
        table = children.empty(count * actions, count * actions)
        _, ids, num_nodes = children.find(
            table,
            places.ravel(),
            result.obs_key.ravel(),
            on.ravel(),
            tree.num_nodes,
            tree.born.shape[0],
        )
        ids = ids.reshape(count, actions)
        lost = on & (ids == EMPTY)
        weight = (jnp.asarray(discount, jnp.float32) ** path.depth / count)[:, None]
        default = weight * discount * default
        upper = weight * discount * upper
        tree, below = self._add_nodes(tree, ids, default, upper)
        # Who finds no room counts as the default policy.
        below = below + jnp.where(lost, default, 0.0)[..., None]
        # Values are sums over a node's scenarios; the price of a node is paid once, by the one that owns its row.
        price = jnp.where(own == edges, self.regularization, 0.0)[:, None, None]
        gain = jnp.where(
            legal[..., None], (weight * result.reward)[..., None] + below - price, -jnp.inf
        )
        return dataclasses.replace(
            tree,
            block=block,
            edge=add_at(tree.edge, edges, gain),
            particle_node=tree.particle_node.at[own].set(ids, mode="drop"),
            particle_block=tree.particle_block.reshape(-1)
            .at[jnp.where(grow, path.particle, EMPTY)]
            .set(own, mode="drop")
            .reshape(max_blocks, actions),
            states=jax.tree.map(
                lambda old, new: old.at[own].set(new, mode="drop"), tree.states, result.state
            ),
            visits=tree.visits
            + jnp.sum(taken & (path.depth == 0)[:, None], axis=0, dtype=jnp.int32),
            num_nodes=num_nodes,
            num_blocks=tree.num_blocks + jnp.sum(grow, dtype=jnp.int32),
            steps=tree.steps + jnp.sum(taken, dtype=jnp.int32),
            overflow=tree.overflow + jnp.where(fits, 0, wanted) + jnp.sum(lost, dtype=jnp.int32),
            invalid=tree.invalid + wrong + jnp.sum(taken & result.invalid, dtype=jnp.int32),
            stranded=tree.stranded + jnp.sum(grow & ~jnp.any(legal, axis=1), dtype=jnp.int32),
            inconsistent=tree.inconsistent + inconsistent,
            depth=jnp.maximum(tree.depth, jnp.max(jnp.where(grow, path.depth + 1, 0))),
            stalled=~jnp.any(taken),
        )

    def evaluate(
        self, keys: PRNGKey, model: Model, states: PyTree, depth: Array, live: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return of the default policy from states `[K, A]`, and an upper bound, by `scenario_bounds`."""
        return scenario_bounds(keys, self, model, states, depth, live)

    def _add_nodes(
        self, tree: ScenarioTree, ids: Array, default: Array, upper: Array
    ) -> tuple[ScenarioTree, Array]:
        """New nodes `ids` `[K, A]`, each the sum of its scenarios, and the values shared among these, `[K, A, 2]`."""
        scenarios = jnp.broadcast_to(jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], ids.shape)
        more = jnp.stack([jnp.ones_like(default), default, upper], axis=-1)
        born = add_at(tree.born, ids.reshape(-1), more.reshape(-1, 3))
        count, default, utility = jnp.moveaxis(born.at[ids].get(mode="clip"), -1, 0)
        utility = jnp.maximum(utility, default)
        values = jnp.stack([default, jnp.maximum(default, utility - self.regularization)], axis=-1)
        tree = dataclasses.replace(
            tree,
            first=tree.first.at[ids].min(scenarios, mode="drop"),
            born=born,
            node=tree.node.at[ids].set(values, mode="drop"),
        )
        return tree, jnp.where(
            (ids != EMPTY)[..., None], values / jnp.maximum(count, 1)[..., None], 0.0
        )

    def back_up(self, tree: ScenarioTree, path: WavePath) -> ScenarioTree:
        """New values of the nodes on the way, deepest first; each is written by its first scenario."""
        scenarios = jnp.arange(path.depth.shape[0], dtype=jnp.int32)
        deepest = jnp.minimum(tree.iteration, self.max_depth)
        moved = jnp.sum((path.nodes[0] != EMPTY) & (path.depth > 0), dtype=jnp.int32)
        tree = dataclasses.replace(tree, visits=tree.visits.at[tree.action[0]].add(moved))

        def level(i: Array, carry: tuple[ScenarioTree, Array]) -> tuple[ScenarioTree, Array]:
            tree, change = carry
            d = deepest - i
            node = path.nodes[d]
            first = tree.first.at[node].get(mode="fill", fill_value=EMPTY)
            node = jnp.where(first == scenarios, node, EMPTY)
            old = tree.node.at[node].get(mode="clip")
            default = tree.born.at[node].get(mode="clip")[:, DEFAULT, None]
            block, action = (
                x.at[node].get(mode="fill", fill_value=EMPTY) for x in (tree.block, tree.action)
            )
            # The scenarios below a node bring their changes to its first one, which adds their sum to the edge.
            change = add_at(jnp.zeros_like(change), first, change)
            place = jnp.where(block == EMPTY, EMPTY, block * tree.edge.shape[1] + action)
            edge = add_at(tree.edge.reshape(-1, 2), place, change).reshape(tree.edge.shape)
            rows = edge.at[block].get(mode="clip")
            inner = (block != EMPTY)[:, None]
            new = jnp.where(inner, jnp.maximum(rows.max(axis=1), default), old)
            best = jnp.argmax(rows[..., UPPER_BOUND], axis=1).astype(jnp.int32)
            tree = dataclasses.replace(
                tree,
                node=tree.node.at[node].set(new, mode="drop"),
                edge=edge,
                action=tree.action.at[jnp.where(inner[:, 0], node, EMPTY)].set(best, mode="drop"),
            )
            return tree, jnp.where((node != EMPTY)[:, None], new - old, 0.0)

        nothing = jnp.zeros((scenarios.shape[0], 2), jnp.float32)
        tree, _ = jax.lax.fori_loop(0, deepest + 1, level, (tree, nothing))
        return dataclasses.replace(tree, iteration=tree.iteration + 1)
