"""Every notebook runs at its small size and is set up by the same cell; its .ipynb twin says the same as its source."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
IN_CI = {"01_sharded_language_model"}

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def content(notebook):
    """What a reader sees: kinds and texts of the cells."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_there_are_notebooks():
    assert IN_CI <= {source.stem for source in SOURCES}
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {source.stem for source in SOURCES}


@each_notebook
def test_twin_is_the_source_without_outputs(source):
    twin = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(twin)
    assert content(twin) == content(jupytext.read(source)), "run `make notebooks`"
    code = [cell for cell in twin.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


def set_up(source):
    """The cell with the heading "Set-up" and the code below it."""
    cells = content(jupytext.read(source))
    (place,) = [number for number, (_, text) in enumerate(cells) if text.startswith("## Set-up\n")]
    return cells[place : place + 2]


def test_all_are_set_up_by_the_same_short_cell():
    (_, words), (kind, code) = set_up(SOURCES[0])
    assert kind == "code" and len(words.splitlines()) <= 6 and len(code.splitlines()) <= 16
    assert [source.name for source in SOURCES if set_up(source) != set_up(SOURCES[0])] == []


@each_notebook
def test_what_it_compiles_is_kept(source):
    code = [text for kind, text in content(jupytext.read(source)) if kind == "code"]
    assert "\nkeep_programs()  # what" in code[1] and "keep_programs" not in code[0]  # set-up, then imports


@pytest.mark.parametrize("below", ["", "notebooks"])
def test_the_set_up_finds_a_checkout(below, monkeypatch):
    monkeypatch.chdir(ROOT / below)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(subprocess, "run", None)
    exec(set_up(SOURCES[0])[1][1], {})
    assert sys.path == [str(ROOT), "elsewhere"]


def test_the_set_up_clones_and_installs_where_there_is_no_checkout(monkeypatch, tmp_path):
    code, ran = set_up(SOURCES[0])[1][1], []

    def clone(command, check):
        ran.append(command)
        if command[0] == "git":
            (tmp_path / "jaxpar" / "experiments").mkdir(parents=True)
            (tmp_path / "jaxpar" / "experiments" / "lm.py").touch()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(subprocess, "run", clone)
    with pytest.raises(AssertionError, match="set REPOSITORY to its git address"):
        exec(code, {})
    told = code.replace('REPOSITORY = ""', 'REPOSITORY = "address"')
    with pytest.raises(AssertionError, match="Restart session"):
        exec(told, {})  # JAX was imported by the tests, so it may be another one than the one installed
    assert [command[0] for command in ran] == ["git", sys.executable] and ran[0][-2] == "address"
    assert ran[1][-1] == f"{tmp_path / 'jaxpar'}[notebooks]"
    exec(code, {})  # after the restart: what was cloned is found
    assert sys.path == [str(tmp_path / "jaxpar"), "elsewhere"] and len(ran) == 2


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, id=s.stem, marks=() if s.stem in IN_CI else pytest.mark.slow) for s in SOURCES],
)
def test_runs_small(source, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("FAST", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = jupytext.read(source)
    resources = {"metadata": {"path": str(tmp_path)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jupyter_client and zmq warn of their own event loops
        nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3", resources=resources).execute()
    assert "assert " in "".join(cell.source for cell in notebook.cells[-1:]), "a notebook ends by asserting its claim"
    assert notebook.cells[-1].execution_count
