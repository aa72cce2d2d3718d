"""Memory traffic and live memory of a step, from its jaxpr: what a compiler that fuses well would read, write and keep.

The model: products, kernels, sorts, scatters and loops read and write memory; everything between them (elementwise
work, broadcasts, slices, row reductions) is fused into what consumes it, so that a chain reads its inputs and writes
its result once. A value that several consumers need is written once if that moves fewer bytes than making it again in
each. Everything is in bytes and operations of one device.

What it misses: layouts and padding, fusion into a product's epilogue, what XLA copies or recomputes for reasons of its
own, and caches.
"""

import collections
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.aot.hlo import Crossing
from jaxpar.lower.flops import flops_of, matmul_flops, shards
from jaxpar.lower.jaxprs import array_of, inner_jaxpr

__all__ = ["ArrayLayout", "Traffic", "traffic_of"]

_VIEWS = {
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "slice",
    "dynamic_slice",
    "copy",
    "rev",
    "split",
    "name",
}
_VIEWS |= {"stop_gradient", "optimization_barrier", "copy_p", "pvary", "mesh_cast", "reshard"}
_CUTS = {"slice", "dynamic_slice", "gather", "split"}
_HEAVY = {
    "sort",
    "cumsum",
    "cumprod",
    "cummax",
    "cumlogsumexp",
    "top_k",
    "fft",
    "ffi_call",
    "scatter",
    "scatter-add",
}
_SUMS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
}
_LOOPS = {"scan", "while", "cond"}


class Traffic(NamedTuple):
    """What one execution does on one device.

    Attributes:
      operations: (operations, bytes) of a kernel -> how often it runs.
      peak: Most bytes alive at once, without arguments and results in the memory of donated ones.
      crossings: Collectives that the layout calls for, the largest first: gathers of what the program constrains to
        be whole, sums of products over split dimensions, and those written out in blocks. A compiler merges some.
    """

    operations: dict[tuple[float, float], float]
    peak: float
    crossings: tuple[Crossing, ...]

    @property
    def bytes(self) -> float:
        """Bytes read and written."""
        return sum(size * count for (_, size), count in self.operations.items())

    @property
    def flops(self) -> float:
        """Operations of products and kernels."""
        return sum(flops * count for (flops, _), count in self.operations.items())

    def seconds(self, flops: float, bandwidth: float) -> float:
        """Returns the time of the kernels one after the other, each bound by arithmetic or by memory."""
        return sum(
            count * max(f / flops, b / bandwidth) for (f, b), count in self.operations.items()
        )


class ArrayLayout:
    """How arrays of a program lie on the devices, as far as their shapes tell; here, on one device.

    Attributes:
      sizes: Of the mesh axes.
    """

    sizes: Mapping[str, int] = {}

    def axes(self, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes that split each dimension of an array."""
        return ((),) * len(shape)

    def bytes(self, aval: AbstractValue) -> float:
        """Returns an array's bytes on one device."""
        return bytes_of(aval)


class _Value:
    """An array: in memory (`reads` is None), or fused, with the bytes it would read of values in memory."""

    __slots__ = ("last", "passing", "reads", "sinks", "size", "view")

    def __init__(self, size: float, reads: "dict[_Value, float] | None" = None):
        self.size = size
        self.reads = reads
        self.view = False
        self.passing = False  # whether something later and no larger serves the same kernels
        self.sinks: set[int] = set()
        self.last = -1


class _Node(NamedTuple):
    eqn: Any
    ins: list[_Value]
    outs: list[_Value]
    devices: int  # that share its operations
    layout: ArrayLayout


def traffic_of(
    jaxpr: Jaxpr,
    layout: ArrayLayout | None = None,
    num_devices: int = 1,
    donated: Collection[int] | None = None,
) -> Traffic:
    """Returns the traffic of a jaxpr.

    Args:
      jaxpr: Of a step, as `jax.make_jaxpr(step)(*args).jaxpr`.
      layout: How its arrays lie; by default whole on one device.
      num_devices: Devices that share the operations.
      donated: Numbers of donated inputs. Each gives its memory to a result of its shape and dtype,
        in order, as XLA does. With None results take no memory at all.
    """
    return _Program(layout or ArrayLayout(), num_devices, donated).run(jaxpr)


def bytes_of(aval: AbstractValue) -> float:
    """Returns the bytes of an abstract value, 0 for a key or a token."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return float(math.prod(getattr(aval, "shape", ())) * itemsize)


class _Program:
    """One jaxpr, its calls inlined; the bodies of its loops are programs of their own."""

    def __init__(
        self,
        layout: ArrayLayout,
        num_devices: int,
        donated: Collection[int] | None = None,
    ):
        self.layout, self.num_devices = layout, num_devices
        self.donated = donated
        self.in_place: set[_Value] = set()  # what may lie where an input of its own kernel does
        self.reused: set[_Value] = set()  # results in the memory of an input that is dead by then
        self.nodes: list[_Node] = []
        self.operations: dict[tuple[float, float], float] = collections.defaultdict(float)
        self.extra: dict[int, float] = {}  # node -> bytes that it needs while it runs
        self.crossings: dict[tuple[str, str], Any] = collections.defaultdict(lambda: np.zeros(2))

    def run(self, jaxpr: Jaxpr) -> Traffic:
        known = {
            var: _Value(self.layout.bytes(var.aval)) for var in (*jaxpr.invars, *jaxpr.constvars)
        }
        arguments = set(known.values())
        self._inline(jaxpr, known, self.layout, self.num_devices)
        outs = [known[var] for var in jaxpr.outvars if not isinstance(var, Literal)]
        self._find_sinks(outs)
        born: dict[_Value, int] = {}
        for place, node in enumerate(self.nodes):
            self._visit(place, node, born)
        end = len(self.nodes)
        self._results(outs, arguments, end)
        if self.donated is not None:
            self._take_over(jaxpr, known, born, end)
        found = []
        for (kind, axes), (count, size) in self.crossings.items():
            found.append(Crossing(kind=kind, axes=axes, count=int(count), bytes=int(size)))
        found.sort(key=lambda one: -one.bytes)
        return Traffic(dict(self.operations), self._peak(born, end), tuple(found))

    def _inline(self, jaxpr: Jaxpr, known: dict, layout: ArrayLayout, devices: int) -> None:
        def value(atom) -> _Value:
            return known[atom] if not isinstance(atom, Literal) else _Value(0.0)

        for eqn in jaxpr.eqns:
            ins = [value(atom) for atom in eqn.invars]
            body = None if eqn.primitive.name in (*_LOOPS, "pallas_call") else inner_jaxpr(eqn)
            if body is not None:
                inner = dict(zip(body.invars, ins, strict=True)) | {
                    var: _Value(0.0) for var in body.constvars
                }
                blocks = shards(eqn) > 1 or eqn.primitive.name == "shard_map"
                self._inline(
                    body, inner, ArrayLayout() if blocks else layout, 1 if blocks else devices
                )
                for var, atom in zip(eqn.outvars, body.outvars, strict=True):
                    known[var] = inner[atom] if not isinstance(atom, Literal) else _Value(0.0)
                continue
            outs = [_Value(_placed_size(eqn, var, layout)) for var in eqn.outvars]
            known.update(zip(eqn.outvars, outs, strict=True))
            node = _Node(eqn=eqn, ins=ins, outs=outs, devices=devices, layout=layout)
            self.nodes.append(node)

    def _find_sinks(self, outs: list[_Value]) -> None:
        """Notes for each value the kernels that it flows into through fused work; -1 is the program's end."""
        for value in outs:
            value.sinks.add(-1)
        for place, node in reversed(list(enumerate(self.nodes))):
            heavy = _is_heavy(node)
            flow = {place} if heavy else set().union(*(out.sinks for out in node.outs))
            for value in node.ins:
                value.sinks |= flow
        for node in self.nodes:
            for value in () if _is_heavy(node) else node.ins:
                value.passing |= any(
                    out.sinks == value.sinks and out.size <= value.size for out in node.outs
                )

    def _visit(self, place: int, node: _Node, born: dict[_Value, int]) -> None:
        name = node.eqn.primitive.name
        if _is_heavy(node):
            read = sum(self._fetch(value, place, born) for value in node.ins)
            for out in node.outs:
                born[out] = place
            if name in _LOOPS:
                self.in_place.update(node.outs)
                self._loop(place, node)
                return
            if name.startswith("scatter") or name == "dynamic_update_slice":
                self.in_place.update(node.outs)
                read -= node.ins[0].size
                written = read
            else:
                written = sum(out.size for out in node.outs)
            # What one device does: inside a block the jaxpr is one device's already.
            flops = (
                matmul_flops(node.eqn) if name != "pallas_call" else _kernel_flops(node.eqn)
            ) or 0.0
            self.operations[flops / node.devices, read + written] += 1
            if name == "dot_general":
                self._sum(node)
            return
        reads: dict[_Value, float] = {}
        for value in node.ins:
            for source, amount in (
                {value: value.size} if value.reads is None else value.reads
            ).items():
                reads[source] = max(reads.get(source, 0.0), amount)
        if name in _CUTS:
            reads = {source: min(amount, node.outs[0].size) for source, amount in reads.items()}
        total = sum(reads.values())
        for out in node.outs:
            out.reads = reads
            out.view = name in _VIEWS and all(
                value.reads is None or value.view for value in node.ins[:1]
            )
            count = len(out.sinks)
            gathered = name == "sharding_constraint" and out.size > 1.01 * node.ins[0].size
            shared = not out.passing and count * total > total + (1 + count) * out.size
            summed = name.startswith("reduce") and (count > 1 or -1 in out.sinks)
            if gathered or shared or summed:
                self._write(out, place, born)
            if gathered:
                lies = node.layout.axes(node.eqn.invars[0].aval.shape)
                kept = _constrained_axes(node.eqn.params["sharding"].spec, lies)
                over = [axis for entry in lies for axis in entry if axis not in kept]
                self._cross("all-gather", over, out.size)
            elif name in _SUMS:
                self._cross(
                    _SUMS[name],
                    node.eqn.params.get("axes", node.eqn.params.get("axis_name", ())),
                    out.size,
                )

    def _fetch(self, value: _Value, place: int, born: dict[_Value, int]) -> float:
        """Returns what a kernel reads of a value, after writing it to memory if it must be there."""
        if value.reads is not None and not value.view:
            self._write(value, place, born)
        for source, _ in (value.reads or {value: 0.0}).items():
            source.last = max(source.last, place)
        return value.size if value.reads is None else sum(value.reads.values())

    def _write(self, value: _Value, place: int, born: dict[_Value, int]) -> None:
        for source in value.reads or ():
            source.last = max(source.last, place)
        self.operations[0.0, sum((value.reads or {}).values()) + value.size] += 1
        value.reads, value.last = None, place
        born[value] = place

    def _results(self, outs: list[_Value], arguments: set[_Value], end: int) -> None:
        """The last fused work: every source is read once, for all results together."""
        reads: dict[_Value, float] = {}
        written = 0.0
        for value in set(outs):
            if value.reads is None:
                value.last = end if value not in arguments else value.last
                continue
            written += value.size
            for source, amount in value.reads.items():
                reads[source] = max(reads.get(source, 0.0), amount)
                source.last = end
        if written:
            self.operations[0.0, sum(reads.values()) + written] += 1

    def _take_over(self, jaxpr: Jaxpr, known: dict, born: dict[_Value, int], end: int) -> None:
        """Counts results: one takes a donated input's memory, any other needs memory of its own.

        A result needs its own if it is written before the input is read for the last time. It does
        so if it is written while the input is read, except for updates of slices and carries of loops.
        """
        free: dict[tuple, list[_Value]] = collections.defaultdict(list)
        for number in sorted(self.donated or (), reverse=True):
            var = jaxpr.invars[number]
            free[_kind(var)].append(known[var])
        inputs = {known[var] for var in jaxpr.invars}
        own = 0.0
        for var in jaxpr.outvars:
            if isinstance(var, Literal) or known[var] in inputs:
                continue
            value = known[var]
            source = None
            if free[_kind(var)]:
                source = free[_kind(var)].pop()
            if value in born:
                if source is not None and source.last < born[value] + (value in self.in_place):
                    self.reused.add(value)
            elif source is None:  # written by the last fused work
                own += value.size
        self.extra[end] = own

    def _sum(self, node: _Node) -> None:
        """Notes the sum over devices that a product over a split dimension needs."""
        (contract, _), _ = node.eqn.params["dimension_numbers"]
        split = node.layout.axes(node.eqn.invars[0].aval.shape)
        over = [axis for dim in contract for axis in split[dim]]
        # A gradient of weights comes whole out of its product, and is cut as its parameter afterwards.
        whole = {
            axis for entry in node.layout.axes(node.eqn.outvars[0].aval.shape) for axis in entry
        } & set(over)
        parts = math.prod(node.layout.sizes[axis] for axis in whole)
        self._cross("reduce-scatter" if whole else "all-reduce", over, node.outs[0].size * parts)

    def _cross(self, kind: str, axes: str | Iterable[str] | None, size: float) -> None:
        names = [axis for axis in _names(axes) if self.layout.sizes.get(axis, 2) > 1]
        if names:
            self.crossings[kind, "+".join(names)] += np.array([1.0, size])

    def _loop(self, place: int, node: _Node) -> None:
        """Adds a loop's body times its length, or a conditional's dearest branch."""
        params, name = node.eqn.params, node.eqn.primitive.name
        if name == "cond":
            body, length = (
                max((b.jaxpr for b in params["branches"]), key=lambda b: flops_of(b).total),
                1,
            )
        else:
            body, length = (
                params["jaxpr" if name == "scan" else "body_jaxpr"].jaxpr,
                params.get("length", 1),
            )
        inner = _Program(node.layout, node.devices).run(body)
        for kind, axes, count, size in inner.crossings:
            self.crossings[kind, axes] += np.array([count, size]) * length
        for operation, count in inner.operations.items():
            self.operations[operation] += count * length
        self.extra[place] = inner.peak

    def _peak(self, born: dict[_Value, int], end: int) -> float:
        change = [0.0] * (end + 2)
        for value, place in born.items():
            if value in self.reused:
                continue
            change[place] += value.size
            change[max(value.last, place) + 1] -= value.size
        alive = peak = 0.0
        for place in range(end + 1):
            alive += change[place]
            peak = max(peak, alive + self.extra.get(place, 0.0))
        return peak


def _is_heavy(node: _Node) -> bool:
    name = node.eqn.primitive.name
    heavy = name in _HEAVY or name in _LOOPS or name in ("pallas_call", "dynamic_update_slice")
    return heavy or matmul_flops(node.eqn) is not None


def _kind(var: Var) -> tuple:
    aval = var.aval
    return getattr(aval, "shape", ()), getattr(aval, "dtype", None)


def _names(axes: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _kernel_flops(eqn: JaxprEqn) -> float:
    """Operations of a Pallas kernel."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    grid = math.prod(n if isinstance(n, int) else 1 for n in eqn.params["grid_mapping"].grid)
    return grid * flops_of(eqn.params["jaxpr"]).total


def _constrained_axes(spec: Iterable, lies: Iterable[Iterable[str]]) -> set[str]:
    """Returns the mesh axes that split a constrained array; an open dimension lies as it did."""
    kept: set[str] = set()
    for entry, before in itertools.zip_longest(spec, lies, fillvalue=()):
        is_open = entry is jax.sharding.PartitionSpec.UNCONSTRAINED
        if is_open:
            kept.update(before)
        else:
            kept.update(_names(entry))
    return kept


def _placed_size(eqn: JaxprEqn, var: Var, layout: ArrayLayout) -> float:
    """Bytes of a result on a device: where the program constrains it, what it says."""
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    if isinstance(sharding, jax.sharding.NamedSharding):
        # `shard_shape` rejects shardings within a block that is manual over other axes.
        axes = _constrained_axes(sharding.spec, layout.axes(array_of(var).shape))
        parts = [sharding.mesh.shape[axis] for axis in axes]
        return bytes_of(array_of(var)) / math.prod(parts)
    return layout.bytes(var.aval)
