"""Runs in each layout: defaults of new ones, what older ones keep, resuming, validation."""

import json

import numpy as np
import pytest
import small_runs

from experiments import lm
from experiments.app import runner
from experiments.app.lm import validation
from jaxpar.lm.text import Windows
from jaxpar.lm.text.row_layouts import DocumentRows, Stream
from jaxpar.types import UsageError

SIZES = (*small_runs.SIZES, "data.seq_len=32", "train.eval_batches=0")


@pytest.fixture
def batches_drawn(monkeypatch):
    """The batches of runs by number, and what draws them last."""
    batches, opened = {}, lm.training_batches

    def training_batches(*options):
        rows = opened(*options)
        batches["of"] = rows

        def draw(step, part=slice(None)):
            return batches.setdefault((len(batches), step), rows(step, part))

        return draw

    monkeypatch.setattr(lm, "training_batches", training_batches)
    return batches


def completions(path, count=60):
    lines = [
        {"prompt": "ask" * (1 + i % 5), "completion": "answer"[: 1 + i % 6]} for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def layout_of(folder):
    return runner.load(folder, lm.Config).data.layout


def test_a_new_run_of_completions_is_packed_and_resumes(
    tmp_path, one_device, batches_drawn, capsys
):
    flags = (*SIZES, f"data.path={completions(tmp_path / 'a.jsonl')}")
    usual = lm.compose(*flags)
    assert "data.layout" not in runner.identity(usual)
    run = tmp_path / "run"
    lm.train(lm.compose(*flags, "train.steps=1"), run)
    rows = batches_drawn["of"]
    assert isinstance(rows, DocumentRows) and rows.packed and layout_of(run) == "packed"
    assert "layout     packed" in capsys.readouterr().out
    lm.train(lm.compose(*flags, "train.steps=2"), run)
    assert "resuming at step 1" in capsys.readouterr().out and layout_of(run) == "packed"
    judged = lm.evaluate(lm.compose("mode=eval", f"run={run}", "checkpoint=newest"), run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert np.isclose(judged["validation/loss"], found[-1], rtol=1e-5)


def test_a_run_of_before_there_were_layouts_keeps_its_windows(
    tmp_path, one_device, batches_drawn, capsys
):
    """Its configuration does not have the field, nor does the identity in its checkpoints."""
    path = completions(tmp_path / "a.jsonl")
    flags = (*SIZES, f"data.path={path}")
    run = tmp_path / "run"
    run.mkdir()
    older = lm.compose(*flags, "train.steps=1")
    runner.write_start(run, older)
    kept = [
        x
        for x in (run / "config.yaml").read_text().splitlines()
        if "layout:" not in x or x[0] != " "
    ]
    (run / "config.yaml").write_text("\n".join(kept) + "\n")
    assert "  layout:" not in (run / "config.yaml").read_text() and layout_of(run) == ""
    lm.train(older, run)
    assert type(batches_drawn["of"]) is Windows and layout_of(run) == ""
    lm.train(lm.compose(*flags, "train.steps=2"), run)
    assert type(batches_drawn["of"]) is Windows and "resuming at step 1" in capsys.readouterr().out


def test_plain_text_is_a_stream_to_its_end(tmp_path, one_device, batches_drawn):
    path = tmp_path / "text"
    path.write_text("".join(f"word {i}\n" for i in range(60)))
    lm.train(lm.compose(*SIZES, f"data.path={path}", "train.steps=1"), tmp_path / "run")
    assert type(batches_drawn["of"]) is Stream and layout_of(tmp_path / "run") == "stream"


def test_a_layout_by_flag(tmp_path, one_device, batches_drawn):
    path = completions(tmp_path / "a.jsonl")
    flags = (*SIZES, f"data.path={path}", "train.steps=1")
    lm.train(lm.compose(*flags, "data.layout=rows"), tmp_path / "rows")
    assert not batches_drawn["of"].packed and layout_of(tmp_path / "rows") == "rows"
    names = [runner.folder_name(lm.compose(*flags, f"data.layout={x}")) for x in ("rows", "packed")]
    assert len({*names, runner.folder_name(lm.compose(*flags))}) == 3
    with pytest.raises(UsageError, match="document 30 of its split has 21 tokens, .*layout=rows"):
        lm.train(lm.compose(*flags, "data.seq_len=16", "data.layout=rows"), tmp_path / "no")
    with pytest.raises(UsageError, match="there are 2 layouts for 1 sources"):
        lm.train(lm.compose(*flags, "data.layout=rows+packed"), tmp_path / "no")


def test_validation_has_the_layout_of_training(tmp_path, one_device, monkeypatch):
    """Its loss is a mean over held-out completions; none sees another."""
    path = completions(tmp_path / "a.jsonl")
    placed, place = [], validation.place

    def recorded(config, rows):
        placed.append(rows(slice(None)))
        return place(config, rows)

    monkeypatch.setattr(validation, "place", recorded)
    for batches in (0, 2):
        flags = (*SIZES, f"data.path={path}", "train.steps=1", f"train.eval_batches={batches}")
        lm.train(lm.compose(*flags), tmp_path / f"run{batches}")
        assert all({"segments", "positions"} <= set(batch) for batch in placed)
        if not batches:
            assert sum(batch["weights"].sum() for batch in placed) == sum(
                1 + i % 6 for i in range(48, 60)
            )
        placed.clear()
