"""The doors of the library: what `import jaxpar` gives, what the page of promises lists, what commands take."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar

ROOT = Path(__file__).parents[1]
DOORS = ("jaxpar.aot.placement", "jaxpar.lm.stages")
"""Modules whose names are public though they are no package's."""


def promises():
    page = (ROOT / "docs" / "stable.md").read_text()
    rows = re.findall(r"^\| `(jaxpar[\w.]*)` \| (.*) \|$", page, re.MULTILINE)
    return {door: re.findall(r"`(\w+)`", names) for door, names in rows}


def test_the_library_has_ten_names_and_reads_nothing_until_one_is_asked_for():
    assert len(jaxpar.__all__) == 10
    for name in jaxpar.__all__:
        assert getattr(jaxpar, name) is not None
        assert name in dir(jaxpar)
    with pytest.raises(AttributeError, match="module 'jaxpar' has no attribute 'nothing'"):
        jaxpar.nothing  # noqa: B018
    program = "import sys, jaxpar; print(sorted(x for x in sys.modules if x.startswith('jax')))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "['jaxpar', 'jaxpar._renamed']", said


@pytest.mark.parametrize("door", promises())
def test_promised_names_are_public(door):
    names = promises()[door]
    public = importlib.import_module(door).__all__
    assert sorted(set(names)) == sorted(names)
    assert not set(names) - set(public)


def test_the_promise_can_be_kept_in_mind():
    assert 130 <= sum(len(names) for names in promises().values()) <= 170


def test_all_that_is_public_is_there():
    for path in sorted((ROOT / "jaxpar").rglob("__init__.py")):
        name = ".".join(path.parent.relative_to(ROOT).parts)
        module = importlib.import_module(name)
        missing = [each for each in getattr(module, "__all__", []) if not hasattr(module, each)]
        assert not missing, name


def public_names(module):
    """Returns the names that users of the library may import from a module, None if it is no door."""
    path = ROOT / module.replace(".", "/")
    is_top = path.parent == ROOT / "jaxpar"
    if not (path.is_dir() or is_top or module in DOORS):
        return None
    return importlib.import_module(module).__all__


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def names_taken(path):
    """Yields each name that a file imports from the library, with its module."""
    elsewhere = ("jaxpar.envs", "jaxpar.commands", "jaxpar._renamed")
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level:
            continue
        if node.module.startswith("jaxpar") and not node.module.startswith(elsewhere):
            yield from ((node.module, alias.name) for alias in node.names if alias.name[:2] != "__")


def test_commands_and_notebooks_import_public_names():
    """Those of single papers apart, which nobody imports."""
    files = [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "notebooks").glob("*.py")]
    files = [path for path in files if path.parent != ROOT / "experiments" / "papers"]
    assert len(files) > 60
    wrong = [
        f"{path.relative_to(ROOT)}: {name} of {module}"
        for path in sorted(files)
        for module, name in names_taken(path)
        if not is_module(f"{module}.{name}") and name not in (public_names(module) or ())
    ]
    assert not wrong, "\n".join(wrong)
