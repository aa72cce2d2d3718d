"""The iteration of one window: updates, tests that NaN cannot pass, and a prefix that has converged and stays.

Step t of any method here is exact once the steps before it are, so the steps that have converged are a prefix, which
every iteration lengthens; only what follows it is ever changed or reset.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.scan.varying import varying_as
from jaxpar.solve.problem import IterativeMethod, Problem
from jaxpar.solve.rounding import allowed, fraction, residual_bound, rounding_noise, trusted, wide, within
from jaxpar.solve.structure import Leaves
from jaxpar.types import Array, PyTree

Tree = TypeVar("Tree")

FROZEN = 0.02
"""Of the allowed error, the residual of a step that is not changed again."""

ROUNDINGS = 4.0
"""Roundings of one step that a residual may hold where it can get no smaller."""

STALLED = 0.9
"""An update that is not smaller than so much of the one before it has stalled."""


class Iterates(NamedTuple):
    """The iterates of one window.

    Attributes:
      h: States [T, ...].
      residual: f(S h, x) - h, zero at steps that are not changed any more.
      frozen: How many of this device's steps are not changed any more, all steps before them being so too.
      prefix: How many have converged, all steps before them having converged too; at least `frozen`.
      is_done: Whether all have, on every device.
      iterations: Made.
      size: Largest update of the last iteration, in units of the allowed error.
      worst: Largest residual, in units of what settles it, and largest update, in units of the allowed error.
    """

    h: Leaves
    residual: Leaves
    frozen: Array
    prefix: Array
    is_done: Array
    iterations: Array
    size: Array
    worst: tuple[Array, Array]


def most_iterations(length: int) -> int:
    """Returns the default bound on the iterations of a window.

    Half its length, but for very short ones: an iteration that finds one step at a time converges always, and says
    nothing about whether the recurrence is stable.
    """
    return min(128, max(length // 2, min(length + 1, 32)))


def iterate(
    method: IterativeMethod, problem: Problem, guess: Leaves, valid: Array, is_sound: Array, confirm: bool = True
) -> Iterates:
    """Iterates until residual and error are small at every entry of every step, or the method's bound is reached.

    Judged is the iterate that is returned: its own residual, and its error, for which the last two updates speak. If
    those shrink by the factor q an iteration, what is left of the error is q / (1 - q) of the last update. An entry
    passes if that is at most `rtol |h| + atol` and its residual as small (`residual_bound`). Where the updates of a
    method that solves with the true Jacobian shrink no more, rounding decides: see `as_good_as_rounding`.
    Those of others may shrink slowly for another reason, and have to pass.

    Args:
      method: Whose updates.
      problem: The recurrence, with rtol and atol.
      guess: First iterate, finite; also what replaces iterates from the first one that is not finite.
      valid: Steps that count; those behind them are padding.
      is_sound: False makes no iteration.
      confirm: False judges the residual that the last update began with, and saves an evaluation of f: for who looks
        at the residual of what is returned.
    """
    limit = method.max_iters or most_iterations(problem.parts * problem.length)
    index = jnp.arange(problem.length)
    is_padding = index >= valid
    is_exact = method.is_exact(problem.structure)

    def advance(iterates: Iterates) -> Iterates:
        is_fixed = index < iterates.frozen
        before = iterates.residual if confirm else _cleared(is_fixed, problem.residual(iterates.h))
        delta = _cleared(is_fixed, method.update(problem, iterates.h, before))
        h = tuple((a + b).astype(a.dtype) for a, b in zip(iterates.h, delta, strict=True))
        h = _reset(h, guess)
        residual = _cleared(is_fixed, problem.residual(h)) if confirm else before
        bound = allowed(problem, h)
        residuals, updates = fraction(residual, residual_bound(problem, h, is_exact)), fraction(delta, bound)
        size, worst = (_largest(problem, jnp.where(is_padding, 0, steps)) for steps in (updates, residuals))
        rate = size / iterates.size
        error = remaining(updates, rate, iterates.iterations)
        passes = (residuals <= 1) & (error <= 1)
        frozen, _ = leading(problem, passes & (residuals <= FROZEN) | is_fixed | is_padding)
        if is_exact:
            passes = once(
                (iterates.iterations > 0) & (rate > STALLED) & ~(passes | is_padding).all(),
                lambda passes: passes | as_good_as_rounding(problem, h, residual, delta, iterates.iterations),
                passes,
                problem.start,
            )
        prefix, is_done = leading(problem, passes | is_fixed | is_padding)
        after = Iterates(h, residual, frozen, prefix, is_done, iterates.iterations + 1, size, (worst, size))
        return varying_as(after, problem.start)

    prefix, is_done = leading(problem, is_padding)
    nothing = jnp.zeros((), jnp.float32)
    unknown = problem.residual(guess) if confirm else tuple(jnp.zeros(leaf.shape, wide(leaf)) for leaf in guess)
    first = Iterates(guess, unknown, prefix, prefix, is_done, jnp.int32(0), nothing, (nothing, nothing))
    first = varying_as(first, problem.start)
    return jax.lax.while_loop(
        lambda iterates: is_sound & ~iterates.is_done & (iterates.iterations < limit), advance, first
    )


def remaining(updates: Array, rate: Array, iterations: Array) -> Array:
    """Returns the error that is left after updates that shrink by `rate`, in their units: a geometric series' rest.

    In the first iteration there is no rate yet, and the update itself is returned; where nothing changes, zero.
    """
    factor = jnp.where(rate < 1, rate / (1 - rate), jnp.inf)
    factor = jnp.where(iterations == 0, 1.0, factor)
    return jnp.where(updates == 0, 0, factor * updates)


def is_rounding(problem: Problem, h: Leaves, residual: Leaves, salt: Array | int = 0) -> Array:
    """Returns at which steps the residual of every entry is a few roundings of what enters it, [T]."""
    level = rounding_noise(problem, h, salt)
    most = tuple(a + ROUNDINGS * b for a, b in zip(residual_bound(problem, h), level, strict=True))
    return within(residual, most)


def as_good_as_rounding(problem: Problem, h: Leaves, residual: Leaves, error: Leaves, salt: Array | int = 0) -> Array:
    """Returns at which steps arithmetic can give nothing better, [T].

    There the residual is rounding, and the error, of which an update that no longer shrinks is a sample, is not that of
    chaos.
    """
    return is_rounding(problem, h, residual, salt) & within(error, trusted(problem, h))


def once(is_needed: Array, repair: Callable[[Tree], Tree], state: Tree, like: PyTree) -> Tree:
    """Returns `repair(state)` if that is needed, else `state`, for which nothing is computed.

    A loop that makes no trip: under `vmap` a `cond` would run both branches.
    """

    def turn(pair):
        return varying_as((jnp.zeros_like(pair[0]), repair(pair[1])), like)

    return jax.lax.while_loop(lambda pair: pair[0], turn, varying_as((is_needed, state), like))[1]


def leading(problem: Problem, passes: Array) -> tuple[Array, Array]:
    """Returns how many leading steps pass, of this device's part and only if all parts before it do, and if all do."""
    count = jnp.where(passes.all(), len(passes), jnp.argmin(passes)).astype(jnp.int32)
    if problem.axis_name is None:
        return count, count == len(passes)
    counts = jax.lax.all_gather(count, problem.axis_name)
    counts = counts[::-1] if problem.reverse else counts
    is_before = jnp.arange(problem.parts) < problem.rank
    return jnp.where(jnp.all(~is_before | (counts == len(passes))), count, 0), jnp.all(counts == len(passes))


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


def _largest(problem: Problem, steps: Array) -> Array:
    """Returns the largest of all steps on all devices, infinite if one is not finite."""
    largest = jnp.where(jnp.isfinite(steps), steps, jnp.inf).max()
    return largest if problem.axis_name is None else jax.lax.pmax(largest, problem.axis_name)
