"""Multiple shooting: only the states between blocks of steps are unknown, and every block is run sequentially inside.

So are, of a cell with many coupled entries, the tangent of the states and its transpose, the gradient: where a
recurrence forgets, so do they, and no Jacobian is ever held.
"""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.fields import AtLeast, field
from jaxpar.scan.varying import moving_with, varying_as
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.in_blocks import scanned, settle
from jaxpar.solve.iterate import as_good_as_rounding, leading, once
from jaxpar.solve.newton import Newton, check_iterative
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.rounding import (
    allowed,
    fractions,
    leaf_largest,
    residual_bound,
    step_largest,
    wide,
    within,
)
from jaxpar.solve.structure import Jac, Leaves, Structure
from jaxpar.solve.windows import accumulated_errors, by_windows, finished
from jaxpar.types import UsageError

__all__ = ["GaussSeidel"]


@dataclasses.dataclass(frozen=True)
class GaussSeidel:
    """Runs blocks of steps sequentially, all blocks at once, until each starts where the one before it ends.

    Inside a block every step sees the newest state before it (Gauss-Seidel), between blocks the old one (Jacobi): one
    iteration takes the time of `block` steps, holds one state a block, and carries information over a whole block, so
    it converges fast where a recurrence forgets within a block. With `correction` the ends of blocks are corrected by
    Newton's method, as parareal does with a coarse propagator: the Jacobian of a block is the product of those of its
    steps, n Jacobian-vector products with a run through it.

    Attributes:
      block: Steps of a block; the last T modulo `block` steps are run at the end.
      correction: Whether by Newton's method.
      jac: Structure of the Jacobian, as in `Newton`.
      window: Steps solved at once, as in `Newton`.
      max_iters: As in `Newton`; half the number of blocks, but 32 to 128.
      shot_above: Coupled entries of a cell above which tangents and gradients are shot too. One H100, a GRU of
        T = 10,000 and B = 16: a gradient took 0.8 ms of 8 entries by an affine scan and 1.5 by shooting, 1.5 and 1.8 of
        16, 5.9 and 2.7 of 32, 24 and 4.9 of 64.

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

    def states(self, problem: Problem, guess: Leaves | None, on_fail: str) -> tuple[Leaves, Outcome]:
        """Solves for the ends of the blocks, and runs every block once more for what lies inside."""
        length = problem.length
        block = min(self.block, length)
        if problem.axis_name is not None and length % block:
            raise UsageError(f"over devices a part's {length} steps must be a whole number of blocks of {block}.")
        count = length // block

        def run_block(before: Leaves, xs: Leaves, steps: int = block) -> Leaves:
            entry = varying_as(before, (before, xs, problem.start))

            def one(h, x):
                h = problem.step(h, x)
                return h, h

            return scanned(one, entry, xs, steps)

        def last(before: Leaves, xs: Leaves) -> Leaves:
            return tuple(leaf[-1] for leaf in run_block(before, xs))

        rows = tuple(leaf[: count * block].reshape(count, block, *leaf.shape[1:]) for leaf in problem.xs)
        # Blind leaves are settled below, once, where all blocks are run anyway.
        structure = dataclasses.replace(problem.structure, blind=frozenset())
        ends = dataclasses.replace(problem, step=last, xs=rows, length=count, structure=structure)
        start = None if guess is None else tuple(leaf[block - 1 :: block][:count] for leaf in guess)
        options = {"jac": self.jac, "max_iters": self.max_iters}
        method = (Newton if self.correction else Jacobi)(window=self.window and self.window // block, **options)
        h, outcome = by_windows(method, ends, start, "nan", confirm=False)

        inside = jax.vmap(run_block, axis_size=count)(ends.shift(h), rows)
        # This is the residual of the ends that were found. Where errors grow, a block that is run by another program
        # may end elsewhere, too: then it was not found.
        gap = tuple(a[:, -1] - b for a, b in zip(inside, h, strict=True))
        is_met = within(gap, residual_bound(ends, h, self.correction))
        is_met = once(~is_met.all(), lambda met: met | as_good_as_rounding(ends, h, gap, gap), is_met, problem.start)
        is_found = problem.rank * count + jnp.arange(count) < outcome.first_bad
        prefix, is_done = leading(ends, is_found & is_met)
        inside = tuple(leaf.reshape(-1, *leaf.shape[2:]) for leaf in inside)
        if count * block < length:
            rest = tuple(leaf[count * block :] for leaf in problem.xs)
            tail = run_block(tuple(leaf[-1] for leaf in inside), rest, length - count * block)
            inside = tuple(jnp.concatenate(pair) for pair in zip(inside, tail, strict=True))
        passes = (jnp.arange(length) < prefix * block) | is_done
        if problem.structure.blind:
            inside, passes = settle(problem, inside, jnp.array(True), jnp.zeros(length, bool))
        bounds = outcome.error
        if not self.shoots(problem.structure):
            calm = tuple(jnp.zeros(leaf.shape, wide(leaf)) for leaf in problem.start)
            parts = fractions(accumulated_errors(problem, inside, calm), allowed(problem, inside))
            passes &= step_largest(parts) <= 1
            bounds = leaf_largest(parts)
        prefix, is_done = leading(problem, passes)
        outcome = outcome._replace(error=bounds)
        h = once(~is_done, lambda h: finished(problem, h, prefix, on_fail), inside, problem.start)
        first_bad = jnp.where(is_done, problem.parts * length, problem.rank * length + prefix)
        if problem.axis_name is not None:
            first_bad = lax.pmin(first_bad, problem.axis_name)
        return h, outcome._replace(first_bad=first_bad.astype(jnp.int32))

    def shoots(self, structure: Structure) -> bool:
        """Whether the tangent is shot too, not solved for by an affine scan with all Jacobians."""
        return not self.correction and max(group.n for group in structure.groups) > self.shot_above

    def tangent(self, problem: Problem, h: Leaves, b: Leaves, d_start: Leaves) -> Leaves:
        """Returns dh[t] = A[t] dh[t-1] + b[t] from dh[-1] = `d_start`, A the Jacobians along the states `h`.

        By shooting again, to a residual of 8 eps of each entry and of its sequence's largest b; what that does not
        find is run sequentially. The transpose is shot backwards. Cost: a Jacobian-vector (or vector-Jacobian) product
        of every step in every pass; memory as `h`.
        """
        before = problem.shift(h)
        narrow = tuple(leaf.dtype for leaf in h)
        wide = tuple(jnp.promote_types(dtype, jnp.float32) for dtype in narrow)
        method = dataclasses.replace(self, correction=False)
        # A tangent may be of any size, so that only its own sequence's counts; a quarter of rtol is for residuals.
        rtol = 32 * max(float(jnp.finfo(dtype).eps) for dtype in wide)
        atol = max(float(jnp.finfo(dtype).tiny) for dtype in wide)

        def pushed(v: Leaves, at: Leaves, x: Leaves) -> Leaves:
            return _cast(jax.jvp(lambda at: problem.step(at, x), (at,), (_cast(v, narrow),))[1], wide)

        def pulled(v: Leaves, at: Leaves, x: Leaves) -> Leaves:
            return _cast(jax.vjp(lambda at: problem.step(at, x), at)[1](_cast(v, narrow))[0], wide)

        def shot(product: Callable, start: Leaves, at: Leaves, xs: Leaves, b: Leaves) -> Leaves:
            def step(v: Leaves, row: Leaves) -> Leaves:
                b, at, x = row[: len(v)], row[len(v) : 2 * len(v)], row[2 * len(v) :]
                return _sum(product(v, at, x), b)

            inputs, floor = (*b, *at, *xs), tuple(rtol * size for size in _sizes(problem.structure, b, start))
            tolerance = {"rtol": (rtol,) * len(b), "atol": (atol,) * len(b), "floor": floor}
            linear = Problem(step, start, inputs, problem.length, problem.structure, **tolerance)
            return method.states(linear, None, "finish")[0]

        def matvec(pair):
            start, v = pair
            earlier = tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(start, v, strict=True))
            carried = jax.vmap(pushed, axis_size=problem.length)(earlier, before, problem.xs)
            return start, tuple(jnp.subtract(*each) for each in zip(v, carried, strict=True))

        def solve(_, pair):
            start, b = pair
            return start, shot(pushed, start, before, problem.xs, b)

        def transpose_solve(_, pair):
            start, g = pair
            # Backwards in time, each step by the Jacobian of the one behind it; the last has none, and takes zeros.
            at, xs = (_backwards(tuple(jnp.roll(leaf, -1, 0) for leaf in part)) for part in (before, problem.xs))
            zeros = tuple(jnp.zeros_like(leaf) for leaf in start)
            back = _backwards(shot(pulled, zeros, at, xs, _backwards(g)))
            first = (tuple(leaf[0] for leaf in part) for part in (back, before, problem.xs))
            return _sum(start, pulled(*first)), back

        d_start, b = _cast(d_start, wide), _cast(b, wide)
        pair = moving_with(d_start, (h, b)), moving_with(b, (h, d_start))
        return _cast(lax.custom_linear_solve(matvec, pair, solve, transpose_solve)[1], narrow)


def _sizes(structure: Structure, b: Leaves, start: Leaves) -> Leaves:
    """Returns the largest |b| and |start| of each leaf's coupled entries over all steps, [1, ...]."""
    whole = tuple(jnp.concatenate([first[None].astype(rest.dtype), rest]) for first, rest in zip(start, b, strict=True))
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
