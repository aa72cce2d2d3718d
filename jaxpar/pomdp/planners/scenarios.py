"""Scenarios: one key each, folded with the depth, so that whatever is done there meets the same random numbers.

States come as `[K, A, ...]`: K scenarios, A candidates of each, which share the scenario's key.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpar.env import Environment, capabilities
from jaxpar.pomdp.model import (
    Simulated,
    is_usable,
    legal_actions,
    random_legal,
    simulate_keyed,
    where_rows,
)
from jaxpar.pomdp.planners.leaves import evaluation, leaf_values
from jaxpar.types import Array, PRNGKey, PyTree, Scalar, UsageError

if TYPE_CHECKING:
    from jaxpar.pomdp.planners.despot import Despot


UPPER = ("bound", "reward", "heuristic")
"""What no policy earns more than: the environment's `upper_bound`, the largest reward at every step, or `heuristic`."""

HORIZON = ("zero", "heuristic")
"""What a state at the horizon is worth."""

DefaultPolicy = int | Callable[[PRNGKey, PyTree, PyTree], Array]
"""An action that is always taken, or `(key, state, params) -> action`."""


def scenario_keys(keys: PRNGKey, depth: Array) -> PRNGKey:
    """Keys `[K, 2]` of the scenarios at `depth` `[K]`: of the environment's step, and of the default policy."""
    return jax.vmap(lambda key, d: jax.random.split(jax.random.fold_in(key, d)))(keys, depth)


def scenario_steps(
    keys: PRNGKey, env: Environment, params: PyTree, states: PyTree, actions: Array
) -> Simulated:
    """Steps `[K, A]`, all of a row with the row's key of `keys` `[K]`."""
    return jax.vmap(
        lambda *column: simulate_keyed(keys, env, params, *column), in_axes=1, out_axes=1
    )(states, actions)


def default_actions(
    keys: PRNGKey, default: DefaultPolicy | None, env: Environment, params: PyTree, states: PyTree
) -> Array:
    """What a default policy does in `states`, int32 `[K, A]`.

    Args:
        keys: `[K]`.
        default: an action, `(key, state, params) -> action`, or None: the environment's `rollout_action`, or, without
            one, uniformly random legal actions.
        env: the environment.
        params: its parameters.
        states: `[K, A, ...]`.
    """
    policy = capabilities(env).rollout_action if default is None else default
    if policy is not None and not isinstance(policy, int):
        return jax.vmap(lambda key, row: jax.vmap(lambda state: policy(key, state, params))(row))(
            keys, states
        )
    shape = jax.tree.leaves(states)[0].shape[:2]
    if policy is not None:
        return jnp.full(shape, policy, jnp.int32)
    draws = jnp.broadcast_to(jax.vmap(jax.random.uniform)(keys)[:, None], shape)
    return random_legal(draws.ravel(), legal_actions(env, params, _flat(states))).reshape(shape)


def scenario_bounds(
    keys: PRNGKey, planner: "Despot", env: Environment, params: PyTree, states: PyTree, depth: Array, live: Array,
    discount: Scalar,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """What the default policy earns from `states` to the horizon, and an upper bound, both from discount^0.

    Costs a rollout of at most `planner.max_depth - depth` steps, until all have ended.

    Args:
        keys: `[K]`, of the scenarios.
        planner: with the horizon, the default policy and the kind of bound.
        env: the environment.
        params: its parameters.
        states: `[K, A, ...]`.
        depth: int32 `[K]`, theirs.
        live: bool `[K, A]`; the others have ended and are worth 0.
        discount: of one step.

    Returns:
        Both values, float32 `[K, A]`, the number of rewards and bounds that were not finite, and the number of states
        whose upper bound lies below what the default policy earns.
    """
    horizon = planner.max_depth

    def advance(carry: tuple) -> tuple:
        d, states, alive, total, weight, wrong = carry
        pairs = scenario_keys(keys, d)
        actions = default_actions(pairs[:, 1], planner.default, env, params, states)
        result = scenario_steps(pairs[:, 0], env, params, states, actions)
        on = alive & (d < horizon)[:, None]
        states = jax.tree.map(lambda new, old: where_rows(on, new, old), result.state, states)
        total = total + jnp.where(on, weight[:, None] * result.reward, 0.0)
        wrong = wrong + jnp.sum(on & result.invalid, dtype=jnp.int32)
        weight = jnp.where(d < horizon, weight * discount, weight)
        return (
            jnp.minimum(d + 1, horizon),
            states,
            alive & ~(on & result.terminated),
            total,
            weight,
            wrong,
        )

    def going(carry: tuple) -> Array:
        return jnp.any(carry[2] & (carry[0] < horizon)[:, None])

    first = (
        depth,
        states,
        live,
        jnp.zeros(live.shape),
        jnp.ones(depth.shape),
        jnp.zeros((), jnp.int32),
    )
    _, ends, alive, total, weight, wrong = jax.lax.while_loop(going, advance, first)
    evaluate, none = evaluation(planner.leaf, 1), jnp.full(alive.size, -1, jnp.int32)
    beyond, missing = leaf_values(
        keys[0], evaluate, env, params, _flat(ends), none, alive.ravel(), discount
    )
    default = total + weight[:, None] * beyond.reshape(live.shape)
    upper = _upper_values(planner, env, params, states, horizon - depth, discount)
    finite = is_usable(upper)
    left = live & (depth < horizon)[:, None]
    invalid = wrong + jnp.sum(missing, dtype=jnp.int32) + jnp.sum(left & ~finite, dtype=jnp.int32)
    upper = jnp.where(left & finite, upper, default)
    short = left & (upper < default - 1e-4 * (1 + jnp.abs(default)))  # by more than rounding
    return default, upper, invalid, jnp.sum(short, dtype=jnp.int32)


def _upper_values(
    planner: "Despot",
    env: Environment,
    params: PyTree,
    states: PyTree,
    left: Array,
    discount: Scalar,
) -> Array:
    """Upper bounds of what states are worth with `left` steps to go, float32 `[K, A]`."""
    able, kind = capabilities(env), planner.upper
    if kind is None:
        kind = "bound" if able.upper_bound is not None else "reward"
    if kind == "reward":
        if planner.max_reward is None:
            raise UsageError(
                f'{env.name} has no upper_bound(state, params); give the planner max_reward=..., or upper="heuristic"'
            )
        gamma = jnp.asarray(discount, jnp.float32)
        steps = (
            jnp.full(left.shape, jnp.inf)
            if planner.leaf == "heuristic"
            else left.astype(jnp.float32)
        )
        # A geometric sum, whose quotient is 0 / 0 without a discount: there it is the number of steps.
        sums = jnp.where(
            gamma < 1, (1 - gamma**steps) / jnp.where(gamma < 1, 1 - gamma, 1.0), steps
        )
        return jnp.broadcast_to(
            (planner.max_reward * sums)[:, None], jax.tree.leaves(states)[0].shape[:2]
        )
    part, bound = (
        ("upper_bound", able.upper_bound) if kind == "bound" else ("heuristic", able.heuristic)
    )
    if bound is None:
        raise UsageError(
            f'{env.name} has no {part}(state, params); give the planner max_reward=..., upper="reward"'
        )
    return jax.vmap(jax.vmap(lambda state: jnp.asarray(bound(state, params), jnp.float32)))(states)


def _flat(states: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
