"""Models that planners simulate: sizes, discount, legal actions, keys of observations, rollouts."""

from typing import NamedTuple, cast

import flax.struct
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

__all__ = ["Model", "discount_of"]

LARGEST = 1e24
"""Size of rewards and leaf values above which they are not used: the sums of 2^31 smaller ones over any horizon, and
their differences, are still float32."""


def is_usable(values: Array) -> Array:
    """Rewards or values that can be added up: finite, and at most `LARGEST` in size; bool."""
    return jnp.abs(values) <= LARGEST  # false of NaN


@flax.struct.dataclass
class Model:
    """Environment, parameters and discount: what simulations need, passed as one.

    Attributes:
        env: the environment; static, so hashable where a model crosses `jit`.
        params: its parameters.
        discount: of one step, in [0, 1].
    """

    env: Environment = flax.struct.field(pytree_node=False)
    params: PyTree
    discount: Scalar


def make_model(env: Environment, params: PyTree, discount: Scalar | None = None) -> Model:
    """The model with `discount`, or else `params.discount`; `UsageError` as of `discount_of`."""
    return Model(env=env, params=params, discount=discount_of(params, discount))


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
    """Returns `discount`, or else `params.discount`; `UsageError` outside [0, 1] where it is known."""
    discount = own_discount(params) if discount is None else discount
    if discount is None:
        raise UsageError(
            "the environment's parameters have no discount; give the planner one, as discount=0.95"
        )
    known = concrete_values(discount)
    if known is not None and not np.all((known[0] >= 0) & (known[0] <= 1)):
        raise UsageError(f"discount={known[0]}: out of range; expected 0 to 1.")
    return discount


def legal_actions(model: Model, states: PyTree) -> Array:
    """Legal actions of each of n states, bool `[n, A]`."""
    mask = capabilities(model.env).action_mask
    if mask is not None:
        return jax.vmap(lambda state: mask(state, model.params))(states)

    count = jax.tree.leaves(states)[0].shape[0]
    return jnp.ones((count, num_actions(model.env, model.params)), bool)


def root_actions(model: Model, states: PyTree) -> tuple[Array, Array]:
    """Returns the legal actions of a root of n drawn states, bool `[A]`, and the ended, bool `[n]`.

    An action is legal where every state that has not ended allows it: the mask of a state that has
    ended means nothing. Where all have ended every action is.
    """
    ended = jax.vmap(lambda state: model.env.terminal(state, model.params))(states)
    legal = legal_actions(model, states)
    return jnp.all(legal | ended[:, None], axis=0), ended


def _step_keyed(
    key: PRNGKey, model: Model, state: PyTree, action: Array
) -> tuple[Transition, Array]:
    following = step(key, model.env, state, action, model.params)
    obs_key = capabilities(model.env).obs_key
    name = following.obs if obs_key is None else obs_key(following.obs, model.params)
    if jnp.shape(name) or not jnp.issubdtype(jnp.asarray(name).dtype, jnp.integer):
        raise UsageError(
            f"{model.env.name} needs obs_key(obs, params) -> int32: its observations are not integers"
        )
    return following, jnp.asarray(name, jnp.int32)


def simulate_keyed(keys: PRNGKey, model: Model, states: PyTree, actions: Array) -> Simulated:
    """One step of n simulations, each with its own of `keys` `[n]`, which it consumes."""
    following, names = jax.vmap(lambda key, *pair: _step_keyed(key, model, *pair))(
        keys, states, actions
    )
    usable = is_usable(following.reward)
    return Simulated(
        state=following.state,
        obs_key=names,
        reward=jnp.where(usable, following.reward, 0.0),
        terminated=following.terminated,
        invalid=~usable,
    )


def simulate_steps(key: PRNGKey, model: Model, states: PyTree, actions: Array) -> Simulated:
    """One step of n simulations, each with a key of its own; consumes `key`."""
    return simulate_keyed(jax.random.split(key, actions.shape[0]), model, states, actions)


def random_legal(draws: Array, mask: Array) -> Array:
    """Actions, int32 `[n]`, uniform over the legal ones of `mask` `[n, A]` by `draws` `[n]` in [0, 1); 0 where none."""
    order = jnp.cumsum(
        mask, axis=1
    )  # numbers the legal actions of a row 1, 2, ...; the first above draw * count is it
    return jnp.argmax(mask & (order > draws[:, None] * order[:, -1:]), axis=1).astype(jnp.int32)


def rollout_values(key: PRNGKey, model: Model, states: PyTree, live: Array, length: int) -> Array:
    """Discounted returns of `length` steps from each state, float32 `[n]`; consumes `key`.

    The environment's `rollout_action` acts, or, without one, chance, uniformly over legal actions. Simulations that
    are not `live` (bool `[n]`) return 0.
    """
    act = capabilities(model.env).rollout_action

    def advance(carry: tuple, key: PRNGKey) -> tuple:
        states, live, total, weight = carry
        pick, move = jax.random.split(key)
        if act is not None:
            play = act
            action = jax.vmap(lambda key, state: play(key, state, model.params))(
                jax.random.split(pick, live.size), states
            )
        else:
            draws = jax.random.uniform(pick, live.shape)
            action = random_legal(draws, legal_actions(model, states))

        result = simulate_steps(move, model, states, action)
        total = total + jnp.where(live, weight * result.reward, 0.0)
        return (result.state, live & ~result.terminated, total, weight * model.discount), None

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
