"""Newton's method, and quasi-Newton with the diagonal of the Jacobian."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, OneOf, Positive, check_fields, field
from jaxpar.scan.varying import varying_as
from jaxpar.solve.fused import newton_states, takes
from jaxpar.solve.problem import Method, Outcome, Problem
from jaxpar.solve.structure import Block, Dense, Jac, Jacobian, Leaves, Structure, elementwise
from jaxpar.solve.windows import by_windows
from jaxpar.types import Array, UsageError

__all__ = ["Newton", "Quasi"]


@dataclasses.dataclass(frozen=True)
class Newton:
    """Solves for the update of all states of a window at once: (I - A S) delta = f(S h, x) - h, A the Jacobian.

    Two to five iterations on recurrences that forget; the update is solved for and not the state,
    so that what the scan rounds, the next residual corrects. Cost of an iteration: n
    Jacobian-vector products at every step and an affine scan, O(T n^3) for n coupled entries.

    Attributes:
      jac: Structure of the Jacobian: "auto" reads it off the program of f; "diag", `Block(k)`,
        "dense" and `Dense(batch_dims)` declare it, and a declaration that the program contradicts
        is refused.
      window: Steps solved at once; None for as many as `jaxpar.solve.windows.WINDOW_BYTES` allows.
      max_iters: Bound on the iterations of a window; None for half its length, but 32 to 128.
      damping: A is multiplied by 1 - damping, which trades speed for stability.
      clip: Entries of A are clipped to [-clip, clip].

    Reference: Lim et al., arXiv:2309.12252, with the update in place of the state; windows as in
    Danieli et al., arXiv:2510.21450.
    """

    jac: Jac = "auto"
    window: int | None = field(None, AtLeast(1))
    max_iters: int | None = field(None, AtLeast(1))
    damping: float = field(0.0, Between(0, 1))
    clip: float | None = field(None, Positive())

    def __post_init__(self):
        check_iterative(self)

    def held(self, structure: Structure) -> Structure:
        """Returns the structure itself: the whole Jacobian is held."""
        return structure

    def is_exact(self, structure: Structure) -> bool:
        """Returns whether the Jacobian is taken as it is."""
        return not self.damping and self.clip is None

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Solves window by window; on CUDA, elementwise cells over their whole length by one kernel an iteration."""
        plain = functools.partial(by_windows, self, problem, guess, on_fail)
        is_as_declared = self.jac == "auto" or problem.structure.proved
        # In float16 an iterate that overshoots ends at infinity, which only `by_windows` resets.
        is_half = any(leaf.dtype == jnp.float16 for leaf in problem.start)
        is_plain = not (self.window or self.damping or self.clip or guess is not None or is_half)
        is_blind = bool(problem.structure.blind)
        if is_blind or not (is_plain and is_as_declared and takes(problem)):
            return plain()
        kernels = functools.partial(newton_states, problem, self.max_iters, on_fail)
        return jax.lax.platform_dependent(default=plain, cuda=kernels)

    def update(self, problem: Problem, h: Leaves, residual: Leaves) -> Leaves:
        """Returns L(A)^-1 residual."""
        return problem.solve(_tamed(problem.jacobian(h), self.damping, self.clip), residual)


@dataclasses.dataclass(frozen=True)
class Quasi:
    """Newton's update with only the diagonal of a dense Jacobian: O(T n) memory, linear convergence.

    Gradients are exact all the same: they take the true Jacobian. Where diag(A) says little about A
    this may need as many iterations as there are steps, more than `Jacobi`; the window's bound then
    ends it.

    Attributes:
      diagonal: "exact", n Jacobian-vector products one after the other; or "hutchinson", the mean
        over `samples` of v * (A v) with random signs v.
      jac: Structure of the true Jacobian, as in `Newton`, for gradients.
      samples: Products an iteration of "hutchinson".
      seed: Of its signs, the same in every iteration.
      window: As in `Newton`, and so are the rest.
      max_iters: As there.
      damping: As there.
      clip: As there.

    Reference: Gonzalez et al., arXiv:2407.19115, whose gradients it does not share.
    """

    diagonal: str = field("exact", OneOf(("exact", "hutchinson")))
    jac: Jac = "auto"
    samples: int = field(1, AtLeast(1))
    seed: int = field(0, Finite())
    window: int | None = field(None, AtLeast(1))
    max_iters: int | None = field(None, AtLeast(1))
    damping: float = field(0.0, Between(0, 1))
    clip: float | None = field(None, Positive())

    def __post_init__(self):
        check_iterative(self)

    def held(self, structure: Structure) -> Structure:
        """Returns the structure of the diagonal."""
        return diagonal_structure(structure)

    def is_exact(self, structure: Structure) -> bool:
        """Returns whether the diagonal is all, and taken as it is."""
        is_all = self.diagonal == "exact" and max(group.n for group in structure.groups) == 1
        return is_all and not self.damping and self.clip is None

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Solves window by window."""
        return by_windows(self, problem, guess, on_fail)

    def update(self, problem: Problem, h: Leaves, residual: Leaves) -> Leaves:
        """Returns L(diag A)^-1 residual."""
        before = problem.shift(h)
        if self.diagonal == "exact":
            diagonal = exact_diagonal(problem, before)
        else:
            diagonal = _hutchinson(problem, before, self.samples, self.seed)
        structure = self.held(problem.structure)
        pairs = zip(diagonal, structure.groups, strict=True)
        jacobian = tuple(((leaf.reshape(len(leaf), *group.batch),),) for leaf, group in pairs)
        jacobian = _tamed(jacobian, self.damping, self.clip)
        return problem.solve(jacobian, residual, structure=structure)


def check_iterative(method: Method) -> None:
    """Checks the fields that all iterative methods share.

    Raises:
      UsageError: Naming the field and what is legal.
    """
    check_fields(method)
    jac = method.jac
    if not (jac in ("auto", "diag", "dense") or isinstance(jac, Block | Dense)):
        raise UsageError(
            f"jac={jac!r} is unknown; legal are 'auto', 'diag', 'dense', Block(k) and Dense(batch_dims)."
        )


def _tamed(jacobian: Jacobian, damping: float, clip: float | None) -> Jacobian:
    """Returns A, damped and clipped."""

    def tame(a: Array) -> Array:
        a = a if damping == 0 else (1 - damping) * a
        return a if clip is None else jnp.clip(a, -clip, clip)

    return jax.tree.map(tame, jacobian)


def diagonal_structure(structure: Structure) -> Structure:
    """Returns the structure of the diagonal of a Jacobian."""
    shapes: dict[int, tuple[int, ...]] = {}
    for group in structure.groups:
        shapes |= {
            leaf: (*group.batch, size) for leaf, size in zip(group.leaves, group.sizes, strict=True)
        }
    return elementwise([shapes[leaf] for leaf in range(len(shapes))])


def exact_diagonal(problem: Problem, before: Leaves) -> Leaves:
    """Returns diag A [T, ...]: column by column, each of which gives one entry of every group."""
    n = max(group.n for group in problem.structure.groups)

    def add(diagonal: Leaves, chosen: Array) -> tuple[Leaves, None]:
        seed = problem.structure.seed(before, chosen)
        column = jax.jvp(problem.apply, (before,), (seed,))[1]
        return tuple(a + b * c for a, b, c in zip(diagonal, seed, column, strict=True)), None

    zeros = varying_as(jax.tree.map(jnp.zeros_like, before), before)
    return jax.lax.scan(add, zeros, jnp.eye(n, dtype=bool))[0]


def _hutchinson(problem: Problem, before: Leaves, samples: int, seed: int) -> Leaves:
    """Returns an unbiased estimate of diag A [T, ...]; its error is that of the row's other entries."""

    def add(diagonal: Leaves, key: Array) -> tuple[Leaves, None]:
        keys = jax.random.split(key, len(before))
        signs = tuple(
            jax.random.rademacher(k, a.shape, a.dtype) for k, a in zip(keys, before, strict=True)
        )
        product = jax.jvp(problem.apply, (before,), (varying_as(signs, before),))[1]
        return tuple(
            a + b * c / samples for a, b, c in zip(diagonal, signs, product, strict=True)
        ), None

    zeros = varying_as(jax.tree.map(jnp.zeros_like, before), before)
    return jax.lax.scan(add, zeros, jax.random.split(jax.random.key(seed), samples))[0]
