"""Output that nobody reads to its end, such as by `| head`, is no error of help, and one sentence of a run."""

import pathlib
import subprocess
import sys

import pytest

from experiments._mistakes import sentence_of

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("flags", ["", "neat --help", "hosted --help"])
def test_help_that_is_cut_short_says_nothing_more(flags):
    line = [sys.executable, "-m", "experiments", *flags.split()]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(line, cwd=ROOT, **pipes) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0
    assert [row for row in said.splitlines() if not row.startswith("starting: ")] == []


def test_a_run_whose_reader_is_gone_says_so():
    assert (
        sentence_of(BrokenPipeError(32, "Broken pipe")) == "whatever read the output has ended; > file keeps all of it."
    )
