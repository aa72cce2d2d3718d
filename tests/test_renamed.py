"""Older names of modules and of what left a package work, are the same things, and say so."""

import importlib
import subprocess
import sys
import warnings

import pytest

from jaxpar import _renamed
from jaxpar._older_fields import newer_arguments
from jaxpar.decode import Decoding

# A checkout has commands in `experiments`, of which `jaxpar.commands` is another name.
OLDER = [older for older in _renamed.MODULES if not older.startswith("jaxpar.commands.")]


@pytest.mark.parametrize("older", sorted(OLDER))
def test_a_module_has_its_older_name(older):
    sys.modules.pop(older, None)
    with pytest.warns(FutureWarning, match=f"{older} is now {_renamed.MODULES[older]};"):
        module = importlib.import_module(older)
    assert module is importlib.import_module(_renamed.MODULES[older])


@pytest.mark.parametrize(
    ("package", "name"),
    sorted((package, name) for package in _renamed.NAMES for name in _renamed.NAMES[package]),
)
def test_a_package_has_names_that_left_it(package, name):
    module = _renamed.NAMES[package][name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        home = importlib.import_module(package)
    with pytest.warns(FutureWarning, match=f"{package}.{name} is now {module}.{name};"):
        found = getattr(home, name)
    assert found is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        home.nothing  # noqa: B018


def test_modules_below_a_package_that_moved_are_found():
    from jaxpar.nn.attention.context import walk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jaxpar.parallel.context.walk as older
        from jaxpar.parallel.pipeline import gpipe
    assert older is walk and gpipe is importlib.import_module("jaxpar.pipeline").gpipe


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="jaxpar.parallel.nothing"):
        importlib.import_module("jaxpar.parallel.nothing")
    with (
        pytest.raises(ModuleNotFoundError, match="jaxpar.pipeline.nothing"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        importlib.import_module("jaxpar.parallel.pipeline.nothing")


def test_packages_load_only_what_they_need():
    """No proof of layouts with layers, no checkpoints with evolution."""
    for package, absent in (("nn", "jaxpar.aot"), ("neat", "orbax"), ("solve", "jaxpar.aot")):
        code = f"import sys, jaxpar.{package}; print(any(name.startswith({absent!r}) for name in sys.modules))"
        said = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert said.stdout.strip() == "False", package


def test_older_arguments_of_one_group_are_all_kept():
    paths = {"chunk": "decoding.chunk", "block": "decoding.block"}
    groups = {"decoding": Decoding(num_samples=2)}
    with pytest.warns(
        FutureWarning, match=r"chunk, block\) is now \(decoding.chunk, decoding.block"
    ):
        newer = newer_arguments("generate", paths, groups, {"chunk": 3, "block": 4})
    assert newer == {"decoding": Decoding(num_samples=2, chunk=3, block=4)}


def test_a_class_is_made_of_older_arguments_alone():
    paths = {"block": "decoding.block"}
    groups = {"decoding": Decoding}
    with pytest.warns(FutureWarning, match=r"generate\(block\) is now \(decoding.block\)"):
        newer = newer_arguments("generate", paths, groups, {"block": 4})
    assert newer == {"decoding": Decoding(block=4)}
