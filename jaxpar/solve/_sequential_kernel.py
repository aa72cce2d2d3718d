"""The Triton kernel that runs sequentially: a thread a lane, the state in registers, inputs of later steps in flight.

A warp owns 32 neighbouring lanes and goes through time alone, so that lanes are what fills the
machine, and a step costs what its arithmetic waits for. Every array is read once and written once.
"""

import dataclasses
import math

import jax

from jaxpar.lower.triton import call_kernel, indented

CONSTANTS = ("T", "LANES", "COLUMNS", "BATCH_STRIDE", "TIME_STRIDE", "REVERSE", "AHEAD")
WARP = 32  # lanes of a program, which is one warp


@dataclasses.dataclass(frozen=True)
class SequentialKernel:
    """What is done at every step.

    Attributes:
      k: Components of the state of a lane.
      x_columns: For each input its elements a step: as many as lanes, or those of the last axes of
        the lanes' shape.
      c_columns: Elements of each constant, likewise.
      functions: Source of `cell(g0.., x0.., c0..)`, which returns the k new components.
      ahead: Steps whose inputs are in flight; of 4, 8 and 16, 16 was fastest on an H100, and more
        compile for minutes.
    """

    k: int
    x_columns: tuple[int, ...]
    c_columns: tuple[int, ...]
    functions: str
    ahead: int = 16


def sequential_source(work: SequentialKernel, lanes: int) -> str:
    """Returns the Triton source of the kernel `states`."""
    ks, xs, cs = range(work.k), range(len(work.x_columns)), range(len(work.c_columns))
    pointers = [
        f"{name}{i}_ptr"
        for name, places in (("start", ks), ("x", xs), ("c", cs), ("h", ks))
        for i in places
    ]

    # Loads of a loop's trip are issued before the arithmetic of the trip before: `ahead` steps of inputs wait in
    # registers, n for the next trip and x for this one, so that no step waits for memory. Offsets in time are 64 bits
    # wide: T times lanes may be over 2^31.
    def place(step: str, u: int) -> list[str]:
        # A step that does not exist reads what the last one reads: no mask, and nothing out of bounds.
        return [
            f"step_{u} = tl.minimum({step} + {u}, T - 1)",
            f"at_{u} = tl.where(REVERSE, T - 1 - step_{u}, step_{u})",
        ]

    def load(into: str, u: int) -> list[str]:
        lines = []
        for i, columns in enumerate(work.x_columns):
            if (
                columns == lanes
            ):  # an element a lane; else one of the last axes, which repeats over lanes
                address = f"x{i}_ptr + base + at_{u}.to(tl.int64) * TIME_STRIDE"
            else:
                address = f"x{i}_ptr + at_{u}.to(tl.int64) * {columns} + lane % {columns}"
            lines.append(f"{into}{i}_{u} = tl.load({address}, mask=live, other=0.0).to(tl.float32)")
        return lines

    lines = ["lane = tl.program_id(0) * 32 + tl.arange(0, 32)", "live = lane < LANES"]
    lines.append("base = (lane // COLUMNS).to(tl.int64) * BATCH_STRIDE + lane % COLUMNS")
    # The state stays in float32 registers from the first step to the last, also where it is stored as 16 bits.
    lines += [
        f"g{i} = tl.load(start{i}_ptr + lane, mask=live, other=0.0).to(tl.float32)" for i in ks
    ]
    lines += [
        f"c{i} = tl.load(c{i}_ptr + lane % {n}).to(tl.float32)"
        for i, n in enumerate(work.c_columns)
    ]
    for u in range(work.ahead):
        lines += [*place("0", u), *load("x", u)]
    lines.append("for first in range(0, T, AHEAD):")
    inner = []
    for u in range(work.ahead):
        inner += [*place("first + AHEAD", u), *load("n", u)]
    for u in range(work.ahead):
        arguments = [f"g{i}" for i in ks] + [f"x{i}_{u}" for i in xs] + [f"c{i}" for i in cs]
        inner += [
            f"{', '.join(f'g{i}' for i in ks)} = cell({', '.join(arguments)})",
            f"step = first + {u}",
        ]
        inner.append(
            "row = base + tl.where(REVERSE, T - 1 - step, step).to(tl.int64) * TIME_STRIDE"
        )
        # The last trip may go beyond T: it computes on what step T - 1 read, and writes nothing.
        inner += [f"tl.store(h{i}_ptr + row, g{i}, mask=live & (step < T))" for i in ks]
    inner += [f"x{i}_{u} = n{i}_{u}" for u in range(work.ahead) for i in xs]
    lines += ["    " + line for line in inner]
    head = ", ".join((*pointers, *(f"{name}: tl.constexpr" for name in CONSTANTS)))
    return (
        f"{work.functions}\n\n@triton.jit\ndef states({head}):\n"
        + indented("\n".join(lines))
        + "\n"
    )


def launch_sequential(
    work: SequentialKernel,
    start,
    xs,
    constants,
    shape: tuple[int, ...],
    axis: int,
    *,
    reverse: bool = False,
) -> tuple:
    """Runs the kernel; returns k arrays of states of one `shape`, with time at `axis`, of the dtypes of `start`.

    Inputs of as many columns as lanes are of that shape; with others, and with several of them,
    time comes first.
    """
    steps, columns = shape[axis], math.prod(shape[axis + 1 :])
    lanes = math.prod(shape[:axis]) * columns
    return tuple(
        call_kernel(
            *start,
            *xs,
            *constants,
            text=sequential_source(work, lanes),
            name="states",
            out=[jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf in start],
            grid=(-(-lanes // WARP),),
            num_warps=1,
            T=steps,
            LANES=lanes,
            COLUMNS=columns,
            BATCH_STRIDE=steps * columns,
            TIME_STRIDE=columns,
            REVERSE=reverse,
            AHEAD=work.ahead,
        )
    )
