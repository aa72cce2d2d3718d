"""The benchmark of attention over split sequences: its forms are attention, and its figures are what they say."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from bench_modules import bench_modules
from tolerance import LAYOUT, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

ROOT = Path(__file__).parents[2]
NAMES = ("context", "context_rows", "context_training", "context_counts")


@pytest.fixture
def bench():
    """The benchmark's modules by name, forgotten afterwards."""
    with bench_modules(*NAMES) as modules:
        yield modules


def asked(bench, name, devices, only=None, **flags):
    args = {
        "only": only,
        "spend_s": 0.0,
        "tiny": True,
        "devices": devices,
        "row_s": 1.0,
        "passes": None,
    }
    args = SimpleNamespace(**args | {"layers": None} | flags)
    return bench["context"].rows_of(
        name, args, {"jaxpar": 0, "training": 0, "ranks": 0, "torch": 0}
    )


def test_one_device_is_asked_what_one_can_do(bench):
    tiny = [name for name, case in bench["context"].CASES.items() if "tiny" in case]
    names = {row["row"] for case in tiny for row in asked(bench, case, 1)}
    assert {
        "jax one",
        "jaxpar one",
        "jaxpar parts 4",
        "jaxpar forest 64",
        "torch flex",
        "own full kernel",
    } <= names
    assert not [
        name
        for name in names
        if any(word in name for word in ("ring", "shares", "ladder", "alltoall"))
    ]
    rows = {row["row"]: row["devices"] for row in asked(bench, "C3", 4)}
    assert rows["jaxpar shares even"] == 4 and {
        rows[name] for name in ("jaxpar one", "torch sdpa", "jax one")
    } == {1}
    share, whole = asked(bench, "C3.share", 2), bench["context"].CASES["C3"]["full"]["shape"]
    assert {row["row"]: row["devices"] for row in share} == {"jax one": 1, "jaxpar one": 1}
    assert (
        bench["context"].CASES["C3.share"]["full"]["shape"][3] == whole[3] * 9 // 10
    )  # as `attend` cuts it
    assert {row["row"] for row in asked(bench, "C1.moves", 2, "zigzag,one")} >= {
        "jaxpar ring zigzag",
        "torch one cudnn",
    }
    assert {row["name"] for row in asked(bench, "C5", 2, "ladder")} == {
        f"C5 jaxpar ladder {rows}" for rows in ("1 row", "4 rows", "16 rows")
    }
    (row,) = asked(bench, "C5", 2, "ladder", passes="fwd,16 rows", layers=3)
    assert row["name"] == "C5 jaxpar ladder 16 rows" and row["model"]["num_layers"] == 3
    assert not asked(bench, "C4", 2, passes="fwd")


def test_the_limit_is_half_of_the_pairs_or_the_cache_once(bench):
    row = {"kind": "moves", "length": 100, "heads": 3, "width": 7}
    assert bench["context"].work_of(row | {"direction": "fwd"}) == (2 * 100**2 * 3 * 7, 0)
    assert bench["context"].work_of(row | {"direction": "fwd+bwd"}) == (7 * 100**2 * 3 * 7, 0)
    full = bench["context"].CASES["C3"]["full"]
    assert bench["context"].work_of(full | {"kind": "attend"}) == (
        0,
        2**20 * 8 * 128 * 2 * 2,
    )  # 4.3 GB


def test_a_row_is_set_beside_foreign_ones_of_as_many_devices_and_beside_one(bench):
    common = {"kind": "moves", "length": 10, "heads": 2, "width": 5, "direction": "fwd"}
    told = [
        ("jaxpar ring", 2, 3.0),
        ("torch ring", 2, 6.0),
        ("torch one", 1, 9.0),
        ("jax one", 1, 5.0),
    ]
    rows = [
        common | {"row": name, "devices": n, "ms": ms, "least_ms": ms / 2} for name, n, ms in told
    ]
    rows.append(common | {"row": "torch other", "devices": 2, "failed": "not here"})
    ours, peer, *_ = bench["context"].judged(rows, {"flops": 1e3, "bytes": 1.0})
    columns = bench["context"].COLUMNS
    assert columns["of peer"](ours) == "2.00x (2.00)" and columns["of one"](ours) == "1.67x (1.67)"
    assert columns["of peer"](peer) == "" and columns["of one"](peer) == "0.83x (0.83)"
    assert ours["limit_ms"] == 2 * 10**2 * 2 * 5 / 1e3 * 1e3 / 2  # over two devices


SIZES = {
    "as the length": (lambda n: n, 1),
    "not at all, then as the length": (lambda n: max(900, n), 1),
    "as the length, over what is always there": (lambda n: 500 + n, 1),
    "as its square": (lambda n: n * n / 100, 2),
    "as the length, then its square": (lambda n: n + n * n / 100, 2),
}


@pytest.mark.parametrize("how", SIZES)
@pytest.mark.parametrize("most", [40, 100, 1000, 4095, 10**6])
def test_the_longest_is_found_from_below(bench, most, how):
    """In few programs, none of which has no room."""
    (size, power), sizes = SIZES[how], {}
    room = size(most)
    sizes[32] = size(32)
    for length in bench["context_training"].guesses(sizes, room, 4096, power):
        assert length not in sizes
        sizes[length] = size(length)
    found = max(sizes)
    assert all(x <= room for x in sizes.values()) and len(sizes) <= 6
    assert found == 4096 if most > 4096 else sizes[found] > 0.85 * room


def test_a_guess_that_was_too_long_is_halved(bench):
    sizes = {32: 32}
    asked = []
    for length in bench["context_training"].guesses(sizes, 200, 4096, 1):
        asked.append(length)
        sizes[length] = length if length <= 150 else 1000
    assert asked == [196, 114, 152, 132, 140] and bench["context_training"].rounded(1001) == 992


class Process:
    """Stands for a process that trains: 10 bytes a token beside 1,000, of which 3,000 tokens would fit."""

    def __init__(self, answers, at=1024):
        self.answers, self.asked, self.closed = answers, [], 0
        self.row = {
            "side": "training",
            "row": "own full kernel",
            "row_s": 50,
            "first": 16,
            "at": at,
            "most": 10**6,
        }

    def ask(self, side, request, left):
        assert side == "training" and 0 < left <= 50
        self.asked.append((request["do"], request.get("length")))
        if request["do"] in self.answers:
            return self.answers[request["do"]](request)
        plan = {"fixed": 1000, "bytes": 10 * request.get("length", 0), "compile_s": 2.0}
        return {
            "make": {"memory": 31_000 / 0.95},
            "plan": plan,
            "time": {"ms": 7.0},
            "begin": {"began": True},
        }[request["do"]]

    def close(self, side):
        self.closed += 1


def test_a_row_of_training_keeps_what_it_found(bench):
    trained, said = bench["context_training"].trained, []
    process = Process({})
    row = trained(process, process.row, said.append)
    assert process.asked == [
        ("make", None),
        ("plan", 1024),
        ("time", 1024),
        ("plan", 2944),
        ("begin", 2944),
    ]
    assert (row["longest"], row["ms"], row["compile_s"], process.closed) == (
        2944,
        7.0,
        4.0,
        1,
    ) and len(said) == 3
    assert row["peak_bytes"] == 11_240 and row["note"].endswith("begun, not awaited")

    limits = {
        "plan": lambda x: (
            {"failed": "no answer"} if x["length"] > 1024 else Process({}).ask("training", x, 1)
        )
    }
    row = trained(process := Process(limits), process.row, said.append)
    assert (row["longest"], row["ms"]) == (1024, 7.0) and row["note"].endswith(
        "not ended: no answer"
    )
    assert process.asked[-1] == ("plan", 2944) and process.closed == 1 and "failed" not in row

    no_room = {"begin": lambda x: {"no_room": True} if x["length"] > 2800 else {"ran_s": 3.0}}
    row = trained(process := Process(no_room), process.row, said.append)
    assert row["longest"] == 2752 and row["note"].endswith(
        "2,944 planned, had no room; ran in 3.0 s"
    )

    row = trained(process := Process({}, at=4096), process.row, said.append)
    assert row["longest"] == 0 and "ms" not in row
    row = trained(
        process := Process({"make": lambda x: {"failed": "died"}}), process.row, said.append
    )
    assert row["failed"] == "died"


def made(program):
    return [np.asarray(program.join(x)) for x in jax.jit(program.function)(*program.args)]


@pytest.mark.parametrize("row", ["jaxpar ring contiguous", "jaxpar ring striped", "jaxpar parts 4"])
def test_forms_are_attention(bench, row):
    """In value and gradient, in float32; sums are added up in another order."""
    kind = "parts" if "parts" in row else "moves"
    request = bench["context"].CASES["C2.moves"]["tiny"] | {
        "direction": "fwd+bwd",
        "mesh": 2,
        "length": 16,
    }
    with use_mesh(make_mesh(MeshSpec(context=2), jax.devices()[:2])):
        got = made(bench["context_rows"].PROGRAMS[kind](request | {"row": row}))
    assert_close(got, made(bench["context_rows"].whole(request)), LAYOUT["float32"])


def test_shares_of_a_cache_are_the_cache(bench):
    request = {"shape": (1, 4, 2, 40, 8), "dtype": "float32", "devices": 4}
    with use_mesh(make_mesh(MeshSpec(context=4), jax.devices()[:4])):
        uneven, whole = (
            bench["context_rows"].attend(request | {"row": row})
            for row in ("jaxpar shares uneven", "jax one")
        )
        assert np.asarray(uneven.args[3]).tolist() == [[36, 1, 1, 1]]
        got = made(uneven)
    q, keys, values = whole.args  # a share's remainder is left out
    (want,) = whole.function(q, keys[:, :39], values[:, :39])
    assert_close(got[0], want, LAYOUT["float32"])
    parts = bench["context_rows"].in_parts(["pairs", "5"], q, keys, values, None)
    assert_close(parts, whole.function(q, keys, values)[0], LAYOUT["float32"])


@pytest.mark.parametrize("move", ["two_way", "swap_ring"])
def test_a_program_sends_what_is_said(bench, move):
    # Two groups would have one hop, which an older XLA makes once for both passes.
    found = bench["context_counts"].counted(move, bench["context_counts"].TINY, 2, jax.devices())
    said = bench["context_counts"].said(move, bench["context_counts"].TINY, 2, 8)
    assert math.isclose(found["compiled"], sum(said.values()))
    ring = 4 if move == "swap_ring" else 8
    assert math.isclose(found["products"], 14 * (2 + 1 / ring) / 4 / 8)
    assert (said["up"] == said["down"] > 0) == (move == "two_way")


@pytest.mark.slow  # three minutes on two quiet cores
def test_every_case_runs_without_peers(tmp_path):
    out = tmp_path / "context.json"
    flags = ["--tiny", "--no-peer", "--out", str(out)]
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "context.py"), *flags], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert len(rows) > 50 and not [row for row in rows if "failed" in row], run.stdout
    assert all(row["error"] < LAYOUT["float32"] for row in rows if "error" in row)


def test_a_longest_step_is_begun(bench, monkeypatch):
    """One that holds whoever asks for it, too; one that fails says so."""
    module = bench["context_training"]
    monkeypatch.setattr(module, "BEGUN_S", 0.2)
    train = object.__new__(module.Train)

    def begun(step):
        train.step = lambda length: step
        return train.begin(8)

    def refused():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    assert begun(lambda: time.sleep(0.6) or 1.0) == {"began": True} and begun(refused) == {
        "no_room": True
    }
    assert begun(lambda: 1.0)["ran_s"] < 0.2
    with pytest.raises(ValueError, match="not finite"):
        begun(lambda: float("nan"))
