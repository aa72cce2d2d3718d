"""Runs with other objectives or parts than usual: begun, stopped, resumed and written back."""

import json

import jax
import numpy as np
import pytest
from small_runs import SIZES

from experiments import generate, lm
from jaxpar.lm import from_hf, to_hf
from jaxpar.lm.text import open_corpora, training_batches
from jaxpar.types import UsageError


def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 99, 600)))
    return path


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_an_average_is_resumed_judged_and_exported(tmp_path, one_device, capsys):
    tuned = ("tuning.freeze=[embedding]", "tuning.ema=0.5", "tuning.layer_decay=0.9")
    flags = (*SIZES, f"data.path={text(tmp_path)}", *tuned)
    run, out = tmp_path / "run", tmp_path / "out"
    first = lm.train(lm.compose(*flags, "train.steps=1"), run)
    last = lm.train(lm.compose(*flags, "train.steps=2", "use_ema=true"), run)
    assert "resuming at step 1" in capsys.readouterr().out
    assert (last.state.params["embedding"] == first.state.params["embedding"]).all()
    trained = {name: x for name, x in last.state.params.items() if name != "embedding"}
    mean = jax.tree.map(lambda a, b: 0.5 * (a + b), first.state.average, trained)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        last.state.average,
        mean,
    )
    corpus_loss = {}
    for use in ("true", "false"):
        lm.export(
            lm.compose(
                "mode=export",
                f"run={run}",
                f"out={out}{use}",
                "checkpoint=newest",
                f"use_ema={use}",
            ),
            run,
        )
        read = from_hf(f"{out}{use}", dtype="float32")[1]
        same(read, last.state.averaged if use == "true" else last.state.params)
        judged = lm.compose("mode=eval", f"run={run}", "checkpoint=newest", f"use_ema={use}")
        corpus_loss[use] = lm.evaluate(judged, run)["validation/loss"]
    assert corpus_loss["true"] != corpus_loss["false"]
    config = generate.Config(run=str(run), checkpoint="newest", use_ema=True)
    same(generate.load(config.run, config, "run").params, last.state.averaged)


def test_an_average_that_is_not_kept_is_refused(tmp_path, one_device):
    flags = (*SIZES, f"data.path={text(tmp_path)}", "train.steps=1")
    with pytest.raises(UsageError, match="use_ema=true asks for an average .* give tuning.ema"):
        lm.train(lm.compose(*flags, "use_ema=true"), tmp_path / "run")


@pytest.mark.slow  # 20 s
def test_a_run_learns_a_teachers_laws_and_resumes(tmp_path, one_device, capsys):
    flags = (*SIZES, f"data.path={text(tmp_path)}")
    lm.train(lm.compose(*flags, "train.steps=1"), tmp_path / "teacher")
    taught = (
        f"teacher=run:{tmp_path / 'teacher'}",
        "objective.distil=0.3",
        "objective.label_smoothing=0.1",
    )
    whole = lm.train(lm.compose(*flags, *taught, "train.steps=2"), tmp_path / "whole")
    lm.train(lm.compose(*flags, *taught, "train.steps=1"), tmp_path / "run")
    parts = lm.train(lm.compose(*flags, *taught, "train.steps=2"), tmp_path / "run")
    same(parts.state.params, whole.state.params)
    assert whole.metrics["train/teacher_kl"] > 0
    to_hf(load_best(tmp_path / "teacher"), lm.compose(*flags).model, tmp_path / "other")
    with pytest.raises(UsageError, match="there is no tokenizer file"):
        lm.train(lm.compose(*flags, f"teacher=hf:{tmp_path / 'other'}"), tmp_path / "no")
    with pytest.raises(
        UsageError, match="teacher=x names no model; legal are hf:folder, run:folder, or nothing"
    ):
        lm.train(lm.compose(*flags, "teacher=x"), tmp_path / "no")
    other = tuple(flag for flag in flags if "embed" not in flag)
    lm.train(lm.compose(*other, "data.tokenizer=bpe:300", "train.steps=1"), tmp_path / "words")
    with pytest.raises(UsageError, match="has the tokenizer bpe:.*, and the model bytes"):
        lm.train(lm.compose(*flags, f"teacher=run:{tmp_path / 'words'}"), tmp_path / "no")


def load_best(folder):
    config = lm.compose("mode=eval", f"run={folder}")
    return lm.load(folder, config)[1]


@pytest.mark.slow  # 15 s
def test_preferences_are_learnt_beside_a_start_that_is_kept(tmp_path, one_device, capsys):
    pairs = [
        {"prompt": f"{i}?", "chosen": "yes" + "!" * (i % 3), "rejected": "no" * (1 + i % 2)}
        for i in range(40)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = (*SIZES, f"data.path={path}", "objective.kind=dpo", "train.eval_batches=0")
    first = lm.train(lm.compose(*flags, "train.steps=1"), tmp_path / "run")
    last = lm.train(lm.compose(*flags, "train.steps=9"), tmp_path / "run")
    assert "resuming at step 1" in capsys.readouterr().out
    same(last.state.reference, first.state.reference)
    assert last.metrics["validation/accuracy"] == 1 and last.metrics["validation/loss"] < 0.69
    with pytest.raises(UsageError, match="mode=eval of a run of preferences"):
        lm.evaluate(
            lm.compose("mode=eval", f"run={tmp_path / 'run'}", "checkpoint=newest"), tmp_path
        )


def test_flags_of_preferences_that_do_not_fit_are_refused(tmp_path, one_device):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"{i}?", "chosen": "a" * 9, "rejected": "b"}) + "\n"
            for i in range(40)
        )
    )
    flags = (*SIZES, f"data.path={path}", "objective.kind=dpo")
    with pytest.raises(
        UsageError, match="has 12 tokens with its prompt, and data.seq_len=4; give at least 11"
    ):
        lm.train(lm.compose(*flags, "data.seq_len=4", "train.steps=1"), tmp_path / "run")
    with pytest.raises(UsageError, match="data.pairs=true is of objective.kind=dpo"):
        lm.compose("data.pairs=true")
    with pytest.raises(UsageError, match="has no pairs; expected records"):
        lm.train(
            lm.compose(*SIZES, f"data.path={text(tmp_path)}", "objective.kind=dpo"), tmp_path / "no"
        )
    mixed = f"data.path='mix:1*{path}+2*{path}'"
    with pytest.raises(UsageError, match="pairs are neither packed nor mixed"):
        lm.train(lm.compose(*flags, mixed), tmp_path / "no")
    with pytest.raises(UsageError, match="data.layout=packed: a pair is two rows"):
        lm.compose(*flags, "data.layout=packed")


def test_pairs_of_a_preset_that_marks_documents(tmp_path, one_device):
    """preset=finetune has data.pack=true; a row of one document has nothing to mark."""
    path = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{i}?", "chosen": "a" * 9, "rejected": "b"} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (*SIZES, f"data.path={path}", "objective.kind=dpo", "train.steps=1")
    losses = [
        lm.train(lm.compose(*flags, pack), tmp_path / pack).metrics["validation/loss"]
        for pack in ("data.pack=true", "data.pack=false")
    ]
    assert losses[0] == losses[1]
    with pytest.raises(UsageError, match="pairs are neither packed nor mixed"):
        config = lm.compose(*flags, "data.pack=true").data
        training_batches(open_corpora(config, tmp_path / "cache"), config, 0)


def test_a_mixture_that_is_stopped_goes_on_with_the_same_batches_to_the_same_loss(
    tmp_path, one_device, monkeypatch
):
    for name, letters in (("a", "abc"), ("b", "xyz")):
        lines = [
            {"prompt": letters[i % 3] * (3 + i % 5), "completion": letters * (1 + i % 4)}
            for i in range(60)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = f"mix:3*{tmp_path / 'a.jsonl'}+1*{tmp_path / 'b.jsonl'}"
    flags = (*SIZES, f"data.path='{path}'", "data.pack=true", "train.steps=4")
    batches, opened = {}, lm.training_batches

    class Stopped(Exception):
        pass

    def recorded(stop):
        def training_batches(*options):
            windows = opened(*options)

            def draw(step, rows=slice(None)):
                if step == stop:
                    raise Stopped
                batches.setdefault(step, []).append(windows(step, rows))
                return batches[step][-1]

            return draw

        return training_batches

    monkeypatch.setattr(lm, "training_batches", recorded(None))
    whole = lm.train(lm.compose(*flags), tmp_path / "whole")
    monkeypatch.setattr(lm, "training_batches", recorded(2))
    with pytest.raises(Stopped):
        lm.train(lm.compose(*flags), tmp_path / "run")
    before = {step: len(drawn) for step, drawn in batches.items()}
    monkeypatch.setattr(lm, "training_batches", recorded(None))
    again = lm.train(lm.compose(*flags), tmp_path / "run")
    assert before == {0: 2, 1: 2, 2: 1, 3: 1}
    resumed_at = min(step for step, drawn in batches.items() if len(drawn) > before[step])
    assert 1 <= resumed_at <= 2 and all(len(drawn) >= 2 for drawn in batches.values())
    for drawn in batches.values():
        for other in drawn[1:]:
            same(other, drawn[0])
    same(again.state.params, whole.state.params)
    assert again.metrics["validation/loss"] == whole.metrics["validation/loss"]
    sources = [
        bytes(row.tolist()).strip(b"abc\0") == b""  # rows are padded with 0
        for drawn in batches.values()
        for row in drawn[0]["tokens"]
    ]
    assert sum(sources) == 3 * len(sources) // 4  # shares are exact over a round
