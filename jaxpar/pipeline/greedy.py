"""Schedules in which each device picks what it does next by a rule: waves, two directions, candidates of a search."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jaxpar.pipeline.ops import Op, Schedule, Task, mirrored, require, wave
from jaxpar.pipeline.timing import UNITS, TaskCosts, simulate_schedule
from jaxpar.types import UsageError

__all__ = ["Preference", "bitpipe", "hanayo", "list_schedule"]


class Preference(NamedTuple):
    """What a device prefers among the tasks that it could begin.

    Attributes:
      in_flight: Microbatches of each copy of the model that have begun and not come back, at most.
      limit: Microbatches of a chunk that a device keeps, at most; None for any number.
      split: Whether gradients of weights are tasks of their own.
      is_backward_first: Else forward passes come first.
      is_deep_first: Whether later chunks come before earlier microbatches.
      waits: Whether a gradient of weights is put off until a device would wait as long as it takes.
    """

    in_flight: int
    limit: int | None = None
    split: bool = True
    is_backward_first: bool = True
    is_deep_first: bool = True
    waits: bool = False


def list_schedule(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    rule: Preference,
    costs: TaskCosts = UNITS,
    latency: float = 0.0,
    copies: int = 1,
) -> Schedule | None:
    """Returns the schedule in which every device, when it is free, does what the rule prefers; None if all get stuck.

    Args:
      name: Of the schedule.
      placement: The device of each chunk.
      microbatches: m.
      rule: What is preferred.
      costs: Time of each task.
      latency: Of a message.
      copies: Of the model.
    """
    state = _State(
        Schedule(name, placement, microbatches, ((),) * (max(placement) + 1), copies),
        rule,
        costs,
        latency,
    )
    now = 0.0
    while state.left:
        for device in range(len(state.rows)):
            if state.free[device] <= now and (task := state.pick(device, now)):
                state.do(device, task, now)
        later = [time for time in (*state.free, *state.ready.values()) if time > now]
        if not later:
            return None
        now = min(later)
    return dataclasses.replace(state.schedule, rows=tuple(map(tuple, state.rows)))


class _State:
    """Where a run of the rule stands."""

    def __init__(self, schedule: Schedule, rule: Preference, costs: TaskCosts, latency: float):
        self.schedule, self.rule, self.costs, self.latency = schedule, rule, costs, latency
        devices, m = schedule.devices, schedule.microbatches
        self.rows: list[list[Task]] = [[] for _ in range(devices)]
        self.free, self.held = [0.0] * devices, [0] * devices
        self.left = m * schedule.depth * (3 if rule.split else 2)
        self.ready = {Task(Op.F, schedule.path(j)[0], j): 0.0 for j in range(m)}
        self.begun = [0] * schedule.copies
        self.weights: list[list[Task]] = [[] for _ in range(devices)]

    def rank(self, task: Task) -> tuple:
        op, chunk, j = task
        depth = chunk % self.schedule.depth
        deep = depth if op == Op.F else -depth
        is_first = (op == Op.F) != self.rule.is_backward_first
        return not is_first, *((-deep, j) if self.rule.is_deep_first else (j, -deep))

    def may(self, task: Task) -> bool:
        if task.op != Op.F:
            return True
        limit, path = self.rule.limit, self.schedule.path(task.microbatch)
        if limit is not None and self.held[self.schedule.placement[task.chunk]] >= limit:
            return False
        return (
            task.chunk != path[0]
            or self.begun[task.microbatch % self.schedule.copies] < self.rule.in_flight
        )

    def pick(self, device: int, now: float) -> Task | None:
        mine = [
            (time, task)
            for task, time in self.ready.items()
            if self.schedule.placement[task.chunk] == device
        ]
        legal = [task for time, task in mine if time <= now and self.may(task)]
        if legal:
            return min(legal, key=self.rank)
        if not self.weights[device]:
            return None
        soon = min(
            (time for time, task in mine if time > now and self.may(task)), default=float("inf")
        )
        if self.rule.waits and soon - now < self.costs.of(self.weights[device][0]):
            return None
        return self.weights[device][0]

    def do(self, device: int, task: Task, now: float) -> None:
        op, chunk, j = task
        path, end = self.schedule.path(j), now + self.costs.of(task)
        self.rows[device].append(task)
        self.free[device], self.left = end, self.left - 1
        if op == Op.W:
            self.weights[device].remove(task)
            self.held[device] -= 1
            return
        del self.ready[task]
        back = Op.B if self.rule.split else Op.BW
        if op == Op.F:
            self.held[device] += 1
            self.begun[j % self.schedule.copies] += chunk == path[0]
            after = Task(Op.F, chunk + 1, j) if chunk < path[-1] else Task(back, chunk, j)
        else:
            self.weights[device] += [Task(Op.W, chunk, j)] * self.rule.split
            self.held[device] -= not self.rule.split
            self.begun[j % self.schedule.copies] -= chunk == path[0]
            if chunk == path[0]:
                return
            after = Task(back, chunk - 1, j)
        self.ready[after] = end + self.latency * (self.schedule.placement[after.chunk] != device)


def best_of(
    candidates: Iterable[Schedule | None], costs: TaskCosts, latency: float = 0.0
) -> Schedule:
    """Returns the one that ends first; of several the one that keeps least."""

    def key(schedule: Schedule) -> tuple[float, int]:
        timing = simulate_schedule(schedule, costs, latency=latency)
        return timing.makespan, max(timing.held)

    return min((candidate for candidate in candidates if candidate is not None), key=key)


def hanayo(devices: int, microbatches: int, waves: int = 1, costs: TaskCosts = UNITS) -> Schedule:
    """Returns 1F1B over waves: 2w chunks a device, there and back, in the memory of 1F1B's first device.

    Args:
      devices: P.
      microbatches: m.
      waves: w; chunks are 2 P w, and smaller.
      costs: Time of each task, for which the best of eight rules is taken.

    Reference: arXiv:2308.15762.
    """
    require(devices, microbatches, waves)
    rules = [
        Preference(in_flight, 2 * waves * devices, False, first, deep)
        for in_flight, first, deep in itertools.product(
            (devices, microbatches), (True, False), (True, False)
        )
    ]
    placement = wave(devices, waves)
    return best_of(
        (list_schedule("hanayo", placement, microbatches, rule, costs) for rule in rules), costs
    )


def bitpipe(devices: int, microbatches: int, costs: TaskCosts = UNITS) -> Schedule:
    """Returns two pipelines in opposite directions, each there and back: two copies of the weights, half of m each.

    The copies' gradients of a chunk are summed between devices d and P-1-d, as `with_reductions` notes. At most P
    microbatches of a copy are under way.

    Args:
      devices: P, even: else the middle device has both copies of the same chunks.
      microbatches: m, even.
      costs: Time of each task, for which the best of some rules is taken.

    Raises:
      UsageError: Of odd numbers.

    Reference: arXiv:2410.19367.
    """
    require(devices, microbatches)
    for name, value in (("devices", devices), ("microbatches", microbatches)):
        if value % 2:
            raise UsageError(
                f"two directions share {name} evenly; {name}={value} is odd, take {value + 1}."
            )
    counts = sorted({max(1, devices // 2), devices * 3 // 4, devices})
    rules = [
        Preference(in_flight, None, False, first, deep)
        for in_flight, first, deep in itertools.product(counts, (True, False), (True, False))
    ]
    placement = mirrored(devices)
    made = (
        list_schedule("bitpipe", placement, microbatches, rule, costs, copies=2) for rule in rules
    )
    return best_of(made, costs)
