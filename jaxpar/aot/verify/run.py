"""Verification: each layout against one device, in value, gradient and steps, and what it does against its limits."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import optax

from jaxpar._older_fields import newer_arguments
from jaxpar.aot.verify.collectives import KINDS
from jaxpar.aot.verify.compare import (
    NOISE,
    TOLERANCE,
    count_differences,
    dead_leaves,
    leaf_errors,
    of_live,
)
from jaxpar.aot.verify.judge import LayoutReport, Limits, bytes_on_device, judge
from jaxpar.aot.verify.layouts import Layout
from jaxpar.aot.verify.program import (
    Outcome,
    Program,
    compile_program,
    estimated_temporaries,
    on_mesh,
    run_program,
)
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.lower.flops import count_flops
from jaxpar.mesh import MeshSpec, axes_like, is_axes, mesh_axes, num_shares, platform, rules_from
from jaxpar.transfers import Transfer, allowed_by_axes
from jaxpar.types import Device, PyTree, UsageError

__all__ = ["Case", "Model", "VerifyOptions", "bytes_of_batch", "verify", "verify_cases"]

ROOM_FOR_FLOPS = 1.02
"""Products of a device over its share of them: what is left is elementwise work that a compiler wrote as a product."""


class Model(NamedTuple):
    """A model that is verified, in one dtype.

    Attributes:
      params: Pytree of floating host arrays.
      axes: Logical axes of each, as in `jaxpar.mesh.RULES`.
      loss: (params, batch) -> scalar; pure, and of the params' dtype throughout.
      optimizer: Optimizer of the steps. Adam's eps should be over the rounding of the gradients, such
        as 1e-6. Otherwise an entry with a gradient of mere rounding moves by a whole learning rate,
        either way.
      gradient: (params, batch, layout) -> (loss, its gradient), where it is not `loss` that is
        differentiated; of `Layout(MeshSpec())`, which all are compared with, its plain form.
    """

    params: PyTree
    axes: PyTree
    loss: Callable[[PyTree, PyTree], jax.Array]
    optimizer: optax.GradientTransformation
    gradient: Callable[[PyTree, PyTree, Layout], tuple[jax.Array, PyTree]] | None = None


class Case(NamedTuple):
    """One layout of a training, and all that judging it needs.

    Attributes:
      layout: The layout.
      rules: The rule table that it gives.
      program: dtype -> the program, called where no mesh is ambient: arrays made under one would lie on it.
      twin: dtype -> what the plain form gave on one device, after the same steps.
      limits: (program, dtype) -> what a device may do, called under the layout's mesh and rules.
      transfer_dtype: Dtype of the program that is compiled where bytes alone are judged.
      skips: Dtypes that are left out for this layout.
    """

    layout: Layout
    rules: Mapping[str, tuple[str, ...]]
    program: Callable[[str], Program]
    twin: Callable[[str], Outcome]
    limits: Callable[[Program, str], Limits]
    transfer_dtype: str = "float32"
    skips: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Options of a verification: dtypes, steps, devices, and the function that gets reports.

    Attributes:
      dtypes: Any of "float32" and "float64", in which values are compared, and in `verify_cases`
        "bfloat16", in which the collectives of the partitioned program alone are judged.
      steps: Optimizer steps to compare after.
      topology: Compile-only devices; each layout's collectives are judged there as well.
      report: Function that is called with each report as it is made.
    """

    dtypes: Sequence[str] = ("float32", "float64")
    steps: int = field(3, AtLeast(1))
    topology: Sequence[Device] | None = None
    report: Callable[[LayoutReport], None] | None = None

    __post_init__ = check_fields


OLDER_OPTIONS = {each.name: f"options.{each.name}" for each in dataclasses.fields(VerifyOptions)}
"""Arguments of verifications that are fields of their options today."""


def verify(
    model: Callable[[str], Model],
    batch: Callable[[int], PyTree],
    batch_axes: PyTree,
    layouts: Iterable[Layout],
    *,
    rules: Mapping[str, str] | None = None,
    declared: Callable[[Layout], list[Transfer]] | None = None,
    allow: Sequence[str] = (),
    options: VerifyOptions | None = None,
    **older: object,
) -> list[LayoutReport]:
    """Runs loss, gradient and some optimizer steps under each layout and compares them with one device's.

    Leaves with a gradient of zero but for rounding (`NOISE`) are left out of the comparison after the
    steps: Adam turns that rounding into moves of a whole learning rate. Each report names them.

    Each layout is also judged by what a device does in a step. The collectives are compared with
    `declared` or, without it, with `allowed_by_axes`. The matrix products are compared with its share of
    the batch, and the bytes of its state and batch with the axes. Products have full precision on every device.

    Args:
      model: dtype -> `Model`; the same values in each dtype.
      batch: Step number -> pytree of host arrays; another one for each step.
      batch_axes: Their logical axes.
      layouts: Layouts; one that is not legal for the model gives a report that says so.
      rules: Changes of the rule table, for all layouts.
      declared: Layout -> the collectives of one step, called under its mesh and rules.
      allow: Transfers that are not judged, by kind and mesh axis, such as "gather over tensor".
      options: Dtypes, steps, topology and report; None means the defaults.
      **older: Fields of `options`, which were arguments; accepted until the first release.

    Returns:
      A report a layout and dtype, and one for the topology. Compile time dominates the cost: one program each.

    Raises:
      TypeError: If a keyword is unknown.
      UsageError: If `allow` names what is no transfer, or `options.dtypes` what has no tolerance.
    """
    groups = {"options": options or VerifyOptions()}
    how: VerifyOptions = newer_arguments("verify", OLDER_OPTIONS, groups, older)["options"]
    check_allowed(allow)

    @functools.cache
    def twin(dtype: str) -> Outcome:
        alone = Layout(MeshSpec())
        program = _program_of(model(dtype), alone, batch, batch_axes)
        with on_mesh(alone, rules_from(rules)):
            return _outcome(program, how.steps)

    @functools.cache
    def flops() -> float:
        alone = Layout(MeshSpec())
        whole = _program_of(model("float32"), alone, batch, batch_axes)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (whole.state, batch(0))
        )
        return count_flops(whole.step, jax.eval_shape(lambda: jax.random.key(0)), *shapes).total

    def limits(layout: Layout, program: Program, dtype: str) -> Limits:
        del dtype
        made = program.state
        params = made["params"]
        param_axes = program.axes["params"]
        if declared is None:
            transfers = allowed_by_axes(params, param_axes, batch_axes)
        else:
            transfers = declared(layout)
        shares = num_shares(*_axes_of_rows(batch_axes))
        held = bytes_on_device(made, params, param_axes) + bytes_of_batch(program)
        return Limits(
            transfers=transfers,
            flops=ROOM_FOR_FLOPS * flops() / shares,
            held=held,
            allow=tuple(allow),
            unjudged=tuple(f"{name}, as allow= says" for name in allow),
        )

    def case(layout: Layout) -> Case:
        return Case(
            layout=layout,
            rules=rules_from(rules, layout.name),
            program=lambda dtype: _program_of(model(dtype), layout, batch, batch_axes),
            twin=twin,
            limits=functools.partial(limits, layout),
        )

    return verify_cases([case(layout) for layout in layouts], how)


def check_allowed(allow: Sequence[str]) -> None:
    """Raises `UsageError` for what names no transfer."""
    for name in allow:
        kind, _, axis = name.partition(" over ")
        if kind not in KINDS or not axis:
            legal = ", ".join(f"{kind} over AXIS" for kind in KINDS)
            raise UsageError(f"allow={name!r} names no transfer; expected {legal}.")


def verify_cases(
    cases: Sequence[Case],
    options: VerifyOptions | None = None,
    *,
    jobs: int = 1,
    **older: object,
) -> list[LayoutReport]:
    """Verifies cases: values in each dtype, and bytes as compiled for a topology.

    Args:
      cases: The layouts.
      options: Dtypes, steps, topology, on which programs are of `Case.transfer_dtype`, and report;
        None means the defaults.
      jobs: Number of layouts that are compiled at a time.
      **older: Fields of `options`, which were arguments; accepted until the first release.

    Returns:
      The reports, in the order of the cases.

    Raises:
      TypeError: If a keyword is unknown.
      UsageError: If `options.dtypes` names what has no tolerance.
    """
    groups = {"options": options or VerifyOptions()}
    how: VerifyOptions = newer_arguments("verify_cases", OLDER_OPTIONS, groups, older)["options"]
    for dtype in how.dtypes:
        if dtype not in (*TOLERANCE, "bfloat16"):
            legal = ", ".join((*TOLERANCE, "bfloat16"))
            raise UsageError(f"dtypes={dtype} has no tolerance; expected any of {legal}.")

    def rows_of(case: Case) -> list[LayoutReport]:
        rows = []
        for dtype in how.dtypes:
            if dtype in case.skips:
                continue
            with jax.enable_x64(dtype == "float64"):
                if dtype in TOLERANCE:
                    row = _compare(case, dtype, how.steps)
                else:
                    row = _judge_bytes(case, dtype)
            row.unjudged += [f"{name}, which other layouts are compared in" for name in case.skips]
            rows.append(row)
            if how.report is not None:
                how.report(row)
            if row.refused:
                return rows
        if how.topology is not None:
            rows.append(_judge_topology(case, how.topology))
            if how.report is not None:
                how.report(rows[-1])
        return rows

    if jobs == 1:
        return [row for case in cases for row in rows_of(case)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(rows_of, cases) for row in rows]


def _compare(case: Case, dtype: str, steps: int) -> LayoutReport:
    """Makes the report of one layout in a dtype in which values are compared."""
    row = LayoutReport(case.layout, dtype)
    try:
        program = case.program(dtype)
        with on_mesh(case.layout, case.rules) as mesh:
            compiled = compile_program(program)
            limits = case.limits(program, dtype)
            got = run_program(program, compiled, steps)
            most = None
            if limits.room is not None:
                most = limits.room * estimated_temporaries(program, compiled, mesh, case.rules)
    except UsageError as error:
        row.refused = str(error)
        return row
    _compare_outcomes(row, got, case.twin(dtype), steps)
    judge(row, compiled, compiled.text, mesh, limits, most)
    return row


def _compare_outcomes(row: LayoutReport, got: Outcome, want: Outcome, steps: int) -> None:
    """Fills in the errors of a report, and the breaches among them."""
    tolerance = TOLERANCE[row.dtype]
    for number, (left, right) in enumerate(zip(got.losses, want.losses, strict=True)):
        error = abs(left - right) / (abs(right) or 1.0)
        if error == error:
            row.loss = max(row.loss, error)
        else:
            row.loss = float("inf")
        if not error <= tolerance:
            row.breaches.append(
                f"the loss of step {number + 1} is off by {error:.1e}, over {tolerance:g}"
            )
    row.worst, row.gradient = _worst(leaf_errors(got.gradient, want.gradient))
    if not row.gradient <= tolerance:
        row.breaches.append(
            f"the gradient of {row.worst} is off by {row.gradient:.1e}, over {tolerance:g}"
        )
    # Parameters and moments differ in size by orders, so each part is measured by its own norm.
    errors = {}
    for name, part in want.state.items():
        parts = leaf_errors(got.state[name], part)
        for path, error in parts.items():
            full = name
            if path:
                full = f"{name}/{path}"
            errors[full] = error
    dead = dead_leaves(want.gradient, NOISE[row.dtype])
    row.worst_step, row.steps = _worst(of_live(errors, want.gradient, dead))
    if not row.steps <= tolerance:
        row.breaches.append(
            f"{row.worst_step} after {steps} steps is off by {row.steps:.1e}, over {tolerance:g}"
        )
    for path, count in count_differences(got.state, want.state).items():
        row.breaches.append(f"{path} after {steps} steps differs in {count} entries")
    if dead:
        row.unjudged.append(
            f"steps of {', '.join(sorted(dead))}, whose gradient is zero but for rounding"
        )


def _judge_bytes(case: Case, dtype: str) -> LayoutReport:
    """Makes the report of a program in few bits, by its collectives alone.

    XLA for CPU sends these in float32: there the program is judged as the partitioner wrote it.
    """
    row = LayoutReport(case.layout, dtype, precision="default")
    try:
        program = case.program(dtype)
        with on_mesh(case.layout, case.rules) as mesh:
            is_widened = platform() == "cpu"
            compiled = compile_program(program, with_gradient=False, is_partitioned_kept=is_widened)
            limits = case.limits(program, dtype)
    except UsageError as error:
        row.refused = str(error)
        return row
    text = compiled.text
    if is_widened:
        text = compiled.partitioned
    judge(row, compiled, text, mesh, limits)
    return row


def _judge_topology(case: Case, devices: Sequence[Device]) -> LayoutReport:
    """Makes the report of a program compiled for devices that are not here."""
    row = LayoutReport(case.layout, devices[0].device_kind, precision="default")
    try:
        program = case.program(case.transfer_dtype)
        with on_mesh(case.layout, case.rules, devices) as mesh:
            compiled = compile_program(program, with_gradient=False)
            limits = case.limits(program, case.transfer_dtype)
    except UsageError as error:
        row.refused = str(error)
        return row
    # Compilers for TPU pad arrays to tiles and make look-ups products, which is not the layout's affair.
    limits = dataclasses.replace(limits, flops=None, held=None)
    judge(row, compiled, compiled.text, mesh, limits)
    return row


def _worst(errors: dict[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: item[1], default=("", 0.0))


def _outcome(program: Program, steps: int) -> Outcome:
    return run_program(program, compile_program(program), steps)


def _program_of(
    model: Model, layout: Layout, batch: Callable[[int], PyTree], batch_axes: PyTree
) -> Program:
    """The training of a model that is a loss with an optimizer."""

    def step(key, state, batch):
        del key
        if model.gradient is None:
            value, grads = jax.value_and_grad(model.loss)(state["params"], batch)
        else:
            value, grads = model.gradient(state["params"], batch, layout)
        updates, moved = model.optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return value, grads, {"params": params, "optimizer": moved}

    optimizer = jax.device_get(model.optimizer.init(model.params))
    axes = {"params": model.axes, "optimizer": axes_like(optimizer, model.params, model.axes)}
    return Program(
        state={"params": model.params, "optimizer": optimizer},
        axes=axes,
        step=step,
        batch=batch,
        batch_axes=batch_axes,
    )


def _axes_of_rows(batch_axes: PyTree) -> tuple[str, ...]:
    """Mesh axes that split the rows of a batch."""
    leaves = jax.tree.leaves(batch_axes, is_leaf=is_axes)
    names = dict.fromkeys(name for leaf in leaves for name in leaf if name)
    return tuple(dict.fromkeys(axis for name in names for axis in mesh_axes(name)))


def bytes_of_batch(program: Program) -> int:
    """Bytes of a device's share of a batch, and of a step's key."""
    total = 16
    leaves = jax.tree.leaves(program.batch(0))
    axes = jax.tree.leaves(program.batch_axes, is_leaf=is_axes)
    for leaf, names in zip(leaves, axes, strict=True):
        shares = num_shares(*_axes_of_rows([names]))
        size = jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize
        total += leaf.size * size // shares
    return total
