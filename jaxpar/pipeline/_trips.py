"""In which tick of a program something goes to the host or comes back, and weights are gathered."""

from jaxpar.pipeline.ops import Op, Schedule, Side, Task
from jaxpar.types import UsageError


def tick_of_side(schedule: Schedule, ticks: dict[Task, int], side: Side) -> int:
    """Returns the tick after the last task before a side's place."""
    return ticks[schedule.rows[side.device][side.place - 1]] + 1 if side.place else 0


def ticks_of_gathers(schedule: Schedule, ticks: dict[Task, int]) -> dict[Side, int]:
    """Returns the tick of each gather of weights: that of its place, but one on a device at a time.

    Two of a device never have the same place but at the start of its row, so each still comes before what reads it.
    """
    found: dict[Side, int] = {}
    free = [0] * schedule.devices
    for side in sorted(
        (side for side in schedule.sides if side.kind == "gather"), key=lambda side: side[1:3]
    ):
        found[side] = max(tick_of_side(schedule, ticks, side), free[side.device])
        free[side.device] = found[side] + 1
    return found


def ticks_of_transfers(schedule: Schedule, ticks: dict[Task, int]) -> dict[Side, int]:
    """Returns the tick of each offload and fetch: that of its place, but one of a kind on a device at a time.

    An offload waits for its F and for the one before; a fetch comes no later than in the tick of its backward task, and
    earlier where another is in its way.

    Raises:
      UsageError: If something is offloaded and not fetched, or the other way round, or has no time for both.
    """
    wishes: dict[tuple[str, int], list[tuple[int, Side]]] = {}
    for side in schedule.sides:
        if side.kind in ("offload", "fetch"):
            when = tick_of_side(schedule, ticks, side)
            if side.kind == "offload":
                forward = Task(op=Op.F, chunk=side.chunk, microbatch=side.microbatch)
                when = max(when, ticks[forward] + 1)
            else:
                when = min(when, ticks[schedule.backward(side.chunk, side.microbatch)])
            wishes.setdefault(side[:2], []).append((when, side))
    found: dict[Side, int] = {}
    for (kind, _), wished in wishes.items():
        is_fetch, free = kind == "fetch", None
        for when, side in sorted(wished, key=lambda entry: entry[0], reverse=is_fetch):
            if free is not None:
                when = min(when, free) if is_fetch else max(when, free)
            found[side], free = when, when - 1 if is_fetch else when + 1
    ways = {(side.kind, *side[3:]): when for side, when in found.items()}
    for kind, chunk, j in ways:
        name = f"what chunk {chunk} keeps of microbatch {j}"
        out, back = (ways.get((way, chunk, j)) for way in ("offload", "fetch"))
        if out is None or back is None:
            raise UsageError(
                f"{name} has {kind} and nothing that undoes it; `check_schedule` says what is wrong."
            )
        if back <= out:
            raise UsageError(
                f"{name} has no time to go to the host and come back in lock-step, where its backward task comes two "
                "ticks after its F at least; `with_offload(lockstep=True)` takes what has."
            )
    return found
