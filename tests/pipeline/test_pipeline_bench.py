"""The benchmark of pipelines: its costs are those of the tasks, its ratios what they say, and all of it runs."""

import json
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_modules import bench_modules

from jaxpar.pipeline import TaskCosts, named_schedule, simulate_schedule

ROOT = Path(__file__).parents[2]
NAMES = ("pipeline", "pipeline_costs", "pipeline_rows", "pipeline_counts")


@pytest.fixture
def bench():
    """The benchmark's modules by name, forgotten afterwards."""
    with bench_modules(*NAMES) as modules:
        yield modules


def test_costs_add_the_ends_where_the_executor_has_them(bench):
    """Two devices, one microbatch: F0 F1 BW1 BW0 one after the other, with the ends of the model in first and last."""
    costs = bench["pipeline_costs"].ChunkCosts(
        F=1, B=7, W=7, BW=2, enter=0.1, head=0.03, leave=0.004, last=1
    )
    for lockstep in (False, True):
        made = simulate_schedule(named_schedule("gpipe", 2, 1), costs, lockstep=lockstep).makespan
        assert made == pytest.approx(1 + 1 + 2 + 2 + 0.1 + 0.03 + 0.004)
    apart = bench["pipeline_costs"].ChunkCosts(F=1, B=2, W=3, BW=50, head=0.5, leave=0.25, last=0)
    assert (
        simulate_schedule(named_schedule("zb_h1", 1, 1), apart).makespan == 1 + 2 + 3 + 0.5 + 0.25
    )
    plain = bench["pipeline_costs"].ChunkCosts(F=1, B=2, W=3, BW=5, last=3)
    for name in (
        "interleaved",
        "zb_v",
    ):  # without ends, and BW as long as both, they are the library's own
        schedule = named_schedule(name, 2, 4)
        assert (
            simulate_schedule(schedule, plain).times
            == simulate_schedule(schedule, TaskCosts(1, 2, 3)).times
        )


def test_a_row_is_set_beside_its_peers_of_as_many_microbatches(bench):
    def row(side, name, m, ms, **more):
        return {
            "side": side,
            "row": name,
            "schedule": name.split()[-1],
            "microbatches": m,
            "ms": ms,
            **more,
        }

    before = [
        row("torch", "torch 1f1b", 8, 30.0),
        row("torch", "torch zb_v", 8, 20.0),
        row("torch", "torch zb_v", 4, 1.0),
        row("jaxpar", "1f1b", 8, 12.0, kind="run", what="run"),
        row("jaxpar", "fsdp, in turn", 8, 5.0, kind="turn", what="fsdp"),
        {"side": "torch", "row": "torch gpipe", "microbatches": 8, "failed": "not here"},
    ]
    got = bench["pipeline"].judged(
        row("jaxpar", "zb_v", 8, 10.0, kind="run", what="run", lockstep_ms=8.0), before
    )
    want = {"of_torch": 2.0, "of_best": 2.0, "of_1f1b": 1.2, "of_fsdp": 0.5, "of_lockstep": 1.25}
    assert {name: got[name] for name in want} == want
    plain = row("jaxpar", "zb_v", 8, 10.0, kind="run", what="offload", bits=3, peaks=[100, 90])
    away = row(
        "jaxpar", "zb_v", 8, 11.0, kind="offload", what="offload", bits=3, peaks=[50, 45], sides=6
    )
    said = "bits equal; 6 sides; 0.50 of the bytes, 1.100 of the time"
    assert bench["pipeline"].judged(away, [plain])["note"] == said
    assert bench["pipeline"].judged(away | {"bits": 4}, [plain])["note"].startswith("bits differ")


def test_parts_ask_for_every_schedule(bench):
    flags = {
        "tiny": True,
        "devices": 2,
        "rows": 2,
        "remat": "none",
        "attention": "auto",
        "spend_s": 0.0,
        "only": None,
    }
    args = Namespace(**flags, chunks=2, timings=5, microbatches="8,4")
    rows = {
        what: bench["pipeline"].rows_of(what, args) for what in ("torch", "run", "fsdp", "offload")
    }
    assert {row["schedule"] for row in rows["run"]} >= {
        "gpipe",
        "1f1b",
        "interleaved",
        "zb_h1",
        "zb_v",
    }
    assert [len(rows[what]) for what in rows] == [10, 12, 6, 12]
    assert {row["devices"] for row in rows["fsdp"]} == {1, 2}


def test_a_split_head_is_in_time_and_bytes_what_it_says(bench):
    """Whole rows on each stage; far under 0.8 of the time where the head is large, and not where it is small."""
    (request, _) = bench["pipeline_counts"].large_head(False)
    row_bytes, made = 2 * 4 * 2048, {}  # a row of head and embedding
    for size in (1000, 2**18):
        made[size] = row = bench["pipeline_counts"].vocabulary(
            request | {"schedules": ["1f1b"], "vocab_size": size}
        )[0]
        assert row["whole_least"] == row["whole_most"] == size * row_bytes
        assert row["split_least"] == row["split_most"] == size // 4 * row_bytes
    assert (
        made[2**18]["events_ratio"] < 0.8
        and made[2**18]["lockstep_ratio"] < 0.8 < made[1000]["events_ratio"]
    )


def run(tmp_path, *flags):
    out = tmp_path / "pipeline.json"
    command = [
        sys.executable,
        str(ROOT / "bench" / "pipeline.py"),
        "--tiny",
        "--out",
        str(out),
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow  # 110 s on two busy cores
def test_rows_run_and_make_one_gradient(tmp_path):
    only = "1f1b,zb_v,fsdp,one device"
    rows, said = run(tmp_path, "--what", "run,fsdp", "--microbatches", "4", "--only", only)
    assert len(rows) == 5 and not [row for row in rows if "failed" in row or row.get("note")], said
    told = [(row["loss"], row["norm"]) for row in rows]
    assert all(one == pytest.approx(told[0], rel=1e-5) for one in told), said
    assert all(row["lockstep_ms"] >= row["events_ms"] > 0 for row in rows if row["what"] == "run")


@pytest.mark.slow  # 36 s on two quiet cores
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_programs_for_pods_compile_on_a_cpu(tmp_path):
    """A language model of 16 layers by 1F1B and ZB-V for 64 and 1,024 chips of v5p."""
    rows, said = run(tmp_path, "--what", "aot")
    print(said)
    assert [row.get("chips") for row in rows] == [64, 64, 1024, 1024], said
    for row in rows:
        assert row["compile_s"] < 60 and row["temporary"] > 0, said
        # Layers lie over all chips, what is outside of them over all but the stages; a batch's numbers are 256 KiB a
        # chip at most, and where 1,024 chips split 1,024 over 32, tiles of 128 are padded.
        ends, padding = 2 * 1024 * 1024, 1 if row["chips"] == 64 else 4
        weights = 4 * ((row["parameters"] - ends) + ends * row["mesh"]["stage"]) / row["chips"]
        assert weights <= row["arguments"] < padding * 1.05 * weights + 2**18, said
