"""Collectives of a compiled program, and where they differ from what is declared."""

import math
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh

from jaxpar.aot import hlo
from jaxpar.transfers import SMALL, Transfer, sum_by_axis

__all__ = []

KINDS = ("gather", "sum", "exchange")

SLACK = 1024
"""Bytes a step of such arrays that compilers may join with one that is declared, by kind and mesh axis."""


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


def _foreign_sizes(
    kind: str, axis: str, found: Sequence[Transfer], declared: Sequence[Transfer]
) -> list[str]:
    """Sentences for arrays over an axis that have the size of none of those that are declared."""
    legal = [
        transfer.sizes for transfer in declared if transfer.kind == kind and axis in transfer.axes
    ]
    if not all(legal):
        return []
    known = {size for sizes in legal for size in sizes}
    strange = [
        size
        for one in found
        if one.kind == kind and axis in one.axes
        for size in one.sizes
        if size not in known
    ]
    if not strange:
        return []
    largest = max(strange)
    return [
        f"an array of {largest:,} entries {_VERB[kind].replace('are', 'is')} over {axis}, which is no parameter"
    ]


def _least_of(transfer: Transfer) -> Transfer:
    """The part of a transfer that must be found."""
    arrays = math.floor(transfer.least * transfer.arrays)
    return transfer._replace(arrays=arrays, bytes=math.floor(transfer.least * transfer.bytes))
