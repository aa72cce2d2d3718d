"""Runs that older code began are resumed by today's, in the same folder and to the same numbers."""

import json
import pathlib
import shutil
import tarfile

import pytest
from make_older_runs import ROOT, call
from older_cases import CASES, WORDS, differences, rows_of, words

from experiments import compare, digits, life, lm, neat, own, pomdp, rl, rnn
from experiments.app.runner import folder_name
from experiments.papers import moving_digits

HERE = pathlib.Path(__file__).parent / "older"
COMMANDS = {
    "compare": compare,
    "digits": digits,
    "life": life,
    "lm": lm,
    "moving_digits": moving_digits,
    "neat": neat,
    "own": own,
    "pomdp": pomdp,
    "rl": rl,
    "rnn": rnn,
}
QUICK = ("full", "population")
RTOL, ATOL = 2e-3, 1e-6
"""Sums of float32 in the order of another processor, through a few updates."""


@pytest.fixture(scope="module")
def expected():
    return json.loads((HERE / "expected.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(HERE / "runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flags_give_the_folder_that_they_gave(case, expected):
    config = COMMANDS[case.command].compose(*case.line(case.begin)[:-1])
    assert folder_name(config) == expected[case.name]["folder"]


def slowly(case):
    marks = [] if case.name in QUICK else [pytest.mark.slow]
    return pytest.param(case, marks=marks, id=case.name)


@pytest.mark.parametrize("case", [slowly(case) for case in CASES])
def test_a_run_is_resumed(case, expected, runs, tmp_path):
    for name in filter(None, (case.name, case.needs)):
        shutil.copytree(runs / name, tmp_path / name)
    (tmp_path / WORDS).write_text(words())
    said = call(ROOT, tmp_path, case, case.resume)
    assert not case.resumes or "(resuming at " in said, said
    assert differences(rows_of(tmp_path / case.name), expected[case.name]["rows"], RTOL, ATOL) == []
