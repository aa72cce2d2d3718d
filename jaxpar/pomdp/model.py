"""What planners ask of an environment: sizes, discount, legal actions, keys of observations, values of leaves."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpar.env import Discrete, Transition, step
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = [
    "LARGEST",
    "Simulated",
    "discount_of",
    "is_traced",
    "is_usable",
    "leaf_values",
    "legal_actions",
    "num_actions",
    "num_observations",
    "random_legal",
    "rollout_values",
    "simulate_keyed",
    "simulate_steps",
]


LARGEST = 1e24
"""Of rewards and leaf values: the sums of 2^31 of them over any horizon, and their differences, are still float32."""


def is_usable(values: Array) -> Array:
    """Whether rewards or values can be added up: finite, and at most `LARGEST` in size; bool."""
    return jnp.abs(values) <= LARGEST  # false of NaN


class Simulated(NamedTuple):
    """One step of n simulations.

    Attributes:
        state: next states `[n, ...]`.
        obs_key: int32 `[n]`.
        reward: float32 `[n]`, 0 where it was not finite, or larger than `LARGEST`.
        terminated: bool `[n]`.
        invalid: bool `[n]`, which those were.
    """

    state: PyTree
    obs_key: Array
    reward: Array
    terminated: Array
    invalid: Array


def is_traced(tree: PyTree) -> bool:
    """Whether values cannot be looked at here, since a transformation is tracing them."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def num_actions(env: Any, params: PyTree) -> int:
    """The number of actions A; `UsageError` where they are not the integers `0 .. A - 1`."""
    space = env.action_space(params)
    if not isinstance(space, Discrete) or space.shape:
        raise UsageError(f"planners need a single Discrete action, and {env.name} has {space}")
    return space.n


def num_observations(env: Any, params: PyTree) -> int | None:
    """The number of different observation keys where they are known to be `0 .. O - 1`, else None."""
    space = env.observation_space(params)
    return space.n if isinstance(space, Discrete) and not space.shape else None


def discount_of(params: PyTree, discount: Any = None) -> Any:
    """`discount`, or else `params.discount`; `UsageError` outside (0, 1] where its value can be seen."""
    discount = getattr(params, "discount", None) if discount is None else discount
    if discount is None:
        raise UsageError("the environment's parameters have no discount; give the planner one, as discount=0.95")
    if not is_traced(discount) and not (np.all(np.asarray(discount) > 0) and np.all(np.asarray(discount) <= 1)):
        raise UsageError(f"a discount lies in (0, 1], not at {discount}")
    return discount


def legal_actions(env: Any, params: PyTree, states: PyTree) -> Array:
    """Which actions are legal in each of n states, bool `[n, A]`."""
    count = jax.tree.leaves(states)[0].shape[0]
    if hasattr(env, "action_mask"):
        return jax.vmap(lambda state: env.action_mask(state, params))(states)
    return jnp.ones((count, num_actions(env, params)), bool)


def _step_keyed(key: PRNGKey, env: Any, params: PyTree, state: PyTree, action: Array) -> tuple[Transition, Array]:
    following = step(key, env, state, action, params)
    name = env.obs_key(following.obs, params) if hasattr(env, "obs_key") else following.obs
    if jnp.shape(name) or not jnp.issubdtype(jnp.asarray(name).dtype, jnp.integer):
        raise UsageError(f"{env.name} needs obs_key(obs, params) -> int32: its observations are not integers")
    return following, jnp.asarray(name, jnp.int32)


def simulate_keyed(keys: PRNGKey, env: Any, params: PyTree, states: PyTree, actions: Array) -> Simulated:
    """One step of n simulations, each with its own of `keys` `[n]`, which it consumes."""
    following, names = jax.vmap(lambda *row: _step_keyed(row[0], env, params, *row[1:]))(keys, states, actions)
    usable = is_usable(following.reward)
    reward = jnp.where(usable, following.reward, 0.0)
    return Simulated(following.state, names, reward, following.terminated, ~usable)


def simulate_steps(key: PRNGKey, env: Any, params: PyTree, states: PyTree, actions: Array) -> Simulated:
    """One step of n simulations, each with a key of its own; consumes `key`."""
    return simulate_keyed(jax.random.split(key, actions.shape[0]), env, params, states, actions)


def random_legal(draws: Array, mask: Array) -> Array:
    """Actions, int32 `[n]`, uniform over the legal ones of `mask` `[n, A]` by `draws` `[n]` in [0, 1); 0 where none."""
    order = jnp.cumsum(mask, axis=1)
    return jnp.argmax(mask & (order > draws[:, None] * order[:, -1:]), axis=1).astype(jnp.int32)


def rollout_values(
    key: PRNGKey, env: Any, params: PyTree, states: PyTree, discount: Any, length: int, live: Array
) -> Array:
    """Discounted returns of `length` steps from each state, float32 `[n]`; consumes `key`.

    The environment's `rollout_action` acts, or, without one, chance, uniformly over legal actions. Lanes that are not
    `live` (bool `[n]`) return 0.
    """

    def advance(carry: tuple, key: PRNGKey) -> tuple:
        states, live, total, weight = carry
        pick, move = jax.random.split(key)
        if hasattr(env, "rollout_action"):
            action = jax.vmap(lambda *row: env.rollout_action(*row, params))(jax.random.split(pick, live.size), states)
        else:
            action = random_legal(jax.random.uniform(pick, live.shape), legal_actions(env, params, states))
        result = simulate_steps(move, env, params, states, action)
        total = total + jnp.where(live, weight * result.reward, 0.0)
        return (result.state, live & ~result.terminated, total, weight * discount), None

    first = (states, live, jnp.zeros(live.shape, jnp.float32), jnp.ones((), jnp.float32))
    return jax.lax.scan(advance, first, jax.random.split(key, length))[0][2]


def leaf_values(
    key: PRNGKey,
    env: Any,
    params: PyTree,
    states: PyTree,
    discount: Any,
    leaf: str,
    length: int,
    live: Array,
    actions: Array | None = None,
) -> tuple[Array, Array]:
    """Guesses of the values of n states, float32 `[n]`, and which were not finite or too large (those count as 0).

    Args:
        key: consumed.
        env: the environment.
        params: its parameters.
        states: `[n, ...]`.
        discount: of one step.
        leaf: "heuristic", "rollout" or "zero".
        length: steps of a rollout.
        live: bool `[n]`; the value of the others, which have ended, is 0.
        actions: int32 `[n]`, what led to each state, for a heuristic with a parameter `action`; None or -1: nothing.
    """
    if leaf == "heuristic":
        if not hasattr(env, "heuristic"):
            raise UsageError(f'{env.name} has no heuristic(state, params); use leaf="rollout" or leaf="zero"')
        if "action" in inspect.signature(env.heuristic).parameters:
            actions = jnp.full(live.shape, -1, jnp.int32) if actions is None else actions
            values = jax.vmap(lambda state, action: env.heuristic(state, params, action))(states, actions)
        else:
            values = jax.vmap(lambda state: env.heuristic(state, params))(states)
    elif leaf == "rollout":
        values = rollout_values(key, env, params, states, discount, length, live)
    else:
        values = jnp.zeros(live.shape)
    values = jnp.asarray(values, jnp.float32)
    usable = is_usable(values)
    return jnp.where(live & usable, values, 0.0), live & ~usable
