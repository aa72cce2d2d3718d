"""What every tree planner shares: batches of simulations down the tree, and what a plan reports.

A planner of this family is a frozen dataclass with sizes, `select` (which action each simulation takes) and `back_up`
(what one level of the tree learns); `grow` runs batches of n simulations, one level at a time, all of them together.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.pomdp._loops import while_live
from jaxpar.pomdp.adding import add_at
from jaxpar.pomdp.model import (
    discount_of,
    leaf_values,
    legal_actions,
    num_actions,
    num_observations,
    simulate_steps,
)
from jaxpar.pomdp.tree import EMPTY, Dense, Hashed, Tree, add_leaves, arrive, empty_tree, take, tally
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = [
    "LEAVES",
    "Path",
    "PlanInfo",
    "Lanes",
    "Search",
    "begin",
    "children_of",
    "drawn_from_nothing",
    "embark",
    "grow",
    "invalid_weights",
    "is_waiting",
    "land",
    "moving",
    "plan",
    "report",
    "root_value",
    "search",
]

LEAVES = ("heuristic", "rollout", "zero")
"""How a simulation is valued where it stops: the environment's `heuristic`, a rollout or 0. Its `rollout_action` plays
rollouts, or, without one, chance."""


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
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)  # unlike `.at`, asks for no bounds
        return self._replace(
            nodes=put(self.nodes, nodes, d + 1), edges=put(self.edges, edges, d), rewards=put(self.rewards, rewards, d)
        )


@flax.struct.dataclass
class PlanInfo:
    """What a plan says of itself.

    Attributes:
        value: float32, the value of the root belief: 0 where every state drawn from it had ended, and -inf where no
            simulation went on from it for another reason (no time, no room).
        values: float32 `[A]`, Q of each action at the root; -inf where it was not tried.
        preferences: float32 `[A]`, Psi (Vopp) or the visits' share (Pomcp); -inf where not tried.
        policy: float32 `[A]`, how the root would act at random.
        entropy: float32, of `policy`, in nats.
        visits: int32 `[A]`.
        nodes: int32, observation nodes with the root.
        edges: int32.
        depth: int32, the most steps that a simulation made on the tree.
        iterations: int32, batches of simulations.
        steps: int32, simulated steps on the tree (rollouts not counted).
        overflow: int32, steps that found no room in the tree; raise max_nodes or max_edges where it is not small.
        invalid: int32, rewards or leaf values that were not finite, or beyond `LARGEST` in size, counted as 0, and
            likelihoods or weights of the belief that were no numbers, counted as none.
        stranded: int32, simulations that stopped since their state allowed no action, and all of them where the belief
            had no weight anywhere, so that its draws mean nothing; 0 unless a mask or a belief is broken.
        ended: float32, the share of root draws that were terminal states: 1 means that there was nothing to plan.
        legal: bool `[A]`, actions that are legal in every state drawn for the root.
    """

    value: Array
    values: Array
    preferences: Array
    policy: Array
    entropy: Array
    visits: Array
    nodes: Array
    edges: Array
    depth: Array
    iterations: Array
    steps: Array
    overflow: Array
    invalid: Array
    stranded: Array
    ended: Array
    legal: Array


@flax.struct.dataclass
class Search:
    """A tree, the iteration-independent facts of its root, and how often a root draw had ended."""

    tree: Tree
    legal: Array
    ended: Array
    drawn: Array


def children_of(planner: Any, env: Any, params: PyTree) -> Dense | Hashed:
    """The back end for the nodes below an edge: the planner's own choice, else dense for up to 64 observations."""
    if planner.children is not None:
        return planner.children
    known = num_observations(env, params)
    return Dense(known) if known is not None and known <= 64 else Hashed()


def begin(planner: Any, env: Any, params: PyTree, belief: Any, iterations: int) -> Search:
    """An empty search with room for `iterations` batches, within the planner's capacities."""
    discount_of(params, planner.discount)
    most = 1 + sum(planner.num_simulations * planner.depth_of(k) for k in range(iterations))
    max_nodes = min(most, planner.max_nodes)
    max_edges = min(most, planner.max_nodes if planner.max_edges is None else planner.max_edges)
    actions = num_actions(env, params)
    tree = empty_tree(actions, max_nodes, max_edges, children_of(planner, env, params))
    tree = dataclasses.replace(tree, invalid=tree.invalid + invalid_weights(belief))
    zero = jnp.zeros((), jnp.int32)
    return Search(tree, jnp.ones((actions,), bool), zero, zero)


def grow(planner: Any, key: PRNGKey, env: Any, params: PyTree, belief: Any, search: Search, iterations: int) -> Search:
    """Runs `iterations` batches more; pure, for jit, vmap and scan. The key of a batch is folded with its number."""

    def batch(_: Array, search: Search) -> Search:
        return _batch(jax.random.fold_in(key, search.tree.iteration), planner, env, params, belief, search)

    return jax.lax.fori_loop(0, iterations, batch, search)


def _batch(key: PRNGKey, planner: Any, env: Any, params: PyTree, belief: Any, search: Search) -> Search:
    draw_key, level_key, leaf_key = jax.random.split(key, 3)
    discount = discount_of(params, planner.discount)
    search, path, lanes, depth = embark(draw_key, planner, env, params, belief, search)
    levels = jnp.arange(planner.max_depth)
    keys = jax.vmap(lambda d: jax.random.split(jax.random.fold_in(level_key, d)))(levels)  # at once: fewer launches

    def level(d: Array, carry: tuple) -> tuple:
        tree, path, lanes = carry
        return _descend(keys[d], planner, env, params, tree, path, lanes, d)

    depth, (tree, path, lanes) = while_live(depth, level, (search.tree, path, lanes), lambda carry: carry[2].live)
    waiting, length = is_waiting(lanes), planner.rollout_depth
    values = leaf_values(leaf_key, env, params, lanes.states, discount, planner.leaf, length, waiting, lanes.action)
    tree, path = land(tree, path, lanes, values, discount)
    return dataclasses.replace(
        search, tree=planner.back_up(tree, children_of(planner, env, params), path, depth, discount)
    )


def embark(
    key: PRNGKey, planner: Any, env: Any, params: PyTree, belief: Any, search: Search
) -> tuple[Search, Path, "Lanes", Array]:
    """The simulations of a batch at the root, with an empty path, and how deep they may go; consumes `key`."""
    count, tree = planner.num_simulations, search.tree
    states = belief.draw(key, count)
    ended = jax.vmap(lambda state: env.terminal(state, params))(states)
    legal = legal_actions(env, params, states)
    search = dataclasses.replace(
        search,
        legal=search.legal & jnp.all(legal | ended[:, None], axis=0),
        ended=search.ended + jnp.sum(ended, dtype=jnp.int32),
        drawn=search.drawn + count,
        tree=dataclasses.replace(
            tree,
            node_visits=tree.node_visits.at[0].add(jnp.sum(~ended, dtype=jnp.int32)),
            stranded=tree.stranded + drawn_from_nothing(belief, count),
        ),
    )
    nowhere = jnp.full((planner.max_depth + 1, count), EMPTY, jnp.int32)
    node = jnp.where(ended, EMPTY, 0)
    path = Path(nowhere.at[0].set(node), nowhere, jnp.zeros(nowhere.shape), jnp.zeros((count,)))
    none = jnp.full((count,), EMPTY, jnp.int32)
    lanes = Lanes(states, node, none, ~ended, jnp.full((count,), -1, jnp.int32))
    return search, path, lanes, planner.depth_of(tree.iteration)


def drawn_from_nothing(belief: Any, count: int) -> Array:
    """How many of `count` draws come from a belief that has no weight anywhere, int32: all of them or none."""
    return jnp.where(getattr(belief, "weightless", False), count, 0).astype(jnp.int32)


def invalid_weights(belief: Any) -> Array:
    """How many weights of a belief are no numbers, int32."""
    return jnp.asarray(getattr(belief, "invalid", 0), jnp.int32)


def moving(lanes: "Lanes", legal: Array) -> tuple["Lanes", Array]:
    """Stops the live simulations whose states allow no action by `legal` `[n, A]`, and says which they are."""
    able = jnp.any(legal, axis=1)
    return lanes._replace(live=lanes.live & able), lanes.live & ~able


def is_waiting(lanes: "Lanes") -> Array:
    """Which simulations stopped without having ended, bool `[n]`."""
    return (lanes.stuck != EMPTY) | (lanes.node != EMPTY)


def land(tree: Tree, path: Path, lanes: "Lanes", leaves: tuple[Array, Array], discount: Any) -> tuple[Tree, Path]:
    """Adds the values of where the simulations stopped, and which of them were not finite, and ends the batch."""
    values, wrong = leaves
    tree = add_leaves(tree, lanes.node, lanes.stuck, values, discount)
    beyond = (path.edges == lanes.stuck[None]) & (path.edges != EMPTY)
    path = path._replace(rewards=path.rewards + jnp.where(beyond, discount * values[None], 0.0), leaf=values)
    return dataclasses.replace(
        tree,
        invalid=tree.invalid + jnp.sum(wrong, dtype=jnp.int32),
        iteration=tree.iteration + 1,
        depth=jnp.maximum(tree.depth, jnp.sum(jnp.any(path.edges != EMPTY, axis=1), dtype=jnp.int32)),
    ), path


class Lanes(NamedTuple):
    """The simulations of a batch, on their way.

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


def _descend(
    keys: PRNGKey, planner: Any, env: Any, params: PyTree, tree: Tree, path: Path, lanes: Lanes, d: Array
) -> tuple[Tree, Path, Lanes]:
    """One level down for every live simulation; consumes both `keys` `[2]`."""
    select_key, step_key = keys
    legal, stranded = legal_actions(env, params, lanes.states), jnp.zeros(lanes.live.shape, bool)
    if hasattr(env, "action_mask"):
        lanes, stranded = moving(lanes, legal)
        at = jnp.where(lanes.live, lanes.node, EMPTY)
        counts = jnp.sum(legal, axis=1, dtype=jnp.int32)
        tree = dataclasses.replace(tree, node_legal=tree.node_legal.at[at].set(counts, mode="drop"))
    actions = planner.select(select_key, tree, lanes, legal)
    tree, edges = take(tree, lanes.node, actions, lanes.live)
    moved = edges != EMPTY
    result = simulate_steps(step_key, env, params, lanes.states, actions)
    on = moved & ~result.terminated
    tree, node, earlier = arrive(tree, children_of(planner, env, params), edges, result.obs_key, on)
    lost = (lanes.live & ~moved) | (on & (node == EMPTY))
    tree = tally(tree, steps=moved, overflow=lost, invalid=moved & result.invalid, stranded=stranded)
    tree = dataclasses.replace(tree, reward_sum=add_at(tree.reward_sum, edges, result.reward))
    # Who found no edge stays where it is; who never went on keeps its place, too.
    lanes = Lanes(
        states=jax.tree.map(lambda new, old: _where(moved, new, old), result.state, lanes.states),
        node=jnp.where(moved, node, lanes.node),
        stuck=jnp.where(on & (node == EMPTY), edges, lanes.stuck),
        live=on & (node != EMPTY) & (earlier >= planner.stops_before),
        action=jnp.where(moved, actions, lanes.action),
    )
    return tree, path.after(d, jnp.where(moved, node, EMPTY), edges, jnp.where(moved, result.reward, 0.0)), lanes


def _where(chosen: Array, new: Array, old: Array) -> Array:
    return jnp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - 1)), new, old)


def root_value(value: Array, tried: Array, ended: Array) -> Array:
    """The value of a root where anything was `tried`; else 0 where all had `ended`, and -inf."""
    return jnp.where(tried, value, jnp.where(ended, 0.0, -jnp.inf))


def report(
    search: Search, value: Array, preferences: Array, policy: Array, *, order: Array | None = None
) -> tuple[Array, PlanInfo]:
    """The action of the highest `order` (`preferences`, if None) that is legal and was tried, and the report.

    Where no legal action was tried the lowest legal one is taken, and where the states drawn agree on none, action 0;
    `visits`, `iterations`, `ended` and `legal` tell.
    """
    tree = search.tree
    row = tree.edges[0]
    tried = row != EMPTY
    order = preferences if order is None else order
    best = jnp.where(tried & search.legal, order, -jnp.inf)
    action = jnp.where(jnp.any(tried & search.legal), jnp.argmax(best), jnp.argmax(search.legal)).astype(jnp.int32)
    return action, PlanInfo(
        value=root_value(value, jnp.any(tried), search.ended >= search.drawn),
        values=jnp.where(tried, tree.value.at[row].get(mode="clip"), -jnp.inf),
        preferences=preferences,
        policy=policy,
        entropy=-jnp.sum(jnp.where(policy > 0, policy * jnp.log(jnp.where(policy > 0, policy, 1.0)), 0.0)),
        visits=jnp.where(tried, tree.edge_visits.at[row].get(mode="clip"), 0),
        nodes=tree.num_nodes,
        edges=tree.num_edges,
        depth=tree.depth,
        iterations=tree.iteration,
        steps=tree.steps,
        overflow=tree.overflow,
        invalid=tree.invalid,
        stranded=tree.stranded,
        ended=search.ended / jnp.maximum(search.drawn, 1),
        legal=search.legal,
    )


def plan(planner: Any, key: PRNGKey, env: Any, params: PyTree, belief: Any) -> tuple[Array, PlanInfo]:
    """An action for `belief`, int32, with its report; pure, with a fixed budget, for jit, vmap and scan.

    Args:
        planner: the planner, whose method this is.
        key: consumed.
        env: an environment with one Discrete action.
        params: its parameters.
        belief: a pytree with `draw(key, num) -> states`.
    """
    return planner.decide(planner.search(key, env, params, belief))


def search(planner: Any, key: PRNGKey, env: Any, params: PyTree, belief: Any) -> Search:
    """The search that `plan` decides by, with the whole tree; a planner's method, too."""
    first = begin(planner, env, params, belief, planner.iterations)
    return grow(planner, key, env, params, belief, first, planner.iterations)
