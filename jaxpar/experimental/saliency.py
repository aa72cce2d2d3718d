"""Saliency of a memory: the gradient of a value now by the observations before."""

import jax
import jax.numpy as jnp

from jaxpar.env import Box
from jaxpar.rl.action_values import ActionValues
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.features import num_choices
from jaxpar.types import Array, PyTree, UsageError

__all__ = ["saliency"]


def saliency(
    agent: ActorCritic | ActionValues,
    weights: PyTree,
    obs: Array,
    starts: Array,
    carry: PyTree,
    time: int = -1,
    action_mask: Array | None = None,
) -> Array:
    """The gradient of the value at step `time` by every observation up to it, through the memory.

        S[s] = d value[time] / d obs[s]        for a Q-learner value[t] = max_a Q(o[..t], a) over legal actions

    Each environment's value (and each agent's) by its own observations. Zero after `time`, and before the last start at
    or before it: no memory reaches across one. How far back a policy's memory reaches is read off the norms (memory
    saliency: Z. Wang et al. 2025, "POPGym Arcade"). One forward and one backward pass.

    Args:
        agent: `ActionValues` (`Pqn`, `Dqn`; without a decomposition) or `ActorCritic` (`Ppo`, `A2c`; not central).
        weights: of its network.
        obs: `[T, B, (N), ...]`, of a space of numbers; bytes count as numbers from 0 to 255.
        starts: bool `[T, B]`.
        carry: the memory's `[B, ...]` before the first step.
        time: the step that is explained; negative ones count from the last.
        action_mask: legal actions `[T, B, (N), A]`, or None.

    Returns:
        Of the shape of `obs`, in value a unit of the observation; float32, or float64 where the weights are.

    Raises:
        UsageError: the observations are names and not numbers, agents' values are mixed, or there is no such step.
    """
    if agent.decomposition != "none" if isinstance(agent, ActionValues) else agent.central:
        raise UsageError(
            "saliency explains an agent's own value: give one of decomposition='none' and central=False."
        )
    if not isinstance(agent.obs_space, Box) or num_choices(agent.obs_space):
        raise UsageError(
            f"{agent.obs_space} has no gradient: saliency takes a Box of numbers, such as pixels."
        )
    if not -len(obs) <= time < len(obs):
        raise UsageError(
            f"time={time} is no step of {len(obs)}; legal are {-len(obs)} to {len(obs) - 1}."
        )

    def value(obs):
        if isinstance(agent, ActionValues):
            return jnp.sum(
                jnp.max(agent.apply(weights, obs, starts, carry, action_mask).q[time], -1)
            )
        return jnp.sum(agent.apply(weights, obs, starts, carry, action_mask).value[time])

    return jax.grad(value)(jnp.asarray(obs, jnp.result_type(float, *jax.tree.leaves(weights))))
