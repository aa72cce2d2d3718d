"""The mutant runner draws all kinds, and knows a test that notices from one that does not."""

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from closure import Imports
from covered import failed_tests
from mutants import Clean, Drawer, copy_of, draw, run_one

ROOT = Path(__file__).parents[1]
SOURCE = '''"""A text, with 1 + 1 in it."""

LIMIT: int = 3


def share(x, size=4, *, axis: int = 0):
    """Adds 2 - 1."""
    if x < LIMIT and not size == 2:
        return -x * 0.5 + call(x, axis=axis, flag=True)
    raise ValueError(f"{x + 1} is over {LIMIT}")
'''
WANTED = {
    ("constant", "3", "4"),
    ("constant", "4", "5"),
    ("constant", "0", "1"),
    ("constant", "2", "3"),
    ("constant", "0.5", "1.0"),
    ("constant", "True", "False"),
    ("comparison", "<", "<="),
    ("comparison", "==", "!="),
    ("operator", "not size == 2", "(size == 2)"),
    ("operator", "-x", "(x)"),
    ("operator", "*", "/"),
    ("operator", "+", "-"),
    ("term", "x < LIMIT and not size == 2", "((x < LIMIT))"),
    ("term", "x < LIMIT and not size == 2", "((not size == 2))"),
    ("term", "-x * 0.5", "(-x)"),
    ("term", "-x * 0.5", "(0.5)"),
    ("term", "-x * 0.5 + call(x, axis=axis, flag=True)", "(-x * 0.5)"),
    ("term", "-x * 0.5 + call(x, axis=axis, flag=True)", "(call(x, axis=axis, flag=True))"),
    ("keyword", "axis=axis,", ""),
    ("keyword", ", flag=True", ""),
}


def changes_of(source):
    return {(m.kind, source[m.start : m.end], m.text) for m in Drawer("share.py", source).mutants}


def test_every_operator_comparison_constant_keyword_and_term_is_drawn_and_no_text():
    assert changes_of(SOURCE) == WANTED


def test_offsets_count_characters_where_a_line_has_others_than_ascii():
    assert changes_of("x = 'é' + y - 1\n") >= {("operator", "-", "+"), ("constant", "1", "2")}


def test_a_seed_draws_the_same_whatever_else_a_file_has(tmp_path):
    (tmp_path / "share.py").write_text(SOURCE)
    drawn = [mutant.name for mutant in draw(tmp_path, ["share.py"], 5, seed=1)]
    (tmp_path / "share.py").write_text(f'"""Other words."""\n\n\n{SOURCE}')
    assert [mutant.name for mutant in draw(tmp_path, ["share.py"], 5, seed=1)] == drawn
    assert [mutant.name for mutant in draw(tmp_path, ["share.py"], 5, seed=2)] != drawn


@pytest.fixture
def checkout(tmp_path):
    """A library of one function and a test of it."""
    (tmp_path / "jaxpar").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "jaxpar" / "__init__.py").write_text("")
    (tmp_path / "jaxpar" / "sums.py").write_text("def plus(x, y=2):\n    return x + y\n")
    test = "from jaxpar.sums import plus\n\n\ndef test_plus():\n    assert plus(1, 1) == 2\n"
    (tmp_path / "tests" / "test_sums.py").write_text(test)
    return tmp_path


def outcome_of(checkout, folder, kind, old, limit_s=60):
    source = (checkout / "jaxpar" / "sums.py").read_text()
    drawn = Drawer("jaxpar/sums.py", source).mutants
    (mutant,) = [m for m in drawn if m.kind == kind and source[m.start : m.end] == old]
    tests = mutants.tests_of(mutant, Imports(checkout), None)
    assert tests == ["tests/test_sums.py"]
    found = run_one(mutant, folder, tests, limit_s, Clean())
    assert (folder / "jaxpar" / "sums.py").read_text() == source, "the copy is restored"
    return found


def test_a_mutant_that_a_test_notices_is_killed_and_others_live(checkout, tmp_path):
    folder = tmp_path / "copy"
    copy_of(checkout, folder)
    killed = outcome_of(checkout, folder, "operator", "+")
    assert (killed.status, killed.by) == ("killed", "tests/test_sums.py::test_plus")
    assert outcome_of(checkout, folder, "constant", "2").status == "lived"
    assert outcome_of(checkout, folder, "constant", "2", limit_s=0).status == "unfinished"


def test_a_test_that_fails_in_any_case_kills_nothing(checkout, tmp_path):
    (checkout / "tests" / "test_sums.py").write_text(
        "from jaxpar.sums import plus\n\n\ndef test_red():\n    assert plus(1) == 0\n\n\n"
        "def test_default():\n    assert plus(1) == 3\n"
    )
    folder = tmp_path / "copy"
    copy_of(checkout, folder)
    killed = outcome_of(checkout, folder, "constant", "2")
    assert (killed.status, killed.by) == ("killed", "tests/test_sums.py::test_default")
    (folder / "tests" / "test_sums.py").write_text(
        "from jaxpar.sums import plus\n\n\ndef test_red():\n    assert plus(1) == 0\n"
    )
    assert outcome_of(checkout, folder, "constant", "2").status == "lived"


def test_a_file_that_cannot_be_collected_in_any_case_kills_nothing(checkout, tmp_path):
    (checkout / "tests" / "test_sums.py").write_text("import nowhere\nfrom jaxpar import sums\n")
    folder = tmp_path / "copy"
    copy_of(checkout, folder)
    assert outcome_of(checkout, folder, "constant", "2").status == "unreached"


def test_names_of_tests_may_have_spaces():
    printed = "FAILED tests/a.py::test_it[rows, bonus] - assert 1 - 2\nERROR tests/b.py\n1 failed\n"
    assert failed_tests(printed) == ["tests/a.py::test_it[rows, bonus]", "tests/b.py"]


def test_lines_leave_out_tests_that_never_reach_a_mutant(checkout):
    (mutant, *_) = Drawer("jaxpar/sums.py", (checkout / "jaxpar" / "sums.py").read_text()).mutants
    imports = Imports(checkout)
    reached = {"lines": {"jaxpar/sums.py": {str(mutant.line): ["tests/test_sums.py"]}}}
    assert mutants.tests_of(mutant, imports, reached) == ["tests/test_sums.py"]
    assert (
        mutants.tests_of(
            mutant, imports, {"lines": {"jaxpar/sums.py": {"77": ["tests/test_sums.py"]}}}
        )
        == []
    )


def test_a_file_that_is_not_there_is_one_sentence():
    command = [sys.executable, str(ROOT / "tests" / "mutants.py"), "jaxpar/nowhere", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no such Python file or folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_covered_writes_which_test_executes_which_line(checkout, tmp_path):
    output = tmp_path / "lines.json"
    command = [
        sys.executable,
        str(ROOT / "tests" / "covered.py"),
        str(output),
        "tests",
        "--jobs",
        "1",
    ]
    subprocess.run([*command, "--root", str(checkout)], check=True, capture_output=True)
    found = json.loads(output.read_text())
    assert found["lines"]["jaxpar/sums.py"] == {
        "1": ["tests/test_sums.py"],
        "2": ["tests/test_sums.py"],
    }
    assert found["failed"] == [] and found["executed_lines"] == 1
