"""What every schedule of a pipeline keeps, one row a schedule; a new one is added to `PIPELINES` and nothing else."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest
from lm_configs import lm_config

from jaxpar.lm import init
from jaxpar.lm.stages import stages
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.pipeline import (
    PIPELINES,
    Op,
    Pipelined,
    check_schedule,
    check_table,
    named_schedule,
    pack_schedule,
    pipedream,
    schedule_text,
    simulate_schedule,
    with_gathers,
    with_offload,
    with_reductions,
    with_vocabulary,
)
from jaxpar.pipeline.accumulation import Accumulation, InTurn

ROWS = {name: (lambda p, m, name=name: named_schedule(name, p, m)) for name in PIPELINES} | {
    "pipedream": pipedream
}
SIDES = {
    "gathers": with_gathers,
    "reductions": with_reductions,
    "offload": with_offload,
    "vocabulary": with_vocabulary,
}
CONFIG = lm_config(vocab_size=8, num_layers=4, embed_dim=8, num_heads=2, mlp_dim=8, dtype="float32")
each_row = pytest.mark.parametrize("name", ROWS)


@each_row
def test_it_is_data(name):
    """Frozen, hashable, the same from the same arguments, and with a name that a person reads."""
    schedule = ROWS[name](2, 4)
    assert (
        schedule == ROWS[name](2, 4)
        and hash(schedule) == hash(ROWS[name](2, 4))
        and schedule != ROWS[name](2, 6)
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.microbatches = 3
    assert (
        str(schedule).startswith(schedule.name) and len(schedule_text(schedule).splitlines()) == 2
    )


@each_row
@pytest.mark.parametrize("p, m", [(2, 2), (4, 6)])
def test_every_microbatch_goes_there_and_back_once(name, p, m):
    schedule = ROWS[name](p, m)
    assert (schedule.devices, schedule.microbatches) == (p, m) and check_schedule(schedule) == []
    ways = {op: [task for task in schedule.tasks if task.op == op] for op in Op}
    assert len(ways[Op.F]) == len(ways[Op.B]) + len(ways[Op.BW]) == m * schedule.depth
    assert len(ways[Op.W]) == len(ways[Op.B])
    for latency in (1, 2):
        assert check_table(pack_schedule(schedule, latency)) == []
    events, steps = (simulate_schedule(schedule, lockstep=each) for each in (False, True))
    assert events.makespan <= steps.makespan and events.held == steps.held


@each_row
@pytest.mark.parametrize("side", SIDES)
def test_what_runs_beside_changes_no_task(name, side):
    schedule = ROWS[name](2, 4)
    if side == "vocabulary" and schedule.copies > 1:
        pytest.skip("refused: the head of two copies")
    more = SIDES[side](schedule)
    own = frozenset(task for task in more.tasks if task.op not in (Op.S, Op.T))
    assert (
        own == schedule.tasks
        and check_schedule(more) == []
        and hash(more) == hash(SIDES[side](schedule))
    )


# Rows of programs, and of what may run beside their tasks; `with_reductions` is a table alone.
PROGRAMS = [(name, "") for name in PIPELINES]
PROGRAMS += [("breadth_first", "gathers"), ("gpipe", "offload"), ("zb_v", "vocabulary")]
QUICK = [("gpipe", ""), ("bitpipe", ""), ("breadth_first", "gathers"), ("zb_v", "vocabulary")]


@pytest.mark.parametrize(
    ("name", "side"),
    [pytest.param(*row, marks=[] if row in QUICK else pytest.mark.slow) for row in PROGRAMS],
)  # 1.5 s each
def test_its_program_is_a_schedule_of_gradients(name, side):
    """Argument names of the protocol; static and hashable; results of the shapes and dtypes of the plain one's."""
    schedule = SIDES.get(side, lambda schedule: schedule)(named_schedule(name, 2, 2))
    made = Pipelined(schedule)
    for method in (type(made).__call__, InTurn.__call__):
        assert list(inspect.signature(method).parameters) == list(
            inspect.signature(Accumulation.__call__).parameters
        )
    assert hash(made) == hash(Pipelined(dataclasses.replace(schedule)))
    config = dataclasses.replace(CONFIG, num_layers=made.schedule.depth)
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    args = (
        jax.eval_shape(lambda: init(jax.random.key(0), config)),
        {"tokens": tokens, "targets": tokens},
    )
    want = jax.eval_shape(lambda *args: InTurn()(stages(config), *args, None, 2), *args)
    with use_mesh(make_mesh(MeshSpec(stage=2), jax.devices()[:2])):
        got = jax.eval_shape(lambda *args: made(stages(config), *args, None, 2), *args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(got)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(want)
    ]
