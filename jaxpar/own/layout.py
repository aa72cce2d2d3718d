"""Two rules for the axes of a model's parameters, read off its own program and shown before use.

1. **tensor.** Dimensions that the program adds, multiplies or sums together are one (`jaxpar.own.dimensions`). Of
   these, those are split over `tensor` that hold the most bytes of weights for each sum over devices that this costs,
   and no two of one weight: the best of what is found by taking one, then the others from the best down. So of two
   matrices in a row the first is split by its outputs and the second by its inputs, with one sum behind both; attention
   by heads; the embedding by its vocabulary; and never a residual stream, which all products but these sum over.
2. **fsdp.** Of each matrix the largest other dimension that divides.

Redco (arXiv:2310.16355) has the same two outcomes by rules for the kernels of flax's layers. A rule costs or saves time
and memory alone: GSPMD computes the same whatever it says.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import NamedSharding

from jaxpar.mesh import RULES, mesh_axes, num_shares, partition, unsplit
from jaxpar.own.dimensions import Dimension, follow
from jaxpar.own.model import Axes, OwnModel, path_of
from jaxpar.types import PyTree, UsageError

__all__ = ["ParamLayout", "OwnLayout", "lay_out"]


class ParamLayout(NamedTuple):
    """How one parameter lies.

    Attributes:
      path: Of the parameter.
      shape: Of the whole array.
      axes: A logical axis, or None, for each dimension.
      split: Mesh axes of each dimension, joined by "+"; "" where it is whole.
      bytes: On one device.
      why: What is not split that might have been, and why.
    """

    path: str
    shape: tuple[int, ...]
    axes: Axes
    split: tuple[str, ...]
    bytes: int
    why: str


@dataclasses.dataclass(frozen=True)
class OwnLayout:
    """A model with the axes of its parameters; as text, the table of them.

    Attributes:
      model: With its `names`.
      rows: A row a parameter, in the order of the tree's leaves.
    """

    model: OwnModel
    rows: tuple[ParamLayout, ...]

    @property
    def warnings(self) -> list[str]:
        """A sentence for each matrix that an axis of the mesh leaves whole."""
        return [f"{row.path} {list(row.shape)}: {row.why}" for row in self.rows if row.why]

    def __str__(self):
        """The table: parameter, shape, axes, bytes on a device; what is left whole; the sum."""
        cells = [("parameter", "shape", "axes", "bytes a device")]
        for row in self.rows:
            axes = ", ".join(
                f"{name}={over}" if over else "-"
                for name, over in zip(row.axes, row.split, strict=True)
            )
            cells.append(
                (
                    row.path,
                    " x ".join(map(str, row.shape)) or "scalar",
                    axes or "-",
                    f"{row.bytes:,}",
                )
            )
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        last = max(len(row[3]) for row in cells)
        rows = [[*(row[i].ljust(widths[i]) for i in range(3)), row[3].rjust(last)] for row in cells]
        lines = ["  ".join(row) for row in rows]
        total = sum(row.bytes for row in self.rows)
        return "\n".join(
            [
                *lines,
                f"{total:,} bytes of parameters a device",
                *(f"note: {w}" for w in self.warnings),
            ]
        )


def lay_out(model: OwnModel, batch: PyTree, given: Mapping[str, Axes] | None = None) -> OwnLayout:
    """Derives the axes of a model's parameters on the ambient mesh, from one trace of its loss.

    Args:
      model: Its `names` are replaced.
      batch: An example of what `loss` gets, arrays or shapes; their first dimension is that of the rows.
      given: Pattern of a path -> the axes of that parameter, instead of the rules': logical axes of
        `jaxpar.mesh.RULES`, "mlp" and its like for tensor and "embed" for fsdp, or None.

    Raises:
      UsageError: A pattern matches nothing or does not fit; a dimension does not divide; the mesh has an axis that no
        model of one's own uses; what `OwnModel` refuses.
    """
    for axis in ("stage", "context", "expert"):
        if not jax.sharding.get_abstract_mesh().empty and num_shares(axis) > 1:
            raise UsageError(f"mesh.{axis}={num_shares(axis)} splits nothing of such a model; legal are data, fsdp and "
                             "tensor.")  # fmt: skip
    model = dataclasses.replace(model, names=())
    state = jax.eval_shape(model.init, jax.random.key(0))
    paths = [
        path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path({"params": state.params})
    ]
    leaves, dimensions = jax.tree.leaves(state.params), _dimensions(model, state, batch)
    chosen = _tensor_dimensions(leaves, dimensions)
    given_axes = _axes_by_path(paths, leaves, given or {})
    names, notes = [], []
    for path, leaf, dims in zip(paths, leaves, dimensions, strict=True):
        axes, why = (
            (given_axes[path], "") if path in given_axes else _axes(leaf.shape, dims, chosen)
        )
        names.append(axes)
        notes.append(why)
    rows = map(_row, paths, leaves, names, notes)
    return OwnLayout(dataclasses.replace(model, names=tuple(names)), tuple(rows))


def _dimensions(model: OwnModel, state: PyTree, batch: PyTree) -> list[tuple[Dimension, ...]]:
    """Follows the parameters' dimensions through the loss."""

    def value(params, collections, batch, key):
        return model.valued(params, collections, batch, key)[0]

    arguments = (state.params, state.collections, batch, jax.random.key(0))
    jaxpr = jax.make_jaxpr(unsplit(value))(
        *arguments
    )  # what a device does alone, read as what all of them do
    counts = [len(jax.tree.leaves(part)) for part in arguments]
    reasons = ("", "of a collection", "of the batch", "")
    whole = [why for count, why in zip(counts, reasons, strict=True) for _ in range(count)]
    return follow(jaxpr, whole)[: counts[0]]


def _tensor_dimensions(
    leaves: Sequence[jax.ShapeDtypeStruct], dimensions: Sequence[tuple[Dimension, ...]]
) -> set[int]:
    """Returns the identities of the dimensions that tensor splits, by the first rule."""
    parts = num_shares(*mesh_axes("mlp"))
    if parts == 1:
        return set()
    held: dict[int, int] = {}
    known: dict[int, Dimension] = {}
    beside: dict[int, set[int]] = {}
    for leaf, dims in zip(leaves, dimensions, strict=True):
        for one in dims if len(dims) > 1 else ():
            known[id(one)] = one
            held[id(one)] = held.get(id(one), 0) + _bytes(leaf.shape, leaf)
            beside.setdefault(id(one), set()).update(
                id(other) for other in dims if other is not one
            )
            if sum(one is other for other in dims) > 1:
                one.whole = one.whole or "is both input and output of a weight"
    legal = [number for number, one in known.items() if not one.whole and one.divisor % parts == 0]
    worth = {number: held[number] / max(known[number].sums, 1) for number in legal}
    legal.sort(key=lambda number: (-worth[number], known[number].sums, known[number].first))

    def from_first(first: int) -> set[int]:
        chosen = {first}
        for number in legal:
            if not beside[number] & chosen:
                chosen.add(number)
        return chosen

    found = (from_first(first) for first in legal)
    return max(found, key=lambda chosen: sum(worth[number] for number in chosen), default=set())


def _axes(
    shape: tuple[int, ...], dims: tuple[Dimension, ...], chosen: set[int]
) -> tuple[Axes, str]:
    """Returns the axes of one parameter, and a sentence where a mesh axis leaves a matrix whole."""
    axes = [_name(one) if id(one) in chosen else None for one in dims]
    if len(shape) < 2:
        return tuple(axes), ""
    why, tensor, fsdp = [], num_shares(*mesh_axes("mlp")), num_shares(*mesh_axes("embed"))
    if tensor > 1 and not any(axes):
        reasons = []
        for size, one in zip(shape, dims, strict=True):
            indivisible = f"does not divide over tensor={tensor}" if one.divisor % tensor else ""
            part = f" in parts of {one.divisor}" if one.divisor != size else ""
            reasons.append(
                f"{size}{part} {one.whole or indivisible or 'costs more sums than what is split'}"
            )
        why.append(f"whole over tensor: {'; '.join(reasons)}")
    if fsdp > 1:
        open_dims = [
            i
            for i, one in enumerate(dims)
            if axes[i] is None and one.whole != "counts the steps of a scan"
        ]
        fits = [i for i in open_dims if shape[i] % fsdp == 0]
        if fits:
            axes[max(fits, key=lambda i: shape[i])] = "embed"
        else:
            why.append(f"whole over fsdp: nothing divides by {fsdp}")
    return tuple(axes), "; ".join(why)


def _name(one: Dimension) -> str:
    """Returns what a dimension that tensor splits is called, for rules of single runs."""
    return "heads" if one.batched else "vocab" if one.looked_up else "mlp"


def _axes_by_path(
    paths: Sequence[str], leaves: Sequence[jax.ShapeDtypeStruct], given: Mapping[str, Axes]
) -> dict[str, Axes]:
    """Returns the axes that the user gave, by path."""
    by_path: dict[str, Axes] = {}
    for pattern, axes in given.items():
        found = [
            (path, leaf)
            for path, leaf in zip(paths, leaves, strict=True)
            if fnmatch.fnmatchcase(path, pattern)
        ]
        if not found:
            raise UsageError(f"no parameter is called {pattern!r}; they are {', '.join(paths)}.")
        if unknown := [name for name in axes if name is not None and name not in RULES]:
            raise UsageError(
                f"{pattern!r} is given the unknown axis {unknown[0]!r}; legal are {', '.join(RULES)}."
            )
        for path, leaf in found:
            if len(axes) != len(leaf.shape):
                raise UsageError(
                    f"{path} of shape {leaf.shape} is given {len(axes)} axes; legal is one a dimension."
                )
            by_path[path] = tuple(axes)
    return by_path


def _row(path: str, leaf: jax.ShapeDtypeStruct, axes: Axes, why: str) -> ParamLayout:
    spec = partition(axes, leaf.shape, path)
    split = tuple("" if name is None else "+".join(mesh_axes(name)) for name in axes)
    mesh = jax.sharding.get_mesh()
    shape = leaf.shape if mesh.empty else NamedSharding(mesh, spec).shard_shape(leaf.shape)
    return ParamLayout(path, leaf.shape, axes, split, _bytes(shape, leaf), why)


def _bytes(shape: Sequence[int], leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(shape) * leaf.dtype.itemsize
