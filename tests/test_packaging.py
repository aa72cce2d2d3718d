"""What is installed, and that its names are those of a checkout."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxpar
from jaxpar.commands import __main__ as command

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", ["jaxpar", "envs", "experiments"])
def test_names_resolve_inside_the_checkout(name):
    """The last two are other people's names on the package index: from the root they must be ours."""
    code = f"import importlib.util as u; print(*u.find_spec({name!r}).submodule_search_locations)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [Path(place) for place in done.stdout.split()] == [ROOT / name]


def test_version_is_one():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", jaxpar.__version__)
    assert (
        PROJECT["tool"]["hatch"]["version"]["path"] == "jaxpar/__init__.py"
        and "version" in PROJECT["project"]["dynamic"]
    )


def test_the_versions_of_python_are_the_same_everywhere():
    """Those that CI tests, and one more, last, as the Makefile tries them."""
    *tested, newest = re.findall(
        r"Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.MULTILINE
    )
    tried, more = re.findall(r"^PYTHONS? \??= (.*)$", MAKEFILE, re.MULTILINE)
    bounds = re.search(r"\(3, (\d+)\) <= v < \(3, (\d+)\)", MAKEFILE)
    assert re.findall(r"python(3\.\d+)", tried) == tested[::-1]
    assert (f"3.{bounds[1]}", f"3.{int(bounds[2]) - 1}") == (tested[0], tested[-1])
    assert PROJECT["project"]["requires-python"] == f">={tested[0]}"
    last = re.search(r"python(3\.\d+)", more)[1]
    assert last == newest
    assert f"Python {tested[0]} to {last}" in (ROOT / "README.md").read_text()
    assert f"{tested[0]}, {tested[-1]} or {last}" in (ROOT / "docs" / "quickstart.md").read_text()


def test_declared_dependencies_can_be_imported():
    modules = {"orbax-checkpoint": "orbax.checkpoint"}
    for requirement in PROJECT["project"]["dependencies"]:
        name = re.match(r"[\w-]+", requirement)[0]
        assert importlib.util.find_spec(modules.get(name, name)) is not None, requirement


def python(code, *, cwd=ROOT, path=ROOT):
    """What `code` prints, in a process that finds packages in `path` first."""
    env = os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_checkout_has_one_of_each_under_both_names():
    """Whichever name comes first; and a module that is not there is not found."""
    code = """
import jaxpar.envs.pomdp.tiger as by_alias, envs.pomdp.tiger as tiger, envs, jaxpar.envs, jaxpar.commands, experiments
from envs.pomdp import baby
from jaxpar.envs.pomdp import baby as same
assert by_alias is tiger and same is baby and jaxpar.envs is envs and jaxpar.envs.make is envs.make
assert isinstance(jaxpar.envs.make("Tiger")[0], by_alias.Tiger)
assert jaxpar.commands is experiments and tiger.__spec__.name == "envs.pomdp.tiger"
try:
    import jaxpar.envs.nothing
except ModuleNotFoundError as error:
    print(error)
"""
    assert python(code) == "No module named 'jaxpar.envs.nothing'\n"


def test_another_package_called_envs_is_left_alone(tmp_path):
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("theirs = 1\n")
    code = "import envs, jaxpar.envs; print(envs.theirs, jaxpar.envs.__name__, hasattr(jaxpar.envs, 'make'))"
    assert (
        python(code, cwd=tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}") == "1 jaxpar.envs True\n"
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """An unpacked wheel."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    zipfile.ZipFile(path).extractall(folder / "site")
    return folder / "site"


def test_a_wheel_holds_the_library_environments_and_commands(wheel):
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {"jaxpar"}
    (about,) = wheel.glob("*.dist-info")
    held = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    for top, name in (
        ("jaxpar", "jaxpar"),
        ("envs", "jaxpar/envs"),
        ("experiments", "jaxpar/commands"),
    ):
        ours = subprocess.run(
            ["git", "ls-files", top], cwd=ROOT, capture_output=True, text=True
        ).stdout.split()
        ours = {name + path.removeprefix(top) for path in ours}
        aliases = {"jaxpar/_checkout.py", "jaxpar/envs.py", "jaxpar/commands.py"}
        assert (ours - aliases) - held == set() and not held & aliases
    assert "jaxpar/py.typed" in held, (
        "type checkers would not read the annotations of an installed jaxpar"
    )
    assert (about / "licenses" / "LICENSE").is_file()
    assert not [name for name in held if "__pycache__" in name]


def test_an_installed_library_has_the_names_of_a_checkout(wheel, tmp_path):
    code = """
import sys
from jaxpar import envs
from jaxpar.commands import __main__ as command
from jaxpar.envs.pomdp.tiger import Tiger
assert isinstance(envs.make("Tiger")[0], Tiger)
print(envs.__file__)
sys.argv = ["jaxpar", "lmm"]
command.main()
"""
    env = os.environ | {"PYTHONPATH": str(wheel)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()) == wheel / "jaxpar" / "envs" / "__init__.py"
    assert (
        done.returncode == 2
        and done.stderr == "error: there is no command 'lmm'; did you mean lm?\n"
    )


def test_commands_are_listed_and_run_as_themselves(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxpar"])
    command.main()
    shown = re.findall(r"^  (\w+) +\w", capfd.readouterr().out, re.MULTILINE)
    files = sorted(path.stem for path in (ROOT / "experiments").glob("[a-z]*.py"))
    assert shown == [*files, "papers"] and "lm" in shown
    ran = []
    monkeypatch.setattr(
        command.runpy, "run_module", lambda name, **kinds: ran.append((name, sys.argv, kinds))
    )
    monkeypatch.setattr(sys, "argv", ["jaxpar", "lm", "seed=3"])
    command.main()
    assert ran == [
        ("experiments.lm", ["lm", "seed=3"], {"run_name": "__main__", "alter_sys": True})
    ]

    def lacking(name, **kinds):
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra")

    monkeypatch.setattr(command.runpy, "run_module", lacking)
    monkeypatch.setattr(sys, "argv", ["jaxpar", "lm"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    assert capfd.readouterr().err == (
        'error: commands need hydra, which is not installed: pip install "jaxpar[experiments]".\n'
    )


def test_the_address_stands_in_one_place():
    (address,) = PROJECT["project"]["urls"].values()
    tracked = subprocess.run(
        ["git", "grep", "-lF", address], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    # The others are held to it: the page by tests/test_howto.py, notebooks by tests/test_notebooks.py.
    assert {path for path in tracked if not path.startswith("notebooks/")} == {
        "pyproject.toml",
        "docs/install.md",
    }
