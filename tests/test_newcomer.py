"""What README shows can be typed: `make newcomer` hears what is slow, silent or red, and its short half runs here."""

import os
import re
from pathlib import Path

import newcomer
import pytest
import release
from newcomer import Line, Seen

from jaxpar.commands import __main__ as command


def test_lines_are_those_of_the_blocks_with_their_times():
    page = (
        "```bash\nmake run   # about two minutes on 2 cores\na --b \\\n  c=1\n"
        "# no\n\nmake run\n```\n```text\nno\n```\n"
    )
    assert newcomer.lines_of(page) == [Line("make run", 120), Line("a --b    c=1", 0)]
    shown = newcomer.lines_of((newcomer.ROOT / "README.md").read_text())
    assert {"jaxpar", "jaxpar lm", "make run"} <= {line.text for line in shown} and len(shown) > 10
    assert shown[0].text.startswith("pip install"), "pip comes first"


@pytest.mark.parametrize(
    ("comment", "seconds"),
    [
        ("", 0),
        ("half an hour on two cores", 1800),
        ("about a minute", 60),
        ("2.5 seconds", 2.5),
        ("8 copies", 0),
        ("24 s", 24),
        ("8 seeds", 0),
    ],
)
def test_times_are_read(comment, seconds):
    assert newcomer.seconds_in(comment) == seconds


def test_what_is_slow_silent_or_red_is_said():
    line = Line("x", 10)
    assert newcomer.verdict(line, Seen(19, 4.9, 0, "")) == []
    assert newcomer.verdict(line, Seen(21, 5.1, 3, "")) == ["RED", "silent", "slow"]
    assert newcomer.verdict(line, Seen(60, 0, 0, "", 19)) == [], "others had the cores"
    assert newcomer.verdict(Line("x"), Seen(299, 0, 0, "")) == []
    assert newcomer.verdict(Line("x", name="Python of a page"), Seen(9, 8, 0, "")) == []


def test_what_another_machine_or_the_reader_has_is_left_out():
    page = "```bash\na   # on one H100, a minute\nb data.path=corpus/\nc   # two CPU cores\n```\n"
    assert [line.text for line in newcomer.lines_of(page)] == ["b data.path=corpus/", "c"]
    left = (
        "b data.path=corpus/",
        "b path=sums.jsonl n=1",
        "b data.path=mine.jsonl",
        "d run=runs/x/...",
        "e preset=llama_1b mesh.data=1",
        "python f.py --deer FOLDER",
    )
    assert all(newcomer.BROUGHT.search(line) for line in left)
    run = (
        "g preset=llama_8b topology=v5p:4x4x4",
        "h prompts=prompts.jsonl out=texts.jsonl draft=copy",
        "jaxpar lm train.steps=20",
    )
    assert not any(newcomer.BROUGHT.search(line) for line in run)


def test_pages_with_python_and_notebooks_have_lines(tmp_path):
    (line,) = newcomer.lines_for("docs/howto/cell.md", tmp_path)
    assert (
        line.name == "Python of docs/howto/cell.md"
        and "import" in Path(line.text.split()[1]).read_text()
    )
    (line,) = newcomer.lines_for("notebooks/05_neat.py", tmp_path)
    assert line.text.startswith("FAST=1 ") and line.name == "notebooks/05_neat.py"
    kinds = {name.split("/")[-2] if "/" in name else "" for name in newcomer.PAGES}
    assert kinds == {"", "docs", "howto", "notebooks"} and len(newcomer.PAGES) > 20


def test_what_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(newcomer, "LIMIT_S", 0.3)
    seen = newcomer.watch("echo a; sleep 60 & sleep 60", tmp_path, dict(os.environ))
    assert seen.code and seen.seconds < 20 and "RED" in newcomer.verdict(Line("x"), seen)


def test_time_of_processors_is_counted(tmp_path):
    seen = newcomer.watch(
        "sleep 0.3; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done", tmp_path, dict(os.environ)
    )
    assert 0 < seen.processor < seen.seconds - 0.2


def test_silence_is_heard(tmp_path):
    seen = newcomer.watch(
        "sleep 0.2; echo a; sleep 0.2; echo b >&2; exit 3", tmp_path, dict(os.environ)
    )
    assert seen.code == 3 and seen.last == "a\nb\n" and 0.19 < seen.silence < seen.seconds - 0.19


def test_the_short_half_runs(capsys):
    assert newcomer.main(["--short"]) == 0, capsys.readouterr().out
    assert re.findall(
        r"(?:ok|silent) +(jaxpar(?: lm --help)?)$", capsys.readouterr().out, re.MULTILINE
    ) == [
        "jaxpar",
        "jaxpar lm --help",
    ]


def test_a_release_runs_a_command_of_every_pillar():
    named = {flags.split()[0] for flags in release.COMMANDS}
    assert (
        named <= command.commands().keys() and {"lm", "pomdp", "neat", "rl", "life", "own"} <= named
    )


@pytest.mark.slow  # an hour and a half on two cores
@pytest.mark.timeout(20_000)
def test_what_pages_and_notebooks_show_runs():
    assert newcomer.main([]) == 0
