import io
import re
import sys

import jax
import pytest

from jaxpar.io.progress import ProgressLabels, _duration, _short, open_progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Unreadable:
    """An array whose value is not there yet: reading it would stop the device."""

    def __float__(self):
        raise AssertionError("read although it is not shown")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    return Terminal()


def run(progress, clock, steps, seconds):
    for step in steps:
        progress.update(step, {"loss": 1 / step})
        clock.now += seconds


def test_log_gets_first_last_and_every_tenth():
    out, clock = io.StringIO(), Clock()
    labels = ProgressLabels(description="lm", tokens_per_step=2000)
    with open_progress(1000, labels=labels, stream=out, clock=clock) as progress:
        clock.now += 300  # compiling
        run(progress, clock, range(1, 1001), 0.002)
    lines = out.getvalue().splitlines()
    assert [int(re.search(r"(\d+)/1000", line)[1]) for line in lines] == [1, *range(100, 1001, 100)]
    assert lines[0] == "lm  1/1000 steps  loss 1"
    assert lines[5] == "lm  500/1000 steps  loss 0.002  500 steps/s  1M tok/s  0:01 left"
    assert lines[-1] == "lm  1000/1000 steps  loss 0.001  500 steps/s  1M tok/s"


def test_slow_run_logs_every_ten_seconds_and_where_it_stopped():
    out, clock = io.StringIO(), Clock()
    with open_progress(10**6, start=50, stream=out, clock=clock) as progress:
        run(progress, clock, range(51, 96), 1.0)
    shown = [int(line.split("/")[0]) for line in out.getvalue().splitlines()]
    assert shown == [51, 61, 71, 81, 91, 95]


def test_rate_looks_back_five_seconds():
    out, clock = io.StringIO(), Clock()
    with open_progress(400, stream=out, clock=clock) as progress:
        run(progress, clock, range(1, 201), 0.1)
        run(progress, clock, range(201, 241), 0.5)
        assert "240/400 steps  loss 0.004167  2 steps/s  1:20 left" in out.getvalue()
        run(progress, clock, range(241, 281), 8.0)
    assert "280/400 steps  loss 0.003571  8 s/step  16:00 left" in out.getvalue()


def test_values_are_read_only_when_shown():
    out, clock = io.StringIO(), Clock()
    with open_progress(100, stream=out, clock=clock) as progress:
        progress.update(1, {"train/loss": 2.5})
        progress.update(2, {"train/loss": Unreadable()})
        progress.update(3, {"train/loss": jax.numpy.float32(1.5)})
    assert out.getvalue() == "1/100 steps  loss 2.5\n3/100 steps  loss 1.5\n"


def test_other_numbers_are_shown_when_asked_for():
    out = io.StringIO()
    labels = ProgressLabels(shown=("best", "species"))
    with open_progress(1, labels=labels, stream=out) as progress:
        progress.update(1, {"train/best": 9.0, "loss": 1.0, "species": 3})
    assert out.getvalue() == "1/1 steps  best 9  species 3\n"


def printed_lines(*args, **options):
    """Returns the lines of two steps; the second takes 2 s."""
    out = io.StringIO()
    clock = Clock()
    with open_progress(2, *args, stream=out, clock=clock, **options) as progress:
        progress.update(1, {"best": 3.0})
        clock.now += 2
        progress.update(2, {"best": 4.0})
    return out.getvalue()


def test_older_arguments_are_fields_of_the_labels():
    words = {"description": "evolving", "unit": "generation"}
    more = {"shown": ("best",), "tokens_per_step": 6, "token": "gene"}
    want = printed_lines(labels=ProgressLabels(**words, **more))
    assert want.endswith("evolving  2/2 generations  best 4  2 s/generation  3 gene/s\n")
    calls = (
        lambda: printed_lines(0, *words.values(), **more),
        lambda: printed_lines(0, "evolving", unit="generation", **more),
        lambda: printed_lines(**words, **more),
    )
    for older in calls:
        with pytest.warns(FutureWarning, match=r"open_progress\(.*\) is now \(.*") as warned:
            got = older()
        assert len(warned) == 1 and warned[0].filename == __file__
        assert got == want
    for name in (words | more).keys():
        assert f"labels.{name}" in str(warned[0].message)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        printed_lines(colour="red")
    with pytest.raises(TypeError, match="1 positional arguments too many"):
        printed_lines(0, "evolving", "generation", "red")


def test_bar_shows_numbers_and_leaves_notes_whole(terminal):
    clock = Clock()
    labels = ProgressLabels(description="[red]lm", tokens_per_step=10**6)
    with open_progress(50, labels=labels, stream=terminal, clock=clock) as progress:
        run(progress, clock, range(1, 41), 0.5)
        progress.note("saved [bold]step 40 to /a/b")
        run(progress, clock, range(41, 51), 0.5)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.getvalue())
    assert "40/50 steps  loss 0.025  2 steps/s  2M tok/s  0:05 left" in text
    assert "\nsaved [bold]step 40 to /a/b\n" in text.replace("\r", "\n")
    assert re.search(r"\[red\]lm ━+ 50/50 steps  loss 0.02  2 steps/s", text)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_terminal_is_restored(terminal, error):
    with pytest.raises(error), open_progress(5, stream=terminal) as progress:
        progress.update(1, {})
        assert terminal.getvalue().count("\x1b[?25l") == 1  # cursor hidden
        raise error
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("1/5 steps")
    assert terminal.getvalue().rstrip("\x1b[?25h").endswith("\n")


def test_bar_draws_ten_times_a_second_at_most(terminal):
    clock = Clock()
    with open_progress(10**5, stream=terminal, clock=clock) as progress:
        run(progress, clock, range(1, 10**4 + 1), 1e-4)
        assert terminal.getvalue().count("loss") <= 12


@pytest.mark.parametrize("without", ["rich", "TERM"])
def test_plain_lines_without_rich_or_a_real_terminal(terminal, monkeypatch, without):
    if without == "rich":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setenv("TERM", "dumb")
    with open_progress(5, stream=terminal) as progress:
        progress.update(1, {})
    assert terminal.getvalue() == "1/5 steps\n"


def test_other_processes_print_nothing(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    out = io.StringIO()
    with open_progress(2, stream=out) as progress:
        progress.update(1, {})
        progress.note("here")
        progress.update(2, {})
    assert out.getvalue() == ""


def test_numbers_are_for_people():
    assert [_short(x) for x in (2.0, 12.34, 999.4, 1234, 1.2e6, 999_900, 3e9, 5e12)] == [
        "2", "12.3", "999", "1.23k", "1.2M", "1M", "3G", "5T",
    ]  # fmt: skip
    assert [_duration(x) for x in (0, 59.6, 151, 3600, 36 * 3600 + 61)] == [
        "0:00", "1:00", "2:31", "1:00:00", "36:01:01",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # the kernel client's own
def test_notebook_has_one_changing_line():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    code = """
import time
from jaxpar.io.progress import ProgressLabels, open_progress
with open_progress(3, labels=ProgressLabels(description="lm")) as progress:
    for step in (1, 2, 3):
        progress.update(step, {"loss": 1 / step})
        time.sleep(0.02)
    progress.note("done")
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=60).execute()
    line, printed = notebook.cells[0].outputs
    assert re.match(r"lm  3/3 steps  loss 0.3333  \d", line["data"]["text/plain"])
    assert printed["text"] == "done\n"
    assert "ipywidgets" not in sys.modules
