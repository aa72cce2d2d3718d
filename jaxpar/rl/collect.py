"""From lanes to what learners read: an unroll with advantages, and minibatches of it."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.rl.returns import advantages, next_values
from jaxpar.rollout import Lanes, Steps, summary, unroll
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["Batch", "check_minibatches", "collect", "ended_by", "epochs", "judged", "latest", "marks"]


@flax.struct.dataclass
class Batch:
    """An unroll as an actor and critic learn from it; `[T, B, (N)]` but for the carry.

    Attributes:
        obs: what was seen.
        start: bool `[T, B]`.
        drawn: what the policy drew.
        log_prob: of that, when it was drawn.
        value: when it was drawn.
        advantage: of it.
        target: the return that the value is to learn.
        weight: float32, 1 where the step counts, 0 where no episode or agent was there.
        action_mask: legal actions, or None.
        carry: what lanes `[B, ...]` remembered before the first step.
    """

    obs: PyTree
    start: Array
    drawn: Array
    log_prob: Array
    value: Array
    advantage: Array
    target: Array
    weight: Array
    action_mask: Array | None
    carry: PyTree


def collect(
    key: PRNGKey,
    lanes: Lanes,
    gone: Array | None,
    agent: Any,
    params: PyTree,
    weights: PyTree,
    rates: Any,
    num_steps: int,
    **rollout: Any,
) -> tuple[Lanes, Batch, Steps]:
    """Walks `num_steps` steps with the policy and judges them; consumes `key`.

    Args:
        key: consumed.
        lanes: where to go on.
        gone: `ended_by` the steps before.
        agent: an `ActorCritic`.
        params: of the environment.
        weights: of the agent.
        rates: with `discount`, `trace` and `reward_scale`.
        num_steps: T.
        rollout: what else `jaxpar.rollout.unroll` takes.
    """
    carry = lanes.carry
    lanes, steps = unroll(key, lanes, agent.env, params, agent, weights, num_steps, value=agent.value, **rollout)
    last = jax.vmap(agent.value, (None, 0, 0))(weights, lanes.obs, carried(lanes))
    return lanes, judged(steps, last, carry, rates, gone), steps


def carried(lanes: Lanes) -> PyTree:
    """What lanes remember, those that start anew as at the start."""

    def one(first, now):
        start = lanes.start.reshape(lanes.start.shape + (1,) * (now.ndim - 1))
        return jnp.where(start, first, now)

    return jax.tree.map(lambda first, now: one(first[None], now), lanes.first_carry, lanes.carry)


def judged(steps: Steps, last_value: Array, carry: PyTree, rates: Any, gone: Array | None = None) -> Batch:
    """Steps with advantages and targets; `last_value` is that of the observation after them, `gone` as of `marks`."""
    extras = steps.extras
    value, reward = extras["value"], steps.reward * rates.reward_scale
    cut, weight = marks(steps, gone)
    following = next_values(value, last_value, cut, steps.bootstrap)
    advantage = advantages(reward, value, following, cut, rates.discount, rates.trace)
    return Batch(
        obs=steps.obs,
        start=steps.start,
        drawn=extras["drawn"],
        log_prob=extras["log_prob"],
        value=value,
        advantage=advantage,
        target=advantage + value,
        weight=weight,
        action_mask=extras.get("action_mask"),
        carry=carry,
    )


def marks(steps: Steps, gone: Array | None = None) -> tuple[Array, Array]:
    """Where trajectories are cut, bool `[T, B, (N)]`, and what counts, float32: 1, or 0 where nobody was there.

    Args:
        steps: `[T, B]`.
        gone: bool `[B, N]`, which of several agents had ended before them; None if none had.
    """
    ended = _per_agent(steps.ended, steps.reward)
    cut = steps.terminated | steps.truncated | ended
    # An agent that ended before its episode did waits; whatever its policy says then, counts for nothing.
    before = jnp.zeros_like(cut[:1]) if gone is None else gone[None]
    over = jnp.concatenate([before, (steps.terminated | steps.truncated)[:-1]])
    waits = over & ~_per_agent(steps.start, steps.reward)
    return cut, (_per_agent(steps.valid, steps.reward) & ~waits).astype(jnp.float32)


def ended_by(steps: Steps) -> Array | None:
    """Which of several agents have ended when the steps have, bool `[B, N]`, for the `marks` of those that follow.

    None for a lone agent, whose end is the episode's.
    """
    return (steps.terminated | steps.truncated)[-1] if steps.reward.ndim > 2 else None


def _per_agent(flag: Array, like: Array) -> Array:
    return jnp.broadcast_to(flag.reshape(flag.shape + (1,) * (like.ndim - flag.ndim)), like.shape)


def check_minibatches(num_steps: int, num_lanes: int, minibatches: int, has_memory: bool) -> None:
    """Refuses a number of minibatches that does not divide what is dealt: lanes with a memory, else steps of lanes."""
    count, what = (num_lanes, "lanes") if has_memory else (num_steps * num_lanes, "steps of all lanes")
    if minibatches < 1 or count % minibatches:
        legal = [n for n in range(1, count + 1) if count % n == 0]
        near = sorted(legal, key=lambda n: (abs(n - minibatches), n))[:3]
        raise UsageError(
            f"minibatches={minibatches} does not divide {count} {what}; the nearest legal are "
            f"{', '.join(map(str, sorted(near)))}."
        )


def epochs(
    key: PRNGKey, state: PyTree, batch: PyTree, update: Callable, num_epochs: int, minibatches: int, has_memory: bool
) -> tuple[PyTree, PyTree]:
    """Goes through a batch in `minibatches` random parts, `num_epochs` times; consumes `key`.

    A memory needs whole unrolls, so that then lanes are dealt; without one, single steps are, as `[1, M]`.

    Args:
        key: consumed.
        state: what `update` changes.
        batch: a dataclass with leaves `[T, B, ...]`, and with a `carry` of leaves `[B, ...]`.
        update: `(state, minibatch) -> (state, info)`.
        num_epochs: how often all is seen.
        minibatches: parts; see `check_minibatches`.
        has_memory: whether lanes stay whole.

    Returns:
        The last state, and infos `[num_epochs, minibatches, ...]`.
    """
    num_steps, num_lanes = batch.start.shape
    count = num_lanes if has_memory else num_steps * num_lanes
    if not has_memory:  # then the carry has no leaves
        batch = jax.tree.map(lambda x: x.reshape(1, count, *x.shape[2:]), batch)

    def part(rows):
        dealt = jax.tree.map(lambda x: jnp.take(x, rows, 1), batch.replace(carry=None))
        return dealt.replace(carry=jax.tree.map(lambda x: x[rows], batch.carry))

    def epoch(state, key):
        order = jax.random.permutation(key, count).reshape(minibatches, -1)
        return jax.lax.scan(lambda state, rows: update(state, part(rows)), state, order)

    return jax.lax.scan(epoch, state, jax.random.split(key, num_epochs))


def latest(info: Info, before: dict[str, Array], steps: Steps) -> tuple[Info, dict[str, Array]]:
    """Adds how episodes went that ended within the steps; where none did, what was last known.

    Returns:
        The info, and what is known now: "return_mean" and "length_mean", NaN until an episode has ended.
    """
    now = summary(steps)
    known = {name: jnp.where(now["num_episodes"] > 0, now[name], old) for name, old in before.items()}
    return info | known | {"episodes": now["num_episodes"].astype(jnp.float32)}, known
