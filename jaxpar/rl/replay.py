"""What learners from a replay buffer have in common: experiences of n steps, their ring, and an update from it."""

import dataclasses
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.optim import annealed
from jaxpar.rl.buffer import Buffer, add, empty_buffer
from jaxpar.rl.collect import done_and_weight, last_agent_done, update_episode_stats
from jaxpar.rl.learner import (
    Learner,
    LearnerState,
    check_learner,
    has_memory,
    init_learner,
    mean_metrics,
    seen,
)
from jaxpar.rl.moments import reward_factor
from jaxpar.rl.network import Network
from jaxpar.rl.returns import n_step_returns
from jaxpar.rollout import (
    Chunked,
    EnvState,
    GivenLevel,
    NextStep,
    Pool,
    SameStep,
    Trajectory,
    rollout,
)
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = [
    "Experience",
    "LevelReset",
    "ReplayLearner",
    "ReplayState",
    "check_replay",
    "collect_experience",
    "init_replay",
    "learned",
    "n_step_experience",
    "next_step_rollout",
    "replay_update",
]

LevelReset = Chunked | SameStep | Pool | GivenLevel
"""Where new episodes begin; the step between two is `NextStep`'s."""


@flax.struct.dataclass
class Experience:
    """A transition of up to n steps; `[*L, (N), ...]`, numbers without N where a decomposition makes agents a team.

    Attributes:
        obs: before the first step.
        action: of the first step, as it was drawn.
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
class ReplayState(LearnerState):
    """A learner's state, with its target networks and replay buffer.

    Attributes:
        target_weights: of the target networks.
        buffer: of `Experience` rows; on a mesh, whole on every device.
        gradient_steps: int32 [], made so far.
    """

    target_weights: PyTree
    buffer: Buffer
    gradient_steps: Array


class ReplayLearner(Learner[ReplayState], Protocol):
    """A learner from a ring of experience on the device: `Dqn`, `Td3` and `Sac`."""

    @property
    def network(self) -> Network:
        """Whose weights it learns."""
        ...

    @property
    def reset(self) -> LevelReset | None:
        """Where new episodes begin; None for the exact default."""
        ...

    @property
    def gradient_steps(self) -> int:
        """After each rollout."""
        ...

    @property
    def capacity(self) -> int:
        """Experiences that are kept."""
        ...

    @property
    def warmup(self) -> int:
        """Experiences before anything is learned."""
        ...

    @property
    def n_step(self) -> int:
        """Rewards that a target sums."""
        ...

    def collect(
        self, key: PRNGKey, state: LearnerState, warm: Array, params: PyTree
    ) -> tuple[EnvState, Trajectory, Experience]:
        """Makes a rollout, as explores before and after the warmup, and its experiences `[T, B]`; consumes `key`."""
        ...

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: PyTree, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a gradient step of `(weights, opt_state, target_weights, gradient_steps)`; consumes `key`."""
        ...


def check_replay(learner: ReplayLearner) -> None:
    """Refuses a ring that is too small, and memories, beside what `check_learner` refuses."""
    check_learner(learner)
    per_update = learner.num_envs * learner.num_steps
    least = max(per_update, learner.warmup)
    if learner.capacity < least:
        raise UsageError(
            f"capacity={learner.capacity} is too small: it must hold an update's {per_update} steps and the "
            f"warmup={learner.warmup}; the least is {least}."
        )
    if has_memory(learner.network):
        raise UsageError(
            f"memory={learner.network.memory!r} has no place in a buffer of single experiences: give memory='none', "
            "or learn with Ppo or Pqn."
        )


def init_replay(learner: ReplayLearner, key: PRNGKey, inputs: PyTree) -> ReplayState:
    """Draws weights, starts an episode in every environment, and empties the ring; consumes `key`."""
    first = init_learner(learner, key, inputs)
    params = learner.env.default_params if inputs is None else inputs
    experience = jax.eval_shape(
        lambda key: learner.collect(key, first, jnp.bool_(False), params)[2], key
    )
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), experience)
    return ReplayState(
        **vars(first),
        target_weights=jax.tree.map(jnp.copy, learned(first.weights)),
        buffer=empty_buffer(row, learner.capacity),
        gradient_steps=jnp.int32(0),
    )


def learned(weights: PyTree) -> PyTree:
    """The weights that gradients move: all but the moments."""
    return {name: part for name, part in weights.items() if name != "moments"}


def replay_update(
    learner: ReplayLearner, key: PRNGKey, state: ReplayState, inputs: PyTree
) -> tuple[ReplayState, Info]:
    """A rollout into the ring, and gradient steps on what is drawn from it; consumes `key`.

    During the warmup nothing is learned, and metrics of learning are NaN.
    """
    params = learner.env.default_params if inputs is None else inputs
    act_key, learn_key = jax.random.split(key)
    env_state, trajectory, experience = learner.collect(
        act_key, state, state.buffer.size >= learner.warmup, params
    )
    experience = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), experience)
    # One row holds all agents of a step: it is kept if any of them was in its episode.
    keep = jnp.any(experience.weight.reshape(len(experience.weight), -1) > 0, -1)
    buffer = add(state.buffer, experience, keep)
    rate = annealed(state.rates.learning_rate, state.rates.anneal, state.updates)
    carry = state.weights, state.opt_state, state.target_weights, state.gradient_steps

    # Rewards are kept as they were, so that all that are drawn are scaled alike.
    scaled = buffer
    if state.returns is not None:
        reward = buffer.rows.reward * reward_factor(state.returns)
        scaled = dataclasses.replace(buffer, rows=dataclasses.replace(buffer.rows, reward=reward))

    def gradient(carry, key):
        return learner.gradient(key, carry, scaled, state.rates, rate)

    keys = jax.random.split(learn_key, learner.gradient_steps)
    metrics = jax.eval_shape(gradient, carry, keys[0])[1]
    idle = {"converged": 1.0, "skipped": 0.0}
    during_warmup = {
        name: jnp.full(learner.gradient_steps, idle.get(name, jnp.nan)) for name in metrics
    }
    (weights, opt_state, target, gradient_steps), infos = jax.lax.cond(
        buffer.size >= learner.warmup,
        lambda: jax.lax.scan(gradient, carry, keys),
        lambda: (carry, during_warmup),
    )
    weights, returns = seen(learner, state, weights, trajectory)
    info = mean_metrics(infos) | {
        "learning_rate": rate,
        "buffer_size": buffer.size.astype(jnp.float32),
    }
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
        returns=returns,
    )
    return state, info


def collect_experience(
    learner: ReplayLearner, key: PRNGKey, state: LearnerState, acting: PyTree, params: PyTree
) -> tuple[EnvState, Trajectory, Experience]:
    """A rollout of a lone agent without masks, and its experiences `[T, B]`; consumes `key`."""
    env_state, trajectory = next_step_rollout(learner, key, state.env_state, params, acting)
    done, weight = done_and_weight(trajectory)
    experience = n_step_experience(
        trajectory, env_state.obs, None, state.rates, learner.n_step, done, weight
    )
    return env_state, trajectory, experience


def next_step_rollout(
    learner: ReplayLearner, key: PRNGKey, env_state: EnvState, params: PyTree, acting: PyTree
) -> tuple[EnvState, Trajectory]:
    """A rollout whose finished environments spend a step on their last observation; consumes `key`.

    So what a step led to is always in the next row.
    """
    reset = NextStep(Chunked() if learner.reset is None else learner.reset)
    return rollout(key, env_state, learner.env, params, learner.agent(), acting, learner.num_steps, prng=learner.prng,
                   reset=reset)  # fmt: skip


def n_step_experience(
    trajectory: Trajectory,
    last_obs: PyTree,
    last_mask: Array | None,
    rates: PyTree,
    num_steps: int,
    done: Array,
    weight: Array,
) -> Experience:
    """A transition of `num_steps` steps from each step of a rollout, of fewer where an episode or the rollout ends.

        reward = r[t] + discount r[t + 1] + ... + discount^(m - 1) r[t + m - 1],    next_obs = obs[t + m]

    Args:
        trajectory: `[T, B]` by `NextStep`: what a step led to is the observation of the next row, also at an episode's
            end.
        last_obs: the observation after it `[B, ...]`.
        last_mask: legal actions there, or None.
        rates: with `discount` and `reward_scale`.
        num_steps: n.
        done: bool `[T, B, (N)]`, whether the trajectory ends with the step.
        weight: float32, 1 where the step counts.
    """
    obs, action, mask = (
        trajectory.obs,
        trajectory.extras["raw_action"],
        trajectory.extras.get("action_mask"),
    )
    zero, alive = jnp.zeros_like(trajectory.reward), (~trajectory.terminated).astype(jnp.float32)
    reward = n_step_returns(
        trajectory.reward * rates.reward_scale, zero, done, rates.discount, num_steps
    )
    # The same sweep over other leaves: a "next value" of 1 gives the product of discounts, and one of t + 1 (without
    # rewards and discount) gives the row of the next observation.
    discount = n_step_returns(zero, alive, done, rates.discount, num_steps)
    next_row = jnp.broadcast_to(
        jnp.arange(1.0, len(done) + 1).reshape(-1, *[1] * (done.ndim - 1)), done.shape
    )
    # For each agent: the next observation of one that ended alone is its own last one, not its team mates' later one.
    next_row = n_step_returns(jnp.zeros_like(next_row), next_row, done, 1.0, num_steps).astype(
        jnp.int32
    )

    def at_next_row(x, last):
        return jnp.concatenate([x, last[None]])[next_row, *jnp.indices(done.shape, sparse=True)[1:]]

    next_mask = None if mask is None else at_next_row(mask, last_mask)
    next_obs = jax.tree.map(at_next_row, obs, last_obs)
    return Experience(obs, action, reward, discount, next_obs, next_mask, weight)
