"""Elementwise cells on CUDA GPUs: all steps in one sequential kernel, and Newton's method as one an iteration.

Elsewhere, for cells that are not elementwise, and without jax-triton, both are what they are in
plain XLA.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import custom_batching, lax

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.lower import triton
from jaxpar.scan.varying import varying_as
from jaxpar.solve import _fused
from jaxpar.solve._emit import NotElementwise, trimmed
from jaxpar.solve.iterate import ROUNDINGS, leading, once, remaining, rounding_bound
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.rounding import (
    allowed,
    fraction,
    fractions,
    leaf_largest,
    residual_bound,
    rounding_noise,
    step_largest,
    wide,
)
from jaxpar.solve.sequential import sequential_outcome
from jaxpar.solve.structure import Jac, Leaves
from jaxpar.solve.windows import run_sequentially

__all__ = ["Fused"]

MAX_ITERATIONS = 24
"""Of Newton's method by kernels: by then the sequential kernel would have been faster."""


@dataclasses.dataclass(frozen=True)
class Fused:
    """Runs all steps sequentially inside one GPU kernel: a thread an element of the state, which stays in registers.

    The same states as `Sequential`, in float32 also where they are stored as bfloat16, and the
    exact parallel gradient of `ParallelBackward`. Every input is read once; a step costs 0.2 to 0.3
    microseconds on an H100 whatever the number of elements up to some ten thousand, against 10 to
    20 of `lax.scan`. For elementwise cells of one or two leaves on CUDA; everything else is run by
    `lax.scan`.

    Attributes:
      jac: Structure of the Jacobian, for the gradient, as in `Newton`.
      window: Steps whose Jacobians are alive at a time, in the gradient; None for what the budget
        allows.
      unroll: Of `lax.scan`, where that is taken; None for 8 on CUDA, 1 elsewhere.
    """

    jac: Jac = "auto"
    window: int | None = field(None, AtLeast(1))
    unroll: int | None = field(None, AtLeast(1))

    __post_init__ = check_fields

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Runs one step after the other; there is nothing to guess nor to fail."""
        return fused_states(problem, self.unroll), sequential_outcome(problem)


def takes(problem: Problem) -> bool:
    """Whether there are kernels for this recurrence here, if it is compiled for CUDA."""
    return _lanes(problem) is not None


def fused_states(problem: Problem, unroll: int | None = None) -> Leaves:
    """Returns the states found step by step."""
    lanes = _lanes(problem)
    plain = functools.partial(run_sequentially, problem, unroll=unroll)
    if lanes is None:
        return plain()
    cell, constants = lanes

    def run(cell, start, xs, constants, _):
        return _fused.states_sequentially(cell, start, xs, constants, steps=problem.length), (), ()

    def kernel():
        states = _batched(run, cell)(problem.start, problem.xs, constants, ())[0]
        return varying_as(states, (problem.start, problem.xs, constants))

    return lax.platform_dependent(default=plain, cuda=kernel)


def newton_states(problem: Problem, max_iters: int | None, on_fail: str) -> tuple[Leaves, Outcome]:
    """Returns the states by Newton's method over the whole sequence, one kernel an iteration; see `Method.states`.

    Only on CUDA and where `takes(problem)`. Iterates until the last two updates say that the error
    is allowed, a few roundings of what enters an entry included; then the residual is tested as
    everywhere. Where a step fails iteration goes on, and at its bound all are run sequentially.
    """
    lanes = _lanes(problem)
    assert lanes is not None
    cell, constants = lanes
    most, dims = max_iters or MAX_ITERATIONS, len(cell.lanes)
    limits = [problem.tolerance(number, leaf.dtype) for number, leaf in enumerate(problem.start)]
    rounding = ROUNDINGS * max(float(jnp.finfo(leaf.dtype).eps) for leaf in problem.start)
    # Sizes of entries are not known inside; the certificate below takes them.
    floors = [rtol / 10 if atol is None else atol for rtol, atol in limits]
    tightest = min(rtol for rtol, _ in limits), min(floors), rounding

    def largest(worst):  # of each sequence
        axes = tuple(range(-dims, 0))
        return jnp.stack([leaf.max(axes, keepdims=True) for leaf in worst]).max(0)

    def run(cell, start, xs, constants, states):
        def advance(carry):
            states, last, _, count = carry
            new, update = _fused.newton_step(cell, states, start, xs, constants, bound=tightest)
            size = largest(update)
            return new, size, remaining(size, size / last, count), count + 1

        def goes_on(carry):
            _, last, error, count = carry
            return (count < most) & ~jnp.all(
                (error <= 1) | jnp.isnan(last)
            )  # no iterate recovers from NaN

        unknown = largest([jnp.full(cell.lanes, jnp.inf, jnp.float32) for _ in start])
        states, _, error, count = lax.while_loop(
            goes_on, advance, (states, unknown, unknown, jnp.int32(0))
        )
        return states, (jnp.broadcast_to(error, cell.lanes),), (count,)

    def step_once(cell, start, xs, constants, states):
        return _fused.newton_step(cell, states, start, xs, constants, bound=tightest)[0], (), ()

    inputs = problem.start, problem.xs, constants

    def turn(carry):
        h, (error,), (count,) = _batched(run, cell)(*inputs, carry[0])
        residual = problem.residual(h)
        sizes = fraction(residual, residual_bound(problem, h))

        def in_rounding(sizes):
            return jnp.minimum(sizes, fraction(residual, rounding_bound(problem, h)))

        sizes = once(~(sizes <= 1).all(), in_rounding, sizes, problem.start)
        passes = (sizes <= 1) & (error <= 1).all()
        return varying_as((h, passes, sizes.max(), error.max(), carry[4] + count), inputs)

    def goes_on(carry):
        _, passes, _, error, count = carry
        # Updates that happen to fall steeply far from the solution promise too much, which the residual shows.
        return ~passes.all() & (error <= 1) & (count < most)

    h = tuple(jnp.broadcast_to(leaf, (problem.length, *leaf.shape)) for leaf in problem.start)
    h, passes, residual, error, iterations = lax.while_loop(
        goes_on, turn, turn((h, None, None, None, jnp.int32(0)))
    )
    # One rate was taken for all lanes, and one size: each entry's own error is added up here.
    # The update of one step more adds up all residuals, which is the error to first order.
    moved = _batched(step_once, cell)(*inputs, h)[0]
    errors = tuple(a.astype(wide(a)) - b.astype(wide(b)) for a, b in zip(moved, h, strict=True))
    rounded = once(
        ~passes.all(),
        lambda level: rounding_noise(problem, h, 0),
        tuple(jnp.zeros(leaf.shape, wide(leaf)) for leaf in h),
        problem.start,
    )
    most = tuple(a + ROUNDINGS * b for a, b in zip(allowed(problem, h), rounded, strict=True))
    parts = fractions(errors, most)
    passes &= step_largest(parts) <= 1
    prefix, is_done = leading(problem, passes)
    outcome = Outcome(
        iterations,
        jnp.int32(1),
        _finite_or_inf(residual),
        leaf_largest(parts),
        jnp.where(is_done, problem.length, prefix).astype(jnp.int32),
    )

    def repaired(h):
        if on_fail == "finish":
            return fused_states(problem)
        is_kept = jnp.arange(problem.length) < prefix
        return tuple(
            jnp.where(is_kept.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.nan) for leaf in h
        )

    return once(~is_done, repaired, h, (h, is_done)), outcome


def _finite_or_inf(value):
    return jnp.where(jnp.isfinite(value), value, jnp.inf)


def _lanes(problem: Problem):
    """The cell and its arrays in the form that kernels take, or None."""
    if problem.axis_name is not None or problem.length == 0 or not triton.available():
        return None
    try:
        return _fused.lane_cell(problem.step, problem.start, tuple(leaf[0] for leaf in problem.xs))
    except NotElementwise:
        return None


def _batched(run: Callable, cell: _fused.LaneCell) -> Callable:
    """Returns `(start, xs, constants, states) -> run(cell, ...)`, whose batch under `vmap` is more lanes of one kernel.

    `run` returns arrays [T, *lanes], arrays [*lanes], and numbers that all lanes share.
    """

    @custom_batching.custom_vmap
    def call(start, xs, constants, states):
        return run(cell, start, xs, constants, states)

    @call.def_vmap
    def _(size, is_batched, start, xs, constants, states):
        in_start, in_xs, in_constants, in_states = is_batched
        whole = math.prod((size, *cell.lanes))

        def everywhere(leaves, is_batched):
            pairs = zip(leaves, is_batched, strict=True)
            return tuple(x if yes else jnp.broadcast_to(x, (size, *x.shape)) for x, yes in pairs)

        start = everywhere(start, in_start)
        states = tuple(jnp.moveaxis(x, 0, 1) for x in everywhere(states, in_states))
        xs = tuple(
            jnp.moveaxis(_spread(x, cell, 2), 0, 1) if yes else x
            for x, yes in zip(xs, in_xs, strict=True)
        )
        constants = [
            _spread(x, cell, 1) if yes else x
            for x, yes in zip(constants, in_constants, strict=True)
        ]
        wide = dataclasses.replace(
            cell,
            lanes=(size, *cell.lanes),
            x_columns=tuple(
                whole if yes else n for n, yes in zip(cell.x_columns, in_xs, strict=True)
            ),
            c_columns=tuple(
                whole if yes else n for n, yes in zip(cell.c_columns, in_constants, strict=True)
            ),
        )
        timed, lanes, shared = _batched(run, wide)(start, xs, constants, states)
        timed = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), timed)
        shared = jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), shared)
        out = timed, lanes, shared
        return out, jax.tree.map(lambda _: True, out)

    return call


def _spread(x, cell: _fused.LaneCell, lead: int):
    """Returns x [lead axes, suffix of the lanes] as [lead axes, *lanes]."""
    tail = trimmed(x.shape[lead:])
    whole = x.reshape(*x.shape[:lead], *(1,) * (len(cell.lanes) - len(tail)), *tail)
    return jnp.broadcast_to(whole, (*x.shape[:lead], *cell.lanes))
