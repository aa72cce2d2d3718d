"""A schedule as text and as a picture."""

from pathlib import Path

from jaxpar.io.figure import COLORS as COLORS_IN_TURN
from jaxpar.io.figure import empty_figure, save, tidy
from jaxpar.pipeline.ops import Op, Schedule, Side, Task
from jaxpar.pipeline.timing import UNITS, TaskCosts, Timing, simulate_schedule, tick_of_each

__all__ = ["draw_schedule", "schedule_text"]

COLORS: dict[Op, str] = dict(
    zip((Op.F, Op.B, Op.W, Op.S, Op.BW, Op.T), COLORS_IN_TURN, strict=False)
)
WORDS = {Op.F: "forward", Op.B: "gradient of inputs", Op.W: "gradient of weights", Op.BW: "gradient of both",
         Op.S: "softmax of the vocabulary", Op.T: "gradient of the vocabulary"}  # fmt: skip
PALER = ", paler boxes later chunks"
LETTERS = {Op.F: "F", Op.B: "B", Op.W: "W", Op.BW: "D", Op.S: "S", Op.T: "T"}
ROWS = {"offload": 0, "fetch": 1, "gather": 0, "reduce": 1}


def schedule_text(schedule: Schedule, numbered: bool = False) -> str:
    """Returns a line a device and a letter a tick: F, B, W, D for B and W at once, S, T, and a dot where it waits.

    Args:
      schedule: That can run.
      numbered: Whether each letter has its microbatch, and after a point its chunk where a device has several.
    """
    ticks = tick_of_each(schedule)
    length = max(ticks.values()) + 1
    lines = []
    for device, row in enumerate(schedule.rows):
        several = len(schedule.chunks_of(device)) > 1
        cells = ["."] * length
        for task in row:
            number = f"{task.microbatch}.{task.chunk}" if several else str(task.microbatch)
            cells[ticks[task]] = LETTERS[task.op] + (number if numbered else "")
        width = max(map(len, cells))
        lines.append(
            " ".join(cell.ljust(width) for cell in cells).rstrip() if numbered else "".join(cells)
        )
    return "\n".join(lines)


def draw_schedule(
    schedule: Schedule,
    out: Path,
    costs: TaskCosts = UNITS,
    *,
    latency: float = 0.0,
    lockstep: bool = False,
) -> Timing:
    """Draws when each device does what as a PNG, and returns the simulation it shows.

    A row a device, a box a task with its microbatch; later chunks of a device are paler. Thin bars below are what runs
    beside: to the host and back, gathers and reductions.

    Args:
      schedule: That can run.
      out: The file.
      costs: Time of each task.
      latency: Of a message.
      lockstep: Whether devices keep in step.

    Raises:
      UsageError: If matplotlib is missing.
    """
    figure = empty_figure(11, 1.5 + 0.45 * schedule.devices)
    from matplotlib.patches import Patch

    timing = simulate_schedule(schedule, costs, latency=latency, lockstep=lockstep)
    axes, has_chunks = (
        figure.subplots(),
        any(len(schedule.chunks_of(d)) > 1 for d in range(schedule.devices)),
    )
    for what, device, start, end in timing.times:
        if isinstance(what, Side):
            axes.barh(
                device + 0.41 + 0.06 * ROWS[what.kind],
                end - start,
                left=start,
                height=0.05,
                color="0.3",
            )
            continue
        shade = schedule.chunks_of(device).index(what.chunk) if what.op not in (Op.S, Op.T) else 0
        alpha = 1 - 0.55 * shade / max(1, len(schedule.chunks_of(device)) - 1)
        axes.barh(
            device,
            end - start,
            left=start,
            height=0.76,
            color=COLORS[what.op],
            alpha=alpha,
            edgecolor="white",
            lw=0.4,
        )
        if (end - start) * 90 > timing.makespan:
            text = str(what.microbatch)
            axes.text(
                (start + end) / 2,
                device,
                text,
                ha="center",
                va="center",
                fontsize=6,
                color="white" if alpha > 0.6 else "black",
            )
    used = sorted({entry.what.op for entry in timing.times if isinstance(entry.what, Task)})
    axes.legend(
        handles=[Patch(color=COLORS[op], label=WORDS[op]) for op in used],
        ncols=len(used), fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0,
        handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
    axes.set(yticks=range(schedule.devices), ylabel="device", xlim=(0, timing.makespan))
    axes.set_xlabel("time, in units of the costs; numbers are microbatches" + PALER * has_chunks)
    axes.set_title(
        f"{schedule}: idle {timing.idle_fraction:.1%}, keeps {max(timing.held)}",
        fontsize=8,
        loc="left",
    )
    axes.invert_yaxis()
    tidy(axes, "")
    save(figure, out)
    return timing
