"""Environments by name."""

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from jaxpar.types import UsageError

MODULES: tuple[str, ...] = ("grid", "xland", "survival")
"""The files of this folder that define `VARIANTS`, a dictionary from names to functions without arguments."""


@functools.cache
def _variants() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for module in MODULES:
        new = importlib.import_module(f".{module}", __package__).VARIANTS
        if twice := sorted(set(new) & set(found)):
            raise ValueError(f"envs/{module}.py gives {twice[0]} a second time")
        found |= new
    return found


def names() -> tuple[str, ...]:
    """The names of our own environments; `make` also knows gymnax's."""
    return tuple(_variants())


def make(name: str, **fields: Any) -> tuple[Any, Any]:
    """The environment of that name, with some of its fields changed, and its default parameters.

    Raises:
        UsageError: no environment has that name, or this one has no such field.
    """
    if name not in _variants():
        raise UsageError(f"there is no environment {name!r}; {_nearest(name, names())}")
    env = _variants()[name]()
    legal = [field.name for field in dataclasses.fields(env)]
    for field in fields:
        if field not in legal:
            raise UsageError(f"{name} has no field {field!r}; {_nearest(field, legal)}")
    env = dataclasses.replace(env, **fields)
    return env, env.default_params


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"the nearest are {', '.join(close)}" if close else f"it has {', '.join(known) or 'none'}"
