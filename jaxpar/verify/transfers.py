"""Arrays that cross devices in one step: what is declared, what a compiled program has, and where they differ."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.aot import hlo
from jaxpar.mesh import in_role, is_axes, mesh_axes, num_shares
from jaxpar.types import PyTree, UsageError

__all__ = [
    "KINDS",
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
      arrays: Number of arrays, those of loops counted each time.
      bytes: Bytes of the whole arrays on one device, together.
      why: Purpose; of found ones, the instruction.
      least: Share of the arrays and bytes that a program must have: 1 for a weight that a layer gathers
        whenever it is computed, since a program without that gather holds the weight whole.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    bytes: int
    why: str
    least: float = 0.0

    def times(self, count: int, least: float | None = None) -> "Transfer":
        """Returns the transfer of `count` microbatches, of which at least the share `least` must be found."""
        least = self.least if least is None else least
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
        out.append(
            Transfer(
                kind=kinds.get(found.kind, "exchange"),
                axes=("?",) if found.axes is None else found.axes,
                arrays=len(large) * found.trips,
                bytes=sum(large) * found.trips,
                why=f"{found.kind} {found.name}",
            )
        )
    return out


def sum_by_axis(transfers: Iterable[Transfer]) -> dict[tuple[str, str], tuple[int, int]]:
    """Sums transfers by (kind, mesh axis): arrays and bytes.

    One sum over two axes and two sums after each other count alike.
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
        slack = SLACK if most_bytes else 0
        if arrays > most_arrays or size > most_bytes + slack:
            out.append(f"{said}, where at most {most_arrays} of {most_bytes:,} are declared")
        elif arrays < least_arrays or size < least_bytes:
            out.append(f"{said}, where at least {least_arrays} of {least_bytes:,} are declared")
    return out


_VERB = {"gather": "are gathered", "sum": "are summed", "exchange": "are exchanged"}


def _least_of(transfer: Transfer) -> Transfer:
    """The part of a transfer that must be found."""
    arrays = math.floor(transfer.least * transfer.arrays)
    return transfer._replace(arrays=arrays, bytes=math.floor(transfer.least * transfer.bytes))


def allowed_by_axes(params: PyTree, axes: PyTree, batch_axes: PyTree) -> list[Transfer]:
    """Returns what a model that declares nothing may send on the ambient mesh, derived from its axes.

    Each parameter is gathered at most twice a step, over the axes that split it at rest and not where
    it is multiplied; its gradient is summed at most twice over the axes of the batch, and vectors four
    times, as a norm over the batch needs. Activations are summed over axes that split parameters where
    they are multiplied, such as tensor, as often as the program likes; they are never gathered, and
    nothing is exchanged.

    Args:
      params: Pytree of arrays or their shapes.
      axes: Logical axes of each.
      batch_axes: Logical axes of the arrays of a batch.
    """
    flat_axes = jax.tree.leaves(axes, is_leaf=is_axes)
    batch = _over_all(jax.tree.leaves(batch_axes, is_leaf=is_axes))
    out = []
    inside: set[str] = set()
    for (path, leaf), names in zip(
        jax.tree_util.tree_leaves_with_path(params), flat_axes, strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        multiplied = _over_all([in_role(names, "use")])
        at_rest = _over_all([names])
        inside.update(multiplied)
        # A stack of layers is gathered a layer at a time.
        pieces = leaf.shape[0] if len(leaf.shape) > 2 else 1
        size = leaf.size * leaf.dtype.itemsize // num_shares(*multiplied)
        gathered = tuple(axis for axis in at_rest if axis not in multiplied)
        if gathered:
            out.append(Transfer("gather", gathered, 2 * pieces, 2 * size, f"{name}, twice"))
        if batch:
            times = 2 if len(leaf.shape) > 1 else 4
            out.append(Transfer("sum", batch, times * pieces, times * size, f"gradient of {name}"))
    for axis in sorted(inside - set(batch)):
        out.append(Transfer("sum", (axis,), _ANY, _ANY, "activations, where they are multiplied in parts"))
    return out


_ANY = 10**15


def _over_all(leaves: Sequence[tuple[str | None, ...]]) -> tuple[str, ...]:
    """Mesh axes that split any of these arrays, each once."""
    names = dict.fromkeys(name for leaf in leaves for name in leaf if name)
    return tuple(dict.fromkeys(axis for name in names for axis in mesh_axes(name)))
