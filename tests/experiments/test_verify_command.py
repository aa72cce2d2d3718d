"""`python -m experiments.verify` as a user runs it, on a model that compiles in seconds."""

import itertools
import json
import re
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from lm_configs import lm_config

from jaxpar.lm.transfers import pipeline_transfers
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, use_mesh
from jaxpar.nn.attention.context import MOVES
from jaxpar.nn.attention.context.token_orders import ORDERS
from jaxpar.pipeline import PIPELINES, pack_schedule, with_gathers
from jaxpar.transfers import sum_by_axis

TINY = (
    "model.num_layers=2 model.embed_dim=32 model.attention.num_heads=4 "
    "model.attention.num_kv_heads=2 model.mlp.dim=64 data.seq_len=16 "
    "data.batch_size=8 topology=none hydra.run.dir=run"
).split()


@pytest.fixture
def verify(monkeypatch, capfd, tmp_path):
    """`verify(*flags)` -> (exit code, what it printed), in `tmp_path`."""
    from experiments import verify as experiment
    from experiments.app import runner

    monkeypatch.setattr(runner, "_quieten", lambda: None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["verify", *TINY, *flags])
        capfd.readouterr()
        try:
            runner.launch("verify", experiment.Config, experiment.execute)
            code = 0
        except SystemExit as exit_:
            code = exit_.code
        out, err = capfd.readouterr()
        return code, out + err

    yield call
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def rows_of(folder):
    """Returns the rows of a run as it wrote them."""
    return json.loads((folder / "run" / "layouts.json").read_text())


def test_rows_table_plot_and_exit_code(verify, tmp_path):
    code, said = verify("layouts=[data2.fsdp2.tensor2/sequence,tensor8]")
    assert code == 0, said
    assert "3 of 3 rows hold" in said and "tensor8 zero3 is not legal here: " in said
    rows = rows_of(tmp_path)
    # Two layouts are compiled at a time, and rows are in the order of the layouts.
    assert [row["dtype"] for row in rows] == ["float32", "float64", "bfloat16", "float64"]
    assert 0 < rows[1]["gradient"] < 1e-12 < rows[0]["gradient"] < 1e-5
    assert rows[0]["kinds"]["all-gather tensor"] and "kv_heads" in rows[3]["refused"]
    assert [row["precision"] for row in rows[:3]] == ["full", "full", "default"]
    of_cast, of_values = (rows[number]["transfers"]["gather tensor"] for number in (2, 0))
    assert of_cast[0] == of_values[0] and of_cast[1] < 0.6 * of_values[1]  # most of 16 bits
    plot = tmp_path / "run" / "plots" / "layouts.png"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_experts_parts_averages_and_jobs(verify, tmp_path):
    """One layout that splits experts, with the number of experts, parts and jobs of these flags."""
    flags = "num_experts=2", "accumulate=4", "ema=0", "float32_every=1", "jobs=1"
    code, said = verify("layouts=[data4.expert2]", "data.batch_size=32", "dtypes=[float64]", *flags)
    assert code == 0 and "1 of 1 rows hold" in said, said
    (row,) = rows_of(tmp_path)
    assert row["layout"] == "data4.expert2 zero3"
    assert any("expert" in name for name in row["kinds"])


def test_dropout_stays_where_it_is_asked_for():
    """Without it, a layout that splits a sequence says that dropout was not judged."""
    from experiments.app.lm import judged_trainings
    from experiments.verify import compose
    from jaxpar.verify import Layout

    split = Layout(MeshSpec(context=2))
    rows = Layout(MeshSpec(data=2))
    for flag, rate in (("true", 0.0), ("false", 0.1)):
        proof = judged_trainings.Proof(compose(f"dropout_off={flag}"))
        assert proof.training(split, number=0).model.dropout == rate
        assert proof.training(rows, number=0).model.dropout == 0.1


def test_parts_experts_and_odd_rows_of_a_layout():
    from experiments.app.lm import judged_trainings
    from experiments.verify import compose
    from jaxpar.verify import Layout

    config = compose("accumulate=8", "microbatches=2", "num_experts=6", "ema=0.5")
    proof = judged_trainings.Proof(config)
    plain = Layout(MeshSpec(data=2))
    assert proof.training(plain, number=0) == (
        judged_trainings.Training(model=config.model, length=config.data.seq_len, parts=8)
    )
    assert proof.training(plain, number=2).length == config.data.seq_len - 1
    assert proof.training(Layout(MeshSpec(stage=2), "stages", "1f1b"), number=0).parts == 2
    split = proof.training(Layout(MeshSpec(expert=2)), number=0)
    assert split.model.experts.num_experts == 6
    trainer = proof.trainer(plain, proof.training(plain, 0), "float64")
    assert (trainer.accumulate, trainer.tuning.ema, trainer.model.dtype) == (8, 0.5, "float64")


def test_float32_is_compared_for_every_so_many_layouts():
    from experiments.app.lm.judged_trainings import cases_of
    from experiments.verify import compose
    from jaxpar.verify import every_layout

    layouts = every_layout(8)[:5]
    cases = cases_of(compose("float32_every=2"), layouts)
    assert [case.skips for case in cases] == [(), ("float32",), (), ("float32",), ()]
    alone = cases_of(compose("float32_every=2", "dtypes=[float32]"), layouts)
    assert not any(case.skips for case in alone)


def test_batches_of_steps_differ_and_are_uneven():
    from experiments.app.lm import judged_trainings
    from experiments.verify import compose
    from jaxpar.verify import Layout

    config = compose()
    training = judged_trainings.Proof(config).training(Layout(MeshSpec()), number=0)
    batches = [
        judged_trainings.rows_of(config, training, "float64", step)
        for step in range(judged_trainings.STEPS)
    ]
    for name in ("tokens", "weights", "segments", "positions"):
        assert len({batch[name].tobytes() for batch in batches}) == len(batches), name
    for batch in batches:
        weights = batch["weights"]
        assert len(set(weights.sum(1))) > 2 and (weights.sum(1) == 0).any()
        assert (weights * 4 == (weights * 4).round()).all()
        assert (batch["segments"].max(1) > 1).any()


SENT = {
    "gather": {"all-gather"},
    "swap": {"all-to-all"},
    "swap_ring": {"all-to-all", "collective-permute"},
}
QUICK = [("ring", "striped"), ("token_ring", "contiguous"), ("swap_ring", "zigzag")]
EVERY = [*QUICK, *(case for case in itertools.product(MOVES, ORDERS) if case not in QUICK)]


@pytest.mark.parametrize(
    ("move", "order"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in EVERY
    ],  # 3 CPU s each
)
def test_a_split_sequence_is_verified_by_any_move_and_order(move, order, verify, tmp_path):
    """Three optimizer steps too, and nothing is sent that the move's table does not declare."""
    heads = (
        "model.attention.num_kv_heads=4" if move == "swap" else "model.attention.num_kv_heads=2"
    )  # it exchanges whole key heads
    flags = f"model.execution.context={move}", f"model.execution.context_order={order}", heads
    code, said = verify("layouts=[data2.context4]", "dtypes=[float32]", *flags)
    assert code == 0 and "1 of 1 rows hold" in said, said
    (row,) = json.loads((tmp_path / "run" / "layouts.json").read_text())
    kinds = {name.split(" ")[0] for name in row["kinds"]}
    kinds -= {"all-reduce", "reduce-scatter"}  # sums of gradients, here over data too
    by_places = (
        {"all-gather"} if order == "striped" and move.startswith("swap") else set()
    )  # of no table
    assert kinds == SENT.get(move, {"collective-permute"}) | by_places


def test_stages_are_verified_by_their_schedule(verify, tmp_path, monkeypatch):
    """Values, and the messages between stages, which are here left out of what is declared."""
    from experiments.app.lm import judged_trainings

    declared = judged_trainings.pipeline_transfers
    asked = []

    def without_messages(*args):
        asked.extend(declared(*args))
        return [t for t in asked if (t.kind, t.axes) != ("exchange", ("stage",))]

    monkeypatch.setattr(judged_trainings, "pipeline_transfers", without_messages)
    flags = "data.batch_size=16", "data.seq_len=4", "model.dropout=0.2", "optimizer.name=muon"
    code, said = verify("layouts=[stage2.fsdp4]", "dtypes=[float64]", *flags)
    (row,) = rows_of(tmp_path)
    assert code == 1 and row["layout"] == "fsdp4.stage2 zero3+stages 1f1b"
    assert 0 < row["gradient"] < 1e-12 and 0 < row["steps"] < 1e-12
    (breach,) = row["breaches"]
    said = r"arrays of together .* are exchanged over stage, where at most 0 of 0 are declared"
    assert re.search(said, breach)
    arrays, size = row["transfers"]["exchange stage"]
    most_arrays, most = sum_by_axis(asked)["exchange", "stage"]
    # Two a tick and none else; of two stages, both go to the other one: a compiler may send one.
    assert arrays in (most_arrays // 2, most_arrays) and size * most_arrays == most * arrays


def pipeline_declared(gather_chunks):
    from experiments.app.lm.judged_trainings import schedule_of
    from experiments.verify import Config
    from jaxpar.verify import Layout

    layout = Layout(MeshSpec(stage=2, fsdp=2), schedule="breadth_first")
    config = lm_config(num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64)
    with use_mesh(make_mesh(layout.mesh, jax.devices()[:4]), rules_from(layout="stages")):
        schedule = schedule_of(Config(gather_chunks=gather_chunks), layout)
        return pipeline_transfers(config, 8, 16, schedule), len(pack_schedule(schedule).rows)


def moves_of(schedule):
    """Returns declared arrays and bytes of w_up, sent to the stages of its chunks and back."""
    from experiments.app.lm.judged_trainings import schedule_of
    from experiments.verify import Config
    from jaxpar.verify import Layout

    layout = Layout(MeshSpec(stage=2), schedule=schedule)
    config = lm_config(num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64)
    with use_mesh(make_mesh(layout.mesh, jax.devices()[:2]), rules_from(layout="stages")):
        declared = pipeline_transfers(config, 8, 16, schedule_of(Config(), layout))
    moved = [t for t in declared if t.why.startswith("layers/w_up to its chunks' devices")]
    return sum(t.arrays for t in moved), sum(t.bytes for t in moved)


def test_layers_that_are_sent_to_the_stages_of_their_chunks_are_declared():
    assert moves_of("1f1b") == (0, 0)  # each stage holds its chunks at rest
    arrays, size = moves_of("interleaved")
    # Two chunks a stage, sent there and their gradients back, of one layer in float32 each.
    assert arrays == 4
    assert size == 4 * 32 * 64 * 4


def test_weights_that_are_gathered_once_are_declared_a_chunk_a_tick():
    (each, _), (once, ticks) = (pipeline_declared(on) for on in (False, True))
    whole, chunk = ("w_up, each layer, forward and backward", "w_up, a chunk a tick")
    assert any(t.why.endswith(whole) for t in each) and not any(t.why.endswith(whole) for t in once)
    (one,) = [t for t in once if t.why.endswith(chunk)]
    assert (one.kind, one.axes, one.arrays) == ("gather", ("fsdp",), ticks)
    assert one.bytes == ticks * 32 * 64 * 2  # of one layer, in bfloat16
    assert sum_by_axis(once)["sum", "fsdp"] == sum_by_axis(each)["sum", "fsdp"]


@pytest.mark.slow  # 15 CPU s
def test_weights_that_are_gathered_once_are_verified(verify, monkeypatch):
    """Also that a program which gathers in its tasks is one too many for that table."""
    from experiments.app.lm import judged_trainings

    flags = (
        "layouts=[stage2.fsdp2/breadth_first]",
        "model.num_layers=4",
        "data.seq_len=8",
        "dtypes=[float32]",
    )
    code, said = verify(*flags, "gather_chunks=true")
    assert code == 0 and "1 of 1 rows hold" in said, said
    declared = judged_trainings.pipeline_transfers

    def once(config, rows, length, schedule, name):
        return declared(config, rows, length, with_gathers(schedule), name)

    monkeypatch.setattr(judged_trainings, "pipeline_transfers", once)
    code, said = verify(*flags)
    expected = "are gathered over fsdp, where at most"
    assert code == 1 and expected in said.replace("\n", " "), said


@pytest.mark.parametrize(("heads", "kinds"), [(1, {"gather"}), (2, {"gather", "exchange"})])
def test_a_sequence_split_within_a_stage_is_declared_by_the_move_that_is_safe_there(heads, kinds):
    """Keys are gathered, or swapped for heads and places gathered; without a pipeline rings would go round."""
    from experiments.app.lm.judged_trainings import schedule_of
    from experiments.verify import Config
    from jaxpar.verify import Layout

    layout = Layout(MeshSpec(stage=2, context=2), schedule="1f1b")
    config = lm_config(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=heads, mlp_dim=64)
    with use_mesh(make_mesh(layout.mesh, jax.devices()[:4]), rules_from(layout="stages")):
        piped = pipeline_transfers(config, 8, 16, schedule_of(Config(), layout))
    of_attention = {t.kind for t in piped if t.axes == ("context",) and t.kind != "sum"}
    assert of_attention == kinds


def test_a_breach_ends_in_exit_code_1(verify, monkeypatch):
    from experiments.app.lm import judged_trainings

    monkeypatch.setattr(judged_trainings, "step_transfers", lambda *_: [])
    code, said = verify("layouts=[data8]", "dtypes=[float32]", "accumulate=1")
    assert code == 1 and "0 of 1 rows hold, 1 DO NOT" in said
    assert "are summed over data, where at most 0 of 0 are declared" in said.replace("\n", " ")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["layouts=[foo8]"], "layout 'foo8' is unknown; legal are sizes such as data2.fsdp4"),
        (
            ["layouts=[data8/zero9]"],
            "layout 'data8/zero9' has after the slash what is none of zero3, zero2",
        ),
        (
            ["layouts=[stage2.data4/zb_v+1f1b]"],
            "layout 'stage2.data4/zb_v+1f1b' has after the slash what is none of",
        ),
        (
            ["layouts=[data8]", "gather_chunks=true"],
            "gather_chunks=true needs stages; name a layout of some, as ",
        ),
        (
            ["dtypes=[int8]"],
            "dtypes=int8 is not judged; expected any of float32, float64, bfloat16.",
        ),
        (
            ["dtypes=[]"],
            "dtypes=[] leaves nothing to verify; legal are float32, float64, bfloat16.",
        ),
        (["layouts=[]"], "layouts=[] leaves nothing to verify; legal are pairs, all, or layouts"),
        (["topology=v9:2x2"], "topology='v9:2x2' is unknown; legal are"),
        (["accumulate=0"], "accumulate=0"),
        (["ema=1"], "ema=1"),
        (["float32_every=0"], "float32_every=0"),
        (["jobs=-1"], "jobs=-1"),
        (["num_experts=-1"], "num_experts=-1"),
    ],
)
def test_mistakes_end_in_a_sentence(verify, flags, sentence):
    code, said = verify(*flags)
    assert code == 2 and f"error: {sentence}" in said and "Traceback" not in said


def test_what_is_not_judged_is_printed(verify):
    flags = "layouts=[data8,fsdp8]", "dtypes=[float64,float32]", "data.seq_len=8", "accumulate=1"
    code, said = verify(*flags, "float32_every=2")
    assert code == 0 and "3 of 3 rows hold" in said, said
    assert "not judged in 1 rows: float32" in said, said


def test_pairs_are_the_layouts_of_at_most_two_axes():
    from experiments.verify import Config, chosen_layouts

    pairs = [str(layout) for layout in chosen_layouts(Config(), 8)]
    every = [str(layout) for layout in chosen_layouts(Config(layouts=["all"]), 8)]
    assert set(pairs) < set(every)
    assert {"data8 zero3", "fsdp4.tensor2 zero2", "data2.fsdp4.inner2 nested"} <= set(pairs)
    assert "data2.fsdp2.tensor2 zero3" not in pairs
    assert all(
        name.split(" ")[0].replace(".inner2", "").count(".") <= 1
        for name in pairs
        if "inner" not in name
    )


def test_all_layouts_cover_every_factorisation_and_variant():
    from experiments.verify import Config, chosen_layouts

    names = [str(layout) for layout in chosen_layouts(Config(layouts=["all"]), 8)]
    assert len(names) == len(set(names)) and len(names) > 35
    for name in (
        "data8 zero3",
        "fsdp8 zero1",
        "data2.fsdp2.tensor2 sequence",
        "data2.fsdp4.inner2 nested",
    ):
        assert name in names
    piped = [name.split(" ") for name in names if "stage" in name]
    assert len(piped) == 15 and {schedule for *_, schedule in piped} == set(PIPELINES)
    none = [str(layout) for layout in chosen_layouts(Config(layouts=["all"], num_experts=0), 8)]
    added = set(names) - set(none)
    assert len(names) == len(none) + len(added)
    assert len(added) == 15 and all("expert" in name for name in added)
    assert {"expert8 zero3", "data2.fsdp2.expert2 zero3"} <= added, added
