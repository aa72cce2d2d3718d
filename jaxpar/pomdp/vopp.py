r"""Vectorised online POMDP planning by an iterated reference policy.

With the previous policy as reference, the value under a relative-entropy penalty of weight 1/eta has a closed form,

    Psi_{k+1}(b, a) = Psi_k(b, a) - [L Psi_k](b) + Q_k(b, a),    [L Psi](b) = (1/eta) log sum_a exp(eta Psi(b, a)),
    Q_k(b, a) = (sum of rewards + discount * sum_o N(bao) [L Psi_k](bao)) / N(ba),

and the policy is softmax(eta Psi). No maximum over samples is taken anywhere: sampling errors average out, and the
preference of the best action tends to the optimal value while the others fall at the rate of their advantage gaps.

Sources: PORPP (IJCAI 2025, eqs. 3-12 and 19), VOPP (arXiv 2510.27191). What this one does otherwise than the official
code: simulations that end early count in N(ba); actions that were never tried at b enter [L Psi](b) only with
`unvisited="paper"`; only visited nodes are backed up unless `sweep="tree"`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.pomdp.model import is_traced
from jaxpar.pomdp.search import LEAVES, Lanes, Path, PlanInfo, Search, plan, plan_until, report, search
from jaxpar.pomdp.tree import EMPTY, Dense, Hashed, Tree, lineage, tell_parents
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["FixedReference", "Vopp", "preference_step", "soft_value"]

UNVISITED = ("mask", "optimistic", "paper")


def soft_value(psi: Array, tried: Array, eta: Any) -> Array:
    """`[L Psi] = (1/eta) log sum exp(eta Psi)` over the tried actions of the last axis; -inf where there is none."""
    return jax.nn.logsumexp(jnp.where(tried, eta * psi, -jnp.inf), axis=-1) / eta


def preference_step(psi: Array, values: Array, tried: Array, eta: Any, unvisited: str = "mask") -> tuple[Array, Array]:
    """One step of the iterated scheme at n beliefs: the new Psi `[n, A]` and the new [L Psi] `[n]`.

    An action that is tried for the first time (`psi` infinite) starts at what the others' preferences say of the
    belief, with its uniform share: as if it had had no advantage so far. The choice changes how fast the scheme
    settles, not where.

    Args:
        psi: float32 `[n, A]`, infinite where new.
        values: float32 `[n, A]`, Q.
        tried: bool `[n, A]`.
        eta: > 0; large is greedy.
        unvisited: "paper" counts untried actions in L at their first preference, -log(A)/eta; else they do not count.
    """
    fresh = tried & jnp.isinf(psi)
    old = tried & ~fresh
    if unvisited == "paper":
        first = jnp.full(psi.shape[:-1] + (1,), -jnp.log(psi.shape[-1]) / eta)
        psi = jnp.where(old, psi, first)
        moved = psi + values - soft_value(psi, jnp.ones_like(tried), eta)[..., None]
        psi = jnp.where(tried, moved, psi)
        return psi, soft_value(psi, jnp.ones_like(tried), eta)
    # New actions enter at an equal share of what is known, so that L over all of them needs no second sum.
    known, all_tried = jnp.sum(old, axis=-1), jnp.maximum(jnp.sum(tried, axis=-1), 1)
    share = jnp.where(known > 0, soft_value(psi, old, eta) - jnp.log(jnp.maximum(known, 1)) / eta, 0.0)
    level = share + jnp.log(all_tried) / eta
    psi = jnp.where(fresh, share[..., None], jnp.where(tried, psi, 0.0))
    psi = jnp.where(tried, psi + values - level[..., None], -jnp.inf)
    return psi, soft_value(psi, tried, eta)


@dataclasses.dataclass(frozen=True)
class Vopp:
    """The iterated reference scheme on a tree that many simulations grow at once.

    A plan makes `iterations` batches of `num_simulations` simulations; batch k goes `floor(depth_scale k^depth_power)
    + 1` steps deep, at most `max_depth`. Costs O(n A) a level and batch, whatever the size of the tree.

    Legal actions are those of a simulation's own state; states that share a history are taken to agree on them.

    Attributes:
        num_simulations: n, in parallel.
        iterations: K.
        max_depth: D, steps.
        eta: inverse temperature, in units of one over reward; a float, which may be traced.
        discount: in (0, 1]; None takes `params.discount`.
        depth_scale: beta of the depth schedule.
        depth_power: alpha of it; 0 with `depth_scale=max_depth` is full depth at once.
        leaf: value of a state where a simulation stops: "heuristic" (the environment's), "rollout" or "zero".
        rollout_depth: steps of a rollout.
        unvisited: what untried actions are worth: "mask" (as much as the belief: tried with their prior share, in no
            sum), "optimistic" (tried before all others) or "paper" (their first preference stays, also in L).
        sweep: "visited" backs up the nodes of the batch; "tree" all of them, level by level.
        max_nodes: capacity in observation nodes.
        max_edges: capacity in action nodes; None is `max_nodes`.
        children: `Dense(O)` or `Hashed()`; None picks by the number of observations.
    """

    num_simulations: int = 256
    iterations: int = 64
    max_depth: int = 30
    eta: Any = 2.0
    discount: Any = None
    depth_scale: float = 1.0
    depth_power: float = 1.0
    leaf: str = "heuristic"
    rollout_depth: int = 20
    unvisited: str = "mask"
    sweep: str = "visited"
    max_nodes: int = 1 << 20
    max_edges: int | None = None
    children: Dense | Hashed | None = None

    iterated: ClassVar[bool] = True
    stops_at_new: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("num_simulations", "iterations", "max_depth", "max_nodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name, legal in (("leaf", LEAVES), ("unvisited", UNVISITED), ("sweep", ("visited", "tree"))):
            if getattr(self, name) not in legal:
                raise UsageError(f"{name} is one of {', '.join(legal)}, not {getattr(self, name)!r}")
        if not is_traced(self.eta) and not self.eta > 0:
            raise UsageError(f"eta must be positive, not {self.eta}")

    def depth_of(self, k: Any) -> Any:
        """How deep batch k goes: an int of an int, an int32 of a traced number."""
        if isinstance(k, int):
            return min(int(self.depth_scale * k**self.depth_power + 1e-4) + 1, self.max_depth)
        depth = jnp.floor(self.depth_scale * jnp.asarray(k, jnp.float32) ** self.depth_power + 1e-4)
        return jnp.minimum(depth.astype(jnp.int32) + 1, self.max_depth)

    def select(self, key: PRNGKey, tree: Tree, lanes: Lanes, legal: Array) -> Array:
        """Actions drawn from softmax(eta Psi) over the tried and the prior share of the untried; int32 `[n]`."""
        row = tree.edges.at[lanes.node].get(mode="clip")
        tried = legal & (row != EMPTY)
        untried = legal & ~tried
        psi = tree.psi.at[row].get(mode="clip")
        known, unknown, all_legal = (jnp.sum(mask, axis=1, keepdims=True) for mask in (tried, untried, legal))
        if self.unvisited == "paper":
            psi = jnp.where(tried, psi, -jnp.log(psi.shape[1]) / self.eta)
            weights = _weights(psi, legal, self.eta)
        else:
            weights = _weights(psi, tried, self.eta)
            share = unknown / jnp.maximum(all_legal, 1) if self.unvisited == "mask" else jnp.minimum(unknown, 1.0)
            share = jnp.where(known > 0, share, 1.0)
            weights = weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-30) * (1 - share)
            weights = jnp.where(untried, share / jnp.maximum(unknown, 1), weights)
        total = _sums_before(weights)
        drawn = self._uniform(key, lanes)[:, None] * total[:, -1:]
        return jnp.argmax((total > drawn) & legal, axis=1).astype(jnp.int32)

    def _uniform(self, key: PRNGKey, lanes: Lanes) -> Array:
        """Numbers in [0, 1), independent but at the root: there evenly spread (by multiples of the golden ratio).

        Root states come sorted (systematic draws), so every action then sees its fair share of each: most of the
        variance of rare actions goes away, and each simulation's own number is still uniform.
        """
        count = lanes.node.shape[0]
        golden = np.arange(count) * 0.6180339887498949 % 1.0
        draws = jax.random.uniform(key, (count,))
        return jnp.where(lanes.node == 0, (jnp.asarray(golden, jnp.float32) + draws[0]) % 1.0, draws)

    def back_up(self, tree: Tree, children: Any, path: Path, depth: Array, discount: Any) -> Tree:
        """Learns from one batch, deepest level first."""
        if self.sweep == "tree":
            return self._sweep(tree, children, depth, discount)

        def level(i: Array, tree: Tree) -> Tree:
            d = depth - i
            parents = jnp.where(d > 0, path.edges[jnp.maximum(d - 1, 0)], EMPTY)
            return self._back_up_nodes(tree, path.nodes[d], path.edges[d], parents, discount)

        return jax.lax.fori_loop(0, depth + 1, level, tree)

    def _sweep(self, tree: Tree, children: Any, depth: Array, discount: Any) -> Tree:
        above, owner = lineage(tree, children)
        higher = jnp.where(above != EMPTY, owner.at[above].get(mode="clip"), EMPTY)
        ids, edge_ids = (jnp.arange(x.shape[0], dtype=jnp.int32) for x in (above, owner))

        def find_level(_: Array, level: Array) -> Array:
            parent = jnp.where(higher != EMPTY, level.at[higher].get(mode="clip"), -1)
            return jnp.where(parent >= 0, parent + 1, level)

        levels = jax.lax.fori_loop(0, depth, find_level, jnp.where(ids == 0, 0, -1).astype(jnp.int32))
        edge_levels = jnp.where(owner != EMPTY, levels.at[owner].get(mode="clip"), -1)

        def back_up_level(i: Array, tree: Tree) -> Tree:
            nodes = jnp.where(levels == depth - i, ids, EMPTY)
            edges = jnp.where(edge_levels == depth - i, edge_ids, EMPTY)
            return self._back_up_nodes(tree, nodes, edges, above, discount)

        return jax.lax.fori_loop(0, depth + 1, back_up_level, tree)

    def _back_up_nodes(self, tree: Tree, nodes: Array, edges: Array, parents: Array, discount: Any) -> Tree:
        visits = jnp.maximum(tree.edge_visits.at[edges].get(mode="clip"), 1)
        total = tree.reward_sum.at[edges].get(mode="clip") + discount * tree.future_sum.at[edges].get(mode="clip")
        tree = dataclasses.replace(tree, value=tree.value.at[edges].set(total / visits, mode="drop"))
        here = nodes != EMPTY
        row = jnp.where(here[:, None], tree.edges.at[nodes].get(mode="clip"), EMPTY)
        tried = row != EMPTY
        values, psi = tree.value.at[row].get(mode="clip"), tree.psi.at[row].get(mode="clip")
        if self.iterated:
            psi, best = preference_step(psi, values, tried, self.eta, self.unvisited)
        else:
            psi = values - jnp.log(jnp.maximum(jnp.sum(tried, axis=1, keepdims=True), 1)) / self.eta
            best = soft_value(psi, tried, self.eta)
        leaf = tree.leaf_sum.at[nodes].get(mode="clip") / jnp.maximum(tree.leaf_visits.at[nodes].get(mode="clip"), 1)
        tree = dataclasses.replace(tree, psi=tree.psi.at[row].set(psi, mode="drop"))
        return tell_parents(tree, nodes, parents, jnp.where(jnp.any(tried, axis=1), best, leaf))

    plan, search, plan_until = plan, search, plan_until

    def decide(self, search: Search) -> tuple[Array, PlanInfo]:
        """The action of the highest preference, and the report."""
        row = search.tree.edges[0]
        tried = row != EMPTY
        psi = jnp.where(tried, search.tree.psi.at[row].get(mode="clip"), -jnp.inf)
        policy = _weights(psi, tried, self.eta)
        policy = policy / jnp.maximum(policy.sum(), 1e-30)
        return report(search, soft_value(psi, tried, self.eta), psi, policy)


@dataclasses.dataclass(frozen=True)
class FixedReference(Vopp):
    """The reference-based planner whose reference stays uniform: `Psi = Q + log(1/A)/eta`, never iterated.

    It solves another problem: its value is that of an agent that pays for leaving the uniform policy (on Tiger 17.17
    at eta = 10 and -18.37 at eta = 0.5, where the optimum is 19.37). Source: PORPP (IJCAI 2025), eqs. 3-8.
    """

    iterated: ClassVar[bool] = False


def _weights(psi: Array, among: Array, eta: Any) -> Array:
    """exp(eta (Psi - max)) among some actions, else 0."""
    scaled = jnp.where(among, eta * psi, -jnp.inf)
    top = jnp.max(scaled, axis=-1, keepdims=True)
    return jnp.where(among, jnp.exp(scaled - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)


def _sums_before(weights: Array) -> Array:
    """Cumulative sums of rows, as a product with a triangle where it is small: several times faster on every device."""
    size = weights.shape[1]
    if size > 128:
        return jnp.cumsum(weights, axis=1)
    return jnp.matmul(weights, jnp.triu(jnp.ones((size, size))), precision=jax.lax.Precision.HIGHEST)
