"""Leaky integrate-and-fire units: what they pass on is 0 or 1, and its gradient that of an arctangent."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

__all__ = ["integrate_and_fire", "spike"]

STEEPNESS = 2.0


@jax.custom_jvp
def spike(v: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns 1 where v > 1, else 0, of the dtype of `v`.

    Its derivative is that of arctan(pi a (v - 1) / 2) / pi + 1/2 with a = 2: a / 2 / (1 + (pi a (v - 1) / 2)^2)
    (Fang et al. 2021, arXiv:2007.05785, section 4.2).
    """
    return (v > 1).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals, tangents):
    (v,), (moved,) = primals, tangents
    slope = STEEPNESS / 2 / (1 + jnp.square(math.pi / 2 * STEEPNESS * (v - 1)))
    return spike(v), slope * moved


def integrate_and_fire(
    x: Float[Array, "B T ..."],
    before: Float[Array, "B ..."] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    *,
    beta: float = 0.9,
) -> tuple[Float[Array, "B T ..."], Float[Array, "B T ..."]]:
    """Computes v[t] = beta v[t-1] + x[t], s[t] = spike(v[t]), and takes s[t] off v[t]; step by step.

    Args:
      x: Currents.
      before: Potentials before the first step; None for zeros.
      starts: Where potentials are put to zero before a step's current enters.
      beta: What a step leaves of a potential.

    Returns:
      Spikes and potentials after each step, of the shape of `x`.
    """
    before = jnp.zeros_like(x[:, 0]) if before is None else before
    starts = jnp.zeros(x.shape[:2], bool) if starts is None else starts

    def step(v, now):
        x, start = now
        v = beta * jnp.where(start.reshape(-1, *(1,) * (v.ndim - 1)), 0, v) + x
        fired = spike(v)
        v = v - fired
        return v, (fired, v)

    _, (fired, potentials) = jax.lax.scan(step, before, (jnp.moveaxis(x, 1, 0), starts.T))
    return jnp.moveaxis(fired, 0, 1), jnp.moveaxis(potentials, 0, 1)
