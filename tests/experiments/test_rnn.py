"""`python -m experiments.rnn`: it learns, resumes, streams; tasks and files; sentences and exit codes."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from experiments import rnn
from experiments.app import runner
from experiments.app.sequences.series import SeriesConfig, open_task, read_series
from jaxpar.types import UsageError

TINY = (
    "data.task=adding data.length=8 data.batch_size=16 model.size=8 model.layers=1 train.steps=6 train.eval_every=3 "
    "train.save_every=3 model.method=newton hydra.run.dir=run cpu_devices=8"
).split()


def batches(**fields):
    task = open_task(SeriesConfig(batch_size=4, **fields), seed=3)
    return task, task.train(5)


# ---------------------------------------------------------------- the command


def test_it_trains_resumes_and_streams(main, trained):
    last = trained(*TINY, of="rnn", steps=6)
    assert last["train/converged"] == 1
    assert last["train/iterations"] >= 1 and last["train/residual"] <= 1
    streamed = main("mode=eval", "run=run", "cpu_devices=8", of="rnn")
    assert streamed.code == 0 and "validation/loss" in streamed.out, streamed
    assert float(streamed.out.split("difference of an output")[1]) < 1e-4


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            "data.task=weather",
            "data.task='weather' is unknown; legal are digits, digits_1d, file, copy",
        ),
        ("data.task=file", "data.task=file needs data.path= to name a .ts, .arff"),
        ("data.task=file data.path=none.ts", "data.path=none.ts is no file"),
        ("data.path=x.ts", "data.path is read by data.task=file alone, not by data.task=adding"),
        ("model.cell=rnn", "model.cell='rnn' is unknown; legal are para_gru, .* lmu, .* tcnca"),
        ("model.cell=gru model.heads=3", "heads=3 of cell gru do not divide size=8"),
        ("model.cell=gla", "cell=gla has a closed form, which no method solves; take method=auto"),
        ("model.cell=gla model.size=6", "size=6 must be a multiple of 4 heads, 4, for cell=gla"),
        (
            "data.task=mqar data.symbols=9",
            "data.symbols=9 of data.task=mqar is over the 16 keys or over data.length=8",
        ),
        ("model.method=newt", "method='newt' is unknown; legal are auto, newton"),
        ("model.method=sequential model.window=4", "window=4 does not fit method='sequential'"),
        ("model.sise=3", "unknown flag 'model.sise'; did you mean model.size"),
        ("train.steps=0", "train.steps=0 must be at least 1"),
        ("mesh.data=8 data.batch_size=12", "data.batch_size=12 does not divide over mesh.data=8"),
        ("mode=test", "mode='test' is unknown; legal are train, eval"),
        ("mode=eval", "mode=eval needs run= to name the folder of a run, not ''"),
        (
            "mode=eval run=nowhere",
            "mode=eval needs run= to name the folder of a run, not 'nowhere'",
        ),
        ("mode=eval run=.", "is no run folder: it has no config.yaml"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    import re

    assert re.search(sentence, main(*TINY, *flags.split(), of="rnn").sentence())


@pytest.mark.parametrize(
    "cell",
    [
        "block_recurrent",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("hgrn", "block_recurrent_lstm", "tcnca")
        ),
    ],
)
def test_mixers_of_a_stack_stream_what_they_make_of_the_whole(cell):
    sizes = "heads=2 size=8 width=8 mlp=8 layers=1 memory=3 theta=4".split()
    flags = "data.task=delayed_copy data.length=5 data.symbols=8 data.batch_size=4 train.steps=2".split()
    config = rnn.compose(f"model.cell={cell}", *flags, *(f"model.{size}" for size in sizes))
    task = open_task(config.data, 0)
    trainer = rnn.make_trainer(config, task)
    params = jax.tree.map(lambda x: 3 * x, jax.jit(trainer.init)(jax.random.key(0)).params)
    assert rnn.streaming_error(trainer, task, params) < 1e-4
    if cell != "hgrn":
        with pytest.raises(UsageError, match="model.size=8 is no multiple of model.heads=3"):
            rnn.make_trainer(
                dataclasses.replace(config, model=dataclasses.replace(config.model, heads=3)), task
            )


def test_how_a_recurrence_is_solved_is_no_part_of_a_runs_identity():
    usual = runner.identity(rnn.compose())
    assert (
        runner.identity(rnn.compose("model.method=sequential", "model.window=8", "train.steps=3"))
        == usual
    )
    for flag in ("model.cell=gru", "data.task=adding", "optimizer.learning_rate=1", "seed=2"):
        assert runner.identity(rnn.compose(flag)) != usual


@pytest.mark.slow
def test_digits_are_learned(main):
    pytest.importorskip("sklearn")
    said = main("hydra.run.dir=run", "cpu_devices=8", of="rnn", compiles=True)
    accuracy = float(said.out.split("validation/accuracy")[-1].split()[0])
    assert accuracy > 0.75, said.out


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize("task", ["adding", "copy", "selective_copy", "digits"])
def test_a_batch_is_a_pure_function_of_seed_and_step(task):
    if task == "digits":
        pytest.importorskip("sklearn")
    task, batch = batches(task=task, length=20, symbols=3)
    again, other = batches(task=task_name(task), length=20, symbols=3)[1], task.train(6)
    jax.tree.map(np.testing.assert_array_equal, batch, again)
    assert not np.array_equal(batch["inputs"], other["inputs"])
    assert batch["inputs"].shape == (4, task.length, task.inputs) and batch["weights"].any(1).all()
    for held_out in task.validation:
        assert held_out["inputs"].shape == batch["inputs"].shape


def task_name(task):
    text = task.text.split(":")[0]
    return {
        "adding problem": "adding",
        "copy memory": "copy",
        "selective copy": "selective_copy",
    }.get(text, "digits")


def test_the_adding_problem_adds_what_is_marked():
    _, batch = batches(task="adding", length=20)
    values, marks = batch["inputs"][..., 0], batch["inputs"][..., 1]
    assert (marks.sum(1) == 2).all() and (marks[:, :10].sum(1) == 1).all()
    np.testing.assert_allclose(batch["targets"][:, -1], (values * marks).sum(1), rtol=1e-6)
    assert batches(task="adding", length=1)[1]["inputs"].shape == (4, 1, 2)


@pytest.mark.parametrize("task", ["copy", "selective_copy"])
def test_what_is_asked_is_what_was_shown(task):
    _, batch = batches(task=task, length=20, symbols=5)
    shown = batch["inputs"].argmax(-1)
    for row in range(4):
        asked = batch["weights"][row] > 0
        assert asked.sum() == 5 and (shown[row][asked] == 9).all()
        symbols = shown[row][shown[row] < 8]
        np.testing.assert_array_equal(batch["targets"][row][asked], symbols)
        silence = shown[row][:25] == 8
        assert silence.sum() == 20


def test_digits_are_split_once_and_for_all():
    pytest.importorskip("sklearn")
    task, _ = batches(task="digits")
    seen = {row.tobytes() for step in range(100) for row in task.train(step)["inputs"]}
    held_out = [row.tobytes() for batch in task.validation for row in batch["inputs"]]
    assert task.outputs == 10 and task.length == 64 and not seen & set(held_out)
    assert sum(batch["weights"].sum() for batch in task.validation) == 359


# ---------------------------------------------------------------- files


SERIES, LABELS = np.arange(24.0).reshape(4, 3, 2), ["b", "a", "b", "a"]


def written(tmp_path, kind, series=SERIES):
    path = tmp_path / f"data.{kind}"
    rows = [",".join(map(str, row[:, 0])) for row in series]
    if kind == "npz":
        np.savez(path, x=series, y=np.array(LABELS))
    elif kind == "ts":
        lines = (":".join(",".join(map(str, row[:, d])) for d in range(2)) for row in series)
        head = "#a comment\n@problemName toy\n@timestamps false\n@classLabel true a b\n@data\n"
        path.write_text(
            head + "".join(f"{line}:{label}\n" for line, label in zip(lines, LABELS, strict=True))
        )
    elif kind == "arff":
        head = "@relation toy\n@attribute x numeric\n@attribute target {a,b}\n\n@data\n"
        path.write_text(
            head + "".join(f"{row},{label}\n" for row, label in zip(rows, LABELS, strict=True))
        )
    else:
        text = "".join(f"{label},{row}\n" for row, label in zip(rows, LABELS, strict=True))
        path.write_text(text.replace(",", "\t") if kind == "tsv" else "label,x0,x1,x2\n" + text)
    return str(path)


@pytest.mark.parametrize(
    "kind, channels", [("npz", 2), ("ts", 2), ("arff", 1), ("csv", 1), ("tsv", 1)]
)
def test_files_hold_series(tmp_path, kind, channels):
    series, labels = read_series(written(tmp_path, kind))
    np.testing.assert_array_equal(series, SERIES[..., :channels])
    assert list(labels) == LABELS
    path = written(tmp_path, kind)
    task = open_task(SeriesConfig(task="file", path=path, validation_path=path, batch_size=3), 0)
    assert (task.inputs, task.outputs, task.length, len(task.validation)) == (channels, 2, 3, 2)
    assert sum(batch["weights"].sum() for batch in task.validation) == 4


@pytest.mark.parametrize("kind", ["ts", "arff", "csv", "tsv"])
def test_a_byte_order_mark_is_no_part_of_a_table(tmp_path, kind):
    path = pathlib.Path(written(tmp_path, kind))
    series, labels = read_series(str(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    marked, same = read_series(str(path))
    np.testing.assert_array_equal(marked, series)
    assert list(same) == list(labels)


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("a.xls", "", r"ends in .xls; legal are .npz, .csv"),
        ("a.ts", "1,2:a\n", "is not a whole .ts file of labelled series: it has no @data line"),
        ("a.ts", "@data\n1,2:a\n1,2,3:b\n", "has series of 2 to 3 steps"),
        ("a.ts", "@data\n1,?:a\n1,2:b\n", "has missing or infinite values"),
        ("a.ts", "@timestamps true\n@data\n", "has time stamps"),
        ("a.arff", "@attribute x relational\n@data\n", "give the same data as .ts"),
        ("a.csv", "a,one,two\nb,1,x\n", "is not a whole .csv file"),
        ("a.npz", "no archive", "is not a whole .npz file"),
        ("a.csv", "", "have|do not fit|not a whole"),
    ],
)
def test_broken_files_are_told(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=sentence):
        read_series(str(tmp_path / name))
