"""Schedules with offload, run: the bits of those without, in the device's and the host's bytes that the table says."""

import dataclasses
import functools
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pipeline_toy as toy
import pytest
from compiled import copies, needs_libtpu, on_a_tpu
from lm_configs import lm_config

from experiments.app.lm.pipeline_flags import make_schedule
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.pipeline import (
    PIPELINES,
    Op,
    Pipelined,
    TaskCosts,
    check_schedule,
    check_table,
    gpipe,
    named_schedule,
    one_f_one_b,
    pack_schedule,
    run,
    simulate_schedule,
    with_gathers,
    with_offload,
    zb_v,
)
from jaxpar.pipeline.ops import Side
from jaxpar.pipeline.timing import SlotSizes
from jaxpar.types import UsageError

LAYERS = 8


def half_of(schedule):
    """Every second microbatch on the host, so that both places have several slots."""
    whole = with_offload(schedule, lockstep=True)
    return dataclasses.replace(
        whole, sides=tuple(side for side in whole.sides if side.microbatch % 2 == 0)
    )


@functools.cache
def made(schedule, axis):
    """The text of a program and the bits that it makes."""
    program, args = toy.program(schedule, LAYERS, "float32", {axis: 2})
    return program.as_text(), [x.tobytes() for x in jax.tree.leaves(jax.device_get(program(*args)))]


@pytest.mark.parametrize("schedule, axis", [(gpipe(4, 6), "tensor"), (zb_v(4, 5), "data")], ids=str)
def test_no_bit_of_a_gradient_changes(schedule, axis):
    away = half_of(schedule)
    text, bits = made(away, axis)
    assert bits == made(schedule, axis)[1] and away.sides
    body, slots = toy.body_of(text), pack_schedule(away).slots
    assert slots["stash"] > 1 and len(re.findall(r" collective-permute(?:-start)?\(", body)) == 2
    if jax.__version_info__ < (0, 11):
        return  # whose compiler copies slots on CPU devices
    for leading in (slots["stash"], slots["host"] + 1):
        for width in {toy.WIDTH, toy.HIDDEN}:
            shape = (
                leading,
                LAYERS // schedule.depth,
                toy.ROWS // (2 if axis == "data" else 1),
                toy.LENGTH,
                width,
            )
            assert not copies(body, shape), shape


def test_one_slot_alone_serves_where_all_goes_to_the_host():
    away = with_offload(gpipe(4, 6), lockstep=True)
    assert pack_schedule(away).slots == {"inbox": 6, "stash": 1, "factors": 0, "head": 0, "host": 5}
    assert made(away, "tensor")[1] == made(gpipe(4, 6), "tensor")[1]


@pytest.mark.parametrize("wrong", ["late", "slot"])
def test_wrong_transfers_are_said_and_change_the_gradient(wrong, monkeypatch):
    table = pack_schedule(half_of(gpipe(4, 6)))
    rows, places = table.rows.copy(), [table.columns.index(name) for name in ("fetch", "fetch_to")]
    if wrong == "late":  # by one tick
        rows[1:, :, places], rows[0, :, places] = table.rows[:-1, :, places], -1
    else:
        fetch = rows[..., places[0]]
        rows[..., places[0]] = np.where(fetch >= 0, (fetch + 1) % table.slots["host"], -1)
    changed = dataclasses.replace(table, rows=rows)
    assert check_table(table) == [] and "stash slot" in check_table(changed)[0]
    right = made(gpipe(4, 6), "tensor")[1]
    monkeypatch.setattr(run, "_packed", lambda *args: changed)
    assert made.__wrapped__(changed.schedule, "tensor")[1] != right


EARLY = (Side("offload", 0, 0, 0, 1), Side("fetch", 0, 4, 0, 1))
"""An offload before F0 of what F1 writes, and its fetch."""


def test_an_offload_never_reads_its_slot_in_the_tick_of_its_f():
    """Nor before: F writes at the end of its tick, and an offload reads at the beginning of one."""
    schedule = dataclasses.replace(gpipe(2, 3), sides=EARLY)
    said = check_schedule(schedule)
    assert said == ["what chunk 0 keeps of microbatch 1 is offloaded before it is there"]
    table = pack_schedule(schedule)  # which orders what it is given
    is_forward = (table.column("op") == Op.F) & (table.column("microbatch") == 1)
    forward = int(np.flatnonzero(is_forward[:, 0])[0])
    ticks = {side.kind: tick for tick, side in table.sides}
    assert ticks["offload"] == forward + 1 and check_table(table) == []

    rows = table.rows.copy()
    cells = [table.columns.index(name) for name in ("offload", "offload_to")]
    rows[forward, 0, cells] = table.rows[forward + 1, 0, cells]
    rows[forward + 1, 0, cells] = -1
    slot = int(rows[forward, 0, cells[0]])
    sides = tuple((tick - (side.kind == "offload"), side) for tick, side in table.sides)
    said = check_table(dataclasses.replace(table, rows=rows, sides=sides))
    assert said[0] == f"tick {forward}, device 0: stash slot {slot} holds nothing to offload"


def test_an_offload_of_what_another_microbatch_left_is_said_where_it_is_read():
    table = pack_schedule(with_offload(gpipe(2, 3), lockstep=True))
    ticks = {side[3:]: tick for tick, side in table.sides if side.kind == "offload"}
    earlier = ticks[0, 1] - 1
    assert ticks[0, 0] == earlier
    wrong = [
        (tick, side) for tick, side in table.sides if (side.kind, side.microbatch) != ("offload", 1)
    ]
    wrong.append((earlier, Side("offload", 0, 1, 0, 1)))
    said = check_table(dataclasses.replace(table, sides=tuple(wrong)))
    assert f"tick {earlier}, device 0: stash slot 0 holds F0.0, not F1.0" in said


@pytest.mark.parametrize("schedule", [one_f_one_b(4, 8), zb_v(4, 8)], ids=str)
def test_both_places_hold_as_many_bytes_as_is_simulated(schedule, x64):
    """On the host one slot more, that nobody reads."""
    for away in (half_of(schedule), with_offload(schedule, lockstep=True)):
        held, _ = toy.carried(away, 8)
        is_there = [x.memory_space == jax.memory.Space.Host for x in held]
        host = [x for x, there in zip(held, is_there, strict=True) if there]
        slots = pack_schedule(away).slots
        like = [(slots["stash"], *x.shape[1:]) for x in host]
        here = [x for x, there in zip(held, is_there, strict=True) if not there and x.shape in like]
        slot = sum(x.size * x.dtype.itemsize for x in host) // (slots["host"] + 1)
        timing = simulate_schedule(away, lockstep=True, sizes=SlotSizes(activation=slot, factors=0))
        assert sum(x.size * x.dtype.itemsize for x in here) == max(timing.bytes)
        assert {x.shape[0] for x in host} == {max(timing.hosted) + 1} and max(timing.transfers) > 0


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "pipedream"])
def test_tables_of_every_schedule_hold_what_is_simulated(name):
    for p, m in ((2, 4), (4, 6)):
        schedule = named_schedule(name, p, m)
        before = simulate_schedule(schedule, lockstep=True)
        for away in (with_offload(schedule, lockstep=True), half_of(schedule)):
            table, timing = pack_schedule(away), simulate_schedule(away, lockstep=True)
            assert (
                check_schedule(away) == check_table(table) == []
                and timing.makespan == before.makespan
            )
            said = table.slots["stash"], table.slots["factors"], table.slots.get("host", 0)
            assert said == (max(timing.activations), max(timing.factors), max(timing.hosted))
        assert (
            max(simulate_schedule(with_offload(schedule, lockstep=True), lockstep=True).activations)
            == 1
        )


def test_slow_transfers_are_taken_only_where_they_cost_no_time():
    for time in (0.5, 1.0, 1.5):
        costs = TaskCosts(offload=time, fetch=time)
        before = simulate_schedule(gpipe(4, 6), costs, lockstep=True)
        away = with_offload(gpipe(4, 6), costs, lockstep=True)
        after = simulate_schedule(away, costs, lockstep=True)
        assert after.makespan == before.makespan and max(after.bytes) <= max(before.bytes)
        assert bool(away.sides) == (time <= 1)  # no tick is shorter than an offload


def for_a_tpu():
    """Bytes of one device, of a schedule without and with offload; and what the host computes."""
    from jaxpar.aot import devices, parse_topology

    toy.WIDTH, toy.HIDDEN, toy.ROWS, toy.LENGTH = (
        1024,
        4096,
        8,
        512,
    )  # what is smaller stays in the cores' own memory
    plain, found = gpipe(4, 8), []
    args = jax.eval_shape(lambda: (toy.params_of(4, "float32"), toy.batch_of(8, "float32")))
    for schedule in (plain, with_offload(plain, lockstep=True)):
        with use_mesh(make_mesh(MeshSpec(stage=4), devices(parse_topology("v5e:2x2")))):

            def whole(params, batch, s=schedule):
                return Pipelined(s)(toy.stages(4), params, batch, None, 8)

            program = jax.jit(whole).lower(*args).compile()
        memory = program.memory_analysis()
        moved = re.findall(
            r" (?:dynamic-update-slice|dynamic-slice|copy)-start\(", program.as_text()
        )
        found.append([memory.temp_size_in_bytes, memory.host_temp_size_in_bytes, len(moved)])
    return found


@needs_libtpu
@pytest.mark.slow  # 13 s on two quiet cores
def test_a_tpu_has_fewer_bytes_on_the_device_and_the_rest_on_the_host():
    (before, none, _), (after, host, moved) = on_a_tpu(__file__)
    slot = 4 * 8 * 512 * (3 * 1024 + 2 * 4096)
    assert (
        none == 0 and host == 8 * slot
    )  # seven at most are away at once, and one that nobody reads
    assert after <= 0.6 * before and moved > 0


def test_transfers_that_no_program_can_make_are_refused():
    soon, far = one_f_one_b(2, 4), gpipe(2, 4)
    pair = tuple(
        Side(kind, 1, 1, 1, 0) for kind in ("offload", "fetch")
    )  # of F0 D0 F1 D1, between F0 and D0
    for schedule, sentence in (
        (
            dataclasses.replace(soon, sides=pair),
            "has no time to go to the host and come back in lock-step",
        ),
        (
            dataclasses.replace(far, sides=with_offload(far).sides[:1]),
            "has offload and nothing that undoes it",
        ),
    ):
        with (
            use_mesh(make_mesh(MeshSpec(stage=2), jax.devices()[:2])),
            pytest.raises(UsageError, match=sentence),
        ):
            Pipelined(schedule).check(toy.stages(4), 4)


def test_devices_without_the_hosts_memory_are_refused(monkeypatch):
    small = SimpleNamespace(
        device_kind="toaster", addressable_memories=lambda: [SimpleNamespace(kind="device")]
    )
    with use_mesh(make_mesh(MeshSpec(stage=2), jax.devices()[:2])):
        monkeypatch.setattr(jax, "devices", lambda: [small])
        Pipelined(gpipe(2, 4)).check(toy.stages(4), 4)
        with pytest.raises(
            UsageError, match="pinned_host, which devices of the kind toaster do not have"
        ):
            Pipelined(with_offload(gpipe(2, 4), lockstep=True)).check(toy.stages(4), 4)


def test_a_run_asks_for_it_by_a_flag():
    def asked(**flags):
        config = dict(
            pipeline="gpipe", microbatches=4, chunks=2, split_head=False, gather_chunks=False
        )
        config |= dict(offload=True) | flags
        return make_schedule(SimpleNamespace(**config), lm_config(num_layers=4), 1)

    with use_mesh(make_mesh(MeshSpec(stage=2), jax.devices()[:2])):
        schedule, parts, _ = asked()
        assert isinstance(schedule, Pipelined) and parts == 4
        assert schedule.schedule == with_offload(gpipe(2, 4), lockstep=True) != gpipe(2, 4)
        assert asked(offload=False)[0] == Pipelined(gpipe(2, 4))
        assert asked(offload=False, gather_chunks=True)[0] == Pipelined(with_gathers(gpipe(2, 4)))
        assert {side.kind for side in asked(gather_chunks=True)[0].schedule.sides} == {
            "gather",
            "offload",
            "fetch",
        }
    with use_mesh(make_mesh(MeshSpec(stage=1), jax.devices()[:1])):
        with pytest.raises(UsageError, match="offload=true needs pipeline="):
            asked(pipeline="none")
        with pytest.raises(UsageError, match="gather_chunks=true needs pipeline="):
            asked(pipeline="none", offload=False, gather_chunks=True)
        with pytest.raises(UsageError, match="offload=true finds nothing in"):
            asked(pipeline="1f1b")


if __name__ == "__main__":
    print(json.dumps(for_a_tpu()))
