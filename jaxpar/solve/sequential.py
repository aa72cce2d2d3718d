"""Step by step: the sequential twin of every method, and the same with a parallel gradient."""

import dataclasses

import jax.numpy as jnp

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.structure import Jac, Leaves
from jaxpar.solve.windows import run_sequentially
from jaxpar.types import UsageError

__all__ = ["ParallelBackward", "Sequential", "check_unroll", "sequential_outcome"]


@dataclasses.dataclass(frozen=True)
class Sequential:
    """`jax.lax.scan`, also for integer states; over a split sequence, one device after the other.

    Attributes:
      unroll: As `lax.scan`'s.
      jac: Structure of the Jacobian for the gradient over a split sequence; elsewhere `lax.scan`'s
        own is taken.
    """

    unroll: int = field(1, AtLeast(1))
    jac: Jac = "auto"

    __post_init__ = check_fields

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Runs one step after the other; there is nothing to guess nor to fail."""
        return run_sequentially(problem, unroll=self.unroll), sequential_outcome(problem)


@dataclasses.dataclass(frozen=True)
class ParallelBackward:
    """Runs forwards sequentially, and solves for the gradient in parallel: exact, without any iteration.

    Attributes:
      jac: Structure of the Jacobian, as in `Newton`.
      window: Steps whose Jacobians are alive at a time; None for what the budget of memory allows.
      unroll: Of the forward `lax.scan`; None for 8 on CUDA, 1 elsewhere.
    """

    jac: Jac = "auto"
    window: int | None = field(None, AtLeast(1))
    unroll: int | None = field(None, AtLeast(1))

    __post_init__ = check_fields

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Runs one step after the other; there is nothing to guess nor to fail."""
        return run_sequentially(problem, unroll=self.unroll), sequential_outcome(problem)


def check_unroll(unroll: int | bool | None) -> None:
    """Checks what all sequential runs share: True unrolls a loop wholly, as `lax.scan` does."""
    if unroll is not None and not isinstance(unroll, bool) and unroll < 1:
        raise UsageError(f"unroll={unroll} must be 1 at least.")


def sequential_outcome(problem: Problem) -> Outcome:
    """Returns the outcome of a sequential run: nothing is guessed, and nothing fails."""
    zero = jnp.zeros((), jnp.float32)
    return Outcome(
        iterations=jnp.int32(0),
        windows=jnp.int32(1),
        residual=zero,
        error=jnp.zeros(len(problem.start), jnp.float32),
        first_bad=jnp.int32(problem.parts * problem.length),
    )
