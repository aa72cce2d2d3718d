"""Elementwise cells as GPU kernels: one that runs all steps with the state in registers, one for a Newton step.

Both get the cell as Triton statements written from its jaxpr (`jaxpar.solve._emit`). Lanes are
independent, so that the former has as many threads as the carry has elements, and reads each input
once; a Newton step reads the previous states as well, and runs over time in parallel
(`jaxpar.lower.lookback`).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxpar.lower.lookback import LARGEST_BLOCK, KernelSource, ScanAxis, launch
from jaxpar.solve import _sequential_kernel
from jaxpar.solve._emit import FUNCTIONS, NotElementwise, statements, trimmed


@dataclasses.dataclass(frozen=True)
class LaneCell:
    """A cell in the form that kernels take.

    Attributes:
      lanes: Shape of each of the k leaves of the carry.
      k: Leaves of the carry.
      x_columns: Elements a step of each input; a divisor of the lanes' number.
      c_columns: Elements of each constant, likewise.
      value: Source of `cell(g0.., x0.., c0..)`, which returns the k new components.
      linear: Source of `cell_and_jacobian`, which returns them and the k x k Jacobian, row by row.
    """

    lanes: tuple[int, ...]
    k: int
    x_columns: tuple[int, ...]
    c_columns: tuple[int, ...]
    value: str
    linear: str

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments of both functions."""
        return (
            [f"g{i}" for i in range(self.k)]
            + [f"x{i}" for i in range(len(self.x_columns))]
            + [f"c{i}" for i in range(len(self.c_columns))]
        )


def lane_cell(step, carry, x) -> tuple[LaneCell, list[jax.Array]]:
    """Writes `step(carry, x) -> carry`, on tuples of arrays, in the form that kernels take.

    Returns:
      The cell, and the arrays that `step` closes over.

    Raises:
      NotElementwise: With the reason, where the step does not treat its lanes alike.
    """
    carry, x = tuple(carry), tuple(x)
    k, lanes = len(carry), carry[0].shape
    if k > LARGEST_BLOCK:
        raise NotElementwise(f"kernels take up to {LARGEST_BLOCK} leaves of a carry, not {k}")
    if any(leaf.shape != lanes for leaf in carry):
        raise NotElementwise(
            f"its carry has leaves of shapes {', '.join(str(leaf.shape) for leaf in carry)}"
        )
    # Arrays that the step closes over become arguments of the kernel; numbers stay in its text.
    value = jax.make_jaxpr(step)(carry, x)
    constants = [constant for constant in value.consts if jnp.ndim(constant)]
    held = [isinstance(constant, jax.Array) and constant.ndim > 0 for constant in value.consts]

    def cell(carry, x, constants):
        rest = iter(constants)
        consts = [
            next(rest) if array else const for array, const in zip(held, value.consts, strict=True)
        ]
        return jaxpr_as_fun(ClosedJaxpr(value.jaxpr, consts))(*carry, *x)

    def linear(carry, x, constants):
        # k <= 2 columns by forward mode; each makes the value again, of which the first is taken.
        seeds = [[jnp.full_like(leaf, i == j) for i, leaf in enumerate(carry)] for j in range(k)]
        columns = [
            jax.jvp(lambda *carry: cell(carry, x, constants), carry, tuple(seed)) for seed in seeds
        ]
        return [*columns[0][0], *(columns[j][1][i] for i in range(k) for j in range(k))]

    x_columns, c_columns = ([_columns(leaf, lanes) for leaf in leaves] for leaves in (x, constants))
    empty = LaneCell(lanes, k, tuple(x_columns), tuple(c_columns), "", "")
    texts = [
        _function(name, f, (carry, x, constants), empty)
        for name, f in (("cell", cell), ("cell_and_jacobian", linear))
    ]
    return dataclasses.replace(empty, value=texts[0], linear=texts[1]), constants


def _columns(leaf, lanes: tuple[int, ...]) -> int:
    if leaf.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotElementwise(
            f"kernels take float32, bfloat16 and float16, but an input is {leaf.dtype}"
        )
    shape = trimmed(leaf.shape)
    if shape != lanes[len(lanes) - len(shape) :]:
        raise NotElementwise(
            f"an input of shape {leaf.shape} is neither like the carry, {lanes}, nor like its last axes"
        )
    return math.prod(shape)


def _function(name: str, function, arguments, cell: LaneCell) -> str:
    closed = jax.make_jaxpr(function)(*arguments)
    lines, results = statements(closed, cell.arguments, "v", cell.lanes)
    # A result that is one number everywhere, or one a lane, must be a tile like the others.
    results = [f"tl.where(g0 == g0, {result}, {result})" for result in results]
    body = "".join(f"    {line}\n" for line in [*lines, f"return {', '.join(results)}"])
    return f"{FUNCTIONS}\n\n@triton.jit\ndef {name}({', '.join(cell.arguments)}):\n{body}"


def states_sequentially(
    cell: LaneCell, start, xs, constants, *, steps: int, reverse: bool = False
) -> tuple:
    """Runs the cell over time, one thread a lane; returns k arrays of states [T, *lanes] of the start's dtypes."""
    work = _sequential_kernel.SequentialKernel(cell.k, cell.x_columns, cell.c_columns, cell.value)
    return _sequential_kernel.launch_sequential(
        work, start, xs, constants, (steps, *cell.lanes), 0, reverse=reverse
    )


@functools.cache
def newton_source(
    cell: LaneCell, relative: float, absolute: float, rounding: float
) -> KernelSource:
    """The look-back kernel whose coefficients are the Jacobian and the residual of the cell at the last states."""
    k, xs, cs = cell.k, range(len(cell.x_columns)), range(len(cell.c_columns))
    inputs = [
        f"{name}{i}_ptr"
        for name, places in (("old", range(k)), ("first", range(k)), ("x", xs), ("c", cs))
        for i in places
    ]
    outputs = [f"{name}{i}_ptr" for name in ("new", "worst") for i in range(k)]
    # Step t needs the old state of t - 1, which lies BACK elements before it, or the start: not `old` shifted in
    # registers, since the first row of a tile has its neighbour in another program's.
    body = ["begins = (step == 0)[:, None]", "row = time[:, None].to(tl.int64)"]
    for i in range(k):
        body.append(
            f"start{i} = tl.load(first{i}_ptr + lane, mask=live, other=0.0).to(tl.float32)[None, :]"
        )
        body.append(f"old{i} = tl.load(old{i}_ptr + at, mask=mask, other=0.0).to(tl.float32)")
        body.append(
            f"before{i} = tl.load(old{i}_ptr + at - BACK, mask=mask & (step > 0)[:, None], other=0.0).to(tl.float32)"
        )
        body.append(f"g{i} = tl.where(begins, start{i}, before{i})")
    for i, columns in enumerate(cell.x_columns):
        address = f"x{i}_ptr + row * {columns} + (lane % {columns})[None, :]"
        body.append(f"x{i} = tl.load({address}, mask=mask, other=0.0).to(tl.float32)")
    for i, columns in enumerate(cell.c_columns):
        body.append(f"c{i} = tl.load(c{i}_ptr + lane % {columns})[None, :].to(tl.float32)")
    results = [f"f{i}" for i in range(k)] + [f"j{i}{j}" for i in range(k) for j in range(k)]
    body.append(f"{', '.join(results)} = cell_and_jacobian({', '.join(cell.arguments)})")
    for i in range(k):
        body += [f"a{i}{j} = j{i}{j}" for j in range(k)]
        body.append(
            f"b{i} = f{i} - old{i}"
        )  # the residual: what is solved for is the update, not the state
    # The update is judged here, while it is in registers: a pass of its own would read all of it again.
    finish = []
    for i in range(k):
        finish.append(f"new{i} = old{i} + h{i}")
        finish.append(f"tl.store(new{i}_ptr + at, new{i}, mask=mask)")
        terms = " + ".join(f"tl.abs(j{i}{j} * g{j})" for j in range(k))
        finish.append(
            f"bound = {relative!r} * tl.abs(new{i}) + {absolute!r} + {rounding!r} * ({terms})"
        )
        # The bits of floats that are not negative are ordered as the floats are, and those of a NaN are above all.
        finish.append(
            f"bits = tl.where(mask, tl.abs(h{i}) / bound, 0.0).to(tl.int32, bitcast=True)"
        )
        finish.append(f"tl.atomic_max(worst{i}_ptr + lane, tl.max(bits, 0), mask=live)")
    return KernelSource(
        k, tuple(inputs), tuple(outputs), "\n".join(body), "\n".join(finish), functions=cell.linear
    )


def newton_step(
    cell: LaneCell,
    states,
    start,
    xs,
    constants,
    *,
    bound: tuple[float, float, float],
    reverse: bool = False,
) -> tuple[tuple, tuple]:
    """One Newton step for all lanes and all of time: states + (I - J S)^-1 (f(S states, xs) - states).

    Args:
      cell: The cell.
      states: k arrays [T, *lanes].
      start: k arrays [*lanes].
      xs: As the cell has them, with a leading T.
      constants: As the cell has them.
      bound: Three positive factors; an update is measured by a |new state| + b + c |J| |state
        before|.
      reverse: Whether time runs backwards.

    Returns:
      The new states, k arrays [T, *lanes]; and the largest |update| of each lane in units of its
      bound, k arrays float32 [*lanes], NaN where one is met.
    """
    # The largest updates are maxima over all programs, taken of their bits as integers: see `newton_source`.
    k, lanes = cell.k, math.prod(cell.lanes)
    shape = (states[0].shape[0], lanes)
    out = [jax.ShapeDtypeStruct(shape, state.dtype) for state in states]
    worst = [jax.ShapeDtypeStruct((lanes,), jnp.int32)] * k
    flat = [jnp.reshape(state, shape) for state in states]
    buffers = [*flat, *start, *xs, *constants]
    zeroed = tuple(range(k, 2 * k))
    results = launch(
        newton_source(cell, *bound),
        buffers,
        [*out, *worst],
        ScanAxis(shape=shape, axis=0, reverse=reverse),
        zeroed=zeroed,
    )
    new = tuple(jnp.reshape(x, state.shape) for x, state in zip(results, states, strict=False))
    return new, tuple(
        jax.lax.bitcast_convert_type(bits, jnp.float32).reshape(cell.lanes) for bits in results[k:]
    )
