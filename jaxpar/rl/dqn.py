"""Q-learning from a replay buffer, with a target network."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, OneOf, Positive, field
from jaxpar.rl.action_values import (
    ActionValues,
    QBatch,
    action_masks,
    action_values_agent,
    epsilon_schedule,
    q_loss,
    team_steps,
)
from jaxpar.rl.buffer import Buffer, sample
from jaxpar.rl.learner import LearnerState, learner_axes
from jaxpar.rl.network import Network
from jaxpar.rl.replay import (
    Experience,
    LevelReset,
    ReplayFields,
    ReplayState,
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
    """Numbers of DQN: those of `PqnRates` without "q_lambda", and one of its own.

    Attributes:
        tau: step of the target network towards the online one, every `Dqn.target_period` gradient
            steps: 1 copies it, a small one with a period of 1 averages.
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
class Dqn(ReplayFields):
    """Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1); an `Algorithm`.

    Finished environments spend a step on their last observation (`NextStep`), so the next
    observation is always in the next row; those steps are not kept. Several agents share the
    network; with a decomposition they learn the team's mean reward (VDN, QMIX). Fields are those of
    `ReplayFields`, `ReplayLearner` and `QLearner`, and:

    Attributes:
        double: True if the online network chooses the action that the target network values (van
            Hasselt et al. 2016, arXiv:1509.06461, eq. 4).
        target_period: gradient steps between moves of the target network.
    """

    network: Network = Network(hidden=(120, 84), activation="relu", layer_norm=True)
    rates: DqnRates = DqnRates()
    num_envs: int = field(8, AtLeast(1))
    gradient_steps: int = field(16, AtLeast(1))
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

    agent = action_values_agent
    init = init_replay
    axes = learner_axes

    def step(self, key: PRNGKey, state: ReplayState, inputs: PyTree) -> tuple[ReplayState, Info]:
        """Makes an update; consumes `key`. During the warmup, metrics of learning are NaN."""
        epsilon = epsilon_schedule(state.rates, state.updates)
        state, info = replay_update(self, key, state, inputs)
        return state, info | {"epsilon": epsilon}

    def collect(
        self, key: PRNGKey, state: LearnerState, warm: Array, params: PyTree
    ) -> tuple[EnvState, Trajectory, Experience]:
        """Makes a rollout, which explores by the schedule alone, and its experiences `[T, B]`."""
        acting = state.weights, epsilon_schedule(state.rates, state.updates)
        env_state, trajectory = next_step_rollout(self, key, state.env_state, params, acting)
        masks = action_masks(self.env, env_state.state, params)
        steps, done, weight = team_steps(self.agent(), trajectory, state.agent_done)
        experience = n_step_experience(
            steps, env_state.obs, masks, state.rates, self.n_step, done, weight
        )
        return env_state, trajectory, experience

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: PyTree, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a step of `(weights, opt_state, target_weights, gradient_steps)` by `key`."""
        agent = self.agent()
        weights, opt_state, target, gradient_steps = carry
        rows = sample(key, buffer, self.batch_size)
        batch = td_targets(agent, weights, target, rows, self.double)
        grads, info = jax.grad(q_loss, has_aux=True)(weights, agent, batch)
        weights, opt_state, optimizer_info = self.optimizer.update(
            grads, opt_state, weights, rate=rate, max_norm=rates.max_grad_norm
        )

        # A step of size 0 between moves: a `cond` under `vmap` over seeds would compute both
        # branches anyway.
        gradient_steps = gradient_steps + 1
        share = jnp.where(gradient_steps % self.target_period == 0, rates.tau, 0.0)
        target = jax.tree.map(lambda old, new: (1 - share) * old + share * new, target, weights)
        return (weights, opt_state, target, gradient_steps), info | optimizer_info


def td_targets(
    agent: ActionValues, weights: PyTree, target_weights: PyTree, rows: Experience, double: bool
) -> QBatch:
    """Experiences `[M]` with their targets, as a batch of one step `[1, M]`.

        target = reward + discount Q'(s', argmax_a Q''(s', a))

    over legal actions, with Q' by `target_weights`, and Q'' by the online `weights` if `double`,
    else as Q'.
    """
    start = jnp.zeros((1, *rows.weight.shape[:1]), bool)
    rows = jax.tree.map(lambda x: x[None], rows)
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (start.size, *x.shape)), agent.first_carry())
    values = agent.apply(target_weights, rows.next_obs, start, carry, rows.next_mask).q
    chosen = values
    if double:
        chosen = agent.apply(weights, rows.next_obs, start, carry, rows.next_mask).q
    best = jnp.take_along_axis(values, jnp.argmax(chosen, -1)[..., None], -1)[..., 0]
    value = agent.joint(target_weights, rows.next_obs, best)
    return QBatch(
        obs=rows.obs,
        start=start,
        action=rows.action,
        target=rows.reward + rows.discount * value,
        weight=rows.weight,
        carry=carry,
    )
