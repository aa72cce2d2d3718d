"""The benchmark of decoding: that it measures what it says, and that every case runs."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.decode import gumbel
from jaxpar.lm import LMConfig, apply, init, to_hf
from jaxpar.lm.model import hidden

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's modules by name, forgotten afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    names = ("harness", "decode", "decode_cases", "decode_rows", "decode_pair", "decode_drafts")
    path = list(sys.path)
    yield {name: __import__(name) for name in names}
    sys.path[:] = path
    for name in names:
        sys.modules.pop(name, None)


def test_the_limit_is_all_weights_and_the_tokens_that_are_seen(bench):
    least, cases = bench["decode_cases"].least_bytes, bench["decode_cases"].CASES
    # 16 layers of 8 keys and values of 64 in bf16 are 32 KiB a token.
    assert least(cases["D2.2k"]["full"], 10**9) == 2 * 10**9 + 64 * (1920 + 64) * 32768
    assert least(cases["D6"]["full"], 0) == (8192 + 64 * 64) * 32768  # the prefix once
    assert least(cases["D7"]["full"], 0) == 131072 * 8 * 128 * 2 * 2
    assert {name for name, sizes in cases.items() if "full" not in sizes} == set()


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


def test_a_step_is_what_all_took_but_the_first(bench):
    rounds = [{"ms": ms, "first_ms": first, "steps": 4} for ms, first in ((21.0, 13.0), (14.0, 2.0), (19.0, 3.0))]
    said = bench["decode"].times_of(rounds)
    assert (said["ms"], said["least_ms"]) == ((19 - 3) / 4, (14 - 2) / 4)


def test_peers_and_texts_are_compared_by_batch(bench):
    model = bench["decode_cases"].TINY
    common = {"kind": "steps", "rows": 1, "model": model, "prompt": 8, "new": 2, "parameters": 10**8}
    ours = common | {
        "side": "jaxpar",
        "row": "jaxpar",
        "ms": 2.0,
        "least_ms": 2.0,
        "tokens": [[1, 2], [3, 4]],
    }
    peer = common | {"side": "torch", "row": "t", "ms": 3.0, "least_ms": 2.5, "tokens": [[1, 2], [3, 5]]}
    ours, peer = bench["decode"].judged([ours, peer], 400e3)
    assert bench["decode"].best_ratio(ours) == "1.50x (1.25)" and bench["decode"].best_ratio(peer) == ""
    assert peer["same"] == 0.5 and ours["same"] == 1.0
    # 400 MB of weights, nine tokens of two layers of four heads of eight, at 400 bytes a millisecond.
    assert ours["limit_ms"] == pytest.approx((4e8 + 9 * 2 * 2 * 4 * 8 * 4) / 400, rel=1e-12)


def test_what_is_timed_alone_is_attention(bench):
    request = {"row": "jaxpar block 16", "shape": (1, 4, 2, 40, 8), "dtype": "float32", "spend_s": 0.0}
    row = bench["decode_rows"].Attend(request)
    (keys, values), _, _, q, k, v, _ = row.args
    keys, values = (np.asarray(x).reshape(2, -1, 8)[:, :40] for x in (keys, values))
    keys, values = (np.concatenate([x, np.asarray(y)[0].swapaxes(0, 1)], 1) for x, y in ((keys, k), (values, v)))
    want = []
    for head in range(4):
        scores = keys[head // 2] @ np.asarray(q)[0, 0, head] / np.sqrt(8)
        weights = np.exp(scores - scores.max())
        want.append(weights / weights.sum() @ values[head // 2])
    np.testing.assert_allclose(np.asarray(row.program(*row.args))[0, 0], want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_difference_counts_unless_rounding_decides(bench, tmp_path, temperature):
    config = LMConfig(vocab_size=8, num_layers=1, embed_dim=8, num_heads=1, mlp_dim=8, dtype="float32")
    params = init(jax.random.key(0), config)
    plain, row = np.array([[1, 2, 3, 4], [1, 2, 3, 4]]), 1
    scores = apply(params, jnp.asarray(plain[row:, :2]), config)[0, -1]
    noise = gumbel(jax.random.key(3), *(jnp.full((1,), x) for x in (row, 2, 0)), 8)[0] if temperature else 0.0
    best, second = np.argsort(-np.asarray(scores / (temperature or 1) + noise))[:2]
    # A bias in all but name: along the features there, the second's score is raised to the best one's.
    features = np.asarray(hidden(params, jnp.asarray(plain[row:, :2]), config)[0][0, -1], np.float64)
    whole = np.asarray(scores + temperature * noise, np.float64)
    lift = (whole[best] - whole[second]) * features / (features @ features)
    tied = params["head"].at[second].add(jnp.asarray(lift, jnp.float32))
    other = np.where(np.arange(4) < 2, plain, plain + 1)
    other[0] = plain[0]
    for name, head, near in (("clear", params["head"], 0), ("tied", tied, 1)):
        to_hf(params | {"head": head}, config, tmp_path / name)
        request = {"folders": {"target": str(tmp_path / name)}, "temperature": temperature, "new": 3}
        said = bench["decode_drafts"].compared(request, plain, other)
        assert said == {"compared": 6, "differing": 1, "near_ties": near}
        assert bench["decode_drafts"].compared(request, plain, plain)["differing"] == 0


@pytest.mark.slow
def test_every_case_runs_without_peers(tmp_path):
    out = tmp_path / "decode.json"
    flags = ["--tiny", "--no-peer", "--older", str(ROOT), "--out", str(out)]
    run = subprocess.run([sys.executable, str(ROOT / "bench" / "decode.py"), *flags], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads(out.read_text())
    assert len(rows) > 20 and not [row for row in rows if "failed" in row], run.stdout
    assert all(row["differing"] == row["near_ties"] for row in rows if "differing" in row)
