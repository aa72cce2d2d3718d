"""Values of states where simulations stop: the part `evaluate` of a tree search, in three kinds.

A kind is a function of `(key, model, states, actions, live)` that gives values float32 `[n]`. Whatever it is,
`leaf_values` counts what cannot be added up and gives what has ended the value 0.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxpar.env import capabilities
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.pomdp.model import Model, is_usable, rollout_values
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Evaluate", "HeuristicValues", "RolloutValues", "ZeroValues"]

LEAVES = ("heuristic", "rollout", "zero")
"""How a simulation is valued where it stops: the environment's `heuristic`, a rollout or 0. Its `rollout_action` plays
rollouts, or, without one, chance."""


class Evaluate(Protocol):
    """Guesses what n states are worth from now on."""

    def __call__(
        self, key: PRNGKey, model: Model, states: PyTree, actions: Array, live: Array
    ) -> Array:
        """Values, float32 `[n]`; those of states that are not live are not used.

        Args:
            key: consumed.
            model: environment, parameters and discount.
            states: `[n, ...]`.
            actions: int32 `[n]`, what led to each state; -1 where nothing did.
            live: bool `[n]`, the state has not ended.
        """
        ...


@dataclasses.dataclass(frozen=True)
class HeuristicValues:
    """The environment's own guess, `heuristic(state, params)`, which may take the action that led there."""

    def __call__(
        self, key: PRNGKey, model: Model, states: PyTree, actions: Array, live: Array
    ) -> Array:
        """The guesses; draws nothing. `UsageError` where the environment has none."""
        heuristic = capabilities(model.env).heuristic
        if heuristic is None:
            raise UsageError(
                f'{model.env.name} has no heuristic(state, params); use leaf="rollout" or leaf="zero"'
            )
        return jax.vmap(lambda state, action: heuristic(state, model.params, action))(
            states, actions
        )


@dataclasses.dataclass(frozen=True)
class RolloutValues:
    """Return of a rollout of `length` steps, played by the environment's `rollout_action`, else by chance."""

    length: int = field(legal=AtLeast(1))

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, key: PRNGKey, model: Model, states: PyTree, actions: Array, live: Array
    ) -> Array:
        """The discounted returns; costs `length` steps of each state."""
        return rollout_values(key, model, states, live, self.length)


@dataclasses.dataclass(frozen=True)
class ZeroValues:
    """Nothing: what comes after the tree is not counted."""

    def __call__(
        self, key: PRNGKey, model: Model, states: PyTree, actions: Array, live: Array
    ) -> Array:
        """Zeros; draws nothing."""
        return jnp.zeros(live.shape)


def evaluation(leaf: str, rollout_depth: int) -> Evaluate:
    """The kind that a planner's field `leaf` names, one of `LEAVES`."""
    return {
        "heuristic": HeuristicValues(),
        "rollout": RolloutValues(rollout_depth),
        "zero": ZeroValues(),
    }[leaf]


def leaf_values(
    key: PRNGKey, evaluate: Evaluate, model: Model, states: PyTree, actions: Array, live: Array
) -> tuple[Array, Array]:
    """Values of n states by `evaluate`, float32 `[n]`, and a mask of those not finite or too large, bool `[n]`.

    Those count as 0, and so do states that are not live: they have ended.
    """
    values = jnp.asarray(evaluate(key, model, states, actions, live), jnp.float32)
    usable = is_usable(values)
    return jnp.where(live & usable, values, 0.0), live & ~usable
