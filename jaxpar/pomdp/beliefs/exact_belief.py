"""Exact beliefs of finite models: one particle a state, weighted by Bayes' rule; what the optimal policy is played on.

Arrays number the states, so a state must be that number: one integer, as those of `TabularEnvironment` are, and as
`check_tabular` compares them.
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from jaxpar.env import Environment
from jaxpar.pomdp.beliefs.belief import Belief, Evidence, Particles
from jaxpar.pomdp.tabular import TabularPomdp, from_environment
from jaxpar.types import Array, PRNGKey, PyTree, UsageError, concrete_values

__all__ = ["ExactBelief"]


@dataclasses.dataclass(frozen=True)
class ExactBelief:
    """Bayes' rule on all S states of an environment with `tabular(params)`, whose states are one integer each.

    Where that integer is not the number in the arrays, or a state is more, play on the model's own environment:
    `model = from_environment(env, params)`, then `model.environment` with `model` as its parameters.
    """

    def init(self, key: PRNGKey, env: Environment, params: PyTree) -> Particles:
        """The model's start; draws nothing.

        Raises:
            UsageError: the environment has no arrays, its states are not one integer, or its parameters are traced
                (those of a `TabularEnvironment` may be).
        """
        model = _model(env, params)
        shape = jax.eval_shape(env.init, jax.random.key(0), params)
        leaves, tree = jax.tree.flatten(shape)
        if len(leaves) != 1 or leaves[0].shape or not jnp.issubdtype(leaves[0].dtype, jnp.integer):
            raise UsageError(
                f"an exact belief needs states that are one integer, and those of {env.name} are not; "
                "play on from_environment(env, params).environment"
            )
        states = jax.tree.unflatten(tree, [jnp.arange(len(model.states), dtype=leaves[0].dtype)])
        return Particles(states, jnp.log(model.start).astype(jnp.float32))

    def update(
        self,
        key: PRNGKey,
        belief: Particles,
        action: Array,
        obs: Array,
        env: Environment,
        params: PyTree,
    ) -> tuple[Particles, Evidence]:
        """The belief after `action` and `obs`, an int32; draws nothing. Costs S^2.

        States that end an episode have no weight, since an update is asked for while it goes on. Where no state
        explains the observation the belief is *depleted*, and is the prediction.
        """
        model = _model(env, params)
        chances = jnp.exp(belief.log_weights).astype(model.start.dtype)
        alive = jnp.where(model.terminal, 0, 1).astype(chances.dtype)
        predicted = _shares((chances @ model.transition[action]) * alive, chances)
        joint = (chances @ model.transition[action]) * model.observation[action, :, obs] * alive
        evidence = joint.sum()
        lost, never = evidence <= 0, jnp.zeros((), bool)
        following = jnp.where(lost, predicted, _shares(joint, predicted))
        weights = jnp.log(following).astype(jnp.float32)
        found = Evidence(
            jnp.log(evidence).astype(jnp.float32),
            jnp.asarray(jnp.inf),
            lost,
            never,
            jnp.zeros((), jnp.int32),
        )
        return Particles(belief.states, weights), found


def _model(env: Environment, params: PyTree) -> TabularPomdp:
    if isinstance(params, TabularPomdp):
        return params
    if concrete_values(params) is None:
        raise UsageError(
            f"the arrays of {env.name} are made outside of jit: give its parameters as constants"
        )
    return from_environment(env, params)


def _shares(masses: Array, otherwise: Array) -> Array:
    total = masses.sum()
    return jnp.where(total > 0, masses / jnp.where(total > 0, total, 1), otherwise)


def chances_of(belief: Belief | Array, num_states: int) -> Array:
    """The chance of each of S states `[S]` under a belief: itself, or what weighted particles of one integer say.

    Raises:
        UsageError: it is neither.
    """
    if not isinstance(belief, Particles):
        if jnp.shape(cast(Array, belief)) != (num_states,):
            raise UsageError(
                f"a belief is [S] = [{num_states}] chances or weighted particles, not {type(belief).__name__}"
            )
        return jnp.asarray(cast(Array, belief))
    leaves = jax.tree.leaves(belief.states)
    if len(leaves) != 1 or leaves[0].ndim != 1 or not jnp.issubdtype(leaves[0].dtype, jnp.integer):
        raise UsageError(
            "vectors over states need particles whose states are one integer each, the number of the state"
        )
    weights = jnp.where(belief.log_weights < jnp.inf, jnp.exp(belief.log_weights), 0.0)
    return jnp.zeros((num_states,), weights.dtype).at[leaves[0]].add(weights, mode="drop")
