"""Tiers name files that are there, papers run where imports changed, flags part kept programs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kept_programs
import pytest
import tiers
from closure import Imports

ROOT = Path(__file__).parents[1]


def test_every_file_that_a_tier_names_is_there():
    for name in (*tiers.GUARDS, *tiers.PROCESSES, *tiers.PAPERS, *tiers.PROGRAMS):
        assert (ROOT / "tests" / name).exists(), name
    named = [*tiers.GUARDS, *tiers.PROCESSES, *tiers.PAPERS]
    assert len(set(named)) == len(named), "a file has one tier"


@pytest.fixture
def checkout(tmp_path):
    """A package with a function that one test reads, through another module, and one does not."""
    files = {
        "jaxpar/__init__.py": "",
        "jaxpar/sums.py": "def plus(x, y):\n    return x + y\n",
        "jaxpar/means.py": "def mean(x, y):\n    from .sums import plus\n    return plus(x, y) / 2\n",
        "jaxpar/other.py": '"""Text that names jaxpar.sums."""\n',
        "experiments/__init__.py": "",
        "experiments/walk.py": "from jaxpar.means import mean\n",
        "experiments/conf/walk/walk.yaml": "steps: 1\n",
        "tests/helper.py": "import jaxpar.means\n",
        "tests/test_means.py": "import helper\n",
        "tests/test_other.py": "from jaxpar import other\n",
        "tests/experiments/conftest.py": "",
        "tests/experiments/test_walk.py": 'NAME = "walk"\n',
        "constraints.txt": "",
        "pyproject.toml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_closure_has_imports_inside_of_functions_helpers_and_commands_by_name(checkout):
    imports = Imports(checkout)
    whole = {"jaxpar/means.py", "jaxpar/sums.py", "jaxpar/__init__.py"}
    assert set(imports.closure("tests/test_means.py")) == whole | {
        "tests/helper.py",
        "tests/test_means.py",
    }
    assert set(imports.closure("tests/test_other.py")) == {
        "jaxpar/other.py",
        "jaxpar/__init__.py",
        "tests/test_other.py",
    }
    assert set(imports.closure("tests/experiments/test_walk.py")) > whole | {"experiments/walk.py"}
    assert imports.tests_of("jaxpar/sums.py") == [
        "tests/experiments/test_walk.py",
        "tests/test_means.py",
    ]


def test_a_paper_runs_until_it_passed_and_again_when_what_it_imports_changes(checkout, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    test = "tests/experiments/test_walk.py"

    def why():
        return tiers.reasons(folder, tiers.digests_of_papers([test], checkout))[test]

    assert why() == "they did not pass here yet"
    kept_programs.note(folder, tiers.name_of_record(), tiers.digests_of_papers([test], checkout))
    assert why() == ""
    (checkout / "jaxpar" / "other.py").write_text("CHANGED = 1\n")
    assert why() == ""
    for name in ("jaxpar/sums.py", "experiments/conf/walk/walk.yaml", "constraints.txt"):
        path = checkout / name
        before = path.read_text()
        path.write_text(before + "\n")
        assert why() == f"changed: {name}"
        path.write_text(before)
    assert why() == ""


@pytest.mark.parametrize(
    "name", ["JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TRITON_INTERPRET", "PJRT_NPROC"]
)
def test_programs_of_other_flags_lie_in_another_folder(name, monkeypatch):
    before = kept_programs.kind_of_programs()
    monkeypatch.setenv(name, "another value")
    assert kept_programs.kind_of_programs() != before


def test_one_variable_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXPAR_TEST_CACHE", "off")
    folder, is_temporary = kept_programs.begin()
    assert is_temporary and folder.is_dir()
    kept_programs.end(folder, is_temporary)
    assert not folder.exists()
    monkeypatch.setenv("JAXPAR_TEST_CACHE", str(tmp_path / "here"))
    folder, is_temporary = kept_programs.begin()
    assert folder.parent == tmp_path / "here" and not is_temporary
    kept_programs.end(folder, is_temporary)
    assert folder.is_dir()


def test_what_was_read_last_is_kept(tmp_path):
    for age, name in enumerate(("new", "old", "oldest")):
        path = tmp_path / "kind" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (1e9 - age, 1e9 - age))
    kept_programs.note(tmp_path / "kind", "seconds", {"a": 1})
    os.utime(tmp_path / "kind" / "seconds.json", (1, 1))  # notes are small, and stay
    kept_programs.prune(tmp_path, max_bytes=250)
    assert sorted(path.name for path in (tmp_path / "kind").iterdir()) == [
        "new",
        "old",
        "seconds.json",
    ]


def test_notes_add_up_and_a_damaged_one_is_none(tmp_path):
    kept_programs.note(tmp_path, "seconds", {"a": 1, "b": 2})
    kept_programs.note(tmp_path, "seconds", {"b": 3})
    assert kept_programs.read(tmp_path, "seconds") == {"a": 1, "b": 3}
    (tmp_path / "seconds.json").write_text('{"a"')
    assert kept_programs.read(tmp_path, "seconds") == {}


@pytest.fixture
def run_tests(tmp_path):
    """Runs files of tests, `{name: text}`, under the conftest of these, with notes of their own."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("conftest.py", "closure.py", "kept_programs.py", "tiers.py"):
        shutil.copy(ROOT / "tests" / name, folder)

    def run(files, *flags):
        for name, text in files.items():
            (folder / name).write_text(text)
        env = os.environ | {"JAXPAR_TEST_CACHE": str(tmp_path / "kept"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
        command += [f"--rootdir={tmp_path}", *flags, "tests"]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )

    return run


def test_a_worker_that_dies_ends_the_run_with_a_sentence(run_tests):
    dies = "import os\n\n\ndef test_dies():\n    os.abort()\n"
    waits = "import pytest\n\n\n@pytest.mark.parametrize('i', range(20))\ndef test_waits(i):\n    pass\n"
    files = {"test_dies.py": dies, "test_waits.py": waits}
    done = run_tests(files, "-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "died while it ran tests/test_dies.py::test_dies" in done.stdout


def test_seconds_are_noted_and_long_files_begin_first(run_tests, tmp_path):
    files = {f"test_{name}.py": "def test_it():\n    pass\n" for name in "abc"}
    assert run_tests(files, "-m", "not slow").returncode == 0
    (notes,) = (tmp_path / "kept").rglob("seconds.json")
    assert set(json.loads(notes.read_text())) == {f"tests/{name}" for name in files}
    seconds = {"tests/test_a.py": 1.0, "tests/test_b.py": 3.0, "tests/test_c.py": 2.0}
    notes.write_text(json.dumps(seconds))
    done = run_tests(files, "-v")
    order = [line.split("::")[0] for line in done.stdout.splitlines() if "PASSED" in line]
    assert order == ["tests/test_b.py", "tests/test_c.py", "tests/test_a.py"], done.stdout


def test_what_needs_a_gpu_says_how_to_run_it(run_tests):
    files = {
        "test_card.py": "import pytest\n\n\n@pytest.mark.gpu\ndef test_it():\n    raise SystemExit\n"
    }
    assert "needs a GPU: make test-gpu" in run_tests(files, "-rs").stdout
