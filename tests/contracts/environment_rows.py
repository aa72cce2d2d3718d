"""The rows of the contract of environments: one of each class in CI, other sizes of it as slow ones."""

import jax
import pytest

from envs.registry import _variants


def rows():
    """One name of every class, and the others as slow ones."""
    seen = set()
    for name, make in _variants().items():  # without parameters, which some compile
        kind = type(make())
        yield pytest.param(name, marks=[pytest.mark.slow] if kind in seen else [])
        seen.add(kind)


each_row = pytest.mark.parametrize("name", list(rows()))


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
