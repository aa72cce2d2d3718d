"""What an agent's memory is made of: the gradient of what it thinks now by what it saw before."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.env import Box
from jaxpar.rl.action_values import ActionValues
from jaxpar.rl.features import num_choices
from jaxpar.types import Array, PyTree, UsageError

__all__ = ["saliency"]


def saliency(
    agent: Any,
    weights: PyTree,
    obs: Array,
    starts: Array,
    carry: PyTree,
    time: int = -1,
    action_mask: Array | None = None,
) -> Array:
    """The gradient of the value at step `time` by every observation up to it, through the memory.

        S[s] = d value[time] / d obs[s]        for a Q-learner value[t] = max_a Q(o[..t], a) over legal actions

    Each lane's value (and each agent's) by its own observations. Zero after `time`, and before the last start at or
    before it: nothing is remembered across one. How far back a policy's memory reaches is read off the norms (memory
    saliency: Z. Wang et al. 2025, "POPGym Arcade"). One forward and one backward pass.

    Args:
        agent: `ActionValues` (of `Pqn`, `Dqn`; without a mixer) or `ActorCritic` (of `Ppo`, `A2c`; not central).
        weights: of its network.
        obs: `[T, B, (N), ...]`, of a space of numbers; bytes count as numbers from 0 to 255.
        starts: bool `[T, B]`.
        carry: what lanes `[B, ...]` remembered before the first step.
        time: the step that is explained; negative ones count from the last.
        action_mask: legal actions `[T, B, (N), A]`, or None.

    Returns:
        Of the shape of `obs`, in value a unit of the observation; float32, or float64 where the weights are.

    Raises:
        UsageError: the observations are names and not numbers, agents' values are mixed, or there is no such step.
    """
    if getattr(agent, "mixer", "none") != "none" or getattr(agent, "central", False):
        raise UsageError("saliency explains an agent's own value: give one of mixer='none' and central=False.")
    if not isinstance(agent.seen, Box) or num_choices(agent.seen):
        raise UsageError(f"{agent.seen} has no gradient: saliency takes a Box that is read as numbers, as pixels are.")
    if not -len(obs) <= time < len(obs):
        raise UsageError(f"time={time} is no step of {len(obs)}; legal are {-len(obs)} to {len(obs) - 1}.")

    def value(seen):
        if isinstance(agent, ActionValues):
            return jnp.sum(jnp.max(agent.estimates(weights, seen, starts, carry, action_mask).q[time], -1))
        return jnp.sum(agent.answers(weights, seen, starts, carry, action_mask).value[time])

    return jax.grad(value)(jnp.asarray(obs, jnp.result_type(float, *jax.tree.leaves(weights))))
