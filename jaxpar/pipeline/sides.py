"""What a schedule does beside its tasks: weights gathered and gradients reduced, activations on the host, a vocabulary.

Each function takes a schedule and returns one with more in it.
"""

import dataclasses
import functools

from jaxpar.pipeline.ops import Op, Schedule, Side, Task
from jaxpar.pipeline.timing import (
    SLOTS,
    UNITS,
    SlotSizes,
    TaskCosts,
    Timed,
    simulate_schedule,
    tick_of_each,
)
from jaxpar.types import UsageError

__all__ = ["with_gathers", "with_offload", "with_reductions", "with_vocabulary"]


def with_gathers(schedule: Schedule, ahead: int = 0) -> Schedule:
    """Returns the schedule with the weights of a chunk gathered before each run of tasks with it (FSDP in a stage).

    A device has room for two gathered chunks, one of forward and one of backward passes, and gathers when the next task
    of a direction is of another chunk: 2v times under breadth-first, 2 v ceil(m/U) in units of U microbatches.

    Args:
      schedule: Any.
      ahead: Tasks by which a gather begins earlier.
    """
    sides = list(schedule.sides)
    for device, row in enumerate(schedule.rows):
        held = {}
        for position, (op, chunk, _) in enumerate(row):
            way = {Op.F: "forward", Op.B: "backward", Op.BW: "backward"}.get(op)
            if way and held.get(way) != chunk:
                held[way] = chunk
                first = max(0, position - ahead)
                sides.append(Side(kind="gather", device=device, place=first, chunk=chunk))
    once = tuple(dict.fromkeys(sides))  # one gather serves both directions
    return dataclasses.replace(schedule, sides=once)


def with_reductions(schedule: Schedule) -> Schedule:
    """Returns the schedule with each chunk's gradient reduced as soon as its last microbatch is done.

    Over the shares of FSDP, over data, or between the two copies of BitPipe.
    """
    sides = list(schedule.sides)
    for device, row in enumerate(schedule.rows):
        last = {}
        for position, (op, chunk, _) in enumerate(row):
            if op in (Op.W, Op.BW):
                last[chunk] = position
        for chunk, position in sorted(last.items(), key=lambda entry: entry[1]):
            sides.append(Side(kind="reduce", device=device, place=position + 1, chunk=chunk))
    return dataclasses.replace(schedule, sides=tuple(sides))


def with_offload(
    schedule: Schedule,
    costs: TaskCosts = UNITS,
    *,
    latency: float = 0.0,
    sizes: SlotSizes = SLOTS,
    lockstep: bool = False,
) -> Schedule:
    """Returns the schedule with activations on the host while that costs no time, those kept longest first.

    What lies idle for at least as long as both ways take is a candidate. A fetch begins after the last task that ends
    early enough before the backward task; candidates are taken if the schedule still ends when it did, and no device's
    peak grows. In lock-step they are offloaded in the tick after their F and fetched in that of their backward task, or
    beside the task before if that alone costs no time; there are two ticks between both tasks at least. Cost: two
    simulations where all candidates may be taken, else one for each F. Reference: PipeOffload, arXiv:2503.01328.

    Args:
      schedule: Without offload.
      costs: With `offload` and `fetch`, of one chunk's microbatch.
      latency: Of a message.
      sizes: Bytes of what is kept.
      lockstep: Whether devices keep step, as the program does that runs it.
    """
    timed = functools.partial(
        simulate_schedule, costs=costs, latency=latency, lockstep=lockstep, sizes=sizes
    )
    before = timed(schedule)
    at = {entry.what: entry for entry in before.times if isinstance(entry.what, Task)}
    ticks = tick_of_each(schedule) if lockstep else {}
    gaps = {}
    for task in sorted(schedule.tasks):
        if task.op == Op.F:
            back = schedule.backward(task.chunk, task.microbatch)
            gap = at[back].start - at[task].end
            if gap >= costs.offload + costs.fetch and not (
                lockstep and ticks[back] < ticks[task] + 2
            ):
                gaps[task] = gap

    def tried(
        schedule: Schedule, peak: tuple[float, ...], places: dict[Task, int]
    ) -> tuple[Schedule, tuple] | None:
        """The schedule with these offloaded too, fetched before the tasks at these places, if that costs nothing."""
        pairs = []
        for task, place in places.items():
            device = schedule.device_of(task)
            out = schedule.rows[device].index(task) + 1
            for kind, position in (("offload", out), ("fetch", place)):
                side = Side(
                    kind=kind,
                    device=device,
                    place=position,
                    chunk=task.chunk,
                    microbatch=task.microbatch,
                )
                pairs.append(side)
        more = dataclasses.replace(
            schedule, sides=tuple(sorted((*schedule.sides, *pairs), key=_when))
        )
        try:
            after = timed(more)
        except UsageError:  # in lock-step, transfers are in each other's way
            return None
        is_smaller = all(new <= old for new, old in zip(after.bytes, peak, strict=True))
        return (more, after.bytes) if after.makespan <= before.makespan and is_smaller else None

    def places_of(task: Task) -> tuple[int, ...]:
        row = schedule.rows[schedule.device_of(task)]
        first, last = row.index(task) + 1, row.index(schedule.backward(task.chunk, task.microbatch))
        return (
            (last, last - 1) if lockstep else (_place_of_fetch(row, at, first, last, costs.fetch),)
        )

    if all_at_once := tried(schedule, before.bytes, {task: places_of(task)[0] for task in gaps}):
        return all_at_once[0]
    best = schedule, before.bytes
    for task in sorted(gaps, key=lambda task: (-gaps[task], task)):
        found = (tried(*best, {task: place}) for place in places_of(task))
        best = next((one for one in found if one), best)
    return best[0]


def _place_of_fetch(
    row: tuple[Task, ...], at: dict[Task, Timed], first: int, last: int, time: float
) -> int:
    """After the last task that ends early enough before the one at place `last`."""
    begin = at[row[last]].start - time
    while last > first and at[row[last - 1]].end > begin:
        last -= 1
    return last


def _when(side: Side) -> tuple[int, int, bool]:
    return side.device, side.place, side.kind == "fetch"  # room is made before it is taken


def with_vocabulary(schedule: Schedule, costs: TaskCosts = UNITS, latency: float = 0.0) -> Schedule:
    """Returns the schedule with the head's rows split over all devices: S after the last chunk, T after that.

    Between the last chunk's F and its backward task all devices do S, so one more microbatch is under way than
    before. One barrier merges the shares: with Y_i = X W_i^T on device i, m_i its maximum and s_i = sum exp(Y_i - m_i),
    the softmax of all needs m = max m_i and s = sum s_i exp(m_i - m) alone (arXiv:2411.05288, section 4).

    Args:
      schedule: Of one copy of the model, without S and T.
      costs: By which the tasks find their places in the rows.
      latency: Of a message.

    Raises:
      UsageError: If there are two copies, or the head is split already.
    """
    if schedule.copies > 1 or schedule.has_vocabulary:
        raise UsageError(
            f"the head of {schedule.name} is split already, or there are two; take one copy without."
        )
    timing = simulate_schedule(schedule, costs, latency=latency)
    at = {entry.what: entry for entry in timing.times if isinstance(entry.what, Task)}
    last = schedule.path(0)[-1]
    rows = []
    for device, row in enumerate(schedule.rows):
        # Keys of one order of all devices' tasks, each after what it needs: so nobody waits for ever.
        keyed = [((at[task].start, 2), task) for task in row]
        for j in range(schedule.microbatches):
            known = at[Task(Op.F, last, j)].end
            keyed += [
                ((known, 0), Task(Op.S, device, j)),
                ((known + costs.S, 1), Task(Op.T, device, j)),
            ]
        rows.append(tuple(task for _, task in sorted(keyed, key=lambda entry: entry[0])))
    name = f"{schedule.name}+vocabulary"
    return dataclasses.replace(schedule, name=name, rows=tuple(rows), sides=())
