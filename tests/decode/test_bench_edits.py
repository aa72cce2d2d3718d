"""The benchmark of edits: how many passes a copy takes at least, and that it runs."""

import json
import sys

import numpy as np
import pytest
from bench_modules import bench_modules


@pytest.fixture
def bench():
    """The benchmark's module, forgotten afterwards."""
    with bench_modules("decode_edits") as modules:
        yield modules["decode_edits"]


def test_an_edit_replaces_so_many_bytes_by_others(bench):
    text = np.arange(50)
    out = bench.edited(np.random.default_rng(0), text, 7)
    assert (out != text).sum() == 7 and ((0 <= out) & (out < 256)).all()


@pytest.mark.parametrize(
    ("places", "length", "passes"), [((), 3, 3), ((4,), 9, 2), ((4, 5), 9, 3), ((9,), 9, 1)]
)
def test_a_copy_takes_a_pass_for_each_edit_and_one_more(bench, places, length, passes):
    source = np.arange(10)
    text = source.copy()
    text[list(places)] += 100
    assert bench.least_passes(source, text, length) == passes


def test_it_runs(bench, monkeypatch, capsys, tmp_path):
    out = tmp_path / "edits.json"
    monkeypatch.setattr(
        sys, "argv", ["decode_edits.py", "--tiny", "--out", str(out), "--rounds", "1"]
    )
    bench.main()
    said = capsys.readouterr().out
    rows = json.loads(out.read_text())
    assert "| plain | 31.0 | 31.0 | 1.00x |" in said and len(rows) == len(said.splitlines()) - 2
    assert all(row["least"] <= row["passes"] < 31 for row in rows[1:])
