"""The states of a recurrence as a differentiable function of its parameters, start and inputs, whatever found them.

Their tangent is the affine recurrence dh[t] = J[t] dh[t-1] + f_x dx[t] + f_theta dtheta with the
true Jacobians J at the solution: one affine scan, forwards, and its transpose backwards. Both are
made window by window, and recomputed for the transpose, so that the Jacobians of one window are
alive at a time. Multiple shooting of wide cells shoots instead.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from jaxpar.lower.jaxprs import primitive_names
from jaxpar.scan.varying import varying_as
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.in_blocks import cut, joined
from jaxpar.solve.problem import Method, Outcome, Problem, WindowedMethod
from jaxpar.solve.program import Recurrence
from jaxpar.solve.structure import Jacobian, Leaves, Structure, probe, probe_tolerance
from jaxpar.solve.windows import auto_window
from jaxpar.types import Array


@dataclasses.dataclass(frozen=True)
class Solve:
    """What is fixed about one solution: all but arrays."""

    recurrence: Recurrence
    method: Method
    structure: Structure
    length: int
    on_fail: str
    axis_name: str | None
    reverse: bool
    rtol: tuple[float | None, ...]
    atol: tuple[float | None, ...]
    unroll: int | None
    names: tuple[str, ...] = ()

    def problem(self, consts: Leaves, start: Leaves, xs: Leaves) -> Problem:
        """Returns the recurrence with its arrays."""
        step = functools.partial(self.recurrence.step, consts)
        return Problem(
            step=step,
            start=start,
            xs=xs,
            length=self.length,
            structure=self.structure,
            axis_name=self.axis_name,
            reverse=self.reverse,
            rtol=self.rtol,
            atol=self.atol,
            unroll=self.unroll,
        )

    @property
    def window(self) -> int:
        """Steps whose true Jacobians are alive at a time."""
        if self.axis_name is not None:
            return self.length
        chosen = self.method.window if isinstance(self.method, WindowedMethod) else None
        return min(chosen or self.length, auto_window(self.structure, self.length))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def states(
    solve: Solve, consts: Leaves, start: Leaves, xs: Leaves, guess: Leaves | None
) -> tuple[Leaves, Outcome, Array]:
    """Returns all states [T, ...], how they were found, and the error of a structure that is not proved (else 0)."""
    problem = solve.problem(consts, start, xs)
    h, outcome = solve.method.states(problem, guess, solve.on_fail)
    if solve.structure.proved:
        return h, outcome, jnp.zeros((), jnp.float32)
    return h, outcome, _structure_error(solve, problem, h)


@functools.partial(states.defjvp, symbolic_zeros=True)
def _states_jvp(solve: Solve, primals, tangents):
    out: Any = states(solve, *primals)
    h, outcome, error = out
    consts, start, xs, _ = primals
    d_consts, d_start, d_xs, _ = tangents
    dh = _tangent(solve, (consts, start, xs), (d_consts, d_start, d_xs), h)
    if not solve.structure.proved:  # a wrong structure gives wrong tangents: better none
        faith = jnp.where(error <= probe_tolerance(h), 1.0, jnp.nan)
        dh = tuple(leaf * faith.astype(leaf.dtype) for leaf in dh)
    still = jax.tree.map(lambda leaf: zero_from_primal(leaf, symbolic_zeros=True), (outcome, error))
    return out, (dh, *still)


def _tangent(solve: Solve, primals: tuple, tangents: tuple, h: Leaves) -> Leaves:
    """Returns the tangent of the states: an affine recurrence, window by window."""
    consts, start, xs = primals
    d_consts, d_start, d_xs = (
        tuple(None if isinstance(d, SymbolicZero) else d for d in part) for part in tangents
    )
    d_start = tuple(
        jnp.zeros_like(a) if d is None else d for a, d in zip(start, d_start, strict=True)
    )

    apply = jax.vmap(solve.recurrence.step, in_axes=(None, 0, 0))

    def drive(before: Leaves, x: Leaves, d_x: tuple) -> Leaves:
        def driven(moved_consts, moved_x):
            return apply(_filled(consts, d_consts, moved_consts), before, _filled(x, d_x, moved_x))

        moved = _moved(consts, d_consts), _moved(x, d_x)
        return jax.jvp(driven, moved, (_moved(d_consts, d_consts), _moved(d_x, d_x)))[1]

    def window(d_before: Leaves, rows) -> tuple[Leaves, Leaves]:
        before, x, _ = rows
        jacobian = _jacobian(solve, lambda before: apply(consts, before, x), before)
        how = {"axis_name": solve.axis_name, "reverse": solve.reverse}
        dh = solve.structure.solve(jacobian, drive(*rows), d_before, **how)
        return tuple(leaf[-1] for leaf in dh), dh

    problem = solve.problem(consts, start, xs)
    rows = problem.shift(h), xs, d_xs
    if (
        isinstance(solve.method, GaussSeidel)
        and solve.axis_name is None
        and solve.method.shoots(solve.structure)
    ):
        return solve.method.tangent(problem, h, jax.checkpoint(drive)(*rows), d_start)
    window = jax.checkpoint(window, prevent_cse=solve.window == solve.length)
    if solve.window == solve.length:
        return window(d_start, rows)[1]
    _, dh = jax.lax.scan(window, d_start, cut(rows, solve.length, solve.window))
    return joined(dh, solve.length)


def _jacobian(solve: Solve, apply: Callable[[Leaves], Leaves], before: Leaves) -> Jacobian:
    """Returns the true Jacobian, finite where one of forward and reverse differentiation is.

    Where f leaves a state out and has an infinite derivative behind, as in
    sqrt(where(reset, 0, h)), forward differentiation multiplies 0 by infinity. Reverse
    differentiation, which the loop's gradient is, drops the product.
    """
    columns = solve.structure.jacobian(apply, before)
    names = primitive_names(solve.recurrence.jaxpr)
    # Without a selection the two agree; a loop without a known end has no reverse derivative.
    if "select_n" not in names or "while" in names:
        return columns
    is_finite = functools.reduce(
        jnp.logical_and, [jnp.isfinite(a).all() for a in jax.tree.leaves(columns)]
    )

    def mended(columns: Jacobian) -> Jacobian:
        rows = solve.structure.jacobian_by_rows(apply, before)
        merged = jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(a), a, b), columns, rows)
        return varying_as(merged, columns)

    return jax.lax.cond(is_finite, lambda columns: columns, mended, columns)


def _moved(values: tuple, tangents: tuple) -> tuple:
    """Returns those of `values` that have a tangent."""
    return tuple(value for value, d in zip(values, tangents, strict=True) if d is not None)


def _filled(values: Leaves, tangents: tuple, moved: Leaves) -> Leaves:
    """Returns `values` with those that have a tangent replaced, in order, by `moved`."""
    rest = iter(moved)
    return tuple(
        value if d is None else next(rest) for value, d in zip(values, tangents, strict=True)
    )


def _structure_error(solve: Solve, problem: Problem, h: Leaves) -> Array:
    """Probes the structure at every step of the solution, window by window."""

    def window(_, rows):
        before, xs = rows
        return None, probe(
            solve.structure, dataclasses.replace(problem, xs=xs, length=solve.window).apply, before
        )

    rows = cut((problem.shift(h), problem.xs), solve.length, solve.window)
    errors = jax.lax.scan(window, None, rows)[1]
    error = jnp.where(jnp.isfinite(errors), errors, jnp.inf).max()
    return error if solve.axis_name is None else jax.lax.pmax(error, solve.axis_name)
