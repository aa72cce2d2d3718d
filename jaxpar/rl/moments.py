"""Running means and variances as pure state, by which learners scale what they observe and earn.

Batches are merged by the exact rule of Chan, Golub and LeVeque, 1983, so that many small ones count as one large one;
sums over a batch are of the whole array, on all devices.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Space
from jaxpar.scan import affine_scan
from jaxpar.types import Array, PyTree, UsageError

CLIP = 10.0  # standardised observations are held to -10 to 10
LEAST = 1e-6  # added to variances that one divides by


@flax.struct.dataclass
class Moments:
    """What has been seen so far: `count` float32 `[]`, and `mean` and `variance` of each number, `[*shape]`."""

    count: Array
    mean: Array
    variance: Array


@flax.struct.dataclass
class Returns:
    """The discounted sum of rewards so far in every environment, `running` `[B, (N)]`, and the `moments` of all."""

    running: Array
    moments: Moments


def no_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Nothing seen: mean 0 and variance 1, by which nothing changes."""
    return Moments(jnp.float32(0), jnp.zeros(shape), jnp.ones(shape))


def with_batch(moments: Moments, x: Array, weight: Array) -> Moments:
    """The moments of what was seen and of `x [*L, *shape]`, each of the `L` counted `weight [*L]` times; O(L).

        n = n_a + n_b,  d = mean_b - mean_a:    mean = mean_a + d n_b / n
        variance = (n_a variance_a + n_b variance_b) / n + d^2 n_a n_b / n^2

    No gradient flows through.
    """
    x, axes = jax.lax.stop_gradient(x), tuple(range(weight.ndim))
    weight = jax.lax.stop_gradient(weight).astype(x.dtype)
    count = jnp.sum(weight)
    each = weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim))
    mean = jnp.sum(each * x, axes) / jnp.maximum(count, 1)
    centred = x - mean.reshape((1,) * weight.ndim + mean.shape)
    variance = jnp.sum(each * centred**2, axes) / jnp.maximum(count, 1)
    total = moments.count + count
    share = count / jnp.maximum(total, 1)
    away = mean - moments.mean
    return Moments(
        total,
        moments.mean + share * away,
        jnp.where(
            total > 0,
            (1 - share) * moments.variance + share * variance + share * (1 - share) * away**2,
            1.0,
        ),
    )


def standardised(moments: Moments | None, obs: PyTree) -> PyTree:
    """Observations `[*L, *shape]` less their mean, by their deviation, within -10 to 10; as they are by None."""
    if moments is None:
        return obs
    moments = jax.lax.stop_gradient(moments)
    lead = (1,) * (obs.ndim - moments.mean.ndim)
    mean, scale = (
        x.reshape(lead + x.shape) for x in (moments.mean, jax.lax.rsqrt(moments.variance + LEAST))
    )
    return jnp.clip((obs - mean) * scale, -CLIP, CLIP)


def check_obs(name: str, space: Space) -> tuple[int, ...]:
    """The shape of observations of one agent; refuses what has no mean."""
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        raise UsageError(
            f"{name} observes {space}; normalize_obs=True takes a Box of floats: leave it False."
        )
    return space.shape


def discounted(running: Array, reward: Array, done: Array, discount: Array) -> tuple[Array, Array]:
    """Discounted sums of past rewards, `G[t] = discount G[t - 1] + r[t]`, from 0 again after a step that is `done`.

    One scan: O(T) work, O(log T) depth on accelerators.

    Args:
        running: `[B, (N)]`, what goes into the first step.
        reward: `[T, B, (N)]`.
        done: bool likewise.
        discount: of a step.

    Returns:
        What goes into the next step `[B, (N)]`, and all sums `[T, B, (N)]`.
    """
    if len(reward) == 0:
        return running, reward
    begins = jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]])
    sums = affine_scan(
        jnp.where(begins, 0.0, discount).astype(reward.dtype), reward, running.astype(reward.dtype)
    )
    return jnp.where(done[-1], 0.0, sums[-1]), sums


def seen_returns(
    returns: Returns, reward: Array, done: Array, weight: Array, discount: Array
) -> Returns:
    """With a rollout's rewards `[T, B, (N)]`, those of no `weight` left out."""
    running, sums = discounted(returns.running, reward * weight, done, discount)
    return Returns(running, with_batch(returns.moments, sums, weight))


def reward_factor(returns: Returns | None) -> Array | float:
    """What rewards are multiplied by: 1 by the deviation of returns, so that these are of size 1 (without a shift)."""
    if returns is None:
        return 1.0
    moments = returns.moments
    return jax.lax.stop_gradient(
        jnp.where(moments.count > 1, jax.lax.rsqrt(moments.variance + LEAST), 1.0)
    )
