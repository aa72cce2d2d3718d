r"""Trees whose nodes are small weighted particle sets, for observations that never come twice: PFT-DPW and POMCPOW.

Every new observation would make a new node, and no node be visited twice; so an edge ba opens slots for observations as
its visits N grow, while |C(ba)| <= k N^alpha, and later visits choose among the slots that are open. The rule depends
on the number of the visit alone: after t of them m(t) = min(t, floor(k (t - 1)^alpha) + 1) slots are open (since
k s^alpha - s is concave, it is lowest at an end), so that n simulations at one edge decide together exactly as they
would one after another. Where observations have keys, nodes are those of the keys and nothing is widened.

*Pft* searches the belief process: a node's particles are made once, by one filter step, and a visit to it costs
nothing. *Pomcpow* keeps a state in each simulation; every visit adds the state that arrives to the node, weighted by
the likelihood of the node's observation, and goes on with one drawn from all of them.

Both take UCB1 with virtual visits, as `Pomcp`; `num_simulations=1` is the published algorithm.

Sources: Sunberg and Kochenderfer (2018), "Online algorithms for POMDPs with continuous state, action, and observation
spaces", algorithms 2 and 3. Ours: the reward of a new node is the mean over its particles' steps.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Transition, step
from jaxpar.pomdp.belief import systematic
from jaxpar.pomdp.model import discount_of, is_traced, leaf_values, legal_actions, num_observations
from jaxpar.pomdp.pomcp import add_returns, best_mean, ranks, upper_confidence
from jaxpar.pomdp.search import (
    LEAVES,
    Lanes,
    Path,
    PlanInfo,
    Search,
    begin,
    children_of,
    embark,
    is_waiting,
    land,
    plan,
    refuse_ended,
    repeat_until,
)
from jaxpar.pomdp.tree import EMPTY, Dense, Hashed, Tree, arrive, take
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Pft", "Pomcpow", "Store", "Widened", "open_slots", "slot_of_visit"]


@flax.struct.dataclass
class Store:
    """What the nodes hold, `[N]` rows of m particles.

    Attributes:
        states: `[N, m, ...]`.
        log_weights: float32 `[N, m]`, -inf where there is no particle.
        obs: `[N, ...]`, the node's observation.
        reward: float32 `[N]`, mean reward of the step to the node (Pft).
        over: bool `[N]`, the episode has ended there (Pft).
        held: int32 `[N]`, states that were added (Pomcpow).
    """

    states: PyTree
    log_weights: Array
    obs: PyTree
    reward: Array
    over: Array
    held: Array


@flax.struct.dataclass
class Widened:
    """The tree of edges and nodes, and what the nodes hold."""

    search: Search
    store: Store


class Step(NamedTuple):
    """One level's move of n simulations: from `node` by `action` over `edge` to `child`.

    Attributes:
        node: int32 `[n]`.
        edge: int32 `[n]`, `EMPTY` where it did not move.
        child: int32 `[n]`, `EMPTY` where it ended or found no room.
        action: int32 `[n]`.
        result: the environment's step, `[n, ...]`.
        fresh: bool `[n]`, the child is new in this batch.
    """

    node: Array
    edge: Array
    child: Array
    action: Array
    result: Transition
    fresh: Array


def open_slots(visits: Array, rate: Any, power: Any) -> Array:
    """m(t): how many slots are open after `visits`, int32; 1e-4 forgives the rounding of the power."""
    grown = jnp.floor(rate * jnp.maximum(visits - 1, 0).astype(jnp.float32) ** power + 1e-4) + 1
    return jnp.minimum(visits, grown.astype(jnp.int32))


def slot_of_visit(draws: Array, visits: Array, rate: Any, power: Any) -> Array:
    """The slot of the visit that follows `visits`: a new one if one opens, else uniformly by `draws` in [0, 1)."""
    before = open_slots(visits, rate, power)
    opens = open_slots(visits + 1, rate, power) > before
    return jnp.where(opens, before, jnp.minimum((draws * before).astype(jnp.int32), before - 1))


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
        k_observations: of the widening |C(ba)| <= k N(ba)^alpha; positive.
        alpha_observations: in [0, 1]; k = alpha = 1 draws a new observation at every visit.
        k_actions: of the widening |C(b)| <= k N(b)^alpha; None opens all legal actions at once.
        alpha_actions: in [0, 1].
        keyed: whether nodes are those of observation keys, without widening; None: if observations are Discrete.
        discount: in (0, 1]; None takes `params.discount`.
        leaf: value of a new node: "rollout" (uniform over legal actions), "heuristic" or "zero".
        rollout_depth: steps of a rollout.
        max_nodes: capacity in nodes, of m particles each.
        max_edges: capacity in action nodes; None is `max_nodes`.
        children: `Dense(O)` or `Hashed()`; None picks by the number of observations.
    """

    num_simulations: int = 32
    iterations: int = 64
    max_depth: int = 20
    num_particles: int = 16
    exploration: Any = 20.0
    k_observations: Any = 4.0
    alpha_observations: Any = 0.5
    k_actions: Any = None
    alpha_actions: Any = 0.5
    keyed: bool | None = None
    discount: Any = None
    leaf: str = "rollout"
    rollout_depth: int = 20
    max_nodes: int = 1 << 16
    max_edges: int | None = None
    children: Dense | Hashed | None = None

    def __post_init__(self) -> None:
        for name in ("num_simulations", "iterations", "max_depth", "num_particles", "rollout_depth", "max_nodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("k_observations", "k_actions"):
            rate = getattr(self, name)
            if rate is not None and not is_traced(rate) and not rate > 0:
                raise UsageError(f"{name} must be positive, not {rate}")
        for name in ("alpha_observations", "alpha_actions"):
            power = getattr(self, name)
            if not is_traced(power) and not 0 <= power <= 1:
                raise UsageError(f"{name} lies in [0, 1], not at {power}")
        if self.leaf not in LEAVES:
            raise UsageError(f"leaf is one of {', '.join(LEAVES)}, not {self.leaf!r}")

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
        states = belief.draw(key, self.num_simulations)
        refuse_ended(env, params, states)
        widened = self.begin(env, params, belief, self.iterations)
        legal = jnp.all(legal_actions(env, params, states), axis=0)
        widened = dataclasses.replace(widened, search=dataclasses.replace(widened.search, legal=legal))
        widened = jax.tree.map(jnp.copy, widened)  # leaves that share a buffer cannot be donated

        def advance(widened: Widened) -> Widened:
            return _grown(key, self, env, params, belief, widened)

        return self.decide(repeat_until(advance, widened, self.iterations, deadline, clock))

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
        search = begin(dataclasses.replace(self, max_nodes=min(most, self.max_nodes)), env, params, iterations)
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
            path = path._replace(
                nodes=path.nodes.at[d + 1].set(jnp.where(move.edge != EMPTY, move.child, EMPTY)),
                edges=path.edges.at[d].set(move.edge),
                rewards=path.rewards.at[d].set(reward),
            )
            lanes = Lanes(
                states=states,
                node=jnp.where(move.edge != EMPTY, move.child, lanes.node),
                stuck=jnp.where(stuck, move.edge, lanes.stuck),
                live=live,
            )
            last = jax.tree.map(lambda new, old: _where(move.fresh, new, old), move, last)
            return tree, store, path, lanes, last

        nothing = _no_step(env, params, lanes)
        tree, store, path, lanes, last = jax.lax.fori_loop(
            0, depth, level, (search.tree, widened.store, path, lanes, nothing)
        )
        store, path, lanes, waiting = self._fill(node_key, env, params, belief, store, path, lanes, last, before)
        leaves = leaf_values(leaf_key, env, params, lanes.states, discount, self.leaf, self.rollout_depth, waiting)
        finite = jnp.isfinite(path.rewards)
        path = path._replace(rewards=jnp.where(finite, path.rewards, 0.0))
        tree = dataclasses.replace(
            tree,
            reward_sum=tree.reward_sum.at[path.edges].add(path.rewards, mode="drop"),
            invalid=tree.invalid + jnp.sum(~finite, dtype=jnp.int32),
        )
        tree, path = land(tree, path, lanes, leaves, depth, discount)
        return Widened(dataclasses.replace(search, tree=add_returns(tree, path, depth, discount)), store)

    def _descend(
        self, key: PRNGKey, env: Any, params: PyTree, tree: Tree, lanes: Lanes, before: Array
    ) -> tuple[Tree, Step]:
        """Every live simulation takes an action and finds its child, by key or by slot."""
        step_key, slot_key = jax.random.split(key)
        rank = jnp.where(lanes.live, ranks(jnp.where(lanes.live, lanes.node, EMPTY)), 0)
        legal = self._opened(tree, lanes.node, rank, legal_actions(env, params, lanes.states))
        action = upper_confidence(tree, lanes.node, rank, legal, self.exploration)
        earlier = tree.edges.at[lanes.node, action].get(mode="fill", fill_value=EMPTY)
        visits = tree.edge_visits.at[earlier].get(mode="fill", fill_value=0)
        tree, edge = take(tree, lanes.node, action, lanes.live)
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
        tree, child = arrive(tree, children, edge, name.astype(jnp.int32), on)
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
        chosen = _draw(key, store.log_weights.at[move.child].get(mode="clip"))
        states = jax.tree.map(lambda x: x.at[move.child, chosen].get(mode="clip"), store.states)
        reward = move.result.reward
        if not self.is_keyed(
            env, params
        ):  # that of the node, if it has one; of a new one it comes with the filter step
            reward = jnp.where(known, store.reward.at[move.child].get(mode="clip"), reward)
            reward = jnp.where(move.fresh, 0.0, reward)
        reward = jnp.where(move.edge != EMPTY, reward, 0.0)
        kept = jax.tree.map(lambda new, old: _where(move.edge != EMPTY, new, old), move.result.state, lanes.states)
        return store, jax.tree.map(lambda new, old: _where(known, new, old), states, kept), reward, known & ~over

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
            return _where(at_root, fresh, held.at[last.node].get(mode="clip"))

        states = jax.tree.map(prior, drawn, store.states)
        weights = jnp.where(at_root[:, None], 0.0, store.log_weights.at[last.node].get(mode="clip"))
        keys = jax.random.split(filter_key, count)
        filtered = functools.partial(_filtered, env=env, params=params)
        states, weights, reward = jax.vmap(filtered)(keys, states, weights, last.action, last.result)
        mine = jnp.where(_speaks(last, before), last.child, EMPTY)
        store = dataclasses.replace(
            store,
            states=jax.tree.map(lambda old, new: old.at[mine].set(new, mode="drop"), store.states, states),
            log_weights=store.log_weights.at[mine].set(weights, mode="drop"),
            obs=jax.tree.map(lambda old, new: old.at[mine].set(new, mode="drop"), store.obs, last.result.obs),
            reward=store.reward.at[mine].set(reward, mode="drop"),
            over=store.over.at[mine].set(last.result.terminated, mode="drop"),
        )
        if not self.is_keyed(env, params):
            own = store.reward.at[last.child].get(mode="clip")
            here = (path.edges == last.edge[None]) & last.fresh[None]
            path = path._replace(rewards=path.rewards + jnp.where(here, own[None], 0.0))
        chosen = _draw(leaf_key, store.log_weights.at[lanes.node].get(mode="clip"))
        inside = (lanes.node != EMPTY) & (lanes.node != 0)
        believed = jax.tree.map(lambda x: x.at[lanes.node, chosen].get(mode="clip"), store.states)
        states = jax.tree.map(lambda new, old: _where(inside, new, old), believed, lanes.states)
        over = store.over.at[lanes.node].get(mode="clip") & inside
        return store, path, lanes._replace(states=states), is_waiting(lanes) & ~over


@dataclasses.dataclass(frozen=True)
class Pomcpow(Pft):
    """Partially observable Monte-Carlo planning with observation widening: fields as `Pft`.

    A node keeps the `num_particles` newest of the weighted states that arrived; the published algorithm keeps all. A
    simulation that finds its node new in the batch stops there. Nodes of keys take the states that made their
    observation, all with the same weight. A batch costs n steps and O(n m) a level.
    """

    def _is_over(self, env: Any, params: PyTree, move: Step) -> Array:
        return move.result.terminated

    def _arrive(
        self, key: PRNGKey, env: Any, params: PyTree, store: Store, lanes: Lanes, move: Step, before: Array
    ) -> tuple[Store, PyTree, Array, Array]:
        size, moved = self.num_particles, move.edge != EMPTY
        named = jnp.where(_speaks(move, before), move.child, EMPTY)
        obs = jax.tree.map(lambda old, new: old.at[named].set(new, mode="drop"), store.obs, move.result.obs)
        seen = jax.tree.map(lambda x: x.at[move.child].get(mode="clip"), obs)
        weight = jax.vmap(lambda *row: env.log_likelihood(*row, params))(
            seen, lanes.states, move.action, move.result.state
        )
        if self.is_keyed(env, params):  # who made the observation itself must not be weighted by it again
            weight = jnp.zeros_like(weight)
        place = ranks(move.child)
        held = store.held.at[move.child].get(mode="clip")
        row = jnp.where(place < size, move.child, EMPTY)  # of one batch a node takes m states at most
        slot = (held + place) % size
        store = dataclasses.replace(
            store,
            obs=obs,
            states=jax.tree.map(
                lambda old, new: old.at[row, slot].set(new, mode="drop"), store.states, move.result.state
            ),
            log_weights=store.log_weights.at[row, slot].set(jnp.asarray(weight, jnp.float32), mode="drop"),
            held=store.held.at[row].add(1, mode="drop"),
        )
        on = (move.child != EMPTY) & ~move.fresh
        chosen = _draw(key, store.log_weights.at[move.child].get(mode="clip"))
        states = jax.tree.map(lambda x: x.at[move.child, chosen].get(mode="clip"), store.states)
        earned = jax.vmap(lambda *row: env.reward(*row, params))(lanes.states, move.action, states)
        reward = jnp.where(moved, jnp.where(on, earned, move.result.reward), 0.0).astype(jnp.float32)
        kept = jax.tree.map(lambda new, old: _where(moved, new, old), move.result.state, lanes.states)
        return store, jax.tree.map(lambda new, old: _where(on, new, old), states, kept), reward, on

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
        return store, path, lanes, is_waiting(lanes)


def _filtered(
    key: PRNGKey, states: PyTree, log_weights: Array, action: Array, result: Transition, *, env: Any, params: PyTree
) -> tuple[PyTree, Array, Array]:
    """One filter step of m particles for the observation of `result`: new ones, log weights, mean reward.

    Resampled below half of the effective sample size. Where no particle explains the observation the node is the one
    state that made it.
    """
    move_key, pick_key = jax.random.split(key)
    size = log_weights.shape[0]
    keys = jax.random.split(move_key, size)
    following = jax.vmap(lambda key, state: env.transition(key, state, action, params))(keys, states)
    rewards = jax.vmap(lambda state, after: env.reward(state, action, after, params))(states, following)
    seen = jax.vmap(lambda state, after: env.log_likelihood(result.obs, state, action, after, params))(
        states, following
    )
    ended = jax.vmap(lambda state: env.terminal(state, params))(following)
    prior = jax.nn.softmax(log_weights)
    reward = jnp.sum(jnp.where(prior > 0, prior * rewards, 0.0))
    joint = jnp.where(ended, -jnp.inf, log_weights + seen)
    total = jax.nn.logsumexp(joint)
    lost = ~jnp.isfinite(total)
    weights = jnp.where(lost, -jnp.log(size), joint - jnp.where(lost, 0.0, total))
    poor = jnp.exp(-jax.nn.logsumexp(2 * weights)) < 0.5 * size
    chosen = jnp.where(poor, systematic(pick_key, weights, size), jnp.arange(size, dtype=jnp.int32))
    kept = jax.tree.map(lambda x, one: jnp.where(lost, one, x[chosen]), following, result.state)
    return kept, jnp.where(poor, -jnp.log(size), weights).astype(jnp.float32), reward.astype(jnp.float32)


def _draw(key: PRNGKey, log_weights: Array) -> Array:
    """One index of each row `[n, m]` by its weights, int32 `[n]`; 0 where there is none."""
    top = jnp.max(log_weights, axis=1, keepdims=True)
    total = jnp.cumsum(jnp.exp(log_weights - jnp.where(jnp.isfinite(top), top, 0.0)), axis=1)
    draws = jax.random.uniform(key, (log_weights.shape[0], 1)) * total[:, -1:]
    return jnp.argmax(total > draws, axis=1).astype(jnp.int32)


def _speaks(move: Step, before: Array) -> Array:
    """Which simulation is the first at each new node, bool `[n]`; new nodes of a batch are numbered from `before`."""
    count = move.fresh.shape[0]
    lanes = jnp.arange(count, dtype=jnp.int32)
    place = jnp.where(move.fresh, move.child - before, EMPTY)
    first = jnp.full((count,), count, jnp.int32).at[place].min(lanes, mode="drop")
    return first.at[place].get(mode="fill", fill_value=-1) == lanes


def _no_step(env: Any, params: PyTree, lanes: Lanes) -> Step:
    """A move that nobody made, for the start of a loop."""
    count = lanes.node.shape[0]
    none, never = jnp.full((count,), EMPTY, jnp.int32), jnp.zeros((count,), bool)
    action = jnp.zeros((count,), jnp.int32)
    result = jax.eval_shape(
        lambda keys, states: jax.vmap(lambda key, state: step(key, env, state, action[0], params))(keys, states),
        jax.random.split(jax.random.key(0), count),
        lanes.states,
    )
    return Step(none, none, none, action, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result), never)


def _where(chosen: Array, new: Array, old: Array) -> Array:
    return jnp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - 1)), new, old)


@functools.partial(jax.jit, static_argnames=("planner", "env"), donate_argnames=("widened",))
def _grown(key: PRNGKey, planner: Pft, env: Any, params: PyTree, belief: Any, widened: Widened) -> Widened:
    return planner.grow(key, env, params, belief, widened, 1)
