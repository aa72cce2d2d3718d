"""`parallel_scan`: `jax.lax.scan` with the steps of its state found all at once."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxpar.scan.varying import varying_as
from jaxpar.solve.blindness import blind_leaves
from jaxpar.solve.callbacks import with_callbacks_known
from jaxpar.solve.carries import Division, Loop, divided, without_blind
from jaxpar.solve.default import rule
from jaxpar.solve.newton import Newton
from jaxpar.solve.problem import Chooser, Method, UnrolledMethod
from jaxpar.solve.program import leaf_names, trace
from jaxpar.solve.sequential import Sequential, check_unroll
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
      residual: Largest `|f(h[t-1], x[t]) - h[t]|` of any entry at any step, in units of what
        passes: `rtol |h| + atol` and eps of `|h|`, or a quarter of the former where a method does
        not solve with the whole Jacobian; where numbers cancel, the rounding of what enters an
        entry is added.
      error: Bound of the error of each leaf that was solved for, by its path, in units of what
        passes: `rtol |h| + atol`, or the rounding of the loop itself. At most 1 where iteration
        converged.
      converged: Whether iteration found every state, and the Jacobian has the structure that was
        declared. States of blind leaves are then f of the states before them to the bit.
      first_bad: First step that iteration did not find, int32; T if there is none. What stands from
        there on, up to the end of its window at least, is what `on_fail` says.
      structure_error: Largest `|J v - A v|` for random v, relative, where the declared structure A
        of J could not be decided from the program of f; zero where it could. Too large a one makes
        every gradient NaN.
      method: The method; `Sequential` where there is nothing to solve, whatever was asked for.
      reason: Why the method was taken: what there is not to solve, or what the default rule found.
        Empty for a method that was named.
    """

    iterations: Array
    windows: Array
    residual: Array
    error: dict[str, Array]
    converged: Array
    first_bad: Array
    structure_error: Array
    method: Any = flax.struct.field(pytree_node=False)
    reason: str = flax.struct.field(pytree_node=False, default="")

    def _largest_error(self) -> float:
        return max(map(float, self.error.values()), default=0.0)

    def __str__(self):
        name = type(self.method).__name__ + (f" ({self.reason})" if self.reason else "")
        if jnp.ndim(self.converged) or isinstance(self.converged, Tracer):
            return f"{name}: {self.converged} of {self.iterations} iterations"
        verdict = (
            "converged" if self.converged else f"not converged from step {int(self.first_bad)} on"
        )
        return (
            f"{name}: {verdict}; {int(self.iterations)} iterations in {int(self.windows)} windows, "
            f"residual {float(self.residual):.1e}, error {self._largest_error():.1e}, "
            f"structure error {float(self.structure_error):.1e}"
        )


def parallel_scan(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    method: Method | Chooser | None = None,
    with_stats: bool = False,
    on_fail: str = "finish",
    guess: PyTree = None,
    axis_name: str | None = None,
    rtol: PyTree = None,
    atol: PyTree = None,
) -> Any:  # two results or three, as `with_stats` says
    """Returns what `jax.lax.scan(f, init, xs, length, reverse, unroll)` does, with its states found in parallel.

    The states are the root of f(h[t-1], x[t]) - h[t] = 0 over all t; the method iterates on all of
    them at once until every entry of every step is within `rtol |h| + atol` of what it must be, or
    as near as rounding lets its own numbers come. The result is a true trajectory: every state is f
    of the one before, up to rounding; the loop's own where errors do not grow. Leaves that are not
    floating (counters, flags, keys, complex numbers) run sequentially first, as inputs of the
    solve; if one depends on an unknown, so does the whole, and `Stats.reason` says so.

    Derivatives of any order are exact whatever the method: they are those of the root. Works under
    `jit`, `vmap` (each sequence converges for itself), `grad`, `jvp`, `shard_map` and in loops
    (there JAX refuses `grad` of `grad`); f may close over traced arrays. Products in f are at full
    precision (no TF32) unless they or `jax.default_matmul_precision` say otherwise. Call it under
    `jit`: outside, every call compiles anew.

    Args:
      f: (state, input) -> (state, output), as for `lax.scan`; differentiable forwards by the
        floating leaves.
      init: The state before the first step, any pytree.
      xs: Inputs, a pytree of arrays [T, ...], or None.
      length: T; needed if xs has no arrays.
      reverse: Whether the first step is at the end of xs.
      unroll: As `lax.scan`'s, of what is run sequentially; 1 leaves it to the method.
      method: A method object of `jaxpar.solve`. None takes one by platform, shapes, structure,
        length and blindness without measuring (`explain` says which, and why); `Auto()` measures
        predictability and cost.
      with_stats: Whether to return a `Stats` as third.
      on_fail: What stands where iteration fails: "finish", a true trajectory, run sequentially;
        "nan"; or "raise", an `ArithmeticError` outside of jit, where values are known, and NaN
        inside.
      guess: States to start from: like init, with a leading T, in the order of xs. Leaves not
        solved for are not read.
      axis_name: Mesh axis that the sequence is split over, inside `jax.shard_map`: xs is this
        device's part, init and the returned state are the same on all. What is sent does not depend
        on T.
      rtol: Error allowed in an entry, relative to it; None for 1.5 eps^(3/4) of its dtype: 1e-5 in
        float32. A number, or a tree of numbers and None like init; one number may stand for a
        branch.
      atol: Error allowed in every entry in addition, likewise. None for a tenth of rtol times the
        entry's typical size: the median of its magnitude over time in the solution, 1 where it is
        always zero.

    Returns:
      The last state, and outputs [T, ...] of every step; with `with_stats` also a `Stats`.

    Raises:
      UsageError: For arguments that do not fit, or a state or a Jacobian structure that f
        contradicts.
      ArithmeticError: See `on_fail`.
    """
    _check(on_fail, unroll)
    rtols = _tolerances(rtol, init, "rtol", "a number between 0 and 1", lambda value: 0 < value < 1)
    atols = _tolerances(
        atol, init, "atol", "zero or positive, and finite", lambda value: 0 <= value < float("inf")
    )
    length, names = _length(xs, length), leaf_names(init)
    loop = Loop(length, reverse, max(1, length if unroll is True else int(unroll)), axis_name)
    if length == 0 or not names:
        alone = dataclasses.replace(loop, axis_name=None)
        return _results(_by_steps(f, init, xs, alone, loop, Sequential()), with_stats)
    if isinstance(method, Chooser):
        method = method.choose_method(f, init, xs, length, reverse)
    if isinstance(method, Sequential) and axis_name is None:
        return _results(_by_steps(f, init, xs, loop, loop, method), with_stats)
    parts = divided(trace(f, init, xs, axis_name), names, axis_name)
    near = None if guess is None else _guess_leaves(guess, parts, length)
    reason = parts.reason
    if method is None:
        method, reason = _default(parts, loop)
        if isinstance(method, Sequential):
            return _results(_by_steps(f, init, xs, loop, loop, method, reason), with_stats)
    if parts.reason:
        traced = parts.traced
        whole = (
            traced.state_tree.unflatten(traced.init),
            jax.tree.structure(xs).unflatten(traced.xs),
        )
        found = _by_steps(f, *whole, loop, loop, method, reason)
    else:
        found = _solved(parts, loop, method, on_fail, near, (rtols, atols), reason)
    stats = found[2]
    if on_fail == "raise" and not isinstance(stats.converged, Tracer) and not stats.converged.all():
        raise ArithmeticError(
            f"no solution was found by {stats}; a smaller window or on_fail='finish' may help."
        )
    return _results(found, with_stats)


def _results(found: tuple[PyTree, PyTree, Stats], with_stats: bool) -> Any:  # two results or three
    return found if with_stats else found[:2]


def _default(parts: Division, loop: Loop) -> tuple[Method, str]:
    """Returns the method that is taken where none is named, and why."""
    if parts.reason:
        return Sequential(), parts.reason
    if loop.axis_name is not None:
        return Newton(), "a loop over devices leaves all but one of them idle"
    choice = rule(parts, loop.length)
    return choice.method, choice.reason


def _by_steps(
    f: Callable, init: PyTree, xs: PyTree, run: Loop, loop: Loop, method: Method, reason: str = ""
) -> tuple[PyTree, PyTree, Stats]:
    """Takes one step after the other: by the loop `run`, which `loop` is without its devices if no step is taken."""
    carry, ys = _unrolled(run, method).run(f, init, xs)
    if not isinstance(method, Sequential):
        method = Sequential()
    return carry, ys, _sequential_stats(method, loop, reason)


def _check(on_fail: str, unroll: int | bool) -> None:
    check_unroll(unroll)
    if on_fail not in ON_FAIL:
        raise UsageError(
            f"on_fail={on_fail!r} is unknown; legal are {', '.join(map(repr, ON_FAIL))}."
        )


def _tolerances(
    given: PyTree, init: PyTree, name: str, legal: str, is_legal: Callable[[float], bool]
) -> tuple[float | None, ...]:
    """Returns a tolerance of each leaf of `init`, from one number or a tree of them."""
    is_none = lambda leaf: leaf is None  # noqa: E731
    try:
        spread = jax.tree.map(
            lambda value, part: [value] * len(jax.tree.leaves(part)), given, init, is_leaf=is_none
        )
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{name} must be a number, None, or a tree of them like init: {error}"
        ) from error
    values = jax.tree.leaves(spread, is_leaf=is_none)
    for value in values:
        if value is not None and not is_legal(float(value)):
            raise UsageError(f"{name}={value} must be {legal}, or None.")
    return tuple(None if value is None else float(value) for value in values)


def _solved(
    parts: Division,
    loop: Loop,
    method: Method,
    on_fail: str,
    guess: Leaves | None,
    tolerances: tuple[tuple[float | None, ...], tuple[float | None, ...]],
    reason: str,
) -> tuple[PyTree, PyTree, Stats]:
    """Returns the last state, the outputs and the stats: what can be is run sequentially first, and the rest solved."""
    traced = with_callbacks_known(parts.traced, loop.length, loop.axis_name)
    parts = dataclasses.replace(parts, traced=traced)
    causes = blind_leaves(traced.recurrence.jaxpr, traced.recurrence.num_carry)
    if loop.axis_name is None:
        parts = without_blind(parts, [bool(found) for found in causes])
    program, known, before = traced, (), ()
    if parts.first:
        known, before = parts.known(loop)
    if parts.first or parts.last:
        program = trace(*parts.rest(before), loop.axis_name)
    if loop.unroll != 1 and isinstance(method, UnrolledMethod):
        method = dataclasses.replace(cast(Any, method), unroll=loop.unroll)
    first = tuple(leaf[0] for leaf in program.xs)
    names = [parts.names[number] for number in parts.solved]
    structure = structure_of(program.step, program.init, first, method.jac, names)
    if program is not traced:
        causes = blind_leaves(program.recurrence.jaxpr, len(names))
    blind = frozenset(number for number, found in enumerate(causes) if found)
    rtols, atols = (tuple(values[number] for number in parts.solved) for values in tolerances)
    solve = Solve(
        recurrence=program.recurrence,
        method=method,
        structure=dataclasses.replace(structure, blind=blind),
        length=loop.length,
        on_fail=on_fail,
        axis_name=loop.axis_name,
        reverse=loop.reverse,
        rtol=rtols,
        atol=atols,
        unroll=loop.unroll if loop.unroll != 1 else None,
        names=tuple(names),
    )
    run = jax.jit(functools.partial(_run, solve))
    carry, ys, stats = run(program.consts, program.init, program.xs, guess)
    last = ()
    if parts.last:
        last, ys = parts.run_last(loop, before, ys)
    state = parts.merged({}, first=known, solved=carry, last=last)
    stats = dataclasses.replace(stats, reason=reason)
    return traced.state_tree.unflatten(state), traced.output_tree.unflatten(ys), stats


def _unrolled(loop: Loop, method: Method) -> Loop:
    """Returns the loop, unrolled as its method says where the call does not."""
    own = method.unroll if isinstance(method, UnrolledMethod) else None
    return dataclasses.replace(loop, unroll=own) if own and loop.unroll == 1 else loop


def _run(
    solve: Solve, consts: Leaves, init: Leaves, xs: Leaves, guess: Leaves | None
) -> tuple[Leaves, Leaves, Stats]:
    """Returns the leaves of the last state and of all outputs, and the stats."""
    xs, guess = _in_time(solve, (xs, guess))
    solution: Any = states(solve, consts, init, xs, guess)
    h, outcome, error = solution
    problem = solve.problem(consts, init, xs)
    ys = solve.recurrence.outputs(consts, problem.shift(h), xs, h)
    carry = problem.final(tuple(leaf[-1] for leaf in h))
    if solve.axis_name is not None:
        outcome, error = jax.tree.map(
            lambda leaf: jax.lax.pmax(leaf, solve.axis_name), (outcome, error)
        )
    found = (outcome.first_bad == problem.parts * solve.length) & (error <= probe_tolerance(h))
    stats = Stats(
        iterations=outcome.iterations,
        windows=outcome.windows,
        residual=outcome.residual,
        error=dict(zip(solve.names, outcome.error, strict=True)),
        converged=found,
        first_bad=outcome.first_bad,
        structure_error=error,
        method=solve.method,
    )
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


def _guess_leaves(guess: PyTree, parts: Division, length: int) -> Leaves:
    """Returns the leaves of a guess that are solved for, all of them checked."""
    traced = parts.traced
    if jax.tree.structure(guess) != traced.state_tree:
        raise UsageError(
            f"guess must have the carry's structure {traced.state_tree}, not {jax.tree.structure(guess)}."
        )
    leaves = tuple(map(jnp.asarray, jax.tree.leaves(guess)))
    for name, leaf, state in zip(parts.names, leaves, traced.init, strict=True):
        if leaf.shape != (length, *state.shape):
            raise UsageError(
                f"guess leaf {name} has shape {leaf.shape}; it needs {(length, *state.shape)}."
            )
    cast = tuple(leaves[number].astype(traced.init[number].dtype) for number in parts.solved)
    return varying_as(jax.lax.stop_gradient(cast), traced.init)


def _sequential_stats(method: Method, loop: Loop, reason: str = "") -> Stats:
    """Returns the stats of a plain loop."""
    zero = jnp.zeros((), jnp.float32)
    return Stats(
        iterations=jnp.int32(0),
        windows=jnp.int32(0),
        residual=zero,
        error={},
        converged=jnp.array(True),
        first_bad=jnp.int32(loop.parts * loop.length),
        structure_error=zero,
        method=method,
        reason=reason,
    )
