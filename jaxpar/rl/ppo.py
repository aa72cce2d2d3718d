"""Proximal policy optimisation, and with several agents IPPO and MAPPO."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch, check_minibatches
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

__all__ = ["Ppo", "PpoRates", "ppo_loss"]


@flax.struct.dataclass
class PpoRates:
    """Numbers of PPO: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of Adam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        gae_lambda: lambda of the generalised advantages.
        clip: how far the ratio, and the value, may usefully move from what they were.
        value_coef: weight of the value's loss.
        entropy_coef: weight of the policy's entropy.
        max_grad_norm: gradients longer than this are shortened to it.
        reward_scale: what rewards are multiplied by before anything is learned from them.
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
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347); an `Algorithm`, a step of it an update.

    An update makes `num_steps` steps in each of `num_envs` environments, computes generalised advantages, and goes
    `epochs` times through them in `minibatches` parts. Its inputs are the environment's parameters, None for the
    default ones. With a memory, whole rollouts are trained on, all steps at once, from the carry before them, with
    episodes' starts inside. Several agents share the network (IPPO); `central` gives them MAPPO's critic.

    Attributes:
        env: the environment or adapter.
        network: of policy and value.
        rates: numbers.
        num_envs: B.
        num_steps: T, of a rollout.
        epochs: passes over each rollout.
        minibatches: parts of a rollout: of whole environments where there is a memory, else of single steps.
        central: whether the value reads all agents' observations.
        target_kl: an update makes no more gradient steps from the first minibatch on in which "approx_kl", the distance
            to the policy before it, is over this; 0 leaves out none.
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

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        check_minibatches(self.num_steps, self.num_envs, self.minibatches, self.has_memory)
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
        too_far = (lambda info: info["approx_kl"] > self.target_kl) if self.target_kl else None
        return actor_critic_update(self, key, state, inputs, ppo_loss, too_far)

    def axes(self) -> PyTree:
        """Logical axes of the state; see `learner_axes`."""
        return learner_axes(self)


def ppo_loss(
    weights: PyTree, agent: ActorCritic, batch: Batch, rates: PpoRates
) -> tuple[Array, Info]:
    """The clipped surrogate (eq. 7), the clipped value loss, and the entropy, of a batch; means by `Batch.weight`.

        ratio = exp(log_prob - old)    L = mean(-min(ratio A, clip(ratio, 1 - c, 1 + c) A))
        V = mean(max((v - G)^2, (old_v + clip(v - old_v, -c, c) - G)^2)) / 2
        loss = L + value_coef V - entropy_coef H

    with advantages A of mean 0 and deviation 1 in the batch.

    Returns:
        The loss, and of its parts: "policy_loss", "value_loss", "entropy", "approx_kl" (mean of ratio - 1 - log ratio),
        "clip_fraction" (share of ratios beyond the clip), "ratio_error" (largest distance of a ratio from 1) and
        "converged".
    """
    out = agent.apply(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)

    def mean(x):
        return jnp.sum(share * x)

    centred = batch.advantage - mean(batch.advantage)
    advantage = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
    log_ratio = log_prob(agent.action_space, out.policy, batch.raw_action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    policy = -mean(
        jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - rates.clip, 1 + rates.clip) * advantage)
    )
    near = batch.value + jnp.clip(out.value - batch.value, -rates.clip, rates.clip)
    value = 0.5 * mean(jnp.maximum((out.value - batch.target) ** 2, (near - batch.target) ** 2))
    spread = mean(entropy(agent.action_space, out.policy))
    info = {
        "policy_loss": policy,
        "value_loss": value,
        "entropy": spread,
        "approx_kl": mean(ratio - 1 - log_ratio),
        "clip_fraction": mean((jnp.abs(ratio - 1) > rates.clip).astype(jnp.float32)),
        "ratio_error": largest(batch.weight * jnp.abs(ratio - 1)),
        "converged": out.converged.astype(jnp.float32),
    }
    return policy + rates.value_coef * value - rates.entropy_coef * spread, info
