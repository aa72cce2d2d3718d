"""Soft actor-critic with a temperature that is learned, from a replay buffer."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.rl.buffer import Buffer
from jaxpar.rl.collect import normalized_weights
from jaxpar.rl.distributions import draw_squashed
from jaxpar.rl.learner import learner_axes
from jaxpar.rl.network import Network
from jaxpar.rl.replay import (
    Experience,
    LevelReset,
    ReplayFields,
    ReplayState,
    init_replay,
    replay_update,
)
from jaxpar.rl.twin_critics import (
    TwinCritics,
    collect_by_actor,
    critic_loss,
    init_optimizers,
    moved_targets,
    sample_rows,
    update_part,
)
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar

__all__ = ["Sac", "SacRates", "sac_actor_loss", "sac_targets", "temperature_loss"]


@flax.struct.dataclass
class SacRates:
    """Numbers of SAC: those of `PpoRates`, and some of its own.

    Attributes:
        tau: step of target networks towards the online ones, every gradient step.
        temperature: weight of the entropy, at first.
        target_entropy: entropy at which the temperature keeps the policy, in nats for each number
            of an action, in units of the box: uniform actions have log 2.
    """

    learning_rate: Scalar = field(3e-4, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.99, Between(0, 1))
    tau: Scalar = field(0.005, Between(0, 1))
    temperature: Scalar = field(1.0, Positive())
    target_entropy: Scalar = field(-1.0, Finite())
    reward_scale: Scalar = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Sac(ReplayFields):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1); an `Algorithm`.

    Each gradient step moves critics, actor, temperature and target networks, in this order.
    Actions are the tanh of normal draws, and uniform during the warmup. The environment has one
    agent and actions of a bounded float `Box`; the network shapes the actor and each critic. Fields
    are those of `ReplayFields` and `ReplayLearner`.
    """

    network: Network = Network(hidden=(256, 256), activation="relu")
    rates: SacRates = SacRates()
    normalize_obs: bool = False
    normalize_returns: bool = False
    prng: str = "env"
    reset: LevelReset | None = None

    step = replay_update
    axes = learner_axes
    collect = collect_by_actor

    def agent(self, greedy: bool = False) -> TwinCritics:
        """The policy, by a state's weights if greedy, else by `(weights, warm, noise)`."""
        return TwinCritics(env=self.env, network=self.network, drawn=True, greedy=greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> ReplayState:
        """Draws weights and starts an episode in every environment; consumes `key`."""
        state = init_replay(self, key, inputs)
        log_temperature = jnp.log(jnp.float32(self.rates.temperature))
        state = dataclasses.replace(
            state,
            weights=state.weights | {"log_temperature": log_temperature},
            target_weights={"critics": state.target_weights["critics"]},
        )
        return init_optimizers(self.optimizer, state)

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: SacRates, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a step of `(weights, opt_state, target_weights, gradient_steps)` by `key`."""
        agent = self.agent()
        optimizer = self.optimizer
        weights, opt_state, target, gradient_steps = carry
        rows_key, next_key, now_key = jax.random.split(key, 3)
        rows = sample_rows(rows_key, weights, buffer, self.batch_size)
        next_draw = jax.random.normal(next_key, rows.action.shape, rows.action.dtype)
        draw = jax.random.normal(now_key, rows.action.shape, rows.action.dtype)

        targets = sac_targets(agent, weights, target, rows, next_draw)
        weights, opt_state, info = update_part(
            optimizer, "critics", critic_loss, weights, opt_state, rate, agent, rows, targets
        )

        weights, opt_state, actor_info = update_part(
            optimizer, "actor", sac_actor_loss, weights, opt_state, rate, agent, weights, rows, draw
        )

        entropy = actor_info["entropy"]  # by the actor before its step
        goal = rates.target_entropy * rows.action.shape[-1]
        weights, opt_state, temperature_info = update_part(
            optimizer, "log_temperature", temperature_loss, weights, opt_state, rate, entropy, goal
        )

        skipped = info["skipped"] + actor_info["skipped"] + temperature_info["skipped"]
        temperature = jnp.exp(weights["log_temperature"])
        info |= {"skipped": skipped, "entropy": entropy, "temperature": temperature}
        target = moved_targets(target, weights, rates.tau)
        return (weights, opt_state, target, gradient_steps + 1), info


def sac_targets(
    agent: TwinCritics, weights: PyTree, target: PyTree, rows: Experience, noise: Array
) -> Array:
    """Targets of experiences `[M]`; a', of density p, is drawn by normal `noise [M, n]`.

    target = reward + discount (min(Q_1'(s', a'), Q_2'(s', a')) - temperature log p(a' | s'))
    """
    action, log_p = draw_squashed(agent.head(weights["actor"], rows.next_obs), noise)
    value = jnp.min(agent.values(target["critics"], rows.next_obs, action), 0)
    return rows.reward + rows.discount * (value - jnp.exp(weights["log_temperature"]) * log_p)


def sac_actor_loss(
    actor: PyTree, agent: TwinCritics, weights: PyTree, rows: Experience, noise: Array
) -> tuple[Array, Info]:
    """`mean(temperature log p(a | s) - min(Q_1(s, a), Q_2(s, a)))`, a drawn by `noise [M, n]`.

    Means are by `Experience.weight`.

    Returns:
        The loss, and "entropy", the mean of -log p.
    """
    action, log_p = draw_squashed(agent.head(actor, rows.obs), noise)
    q = jnp.min(agent.values(weights["critics"], rows.obs, action), 0)
    share = normalized_weights(rows.weight)
    loss = jnp.sum(share * (jnp.exp(weights["log_temperature"]) * log_p - q))
    return loss, {"entropy": -jnp.sum(share * log_p)}


def temperature_loss(log_temperature: Array, entropy: Array, goal: Scalar) -> tuple[Array, Info]:
    """`temperature (entropy - goal)`; its descent cools a policy above its goal. No metrics."""
    return jnp.exp(log_temperature) * (entropy - goal), {}
