"""Every notebook runs at its small size and is set up by the same cell; its .ipynb twin has what that gave."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jupytext
import nbformat
import pytest
import write_notebooks
from write_notebooks import code_cells, colab, digest, repository, with_address

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
IN_CI = {"01_sharded_language_model"}
A_NOTEBOOK, ALL = 300_000, 3_000_000
"""The most bytes of a twin, and of all: every execution adds as much to the repository."""
A_MACHINE = re.compile(
    r"/(home|root|tmp|work|Users|usr|var|opt|mnt|content)/\w|\b[Ww]arning\b|Traceback"
)
"""What outputs do not show: folders of whoever executed them, and what went wrong there."""

each_notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)


def content(notebook):
    """Kinds and texts of the cells."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def title(source):
    return re.search(r"^# # (.*)$", source.read_text(), re.MULTILINE)[1]


def test_there_are_notebooks():
    assert IN_CI <= {source.stem for source in SOURCES}
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {
        source.stem for source in SOURCES
    }
    assert sum(source.with_suffix(".ipynb").stat().st_size for source in SOURCES) < ALL


@each_notebook
def test_twin_is_the_source_with_what_it_gave(source):
    twin, notebook = (
        nbformat.read(source.with_suffix(".ipynb"), as_version=4),
        jupytext.read(source),
    )
    nbformat.validate(twin)
    assert content(twin) == content(notebook), "run `make notebooks`"
    assert twin.metadata["jaxpar"]["code"] == digest(notebook), (
        "its code has changed: run `make notebooks`"
    )
    code = code_cells(twin)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    assert any("image/png" in output.get("data", {}) for output in outputs), (
        "a notebook has pictures"
    )
    texts = [output.get("text", "") for output in outputs]
    texts += [
        text
        for o in outputs
        for kind, text in o.get("data", {}).items()
        if not kind.startswith("image/")
    ]
    assert [found[0] for text in texts if (found := A_MACHINE.search(text))] == []
    assert "assert " in twin.cells[-1].source, "a notebook ends by asserting its claim"
    assert source.with_suffix(".ipynb").stat().st_size < A_NOTEBOOK


def test_titles_are_those_of_the_lists():
    listed = re.findall(
        r"^  - \[(\d\d): (.*)\]\(notebooks/(\w+)\.ipynb\)$", (ROOT / "README.md").read_text(), re.M
    )
    assert listed == [(source.stem[:2], title(source), source.stem) for source in SOURCES]
    in_docs = re.findall(
        r"^notebooks/(\w+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE
    )
    assert in_docs == [source.stem for source in SOURCES]


# ---------------------------------------------------------------- the address


@each_notebook
def test_the_address_is_that_of_the_project(source):
    text = source.read_text()
    assert text == with_address(text, repository(), source.stem), "run `make notebooks`"
    assert content(jupytext.read(source))[0] == ("markdown", colab(repository(), source.stem))
    assert f'REPOSITORY = "{repository()}"' in set_up(source)[1][1]


def test_a_new_address_replaces_the_old_one():
    text, github = SOURCES[0].read_text(), "https://github.com/someone/something"
    moved = with_address(text, github, "00_tour")
    link = "https://colab.research.google.com/github/someone/something/blob/main/notebooks/00_tour.ipynb"
    assert moved.count(f"[Open in Colab]({link})") == 1 and f'\nREPOSITORY = "{github}"\n' in moved
    assert repository() not in moved and with_address(moved, repository(), "00_tour") == text
    assert f"]({link})" in colab(f"{github}.git", "00_tour")
    assert "example.com" in colab("https://example.com/there", "00_tour")  # which Colab cannot open


# ---------------------------------------------------------------- what writes them


SMALL = """# %% [markdown]
# # Title

# %% [markdown]
# ## Set-up
# Words.

# %%
REPOSITORY = ""

# %%
import os
print(os.environ["FAST"], os.getcwd() + "/a")
print("12\\r345")
"""


def test_a_twin_is_executed_when_its_code_has_changed(monkeypatch, tmp_path):
    source, twin = tmp_path / "00_small.py", tmp_path / "00_small.ipynb"
    source.write_text(SMALL)
    monkeypatch.setattr(write_notebooks, "FULL_SIZE", {"another"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jupyter_client and zmq warn of their own event loops
        assert write_notebooks.write(source, False).startswith("executed")
    last = nbformat.read(twin, as_version=4).cells[-1]
    assert [output.text for output in last.outputs] == [
        "1 a\n345\n"
    ]  # no folder, and a line written over once

    def warn(notebook, fast):
        code_cells(notebook)[-1].outputs = [
            nbformat.v4.new_output("stream", name="stderr", text="UserWarning: no")
        ]

    monkeypatch.setattr(write_notebooks, "execute", warn)
    source.write_text(
        source.read_text().replace("Title", "Other").replace("REPOSITORY =", "x = 1\nREPOSITORY =")
    )
    assert write_notebooks.write(source, False).startswith("kept")
    kept = twin.read_text()
    assert nbformat.reads(kept, 4).cells[-1] == last and "# Other" in kept and "x = 1" in kept
    source.write_text(source.read_text().replace("345", "6"))
    assert "UserWarning: no" in write_notebooks.write(source, False) and twin.read_text() == kept


# ---------------------------------------------------------------- the set-up cell


def set_up(source):
    """The cell with the heading "Set-up" and the code below it."""
    cells = content(jupytext.read(source))
    (place,) = [
        number for number, (_, text) in enumerate(cells) if text.startswith(write_notebooks.SET_UP)
    ]
    return cells[place : place + 2]


def test_all_are_set_up_by_the_same_short_cell():
    (_, words), (kind, code) = set_up(SOURCES[0])
    # Twenty lines: it finds a checkout, an archive or the address, installs what is missing, and asks for a restart.
    assert kind == "code" and len(words.splitlines()) <= 6 and len(code.splitlines()) <= 20
    assert [source.name for source in SOURCES if set_up(source) != set_up(SOURCES[0])] == []


@each_notebook
def test_what_it_compiles_is_kept(source):
    code = [text for kind, text in content(jupytext.read(source)) if kind == "code"]
    assert (
        "\nkeep_programs()  # what" in code[1] and "keep_programs" not in code[0]
    )  # set-up, then imports


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A folder, and a pip that says what it is asked; `whole` says whether all is installed, `works` whether it can."""
    installed = [place for place in sys.path if place]
    seen = SimpleNamespace(installed=installed, folder=tmp_path, asked=[], whole=False, works=True)

    def pip(command, **_):
        if "--no-index" in command:
            return SimpleNamespace(returncode=int(not seen.whole))
        seen.asked.append(command[command.index("--quiet") + 1 :])
        return SimpleNamespace(returncode=int(not seen.works))

    def run_cell():
        exec(set_up(SOURCES[0])[1][1], {})
        return seen.asked

    seen.run_cell = run_cell
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *installed])
    monkeypatch.setattr(subprocess, "run", pip)
    return seen


@pytest.mark.parametrize("below", ["", "notebooks"])
def test_the_set_up_finds_a_checkout(below, machine, monkeypatch):
    machine.whole = True
    monkeypatch.chdir(ROOT / below)
    assert machine.run_cell() == [] and sys.path == [str(ROOT), "", *machine.installed]
    machine.whole = False  # a clone that was not installed, or without the extra
    assert machine.run_cell() == [["--editable", f"{ROOT}[notebooks]"]]


def test_the_set_up_leaves_alone_what_is_installed(machine):
    machine.whole = True
    assert machine.run_cell() == [] and sys.path == machine.installed


def test_the_set_up_installs_from_the_address_or_an_archive(machine):
    address = f"jaxpar[notebooks] @ git+{repository()}"
    assert machine.run_cell() == [[address]] and sys.path == machine.installed
    broken = (
        machine.folder / "jaxpar" / "jaxpar"
    )  # a clone that broke off, which must not be imported
    broken.mkdir(parents=True)
    (broken / "__init__.py").touch()
    assert machine.run_cell() == [[address]] * 2 and sys.path == machine.installed
    archive = machine.folder / "jaxpar-main (1).zip"
    archive.touch()
    assert (
        machine.run_cell()[2:] == [[f"jaxpar[notebooks] @ {archive.as_uri()}"]]
        and "%20" in archive.as_uri()
    )


def test_the_set_up_says_what_to_do(machine, monkeypatch):
    machine.works = False
    with pytest.raises(
        AssertionError, match="put an archive of jaxpar beside the notebook, or correct REPOSITORY"
    ):
        machine.run_cell()
    machine.works = True
    monkeypatch.setattr(jax, "__version__", "0.4.1")
    for machine.whole in (False, True):  # also when the cell is run again without the restart
        with pytest.raises(AssertionError, match="Restart session"):
            machine.run_cell()


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(s, id=s.stem, marks=() if s.stem in IN_CI else pytest.mark.slow)
        for s in SOURCES
    ],
)
def test_runs_small(source, monkeypatch):
    pytest.importorskip("nbclient")
    if source.stem in IN_CI:  # whose programs run for seconds
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    notebook = jupytext.read(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jupyter_client and zmq warn of their own event loops
        write_notebooks.execute(notebook, programs=jax.config.jax_compilation_cache_dir)
    assert notebook.cells[-1].execution_count and write_notebooks.warned(notebook) == []
