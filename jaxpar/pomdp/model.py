"""What planners ask of an environment: sizes, discount, legal actions, keys of observations, rollouts."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import (
    Discrete,
    Environment,
    PartiallyObserved,
    Transition,
    capabilities,
    own_discount,
    step,
)
from jaxpar.types import Array, PRNGKey, PyTree, Scalar, UsageError, concrete_values

__all__ = ["discount_of"]

LARGEST = 1e24
"""Size of rewards and leaf values above which they are not used: the sums of 2^31 smaller ones over any horizon, and
their differences, are still float32."""


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


def num_actions(env: Environment, params: PyTree) -> int:
    """The number of actions A; `UsageError` where they are not the integers `0 .. A - 1`."""
    space = env.action_space(params)
    if not isinstance(space, Discrete) or space.shape:
        raise UsageError(f"planners need a single Discrete action, and {env.name} has {space}")
    return space.n


def num_observations(env: Environment, params: PyTree) -> int | None:
    """The number of different observation keys where they are known to be `0 .. O - 1`, else None."""
    space = env.observation_space(params)
    return space.n if isinstance(space, Discrete) and not space.shape else None


def discount_of(params: PyTree, discount: Scalar | None = None) -> Scalar:
    """`discount`, or else `params.discount`; `UsageError` outside (0, 1] where its value can be seen."""
    discount = own_discount(params) if discount is None else discount
    if discount is None:
        raise UsageError(
            "the environment's parameters have no discount; give the planner one, as discount=0.95"
        )
    known = concrete_values(discount)
    if known is not None and not np.all((known[0] > 0) & (known[0] <= 1)):
        raise UsageError(f"a discount lies in (0, 1], not at {known[0]}")
    return discount


def legal_actions(env: Environment, params: PyTree, states: PyTree) -> Array:
    """Which actions are legal in each of n states, bool `[n, A]`."""
    count, mask = jax.tree.leaves(states)[0].shape[0], capabilities(env).action_mask
    if mask is not None:
        return jax.vmap(lambda state: mask(state, params))(states)
    return jnp.ones((count, num_actions(env, params)), bool)


def _step_keyed(
    key: PRNGKey, env: Environment, params: PyTree, state: PyTree, action: Array
) -> tuple[Transition, Array]:
    following = step(key, env, state, action, params)
    obs_key = capabilities(env).obs_key
    name = following.obs if obs_key is None else obs_key(following.obs, params)
    if jnp.shape(name) or not jnp.issubdtype(jnp.asarray(name).dtype, jnp.integer):
        raise UsageError(
            f"{env.name} needs obs_key(obs, params) -> int32: its observations are not integers"
        )
    return following, jnp.asarray(name, jnp.int32)


def simulate_keyed(
    keys: PRNGKey, env: Environment, params: PyTree, states: PyTree, actions: Array
) -> Simulated:
    """One step of n simulations, each with its own of `keys` `[n]`, which it consumes."""
    following, names = jax.vmap(lambda *row: _step_keyed(row[0], env, params, *row[1:]))(
        keys, states, actions
    )
    usable = is_usable(following.reward)
    reward = jnp.where(usable, following.reward, 0.0)
    return Simulated(following.state, names, reward, following.terminated, ~usable)


def simulate_steps(
    key: PRNGKey, env: Environment, params: PyTree, states: PyTree, actions: Array
) -> Simulated:
    """One step of n simulations, each with a key of its own; consumes `key`."""
    return simulate_keyed(jax.random.split(key, actions.shape[0]), env, params, states, actions)


def random_legal(draws: Array, mask: Array) -> Array:
    """Actions, int32 `[n]`, uniform over the legal ones of `mask` `[n, A]` by `draws` `[n]` in [0, 1); 0 where none."""
    order = jnp.cumsum(
        mask, axis=1
    )  # numbers the legal actions of a row 1, 2, ...; the first above draw * count is it
    return jnp.argmax(mask & (order > draws[:, None] * order[:, -1:]), axis=1).astype(jnp.int32)


def rollout_values(
    key: PRNGKey,
    env: Environment,
    params: PyTree,
    states: PyTree,
    discount: Scalar,
    length: int,
    live: Array,
) -> Array:
    """Discounted returns of `length` steps from each state, float32 `[n]`; consumes `key`.

    The environment's `rollout_action` acts, or, without one, chance, uniformly over legal actions. Simulations that
    are not `live` (bool `[n]`) return 0.
    """
    act = capabilities(env).rollout_action

    def advance(carry: tuple, key: PRNGKey) -> tuple:
        states, live, total, weight = carry
        pick, move = jax.random.split(key)
        if act is not None:
            play = act
            action = jax.vmap(lambda key, state: play(key, state, params))(
                jax.random.split(pick, live.size), states
            )
        else:
            action = random_legal(
                jax.random.uniform(pick, live.shape), legal_actions(env, params, states)
            )
        result = simulate_steps(move, env, params, states, action)
        total = total + jnp.where(live, weight * result.reward, 0.0)
        return (result.state, live & ~result.terminated, total, weight * discount), None

    first = (states, live, jnp.zeros(live.shape, jnp.float32), jnp.ones((), jnp.float32))
    return jax.lax.scan(advance, first, jax.random.split(key, length))[0][2]


def with_likelihood(env: Environment) -> PartiallyObserved:
    """The environment as one that has `log_likelihood`; `UsageError` where it has none."""
    if capabilities(env).log_likelihood is None:
        raise UsageError(
            f"weighted particles need log_likelihood of the environment, and {env.name} has none"
        )
    return cast(PartiallyObserved, env)


def where_rows(chosen: Array, new: Array, old: Array) -> Array:
    """Rows of `new` where `chosen` `[n]`, else of `old`, `[n, ...]`; or rows `[K, A]` of `[K, A, ...]`."""
    return jnp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - chosen.ndim)), new, old)
