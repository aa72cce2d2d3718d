"""Spaces of actions and observations: hashable values that can draw from themselves and judge what is inside."""

import dataclasses
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = [
    "Box",
    "Discrete",
    "Fields",
    "MultiDiscrete",
    "Space",
    "legal_sample",
    "mask_shape",
    "size",
]


@dataclasses.dataclass(frozen=True)
class Discrete:
    """The integers `0 .. n - 1`, as an int32 scalar (or any `shape` of them, each below the same `n`).

    Attributes:
        n: How many.
        shape: Of what is drawn.
        dtype: Its type.
        names: What films, trees and tables call the integers, n of them; or none. Spaces that differ in these alone
            are equal.
    """

    n: int
    shape: tuple[int, ...] = ()
    dtype: DTypeLike = jnp.int32
    names: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def __post_init__(self):
        """Refuses another number of names."""
        if self.names and len(self.names) != self.n:
            raise UsageError(f"{self.n} choices take as many names, not {len(self.names)}.")

    def sample(self, key: PRNGKey) -> Array:
        """A uniform draw; consumes `key`."""
        return jax.random.randint(key, self.shape, 0, self.n, self.dtype)

    def contains(self, x: Array) -> Array:
        """A traced bool: shape, kind of dtype and range agree."""
        x = jnp.asarray(x)
        if x.shape != self.shape or not jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.zeros((), bool)
        return jnp.all((x >= 0) & (x < self.n))


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """A vector of integers, the i-th below `ns[i]`, as int32 `[len(ns)]`."""

    ns: tuple[int, ...]
    dtype: DTypeLike = jnp.int32

    @property
    def shape(self) -> tuple[int, ...]:
        """`[len(ns)]`."""
        return (len(self.ns),)

    def sample(self, key: PRNGKey) -> Array:
        """A uniform draw; consumes `key`."""
        return jax.random.randint(key, self.shape, 0, np.asarray(self.ns), self.dtype)

    def contains(self, x: Array) -> Array:
        """A traced bool: shape, kind of dtype and range agree."""
        x = jnp.asarray(x)
        if x.shape != self.shape or not jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.zeros((), bool)
        return jnp.all((x >= 0) & (x < np.asarray(self.ns)))


@dataclasses.dataclass(frozen=True)
class Box:
    """Arrays of one shape between two bounds, which are numbers or nested tuples that broadcast to `shape`."""

    low: "Bound"
    high: "Bound"
    shape: tuple[int, ...] = ()
    dtype: DTypeLike = jnp.float32

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Both bounds, broadcast to `shape`."""
        low, high = (
            np.broadcast_to(np.asarray(end, np.dtype(self.dtype)), self.shape)
            for end in (self.low, self.high)
        )
        return low, high

    def sample(self, key: PRNGKey) -> Array:
        """A uniform draw between finite bounds, exponential beyond one, normal without any; consumes `key`."""
        low, high = self.bounds()
        if not jnp.issubdtype(self.dtype, jnp.floating):
            return jax.random.randint(
                key, self.shape, low.astype(np.int32), high.astype(np.int32) + 1
            ).astype(self.dtype)
        below, above = np.isfinite(low), np.isfinite(high)
        tail = jax.random.exponential(key, self.shape, self.dtype)
        uniform = jax.random.uniform(
            key, self.shape, self.dtype, np.where(below, low, 0), np.where(above, high, 1)
        )
        one_sided = jnp.where(
            below, np.where(below, low, 0) + tail, np.where(above, high, 0) - tail
        )
        free = jax.random.normal(key, self.shape, self.dtype)
        return jnp.where(below & above, uniform, jnp.where(below | above, one_sided, free))

    def contains(self, x: Array) -> Array:
        """A traced bool: shape and dtype agree, every entry is finite or allowed to be infinite, and in the bounds."""
        x = jnp.asarray(x)
        if x.shape != self.shape or x.dtype != jnp.dtype(self.dtype):
            return jnp.zeros((), bool)
        low, high = self.bounds()
        return jnp.all((x >= low) & (x <= high))


@dataclasses.dataclass(frozen=True)
class Fields:
    """A dictionary of spaces, given as `Fields.of(image=Box(...), direction=Discrete(4))`."""

    items: tuple[tuple[str, "Space"], ...]

    @classmethod
    def of(cls, **spaces: "Space") -> "Fields":
        """Named spaces, in the order of their names."""
        return cls(tuple(sorted(spaces.items())))

    def sample(self, key: PRNGKey) -> dict[str, PyTree]:
        """Independent draws; consumes `key`."""
        keys = jax.random.split(key, len(self.items))
        return {name: space.sample(keys[i]) for i, (name, space) in enumerate(self.items)}

    def contains(self, x: dict[str, PyTree]) -> Array:
        """A traced bool: the names agree and every field is inside."""
        if not isinstance(x, dict) or set(x) != {name for name, _ in self.items}:
            return jnp.zeros((), bool)
        return jnp.all(jnp.stack([space.contains(x[name]) for name, space in self.items]))


Space = Discrete | MultiDiscrete | Box | Fields

Bound: TypeAlias = "float | tuple[Bound, ...]"
"""One end of a box: a number, or nested tuples of them, since a space is hashable."""


def mask_shape(space: Space) -> tuple[int, ...] | None:
    """The shape of a mask over the choices of discrete actions, `[*space.shape, choices]`; None for other actions."""
    match space:
        case Discrete():
            return *space.shape, space.n
        case MultiDiscrete():
            return *space.shape, max(space.ns)
    return None


def legal_sample(key: PRNGKey, space: Space, mask: Array | None = None) -> PyTree:
    """A uniform draw among the actions that `mask` allows; consumes `key`.

    Args:
        key: consumed.
        space: `Discrete` or `MultiDiscrete` where there is a mask.
        mask: bool of `mask_shape(space)`, padded with False where an entry has fewer choices; None allows all.
    """
    if mask is None:
        return space.sample(key)
    if not isinstance(space, Discrete | MultiDiscrete):
        raise UsageError(f"only discrete actions can be masked, not those of {space}")
    return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf)).astype(space.dtype)


def size(space: Space) -> int:
    """How many numbers one element holds, as a policy network would read it (a choice counts its alternatives)."""
    match space:
        case Discrete():
            return space.n * math.prod(space.shape)
        case MultiDiscrete():
            return sum(space.ns)
        case Box():
            return math.prod(space.shape)
        case Fields():
            return sum(size(inner) for _, inner in space.items)
