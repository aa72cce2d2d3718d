"""Reads the collectives of a compiled program from its HLO text: kinds, shapes, mesh axes."""

import itertools
import math
import re
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>" + "|".join(KINDS) + r")(?P<start>-start)?\("
)
_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*\(.*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: As in `KINDS`. An all-reduce inside a computation that XLA for TPU names all-reduce-scatter is a
        "reduce-scatter".
      axes: Mesh axes of size over 1 that a group spans, in the mesh's order; None if the groups are no such product
        (and for a collective-permute).
      shapes: Dimensions of each array it returns; a combined instruction has several.
      name: Of the instruction.
    """

    kind: str
    axes: tuple[str, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    name: str


def replica_groups(text, num_devices):
    """Returns the groups as a list of tuples of device numbers, from the text after `replica_groups=`.

    Knows the three forms: explicit `{{0,1},{2,3}}` (`{}` is everybody), iota `[2,4]<=[4,2]T(1,0)`, and
    `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, where an axis may be a part, `'b':(1)2`.
    """
    if text.startswith("{"):
        inner = re.match(r"\{((?:\{[\d,]*\},?)*)\}", text)[1]
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", inner)]
        return groups or [tuple(range(num_devices))]
    if text.startswith("["):
        shape, rest = re.match(r"\[([\d,]+)\]<=(\S*?\](?:T\([\d,]+\))?)", text).groups()
        return [tuple(row) for row in _iota(rest).reshape(_numbers(shape)).tolist()]
    found = re.match(r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>[^{]*)\))? \{(?P<axes>[^}]*)\}", text)
    assert found, f"unknown form of replica groups: {text[:120]}"
    sizes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", found["sizes"])]
    ids = found["ids"]
    order = np.arange(num_devices) if not ids else _iota(ids) if ids.startswith("[") else np.array(_numbers(ids))
    # An axis in parts is cut into (before, part, after), so that every grouped axis is whole.
    grouped = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found["axes"])
    shape, inside = [], []
    for name, size in sizes:
        cuts = {1, size}
        spans = [(int(pre), int(pre) * int(part)) if pre else (1, size) for axis, pre, part in grouped if axis == name]
        cuts |= {cut for span in spans for cut in span}
        for low, high in itertools.pairwise(sorted(cuts)):
            shape.append(high // low)
            inside.append(any(start <= low and high <= stop for start, stop in spans))
    devices = order.reshape(shape)
    front = [i for i, yes in enumerate(inside) if not yes]
    back = [i for i, yes in enumerate(inside) if yes]
    together = math.prod(shape[i] for i in back)
    return [tuple(row) for row in devices.transpose(front + back).reshape(-1, together).tolist()]


def _numbers(text):
    return [int(n) for n in text.split(",") if n]


def _iota(text):
    """Reads `[4,2]T(1,0)`: 0..7 in shape (4, 2), transposed, flat."""
    shape, order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(order)) if order else numbers).reshape(-1)


def axes_of(groups, mesh):
    """Returns the mesh axes that every group spans in full, or None if the groups are no product of axes.

    Device numbers in a program count the mesh's devices in row-major order.
    """
    names, sizes = mesh.axis_names, mesh.devices.shape
    places = [np.stack(np.unravel_index(np.array(group), sizes), -1) for group in groups]
    moving = [i for i in range(len(sizes)) if any(len(set(place[:, i])) > 1 for place in places)]
    full = math.prod(sizes[i] for i in moving)
    fixed = [i for i in range(len(sizes)) if i not in moving]
    product = all(len(p) == full and len({tuple(row) for row in p[:, fixed]}) == 1 for p in places)
    return tuple(names[i] for i in moving) if product else None


def collectives(text, mesh):
    """Returns every `Collective` of the module whose text this is; a `-start` and its `-done` count once."""
    out, computation = [], ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head["name"]
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        kind, shape = found["kind"], found["shape"]
        arrays = [tuple(_numbers(dims)) for _, dims in _ARRAY.findall(shape)]
        if found["start"] and kind in ("all-gather", "collective-permute") and shape.startswith("("):
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        if kind == "collective-permute":
            spans = None  # pairs of devices are no product of axes
        else:
            spans = axes_of(replica_groups(line.split("replica_groups=")[1], mesh.size), mesh)
        if spans != ():
            out.append(Collective(kind, spans, tuple(arrays), found["name"]))
    return out
