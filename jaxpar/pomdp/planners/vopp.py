r"""Vectorised online POMDP planning by an iterated reference policy.

With the previous policy as reference, the value under a relative-entropy penalty of weight 1/eta has a closed form,

    Psi_{k+1}(b, a) = Psi_k(b, a) - [L Psi_k](b) + Q_k(b, a),    [L Psi](b) = (1/eta) log sum_a exp(eta Psi(b, a)),
    Q_k(b, a) = (sum of rewards + discount * sum_o N(bao) [L Psi_k](bao)) / N(ba),

and the policy is softmax(eta Psi). No maximum over samples is taken anywhere: sampling errors average out, and the
preference of the best action tends to the optimal value while the others fall at the rate of their advantage gaps.

The scheme may start at any preferences. Here it starts at Psi_0(b, a) = v(b) - log(A)/eta, v being the guess made where
the tree ended (`leaf`), and an action keeps that until it is tried: so a node that has seen one bad action is worth
its guess and not that action, and values do not fall where the tree is thin. Preferences move only when their action
is tried, as in the asynchronous rule of PORPP, so that none starves for a bad first sample.

Sources: PORPP (IJCAI 2025, eqs. 3-12, 19 and algorithm 2), VOPP (arXiv 2510.27191). What this one does otherwise than
the official code: simulations that end early count in N(ba); a simulation stops at the first node that it makes; the
start above and the asynchronous rule. `unvisited="paper"` with `sweep="tree"` is the rule of that code.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.pomdp.planners import clock, planner
from jaxpar.pomdp.planners._loops import map_active
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
    parents,
    representative,
)
from jaxpar.pomdp.planners.tree_search import Depth, TreeSearch
from jaxpar.types import Array, PRNGKey, Scalar, UsageError

__all__ = ["FixedReference", "Vopp", "preference_step", "soft_value"]

UNVISITED = ("leaf", "mask", "paper")


def soft_value(psi: Array, tried: Array, eta: Scalar) -> Array:
    """`[L Psi] = (1/eta) log sum exp(eta Psi)` over the tried actions of the last axis; -inf where there is none."""
    return jax.nn.logsumexp(jnp.where(tried, eta * psi, -jnp.inf), axis=-1) / eta


def preference_step(
    psi: Array,
    values: Array,
    tried: Array,
    eta: Scalar,
    first: Array,
    untried: Array,
    moves: Array | None = None,
) -> tuple[Array, Array]:
    """One step of the iterated scheme at n beliefs: the new Psi `[n, A]` and the new [L Psi] `[n]`.

    Args:
        psi: float32 `[n, A]`, infinite where an action is new: it starts at `first`.
        values: float32 `[n, A]`, Q.
        tried: bool `[n, A]`.
        eta: > 0; large is greedy.
        first: float32 `[n]`, the preference that an action starts with.
        untried: int32 `[n]`, how many actions that were never tried count in L, each with `first`.
        moves: bool `[n, A]`, whose preferences move: those tried just now; None is all that were ever tried.
    """
    others = jnp.where(untried > 0, first + jnp.log(jnp.maximum(untried, 1)) / eta, -jnp.inf)

    def level(psi: Array) -> Array:
        return jnp.logaddexp(eta * soft_value(psi, tried, eta), eta * others) / eta

    psi = jnp.where(tried, jnp.where(jnp.isinf(psi), first[..., None], psi), 0.0)
    base = jnp.where(jnp.isneginf(others) & ~jnp.any(tried, axis=-1), 0.0, level(psi))
    moved = psi + values - base[..., None]
    psi = jnp.where(tried, moved if moves is None else jnp.where(moves, moved, psi), -jnp.inf)
    return psi, level(psi)


@dataclasses.dataclass(frozen=True)
class Vopp:
    """The iterated reference scheme on a tree that many simulations grow at once.

    A plan makes `iterations` batches of `num_simulations` simulations; batch k goes `floor(depth_scale k^depth_power)
    + 1` steps deep, at most `max_depth`. Costs O(n A) a level and batch, whatever the size of the tree.

    Where actions are many, a node considers `widen N^widen_power` of them after N visits: those it has tried, and as
    many more that it has not.

    Legal actions are those of a simulation's own state; states that share a history are taken to agree on them.

    Attributes:
        num_simulations: n, in parallel.
        iterations: K, batches of a plan.
        max_depth: D, steps.
        eta: inverse temperature, in units of one over reward; a float, which may be traced.
        discount: in (0, 1]; None takes `params.discount`.
        depth_scale: beta of the depth schedule.
        depth_power: alpha of it; 0 with `depth_scale=max_depth` is full depth at once.
        leaf: value of a state where a simulation stops: "heuristic" (the environment's), "rollout" or "zero".
        rollout_depth: steps of a rollout.
        unvisited: what untried actions count for in [L Psi](b): "leaf" (the guess v(b); simulations stop at new nodes),
            "mask" (nothing) or "paper" (-log(A)/eta, and so are they drawn; else each has its uniform share of draws).
        expand_after: m, visits to a node before simulations go on from it; until then each stops there and adds its
            guess. With 1, where observations rarely come twice, nodes hold one state each, and what is below knows
            it; with more a node first has a belief, and trees are less deep. For "leaf" alone.
        sweep: "visited" moves what the batch tried; "tree" every action ever tried, level by level.
        widen: how many actions a node considers at its first visit.
        widen_power: how that number grows with its visits.
        max_nodes: capacity in observation nodes.
        max_edges: capacity in action nodes; None is `max_nodes`.
        children: `DenseChildren(O)` or `HashedChildren()`; None picks by the number of observations.
    """

    num_simulations: int = field(256, AtLeast(1))
    iterations: int = field(64, AtLeast(1))
    max_depth: int = field(30, AtLeast(1))
    eta: Any = field(2.0, Positive())
    discount: Any = field(None, Between(0, 1, "(]"))
    depth_scale: float = field(1.0, Positive())
    depth_power: float = field(1.0, AtLeast(0))
    leaf: str = field("heuristic", OneOf(LEAVES))
    rollout_depth: int = field(20, AtLeast(1))
    unvisited: str = field("leaf", OneOf(UNVISITED))
    expand_after: int = field(1, AtLeast(1))
    sweep: str = field("visited", OneOf(("visited", "tree")))
    widen: Any = field(8.0, Positive())
    widen_power: Any = field(0.5, Between(0, 1))
    max_nodes: int = field(1 << 20, ROWS)
    max_edges: int | None = field(None, ROWS)
    children: DenseChildren | HashedChildren | None = None

    iterated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_children(self.children)
        if self.expand_after > 1 and self.unvisited != "leaf":
            raise UsageError(
                f'expand_after={self.expand_after} needs unvisited="leaf", where simulations stop at nodes.'
            )

    # Functions that all planners share, as methods (see `planners.planner`).
    plan = planner.plan
    plan_until = clock.plan_until
    search = planner.search

    def tree_search(self) -> TreeSearch:
        """The search with its parts and sizes."""
        return TreeSearch(
            select=self.select,
            evaluate=evaluation(self.leaf, self.rollout_depth),
            back_up=self.back_up,
            decide=self.decide,
            depth_of=self.depth_of,
            num_simulations=self.num_simulations,
            iterations=self.iterations,
            max_depth=self.max_depth,
            expand_after=self.expand_after if self.unvisited == "leaf" else 0,
            discount=self.discount,
            max_nodes=self.max_nodes,
            max_edges=self.max_edges,
            children=self.children,
            ranked_by="preferences",
        )

    def depth_of(self, k: Depth) -> Depth:
        """Depth of batch k: an int of an int, an int32 of a traced number."""
        if isinstance(k, int):  # 1e-4 forgives the rounding of the power
            return min(int(self.depth_scale * k**self.depth_power + 1e-4) + 1, self.max_depth)
        depth = jnp.floor(self.depth_scale * jnp.asarray(k, jnp.float32) ** self.depth_power + 1e-4)
        return jnp.minimum(depth.astype(jnp.int32) + 1, self.max_depth)

    def considered(self, visits: Array, legal: Array) -> Array:
        """Number of a node's `legal` actions that count after `visits`, int32."""
        most = jnp.ceil(self.widen * jnp.maximum(visits, 1).astype(jnp.float32) ** self.widen_power)
        return jnp.minimum(legal.astype(jnp.float32), most).astype(jnp.int32)

    def select(self, key: PRNGKey, tree: Tree, simulations: Simulations, legal: Array) -> Array:
        """Actions drawn from softmax(eta Psi) over the tried and the prior share of the untried; int32 `[n]`."""
        count, num_actions = legal.shape
        number = jnp.arange(count, dtype=jnp.int32)
        block = row_block(num_actions, count)
        first = number
        if (
            block < number.size
        ):  # simulations at one node with one mask draw from the row of one of them
            first = representative(tree.stamp, simulations.node)[1]
            first = jnp.where(jnp.all(legal == legal[first], axis=1), first, number)
        total = map_active(
            lambda some: self._shares(tree, simulations.node[some], legal[some]),
            (first == number) & simulations.live,
            block,
        )
        total = total if first is number else total[first]
        drawn = self._uniform(key, simulations)[:, None] * total[:, -1:]
        return jnp.argmax((total > drawn) & legal, axis=1).astype(jnp.int32)

    def _shares(self, tree: Tree, nodes: Array, legal: Array) -> Array:
        """Cumulative sums of the weights with which actions are drawn at nodes, float32 `[n, A]`."""
        row = tree.edges.at[nodes].get(mode="clip")
        tried = legal & (row != EMPTY)
        psi = tree.psi.at[row].get(mode="clip")
        if self.unvisited == "paper":
            weights = _weights(
                jnp.where(tried, psi, -jnp.log(psi.shape[1]) / self.eta), legal, self.eta
            )
        else:
            untried = legal & ~tried
            known, unknown = (jnp.sum(mask, axis=1, keepdims=True) for mask in (tried, untried))
            visits = tree.node_visits.at[nodes].get(mode="clip")[:, None]
            most = self.considered(visits, known + unknown)
            share = jnp.where(known > 0, jnp.maximum(most - known, 0) / jnp.maximum(most, 1), 1.0)
            weights = _weights(psi, tried, self.eta)
            weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-30) * (1 - share)
            weights = jnp.where(untried, share / jnp.maximum(unknown, 1), weights)
        return _sums_before(weights)

    def _uniform(self, key: PRNGKey, simulations: Simulations) -> Array:
        """Numbers in [0, 1), independent but at the root: there evenly spread (by multiples of the golden ratio).

        Equal root states come side by side (systematic draws of a table, or of particles that lie so), so every action
        sees its fair share of each: most of the variance of rare actions goes away, and each simulation's own number is
        still uniform.
        """
        count = simulations.node.shape[0]
        golden = np.arange(count) * 0.6180339887498949 % 1.0
        draws = jax.random.uniform(key, (count,))
        return jnp.where(
            simulations.node == 0, (jnp.asarray(golden, jnp.float32) + draws[0]) % 1.0, draws
        )

    def back_up(
        self, tree: Tree, children: Children, path: Path, depth: Array, discount: Scalar
    ) -> Tree:
        """Learns from one batch, deepest level first."""
        if self.sweep == "tree":
            return self._sweep(tree, children, tree.depth, discount)

        moves = jnp.zeros(tree.psi.shape, bool).at[path.edges.reshape(-1)].set(True, mode="drop")

        def level(i: Array, tree: Tree) -> Tree:
            d = depth - i
            parents = jnp.where(d > 0, path.edges[jnp.maximum(d - 1, 0)], EMPTY)
            return self._back_up_nodes(tree, path.nodes[d], path.edges[d], parents, discount, moves)

        return jax.lax.fori_loop(0, depth + 1, level, tree)

    def _sweep(self, tree: Tree, children: Children, depth: Array, discount: Scalar) -> Tree:
        """Moves every preference of the whole tree, level by level from the deepest."""
        above, owner = parents(tree, children)
        higher = jnp.where(above != EMPTY, owner.at[above].get(mode="clip"), EMPTY)
        ids, edge_ids = (jnp.arange(x.shape[0], dtype=jnp.int32) for x in (above, owner))

        def find_level(_: Array, level: Array) -> Array:
            parent = jnp.where(higher != EMPTY, level.at[higher].get(mode="clip"), -1)
            return jnp.where(parent >= 0, parent + 1, level)

        levels = jax.lax.fori_loop(
            0, depth, find_level, jnp.where(ids == 0, 0, -1).astype(jnp.int32)
        )
        edge_levels = jnp.where(owner != EMPTY, levels.at[owner].get(mode="clip"), -1)

        def back_up_level(i: Array, tree: Tree) -> Tree:
            nodes = jnp.where(levels == depth - i, ids, EMPTY)
            edges = jnp.where(edge_levels == depth - i, edge_ids, EMPTY)
            return self._back_up_nodes(tree, nodes, edges, above, discount, None)

        return jax.lax.fori_loop(0, depth + 1, back_up_level, tree)

    def _back_up_nodes(
        self,
        tree: Tree,
        nodes: Array,
        edges: Array,
        parents: Array,
        discount: Scalar,
        moves: Array | None,
    ) -> Tree:
        """New values of `edges`, new preferences at `nodes`, and what these are worth to the edges above, `parents`."""
        visits = jnp.maximum(tree.edge_visits.at[edges].get(mode="clip"), 1)
        total = tree.reward_sum.at[edges].get(mode="clip") + discount * tree.future_sum.at[
            edges
        ].get(mode="clip")
        tree = dataclasses.replace(
            tree, value=tree.value.at[edges].set(total / visits, mode="drop")
        )
        if self.iterated and moves is not None:
            edges, psi, best = self._learn_edges(tree, nodes, edges, moves)
        else:
            edges, psi, best = self._learn(tree, nodes, moves)
        tree = dataclasses.replace(tree, psi=tree.psi.at[edges].set(psi, mode="drop"))
        return back_up(tree, nodes, parents, best)

    def _learn(self, tree: Tree, nodes: Array, moves: Array | None) -> tuple[Array, Array, Array]:
        """The edges of nodes `[n, A]`, their new preferences, and the new values of the nodes `[n]`."""
        row = jnp.where((nodes != EMPTY)[:, None], tree.edges.at[nodes].get(mode="clip"), EMPTY)
        tried = row != EMPTY
        values = tree.value.at[row].get(mode="clip")
        psi = tree.psi.at[row].get(mode="clip")
        leaf, guesses = self._guess(tree, nodes)
        if self.iterated:
            first, untried = self._start(tree, nodes, psi, tried, leaf, guesses)
            now = None if moves is None else moves.at[row].get(mode="clip") & tried
            psi, best = preference_step(psi, values, tried, self.eta, first, untried, now)
        else:
            psi = values - jnp.log(jnp.maximum(jnp.sum(tried, axis=1, keepdims=True), 1)) / self.eta
            best = soft_value(psi, tried, self.eta)
        return row, psi, jnp.where(jnp.any(tried, axis=1), best, leaf)

    def _learn_edges(
        self, tree: Tree, nodes: Array, edges: Array, moves: Array
    ) -> tuple[Array, Array, Array]:
        """The edges `[n]` of the simulations, which alone have moved, their preferences, and the nodes' values `[n]`.

        Where rows are long, one simulation reads each edge and one each node, and nodes without edges read no row.
        """
        number = jnp.arange(nodes.shape[0], dtype=jnp.int32)
        block = row_block(tree.edges.shape[1], nodes.shape[0])

        def learn(some: Array) -> tuple[Array, Array]:
            row, psi, best = self._learn(tree, nodes[some], moves)
            mine = (row == edges[some][:, None]) & (row != EMPTY)
            return jnp.sum(jnp.where(mine, psi, 0.0), axis=1), best

        if block >= number.size:
            return edges, *learn(number)
        by_edge = representative(jnp.zeros(tree.psi.shape, jnp.int32), edges)[1]
        asks_edge = (by_edge == number) & (edges != EMPTY)
        stamp = representative(tree.stamp, nodes)[0]
        # Who asks for an edge has its node's row at hand, so it represents the node, too, where there is one.
        by_node = (
            representative(stamp, jnp.where(asks_edge, nodes, EMPTY))[0].at[nodes].get(mode="clip")
        )
        leaf, guesses = self._guess(tree, nodes)
        expanded = guesses < tree.node_visits.at[nodes].get(mode="clip")
        asks_node = (by_node == number) & (nodes != EMPTY) & expanded
        psi, best = map_active(learn, asks_edge | asks_node, block)
        return edges, psi[by_edge], jnp.where(expanded, best[by_node], leaf)

    def _guess(self, tree: Tree, nodes: Array) -> tuple[Array, Array]:
        """The mean of the leaf values at nodes, and how many there were."""
        guesses = tree.leaf_visits.at[nodes].get(mode="clip")
        return tree.leaf_sum.at[nodes].get(mode="clip") / jnp.maximum(guesses, 1), guesses

    def _start(
        self, tree: Tree, nodes: Array, psi: Array, tried: Array, leaf: Array, guesses: Array
    ) -> tuple[Array, Array]:
        """The preference with which actions of each node start, and how many untried ones count with it."""
        count = jnp.sum(tried, axis=1)
        if self.unvisited == "paper":
            return jnp.full(nodes.shape, -jnp.log(psi.shape[1]) / self.eta), psi.shape[1] - count
        old = tried & ~jnp.isinf(psi)
        known = jnp.sum(old, axis=1)
        # Without a guess an action starts with an equal share of what the others say of the belief.
        share = jnp.where(
            known > 0,
            soft_value(psi, old, self.eta) - jnp.log(jnp.maximum(known, 1)) / self.eta,
            0.0,
        )
        if self.unvisited == "mask":
            return share, jnp.zeros_like(count)
        visits, legal = (x.at[nodes].get(mode="clip") for x in (tree.node_visits, tree.node_legal))
        guessed = guesses > 0  # the root has no guess
        most = jnp.where(guessed, jnp.maximum(self.considered(visits, legal), count), count)
        return jnp.where(
            guessed, leaf - jnp.log(jnp.maximum(most, 1)) / self.eta, share
        ), most - count

    def decide(self, search: SearchState) -> tuple[Array, PlanInfo]:
        """The action of the highest preference, and the report."""
        row = search.tree.edges[0]
        tried = row != EMPTY
        psi = jnp.where(tried, search.tree.psi.at[row].get(mode="clip"), -jnp.inf)
        allowed = tried & search.legal
        policy = _weights(psi, allowed, self.eta)
        policy = policy / jnp.maximum(policy.sum(), 1e-30)  # 0 where nothing was tried
        return report(search, soft_value(psi, allowed, self.eta), psi, policy)


@dataclasses.dataclass(frozen=True)
class FixedReference(Vopp):
    """The reference-based planner whose reference stays uniform: `Psi = Q + log(1/A)/eta`, never iterated.

    It solves another problem: its value is that of an agent that pays for leaving the uniform policy (on Tiger 17.17
    at eta = 10 and -18.37 at eta = 0.5, where the optimum is 19.37). Source: PORPP (IJCAI 2025), eqs. 3-8.
    """

    iterated: ClassVar[bool] = False


def row_block(num_actions: int, count: int) -> int:
    """Number of rows of actions, out of `count`, that are worked on at a time: all where they are short."""
    return max(2**19 // num_actions, 1) if num_actions > 64 else count


def _weights(psi: Array, among: Array, eta: Scalar) -> Array:
    """exp(eta (Psi - max)) among some actions, else 0."""
    scaled = jnp.where(among, eta * psi, -jnp.inf)
    top = jnp.max(scaled, axis=-1, keepdims=True)
    # The largest exponent is 0, so that none overflows; a row without any has no top to take off.
    return jnp.where(among, jnp.exp(scaled - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)


def _sums_before(weights: Array) -> Array:
    """Cumulative sums of rows as products with triangles, in blocks of 32: several times faster on every device."""
    size = weights.shape[1]
    if size <= 128:
        return jnp.matmul(
            weights, np.triu(np.ones((size, size), np.float32)), precision=jax.lax.Precision.HIGHEST
        )
    blocks = jnp.pad(weights, ((0, 0), (0, -size % 32))).reshape(weights.shape[0], -1, 32)
    within = _sums_before(blocks.reshape(-1, 32)).reshape(blocks.shape)
    totals = _sums_before(blocks.sum(2))
    before = jnp.pad(totals[:, :-1], ((0, 0), (1, 0)))
    return (within + before[:, :, None]).reshape(weights.shape[0], -1)[:, :size]
