"""What a schedule does beside its tasks: weights gathered and gradients reduced, activations on the host, a vocabulary.

Each function takes a schedule and returns one with more in it.
"""

import dataclasses

from jaxpar.parallel.pipeline.ops import Op, Schedule, Side, Task
from jaxpar.parallel.pipeline.timing import SLOTS, UNITS, SlotSizes, TaskCosts, simulate_schedule
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
        for place, (op, chunk, _) in enumerate(row):
            way = {Op.F: "forward", Op.B: "backward", Op.BW: "backward"}.get(op)
            if way and held.get(way) != chunk:
                held[way] = chunk
                sides.append(Side("gather", device, max(0, place - ahead), chunk))
    return dataclasses.replace(schedule, sides=tuple(dict.fromkeys(sides)))  # one gather serves both directions


def with_reductions(schedule: Schedule) -> Schedule:
    """Returns the schedule with each chunk's gradient reduced as soon as its last microbatch is done.

    Over the shares of FSDP, over data, or between the two copies of BitPipe.
    """
    sides = list(schedule.sides)
    for device, row in enumerate(schedule.rows):
        last = {chunk: place for place, (op, chunk, _) in enumerate(row) if op in (Op.W, Op.BW)}
        ordered = sorted(last.items(), key=lambda entry: entry[1])
        sides += [Side("reduce", device, place + 1, chunk) for chunk, place in ordered]
    return dataclasses.replace(schedule, sides=tuple(sides))


def with_offload(
    schedule: Schedule,
    costs: TaskCosts = UNITS,
    *,
    latency: float = 0.0,
    sizes: SlotSizes = SLOTS,
) -> Schedule:
    """Returns the schedule with activations on the host while that costs no time, those kept longest first.

    What lies idle for at least as long as both ways take is a candidate. A fetch begins after the last task that ends
    early enough before the backward task; a candidate is taken if the schedule still ends when it did, and no device's
    peak grows. Cost: a simulation for each F. Reference: PipeOffload, arXiv:2503.01328.

    Args:
      schedule: Without offload.
      costs: With `offload` and `fetch`, of one chunk's microbatch.
      latency: Of a message.
      sizes: Bytes of what is kept.
    """
    before = simulate_schedule(schedule, costs, latency=latency, sizes=sizes)
    at = {entry.what: entry for entry in before.times if isinstance(entry.what, Task)}
    gaps = {}
    for task in sorted(schedule.tasks):
        if task.op == Op.F:
            back = schedule.backward(task.chunk, task.microbatch)
            gaps[task] = at[back].start - at[task].end
    peak = before.bytes
    for task in sorted(gaps, key=lambda task: (-gaps[task], task)):
        if gaps[task] < costs.offload + costs.fetch:
            break
        device = schedule.device_of(task)
        row = schedule.rows[device]
        back = schedule.backward(task.chunk, task.microbatch)
        out, place = row.index(task) + 1, row.index(back)
        while place > out and at[row[place - 1]].end > at[back].start - costs.fetch:
            place -= 1
        pair = [Side(kind, device, where, *task[1:]) for kind, where in (("offload", out), ("fetch", place))]
        tried = dataclasses.replace(schedule, sides=tuple(sorted((*schedule.sides, *pair), key=_when)))
        after = simulate_schedule(tried, costs, latency=latency, sizes=sizes)
        is_smaller = all(new <= old for new, old in zip(after.bytes, peak, strict=True))
        if after.makespan <= before.makespan and is_smaller:
            schedule, peak = tried, after.bytes
    return schedule


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
        raise UsageError(f"the head of {schedule.name} is split already, or there are two; take one copy without.")
    timing = simulate_schedule(schedule, costs, latency=latency)
    at = {entry.what: entry for entry in timing.times if isinstance(entry.what, Task)}
    last = schedule.path(0)[-1]
    rows = []
    for device, row in enumerate(schedule.rows):
        # Keys of one order of all devices' tasks, each after what it needs: so nobody waits for ever.
        keyed = [((at[task].start, 2), task) for task in row]
        for j in range(schedule.microbatches):
            known = at[Task(Op.F, last, j)].end
            keyed += [((known, 0), Task(Op.S, device, j)), ((known + costs.S, 1), Task(Op.T, device, j))]
        rows.append(tuple(task for _, task in sorted(keyed, key=lambda entry: entry[0])))
    name = f"{schedule.name}+vocabulary"
    return dataclasses.replace(schedule, name=name, rows=tuple(rows), sides=())
