"""Advantage actor-critic: one step down the plain policy gradient an unroll."""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch
from jaxpar.rl.distributions import entropy, log_prob
from jaxpar.rl.learner import LearnerState, actor_critic, begun, check_learner, has_memory, learned, learner_axes
from jaxpar.rl.network import Network
from jaxpar.types import Array, Info, PRNGKey, PyTree

__all__ = ["A2c", "A2cRates", "a2c_loss"]


@flax.struct.dataclass
class A2cRates:
    """Numbers of A2C, as `PpoRates`."""

    learning_rate: Any = field(7e-4, Positive())
    anneal: Any = field(0.0, AtLeast(0))
    discount: Any = field(0.99, Between(0, 1))
    trace: Any = field(1.0, Between(0, 1))
    value: Any = field(0.5, AtLeast(0))
    entropy: Any = field(0.01, Finite())
    max_grad_norm: Any = field(0.5, AtLeast(0))
    reward_scale: Any = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class A2c:
    """Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, in step over all lanes); an `Algorithm`.

    As `Ppo` but for its loss, and one update an unroll.

    Attributes:
        env: the environment or adapter.
        network: of policy and value.
        rates: numbers.
        num_lanes: B.
        num_steps: T, of an unroll.
        central: whether the value reads all agents' observations.
        draw: as in `jaxpar.rollout.unroll`.
        reset: likewise; None for the exact default.
    """

    env: Any
    network: Network = Network()
    rates: A2cRates = A2cRates()
    num_lanes: int = field(16, AtLeast(1))
    num_steps: int = field(8, AtLeast(1))
    central: bool = False
    draw: str = "lane"
    reset: Any = None
    epochs = 1
    minibatches = 1

    optimizer = make_optimizer(OptimizerConfig("rmsprop", eps=1e-5, b2=0.9, weight_decay=0.0))
    agent, init, axes, has_memory = actor_critic, begun, learner_axes, property(has_memory)

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        self.agent()

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        return learned(self, key, state, inputs, a2c_loss)


def a2c_loss(weights: PyTree, agent: ActorCritic, batch: Batch, rates: A2cRates) -> tuple[Array, Info]:
    """`-mean(log_prob A) + value mean((v - G)^2) / 2 - entropy H`, means over what counts.

    Returns:
        The loss, and of its parts: "policy_loss", "value_loss", "entropy", "ratio_error" (how far densities are from
        those that were drawn with), "converged".
    """
    said = agent.answers(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)
    log_p = log_prob(agent.space, said.policy, batch.drawn)
    policy = -jnp.sum(share * log_p * batch.advantage)
    value = 0.5 * jnp.sum(share * (said.value - batch.target) ** 2)
    spread = jnp.sum(share * entropy(agent.space, said.policy))
    info = {
        "policy_loss": policy,
        "value_loss": value,
        "entropy": spread,
        "ratio_error": jnp.max(batch.weight * jnp.abs(jnp.exp(log_p - batch.log_prob) - 1)),
        "converged": said.converged.astype(jnp.float32),
    }
    return policy + rates.value * value - rates.entropy * spread, info
