"""Fields and arguments that have moved into groups: older names work until a release, with a sentence."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxpar._renamed import warn_of_older
from jaxpar.fields import group_values
from jaxpar.types import UsageError

__all__ = ["accept_older_fields", "join_positions", "newer_arguments", "newer_fields"]

T = TypeVar("T")


def accept_older_fields(paths: dict[str, str]) -> Callable[[type[T]], type[T]]:
    """Lets a dataclass be made and read by the names that its fields had before they were nested.

    Args:
      paths: Paths of fields, such as `attention.num_heads`, by their older names.
    """

    def decorate(kind: type[T]) -> type[T]:
        plain_init = kind.__init__

        @functools.wraps(plain_init)
        def init(self: T, **values: object) -> None:
            _refuse_replaced_groups(kind, paths, values)
            plain_init(self, **group_values(kind, newer_fields(kind, paths, values, level=3)))

        def read(self: T, name: str) -> object:
            if name not in paths:
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
            warn_of_older(f"{kind.__name__}.{name}", f"{kind.__name__}.{paths[name]}", level=2)
            return operator.attrgetter(paths[name])(self)

        kind.__init__ = init  # type: ignore[method-assign]
        kind.__getattr__ = read  # type: ignore[attr-defined]
        return kind

    return decorate


def newer_fields(
    kind: type, paths: dict[str, str], values: dict[str, object], level: int
) -> dict[str, object]:
    """Returns values of a dataclass's fields by the names of today, which may be paths.

    Args:
      kind: The dataclass.
      paths: Paths of fields by their older names.
      values: Values by names of today or older ones.
      level: Frames from `warn_of_older` up to the caller that is warned, as of that.
    """
    older = [name for name, value in values.items() if _is_older(name, value, paths)]
    if older:
        today = ", ".join(paths[name] for name in older)
        warn_of_older(f"{kind.__name__}({', '.join(older)})", f"({today})", level=level)
    return {paths[name] if name in older else name: value for name, value in values.items()}


def newer_arguments(
    function: str,
    paths: dict[str, str],
    groups: Mapping[str, object],
    older: Mapping[str, object],
) -> dict[str, Any]:  # each group of its own type
    """Returns a function's groups of options with the values that came as arguments of their own.

    Args:
      function: Name of the function.
      paths: Group and field, such as `decoding.block`, by the names of the older arguments.
      groups: Dataclasses and named tuples, by the names of the function's arguments today; the
        class itself where the caller gave none, so that all its fields come as older arguments.
      older: Values of older arguments.

    Raises:
      TypeError: The function never had such an argument, or a class lacks one that it needs.
    """
    changes: dict[str, dict[str, object]] = {group: {} for group in groups}
    for name, value in older.items():
        if name not in paths:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        group, _, field = paths[name].partition(".")
        changes[group][field] = value

    if older:
        today = ", ".join(paths[name] for name in older)
        warn_of_older(f"{function}({', '.join(older)})", f"({today})", level=3)

    newer = {}
    for group, options in groups.items():
        if isinstance(options, type):
            newer[group] = options(**changes[group])
        elif dataclasses.is_dataclass(options):
            newer[group] = dataclasses.replace(cast(Any, options), **changes[group])
        else:
            newer[group] = cast(Any, options)._replace(**changes[group])
    return newer


def join_positions(
    function: str,
    names: Sequence[str],
    values: Sequence[object],
    older: Mapping[str, object],
) -> dict[str, object]:
    """Returns values of older arguments by their names, those that came by position among them.

    Args:
      function: Name of the function.
      names: Names of the older arguments that could be given by position, in their order.
      values: Values that came by position.
      older: Values that came by name.

    Raises:
      TypeError: There are more values than names, or an argument has two values.
    """
    if len(values) > len(names):
        raise TypeError(
            f"{function}() got {len(values) - len(names)} positional arguments too many"
        )

    positions = dict(zip(names, values, strict=False))
    for name in positions:
        if name in older:
            raise TypeError(f"{function}() got multiple values for argument {name!r}")
    return positions | dict(older)


def _is_older(name: str, value: object, paths: dict[str, str]) -> bool:
    """Whether a value is meant for a field of an older name, which may be that of a group today."""
    return name in paths and not dataclasses.is_dataclass(value)


def _refuse_replaced_groups(kind: type, paths: dict[str, str], values: dict[str, object]) -> None:
    """Refuses `dataclasses.replace(config, mixer="gla")`.

    It gives the new value in place of the whole group, the rest of which would be lost.
    """
    names = {declared.name for declared in dataclasses.fields(cast(Any, kind))}
    for name in names & values.keys():
        if _is_older(name, values[name], paths) and names <= values.keys():
            raise UsageError(
                f"{kind.__name__}.{name} is a group of fields, which {name}={values[name]!r} would "
                f"replace; take jaxpar.fields.replace_nested(config, "
                f"{{{paths[name]!r}: {values[name]!r}}})."
            )
