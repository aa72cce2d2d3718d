"""Planning against the clock, on the host: batch after batch until a deadline; what cannot be planned is rejected."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.env import Environment
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import Model, make_model, root_actions
from jaxpar.pomdp.planners.planner import PlanInfo, Searcher, State
from jaxpar.pomdp.planners.simulations import State as TreeState
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["plan_until"]

Carry = TypeVar("Carry")


class Simulating(Protocol):
    """A search by simulations."""

    @property
    def num_simulations(self) -> int:
        """Of a batch."""
        ...


def inspect_root(
    parts: Simulating, key: PRNGKey, model: Model, belief: Belief, search: TreeState
) -> tuple[TreeState, Array]:
    """The search with the actions that a first draw of states allows, as `Search.inspect_root`; consumes `key`."""
    states = belief.sample(key, parts.num_simulations)
    legal, ended = root_actions(model, states)
    nothing = jnp.stack([jnp.all(ended), jnp.asarray(belief.weightless)])
    return dataclasses.replace(search, legal=legal), nothing


def reject_empty(nothing: Array) -> None:
    """`UsageError` where there is nothing to plan, which a compiled draw cannot say."""
    ended, weightless = jax.device_get(nothing)
    if weightless:
        raise UsageError(
            "the belief has no particle left with any weight; give it a rejuvenation hook"
        )
    if ended:
        raise UsageError(
            "every state of the belief is terminal: the episode has ended and there is nothing to plan"
        )


def repeat_until(
    advance: Callable[[Carry], Carry],
    state: Carry,
    most: int,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    done: Callable[[Carry], bool] = lambda state: False,
) -> Carry:
    """`advance` repeated, at most `most` times, until `done`, or the next would probably end after `deadline`."""
    longest = 0.0
    for _ in range(most):
        began = clock()
        if began + longest >= deadline or done(state):
            break
        state = jax.block_until_ready(advance(state))
        longest = max(longest, clock() - began)
    return state


def plan_until(
    planner: Searcher,
    key: PRNGKey,
    env: Environment,
    params: PyTree,
    belief: Belief,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Array, PlanInfo]:
    """Runs batches until the next one would probably end after `deadline`, at most `planner.iterations`, and decides.

    Stops before, too, where further batches would change nothing. A deadline that is too short for one batch still
    gives a legal action, with `iterations` 0.

    Args:
        planner: its `iterations` bound the work and, with the capacities, the memory.
        key: consumed.
        env: hashable.
        params: its parameters.
        belief: what is known of the state.
        deadline: when to be done, on `clock`, in seconds.
        clock: for tests.

    Raises:
        UsageError: every state drawn from the belief has ended, so that there is nothing to plan.
    """
    # Here, since a discount that is traced cannot be rejected.
    model = make_model(env, params, planner.discount)
    search, nothing = _start(key, planner, model, belief)
    reject_empty(nothing)

    search = repeat_until(
        lambda search: _advance(key, planner, model, belief, search),
        search,
        planner.tree_search().iterations,
        deadline,
        clock,
        lambda search: bool(search.is_finished),
    )
    return _decide(planner, search)


@functools.partial(jax.jit, static_argnames=("planner",))
def _start(
    key: PRNGKey, planner: Searcher[State], model: Model, belief: Belief
) -> tuple[State, Array]:
    """The first search and what `reject_empty` takes: one launch, where op by op takes 40 ms on a GPU."""
    parts = planner.tree_search()
    return parts.inspect_root(key, model, belief, parts.init_search(key, model, belief))


@functools.partial(jax.jit, static_argnames=("planner",), donate_argnames=("search",))
def _advance(
    key: PRNGKey, planner: Searcher[State], model: Model, belief: Belief, search: State
) -> State:
    """One batch more, in place: the search is donated, so that no batch copies its tree."""
    return planner.tree_search().grow(key, model, belief, search, 1)


@functools.partial(jax.jit, static_argnames=("planner",))
def _decide(planner: Searcher[State], search: State) -> tuple[Array, PlanInfo]:
    return planner.tree_search().decide(search)
