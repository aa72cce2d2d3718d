"""Multiple shooting: only the states between blocks of steps are unknown, and every block is run sequentially inside.

So are, of a cell with many coupled entries, the tangent of the states and its transpose, the
gradient: where a recurrence forgets, so do they, and no Jacobian is ever held.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.fields import AtLeast, field
from jaxpar.scan.varying import moving_with
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.in_blocks import PASSES, Meeting, block_of, meet, settle
from jaxpar.solve.iterate import leading, most_iterations, once, rounding_bound
from jaxpar.solve.newton import Newton, check_iterative
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.rounding import (
    RESIDUAL_SHARE,
    allowed,
    at_steps,
    fractions,
    leaf_largest,
    over_devices,
    residual_bound,
    step_largest,
    wide,
)
from jaxpar.solve.structure import Jac, Leaves, Structure
from jaxpar.solve.windows import accumulated_errors, by_windows, finished, first_iterate
from jaxpar.types import Array, UsageError

__all__ = ["GaussSeidel"]

SHRUNK = 0.5
"""Share of a gap up to which a pass has made it smaller; small gaps that shrink less are run no more."""

SMALL = 16.0
"""What counts as small, in units of what a residual may be: roundings of large numbers in a small entry."""


class Certificate(NamedTuple):
    """States and what is known of them.

    Attributes:
      h: States [T, ...].
      passes: Which of them are right if all before them are, [T].
      residual: Largest residual, in units of what passes.
      error: Bound of the error of each leaf, in units of what passes.
    """

    h: Leaves
    passes: Array
    residual: Array
    error: Array


@dataclasses.dataclass(frozen=True)
class GaussSeidel:
    """Runs blocks of steps sequentially, all blocks at once, until each starts where the one before it ends.

    Inside a block every step sees the newest state before it (Gauss-Seidel), between blocks the old
    one (Jacobi): one iteration takes the time of `block` steps, holds one state a block, and
    carries information over a whole block, so it converges fast where a recurrence forgets within a
    block. With `correction` the ends of blocks are corrected by Newton's method, as parareal does
    with a coarse propagator: the Jacobian of a block is the product of those of its steps, n
    Jacobian-vector products with a run through it.

    Attributes:
      block: Steps of a block; the last T modulo `block` steps are run at the end.
      correction: Whether by Newton's method.
      jac: Structure of the Jacobian, as in `Newton`.
      window: Steps solved at once, as in `Newton`.
      max_iters: As in `Newton`; half the number of blocks, but 32 to 128.
      shot_above: Coupled entries of a cell above which tangents and gradients are shot too. One
        H100, a GRU of T = 10,000 and B = 16: a gradient took 0.8 ms of 8 entries by an affine scan
        and 1.5 by shooting, 1.5 and 1.8 of 16, 5.9 and 2.7 of 32, 24 and 4.9 of 64.

    Reference: Song et al., arXiv:2002.03629; Lions, Maday and Turinici 2001 for parareal.
    """

    block: int = field(64, AtLeast(1))
    correction: bool = False
    jac: Jac = "auto"
    window: int | None = field(None, AtLeast(1))
    max_iters: int | None = field(None, AtLeast(1))
    shot_above: int = field(16, AtLeast(0))

    def __post_init__(self):
        check_iterative(self)
        if self.window is not None and self.window < self.block:
            raise UsageError(f"window={self.window} must hold one block of {self.block} at least.")

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Runs all blocks at once until they meet to the bit, or by so little that the certificate passes."""
        return self._shot(problem, guess, on_fail, is_certified=True)

    def _shot(
        self, problem: Problem, guess: Leaves | None, on_fail: str, is_certified: bool
    ) -> tuple[Leaves, Outcome]:
        """Returns `states`; without a certificate blocks need not meet to the bit, and the speed of updates decides."""
        length = problem.length
        block = min(self.block, length)
        if problem.axis_name is not None and length % block:
            raise UsageError(
                f"over devices a part's {length} steps must be a whole number of blocks of {block}."
            )
        ends = _from_block_to_block(problem, block)
        start = _ends_of(guess, block, ends.length)
        if self.correction or self.window or not is_certified:
            met, outcome, is_found = self._iterate(problem, ends, start, block, is_certified)
        else:
            most = self.max_iters or most_iterations(problem.parts * ends.length)
            met = self._meet(problem, ends, first_iterate(ends, start), block, most, is_certified)
            unknown = jnp.zeros(len(problem.start), jnp.float32)
            outcome = Outcome(met.passes, jnp.int32(1), unknown.max(), unknown, jnp.int32(length))
            is_found = jnp.ones(ends.length, bool)
        inside = _inside(problem, met, block)

        if is_certified:
            inside, passes, residual, bounds = self._verdict(problem, ends, met, inside, block)
            outcome = outcome._replace(residual=residual, error=bounds)
        else:
            # The iteration has judged the blocks; what is left here is another program's rounding.
            prefix, is_done = leading(ends, is_found & (met.gaps <= SMALL))
            passes = (jnp.arange(length) < prefix * block) | is_done
        # The loop's own states, too, are not found where they are not finite.
        for leaf in inside:
            passes &= jnp.isfinite(leaf).reshape(length, -1).all(1)

        prefix, is_done = leading(problem, passes)
        h = once(~is_done, lambda h: finished(problem, h, prefix, on_fail), inside, problem.start)
        first_bad = problem.rank * length + prefix
        first_bad = jnp.where(is_done, problem.parts * length, first_bad)
        if problem.axis_name is not None:
            first_bad = lax.pmin(first_bad, problem.axis_name)
        return h, outcome._replace(first_bad=first_bad.astype(jnp.int32))

    def _iterate(
        self, problem: Problem, ends: Problem, start: Leaves | None, block: int, is_certified: bool
    ) -> tuple[Meeting, Outcome, Array]:
        """Returns blocks run from ends that an iteration found, how it fared, and which it found."""
        kind = Jacobi
        if self.correction:
            kind = Newton
        window = None
        if self.window:
            window = self.window // block
        method = kind(window=window, jac=self.jac, max_iters=self.max_iters)
        found, outcome = by_windows(method, ends, start, "nan", confirm=False)
        most = 1
        if is_certified:
            most = PASSES
        met = self._meet(problem, ends, found, block, most, is_certified)
        index = problem.rank * ends.length + jnp.arange(ends.length)
        return met, outcome, index < outcome.first_bad

    def _meet(
        self,
        problem: Problem,
        ends: Problem,
        start: Leaves,
        block: int,
        most: int,
        is_certified: bool,
    ) -> Meeting:
        """Runs all blocks until they meet, forget, or are stuck, at most so often."""

        def goes_on(met: Meeting) -> Array:
            # Small gaps that no longer fall are rounding, or the error of a slow entry.
            is_stuck = (met.gap <= SMALL) & (met.gap > SHRUNK * met.earlier)
            is_done = met.is_same.all()
            if is_certified:
                is_done |= self._error_left(problem, met) <= 1
            return ~is_done & ~is_stuck & (met.passes < most)

        return meet(ends, block_of(problem, block), start, block, goes_on, self.correction)

    def _error_left(self, problem: Problem, met: Meeting) -> Array:
        """Returns the error that is left, in units of what is allowed; infinite where it is not known.

        The starts were off by the last gap and by the error left after it. A run multiplies both by
        `rate`, so that all errors are a geometric series.
        """
        if problem.structure.blind:
            # Blind leaves show no difference until they jump.
            return jnp.float32(jnp.inf)
        share = RESIDUAL_SHARE
        if self.correction:
            share = 1.0
        left = share * met.gap / (1 - jnp.minimum(met.rate, SHRUNK))
        return jnp.where(met.rate <= SHRUNK, left, jnp.inf)

    def _verdict(
        self, problem: Problem, ends: Problem, met: Meeting, inside: Leaves, block: int
    ) -> Certificate:
        """Returns states and what is known of them."""
        left = self._error_left(problem, met)
        prefix, is_done = leading(ends, met.is_same | (left <= 1))
        bound = jnp.where(met.is_same.all(), 0, left)
        every = jnp.ones(problem.length, bool)
        is_loop = jnp.arange(problem.length) < prefix * block
        found = Certificate(inside, every, bound, jnp.full(len(inside), bound, jnp.float32))
        certify = functools.partial(self._certify, problem, is_loop)
        return once(~is_done, certify, found, problem.start)

    def _certify(self, problem: Problem, is_loop: Array, found: Certificate) -> Certificate:
        """Returns a certificate of what blocks found that do not meet to the bit.

        Blind leaves have to, after more passes; of others residuals are added up. Steps of
        `is_loop` are the loop's own, whatever another program's rounding adds up to.
        """
        h = found.h
        passes = found.passes
        is_blind = bool(problem.structure.blind)
        settled = jnp.float32(0)
        if is_blind:
            h, passes, settled = settle(
                problem, h, jnp.array(True), jnp.zeros(problem.length, bool)
            )
        gap = problem.residual(h)
        open_gap = gap
        if is_blind:
            # They have been judged, to the bit, by the program that made them.
            open_gap = tuple(jnp.zeros_like(leaf) for leaf in gap)
        calm = tuple(jnp.zeros(leaf.shape, wide(leaf)) for leaf in problem.start)
        if self.shoots(problem.structure) and problem.axis_name is None:
            # A tenth is exact enough for a bound.
            floor = tuple(0.1 * leaf.min(0, keepdims=True) for leaf in allowed(problem, h))
            push = functools.partial(_pushed, problem)
            rows = (problem.shift(h), problem.xs, gap)
            errors = self._linear(problem, push, calm, rows, 0.1, floor, "nan")
        else:
            errors = accumulated_errors(problem, h, calm)
        parts = fractions(errors, allowed(problem, h))
        residuals = fractions(open_gap, residual_bound(problem, h))

        def by_rounding(parts: Leaves) -> Leaves:
            bound = rounding_bound(problem, h)
            rounded = (*fractions(errors, bound), *fractions(open_gap, bound))
            return tuple(map(jnp.minimum, parts, rounded))

        both = (*parts, *residuals)
        # All devices or none: rounding is looked for with a permute between them.
        is_large = over_devices(problem, step_largest(both).max()) > 1
        both = once(is_large, by_rounding, both, problem.start)
        both = tuple(jnp.where(at_steps(is_loop, leaf), 0, leaf) for leaf in both)
        worst = leaf_largest(both)
        count = len(h)
        return Certificate(
            h=h,
            passes=passes & (step_largest(both) <= 1),
            residual=jnp.maximum(settled, worst[count:].max()),
            error=worst[:count],
        )

    def _linear(
        self,
        problem: Problem,
        product: Callable,
        start: Leaves,
        rows: tuple[Leaves, Leaves, Leaves],
        rtol: float,
        floor: Leaves,
        on_fail: str,
    ) -> Leaves:
        """Returns v[t] = product(v[t-1], h[t-1], x[t]) + b[t] by shooting.

        Args:
          problem: The recurrence that the product is a derivative of.
          product: Of a vector with the Jacobian, or with its transpose.
          start: v before the first step.
          rows: States before each step, inputs and b, all [T, ...].
          rtol: Error allowed in an entry, relative to it.
          floor: Error allowed in addition, [1, ...].
          on_fail: As of `Method.states`.
        """
        at, xs, b = rows
        count = len(b)

        def step(v: Leaves, row: Leaves) -> Leaves:
            b, at, x = row[:count], row[count : 2 * count], row[2 * count :]
            return _sum(product(v, at, x), b)

        atol = max(float(jnp.finfo(leaf.dtype).tiny) for leaf in b)
        linear = Problem(
            step=step,
            start=start,
            xs=(*b, *at, *xs),
            length=problem.length,
            structure=problem.structure,
            rtol=(rtol,) * count,
            atol=(atol,) * count,
            floor=floor,
        )
        method = dataclasses.replace(self, correction=False)
        return method._shot(linear, None, on_fail, is_certified=False)[0]

    def shoots(self, structure: Structure) -> bool:
        """Whether the tangent is shot too, not solved for by an affine scan with all Jacobians."""
        return not self.correction and max(group.n for group in structure.groups) > self.shot_above

    def tangent(self, problem: Problem, h: Leaves, b: Leaves, d_start: Leaves) -> Leaves:
        """Returns dh[t] = A[t] dh[t-1] + b[t] from dh[-1] = `d_start`, A the Jacobians along the states `h`.

        By shooting again, to a residual of 8 eps of each entry and of its sequence's largest b;
        what that does not find is run sequentially. The transpose is shot backwards. Cost: a
        Jacobian-vector (or vector-Jacobian) product of every step in every pass; memory as `h`.
        """
        before = problem.shift(h)
        narrow = tuple(leaf.dtype for leaf in h)
        wider = tuple(jnp.promote_types(dtype, jnp.float32) for dtype in narrow)
        # A quarter of rtol is for residuals.
        rtol = 32 * max(float(jnp.finfo(dtype).eps) for dtype in wider)

        def pushed(v: Leaves, at: Leaves, x: Leaves) -> Leaves:
            return _pushed(problem, v, at, x)

        def pulled(v: Leaves, at: Leaves, x: Leaves) -> Leaves:
            return _cast(jax.vjp(lambda at: problem.step(at, x), at)[1](_cast(v, narrow))[0], wider)

        def shot(product: Callable, start: Leaves, at: Leaves, xs: Leaves, b: Leaves) -> Leaves:
            # A tangent may be of any size, so that only its own sequence's counts.
            floor = tuple(rtol * size for size in _sizes(problem.structure, b, start))
            return self._linear(problem, product, start, (at, xs, b), rtol, floor, "finish")

        def matvec(pair):
            start, v = pair
            earlier = tuple(
                jnp.concatenate([a[None], b[:-1]]) for a, b in zip(start, v, strict=True)
            )
            carried = jax.vmap(pushed, axis_size=problem.length)(earlier, before, problem.xs)
            return start, tuple(jnp.subtract(*each) for each in zip(v, carried, strict=True))

        def solve(_, pair):
            start, b = pair
            return start, shot(pushed, start, before, problem.xs, b)

        def transpose_solve(_, pair):
            start, g = pair
            # Backwards in time, each step by the Jacobian of the one behind it; the last has none, and takes zeros.
            at, xs = (
                _backwards(tuple(jnp.roll(leaf, -1, 0) for leaf in part))
                for part in (before, problem.xs)
            )
            zeros = tuple(jnp.zeros_like(leaf) for leaf in start)
            back = _backwards(shot(pulled, zeros, at, xs, _backwards(g)))
            first = (tuple(leaf[0] for leaf in part) for part in (back, before, problem.xs))
            return _sum(start, pulled(*first)), back

        d_start, b = _cast(d_start, wider), _cast(b, wider)
        pair = moving_with(d_start, (h, b)), moving_with(b, (h, d_start))
        return _cast(lax.custom_linear_solve(matvec, pair, solve, transpose_solve)[1], narrow)


def _from_block_to_block(problem: Problem, block: int) -> Problem:
    """Returns the recurrence of the states at the ends of blocks."""
    count = problem.length // block
    run_block = block_of(problem, block)

    def last(before: Leaves, xs: Leaves) -> Leaves:
        return tuple(leaf[-1] for leaf in run_block(before, xs))

    rows = [leaf[: count * block].reshape(count, block, *leaf.shape[1:]) for leaf in problem.xs]
    # Blind leaves are settled at the end, once, where all blocks are run anyway.
    structure = dataclasses.replace(problem.structure, blind=frozenset())
    return dataclasses.replace(
        problem, step=last, xs=tuple(rows), length=count, structure=structure
    )


def _ends_of(guess: Leaves | None, block: int, count: int) -> Leaves | None:
    """Returns the states at the ends of blocks, of states [T, ...]."""
    if guess is None:
        return None
    return tuple(leaf[block - 1 :: block][:count] for leaf in guess)


def _inside(problem: Problem, met: Meeting, block: int) -> Leaves:
    """Returns all states, [T, ...]: the blocks, and the steps behind the last block."""
    inside = tuple(leaf.reshape(-1, *leaf.shape[2:]) for leaf in met.inside)
    num_rest = problem.length % block
    if not num_rest:
        return inside
    rest = tuple(leaf[-num_rest:] for leaf in problem.xs)
    run_rest = block_of(problem, num_rest)
    tail = run_rest(tuple(leaf[-1] for leaf in inside), rest)
    return tuple(jnp.concatenate(pair) for pair in zip(inside, tail, strict=True))


def _pushed(problem: Problem, v: Leaves, at: Leaves, x: Leaves) -> Leaves:
    """Returns the product of the Jacobian of one step with v, in float32 at least."""
    narrow = _cast(v, [leaf.dtype for leaf in at])
    product = jax.jvp(lambda at: problem.step(at, x), (at,), (narrow,))[1]
    return tuple(leaf.astype(wide(leaf)) for leaf in product)


def _sizes(structure: Structure, b: Leaves, start: Leaves) -> Leaves:
    """Returns the largest |b| and |start| of each leaf's coupled entries over all steps, [1, ...]."""
    whole = tuple(
        jnp.concatenate([first[None].astype(rest.dtype), rest])
        for first, rest in zip(start, b, strict=True)
    )
    out = [jnp.abs(leaf).max(0, keepdims=True) for leaf in whole]
    for group in structure.groups:
        size = group.flat(tuple(out)).max(-1, keepdims=True, initial=0)
        group.put(out, jnp.broadcast_to(size, (*size.shape[:-1], group.n)))
    return tuple(out)


def _cast(leaves: Leaves, dtypes: Iterable) -> Leaves:
    return tuple(leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True))


def _sum(a: Leaves, b: Leaves) -> Leaves:
    return tuple(map(jnp.add, a, b))


def _backwards(leaves: Leaves) -> Leaves:
    return tuple(leaf[::-1] for leaf in leaves)
