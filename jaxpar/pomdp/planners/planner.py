"""Planners, the report of a plan, and `plan` and `search` of all that grow something.

`Planner` is all that `simulate` needs; `AnytimePlanner` can be stopped by the clock; a `SearchPlanner` grows a tree,
and several of its trees can be merged at their roots (`RootParallel`).

What grows is a `Search`: it starts, is grown by batches, and decides. `plan` and `search` here and `plan_until` of
`clock` are functions of its parts, written once. Planners have them as methods, by `plan = planner.plan` in the body of
the class, which makes the planner the first argument.
"""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Environment
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import Model, make_model
from jaxpar.pomdp.planners.simulations import SearchState
from jaxpar.pomdp.planners.tree import EMPTY, Children
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

__all__ = [
    "AnytimePlanner",
    "PlanInfo",
    "Planner",
    "Search",
    "SearchPlanner",
    "plan",
    "search",
]


@flax.struct.dataclass
class PlanInfo:
    """Report of a plan.

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
            had no weight anywhere, so that its samples mean nothing; 0 unless a mask or a belief is broken.
        ended: float32, the share of root samples that were terminal states: 1 means that there was nothing to plan.
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


class Planner(Protocol):
    """Gives an action for a belief. The object is the configuration: frozen, hashable, without arrays."""

    @property
    def discount(self) -> Scalar | None:
        """Of one step, in (0, 1]; None takes `params.discount`."""
        ...

    def plan(
        self, key: PRNGKey, env: Environment, params: PyTree, belief: Belief
    ) -> tuple[Array, PlanInfo]:
        """An action for `belief`, int32, with its report; pure, with a fixed budget, for jit, vmap and scan.

        Args:
            key: consumed.
            env: an environment with one Discrete action.
            params: its parameters.
            belief: what is known of the state.
        """
        ...


class AnytimePlanner(Planner, Protocol):
    """A planner that works in batches, and stops after as many as there is time for."""

    @property
    def iterations(self) -> int:
        """Batches of a plan, at most."""
        ...

    def plan_until(
        self,
        key: PRNGKey,
        env: Environment,
        params: PyTree,
        belief: Belief,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[Array, PlanInfo]:
        """As `plan`, with as many of the batches as end before `deadline` on `clock` (s); runs on the host.

        A deadline that is too short for one batch still gives a legal action, with `iterations` 0.

        Raises:
            UsageError: every state drawn from the belief has ended.
        """
        ...


class Growing(Protocol):
    """State of a search."""

    @property
    def iteration(self) -> Array:
        """Number of batches so far, int32."""
        ...

    @property
    def is_finished(self) -> Array | bool:
        """True where further batches would change nothing."""
        ...


State = TypeVar("State", bound=Growing)


class Search(Protocol[State]):
    """The parts of a plan: `TreeSearch`, `ParticleTreeSearch`, `Despot`, `RootParallel`."""

    @property
    def iterations(self) -> int:
        """Batches, at most."""
        ...

    def init_search(self, key: PRNGKey, model: Model, belief: Belief) -> State:
        """A root, with room for `iterations` batches."""
        ...

    def grow(
        self, key: PRNGKey, model: Model, belief: Belief, search: State, iterations: int
    ) -> State:
        """`iterations` batches more; pure. The key of a batch is folded with its number."""
        ...

    def decide(self, search: State) -> tuple[Array, PlanInfo]:
        """The action, int32, and the report."""
        ...

    def inspect_root(
        self, key: PRNGKey, model: Model, belief: Belief, search: State
    ) -> tuple[State, Array]:
        """The root that a clock starts from, and why there is nothing to plan, bool `[2]`: ended, without weight."""
        ...


class RankedSearch(Search[State], Protocol[State]):
    """A search whose reports can be merged with those of others on the same belief."""

    @property
    def ranked_by(self) -> str:
        """Column of a report that orders actions: "values" or "preferences"."""
        ...


class Searcher(Protocol[State]):
    """A planner whose plan is a search."""

    @property
    def discount(self) -> Scalar | None:
        """Of one step, in (0, 1]; None takes `params.discount`."""
        ...

    def tree_search(self) -> Search[State]:
        """The search with its parts and sizes."""
        ...


@runtime_checkable
class SearchPlanner(AnytimePlanner, Protocol[State]):
    """A planner whose plan is a search of one tree."""

    @property
    def num_simulations(self) -> int:
        """Of a batch."""
        ...

    @property
    def children(self) -> Children | None:
        """Where the nodes below an edge are looked up; None picks by the number of observations."""
        ...

    def tree_search(self) -> RankedSearch[State]:
        """The search with its parts and sizes."""
        ...


class Batched(Protocol[State]):
    """A search that is grown by one batch at a time."""

    def batch(self, key: PRNGKey, model: Model, belief: Belief, search: State) -> State:
        """One batch more; consumes `key`."""
        ...


def grow_by_batches(
    parts: Batched[State],
    key: PRNGKey,
    model: Model,
    belief: Belief,
    search: State,
    iterations: int,
) -> State:
    """`iterations` batches more, as `Search.grow`; pure, for jit, vmap and scan."""

    def batch(_: Array, search: State) -> State:
        return parts.batch(jax.random.fold_in(key, search.iteration), model, belief, search)

    return jax.lax.fori_loop(0, iterations, batch, search)


def search(
    planner: Searcher[State], key: PRNGKey, env: Environment, params: PyTree, belief: Belief
) -> State:
    """The search that `plan` decides by, with the whole tree; consumes `key`."""
    model = make_model(env, params, planner.discount)
    parts = planner.tree_search()
    first = parts.init_search(key, model, belief)
    return parts.grow(key, model, belief, first, parts.iterations)


def plan(
    planner: Searcher, key: PRNGKey, env: Environment, params: PyTree, belief: Belief
) -> tuple[Array, PlanInfo]:
    """The action and the report of a planner's search, as `Planner.plan`; consumes `key`."""
    return planner.tree_search().decide(search(planner, key, env, params, belief))


def root_value(value: Array, tried: Array, ended: Array) -> Array:
    """The value of a root where anything was `tried`; else 0 where all had `ended`, and -inf."""
    return jnp.where(tried, value, jnp.where(ended, 0.0, -jnp.inf))


def report(
    search: SearchState,
    value: Array,
    preferences: Array,
    policy: Array,
    *,
    order: Array | None = None,
) -> tuple[Array, PlanInfo]:
    """The action of the highest `order` (`preferences`, if None) that is legal and was tried, and the report.

    Where no legal action was tried the lowest legal one is taken, and where the states drawn agree on none, action 0;
    `visits`, `iterations`, `ended` and `legal` show which it was.
    """
    tree = search.tree
    row = tree.edges[0]
    tried = row != EMPTY
    order = preferences if order is None else order
    best = jnp.where(tried & search.legal, order, -jnp.inf)
    action = jnp.where(
        jnp.any(tried & search.legal), jnp.argmax(best), jnp.argmax(search.legal)
    ).astype(jnp.int32)
    return action, PlanInfo(
        value=root_value(value, jnp.any(tried), search.ended >= search.drawn),
        values=jnp.where(tried, tree.value.at[row].get(mode="clip"), -jnp.inf),
        preferences=preferences,
        policy=policy,
        # The inner `where` keeps log away from 0, whose NaN gradient would pass through the outer one.
        entropy=-jnp.sum(
            jnp.where(policy > 0, policy * jnp.log(jnp.where(policy > 0, policy, 1.0)), 0.0)
        ),
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
