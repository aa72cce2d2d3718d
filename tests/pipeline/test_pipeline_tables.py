"""Tables of pipelines: integers that a program runs, walked with names for arrays; searches, stages, text, pictures."""

import dataclasses
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_orders import MADE

from jaxpar import pipeline
from jaxpar.pipeline import (
    Op,
    Schedule,
    Task,
    TaskCosts,
    blockwise,
    breadth_first,
    check_schedule,
    check_table,
    draw_schedule,
    gpipe,
    interleaved,
    list_schedule,
    loop,
    one_f_one_b,
    pack_schedule,
    partition_layers,
    schedule_text,
    search_schedule,
    simulate_schedule,
    vee,
    with_gathers,
    with_vocabulary,
    zb_h1,
    zb_h2,
    zb_v,
    zero_bubble,
)
from jaxpar.pipeline.greedy import Preference
from jaxpar.pipeline.pack import COLUMNS
from jaxpar.pipeline.search import closed_forms
from jaxpar.types import UsageError

# ---------------------------------------------------------------- tables


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(MADE)), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_a_table_does_every_task_with_what_it_needs(name, p, m, latency):
    schedule = MADE[name](p, m)
    table = pack_schedule(schedule, latency)
    assert check_table(table) == []
    timing = simulate_schedule(schedule, lockstep=True)
    assert (table.column("op") != Op.IDLE).sum() == len(schedule.tasks)
    assert table.rows.dtype == np.int32 and (latency > 1 or len(table.rows) == timing.ticks)
    # As many slots as are ever full at once, no more.
    peaks = {"stash": timing.activations, "factors": timing.factors, "heads": timing.heads}
    assert {
        "stash": table.slots["stash"],
        "factors": table.slots["factors"],
        "heads": table.slots["head"],
    } == {name: max(peak) for name, peak in peaks.items()}


def altered(table, tick, device, **cells):
    rows = table.rows.copy()
    for name, value in cells.items():
        rows[tick, device, COLUMNS.index(name)] = value
    return dataclasses.replace(table, rows=rows)


def tick_of(table, device, op, microbatch):
    found = (table.column("op")[:, device] == op) & (
        table.column("microbatch")[:, device] == microbatch
    )
    return int(np.flatnonzero(found)[0])


def test_wrong_tables_are_said():
    table = pack_schedule(zb_h1(2, 4))
    # A slot of the stash given to the next microbatch while the one before still lies in it: one tick too early.
    second, held = tick_of(table, 0, Op.F, 1), table.column("stash")[0, 0]
    found = check_table(altered(table, second, 0, stash=held))
    assert found[0].endswith(f"stash slot {held} holds F1.0, not F0.0")
    # A message that its reader looks for one tick late, where another has come meanwhile.
    late = np.array(table.rows)
    inputs, arrivals = (COLUMNS.index(name) for name in ("input", "from_before"))
    late[1:, 1, arrivals] = table.rows[:-1, 1, arrivals]
    late[0, 1, arrivals] = -1
    found = check_table(dataclasses.replace(table, rows=late))
    assert "what comes by from_before is put nowhere" in found[0] and any(
        "not F0.0" in each for each in found
    )
    # A reader that runs a tick later than its message's slot is kept.
    forward = tick_of(table, 1, Op.F, 0)
    assert check_table(altered(table, forward, 1, input=table.rows[forward, 1, inputs] + 7))[
        0
    ].endswith("holds nothing, not F0.0")
    # The last microbatch's W dropped; factors of another microbatch; a message sent the wrong way.
    last = tick_of(table, 1, Op.W, 3)
    assert check_table(altered(table, last, 1, op=Op.IDLE)) == ["W3.1 is never done"]
    assert (
        "factors slot"
        in check_table(altered(table, last, 1, factors=table.rows[last, 1, 5] + 1))[0]
    )
    assert len(check_table(altered(table, 0, 0, send=0))) == 1
    three = pack_schedule(one_f_one_b(3, 3))
    assert "put nowhere" in check_table(altered(three, 0, 0, send=2))[0]


def test_wrong_tables_of_a_split_head_are_said():
    table = pack_schedule(with_vocabulary(one_f_one_b(2, 3)))
    merges = np.argwhere(table.column("merge") >= 0)
    tick, device = map(int, merges[0])
    assert check_table(altered(table, tick, device, merge=-1))[0].endswith(
        "merge shares of different microbatches"
    )
    tick = int(np.flatnonzero(table.column("merged")[:, 1] >= 0)[0])
    found = check_table(altered(table, tick, 1, merged=-1))
    assert any("the gradient of the head for 0" in each for each in found)
    with pytest.raises(UsageError, match="two broadcasts"):
        pack_schedule(dataclasses.replace(with_vocabulary(zb_h1(2, 2)), copies=2))


def test_messages_go_to_neighbours_and_later_than_they_are_sent():
    with pytest.raises(UsageError, match="at least 1"):
        pack_schedule(gpipe(2, 2), 0)
    rows = tuple(tuple(Task(op, device, 0) for op in (Op.F, Op.BW)) for device in range(4))
    # Chunks 0, 1, 2, 3 on devices 0, 2, 1, 3: the first message jumps over a device.
    far = Schedule("far", (0, 2, 1, 3), 1, tuple(rows[chunk] for chunk in (0, 2, 1, 3)))
    assert check_schedule(far) == []
    with pytest.raises(UsageError, match=r"F0\.1 is more than one device away"):
        pack_schedule(far)


def test_sides_have_ticks():
    table = pack_schedule(with_gathers(breadth_first(2, 3, 2)))
    assert [(tick, side.chunk) for tick, side in table.sides if side.device == 0] == [
        (0, 0),
        (3, 2),
        (6, 2),
        (11, 0),
    ]


@pytest.mark.parametrize("p, m, v", [(2, 4, 2), (4, 8, 2), (2, 6, 3)])
def test_tables_gather_as_often_as_the_closed_forms_say(p, m, v):
    """2v times breadth first, 2v ceil(m / U) in units; depth first 2v m / P or less. Slots are as simulated."""
    counts = {
        breadth_first(p, m, v): 2 * v,
        interleaved(p, m, v): 2 * v * m // p,
        blockwise(p, m, v, 2 * p): 2 * v * -(-m // (2 * p)),
    }
    for schedule, count in counts.items():
        for ahead in (0, 1):
            schedule_of = with_gathers(schedule, ahead)
            table, timing = (
                pack_schedule(schedule_of),
                simulate_schedule(schedule_of, lockstep=True),
            )
            assert check_table(table) == [] and table.rows.shape[-1] == len(COLUMNS) + 3
            gathers = (table.column("gather") >= 0).sum(0)
            assert (gathers <= count).all() and timing.gathers == (count,) * p
            if not ahead:
                assert table.slots["weights"] == max(timing.gathered) <= 2
                assert schedule.name == "interleaved" or (gathers == count).all()


def test_wrong_gathers_are_said():
    schedule = with_gathers(breadth_first(2, 3, 2))
    table = pack_schedule(schedule)
    columns = table.columns

    def changed(tick, name, value):
        rows = table.rows.copy()
        rows[tick, 0, columns.index(name)] = value
        return check_table(dataclasses.replace(table, rows=rows))

    second = int(np.flatnonzero(table.column("gather")[:, 0] == 1)[0])
    held = table.column("weights")[second, 0]
    assert changed(second, "gather", 0)[0].endswith(
        f"weights slot {held} holds weights of chunk 0, not weights of chunk 2"
    )
    assert "not weights of chunk 2" in changed(second + 1, "weights", 1 - held)[0]
    assert "holds nothing, not weights of chunk 0" in changed(0, "gather", -1)[0]
    some = dataclasses.replace(schedule, sides=schedule.sides[1:])
    with pytest.raises(
        UsageError, match=r"F0\.0 of breadth_first reads weights that were not gathered"
    ):
        pack_schedule(some)


# ---------------------------------------------------------------- searches


@pytest.mark.parametrize("seed", range(6))
def test_a_search_is_never_worse_than_the_closed_forms(seed):
    draw = random.Random(seed)
    p, m = draw.choice((2, 3, 4)), draw.randint(3, 7)
    costs = TaskCosts(*(draw.uniform(0.3, 2) for _ in "FBW"))
    cap, latency = draw.randint(p, 2 * p), draw.choice((0.0, 0.1, 0.7))
    found = search_schedule(loop(p), m, costs, cap, latency=latency, swaps=40)
    assert check_schedule(found, cap) == []
    forms = [each for each in closed_forms(loop(p), m) if check_schedule(each, cap) == []]
    assert zb_h1(p, m).rows in {each.rows for each in forms}
    end = min(simulate_schedule(each, costs, latency=latency).makespan for each in forms)
    assert simulate_schedule(found, costs, latency=latency).makespan <= end


@pytest.mark.slow  # 200 searches, 15 s
def test_two_hundred_searches_are_never_worse_than_the_closed_forms():
    for seed in range(200):
        test_a_search_is_never_worse_than_the_closed_forms(1000 + seed)


def words(chunk, m, cap):
    """All orders of F, B, W of m microbatches, each kind in turn, which is no loss since microbatches are alike."""
    found = []

    def grow(row, f, b, w):
        if w == m:
            found.append(tuple(row))
        for op, number, legal in (
            (Op.F, f, f < m and f - w < cap),
            (Op.B, b, b < f),
            (Op.W, w, w < b),
        ):
            if legal:
                grow(
                    [*row, Task(op, chunk, number)],
                    f + (op == Op.F),
                    b + (op == Op.B),
                    w + (op == Op.W),
                )

    grow([], 0, 0, 0)
    return found


@pytest.mark.parametrize(
    "costs, cap, latency, m",
    [
        ((1, 1, 1), 2, 0, 3),
        ((1, 1.5, 0.75), 2, 0.25, 3),
        ((1, 2, 0.5), 3, 0.5, 2),
        ((2, 1, 1), 1, 0, 3),
        *(
            pytest.param((1, 1.5, 0.75), 2, latency, 4, marks=pytest.mark.slow)
            for latency in (0, 0.25)
        ),  # 4 s each
    ],
)
def test_a_search_finds_what_brute_force_finds(costs, cap, latency, m):
    costs = TaskCosts(*costs)
    ends = []
    for rows in itertools.product(words(0, m, cap), words(1, m, cap)):
        schedule = Schedule("brute", (0, 1), m, rows)
        if not check_schedule(schedule):  # some pairs wait for each other for ever
            ends.append(simulate_schedule(schedule, costs, latency=latency).makespan)
    found = search_schedule(loop(2), m, costs, cap, latency=latency)
    assert simulate_schedule(found, costs, latency=latency).makespan == min(ends)


def test_searches_over_other_placements():
    for placement, form in ((vee(3), zb_v(3, 7)), (loop(3, 2), blockwise(3, 7, 2, 3))):
        cap = max(simulate_schedule(form).held)
        found = search_schedule(placement, 7, TaskCosts(), cap, swaps=10)
        assert check_schedule(found, cap) == []
        assert simulate_schedule(found).makespan <= simulate_schedule(form).makespan
    with pytest.raises(UsageError, match="cap=1 is too small"):
        search_schedule(vee(2), 3, cap=1)


def test_rules_may_get_stuck():
    # Each device fills its only place with its first chunk, whose backward pass waits for the second.
    assert list_schedule("stuck", vee(2), 2, Preference(2, 1)) is None


# ---------------------------------------------------------------- stages


def brute_partition(compute, send, weights, machines, is_replicated):
    """Every way to cut the layers and to hand out the machines."""
    layers, ends = len(compute), []
    for count in range(1, min(layers, machines) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            for shares in itertools.product(range(1, machines + 1), repeat=count):
                if sum(shares) != machines or (not is_replicated and max(shares) > 1):
                    continue
                bounds = (0, *cuts, layers)
                times = [send[cut - 1] for cut in cuts]
                for i, j, n in zip(bounds[:-1], bounds[1:], shares, strict=True):
                    times.append(max(sum(compute[i:j]), 2 * (n - 1) / n * sum(weights[i:j])) / n)
                ends.append(max(times))
    return min(ends)


@pytest.mark.parametrize("seed", range(8))
def test_partitions_are_those_of_brute_force(seed):
    draw = random.Random(seed)
    layers, machines = draw.randint(2, 8), draw.randint(1, 4)
    lists = [[draw.randint(1, 9) / 4 for _ in range(layers)] for _ in range(3)]
    lists[1] = [3 * time for time in lists[1]]  # so that what is sent decides in some
    for is_replicated in (True, False) if machines <= layers else (True,):
        time, stages = partition_layers(*lists, machines, is_replicated=is_replicated)
        assert time == brute_partition(*lists, machines, is_replicated)
        assert sum(stage.machines for stage in stages) == machines
        assert [s.first for s in stages] == [0, *(s.last for s in stages[:-1])] and stages[
            -1
        ].last == layers


def test_partitions_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="3 machines; legal is 1 to 2"):
        partition_layers([1, 1], [1, 1], [1, 1], 3, is_replicated=False)
    with pytest.raises(UsageError, match="1 times of sending"):
        partition_layers([1, 1], [1], [1, 1], 2)


# ---------------------------------------------------------------- text and pictures


def test_text():
    assert schedule_text(one_f_one_b(3, 4)) == "FFF..DFD.D.D\n.FF.DFDFD.D.\n..FDFDFDFD.."
    assert schedule_text(zb_h1(2, 2)) == "FF.BWBW\n.FBFBWW"
    assert schedule_text(interleaved(2, 1, 2), True) == (
        "F0.0 .    F0.2 .    .    D0.2 .    D0.0\n.    F0.1 .    F0.3 D0.3 .    D0.1 ."
    )


def test_a_picture_shows_its_simulation(tmp_path):
    schedule = with_vocabulary(zb_v(2, 3))
    timing = draw_schedule(
        with_gathers(schedule), tmp_path / "new" / "zb.png", TaskCosts(gather=0.5), latency=0.1
    )
    assert (tmp_path / "new" / "zb.png").read_bytes()[:4] == b"\x89PNG"
    assert timing == simulate_schedule(with_gathers(schedule), TaskCosts(gather=0.5), latency=0.1)


# ---------------------------------------------------------------- torch


OPS = {"FORWARD": Op.F, "FULL_BACKWARD": Op.BW, "BACKWARD_INPUT": Op.B, "BACKWARD_WEIGHT": Op.W}


@pytest.mark.parametrize("p, m", [(4, 8), (3, 7)])
def test_rows_are_those_of_torch(p, m):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    known = {
        "ScheduleLoopedBFS": breadth_first(p, m, 2),
        "ScheduleInterleaved1F1B": interleaved(p, m, 2),
        "ScheduleInterleavedZeroBubble": blockwise(p, m, 2, p),
        "ScheduleZBVZeroBubble": zb_v(p, m),
    }
    for name, ours in known.items():
        if m % p and "Interleaved" in name:
            continue  # its last group is another one
        theirs = object.__new__(getattr(schedules, name))
        theirs.pp_group_size, theirs.n_local_stages, theirs.num_stages, theirs._num_stages = (
            p,
            2,
            2 * p,
            2 * p,
        )
        theirs._n_microbatches, theirs.number_of_rounds, theirs.microbatches_per_round = (
            m,
            max(1, m // p),
            p,
        )
        theirs._stages = [None, None]  # as many as lie on a device
        for device, row in enumerate(ours.rows):
            theirs.rank = device
            actions = [
                each
                for each in theirs._calculate_single_rank_operations(device)
                if each is not None
            ]
            told = [
                (each.computation_type.name, each.stage_index, each.microbatch_index)
                for each in actions
            ]
            if name == "ScheduleLoopedBFS":  # which goes back from the last microbatch on
                told[2 * m :] = [(op, stage, m - 1 - j) for op, stage, j in told[2 * m :]]
            assert row == tuple(Task(OPS[op], stage, j) for op, stage, j in told), name


@pytest.mark.parametrize("name", sorted(MADE))
def test_the_validator_of_torch_agrees(name):
    """On what is right, and on a W that is missing, comes before its B or lies elsewhere."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = MADE[name](4, 8)
    if schedule.copies > 1 or not hasattr(schedules, "_validate_schedule"):
        pytest.skip("it knows one copy of a model, and some versions have none")
    kinds = {op: getattr(schedules._ComputationType, name) for name, op in OPS.items()}

    def judged(rows):
        actions = {
            device: [schedules._Action(chunk, kinds[op], j) for op, chunk, j in row if op in kinds]
            for device, row in enumerate(rows)
        }
        placed = schedules._validate_schedule(actions, 4, schedule.depth, 8)
        assert tuple(placed[chunk] for chunk in range(schedule.depth)) == schedule.placement

    judged(schedule.rows)
    first, *others = schedule.rows
    last = max(place for place, task in enumerate(first) if task.op in (Op.BW, Op.W))
    shorter = (*first[:last], *first[last + 1 :])
    for rows in (
        (shorter, *others),
        ((first[last], *shorter), *others),
        (shorter, (*others[0], first[last]), *others[1:]),
    ):
        with pytest.raises(AssertionError):
            judged(rows)
        assert check_schedule(dataclasses.replace(schedule, rows=tuple(rows)))


def test_limits_between_h1_and_h2():
    ends = [simulate_schedule(zero_bubble(4, 9, limit)).span[3] for limit in range(4, 8)]
    assert ends == sorted(ends, reverse=True)
    assert zero_bubble(4, 9, 7).rows == zb_h2(4, 9).rows


# ---------------------------------------------------------------- the page

PAGE = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()


def test_the_snippet_of_the_page_prints_what_it_shows(capsys):
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]


def test_figures_of_the_page_are_those_of_the_simulator():
    made = {"interleaved": interleaved(4, 8, 2), "breadth_first": breadth_first(4, 8, 2)}
    made |= {"blockwise": blockwise(4, 8, 2, 4)}
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) % \| (\d+) \| (\d+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 10
    for name, idle, kept, chunks in rows:
        timing = simulate_schedule(made[name] if name in made else getattr(pipeline, name)(4, 8))
        shown = f"{100 * timing.idle_fraction:.1f}", max(timing.held), max(timing.weights)
        assert shown == (idle, int(kept), int(chunks)), name


def test_the_page_says_what_both_stages_apart_gain():
    (halves,) = re.findall(r"both wait ([\d.]+) % in place of ([\d.]+) %", PAGE)
    for make in (gpipe, one_f_one_b):
        shown = [
            f"{100 * simulate_schedule(make(4, 8, split)).idle_fraction:.1f}"
            for split in (True, False)
        ]
        assert shown == list(halves)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("schedule", [interleaved(2, 4, 3), breadth_first(2, 4, 2)])
def test_a_device_gathers_one_chunk_a_tick_and_before_it_is_read(schedule, ahead):
    table = pack_schedule(with_gathers(schedule, ahead))
    begun = [(tick, side) for tick, side in table.sides if side.kind == "gather"]
    assert len({(tick, side.device) for tick, side in begun}) == len(begun)
    assert not check_table(table)  # which reads the weights of every task off the columns
