"""Q-learning from a replay buffer, with a target network."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, OneOf, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.action_values import (
    ActionValues,
    QBatch,
    action_masks,
    epsilon_schedule,
    q_loss,
    team_trajectory,
)
from jaxpar.rl.buffer import Buffer, sample
from jaxpar.rl.collect import done_and_weight
from jaxpar.rl.learner import LearnerState, learner_axes
from jaxpar.rl.network import Network
from jaxpar.rl.replay import (
    Experience,
    LevelReset,
    ReplayState,
    check_replay,
    init_replay,
    n_step_experience,
    next_step_rollout,
    replay_update,
)
from jaxpar.rl.value_decomposition import DECOMPOSITIONS
from jaxpar.rollout import EnvState, Trajectory
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar

__all__ = ["Dqn", "DqnRates", "td_targets"]


@flax.struct.dataclass
class DqnRates:
    """Numbers of DQN: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of Adam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        epsilon_start: share of random actions, at first.
        epsilon_end: and in the end.
        epsilon_anneal: updates over which it gets there, in a line.
        tau: how far the target network moves to the online one, every `Dqn.target_period` gradient steps: 1 copies it,
            a small one with a period of 1 averages.
        max_grad_norm: gradients longer than this are shortened to it.
        reward_scale: what rewards are multiplied by before anything is learned from them.
    """

    learning_rate: Scalar = field(2.5e-4, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.99, Between(0, 1))
    epsilon_start: Scalar = field(1.0, Between(0, 1))
    epsilon_end: Scalar = field(0.05, Between(0, 1))
    epsilon_anneal: Scalar = field(500.0, AtLeast(0))
    tau: Scalar = field(1.0, Between(0, 1))
    max_grad_norm: Scalar = field(10.0, AtLeast(0))
    reward_scale: Scalar = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Dqn:
    """Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1); an `Algorithm`, a step of it an update.

    An update makes `num_steps` steps in `num_envs` environments, keeps them in a ring of `capacity` experiences on the
    device, and makes `gradient_steps` gradient steps on batches sampled from it. Finished environments spend a step on
    their last observation (`NextStep`), so the next observation is always in the next row; those steps are not kept.
    Several agents share the network; with a decomposition they are taught the team's mean reward (VDN, QMIX).

    Attributes:
        env: the environment or adapter, with actions `Discrete`.
        network: of the values, without a memory.
        rates: numbers.
        num_envs: B.
        num_steps: T, of a rollout.
        gradient_steps: after each rollout.
        batch_size: experiences a gradient step.
        capacity: experiences that are kept.
        warmup: experiences before anything is learned.
        n_step: rewards that a target sums, fewer where an episode or the rollout ends.
        double: whether the online network chooses the action that the target network values (van Hasselt et al. 2016,
            arXiv:1509.06461, eq. 4).
        target_period: gradient steps between moves of the target network.
        decomposition: "none", "vdn" or "qmix".
        decomposition_size: hidden units of QMIX's mixing network.
        prng: as in `jaxpar.rollout.rollout`.
        reset: where new episodes begin: `NextStep`'s `by`; None for the exact default.
    """

    env: Environment | Adapter
    network: Network = Network(hidden=(120, 84), activation="relu", layer_norm=True)
    rates: DqnRates = DqnRates()
    num_envs: int = field(8, AtLeast(1))
    num_steps: int = field(16, AtLeast(1))
    gradient_steps: int = field(16, AtLeast(1))
    batch_size: int = field(128, AtLeast(1))
    capacity: int = field(65536, AtLeast(1))
    warmup: int = field(4096, AtLeast(0))
    n_step: int = field(3, AtLeast(1))
    double: bool = True
    target_period: int = field(100, AtLeast(1))
    decomposition: str = field("none", OneOf(DECOMPOSITIONS))
    decomposition_size: int = field(32, AtLeast(1))
    prng: str = "env"
    reset: LevelReset | None = None
    normalize_obs = False
    normalize_returns = False

    optimizer = make_optimizer(OptimizerConfig(eps=1e-8, b2=0.999, weight_decay=0.0))

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_replay(self)
        self.agent()

    def agent(self, greedy: bool = False) -> ActionValues:
        """The policy; if greedy, with the weights of a state as its parameters, else with `(weights, epsilon)`."""
        return ActionValues(
            self.env, self.network, self.decomposition, self.decomposition_size, greedy
        )

    def init(self, key: PRNGKey, inputs: PyTree) -> ReplayState:
        """Draws weights and starts an episode in every environment; consumes `key`."""
        return init_replay(self, key, inputs)

    def step(self, key: PRNGKey, state: ReplayState, inputs: PyTree) -> tuple[ReplayState, Info]:
        """Makes an update; consumes `key`. During the warmup, metrics of learning are NaN."""
        stepped, info = replay_update(self, key, state, inputs)
        return stepped, info | {"epsilon": epsilon_schedule(state.rates, state.updates)}

    def axes(self) -> PyTree:
        """Logical axes of the state; see `learner_axes`."""
        return learner_axes(self)

    def collect(
        self, key: PRNGKey, state: LearnerState, warm: Array, params: PyTree
    ) -> tuple[EnvState, Trajectory, Experience]:
        """Makes a rollout, with a share of random actions by the schedule alone, and its experiences `[T, B]`."""
        agent, acting = self.agent(), (state.weights, epsilon_schedule(state.rates, state.updates))
        env_state, trajectory = next_step_rollout(self, key, state.env_state, params, acting)
        masks = action_masks(self.env, env_state.state, params)
        # A decomposition makes agents a team, which ends as one.
        steps = team_trajectory(agent, trajectory)
        done, weight = done_and_weight(
            steps, state.agent_done if agent.decomposition == "none" else None
        )
        experience = n_step_experience(
            steps, env_state.obs, masks, state.rates, self.n_step, done, weight
        )
        return env_state, trajectory, experience

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: PyTree, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a gradient step of `(weights, opt_state, target_weights, gradient_steps)`; consumes `key`."""
        rows = sample(key, buffer, self.batch_size)
        agent, optimizer = self.agent(), self.optimizer
        weights, opt_state, target, gradient_steps = carry
        batch = td_targets(agent, weights, target, rows, self.double)
        grads, info = jax.grad(q_loss, has_aux=True)(weights, agent, batch)
        weights, opt_state, optimizer_info = optimizer.update(grads, opt_state, weights, rate=rate,
                                                              max_norm=rates.max_grad_norm)  # fmt: skip
        gradient_steps = gradient_steps + 1
        # A step size of 0 between moves: a `cond` under `vmap` over seeds would compute both branches anyway.
        share = jnp.where(gradient_steps % self.target_period == 0, rates.tau, 0.0)
        target = jax.tree.map(lambda old, new: (1 - share) * old + share * new, target, weights)
        return (weights, opt_state, target, gradient_steps), info | optimizer_info


def td_targets(
    agent: ActionValues, weights: PyTree, target_weights: PyTree, rows: Experience, double: bool
) -> QBatch:
    """Experiences `[M]` with their targets, as a batch of one step `[1, M]`.

        target = reward + discount Q'(s', argmax_a Q''(s', a))

    over legal actions, with Q' by `target_weights`, and Q'' by the online `weights` if `double`, else as Q'.
    """
    start = jnp.zeros((1, *rows.weight.shape[:1]), bool)
    rows = jax.tree.map(lambda x: x[None], rows)
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (start.size, *x.shape)), agent.first_carry())
    values = agent.apply(target_weights, rows.next_obs, start, carry, rows.next_mask).q
    chosen = (
        agent.apply(weights, rows.next_obs, start, carry, rows.next_mask).q if double else values
    )
    best = jnp.take_along_axis(values, jnp.argmax(chosen, -1)[..., None], -1)[..., 0]
    value = agent.joint(target_weights, rows.next_obs, best)
    return QBatch(
        rows.obs, start, rows.action, rows.reward + rows.discount * value, rows.weight, carry
    )
