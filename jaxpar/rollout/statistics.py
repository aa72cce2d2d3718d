"""Statistics of trajectories, by `where`: a masked value never enters, even if it is NaN."""

import dataclasses
import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar._older_fields import newer_arguments
from jaxpar.env import Adapter, Environment
from jaxpar.rollout.env_state import init, per_env
from jaxpar.rollout.policies import Policy
from jaxpar.rollout.resets import NoReset
from jaxpar.rollout.trajectory import RolloutOptions, Trajectory, rollout
from jaxpar.types import Array, PRNGKey, PyTree, UsageError, concrete_values, largest

__all__ = [
    "EpisodeResults",
    "EvaluateOptions",
    "check_trajectory",
    "episode_stats",
    "evaluate",
    "first_episodes",
]


def episode_stats(trajectory: Trajectory) -> dict[str, Array]:
    """Scalars of all episodes that ended within the trajectory; NaN where none did.

    Short episodes end more often within a given time, so these means are biased towards them: good for watching a
    run, not for judging a policy. For that, `evaluate`.

    Returns:
        "num_steps" (valid ones), "num_episodes", "truncated" (the share of episodes cut, not terminated) and "reward"
        (mean of a step). Returns and lengths have "mean", "std", "min" and "max", such as "return_mean". For several
        agents, the mean over agents is one return.
    """
    agents = tuple(range(2, trajectory.reward.ndim))
    returns, rewards = trajectory.episode_return.mean(agents), trajectory.reward.mean(agents)
    cut = jnp.any(
        (trajectory.truncated & ~trajectory.terminated).reshape(*trajectory.start.shape, -1), -1
    )
    return {
        "num_steps": jnp.sum(trajectory.valid, dtype=jnp.int32),
        "num_episodes": jnp.sum(trajectory.ended, dtype=jnp.int32),
        "truncated": _mean(cut, trajectory.ended),
        "reward": _mean(rewards, trajectory.valid),
        **{f"return_{name}": x for name, x in _moments(returns, trajectory.ended).items()},
        **{
            f"length_{name}": x
            for name, x in _moments(trajectory.episode_length, trajectory.ended).items()
        },
    }


def _mean(x: Array, mask: Array) -> Array:
    count = jnp.sum(mask)
    return jnp.where(count > 0, jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(count, 1), jnp.nan)


def _moments(x: Array, mask: Array) -> dict[str, Array]:
    x = x.astype(jnp.float32)
    mean, is_empty = _mean(x, mask), ~jnp.any(mask)
    return {
        "mean": mean,
        "std": jnp.sqrt(_mean((x - mean) ** 2, mask)),
        "min": jnp.where(is_empty, jnp.nan, -largest(-jnp.where(mask, x, jnp.inf))),
        "max": jnp.where(is_empty, jnp.nan, largest(jnp.where(mask, x, -jnp.inf))),
    }


class EpisodeResults(NamedTuple):
    """The results of one episode in each environment.

    Attributes:
        returns: float32 `[B]`, or `[B, N]` agents; so far of one that is not finished.
        lengths: int32 `[B]`.
        finished: bool `[B]`.
        truncated: bool `[B]`, it was cut before the process ended (for some agent).
    """

    returns: Array
    lengths: Array
    finished: Array
    truncated: Array


def first_episodes(trajectory: Trajectory) -> EpisodeResults:
    """The first episode of each environment: each counts once, so short episodes have no more weight than long ones.

    The trajectory should start where the episodes do, and be long enough for all of them: see `finished`.
    """
    last = jnp.where(
        jnp.any(trajectory.ended, 0), jnp.argmax(trajectory.ended, 0), len(trajectory.ended) - 1
    )

    def at_last(x):
        return jnp.take_along_axis(x, per_env(last, x[0])[None], 0)[0]

    cut = jnp.any(
        (trajectory.truncated & ~trajectory.terminated).reshape(*trajectory.start.shape, -1), -1
    )
    finished = jnp.any(trajectory.ended, 0)
    return EpisodeResults(
        at_last(trajectory.episode_return),
        at_last(trajectory.episode_length),
        finished,
        at_last(cut) & finished,
    )


@flax.struct.dataclass
class EvaluateOptions:
    """Options of `evaluate`.

    Attributes:
        carry: the policy's at the start of an episode, as of `init`.
        prng: "env" or "batch", as of `rollout`; static.
    """

    carry: PyTree = ()
    prng: str = flax.struct.field(default="env", pytree_node=False)


_OLDER = {field.name: f"options.{field.name}" for field in dataclasses.fields(EvaluateOptions)}
"""Arguments of `evaluate` that are fields of its options today."""


def evaluate(
    key: PRNGKey,
    env: Environment | Adapter,
    params: PyTree,
    policy: Policy,
    policy_params: PyTree,
    num_envs: int,
    max_steps: int,
    options: EvaluateOptions | None = None,
    **older: object,
) -> EpisodeResults:
    """Plays one episode in each environment, and keeps nothing but its results.

    It is compiled once for each environment, policy, number of environments and of steps.

    Args:
        key: root key, as of `rollout`.
        env: an environment or adapter; static.
        params: its parameters.
        policy: a `Policy`; static.
        policy_params: its parameters.
        num_envs: B; static.
        max_steps: steps of an episode, at most; static.
        options: the policy's carry, and keys; None means the defaults.
        **older: fields of `options`, which were arguments; accepted until the first release.

    Raises:
        TypeError: for an unknown keyword.
        UsageError: as `init` and `rollout`.
    """
    groups = {"options": options or EvaluateOptions()}
    chosen: EvaluateOptions = newer_arguments("evaluate", _OLDER, groups, older)["options"]
    return _evaluate(key, env, params, policy, policy_params, num_envs, max_steps, chosen)


@functools.partial(jax.jit, static_argnames=("env", "policy", "num_envs", "max_steps"))
def _evaluate(
    key: PRNGKey,
    env: Environment | Adapter,
    params: PyTree,
    policy: Policy,
    policy_params: PyTree,
    num_envs: int,
    max_steps: int,
    options: EvaluateOptions,
) -> EpisodeResults:
    env_state = init(key, env, params, num_envs, options.carry, prng=options.prng)
    how = RolloutOptions(reset=NoReset(), prng=options.prng)
    _, trajectory = rollout(key, env_state, env, params, policy, policy_params, max_steps, how)
    return first_episodes(trajectory)


def check_trajectory(
    trajectory: Trajectory,
    env: Environment | Adapter | None = None,
    params: PyTree = None,
    *,
    first_step: int = 0,
) -> None:
    """Refuses rewards that are not finite and, given the environment, actions outside its space.

    Rewards and actions are copied to the host.

    Args:
        trajectory: of `rollout`.
        env: the environment, to check actions.
        params: its parameters.
        first_step: how many steps were made before these, for the numbers in the message.

    Raises:
        UsageError: naming the first such step and environment, and how many there are; or values
            are not known, as those that jit traces.
    """
    known = concrete_values(trajectory.reward, trajectory.valid)
    actions = concrete_values(trajectory.action)
    if known is None or actions is None:
        raise UsageError("check_trajectory reads values, which jit and vmap hide: call it outside.")
    reward, valid = known
    agents = tuple(range(2, reward.ndim))
    wrong = ~np.isfinite(reward).all(agents)
    if wrong.any():
        found = f"the reward is {reward[_first(wrong)]}"
        raise UsageError(f"{_place(wrong, first_step)} {found}; legal are finite numbers.")
    if env is None:
        return

    space = env.action_space(params)
    # `contains` computes by JAX, which a trace around this would record.
    with jax.ensure_compile_time_eval():
        inside = np.asarray(jax.vmap(jax.vmap(space.contains))(trajectory.action))
    wrong = ~inside & valid
    if wrong.any():
        action = jax.tree.map(lambda x: x[_first(wrong)], actions[0])
        raise UsageError(f"{_place(wrong, first_step)} the action {action} is not in {space}.")


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _place(wrong: np.ndarray, first_step: int) -> str:
    step, env = _first(wrong)
    return f"at step {first_step + step} of environment {env} (the first of {int(wrong.sum())} such steps)"
