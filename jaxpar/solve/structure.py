"""Which entries of a new state depend on which of the old: what makes its Jacobian cheap."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxpar.types import Array

__all__ = ["Block", "Group", "Jacobian", "Structure"]

Jacobian = tuple[Any, ...]
"""One item a group: lanes `A[i][j]` of shape [T, *batch] if it couples few entries, else an array [T, *batch, n, n]."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Jacobians of k x k blocks: k leaves of one shape coupled elementwise, or one leaf [..., k]."""

    k: int


class Group(NamedTuple):
    """Leaves that depend on each other and on no other leaf.

    Attributes:
      leaves: Their numbers.
      batch: The dimensions that all their shapes begin with and along which nothing is coupled.
      sizes: Entries of each leaf for one batch element; n is their sum.
    """

    leaves: tuple[int, ...]
    batch: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Structure:
    """A partition of the state into groups; hashable.

    Attributes:
      groups: Every leaf is in one.
      proved: Whether the program of f shows it, so that no probe is needed.
    """

    groups: tuple[Group, ...]
    proved: bool

    def jacobian(self, apply: Callable[[tuple[Array, ...]], tuple[Array, ...]], before: tuple[Array, ...]) -> Jacobian:
        """Returns A at `before` [T, ...], apply being f at every step."""
        raise NotImplementedError

    def diagonal(self) -> "Structure":
        """Returns the structure of elementwise f: every entry its own."""
        raise NotImplementedError

    def solve(self, jacobian: Jacobian, b: tuple[Array, ...], start=None, *, axis_name=None) -> tuple[Array, ...]:
        """Returns delta[t] = A[t] delta[t-1] + b[t], from `start` (zeros)."""
        raise NotImplementedError

    def dense(self, jacobian: Jacobian) -> tuple[jax.Array, ...]:
        """Returns A of each group as an array [T, *batch, n, n], and `flatten` the states as [T, *batch, n]."""
        raise NotImplementedError
