"""Parts that learners from a replay buffer share: experiences of n steps, their ring, an update."""

import dataclasses
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, field
from jaxpar.optim import OptimizerConfig, annealed, make_optimizer
from jaxpar.rl.buffer import Buffer, add, empty_buffer
from jaxpar.rl.collect import done_and_weight
from jaxpar.rl.learner import (
    Learner,
    LearnerState,
    check_learner,
    env_params,
    finish_update,
    has_memory,
    init_learner,
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
    RolloutOptions,
    SameStep,
    Trajectory,
    rollout,
)
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = [
    "Experience",
    "LevelReset",
    "ReplayFields",
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
    """A transition of up to n steps; `[*L, (N), ...]`.

    Numbers are without N where a decomposition makes agents a team.

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
        """The network, without a memory."""
        ...

    @property
    def reset(self) -> LevelReset | None:
        """Start of new episodes, as `by` of `NextStep`; None for the exact default."""
        ...

    @property
    def gradient_steps(self) -> int:
        """Gradient steps after each rollout."""
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
        """Rewards in a target's sum."""
        ...

    def collect(
        self, key: PRNGKey, state: LearnerState, warm: Array, params: PyTree
    ) -> tuple[EnvState, Trajectory, Experience]:
        """Makes a rollout, which may explore otherwise until `warm`, and its experiences `[T, B]`.

        It consumes `key`.
        """
        ...

    def gradient(
        self, key: PRNGKey, carry: tuple, buffer: Buffer, rates: PyTree, rate: Array
    ) -> tuple[tuple, Info]:
        """Makes a step of `(weights, opt_state, target_weights, gradient_steps)` by `key`."""
        ...


def check_replay(learner: ReplayLearner) -> None:
    """Rejects all that `check_learner` does, small rings, memories, and unfit environments."""
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
    learner.agent()


@dataclasses.dataclass(frozen=True)
class ReplayFields:
    """Fields with which `Dqn`, `Td3` and `Sac` begin, and their ranges; others are `Learner`'s.

    An update makes `num_steps` steps in `num_envs` environments, keeps them in a ring of `capacity`
    experiences on the device, and makes `gradient_steps` gradient steps on batches sampled from it.

    Attributes:
        env: the environment or adapter.
        network: the network, without a memory.
        rates: numbers of the algorithm.
        num_envs: B, environments that run at once.
        num_steps: T, steps of a rollout in each environment.
        gradient_steps: gradient steps after each rollout.
        batch_size: experiences in a gradient step.
        capacity: experiences that are kept.
        warmup: experiences before anything is learned.
        n_step: rewards in a target's sum, fewer where an episode or the rollout ends.
    """

    env: Environment | Adapter
    network: Network
    rates: PyTree
    num_envs: int = field(4, AtLeast(1))
    num_steps: int = field(16, AtLeast(1))
    gradient_steps: int = field(64, AtLeast(1))
    batch_size: int = field(128, AtLeast(1))
    capacity: int = field(65536, AtLeast(1))
    warmup: int = field(1024, AtLeast(0))
    n_step: int = field(1, AtLeast(1))

    __post_init__ = check_replay
    optimizer = make_optimizer(OptimizerConfig(eps=1e-8, b2=0.999, weight_decay=0.0))


def init_replay(learner: ReplayLearner, key: PRNGKey, inputs: PyTree) -> ReplayState:
    """Draws weights and starts an episode in every environment; consumes `key`."""
    first = init_learner(learner, key, inputs)
    params = env_params(learner, inputs)
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
    """Returns the weights that gradients move: all but the moments."""
    return {name: part for name, part in weights.items() if name != "moments"}


def replay_update(
    learner: ReplayLearner, key: PRNGKey, state: ReplayState, inputs: PyTree
) -> tuple[ReplayState, Info]:
    """Makes an update; consumes `key`.

    A rollout goes into the ring, and gradient steps are made on draws from it. During the warmup
    nothing is learned, and metrics of learning are NaN.
    """
    params = env_params(learner, inputs)
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
    state = dataclasses.replace(
        state, target_weights=target, buffer=buffer, gradient_steps=gradient_steps
    )
    state, info = finish_update(learner, state, env_state, trajectory, weights, opt_state, infos)
    buffer_size = buffer.size.astype(jnp.float32)
    return state, info | {"learning_rate": rate, "buffer_size": buffer_size}


def collect_experience(
    learner: ReplayLearner, key: PRNGKey, state: LearnerState, acting: PyTree, params: PyTree
) -> tuple[EnvState, Trajectory, Experience]:
    """Makes a rollout of a lone agent without masks, and its experiences `[T, B]` by `key`."""
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
    return rollout(
        key,
        env_state,
        learner.env,
        params,
        learner.agent(),
        acting,
        learner.num_steps,
        RolloutOptions(reset=reset, prng=learner.prng),
    )


def n_step_experience(
    trajectory: Trajectory,
    last_obs: PyTree,
    last_mask: Array | None,
    rates: PyTree,
    num_steps: int,
    done: Array,
    weight: Array,
) -> Experience:
    """A transition of `num_steps` steps from each step of a rollout.

        reward = r[t] + discount r[t + 1] + ... + discount^(m - 1) r[t + m - 1]
        next_obs = obs[t + m]

    with m = n, or fewer where an episode or the rollout ends.

    Args:
        trajectory: `[T, B]` by `NextStep`: the next row has the observation after a step, also at
            an episode's end.
        last_obs: the observation after it `[B, ...]`.
        last_mask: legal actions there, or None.
        rates: with `discount` and `reward_scale`.
        num_steps: n.
        done: bool `[T, B, (N)]`, whether the trajectory ends with the step.
        weight: float32, 1 where the step counts.
    """
    mask = trajectory.extras.get("action_mask")
    zero = jnp.zeros_like(trajectory.reward)
    alive = (~trajectory.terminated).astype(jnp.float32)
    reward = n_step_returns(
        trajectory.reward * rates.reward_scale, zero, done, rates.discount, num_steps
    )
    # The same sweep over other leaves: a "next value" of 1 gives the product of discounts, and one
    # of t + 1 (without rewards and discount) gives the row of the next observation.
    discount = n_step_returns(zero, alive, done, rates.discount, num_steps)
    next_row = jnp.broadcast_to(
        jnp.arange(1.0, len(done) + 1).reshape(-1, *[1] * (done.ndim - 1)), done.shape
    )
    # For each agent: the next observation of one that ended alone is its own last one, not its team
    # mates' later one.
    next_row = n_step_returns(jnp.zeros_like(next_row), next_row, done, 1.0, num_steps).astype(
        jnp.int32
    )

    def at_next_row(x, last):
        return jnp.concatenate([x, last[None]])[next_row, *jnp.indices(done.shape, sparse=True)[1:]]

    next_mask = None
    if mask is not None:
        next_mask = at_next_row(mask, last_mask)
    return Experience(
        obs=trajectory.obs,
        action=trajectory.extras["raw_action"],
        reward=reward,
        discount=discount,
        next_obs=jax.tree.map(at_next_row, trajectory.obs, last_obs),
        next_mask=next_mask,
        weight=weight,
    )
