"""A schedule sought for given costs and memory, never worse than those with a closed form."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

from jaxpar.pipeline import orders
from jaxpar.pipeline.greedy import Preference, best_of, list_schedule
from jaxpar.pipeline.ops import Op, Schedule, Task, loop, require, vee
from jaxpar.pipeline.timing import UNITS, TaskCosts, try_run
from jaxpar.types import UsageError

__all__ = ["closed_forms", "search_schedule"]


def closed_forms(placement: tuple[int, ...], microbatches: int) -> list[Schedule]:
    """Returns the schedules with a closed form whose chunks lie so, fused and split."""
    devices = max(placement) + 1
    chunks = len(placement) // devices
    found: list[Schedule] = []
    if placement == loop(devices):
        pair = devices, microbatches
        found += [orders.gpipe(*pair), orders.one_f_one_b(*pair), orders.one_f_one_b(*pair, True)]
        found += [orders.zb_h1(*pair), orders.zb_h2(*pair)]
        found += [orders.zero_bubble(*pair, limit) for limit in range(devices + 1, 2 * devices - 1)]
    elif placement == loop(devices, chunks):
        triple = devices, microbatches, chunks
        units = sorted({devices, 2 * devices, max(devices, microbatches)})
        found += [orders.breadth_first(*triple), orders.interleaved(*triple)]
        found += [orders.blockwise(*triple, unit) for unit in units]
    elif placement == vee(devices):
        found.append(orders.zb_v(devices, microbatches))
    return found


def search_schedule(
    placement: tuple[int, ...],
    microbatches: int,
    costs: TaskCosts = UNITS,
    cap: int | None = None,
    *,
    latency: float = 0.0,
    swaps: int = 200,
    seed: int = 0,
) -> Schedule:
    """Returns the schedule found that ends first and on no device keeps more than a cap.

    Candidates are all with a closed form of this placement (`closed_forms`) and those of `list_schedule` by eight
    rules, with as many microbatches in flight as may help (the idea of arXiv:2401.10241, section 4.1); the best one's
    tasks are then moved within their rows while it ends no later. It is never worse than the closed forms at its cap.
    Cost: `swaps` simulations, about a millisecond each at 100 tasks.

    Args:
      placement: The device of each chunk, as by `loop`, `wave` or `vee`.
      microbatches: m.
      costs: Time of each task.
      cap: Microbatches of a chunk that a device keeps from F to W or BW, at most; None for any number.
      latency: Of a message.
      swaps: Moves that are tried.
      seed: Of the moves.

    Raises:
      UsageError: If nothing fits the cap: a device keeps a microbatch of each of its chunks at least.
    """
    devices = max(placement) + 1
    require(devices, microbatches)
    least = max(map(placement.count, range(devices)))
    if cap is not None and cap < least:
        raise UsageError(
            f"a device has {least} chunks, and keeps as many of one microbatch; cap={cap} is too small."
        )
    candidates = [
        *closed_forms(placement, microbatches),
        *_by_rules(placement, microbatches, costs, cap, latency),
    ]
    best = best_of([each for each in candidates if _fits(each, cap)], costs, latency)
    best = _improve(best, costs, cap, latency, swaps, random.Random(seed))
    return dataclasses.replace(best, name="searched")


def _fits(schedule: Schedule, cap: int | None) -> bool:
    """Counts along each row: when tasks run does not matter for what a device keeps."""
    if cap is None:
        return True
    for row in schedule.rows:
        held = 0
        for task in row:
            held += {Op.F: 1, Op.W: -1, Op.BW: -1}.get(task.op, 0)
            if held > cap:
                return False
    return True


def _by_rules(
    placement: tuple[int, ...], m: int, costs: TaskCosts, cap: int | None, latency: float
) -> Iterator[Schedule]:
    devices = max(placement) + 1
    chunks = max(map(placement.count, range(devices)))
    safe = (
        m if cap is None else min(m, cap // chunks)
    )  # so many can never leave each other without room
    counts = sorted(
        {safe, min(m, devices), min(m, 2 * devices - 1), m if cap is None else min(m, cap)}
    )
    switches = itertools.product((True, False), repeat=3)
    for (first, deep, waits), count in itertools.product(switches, counts):
        made = list_schedule(
            "rule", placement, m, Preference(count, cap, True, first, deep, waits), costs, latency
        )
        if made is not None:
            yield made


def _improve(
    schedule: Schedule,
    costs: TaskCosts,
    cap: int | None,
    latency: float,
    swaps: int,
    draw: random.Random,
) -> Schedule:
    """Moves single tasks earlier or later in their rows while that ends no later; equal ends may lead on."""
    end = _end(schedule, costs, latency)
    best, best_end = schedule, end
    bound = max(sum(map(costs.of, row)) for row in schedule.rows)
    for _ in range(swaps):
        if best_end <= bound:
            break  # no device could be done earlier
        device = draw.randrange(schedule.devices)
        row = list(schedule.rows[device])
        start, goal = draw.randrange(len(row)), draw.randrange(len(row))
        row.insert(goal, row.pop(start))
        rows = (*schedule.rows[:device], tuple(row), *schedule.rows[device + 1 :])
        other = dataclasses.replace(schedule, rows=rows)
        if not _in_order(row) or not _fits(other, cap):
            continue
        other_end = _end(other, costs, latency)
        if other_end <= end:
            schedule, end = other, other_end
        if end < best_end:
            best, best_end = schedule, end
    return best


def _in_order(row: list[Task]) -> bool:
    """Whether F comes before B and B before W, for each chunk and microbatch: cheap, and most moves fail it."""
    seen: dict[tuple[int, int], int] = {}
    for op, chunk, j in row:
        if seen.get((chunk, j), 0) > op:
            return False
        seen[chunk, j] = op
    return True


def _end(schedule: Schedule, costs: TaskCosts, latency: float) -> float:
    done, stuck, _ = try_run(schedule, costs, latency)
    return float("inf") if stuck else max(end for _, end in done.values())
