"""Planning against the clock, on the host: batch after batch until a deadline, and what cannot be planned refused."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpar.env import Environment
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import discount_of, legal_actions
from jaxpar.pomdp.planners.planner import PlanInfo, SearchPlanner
from jaxpar.pomdp.planners.simulations import State
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["plan_until"]

Carry = TypeVar("Carry")


@functools.partial(jax.jit, static_argnames=("planner", "env"))
def _begun(
    key: PRNGKey, planner: SearchPlanner[State], env: Environment, params: PyTree, belief: Belief
) -> tuple[State, Array]:
    """The empty search, and what `refuse_empty` takes: one launch, where op by op takes 40 ms on a GPU."""
    states = belief.sample(key, planner.num_simulations)
    search = planner.tree_search().init_search(env, params, belief)
    legal = jnp.all(legal_actions(env, params, states), axis=0)
    return dataclasses.replace(search, legal=legal), nothing_to_plan(env, params, belief, states)


@functools.partial(jax.jit, static_argnames=("planner", "env"), donate_argnames=("search",))
def _grown(
    key: PRNGKey,
    planner: SearchPlanner[State],
    env: Environment,
    params: PyTree,
    belief: Belief,
    search: State,
) -> State:
    """One batch more, in place: the search is donated, so that no batch copies its tree."""
    return planner.tree_search().grow(key, env, params, belief, search, 1)


@functools.partial(jax.jit, static_argnames=("planner",))
def _decided(planner: SearchPlanner[State], search: State) -> tuple[Array, PlanInfo]:
    return planner.tree_search().decide(search)


def nothing_to_plan(env: Environment, params: PyTree, belief: Belief, states: PyTree) -> Array:
    """Whether all of `states` `[n, ...]`, drawn from `belief`, have ended, and whether it has no weight: bool `[2]`."""
    ended = jnp.all(jax.vmap(lambda state: env.terminal(state, params))(states))
    return jnp.stack([ended, jnp.asarray(belief.weightless)])


def refuse_empty(nothing: Array) -> None:
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
    key: PRNGKey,
    planner: SearchPlanner,
    env: Environment,
    params: PyTree,
    belief: Belief,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Array, PlanInfo]:
    """Runs batches until the next one would probably end after `deadline`, at most `planner.iterations`, and decides.

    Args:
        key: consumed.
        planner: its `iterations` bound the work and, with the capacities, the memory.
        env: hashable.
        params: its parameters.
        belief: what is known of the state.
        deadline: when to be done, on `clock`, in seconds.
        clock: for tests.

    Raises:
        UsageError: every state drawn from the belief has ended, so that there is nothing to plan.
    """
    discount_of(params, planner.discount)  # here, since a discount that is traced cannot be refused
    search, nothing = _begun(key, planner, env, params, belief)
    refuse_empty(nothing)
    search = repeat_until(
        lambda search: _grown(key, planner, env, params, belief, search),
        search,
        planner.iterations,
        deadline,
        clock,
    )
    return _decided(planner, search)
