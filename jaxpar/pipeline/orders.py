"""Schedules with a closed form: GPipe, 1F1B, interleaved, breadth-first, zero bubble, PipeDream.

P devices, v chunks a device, m microbatches. Where a rule wants more microbatches than there are, its order of more is
taken and those that do not exist are left out: what a microbatch waits for is never another one, so it stays legal.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxpar.pipeline.ops import Op, Schedule, Task, loop, require, vee
from jaxpar.types import UsageError

__all__ = [
    "blockwise",
    "breadth_first",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "zero_bubble",
]


def _schedule(
    name: str,
    placement: tuple[int, ...],
    m: int,
    rows: Sequence[Iterable[Task]],
    is_asynchronous: bool = False,
) -> Schedule:
    kept = tuple(tuple(task for task in row if task.microbatch < m) for row in rows)
    return Schedule(
        name=name,
        placement=placement,
        microbatches=m,
        rows=kept,
        asynchronous=is_asynchronous,
    )


def _backward(chunk: int, microbatch: int, split: bool) -> Task:
    return Task(op=Op.B if split else Op.BW, chunk=chunk, microbatch=microbatch)


def gpipe(devices: int, microbatches: int, split: bool = False) -> Schedule:
    """Returns all forward passes, then all backward passes: idle (P-1)/(m+P-1), m activations a device.

    Args:
      devices: P.
      microbatches: m.
      split: Whether weights' gradients wait until all gradients of inputs are done (2BP, arXiv:2405.18047).

    Reference: arXiv:1811.06965.
    """
    return dataclasses.replace(breadth_first(devices, microbatches, 1, split), name="gpipe")


def breadth_first(devices: int, microbatches: int, chunks: int, split: bool = False) -> Schedule:
    """Returns all microbatches of a chunk before the next chunk: idle (P-1)/(vm+P-1), each chunk's weights used twice.

    Activations of m v chunks are kept. Reference: arXiv:2211.05953.

    Args:
      devices: P.
      microbatches: m.
      chunks: v, of each device; chunk c lies on device c mod P.
      split: Whether weights' gradients come last.
    """
    require(devices, microbatches, chunks)
    rows = []
    for device in range(devices):
        own = range(device, devices * chunks, devices)
        each = [(chunk, j) for chunk in own for j in range(microbatches)]
        back = [(chunk, j) for chunk in reversed(own) for j in range(microbatches)]
        row = [Task(op=Op.F, chunk=chunk, microbatch=j) for chunk, j in each]
        row += [_backward(chunk, j, split) for chunk, j in back]
        if split:
            row += [Task(op=Op.W, chunk=chunk, microbatch=j) for chunk, j in back]
        rows.append(row)
    return _schedule("breadth_first", loop(devices, chunks), microbatches, rows)


def one_f_one_b(devices: int, microbatches: int, split: bool = False) -> Schedule:
    """Returns one forward pass, one backward pass in turn: GPipe's idle time with P - d activations on device d.

    Args:
      devices: P.
      microbatches: m.
      split: Whether weights' gradients come last (2BP).

    Reference: arXiv:2006.09503 (PipeDream-Flush), arXiv:2104.04473.
    """
    require(devices, microbatches)
    rows = []
    for device in range(devices):
        forward = [Task(Op.F, device, j) for j in range(microbatches)]
        backward = [_backward(device, j, split) for j in range(microbatches)]
        weights = [Task(Op.W, device, j) for j in range(microbatches)] * split
        rows.append(_in_turn(forward, backward, devices - device - 1) + weights)
    return _schedule("1f1b", loop(devices), microbatches, rows)


def _in_turn(forward: list[Task], backward: list[Task], warm_up: int) -> list[Task]:
    """`warm_up` forward tasks, then one forward, one backward, then what is left."""
    warm_up = min(warm_up, len(forward))
    pairs = zip(forward[warm_up:], backward, strict=False)
    return [
        *forward[:warm_up],
        *(task for pair in pairs for task in pair),
        *backward[len(forward) - warm_up :],
    ]


def interleaved(devices: int, microbatches: int, chunks: int) -> Schedule:
    """Returns 1F1B over v chunks a device, in groups of P microbatches: idle (P-1)/(vm+P-1) where P divides m.

    Device d keeps 2 (P-d-1) + (v-1) P + 1 activations. Of another m the last group is smaller.

    Args:
      devices: P.
      microbatches: m.
      chunks: v, of each device; chunk c lies on device c mod P.

    Reference: arXiv:2104.04473.
    """
    require(devices, microbatches, chunks)
    groups = -(-microbatches // devices)
    turns = [
        (turn, group * devices + j)
        for group in range(groups)
        for turn in range(chunks)
        for j in range(devices)
    ]
    rows = []
    for device in range(devices):
        forward = [Task(Op.F, turn * devices + device, j) for turn, j in turns]
        backward = [Task(Op.BW, (chunks - 1 - turn) * devices + device, j) for turn, j in turns]
        warm_up = 2 * (devices - device - 1) + (chunks - 1) * devices
        # One chunk and more than a group in flight is 1F1B with a second activation for each message under way.
        rows.append(_in_turn(forward, backward, warm_up if chunks > 1 else devices - device - 1))
    return _schedule("interleaved", loop(devices, chunks), microbatches, rows)


def pipedream(devices: int, microbatches: int) -> Schedule:
    """Returns 1F1B that never drains: weights change after each backward task, idle tends to 0 as m grows.

    Device d uses for microbatch t the weights after max(0, t - (P-d-1)) updates, forward and backward, and so keeps
    P - d versions. Reference: arXiv:1806.03377, section 3.3.
    """
    row = one_f_one_b(devices, microbatches)
    return _schedule("pipedream", row.placement, microbatches, row.rows, True)


def zero_bubble(devices: int, microbatches: int, limit: int) -> Schedule:
    """Returns 1F1B with weights' gradients put off to where a device would wait, with `limit` microbatches kept.

    Device d begins with min(2 (P-d) - 1, limit - d) forward passes, and puts off as many weights' gradients as make
    `limit` with them. `limit` = P is ZB-H1, 2P - 1 is ZB-H2.

    Args:
      devices: P.
      microbatches: m.
      limit: Microbatches between their F and their W, P to 2P - 1.

    Raises:
      UsageError: Of another limit.

    Reference: arXiv:2401.10241, section 2.
    """
    require(devices, microbatches)
    if not devices <= limit <= 2 * devices - 1:
        raise UsageError(
            f"zero bubbles over {devices} devices keep {devices} to {2 * devices - 1} microbatches, not {limit}."
        )
    rows = []
    for device in range(devices):
        warm_up = min(2 * (devices - device) - 1, limit - device)
        delay = limit - warm_up
        row = [Task(Op.F, device, j) for j in range(warm_up - 1)]
        for j in range(microbatches):
            row += [Task(Op.F, device, j + warm_up - 1), Task(Op.B, device, j)]
            if j >= delay:
                row.append(Task(Op.W, device, j - delay))
        rows.append(
            row + [Task(Op.W, device, j) for j in range(max(0, microbatches - delay), microbatches)]
        )
    return _schedule(f"zb_{limit}", loop(devices), microbatches, rows)


def blockwise(devices: int, microbatches: int, chunks: int, unit: int) -> Schedule:
    """Returns interleaved units of U microbatches with weights' gradients put off: a chunk's weights serve U in turn.

    Between 1F1B and breadth-first: a device gathers weights 2 v ceil(m/U) times (see `with_gathers`) and keeps
    (v-1) U + P microbatches of a chunk at most.

    Args:
      devices: P.
      microbatches: m.
      chunks: v, of each device; chunk c lies on device c mod P.
      unit: U, at least P, else a device waits within a unit.

    Raises:
      UsageError: Of a smaller unit.

    Reference: ZeroPP, arXiv:2402.03791.
    """
    require(devices, microbatches, chunks)
    if unit < devices:
        raise UsageError(
            f"a unit of {unit} microbatches leaves {devices} devices waiting; take at least {devices}."
        )
    units = range(-(-microbatches // unit))
    turns = [(turn, u * unit + j) for u in units for turn in range(chunks) for j in range(unit)]
    limit = (chunks - 1) * unit + devices
    rows = []
    for device in range(devices):
        forward = [Task(Op.F, turn * devices + device, j) for turn, j in turns if j < microbatches]
        backward = []
        weights = []
        for turn, j in turns:
            if j < microbatches:
                chunk = (chunks - 1 - turn) * devices + device
                backward.append(Task(op=Op.B, chunk=chunk, microbatch=j))
                weights.append(Task(op=Op.W, chunk=chunk, microbatch=j))
        warm_up = min(limit - device, len(forward))
        delay = limit - warm_up
        row = forward[: warm_up - 1]
        for i, task in enumerate(backward):
            row += [*forward[warm_up - 1 + i : warm_up + i], task]
            if i >= delay:
                row.append(weights[i - delay])
        rows.append(row + weights[max(0, len(weights) - delay) :])
    return _schedule("blockwise", loop(devices, chunks), microbatches, rows)


def zb_h1(devices: int, microbatches: int) -> Schedule:
    """Returns ZB-H1: the memory of 1F1B's first device on all, a third of its idle time: span 3m + P - 1 of 3m."""
    return dataclasses.replace(zero_bubble(devices, microbatches, devices), name="zb_h1")


def zb_h2(devices: int, microbatches: int) -> Schedule:
    """Returns ZB-H2: each device has work from its first task to its last where F = B = W and m >= 2P - 1."""
    return dataclasses.replace(zero_bubble(devices, microbatches, 2 * devices - 1), name="zb_h2")


def zb_v(devices: int, microbatches: int) -> Schedule:
    """Returns ZB-V: no idle time between a device's first and last task, as ZB-H2, in the memory of 1F1B.

    Two chunks a device, there and back (`vee`); at most 2P of these halves are kept. Holds for F = B = W, m >= 2P - 1.

    Reference: arXiv:2401.10241, section 6.
    """
    require(devices, microbatches)
    rows = []
    for device in range(devices):
        chunks = device, 2 * devices - 1 - device
        done: dict[tuple[Op, int], int] = {}
        row: list[Task] = []

        def add(times: int, *steps: tuple[Op, int], row=row, done=done, chunks=chunks) -> None:
            for _ in range(times):
                for op, half in steps:
                    j = done.get((op, half), 0)
                    if j < microbatches:
                        row.append(Task(op, chunks[half], j))
                        done[op, half] = j + 1

        # Forward passes until the first gradient is here; device d has then seen d microbatches come back.
        add(2 * (devices - device) - 1, (Op.F, 0))
        add(device, (Op.F, 1), (Op.F, 0))
        add(devices - device, (Op.F, 1), (Op.B, 1), (Op.W, 1))
        while done.get((Op.F, 1), 0) < microbatches:
            add(1, (Op.F, 0), (Op.B, 0), (Op.W, 0), (Op.F, 1), (Op.B, 1), (Op.W, 1))
        add(device, (Op.B, 0), (Op.B, 1))  # gradients others wait for first
        add(devices - device, (Op.B, 0), (Op.W, 0))
        add(microbatches, (Op.W, 1))
        add(microbatches, (Op.W, 0))
        rows.append(row)
    return _schedule("zb_v", vee(devices), microbatches, rows)
