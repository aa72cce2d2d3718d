"""Windows in sequence, each started from the true state before it, and what follows where one fails.

A window that fails is solved again in short windows, and what fails even there is run step by step.
A repair is a loop that makes no trip when there is nothing to repair: under `vmap` a `cond` would
run both branches.

Windows hide instability: each may converge while the error of the states before it grows from
window to window. So a sequence of windows also carries an estimate of how large rounding errors
have become, one more linear solve a window.

What a window found is then certified. States of blind leaves are the loop's own to the bit
(`settle`). Residuals of others, added up by the Jacobians, are within what is allowed
(`accumulated_errors`).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.scan.varying import varying_as
from jaxpar.solve.in_blocks import cut, joined, scanned, settle
from jaxpar.solve.iterate import iterate, leading, once
from jaxpar.solve.problem import IterativeMethod, Outcome, Problem
from jaxpar.solve.rounding import (
    allowed,
    at_steps,
    entering,
    fractions,
    leaf_largest,
    spread,
    step_largest,
    trusted,
    wide,
    within,
)
from jaxpar.solve.structure import Leaves, Structure
from jaxpar.types import Array

__all__ = ["SHORT", "WINDOW_BYTES"]

WINDOW_BYTES = 2**30
"""What the Jacobians of one window and the scan over them may take, by `Structure.bytes_per_step`."""

SHORT = 64
"""Steps of the windows in which a failed window is solved again."""


def auto_window(structure: Structure, length: int) -> int:
    """Returns how many of `length` steps fit the budget: all, or an even part of them."""
    most = max(1, WINDOW_BYTES // max(1, structure.bytes_per_step))
    return max(1, math.ceil(length / math.ceil(length / most)))


def by_windows(
    method: IterativeMethod,
    problem: Problem,
    guess: Leaves | None,
    on_fail: str,
    *,
    confirm: bool = True,
) -> tuple[Leaves, Outcome]:
    """Returns the states of a problem by a method's updates, as `Method.states`; `confirm` is that of `iterate`."""
    length = problem.length
    window = min(length, method.window or auto_window(method.held(problem.structure), length))
    if problem.axis_name is not None:
        sizes: tuple[int, ...] = (length,)  # one window over all devices
    else:
        # In short windows blind leaves would be run sequentially anyway, at a higher price.
        is_repaired = window > 2 * SHORT and not problem.structure.blind
        sizes = (window, SHORT) if is_repaired else (window,)
    calm = tuple(jnp.zeros(leaf.shape, wide(leaf)) for leaf in problem.start)
    solver = _Solver(method, on_fail, confirm)
    h, _, outcome = solver.windows(problem, sizes, guess, jnp.int32(length), _Errors(calm, calm))
    where = jnp.where(
        outcome.first_bad < length, problem.rank * length, (problem.parts - 1) * length
    )
    first_bad = where + outcome.first_bad
    if problem.axis_name is not None:
        first_bad = jax.lax.pmin(first_bad, problem.axis_name)
    return h, outcome._replace(first_bad=first_bad.astype(jnp.int32))


def accumulated_errors(problem: Problem, h: Leaves, start: Leaves) -> Leaves:
    """Returns the error of every entry to first order, [T, ...]: all residuals, carried on by the Jacobians.

    Where the true Jacobian does not fit into memory for all steps, it is made window by window.
    Cost: one set of Jacobians and one solve.

    Args:
      problem: The recurrence.
      h: States [T, ...].
      start: Error of the state before the first step.
    """
    residual = problem.residual(h)
    size = auto_window(problem.structure, problem.length)
    if problem.axis_name is not None or size == problem.length:
        return problem.solve(problem.jacobian(h), residual, start)

    def one(error, row):
        before, xs, gap = row
        part = dataclasses.replace(problem, xs=xs, length=size, valid=None)
        jacobian = problem.structure.jacobian(part.apply, before)
        errors = problem.structure.solve(jacobian, gap, error)
        return tuple(leaf[-1] for leaf in errors), errors

    rows = cut((problem.shift(h), problem.xs, residual), problem.length, size)
    return joined(jax.lax.scan(one, varying_as(start, problem.start), rows)[1], problem.length)


def run_sequentially(
    problem: Problem, h: Leaves | None = None, prefix: Array | int = 0, unroll: int | None = None
) -> Leaves:
    """Returns the states found step by step, keeping the first `prefix` steps of `h`, none by default.

    With `axis_name` the devices take turns, each passing one state on. `unroll` is `lax.scan`'s;
    None for 8 on CUDA, where the step of an XLA loop costs 20 microseconds whatever is in it, and 1
    elsewhere.
    """
    unroll = problem.unroll if unroll is None else unroll
    if h is None:
        h = tuple(jnp.zeros((problem.length, *leaf.shape), leaf.dtype) for leaf in problem.start)
    is_kept = jnp.arange(problem.length) < prefix

    def one(before, row):
        x, known, keep = row
        new = tuple(
            jnp.where(keep, a, b) for a, b in zip(known, problem.step(before, x), strict=True)
        )
        return new, new

    def part(entry, h):
        return scanned(one, entry, (problem.xs, h, is_kept), problem.length, unroll)

    if problem.axis_name is None:
        return part(problem.start, h)

    def turn(hop, h):
        entry = problem.entry(tuple(leaf[-1] for leaf in h))
        return once((problem.rank == hop) & ~is_kept.all(), lambda h: part(entry, h), h, entry)

    return jax.lax.fori_loop(0, problem.parts, turn, varying_as(h, problem.start))


class _Errors(NamedTuple):
    """Errors of a state: what rounding may have grown to, and what residuals add up to."""

    rounding: Leaves
    residual: Leaves


class _State(NamedTuple):
    """A window: its states, the errors of the last one, and how it came about."""

    h: Leaves
    error: _Errors
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class _Solver:
    """A method, what stands where it fails, and whether its iterates are confirmed here."""

    method: IterativeMethod
    on_fail: str
    confirm: bool

    def windows(
        self,
        problem: Problem,
        sizes: tuple[int, ...],
        guess: Leaves | None,
        valid: Array,
        error: _Errors,
        chained: bool = False,
    ) -> _State:
        """Solves windows of `sizes[0]` steps in sequence, each again in windows of `sizes[1:]` where it fails.

        Args:
          problem: The recurrence.
          sizes: Of windows, at each level.
          guess: States [T, ...], or None.
          valid: Steps that count; those behind them are padding.
          error: Of the state before the first step, as `_errors` estimates it.
          chained: Whether this sequence is a part of a longer one.
        """
        size, length = sizes[0], problem.length
        count = math.ceil(length / size)
        if count == 1:
            return self.window(problem, sizes, guess, valid, error, chained)

        def one(carry, row):
            start, error = carry
            xs, guess, valid = row
            part = dataclasses.replace(problem, start=start, xs=xs, length=size)
            state = self.window(part, sizes, guess, valid, error, True)
            return (tuple(leaf[-1] for leaf in state.h), state.error), (state.h, state.outcome)

        rows = (
            *cut((problem.xs, guess), length, size),
            jnp.clip(valid - size * jnp.arange(count), 0, size),
        )
        entry = varying_as((problem.start, error), problem.start)
        (_, error), (h, outcomes) = jax.lax.scan(one, entry, rows)
        return _State(joined(h, length), error, _merged(outcomes, size, length))

    def window(self, problem, sizes, guess, valid, error, chained) -> _State:
        """Solves one window, and again what fails of it."""
        problem = dataclasses.replace(problem, valid=valid)
        guess = first_iterate(problem, guess)
        is_finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in problem.start]).all()
        entry = tuple(leaf[None] for leaf in problem.start)
        grown = tuple(leaf[None] for leaf in error.rounding)
        is_sound = is_finite & within(grown, trusted(problem, entry))[0]
        iterates = iterate(self.method, problem, guess, valid, is_sound, self.confirm)
        index = jnp.arange(problem.length)
        is_padding = index >= valid
        h = iterates.h
        worst, bounds = iterates.worst
        passes = index < iterates.prefix
        after = error
        added = None
        if problem.structure.blind:
            h, passes, worst = settle(problem, h, is_sound, is_padding)
        if chained and self._is_affordable(problem):
            errors = _errors(problem, h, error.rounding)
            passes &= within(errors, trusted(problem, h)) | is_padding
            after = after._replace(rounding=tuple(leaf[-1] for leaf in errors))
        if self._is_certified(problem):
            errors = accumulated_errors(problem, h, error.residual)
            parts = fractions(errors, allowed(problem, h))
            passes &= (step_largest(parts) <= 1) | is_padding
            parts = tuple(jnp.where(at_steps(is_padding, leaf), 0, leaf) for leaf in parts)
            bounds = leaf_largest(parts)
            after = after._replace(residual=tuple(leaf[-1] for leaf in errors))
            added = errors
        prefix, is_done = leading(problem, passes)
        none = jnp.full_like(prefix, problem.length)
        outcome = Outcome(iterates.iterations, jnp.int32(1), worst, bounds, none)

        def repair(state: _State) -> _State:
            if sizes[1:]:
                again = self.windows(problem, sizes[1:], state.h, valid, error, True)
                made = again.outcome
                total = made._replace(
                    iterations=made.iterations + iterates.iterations, windows=made.windows + 1
                )
                return again._replace(outcome=total)
            # What is run sequentially is what the loop gives from the last state that passed: it
            # keeps that state's error, while the estimate of rounding starts again from what it was.
            rest = finished(problem, state.h, prefix, self.on_fail)
            left = error
            if added is not None:
                last = jnp.maximum(prefix - 1, 0)
                pairs = zip(added, error.residual, strict=True)
                kept = tuple(jnp.where(prefix > 0, leaf[last], start) for leaf, start in pairs)
                left = error._replace(residual=kept)
            return _State(rest, left, outcome._replace(first_bad=prefix))

        return once(~is_done, repair, _State(h, after, outcome), problem.start)

    def _is_certified(self, problem: Problem) -> bool:
        """True if residuals are to be added up: where an update is not the error itself."""
        if not self.confirm:
            return False  # the caller judges what it makes of the states
        return not self.method.is_exact(problem.structure) or bool(problem.structure.blind)

    def _is_affordable(self, problem) -> bool:
        """Whether the true Jacobian takes no more memory than what an update holds anyway."""
        return (
            problem.structure.bytes_per_step <= self.method.held(problem.structure).bytes_per_step
        )


def finished(problem: Problem, h: Leaves, prefix: Array, on_fail: str) -> Leaves:
    """Returns the states with all but the first `prefix` steps run sequentially, or NaN; see `Method.states`."""
    if on_fail == "finish":
        return run_sequentially(problem, h, prefix)
    is_kept = jnp.arange(problem.length) < prefix
    return tuple(jnp.where(at_steps(is_kept, leaf), leaf, jnp.nan) for leaf in h)


def first_iterate(problem: Problem, guess: Leaves | None) -> Leaves:
    """Returns `guess`, by default f(start, x[t]) at every t; the start where that is not finite."""
    start = tuple(jnp.broadcast_to(leaf, (problem.length, *leaf.shape)) for leaf in problem.start)
    guess = problem.apply(start) if guess is None else guess
    return tuple(
        jnp.where(jnp.isfinite(a), a, jnp.nan_to_num(b)) for a, b in zip(guess, start, strict=True)
    )


def _errors(problem: Problem, h: Leaves, error: Leaves) -> Leaves:
    """Estimates the error at each step: rounding in every step, of random sign, carried on by the Jacobians.

    Cost: one set of Jacobians and one solve.
    """
    jacobian = problem.jacobian(h)
    level = entering(problem, jacobian, h)
    return problem.solve(
        jacobian, tuple(a * spread(a, place) for place, a in enumerate(level)), error
    )


def _merged(outcomes: Outcome, size: int, length: int) -> Outcome:
    """Returns the outcome of windows of one size in sequence from that of each."""
    bad = outcomes.first_bad
    at = jnp.where(bad < size, bad + size * jnp.arange(len(bad), dtype=bad.dtype), length)
    return Outcome(
        outcomes.iterations.sum(dtype=jnp.int32),
        outcomes.windows.sum(dtype=jnp.int32),
        outcomes.residual.max(),
        outcomes.error.max(0),
        at.min(),
    )
