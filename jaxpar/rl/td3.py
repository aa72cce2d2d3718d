"""Twin delayed deterministic policy gradients, from a replay buffer."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.rl.buffer import Buffer
from jaxpar.rl.learner import learner_axes
from jaxpar.rl.network import Network
from jaxpar.rl.replay import Experience, LevelReset, ReplayFields, replay_update
from jaxpar.rl.twin_critics import (
    TwinCritics,
    collect_by_actor,
    critic_loss,
    init_twin_critics,
    moved_targets,
    sample_rows,
    update_part,
)
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar

__all__ = ["Td3", "Td3Rates", "td3_actor_loss", "td3_targets"]


@flax.struct.dataclass
class Td3Rates:
    """Numbers of TD3: those of `PpoRates`, and some of its own.

    Deviations and bounds of actions are in units of the box, which is 2 wide.

    Attributes:
        tau: step of target networks towards the online ones, each time that the actor moves.
        noise: deviation of the normal noise in actions.
        target_noise: deviation of the noise in the target actor's actions.
        noise_clip: bound on that noise.
    """

    learning_rate: Scalar = field(1e-3, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.99, Between(0, 1))
    tau: Scalar = field(0.005, Between(0, 1))
    noise: Scalar = field(0.1, AtLeast(0))
    target_noise: Scalar = field(0.2, AtLeast(0))
    noise_clip: Scalar = field(0.5, AtLeast(0))
    reward_scale: Scalar = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Td3(ReplayFields):
    """Twin delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1); an `Algorithm`.

    Gradient steps move the critics, and every `policy_period`-th of them the actor as well, and the
    target networks after it. Actions are noisy, and uniform during the warmup. The environment has
    one agent and actions of a bounded float `Box`; the network shapes the actor and each critic.
    Fields are those of `ReplayFields` and `ReplayLearner`, and:

    Attributes:
        policy_period: gradient steps between moves of the actor and the target networks.
    """

    network: Network = Network(hidden=(256, 256), activation="relu")
    rates: Td3Rates = Td3Rates()
    policy_period: int = field(2, AtLeast(1))
    normalize_obs: bool = False
    normalize_returns: bool = False
    prng: str = "env"
    reset: LevelReset | None = None

    init = init_twin_critics
    step = replay_update
    axes = learner_axes
    collect = collect_by_actor

    def agent(self, greedy: bool = False) -> TwinCritics:
        """The policy, by a state's weights if greedy, else by `(weights, warm, noise)`."""
        return TwinCritics(env=self.env, network=self.network, drawn=False, greedy=greedy)

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: Td3Rates, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a step of `(weights, opt_state, target_weights, gradient_steps)` by `key`."""
        agent = self.agent()
        optimizer = self.optimizer
        weights, opt_state, target, gradient_steps = carry
        rows_key, noise_key = jax.random.split(key)
        rows = sample_rows(rows_key, weights, buffer, self.batch_size)
        noise = jax.random.normal(noise_key, rows.action.shape, rows.action.dtype)

        targets = td3_targets(agent, target, rows, noise, rates)
        weights, opt_state, info = update_part(
            optimizer, "critics", critic_loss, weights, opt_state, rate, agent, rows, targets
        )
        gradient_steps = gradient_steps + 1

        def move_actor():
            critics = weights["critics"]
            moved, moved_state, actor_info = update_part(
                optimizer, "actor", td3_actor_loss, weights, opt_state, rate, agent, critics, rows
            )
            moved_target = moved_targets(target, moved, rates.tau)
            return moved, moved_state, moved_target, actor_info["skipped"]

        def keep_actor():
            return weights, opt_state, target, jnp.zeros_like(info["skipped"])

        is_due = gradient_steps % self.policy_period == 0
        weights, opt_state, target, skipped = jax.lax.cond(is_due, move_actor, keep_actor)
        info |= {"skipped": info["skipped"] + skipped}
        return (weights, opt_state, target, gradient_steps), info


def td3_targets(
    agent: TwinCritics, target: PyTree, rows: Experience, noise: Array, rates: Td3Rates
) -> Array:
    """Targets of experiences `[M]`, by target networks and standard normal `noise [M, n]`.

    a' = clip(actor'(s') + clip(target_noise noise, -noise_clip, noise_clip), -1, 1)
    target = reward + discount min(Q_1'(s', a'), Q_2'(s', a'))
    """
    smooth = jnp.clip(rates.target_noise * noise, -rates.noise_clip, rates.noise_clip)
    action = jnp.clip(agent.action(target["actor"], rows.next_obs) + smooth, -1, 1)
    value = jnp.min(agent.values(target["critics"], rows.next_obs, action), 0)
    return rows.reward + rows.discount * value


def td3_actor_loss(
    actor: PyTree, agent: TwinCritics, critics: PyTree, rows: Experience
) -> tuple[Array, Info]:
    """`-mean(Q_1(s, actor(s)))` by the first critic and `Experience.weight`; no metrics."""
    q = agent.values(critics, rows.obs, agent.action(actor, rows.obs))[0]
    return -jnp.sum(rows.weight * q) / jnp.maximum(jnp.sum(rows.weight), 1), {}
