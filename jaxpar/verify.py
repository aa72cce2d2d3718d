"""Is a layout right? Each one against one device, in value, gradient and steps, and its collectives against the table.

    rows = verify(model, batch, batch_axes, every_layout(8))

Works on any model that is a loss of parameters with logical axes (`Model`).
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpar.aot import hlo
from jaxpar.aot.estimate import EFFORTS, compile_lowered
from jaxpar.mesh import MeshSpec, axes_like, make_mesh, named_shardings, platform, rules_from, shard, use_mesh
from jaxpar.types import Device, PyTree, UsageError

__all__ = [
    "FLOOR",
    "TOLERANCE",
    "Layout",
    "LayoutReport",
    "Model",
    "Transfer",
    "every_layout",
    "explained",
    "found_transfers",
    "leaf_errors",
    "sum_by_axis",
    "verify",
]

FLOOR = 1e-3
"""Share of the whole tree's norm under which a leaf's own norm is no measure."""

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
"""Between layouts only the order of sums differs; float64 tells rounding from bugs."""

NOISE = {"float32": 1e-6, "float64": 1e-14}
"""Share of the whole gradient's norm under which a leaf's gradient counts as zero but for rounding."""


class Layout(NamedTuple):
    """A mesh and the named changes of the rule table that go with it.

    Attributes:
      mesh: Sizes of its axes.
      name: Of `jaxpar.mesh.LAYOUTS`, joined by +.
      schedule: How microbatches pass through its stages, for `Model.gradient` to know; empty without stages.
    """

    mesh: MeshSpec
    name: str = "zero3"
    schedule: str = ""

    @property
    def num_devices(self) -> int:
        """Devices that the mesh needs; `inner` is a part of `fsdp`."""
        return math.prod(size for name, size in dataclasses.asdict(self.mesh).items() if name != "inner")

    def __str__(self):
        """Such as "data2.fsdp4 zero2"."""
        sizes = [(field.name, getattr(self.mesh, field.name)) for field in dataclasses.fields(self.mesh)]
        return ".".join(f"{name}{size}" for name, size in sizes if size != 1) + f" {self.name} {self.schedule}".rstrip()


class Model(NamedTuple):
    """What is verified, in one dtype.

    Attributes:
      params: Pytree of floating host arrays.
      axes: Logical axes of each, as in `jaxpar.mesh.RULES`.
      loss: (params, batch) -> scalar; pure, and of the params' dtype throughout.
      optimizer: Made three steps with. Adam's eps should be over the rounding of the gradients (1e-6, say): an entry
        whose gradient is zero but for rounding moves by a whole learning rate otherwise, either way.
      gradient: (params, batch, layout) -> (loss, its gradient), where it is not `loss` that is differentiated, as of a
        pipeline; of `Layout(MeshSpec())`, which all are compared with, its plain form.
    """

    params: PyTree
    axes: PyTree
    loss: Callable[[PyTree, PyTree], jax.Array]
    optimizer: optax.GradientTransformation
    gradient: Callable[[PyTree, PyTree, Layout], tuple[jax.Array, PyTree]] | None = None


class Transfer(NamedTuple):
    """Arrays that cross devices in one step; scalars are left out.

    Attributes:
      kind: "gather" (all-gather), "sum" (all-reduce, or the reduce-scatter that a compiler makes of one and a slice),
        or "exchange" (all-to-all and permutations).
      axes: Mesh axes that it spans.
      arrays: How many, those of loops counted each time.
      bytes: Of the whole arrays on one device, together.
      why: What it is for; of found ones, the instruction.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    bytes: int
    why: str


@dataclasses.dataclass
class LayoutReport:
    """What one layout in one dtype gave.

    Attributes:
      layout: The layout.
      dtype: Of parameters and loss; or the topology that the program was compiled for.
      refused: Why the layout is not legal for this model, in the error's words; "" if it is.
      loss: Relative error of the loss against one device.
      gradient: Error of the worst gradient leaf, by `leaf_errors`.
      worst: Its path.
      steps: Error of the worst leaf of parameters and optimizer state after the steps.
      worst_step: Its path.
      transfers: Found collectives by (kind, mesh axis): arrays and bytes a step.
      kinds: HLO's own names by mesh axes, with arrays a step.
      breaches: What does not hold, a sentence each.
    """

    layout: Layout
    dtype: str
    refused: str = ""
    loss: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    steps: float = 0.0
    worst_step: str = ""
    transfers: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    kinds: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    breaches: list[str] = dataclasses.field(default_factory=list)


def every_layout(num_devices: int, axes: Sequence[str] = ("data", "fsdp", "tensor", "context")) -> list[Layout]:
    """Returns every factorisation of the devices over the axes, under the default table."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    sizes = (s for s in itertools.product(divisors, repeat=len(axes)) if math.prod(s) == num_devices)
    return [Layout(MeshSpec(**dict(zip(axes, size, strict=True)))) for size in sizes]


def leaf_errors(got: PyTree, want: PyTree, floor: float = FLOOR) -> dict[str, float]:
    """Returns the error of each floating leaf by its path: `|got - want| / max(|want|, floor |tree|)`.

    Euclidean norms, in float64. A plain relative error means nothing for a leaf whose true value is zero, as the
    gradient of an attention key bias is: both sides hold rounding noise of the sums that cancel, which is as
    large as the tree, not as the leaf. A leaf that is not finite on either side has an infinite error.
    """
    got_leaves, want_leaves = _floats(got), _floats(want)
    if got_leaves.keys() != want_leaves.keys() or not want_leaves:
        raise UsageError("two trees that differ in structure, or hold no floating leaf, cannot be compared.")
    whole = math.sqrt(sum(float(np.sum(x**2)) for x in want_leaves.values()))
    out = {}
    for name, right in want_leaves.items():
        if got_leaves[name].shape != right.shape:
            raise UsageError(f"{name} has shape {got_leaves[name].shape} on one side and {right.shape} on the other.")
        scale = max(float(np.linalg.norm(right)), floor * whole) or 1.0
        error = float(np.linalg.norm(got_leaves[name] - right)) / scale
        out[name] = error if math.isfinite(error) else math.inf
    return out


def verify(
    model: Callable[[str], Model],
    batch: Callable[[int], PyTree],
    batch_axes: PyTree,
    layouts: Iterable[Layout],
    *,
    rules: Mapping[str, str] | None = None,
    declared: Callable[[Layout], list[Transfer]] | None = None,
    dtypes: Sequence[str] = ("float32", "float64"),
    steps: int = 3,
    topology: Sequence[Device] | None = None,
    report: Callable[[LayoutReport], None] | None = None,
) -> list[LayoutReport]:
    """Runs loss, gradient and `steps` optimizer steps under each layout and compares them with one device's.

    Leaves whose gradient is zero but for rounding (`NOISE`) are left out of the comparison after the steps: Adam
    turns that rounding into moves of a whole learning rate.

    Args:
      model: dtype -> `Model`; the same values in each dtype.
      batch: Step number -> pytree of host arrays.
      batch_axes: Their logical axes.
      layouts: What to verify; a layout that is not legal for the model gives a row that says so.
      rules: Changes of the rule table, for all layouts.
      declared: Layout -> the collectives of one step, called under its mesh and rules. Found ones may be fewer, never
        more. Without it, `explained` says what the table allows.
      dtypes: Of "float32" and "float64".
      steps: Optimizer steps to compare after.
      topology: Compile-only devices; each layout's collectives are judged there as well.
      report: Called with each row as it is made.

    Returns:
      A row a layout and dtype, and one for the topology. Compile time dominates the cost: one program each.
    """
    rows = []

    @functools.cache
    def one(dtype: str):
        """The outcome on one device, computed for the first layout that turns out to be legal."""
        alone = _Case(Layout(MeshSpec()), batch, batch_axes, rules_from(rules), declared)
        return _outcome(model(dtype), alone, steps)[0]

    def add(row: LayoutReport) -> None:
        rows.append(row)
        if report:
            report(row)

    for layout in layouts:
        case = _Case(layout, batch, batch_axes, rules_from(rules, layout.name), declared)
        for dtype in dtypes:
            with jax.enable_x64(dtype == "float64"):
                add(_compare(case, dtype, model(dtype), steps, one))
            if rows[-1].refused:
                break
        if topology is not None and not rows[-1].refused:
            add(_judge_topology(case, model("float32"), topology))
    return rows


class _Case(NamedTuple):
    """What all rows of a layout share."""

    layout: Layout
    batch: Callable[[int], PyTree]
    batch_axes: PyTree
    rules: Mapping[str, tuple[str, ...]]
    declared: Callable[[Layout], list[Transfer]] | None


def _compare(case: _Case, dtype: str, model: Model, steps: int, one: Callable[[str], PyTree]) -> LayoutReport:
    """Makes the row of one layout and dtype."""
    row = LayoutReport(case.layout, dtype)
    try:
        (value, grads, state), compiled, mesh = _outcome(model, case, steps)
    except UsageError as error:
        row.refused = str(error)
        return row
    one_value, one_grads, one_state = one(dtype)
    row.loss = abs(float(value) - float(one_value)) / (abs(float(one_value)) or 1.0)
    row.worst, row.gradient = _worst(leaf_errors(grads, one_grads))
    # Parameters and moments differ in size by orders, so each is measured by its own norm.
    errors = leaf_errors(state["params"], one_state["params"]) | leaf_errors(state["optimizer"], one_state["optimizer"])
    noise = _noise(one_grads, NOISE[dtype])
    row.worst_step, row.steps = _worst({path: e for path, e in errors.items() if not f"/{path}".endswith(noise)})
    for what, error in (
        ("the loss", row.loss),
        (f"the gradient of {row.worst}", row.gradient),
        (f"{row.worst_step} after {steps} steps", row.steps),
    ):
        if not error <= TOLERANCE[dtype]:
            row.breaches.append(f"{what} is off by {error:.1e}, over {TOLERANCE[dtype]:g}")
    _judge_transfers(row, compiled.as_text() or "", mesh, model, case)
    return row


def _worst(errors: dict[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: item[1], default=("", 0.0))


def _judge_topology(case: _Case, model: Model, devices: Sequence[Device]) -> LayoutReport:
    """Makes the row of a program compiled for devices that are not here."""
    row = LayoutReport(case.layout, devices[0].device_kind)
    try:
        mesh = make_mesh(case.layout.mesh, devices)
        with use_mesh(mesh, case.rules):
            step, state, shardings = _program(model, case)
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, case.batch(0)))
            compiled = compile_lowered(step.lower(*shapes), EFFORTS["low"])
    except UsageError as error:
        row.refused = str(error)
        return row
    _judge_transfers(row, compiled.as_text() or "", mesh, model, case)
    return row


def _program(model: Model, case: _Case):
    """Returns the jitted (state, batch) -> (loss, gradient, next state), the state's shapes, and both shardings."""

    def step(state, batch):
        if model.gradient is None:
            value, grads = jax.value_and_grad(model.loss)(state["params"], batch)
        else:
            value, grads = model.gradient(state["params"], batch, case.layout)
        updates, opt_state = model.optimizer.update(grads, state["optimizer"], state["params"])
        return value, grads, {"params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}

    shapes = jax.eval_shape(lambda p: {"params": p, "optimizer": model.optimizer.init(p)}, model.params)
    axes = {"params": model.axes, "optimizer": axes_like(shapes["optimizer"], model.params, model.axes)}
    shardings = (named_shardings(shapes, axes), named_shardings(case.batch(0), case.batch_axes))
    return jax.jit(step, in_shardings=shardings, out_shardings=(None, None, shardings[0])), shapes, shardings


def _outcome(model: Model, case: _Case, steps: int):
    """Runs a layout: ((loss, gradient, last state) on the host, the compiled program, the mesh)."""
    mesh = make_mesh(case.layout.mesh, jax.devices()[: case.layout.num_devices])
    with use_mesh(mesh, case.rules):
        step, _, (state_shardings, _) = _program(model, case)
        init = jax.jit(lambda p: {"params": p, "optimizer": model.optimizer.init(p)}, out_shardings=state_shardings)
        state, first = init(model.params), shard(case.batch(0), case.batch_axes)
        # What runs three times needs no optimised machine code; sharding and buffers are decided before that.
        quick: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        compiled = step.lower(state, first).compile(compiler_options=quick if platform() == "cpu" else None)
        value, grads, state = compiled(state, first)
        for number in range(1, steps):
            _, _, state = compiled(state, shard(case.batch(number), case.batch_axes))
        return jax.device_get((value, grads, state)), compiled, mesh


def _noise(grads: PyTree, share: float) -> tuple[str, ...]:
    """Returns the paths, each after a slash, of the leaves whose gradient is zero but for rounding."""
    norms = {name: float(np.linalg.norm(x)) for name, x in _floats(grads).items()}
    whole = math.sqrt(sum(norm**2 for norm in norms.values()))
    return tuple(f"/{name}" for name, norm in norms.items() if norm <= share * whole)


def _floats(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns {path: float64 array} of the floating leaves."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    out = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in flat}
    return {name: x.astype(np.float64) for name, x in out.items() if x.dtype.kind == "f" or x.dtype.name == "bfloat16"}


# ---------------------------------------------------------------- collectives

_KIND = {"all-gather": "gather", "all-reduce": "sum", "reduce-scatter": "sum"}


def found_transfers(text: str, mesh: Mesh) -> list[Transfer]:
    """Returns the collectives of a compiled program as `Transfer`; those of scalars alone are left out."""
    out = []
    for c in hlo.collectives(text, mesh):
        arrays = [(shape, dtype) for shape, dtype in zip(c.shapes, c.dtypes, strict=True) if shape]
        if arrays:
            shapes, dtypes = zip(*arrays, strict=True)
            size = c._replace(shapes=shapes, dtypes=dtypes).bytes
            axes = c.axes if c.axes is not None else ("?",)
            kind = _KIND.get(c.kind, "exchange")
            out.append(Transfer(kind, axes, len(arrays) * c.trips, size * c.trips, f"{c.kind} {c.name}"))
    return out


def sum_by_axis(transfers: Iterable[Transfer]) -> dict[tuple[str, str], tuple[int, int]]:
    """Sums transfers by (kind, mesh axis). One sum over two axes and two sums after each other count alike."""
    out: dict[tuple[str, str], tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for t in transfers:
        for axis in t.axes:
            arrays, size = out[t.kind, axis]
            out[t.kind, axis] = (arrays + t.arrays, size + t.bytes)
    return dict(out)


def explained(model: Model, batch_axes: PyTree, rules: Mapping[str, tuple[str, ...]]) -> set[tuple[str, str]]:
    """Returns the (kind, mesh axis) pairs that a rule table can cause in a model that declares no transfers.

    Sums over every axis that splits a parameter, the batch or a sequence; gathers over every axis that splits a
    parameter or a sequence; no exchange.
    """

    def over(names: Iterable[str]) -> set[str]:
        return {axis for row, axes in rules.items() if row.partition("_")[0] in names or row in names for axis in axes}

    gathers = over({"seq"} | _names(model.axes))
    sums = gathers | over(_names(batch_axes))
    return {("sum", axis) for axis in sums} | {("gather", axis) for axis in gathers}


def _names(axes: PyTree) -> set[str]:
    """Returns the logical names in a tree of axes."""
    return {name for name in jax.tree.leaves(axes) if isinstance(name, str)}


def _judge_transfers(row: LayoutReport, text: str, mesh: Mesh, model: Model, case: _Case) -> None:
    """Fills in a row's collectives, and what is wrong with them."""
    found = found_transfers(text, mesh)
    row.transfers = sum_by_axis(found)
    for t in found:
        key = (t.why.split()[0], "+".join(t.axes))
        row.kinds[key] = row.kinds.get(key, 0) + t.arrays
    if case.declared is None:
        allowed = dict.fromkeys(explained(model, case.batch_axes, case.rules), (math.inf, math.inf))
    else:
        with use_mesh(mesh, case.rules):
            allowed = sum_by_axis(case.declared(case.layout))
    for (kind, axis), (arrays, size) in sorted(row.transfers.items()):
        most = allowed.get((kind, axis), (0, 0))
        if arrays > most[0] or size > most[1]:
            said = f"{arrays} arrays of together {size:,} bytes {VERB[kind]} over {axis}"
            row.breaches.append(f"{said}, where the table declares {most[0]} of {most[1]:,}")


VERB = {"gather": "are gathered", "sum": "are summed", "exchange": "are exchanged"}
