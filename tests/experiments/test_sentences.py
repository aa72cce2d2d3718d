"""What a command says where its output is cut short, by `| head`, and where its folder cannot be."""

import pathlib
import subprocess
import sys
import types

import pytest

from experiments import lm
from experiments.app.mistakes import sentence_of
from jaxpar.io.storage import storage_reason, unreadable_reason
from jaxpar.lm.text.tokenizer import Bytes
from jaxpar.types import UsageError

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
        sentence_of(BrokenPipeError(32, "Broken pipe"))
        == "whatever read the output has ended; > file keeps all of it."
    )


def test_where_runs_cannot_be_the_sentence_says_how_to_put_them_elsewhere():
    said = sentence_of(OSError(30, "Read-only file system", "runs/lm"))
    assert (
        said
        == "runs/lm cannot be opened or written: Read-only file system; hydra.run.dir= puts the run elsewhere."
    )
    assert "hydra" not in sentence_of(OSError(30, "Read-only file system", "texts/runs.txt"))


def test_a_sentence_is_found_among_causes_that_go_round():
    mistake = UsageError("width=0 is not legal.")
    error = ValueError("Error merging override")
    error.__cause__ = mistake
    mistake.__cause__ = error  # as OmegaConf leaves them under a debugger
    assert sentence_of(error) == "width=0 is not legal."
    assert storage_reason(error) is None
    assert "width" not in unreadable_reason(error)


def test_a_vocabulary_that_is_raised_is_told(capsys):
    many = types.SimpleNamespace(vocab_size=300)
    for flags, tokenizer, size, said in [
        (["model.vocab_size=10"], Bytes(), 256, "model.vocab_size=10 is raised to 256"),
        ([], Bytes(), 256, ""),
        ([], many, 320, ""),  # nobody asked for 256
    ]:
        config = lm.with_vocabulary(lm.compose(*flags), tokenizer)
        assert config.model.vocab_size == size
        out = capsys.readouterr().out
        assert said in out and bool(said) == bool(out), out
