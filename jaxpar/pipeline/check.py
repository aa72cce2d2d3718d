"""What is wrong with a schedule, in sentences; nothing where it can run."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

from jaxpar.pipeline.ops import SIDES, Op, Schedule, Side, Task, wrong_indices
from jaxpar.pipeline.timing import UNITS, simulate_schedule, try_run

__all__ = ["check_schedule"]


def check_schedule(schedule: Schedule, cap: int | None = None) -> list[str]:
    """Returns what is wrong with a schedule, a sentence each: an empty list where it can run.

    Each number of a chunk, a microbatch or a device is in range. Each task is there once, on the
    device of its chunk. Each chunk of each microbatch has F, and BW or both B and W. S and T are on
    all devices or on none. No device waits for ever or keeps more than `cap`. An offload begins after
    its F, comes back before it is needed, and travels once. Weights are gathered before a chunk's first
    task, and gradients reduced after its last.

    Args:
      schedule: Any.
      cap: Microbatches of a chunk that a device keeps from F to the last task that needs them, at most.
    """
    found = [*wrong_indices(schedule)] or [*_wrong_tasks(schedule)]
    if found:
        return found  # what follows reads tasks that are there
    _, stuck, _ = try_run(dataclasses.replace(schedule, sides=()), UNITS, 0.0)
    found += stuck
    found += _wrong_sides(schedule)
    if not found and cap is not None:
        held = simulate_schedule(schedule).held
        found += [
            f"device {d} keeps {n} microbatches of a chunk, over a cap of {cap}"
            for d, n in enumerate(held)
            if n > cap
        ]
    return found


def _wrong_tasks(schedule: Schedule) -> Iterator[str]:
    times = Counter(task for row in schedule.rows for task in row)
    for device, row in enumerate(schedule.rows):
        for task in row:
            if schedule.device_of(task) != device:
                yield f"{task} is on device {device}, its chunk on device {schedule.device_of(task)}"
    yield from (f"{task} is there {count} times" for task, count in times.items() if count > 1)
    legal = set()
    for j in range(schedule.microbatches):
        for chunk in schedule.path(j):
            f, b, w, bw = (Task(op, chunk, j) for op in (Op.F, Op.B, Op.W, Op.BW))
            legal |= {f, b, w, bw}
            if f not in times:
                yield f"{f} is missing"
            if bw in times and (b in times or w in times):
                yield f"chunk {chunk} goes back twice with microbatch {j}: {bw} beside {b if b in times else w}"
            elif bw not in times:
                yield from (f"{task} is missing" for task in (b, w) if task not in times)
        for op in (Op.S, Op.T) if schedule.has_vocabulary else ():
            shares = [Task(op, device, j) for device in range(schedule.devices)]
            legal |= set(shares)
            yield from (f"{task} is missing" for task in shares if task not in times)
    yield from (
        f"{task} is of no chunk that microbatch {task.microbatch} passes"
        for task in times.keys() - legal
    )


def _wrong_sides(schedule: Schedule) -> Iterator[str]:
    by_kind: dict[tuple, list[Side]] = {}
    for side in schedule.sides:
        row = schedule.rows[side.device]
        if side.kind not in SIDES or not 0 <= side.place <= len(row):
            yield f"{side} is none of {', '.join(SIDES)}, or at no place of its row"
            return
        by_kind.setdefault((side.kind, side.device, side.chunk, side.microbatch), []).append(side)
    for (kind, device, chunk, j), sides in by_kind.items():
        row = schedule.rows[device]
        if kind in ("offload", "fetch"):
            name = f"what chunk {chunk} keeps of microbatch {j}"
            if len(sides) > 1:
                yield f"{name} is taken by {kind} {len(sides)} times"
            other = by_kind.get(("offload" if kind == "fetch" else "fetch", device, chunk, j))
            if Task(Op.F, chunk, j) not in row:
                yield f"{name} is not on device {device}"
            elif kind == "offload" and sides[0].place <= row.index(Task(Op.F, chunk, j)):
                yield f"{name} is offloaded before it is there"
            elif not other:
                yield f"{name} has {kind} and nothing that undoes it"
            elif kind == "fetch":
                if (sides[0].place, schedule.sides.index(sides[0])) < (
                    other[0].place,
                    schedule.sides.index(other[0]),
                ):
                    yield f"{name} comes back before it is offloaded"
                if sides[0].place > row.index(schedule.backward(chunk, j)):
                    yield f"{name} comes back after it is needed"
        elif chunk not in schedule.chunks_of(device):
            owner = schedule.placement[chunk]
            yield f"{kind} of chunk {chunk} is on device {device}, its chunk on device {owner}"
        else:
            users = [
                i
                for i, task in enumerate(row)
                if task.chunk == chunk and task.op not in (Op.S, Op.T)
            ]
            if not users:
                yield f"{kind} of chunk {chunk} serves no task of device {device}"
                continue
            if kind == "reduce" and (len(sides) > 1 or sides[0].place <= users[-1]):
                yield f"the gradient of chunk {chunk} is reduced on device {device} before its last task"
            if kind == "gather" and min(side.place for side in sides) > users[0]:
                yield f"chunk {chunk} is used on device {device} before its weights are gathered"
