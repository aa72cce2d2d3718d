"""Meshes, and the one table from logical axis names to mesh axes.

Model code names the axes of an array ("batch", "embed", "heads"); the table says which mesh axes hold them; GSPMD
inserts the collectives. Changing a layout means changing the table or the mesh, never a model. Everything reads the
ambient mesh that `use_mesh` sets; without one, on a single device, every function here is the identity, which is the
sequential form of each layout. No other file names an `AxisType`.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Device, PyTree, UsageError

__all__ = [
    "AXES",
    "LAYOUTS",
    "RULES",
    "MeshSpec",
    "axes_like",
    "constrain",
    "gather",
    "in_role",
    "is_axes",
    "local",
    "make_mesh",
    "mesh_axes",
    "named_shardings",
    "num_shares",
    "partition",
    "place_rows",
    "platform",
    "rules_from",
    "scatter",
    "shard",
    "simulate_devices",
    "unsplit",
    "use_mesh",
    "whole_weights",
]

Axes = tuple[str | None, ...]

# Slowest link first: `jax.make_mesh` gives neighbours in the last axis the fastest connection. `inner` is the part of
# fsdp within the fastest links, an axis of its own so that a rule can name it alone.
AXES = ("stage", "data", "fsdp", "inner", "expert", "context", "tensor")

RULES: dict[str, tuple[str, ...]] = {
    # activations: `seq` in the residual stream, `seq_layer` inside attention, mlp and loss
    "batch": ("data", "fsdp", "inner", "expert"),
    "seq": ("context",),
    "seq_layer": ("context",),
    "time": (
        "context",
    ),  # of a video's tokens; while layers look along the one, the other is split
    "space": ("context",),
    # parameters: `embed` at rest, with the optimizer's state; `embed_weight` as a step holds them from its forward to
    # its backward pass; `embed_grad` what their gradients are summed into; `embed_product` as they are multiplied
    # (inner first: a share over more axes is then a slice of the share over fewer)
    "embed": ("inner", "fsdp"),
    "embed_weight": ("inner", "fsdp"),
    "embed_grad": ("inner", "fsdp"),
    "embed_product": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "slots": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "layers": (),
    "stage": ("stage",),
    "experts": ("expert",),
    # populations of independent things
    "population": ("data", "fsdp", "inner"),
    "envs": ("data", "fsdp", "inner"),
    "particles": ("data", "fsdp", "inner"),
}
"""Logical axis name -> mesh axes, for all pillars; `()` leaves an axis whole."""

LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "zero3": {},  # weights gathered layer by layer, and again in the backward pass (ZeRO-3, FSDP)
    "zero2": {
        "embed_weight": ()
    },  # weights gathered once a step and held; gradients summed into shares (ZeRO-2)
    # The same with gradients summed whole: only the optimizer and its state are split (ZeRO-1).
    "zero1": {"embed_weight": (), "embed_grad": ()},
    # Split inside a node, one copy a node (hybrid sharding).
    "hybrid": {"embed": ("inner",), "embed_weight": ("inner",), "embed_grad": ("inner",)},
    # Three levels: weights over the inner axis, gradients over fsdp, the optimizer over data too (arXiv:2501.04266).
    "nested": {"embed": ("inner", "fsdp", "data"), "embed_weight": ("inner",)},
    "stages": {"layers": ("stage",)},  # of a pipeline, which holds its own at rest
    # Beside tensor parallelism: the residual stream split over the sequence (arXiv:2205.05198).
    "sequence": {"seq": ("context", "tensor")},
    "2d": {
        "batch": ("data", "fsdp", "expert"),
        "embed_product": ("inner",),
    },  # products split by rows and columns
}
"""Named changes to `RULES`; "zero2+sequence" is both."""

# A user context is part of JAX's trace cache key: another table can never reuse a stale program.
_table = jax.make_user_context(tuple(RULES.items()))
_platform = jax.make_user_context(None)
_unsplit = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes. All axes always exist; at most one size may be -1, "all that is left".

    Attributes:
      data: Copies of the model, each with its own share of the batch.
      fsdp: Shares of batch and of parameters alike; what is gathered when is the layout's (`LAYOUTS`).
      inner: The part of fsdp within the fastest links, a divisor of it: the mesh then has fsdp / inner along `fsdp`
        and this many along `inner`.
      tensor: Shares of heads, mlp and vocabulary.
      context: Shares of the sequence.
      expert: Shares of the experts, and of the batch.
      stage: Pipeline stages.
    """

    data: int = field(1, AtLeast(1, also=(-1,)))
    fsdp: int = field(1, AtLeast(1, also=(-1,)))
    tensor: int = field(1, AtLeast(1, also=(-1,)))
    context: int = field(1, AtLeast(1, also=(-1,)))
    expert: int = field(1, AtLeast(1, also=(-1,)))
    stage: int = field(1, AtLeast(1, also=(-1,)))
    inner: int = field(1, AtLeast(1))

    def __post_init__(self):
        """Refuses what is no size."""
        check_fields(self, "mesh.")

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Returns the size of each axis for `num_devices` devices, in the order of `AXES`.

        Raises:
          UsageError: If the sizes do not multiply to `num_devices`, with the nearest legal choice.
        """
        sizes = {name: getattr(self, name) for name in AXES if name != "inner"}
        asked = " ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "data=1"
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise UsageError(
                f"mesh {asked} leaves {' and '.join(free)} open; only one axis may be -1."
            )
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if num_devices % fixed or (not free and fixed != num_devices):
            largest = max(
                (n for n, s in sizes.items() if s != -1), key=lambda n: (sizes[n], n == "data")
            )
            room, left = divmod(num_devices, fixed // sizes[largest])
            fits = [n for n in range(1, room + 1) if room % n == 0] if free else [room]
            legal = f"data={num_devices} and nothing else"
            if fits and room and not left:
                legal = f"{largest}={min(fits, key=lambda n: abs(n - sizes[largest]))}"
            raise UsageError(
                f"mesh {asked} needs {fixed} devices but {num_devices} are here; the nearest legal choice is {legal}."
            )
        if free:
            sizes[free[0]] = num_devices // fixed
        if sizes["fsdp"] % self.inner:
            legal = ", ".join(str(n) for n in range(1, sizes["fsdp"] + 1) if sizes["fsdp"] % n == 0)
            raise UsageError(
                f"mesh inner={self.inner} does not divide fsdp={sizes['fsdp']}; legal are {legal}."
            )
        sizes |= {"fsdp": sizes["fsdp"] // self.inner, "inner": self.inner}
        return {name: sizes[name] for name in AXES}


def make_mesh(spec: MeshSpec | None = None, devices: Sequence[Device] | None = None) -> Mesh:
    """Makes the mesh of a run: every axis of `AXES`, partitioned by GSPMD; a TPU's torus is split where it must be.

    Args:
      spec: Axis sizes; by default all devices on `data`.
      devices: Devices to use; by default all devices of all processes.

    Raises:
      UsageError: If the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = (spec or MeshSpec(data=-1)).sizes(len(devices))
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    except (
        NotImplementedError
    ):  # no axes of the torus multiply to an axis of the mesh: 8 x 8 of 4 x 4 x 4
        return Mesh(
            create_device_mesh(shape, devices, allow_split_physical_axes=True),
            AXES,
            axis_types=types,
        )


def rules_from(
    changes: Mapping[str, str] | None = None, layout: str = "zero3"
) -> dict[str, tuple[str, ...]]:
    """Returns `RULES` as `layout` changes them, then with changes such as `{"embed": "none", "batch": "data+fsdp"}`.

    A change of embed alone goes for embed_weight and embed_grad as well.

    Args:
      changes: Logical axis -> mesh axes joined by +, or none.
      layout: Names from `LAYOUTS`, joined by +.

    Raises:
      UsageError: For an unknown layout, logical axis or mesh axis.
    """
    rules = dict(RULES)
    for part in layout.split("+"):
        if part not in LAYOUTS:
            raise UsageError(
                f"layout {part!r} is unknown; legal are {', '.join(LAYOUTS)}, several joined by +."
            )
        rules |= LAYOUTS[part]
    changes = dict(changes or {})
    if "embed" in changes:
        changes |= {
            role: changes.get(role, changes["embed"]) for role in ("embed_weight", "embed_grad")
        }
    for name, value in changes.items():
        if name not in RULES:
            raise UsageError(
                f"rule for unknown axis {name!r}; logical axes are {', '.join(RULES)}."
            )
        rules[name] = () if value in ("", "none") else tuple(value.split("+"))
        for axis in set(rules[name]) - set(AXES):
            legal = f"{', '.join(AXES)}, several joined by +, or none"
            raise UsageError(
                f"rule {name}={value} names unknown mesh axis {axis!r}; legal are {legal}."
            )
    return rules


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: Mapping[str, tuple[str, ...]] | None = None):
    """Makes `mesh` and the rule table ambient for `shard`, `constrain` and everything built on them."""
    with (
        jax.set_mesh(mesh),
        _table(tuple((rules or RULES).items())),
        _platform(_kind(mesh.devices.flat[0].platform)),
    ):
        yield mesh


def whole_weights() -> contextlib.AbstractContextManager:
    """Has layers take weights for gathered; into what their gradients are summed stays as it is."""
    return _table(tuple((dict(_table.value) | {"embed_weight": ()}).items()))


def _ambient() -> Mesh | AbstractMesh:
    """The ambient mesh: abstract inside a trace, which is enough for sizes; none inside `unsplit`."""
    return jax.sharding.AbstractMesh((), ()) if _unsplit.value else jax.sharding.get_abstract_mesh()


def unsplit(fn: Callable) -> Callable:
    """Returns `fn` as it is without a mesh, its backward pass included: nothing in it says how arrays lie.

    For a network inside a program laid out by other rules, such as one device's own environments in `jax.shard_map`;
    elsewhere GSPMD takes the layout from the arguments. `fn` takes arrays by position. Reverse mode only.
    """

    def quiet(*args):
        with _unsplit(True):
            return fn(*args)

    def backward(pull, g):
        with _unsplit(True):
            return pull(g)

    moved = jax.custom_vjp(quiet)
    moved.defvjp(lambda *args: jax.vjp(quiet, *args), backward)
    return moved


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the mesh axes of size over 1 that hold a logical axis; "a+b": either of two; "a-b": the first alone."""
    table, mesh = dict(_table.value), _ambient()
    parts, less = (side.split("+") if side else [] for side in name.partition("-")[::2])
    if unknown := [part for part in (*parts, *less) if part not in table]:
        raise UsageError(
            f"unknown logical axis {unknown[0]!r}; the rule table knows {', '.join(table)}."
        )
    held, apart = (sum((table[part] for part in side), ()) for side in (parts, less))
    apart += (
        ("stage",) if "stage" in getattr(mesh, "manual_axes", ()) else ()
    )  # nothing is split within one
    return (
        ()
        if mesh.empty
        else tuple(axis for axis in held if axis not in apart and mesh.shape[axis] > 1)
    )


def num_shares(*axes: str) -> int:
    """Returns into how many shares these mesh axes split an array on the ambient mesh."""
    return math.prod(_ambient().shape[axis] for axis in axes)


def partition(axes: Axes, shape: Sequence[int] | None = None, name: str = "array") -> P:
    """Returns the `PartitionSpec` of an array with logical `axes` on the ambient mesh.

    Args:
      axes: One logical name, or None for "not split", per dimension.
      shape: If given, each split dimension must divide evenly.
      name: What to call the array in an error.

    Raises:
      UsageError: If two dimensions want the same mesh axis, or a dimension does not divide.
    """
    if shape is not None and len(shape) != len(axes):
        raise UsageError(
            f"{name} of shape {tuple(shape)} has {len(shape)} dimensions but axes {axes}."
        )
    owner: dict[str, str | None] = {}
    entries = []
    for dim, logical in enumerate(axes):
        over = () if logical is None else mesh_axes(logical)
        for axis in over:
            if axis in owner:
                raise UsageError(
                    f"{name} with axes {axes} uses mesh axis {axis!r} twice, for {owner[axis]!r} and "
                    f"{logical!r}; change one of the two rules."
                )
            owner[axis] = logical
        parts = num_shares(*over)
        if shape is not None and shape[dim] % parts:
            choices = " or ".join(
                str(n * parts) for n in (shape[dim] // parts, shape[dim] // parts + 1) if n
            )
            raise UsageError(
                f"{name}: dimension {dim} ({logical}) of size {shape[dim]} does not divide over "
                f"{'*'.join(over)}={parts}; the nearest legal sizes are {choices}."
            )
        entries.append(over[0] if len(over) == 1 else over or None)
    return P(*entries)


def is_axes(value: object) -> bool:
    """Whether a value is the axes of one array: a tuple of names and None."""
    return type(value) is tuple and all(a is None or isinstance(a, str) for a in value)


def named_shardings(tree: PyTree, axes: PyTree, mesh: Mesh | None = None) -> PyTree:
    """Returns the `NamedSharding` of each leaf of `tree` (arrays or shapes), given its logical axes."""
    mesh = mesh or jax.sharding.get_mesh()

    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    # The tree says what is a leaf: `()` is the axes of a scalar, and an empty part of a state.
    shardings = []
    for (path, leaf), names in zip(leaves, structure.flatten_up_to(axes), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shardings.append(NamedSharding(mesh, partition(names, leaf.shape, name)))
    return jax.tree.unflatten(structure, shardings)


def shard(tree: PyTree, axes: PyTree) -> PyTree:
    """Places each leaf of `tree` on the ambient mesh by its logical axes; the identity without a mesh.

    `tree` has arrays that are the same on every process; `axes`, of its structure, a tuple of logical names a leaf.
    """
    return tree if _ambient().empty else jax.device_put(tree, named_shardings(tree, axes))


def constrain(
    x: jax.Array, *axes: str | None, name: str = "activation", is_rest_open: bool = False
) -> jax.Array:
    """Tells GSPMD how `x` is split, by logical axis; its cotangent is split the same way.

    Args:
      x: Array.
      *axes: One logical name, or None for "not split", per dimension.
      name: What to call the array in an error.
      is_rest_open: Whether dimensions after those that are named may lie as they do.
    """
    if _ambient().empty:
        return x
    if not is_rest_open:
        return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, name))
    named = partition(axes, x.shape[: len(axes)], name)
    rest = (P.UNCONSTRAINED,) * (x.ndim - len(axes))
    return jax.lax.with_sharding_constraint(x, P(*named, *rest))


def in_role(axes: Axes, role: str) -> Axes:
    """Returns the axes with each name that has a row for `role` in the table replaced by that row's: embed_grad, ...

    The role "use" stands for a weight where it is multiplied: whole, but for what tensor parallelism splits.
    """
    table = dict(_table.value)
    if role == "use":
        return tuple(None if f"{name}_weight" in table else name for name in axes)
    return tuple(f"{name}_{role}" if f"{name}_{role}" in table else name for name in axes)


def gather(
    x: jax.Array, split: Axes, whole: Axes, grad: Axes | None = None, name: str = "activation"
) -> jax.Array:
    """Takes `x` to a layout that splits it less; its cotangent is summed into `grad`, by default `split`.

    `constrain` gives value and cotangent the same layout, which would sum the cotangent whole before it takes its
    share; and alone it lets GSPMD gather what `x` was cast from, twice the bytes. Reverse mode only.
    """
    if _ambient().empty:
        return x

    @jax.custom_vjp
    def moved(x):
        return constrain(constrain(x, *split, name=name), *whole, name=name)

    moved.defvjp(
        lambda x: (moved(x), None),
        lambda _, g: (constrain(g, *(grad or split), name=f"gradient of {name}"),),
    )
    return moved(x)


def scatter(x: jax.Array, whole: Axes, split: Axes, name: str = "activation") -> jax.Array:
    """Sums `x` into a layout that splits it more; its cotangent is gathered: the transpose of `gather`."""
    if _ambient().empty:
        return x

    @jax.custom_vjp
    def moved(x):
        return constrain(x, *split, name=name)

    moved.defvjp(
        lambda x: (moved(x), None),
        lambda _, g: (constrain(constrain(g, *split, name=name), *whole, name=name),),
    )
    return moved(x)


def local(
    fn: Callable, in_axes: Sequence[Axes], out_axes: PyTree, *, check: bool = True
) -> Callable:
    """Runs `fn` on each device's own block, by `jax.shard_map`; plain `fn` without a mesh.

    For what GSPMD cannot split or would split badly. `fn` needs no data of another block, or asks for it by collectives
    over `mesh_axes(...)`. `check=False` trusts the specs: for kernels, and where nothing is differentiated through.
    """
    if _ambient().empty:
        return fn

    def wrapped(*args):
        in_specs = tuple(
            partition(axes, x.shape, f"argument {i}")
            for i, (axes, x) in enumerate(zip(in_axes, args, strict=True))
        )
        out_specs = jax.tree.map(partition, out_axes, is_leaf=is_axes)
        rest = set(_ambient().axis_names) - set(
            getattr(_ambient(), "manual_axes", ())
        )  # in a stage, all others
        return jax.shard_map(
            fn, in_specs=in_specs, out_specs=out_specs, axis_names=rest, check_vma=check
        )(*args)

    return wrapped


def axes_like(tree: PyTree, params: PyTree, param_axes: PyTree) -> PyTree:
    """Returns logical axes for a tree that holds copies of `params` in places, such as an optimizer state.

    A leaf whose path ends in a parameter's path and whose shape is the parameter's gets the parameter's
    axes; every other leaf is not split.
    """
    flat_axes = jax.tree.leaves(param_axes, is_leaf=is_axes)
    known = {
        jax.tree_util.keystr(path): (leaf.shape, axes)
        for (path, leaf), axes in zip(
            jax.tree_util.tree_leaves_with_path(params), flat_axes, strict=True
        )
    }

    def find(path, leaf):
        found = (
            known.get(jax.tree_util.keystr(path[start:]), (None, None))
            for start in range(len(path))
        )
        return next(
            (axes for shape, axes in found if shape == leaf.shape), (None,) * len(leaf.shape)
        )

    return jax.tree_util.tree_map_with_path(find, tree)


def place_rows(rows: Callable[[slice], PyTree], num_rows: int, axes: Axes = ("batch",)) -> PyTree:
    """Makes global arrays, whose first dimensions `axes` split, of which each process reads only its own rows.

    Args:
      rows: `slice -> pytree of NumPy arrays` with that slice of the rows in front; pure, whichever process asks.
      num_rows: Rows of the global arrays.
      axes: Logical axes, the first of them that of the rows.
    """
    if _ambient().empty:
        return jax.tree.map(jax.numpy.asarray, rows(slice(0, num_rows)))
    mesh, over = jax.sharding.get_mesh(), partition(axes[:1], (num_rows,), "batch")
    indices: Any = NamedSharding(mesh, over).addressable_devices_indices_map((num_rows,)).values()
    starts, stops, _ = zip(*(index[0].indices(num_rows) for index in indices), strict=True)
    first, last = min(starts), max(stops)

    def place(block: np.ndarray) -> jax.Array:
        def piece(index):
            start, stop, _ = index[0].indices(num_rows)
            return block[(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback(
            (num_rows, *block.shape[1:]), NamedSharding(mesh, partition(axes)), piece
        )

    return jax.tree.map(place, rows(slice(first, last)))


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": of the ambient mesh's devices, else of JAX's default backend."""
    return _platform.value or _kind(jax.default_backend())


def _kind(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm") else name


def simulate_devices(count: int) -> None:
    """Gives this process `count` CPU devices; called before anything touches a device.

    For several devices, XLA's pool has four threads a device (`PJRT_NPROC`, unless it is set). By
    default it has one: a device that waits in two collectives of a program at once then holds the
    thread of a device that both wait for, and XLA ends the process after 40 s.
    """
    if count > 1:
        threads = max(4 * count, os.cpu_count() or 1)
        os.environ.setdefault("PJRT_NPROC", str(threads))
    jax.config.update("jax_num_cpu_devices", count)
