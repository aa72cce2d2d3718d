"""Planning against the clock, on the host: batch after batch until a deadline, and what cannot be planned refused."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.pomdp.model import discount_of, legal_actions
from jaxpar.pomdp.search import PlanInfo, Search, begin, grow
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["decided", "improve_until", "nothing_to_plan", "plan_until", "refuse", "repeat_until"]


@functools.partial(jax.jit, static_argnames=("planner", "env"))
def _begun(key: PRNGKey, planner: Any, env: Any, params: PyTree, belief: Any) -> tuple[Search, Array]:
    """The empty search, and what `refuse` takes: one launch, where op by op takes 40 ms on a GPU."""
    states = belief.draw(key, planner.num_simulations)
    search = begin(planner, env, params, belief, planner.iterations)
    legal = jnp.all(legal_actions(env, params, states), axis=0)
    return dataclasses.replace(search, legal=legal), nothing_to_plan(env, params, belief, states)


@functools.partial(jax.jit, static_argnames=("planner",))
def decided(planner: Any, search: Any) -> tuple[Array, Any]:
    """`planner.decide` of a search, compiled."""
    return planner.decide(search)


@functools.partial(jax.jit, static_argnames=("planner", "env", "iterations"), donate_argnames=("search",))
def _grown(
    key: PRNGKey, planner: Any, env: Any, params: PyTree, belief: Any, search: Search, iterations: int
) -> Search:
    return grow(planner, key, env, params, belief, search, iterations)


def improve_until(
    key: PRNGKey,
    planner: Any,
    env: Any,
    params: PyTree,
    belief: Any,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Runs batches until the next one would probably end after `deadline`, at most `planner.iterations`.

    Args:
        key: consumed.
        planner: its `iterations` bound the work and, with the capacities, the memory.
        env: hashable.
        params: its parameters.
        belief: with `draw`.
        deadline: when to be done, on `clock`, in seconds.
        clock: for tests.

    Raises:
        UsageError: every state drawn from the belief has ended, so that there is nothing to plan.
    """
    discount_of(params, planner.discount)  # which cannot refuse what is traced
    search, nothing = _begun(key, planner, env, params, belief)
    refuse(nothing)

    def advance(search: Search) -> Search:
        return _grown(key, planner, env, params, belief, search, 1)

    return repeat_until(advance, search, planner.iterations, deadline, clock)


def nothing_to_plan(env: Any, params: PyTree, belief: Any, states: PyTree) -> Array:
    """Whether all of `states` `[n, ...]`, drawn from `belief`, have ended, and whether it has no weight: bool `[2]`."""
    ended = jnp.all(jax.vmap(lambda state: env.terminal(state, params))(states))
    return jnp.stack([ended, jnp.asarray(getattr(belief, "weightless", False))])


def refuse(nothing: Array) -> None:
    """`UsageError` where there is nothing to plan, which a compiled draw cannot say."""
    ended, weightless = jax.device_get(nothing)
    if weightless:
        raise UsageError("the belief has no particle left with any weight; give it a rejuvenation hook")
    if ended:
        raise UsageError("every state of the belief is terminal: the episode has ended and there is nothing to plan")


def repeat_until(
    advance: Callable[[Any], Any],
    state: Any,
    most: int,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
    done: Callable[[Any], bool] = lambda state: False,
) -> Any:
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
    planner: Any,
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
    return decided(planner, improve_until(key, planner, env, params, belief, deadline, clock))
