"""When each task of a schedule runs, and what is in memory then: by events, or tick by tick as one program runs it."""

import dataclasses
from collections import Counter
from typing import NamedTuple

from jaxpar.fields import AtLeast, Each, check_fields, check_value, field
from jaxpar.pipeline._trips import ticks_of_transfers
from jaxpar.pipeline.ops import Op, Schedule, Side, Task, wrong_indices
from jaxpar.types import UsageError

__all__ = ["SlotSizes", "TaskCosts", "Timed", "Timing", "simulate_schedule"]


@dataclasses.dataclass(frozen=True)
class TaskCosts:
    """Time of each task, in any unit; BW takes B and W together.

    Attributes:
      F: Forward pass of a chunk.
      B: Gradient of its input.
      W: Gradient of its weights.
      S: Softmax of a device's rows of the vocabulary.
      T: Gradient of these rows.
      offload: Of what a chunk keeps of a microbatch, to the host.
      fetch: Of the same, back.
      gather: Of a chunk's weights from the devices that hold shares.
      reduce: Of their gradient.
      scale: By which F, B and W of each chunk are longer; empty where all are alike.
    """

    F: float = field(1.0, AtLeast(0))
    B: float = field(1.0, AtLeast(0))
    W: float = field(1.0, AtLeast(0))
    S: float = field(1.0, AtLeast(0))
    T: float = field(1.0, AtLeast(0))
    offload: float = field(0.0, AtLeast(0))
    fetch: float = field(0.0, AtLeast(0))
    gather: float = field(0.0, AtLeast(0))
    reduce: float = field(0.0, AtLeast(0))
    scale: tuple[float, ...] = field((), Each(AtLeast(0)))

    __post_init__ = check_fields

    def of(self, task: Task) -> float:
        """Returns the time of a task."""
        op, chunk, _ = task
        if op in (Op.S, Op.T):
            return self.S if op == Op.S else self.T
        scale = self.scale[chunk] if self.scale else 1.0
        return scale * {Op.F: self.F, Op.B: self.B, Op.W: self.W, Op.BW: self.B + self.W}[op]

    def of_side(self, side: Side) -> float:
        """Returns the time of what runs beside the tasks."""
        return {
            "offload": self.offload,
            "fetch": self.fetch,
            "gather": self.gather,
            "reduce": self.reduce,
        }[side.kind]


class SlotSizes(NamedTuple):
    """Bytes of what is kept.

    Attributes:
      activation: What F of a chunk leaves for its backward task.
      factors: What B leaves for W.
      weights: Of a chunk, once for each version that is kept.
      gathered: A chunk's weights gathered from all shares.
      head: What S leaves for T.
    """

    activation: float = 1.0
    factors: float = 1.0
    weights: float = 0.0
    gathered: float = 0.0
    head: float = 0.0


UNITS, SLOTS = TaskCosts(), SlotSizes()


class Timed(NamedTuple):
    """A task, or what runs beside, and when."""

    what: Task | Side
    device: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timing:
    """What a simulation found; tuples have an entry for each device.

    Attributes:
      makespan: From the first start to the last end.
      span: From a device's first start to its last end.
      work: Time of its tasks.
      activations: Most microbatches of a chunk between F and its backward task at once.
      factors: Most between B and W.
      held: Most between F and the last task that needs what it left.
      heads: Most between S and T.
      weights: Chunks of weights kept, each in as many versions as are in use.
      gathered: Most chunks gathered at once.
      hosted: Most microbatches of a chunk on the host at once.
      bytes: Most bytes at once, of all of these together.
      gathers: Gathers of a chunk's weights.
      messages: Between devices, of all.
      transfers: To and from the host.
      ticks: Of a program that runs tick by tick; 0 of a simulation by events.
      times: All tasks and what ran beside them.
    """

    makespan: float
    span: tuple[float, ...]
    work: tuple[float, ...]
    activations: tuple[int, ...]
    factors: tuple[int, ...]
    held: tuple[int, ...]
    heads: tuple[int, ...]
    weights: tuple[int, ...]
    gathered: tuple[int, ...]
    hosted: tuple[int, ...]
    bytes: tuple[float, ...]
    gathers: tuple[int, ...]
    messages: int
    transfers: tuple[int, ...]
    ticks: int
    times: tuple[Timed, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Time in which a device has no task, of the makespan."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def idle_fraction(self) -> float:
        """Share of all devices' time without a task: the bubble."""
        return sum(self.idle) / (self.makespan * len(self.work)) if self.makespan else 0.0


def simulate_schedule(
    schedule: Schedule,
    costs: TaskCosts = UNITS,
    *,
    latency: float = 0.0,
    lockstep: bool = False,
    sizes: SlotSizes = SLOTS,
) -> Timing:
    """Returns when each task runs, how long devices wait, and what they hold.

    By events a task starts when its device has done the one before, and what it needs has arrived: `latency` after it
    was done where that was on another device. In lock-step all devices do a task a tick, a tick takes as long as its
    longest task and `latency` for the messages, and what was sent in a tick is there in the next: so runs one program
    with its exchange outside of the tasks. There a fetch comes before the task of its tick, and where anything is
    offloaded no tick is shorter than an offload. Cost is that of the tasks, some microseconds each.

    Args:
      schedule: P rows of tasks.
      costs: Time of each.
      latency: Of a message.
      lockstep: Whether devices keep in step.
      sizes: Bytes of what is kept.

    Raises:
      UsageError: If devices wait for each other for ever, naming the first that does; of a latency under 0; if costs
        have a scale for another number of chunks; or if what is offloaded has no time for both ways in lock-step.
    """
    check_value("latency", latency, AtLeast(0))
    if costs.scale and len(costs.scale) != len(schedule.placement):
        raise UsageError(
            f"costs.scale has {len(costs.scale)} entries for {len(schedule.placement)} chunks."
        )
    done, sides, at, ticks = (_in_step if lockstep else _run)(schedule, costs, latency)
    times = []
    for task, (start, end) in done.items():
        device = schedule.device_of(task)
        times.append(Timed(what=task, device=device, start=start, end=end))
    for side, (start, end) in sides.items():
        times.append(Timed(what=side, device=side.device, start=start, end=end))
    return _timing(schedule, costs, sizes, times, at, ticks)


def _run(schedule: Schedule, costs: TaskCosts, latency: float) -> tuple[dict, dict, dict, int]:
    """Start and end of each task, of each side, and when either takes and gives room, by events."""
    done, stuck, sides = try_run(schedule, costs, latency)
    if stuck:
        raise UsageError(f"{schedule.name} never ends: {stuck[0]}.")
    return done, sides, {**done, **sides}, 0


def try_run(schedule: Schedule, costs: TaskCosts, latency: float) -> tuple[dict, list[str], dict]:
    """Runs a schedule as far as it goes.

    Returns:
      Start and end of each task, a sentence about each device that waits, and times of sides.

    Raises:
      UsageError: A number of the schedule names a chunk, microbatch or device that is not there.
    """
    for sentence in wrong_indices(schedule):
        raise UsageError(f"{schedule.name}: {sentence}.")
    done: dict[Task, tuple[float, float]] = {}
    sides = _Sides(schedule, costs)
    place, free = [0] * schedule.devices, [0.0] * schedule.devices
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(schedule.rows):
            while place[device] < len(row):
                task = row[place[device]]
                needed = schedule.needs(task)
                if not all(other in done for other in needed):
                    break
                sides.start(device, place[device], free[device])
                late = [done[n][1] + latency * schedule.travels(n, task) for n in needed]
                begin = max([free[device], sides.ready(task), *late])
                done[task] = begin, begin + costs.of(task)
                place[device], free[device], moved = place[device] + 1, done[task][1], True
    stuck = []
    for device, row in enumerate(schedule.rows):
        if place[device] < len(row):
            task = row[place[device]]
            missing = next(other for other in schedule.needs(task) if other not in done)
            stuck.append(f"device {device} waits with {task} for {missing}")
        else:
            sides.start(device, len(row), free[device])
    return done, stuck, sides.done


class _Sides:
    """What runs beside tasks: each device has a channel to the host, one from it, and one to other devices."""

    def __init__(self, schedule: Schedule, costs: TaskCosts):
        self.costs, self.done = costs, {}
        self._waiting = {}
        for side in schedule.sides:
            self._waiting.setdefault((side.device, side.place), []).append(side)
        self._free: dict[tuple[int, str], float] = {}
        self._fetched: dict[tuple[int, int], float] = {}
        self._offloaded: dict[tuple[int, int], float] = {}
        self._gathered: dict[int, float] = {}

    def start(self, device: int, place: int, time: float) -> None:
        for side in self._waiting.pop((device, place), ()):
            which = side.chunk, side.microbatch
            channel = device, side.kind if side.kind in ("offload", "fetch") else "weights"
            begin = max(time, self._free.get(channel, 0.0))
            if side.kind == "fetch":
                begin = max(begin, self._offloaded.get(which, 0.0))
            end = begin + self.costs.of_side(side)
            self.done[side], self._free[channel] = (begin, end), end
            if side.kind == "gather":
                self._gathered[side.chunk] = end
            elif side.kind in ("offload", "fetch"):
                (self._offloaded if side.kind == "offload" else self._fetched)[which] = end

    def ready(self, task: Task) -> float:
        """When what a task needs from beside is there."""
        if task.op in (Op.S, Op.T):
            return 0.0
        fetched = (
            self._fetched.get((task.chunk, task.microbatch), 0.0)
            if task.op in (Op.B, Op.BW)
            else 0.0
        )
        return max(fetched, self._gathered.get(task.chunk, 0.0))


def _in_step(schedule: Schedule, costs: TaskCosts, latency: float) -> tuple[dict, dict, dict, int]:
    """The same where every tick waits for its longest task.

    Room is then counted by place in the order of ticks. In tick k what is offloaded has left its slot at k - 1/4; then,
    at k, what is fetched takes one, and a task takes its own; and at k + 1/2 a task has given back what it read.
    """
    ticks_of = tick_of_each(schedule)
    ticks = max(ticks_of.values(), default=-1) + 1
    moves = ticks_of_transfers(schedule, ticks_of)
    fetches = {(side.device, tick) for side, tick in moves.items() if side.kind == "fetch"}
    first = {
        task: costs.fetch * ((schedule.device_of(task), tick) in fetches)
        for task, tick in ticks_of.items()
    }
    length = [costs.offload if moves else 0.0] * ticks
    for task, tick in ticks_of.items():
        length[tick] = max(length[tick], first[task] + costs.of(task))
    for _, tick in fetches:
        length[tick] = max(length[tick], costs.fetch)
    starts, now = [], 0.0
    for each in length:
        starts.append(now)
        now += each + latency
    done = {}
    for task, tick in ticks_of.items():
        begin = starts[tick] + first[task]
        done[task] = begin, begin + costs.of(task)
    at: dict[Task | Side, tuple[float, float]] = {
        task: (tick, tick + 0.5) for task, tick in ticks_of.items()
    }
    sides = {}
    for side in schedule.sides:
        if side in moves:
            k, is_fetch = moves[side], side.kind == "fetch"
            sides[side] = starts[k], starts[k] + costs.of_side(side)
            at[side] = (k, k) if is_fetch else (k, k - 0.25)
            continue
        before = schedule.rows[side.device][side.place - 1] if side.place else None
        begin = done[before][1] if before else 0.0
        sides[side] = begin, begin + costs.of_side(side)
        taken = at[before][1] if before else 0
        at[side] = taken, taken
    return done, sides, at, ticks


def tick_of_each(schedule: Schedule, latency: int = 1) -> dict[Task, int]:
    """Returns the tick of each task: as early as order and messages allow, which take `latency` ticks."""
    done, stuck, _ = try_run(_without_sides(schedule), _Units(), latency - 1)
    if stuck:
        raise UsageError(f"{schedule.name} never ends: {stuck[0]}.")
    return {task: round(start) for task, (start, _) in done.items()}


class _Units(TaskCosts):
    """A tick for every task."""

    def of(self, task: Task) -> float:
        return 1.0


def _without_sides(schedule: Schedule) -> Schedule:
    return dataclasses.replace(schedule, sides=())


def _timing(
    schedule: Schedule, costs: TaskCosts, sizes: SlotSizes, times: list[Timed], at: dict, ticks: int
) -> Timing:
    tasks = [entry for entry in times if isinstance(entry.what, Task)]
    rows = [
        [entry for entry in tasks if entry.device == device] for device in range(schedule.devices)
    ]
    kinds = Counter(
        (entry.device, entry.what.kind) for entry in times if isinstance(entry.what, Side)
    )
    kept = _intervals(schedule, at)
    weights = tuple(_versions(schedule, device) for device in range(schedule.devices))

    def most(device: int, *names: str) -> int:
        return int(_peak([(*span, 1) for name in names for span in kept[device][name]]))

    def largest(device: int) -> float:
        size = {"activations": sizes.activation, "factors": sizes.factors, "heads": sizes.head}
        size |= {"gathered": sizes.gathered}
        spans = [(*span, size[name]) for name in size for span in kept[device][name]]
        return _peak(spans) + weights[device] * sizes.weights

    each = range(schedule.devices)
    sent = sum(
        schedule.device_of(need) != schedule.device_of(task)
        for task in schedule.tasks
        for need in schedule.needs(task)
    )
    return Timing(
        makespan=max((entry.end for entry in times), default=0.0),
        span=tuple(
            max((e.end for e in row), default=0.0) - min((e.start for e in row), default=0.0)
            for row in rows
        ),
        work=tuple(sum(costs.of(task) for task in row) for row in schedule.rows),
        activations=tuple(most(device, "activations") for device in each),
        factors=tuple(most(device, "factors") for device in each),
        held=tuple(most(device, "held") for device in each),
        heads=tuple(most(device, "heads") for device in each),
        weights=weights,
        gathered=tuple(most(device, "gathered") for device in each),
        hosted=tuple(most(device, "hosted") for device in each),
        bytes=tuple(largest(device) for device in each),
        gathers=tuple(kinds[device, "gather"] for device in each),
        messages=sent,
        transfers=tuple(kinds[device, "offload"] + kinds[device, "fetch"] for device in each),
        ticks=ticks,
        times=tuple(times),
    )


def _versions(schedule: Schedule, device: int) -> int:
    """Weights of chunks that a device must keep at once, in all their versions."""
    own = schedule.chunks_of(device)
    if not schedule.asynchronous:
        return len(own)
    used, most = schedule.weight_versions()[device], dict.fromkeys(own, 1)
    newest, alive = dict.fromkeys(own, 0), set()
    for op, chunk, j in schedule.rows[device]:
        if op == Op.F:
            alive.add((chunk, j))
        elif op in (Op.BW, Op.W):
            alive.discard((chunk, j))
            newest[chunk] += 1
        kept = {used[which] for which in alive if which[0] == chunk} | {newest[chunk]}
        most[chunk] = max(most[chunk], len(kept))
    return sum(most.values())


def _intervals(schedule: Schedule, at: dict) -> list[dict[str, list[tuple[float, float]]]]:
    """From when to when something is kept, by device and kind."""
    away = {
        (side.kind, *side[3:]): at[side]
        for side in schedule.sides
        if side.kind in ("offload", "fetch")
    }
    names = ("activations", "factors", "held", "heads", "gathered", "hosted")
    kept: list[dict[str, list]] = [{name: [] for name in names} for _ in range(schedule.devices)]
    for task in schedule.tasks:
        mine, (op, chunk, j) = kept[schedule.device_of(task)], task
        if op == Op.F:
            end = at[schedule.backward(chunk, j)][1]
            out, back = (away.get((kind, chunk, j)) for kind in ("offload", "fetch"))
            if out and back:
                mine["activations"] += [(at[task][0], out[1]), (back[0], end)]
                mine["hosted"].append((out[0], back[1]))
            else:
                mine["activations"].append((at[task][0], end))
            mine["held"].append((at[task][0], at.get(Task(Op.W, chunk, j), (0.0, end))[1]))
        elif op == Op.W:
            # Factors replace what F left when B ends: both are never counted at once.
            mine["factors"].append((at[Task(Op.B, chunk, j)][1], at[task][1]))
        elif op == Op.T:
            mine["heads"].append((at[Task(Op.S, chunk, j)][0], at[task][1]))
    for device, row in enumerate(schedule.rows):
        kept[device]["gathered"] = _gathered(schedule, device, row, at)
    return kept


def _gathered(
    schedule: Schedule, device: int, row: tuple[Task, ...], at: dict
) -> list[tuple[float, float]]:
    """A gathered chunk stays until the last task that reads it before its next gather; W has its factors."""
    gathers = [side for side in schedule.sides if side.device == device and side.kind == "gather"]
    spans = []
    for number, side in enumerate(gathers):
        later = [other.place for other in gathers[number + 1 :] if other.chunk == side.chunk]
        users = row[side.place : later[0] if later else len(row)]
        ends = [
            at[task][1]
            for task in users
            if task.chunk == side.chunk and task.op in (Op.F, Op.B, Op.BW)
        ]
        spans.append((at[side][0], max(ends, default=at[side][1])))
    return spans


def _peak(spans: list[tuple[float, float, float]]) -> float:
    """Largest sum of the sizes of intervals (start, end, size) at once; what ends when another starts makes room."""
    events = sorted(
        event for start, end, size in spans for event in ((start, 1, size), (end, 0, -size))
    )
    total = peak = 0.0
    for _, _, size in events:
        total += size
        peak = max(peak, total)
    return peak
