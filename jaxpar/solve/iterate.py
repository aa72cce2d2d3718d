"""The iteration of one window: updates, tests that NaN cannot pass, and a prefix that has converged and stays.

Step t of any method here is exact once the steps before it are, so the steps that have converged are a prefix, which
every iteration lengthens; only what follows it is ever changed or reset.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.scan.varying import varying_as
from jaxpar.solve.problem import IterativeMethod, Problem
from jaxpar.solve.structure import Leaves
from jaxpar.types import Array

__all__ = ["Fit", "bounds", "iterate", "leading", "most_iterations", "within"]


class Fit(NamedTuple):
    """The iterates of one window.

    Attributes:
      h: States [T, ...].
      prefix: How many of this device's steps have converged, all steps before them having converged too.
      is_done: Whether all have, on every device.
      iterations: Made.
      residual: Largest of the last iteration before its update, relative to the largest |h| of its leaf.
      update: Largest, likewise.
    """

    h: Leaves
    prefix: Array
    is_done: Array
    iterations: Array
    residual: Array
    update: Array


def most_iterations(length: int) -> int:
    """Returns the default bound on the iterations of a window.

    Half its length, but for very short ones: an iteration that finds one step at a time converges always, and says
    nothing about whether the recurrence is stable.
    """
    return min(128, max(length // 2, min(length + 1, 32)))


def iterate(method: IterativeMethod, problem: Problem, guess: Leaves, valid: Array, is_sound: Array) -> Fit:
    """Iterates until residual and update are small at every step, or the method's bound is reached.

    A step passes if |residual| <= tol * scale and |update| <= max(tol, sqrt(eps)) * scale, scale being the largest |h|
    of the leaf; tol is the method's, or eps^(4/5). The update is what bounds the error where the recurrence amplifies
    a small residual.

    Args:
      method: Whose updates.
      problem: The recurrence.
      guess: First iterate, finite; also what replaces iterates from the first one that is not finite.
      valid: Steps that count; those behind them are padding.
      is_sound: False makes no iteration.
    """
    limit = method.max_iters or most_iterations(problem.parts * problem.length)
    index = jnp.arange(problem.length)

    def advance(fit: Fit) -> Fit:
        is_fixed = index < fit.prefix
        residual = _cleared(is_fixed, problem.residual(fit.h))
        delta = _cleared(is_fixed, method.update(problem, fit.h, residual))
        h = tuple((a + b).astype(a.dtype) for a, b in zip(fit.h, delta, strict=True))
        scales = scale(problem, h)
        passes = within(residual, bounds(scales, h, method.tol)) & within(delta, bounds(scales, h, method.tol, 0.5))
        prefix, is_done = leading(problem, passes | is_fixed | (index >= valid))
        after = Fit(
            _reset(h, guess),
            prefix,
            is_done,
            fit.iterations + 1,
            _largest(problem, _cleared(index >= valid, residual), scales),
            _largest(problem, _cleared(index >= valid, delta), scales),
        )
        return varying_as(after, problem.start)

    prefix, is_done = leading(problem, index >= valid)
    nothing = jnp.zeros((), jnp.float32)
    first = Fit(guess, prefix, is_done, jnp.int32(0), nothing, nothing)
    first = varying_as(first, problem.start)
    return jax.lax.while_loop(lambda fit: is_sound & ~fit.is_done & (fit.iterations < limit), advance, first)


def leading(problem: Problem, passes: Array) -> tuple[Array, Array]:
    """Returns how many leading steps pass, of this device's part and only if all parts before it do, and if all do."""
    count = jnp.where(passes.all(), len(passes), jnp.argmin(passes)).astype(jnp.int32)
    if problem.axis_name is None:
        return count, count == len(passes)
    counts = jax.lax.all_gather(count, problem.axis_name)
    counts = counts[::-1] if problem.reverse else counts
    is_before = jnp.arange(problem.parts) < problem.rank
    return jnp.where(jnp.all(~is_before | (counts == len(passes))), count, 0), jnp.all(counts == len(passes))


def scale(problem: Problem, h: Leaves) -> Array:
    """Returns for each leaf and step the largest finite |h| up to it, [leaves, T]; one small gather over the devices.

    Only up to it: what diverges further on must not make a residual look small.
    """
    sizes = (jnp.where(jnp.isfinite(leaf), jnp.abs(leaf), 0) for leaf in h)
    steps = jnp.stack([size.reshape(len(size), -1).max(1).astype(_wide(size)) for size in sizes])
    largest = _running_max(steps)
    starts = jnp.stack([jnp.max(jnp.abs(leaf), initial=0).astype(steps.dtype) for leaf in problem.start])
    if problem.axis_name is not None:
        ends = jax.lax.all_gather(largest[:, -1], problem.axis_name)
        ends = ends[::-1] if problem.reverse else ends
        is_before = jnp.arange(problem.parts) < problem.rank
        starts = jnp.maximum(starts, jnp.where(is_before[:, None], ends, 0).max(0))
    return jnp.maximum(largest, starts[:, None])


def _running_max(x: Array) -> Array:
    """Returns the largest of x [leaves, T] up to each step, in two levels: a tree of log2(T) is as many GPU kernels."""
    leaves, length = x.shape
    size = max(1, math.isqrt(length))
    count = -(-length // size)
    rows = jnp.pad(x, ((0, 0), (0, count * size - length)), mode="edge").reshape(leaves, count, size)
    inside = jnp.where(jnp.tri(size, dtype=bool)[None, None], rows[:, :, None, :], -jnp.inf).max(-1)
    before = jnp.where(jnp.tri(count, k=-1, dtype=bool)[None], inside[:, None, :, -1], -jnp.inf).max(-1)
    return jnp.maximum(inside, before[:, :, None]).reshape(leaves, -1)[:, :length]


def bounds(scales: Array, h: Leaves, tol: float | None = None, power: float = 0.8) -> Array:
    """Returns the bound of each leaf and step, [leaves, T]: its scale times the larger of eps^power and, if given, tol.

    At power 4/5, that of the residual, `tol` stands in place of eps^(4/5).
    """
    eps = [float(jnp.finfo(leaf.dtype).eps) for leaf in h]
    relative = [tol if tol and power == 0.8 else max(tol or 0.0, each**power) for each in eps]
    return scales * jnp.array(relative, scales.dtype)[:, None]


def within(values: Leaves, bound: Array) -> Array:
    """Returns whether each step's every entry is within its leaf's bound, [T]; no NaN is."""
    pairs = zip(values, bound, strict=True)
    tests = [(jnp.abs(leaf) <= _column(limit, leaf)).reshape(len(leaf), -1).all(1) for leaf, limit in pairs]
    return jnp.all(jnp.stack(tests), 0)


def _wide(leaf: Any) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _cleared(where: Array, values: Leaves) -> Leaves:
    """Returns values [T, ...] with zeros at the steps of `where`."""
    return tuple(jnp.where(_column(where, leaf), 0, leaf) for leaf in values)


def _column(steps: Array, leaf: Array) -> Array:
    return steps.reshape(-1, *(1,) * (leaf.ndim - 1))


def _reset(h: Leaves, guess: Leaves) -> Leaves:
    """Returns h with `guess` from the first step on that is not finite."""
    is_finite = jnp.stack([jnp.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in h]).all(0)
    first_bad = jnp.where(is_finite.all(), len(is_finite), jnp.argmin(is_finite))
    is_kept = jnp.arange(len(is_finite)) < first_bad
    return tuple(jnp.where(_column(is_kept, a), a, b) for a, b in zip(h, guess, strict=True))


def _largest(problem: Problem, values: Leaves, scales: Array) -> Array:
    """Returns the largest entry relative to its leaf's scale; infinite if one is not finite."""
    tiny = jnp.finfo(scales.dtype).tiny
    sizes = [jnp.where(jnp.isfinite(leaf), jnp.abs(leaf), jnp.inf) for leaf in values]
    each = jnp.stack([size.reshape(len(size), -1).max(1).astype(scales.dtype) for size in sizes])
    largest = (each / jnp.maximum(scales, tiny)).max().astype(jnp.float32)
    return largest if problem.axis_name is None else jax.lax.pmax(largest, problem.axis_name)
