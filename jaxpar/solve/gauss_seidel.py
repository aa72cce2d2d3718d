"""Multiple shooting: only the states between blocks of steps are unknown, and every block is walked inside."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.scan.varying import varying_as
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.newton import Newton, check_iterative
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.structure import Leaves
from jaxpar.solve.windows import by_windows, scanned
from jaxpar.types import UsageError

__all__ = ["GaussSeidel"]


@dataclasses.dataclass(frozen=True)
class GaussSeidel:
    """Walks blocks of steps, all blocks at once, until each starts where the one before it ends.

    Inside a block every step sees the newest state before it (Gauss-Seidel), between blocks the old one (Jacobi): one
    iteration takes the time of `block` steps, holds one state a block, and carries information over a whole block, so
    it converges fast where a recurrence forgets within a block. With `correction` the ends of blocks are corrected by
    Newton's method, as parareal does with a coarse propagator: the Jacobian of a block is the product of those of its
    steps, n Jacobian-vector products with a walk through it.

    Attributes:
      block: Steps of a block; the last T modulo `block` steps are walked at the end.
      correction: Whether by Newton's method.
      jac: Structure of the Jacobian, as in `Newton`.
      window: Steps solved at once, as in `Newton`.
      tol: As in `Newton`.
      max_iters: As in `Newton`; half the number of blocks, but 32 to 128.

    Reference: Song et al., arXiv:2002.03629; Lions, Maday and Turinici 2001 for parareal.
    """

    block: int = 64
    correction: bool = False
    jac: Any = "auto"
    window: int | None = None
    tol: float | None = None
    max_iters: int | None = None

    def __post_init__(self):
        check_iterative(self)
        if self.block < 1:
            raise UsageError(f"block={self.block} must be 1 at least.")
        if self.window is not None and self.window < self.block:
            raise UsageError(f"window={self.window} must hold one block of {self.block} at least.")

    def states(self, problem: Problem, guess: Leaves | None, on_fail: str) -> tuple[Leaves, Outcome]:
        """Solves for the ends of the blocks, and walks every block once more for what lies inside."""
        length = problem.length
        block = min(self.block, length)
        if problem.axis_name is not None and length % block:
            raise UsageError(f"over devices a part's {length} steps must be a whole number of blocks of {block}.")
        count = length // block

        def walk(before: Leaves, xs: Leaves, steps: int = block) -> Leaves:
            entry = varying_as(before, (before, xs, problem.start))

            def one(h, x):
                h = problem.step(h, x)
                return h, h

            return scanned(one, entry, xs, steps)

        def last(before: Leaves, xs: Leaves) -> Leaves:
            return tuple(leaf[-1] for leaf in walk(before, xs))

        rows = tuple(leaf[: count * block].reshape(count, block, *leaf.shape[1:]) for leaf in problem.xs)
        ends = dataclasses.replace(problem, step=last, xs=rows, length=count)
        start = None if guess is None else tuple(leaf[block - 1 :: block][:count] for leaf in guess)
        options = {"jac": self.jac, "tol": self.tol, "max_iters": self.max_iters}
        method = (Newton if self.correction else Jacobi)(window=self.window and self.window // block, **options)
        h, outcome = by_windows(method, ends, start, on_fail)

        inside = jax.vmap(walk, axis_size=count)(ends.shift(h), rows)
        inside = tuple(leaf.reshape(-1, *leaf.shape[2:]) for leaf in inside)
        if count * block < length:
            rest = tuple(leaf[count * block :] for leaf in problem.xs)
            tail = walk(tuple(leaf[-1] for leaf in inside), rest, length - count * block)
            inside = tuple(jnp.concatenate(pair) for pair in zip(inside, tail, strict=True))
        found = outcome.first_bad + 1  # blocks: the first whose end was not found is walked from one that was
        everything = problem.parts * length
        return inside, outcome._replace(first_bad=jnp.where(found < problem.parts * count, found * block, everything))
