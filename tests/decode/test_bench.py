"""The benchmark of decoding: that it measures what it says, and that every case runs."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_modules import bench_modules
from lm_configs import lm_config

from jaxpar.decode import gumbel
from jaxpar.lm import apply, from_hf, init, to_hf
from jaxpar.lm.model import hidden

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench():
    """The benchmark's modules by name, forgotten afterwards."""
    names = ("harness", "decode", "decode_cases", "decode_rows", "decode_pair", "decode_drafts")
    with bench_modules(*names) as modules:
        yield modules


def test_the_limit_is_all_weights_and_the_tokens_that_are_seen(bench):
    least, cases = bench["decode_cases"].least_bytes, bench["decode_cases"].CASES
    # 16 layers of 8 keys and values of 64 in bf16 are 32 KiB a token.
    assert least(cases["D2.2k"]["full"], 10**9) == 2 * 10**9 + 64 * (1920 + 64) * 32768
    assert least(cases["D6"]["full"], 0) == (8192 + 64 * 64) * 32768  # the prefix once
    assert least(cases["D7"]["full"], 0) == 131072 * 8 * 128 * 2 * 2
    assert {name for name, sizes in cases.items() if "full" not in sizes} == set()


def test_a_process_finds_what_it_is_given_first_and_then_what_is_installed(
    bench, tmp_path, monkeypatch
):
    for folder, modules in {"given": ["ours"], "installed": ["ours", "kernels"]}.items():
        (tmp_path / folder).mkdir()
        for module in modules:
            (tmp_path / folder / f"{module}.py").write_text(f"place = {folder!r}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    answer = "import json, kernels, ours; input(); print(json.dumps({'at': [ours.place, kernels.place]}), flush=True)"
    worker = bench["harness"].Worker(["-c", answer], {"PYTHONPATH": str(tmp_path / "given")})
    assert worker.ask({}, 30)["at"] == ["given", "installed"]
    worker.close()
    assert worker.lines.get(timeout=30) == ""  # its reader is done
    for pipe in (worker.process.stdin, worker.process.stdout, worker.log):
        pipe.close()


def test_rows_are_timed_in_turns_and_a_failed_one_is_asked_no_more(bench):
    asked = []

    class Fake:
        workers: dict = {"a": 0, "b": 0}

        def ask(self, side, request):
            asked.append((request["do"], request.get("name")))
            if request["do"] == "round":
                return {"failed": "tired"} if request["name"] == "y" else {"ms": float(len(asked))}
            return {"compile_s": 1.0}

    rows = [{"name": name, "side": side} for name, side in (("x", "a"), ("y", "b"), ("z", "a"))]
    x, y, z = bench["decode"].in_turns(Fake(), rows, 3)
    order = [name for do, name in asked if do == "round"]
    assert order == ["x", "y", "z", "z", "x", "x", "z"]
    assert y["failed"] == "tired" and "ms" not in y
    assert (x["ms"], x["least_ms"], len(x["rounds"])) == (8.0, 4.0, 3) and z["least_ms"] == 6.0
    assert asked[-2:] == [("drop", None)] * 2


def test_with_jobs_the_sides_make_theirs_at_once_and_ours_is_prepared(bench):
    asked = []

    class Fake:
        workers: dict = {}
        row_s = 2.0

        def ask(self, side, request, row_s=None):
            asked.append((side, request["do"], len(request.get("rows", ())), row_s))
            return {"ms": 1.0} if request["do"] == "round" else {}

    rows = [
        {"name": name, "side": side}
        for name, side in (("x", "jaxpar"), ("y", "torch"), ("z", "jaxpar"))
    ]
    made = bench["decode"].in_turns(Fake(), rows, 1, 4)
    assert [row["name"] for row in made] == ["x", "y", "z"] and all(
        row["ms"] == 1.0 for row in made
    )
    assert [each[:2] for each in asked if each[0] == "jaxpar"][:3] == [("jaxpar", "prepare")] + [
        ("jaxpar", "make")
    ] * 2
    assert ("jaxpar", "prepare", 2, 4.0) in asked and ("torch", "make", 0, None) in asked
    assert not any(each[:2] == ("torch", "prepare") for each in asked)


def test_what_is_prepared_is_made_once(bench):
    built = []

    class Row:
        def __init__(self, request):
            built.append(request["name"])
            if request["name"] == "bad":
                raise ValueError("no")

        def warm(self):
            return {"compile_s": 1.0}

        def round(self):
            return {"ms": 2.0}

    module = bench["decode_rows"]
    module.KINDS["fake"] = Row
    rows = bench["harness"].Rows(module.make_row)
    requests = [{"name": name, "kind": "fake"} for name in ("a", "bad")]
    assert rows({"do": "prepare", "jobs": 2, "rows": requests}) == {}
    assert rows(requests[0] | {"do": "make"}) == {"compile_s": 1.0} and sorted(built) == [
        "a",
        "bad",
    ]
    with pytest.raises(ValueError, match="no"):
        rows(requests[1] | {"do": "make"})
    assert rows({"do": "round", "name": "a"}) == {"ms": 2.0}
    assert rows({"name": "b", "kind": "fake", "do": "make"}) == {"compile_s": 1.0} and sorted(
        built
    ) == [
        "a",
        "b",
        "bad",
    ]
    assert rows({"do": "drop"}) == {} and not rows.held


def test_a_step_is_what_all_took_but_the_first(bench):
    rounds = [
        {"ms": ms, "first_ms": first, "steps": 4}
        for ms, first in ((21.0, 13.0), (14.0, 2.0), (19.0, 3.0))
    ]
    said = bench["decode"].times_of(rounds)
    assert (said["ms"], said["least_ms"]) == ((19 - 3) / 4, (14 - 2) / 4)


def test_peers_and_texts_are_compared_by_batch(bench):
    model = bench["decode_cases"].TINY
    common = {
        "kind": "steps",
        "rows": 1,
        "model": model,
        "prompt": 8,
        "new": 2,
        "parameters": 10**8,
    }
    ours = common | {
        "side": "jaxpar",
        "row": "jaxpar",
        "ms": 2.0,
        "least_ms": 2.0,
        "tokens": [[1, 2], [3, 4]],
    }
    peer = common | {
        "side": "torch",
        "row": "t",
        "ms": 3.0,
        "least_ms": 2.5,
        "tokens": [[1, 2], [3, 5]],
    }
    ours, peer = bench["decode"].judged([ours, peer], 400e3)
    assert (
        bench["decode"].best_ratio(ours) == "1.50x (1.25)"
        and bench["decode"].best_ratio(peer) == ""
    )
    assert peer["same"] == 0.5 and ours["same"] == 1.0
    # 400 MB of weights, nine tokens of two layers of four heads of eight, at 400 bytes a millisecond.
    assert ours["limit_ms"] == pytest.approx((4e8 + 9 * 2 * 2 * 4 * 8 * 4) / 400, rel=1e-12)


def test_a_row_is_set_beside_its_own_plain_one_and_a_failed_one_beside_nothing(bench):
    common = {
        "kind": "drafts",
        "rows": 1,
        "parameters": 10**9,
        "prompts": [[1], [2]],
        "least_ms": 1.0,
    }
    rows = [
        common | {"side": side, "row": f"{side} {name}", "ms": ms}
        for side, name, ms in (
            ("jaxpar", "plain", 4.0),
            ("jaxpar", "copy 8", 2.0),
            ("transformers", "dynamic", 9.0),
        )
    ]
    rows += [
        common | {"side": "transformers", "row": "transformers lookup", "ms": 3.0, "tokens": [[7]]}
    ]
    rows += [
        {"kind": "drafts", "rows": 1, "side": "torch", "row": "torch plain", "failed": "tired"}
    ]
    judged = bench["decode"].judged(rows, 1.0)
    assert [row.get("plain_ms") for row in judged] == [4.0, 4.0, 9.0, 9.0, None]
    assert [row["texts"] for row in judged] == [2, 2, 2, 2, 0]
    assert {row["best_peer_ms"] for row in judged} == {3.0}
    assert not any(name in row for row in judged for name in ("limit_ms", "same"))
    alone = bench["decode"].judged(
        [common | {"side": "jaxpar", "row": "jaxpar plain", "ms": 4.0}], 1.0
    )
    assert bench["decode"].best_ratio(alone[0]) == ""


def test_what_fits_into_the_processors_cache_has_no_limit(bench):
    case = {"kind": "attend", "dtype": "float32", "side": "jaxpar", "row": "jaxpar"}
    near = int(bench["harness"].CACHE / (2 * 4 * 100 * 10)) - 1
    for slots, has_limit in ((near, False), (near + 2, True)):
        rows = bench["decode"].judged([case | {"shape": (1, 20, 10, slots, 100)}], 1e3)
        assert [row.get("limit_ms") for row in rows] == [
            2 * 4 * 10 * slots * 100 if has_limit else None
        ]


def test_a_table_says_in_how_much_of_the_limit_and_how_many_times_as_fast(bench):
    row = {
        "kind": "steps",
        "row": "x",
        "rows": 2,
        "readers": 3,
        "ms": 4.0,
        "least_ms": 2.0,
        "limit_ms": 1.0,
    }
    steps = {
        name: show(row)
        for name, show in bench["decode"].filled(bench["decode"].STEPS, [row]).items()
    }
    assert steps == {
        "row": "x", "rows": "2", "ms (least)": "4.000 (2.000)", "tokens/s": "1,500", "limit ms": "1.000",
        "of limit": "25 %", "note": "",
    }  # fmt: skip
    said = bench["decode"].DRAFTS["of plain"](row | {"plain_ms": 6.0, "plain_least_ms": 5.0})
    assert said == "1.50x (2.50)"


def test_the_rate_is_the_fastest_copys_and_another_checkout_is_refused(bench):
    class Fake:
        def ask(self, side, request):
            if side == "torch":
                return {"failed": "not here"}
            return {
                "device": "d",
                "version": "v",
                "rate": {"jaxpar": 3.0, "older": 5.0}[side],
                "from": "/here",
            }

    class Args:
        size, spend_s = "tiny", 0.0

    sides = {
        "jaxpar": ([], {"PYTHONPATH": "/here"}),
        "older": ([], {"PYTHONPATH": "/here"}),
        "torch": ([], {}, ""),
    }
    assert bench["decode"].started(Fake(), sides, Args) == 5.0
    sides["older"] = ([], {"PYTHONPATH": "/there"})
    with pytest.raises(SystemExit, match="older would be measured from /here"):
        bench["decode"].started(Fake(), sides, Args)


def test_rows_are_asked_of_the_sides_that_are_there(bench):
    class Args:
        only, skip, spend_s = "copy,static,plain", "plain,never", 0.0

    case = {
        "rows": [1, 2], "sides": {"jaxpar": ["plain", "copy 8"], "transformers": ["static"], "torch": ["static"]},
        "exported": True, "prompt": 3, "model": {"vocab_size": 50},
    }  # fmt: skip
    first, again = (
        bench["decode"].rows_of("D", case, Args, {"jaxpar": 0, "transformers": 0}) for _ in range(2)
    )
    names = [f"D {row} {rows}" for rows in (1, 2) for row in ("copy 8", "static")]
    assert [row["name"] for row in first] == names and first == again
    assert [np.shape(row["prompts"]) for row in first] == [(row["rows"], 3) for row in first]
    assert first[0]["prompts"] == first[1]["prompts"], "all sides of a batch are asked the same"


def test_our_processes_begin_with_their_checkout_and_see_what_this_one_sees(bench, monkeypatch):
    class Args:
        older, no_peer = "/older", True

    monkeypatch.setenv("PYTHONPATH", "/one:/two")
    sides = bench["decode"].sides_of(Args)
    assert sides["jaxpar"][1]["PYTHONPATH"] == f"{ROOT}:/one:/two"
    assert sides["older"][1]["PYTHONPATH"] == "/older:/one:/two"
    monkeypatch.delenv("PYTHONPATH")
    assert bench["decode"].sides_of(Args)["older"][1]["PYTHONPATH"] == "/older"


def test_what_is_timed_alone_is_attention(bench):
    request = {
        "row": "jaxpar block 16",
        "shape": (1, 4, 2, 40, 8),
        "dtype": "float32",
        "spend_s": 0.0,
    }
    row = bench["decode_rows"].Attend(request)
    (keys, values), _, _, q, k, v, _ = row.args
    keys, values = (np.asarray(x).reshape(2, -1, 8)[:, :40] for x in (keys, values))
    keys, values = (
        np.concatenate([x, np.asarray(y)[0].swapaxes(0, 1)], 1) for x, y in ((keys, k), (values, v))
    )
    want = []
    for head in range(4):
        scores = keys[head // 2] @ np.asarray(q)[0, 0, head] / np.sqrt(8)
        weights = np.exp(scores - scores.max())
        want.append(weights / weights.sum() @ values[head // 2])
    np.testing.assert_allclose(np.asarray(row.program(*row.args))[0, 0], want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_difference_counts_unless_rounding_decides(bench, tmp_path, temperature):
    config = lm_config(
        vocab_size=8, num_layers=1, embed_dim=8, num_heads=1, mlp_dim=8, dtype="float32"
    )
    params = init(jax.random.key(0), config)
    plain, row = np.array([[1, 2, 3, 4], [1, 2, 3, 4]]), 1
    scores = apply(params, jnp.asarray(plain[row:, :2]), config)[0, -1]
    noise = (
        gumbel(jax.random.key(3), *(jnp.full((1,), x) for x in (row, 2, 0)), 8)[0]
        if temperature
        else 0.0
    )
    best, second = np.argsort(-np.asarray(scores / (temperature or 1) + noise))[:2]
    # A bias in all but name: along the features there, the second's score is raised to the best one's.
    features = np.asarray(
        hidden(params, jnp.asarray(plain[row:, :2]), config)[0][0, -1], np.float64
    )
    whole = np.asarray(scores + temperature * noise, np.float64)
    lift = (whole[best] - whole[second]) * features / (features @ features)
    tied = params["head"].at[second].add(jnp.asarray(lift, jnp.float32))
    other = np.where(np.arange(4) < 2, plain, plain + 1)
    other[0] = plain[0]
    for name, head, near in (("clear", params["head"], 0), ("tied", tied, 1)):
        to_hf(params | {"head": head}, config, tmp_path / name)
        request = {
            "folders": {"target": str(tmp_path / name)},
            "temperature": temperature,
            "new": 3,
        }
        said = bench["decode_drafts"].compared(request, plain, other)
        assert said == {"compared": 6, "differing": 1, "near_ties": near}
        assert bench["decode_drafts"].compared(request, plain, plain)["differing"] == 0


@pytest.mark.slow
def test_every_case_runs_without_peers(tmp_path):
    out = tmp_path / "decode.json"
    flags = ["--tiny", "--no-peer", "--older", str(ROOT), "--out", str(out)]
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "decode.py"), *flags], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert len(rows) > 20 and not [row for row in rows if "failed" in row], run.stdout
    assert all(row["differing"] == row["near_ties"] for row in rows if "differing" in row)


def test_a_grown_target_says_the_same_with_more_weights(bench, tmp_path):
    config = lm_config(
        vocab_size=32,
        num_layers=2,
        embed_dim=16,
        num_heads=2,
        mlp_dim=24,
        dtype="float32",
        init_std=0.3,
    )
    params = init(jax.random.key(0), config)
    to_hf(params, config, tmp_path / "target")
    large, weights = from_hf(bench["decode_pair"].grown(tmp_path / "target", 64), dtype="float32")
    assert large.mlp.dim == 64 and weights["layers"]["w_down"].shape == (2, 64, 16)
    assert all(
        (weights["layers"][name] != 0).mean() > 0.99 for name in ("w_gate", "w_up")
    )  # nothing to skip
    tokens = jnp.arange(20)[None]
    np.testing.assert_allclose(
        apply(weights, tokens, large), apply(params, tokens, config), rtol=1e-5, atol=1e-5
    )
