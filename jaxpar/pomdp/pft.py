r"""The particle filter tree with double progressive widening (PFT-DPW), for observations that never come twice.

A search of the belief process: a node is a small weighted particle set, made once, by one filter step; a visit to it
costs one step of one of its states. How many observations an edge has is limited by its visits (`widening.py`); where
observations have keys, nodes are those of the keys and nothing is widened. Actions are taken by UCB1 with virtual
visits, as by `Pomcp`; `num_simulations=1` is the published algorithm.

Source: Sunberg and Kochenderfer (2018), "Online algorithms for POMDPs with continuous state, action, and observation
spaces", algorithm 3. Ours: the reward of a new node is the mean over its particles' steps.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpar.env import step
from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.pomdp._loops import while_live
from jaxpar.pomdp.adding import add_at
from jaxpar.pomdp.clock import decided, nothing_to_plan, refuse, repeat_until
from jaxpar.pomdp.model import discount_of, is_usable, leaf_values, legal_actions, num_observations
from jaxpar.pomdp.pomcp import BACKUPS, back_up, best_mean, ranks, upper_confidence
from jaxpar.pomdp.search import (
    LEAVES,
    Lanes,
    Path,
    PlanInfo,
    begin,
    children_of,
    embark,
    is_waiting,
    land,
    moving,
    plan,
)
from jaxpar.pomdp.tree import EMPTY, Dense, Hashed, Tree, arrive, take, tally
from jaxpar.pomdp.widening import (
    Step,
    Store,
    Widened,
    chosen_rows,
    drawn_index,
    filter_step,
    no_step,
    open_slots,
    slot_of_visit,
    speaks,
)
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Pft"]


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
        k_actions: of the widening to #C(b) <= k N(b)^alpha; None opens all legal actions at once.
        alpha_actions: in [0, 1].
        keyed: whether nodes are those of observation keys, without widening; None: if observations are Discrete.
        discount: in (0, 1]; None takes `params.discount`.
        leaf: value of a new node: "rollout" (uniform over legal actions), "heuristic" or "zero".
        rollout_depth: steps of a rollout.
        backup: what a node is worth to the edge above, as in `Pomcp`: "mean" or "best".
        max_nodes: capacity in nodes, of m particles each.
        max_edges: capacity in action nodes; None is `max_nodes`.
        children: `Dense(O)` or `Hashed()`; None picks by the number of observations.
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
    backup: str = field("mean", OneOf(BACKUPS))
    max_nodes: int = field(1 << 16, AtLeast(1))
    max_edges: int | None = field(None, AtLeast(1))
    children: Dense | Hashed | None = None

    __post_init__ = check_fields

    ranked_by: ClassVar[str] = "values"

    plan = plan

    def search(self, key: PRNGKey, env: Any, params: PyTree, belief: Any) -> Widened:
        """The search that `plan` decides by."""
        widened = self.begin(env, params, belief, self.iterations)
        return self.grow(key, env, params, belief, widened, self.iterations)

    def plan_until(
        self,
        key: PRNGKey,
        env: Any,
        params: PyTree,
        belief: Any,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[Array, PlanInfo]:
        """As `plan`, with as many of the batches as end before `deadline` on `clock` (s); runs on the host.

        A deadline that is too short for one batch still gives a legal action, with `iterations` 0.

        Raises:
            UsageError: every state drawn from the belief has ended.
        """
        discount_of(params, self.discount)  # which cannot refuse what is traced
        widened, nothing = _begun(key, self, env, params, belief)
        refuse(nothing)

        def advance(widened: Widened) -> Widened:
            return _grown(key, self, env, params, belief, widened)

        return decided(self, repeat_until(advance, widened, self.iterations, deadline, clock))

    def decide(self, widened: Widened) -> tuple[Array, PlanInfo]:
        """The action of the highest mean return, and the report; the policy is the visits' share."""
        return best_mean(widened.search)

    def depth_of(self, k: Any) -> Any:
        """At most one level more than the batches so far."""
        return min(k + 1, self.max_depth) if isinstance(k, int) else jnp.minimum(k + 1, self.max_depth)

    def is_keyed(self, env: Any, params: PyTree) -> bool:
        """Whether nodes are those of observation keys."""
        return num_observations(env, params) is not None if self.keyed is None else self.keyed

    def begin(self, env: Any, params: PyTree, belief: Any, iterations: int) -> Widened:
        """A root, with room for `iterations` batches."""
        if not hasattr(env, "log_likelihood"):
            raise UsageError(f"weighted particles need log_likelihood of the environment, and {env.name} has none")
        most = 1 + self.num_simulations * iterations
        limited = dataclasses.replace(self, max_nodes=min(most, self.max_nodes))
        search = begin(limited, env, params, belief, iterations)
        if not self.is_keyed(env, params) and self.children is None:
            max_nodes, max_edges = search.tree.node_visits.shape[0], search.tree.edge_visits.shape[0]
            tree = dataclasses.replace(search.tree, children=Hashed().empty(max_nodes, max_edges))
            search = dataclasses.replace(search, tree=tree)

        def example(key: PRNGKey) -> tuple[PyTree, PyTree]:
            state = jax.tree.map(lambda x: x[0], belief.draw(key, 1))
            return state, step(key, env, state, jnp.zeros((), jnp.int32), params).obs

        state, obs = jax.eval_shape(example, jax.random.key(0))
        nodes, size = search.tree.node_visits.shape[0], self.num_particles
        rows = jnp.zeros((nodes,), jnp.float32)
        store = Store(
            states=jax.tree.map(lambda x: jnp.zeros((nodes, size, *x.shape), x.dtype), state),
            log_weights=jnp.full((nodes, size), -jnp.inf, jnp.float32),
            obs=jax.tree.map(lambda x: jnp.zeros((nodes, *x.shape), x.dtype), obs),
            reward=rows,
            over=jnp.zeros((nodes,), bool),
            held=jnp.zeros((nodes,), jnp.int32),
            invalid=jnp.zeros((), jnp.int32),
        )
        return Widened(search, store)

    def grow(self, key: PRNGKey, env: Any, params: PyTree, belief: Any, widened: Widened, iterations: int) -> Widened:
        """`iterations` batches more; pure. The key of a batch is folded with its number."""

        def batch(_: Array, widened: Widened) -> Widened:
            return self._batch(jax.random.fold_in(key, widened.search.tree.iteration), env, params, belief, widened)

        return jax.lax.fori_loop(0, iterations, batch, widened)

    def _batch(self, key: PRNGKey, env: Any, params: PyTree, belief: Any, widened: Widened) -> Widened:
        draw_key, level_key, node_key, leaf_key = jax.random.split(key, 4)
        discount = discount_of(params, self.discount)
        search, path, lanes, depth = embark(draw_key, self, env, params, belief, widened.search)
        before = search.tree.num_nodes

        def level(d: Array, carry: tuple) -> tuple:
            tree, store, path, lanes, last = carry
            step_key, own_key = jax.random.split(jax.random.fold_in(level_key, d))
            tree, move = self._descend(step_key, env, params, tree, lanes, before)
            store, states, reward, live = self._arrive(own_key, env, params, store, lanes, move, before)
            stuck = (move.edge != EMPTY) & (move.child == EMPTY) & ~self._is_over(env, params, move)
            path = path.after(d, jnp.where(move.edge != EMPTY, move.child, EMPTY), move.edge, reward)
            lanes = Lanes(
                states=states,
                node=jnp.where(move.edge != EMPTY, move.child, lanes.node),
                stuck=jnp.where(stuck, move.edge, lanes.stuck),
                live=live,
                action=jnp.where(move.edge != EMPTY, move.action, lanes.action),
            )
            last = jax.tree.map(lambda new, old: chosen_rows(move.fresh, new, old), move, last)
            return tree, store, path, lanes, last

        nothing = no_step(env, params, lanes)
        first = (search.tree, widened.store, path, lanes, nothing)
        depth, (tree, store, path, lanes, last) = while_live(depth, level, first, lambda carry: carry[3].live)
        store, path, lanes, waiting = self._fill(node_key, env, params, belief, store, path, lanes, last, before)
        leaves = leaf_values(
            leaf_key, env, params, lanes.states, discount, self.leaf, self.rollout_depth, waiting, lanes.action
        )
        usable = is_usable(path.rewards)
        path = path._replace(rewards=jnp.where(usable, path.rewards, 0.0))
        tree = dataclasses.replace(
            tree,
            reward_sum=add_at(tree.reward_sum, path.edges.reshape(-1), path.rewards.reshape(-1)),
            invalid=tree.invalid + jnp.sum(~usable, dtype=jnp.int32) + store.invalid - widened.store.invalid,
        )
        tree, path = land(tree, path, lanes, leaves, discount)
        return Widened(dataclasses.replace(search, tree=back_up(tree, path, depth, discount, self.backup)), store)

    def _descend(
        self, key: PRNGKey, env: Any, params: PyTree, tree: Tree, lanes: Lanes, before: Array
    ) -> tuple[Tree, Step]:
        """Every live simulation takes an action and finds its child, by key or by slot."""
        step_key, slot_key = jax.random.split(key)
        allowed = legal_actions(env, params, lanes.states)
        lanes, stranded = moving(lanes, allowed)
        rank = jnp.where(lanes.live, ranks(jnp.where(lanes.live, lanes.node, EMPTY)), 0)
        legal = self._opened(tree, lanes.node, rank, allowed)
        action = upper_confidence(tree, lanes.node, rank, legal, self.exploration)
        earlier = tree.edges.at[lanes.node, action].get(mode="fill", fill_value=EMPTY)
        visits = tree.edge_visits.at[earlier].get(mode="fill", fill_value=0)
        visits, edges = jax.lax.optimization_barrier((visits, tree.edges))  # reads before writes, as in `insert`
        tree, edge = take(dataclasses.replace(tree, edges=edges), lanes.node, action, lanes.live)
        keys = jax.random.split(step_key, action.shape[0])
        result = jax.vmap(lambda key, state, action: step(key, env, state, action, params))(keys, lanes.states, action)
        if self.is_keyed(env, params):
            name = jax.vmap(lambda obs: env.obs_key(obs, params))(result.obs) if hasattr(env, "obs_key") else result.obs
            children = children_of(self, env, params)
        else:
            draws = jax.random.uniform(slot_key, action.shape)
            name = slot_of_visit(draws, visits + ranks(edge), self.k_observations, self.alpha_observations)
            children = Hashed() if self.children is None else self.children
        move = Step(lanes.node, edge, edge, action, result, lanes.live)
        on = (edge != EMPTY) & ~self._is_over(env, params, move)
        tree, child, _ = arrive(tree, children, edge, name.astype(jnp.int32), on)
        lost = (lanes.live & (edge == EMPTY)) | (on & (child == EMPTY))
        tree = tally(tree, steps=edge != EMPTY, overflow=lost, stranded=stranded)
        return tree, move._replace(child=child, fresh=(child != EMPTY) & (child >= before))

    def _opened(self, tree: Tree, node: Array, rank: Array, legal: Array) -> Array:
        """The legal actions that widening has opened at the nodes: the first ones, by number."""
        if self.k_actions is None:
            return legal
        row = tree.edges.at[node].get(mode="clip")
        visits = jnp.sum(jnp.where(row != EMPTY, tree.edge_visits.at[row].get(mode="clip"), 0), axis=1) + rank
        opened = open_slots(visits + 1, self.k_actions, self.alpha_actions)
        return legal & (jnp.cumsum(legal, axis=1) <= opened[:, None])

    def _is_over(self, env: Any, params: PyTree, move: Step) -> Array:
        """Simulations that end on the edge. Without keys an ended episode is a child like any other."""
        return move.result.terminated if self.is_keyed(env, params) else jnp.zeros_like(move.result.terminated)

    def _arrive(
        self, key: PRNGKey, env: Any, params: PyTree, store: Store, lanes: Lanes, move: Step, before: Array
    ) -> tuple[Store, PyTree, Array, Array]:
        """The node's store, the states to go on with, what the step earned, and who goes on."""
        known = (move.child != EMPTY) & ~move.fresh
        over = store.over.at[move.child].get(mode="clip") & known
        chosen = drawn_index(key, store.log_weights.at[move.child].get(mode="clip"))
        states = jax.tree.map(lambda x: x.at[move.child, chosen].get(mode="clip"), store.states)
        reward = move.result.reward
        if not self.is_keyed(
            env, params
        ):  # that of the node, if it has one; of a new one it comes with the filter step
            reward = jnp.where(known, store.reward.at[move.child].get(mode="clip"), reward)
            reward = jnp.where(move.fresh, 0.0, reward)
        reward = jnp.where(move.edge != EMPTY, reward, 0.0)
        kept = jax.tree.map(lambda new, old: chosen_rows(move.edge != EMPTY, new, old), move.result.state, lanes.states)
        return store, jax.tree.map(lambda new, old: chosen_rows(known, new, old), states, kept), reward, known & ~over

    def _fill(
        self,
        key: PRNGKey,
        env: Any,
        params: PyTree,
        belief: Any,
        store: Store,
        path: Path,
        lanes: Lanes,
        last: Step,
        before: Array,
    ) -> tuple[Store, Path, Lanes, Array]:
        """One filter step for every new node, by the first simulation that reached it."""
        root_key, filter_key, leaf_key = jax.random.split(key, 3)
        count, size = last.fresh.shape[0], self.num_particles
        drawn = belief.draw(root_key, count * size)
        at_root = last.node == 0

        def prior(fresh: Array, held: Array) -> Array:
            fresh = jnp.swapaxes(fresh.reshape(size, count, *fresh.shape[1:]), 0, 1)
            return chosen_rows(at_root, fresh, held.at[last.node].get(mode="clip"))

        states = jax.tree.map(prior, drawn, store.states)
        weights = jnp.where(at_root[:, None], 0.0, store.log_weights.at[last.node].get(mode="clip"))
        keys = jax.random.split(filter_key, count)
        filtered = functools.partial(filter_step, env=env, params=params)
        states, weights, reward, wrong = jax.vmap(filtered)(keys, states, weights, last.action, last.result)
        first = speaks(last, before)
        mine = jnp.where(first, last.child, EMPTY)
        store = dataclasses.replace(
            store,
            states=jax.tree.map(lambda old, new: old.at[mine].set(new, mode="drop"), store.states, states),
            log_weights=store.log_weights.at[mine].set(weights, mode="drop"),
            obs=jax.tree.map(lambda old, new: old.at[mine].set(new, mode="drop"), store.obs, last.result.obs),
            reward=store.reward.at[mine].set(reward, mode="drop"),
            over=store.over.at[mine].set(last.result.terminated, mode="drop"),
            invalid=store.invalid + jnp.sum(jnp.where(first, wrong, 0), dtype=jnp.int32),
        )
        if not self.is_keyed(env, params):
            own = store.reward.at[last.child].get(mode="clip")
            here = (path.edges == last.edge[None]) & last.fresh[None]
            path = path._replace(rewards=path.rewards + jnp.where(here, own[None], 0.0))
        chosen = drawn_index(leaf_key, store.log_weights.at[lanes.node].get(mode="clip"))
        inside = (lanes.node != EMPTY) & (lanes.node != 0)
        believed = jax.tree.map(lambda x: x.at[lanes.node, chosen].get(mode="clip"), store.states)
        states = jax.tree.map(lambda new, old: chosen_rows(inside, new, old), believed, lanes.states)
        over = store.over.at[lanes.node].get(mode="clip") & inside
        return store, path, lanes._replace(states=states), is_waiting(lanes) & ~over


@functools.partial(jax.jit, static_argnames=("planner", "env"))
def _begun(key: PRNGKey, planner: Pft, env: Any, params: PyTree, belief: Any) -> tuple[Widened, Array]:
    """The empty search, and what `refuse` takes."""
    states = belief.draw(key, planner.num_simulations)
    widened = planner.begin(env, params, belief, planner.iterations)
    legal = jnp.all(legal_actions(env, params, states), axis=0)
    search = dataclasses.replace(widened.search, legal=legal)
    return dataclasses.replace(widened, search=search), nothing_to_plan(env, params, belief, states)


@functools.partial(jax.jit, static_argnames=("planner", "env"), donate_argnames=("widened",))
def _grown(key: PRNGKey, planner: Pft, env: Any, params: PyTree, belief: Any, widened: Widened) -> Widened:
    return planner.grow(key, env, params, belief, widened, 1)
