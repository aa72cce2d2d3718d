"""Step by step: the sequential twin of every method, and the same with a parallel gradient."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.structure import Leaves
from jaxpar.solve.windows import walk
from jaxpar.types import UsageError

__all__ = ["ParallelBackward", "Sequential"]


@dataclasses.dataclass(frozen=True)
class Sequential:
    """`jax.lax.scan`, also for integer states; over a split sequence, one device after the other.

    Attributes:
      unroll: As `lax.scan`'s.
      jac: Structure of the Jacobian for the gradient over a split sequence; elsewhere `lax.scan`'s own is taken.
    """

    unroll: int = 1
    jac: Any = "auto"

    def __post_init__(self):
        _check_unroll(self.unroll)

    def states(self, problem: Problem, guess: Leaves | None, on_fail: str) -> tuple[Leaves, Outcome]:
        """Walks; there is nothing to guess nor to fail."""
        return _walked(problem, self.unroll)


@dataclasses.dataclass(frozen=True)
class ParallelBackward:
    """Walks forwards, and solves for the gradient in parallel: exact, without any iteration.

    Attributes:
      jac: Structure of the Jacobian, as in `Newton`.
      window: Steps whose Jacobians are alive at a time; None for what the budget of memory allows.
      unroll: Of the forward `lax.scan`.
    """

    jac: Any = "auto"
    window: int | None = None
    unroll: int = 1

    def __post_init__(self):
        _check_unroll(self.unroll)

    def states(self, problem: Problem, guess: Leaves | None, on_fail: str) -> tuple[Leaves, Outcome]:
        """Walks; there is nothing to guess nor to fail."""
        return _walked(problem, self.unroll)


def _check_unroll(unroll: int) -> None:
    if unroll < 1:
        raise UsageError(f"unroll={unroll} must be 1 at least.")


def _walked(problem: Problem, unroll: int) -> tuple[Leaves, Outcome]:
    empty = tuple(jnp.zeros((problem.length, *leaf.shape), leaf.dtype) for leaf in problem.start)
    h = walk(problem, empty, 0, unroll)
    zero = jnp.zeros((), jnp.float32)
    return h, Outcome(jnp.int32(0), jnp.int32(1), zero, zero, jnp.int32(problem.parts * problem.length))
