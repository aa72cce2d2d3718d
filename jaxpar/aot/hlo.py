"""Reads the collectives of a compiled program from its HLO text: kinds, shapes, mesh axes, how often they run."""

import collections
import itertools
import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Crossing",
    "Node",
    "axes_of",
    "collectives",
    "crossings",
    "dependencies",
    "drop_unused",
    "has_entry",
    "matmul_flops",
    "replica_groups",
    "trip_counts",
]

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

EFFECTS = (
    "infeed",
    "outfeed",
    "send",
    "send-done",
    "recv",
    "recv-done",
    "while",
    "conditional",
    "call",
    "custom-call",
)
"""Operations that run although nothing reads their result: they may have effects of their own."""

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*\(.*\{\s*$")
_HEAD = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|"
    r"called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
# XLA for TPU writes an asynchronous collective three times: in a computation that starts it, in one that computes
# beside it, and in one that ends it.
_REPEATED = re.compile(r'custom_call_target="AsyncCollectiveDone"')


class Collective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: As in `COLLECTIVES`. An all-reduce inside a computation that XLA for TPU names all-reduce-scatter is a
        "reduce-scatter".
      axes: Mesh axes of size over 1 that a group spans, in the mesh's order; of a collective-permute those along
        which its pairs move. None if the groups are no such product.
      shapes: Dimensions of each whole array, on one device: what an all-gather returns, what a reduce-scatter is
        given, and for the others, which change no size, what they return. A combined instruction has several.
      dtypes: Of each array, as HLO names them: "bf16", "f32".
      trips: How often it runs in one execution of the program: the product over the loops around it.
      name: Of the instruction.
    """

    kind: str
    axes: tuple[str, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    trips: int
    name: str

    @property
    def bytes(self) -> int:
        """Returns the bytes of `shapes`: the whole payload on one device, in one execution."""
        bits = (
            math.prod(shape) * _bits(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return sum(bits) // 8


class Crossing(NamedTuple):
    """Collectives of one kind over the same mesh axes, in one step, on one device.

    Attributes:
      kind: As in `COLLECTIVES`.
      axes: Mesh axes, joined by "+".
      count: Executions.
      bytes: Payload of all of them.
    """

    kind: str
    axes: str
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # a field: tuple.count is not used
    bytes: int


class Node(NamedTuple):
    """One instruction of a program's entry, with all that it calls.

    Attributes:
      ops: Its own operation and those of the computations that it calls: "fusion" and "dot", say.
      waits: Names of all instructions without which it cannot start.
    """

    ops: frozenset[str]
    waits: frozenset[str]


class _Instruction(NamedTuple):
    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """The names between the parentheses, `name#2` for an entry of a tuple."""
        return re.findall(r"%([\w.\-]+(?:#\d+)?)", self.rest[: _closing(self.rest, 0)])


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Returns every `Collective` of the module whose text this is; a `-start` and its `-done` count once.

    Args:
      text: `compiled.as_text()`.
      mesh: Of the program, or anything with its `axis_names`, `shape` (name -> size) and `size`.
    """
    program, entry = _computations(text)
    times = _times(program, entry)
    out = []
    for computation, instructions in program.items():
        if not times[computation] or _is_repetition(computation, instructions):
            continue
        for found in instructions:
            kind, _, start = found.op.partition("-start")
            if kind not in COLLECTIVES or start:
                continue
            if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"
            dtypes, shapes, spans = _payload(found, mesh)
            if spans != ():
                out.append(Collective(kind, spans, shapes, dtypes, times[computation], found.name))
    return out


def has_entry(text: str) -> bool:
    """Returns whether the text is a module with an entry that computes something."""
    program, entry = _computations(text)
    return entry is not None and bool(program[entry])


def drop_unused(text: str) -> str:
    """Returns a module without the instructions that nothing reads, as later passes drop them.

    Args:
      text: HLO from between two passes.
    """
    program, _ = _computations(text)
    used = {computation: _used(instructions) for computation, instructions in program.items()}
    kept = []
    current: set[str] | None = None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if computation := _COMPUTATION.match(line):
            current = used[computation["name"]]
        elif head and current is not None and head["name"] not in current:
            continue
        kept.append(line)
    return "\n".join(kept)


def crossings(found: list[Collective]) -> tuple[Crossing, ...]:
    """Sums collectives by kind and mesh axes, the largest first."""
    count: collections.Counter = collections.Counter()
    size: collections.Counter = collections.Counter()
    for one in found:
        key = one.kind, "+".join(one.axes) if one.axes else "?"
        count[key] += one.trips
        size[key] += one.trips * one.bytes
    return tuple(
        Crossing(kind, axes, count[kind, axes], total) for (kind, axes), total in size.most_common()
    )


def dependencies(text: str) -> dict[str, Node]:
    """Returns what each instruction of the entry computation waits for, by its name.

    Two of which neither waits for the other may run at the same time. What a loop or a conditional contains counts as
    one instruction.
    """
    program, entry = _computations(text)

    def inside(found: _Instruction) -> frozenset[str]:
        called = (
            name for names in _CALLED.findall(found.rest) for name in re.findall(r"[\w.\-]+", names)
        )
        return frozenset({found.op}).union(
            *(inside(one) for name in called for one in program.get(name, ()))
        )

    nodes: dict[str, Node] = {}
    for found in program[entry] if entry else ():  # each after its operands
        before = [name.partition("#")[0] for name in found.operands]
        known = [name for name in before if name in nodes]
        nodes[found.name] = Node(
            inside(found), frozenset(known).union(*(nodes[name].waits for name in known))
        )
    return nodes


def matmul_flops(text: str) -> float:
    """Returns the operations of the matrix products and convolutions of one device, in one execution.

    Loops count as often as they run, and each branch of a conditional counts. Products that XLA for
    GPU gives to cuBLAS count too; other kernels do not.
    """
    program, entry = _computations(text)
    times = _times(program, entry)
    total = 0.0
    for computation, instructions in program.items():
        if not times[computation]:
            continue
        shapes = {found.name: found.shape for found in instructions}
        for found in instructions:
            total += times[computation] * _flops_of(found, shapes)
    return total


def trip_counts(text: str) -> dict[str, int | None]:
    """Returns how often each while loop of the module runs its body; None where the text does not tell."""
    program, _ = _computations(text)
    return {
        found.name: _trips(program, instructions, found)
        for instructions in program.values()
        for found in instructions
        if found.op == "while"
    }


def replica_groups(text: str, num_devices: int) -> list[tuple[int, ...]]:
    """Returns the groups as a list of tuples of device numbers, from the text after `replica_groups=`.

    Knows the three forms: explicit `{{0,1},{2,3}}` (`{}` is everybody), iota `[2,4]<=[4,2]T(1,0)`, and
    `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`, where an axis may be a part, `'b':(1)2`.
    """
    if text.startswith("{"):
        inner = _match(r"\{((?:\{[\d,]*\},?)*)\}", text)[1]
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", inner)]
        return groups or [tuple(range(num_devices))]
    if text.startswith("["):
        shape, rest = _match(r"\[([\d,]+)\]<=(\S*?\](?:T\([\d,]+\))?)", text).groups()
        return [tuple(row) for row in _iota(rest).reshape(_numbers(shape)).tolist()]
    found = _match(
        r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>[^{]*)\))? \{(?P<axes>[^}]*)\}", text
    )
    sizes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", found["sizes"])]
    ids = found["ids"]
    order = (
        np.arange(num_devices)
        if not ids
        else _iota(ids)
        if ids.startswith("[")
        else np.array(_numbers(ids))
    )
    # An axis in parts is cut into (before, part, after), so that every grouped axis is whole.
    grouped = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found["axes"])
    shape, inside = [], []
    for name, size in sizes:
        cuts = {1, size}
        spans = [
            (int(pre), int(pre) * int(part)) if pre else (1, size)
            for axis, pre, part in grouped
            if axis == name
        ]
        cuts |= {cut for span in spans for cut in span}
        for low, high in itertools.pairwise(sorted(cuts)):
            shape.append(high // low)
            inside.append(any(start <= low and high <= stop for start, stop in spans))
    devices = order.reshape(shape)
    front = [i for i, yes in enumerate(inside) if not yes]
    back = [i for i, yes in enumerate(inside) if yes]
    together = math.prod(shape[i] for i in back)
    return [tuple(row) for row in devices.transpose(front + back).reshape(-1, together).tolist()]


def axes_of(groups: list[tuple[int, ...]], mesh: Mesh) -> tuple[str, ...] | None:
    """Returns the mesh axes that every group spans in full, or None if the groups are no product of axes.

    Device numbers in a program count the mesh's devices in row-major order.
    """
    names, sizes = mesh.axis_names, tuple(mesh.shape[name] for name in mesh.axis_names)
    places = [np.stack(np.unravel_index(np.array(group), sizes), -1) for group in groups]
    moving = [i for i in range(len(sizes)) if any(len(set(place[:, i])) > 1 for place in places)]
    full = math.prod(sizes[i] for i in moving)
    fixed = [i for i in range(len(sizes)) if i not in moving]
    product = all(len(p) == full and len({tuple(row) for row in p[:, fixed]}) == 1 for p in places)
    return tuple(names[i] for i in moving) if product else None


def _flops_of(found: _Instruction, shapes: dict[str, str]) -> float:
    """Operations of one instruction: two for each entry of the result and each number summed into it."""
    if found.op == "dot":
        contracted = _dimensions(r"lhs_contracting_dims=\{([\d,]*)\}", found.rest)
    elif (
        found.op == "custom-call" and "gemm" in found.rest.partition("custom_call_target=")[2][:40]
    ):
        contracted = _dimensions(r'"lhs_contracting_dimensions":\[([^\]]*)\]', found.rest)
    elif found.op == "convolution":
        return 2.0 * _size_of(found.shape) * _numbers_summed(found, shapes)
    else:
        return 0.0
    left = _operand_shape(found, 0, shapes)
    return 2.0 * _size_of(found.shape) * math.prod(left[dim] for dim in contracted)


def _numbers_summed(found: _Instruction, shapes: dict[str, str]) -> int:
    """Numbers that a convolution sums into one entry: its kernel without the dimension of outputs."""
    kernel = _operand_shape(found, 1, shapes)
    labels = _match(r".*\bdim_labels=\w+_(\w+)->", found.rest)[1]
    return math.prod(size for size, label in zip(kernel, labels, strict=True) if label != "o")


def _dimensions(pattern: str, text: str) -> list[int]:
    """Numbers that a list among an instruction's attributes holds."""
    listed = re.search(pattern, text)
    if not listed:
        return []
    return [int(number) for number in re.findall(r"\d+", listed[1])]


def _operand_shape(found: _Instruction, index: int, shapes: dict[str, str]) -> list[int]:
    """Dimensions of an operand, which may be `name#2`, an entry of a tuple."""
    name, _, entry = found.operands[index].partition("#")
    shape = shapes[name]
    if entry:
        shape = _elements(shape)[int(entry)]
    return _shape_of(shape)


def _shape_of(shape: str) -> list[int]:
    """Dimensions of an array, or of the first of a tuple, as HLO writes them."""
    listed = _ARRAY.search(shape)
    if not listed:
        return []
    return _numbers(listed[2])


def _size_of(shape: str) -> int:
    return math.prod(_shape_of(shape))


def _match(pattern: str, text: str) -> re.Match:
    found = re.match(pattern, text)
    if found is None:
        raise ValueError(f"unknown form of a collective's groups: {text[:120]}")
    return found


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _iota(text: str) -> np.ndarray:
    """Reads `[4,2]T(1,0)`: 0..7 in shape (4, 2), transposed, flat."""
    shape, order = _match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(order)) if order else numbers).reshape(-1)


def _bits(dtype: str) -> int:
    """Bits of an entry: the first number of the name, and a boolean is a byte."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def _closing(text: str, start: int) -> int:
    """Returns the place of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.finditer(r"[()]", text[start:]):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return start + found.start()
    return len(text)


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    """Cuts a module into computations; also returns the name of its entry."""
    program: dict[str, list[_Instruction]] = {}
    entry, current = None, []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = program.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        elif head := _HEAD.match(line):
            begin = head.end()
            end = _closing(line, begin) + 1 if line[begin] == "(" else line.find(" ", begin)
            op, _, _ = line[end:].strip().partition("(")
            instruction = _Instruction(
                name=head["name"],
                shape=line[begin:end],
                op=op,
                rest=line[line.find("(", end) :],
                is_root=line.lstrip().startswith("ROOT "),
            )
            current.append(instruction)
    return program, entry


def _used(instructions: list[_Instruction]) -> set[str]:
    """Returns the names of the instructions of a computation that its result depends on, or the world outside."""
    by_name = {found.name: found for found in instructions}
    starts = [found for found in instructions if found.is_root or found.op in EFFECTS]
    todo = [found.name for found in starts]
    used: set[str] = set()
    while todo:
        name = todo.pop()
        if name in used or name not in by_name:
            continue
        used.add(name)
        todo += _operands_read(by_name[name], by_name)
    return used


def _operands_read(found: _Instruction, by_name: dict[str, _Instruction]) -> list[str]:
    """Returns the names of an instruction's operands; in place of a tuple the one entry that it takes."""
    index = re.search(r"\bindex=(\d+)", found.rest)
    names = []
    for operand in found.operands:
        name, _, entry = operand.partition("#")
        if found.op == "get-tuple-element" and index:
            entry = index[1]
        source = by_name.get(name)
        if entry and source is not None and source.op == "tuple":
            name, _, _ = source.operands[int(entry)].partition("#")
        names.append(name)
    return names


def _times(program: dict[str, list[_Instruction]], entry: str | None) -> collections.Counter:
    """Counts the executions of each computation; both branches of a conditional count, and an unknown loop is one."""
    times: collections.Counter = collections.Counter()

    def visit(computation: str, count: int) -> None:
        times[computation] += count
        for found in program.get(computation, ()):
            if found.op in (
                "async-done",
                "async-update",
            ):  # they name what `async-start` has called
                continue
            inner = (
                (_trips(program, program[computation], found) or 1) if found.op == "while" else 1
            )
            for names in _CALLED.findall(found.rest):
                for name in re.findall(r"[\w.\-]+", names):
                    visit(name, count * inner)

    if entry is not None:
        visit(entry, 1)
    return times


def _is_repetition(computation: str, instructions: list[_Instruction]) -> bool:
    """Whether a computation repeats, for the scheduler, a collective that another one starts."""
    return computation.startswith("async_collective_fusion") or any(
        _REPEATED.search(i.rest) for i in instructions
    )


def _payload(
    found: _Instruction, mesh: Mesh
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[str, ...] | None]:
    """Returns dtypes and shapes of the whole arrays of a collective, and the axes that it spans."""
    shape = found.shape
    parts = _elements(shape)
    if found.op.endswith("-start") and len(parts) > 1:
        # (operands, results, ...); an all-reduce-start returns its results alone.
        if parts[0].startswith("(") or found.op in ("all-gather-start", "collective-permute-start"):
            shape = parts[1]
    arrays = _ARRAY.findall(shape)
    shapes = [_numbers(dims) for _, dims in arrays]
    if found.op.startswith("collective-permute"):
        spans = _moving(found.rest.split("source_target_pairs=")[1], mesh)
    else:
        groups = replica_groups(found.rest.split("replica_groups=")[1], mesh.size)
        spans = axes_of(groups, mesh)
        if found.op.startswith("reduce-scatter"):
            cut = int(_match(r".*\bdimensions=\{(\d+)\}", found.rest)[1])
            for dims in shapes:
                dims[cut] *= len(groups[0])
    return tuple(dtype for dtype, _ in arrays), tuple(map(tuple, shapes)), spans


def _moving(text: str, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which a permutation's pairs of devices differ."""
    pairs = np.array(re.findall(r"\{(\d+),(\d+)\}", text[: text.find("}}") + 2]), int).reshape(
        -1, 2
    )
    sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
    source, target = (np.unravel_index(pairs[:, i], sizes) for i in (0, 1))
    return tuple(
        name for name, a, b in zip(mesh.axis_names, source, target, strict=True) if (a != b).any()
    )


def _elements(shape: str) -> list[str]:
    """Splits `(a, (b, c), d)` at its outermost commas."""
    if not shape.startswith("("):
        return [shape]
    out, depth = [""], 0
    for letter in shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            out.append("")
        else:
            out[-1] += letter
    return [re.sub(r"/\*.*?\*/", "", part).strip() for part in out]


def _trips(
    program: dict[str, list[_Instruction]], around: list[_Instruction], loop: _Instruction
) -> int | None:
    """Returns how often `loop` runs: XLA's own note, else the bound that its condition compares the counter with."""
    if note := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(note[1])
    condition, body = (
        re.search(rf"\b{part}=%?([\w.\-]+)", loop.rest) for part in ("condition", "body")
    )
    if not condition or not body or condition[1] not in program or body[1] not in program:
        return None
    inside = {found.name: found for found in program[condition[1]]}
    compare = program[condition[1]][-1]
    test = compare
    if compare.op == "fusion" and (called := re.search(r"\bcalls=%?([\w.\-]+)", compare.rest)):
        test = program[called[1]][-1]
    direction = re.search(r"direction=(LT|LE),", test.rest)
    if test.op != "compare" or not direction or len(compare.operands) != 2:
        return None
    counter, limit = compare.operands
    bound = _constant(inside, inside.get(limit))
    # Inside a block that is manual over some axes, the partitioner copies the counter first.
    while counter in inside and inside[counter].op == "copy":
        counter = inside[counter].operands[0]
    if "#" not in counter and counter in inside:
        counter = f"{inside[counter].op}{inside[counter].rest}"
    index = re.search(r"#(\d+)$|get-tuple-element\(.*index=(\d+)", counter)
    if bound is None or index is None:
        return None
    # Loops of JAX count from 0 by 1; where the text shows other numbers, those hold.
    first = _entry_of(around, loop.operands[0], int(index[1] or index[2]))
    return max(0, bound + (direction[1] == "LE") - (first or 0))


def _entry_of(around: list[_Instruction], name: str, index: int) -> int | None:
    """Returns entry `index` of the tuple `name` if it is a constant."""
    known = {found.name: found for found in around}
    made = known.get(name)
    return (
        _constant(known, known.get(made.operands[index]))
        if made is not None and made.op == "tuple"
        else None
    )


def _constant(known: dict[str, _Instruction], found: _Instruction | None) -> int | None:
    """Returns the value of an integer constant, looked for through copies."""
    while found is not None and found.op in ("copy", "bitcast") and found.operands:
        found = known.get(found.operands[0])
    value = (
        re.match(r"\((-?\d+)\)", found.rest)
        if found is not None and found.op == "constant"
        else None
    )
    return int(value[1]) if value else None
