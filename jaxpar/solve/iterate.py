"""The iteration of one window: updates, tests that NaN cannot pass, and a prefix that has converged and stays.

Step t of any method here is exact once the steps before it are, so the steps that have converged
are a prefix, which every iteration lengthens; only what follows it is ever changed or reset.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.scan.varying import varying_as
from jaxpar.solve.problem import IterativeMethod, Problem
from jaxpar.solve.rounding import (
    allowed,
    at_steps,
    fraction,
    fractions,
    leaf_largest,
    over_devices,
    residual_bound,
    rounding_noise,
    step_largest,
    trusted,
    wide,
    within,
)
from jaxpar.solve.structure import Leaves
from jaxpar.types import Array, PyTree

Tree = TypeVar("Tree")

FROZEN = 0.02
"""Share of the allowed error that the residuals of all steps that are not changed again may add up to."""

PARTS = 16
"""Parts of a window in which the speed of convergence is measured, each for itself.

Only for methods that solve with the true Jacobian: others converge along the window at a speed that
says little in one part, and their states are certified afterwards.
"""

ROUNDINGS = 4.0
"""Roundings of one step that a residual may hold where it can get no smaller."""

SMALL = 30.0
"""Size of an update by the true Jacobian, in units of the allowed error, that leaves only rounding behind."""

STALLED = 0.9
"""An update that is not smaller than so much of the one before it has stalled."""


class Iterates(NamedTuple):
    """The iterates of one window.

    Attributes:
      h: States [T, ...].
      residual: f(S h, x) - h.
      frozen: How many of this device's steps are not changed any more, all steps before them being
        so too.
      prefix: How many have converged, all steps before them having converged too; at least
        `frozen`.
      is_done: Whether all have, on every device.
      iterations: Made.
      size: Largest update of the last iteration, in units of the allowed error.
      sizes: The same of each entry in each part of the window, [parts, ...].
      worst: Largest residual of all, and largest error of each leaf, in units of what passes.
    """

    h: Leaves
    residual: Leaves
    frozen: Array
    prefix: Array
    is_done: Array
    iterations: Array
    size: Array
    sizes: Leaves
    worst: tuple[Array, Array]


def most_iterations(length: int) -> int:
    """Returns the default bound on the iterations of a window.

    Half its length, but for very short ones: an iteration that finds one step at a time converges
    always, and says nothing about whether the recurrence is stable.
    """
    return min(128, max(length // 2, min(length + 1, 32)))


def iterate(
    method: IterativeMethod,
    problem: Problem,
    guess: Leaves,
    valid: Array,
    is_sound: Array,
    confirm: bool = True,
) -> Iterates:
    """Iterates until residual and error are small at every entry of every step, or the method's bound is reached.

    Judged is the iterate that is returned: its own residual, and its error, which the last two
    updates bound. If updates of an entry shrink by the factor q an iteration, what is left of its
    error is q / (1 - q) of the last update. Each entry has a factor of its own, and so have early
    and late steps: a fast entry says nothing of a slow one. An entry passes if that is at most
    `rtol |h| + atol` and its residual as small (`residual_bound`). Where updates shrink no more,
    rounding decides (`rounding_bound`). Updates without the true Jacobian may shrink slowly for
    another reason: they pass only if they are no more than rounding themselves.

    Args:
      method: Whose updates.
      problem: The recurrence, with rtol and atol.
      guess: First iterate, finite; also what replaces iterates from the first one that is not
        finite.
      valid: Steps that count; those behind them are padding.
      is_sound: False makes no iteration.
      confirm: False judges the residual that the last update began with, and saves an evaluation of
        f: for who looks at the residual of what is returned.
    """
    limit = method.max_iters or most_iterations(problem.parts * problem.length)
    index = jnp.arange(problem.length)
    is_padding = index >= valid
    is_exact = method.is_exact(problem.structure)

    def advance(iterates: Iterates) -> Iterates:
        is_fixed = index < iterates.frozen
        before = iterates.residual
        if not confirm:
            before = problem.residual(iterates.h)
        before = _cleared(is_fixed, before)
        delta = _cleared(is_fixed, method.update(problem, iterates.h, before))
        h = tuple((a + b).astype(a.dtype) for a, b in zip(iterates.h, delta, strict=True))
        h = _reset(h, guess)
        residual = before
        if confirm:
            residual = problem.residual(h)
        bound = allowed(problem, h)
        residuals = fraction(residual, residual_bound(problem, h, is_exact, bound))
        updates = _cleared(is_padding, fractions(delta, bound))
        size = _largest(problem, step_largest(updates))
        sizes = _part_sizes(updates, is_exact)
        errors = _remaining_errors(problem, iterates, updates, sizes, is_exact)
        error = step_largest(errors)
        passes = (residuals <= 1) & (error <= 1)
        is_settled = (residuals <= 1) & within(residual, _settling_bound(problem, h))
        frozen, _ = leading(problem, is_settled | is_fixed | is_padding)
        is_stalled = (iterates.iterations > 0) & (size > STALLED * iterates.size)
        if is_exact:
            is_stalled |= size <= SMALL

        def by_rounding(state):
            passes, _, residuals = state
            limit = rounding_bound(problem, h, iterates.iterations)
            # An update that is no more than rounding cannot shrink; the certificate follows.
            most = trusted(problem, h) if is_exact else limit
            smaller = fractions(delta, most)
            in_rounding = fraction(residual, limit)
            is_rounded = (in_rounding <= 1) & (step_largest(smaller) <= 1)
            # What rounding leaves is reported in units of what passes for it.
            is_new = is_rounded & ~passes
            pairs = zip(errors, smaller, strict=True)
            reported = tuple(jnp.where(at_steps(is_new, a), b, a) for a, b in pairs)
            worst = leaf_largest(_cleared(is_padding, reported))
            return passes | is_rounded, worst, jnp.where(is_new, in_rounding, residuals)

        worst_errors = leaf_largest(_cleared(is_padding, errors))
        # In 16 bits a few roundings are more than a slow iteration moves: there only the loop's own states pass.
        is_wide = all(float(jnp.finfo(leaf.dtype).eps) < 1e-4 for leaf in problem.start)
        if is_exact or is_wide:
            # All devices or none: rounding is looked for with a permute between them.
            is_open = _largest(problem, jnp.where(passes | is_padding, 0.0, 1.0))
            is_needed = is_stalled & (is_open > 0)
            state = once(is_needed, by_rounding, (passes, worst_errors, residuals), problem.start)
            passes, worst_errors, residuals = state
        worst = _largest(problem, jnp.where(is_padding, 0, residuals))
        prefix, is_done = leading(problem, passes | is_fixed | is_padding)
        after = Iterates(
            h=h,
            residual=residual,
            frozen=frozen,
            prefix=prefix,
            is_done=is_done,
            iterations=iterates.iterations + 1,
            size=size,
            sizes=sizes,
            worst=(worst, worst_errors),
        )
        return varying_as(after, problem.start)

    prefix, is_done = leading(problem, is_padding)
    nothing = jnp.zeros((), jnp.float32)
    unknown = (
        problem.residual(guess)
        if confirm
        else tuple(jnp.zeros(leaf.shape, wide(leaf)) for leaf in guess)
    )
    count = _num_parts(problem.length, is_exact)
    first = Iterates(
        h=guess,
        residual=unknown,
        frozen=prefix,
        prefix=prefix,
        is_done=is_done,
        iterations=jnp.int32(0),
        size=nothing,
        sizes=tuple(jnp.zeros((count, *leaf.shape[1:]), jnp.float32) for leaf in guess),
        worst=(nothing, jnp.zeros(len(guess), jnp.float32)),
    )
    first = varying_as(first, problem.start)
    return jax.lax.while_loop(
        lambda iterates: is_sound & ~iterates.is_done & (iterates.iterations < limit),
        advance,
        first,
    )


def remaining(updates: Array, rate: Array, iterations: Array) -> Array:
    """Returns the error that is left after updates that shrink by `rate`, in their units: a geometric series' rest.

    In the first iteration there is no rate yet, and the update itself is returned; where nothing
    changes, zero.
    """
    return jnp.where(updates == 0, 0, _rest_factor(rate, iterations) * updates)


def _rest_factor(rate: Array, iterations: Array) -> Array:
    """Returns the sum of all later updates over the last one."""
    factor = jnp.where(rate < 1, rate / (1 - rate), jnp.inf)
    return jnp.where(iterations == 0, 1.0, factor)


def _remaining_errors(
    problem: Problem, iterates: Iterates, updates: Leaves, sizes: Leaves, is_exact: bool
) -> Leaves:
    """Returns the error that is left in every entry, [T, ...], in units of what is allowed.

    An update of a method that solves with the true Jacobian is itself the error before it, so that
    its size is a bound however fast it shrinks. Other updates are no bound, but where one is a few
    roundings of its entry it cannot shrink any more, and the certificate of the window decides.
    """
    out = []
    rows = zip(updates, sizes, iterates.sizes, strict=True)
    for number, (update, size, earlier) in enumerate(rows):
        rate = jnp.where(size == 0, 0, size / earlier)
        factor = _rest_factor(rate, iterates.iterations)[:, None]
        steps = _in_parts(update, len(size))
        if is_exact:
            # Updates that grow bound nothing: an error may only begin to show.
            factor = jnp.where(factor < jnp.inf, jnp.minimum(factor, 1.0), jnp.inf)
        else:
            dtype = problem.start[number].dtype
            rounding = 2 * float(jnp.finfo(dtype).eps) / problem.tolerance(number, dtype)[0]
            factor = jnp.where(steps <= rounding, jnp.minimum(factor, 1.0), factor)
        error = jnp.where(steps == 0, 0, factor * steps)
        out.append(error.reshape(-1, *update.shape[1:])[: len(update)])
    return tuple(out)


def _num_parts(length: int, is_exact: bool) -> int:
    if is_exact:
        return min(PARTS, length)
    return 1


def _in_parts(leaf: Array, count: int) -> Array:
    """Returns values of each step, [T, ...], as [parts, steps of a part, ...]; zeros fill up the last part."""
    size = -(-len(leaf) // count)
    padding = [(0, count * size - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)]
    return jnp.pad(leaf, padding).reshape(count, size, *leaf.shape[1:])


def _part_sizes(values: Leaves, is_exact: bool) -> Leaves:
    """Returns the largest value of each entry in each part of a window, [parts, ...]; values are not negative."""
    out = []
    for leaf in values:
        rows = _in_parts(leaf, _num_parts(len(leaf), is_exact)).max(1)
        out.append(jnp.where(jnp.isfinite(rows), rows, jnp.inf))
    return tuple(out)


def _settling_bound(problem: Problem, h: Leaves) -> Leaves:
    """Returns the residual at which a step is not changed again: rounding, and a share of the allowed error.

    Entries' own sizes alone count. A typical size counts later steps too. Their iterates may still
    be anything, and a step that was settled by them would stay wrong.
    """
    out = []
    for number, leaf in enumerate(h):
        rtol, _ = problem.tolerance(number, leaf.dtype)
        share = 2 * float(jnp.finfo(leaf.dtype).eps) + FROZEN * rtol / problem.length
        out.append(share * jnp.abs(leaf.astype(wide(leaf))))
    return tuple(out)


def rounding_bound(problem: Problem, h: Leaves, salt: Array | int = 0) -> Leaves:
    """Returns what a residual may be where rounding decides, [T, ...]."""
    level = rounding_noise(problem, h, salt)
    return tuple(a + ROUNDINGS * b for a, b in zip(residual_bound(problem, h), level, strict=True))


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
    return jnp.where(jnp.all(~is_before | (counts == len(passes))), count, 0), jnp.all(
        counts == len(passes)
    )


def _cleared(where: Array, values: Leaves) -> Leaves:
    """Returns values [T, ...] with zeros at the steps of `where`."""
    return tuple(jnp.where(at_steps(where, leaf), 0, leaf) for leaf in values)


def _reset(h: Leaves, guess: Leaves) -> Leaves:
    """Returns h with `guess` from the first step on that is not finite."""
    is_finite = jnp.stack([jnp.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in h]).all(0)
    first_bad = jnp.where(is_finite.all(), len(is_finite), jnp.argmin(is_finite))
    is_kept = jnp.arange(len(is_finite)) < first_bad
    return tuple(jnp.where(at_steps(is_kept, a), a, b) for a, b in zip(h, guess, strict=True))


def _largest(problem: Problem, steps: Array) -> Array:
    """Returns the largest of all steps on all devices, infinite if one is not finite."""
    return over_devices(problem, jnp.where(jnp.isfinite(steps), steps, jnp.inf).max())
