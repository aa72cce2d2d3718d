"""What a pipeline does, as data: tasks, on which device a chunk of the layers lies, and schedules."""

import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import NamedTuple

from jaxpar.types import UsageError

__all__ = ["Op", "Schedule", "Side", "Task", "loop", "mirrored", "vee", "wave"]


class Op(enum.IntEnum):
    """What a device does in a tick.

    F is the forward pass of a chunk; B the gradient of its input alone, W that of its weights alone, BW both at once
    (arXiv:2401.10241). S and T are the passes of a device's rows of the vocabulary: S gives its share of the softmax
    and, once all shares are merged, of the gradient of the last chunk's output; T that of its rows (arXiv:2411.05288).
    """

    IDLE = 0
    F = 1
    B = 2
    W = 3
    BW = 4
    S = 5
    T = 6


class Task(NamedTuple):
    """One entry of a schedule.

    Attributes:
      op: What is done.
      chunk: With which chunk of the layers; of S and T, with which device's rows of the vocabulary.
      microbatch: To which microbatch.
    """

    op: Op
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.name}{self.microbatch}.{self.chunk}"


class Side(NamedTuple):
    """What a device starts beside its tasks, and waits for only where it needs the result.

    Attributes:
      kind: "offload" or "fetch" what a chunk keeps of a microbatch, to the host and back; "gather" the weights of a
        chunk; "reduce" their gradient.
      device: Which starts it.
      place: How many of its tasks it has done by then.
      chunk: Of the layers.
      microbatch: Of what is offloaded or fetched; -1 for weights.
    """

    kind: str
    device: int
    place: int
    chunk: int
    microbatch: int = -1


SIDES = ("offload", "fetch", "gather", "reduce")


def loop(devices: int, chunks: int = 1) -> tuple[int, ...]:
    """Returns the device of each of P v chunks: chunk c lies on device c mod P (arXiv:2104.04473)."""
    return tuple(range(devices)) * chunks


def wave(devices: int, waves: int = 1) -> tuple[int, ...]:
    """Returns the device of each of 2 P w chunks, there and back w times, so that turns cost no message.

    Source: Hanayo, arXiv:2308.15762.
    """
    return (tuple(range(devices)) + tuple(reversed(range(devices)))) * waves


def vee(devices: int) -> tuple[int, ...]:
    """Returns the device of each of 2 P chunks, there and back once: the first device has the last chunk too."""
    return wave(devices)


def mirrored(devices: int) -> tuple[int, ...]:
    """Returns the device of each of 2 P chunks twice: of one copy of the model as by `vee`, of the other mirrored.

    Source: BitPipe, arXiv:2410.19367.
    """
    return vee(devices) + tuple(devices - 1 - device for device in vee(devices))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of each device in order. When they run follows from what they wait for, and from what they cost.

    A microbatch passes the chunks one after the other, then back. With two copies of the model, microbatch j passes
    copy j mod 2, whose chunks are numbered after those of the first.

    Attributes:
      name: Of the rule that made it.
      placement: The device of each chunk.
      microbatches: m.
      rows: The tasks of each of P devices.
      copies: Of the model.
      asynchronous: Whether weights change after each backward task of a device, and each microbatch keeps the version
        of its forward pass (PipeDream), rather than once for all microbatches.
      sides: What runs beside the tasks, in order.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Task, ...], ...]
    copies: int = 1
    asynchronous: bool = False
    sides: tuple[Side, ...] = ()

    @property
    def devices(self) -> int:
        """P."""
        return len(self.rows)

    @property
    def depth(self) -> int:
        """Chunks that a microbatch passes."""
        return len(self.placement) // self.copies

    @functools.cached_property
    def tasks(self) -> frozenset[Task]:
        """All tasks of all devices."""
        return frozenset(task for row in self.rows for task in row)

    @functools.cached_property
    def has_vocabulary(self) -> bool:
        """Whether the vocabulary is split over all devices, by tasks S and T."""
        return any(task.op == Op.S for task in self.tasks)

    def chunks_of(self, device: int) -> tuple[int, ...]:
        """Returns the chunks that lie on a device, of all copies."""
        return tuple(chunk for chunk, owner in enumerate(self.placement) if owner == device)

    def path(self, microbatch: int) -> range:
        """Returns the chunks that a microbatch passes, in order."""
        first = microbatch % self.copies * self.depth
        return range(first, first + self.depth)

    def device_of(self, task: Task) -> int:
        """Returns where a task belongs."""
        return task.chunk if task.op in (Op.S, Op.T) else self.placement[task.chunk]

    def backward(self, chunk: int, microbatch: int) -> Task:
        """Returns the task that gives the gradient of a chunk's input: BW where the schedule has it, else B."""
        fused = Task(Op.BW, chunk, microbatch)
        return fused if fused in self.tasks else Task(Op.B, chunk, microbatch)

    def needs(self, task: Task) -> list[Task]:
        """Returns what must be done before a task."""
        op, chunk, j = task
        path = self.path(j)
        shares = [Task(Op.S, device, j) for device in range(self.devices)]
        if op == Op.F:
            return [Task(Op.F, chunk - 1, j)] if chunk > path[0] else []
        if op == Op.W:
            return [Task(Op.B, chunk, j)]
        if op == Op.S:
            return [Task(Op.F, path[-1], j)]
        if op == Op.T:
            return shares
        if chunk < path[-1]:
            return [Task(Op.F, chunk, j), self.backward(chunk + 1, j)]
        return [Task(Op.F, chunk, j), *(shares if self.has_vocabulary else [])]

    def travels(self, need: Task, task: Task) -> bool:
        """Whether what a task needs comes by a message: from another device, or by the collectives around S."""
        return Op.S in (need.op, task.op) or self.device_of(need) != self.device_of(task)

    def weight_versions(self) -> tuple[dict[tuple[int, int], int], ...]:
        """Returns for each device which version of its weights a chunk's microbatch uses: (chunk, j) -> updates before.

        Of a schedule that is not asynchronous all are 0. Versions that a device must keep are those of microbatches
        between their F and their BW, and the newest.
        """
        found = []
        for row in self.rows:
            updates, used = dict.fromkeys(range(len(self.placement)), 0), {}
            for op, chunk, j in row:
                if op == Op.F:
                    used[chunk, j] = updates[chunk]
                elif op in (Op.BW, Op.W) and self.asynchronous:
                    updates[chunk] += 1
            found.append(used)
        return tuple(found)

    def __str__(self) -> str:
        return f"{self.name}, {self.devices} devices, {len(self.placement)} chunks, {self.microbatches} microbatches"


def wrong_indices(schedule: Schedule) -> Iterator[str]:
    """Yields a sentence about each number of a schedule that names what is not there.

    Other functions use the numbers as indices, and Python takes negative ones without an error.
    """
    copies = schedule.copies
    chunks = len(schedule.placement)
    devices = schedule.devices
    microbatches = schedule.microbatches
    if copies < 1 or chunks % copies or not set(schedule.placement) <= set(range(devices)):
        yield f"{chunks} chunks of {copies} copies do not lie on {devices} devices"
        return
    yield from _wrong_tasks(schedule)
    for side in schedule.sides:
        name = f"the side {side.kind}"
        is_transfer = side.kind in ("offload", "fetch")
        yield from _outside("device", side.device, name, "device", devices)
        yield from _outside("chunk", side.chunk, name, "chunk", chunks)
        if is_transfer:
            yield from _outside("microbatch", side.microbatch, name, "microbatch", microbatches)


def _wrong_tasks(schedule: Schedule) -> Iterator[str]:
    ranges = {"chunk": len(schedule.placement), "device": schedule.devices}
    microbatches = schedule.microbatches
    operations = set(Op) - {Op.IDLE}
    for device, row in enumerate(schedule.rows):
        for task in row:
            what = "chunk"
            if task.op in (Op.S, Op.T):
                what = "device"  # with its share of the head
            is_there = 0 <= task.chunk < ranges[what] and 0 <= task.microbatch < microbatches
            if is_there and task.op in operations:
                continue
            name = f"a task of device {device}"
            if task.op not in operations:
                yield f"op={task.op!r} of {name}: it is no operation; expected one of Op after IDLE"
                continue
            whose = f"{name}, {task}"
            yield from _outside("chunk", task.chunk, whose, what, ranges[what])
            yield from _outside("microbatch", task.microbatch, whose, "microbatch", microbatches)


def _outside(field: str, value: int, whose: str, what: str, count: int) -> Iterator[str]:
    if not 0 <= value < count:
        yield f"{field}={value} of {whose}: there is no such {what}; expected 0 to {count - 1}"


def require(devices: int, microbatches: int, chunks: int = 1) -> None:
    """Refuses numbers of which no schedule can be made."""
    for name, value in (("devices", devices), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise UsageError(
                f"a pipeline with {name}={value} has nothing to do; {name} is at least 1."
            )
