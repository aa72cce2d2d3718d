"""A schedule as integers: what each device does in each tick, in which slots, and where what arrives is put."""

import dataclasses
import heapq
from collections.abc import Iterable

import numpy as np

from jaxpar.pipeline._trips import tick_of_side, ticks_of_gathers, ticks_of_transfers
from jaxpar.pipeline.ops import Op, Schedule, Side, Task
from jaxpar.pipeline.timing import tick_of_each
from jaxpar.types import UsageError

__all__ = ["COLUMNS", "TickTable", "check_table", "pack_schedule"]

COLUMNS: tuple[str, ...] = (
    "op",  # `Op`
    "chunk",  # the number of the chunk among those of its device
    "microbatch",
    "input",  # slot of the inbox that F, BW, B or S reads; -1: data. B of the last chunk reads its output, for the loss
    "stash",  # slot that F writes and BW or B reads
    "factors",  # slot that B writes and W reads
    "head",  # slot that S writes and T reads
    "send",  # 0 nothing, 1 to the next device, 2 to the one before, 3 to itself, 4 to all
    "keep",  # slot of the inbox for what goes to itself
    "from_before",  # slot for what arrives from the device before, at the end of the tick; -1: nothing
    "from_after",  # the same from the next device
    "from_all",  # the same from the device of the last chunk, for S
    "merge",  # slot of the head whose shares all devices merge at the end of the tick
    "merged",  # slot of the inbox for the gradient that the merged shares give
)
HOST_COLUMNS: tuple[str, ...] = (  # of tables of schedules that offload, after the others
    "offload",  # slot of the stash that goes to the host, of what is in it as the tick begins
    "offload_to",  # slot of the host for it
    "fetch",  # slot of the host that comes back before the tick's task, of what is in it as the tick begins
    "fetch_to",  # slot of the stash for it
)
WEIGHT_COLUMNS: tuple[str, ...] = (  # of tables of schedules that gather weights, after the others
    "gather",  # the number of the chunk, among those of its device, that is gathered before the tick's task
    "gather_to",  # slot of the weights for it
    "weights",  # slot of the weights that F, BW or B reads
)
READERS = (Op.F, Op.B, Op.BW)  # of weights: W has its factors
NOTHING, NEXT, BEFORE, ITSELF, ALL = range(5)


@dataclasses.dataclass(frozen=True, eq=False)
class TickTable:
    """What one program runs: a loop over ticks, in each a task, and the same exchanges.

    In a tick a device moves a slot to the host and one back, where its table has columns for that. Then it reads its
    slots, does its task, writes its slots, and puts what has arrived.

    Attributes:
      rows: int32 [ticks, P, columns], -1 where a column says nothing.
      slots: How many of "inbox", "stash", "factors" and "head" each device needs: what the fullest one does. Of a
        schedule that offloads also of "host", in the host's memory; of one that gathers also of "weights".
      latency: Ticks from a task to the one on another device that reads its message.
      sides: What begins beside the tasks, with its tick.
      schedule: Whose table it is.
    """

    rows: np.ndarray
    slots: dict[str, int]
    latency: int
    sides: tuple[tuple[int, Side], ...]
    schedule: Schedule

    @property
    def columns(self) -> tuple[str, ...]:
        """`COLUMNS`, and after them "offload", "offload_to", "fetch" and "fetch_to" where something is offloaded.

        Then "gather", "gather_to" and "weights" where weights are gathered.
        """
        return _columns_of(self.schedule)

    def column(self, name: str) -> np.ndarray:
        """Returns a column, int32 [ticks, P]."""
        return self.rows[..., self.columns.index(name)]


def pack_schedule(schedule: Schedule, latency: int = 1) -> TickTable:
    """Returns the table of a schedule in which each task takes a tick and begins as early as order and messages allow.

    Slots are given by colouring intervals in order of their start, which takes as many as are ever full at once; those
    of "stash" and "factors" are the activations and factors that `simulate_schedule` counts in lock-step, and those of
    "host" what it counts as hosted. What is offloaded has a slot of the stash until it goes, and perhaps another one
    from when it is back. Gathered weights have one until the last task that reads them.

    Args:
      schedule: That `check_schedule` finds nothing wrong with.
      latency: Ticks until a message to another device can be read, at least 1.

    Raises:
      UsageError: If devices wait for ever, a message goes further than one device on, the latency is under 1, what
        is offloaded has no time for both ways, or only some of the weights are gathered.
    """
    if latency < 1:
        raise UsageError(
            f"a message cannot be read in the tick that sends it; latency={latency} must be at least 1."
        )
    if schedule.has_vocabulary and schedule.copies > 1:
        raise UsageError(
            "the head of two copies has two broadcasts in a tick; take a schedule of one copy."
        )
    ticks = tick_of_each(schedule, latency)
    moves = ticks_of_transfers(schedule, ticks)
    columns, gathers = _columns_of(schedule), ticks_of_gathers(schedule, ticks)
    rows = np.full((max(ticks.values()) + 1, schedule.devices, len(columns)), -1, np.int32)
    rows[..., COLUMNS.index("op")] = Op.IDLE
    rows[..., COLUMNS.index("send")] = NOTHING
    packing = _Packing(schedule, ticks, moves, latency, rows)
    for task, tick in ticks.items():
        device = schedule.device_of(task)
        own = schedule.chunks_of(device)
        chunk = 0 if task.op in (Op.S, Op.T) else own.index(task.chunk)
        packing.put(tick, device, op=task.op, chunk=chunk, microbatch=task.microbatch)
        packing.keep(task)
        packing.route(task)
    if gathers:
        packing.gather(gathers)
    slots, moves = packing.color(), moves | gathers
    begun = [
        (moves[side] if side in moves else tick_of_side(schedule, ticks, side), side)
        for side in schedule.sides
    ]
    return TickTable(rows, slots, latency, tuple(begun), schedule)


def _columns_of(schedule: Schedule) -> tuple[str, ...]:
    kinds = {side.kind for side in schedule.sides}
    away = HOST_COLUMNS if kinds & {"offload", "fetch"} else ()
    return (*COLUMNS, *away, *(WEIGHT_COLUMNS if "gather" in kinds else ()))


class _Packing:
    """Collects intervals (kind, device, from, to, cells that get the slot's number), then gives slots."""

    def __init__(
        self,
        schedule: Schedule,
        ticks: dict[Task, int],
        moves: dict[Side, int],
        latency: int,
        rows: np.ndarray,
    ):
        self.schedule, self.ticks, self.latency, self.rows = schedule, ticks, latency, rows
        self.columns = _columns_of(schedule)
        self.moves = {
            (side.kind, side.chunk, side.microbatch): tick for side, tick in moves.items()
        }
        self.intervals: list[tuple[str, int, float, float, list[tuple[int, str]]]] = []

    def put(self, tick: int, device: int, **cells: int) -> None:
        for name, value in cells.items():
            self.rows[tick, device, self.columns.index(name)] = value

    def gather(self, gathers: dict[Side, int]) -> None:
        """Weights of chunks, each from its gather to the last task that reads them; gathered before a tick's task.

        A gather that nobody reads, since that of the other direction came meanwhile, is left out.
        """
        for device, row in enumerate(self.schedule.rows):
            own, read = self.schedule.chunks_of(device), {}
            for task in row:
                if task.op not in READERS:
                    continue
                mine = [
                    side for side in gathers if (side.device, side.chunk) == (device, task.chunk)
                ]
                before = [side for side in mine if gathers[side] <= self.ticks[task]]
                if not before:
                    raise UsageError(
                        f"{task} of {self.schedule.name} reads weights that were not gathered; `with_gathers` has "
                        "all of them gathered."
                    )
                read.setdefault(max(before, key=lambda side: gathers[side]), []).append(
                    self.ticks[task]
                )
            for side, users in read.items():
                tick = gathers[side]
                self.put(tick, device, gather=own.index(side.chunk))
                cells = [(tick, "gather_to"), *((user, "weights") for user in users)]
                self.intervals.append(("weights", device, tick - 0.25, max(users), cells))

    def keep(self, task: Task) -> None:
        """What a task leaves on its own device."""
        op, chunk, j = task
        pairs = {
            Op.F: ("stash", self.schedule.backward(chunk, j)),
            Op.B: ("factors", Task(Op.W, chunk, j)),
            Op.S: ("head", Task(Op.T, chunk, j)),
        }
        if op in pairs:
            kind, reader = pairs[op]
            start, end = self.ticks[task], self.ticks[reader]
            if op == Op.F and ("offload", chunk, j) in self.moves:
                self.keep_away(self.schedule.device_of(task), start, end, chunk, j)
                return
            cells = [(start, kind), (end, kind)]
            if op == Op.S:
                cells.append(
                    (
                        max(self.ticks[Task(Op.S, d, j)] for d in range(self.schedule.devices)),
                        "merge",
                    )
                )
            self.intervals.append((kind, self.schedule.device_of(task), start, end, cells))

    def keep_away(self, device: int, start: int, end: int, chunk: int, j: int) -> None:
        """What F leaves where it is offloaded: in the stash, on the host, and in the stash again.

        In a tick what goes is read before what comes is written, and both before the task, which writes at the end.
        """
        out, back = self.moves["offload", chunk, j], self.moves["fetch", chunk, j]
        self.intervals += [
            ("stash", device, start, out - 0.5, [(start, "stash"), (out, "offload")]),
            ("host", device, out, back, [(out, "offload_to"), (back, "fetch")]),
            ("stash", device, back - 0.25, end, [(back, "fetch_to"), (end, "stash")]),
        ]

    def route(self, task: Task) -> None:
        """Where a task's message goes, and in which slot it waits."""
        schedule, (op, chunk, j) = self.schedule, task
        device, path, tick = schedule.device_of(task), schedule.path(j), self.ticks[task]
        if op == Op.F and chunk == path[-1] and schedule.has_vocabulary:
            self.put(tick, device, send=ALL)
            for other in range(schedule.devices):
                self.arrive(other, tick, "from_all", Task(Op.S, other, j))
        elif (
            op == Op.F and chunk == path[-1]
        ):  # whose backward task begins with the loss, of its output
            self.send(device, tick, schedule.backward(chunk, j))
        elif op == Op.F:
            self.send(device, tick, Task(Op.F, chunk + 1, j))
        elif op in (Op.B, Op.BW) and chunk > path[0]:
            self.send(device, tick, schedule.backward(chunk - 1, j))
        if op in (Op.B, Op.BW) and chunk == path[-1] and schedule.has_vocabulary:
            merged = max(self.ticks[Task(Op.S, d, j)] for d in range(schedule.devices))
            self.intervals.append(
                self.inbox(device, merged, merged, "merged", task)
            )  # where it is, without a message

    def send(self, device: int, tick: int, reader: Task) -> None:
        goal, devices = self.schedule.device_of(reader), self.schedule.devices
        if goal == device:
            self.put(tick, device, send=ITSELF)
            self.intervals.append(self.inbox(goal, tick, tick, "keep", reader))
            return
        is_forward = reader.op == Op.F  # of two devices each is both before and after the other
        ways = [(NEXT, 1, "from_before"), (BEFORE, -1, "from_after")][:: 1 if is_forward else -1]
        for way, step, column in ways:
            if (device + step) % devices == goal:
                self.put(tick, device, send=way)
                self.arrive(goal, tick, column, reader)
                return
        raise UsageError(
            f"{reader} is more than one device away from what it needs; place neighbours side by side."
        )

    def arrive(self, goal: int, tick: int, column: str, reader: Task) -> None:
        self.intervals.append(self.inbox(goal, tick, tick + self.latency - 1, column, reader))

    def inbox(self, goal: int, sent: int, put: int, column: str, reader: Task) -> tuple:
        return (
            "inbox",
            goal,
            put,
            self.ticks[reader],
            [(put, column), (self.ticks[reader], "input")],
        )

    def color(self) -> dict[str, int]:
        """Gives each interval a slot that no other has meanwhile; one may begin in the tick in which another ends."""
        slots: dict[str, int] = {"inbox": 0, "stash": 0, "factors": 0, "head": 0}
        slots |= {"host": 0} if self.moves else {}
        slots |= {"weights": 0} if "weights" in self.columns else {}
        groups: dict[tuple[str, int], list] = {}
        for kind, device, *rest in self.intervals:
            groups.setdefault((kind, device), []).append(rest)
        for (kind, device), intervals in groups.items():
            free: list[int] = []
            busy: list[tuple[float, int]] = []
            count = 0
            for start, end, cells in sorted(intervals, key=lambda entry: entry[:2]):
                while busy and busy[0][0] <= start:
                    heapq.heappush(free, heapq.heappop(busy)[1])
                if not free:
                    free, count = [count], count + 1
                slot = heapq.heappop(free)
                heapq.heappush(busy, (end, slot))
                for tick, column in cells:
                    self.put(tick, device, **{column: slot})
            slots[kind] = max(slots[kind], count)
        return slots


def check_table(table: TickTable) -> list[str]:
    """Returns what is wrong with a table, a sentence each, by walking it as a program does, with names for arrays.

    Every slot that a task reads must hold what the task needs; in the end all tasks of the schedule are done.
    """
    walk = _Walk(table)
    for tick in range(len(table.rows)):
        walk.tick(tick)
    missing = sorted(table.schedule.tasks - walk.done)
    return walk.found + [f"{task} is never done" for task in missing]


class _Walk:
    """The slots of all devices, each with the name of what it holds."""

    def __init__(self, table: TickTable):
        self.table, self.schedule = table, table.schedule
        self.slots: list[dict[tuple[str, int], object]] = [
            {} for _ in range(table.schedule.devices)
        ]
        self.found: list[str] = []
        self.done: set[Task] = set()
        self.way: dict[
            int, list[tuple[int, str, object]]
        ] = {}  # when it arrives -> goal, column, what
        self.offloads = {
            (tick, side.device): Task(Op.F, side.chunk, side.microbatch)
            for tick, side in table.sides
            if side.kind == "offload"
        }

    def tick(self, tick: int) -> None:
        cells = [
            dict(zip(self.table.columns, map(int, row), strict=True))
            for row in self.table.rows[tick]
        ]
        for device, cell in enumerate(cells):
            self.move(tick, device, cell)
            if cell.get("gather", -1) >= 0:
                gathered = self.schedule.chunks_of(device)[cell["gather"]]
                self.slots[device]["weights", cell["gather_to"]] = ("weights", gathered)
            if cell["op"] != Op.IDLE:
                self.do(tick, device, cell)
        self.merge(tick, cells)
        arrived = {(goal, column): what for goal, column, what in self.way.pop(tick, ())}
        for device, cell in enumerate(cells):
            for column in ("keep", "from_before", "from_after", "from_all", "merged"):
                what = arrived.pop((device, column), None)
                if cell[column] >= 0:
                    self.slots[device]["inbox", cell[column]] = what
                elif what is not None:
                    self.found.append(
                        f"tick {tick}, device {device}: what comes by {column} is put nowhere"
                    )

    def move(self, tick: int, device: int, cell: dict[str, int]) -> None:
        """Between stash and host: both are read before either is written."""
        slots, written = self.slots[device], {}
        for way, kind, other in (("offload", "stash", "host"), ("fetch", "host", "stash")):
            source, goal = cell.get(way, -1), cell.get(f"{way}_to", -1)
            if (source < 0) != (goal < 0):
                self.found.append(
                    f"tick {tick}, device {device}: {way} has a slot to read or to write, not both"
                )
            elif source >= 0:
                written[other, goal] = slots.get((kind, source))
                if written[other, goal] is None:
                    self.found.append(
                        f"tick {tick}, device {device}: {kind} slot {source} holds nothing to {way}"
                    )
                elif way == "offload" and (tick, device) in self.offloads:
                    # F writes at the end of its tick; its slot holds another's or nothing before.
                    self.read(tick, device, kind, source, self.offloads[tick, device])
        slots.update(written)

    def read(self, tick: int, device: int, kind: str, slot: int, wanted: object) -> None:
        if self.slots[device].get((kind, slot)) != wanted:
            held = self.slots[device].get((kind, slot), "nothing")
            self.found.append(
                f"tick {tick}, device {device}: {kind} slot {slot} holds {_say(held)}, not {_say(wanted)}"
            )

    def do(self, tick: int, device: int, cell: dict[str, int]) -> None:
        schedule, op, j = self.schedule, Op(cell["op"]), cell["microbatch"]
        chunk = device if op in (Op.S, Op.T) else schedule.chunks_of(device)[cell["chunk"]]
        task, path = Task(op, chunk, j), schedule.path(j)
        self.done.add(task)
        before = {
            Op.F: Task(Op.F, chunk - 1, j) if chunk != path[0] else None,
            Op.S: Task(Op.F, path[-1], j),
        }
        if op in (Op.B, Op.BW):
            is_last = chunk == path[-1]
            merged = ("merged", j) if schedule.has_vocabulary else Task(Op.F, chunk, j)
            before[op] = merged if is_last else schedule.backward(chunk + 1, j)
        if before.get(op) is not None:
            self.read(tick, device, "inbox", cell["input"], before[op])
        if op in READERS and "weights" in cell:
            self.read(tick, device, "weights", cell["weights"], ("weights", chunk))
        reads = {
            Op.B: ("stash", Op.F),
            Op.BW: ("stash", Op.F),
            Op.W: ("factors", Op.B),
            Op.T: ("head", Op.S),
        }
        if op in reads:
            kind, writer = reads[op]
            self.read(tick, device, kind, cell[kind], Task(writer, chunk, j))
        writes = {Op.F: "stash", Op.B: "factors", Op.S: "head"}
        if op in writes:
            self.slots[device][writes[op], cell[writes[op]]] = task
        self.send(tick, device, cell["send"], task)

    def send(self, tick: int, device: int, way: int, task: Task) -> None:
        devices, late = self.schedule.devices, tick + self.table.latency - 1
        if way == ITSELF:
            self.way.setdefault(tick, []).append((device, "keep", task))
        elif way == NEXT:
            self.way.setdefault(late, []).append(((device + 1) % devices, "from_before", task))
        elif way == BEFORE:
            self.way.setdefault(late, []).append(((device - 1) % devices, "from_after", task))
        elif way == ALL:
            self.way.setdefault(late, []).extend(
                (other, "from_all", task) for other in range(devices)
            )

    def merge(self, tick: int, cells: list[dict[str, int]]) -> None:
        shares = [
            self.slots[d].get(("head", cell["merge"]))
            for d, cell in enumerate(cells)
            if cell["merge"] >= 0
        ]
        names: Iterable = {share.microbatch for share in shares if isinstance(share, Task)}
        if not shares:
            return
        if len(shares) < len(cells) or len(set(names)) != 1:
            self.found.append(f"tick {tick}: devices merge shares of different microbatches")
            return
        j = next(iter(names))
        goal = self.schedule.placement[self.schedule.path(j)[-1]]
        self.way.setdefault(tick, []).append((goal, "merged", ("merged", j)))


def _say(what: object) -> str:
    if type(what) is not tuple:
        return str(what)
    return (
        f"weights of chunk {what[1]}"
        if what[0] == "weights"
        else f"the gradient of the head for {what[1]}"
    )
