"""How fast a recurrence forgets: its largest Lyapunov exponent, which decides whether a parallel solve pays."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from jaxpar.types import PyTree, UsageError

__all__ = ["lyapunov"]


def lyapunov(
    f,
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    *,
    states: PyTree | None = None,
    discard: int = 0,
    seed: int = 0,
) -> Float[Array, ""]:
    """Returns the largest Lyapunov exponent of h[t] = f(h[t-1], x[t])[0], in nats a step.

    It is log ||J[T-1] ... J[k] v|| / (T - k), J[t] the Jacobian of f at h[t-1], v of norm one, k =
    `discard`: how fast two runs from nearby states part (positive, chaos) or meet (negative). A
    parallel solve takes few iterations where it is negative and is hopeless where it is clearly
    positive (Gonzalez et al. 2025, arXiv:2508.16817). The estimate converges like 1 / T or, on a
    chaotic orbit, like 1 / sqrt(T).

    Args:
      f: (state, x) -> (state, y), as for `lax.scan`; every state leaf floating.
      init: The state before the first step.
      xs: Inputs, each leaf [T, ...], or None.
      length: T, needed when xs has no leaves.
      states: The states after each step, [T, ...], where they are known (the ys of a scan that
        returns its carry). All Jacobians are then taken and multiplied at once, in log2(T) rounds
        of n x n products with O(T n^2) memory; without them one `lax.scan` carries v along.
      discard: Steps left out of the mean at the start, so that the orbit forgets `init` and, in the
        loop, v turns.
      seed: Of v.

    Returns:
      The exponent; -inf if some product sends v to zero, so that the past is forgotten wholly.

    Raises:
      UsageError: State leaves that are not floating, no step left to average over, states of
        another length.
    """
    leaves = jax.tree.leaves(init)
    if not leaves or not all(
        jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves
    ):
        raise UsageError(
            "lyapunov needs a state of floating leaves: only those have neighbours to part from."
        )
    init = jax.tree.map(jnp.asarray, init)
    num = length if length is not None else next((len(leaf) for leaf in jax.tree.leaves(xs)), None)
    if num is None or not 0 <= discard < num:
        raise UsageError(
            f"lyapunov needs steps to average over, but of {num} it is to discard {discard}."
        )
    h, unravel = ravel_pytree(init)
    v = jax.random.normal(jax.random.key(seed), h.shape, h.dtype)
    v = v / jnp.linalg.norm(v)

    def step(h, x):
        return ravel_pytree(f(unravel(h), x)[0])[0]

    if states is None:
        logs = _run_steps(step, h, xs, length, v)
        return logs[discard:].mean()
    flat = jax.vmap(lambda state: ravel_pytree(state)[0])(states)
    if len(flat) != num:
        raise UsageError(
            f"states must hold the state after each of the {num} steps, but hold {len(flat)}."
        )
    before = jnp.concatenate([h[None], flat[:-1]])[discard:]
    inputs = jax.tree.map(lambda x: x[discard:], xs)
    jacobians = jax.vmap(jax.jacfwd(step), axis_size=num - discard)(before, inputs)
    return _log_product(jacobians, v) / (num - discard)


def _run_steps(step, h: Array, xs: PyTree, length: int | None, v: Array) -> Array:
    """Returns log ||J v|| of every step, v being turned along and made of norm one each time."""

    def body(carry, x):
        h, v = carry
        h, turned = jax.jvp(lambda h: step(h, x), (h,), (v,))
        norm = jnp.linalg.norm(turned)
        return (h, jnp.where(norm > 0, turned / jnp.where(norm > 0, norm, 1), v)), jnp.log(norm)

    return lax.scan(body, (h, v), xs, length)[1]


def _log_product(matrices: Array, v: Array) -> Array:
    """Returns log ||M[last] ... M[0] v|| of matrices [T, n, n], multiplied in pairs and rescaled in every round."""
    log_scale = jnp.zeros(len(matrices), matrices.dtype)
    while len(matrices) > 1:
        if len(matrices) % 2:
            matrices = jnp.concatenate([matrices, jnp.eye(len(v), dtype=matrices.dtype)[None]])
            log_scale = jnp.append(log_scale, 0)
        matrices = jnp.matmul(matrices[1::2], matrices[::2], precision=lax.Precision.HIGHEST)
        largest = jnp.abs(matrices).max((1, 2))
        matrices = matrices / jnp.where(largest > 0, largest, 1)[:, None, None]
        log_scale = log_scale[1::2] + log_scale[::2] + jnp.log(largest)
    return log_scale[0] + jnp.log(
        jnp.linalg.norm(jnp.matmul(matrices[0], v, precision=lax.Precision.HIGHEST))
    )
