"""The rows of the contract of environments: one of each class in CI, other sizes as slow ones."""

import jax
import pytest

import envs
from envs.registry import _variants
from jaxpar.env import check_environment

ALL = ("arcade", "classic", "grid", "memory", "minatar", "multi", "pomdp", "puzzles")
LARGE = ("grid", "multi", "puzzles")
"""Families with programs that take long to compile, apart from the others."""


def rows(families=ALL):
    """Yields a name of every class in some families, and the others as slow ones."""
    seen = set()
    for name, make in _variants().items():  # without parameters, which some compile
        kind = type(make())
        is_other = kind in seen
        seen.add(kind)
        if family_of(kind) in families:
            yield pytest.param(name, marks=[pytest.mark.slow] * is_other)


def family_of(kind):
    """Returns the folder of an environment's class."""
    return kind.__module__.removeprefix("envs.").split(".")[0]


def each_row(families=ALL):
    """Returns the parameters of a test that runs on some families."""
    return pytest.mark.parametrize("name", list(rows(families)))


def assert_promises(name):
    """Asserts that an environment passes every check of `check_environment`."""
    env, params = envs.make(name)
    report = check_environment(env, params, num_envs=4, num_steps=50)
    assert report.steps == 200 and {"identity", "types", "walk"} <= set(report.checks)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
