"""Scans over a user's monoid, and the log-sum-exp monoid, whose scan is causal softmax attention."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.scan import sharded
from jaxpar.scan._rings import num_steps, shifted, take
from jaxpar.scan.affine import affine_scan
from jaxpar.types import Array, PyTree, UsageError

__all__ = ["LOGSUMEXP", "LogSumExp", "Monoid", "attention_scan", "attention_step", "scan_monoid"]


class Monoid(NamedTuple):
    """An associative operation with a neutral element.

    `combine` is also the streaming step, with constant memory: start from `identity(element)` and combine each new
    element onto it.

    Attributes:
      combine: `(earlier, later) -> element`, associative, elementwise over any leading axes of the leaves.
      identity: `element -> element` of the same shapes and dtypes, which changes nothing it is combined with.
      scan: A faster scan of the same numbers, `(elements, *, axis, reverse, axis_name) -> elements`, if there is one.
    """

    combine: Callable[[PyTree, PyTree], PyTree]
    identity: Callable[[PyTree], PyTree]
    scan: Callable[..., PyTree] | None = None


class LogSumExp(NamedTuple):
    """Sums of exp(score) and exp(score) * value that cannot overflow.

    Attributes:
      max: Largest score, `[...]`; minus infinity where there is none. It is a unit, not a result: derivatives treat
        it as a constant, and are exact for what does not depend on it, as `log_sum` and `mean`.
      denominator: Sum of exp(score - max), `[...]`.
      numerator: Sum of exp(score - max) * value, `[..., V]`.
    """

    max: Array
    denominator: Array
    numerator: Array

    @property
    def log_sum(self) -> Array:
        """Log of the sum of exp(score), minus infinity of none."""
        some = self.denominator != 0  # true of NaN, which must not pass for nothing
        return jnp.where(some, self.max + jnp.log(jnp.where(some, self.denominator, 1)), -jnp.inf)

    @property
    def mean(self) -> Array:
        """Mean of the values with weights softmax(scores), zeros of none."""
        some = (self.denominator != 0)[..., None]
        return jnp.where(some, self.numerator / jnp.where(some, self.denominator[..., None], 1), 0)


def scan_monoid(
    monoid: Monoid,
    elements: PyTree,
    *,
    axis: int = 0,
    reverse: bool = False,
    axis_name: str | None = None,
) -> PyTree:
    """Returns the running combination of all elements up to each: e[0], e[0] + e[1], e[0] + e[1] + e[2], ...

    log2(T) levels. Derivatives go through the tree, at many times its memory, but for a monoid with a `scan` of its
    own, as `LOGSUMEXP`.

    Args:
      monoid: What combines.
      elements: Pytree of arrays with time at `axis`, of one length.
      axis: Of time, from the front, or from the back if all leaves have as many axes.
      reverse: Combines e[T-1] first: each place gets all elements from it on, the last one as the earliest.
      axis_name: Mesh axis over which time is split, inside `jax.shard_map`; moves one element a device.

    Raises:
      UsageError: If the leaves have no such axis or differ in its length.
    """
    elements = jax.tree.map(jnp.asarray, elements)
    axis = _time_axis(elements, axis)
    if num_steps(elements, axis) == 0:
        return elements
    if monoid.scan is not None:
        return monoid.scan(elements, axis=axis, reverse=reverse, axis_name=axis_name)
    out = lax.associative_scan(monoid.combine, elements, axis=axis, reverse=reverse)
    if axis_name is None:
        return out
    whole = take(out, 0 if reverse else -1, axis)
    before = sharded.incoming(monoid.combine, whole, monoid.identity(whole), axis_name, reverse)
    combine = jax.vmap(monoid.combine, (None, axis), axis)
    return combine(before, out)


def attention_scan(
    scores: Array,
    values: Array,
    *,
    axis: int = 0,
    reverse: bool = False,
    axis_name: str | None = None,
) -> Array:
    """Returns causal softmax attention of one constant query: out[t] = sum_{s<=t} softmax(scores[:t+1])[s] values[s].

    Equal to masked dense attention at O(T) work and memory, and `attention_step` streams it. Its gradient is one
    reverse affine scan of each sum. "Attention as an RNN" (arXiv:2405.13956), section 3.

    Args:
      scores: Query times keys, `[..., T, ...]`; minus infinity hides a step. From a NaN or plus
        infinity on, outputs are NaN, as those of softmax.
      values: `[..., T, ..., V]`.
      axis: Of time in scores.
      reverse: Attends to s >= t instead.
      axis_name: Mesh axis over which time is split, inside `jax.shard_map`.

    Returns:
      Array like `values`; zeros where all steps so far are hidden.

    Raises:
      UsageError: For shapes that do not fit.
    """
    elements = _element(jnp.asarray(scores), jnp.asarray(values))
    axis = axis + elements.max.ndim if axis < 0 else axis
    return scan_monoid(LOGSUMEXP, elements, axis=axis, reverse=reverse, axis_name=axis_name).mean


def attention_step(state: LogSumExp | None, score: Array, value: Array) -> tuple[LogSumExp, Array]:
    """Takes one step of `attention_scan` in memory that does not grow: `(state, output)`.

    Args:
      state: Of the step before, None at the first.
      score: `[...]`.
      value: `[..., V]`.
    """
    element = _element(jnp.asarray(score), jnp.asarray(value))
    state = element if state is None else LOGSUMEXP.combine(state, element)
    return state, state.mean


def _element(score, value):
    if value.shape[:-1] != score.shape:
        raise UsageError(
            f"values take the shape of scores, {score.shape}, and one axis more, but have {value.shape}."
        )
    constant = lax.stop_gradient(score)
    # 1 of what is shown, but NaN of a score that has no exponential in any unit: NaN and infinity.
    shown = _relative(constant, constant).astype(value.dtype)
    return LogSumExp(score, shown, jnp.where(score[..., None] != -jnp.inf, value, 0))


def _relative(score, unit):
    """Returns exp(score - unit) for score <= unit, 0 if both are minus infinity; `unit` is a constant."""
    # Both branches are computed and differentiated: inside, a hidden step's -inf is 0, so that no inf - inf is NaN.
    some = score != -jnp.inf  # true of NaN, which is no hidden step
    return jnp.where(some, jnp.exp(jnp.where(some, score, 0) - jnp.where(some, unit, 0)), 0)


def _add(earlier, later):
    unit = lax.stop_gradient(jnp.maximum(earlier.max, later.max))
    x, y = _relative(earlier.max, unit), _relative(later.max, unit)
    return LogSumExp(
        unit,
        x * earlier.denominator + y * later.denominator,
        x[..., None] * earlier.numerator + y[..., None] * later.numerator,
    )


def _nothing(element):
    return LogSumExp(
        max=jnp.full_like(element.max, -jnp.inf),
        denominator=jnp.full_like(element.denominator, 0),
        numerator=jnp.full_like(element.numerator, 0),
    )


def _scan_log_sum_exp(elements, *, axis, reverse, axis_name):
    """Scans the maxima; in their units the sums are affine recurrences whose transitions are constants up to 1."""
    # The result does not depend on the units, so that they are constants to a derivative.
    units = scan_monoid(
        _MAX, lax.stop_gradient(elements.max), axis=axis, reverse=reverse, axis_name=axis_name
    )
    first = take(units, -1 if reverse else 0, axis)
    if axis_name is not None:
        whole = take(units, 0 if reverse else -1, axis)
        first = jnp.where(
            sharded.is_first(axis_name, reverse),
            first,
            sharded.from_earlier(whole, axis_name, reverse),
        )
    wide = jnp.promote_types(units.dtype, jnp.float32)
    earlier = shifted(units, first, axis, reverse=reverse).astype(wide)
    keep = _relative(earlier, units.astype(wide))
    # A scan forgets what it multiplies by 0. An underflow must not: values that are NaN have to stay.
    least = jnp.asarray(jnp.finfo(wide).tiny, wide)
    keep = jnp.where(earlier == -jnp.inf, 0, jnp.maximum(keep, least))
    weight = _relative(elements.max, units)
    run = functools.partial(affine_scan, axis=axis, reverse=reverse, axis_name=axis_name)
    values = weight[..., None] * elements.numerator
    return LogSumExp(
        units,
        run(keep, weight * elements.denominator),
        run(jnp.broadcast_to(keep[..., None], values.shape), values),
    )


_MAX = Monoid(jnp.maximum, lambda element: jnp.full_like(element, -jnp.inf))

LOGSUMEXP = Monoid(_add, _nothing, _scan_log_sum_exp)
"""Over `LogSumExp(max, denominator, numerator)`; one observation is (score, 1, value)."""


def _time_axis(elements: PyTree, axis: int) -> int:
    leaves = jax.tree.leaves(elements)
    if not leaves:
        raise UsageError("scan_monoid takes elements with at least one array, but there is none.")
    ranks = {x.ndim for x in leaves}
    if axis < 0 and len(ranks) > 1:
        raise UsageError(
            f"axis={axis} counts from the back, but the elements have {sorted(ranks)} axes; use 0 or more."
        )
    axis = axis + min(ranks) if axis < 0 else axis
    if not 0 <= axis < min(ranks):
        raise UsageError(
            f"axis={axis} is no axis of every element; legal are 0 to {min(ranks) - 1}."
        )
    if len(lengths := {x.shape[axis] for x in leaves}) > 1:
        raise UsageError(
            f"elements take one length of time, but have {sorted(lengths)} at axis {axis}."
        )
    return axis
