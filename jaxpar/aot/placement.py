"""Split, broadcast and partial: how an array lies along each mesh axis, and what converts one into another.

A placement is a mapping from mesh axis to `Split(dim)`, `Broadcast()` or `Partial(op)`; an axis that it does not name
is broadcast. Where several axes split one dimension, the first in the mapping is the outermost, as in a
`PartitionSpec`. `conversion` finds the collectives with the fewest bytes; `convert` carries them out.

The three words and the costs of single steps are OneFlow's (https://arxiv.org/abs/2110.15032, table 2); the search
over several axes, with slices, gathers, all-to-alls and permutes, is that of memory-efficient redistribution
(https://arxiv.org/abs/2112.01075), without its bound on memory.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import UsageError

__all__ = ["OPS", "Broadcast", "ConversionStep", "Partial", "Placement", "Split", "conversion"]

OPS = ("sum", "max", "min")


@dataclasses.dataclass(frozen=True)
class Split:
    """Each device along the axis holds a block of dimension `dim`, in order."""

    dim: int = field(legal=AtLeast(0))

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class Broadcast:
    """Each device along the axis holds the same values."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each device along the axis holds an array of the full shape; the value is their `op`, entry by entry.

    Raises:
      UsageError: If `op` is not one of `OPS`.
    """

    op: str = "sum"

    def __post_init__(self):
        if self.op not in OPS:
            raise UsageError(
                f"a partial value of op {self.op!r} is unknown; legal are {', '.join(OPS)}."
            )


Placement = Mapping[str, Split | Broadcast | Partial]


@dataclasses.dataclass(frozen=True)
class ConversionStep:
    """One step of a conversion.

    Attributes:
      kind: "all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute", or one of the local
        steps "slice" (broadcast to split), "pad" (split to partial) and "mask" (broadcast to partial).
      axes: The mesh axes that it runs over, as one group.
      bytes: What each device sends; of a collective-permute, what a device sends that does not keep its block.
      why: A sentence with the cost's formula.
      after: The placement after this step, without broadcast axes.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    why: str
    after: Placement


_WHY = {
    "slice": "each of n={n} keeps its block of what it has: 0",
    "pad": "each of n={n} puts its block among identities of {op}: 0",
    "mask": "the first of n={n} keeps the values, the others hold the identity of {op}: 0",
    "all-gather": "the blocks of the other n-1 come to each: (n-1)/n of the {after} bytes it then has, n={n}",
    "all-to-all": "each keeps one of n pieces and sends the rest: (n-1)/n of its {before} bytes, n={n}",
    "reduce-scatter": "each reduces one of n blocks for all: (n-1)/n of its {before} bytes, n={n}",
    "all-reduce": "a reduce-scatter, then an all-gather: 2(n-1)/n of its {before} bytes, n={n}",
    "collective-permute": "the same blocks on other devices: all of its {before} bytes",
}


class _State(NamedTuple):
    """A placement as the search sees it, without axes of size 1; `nests` are outermost first."""

    nests: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    op: str | None = None

    def placement(self) -> dict[str, Split | Broadcast | Partial]:
        split = {axis: Split(dim) for dim, nest in enumerate(self.nests) for axis in nest}
        return {**split, **{axis: Partial(self.op or "sum") for axis in self.partial}}


@dataclasses.dataclass(frozen=True)
class _View:
    """The array and the axes that the search may use."""

    shape: tuple[int, ...]
    itemsize: int
    sizes: Mapping[str, int]
    ops: tuple[str, ...]

    def count(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def fits(self, state: _State) -> bool:
        return not any(
            size % self.count(nest) for size, nest in zip(self.shape, state.nests, strict=True)
        )

    def local_bytes(self, state: _State) -> int:
        return self.itemsize * math.prod(self.shape) // math.prod(map(self.count, state.nests))


def conversion(
    source: Placement,
    target: Placement,
    shape: Sequence[int],
    dtype: DTypeLike,
    sizes: Mapping[str, int],
) -> list[ConversionStep]:
    """Returns the steps that turn `source` into `target` with the fewest bytes sent a device.

    Among equals the one with the fewest collectives, then the fewest steps, wins. Only the innermost axes of a
    dimension can be gathered or moved, and an axis enters a dimension as its innermost; a permute changes that order.
    An axis that is broadcast in both placements is not used. Intermediate placements that do not divide are left out.
    Cost: exhaustive; milliseconds for two axes, and to be kept to four.

    Args:
      source: What the array's placement is.
      target: What it shall be.
      shape: Of the dense array, without leading dimensions of partial axes.
      dtype: Of its entries.
      sizes: Size of each mesh axis, such as `mesh.shape`.

    Raises:
      UsageError: For an unknown axis, a dimension that is not there or does not divide, or two ops in one placement.
    """
    shape, dtype = tuple(shape), jnp.dtype(dtype)
    first, last = (_state(placement, shape, dtype, sizes) for placement in (source, target))
    names = {
        axis for state in (first, last) for axis in (*itertools.chain(*state.nests), *state.partial)
    }
    axes = {axis: size for axis, size in sizes.items() if axis in names}
    view = _View(shape, dtype.itemsize, axes, tuple(op for op in OPS if op in (first.op, last.op)))
    return [_step(view, *edge) for edge in _cheapest(view, first, last)]


def _state(
    placement: Placement, shape: tuple[int, ...], dtype: DTypeLike, sizes: Mapping[str, int]
) -> _State:
    """Checks a placement and brings it into the search's form."""
    nests: list[tuple[str, ...]] = [()] * len(shape)
    ops = sorted({where.op for where in placement.values() if isinstance(where, Partial)})
    if len(ops) > 1:
        raise UsageError(
            f"a placement with partial ops {' and '.join(ops)} depends on their order; use one op."
        )
    if ops and not jnp.issubdtype(dtype, jnp.number):
        raise UsageError(f"a partial value needs numbers, not {dtype}.")
    for axis, where in placement.items():
        if axis not in sizes:
            raise UsageError(
                f"placement names unknown mesh axis {axis!r}; the mesh has {', '.join(sizes)}."
            )
        if isinstance(where, Split):
            if not 0 <= where.dim < len(shape):
                raise UsageError(
                    f"{axis}={where} splits dimension {where.dim} of an array of shape {shape}."
                )
            nests[where.dim] += (axis,) if sizes[axis] > 1 else ()
    for dim, nest in enumerate(nests):
        parts = math.prod(sizes[axis] for axis in nest)
        if shape[dim] % parts:
            below = shape[dim] // parts * parts
            choices = f"{below} or {below + parts}" if below else f"{parts}"
            raise UsageError(
                f"dimension {dim} of size {shape[dim]} does not divide over {'*'.join(nest)}={parts}; "
                f"the nearest legal sizes are {choices}."
            )
    partial = tuple(
        sorted(a for a, where in placement.items() if isinstance(where, Partial) and sizes[a] > 1)
    )
    return _State(tuple(nests), partial, ops[0] if partial else None)


_Edge = tuple[str, tuple[str, ...], Fraction, _State, _State]


def _cheapest(view: _View, first: _State, last: _State) -> list[_Edge]:
    """Dijkstra's algorithm over placements, by (bytes, collectives, steps)."""
    best: dict[_State, tuple] = {}
    order = itertools.count()
    queue: list[tuple] = [((Fraction(0), 0, 0), next(order), first, None)]
    while queue:
        cost, _, state, edge = heapq.heappop(queue)
        if state in best:
            continue
        best[state] = edge
        if state == last:
            break
        for kind, axes, sent, after in _moves(view, state):
            if after not in best:
                total = (cost[0] + sent, cost[1] + (sent > 0), cost[2] + 1)
                heapq.heappush(queue, (total, next(order), after, (kind, axes, sent, state, after)))
    path = []
    while edge := best[last]:
        path.append(edge)
        last = edge[3]
    return path[::-1]


_Move = tuple[str, tuple[str, ...], Fraction, _State]


def _moves(view: _View, state: _State) -> Iterator[_Move]:
    """Every single step from a placement, with its bytes."""
    for move in itertools.chain(
        _local(view, state), _from_split(view, state), _from_partial(view, state)
    ):
        if view.fits(move[3]):
            yield move
    parts = tuple(map(view.count, state.nests))
    held = Fraction(view.local_bytes(state))
    for nests in _arrangements(
        view, parts, tuple(axis for axis in view.sizes if axis not in state.partial)
    ):
        if nests != state.nests:
            axes = {axis for nest in (*state.nests, *nests) for axis in nest}
            ordered = tuple(axis for axis in view.sizes if axis in axes)
            yield "collective-permute", ordered, held, state._replace(nests=nests)


def _with_nest(state: _State, dim: int, nest: tuple[str, ...]) -> _State:
    return state._replace(nests=(*state.nests[:dim], nest, *state.nests[dim + 1 :]))


def _with_partial(state: _State, axis: str, op: str) -> _State:
    return state._replace(partial=tuple(sorted((*state.partial, axis))), op=op)


def _local(view: _View, state: _State) -> Iterator[_Move]:
    """Steps without communication."""
    used = {*itertools.chain(*state.nests), *state.partial}
    ops = [op for op in view.ops if state.op in (None, op)]
    for axis in view.sizes:
        if axis not in used:
            for dim, nest in enumerate(state.nests):
                yield "slice", (axis,), Fraction(0), _with_nest(state, dim, (*nest, axis))
            for op in ops:
                yield "mask", (axis,), Fraction(0), _with_partial(state, axis, op)
    for dim, nest in enumerate(state.nests):
        if nest:
            for op in ops:
                yield (
                    "pad",
                    nest[-1:],
                    Fraction(0),
                    _with_partial(_with_nest(state, dim, nest[:-1]), nest[-1], op),
                )


def _from_split(view: _View, state: _State) -> Iterator[_Move]:
    """Gathers and moves of the innermost axes of each dimension."""
    held = Fraction(view.local_bytes(state))
    for dim, nest in enumerate(state.nests):
        for start in range(len(nest)):
            axes, less = nest[start:], _with_nest(state, dim, nest[:start])
            n = view.count(axes)
            yield "all-gather", axes, (n - 1) * held, less
            for other, onto in enumerate(state.nests):
                if other != dim:
                    yield (
                        "all-to-all",
                        axes,
                        (n - 1) * held / n,
                        _with_nest(less, other, (*onto, *axes)),
                    )


def _from_partial(view: _View, state: _State) -> Iterator[_Move]:
    """Reductions. For max and min the scattered one is an all-to-all of the parts, then a local reduction."""
    held = Fraction(view.local_bytes(state))
    for number in range(1, len(state.partial) + 1):
        for axes in itertools.permutations(state.partial, number):
            n = view.count(axes)
            left = tuple(axis for axis in state.partial if axis not in axes)
            less = state._replace(partial=left, op=state.op if left else None)
            if list(axes) == sorted(axes):
                yield "all-reduce", axes, 2 * (n - 1) * held / n, less
            kind = "reduce-scatter" if state.op == "sum" else "all-to-all"
            for dim, nest in enumerate(state.nests):
                yield kind, axes, (n - 1) * held / n, _with_nest(less, dim, (*nest, *axes))


def _arrangements(view: _View, parts: tuple[int, ...], axes: tuple[str, ...]) -> Iterator[tuple]:
    """Every way to cut dimensions into `parts` by `axes`."""
    if not parts:
        yield ()
        return
    for number in range(len(axes) + 1):
        for nest in itertools.permutations(axes, number):
            if view.count(nest) == parts[0]:
                for rest in _arrangements(
                    view, parts[1:], tuple(axis for axis in axes if axis not in nest)
                ):
                    yield (nest, *rest)


def _step(
    view: _View, kind: str, axes: tuple[str, ...], sent: Fraction, before: _State, after: _State
) -> ConversionStep:
    facts = dict(n=view.count(axes), before=view.local_bytes(before), after=view.local_bytes(after))
    why = _WHY[kind].format(op=after.op or before.op, **facts)
    return ConversionStep(kind, axes, float(sent), why, after.placement())
