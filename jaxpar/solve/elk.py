"""Newton's method in a trust region: a Kalman filter over the sequence says how far to trust each Jacobian."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, field
from jaxpar.solve.newton import check_iterative, diagonal_structure, exact_diagonal
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.structure import Jac, Leaves, Structure
from jaxpar.solve.windows import by_windows

__all__ = ["Elk"]


@dataclasses.dataclass(frozen=True)
class Elk:
    """Newton's update with Jacobians attenuated where a long step would leave the region in which they hold.

    A Levenberg-Marquardt step minimises `sum_t |delta[t] - A[t] delta[t-1] - r[t]|^2 + lambda[t]
    |delta[t]|^2`, r the residual: the estimate of a linear system that is driven by unit noise and
    seen at zero with variance 1 / lambda. ELK takes the filter's estimate, delta[t] = M[t] (A[t]
    delta[t-1] + r[t]) with M[t] = (I + lambda[t] P[t])^-1 and P the predicted covariance. Here r
    enters whole: delta[t] = M[t] A[t] delta[t-1] + r[t]. M A is stable as a filter is, however A
    grows; and since one more step becomes exact in every iteration, as with Newton's update, a
    large lambda costs iterations but cannot stall, where the published step shrinks r and converges
    only as fast as lambda lets it. The gradient is exact, as for every method.

    Cost of an iteration: Newton's, and a parallel scan over n x n filtering elements with a linear
    solve in each combination, several times Newton's. For `quasi`, and where f is elementwise, all
    of it is scalar, O(T n).

    Attributes:
      quasi: Whether only the diagonal of A is used (quasi-ELK).
      lam: lambda of a step whose residual is as large as the states; it falls with the squared
        residual, so that Newton's quadratic convergence is kept. Zero gives Newton's update.
      adaptive: False keeps lambda at `lam` in all steps and iterations.
      jac: Structure of the Jacobian, as in `Newton`, and so are the rest.
      window: As there.
      max_iters: As there.

    Reference: Gonzalez et al., arXiv:2407.19115 (lambda = 1 / sigma^2); the filter in parallel is
    Särkkä and García-Fernández, arXiv:1905.13002.
    """

    quasi: bool = False
    lam: float = field(1.0, AtLeast(0))
    adaptive: bool = True
    jac: Jac = "auto"
    window: int | None = field(None, AtLeast(1))
    max_iters: int | None = field(None, AtLeast(1))

    def __post_init__(self):
        check_iterative(self)

    def held(self, structure: Structure) -> Structure:
        """Returns the structure of the part of the Jacobian that an update uses."""
        return diagonal_structure(structure) if self.quasi else structure

    def is_exact(self, structure: Structure) -> bool:
        """Returns False but for lambda = 0: an attenuated update is not the error."""
        return not self.quasi and self.lam == 0

    def states(
        self, problem: Problem, guess: Leaves | None, on_fail: str
    ) -> tuple[Leaves, Outcome]:
        """Solves window by window."""
        return by_windows(self, problem, guess, on_fail)

    def update(self, problem: Problem, h: Leaves, residual: Leaves) -> Leaves:
        """Returns L(M A)^-1 residual. Over devices each part's filter starts anew, which changes M and no solution."""
        structure = self.held(problem.structure)
        if self.quasi:
            diagonal = zip(exact_diagonal(problem, problem.shift(h)), structure.groups, strict=True)
            jacobian = tuple(
                ((leaf.reshape(len(leaf), *group.batch),),) for leaf, group in diagonal
            )
        else:
            jacobian = problem.jacobian(h)
        ahead = tuple(a.astype(r.dtype) + r for a, r in zip(h, residual, strict=True))
        ma = []
        for group, a, whole in zip(
            structure.groups, jacobian, structure.dense(jacobian), strict=True
        ):
            lam = self._lam(group.flat(residual), group.flat(ahead))
            each = damped_dynamics(whole.astype(lam.dtype), lam)
            lanes = tuple(tuple(each[..., i, j] for j in range(group.n)) for i in range(group.n))
            ma.append(lanes if isinstance(a, tuple) else each)
        return problem.solve(tuple(ma), residual, structure=structure)

    def _lam(self, residual: Array, ahead: Array) -> Array:
        """Returns lambda [T, *batch] from the residual and f(S h, x) of one group, [T, *batch, n]."""
        if not self.adaptive:
            return jnp.full(residual.shape[:-1], self.lam, residual.dtype)
        size = jnp.mean(ahead * ahead, (0, -1))
        return (
            self.lam
            * jnp.mean(residual * residual, -1)
            / jnp.maximum(size, jnp.finfo(size.dtype).tiny)[None]
        )


def damped_dynamics(
    a: Float[Array, "T *batch n n"], lam: Float[Array, "T *batch"]
) -> Float[Array, "T *batch n n"]:
    """Returns M[t] A[t], M[t] = (I + lam[t] P[t])^-1: the dynamics of the Kalman filter's estimate.

    P[t] = A[t] S[t-1] A[t]^T + I is the covariance predicted by delta[t] = A[t] delta[t-1] + unit
    noise, and S[t] = M[t] P[t] that after seeing delta[t] with variance 1 / lam[t]; S[-1] = 0. The
    scan is over the filtering elements of Särkkä and García-Fernández 2021, eq. 10 to 15, without
    the means. Where something is not finite, M A is zero, the most cautious choice.
    """
    lam = lam[..., None, None]
    gain = lam / (1 + lam)
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    elements = _Filtering(
        dynamics=(1 - gain) * a,
        covariance=(1 - gain) * eye,
        information=gain * _times(_transposed(a), a),
    )
    after = _prefixes(elements).covariance
    before = jnp.concatenate([jnp.zeros_like(after[:1]), after[:-1]])
    predicted = _times(_times(a, before), _transposed(a)) + eye
    ma = _solved(eye + lam * predicted, a)
    is_sound = jnp.isfinite(ma).all((-2, -1), keepdims=True)
    return jnp.where(is_sound, ma, 0)


class _Filtering(NamedTuple):
    """Some steps of a filter, from a state before them to the estimate after them (A, C and J of the reference).

    Attributes:
      dynamics: What multiplies the state.
      covariance: Of the estimate, if the state is known.
      information: What the observations say of the state.
    """

    dynamics: Array
    covariance: Array
    information: Array


def _prefixes(elements: _Filtering) -> _Filtering:
    """Returns the steps up to each: log2(T) rounds of T combinations, one program, as each compiles a linear solve."""
    length = len(elements.covariance)
    index = jnp.arange(length).reshape(-1, *(1,) * (elements.covariance.ndim - 1))

    def double(round, prefixes):
        reach = 2**round
        earlier = jax.tree.map(lambda leaf: jnp.roll(leaf, reach, 0), prefixes)
        longer = _combined(earlier, prefixes)
        return jax.tree.map(lambda a, b: jnp.where(index < reach, a, b), prefixes, longer)

    return lax.fori_loop(0, (length - 1).bit_length(), double, elements)


def _combined(i: _Filtering, j: _Filtering) -> _Filtering:
    """Returns the steps of i, then those of j."""
    eye = jnp.broadcast_to(jnp.eye(i.dynamics.shape[-1], dtype=i.dynamics.dtype), i.dynamics.shape)
    both = _solved(
        eye + _times(i.covariance, j.information), jnp.concatenate([i.dynamics, i.covariance], -1)
    )
    damped, shrunk = jnp.split(both, 2, -1)
    return _Filtering(
        dynamics=_times(j.dynamics, damped),
        covariance=_times(_times(j.dynamics, shrunk), _transposed(j.dynamics)) + j.covariance,
        information=_times(_times(_transposed(i.dynamics), j.information), damped) + i.information,
    )


def _times(a: Array, b: Array) -> Array:
    return a * b if a.shape[-1] == 1 else jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _transposed(a: Array) -> Array:
    return jnp.swapaxes(a, -2, -1)


def _solved(a: Array, b: Array) -> Array:
    return b / a if a.shape[-1] == 1 else jnp.linalg.solve(a, b)
