"""Every notebook runs at its small size, and its .ipynb twin says the same as its source."""

import os
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
