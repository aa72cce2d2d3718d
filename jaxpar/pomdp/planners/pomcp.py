"""Monte-Carlo planning with upper confidence bounds (POMCP), many simulations at once.

Simulations of a batch descend together. Those at the same node do not see each other's results, only each other's
visits: the i-th of them takes the action that UCB1 would take after i - 1 *virtual visits* that leave the means as they
are. With `num_simulations=1` this is POMCP itself; the more run together, the older the means they act on.

Source: Silver and Veness (2010), "Monte-Carlo planning in large POMDPs".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, OneOf, check_fields, field
from jaxpar.pomdp.planners import clock, planner
from jaxpar.pomdp.planners.adding import add_at
from jaxpar.pomdp.planners.leaves import LEAVES, evaluation
from jaxpar.pomdp.planners.planner import PlanInfo, report
from jaxpar.pomdp.planners.simulations import Path, SearchState, Simulations
from jaxpar.pomdp.planners.tree import (
    EMPTY,
    ROWS,
    Children,
    DenseChildren,
    HashedChildren,
    Tree,
    back_up,
    check_children,
)
from jaxpar.pomdp.planners.tree_search import Depth, TreeSearch
from jaxpar.types import Array, PRNGKey, Scalar

__all__ = ["Pomcp", "virtual_choice"]


def ranks(ids: Array) -> Array:
    """Number of earlier entries with the same id, int32 `[n]`; costs one sort."""
    order = jnp.argsort(ids, stable=True)
    ordered = ids[order]
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    first = jax.lax.cummax(jnp.where(starts, place, 0))
    return jnp.zeros_like(place).at[order].set(place - first, unique_indices=True)


def virtual_choice(
    rank: Array, values: Array, visits: Array, legal: Array, total: Array, scale: Scalar
) -> Array:
    """The action that UCB1 takes after `rank` virtual visits, int32 `[n]`.

    UCB1 visits in decreasing order of Q_a + scale sqrt(log total / (visits_a + j)), j = 0, 1, ...; the place in this
    order is found by bisecting the bound, so that all simulations choose at once. Costs 32 sweeps over `[n, A]`.

    Args:
        rank: int32 `[n]`.
        values: float32 `[n, A]`, means; any finite number where not visited.
        visits: int32 `[n, A]`.
        legal: bool `[n, A]`.
        total: float32 `[n]`, > 1.
        scale: of the exploration, in units of return.
    """
    bonus = (scale**2 * jnp.log(total))[:, None]
    low = jnp.where(legal, values, jnp.inf).min(1)
    high = jnp.where(legal, values, -jnp.inf).max(1)
    # Above the bound of every action that was visited once; 1.01 and 1e-3 are room for rounding.
    top = high + jnp.sqrt(bonus[:, 0]) * 1.01 + 1e-3

    def made(bound: Array) -> Array:
        """Virtual visits that each action gets before its upper confidence bound falls below `bound`."""
        gap = jnp.maximum(
            bound[:, None] - values, 1e-9
        )  # no division by 0 where the bound is a mean
        count = jnp.minimum(
            jnp.ceil(bonus / gap**2 - visits), 2.0**20
        )  # sums of these are exact in float32
        return jnp.where(legal, jnp.maximum(count, 0.0), 0.0)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (ends[0] + ends[1])
        enough = made(middle).sum(1) > rank
        return jnp.where(enough, middle, ends[0]), jnp.where(enough, ends[1], middle)

    below, above = jax.lax.fori_loop(
        0, 32, halve, (low, top)
    )  # 32 halvings end at float32's resolution
    at_once = made(top).sum(1) > rank  # an action without visits has an infinite bound
    before = jnp.where((at_once | (above >= top))[:, None], 0.0, made(above))
    more = jnp.cumsum(jnp.maximum(made(jnp.where(at_once, top, below)) - before, 0.0), axis=1)
    # Between `above` and `below` lie the visits among which `rank` is: they are counted in order of actions.
    place = rank.astype(jnp.float32) - before.sum(1)
    return jnp.argmax((more > place[:, None]) & legal, axis=1).astype(jnp.int32)


def upper_confidence(
    tree: Tree, node: Array, rank: Array, legal: Array, exploration: Scalar
) -> Array:
    """The actions of UCB1 at `node` `[n]` after `rank` `[n]` virtual visits, among `legal` `[n, A]`; int32 `[n]`."""
    row = tree.edges.at[node].get(mode="clip")
    tried = row != EMPTY
    visits = jnp.where(tried, tree.edge_visits.at[row].get(mode="clip"), 0)
    values = jnp.where(tried, tree.value.at[row].get(mode="clip"), jnp.inf)
    least = jnp.min(values, axis=1, keepdims=True)
    # The mean of an action without visits only has to be finite: its bonus is infinite.
    values = jnp.where(tried, values, jnp.where(jnp.isfinite(least), least, 0.0))
    total = (
        tree.node_visits.at[node].get(mode="clip").astype(jnp.float32) + 1
    )  # above 1, so that its log is positive
    return virtual_choice(rank, values, visits, legal, total, exploration)


def add_returns(tree: Tree, children: Children, path: Path, depth: Array, discount: Scalar) -> Tree:
    """Adds each simulation's return to the edges on its way, deepest level first."""

    def level(i: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        tree, future = carry
        d = depth - i
        edges = path.edges[d]
        future = jnp.where((path.nodes[d] != EMPTY) & (edges == EMPTY), path.leaf, future)
        sums = add_at(tree.future_sum, edges, future)
        total = tree.reward_sum.at[edges].get(mode="clip") + discount * sums.at[edges].get(
            mode="clip"
        )
        mean = total / jnp.maximum(tree.edge_visits.at[edges].get(mode="clip"), 1)
        tree = dataclasses.replace(
            tree, future_sum=sums, value=tree.value.at[edges].set(mean, mode="drop")
        )
        return tree, jnp.where(edges != EMPTY, path.rewards[d] + discount * future, future)

    return jax.lax.fori_loop(0, depth + 1, level, (tree, jnp.zeros(path.leaf.shape)))[0]


def add_best(tree: Tree, children: Children, path: Path, depth: Array, discount: Scalar) -> Tree:
    """Values of the edges on the way from the best actions below, deepest level first.

    `Q(b, a) = (sum of rewards + discount * sum_o N(bao) max_a' Q(bao, a')) / N(ba)`, over the actions that were tried;
    a node without any is worth the mean of its guesses.
    """

    def level(i: Array, tree: Tree) -> Tree:
        d = depth - i
        nodes = path.nodes[d]
        edges = path.edges[d]
        visits = jnp.maximum(tree.edge_visits.at[edges].get(mode="clip"), 1)
        total = tree.reward_sum.at[edges].get(mode="clip") + discount * tree.future_sum.at[
            edges
        ].get(mode="clip")
        tree = dataclasses.replace(
            tree, value=tree.value.at[edges].set(total / visits, mode="drop")
        )
        row = tree.edges.at[nodes].get(mode="clip")
        best = jnp.max(
            jnp.where(row != EMPTY, tree.value.at[row].get(mode="clip"), -jnp.inf), axis=1
        )
        guesses = tree.leaf_visits.at[nodes].get(mode="clip")
        guess = tree.leaf_sum.at[nodes].get(mode="clip") / jnp.maximum(guesses, 1)
        parents = jnp.where(d > 0, path.edges[jnp.maximum(d - 1, 0)], EMPTY)
        return back_up(tree, nodes, parents, jnp.where(jnp.isfinite(best), best, guess))

    return jax.lax.fori_loop(0, depth + 1, level, tree)


BACKUPS = {"mean": add_returns, "best": add_best}
"""What a node is worth to the edge above: the mean of all returns from it, or its best action."""


def one_deeper(k: Depth, max_depth: int) -> Depth:
    """At most one level more than the `k` batches so far; an int of an int, an int32 of a traced number."""
    if isinstance(k, int):
        return min(k + 1, max_depth)
    return jnp.minimum(k + 1, max_depth)


def best_mean(search: SearchState) -> tuple[Array, PlanInfo]:
    """Returns the action of the highest mean return, and the report.

    The policy is the share of the visits to legal actions.
    """
    row = search.tree.edges[0]
    tried = row != EMPTY
    visits = jnp.where(tried, search.tree.edge_visits.at[row].get(mode="clip"), 0).astype(
        jnp.float32
    )
    values = jnp.where(tried & search.legal, search.tree.value.at[row].get(mode="clip"), -jnp.inf)
    share = visits / jnp.maximum(visits.sum(), 1.0)
    allowed = jnp.where(search.legal, visits, 0.0)
    policy = allowed / jnp.maximum(allowed.sum(), 1.0)
    return report(search, values.max(), jnp.where(tried, share, -jnp.inf), policy, order=values)


@dataclasses.dataclass(frozen=True)
class Pomcp:
    """UCB1 on a tree of histories with unweighted particles; each simulation adds at most one node.

    Attributes:
        num_simulations: n, in parallel, with virtual visits among them.
        iterations: batches of n; the k-th can be k + 1 deep.
        max_depth: steps within the tree.
        exploration: the constant of UCB1, in units of return.
        discount: in (0, 1]; None takes `params.discount`.
        leaf: value of a new node: "rollout" (`rollout_action`, else chance), "heuristic" or "zero".
        rollout_depth: steps of a rollout.
        expand_after: visits to a node before simulations go on from it, as in `Vopp`.
        backup: what a node is worth to the edge above: "mean", all returns from it, as published, or "best", its best
            action so far. Means include what exploring cost, much where few simulations meet large penalties; the best
            of few samples flatters, much where leaf values do.
        max_nodes: capacity in observation nodes.
        max_edges: capacity in action nodes; None is `max_nodes`.
        children: `DenseChildren(O)` or `HashedChildren()`; None picks by the number of observations.
    """

    num_simulations: int = field(32, AtLeast(1))
    iterations: int = field(128, AtLeast(1))
    max_depth: int = field(30, AtLeast(1))
    exploration: Any = field(20.0, AtLeast(0))
    discount: Any = field(None, Between(0, 1, "(]"))
    leaf: str = field("rollout", OneOf(LEAVES))
    rollout_depth: int = field(30, AtLeast(1))
    expand_after: int = field(1, AtLeast(1))
    backup: str = field("mean", OneOf(tuple(BACKUPS)))
    max_nodes: int = field(1 << 18, ROWS)
    max_edges: int | None = field(None, ROWS)
    children: DenseChildren | HashedChildren | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_children(self.children)

    # Functions that all planners share, as methods (see `planners.planner`).
    plan = planner.plan
    plan_until = clock.plan_until
    search = planner.search
    decide = staticmethod(best_mean)

    def tree_search(self) -> TreeSearch:
        """The search with its parts and sizes."""
        return TreeSearch(
            select=self.select,
            evaluate=evaluation(self.leaf, self.rollout_depth),
            back_up=BACKUPS[self.backup],
            decide=best_mean,
            depth_of=self.depth_of,
            num_simulations=self.num_simulations,
            iterations=self.iterations,
            max_depth=self.max_depth,
            expand_after=self.expand_after,
            discount=self.discount,
            max_nodes=self.max_nodes,
            max_edges=self.max_edges,
            children=self.children,
            ranked_by="values",
        )

    def depth_of(self, k: Depth) -> Depth:
        """At most one level more than the batches so far."""
        return one_deeper(k, self.max_depth)

    def select(self, key: PRNGKey, tree: Tree, simulations: Simulations, legal: Array) -> Array:
        """UCB1 with virtual visits; int32 `[n]`. The key is not used."""
        # Those that are not live share the id `EMPTY`, whose ranks mean nothing.
        rank = jnp.where(
            simulations.live, ranks(jnp.where(simulations.live, simulations.node, EMPTY)), 0
        )
        return upper_confidence(tree, simulations.node, rank, legal, self.exploration)
