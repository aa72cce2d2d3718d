"""Proximal policy optimisation, and with several agents IPPO and MAPPO."""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch, check_minibatches
from jaxpar.rl.distributions import entropy, log_prob
from jaxpar.rl.learner import LearnerState, actor_critic, begun, check_learner, has_memory, learned, learner_axes
from jaxpar.rl.network import Network
from jaxpar.types import Array, Info, PRNGKey, PyTree

__all__ = ["Ppo", "PpoRates", "ppo_loss"]


@flax.struct.dataclass
class PpoRates:
    """Numbers of PPO: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of Adam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        trace: lambda of the advantages.
        clip: how far the ratio, and the value, may usefully move from what they were.
        value: weight of the value's loss.
        entropy: weight of the policy's entropy.
        max_grad_norm: gradients longer than this are shortened to it.
        reward_scale: what rewards are multiplied by before anything is learned from them.
    """

    learning_rate: Any = field(2.5e-4, Positive())
    anneal: Any = field(0.0, AtLeast(0))
    discount: Any = field(0.99, Between(0, 1))
    trace: Any = field(0.95, Between(0, 1))
    clip: Any = field(0.2, AtLeast(0))
    value: Any = field(0.5, AtLeast(0))
    entropy: Any = field(0.01, Finite())
    max_grad_norm: Any = field(0.5, AtLeast(0))
    reward_scale: Any = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Ppo:
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347); an `Algorithm`, a step of it an update.

    An update walks `num_steps` steps in `num_lanes` environments, computes generalised advantages, and goes `epochs`
    times through them in `minibatches` parts. Its inputs are the environment's parameters, None for the default ones.
    With a memory, whole unrolls are trained on, all steps at once, from what the lanes remembered before them, with
    episodes' starts inside. Several agents share the network (IPPO); `central` gives them MAPPO's critic.

    Attributes:
        env: the environment or adapter.
        network: of policy and value.
        rates: numbers.
        num_lanes: B.
        num_steps: T, of an unroll.
        epochs: times that an unroll is gone through.
        minibatches: parts of an unroll; lanes are dealt to them where there is a memory, else single steps.
        central: whether the value reads all agents' observations.
        draw: as in `jaxpar.rollout.unroll`.
        reset: likewise; None for the exact default.
    """

    env: Any
    network: Network = Network()
    rates: PpoRates = PpoRates()
    num_lanes: int = field(4, AtLeast(1))
    num_steps: int = field(128, AtLeast(1))
    epochs: int = field(4, AtLeast(1))
    minibatches: int = field(4, AtLeast(1))
    central: bool = False
    draw: str = "lane"
    reset: Any = None

    optimizer = make_optimizer(OptimizerConfig(eps=1e-5, b2=0.999, weight_decay=0.0))
    agent, init, axes, has_memory = actor_critic, begun, learner_axes, property(has_memory)

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        check_minibatches(self.num_steps, self.num_lanes, self.minibatches, self.has_memory)
        self.agent()

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        return learned(self, key, state, inputs, ppo_loss)


def ppo_loss(weights: PyTree, agent: ActorCritic, batch: Batch, rates: PpoRates) -> tuple[Array, Info]:
    """The clipped surrogate (eq. 7), the clipped value loss, and the entropy, of a batch; means over what counts.

        ratio = exp(log_prob - old)    L = mean(-min(ratio A, clip(ratio, 1 - c, 1 + c) A))
        V = mean(max((v - G)^2, (old_v + clip(v - old_v, -c, c) - G)^2)) / 2
        loss = L + value V - entropy H

    with advantages A of mean 0 and deviation 1 in the batch.

    Returns:
        The loss, and of its parts: "policy_loss", "value_loss", "entropy", "approx_kl" (mean of ratio - 1 - log ratio),
        "clipped" (share of ratios beyond the clip), "ratio_error" (largest distance of a ratio from 1), "converged".
    """
    said = agent.answers(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)

    def mean(x):
        return jnp.sum(share * x)

    centred = batch.advantage - mean(batch.advantage)
    advantage = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
    log_ratio = log_prob(agent.space, said.policy, batch.drawn) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    policy = -mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - rates.clip, 1 + rates.clip) * advantage))
    near = batch.value + jnp.clip(said.value - batch.value, -rates.clip, rates.clip)
    value = 0.5 * mean(jnp.maximum((said.value - batch.target) ** 2, (near - batch.target) ** 2))
    spread = mean(entropy(agent.space, said.policy))
    info = {
        "policy_loss": policy,
        "value_loss": value,
        "entropy": spread,
        "approx_kl": mean(ratio - 1 - log_ratio),
        "clipped": mean((jnp.abs(ratio - 1) > rates.clip).astype(jnp.float32)),
        "ratio_error": jnp.max(batch.weight * jnp.abs(ratio - 1)),
        "converged": said.converged.astype(jnp.float32),
    }
    return policy + rates.value * value - rates.entropy * spread, info
