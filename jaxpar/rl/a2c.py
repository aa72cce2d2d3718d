"""Advantage actor-critic: one gradient step on each rollout."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.actor_critic import (
    actor_critic_agent,
    actor_critic_loss,
    evaluate_batch,
    init_actor_critic,
)
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch
from jaxpar.rl.items import Items
from jaxpar.rl.learner import (
    LearnerState,
    actor_critic_update,
    check_minibatch_learner,
    has_memory,
    learner_axes,
)
from jaxpar.rl.network import Network
from jaxpar.rollout import Reset
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar

__all__ = ["A2c", "A2cRates", "a2c_loss"]


@flax.struct.dataclass
class A2cRates:
    """Numbers of A2C, as `PpoRates`."""

    learning_rate: Scalar = field(7e-4, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.99, Between(0, 1))
    gae_lambda: Scalar = field(1.0, Between(0, 1))
    value_coef: Scalar = field(0.5, AtLeast(0))
    entropy_coef: Scalar = field(0.01, Finite())
    max_grad_norm: Scalar = field(0.5, AtLeast(0))
    reward_scale: Scalar = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class A2c:
    """Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783), in step over all environments.

    An `Algorithm` with the fields of `ActorCriticLearner`: as `Ppo` but for its loss, and with one
    gradient step on each rollout.
    """

    env: Environment | Adapter
    network: Network | Items = Network()
    rates: A2cRates = A2cRates()
    num_envs: int = field(16, AtLeast(1))
    num_steps: int = field(8, AtLeast(1))
    central: bool = False
    lag: int = field(0, AtLeast(0))
    correct: bool = True
    normalize_obs: bool = False
    normalize_returns: bool = False
    prng: str = "env"
    reset: Reset | None = None

    epochs = 1
    minibatches = 1
    optimizer = make_optimizer(OptimizerConfig("rmsprop", eps=1e-5, b2=0.9, weight_decay=0.0))

    __post_init__ = check_minibatch_learner
    agent = actor_critic_agent
    init = init_actor_critic
    axes = learner_axes

    @property
    def has_memory(self) -> bool:
        """True if rollouts must stay whole."""
        return has_memory(self.network)

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        return actor_critic_update(self, key, state, inputs, a2c_loss)


def a2c_loss(
    weights: PyTree, agent: ActorCritic, batch: Batch, rates: A2cRates
) -> tuple[Array, Info]:
    """`-mean(log_prob A) + value_coef mean((v - G)^2) / 2 - entropy_coef H`, by `Batch.weight`.

    Returns:
        The loss, and the metrics of `actor_critic_loss`.
    """
    now = evaluate_batch(weights, agent, batch)
    policy_loss = -jnp.sum(now.share * now.log_prob * batch.advantage)
    value_loss = 0.5 * jnp.sum(now.share * (now.value - batch.target) ** 2)
    return actor_critic_loss(policy_loss, value_loss, now, batch, rates)
