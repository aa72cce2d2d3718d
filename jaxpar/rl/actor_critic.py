"""Parts that `Ppo` and `A2c` share: their agent, their first state, and terms of their losses."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch, normalized_weights
from jaxpar.rl.distributions import entropy, log_prob
from jaxpar.rl.learner import ActorCriticLearner, LearnerState, init_learner
from jaxpar.types import Array, Info, PRNGKey, PyTree, largest

__all__ = [
    "Evaluation",
    "actor_critic_agent",
    "actor_critic_loss",
    "evaluate_batch",
    "init_actor_critic",
]


def actor_critic_agent(learner: ActorCriticLearner, greedy: bool = False) -> ActorCritic:
    """The policy, with a state's weights as its parameters in `jaxpar.rollout`."""
    return ActorCritic(
        env=learner.env, network=learner.network, central=learner.central, greedy=greedy
    )


def init_actor_critic(learner: ActorCriticLearner, key: PRNGKey, inputs: PyTree) -> LearnerState:
    """Draws weights, also those that a lag needs, and starts an episode in every environment.

    It consumes `key`.
    """
    state = init_learner(learner, key, inputs)
    if not learner.lag:
        return state
    older = jax.tree.map(lambda x: jnp.broadcast_to(x, (learner.lag, *x.shape)), state.weights)
    return dataclasses.replace(state, older=older)


class Evaluation(NamedTuple):
    """A batch by weights that may differ from those that acted.

    Attributes:
        log_prob: of the batch's actions `[T, B, (N)]`.
        log_ratio: log of their density compared with that by the weights that acted.
        value: `[T, B, (N)]`.
        entropy: mean entropy of the policy, float32 [].
        share: `normalized_weights` of the batch.
        converged: float32 [], 1 if the memory's solver did.
    """

    log_prob: Array
    log_ratio: Array
    value: Array
    entropy: Array
    share: Array
    converged: Array


def evaluate_batch(weights: PyTree, agent: ActorCritic, batch: Batch) -> Evaluation:
    """Evaluates actions and observations of a batch; means are by `Batch.weight`."""
    out = agent.apply(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
    share = normalized_weights(batch.weight)
    now = log_prob(agent.action_space, out.policy, batch.raw_action)
    return Evaluation(
        log_prob=now,
        log_ratio=now - batch.log_prob,
        value=out.value,
        entropy=jnp.sum(share * entropy(agent.action_space, out.policy)),
        share=share,
        converged=out.converged.astype(jnp.float32),
    )


def actor_critic_loss(
    policy_loss: Array, value_loss: Array, now: Evaluation, batch: Batch, rates: PyTree
) -> tuple[Array, Info]:
    """`policy_loss + value_coef value_loss - entropy_coef entropy`.

    Returns:
        The loss, and its parts with "ratio_error", the largest distance of a ratio from 1, and
        "converged".
    """
    ratio = jnp.exp(now.log_ratio)
    info = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": now.entropy,
        "ratio_error": largest(batch.weight * jnp.abs(ratio - 1)),
        "converged": now.converged,
    }
    loss = policy_loss + rates.value_coef * value_loss - rates.entropy_coef * now.entropy
    return loss, info
