"""Twin delayed deterministic policy gradients, from a replay buffer."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.buffer import Buffer, sample
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

__all__ = ["Td3", "Td3Rates", "td3_actor_loss", "td3_targets"]


@flax.struct.dataclass
class Td3Rates:
    """Numbers of TD3: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Deviations and bounds of actions are in units of the box, which is 2 wide.

    Attributes:
        learning_rate: of Adam, at first, of actor and critics.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        tau: how far target networks move to the online ones, each time that the actor does.
        noise: deviation of what is added to actions.
        target_noise: deviation of what is added to the target actor's.
        noise_clip: the most that is added there.
        reward_scale: what rewards are multiplied by before anything is learned from them.
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
class Td3:
    """Twin delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1); an `Algorithm`, a step of it an update.

    An update makes `num_steps` steps in `num_envs` environments, keeps them in a ring of `capacity` experiences on the
    device, and makes `gradient_steps` gradient steps of the critics on batches sampled from it; every
    `policy_period`-th of them the actor is moved as well, and the target networks after it.

    Attributes:
        env: the environment or adapter, of one agent, with actions of a bounded float `Box`.
        network: of the actor and of each critic, without a memory.
        rates: numbers.
        num_envs: B.
        num_steps: T, of a rollout.
        gradient_steps: of the critics, after each rollout.
        batch_size: experiences a gradient step.
        capacity: experiences that are kept.
        warmup: experiences before anything is learned, by uniform actions.
        n_step: rewards that a target sums, fewer where an episode or the rollout ends.
        policy_period: gradient steps between moves of the actor and the target networks.
        normalize_obs: whether observations are standardised by their running mean and deviation, which are part of the
            weights: those before an update in all of it, and in evaluation as they stand.
        normalize_returns: whether rewards are divided by the running deviation of their discounted sums.
        prng: as in `jaxpar.rollout.rollout`.
        reset: where new episodes begin: `NextStep`'s `by`; None for the exact default.
    """

    env: Environment | Adapter
    network: Network = Network(hidden=(256, 256), activation="relu")
    rates: Td3Rates = Td3Rates()
    num_envs: int = field(4, AtLeast(1))
    num_steps: int = field(16, AtLeast(1))
    gradient_steps: int = field(64, AtLeast(1))
    batch_size: int = field(128, AtLeast(1))
    capacity: int = field(65536, AtLeast(1))
    warmup: int = field(1024, AtLeast(0))
    n_step: int = field(1, AtLeast(1))
    policy_period: int = field(2, AtLeast(1))
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
        return TwinCritics(self.env, self.network, drawn=False, greedy=greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> ReplayState:
        """Draws weights and starts an episode in every environment; consumes `key`."""
        state = init_replay(self, key, inputs)
        opt_state = {
            name: self.optimizer.init(part) for name, part in learned(state.weights).items()
        }
        return dataclasses.replace(state, opt_state=opt_state)

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
        return collect_experience(
            self, key, state, (state.weights, warm, state.rates.noise), params
        )

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: Td3Rates, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a gradient step of `(weights, opt_state, target_weights, gradient_steps)`; consumes `key`."""
        agent, optimizer = self.agent(), self.optimizer
        rows_key, noise_key = jax.random.split(key)
        weights, opt_state, target, gradient_steps = carry
        rows = standard_rows(weights, sample(rows_key, buffer, self.batch_size))
        noise = jax.random.normal(noise_key, rows.action.shape, rows.action.dtype)
        wanted = td3_targets(agent, target, rows, noise, rates)
        weights, opt_state, info = update_part(
            optimizer,
            "critics",
            lambda part: critic_loss(part, agent, rows, wanted),
            weights,
            opt_state,
            rate,
        )
        gradient_steps = gradient_steps + 1

        def delayed():
            after, moved, said = update_part(
                optimizer, "actor", lambda part: td3_actor_loss(part, agent, weights["critics"], rows), weights,
                opt_state, rate,
            )  # fmt: skip
            return after, moved, moved_targets(target, after, rates.tau), said["skipped"]

        weights, opt_state, target, skipped = jax.lax.cond(
            gradient_steps % self.policy_period == 0,
            delayed,
            lambda: (weights, opt_state, target, jnp.zeros_like(info["skipped"])),
        )
        return (weights, opt_state, target, gradient_steps), info | {
            "skipped": info["skipped"] + skipped
        }


def td3_targets(
    agent: TwinCritics, target: PyTree, rows: Experience, noise: Array, rates: Td3Rates
) -> Array:
    """What actions of experiences `[M]` are to be worth, by target networks and standard normal `noise [M, n]`.

    a' = clip(actor'(s') + clip(target_noise noise, -noise_clip, noise_clip), -1, 1)
    target = reward + discount min(Q_1'(s', a'), Q_2'(s', a'))
    """
    smooth = jnp.clip(rates.target_noise * noise, -rates.noise_clip, rates.noise_clip)
    action = jnp.clip(agent.action(target["actor"], rows.next_obs) + smooth, -1, 1)
    return rows.reward + rows.discount * jnp.min(
        agent.values(target["critics"], rows.next_obs, action), 0
    )


def td3_actor_loss(
    actor: PyTree, agent: TwinCritics, critics: PyTree, rows: Experience
) -> tuple[Array, Info]:
    """`-mean(Q_1(s, actor(s)))` by the first critic, means by `Experience.weight`; nothing to tell."""
    q = agent.values(critics, rows.obs, agent.action(actor, rows.obs))[0]
    return -jnp.sum(rows.weight * q) / jnp.maximum(jnp.sum(rows.weight), 1), {}
