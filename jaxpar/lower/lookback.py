"""The Triton kernel of affine scans: one pass over memory, tiles of time in parallel, carries by decoupled look-back.

A program takes a ticket, which names a tile of L steps x W lanes, earlier tiles first. It makes the coefficients of
its steps, scans them, publishes the tile's sum h -> P h + s, and looks back over what earlier tiles published until it
meets one that already knows its last state. Then it publishes its own last state and writes its L steps: every array
is read once and written once (Merrill and Garland 2016, "Single-pass parallel prefix scan with decoupled look-back").

What is published is a pair (status, float32) in one 64-bit word, so that no fence is needed: a word is seen whole or
not at all. Status 1 is part of a tile's sum, status 2 of its last state.

The text is made, not written by hand, since it differs in the size k of the blocks and in where the coefficients come
from: arrays (`jaxpar.scan`), or a cell and its derivative (`jaxpar.solve`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpar.lower.triton import call_kernel, indented

__all__ = ["LARGEST_BLOCK", "KernelSource", "ScanAxis", "Tile", "launch"]

LARGEST_BLOCK = 2
"""Blocks of more components do not fit a tile's registers."""

CONSTANTS = (
    *("T", "L", "W", "SPAN", "LANES", "COLUMNS", "PER_BATCH", "BLOCKS"),
    *("BATCH_STRIDE", "TIME_STRIDE", "COLUMN_STRIDE", "REVERSE", "SHIFT", "BACK"),
)
"""What is known when the kernel is compiled: sizes, strides in elements, and directions."""


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """Where a tile gets its coefficients from, and what is written.

    Attributes:
      k: Components of the state of a lane.
      inputs: Names of the input pointers.
      outputs: Names of the output pointers.
      body: Defines the tiles `a<i><j>` and `b<i>` [L, W] from `at` (64-bit offset of each element), `mask`, `step` [L]
        (in the order of the scan), `lane` and `live` [W]. What they are out of `mask` does not matter.
      start: Expression of component {i} of the state before the first step, [W].
      used: Mask [L, W] of the steps at which `a<i><j>` matters.
      finish: Writes the states, the tiles `h<i>`.
      functions: Definitions that `body` calls.
    """

    k: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    finish: str
    start: str = "tl.zeros([W], tl.float32)"
    used: str = "mask"
    functions: str = ""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the work is cut: `steps` x `lanes` a program of `warps` warps, which looks back `span` tiles at a time."""

    steps: int
    lanes: int
    span: int
    warps: int


class ScanAxis(NamedTuple):
    """The axis along which a scan runs, and how it runs.

    Attributes:
      shape: Shape of the arrays, the axis included.
      axis: Index of the axis in the shape.
      reverse: Whether step t depends on step t + 1.
      adjoint: Whether step t takes the coefficients of the step before it, in the order of the scan.
    """

    shape: tuple[int, ...]
    axis: int
    reverse: bool = False
    adjoint: bool = False


PRODUCTS = """
@triton.jit
def push(a, h):
    # A zero forgets: 0 NaN and 0 inf would be NaN.
    return a * tl.where(a == 0.0, 0.0, h)


@triton.jit
def product(later, earlier):
    # 0 only where a factor is: what a product that underflows would forget has to stay.
    both = later * earlier + 1.1754944e-38
    return tl.where((later == 0.0) | (earlier == 0.0), 0.0, both)


@triton.jit
def push_nonzero(a, h):
    return a * h


@triton.jit
def product_nonzero(later, earlier):
    return later * earlier + 1.1754944e-38
"""
"""Products of entries, as in `jaxpar.scan._rings`; the last two where no factor is 0."""


def _composition(k: int, name: str, suffix: str = "", cut: bool = False) -> str:
    """Returns a function of the maps (P, s) of two spans, left the earlier.

    Args:
      k: Number of components.
      name: The function's.
      suffix: End of the names of `push` and `product`.
      cut: Whether a flag is added that forgets what was before.
    """

    def names(side):
        return [f"{side}{i}{j}" for i in range(k) for j in range(k)] + [
            f"{side}{i}" for i in range(k)
        ]

    def row(name, i, right_of):
        return " + ".join(f"{name}{suffix}(r{i}{m}, {right_of(m)})" for m in range(k))

    products = [row("product", i, lambda m, j=j: f"l{m}{j}") for i in range(k) for j in range(k)]
    sums = [row("push", i, lambda m: f"l{m}") + f" + r{i}" for i in range(k)]
    if cut:  # right of a flag nothing earlier matters: a tile whose last state is known stands for all before it
        products = [f"tl.where(rc > 0, 0.0, {text})" for text in products]
        sums = [f"tl.where(rc > 0, r{i}, {text})" for i, text in enumerate(sums)] + [
            "tl.maximum(lc, rc)"
        ]
    arguments = names("l") + ["lc"] * cut + names("r") + ["rc"] * cut
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n    return {', '.join(products + sums)}\n"


def _has_zero(matrix: list[str], used: str) -> str:
    """Returns lines that set `has_zero`: whether a transition that matters is 0."""
    lines = [f"least = tl.abs(a{matrix[0]})"]
    for name in matrix[1:]:
        lines.append(f"least = tl.minimum(least, tl.abs(a{name}))")
    # A minimum leaves NaN out, next to which a 0 counts as well.
    lines.append(f"has_zero = tl.min(tl.min(tl.where({used}, least, 1.0), 0), 0) == 0.0")
    return "\n".join(lines)


def _look_back(k: int, parts: list[str]) -> str:
    """Lines that find `carry<i>`, the state before this tile, from the words of earlier tiles, SPAN at a time."""
    matrix, vector = parts[: k * k], parts[k * k :]
    lines = [
        f"run{name} = tl.full([W], {float(name in [f'{i}{i}' for i in range(k)])}, tl.float32)"
        for name in matrix
    ]
    lines += [f"run{name} = tl.zeros([W], tl.float32)" for name in vector]
    # Backwards, SPAN tiles at a time, until every lane has met a tile whose last state is known; tile 0 always is one.
    lines += [
        "known = tl.zeros([W], tl.int32)",
        "newest = chunk - 1",
        "open = 1",
        "while open > 0:",
    ]
    lines += [
        "    back = newest - (SPAN - 1) + tl.arange(0, SPAN)",
        "    there = (back >= 0)[:, None] & live[None, :]",
    ]
    lines += [
        f"    word = words + (back[:, None].to(tl.int64) * LANES + lane[None, :]) * {len(parts) + k}"
    ]
    # Volatile, or the compiler would read once and loop without end. What lies before tile 0 counts as known.
    poll = [
        f"w{i} = tl.load(word + {i}, mask=there, other=UNKNOWN, volatile=True)"
        for i in range(len(parts) + k)
    ]
    poll.append(
        "waiting = tl.max(tl.max(1 - ("
        + _status(parts, 0, 1)
        + " | "
        + _status(vector, len(parts), 2)
        + ").to(tl.int32), 1), 0)"
    )
    lines += (
        ["    " + line for line in poll]
        + ["    while waiting > 0:"]
        + ["        " + line for line in poll]
    )
    # Of a tile whose last state is known, only that is taken: its map becomes 0 h + state.
    lines += [f"    final = {_status(vector, len(parts), 2)}"]
    for place, name in enumerate(parts):
        lines.append(f"    v{name} = {_read(place)}")
    lines += [f"    v{name} = tl.where(final, 0.0, v{name})" for name in matrix]
    for place, name in enumerate(vector, len(parts)):
        lines.append(f"    v{name} = tl.where(final, {_read(place)}, v{name})")
    names = ", ".join(f"v{name}" for name in parts)
    lines += [
        f"    {names}, cut = tl.associative_scan(({names}, final.to(tl.int32)), 0, compose_cut)"
    ]
    # Triton cannot index a tile: the last row is picked by a sum with all others masked.
    lines += ["    last = (tl.arange(0, SPAN) == SPAN - 1)[:, None]"]
    for name in [*(f"v{name}" for name in parts), "cut"]:
        lines.append(f"    {name} = tl.sum(tl.where(last, {name}, 0), 0)")
    # The new span lies before what `run` sums up so far; a lane that is known already keeps what it has.
    for i in range(k):
        total = " + ".join(f"push(run{i}{m}, v{m})" for m in range(k))
        lines.append(f"    run{i} = tl.where(known > 0, run{i}, {total} + run{i})")
    for i in range(k):
        for j in range(k):
            terms = " + ".join(f"product(run{i}{m}, v{m}{j})" for m in range(k))
            lines.append(f"    next{i}{j} = {terms}")
    lines += [f"    run{i}{j} = next{i}{j}" for i in range(k) for j in range(k)]
    lines += [
        "    known = tl.maximum(known, cut)",
        "    newest -= SPAN",
        "    open = 1 - tl.min(known, 0)",
    ]
    lines += [f"carry{i} = run{i}" for i in range(k)]
    return "\n".join(lines)


def _status(parts: list[str], first: int, status: int) -> str:
    """Whether all words of some parts have been published."""
    return "(" + " & ".join(f"((w{first + i} >> 32) == {status})" for i in range(len(parts))) + ")"


def _read(place: int) -> str:
    """The float32 in the low half of a word; the high half is its status."""
    return f"(w{place} & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)"


def _publish(values: list[str], first: int, status: int) -> str:
    """Stores values with their status in one word each, which no reader can see in parts."""
    lines = []
    for place, value in enumerate(values, first):
        bits = f"{value}.to(tl.uint32, bitcast=True).to(tl.uint64)"
        lines.append(f"tl.store(words + own + {place}, {bits} | STATUS{status}, mask=live)")
    return "\n".join(lines)


def kernel_text(source: KernelSource) -> str:
    """Returns the Triton source of the kernel `lookback`."""
    k = source.k
    matrix = [f"{i}{j}" for i in range(k) for j in range(k)]
    vector = [f"{i}" for i in range(k)]
    parts = matrix + vector
    scanned = ", ".join([f"a{name}" for name in matrix] + [f"b{name}" for name in vector])
    sums = ", ".join([f"p{name}" for name in matrix] + [f"s{name}" for name in vector])
    totals = "\n".join(
        f"total{name} = tl.sum(tl.where(end, {'p' if name in matrix else 's'}{name}, 0.0), 0)"
        for name in parts
    )

    def after(name, sum_name, state):
        terms = (" + ".join(f"push({name}{i}{m}, {state(m)})" for m in range(k)) for i in range(k))
        return [f"{text} + {sum_name}{i}" for i, text in enumerate(terms)]

    ends = after("total", "total", lambda m: f"carry{m}")
    last = "\n".join(f"after{i} = {text}" for i, text in enumerate(ends))
    rows = after("p", "s", lambda m: f"tl.broadcast_to(carry{m}[None, :], [L, W])")
    states = "\n".join(f"h{i} = {text}" for i, text in enumerate(rows))
    starts = "\n".join(f"carry{i} = " + source.start.format(i=i) for i in range(k))
    pointers = ", ".join((*source.inputs, *source.outputs))
    # The ticket and not the program's number says which tile is made: programs start in no promised order, and one that
    # waits for an earlier tile must be sure that it has been begun. Offsets are 64 bits wide where T is a factor.
    # A scan that selects has two thirds more instructions: only a tile with a zero makes it.
    body = f"""
ticket = tl.atomic_add(ticket_ptr, 1)
chunk = ticket // BLOCKS
block = ticket % BLOCKS
batch = block // PER_BATCH
column = (block % PER_BATCH) * W + tl.arange(0, W)
live = column < COLUMNS
lane = batch * COLUMNS + column
step = chunk * L + tl.arange(0, L)
time = (T - 1 - step) if REVERSE else step
base = batch.to(tl.int64) * BATCH_STRIDE
at = base + time[:, None].to(tl.int64) * TIME_STRIDE + column[None, :] * COLUMN_STRIDE
mask = (step < T)[:, None] & live[None, :]
words = words_ptr.to(tl.pointer_type(tl.uint64))
own = (chunk.to(tl.int64) * LANES + lane) * {len(parts) + k}
STATUS1 = tl.full([W], 4294967296, tl.uint64)
STATUS2 = tl.full([W], 8589934592, tl.uint64)
UNKNOWN = tl.full([SPAN, W], 8589934592, tl.uint64)
{source.body}
{_has_zero(matrix, source.used)}
if has_zero:
    {sums} = tl.associative_scan(({scanned}), 0, compose)
else:
    {sums} = tl.associative_scan(({scanned}), 0, compose_nonzero)
end = (tl.arange(0, L) == L - 1)[:, None]
{totals}
if chunk == 0:
{indented(starts)}
else:
{indented(_publish([f"total{name}" for name in parts], 0, 1))}
{indented(_look_back(k, parts))}
{last}
{_publish([f"after{name}" for name in vector], len(parts), 2)}
{states}
{source.finish}
"""
    constants = ", ".join(f"{name}: tl.constexpr" for name in CONSTANTS)
    compositions = "\n\n".join(
        [
            _composition(k, "compose"),
            _composition(k, "compose_nonzero", suffix="_nonzero"),
            _composition(k, "compose_cut", cut=True),
        ]
    )
    head = f"@triton.jit\ndef lookback({pointers}, words_ptr, ticket_ptr, {constants}):\n"
    body = head + indented(body.strip())
    parts = (source.functions, PRODUCTS.strip(), compositions, body)
    return "\n\n".join(part for part in parts if part) + "\n"


def tile_for(steps: int, columns: int, lanes: int, k: int) -> Tile:
    """The fastest tile of those timed on one H100, over 64 to 12,288 lanes.

    With many lanes the tiles before a tile are mostly done, and looking back at two is enough; with few, longer tiles
    make fewer of them. 24 to 48 tiles were tried at each shape; half of them cost more than 1.2 times the best.
    """
    # Sizes of Triton's tiles are powers of two, and no larger than what there is to do.
    width = min(32, 1 << max(0, columns - 1).bit_length())
    length = 256 if lanes <= 128 else 128
    length = min(length if k == 1 else 64, max(16, 1 << (steps - 1).bit_length()))
    return Tile(length, width, 2 if lanes >= 8192 else 4, 4)


def launch(
    source: KernelSource,
    buffers: Sequence[ArrayLike],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    along: ScanAxis,
    *,
    tile: Tile | None = None,
    zeroed: tuple[int, ...] = (),
) -> tuple:
    """Runs the look-back kernel of a source.

    Args:
      source: Coefficients and results of the kernel.
      buffers: Arrays for the source's input pointers, in their order.
      out_shape: Shapes and dtypes for its output pointers, in their order.
      along: The axis of time, and its direction.
      tile: Sizes in which the work is cut; None takes the measured best.
      zeroed: Indices of the outputs that start as zeros.

    Returns:
      The outputs.
    """
    shape = along.shape
    axis = along.axis
    steps = shape[axis]
    lanes = math.prod(shape[:axis] + shape[axis + 1 :])
    columns = math.prod(shape[axis + 1 :])
    batch_stride, time_stride, column_stride = steps * columns, columns, 1
    if columns == 1:  # time is contiguous: the batch becomes the columns
        columns, batch_stride, time_stride, column_stride = lanes, 0, 1, steps
    tile = tile or tile_for(steps, columns, lanes, source.k)
    chunks, per_batch = -(-steps // tile.steps), -(-columns // tile.lanes)
    blocks = per_batch * (lanes // columns)
    back = -time_stride if along.reverse else time_stride
    # A word for each entry of a tile's matrix, of its sum and of its last state; zeroed, since status 0 is "not yet".
    words = chunks * lanes * source.k * (source.k + 2)
    scratch = [
        jax.ShapeDtypeStruct((2 * words,), jnp.uint32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    ]
    outputs = call_kernel(
        *buffers,
        text=kernel_text(source),
        name="lookback",
        out=[*out_shape, *scratch],
        zeroed_outputs=(*zeroed, len(out_shape), len(out_shape) + 1),
        grid=(chunks * blocks,),
        num_warps=tile.warps,
        T=steps,
        L=tile.steps,
        W=tile.lanes,
        SPAN=tile.span,
        LANES=lanes,
        COLUMNS=columns,
        PER_BATCH=per_batch,
        BLOCKS=blocks,
        BATCH_STRIDE=batch_stride,
        TIME_STRIDE=time_stride,
        COLUMN_STRIDE=column_stride,
        REVERSE=along.reverse,
        BACK=back,
        SHIFT=-back if along.adjoint else 0,
    )
    return tuple(outputs[: len(out_shape)])
