"""Every schedule as one program: gradients of the plain model, exchanges and memory as its table says."""

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_toy import (
    HIDDEN,
    LENGTH,
    ROWS,
    WIDTH,
    assert_equals_in_turn,
    batch_of,
    body_of,
    carried,
    in_turn,
    params_of,
    program,
    stages,
)
from test_pipeline_tables import altered, tick_of

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.pipeline import (
    PIPELINES,
    Op,
    Pipelined,
    TaskCosts,
    blockwise,
    breadth_first,
    check_table,
    gpipe,
    named_schedule,
    one_f_one_b,
    pack_schedule,
    pipedream,
    run,
    search_schedule,
    simulate_schedule,
    vee,
    with_gathers,
    with_reductions,
    with_vocabulary,
    zb_h1,
    zb_h2,
    zb_v,
)
from jaxpar.pipeline._chunks import rounds_of
from jaxpar.pipeline.ops import mirrored
from jaxpar.types import UsageError

TOLERANCE = 1e-12  # float64; gradients pass eight layers, summed in another order
LAYERS = 8


@pytest.mark.parametrize("name", PIPELINES)
def test_gradients_are_those_of_the_plain_model(name, x64):
    turns = 16 if name == "bitpipe" else LAYERS
    assert_equals_in_turn(named_schedule(name, 4, 4), turns, "float64", TOLERANCE, {"tensor": 2})


def test_in_float32_too():
    assert_equals_in_turn(zb_v(4, 6), LAYERS, "float32", 1e-5, {"data": 2})


@pytest.mark.parametrize(
    "schedule, turns, sizes, options",
    [
        (zb_h1(8, 3), 8, {}, {}),  # fewer microbatches than stages
        (zb_h2(2, 5), 6, {"data": 2, "tensor": 2}, {}),
        (zb_h1(2, 4), 2, {"fsdp": 4}, {"latency": 2}),
        (gpipe(1, 3), 3, {"data": 2}, {}),
        (one_f_one_b(2, 4, split=True), 4, {"fsdp": 4, "inner": 2}, {"keep": jax.checkpoint}),
        (named_schedule("interleaved", 2, 3), 4, {"tensor": 4}, {}),
        (zb_v(2, 3), 4, {"data": 2, "fsdp": 2}, {}),
        (blockwise(4, 5, 2, 4), 8, {"fsdp": 2}, {}),
    ],
    ids=["eight stages", "data and tensor", "messages of two ticks", "one stage", "recomputed", "tensor of four",
         "data and fsdp", "fsdp of four stages"],
)  # fmt: skip
def test_on_other_meshes(schedule, turns, sizes, options, x64):
    assert_equals_in_turn(schedule, turns, "float64", TOLERANCE, sizes, **options)


def late(table, column, device):
    """The table with a column of a device a tick later."""
    rows, place = table.rows.copy(), table.columns.index(column)
    rows[1:, device, place], rows[0, device, place] = table.rows[:-1, device, place], -1
    return dataclasses.replace(table, rows=rows)


def swapped(table, device, *ticks):
    rows = table.rows.copy()
    rows[list(ticks), device] = rows[list(reversed(ticks)), device]
    return dataclasses.replace(table, rows=rows)


MUTATIONS = {
    "W before its B": lambda t: swapped(t, 1, tick_of(t, 1, Op.B, 3), tick_of(t, 1, Op.W, 3)),
    "a slot a tick early": lambda t: altered(
        t, tick_of(t, 0, Op.F, 1), 0, stash=t.column("stash")[0, 0]
    ),
    "the last W dropped": lambda t: altered(t, tick_of(t, 1, Op.W, 3), 1, op=Op.IDLE),
    "a message a tick late": lambda t: late(t, "from_before", 1),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_wrong_tables_change_the_gradient(name, x64, monkeypatch):
    """And `check_table` says so."""
    schedule = zb_h1(2, 4)
    table = pack_schedule(schedule)
    wrong = MUTATIONS[name](table)
    assert check_table(table) == [] != check_table(wrong)
    monkeypatch.setattr(run, "_packed", lambda *args: wrong)
    with pytest.raises(AssertionError, match="over 1e-06"):
        assert_equals_in_turn(schedule, 2, "float64", 1e-6)


def weights_gathered(text):
    """Shapes of weights that a compiled module gathers: those of activations have as many dimensions as a batch."""
    found = re.findall(r"\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    shapes = [tuple(map(int, shape.split(","))) for shape in found]
    return [shape for shape in shapes if shape[-2:] in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]


@pytest.mark.parametrize(
    "schedule, sizes",
    [
        (with_gathers(named_schedule("interleaved", 2, 4)), {"fsdp": 2, "data": 2}),
        *(
            pytest.param(schedule, sizes, marks=pytest.mark.slow)  # 5 s each
            for schedule, sizes in (
                (with_gathers(blockwise(4, 8, 2, 4), 1), {"fsdp": 2}),
                (with_gathers(zb_v(2, 5)), {"fsdp": 4}),
                (with_gathers(breadth_first(2, 4, 2)), {"fsdp": 2}),
            )
        ),
    ],
    ids=str,
)
def test_weights_that_are_gathered_for_many_microbatches(schedule, sizes, x64):
    """Equal gradients; layers are gathered in one place, a chunk of two weights at once, and not in their tasks."""
    run = assert_equals_in_turn(schedule, LAYERS, "float64", TOLERANCE, sizes)
    turns = LAYERS // schedule.depth
    assert sorted(weights_gathered(run.as_text())) == [
        (turns, HIDDEN, WIDTH),
        (turns, WIDTH, HIDDEN),
    ]
    plain, _ = program(dataclasses.replace(schedule, sides=()), LAYERS, "float64", sizes)
    assert len(weights_gathered(plain.as_text())) > 2  # forward and backward, of each turn


MESHES = [
    (2, {"data": 4}), (2, {"fsdp": 4}), (2, {"tensor": 4}), (2, {"data": 2, "tensor": 2}),
    (2, {"fsdp": 2, "tensor": 2}), (2, {"data": 2, "fsdp": 2}), (4, {"data": 2}), (4, {"fsdp": 2}), (8, {}),
]  # fmt: skip


@pytest.mark.slow  # 90 s for all on a quiet core
@pytest.mark.parametrize("stages, sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "pipedream"])
def test_every_schedule_on_every_mesh(name, stages, sizes, x64):
    schedule = named_schedule(name, stages, 4)
    assert_equals_in_turn(schedule, schedule.depth, "float64", TOLERANCE, sizes)


def test_a_schedule_that_was_searched(x64):
    schedule = search_schedule(vee(2), 5, TaskCosts(F=1, B=1.3, W=0.7), cap=4)
    assert_equals_in_turn(schedule, 4, "float64", TOLERANCE)


def instructions(text):
    return [
        re.sub(r"[\d.]+", "", line.split("=")[1].split("(")[0])
        for line in text.splitlines()
        if " = " in line
    ]


def test_two_exchanges_a_tick_whatever_the_number_of_microbatches(x64):
    texts = [program(zb_h2(4, m), 4, "float64", {"tensor": 2})[0].as_text() for m in (8, 32)]
    for text in texts:
        body = body_of(text)
        assert len(re.findall(r" collective-permute(?:-start)?\(", body)) == 2
        slots = pack_schedule(zb_h2(4, 8)).slots["stash"]
        assert slots == 7 and not re.search(rf"= \w+\[{slots},[\d,]+\]\S* copy\(", body)
    few, many = (sorted(instructions(text)) for text in texts)
    assert few == many


@pytest.mark.slow  # 8 s
def test_a_schedule_of_two_chunks_has_one_program_too():
    few, many = (program(zb_v(4, m), 8, "float32", {})[0].as_text() for m in (8, 32))
    assert sorted(instructions(few)) == sorted(instructions(many))


@pytest.mark.parametrize("schedule", [zb_h2(4, 8), one_f_one_b(4, 8), zb_v(4, 8)], ids=str)
def test_the_stash_has_as_many_slots_as_the_simulated_peak(schedule, x64):
    table, turns = pack_schedule(schedule), 2
    shapes = [
        x.shape
        for x in carried(schedule, schedule.depth * turns)[0]
        if x.shape[1:2] == (turns,) and x.ndim == 5
    ]
    peak = max(simulate_schedule(schedule, lockstep=True).held)
    is_split = table.slots["factors"] > 0
    factors = [
        (table.slots["factors"], turns, ROWS, LENGTH, width)
        for width in (WIDTH, HIDDEN) * 2 * is_split
    ]
    # The input, for the scale, and moved, for the product up; the tanh, for its slope, and times the number, for the
    # product down; and what is added, for its loss. Of the slope some versions of JAX keep another number.
    kept = [(peak, turns, ROWS, LENGTH, width) for width in (WIDTH, WIDTH, HIDDEN, HIDDEN, WIDTH)]
    over = Counter(shapes) - Counter(kept) - Counter(factors)
    assert not Counter(kept + factors) - Counter(shapes)
    assert over.total() <= 1 and set(over) <= set(kept)


def test_a_tick_does_its_task_alone():
    """What a task computes stays within its loop, though all turns of it would compute the same."""
    text = program(zb_h2(4, 8), 4, "float32", {"tensor": 2})[0].as_text()
    body = body_of(text)
    loops = [line for line in body.splitlines() if " while(" in line]
    assert len(loops) == 3  # F, B and W
    assert not any(
        "known_trip_count" in line for line in loops
    )  # as turns of a chunk have that were moved out
    called = {
        name
        for line in body.splitlines()
        if " while(" not in line
        for name in re.findall(r"=(%[\w.-]+)", line)
    }
    blocks = dict(re.findall(r"\n(%[\w.-]+) (.*?\n)(?=\n)", text, re.DOTALL))
    assert called and not any(
        " dot(" in block for block in [body, *(blocks[name] for name in called)]
    )


def multiplications(jaxpr):
    """Multiplications of all products, loops over turns counted as often as they run, tasks within a task not."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += int(np.prod(eqn.outvars[0].aval.shape)) * int(
                np.prod([eqn.invars[0].aval.shape[dim] for dim in contracted])
            )
        for value in eqn.params.values():
            if eqn.primitive.name != "while" and hasattr(value, "jaxpr"):
                total += eqn.params.get("length", 1) * multiplications(value.jaxpr)
    return total


def tasks_of(schedule, num_turns):
    """Multiplications of each task, in the turns of a chunk; and of what a tick does beside them."""
    _, body = carried(schedule, num_turns)
    tasks = [eqn.params["body_jaxpr"].jaxpr for eqn in body.eqns if eqn.primitive.name == "while"]
    return *(multiplications(task) for task in tasks), multiplications(body)


def test_nothing_is_computed_twice(x64):
    forward, fused, beside = tasks_of(one_f_one_b(2, 4), 4)
    split_forward, inputs, weights, _ = tasks_of(zb_h1(2, 4), 4)
    products = 2 * 2 * ROWS * LENGTH * WIDTH * HIDDEN  # of two turns
    assert (beside, forward) == (0, products)
    assert (split_forward, inputs, weights) == (products, products, products)
    assert fused == inputs + weights


def test_a_microbatch_that_is_not_finite_is_told_and_touches_nothing_else():
    m, dtype = 4, "float32"
    run, (params, batch) = program(zb_h1(4, m), 4, dtype, {})
    (_, _), want = in_turn(4, m, dtype)
    batch = {
        **batch,
        "tokens": batch["tokens"] % 3,
    }  # so that no other microbatch reads the last row
    batch["tokens"] = batch["tokens"].at[2::m].set(5)  # all of microbatch 2
    params = {**params, "table": params["table"].at[5].set(jnp.nan)}
    (value, aux), grads = run(params, batch)
    assert np.isnan(value) and aux.metrics["largest"].value == np.inf
    assert np.isfinite(grads["table"][:3]).all() and np.isnan(grads["table"][5]).all()
    assert np.isfinite(jax.tree.leaves(want)[0]).all()


@pytest.mark.parametrize(
    "schedule, turns, stage, count, sentence",
    [
        (gpipe(4, 4), 4, 2, 4, "needs mesh.stage=4, not the 2 that are here"),
        (gpipe(4, 4), 4, 4, 2, "has 4 microbatches, not 2"),
        (
            zb_v(4, 4),
            12,
            4,
            4,
            "12 layers do not divide over the 8 chunks of zb_v; the nearest legal numbers are 8 or",
        ),
        (
            gpipe(4, 4),
            2,
            4,
            4,
            "2 layers do not divide over the 4 chunks of gpipe; the nearest legal numbers are 4",
        ),
        (
            pipedream(4, 4),
            4,
            4,
            4,
            "pipedream changes weights in between and has no one gradient; PipeDream runs it",
        ),
        (
            with_reductions(gpipe(4, 4)),
            4,
            4,
            4,
            "gpipe has what no program here runs: sides of kind reduce",
        ),
        (
            with_vocabulary(gpipe(4, 4)),
            4,
            4,
            4,
            "gpipe+vocabulary needs a model with a head of rows",
        ),
    ],
)
def test_what_does_not_fit_is_refused(schedule, turns, stage, count, sentence):
    with (
        use_mesh(make_mesh(MeshSpec(stage=stage), jax.devices()[:stage])),
        pytest.raises(UsageError, match=re.escape(sentence)),
    ):
        Pipelined(schedule).check(stages(turns), count)


@pytest.mark.parametrize(
    "schedule", [gpipe(4, 4), named_schedule("interleaved", 4, 4, 3), zb_v(4, 4)], ids=str
)
def test_every_chunk_comes_to_its_device_in_as_few_rounds_as_there_are_chunks(schedule):
    rounds = rounds_of(schedule)
    assert len(rounds) == len(schedule.placement) // schedule.devices
    at_rest = schedule.depth // schedule.devices
    got = {}
    for pairs, read, put in rounds:
        assert (
            sorted(goal for _, goal in pairs)
            == sorted(source for source, _ in pairs)
            == list(range(4))
        )
        for source, goal in pairs:
            got[goal, int(put[goal])] = source * at_rest + int(read[source])
    assert got == {(d, i): c for d in range(4) for i, c in enumerate(schedule.chunks_of(d))}


def test_two_copies_of_the_model_get_each_chunk_twice():
    schedule = dataclasses.replace(named_schedule("bitpipe", 4, 4))
    assert schedule.placement == mirrored(4) and len(rounds_of(schedule)) == 4


def test_names_of_schedules():
    for name in PIPELINES:
        assert named_schedule(name, 4, 8).microbatches == 8
    with pytest.raises(UsageError, match="pipeline='2f2b' is unknown; legal are gpipe, 1f1b"):
        named_schedule("2f2b", 4, 8)


@pytest.mark.parametrize("schedule", [zb_h2(4, 8), zb_v(2, 5)], ids=str)
def test_bytes_of_the_slots_are_those_that_the_loop_carries(schedule, x64):
    turns, m = 2 * schedule.depth, schedule.microbatches
    args = params_of(turns, "float64"), batch_of(m, "float64")
    with use_mesh(make_mesh(MeshSpec(stage=schedule.devices), jax.devices()[: schedule.devices])):
        slots = Pipelined(schedule).slots(stages(turns), *args, None, m)
    sized = Counter((x.shape, x.dtype) for part in slots.values() for x in part)
    in_loop = Counter((x.shape, x.dtype) for x in carried(schedule, turns)[0])
    assert not sized - in_loop
    table, peak = pack_schedule(schedule), simulate_schedule(schedule, lockstep=True)
    for name in ("inbox", "stash", "factors"):
        assert slots[name] and {x.shape[0] for x in slots[name]} == {table.slots[name]}
    assert table.slots["stash"] == max(peak.activations) and table.slots["factors"] == max(
        peak.factors
    )
    numbers = {(table.slots[name], 2) for name in ("stash", "factors")}
    kept = [x for x in carried(schedule, turns)[0] if x.shape[:2] in numbers]
    of_layers = Counter((x.shape, x.dtype) for name in ("stash", "factors") for x in slots[name])
    assert of_layers == Counter((x.shape, x.dtype) for x in kept if x.ndim == 5)
