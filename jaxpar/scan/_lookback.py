"""Source of the Triton kernel: one pass over memory, tiles of time in parallel, carries by decoupled look-back.

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
import functools
import linecache

__all__ = ["Source", "arrays", "compiled", "indented", "kernel_text"]


CONSTANTS = (
    *("T", "L", "W", "SPAN", "LANES", "COLUMNS", "PER_BATCH", "BLOCKS"),
    *("BATCH_STRIDE", "TIME_STRIDE", "COLUMN_STRIDE", "REVERSE", "SHIFT", "BACK"),
)
"""What is known when the kernel is compiled: sizes, strides in elements, and directions."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tile gets its coefficients from, and what is written.

    Attributes:
      k: Components of the state of a lane.
      inputs: Names of the input pointers.
      outputs: Names of the output pointers.
      body: Defines the tiles `a<i><j>` and `b<i>` [L, W] from `at` (64-bit offset of each element), `mask`, `step` [L]
        (in the order of the scan), `lane` and `live` [W]. What they are out of `mask` does not matter.
      start: Expression of component {i} of the state before the first step, [W].
      finish: Writes the states, the tiles `h<i>`.
      functions: Definitions that `body` calls.
    """

    k: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    finish: str
    start: str = "tl.zeros([W], tl.float32)"
    functions: str = ""


def arrays(k: int, has_start: bool) -> Source:
    """Coefficients read from arrays, one a component; with SHIFT those of a belong to the step before."""
    body, pairs = [], [(i, j) for i in range(k) for j in range(k)]
    # Without a start, what the first step's a is does not matter, be it infinite.
    body.append("used = mask" if has_start else "used = mask & (step > 0)[:, None]")
    for i, j in pairs:
        body.append(f"a{i}{j} = tl.load(a{i}{j}_ptr + at + SHIFT, mask=used, other=0.0).to(tl.float32)")
    body += [f"b{i} = tl.load(b{i}_ptr + at, mask=mask, other=0.0).to(tl.float32)" for i in range(k)]
    inputs = [f"a{i}{j}_ptr" for i, j in pairs] + [f"b{i}_ptr" for i in range(k)]
    if has_start:
        inputs += [f"start{i}_ptr" for i in range(k)]
    return Source(
        k,
        tuple(inputs),
        tuple(f"h{i}_ptr" for i in range(k)),
        "\n".join(body),
        "\n".join(f"tl.store(h{i}_ptr + at, h{i}, mask=mask)" for i in range(k)),
        "tl.load(start{i}_ptr + lane, mask=live, other=0.0).to(tl.float32)" if has_start else Source.start,
    )


def _composition(k: int, name: str, cut: bool) -> str:
    """A function of the maps (P, s) of two spans, left the earlier; `cut` adds a flag that forgets what was before."""

    def names(side):
        return [f"{side}{i}{j}" for i in range(k) for j in range(k)] + [f"{side}{i}" for i in range(k)]

    def row(i, right_of):
        return " + ".join(f"r{i}{m} * {right_of(m)}" for m in range(k))

    products = [row(i, lambda m, j=j: f"l{m}{j}") for i in range(k) for j in range(k)]
    sums = [row(i, lambda m: f"l{m}") + f" + r{i}" for i in range(k)]
    if cut:
        products = [f"tl.where(rc > 0, 0.0, {text})" for text in products]
        sums = [f"tl.where(rc > 0, r{i}, {text})" for i, text in enumerate(sums)] + ["tl.maximum(lc, rc)"]
    arguments = names("l") + ["lc"] * cut + names("r") + ["rc"] * cut
    return f"@triton.jit\ndef {name}({', '.join(arguments)}):\n    return {', '.join(products + sums)}\n"


def _look_back(k: int, parts: list[str]) -> str:
    """Lines that find `carry<i>`, the state before this tile, from the words of earlier tiles, SPAN at a time."""
    matrix, vector = parts[: k * k], parts[k * k :]
    lines = [f"run{name} = tl.full([W], {float(name in [f'{i}{i}' for i in range(k)])}, tl.float32)" for name in matrix]
    lines += [f"run{name} = tl.zeros([W], tl.float32)" for name in vector]
    lines += ["known = tl.zeros([W], tl.int32)", "newest = chunk - 1", "open = 1", "while open > 0:"]
    lines += ["    back = newest - (SPAN - 1) + tl.arange(0, SPAN)", "    there = (back >= 0)[:, None] & live[None, :]"]
    lines += [f"    word = words + (back[:, None].to(tl.int64) * LANES + lane[None, :]) * {len(parts) + k}"]
    poll = [f"w{i} = tl.load(word + {i}, mask=there, other=UNKNOWN, volatile=True)" for i in range(len(parts) + k)]
    poll.append(
        "waiting = tl.max(tl.max(1 - ("
        + _status(parts, 0, 1)
        + " | "
        + _status(vector, len(parts), 2)
        + ").to(tl.int32), 1), 0)"
    )
    lines += ["    " + line for line in poll] + ["    while waiting > 0:"] + ["        " + line for line in poll]
    lines += [f"    final = {_status(vector, len(parts), 2)}"]
    for place, name in enumerate(parts):
        lines.append(f"    v{name} = {_read(place)}")
    lines += [f"    v{name} = tl.where(final, 0.0, v{name})" for name in matrix]
    for place, name in enumerate(vector, len(parts)):
        lines.append(f"    v{name} = tl.where(final, {_read(place)}, v{name})")
    names = ", ".join(f"v{name}" for name in parts)
    lines += [f"    {names}, cut = tl.associative_scan(({names}, final.to(tl.int32)), 0, compose_cut)"]
    lines += ["    last = (tl.arange(0, SPAN) == SPAN - 1)[:, None]"]
    for name in [*(f"v{name}" for name in parts), "cut"]:
        lines.append(f"    {name} = tl.sum(tl.where(last, {name}, 0), 0)")
    for i in range(k):
        total = " + ".join(f"run{i}{m} * v{m}" for m in range(k))
        lines.append(f"    run{i} = tl.where(known > 0, run{i}, {total} + run{i})")
    for i in range(k):
        for j in range(k):
            lines.append(f"    next{i}{j} = " + " + ".join(f"run{i}{m} * v{m}{j}" for m in range(k)))
    lines += [f"    run{i}{j} = next{i}{j}" for i in range(k) for j in range(k)]
    lines += ["    known = tl.maximum(known, cut)", "    newest -= SPAN", "    open = 1 - tl.min(known, 0)"]
    lines += [f"carry{i} = run{i}" for i in range(k)]
    return "\n".join(lines)


def _status(parts: list[str], first: int, status: int) -> str:
    """Whether all words of some parts have been published."""
    return "(" + " & ".join(f"((w{first + i} >> 32) == {status})" for i in range(len(parts))) + ")"


def _read(place: int) -> str:
    return f"(w{place} & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)"


def _publish(values: list[str], first: int, status: int) -> str:
    lines = []
    for place, value in enumerate(values, first):
        bits = f"{value}.to(tl.uint32, bitcast=True).to(tl.uint64)"
        lines.append(f"tl.store(words + own + {place}, {bits} | STATUS{status}, mask=live)")
    return "\n".join(lines)


def kernel_text(source: Source) -> str:
    """Returns the Triton source of the kernel `lookback`."""
    k = source.k
    matrix = [f"{i}{j}" for i in range(k) for j in range(k)]
    vector = [f"{i}" for i in range(k)]
    parts = matrix + vector
    scanned = ", ".join([f"a{name}" for name in matrix] + [f"b{name}" for name in vector])
    sums = ", ".join([f"p{name}" for name in matrix] + [f"s{name}" for name in vector])
    totals = "\n".join(
        f"total{name} = tl.sum(tl.where(end, {'p' if name in matrix else 's'}{name}, 0.0), 0)" for name in parts
    )
    last = "\n".join(
        f"after{i} = " + " + ".join(f"total{i}{m} * carry{m}" for m in range(k)) + f" + total{i}" for i in range(k)
    )
    states = "\n".join(
        f"h{i} = " + " + ".join(f"p{i}{m} * carry{m}[None, :]" for m in range(k)) + f" + s{i}" for i in range(k)
    )
    starts = "\n".join(f"carry{i} = " + source.start.format(i=i) for i in range(k))
    pointers = ", ".join((*source.inputs, *source.outputs))
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
{sums} = tl.associative_scan(({scanned}), 0, compose)
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
    compositions = _composition(k, "compose", False) + "\n\n" + _composition(k, "compose_cut", True)
    head = f"@triton.jit\ndef lookback({pointers}, words_ptr, ticket_ptr, {constants}):\n"
    return "\n\n".join(part for part in (source.functions, compositions, head + indented(body.strip())) if part) + "\n"


def indented(text: str) -> str:
    """Returns the lines one level further in."""
    return "\n".join("    " + line if line else line for line in text.split("\n"))


@functools.cache
def compiled(text: str, name: str):
    """Returns the Triton function `name` of a source text, which stays readable to Triton and to a debugger."""
    import triton
    import triton.language as tl

    place = f"<jaxpar kernel {name} {abs(hash(text)):x}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    scope = {"triton": triton, "tl": tl, "__name__": "jaxpar.kernels"}
    exec(compile(text, place, "exec"), scope)
    return scope[name]
