"""Q-learning from a replay buffer, with a target network."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, OneOf, Positive, field
from jaxpar.optim import OptimizerConfig, annealed, make_optimizer
from jaxpar.rl.action_values import ActionValues, QBatch, action_masks, epsilon_schedule, q_loss, team_trajectory
from jaxpar.rl.buffer import Buffer, add, empty_buffer, sample
from jaxpar.rl.collect import done_and_weight, last_agent_done, update_episode_stats
from jaxpar.rl.learner import LearnerState, check_learner, has_memory, init_learner, learner_axes, mean_metrics
from jaxpar.rl.network import Network
from jaxpar.rl.returns import n_step_returns
from jaxpar.rl.value_decomposition import DECOMPOSITIONS
from jaxpar.rollout import Chunked, EnvState, GivenLevel, NextStep, Pool, SameStep, Trajectory, rollout
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar, UsageError

__all__ = ["Dqn", "DqnRates", "DqnState", "Experience", "n_step_experience", "td_targets"]


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


@flax.struct.dataclass
class Experience:
    """A transition of up to n steps; `[*L, (N), ...]`, numbers without N where a decomposition makes agents a team.

    Attributes:
        obs: before the first step.
        action: of the first step, int32.
        reward: discounted sum of the steps' rewards.
        discount: of the value of `next_obs`; 0 where the process terminated.
        next_obs: after the last step; the last observation of an episode that was truncated.
        next_mask: legal actions there, or None.
        weight: float32, 1 where it counts, 0 outside of episodes.
    """

    obs: PyTree
    action: Array
    reward: Array
    discount: Array
    next_obs: PyTree
    next_mask: Array | None
    weight: Array


@flax.struct.dataclass
class DqnState(LearnerState):
    """A learner's state, with its target network and replay buffer.

    Attributes:
        target_weights: of the target network.
        buffer: of `Experience` rows; on a mesh, whole on every device.
        gradient_steps: int32 [], made so far.
    """

    target_weights: PyTree
    buffer: Buffer
    gradient_steps: Array


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
    reset: Chunked | SameStep | Pool | GivenLevel | None = None

    optimizer = make_optimizer(OptimizerConfig(eps=1e-8, b2=0.999, weight_decay=0.0))

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        least = max(self.num_envs * self.num_steps, self.warmup)
        if self.capacity < least:
            raise UsageError(
                f"capacity={self.capacity} is too small: it must hold an update's {self.num_envs * self.num_steps} "
                f"steps and the warmup={self.warmup}; the least is {least}."
            )
        if has_memory(self.network):
            raise UsageError(
                f"memory={self.network.memory!r} has no place in a buffer of single experiences: give memory='none', "
                "or learn with Pqn."
            )
        self.agent()

    def agent(self, greedy: bool = False) -> ActionValues:
        """The policy; if greedy, with the weights of a state as its parameters, else with `(weights, epsilon)`."""
        return ActionValues(self.env, self.network, self.decomposition, self.decomposition_size, greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> DqnState:
        """Draws weights and starts an episode in every environment; consumes `key`."""
        first = init_learner(self, key, inputs)
        params = self.env.default_params if inputs is None else inputs
        acting = first.weights, jnp.float32(1)
        experience = jax.eval_shape(lambda key: self._collect(key, first, acting, params)[2], key)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), experience)
        return DqnState(
            **vars(first),
            target_weights=jax.tree.map(jnp.copy, first.weights),
            buffer=empty_buffer(row, self.capacity),
            gradient_steps=jnp.int32(0),
        )

    def step(self, key: PRNGKey, state: DqnState, inputs: PyTree) -> tuple[DqnState, Info]:
        """Makes an update; consumes `key`. During the warmup, metrics of learning are NaN."""
        params = self.env.default_params if inputs is None else inputs
        act_key, learn_key = jax.random.split(key)
        epsilon = epsilon_schedule(state.rates, state.updates)
        env_state, trajectory, experience = self._collect(act_key, state, (state.weights, epsilon), params)
        experience = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), experience)
        # One row holds all agents of a step: it is kept if any of them was in its episode.
        keep = jnp.any(experience.weight.reshape(len(experience.weight), -1) > 0, -1)
        buffer = add(state.buffer, experience, keep)
        rate = annealed(state.rates.learning_rate, state.rates.anneal, state.updates)
        carry = state.weights, state.opt_state, state.target_weights, state.gradient_steps

        def gradient(carry, key):
            return self._gradient(carry, sample(key, buffer, self.batch_size), state.rates, rate)

        keys = jax.random.split(learn_key, self.gradient_steps)
        metrics = jax.eval_shape(gradient, carry, keys[0])[1]
        idle = {"converged": 1.0, "skipped": 0.0}
        during_warmup = {name: jnp.full(self.gradient_steps, idle.get(name, jnp.nan)) for name in metrics}
        (weights, opt_state, target, gradient_steps), infos = jax.lax.cond(
            buffer.size >= self.warmup, lambda: jax.lax.scan(gradient, carry, keys), lambda: (carry, during_warmup)
        )
        info = mean_metrics(infos) | {"learning_rate": rate, "epsilon": epsilon}
        info["buffer_size"] = buffer.size.astype(jnp.float32)
        info, stats = update_episode_stats(info, state.episode_stats, trajectory)
        state = dataclasses.replace(
            state,
            weights=weights,
            opt_state=opt_state,
            target_weights=target,
            gradient_steps=gradient_steps,
            buffer=buffer,
            env_state=env_state,
            agent_done=last_agent_done(trajectory),
            updates=state.updates + 1,
            episode_stats=stats,
        )
        return state, info

    def axes(self) -> PyTree:
        """Logical axes of the state; see `learner_axes`."""
        return learner_axes(self)

    def _collect(self, key, state, acting, params) -> tuple[EnvState, Trajectory, Experience]:
        agent, reset = self.agent(), NextStep(Chunked() if self.reset is None else self.reset)
        env_state, trajectory = rollout(key, state.env_state, self.env, params, agent, acting, self.num_steps,
                                        prng=self.prng, reset=reset)  # fmt: skip
        masks = action_masks(self.env, env_state.state, params)
        experience = n_step_experience(agent, trajectory, env_state.obs, masks, state.rates, self.n_step,
                                       state.agent_done)  # fmt: skip
        return env_state, trajectory, experience

    def _gradient(self, carry, rows: Experience, rates, rate) -> tuple[tuple, Info]:
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


def n_step_experience(
    agent: ActionValues,
    trajectory: Trajectory,
    last_obs: PyTree,
    last_mask: Array | None,
    rates: PyTree,
    num_steps: int,
    agent_done: Array | None = None,
) -> Experience:
    """A transition of `num_steps` steps from each step of a rollout, of fewer where an episode or the rollout ends.

        reward = r[t] + discount r[t + 1] + ... + discount^(m - 1) r[t + m - 1],    next_obs = obs[t + m]

    Args:
        agent: whose policy acted.
        trajectory: `[T, B]` by `NextStep`: what a step led to is the observation of the next row, also at an episode's
            end.
        last_obs: the observation after it `[B, ...]`.
        last_mask: legal actions there, or None.
        rates: with `discount` and `reward_scale`.
        num_steps: n.
        agent_done: as in `done_and_weight`; ignored where a decomposition makes agents a team, which ends as one.
    """
    obs, action, mask = trajectory.obs, trajectory.extras["raw_action"], trajectory.extras.get("action_mask")
    trajectory = team_trajectory(agent, trajectory)
    done, weight = done_and_weight(trajectory, agent_done if agent.decomposition == "none" else None)
    zero, alive = jnp.zeros_like(trajectory.reward), (~trajectory.terminated).astype(jnp.float32)
    reward = n_step_returns(trajectory.reward * rates.reward_scale, zero, done, rates.discount, num_steps)
    # The same sweep over other leaves: a "next value" of 1 gives the product of discounts, and one of t + 1 (without
    # rewards and discount) gives the row of the next observation.
    discount = n_step_returns(zero, alive, done, rates.discount, num_steps)
    next_row = jnp.broadcast_to(jnp.arange(1.0, len(done) + 1).reshape(-1, *[1] * (done.ndim - 1)), done.shape)
    # For each agent: the next observation of one that ended alone is its own last one, not its team mates' later one.
    next_row = n_step_returns(jnp.zeros_like(next_row), next_row, done, 1.0, num_steps).astype(jnp.int32)

    def at_next_row(x, last):
        return jnp.concatenate([x, last[None]])[next_row, *jnp.indices(done.shape, sparse=True)[1:]]

    next_mask = None if mask is None else at_next_row(mask, last_mask)
    next_obs = jax.tree.map(at_next_row, obs, last_obs)
    return Experience(obs, action, reward, discount, next_obs, next_mask, weight)


def td_targets(agent: ActionValues, weights: PyTree, target_weights: PyTree, rows: Experience, double: bool) -> QBatch:
    """Experiences `[M]` with their targets, as a batch of one step `[1, M]`.

        target = reward + discount Q'(s', argmax_a Q''(s', a))

    over legal actions, with Q' by `target_weights`, and Q'' by the online `weights` if `double`, else as Q'.
    """
    start = jnp.zeros((1, *rows.weight.shape[:1]), bool)
    rows = jax.tree.map(lambda x: x[None], rows)
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (start.size, *x.shape)), agent.first_carry())
    values = agent.apply(target_weights, rows.next_obs, start, carry, rows.next_mask).q
    chosen = agent.apply(weights, rows.next_obs, start, carry, rows.next_mask).q if double else values
    best = jnp.take_along_axis(values, jnp.argmax(chosen, -1)[..., None], -1)[..., 0]
    value = agent.joint(target_weights, rows.next_obs, best)
    return QBatch(rows.obs, start, rows.action, rows.reward + rows.discount * value, rows.weight, carry)
