"""An environment by name, with what the flags of an experiment change in it."""

import dataclasses
import difflib
import math
from typing import Any

from jaxpar import envs
from jaxpar.fields import Between, check_value
from jaxpar.types import UsageError


def make_world(env: str, env_fields: dict[str, Any], params: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the environment and its parameters, with these changes to its fields and to its parameters."""
    fields = env_fields
    if env in envs.names():
        usual, _ = envs.make(env)
        legal = {field.name: getattr(usual, field.name) for field in dataclasses.fields(usual)}
        fields = changes("env_fields", env, legal, env_fields)
    made, own = envs.make(env, **fields)
    legal = (
        {field.name: getattr(own, field.name) for field in dataclasses.fields(own)} if own else {}
    )
    changed = changes("params", env, legal, params)
    for name, value in changed.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                check_value(f"params.{name}", number, Between(-math.inf, math.inf))
    return made, own.replace(**changed) if changed else own


def changes(flag: str, owner: str, usual: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the values asked for, as what they replace is.

    Raises:
      UsageError: `owner` has no such name, or the value is of another kind.
    """
    made = {}
    for name, value in asked.items():
        if name not in usual:
            near = difflib.get_close_matches(name, list(usual), n=3, cutoff=0.5) or list(usual)
            which = f"the nearest are {', '.join(near)}" if near else "it has none"
            raise UsageError(f"{owner} has no {flag}.{name}; {which}.")
        new: Any = tuple(value) if isinstance(value, list) else value
        if not _fits(new, usual[name]):
            text = f"{flag}.{name}={value!r} does not fit {owner}"
            if isinstance(usual[name], bool | int | float | str | tuple):
                raise UsageError(f"{text}, where it is {usual[name]!r}; give {_kind(usual[name])}.")
            raise UsageError(f"{text}: no flag can give a {type(usual[name]).__name__}.")
        made[name] = float(new) if isinstance(usual[name], float) else new
    return made


def _fits(value: Any, usual: Any) -> bool:
    if isinstance(usual, tuple):
        return (
            isinstance(value, tuple) and len(value) == len(usual) and all(map(_fits, value, usual))
        )
    return type(value) is type(usual) or (type(usual) is float and type(value) is int)


def _kind(usual: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a word"}
    return (
        f"a list of {len(usual)}, each {_kind(usual[0])}"
        if isinstance(usual, tuple)
        else names[type(usual)]
    )
