"""Data for learners: a rollout with advantages, and minibatches of it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.distributions import log_prob
from jaxpar.rl.returns import advantages, next_values, vtrace
from jaxpar.rollout import EnvState, RolloutOptions, Trajectory, episode_stats, rollout
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = [
    "Batch",
    "RolloutStart",
    "RolloutWeights",
    "carry_at_start",
    "check_minibatches",
    "collect",
    "done_and_weight",
    "last_agent_done",
    "make_batch",
    "normalized_weights",
    "scan_minibatches",
    "update_episode_stats",
]


@flax.struct.dataclass
class Batch:
    """A rollout as an actor and critic learn from it; `[T, B, (N)]` but for the carry.

    Attributes:
        obs: what the policy saw.
        start: bool `[T, B]`.
        raw_action: what the policy drew, before it was scaled to the bounds of a box.
        log_prob: of that, by the weights before the update.
        value: likewise.
        advantage: of the action.
        target: the return that the value is to learn.
        weight: float32, 1 where the step counts, 0 outside of episodes and for agents that have
            ended.
        action_mask: legal actions, or None.
        carry: the policy's `[B, ...]` before the first step.
    """

    obs: PyTree
    start: Array
    raw_action: Array
    log_prob: Array
    value: Array
    advantage: Array
    target: Array
    weight: Array
    action_mask: Array | None
    carry: PyTree


class RolloutStart(NamedTuple):
    """The end of a rollout, at which the next one starts.

    Attributes:
        env_state: state of the environments.
        agent_done: ends of several agents, of `last_agent_done`; None for a single one, and before
            the first rollout.
    """

    env_state: EnvState
    agent_done: Array | None = None


class RolloutWeights(NamedTuple):
    """Weights of the agent in a rollout.

    Attributes:
        learned: weights that an update is to change; values are by them.
        behaviour: weights that act; None for `learned`.
    """

    learned: PyTree
    behaviour: PyTree = None


def collect(
    key: PRNGKey,
    start: RolloutStart,
    agent: ActorCritic,
    params: PyTree,
    weights: RolloutWeights,
    rates: PyTree,
    num_steps: int,
    options: RolloutOptions | None = None,
) -> tuple[EnvState, Batch, Trajectory]:
    """Makes `num_steps` steps with the policy, and a batch of them; consumes `key`.

    Where older weights act, values and densities of the batch are by `weights.learned`, its targets
    and advantages V-trace's: one more pass over all steps.

    Args:
        key: consumed.
        start: end of the rollout before.
        agent: an `ActorCritic`.
        params: of the environment.
        weights: weights that are learned, and those that act.
        rates: with `discount`, `gae_lambda` and `reward_scale`.
        num_steps: T.
        options: reset policy, keys and unroll of the rollout; its value is the agent's, and all of
            a step is kept.

    Returns:
        The state of the environments after the last step, the batch, and the trajectory.
    """
    carry = start.env_state.carry
    learned = weights.learned
    log_ratio = None
    actor = agent
    acting = learned
    if weights.behaviour is not None:
        actor = _Older(agent)
        acting = weights.behaviour, learned
    options = options or RolloutOptions()
    options = dataclasses.replace(options, value=actor.value, keep=None)
    env_state, trajectory = rollout(
        key, start.env_state, agent.env, params, actor, acting, num_steps, options
    )
    last = jax.vmap(agent.value, (None, 0, 0))(learned, env_state.obs, carry_at_start(env_state))
    if weights.behaviour is not None:
        extras = trajectory.extras
        out = agent.apply(
            learned, trajectory.obs, trajectory.start, carry, extras.get("action_mask")
        )
        now = log_prob(agent.action_space, out.policy, extras["raw_action"])
        log_ratio = now - extras["log_prob"]
        trajectory = trajectory.replace(extras=extras | {"value": out.value, "log_prob": now})
    batch = make_batch(trajectory, last, carry, rates, start.agent_done, log_ratio)
    return env_state, batch, trajectory


@dataclasses.dataclass(frozen=True)
class _Older:
    """An agent who acts by one's weights and values by another's; its parameters are both."""

    agent: ActorCritic

    def __call__(self, key, params, obs, carry, action_mask=None) -> tuple:
        return self.agent(key, params[0], obs, carry, action_mask)

    def value(self, params, obs, carry) -> Array:
        return self.agent.value(params[1], obs, carry)


def carry_at_start(env_state: EnvState) -> PyTree:
    """The policy's carry before the next step `[B, ...]`: the first one where an episode starts."""

    def one(first, now):
        start = env_state.start.reshape(env_state.start.shape + (1,) * (now.ndim - 1))
        return jnp.where(start, first, now)

    return jax.tree.map(
        lambda first, now: one(first[None], now), env_state.first_carry, env_state.carry
    )


def make_batch(
    trajectory: Trajectory,
    last_value: Array,
    carry: PyTree,
    rates: PyTree,
    agent_done: Array | None = None,
    log_ratio: Array | None = None,
) -> Batch:
    """A trajectory with advantages and targets.

    Args:
        trajectory: `[T, B]`, with the extras of an `ActorCritic`.
        last_value: of the observation after it `[B]`, or `[B, N]` agents.
        carry: the policy's `[B, ...]` before the first step.
        rates: with `discount`, `gae_lambda` and `reward_scale`.
        agent_done: as in `done_and_weight`.
        log_ratio: as in `jaxpar.rl.vtrace`; None where the policy that learns has acted.
    """
    extras = trajectory.extras
    value = extras["value"]
    reward = trajectory.reward * rates.reward_scale
    done, weight = done_and_weight(trajectory, agent_done)
    following = next_values(value, last_value, done, trajectory.bootstrap)
    if log_ratio is None:
        advantage = advantages(reward, value, following, done, rates.discount, rates.gae_lambda)
        target = advantage + value
    else:
        target, advantage = vtrace(
            log_ratio, reward, value, following, done, rates.discount, rates.gae_lambda
        )
    return Batch(
        obs=trajectory.obs,
        start=trajectory.start,
        raw_action=extras["raw_action"],
        log_prob=extras["log_prob"],
        value=value,
        advantage=advantage,
        target=target,
        weight=weight,
        action_mask=extras.get("action_mask"),
        carry=carry,
    )


def done_and_weight(trajectory: Trajectory, agent_done: Array | None = None) -> tuple[Array, Array]:
    """Flags of steps that end their trajectories, bool `[T, B, (N)]`, and weights of all, float32.

    A weight is 1 where the step counts, and 0 without an agent.

    Args:
        trajectory: `[T, B]`.
        agent_done: bool `[B, N]`, which of several agents had ended before it; None if none had.
    """
    ended = _per_agent(trajectory.ended, trajectory.reward)
    agent_ends = trajectory.terminated | trajectory.truncated
    # An agent that ends before its episode still gets observations and acts; those steps do not
    # count.
    before = jnp.zeros_like(ended[:1])
    if agent_done is not None:
        before = agent_done[None]
    had_ended = jnp.concatenate([before, agent_ends[:-1]]) & ~_per_agent(
        trajectory.start, trajectory.reward
    )
    weight = _per_agent(trajectory.valid, trajectory.reward) & ~had_ended
    return agent_ends | ended, weight.astype(jnp.float32)


def normalized_weights(weight: Array) -> Array:
    """Weights that sum to 1, so that `sum(share * x)` is a mean; all 0 where none counts."""
    return weight / jnp.maximum(jnp.sum(weight), 1)


def last_agent_done(trajectory: Trajectory) -> Array | None:
    """Ends of several agents after a trajectory, bool `[B, N]`: `agent_done` of the next one.

    None for a single agent, which ends with its episode.
    """
    if trajectory.reward.ndim <= 2:
        return None
    return (trajectory.terminated | trajectory.truncated)[-1]


def _per_agent(flag: Array, like: Array) -> Array:
    return jnp.broadcast_to(flag.reshape(flag.shape + (1,) * (like.ndim - flag.ndim)), like.shape)


def check_minibatches(num_steps: int, num_envs: int, minibatches: int, has_memory: bool) -> None:
    """Rejects minibatches that do not divide the environments with a memory, else all steps."""
    count = num_steps * num_envs
    what = "steps of all environments"
    if has_memory:
        count = num_envs
        what = "environments"
    if minibatches < 1 or count % minibatches:
        legal = [n for n in range(1, count + 1) if count % n == 0]
        near = sorted(legal, key=lambda n: (abs(n - minibatches), n))[:3]
        raise UsageError(
            f"minibatches={minibatches} does not divide {count} {what}; the nearest legal are "
            f"{', '.join(map(str, sorted(near)))}."
        )


def scan_minibatches(
    key: PRNGKey,
    state: PyTree,
    batch: PyTree,
    update: Callable,
    num_epochs: int,
    minibatches: int,
    has_memory: bool,
) -> tuple[PyTree, PyTree]:
    """Scans `update` over a batch in random parts, `num_epochs` times; consumes `key`.

    A memory needs whole rollouts, so environments are shuffled then; without one, single steps are,
    as `[1, M]`.

    Args:
        key: consumed.
        state: what `update` carries.
        batch: a dataclass with leaves `[T, B, ...]`, and with a `carry` of leaves `[B, ...]`.
        update: `(state, minibatch) -> (state, info)`.
        num_epochs: passes over the batch.
        minibatches: parts of it; see `check_minibatches`.
        has_memory: whether environments stay whole.

    Returns:
        The last state, and infos `[num_epochs, minibatches, ...]`.
    """
    num_steps, num_envs = batch.start.shape
    count = num_envs
    if not has_memory:  # the carry has no leaves then, so all leaves are [T, B, ...]
        count = num_steps * num_envs
        batch = jax.tree.map(lambda x: x.reshape(1, count, *x.shape[2:]), batch)

    def minibatch(rows):
        chosen = jax.tree.map(lambda x: jnp.take(x, rows, 1), batch.replace(carry=None))
        return chosen.replace(carry=jax.tree.map(lambda x: x[rows], batch.carry))

    def epoch(state, key):
        order = jax.random.permutation(key, count).reshape(minibatches, -1)
        return jax.lax.scan(lambda state, rows: update(state, minibatch(rows)), state, order)

    return jax.lax.scan(epoch, state, jax.random.split(key, num_epochs))


def update_episode_stats(
    info: Info, before: dict[str, Array], trajectory: Trajectory
) -> tuple[Info, dict[str, Array]]:
    """Adds mean return and length of episodes that ended in the trajectory; without any, `before`.

    Returns:
        The info, also with "num_episodes"; and the means alone, NaN until an episode has ended.
    """
    now = episode_stats(trajectory)
    means = {
        name: jnp.where(now["num_episodes"] > 0, now[name], old) for name, old in before.items()
    }
    return info | means | {"num_episodes": now["num_episodes"].astype(jnp.float32)}, means
