"""Soft actor-critic with a temperature that is learned, from a replay buffer."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.buffer import Buffer, sample
from jaxpar.rl.distributions import draw_squashed
from jaxpar.rl.learner import LearnerState, learner_axes
from jaxpar.rl.network import Network
from jaxpar.rl.replay import (
    Experience,
    LevelReset,
    ReplayState,
    check_replay,
    collect_experience,
    init_replay,
    learned,
    replay_update,
)
from jaxpar.rl.twin_critics import (
    TwinCritics,
    critic_loss,
    moved_targets,
    standard_rows,
    update_part,
)
from jaxpar.rollout import EnvState, Trajectory
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar

__all__ = ["Sac", "SacRates", "sac_actor_loss", "sac_targets", "temperature_loss"]


@flax.struct.dataclass
class SacRates:
    """Numbers of SAC: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of Adam, at first, of actor, critics and temperature.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        tau: how far target networks move to the online ones, every gradient step.
        temperature: weight of the entropy, at first.
        target_entropy: what the temperature is to keep the policy's entropy at, in nats for each number of an action,
            in units of the box: uniform actions have log 2.
        reward_scale: what rewards are multiplied by before anything is learned from them.
    """

    learning_rate: Scalar = field(3e-4, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.99, Between(0, 1))
    tau: Scalar = field(0.005, Between(0, 1))
    temperature: Scalar = field(1.0, Positive())
    target_entropy: Scalar = field(-1.0, Finite())
    reward_scale: Scalar = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Sac:
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1); an `Algorithm`, a step of it an update.

    An update makes `num_steps` steps in `num_envs` environments, keeps them in a ring of `capacity` experiences on the
    device, and makes `gradient_steps` gradient steps on batches sampled from it, each of critics, actor, temperature
    and target networks in turn. Actions are the tanh of normal draws.

    Attributes:
        env: the environment or adapter, of one agent, with actions of a bounded float `Box`.
        network: of the actor and of each critic, without a memory.
        rates: numbers.
        num_envs: B.
        num_steps: T, of a rollout.
        gradient_steps: after each rollout.
        batch_size: experiences a gradient step.
        capacity: experiences that are kept.
        warmup: experiences before anything is learned, by uniform actions.
        n_step: rewards that a target sums, fewer where an episode or the rollout ends.
        normalize_obs: whether observations are standardised by their running mean and deviation, which are part of the
            weights: those before an update in all of it, and in evaluation as they stand.
        normalize_returns: whether rewards are divided by the running deviation of their discounted sums.
        prng: as in `jaxpar.rollout.rollout`.
        reset: where new episodes begin: `NextStep`'s `by`; None for the exact default.
    """

    env: Environment | Adapter
    network: Network = Network(hidden=(256, 256), activation="relu")
    rates: SacRates = SacRates()
    num_envs: int = field(4, AtLeast(1))
    num_steps: int = field(16, AtLeast(1))
    gradient_steps: int = field(64, AtLeast(1))
    batch_size: int = field(128, AtLeast(1))
    capacity: int = field(65536, AtLeast(1))
    warmup: int = field(1024, AtLeast(0))
    n_step: int = field(1, AtLeast(1))
    normalize_obs: bool = False
    normalize_returns: bool = False
    prng: str = "env"
    reset: LevelReset | None = None

    optimizer = make_optimizer(OptimizerConfig(eps=1e-8, b2=0.999, weight_decay=0.0))

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_replay(self)
        self.agent()

    def agent(self, greedy: bool = False) -> TwinCritics:
        """The policy; if greedy, with the weights of a state as its parameters, else with `(weights, warm, noise)`."""
        return TwinCritics(self.env, self.network, drawn=True, greedy=greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> ReplayState:
        """Draws weights and starts an episode in every environment; consumes `key`."""
        state = init_replay(self, key, inputs)
        weights = state.weights | {"log_temperature": jnp.log(jnp.float32(self.rates.temperature))}
        return dataclasses.replace(
            state,
            weights=weights,
            opt_state={name: self.optimizer.init(part) for name, part in learned(weights).items()},
            target_weights={"critics": state.target_weights["critics"]},
        )

    def step(self, key: PRNGKey, state: ReplayState, inputs: PyTree) -> tuple[ReplayState, Info]:
        """Makes an update; consumes `key`. During the warmup, metrics of learning are NaN."""
        return replay_update(self, key, state, inputs)

    def axes(self) -> PyTree:
        """Logical axes of the state; see `learner_axes`."""
        return learner_axes(self)

    def collect(
        self, key: PRNGKey, state: LearnerState, warm: Array, params: PyTree
    ) -> tuple[EnvState, Trajectory, Experience]:
        """Makes a rollout, by uniform actions until it is `warm`, and its experiences `[T, B]`; consumes `key`."""
        return collect_experience(self, key, state, (state.weights, warm, None), params)

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: SacRates, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a gradient step of `(weights, opt_state, target_weights, gradient_steps)`; consumes `key`."""
        agent, optimizer = self.agent(), self.optimizer
        rows_key, next_key, now_key = jax.random.split(key, 3)
        weights, opt_state, target, gradient_steps = carry
        rows = standard_rows(weights, sample(rows_key, buffer, self.batch_size))
        after, now = (
            jax.random.normal(k, rows.action.shape, rows.action.dtype) for k in (next_key, now_key)
        )
        wanted = sac_targets(agent, weights, target, rows, after)
        weights, opt_state, info = update_part(
            optimizer,
            "critics",
            lambda part: critic_loss(part, agent, rows, wanted),
            weights,
            opt_state,
            rate,
        )
        others = weights
        weights, opt_state, of_actor = update_part(
            optimizer,
            "actor",
            lambda part: sac_actor_loss(part, agent, others, rows, now),
            weights,
            opt_state,
            rate,
        )
        entropy = of_actor["entropy"]  # by the actor before its move
        goal = rates.target_entropy * rows.action.shape[-1]
        weights, opt_state, of_temperature = update_part(
            optimizer,
            "log_temperature",
            lambda part: temperature_loss(part, entropy, goal),
            weights,
            opt_state,
            rate,
        )
        skipped = info["skipped"] + of_actor["skipped"] + of_temperature["skipped"]
        info |= {
            "skipped": skipped,
            "entropy": entropy,
            "temperature": jnp.exp(weights["log_temperature"]),
        }
        return (
            weights,
            opt_state,
            moved_targets(target, weights, rates.tau),
            gradient_steps + 1,
        ), info


def sac_targets(
    agent: TwinCritics, weights: PyTree, target: PyTree, rows: Experience, noise: Array
) -> Array:
    """What actions of experiences `[M]` are to be worth, with a' and its density p by standard normal `noise [M, n]`.

    target = reward + discount (min(Q_1'(s', a'), Q_2'(s', a')) - temperature log p(a' | s'))
    """
    action, log_p = draw_squashed(agent.head(weights["actor"], rows.next_obs), noise)
    value = jnp.min(agent.values(target["critics"], rows.next_obs, action), 0)
    return rows.reward + rows.discount * (value - jnp.exp(weights["log_temperature"]) * log_p)


def sac_actor_loss(
    actor: PyTree, agent: TwinCritics, weights: PyTree, rows: Experience, noise: Array
) -> tuple[Array, Info]:
    """`mean(temperature log p(a | s) - min(Q_1(s, a), Q_2(s, a)))`, a by `noise [M, n]`; means by `Experience.weight`.

    Returns:
        The loss, and "entropy", the mean of -log p.
    """
    action, log_p = draw_squashed(agent.head(actor, rows.obs), noise)
    q = jnp.min(agent.values(weights["critics"], rows.obs, action), 0)
    share = rows.weight / jnp.maximum(jnp.sum(rows.weight), 1)
    loss = jnp.sum(share * (jnp.exp(weights["log_temperature"]) * log_p - q))
    return loss, {"entropy": -jnp.sum(share * log_p)}


def temperature_loss(log_temperature: Array, entropy: Array, goal: Scalar) -> tuple[Array, Info]:
    """`temperature (entropy - goal)`, whose descent cools a policy above its goal; nothing to tell."""
    return jnp.exp(log_temperature) * (entropy - goal), {}
