"""Foreign values in our terms: spaces, observations, and what makes two objects equal."""

import dataclasses
import functools
import types
from collections.abc import Hashable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpar.env.spaces import Bound, Box, Discrete, Fields, MultiDiscrete, Space
from jaxpar.types import PyTree, UsageError

Foreign = Any
"""An object of another suite: anything, told by the attributes that it has, which is why they are asked by name here.

There is no type to name: no suite is imported but by its user, and each has its own.
"""


def with_names(obs: PyTree) -> PyTree:
    """Observations as arrays and dictionaries: named tuples and dataclasses become dictionaries."""
    if hasattr(obs, "_asdict"):
        obs = obs._asdict()
    elif dataclasses.is_dataclass(obs):
        obs = {field.name: getattr(obs, field.name) for field in dataclasses.fields(obs)}
    if isinstance(obs, Mapping):
        return {name: with_names(value) for name, value in obs.items()}
    return obs


def foreign_space(space: Foreign, example: PyTree = None) -> Space:
    """Any suite's space as one of ours.

    Args:
        space: an object with `n`, `num_values`, `low` and `high`, `minimum` and `maximum`, or members by name; None for
            unbounded.
        example: an abstract element, whose shapes and dtypes hold where the space tells others; None to believe it.
    """
    if isinstance(example, dict):
        return Fields.of(
            **{name: foreign_space(_member(space, name), value) for name, value in example.items()}
        )
    if example is None:
        example = jax.ShapeDtypeStruct(
            tuple(getattr(space, "shape", ())), getattr(space, "dtype", jnp.int32)
        )
    if not hasattr(example, "shape") or not hasattr(example, "dtype"):
        raise UsageError(
            f"an observation must be an array or a dictionary of arrays, not a {type(example).__name__}"
        )
    shape, dtype = tuple(example.shape), np.dtype(example.dtype)
    choices = next(
        (
            getattr(space, name)
            for name in ("n", "num_values", "num_categories")
            if hasattr(space, name)
        ),
        None,
    )
    if choices is not None and jnp.issubdtype(dtype, jnp.integer):
        choices = np.asarray(choices)
        if choices.ndim == 0:
            return Discrete(int(choices), shape, dtype)
        return MultiDiscrete(tuple(int(n) for n in choices.ravel()), dtype)
    low, high = (
        next((getattr(space, name) for name in names if hasattr(space, name)), default)
        for names, default in ((("low", "minimum"), -np.inf), (("high", "maximum"), np.inf))
    )
    return Box(_bound(low, shape, dtype), _bound(high, shape, dtype), shape, dtype)


def fingerprint(value: Foreign, seen: tuple[int, ...] = ()) -> Hashable:
    """A hashable that is equal for objects built alike: numbers and arrays by value, functions by code and closure.

    What cannot be looked into (compiled functions, objects without a `__dict__`) is equal to itself only.
    """
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | type | types.ModuleType
    ):
        return type(value), value
    if isinstance(value, np.ndarray | jax.Array | np.generic):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(cast(jax.Array, value)) if is_key else value)
        return "array", value.shape, str(value.dtype), data.tobytes()
    if id(value) in seen:
        return "cycle", len(seen) - seen.index(id(value))
    inside = functools.partial(fingerprint, seen=(*seen, id(value)))
    if isinstance(value, Mapping):
        return type(value), tuple((inside(key), inside(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(inside(item) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(inside(item) for item in value)
    if isinstance(value, functools.partial):
        return type(value), inside(value.func), inside(value.args), inside(value.keywords)
    if isinstance(value, types.MethodType):
        return type(value), value.__func__, inside(value.__self__)
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return (
            value.__module__,
            value.__code__,
            inside([value.__defaults__, value.__kwdefaults__, held]),
        )
    if hasattr(value, "__dict__") and not hasattr(
        value, "__name__"
    ):  # an instance, not a compiled function
        return type(value), inside(vars(value))
    return _Identity(value)


@dataclasses.dataclass(frozen=True)
class _Identity:
    """An object as itself: equal to nothing else, and kept alive, so that no other gets its address."""

    value: Foreign

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __deepcopy__(self, memo: dict) -> "_Identity":
        return self


def _member(space: Foreign, name: str) -> Foreign:
    space = getattr(space, "spaces", space)
    try:
        return space[name]
    except (KeyError, TypeError):
        return None


def _bound(end: ArrayLike, shape: tuple[int, ...], dtype: np.dtype) -> Bound:
    """A bound as one number where it is the same everywhere, else as nested tuples; integers stay in their range."""
    end = np.broadcast_to(np.asarray(end, float), shape)
    if jnp.issubdtype(dtype, jnp.bool_):
        end = np.clip(end, 0, 1)
    elif jnp.issubdtype(dtype, jnp.integer):
        end = np.clip(end, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max).astype(int)
    else:
        end = np.where(np.abs(end) >= jnp.finfo(dtype).max, np.copysign(np.inf, end), end).astype(
            dtype
        )
    first = end.flat[0].item() if end.size else 0
    return first if (end == first).all() else nested(end.tolist())


def nested(values: list) -> Bound:
    """Nested lists as nested tuples."""
    return tuple(nested(value) for value in values) if isinstance(values, list) else values
