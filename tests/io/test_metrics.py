import math
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.io.metrics import JsonlWriter, WandbWriter, Writers, open_writers, read_jsonl
from jaxpar.types import UsageError

NAMES = st.sampled_from(["train/loss", "validation/loss", "a b", "é"])
VALUES = st.dictionaries(NAMES, st.floats(allow_nan=True, allow_infinity=True))


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k] == b[k] or (math.isnan(a[k]) and math.isnan(b[k])) for k in a
    )


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, max_size=6), killed_at=st.integers(0, 6), torn=st.integers(0, 12))
def test_resumed_run_has_every_step_once(values, killed_at, torn):
    """Oracle: the rows of a run that nothing stopped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "metrics.jsonl"
        first = JsonlWriter(path, None)
        for step, row in enumerate(values):
            first.write(step, row)
        first.close()
        text = path.read_bytes()
        path.write_bytes(text[: max(0, len(text) - torn)])  # what a kill left
        resume = min(killed_at, text[: max(0, len(text) - torn)].count(b"\n") - 1)
        again = JsonlWriter(path, resume)
        assert len(read_jsonl(path)) == resume + 1
        for step, row in list(enumerate(values))[resume + 1 :]:
            again.write(step, row)
        again.close()
        rows = read_jsonl(path)
        assert [row.pop("step") for row in rows] == list(range(len(values)))
        assert all(same(row, value) for row, value in zip(rows, values, strict=True))


def test_every_write_is_on_disk_at_once_and_valid_json(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl", None)
    writer.write(
        3, {"train/loss": math.nan, "up": math.inf, "down": -math.inf, "x": jax.numpy.float32(0.5)}
    )
    text = (tmp_path / "m.jsonl").read_text()
    assert text == '{"step": 3, "train/loss": "nan", "up": "inf", "down": "-inf", "x": 0.5}\n'
    writer.close()


def test_starting_over_drops_the_lines_of_before(tmp_path):
    for _ in range(2):
        writer = open_writers(tmp_path)
        writer.write(1, {"x": 1})
        writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1.0}]


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", '{"x": 1}', '{"step": 1.5}', '{"step": 1, "x": "much"}', '{"step": 1, "x": []}'],
)
def test_foreign_line_is_named(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(UsageError, match=f"line 2 of {path}"):
        read_jsonl(path)
    with pytest.raises(UsageError, match=f"line 2 of {path}"):
        JsonlWriter(path, 1)
    assert path.read_text().count("\n") == 3  # not touched
    with pytest.raises(UsageError, match="does not exist"):
        read_jsonl(tmp_path / "none")


def test_unknown_and_missing_services_are_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(
        UsageError, match="cannot go to 'tensorbord'; choose among tensorboard, wandb$"
    ):
        open_writers(tmp_path, ("tensorbord",))
    for package, extra in (("tensorboardX", "tensorboard"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
        with pytest.raises(
            UsageError, match=rf"need {package}: pip install \"jaxpar\[{extra}\]\"$"
        ):
            open_writers(tmp_path, (extra,))


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writers = open_writers(tmp_path / "run", ("tensorboard",))
    writers.write(0, {"x": 1.0})
    writers.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboardX's own
def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    writers = open_writers(tmp_path, ("tensorboard",), resume_step=None)
    writers.write(7, {"train/loss": 2.5})
    writers.close()
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (tmp_path / "tensorboard").iterdir()
    data, scalars = path.read_bytes(), []
    while data:  # length, its checksum, an event, its checksum
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    assert scalars == [(7, "train/loss", 2.5)]
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 7, "train/loss": 2.5}]


def test_wandb_resumes_the_run_of_that_name(tmp_path, monkeypatch):
    calls = []

    def init(**options):
        calls.append(options)
        return SimpleNamespace(
            log=lambda *a, **k: calls.append((a, k)), finish=lambda: calls.append("finished")
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    writer = WandbWriter("p", "lm/small seed=3", {"lr": 1}, tmp_path)
    writer.write(2, {"x": 1})
    writer.close()
    options, logged, finished = calls
    assert (
        options["id"] == "lm-small-seed-3"
        and options["resume"] == "allow"
        and options["config"] == {"lr": 1}
    )
    assert logged == (({"x": 1.0},), {"step": 2}) and finished == "finished"


def test_all_writers_close_when_one_cannot(tmp_path):
    closed = []

    def fail():
        raise RuntimeError("the network is gone")

    with pytest.raises(RuntimeError, match="network"):
        Writers(
            [SimpleNamespace(close=lambda: closed.append(1)), SimpleNamespace(close=fail)]
        ).close()
    assert closed == [1]
