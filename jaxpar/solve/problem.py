"""One nonlinear recurrence as a system of equations over its whole length, and what a method makes of it.

The states h[0], ..., h[T-1] of h[t] = f(h[t-1], x[t]), h[-1] = start, are the root of residual(h) =
f(S h, x) - h, with S the shift by one step. Newton's update solves (I - A S) delta = residual(h),
A[t] being the Jacobian of f at h[t-1]: one affine scan. Other methods replace A.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.solve.structure import Jac, Jacobian, Leaves, Structure
from jaxpar.stage import refuse_in_stage
from jaxpar.types import Array, PyTree

__all__ = [
    "Chooser",
    "IterativeMethod",
    "Method",
    "Outcome",
    "Problem",
    "UnrolledMethod",
    "WindowedMethod",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """h[t] = f(h[t-1], x[t]) for T steps from `start`; made anew inside every trace, never an argument of one.

    Attributes:
      step: f on the leaves of one state and of one input.
      start: The state before the first step. With `axis_name`, that before the whole sequence.
      xs: Leaves of the inputs, each [T, ...]; possibly none.
      length: T; with `axis_name`, of this device's part.
      structure: Which entries of the new state depend on which of the old.
      axis_name: Mesh axis that the sequence is split over; None if it is whole.
      reverse: Whether the first device along that axis holds the last part. Within a part time runs
        forwards.
      rtol: Error of each leaf that is allowed relative to an entry; None for 1.5 eps^(3/4) of its
        dtype. An empty tuple is None for all.
      atol: Error of each leaf that is allowed in addition; None for a tenth of rtol times the
        entry's typical size (`rounding.typical_size`). An empty tuple is None for all.
      unroll: Of what is run sequentially; None leaves it to the method.
      floor: Error that is allowed beside both, arrays that broadcast against [T, ...]; None for
        none.
      valid: Steps that count, those behind them being padding; None for all.
    """

    step: Callable[[Leaves, Leaves], Leaves]
    start: Leaves
    xs: Leaves
    length: int
    structure: Structure
    axis_name: str | None = None
    reverse: bool = False
    rtol: tuple[float | None, ...] = ()
    atol: tuple[float | None, ...] = ()
    unroll: int | None = None
    floor: Leaves | None = None
    valid: Array | None = None

    def tolerance(self, number: int, dtype: DTypeLike) -> tuple[float, float | None]:
        """Returns rtol and atol of a leaf; atol is None where the leaf's size decides."""
        rtol = None
        if self.rtol:
            rtol = self.rtol[number]
        if rtol is None:
            rtol = 1.5 * float(jnp.finfo(dtype).eps) ** 0.75
        atol = None
        if self.atol:
            atol = self.atol[number]
        return rtol, atol

    @property
    def parts(self) -> int:
        """Devices that the sequence is split over."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    @property
    def rank(self) -> Array | int:
        """Place of this device's part in time."""
        if self.axis_name is None:
            return 0
        mine = jax.lax.axis_index(self.axis_name)
        return self.parts - 1 - mine if self.reverse else mine

    def entry(self, last: Leaves) -> Leaves:
        """Returns the state before this device's part, given the last state of each; one permute of one state."""
        if self.axis_name is None:
            return self.start
        refuse_in_stage("a solver over a split sequence", "take mesh.context=1")
        hops = [(place, place + 1) for place in range(self.parts - 1)]
        hops = [(b, a) for a, b in hops] if self.reverse else hops
        earlier = (jax.lax.ppermute(leaf, self.axis_name, hops) for leaf in last)
        return tuple(
            jnp.where(self.rank == 0, a, b) for a, b in zip(self.start, earlier, strict=True)
        )

    def final(self, last: Leaves) -> Leaves:
        """Returns the state after the whole sequence, the same on all devices, given the last state of each."""
        if self.axis_name is None:
            return last
        is_last = self.rank == self.parts - 1
        return tuple(
            jax.lax.psum(jnp.where(is_last, leaf, 0), self.axis_name).astype(leaf.dtype)
            for leaf in last
        )

    def shift(self, h: Leaves) -> Leaves:
        """Returns S h: the state before each step, [T, ...]."""
        before = self.entry(tuple(leaf[-1] for leaf in h))
        return tuple(jnp.concatenate([a[None], b[:-1]]) for a, b in zip(before, h, strict=True))

    def apply(self, before: Leaves) -> Leaves:
        """Returns f at every step, given the state before each."""
        return jax.vmap(self.step, axis_size=self.length)(before, self.xs)

    def residual(self, h: Leaves) -> Leaves:
        """Returns f(S h, x) - h, in float32 at least."""
        wide = (jnp.promote_types(leaf.dtype, jnp.float32) for leaf in h)
        new = self.apply(self.shift(h))
        return tuple(a.astype(d) - b.astype(d) for a, b, d in zip(new, h, wide, strict=True))

    def jacobian(self, h: Leaves) -> Jacobian:
        """Returns A[t], the Jacobian of f at h[t-1], as the structure stores it.

        Cost: n Jacobian-vector products at every step, n the entries of the largest group; memory T
          n^2.
        """
        return self.structure.jacobian(self.apply, self.shift(h))

    def solve(
        self,
        jacobian: Jacobian,
        b: Leaves,
        start: Leaves | None = None,
        structure: Structure | None = None,
    ):
        """Returns L(A)^-1 b: delta[t] = A[t] delta[t-1] + b[t] from delta[-1] = `start` (zeros), by one affine scan.

        Args:
          jacobian: A, as `structure` stores it.
          b: Leaves [T, ...].
          start: delta before the first step.
          structure: Of A; the problem's by default.
        """
        structure = structure or self.structure
        return structure.solve(jacobian, b, start, axis_name=self.axis_name, reverse=self.reverse)


class Outcome(NamedTuple):
    """How a solution came about.

    Attributes:
      iterations: Of all windows together, int32.
      windows: How many were solved, int32.
      residual: Largest `|f(S h, x) - h|` of any entry when iteration ended, in units of what passes
        (`rounding`).
      error: Bound of the error of each leaf, [leaves], in units of what passes.
      first_bad: First step whose state was not found by iteration, int32; T if there is none.
    """

    iterations: Array
    windows: Array
    residual: Array
    error: Array
    first_bad: Array


class Method(Protocol):
    """How states are found: a frozen, hashable dataclass without arrays."""

    @property
    def jac(self) -> Jac:
        """Declared structure of the Jacobian: "auto", "diag", `Block(k)`, "dense" or `Dense(batch_dims)`."""
        ...

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Returns all states [T, ...].

        Args:
          problem: The recurrence.
          guess: States to start from, or None.
          on_fail: What stands where no iteration has found the states: "finish" or "nan".
        """
        ...


@runtime_checkable
class WindowedMethod(Method, Protocol):
    """A method that takes a sequence in windows."""

    @property
    def window(self) -> int | None:
        """Steps solved at once, or whose Jacobians are alive at once; None for what a budget of memory allows."""
        ...


@runtime_checkable
class UnrolledMethod(Method, Protocol):
    """A method with a loop over steps, which may be unrolled."""

    @property
    def unroll(self) -> int | None:
        """Steps in one trip of the loop, as `lax.scan`'s; None for what the platform does best."""
        ...


@runtime_checkable
class Chooser(Protocol):
    """What stands in a method's place and chooses one for the recurrence at hand: a frozen dataclass, too."""

    @property
    def jac(self) -> Jac:
        """Declared structure of the Jacobian, which it passes on."""
        ...

    def choose_method(
        self, f: Callable, init: PyTree, xs: PyTree, length: int, reverse: bool
    ) -> Method:
        """Returns the method to take for these arguments of `parallel_scan`."""
        ...


class IterativeMethod(WindowedMethod, Protocol):
    """A method whose `states` returns `jaxpar.solve.windows.by_windows(self, problem, guess, on_fail)`."""

    @property
    def max_iters(self) -> int | None:
        """Bound on the iterations of a window; None for one that depends on its length."""
        ...

    def held(self, structure: Structure) -> Structure:
        """Returns the structure of the A that an update holds, given that of the problem: it says the memory."""
        ...

    def is_exact(self, structure: Structure) -> bool:
        """Whether an update solves with the whole Jacobian, so that it is the error but for higher orders."""
        ...

    def update(self, problem: Problem, h: Leaves, residual: Leaves) -> Leaves:
        """Returns delta [T, ...]; the driver adds it, tests it, and keeps what has converged as it is.

        `residual` is zero in the steps that have converged, always a prefix; delta is ignored
        there. Whatever an update does, it must be causal (delta[t] depends on steps up to t) and
        give delta[t] = residual[t] where delta[t-1] = 0: that is what fixes one more step at least
        in every iteration.
        """
        ...
