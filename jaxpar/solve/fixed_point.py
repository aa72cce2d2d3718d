"""Iterations that need no Jacobian: Jacobi's and Picard's."""

import dataclasses

import jax.numpy as jnp

from jaxpar.fields import AtLeast, field
from jaxpar.solve.newton import check_iterative, diagonal_structure
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.structure import Jac, Leaves, Structure
from jaxpar.solve.windows import by_windows

__all__ = ["Jacobi", "Picard"]


@dataclasses.dataclass(frozen=True)
class Jacobi:
    """Applies f to all states at once, again and again: A = 0, no scan.

    Information moves one step an iteration, so it converges as fast as the recurrence forgets.

    Attributes:
      jac: Structure of the Jacobian, as in `Newton`, for gradients.
      window: As in `Newton`, and so are the rest.
      max_iters: As there.

    Reference: Song et al., arXiv:2002.03629.
    """

    jac: Jac = "auto"
    window: int | None = field(None, AtLeast(1))
    max_iters: int | None = field(None, AtLeast(1))

    def __post_init__(self):
        check_iterative(self)

    def held(self, structure: Structure) -> Structure:
        """Returns the structure of a diagonal, more than is held."""
        return diagonal_structure(structure)

    def is_exact(self, structure: Structure) -> bool:
        """Returns False: an update knows little of the Jacobian."""
        return False

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Solves window by window."""
        return by_windows(self, problem, guess, on_fail)

    def update(self, problem: Problem, h: Leaves, residual: Leaves) -> Leaves:
        """Returns the residual: the next iterate is f(S h, x)."""
        return residual


@dataclasses.dataclass(frozen=True)
class Picard:
    """Sums the increments of all steps: A = I, a cumulative sum; for states that change little in a step.

    Attributes:
      jac: Structure of the Jacobian, as in `Newton`, for gradients.
      window: As in `Newton`, and so are the rest.
      max_iters: As there.
    """

    jac: Jac = "auto"
    window: int | None = field(None, AtLeast(1))
    max_iters: int | None = field(None, AtLeast(1))

    def __post_init__(self):
        check_iterative(self)

    def held(self, structure: Structure) -> Structure:
        """Returns the structure of a diagonal, more than is held."""
        return diagonal_structure(structure)

    def is_exact(self, structure: Structure) -> bool:
        """Returns False: an update knows little of the Jacobian."""
        return False

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Solves window by window."""
        return by_windows(self, problem, guess, on_fail)

    def update(self, problem: Problem, h: Leaves, residual: Leaves) -> Leaves:
        """Returns delta[t] = delta[t-1] + residual[t]."""
        structure = self.held(problem.structure)
        ones = (
            (jnp.ones((problem.length, *group.batch), residual[0].dtype),)
            for group in structure.groups
        )
        return problem.solve(tuple((row,) for row in ones), residual, structure=structure)
