"""Arrays that cross devices in one step: what is declared, what a compiled program has, and where they differ."""

import collections
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.aot import hlo
from jaxpar.mesh import in_role, is_axes, mesh_axes, num_shares
from jaxpar.types import PyTree

__all__ = [
    "Transfer",
    "allowed_by_axes",
    "breaches_of",
    "found_transfers",
    "sum_by_axis",
]

KINDS = ("gather", "sum", "exchange")

SMALL = 64
"""Bytes of an array up to which it is not judged: counts, norms and means, alone or joined by a compiler."""

SLACK = 1024
"""Bytes a step of such arrays that compilers may join with one that is declared, by kind and mesh axis."""


class Transfer(NamedTuple):
    """Arrays that cross devices in one step; scalars and arrays of at most `SMALL` bytes are left out.

    Attributes:
      kind: "gather" (all-gather), "sum" (all-reduce, or the reduce-scatter that a compiler makes of
        one and a slice), or "exchange" (all-to-all and permutations).
      axes: Mesh axes that it spans.
      arrays: Number of arrays; arrays of loops count each time.
      bytes: Bytes of the whole arrays on one device, together.
      why: Purpose; of found ones, the instruction.
      least: Share of the arrays and bytes that a program must have. It is 1 for a weight that a layer
        gathers whenever it is computed: a program without that gather holds the weight whole.
      sizes: Numbers of entries of its arrays; of declared ones, those that they may have, () for any.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    bytes: int
    why: str
    least: float = 0.0
    sizes: tuple[int, ...] = ()

    def times(self, count: int, least: float | None = None) -> "Transfer":
        """Returns the transfer of `count` microbatches; at least the share `least` must be found."""
        if least is None:
            least = self.least
        return self._replace(arrays=count * self.arrays, bytes=count * self.bytes, least=least)


def found_transfers(text: str, mesh: Mesh) -> list[Transfer]:
    """Returns the collectives of a compiled program as `Transfer`, without arrays of at most `SMALL` bytes."""
    kinds = {"all-gather": "gather", "all-reduce": "sum", "reduce-scatter": "sum"}
    out = []
    for found in hlo.collectives(text, mesh):
        arrays = [
            found._replace(shapes=(shape,), dtypes=(dtype,)).bytes
            for shape, dtype in zip(found.shapes, found.dtypes, strict=True)
        ]
        large = [size for size in arrays if size > SMALL]
        if not large:
            continue
        axes = found.axes
        if axes is None:
            axes = ("?",)
        out.append(
            Transfer(
                kind=kinds.get(found.kind, "exchange"),
                axes=axes,
                arrays=len(large) * found.trips,
                bytes=sum(large) * found.trips,
                why=f"{found.kind} {found.name}",
                sizes=tuple(math.prod(shape) for shape in found.shapes),
            )
        )
    return out


def sum_by_axis(transfers: Iterable[Transfer]) -> dict[tuple[str, str], tuple[int, int]]:
    """Sums transfers by (kind, mesh axis): arrays and bytes.

    One sum over two axes counts the same as two sums after each other.
    """
    out: dict[tuple[str, str], tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for transfer in transfers:
        for axis in transfer.axes:
            arrays, size = out[transfer.kind, axis]
            out[transfer.kind, axis] = (arrays + transfer.arrays, size + transfer.bytes)
    return dict(out)


def breaches_of(
    found: Iterable[Transfer],
    declared: Sequence[Transfer],
    allow: Iterable[str] = (),
) -> list[str]:
    """Returns a sentence for each kind and mesh axis over which a program sends more, or gathers less, than declared.

    Args:
      found: Collectives of the program.
      declared: What it may send, and must.
      allow: Kinds and axes that are not judged, such as "gather over tensor".
    """
    found = list(found)
    most = sum_by_axis(declared)
    least = sum_by_axis(_least_of(transfer) for transfer in declared)
    seen = sum_by_axis(found)
    not_judged = set(allow)
    out = []
    for kind, axis in sorted({*seen, *least}):
        if f"{kind} over {axis}" in not_judged:
            continue
        arrays, size = seen.get((kind, axis), (0, 0))
        most_arrays, most_bytes = most.get((kind, axis), (0, 0))
        least_arrays, least_bytes = least.get((kind, axis), (0, 0))
        said = f"{arrays} arrays of together {size:,} bytes {_VERB[kind]} over {axis}"
        slack = 0
        if most_bytes:
            slack = SLACK
        if arrays > most_arrays or size > most_bytes + slack:
            out.append(f"{said}, where at most {most_arrays} of {most_bytes:,} are declared")
        elif arrays < least_arrays or size < least_bytes:
            out.append(f"{said}, where at least {least_arrays} of {least_bytes:,} are declared")
        else:
            out += _foreign_sizes(kind, axis, found, declared)
    return out


_VERB = {"gather": "are gathered", "sum": "are summed", "exchange": "are exchanged"}


def _foreign_sizes(kind: str, axis: str, found: Sequence[Transfer], declared: Sequence[Transfer]) -> list[str]:
    """Sentences for arrays over an axis that have the size of none of those that are declared."""
    legal = [transfer.sizes for transfer in declared if transfer.kind == kind and axis in transfer.axes]
    if not all(legal):
        return []
    known = {size for sizes in legal for size in sizes}
    strange = [
        size for one in found if one.kind == kind and axis in one.axes for size in one.sizes if size not in known
    ]
    if not strange:
        return []
    largest = max(strange)
    return [f"an array of {largest:,} entries {_VERB[kind].replace('are', 'is')} over {axis}, which is no parameter"]


def _least_of(transfer: Transfer) -> Transfer:
    """The part of a transfer that must be found."""
    arrays = math.floor(transfer.least * transfer.arrays)
    return transfer._replace(arrays=arrays, bytes=math.floor(transfer.least * transfer.bytes))


def allowed_by_axes(params: PyTree, axes: PyTree, batch_axes: PyTree) -> list[Transfer]:
    """Returns what a model that declares nothing may send on the ambient mesh, derived from its axes.

    Each parameter is gathered at most twice a step, whole or a layer of its stack at a time, over the
    axes that split it at rest and not where it is multiplied. Activations are never gathered. Any
    number of sums is legal: gradients over the axes of the batch, and activations over axes that split
    parameters where they are multiplied. Exchanges carry at most two copies of the
    parameters that an axis splits: GSPMD puts the gradient of a look-up where it likes and sends it on.

    Args:
      params: Pytree of arrays or their shapes.
      axes: Logical axes of each.
      batch_axes: Logical axes of the arrays of a batch.
    """
    flat_axes = jax.tree.leaves(axes, is_leaf=is_axes)
    batch = _over_all(jax.tree.leaves(batch_axes, is_leaf=is_axes))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    out = []
    inside: set[str] = set()
    for (path, leaf), names in zip(leaves, flat_axes, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        at_rest = _over_all([names])
        multiplied = _over_all([in_role(names, "use")])
        inside.update(multiplied)
        # A stack of layers may be gathered a layer at a time.
        pieces = 1
        if len(leaf.shape) > 2:
            pieces = leaf.shape[0]
        size = leaf.size * leaf.dtype.itemsize // num_shares(*multiplied)
        # Vectors may be gathered wherever they are split: biases and scales cost nothing.
        kept = ()
        if len(leaf.shape) > 1:
            kept = multiplied
        gathered = tuple(axis for axis in at_rest if axis not in kept)
        entries = leaf.size // num_shares(*kept)
        if gathered:
            size = entries * leaf.dtype.itemsize
            sizes = _sizes_on_the_way(entries, gathered, pieces)
            out.append(Transfer("gather", gathered, 2 * pieces, 2 * size, f"{name}, twice", sizes=sizes))
        for axis in at_rest:
            out.append(Transfer("exchange", (axis,), _ANY, 2 * size, f"gradient of {name}"))
    for axis in sorted(inside | set(batch)):
        out.append(Transfer("sum", (axis,), _ANY, _ANY, "gradients, and activations in parts"))
    return out


def _sizes_on_the_way(entries: int, axes: tuple[str, ...], pieces: int) -> tuple[int, ...]:
    """Entries of a parameter as it is gathered over some of the axes that split it, or over all, whole or a layer."""
    found = set()
    for count in range(len(axes)):
        for left in itertools.combinations(axes, count):
            found |= {entries // num_shares(*left), entries // num_shares(*left) // pieces}
    return tuple(sorted(found))


_ANY = 10**15


def _over_all(leaves: Sequence[tuple[str | None, ...]]) -> tuple[str, ...]:
    """Mesh axes that split any of these arrays, each once."""
    names = dict.fromkeys(name for leaf in leaves for name in leaf if name)
    return tuple(dict.fromkeys(axis for name in names for axis in mesh_axes(name)))
