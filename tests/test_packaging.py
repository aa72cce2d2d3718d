"""What is installed, and what is used from a checkout only."""

import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxpar

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", ["jaxpar", "envs", "experiments"])
def test_names_resolve_inside_the_checkout(name):
    """The last two are other people's names on the package index: from the root they must be ours."""
    code = f"import importlib.util as u; print(*u.find_spec({name!r}).submodule_search_locations)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [Path(place) for place in done.stdout.split()] == [ROOT / name]


def test_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", jaxpar.__version__)
    assert (
        PROJECT["tool"]["hatch"]["version"]["path"] == "jaxpar/__init__.py"
        and "version" in PROJECT["project"]["dynamic"]
    )


def test_the_versions_of_python_are_the_same_everywhere():
    """Those that CI tests, and one more that may do, as the Makefile tries them."""
    tested = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.MULTILINE)
    tried, more = re.findall(r"^PYTHONS? \??= (.*)$", MAKEFILE, re.MULTILINE)
    bounds = re.search(r"\(3, (\d+)\) <= v < \(3, (\d+)\)", MAKEFILE)
    assert re.findall(r"python(3\.\d+)", tried) == tested[::-1]
    assert (f"3.{bounds[1]}", f"3.{int(bounds[2]) - 1}") == (tested[0], tested[-1])
    assert PROJECT["project"]["requires-python"] == f">={tested[0]}"
    last = re.search(r"python(3\.\d+)", more)[1]
    assert f"Python {tested[0]} to {last}" in (ROOT / "README.md").read_text()
    assert f"{tested[0]}, {tested[-1]} or {last}" in (ROOT / "docs" / "quickstart.md").read_text()


def test_declared_dependencies_can_be_imported():
    modules = {"orbax-checkpoint": "orbax.checkpoint"}
    for requirement in PROJECT["project"]["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert importlib.util.find_spec(modules.get(name, name)) is not None, requirement


def test_a_wheel_holds_the_library_only(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(path).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"jaxpar"}
    assert "jaxpar/mesh.py" in names and "jaxpar/lm/model.py" in names
    assert "jaxpar/py.typed" in names, "type checkers would not read the annotations of an installed jaxpar"
    assert any(name.endswith("licenses/LICENSE") for name in names)
