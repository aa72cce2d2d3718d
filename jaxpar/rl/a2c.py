"""Advantage actor-critic: one gradient step on each rollout."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch
from jaxpar.rl.distributions import entropy, log_prob
from jaxpar.rl.items import Items
from jaxpar.rl.learner import (
    LearnerState,
    actor_critic_update,
    check_learner,
    has_memory,
    init_learner,
    learner_axes,
)
from jaxpar.rl.network import Network
from jaxpar.rollout import Reset
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar, largest

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
    """Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, in step over all environments); an `Algorithm`.

    As `Ppo` but for its loss, and with one gradient step on each rollout.

    Attributes:
        env: the environment or adapter.
        network: of policy and value.
        rates: numbers.
        num_envs: B.
        num_steps: T, of a rollout.
        central: whether the value reads all agents' observations.
        lag: updates for which the weights that act are old, as where actors run beside the learner.
        correct: whether V-trace corrects for that.
        normalize_obs: whether observations are standardised by their running mean and deviation, which are part of the
            weights: those before an update in all of it, and in evaluation as they stand.
        normalize_returns: whether rewards are divided by the running deviation of their discounted sums.
        prng: as in `jaxpar.rollout.rollout`.
        reset: likewise; None for the exact default.
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

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        self.agent()

    @property
    def has_memory(self) -> bool:
        """Whether rollouts must stay whole."""
        return has_memory(self.network)

    def agent(self, greedy: bool = False) -> ActorCritic:
        """The policy, for `jaxpar.rollout.rollout` and `evaluate`, with the weights of a state as its parameters."""
        return ActorCritic(self.env, self.network, self.central, greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> LearnerState:
        """Draws weights and starts an episode in every environment; consumes `key`."""
        return init_learner(self, key, inputs, self.lag)

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        return actor_critic_update(self, key, state, inputs, a2c_loss)

    def axes(self) -> PyTree:
        """Logical axes of the state; see `learner_axes`."""
        return learner_axes(self)


def a2c_loss(
    weights: PyTree, agent: ActorCritic, batch: Batch, rates: A2cRates
) -> tuple[Array, Info]:
    """`-mean(log_prob A) + value_coef mean((v - G)^2) / 2 - entropy_coef H`, means by `Batch.weight`.

    Returns:
        The loss, and of its parts: "policy_loss", "value_loss", "entropy", "ratio_error" (how far densities are from
        those that were drawn with), "converged".
    """
    out = agent.apply(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)
    log_p = log_prob(agent.action_space, out.policy, batch.raw_action)
    policy = -jnp.sum(share * log_p * batch.advantage)
    value = 0.5 * jnp.sum(share * (out.value - batch.target) ** 2)
    spread = jnp.sum(share * entropy(agent.action_space, out.policy))
    info = {
        "policy_loss": policy,
        "value_loss": value,
        "entropy": spread,
        "ratio_error": largest(batch.weight * jnp.abs(jnp.exp(log_p - batch.log_prob) - 1)),
        "converged": out.converged.astype(jnp.float32),
    }
    return policy + rates.value_coef * value - rates.entropy_coef * spread, info
