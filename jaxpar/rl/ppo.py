"""Proximal policy optimisation, and with several agents IPPO and MAPPO."""

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

__all__ = ["Ppo", "PpoRates", "ppo_loss"]


@flax.struct.dataclass
class PpoRates:
    """Numbers of PPO: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of the optimizer, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        gae_lambda: lambda of the generalised advantages.
        clip: distance from the old ratio, and the old value, beyond which no gain is counted.
        value_coef: weight of the value's loss.
        entropy_coef: weight of the policy's entropy.
        max_grad_norm: norm to which longer gradients are shortened.
        reward_scale: factor of rewards before anything is learned from them.
    """

    learning_rate: Scalar = field(2.5e-4, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.99, Between(0, 1))
    gae_lambda: Scalar = field(0.95, Between(0, 1))
    clip: Scalar = field(0.2, AtLeast(0))
    value_coef: Scalar = field(0.5, AtLeast(0))
    entropy_coef: Scalar = field(0.01, Finite())
    max_grad_norm: Scalar = field(0.5, AtLeast(0))
    reward_scale: Scalar = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Ppo:
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347); an `Algorithm`.

    An update makes `num_steps` steps in each of `num_envs` environments, computes generalised
    advantages, and goes `epochs` times through them in `minibatches` parts. With a memory, whole
    rollouts are trained on, all steps at once, from the carry before them, with episodes' starts
    inside. Several agents share the network (IPPO); `central` gives them MAPPO's critic. Fields are
    those of `ActorCriticLearner`, and:

    Attributes:
        target_kl: bound on "approx_kl", the distance to the policy before the update. From the
            first minibatch over it on, the update makes no more gradient steps; 0 bounds nothing.
    """

    env: Environment | Adapter
    network: Network | Items = Network()
    rates: PpoRates = PpoRates()
    num_envs: int = field(4, AtLeast(1))
    num_steps: int = field(128, AtLeast(1))
    epochs: int = field(4, AtLeast(1))
    minibatches: int = field(4, AtLeast(1))
    central: bool = False
    target_kl: float = field(0.0, AtLeast(0))
    lag: int = field(0, AtLeast(0))
    correct: bool = True
    normalize_obs: bool = False
    normalize_returns: bool = False
    prng: str = "env"
    reset: Reset | None = None

    optimizer = make_optimizer(OptimizerConfig(eps=1e-5, b2=0.999, weight_decay=0.0))

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
        if not self.target_kl:
            return actor_critic_update(self, key, state, inputs, ppo_loss)

        def too_far(info: Info) -> Array:
            return info["approx_kl"] > self.target_kl

        return actor_critic_update(self, key, state, inputs, ppo_loss, too_far)


def ppo_loss(
    weights: PyTree, agent: ActorCritic, batch: Batch, rates: PpoRates
) -> tuple[Array, Info]:
    """The clipped surrogate (eq. 7), the clipped value loss, and the entropy; by `Batch.weight`.

        ratio = exp(log_prob - old)    L = mean(-min(ratio A, clip(ratio, 1 - c, 1 + c) A))
        V = mean(max((v - G)^2, (old_v + clip(v - old_v, -c, c) - G)^2)) / 2
        loss = L + value_coef V - entropy_coef H

    with advantages A of mean 0 and deviation 1 in the batch.

    Returns:
        The loss, and the metrics of `actor_critic_loss` with "approx_kl", the mean of
        ratio - 1 - log ratio, and "clip_fraction", the share of ratios beyond the clip.
    """
    now = evaluate_batch(weights, agent, batch)

    def mean(x):
        return jnp.sum(now.share * x)

    centred = batch.advantage - mean(batch.advantage)
    advantage = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
    ratio = jnp.exp(now.log_ratio)
    clipped = jnp.clip(ratio, 1 - rates.clip, 1 + rates.clip)
    policy_loss = -mean(jnp.minimum(ratio * advantage, clipped * advantage))

    near = batch.value + jnp.clip(now.value - batch.value, -rates.clip, rates.clip)
    error = jnp.maximum((now.value - batch.target) ** 2, (near - batch.target) ** 2)
    value_loss = 0.5 * mean(error)

    loss, info = actor_critic_loss(policy_loss, value_loss, now, batch, rates)
    return loss, info | {
        "approx_kl": mean(ratio - 1 - now.log_ratio),
        "clip_fraction": mean((jnp.abs(ratio - 1) > rates.clip).astype(jnp.float32)),
    }
