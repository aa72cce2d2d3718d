"""`parallel_scan`: `jax.lax.scan` with the steps of its state found all at once."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxpar.scan.varying import varying_as
from jaxpar.solve.newton import Newton
from jaxpar.solve.problem import Method, Outcome
from jaxpar.solve.program import Traced, leaf_names, trace
from jaxpar.solve.sequential import Sequential
from jaxpar.solve.solution import Solve, states
from jaxpar.solve.structure import Leaves, probe_tolerance, structure_of
from jaxpar.types import Array, PyTree, UsageError

__all__ = ["ON_FAIL", "Stats", "parallel_scan"]

ON_FAIL = ("finish", "nan", "raise")


@flax.struct.dataclass
class Stats:
    """How a solution came about; under `vmap` one of each for every sequence.

    Attributes:
      iterations: Of all windows together, int32.
      windows: How many windows were solved, those that a failure called for included, int32.
      residual: Largest `|f(h[t-1], x[t]) - h[t]|` of any entry at any step, in units of what passes: a quarter of
        `rtol |h| + atol`, and eps of `|h|`. Over one where numbers cancel that arithmetic cannot resolve better.
      update: Largest change of an entry in the last iterations, in units of `rtol |h| + atol`. It may be over one: what
        is left of it as an error is less, the more so the faster the iteration converged.
      converged: Whether iteration found every state, and the Jacobian has the structure that was declared.
      first_bad: First step that iteration did not find, int32; T if there is none. What stands from there on, up to
        the end of its window at least, is what `on_fail` says.
      structure_error: Largest `|J v - A v|` for random v, relative, where the declared structure A of J could not be
        decided from the program of f; zero where it could. Too large a one makes every gradient NaN.
      method: The method.
    """

    iterations: Array
    windows: Array
    residual: Array
    update: Array
    converged: Array
    first_bad: Array
    structure_error: Array
    method: Any = flax.struct.field(pytree_node=False)

    def __str__(self):
        name = type(self.method).__name__
        if jnp.ndim(self.converged) or isinstance(self.converged, Tracer):
            return f"{name}: {self.converged} of {self.iterations} iterations"
        verdict = "converged" if self.converged else f"not converged from step {int(self.first_bad)} on"
        return (
            f"{name}: {verdict}; {int(self.iterations)} iterations in {int(self.windows)} windows, "
            f"residual {float(self.residual):.1e}, update {float(self.update):.1e}, "
            f"structure error {float(self.structure_error):.1e}"
        )


def parallel_scan(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    *,
    method: Method | None = None,
    with_stats: bool = False,
    on_fail: str = "finish",
    guess: PyTree = None,
    axis_name: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Any:
    """Returns what `jax.lax.scan(f, init, xs, length, reverse)` does, with its states found in parallel.

    The states are the root of f(h[t-1], x[t]) - h[t] = 0 over all t; the method iterates on all of them at once until
    residual and update are as small as rounding allows, so the result is that of the loop up to rounding and not an
    approximation. Derivatives of any order are exact whatever the method: they are those of the root. Works under
    `jit`, `vmap` (each sequence with its own convergence), `grad`, `jvp`, `shard_map` and inside loops (there `jvp` of
    `grad`, but no `grad` of `grad`, which JAX refuses); f may close over traced arrays. Products in f are made at full
    precision (no TF32) unless they or `jax.default_matmul_precision` say otherwise. Call it under `jit`: outside, every
    call compiles anew.

    Args:
      f: (state, input) -> (state, output), as for `lax.scan`; differentiable forwards. State leaves are floating.
      init: The state before the first step, any pytree.
      xs: Inputs, a pytree of arrays [T, ...], or None.
      length: T; needed if xs has no arrays.
      reverse: Whether the first step is at the end of xs.
      method: A method object of `jaxpar.solve`; None for `Newton()`, `Auto()` to choose one by predictability and cost.
      with_stats: Whether to return a `Stats` as third.
      on_fail: What stands where iteration fails: "finish", the true states, found step by step; "nan"; or "raise", an
        `ArithmeticError` where values are known, that is outside of jit, and NaN inside.
      guess: States to start from: like init, with a leading T, in the order of xs.
      axis_name: Mesh axis that the sequence is split over, inside `jax.shard_map`: xs is this device's part, init and
        the returned state are the same on all. What is sent does not depend on T.
      rtol: Error that is allowed in an entry of a state, relative to it; None for eps^(3/4) of its dtype: 6e-6 in
        float32, 2e-12 in float64.
      atol: Error that is allowed in every entry beside that; None for a tenth of rtol, which suits states of order one.

    Returns:
      The last state, and outputs [T, ...] of every step; with `with_stats` also a `Stats`.

    Raises:
      UsageError: For arguments that do not fit, states that are not floating, a state that f returns with another
        structure, shape or dtype than it took, and a Jacobian structure that the program of f contradicts.
      ArithmeticError: See `on_fail`.
    """
    if on_fail not in ON_FAIL:
        raise UsageError(f"on_fail={on_fail!r} is unknown; legal are {', '.join(map(repr, ON_FAIL))}.")
    if rtol is not None and not 0 < rtol < 1:
        raise UsageError(f"rtol={rtol} must lie between 0 and 1, or be None.")
    if atol is not None and not 0 <= atol < float("inf"):
        raise UsageError(f"atol={atol} must be zero or positive, and finite, or None.")
    length = _length(xs, length)
    method = _chosen(method, f, init, xs, length, reverse)
    is_plain = isinstance(method, Sequential) and axis_name is None
    if is_plain or length == 0 or not jax.tree.leaves(init):
        unroll = getattr(method, "unroll", None) or 1
        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll=unroll)
        return (carry, ys, _untroubled(method, length)) if with_stats else (carry, ys)
    traced = trace(f, init, xs, axis_name)
    names = leaf_names(init)
    structure = structure_of(traced.step, traced.init, tuple(leaf[0] for leaf in traced.xs), method.jac, names)
    solve = Solve(traced.recurrence, method, structure, length, on_fail, axis_name, reverse, rtol, atol)
    states_guess = None if guess is None else _guess_leaves(guess, traced, length)
    carry, ys, stats = jax.jit(functools.partial(_run, solve))(traced.consts, traced.init, traced.xs, states_guess)
    if on_fail == "raise" and not isinstance(stats.converged, Tracer) and not stats.converged.all():
        raise ArithmeticError(f"no solution was found by {stats}; a smaller window or on_fail='finish' may help.")
    result = traced.state_tree.unflatten(carry), traced.output_tree.unflatten(ys)
    return (*result, stats) if with_stats else result


def _chosen(method: Any, f: Callable, init: PyTree, xs: PyTree, length: int, reverse: bool) -> Method:
    """Returns the method itself, `Newton` for None, and the choice of an `Auto`, which tries methods with this f."""
    if method is None:
        return Newton()
    if hasattr(method, "choice"):
        return method.choice(f, init, xs, length, reverse).method if length > 0 else Sequential()
    return method


def _run(solve: Solve, consts: Leaves, init: Leaves, xs: Leaves, guess: Leaves | None) -> tuple[Leaves, Leaves, Stats]:
    """Returns the leaves of the last state and of all outputs, and the stats."""
    xs, guess = _in_time(solve, (xs, guess))
    h, outcome, error = states(solve, consts, init, xs, guess)
    problem = solve.problem(consts, init, xs)
    ys = solve.recurrence.outputs(consts, problem.shift(h), xs, h)
    carry = tuple(leaf[-1] for leaf in h)
    if solve.axis_name is not None:
        is_last = problem.rank == problem.parts - 1
        carry = tuple(jax.lax.psum(jnp.where(is_last, leaf, 0), solve.axis_name) for leaf in carry)
        outcome, error = jax.tree.map(lambda leaf: jax.lax.pmax(leaf, solve.axis_name), (outcome, error))
    found = (outcome.first_bad == problem.parts * solve.length) & (error <= probe_tolerance(h))
    stats = Stats(**outcome._asdict(), converged=found, structure_error=error, method=solve.method)
    return carry, _in_time(solve, ys), stats


def _in_time(solve: Solve, tree: PyTree) -> PyTree:
    """Turns arrays [T, ...] from the order of xs to that of time, or back."""
    return jax.tree.map(lambda leaf: leaf[::-1], tree) if solve.reverse else tree


def _length(xs: PyTree, length: int | None) -> int:
    """Returns T."""
    sizes = {}
    for name, leaf in zip(leaf_names(xs), jax.tree.leaves(xs), strict=True):
        if not jnp.ndim(leaf):
            raise UsageError(f"xs leaf {name} is a scalar, but needs a leading axis of time.")
        sizes[name] = jnp.shape(leaf)[0]
    if length is not None:
        sizes["length"] = operator.index(length)
    if not sizes:
        raise UsageError("xs has no arrays, so that length must be given.")
    if len(set(sizes.values())) > 1:
        raise UsageError(f"xs and length must agree on T, but are {sizes}.")
    return next(iter(sizes.values()))


def _guess_leaves(guess: PyTree, traced: Traced, length: int) -> Leaves:
    """Returns the leaves of a guess, checked."""
    if jax.tree.structure(guess) != traced.state_tree:
        raise UsageError(f"guess must have the carry's structure {traced.state_tree}, not {jax.tree.structure(guess)}.")
    leaves = tuple(map(jnp.asarray, jax.tree.leaves(guess)))
    for name, leaf, state in zip(leaf_names(guess), leaves, traced.init, strict=True):
        if leaf.shape != (length, *state.shape):
            raise UsageError(f"guess leaf {name} has shape {leaf.shape}; it needs {(length, *state.shape)}.")
    cast = tuple(leaf.astype(state.dtype) for leaf, state in zip(leaves, traced.init, strict=True))
    return varying_as(jax.lax.stop_gradient(cast), traced.init)


def _untroubled(method: Method, length: int) -> Stats:
    """Returns the stats of a plain loop."""
    zero = jnp.zeros((), jnp.float32)
    outcome = Outcome(jnp.int32(0), jnp.int32(0), zero, zero, jnp.int32(length))
    return Stats(**outcome._asdict(), converged=jnp.array(True), structure_error=zero, method=method)
