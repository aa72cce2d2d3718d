"""Legal ranges of configuration fields: declared once, beside the default, and checked where a configuration is made.

Example:
    @dataclasses.dataclass(frozen=True)
    class OptimizerConfig:
        learning_rate: float = field(1e-3, Positive())
        schedule: str = field("cosine", OneOf(("cosine", "linear")))

        def __post_init__(self):
            check_fields(self, "optimizer.")

NaN is in no range, and infinity only in one that names it as a closed end. What relates several fields stays a check by
hand in `__post_init__`.
"""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxpar.types import UsageError, concrete_values

__all__ = [
    "AtLeast",
    "Between",
    "Each",
    "Finite",
    "OneOf",
    "Positive",
    "check_fields",
    "check_value",
    "field",
    "group_values",
    "leaf_fields",
    "make_nested",
    "replace_nested",
]


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Between:
    """Numbers from `low` to `high`.

    Attributes:
      low: Lower end.
      high: Upper end.
      ends: "[" or "(" and "]" or ")": whether each end is legal itself.
      also: Single numbers that are legal besides, such as a -1 that means "the rest".
    """

    low: float
    high: float
    ends: str = "[]"
    also: tuple[float, ...] = ()

    def __contains__(self, value: object) -> bool:
        number = cast(float, value)
        above = number >= self.low if self.ends[0] == "[" else number > self.low
        below = number <= self.high if self.ends[1] == "]" else number < self.high
        return bool(above and below) or value in self.also

    def __str__(self) -> str:
        low = (
            []
            if self.low == -math.inf
            else [f"{'at least' if self.ends[0] == '[' else 'over'} {self.low:g}"]
        )
        high = (
            []
            if self.high == math.inf
            else [f"{'at most' if self.ends[1] == ']' else 'under'} {self.high:.10g}"]
        )
        return " and ".join(low + high) + "".join(f", or {value:g}" for value in self.also)


def AtLeast(low: float, also: tuple[float, ...] = ()) -> Between:
    """Returns the finite numbers from `low` on."""
    return Between(low, math.inf, "[)", also)


def Positive() -> Between:
    """Returns the finite numbers over 0."""
    return Between(0, math.inf, "()")


def Finite() -> Between:
    """Returns all finite numbers."""
    return Between(-math.inf, math.inf, "()")


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of some names; a mapping's are its keys."""

    choices: Iterable[Any]

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and value in tuple(self.choices)

    def __str__(self) -> str:
        return ", ".join(map(str, self.choices))


@dataclasses.dataclass(frozen=True)
class Each:
    """Any number of entries, each of which is in `legal`."""

    legal: Between | OneOf


Legal = Between | OneOf | Each


def field(
    default: object = dataclasses.MISSING,
    legal: Legal | None = None,
    *,
    default_factory: object = dataclasses.MISSING,
    **metadata: object,
) -> Any:  # as of `dataclasses.field`: it stands where a value of the field's type would
    """Declares a field of a configuration with what is legal in it; `check_fields` in `__post_init__` holds it to that.

    Args:
      default: Where the default or the annotation is None, None is legal as well.
      legal: What is.
      default_factory: Makes the default instead, where it is a list.
      **metadata: More of it, such as `identity` in runs.
    """
    metadata = metadata if legal is None else metadata | {"legal": legal}
    return cast(Any, dataclasses.field)(
        default=default, default_factory=default_factory, metadata=metadata
    )


def check_fields(config: object, where: str = "") -> None:
    """Refuses a value that is outside of its field's declared range, or of another type than annotated.

    An `int` field takes whole numbers and a `float` field real ones, neither of them a bool. A field of type
    `jaxpar.types.Scalar` may hold a number to be swept: a tracer is not looked at, and an array is judged by all that
    it holds.

    Args:
      config: A dataclass, whose fields were declared by `field`.
      where: What precedes the names of its fields where a user gives them, such as "model.".

    Raises:
      UsageError: In one sentence, with the field, its value and what is legal.
    """
    for declared in dataclasses.fields(cast(Any, config)):
        legal = declared.metadata.get("legal")
        if legal is not None:
            reason = _objection(getattr(config, declared.name), legal, declared)
            if reason:
                raise UsageError(
                    f"{where}{declared.name}={getattr(config, declared.name)!r} {reason}."
                )


def check_value(name: str, value: object, legal: Between | OneOf, kind: type = float) -> None:
    """Refuses one argument as `check_fields` refuses a field: the same ranges, for what is no dataclass.

    Args:
      name: Of the argument.
      value: Its value.
      legal: What is legal.
      kind: `int` for whole numbers, `float` for real ones.
    """
    reason = _why(value, legal, {kind})
    if reason:
        raise UsageError(f"{name}={value!r} {reason}.")


def leaf_fields(config: object, where: str = "") -> Iterator[tuple[str, dataclasses.Field, object]]:
    """Yields the path, the declaration and the value of each field, those of nested dataclasses one by one.

    A path has a dot for each level: `attention.num_heads`.
    """
    for declared in dataclasses.fields(cast(Any, config)):
        value = getattr(config, declared.name)
        path = where + declared.name
        if dataclasses.is_dataclass(value):
            yield from leaf_fields(value, f"{path}.")
        else:
            yield path, declared, value


def make_nested(kind: type[T], values: Mapping[str, object]) -> T:
    """Returns a configuration from the values of fields by their paths, such as `attention.num_heads`.

    Fields that are not named have their defaults. Each nested configuration is made once, so that
    what relates several fields is checked with all of them in place.

    Raises:
      UsageError: A path names no field, or a value is not legal.
    """
    return kind(**group_values(kind, values))


def group_values(kind: type, values: Mapping[str, object]) -> dict[str, object]:
    """Returns the values of a configuration's own fields, made of values by paths.

    Raises:
      UsageError: A path names no field, or a value is not legal.
    """
    fields = {declared.name: declared for declared in dataclasses.fields(cast(Any, kind))}
    own, nested = _by_group(kind.__name__, fields.values(), values)
    for group, changes in nested.items():
        own[group] = replace_nested(own.get(group, fields[group].default), changes)
    return own


def replace_nested(config: T, values: Mapping[str, object]) -> T:
    """Returns a configuration with other values of the fields that paths name, as `dataclasses.replace` does.

    Raises:
      UsageError: A path names no field, or a value is not legal.
    """
    fields = dataclasses.fields(cast(Any, config))
    own, nested = _by_group(type(config).__name__, fields, values)
    for group, changes in nested.items():
        own[group] = replace_nested(own.get(group, getattr(config, group)), changes)
    return dataclasses.replace(cast(Any, config), **own)


def _by_group(
    owner: str, fields: Iterable[dataclasses.Field], values: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Returns the values of own fields, and those of each nested configuration."""
    names = [declared.name for declared in fields]
    own: dict[str, object] = {}
    nested: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        group, _, rest = path.partition(".")
        if group not in names:
            raise UsageError(f"{owner} has no field {group!r}; legal are {', '.join(names)}.")
        if rest:
            nested.setdefault(group, {})[rest] = value
        else:
            own[group] = value
    return own, nested


def _objection(value: object, legal: Legal, declared: dataclasses.Field) -> str:
    """What is wrong with a value; empty where nothing is."""
    kinds = _kinds(declared.type)
    is_optional = type(None) in kinds or declared.default is None
    if isinstance(value, jax.Array) and concrete_values(value) is None:
        return ""
    if value is None and is_optional:
        return ""
    if isinstance(legal, Each):
        if not isinstance(value, tuple | list):
            return f"must be a list, each entry {legal.legal}"
        wrong = [reason for entry in value if (reason := _why(entry, legal.legal, kinds))]
        return f"has an entry that {wrong[0]}" if wrong else ""
    reason = _why(value, legal, kinds)
    return f"{reason}, or None" if reason and is_optional else reason


def _why(value: object, legal: Between | OneOf, kinds: set) -> str:
    if isinstance(legal, OneOf):
        return "" if value in legal else f"is unknown; legal are {legal}"
    if kinds & {Any, jax.Array} and isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value)
        if value.ndim:
            return next((reason for x in value.flat if (reason := _why(x, legal, kinds))), "")
        value = value.item()
    kind, noun = (
        (numbers.Real, "a number") if kinds & {float, Any} else (numbers.Integral, "a whole number")
    )
    if isinstance(value, bool) or not isinstance(value, kind):
        return ", ".join(filter(None, [f"must be {noun}", str(legal)]))
    if value in legal:
        return ""
    finite = (
        [] if isinstance(value, numbers.Integral) or math.isfinite(value) else ["a finite number"]
    )
    return "must be " + ", ".join(filter(None, [*finite, str(legal)]))


def _kinds(annotation: object) -> set:
    """The types in a union or in a tuple's annotation; `Any` where nothing is said."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list):
        return set().union(*map(_kinds, typing.get_args(annotation)))
    return {Any} if annotation is typing.Any or isinstance(annotation, str) else {annotation}
