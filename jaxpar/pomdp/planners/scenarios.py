"""Scenarios: one key each, folded with the depth, so that whatever is done there meets the same random numbers.

States come as `[K, A, ...]`: K scenarios, A candidates of each, which share the scenario's key.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp

from jaxpar.env import capabilities
from jaxpar.pomdp.model import (
    Model,
    Simulated,
    is_usable,
    legal_actions,
    random_legal,
    simulate_keyed,
    where_rows,
)
from jaxpar.pomdp.planners.leaves import evaluation, leaf_values
from jaxpar.pomdp.planners.tree import EMPTY
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

if TYPE_CHECKING:
    from jaxpar.pomdp.planners.despot import Despot


UPPER = ("bound", "reward", "heuristic")
"""What no policy earns more than: the environment's `upper_bound`, the largest reward at every step, or `heuristic`."""

HORIZON = ("zero", "heuristic")
"""What a state at the horizon is worth."""

DefaultPolicy = int | Callable[[PRNGKey, PyTree, PyTree], Array]
"""An action that is always taken, or `(key, state, params) -> action`."""


def check_default(default: object, num_actions: int | None = None) -> None:
    """Rejects what is no default policy, or an action beyond their number where that is known.

    Raises:
        UsageError: it is neither None, an action nor a function.
    """
    if default is None or (callable(default) and not isinstance(default, type)):
        return
    most = num_actions or EMPTY
    is_whole = isinstance(default, int) and not isinstance(default, bool)
    if is_whole and 0 <= cast(int, default) < most:
        return
    actions = "an action from 0"
    if num_actions is not None:
        actions = f"an action, 0 to {num_actions - 1}"
    raise UsageError(
        f"default={default!r}: no default policy; expected {actions}, a function "
        "(key, state, params) -> action, or None."
    )


def scenario_keys(keys: PRNGKey, depth: Array) -> PRNGKey:
    """Keys `[K, 2]` of the scenarios at `depth` `[K]`: of the environment's step, and of the default policy."""
    return jax.vmap(lambda key, d: jax.random.split(jax.random.fold_in(key, d)))(keys, depth)


def scenario_steps(keys: PRNGKey, model: Model, states: PyTree, actions: Array) -> Simulated:
    """Steps `[K, A]`, all of a row with the row's key of `keys` `[K]`."""
    return jax.vmap(lambda *column: simulate_keyed(keys, model, *column), in_axes=1, out_axes=1)(
        states, actions
    )


def default_actions(
    keys: PRNGKey, default: DefaultPolicy | None, model: Model, states: PyTree
) -> Array:
    """Actions of a default policy in `states`, int32 `[K, A]`.

    Args:
        keys: `[K]`.
        default: an action, `(key, state, params) -> action`, or None: the environment's `rollout_action`, or, without
            one, uniformly random legal actions.
        model: environment, parameters and discount.
        states: `[K, A, ...]`.
    """
    policy = capabilities(model.env).rollout_action if default is None else default
    if policy is not None and not isinstance(policy, int):
        return jax.vmap(
            lambda key, row: jax.vmap(lambda state: policy(key, state, model.params))(row)
        )(keys, states)

    shape = jax.tree.leaves(states)[0].shape[:2]
    if policy is not None:
        return jnp.full(shape, policy, jnp.int32)
    draws = jnp.broadcast_to(jax.vmap(jax.random.uniform)(keys)[:, None], shape)
    return random_legal(draws.ravel(), legal_actions(model, _flat(states))).reshape(shape)


def scenario_bounds(
    keys: PRNGKey, planner: "Despot", model: Model, states: PyTree, depth: Array, live: Array
) -> tuple[Array, Array, Array, Array]:
    """Return of the default policy from `states` to the horizon, and an upper bound, both from discount^0.

    Costs a rollout of at most `planner.max_depth - depth` steps, until all have ended.

    Args:
        keys: `[K]`, of the scenarios.
        planner: with the horizon, the default policy and the kind of bound.
        model: environment, parameters and discount.
        states: `[K, A, ...]`.
        depth: int32 `[K]`, theirs.
        live: bool `[K, A]`; the others have ended and are worth 0.

    Returns:
        Both values, float32 `[K, A]`, the number of rewards and bounds that were not finite, and the number of states
        whose upper bound lies below what the default policy earns.
    """
    horizon = planner.max_depth

    def advance(carry: tuple) -> tuple:
        d, states, alive, total, weight, wrong = carry
        pairs = scenario_keys(keys, d)
        actions = default_actions(pairs[:, 1], planner.default, model, states)
        result = scenario_steps(pairs[:, 0], model, states, actions)
        on = alive & (d < horizon)[:, None]
        states = jax.tree.map(lambda new, old: where_rows(on, new, old), result.state, states)
        total = total + jnp.where(on, weight[:, None] * result.reward, 0.0)
        wrong = wrong + jnp.sum(on & result.invalid, dtype=jnp.int32)
        weight = jnp.where(d < horizon, weight * model.discount, weight)
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
    evaluate = evaluation(planner.leaf, 1)
    none = jnp.full(alive.size, -1, jnp.int32)
    beyond, missing = leaf_values(keys[0], evaluate, model, _flat(ends), none, alive.ravel())
    default = total + weight[:, None] * beyond.reshape(live.shape)
    upper = _upper_values(planner, model, states, horizon - depth)
    finite = is_usable(upper)
    left = live & (depth < horizon)[:, None]
    invalid = wrong + jnp.sum(missing, dtype=jnp.int32) + jnp.sum(left & ~finite, dtype=jnp.int32)
    upper = jnp.where(left & finite, upper, default)
    short = left & (upper < default - 1e-4 * (1 + jnp.abs(default)))  # by more than rounding
    return default, upper, invalid, jnp.sum(short, dtype=jnp.int32)


def _upper_values(planner: "Despot", model: Model, states: PyTree, left: Array) -> Array:
    """Upper bounds of what states are worth with `left` steps to go, float32 `[K, A]`."""
    able = capabilities(model.env)
    kind = planner.upper
    if kind is None:
        kind = "bound" if able.upper_bound is not None else "reward"

    if kind == "reward":
        if planner.max_reward is None:
            raise UsageError(
                f"{model.env.name} has no upper_bound(state, params); give the planner max_reward=..., "
                'or upper="heuristic"'
            )
        gamma = jnp.asarray(model.discount, jnp.float32)
        if planner.leaf == "heuristic":
            steps = jnp.full(left.shape, jnp.inf)
        else:
            steps = left.astype(jnp.float32)
        # A geometric sum, whose quotient is 0 / 0 without a discount: there it is the number of steps.
        sums = jnp.where(
            gamma < 1, (1 - gamma**steps) / jnp.where(gamma < 1, 1 - gamma, 1.0), steps
        )
        shape = jax.tree.leaves(states)[0].shape[:2]
        return jnp.broadcast_to((planner.max_reward * sums)[:, None], shape)

    part = "upper_bound" if kind == "bound" else "heuristic"
    bound = able.upper_bound if kind == "bound" else able.heuristic
    if bound is None:
        raise UsageError(
            f'{model.env.name} has no {part}(state, params); give the planner max_reward=..., upper="reward"'
        )

    def value(state: PyTree) -> Array:
        return jnp.asarray(bound(state, model.params), jnp.float32)

    return jax.vmap(jax.vmap(value))(states)


def _flat(states: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
