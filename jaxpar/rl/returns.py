"""Advantages and value targets of whole rollouts, by one scan each.

In all of them `next_value[t]` is the value of what step t led to and `done[t]` whether the trajectory ends with it, so
that nothing of what follows belongs to it: after an end, `next_value` is the bootstrap (0 where the process terminated,
the value of the last observation where the episode was truncated), never the value of the next episode's start.
`next_values` makes both from a rollout. Time is the leading axis; any axes may follow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar._older_fields import join_positions, newer_arguments
from jaxpar.scan import affine_scan
from jaxpar.types import Scalar, UsageError

__all__ = [
    "RatioLimits",
    "advantages",
    "lambda_returns",
    "n_step_returns",
    "next_values",
    "vtrace",
]


def next_values(
    value: Float[Array, "T *B"],
    last_value: Float[Array, "*B"],
    done: Bool[Array, "T *B"],
    bootstrap: Array,
) -> Float[Array, "T *B"]:
    """The value of what each step led to: `bootstrap[t]` where done, else `value[t + 1]`, at the end `last_value`."""
    return jnp.where(done, bootstrap, jnp.concatenate([value[1:], last_value[None]]))


def advantages(
    reward: Float[Array, "T *B"],
    value: Array,
    next_value: Array,
    done: Bool[Array, "T *B"],
    discount,
    gae_lambda,
) -> Float[Array, "T *B"]:
    """Generalised advantages (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

        d[t] = reward[t] + discount next_value[t] - value[t]
        A[t] = d[t] + discount gae_lambda A[t + 1], or d[t] where done

    O(T) work, O(log T) depth on accelerators. Gradients flow into all arguments; stop them where they must not.

    Args:
        reward: of each step.
        value: of what each step started from.
        next_value: of what it led to, see above.
        done: whether the trajectory ends with the step.
        discount: of a step.
        gae_lambda: 0 gives one-step errors, 1 gives returns less values.
    """
    error = reward + discount * next_value - value
    return affine_scan(
        jnp.where(done, 0.0, discount * gae_lambda).astype(error.dtype), error, reverse=True
    )


def lambda_returns(
    reward: Float[Array, "T *B"], next_value: Array, done: Bool[Array, "T *B"], discount, lambda_
) -> Float[Array, "T *B"]:
    """Returns that mix all lengths (Sutton and Barto 2018, section 12.1).

        G[t] = reward[t] + discount ((1 - lambda) next_value[t] + lambda G[t + 1])

    with `next_value[t]` in place of both where done and at the end. Arguments as of `advantages`.
    """
    last = _ends(done)
    lambda_ = jnp.where(last, 0.0, lambda_).astype(reward.dtype)
    return affine_scan(
        discount * lambda_, reward + discount * (1 - lambda_) * next_value, reverse=True
    )


class RatioLimits(NamedTuple):
    """Largest weights of what another policy did, for `vtrace`.

    Attributes:
        max_rho: largest weight of a step's own error: it decides which policy's values the targets
            are.
        max_c: largest weight that what follows is carried back with: it decides how fast that is
            learned.
    """

    max_rho: Scalar = 1.0
    max_c: Scalar = 1.0


_OLDER = {name: f"limits.{name}" for name in RatioLimits._fields}
"""Arguments of `vtrace` that are fields of its limits today."""


def vtrace(
    log_ratio: Float[Array, "T *B"],
    reward: Float[Array, "T *B"],
    value: Array,
    next_value: Array,
    done: Bool[Array, "T *B"],
    discount,
    lambda_,
    *older_limits: Scalar,
    limits: RatioLimits | None = None,
    **older: object,
) -> tuple[Float[Array, "T *B"], Float[Array, "T *B"]]:
    """Value targets and advantages of a policy from what another one did (Espeholt et al. 2018, arXiv:1802.01561).

        rho[t] = min(max_rho, exp(log_ratio[t])),    c[t] = lambda min(max_c, exp(log_ratio[t]))
        d[t] = reward[t] + discount next_value[t] - value[t]
        x[t] = rho[t] d[t] + discount c[t] x[t + 1], or rho[t] d[t] where done
        target[t] = value[t] + x[t],    A[t] = rho[t] (d[t] + discount lambda x[t + 1])

    which are eq. 1 and the advantages of section 4.2, with the lambda of its remark 2. A `log_ratio` of 0 gives
    `advantages`, and those over the values. One scan: O(T) work, O(log T) depth on accelerators.

    Args:
        log_ratio: log density of each action by the policy that learns, less that by the one that acted.
        reward: of each step.
        value: of what each step started from.
        next_value: of what it led to, see above.
        done: whether the trajectory ends with the step.
        discount: of a step.
        lambda_: 0 corrects by one step, 1 by all that follow.
        *older_limits: `max_rho` and `max_c` by position, until the first release.
        limits: largest weights; None means 1 for both.
        **older: fields of `limits`, which were arguments; accepted until the first release.

    Returns:
        Targets and advantages. Gradients flow into all arguments; stop them where they must not.

    Raises:
        TypeError: for an unknown keyword, or too many arguments.
    """
    older = join_positions("vtrace", RatioLimits._fields, older_limits, older)
    groups = {"limits": limits or RatioLimits()}
    most: RatioLimits = newer_arguments("vtrace", _OLDER, groups, older)["limits"]

    ratio = jnp.exp(log_ratio)
    rho = jnp.minimum(most.max_rho, ratio)
    c = jnp.minimum(most.max_c, ratio)
    error = reward + discount * next_value - value
    carried = jnp.where(done, 0.0, discount * lambda_).astype(error.dtype)
    excess = affine_scan(carried * c, rho * error, reverse=True)
    after = jnp.concatenate([excess[1:], jnp.zeros_like(excess[:1])])
    # Selected: what follows an end may be NaN, and 0 NaN is NaN.
    after = jnp.where(done, 0.0, after)
    return value + excess, rho * (error + carried * after)


def _ends(done: Bool[Array, "T *B"]) -> Bool[Array, "T *B"]:
    """Returns where a trajectory or the rollout ends; not by an index, since there may be no step."""
    is_last = jnp.arange(len(done)) == len(done) - 1
    return done | is_last.reshape(-1, *(1,) * (done.ndim - 1))


def n_step_returns(
    reward: Float[Array, "T *B"],
    next_value: Array,
    done: Bool[Array, "T *B"],
    discount,
    num_steps: int,
) -> Float[Array, "T *B"]:
    """The rewards of up to `num_steps` steps and the value of where they led, fewer where done and at the end.

    `num_steps` sweeps over the whole rollout. Arguments as of `advantages`.
    """
    if num_steps < 1:
        raise UsageError(f"num_steps={num_steps} must be at least 1.")
    last = _ends(done)

    def longer(_, returns):
        after = jnp.concatenate([returns[1:], returns[-1:]])
        return reward + discount * jnp.where(last, next_value, after)

    return jax.lax.fori_loop(0, num_steps - 1, longer, reward + discount * next_value)
