"""Schedules of pipelines: closed forms of idle time and memory, a plain simulator, what is noticed as wrong."""

import dataclasses
import functools
import heapq
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.pipeline import (
    Op,
    Schedule,
    Task,
    TaskCosts,
    bitpipe,
    blockwise,
    breadth_first,
    check_schedule,
    gpipe,
    hanayo,
    interleaved,
    loop,
    one_f_one_b,
    pack_schedule,
    pipedream,
    simulate_schedule,
    vee,
    with_gathers,
    with_offload,
    with_reductions,
    with_vocabulary,
    zb_h1,
    zb_h2,
    zb_v,
    zero_bubble,
)
from jaxpar.pipeline.ops import Side, mirrored, wave
from jaxpar.pipeline.timing import SlotSizes
from jaxpar.types import UsageError

# Every generator, at any P and m.
MADE = {
    "gpipe": gpipe,
    "gpipe split": lambda p, m: gpipe(p, m, True),
    "1f1b": one_f_one_b,
    "1f1b split": lambda p, m: one_f_one_b(p, m, True),
    "interleaved 2": lambda p, m: interleaved(p, m, 2),
    "interleaved 3": lambda p, m: interleaved(p, m, 3),
    "interleaved 1": lambda p, m: interleaved(p, m, 1),
    "breadth first": lambda p, m: breadth_first(p, m, 2),
    "blockwise": lambda p, m: blockwise(p, m, 2, p + 1),
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "pipedream": pipedream,
    "hanayo": lambda p, m: hanayo(p, m, 1),
    "bitpipe": lambda p, m: bitpipe(2 * -(-p // 2), 2 * -(-m // 2)),
    "vocabulary": lambda p, m: with_vocabulary(zb_h1(p, m)),
    "gathers": lambda p, m: with_reductions(with_gathers(blockwise(p, m, 2, p), 1)),
}


def idle(schedule, **options):
    timing = simulate_schedule(schedule, **options)
    return 1 - Fraction(sum(timing.work)) / (Fraction(timing.makespan) * schedule.devices)


@pytest.mark.parametrize("p, m", [(1, 3), (2, 2), (2, 7), (4, 8), (5, 5), (4, 3)])
def test_idle_time_of_gpipe_and_1f1b(p, m):
    assert idle(gpipe(p, m)) == idle(one_f_one_b(p, m)) == Fraction(p - 1, m + p - 1)
    assert simulate_schedule(gpipe(p, m)).activations == (m,) * p
    assert simulate_schedule(one_f_one_b(p, m)).activations == tuple(
        min(m, p - d) for d in range(p)
    )
    assert one_f_one_b(p, m).rows == interleaved(p, m, 1).rows


@pytest.mark.parametrize("p, m, v", [(2, 4, 2), (3, 6, 3), (4, 8, 2), (4, 12, 4)])
def test_idle_time_of_interleaved_and_breadth_first(p, m, v):
    expected = Fraction(p - 1, v * m + p - 1)
    assert idle(interleaved(p, m, v)) == idle(breadth_first(p, m, v)) == expected
    peaks = tuple(min(m * v, 2 * (p - d - 1) + (v - 1) * p + 1) for d in range(p))
    assert simulate_schedule(interleaved(p, m, v)).activations == peaks
    assert simulate_schedule(breadth_first(p, m, v)).activations == (m * v,) * p


@pytest.mark.parametrize("p, m", [(2, 3), (3, 5), (4, 8), (6, 12), (8, 15)])
def test_idle_time_of_zero_bubbles(p, m):
    h1, h2, v = (simulate_schedule(make(p, m)) for make in (zb_h1, zb_h2, zb_v))
    assert h1.makespan == 3 * m + p - 1 and h1.held == (p,) * p
    assert sum(simulate_schedule(one_f_one_b(p, m)).idle) == 3 * sum(h1.idle)
    assert h2.span == h2.work == (3 * m,) * p and h2.held == (2 * p - 1,) * p
    assert v.span == v.work == (6 * m,) * p
    assert max(v.held) <= 2 * p
    for limit in range(p, 2 * p):
        assert max(simulate_schedule(zero_bubble(p, m, limit)).held) <= limit


def test_split_backward_shortens_gpipe_and_1f1b():
    # The chain back is half as long: P - 1 units less of each of P - 1 idle devices.
    for make in (gpipe, one_f_one_b):
        whole, split = (simulate_schedule(make(4, 8, split)) for split in (False, True))
        assert split.makespan < whole.makespan and split.work == whole.work and max(split.held) == 8


def test_waves_and_two_directions_reach_the_figures_of_a_list_scheduler():
    for (p, m, w), bar in {
        (4, 4, 1): 0.3334,
        (4, 4, 2): 0.25,
        (8, 8, 1): 0.3685,
        (8, 8, 2): 0.294,
    }.items():
        timing = simulate_schedule(hanayo(p, m, w))
        assert timing.idle_fraction <= bar < idle(one_f_one_b(p, m))
        assert (
            max(timing.activations) <= 2 * w * p
        )  # as many halves, quarters, ... as 1F1B has wholes
        assert timing.messages == 2 * m * (2 * w * (p - 1))  # turns cost none
    for (p, m), bar in {(4, 4): 0.143, (4, 8): 0.094, (8, 8): 0.25, (8, 16): 0.1795}.items():
        timing = simulate_schedule(bitpipe(p, m))
        assert timing.idle_fraction <= bar and timing.weights == (4,) * p
        assert timing.idle_fraction < Fraction(p - 1, 2 * m + p - 1)


def test_blockwise_lies_between_1f1b_and_breadth_first():
    for m in (8, 16, 32):
        ours = simulate_schedule(blockwise(4, m, 2, 4))
        wide, deep = simulate_schedule(breadth_first(4, m, 2)), simulate_schedule(one_f_one_b(4, m))
        assert ours.makespan < min(wide.makespan, 2 * deep.makespan) and 2 * max(ours.held) <= max(
            wide.held
        )
        for unit in (4, 8):
            gathered = simulate_schedule(with_gathers(blockwise(4, m, 2, unit)))
            assert gathered.gathers == (4 * -(-m // unit),) * 4 and max(gathered.gathered) <= 2
    assert simulate_schedule(with_gathers(breadth_first(4, 8, 3))).gathers == (6,) * 4
    assert simulate_schedule(with_gathers(interleaved(4, 8, 2))).gathers == (2 * 2 * 8 // 4,) * 4


@pytest.mark.parametrize("p, m", [(1, 3), (3, 8), (4, 12)])
def test_versions_of_weights_of_pipedream(p, m):
    schedule = pipedream(p, m)
    versions = schedule.weight_versions()
    assert versions == tuple({(d, t): max(0, t - (p - d - 1)) for t in range(m)} for d in range(p))
    assert simulate_schedule(schedule).weights == tuple(range(p, 0, -1))
    # Once full it never waits: the middle of a long run.
    last = {e.what: e for e in simulate_schedule(pipedream(p, m + 9)).times}
    assert last[Task(Op.BW, 0, m + 8)].end - last[Task(Op.BW, 0, m + 5)].end == 3 * 3


def test_placements():
    assert loop(2, 2) == (0, 1, 0, 1) and vee(2) == (0, 1, 1, 0) and wave(2, 2) == vee(2) * 2
    assert mirrored(2) == (0, 1, 1, 0, 1, 0, 0, 1)


# ---------------------------------------------------------------- a plain simulator


def plain(schedule, costs, latency):
    """Start and end of each task: a clock, and devices that look at their next task whenever something happens."""
    queue, place, busy, done = [(0.0, 0)], [0] * schedule.devices, [0.0] * schedule.devices, {}
    order = {device: list(row) for device, row in enumerate(schedule.rows)}
    number = 1
    while queue:
        now, _ = heapq.heappop(queue)
        for device, row in order.items():
            if place[device] == len(row) or busy[device] > now:
                continue
            op, chunk, j = task = row[place[device]]
            path = list(schedule.path(j))
            wanted = {
                Op.F: [(Op.F, chunk - 1)] if chunk != path[0] else [],
                Op.W: [(Op.B, chunk)],
                Op.S: [(Op.F, path[-1])],
                Op.T: [(Op.S, d) for d in range(schedule.devices)],
            }.get(op)
            if wanted is None:
                ahead = [
                    (other, chunk + 1)
                    for other in (Op.B, Op.BW)
                    if (other, chunk + 1, j) in schedule.tasks
                ]
                shares = [
                    (Op.S, d) for d in range(schedule.devices) if (Op.S, d, j) in schedule.tasks
                ]
                wanted = [(Op.F, chunk), *(shares if chunk == path[-1] else ahead)]
            if all(
                (w, c, j) in done
                and done[w, c, j][1]
                + latency * (Op.S in (w, op) or schedule.placement[c] != device)
                <= now
                for w, c in wanted
            ):
                each = {name: getattr(costs, name) for name in "FBWST"}
                time = each["B"] + each["W"] if op == Op.BW else each[op.name]
                done[tuple(task)] = now, now + time
                busy[device], place[device] = now + time, place[device] + 1
                for when in {now + time, now + time + latency}:
                    heapq.heappush(queue, (when, number))
                    number += 1
    assert len(done) == len(schedule.tasks)
    return done


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(MADE)),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.integers(1, 16), min_size=5, max_size=5),
    st.sampled_from((0.0, 0.25, 2.0)),
)
def test_every_schedule_is_legal_and_timed_as_by_a_plain_simulator(name, p, m, times, latency):
    schedule, costs = (
        MADE[name](p, m),
        TaskCosts(*(time / 8 for time in times)),
    )  # eighths: sums are exact
    assert check_schedule(schedule) == []
    timing = simulate_schedule(schedule, costs, latency=latency)
    assert {
        tuple(e.what): (e.start, e.end) for e in timing.times if isinstance(e.what, Task)
    } == plain(schedule, costs, latency)
    in_step = simulate_schedule(schedule, costs, latency=latency, lockstep=True)
    assert in_step.makespan >= timing.makespan - latency and in_step.work == timing.work
    assert in_step.held == timing.held  # what a device keeps follows from its order alone


def test_lockstep_takes_the_longest_task_of_each_tick():
    # F of two devices side by side takes 1, beside BW 3; the tick of the last F and the first BW is no exception.
    timing = simulate_schedule(
        one_f_one_b(2, 2), TaskCosts(F=1.0, B=2.0, W=1.0), latency=0.5, lockstep=True
    )
    # device 0: F F . D . D, device 1: . F D F D .
    assert timing.ticks == 6 and timing.makespan == (1 + 1 + 3 + 3 + 3 + 3) + 5 * 0.5


def test_bytes_and_messages():
    timing = simulate_schedule(zb_h1(3, 5), sizes=SlotSizes(activation=10, factors=4, weights=100))
    assert timing.messages == 2 * 2 * 5
    # Device 0 is 1F1B whose W follows at once; the last has one activation and two put off, then three put off.
    assert timing.bytes == (130, 124, 118)


def test_vocabulary_split_over_devices_shortens_a_heavy_head():
    # Head as heavy as three chunks, alone on the last device or a quarter on each; S has forward and the input's part.
    alone = TaskCosts(scale=(1.0, 1.0, 1.0, 4.0))
    split = TaskCosts(S=2 * 3 / 4, T=3 / 4)
    for make in (one_f_one_b, zb_h1):
        before, after = (make(4, 16), alone), (with_vocabulary(make(4, 16), split), split)
        times = [simulate_schedule(*pair) for pair in (before, after)]
        assert times[1].makespan <= 0.8 * times[0].makespan and sum(times[1].work) == sum(
            times[0].work
        )
        assert times[1].heads == (1,) * 4


# ---------------------------------------------------------------- what is wrong


def without(schedule, *tasks):
    return dataclasses.replace(
        schedule, rows=tuple(tuple(t for t in row if t not in tasks) for row in schedule.rows)
    )


def swapped(schedule, device, one, other):
    row = list(schedule.rows[device])
    i, j = row.index(one), row.index(other)
    row[i], row[j] = row[j], row[i]
    rows = (*schedule.rows[:device], tuple(row), *schedule.rows[device + 1 :])
    return dataclasses.replace(schedule, rows=rows)


def test_wrong_tasks_are_said():
    right = zb_h1(2, 3)
    f, b, w = (Task(op, 1, 2) for op in (Op.F, Op.B, Op.W))
    assert check_schedule(without(right, w)) == [
        "W2.1 is missing"
    ]  # the last microbatch's W dropped
    assert check_schedule(without(right, f)) == ["F2.1 is missing"]
    assert check_schedule(without(right, b)) == ["B2.1 is missing"]
    twice = dataclasses.replace(right, rows=(right.rows[0], (*right.rows[1], w)))
    assert check_schedule(twice) == ["W2.1 is there 2 times"]
    both = dataclasses.replace(right, rows=(right.rows[0], (*right.rows[1], Task(Op.BW, 1, 2))))
    assert check_schedule(both) == ["chunk 1 goes back twice with microbatch 2: BW2.1 beside B2.1"]
    moved = dataclasses.replace(
        without(right, w), rows=((*right.rows[0], w), without(right, w).rows[1])
    )
    assert check_schedule(moved) == ["W2.1 is on device 0, its chunk on device 1"]
    alien = dataclasses.replace(right, rows=((*right.rows[0], Task(Op.F, 0, 3)), right.rows[1]))
    assert check_schedule(alien) == [
        "microbatch=3 of a task of device 0, F3.0: there is no such microbatch; expected 0 to 2"
    ]
    other = dataclasses.replace(without(bitpipe(2, 2), f0 := Task(Op.F, 0, 0)), microbatches=2)
    placed = dataclasses.replace(other, rows=((Task(Op.F, 0, 1), *other.rows[0]), other.rows[1]))
    assert check_schedule(placed) == [
        f"{f0} is missing",
        "F1.0 is of no chunk that microbatch 1 passes",
    ]
    split = with_vocabulary(right)
    assert check_schedule(without(split, Task(Op.S, 0, 1))) == ["S1.0 is missing"]
    assert check_schedule(Schedule("none", (0, 2), 1, ((), ()))) == [
        "2 chunks of 1 copies do not lie on 2 devices"
    ]


NO_OPERATION = "it is no operation; expected one of Op after IDLE"


@pytest.mark.parametrize(
    "task, number, name, what, last",
    [
        (Task(Op.F, 7, 0), "chunk=7", "F0.7", "chunk", 3),
        (Task(Op.F, -1, 0), "chunk=-1", "F0.-1", "chunk", 3),
        (Task(Op.BW, 4, 0), "chunk=4", "BW0.4", "chunk", 3),
        (Task(Op.F, 1, 5), "microbatch=5", "F5.1", "microbatch", 2),
        (Task(Op.W, 1, -1), "microbatch=-1", "W-1.1", "microbatch", 2),
        (Task(Op.S, 2, 0), "chunk=2", "S0.2", "device", 1),
        (Task(Op.T, -1, 0), "chunk=-1", "T0.-1", "device", 1),
        (Task(9, 1, 0), "op=9", "", "", 0),
        (Task(Op.IDLE, 1, 0), "op=<Op.IDLE: 0>", "", "", 0),
    ],
)
def test_tasks_of_what_is_not_there_are_one_sentence(task, number, name, what, last):
    right = interleaved(2, 3, 2)
    wrong = dataclasses.replace(right, rows=(right.rows[0], (*right.rows[1], task)))
    sentence = (
        f"{number} of a task of device 1, {name}: there is no such {what}; expected 0 to {last}"
    )
    if not name:
        sentence = f"{number} of a task of device 1: {NO_OPERATION}"
    assert check_schedule(wrong) == [sentence]
    in_lockstep = functools.partial(simulate_schedule, lockstep=True)
    for read in (simulate_schedule, pack_schedule, in_lockstep):
        with pytest.raises(UsageError, match=re.escape(f"interleaved: {sentence}.")):
            read(wrong)


@pytest.mark.parametrize(
    "side, number, what, last",
    [
        (Side("gather", 2, 0, 0), "device=2", "device", 1),
        (Side("reduce", -1, 0, 0), "device=-1", "device", 1),
        (Side("gather", 0, 0, 4), "chunk=4", "chunk", 3),
        (Side("fetch", 0, 1, -1, 0), "chunk=-1", "chunk", 3),
        (Side("offload", 0, 1, 0, 3), "microbatch=3", "microbatch", 2),
        (Side("fetch", 0, 1, 0, -1), "microbatch=-1", "microbatch", 2),
    ],
)
def test_sides_of_what_is_not_there_are_one_sentence(side, number, what, last):
    said = check_schedule(dataclasses.replace(interleaved(2, 3, 2), sides=(side,)))
    sentence = f"{number} of the side {side.kind}: there is no such {what}; expected 0 to {last}"
    assert said == [sentence]


def test_sides_of_another_device_or_outside_of_a_row_are_one_sentence():
    def breaches_of(side):
        return check_schedule(dataclasses.replace(interleaved(2, 3, 2), sides=(side,)))

    elsewhere = "reduce of chunk 1 is on device 0, its chunk on device 1"
    assert breaches_of(Side("reduce", 0, 12, 1)) == [elsewhere]
    for number in (-1, 13):
        (sentence,) = breaches_of(Side("gather", 0, number, 0))
        assert "or at no place of its row" in sentence


def test_numbers_of_which_nothing_can_be_placed_are_one_sentence():
    right = one_f_one_b(2, 1)
    for copies in (0, -1, 3):
        wrong = dataclasses.replace(right, copies=copies)
        assert check_schedule(wrong) == [f"2 chunks of {copies} copies do not lie on 2 devices"]
    for placement in ((0, 2), (0, -1)):
        wrong = dataclasses.replace(right, placement=placement)
        assert check_schedule(wrong) == ["2 chunks of 1 copies do not lie on 2 devices"]
    both = bitpipe(2, 2)
    rows = tuple(tuple(task for task in row if task.microbatch == 0) for row in both.rows)
    # A chunk of the copy that no microbatch passes.
    other = next(chunk for chunk in both.chunks_of(0) if chunk >= both.depth)
    sides = (Side("gather", 0, 0, other),)
    idle = dataclasses.replace(both, microbatches=1, rows=rows, sides=sides)
    assert check_schedule(idle) == [f"gather of chunk {other} serves no task of device 0"]


def test_wrong_orders_are_said():
    right = zb_h1(2, 3)
    early = swapped(right, 0, Task(Op.W, 0, 0), Task(Op.B, 0, 0))  # W before its B
    assert check_schedule(early)[0] == "device 0 waits with W0.0 for B0.0"
    with pytest.raises(UsageError, match=r"zb_h1 never ends: device 0 waits with W0\.0 for B0\.0"):
        simulate_schedule(early)
    crossed = swapped(right, 1, Task(Op.F, 1, 0), Task(Op.B, 1, 0))
    assert check_schedule(crossed)[0] == "device 0 waits with B0.0 for B0.1"
    assert check_schedule(right, 2) == [] and check_schedule(right, 1) == [
        f"device {d} keeps 2 microbatches of a chunk, over a cap of 1" for d in range(2)
    ]


def test_wrong_sides_are_said():
    right = gpipe(2, 2)  # F0 F1 D0 D1

    def said(*sides):
        return check_schedule(dataclasses.replace(right, sides=sides))

    out, back = Side("offload", 0, 1, 0, 0), Side("fetch", 0, 2, 0, 0)
    assert said(out, back) == []
    assert said(out._replace(place=0), back) == [
        "what chunk 0 keeps of microbatch 0 is offloaded before it is there"
    ]
    late = out._replace(place=2)
    assert said(late, back) == [] and said(back, late) == [
        "what chunk 0 keeps of microbatch 0 comes back before it is offloaded"
    ]
    assert said(out, back._replace(place=3)) == [
        "what chunk 0 keeps of microbatch 0 comes back after it is needed"
    ]
    assert said(out) == [
        "what chunk 0 keeps of microbatch 0 has offload and nothing that undoes it"
    ]
    assert "taken by fetch 2 times" in said(out, back, back)[0]
    assert said(Side("offload", 1, 1, 0, 0), Side("fetch", 1, 2, 0, 0))[0].endswith(
        "is not on device 1"
    )
    assert said(Side("gather", 0, 0, 0), Side("reduce", 0, 4, 0)) == []
    assert said(Side("gather", 0, 1, 0)) == [
        "chunk 0 is used on device 0 before its weights are gathered"
    ]
    assert said(Side("reduce", 0, 3, 0)) == [
        "the gradient of chunk 0 is reduced on device 0 before its last task"
    ]
    assert "none of offload" in said(Side("send", 0, 0, 0))[0]


def test_offload_halves_the_memory_in_the_same_time():
    costs = TaskCosts(offload=0.5, fetch=0.5)
    for make in (lambda: gpipe(3, 6), lambda: interleaved(2, 6, 2)):
        before, schedule = simulate_schedule(make(), costs), with_offload(make(), costs)
        after = simulate_schedule(schedule, costs)
        assert check_schedule(schedule) == [] and after.makespan == before.makespan
        assert max(after.bytes) <= 0.6 * max(before.bytes) and min(after.transfers) > 0
        # One transfer at a time each way, after the F, and home before the backward task.
        at = {e.what: e for e in after.times}
        for side, entry in ((e.what, e) for e in after.times if isinstance(e.what, Side)):
            which = side.chunk, side.microbatch
            if side.kind == "offload":
                assert entry.start >= at[Task(Op.F, *which)].end
            else:
                assert entry.end <= at[schedule.backward(*which)].start
            same = [
                e
                for e in at.values()
                if isinstance(e.what, Side) and e.what[:2] == side[:2] and e is not entry
            ]
            assert all(e.end <= entry.start or e.start >= entry.end for e in same)
    slow = TaskCosts(offload=50.0, fetch=50.0)
    assert with_offload(gpipe(2, 4), slow) == gpipe(2, 4)  # nothing lies idle so long


def test_gathers_cost_time_unless_they_begin_early():
    costs = TaskCosts(gather=1.0, reduce=1.0)
    plain_time = simulate_schedule(breadth_first(2, 4, 2), costs).makespan
    late, early = (
        simulate_schedule(with_gathers(breadth_first(2, 4, 2), ahead), costs) for ahead in (0, 1)
    )
    assert plain_time < early.makespan < late.makespan
    reduced = simulate_schedule(with_reductions(breadth_first(2, 4, 2)), costs)
    assert (
        reduced.makespan == plain_time + 1 and len(reduced.times) == 2 * 4 * 4 + 4
    )  # the last one shows


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: gpipe(0, 2), "devices=0"),
        (lambda: one_f_one_b(2, 0), "microbatches=0"),
        (lambda: interleaved(2, 2, 0), "chunks=0"),
        (lambda: zero_bubble(4, 8, 3), "keep 4 to 7"),
        (lambda: blockwise(4, 8, 2, 3), "at least 4"),
        (lambda: bitpipe(3, 4), "devices=3 is odd"),
        (lambda: bitpipe(4, 3), "microbatches=3 is odd"),
        (lambda: with_vocabulary(bitpipe(2, 2)), "two"),
        (lambda: simulate_schedule(gpipe(2, 1), TaskCosts(scale=(1.0,))), "1 entries for 2 chunks"),
        (lambda: simulate_schedule(gpipe(1, 1), latency=float("nan")), "latency"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()
