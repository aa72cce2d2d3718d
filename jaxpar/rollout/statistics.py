"""Statistics of steps, by `where`: what is masked never enters, whatever its value."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.rollout.lanes import begin, per_lane
from jaxpar.rollout.resets import NoReset
from jaxpar.rollout.unroll import Steps, unroll
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Episodes", "check_steps", "evaluate", "first_episodes", "summary"]


def summary(steps: Steps) -> dict[str, Array]:
    """Scalars of all episodes that ended within the steps; NaN where none did.

    Short episodes end more often within a given time, so these means lean to them: good for watching a run, not for
    judging a policy. For that, `evaluate`.

    Returns:
        "num_steps" (valid ones), "num_episodes", "truncated" (the share of episodes cut, not terminated), "reward"
        (mean of a step), and of returns and lengths mean, standard deviation, least and largest: "return_mean", ...
        For several agents, the mean over agents is one return.
    """
    agents = tuple(range(2, steps.reward.ndim))
    returns, rewards = steps.episode_return.mean(agents), steps.reward.mean(agents)
    cut = jnp.any((steps.truncated & ~steps.terminated).reshape(*steps.start.shape, -1), -1)
    return {
        "num_steps": jnp.sum(steps.valid, dtype=jnp.int32),
        "num_episodes": jnp.sum(steps.ended, dtype=jnp.int32),
        "truncated": _mean(cut, steps.ended),
        "reward": _mean(rewards, steps.valid),
        **{f"return_{name}": x for name, x in _moments(returns, steps.ended).items()},
        **{f"length_{name}": x for name, x in _moments(steps.episode_length, steps.ended).items()},
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
        "min": jnp.where(is_empty, jnp.nan, jnp.min(jnp.where(mask, x, jnp.inf))),
        "max": jnp.where(is_empty, jnp.nan, jnp.max(jnp.where(mask, x, -jnp.inf))),
    }


class Episodes(NamedTuple):
    """One episode a lane.

    Attributes:
        returns: float32 `[B]`, or `[B, N]` agents; of one that is not finished, so far.
        lengths: int32 `[B]`.
        finished: bool `[B]`.
        truncated: bool `[B]`, it was cut before the process ended (for some agent).
    """

    returns: Array
    lengths: Array
    finished: Array
    truncated: Array


def first_episodes(steps: Steps) -> Episodes:
    """The first episode of each lane alone: every lane counts once, so short episodes have no more weight than long.

    The steps should begin where the lanes did, and be so many that every lane finishes: look at `finished`.
    """
    last = jnp.where(jnp.any(steps.ended, 0), jnp.argmax(steps.ended, 0), len(steps.ended) - 1)

    def at_last(x):
        return jnp.take_along_axis(x, per_lane(last, x[0])[None], 0)[0]

    cut = jnp.any((steps.truncated & ~steps.terminated).reshape(*steps.start.shape, -1), -1)
    finished = jnp.any(steps.ended, 0)
    return Episodes(at_last(steps.episode_return), at_last(steps.episode_length), finished, at_last(cut) & finished)


@functools.partial(jax.jit, static_argnames=("env", "policy", "num_lanes", "max_steps", "draw"))
def evaluate(
    key: PRNGKey,
    env: Any,
    params: PyTree,
    policy: Any,
    policy_params: PyTree,
    num_lanes: int,
    max_steps: int,
    *,
    carry: PyTree = (),
    draw: str = "lane",
) -> Episodes:
    """Plays one episode a lane, of at most `max_steps` steps, and keeps nothing but its statistics.

    Arguments are those of `begin` and `unroll`.
    """
    lanes = begin(key, env, params, num_lanes, carry, draw=draw)
    steps = unroll(key, lanes, env, params, policy, policy_params, max_steps, reset=NoReset(), draw=draw)[1]
    return first_episodes(steps)


def check_steps(steps: Steps, env: Any = None, params: PyTree = None, *, first_step: int = 0) -> None:
    """Refuses rewards that are not finite and, given the environment, actions outside its space; not under jit.

    Args:
        steps: of `unroll`.
        env: the environment, to judge actions.
        params: its parameters.
        first_step: how many steps were made before these, to be told the right number.

    Raises:
        UsageError: naming the first such step and lane, and how many there are.
    """
    agents = tuple(range(2, steps.reward.ndim))
    wrong = np.asarray(~jnp.isfinite(steps.reward).all(agents))
    if wrong.any():
        raise UsageError(
            f"{_place(wrong, first_step)} the reward is {np.asarray(steps.reward)[_first(wrong)]}; legal are numbers."
        )
    if env is not None:
        inside = jax.vmap(jax.vmap(env.action_space(params).contains))(steps.action)
        wrong = np.asarray(~inside & steps.valid)
        if wrong.any():
            action = jax.tree.map(lambda x: np.asarray(x)[_first(wrong)], steps.action)
            raise UsageError(f"{_place(wrong, first_step)} the action {action} is not in {env.action_space(params)}.")


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _place(wrong: np.ndarray, first_step: int) -> str:
    step, lane = _first(wrong)
    return f"at step {first_step + step} of lane {lane} (the first of {int(wrong.sum())} such steps)"
