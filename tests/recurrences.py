"""Slow twins of the recurrences of `jaxpar.scan`, and their inputs."""

import jax.numpy as jnp
import numpy as np
from jax import lax

PRODUCT = {
    "diag": "...,...->...",
    "block": "...ij,...j->...i",
    "dense": "...ij,...j->...i",
    "row": "...,...j->...j",
    "matrix": "...ij,...jk->...ik",
}


def draw(shape, kind="diag", axis=0, seed=0, scale=0.6, dtype="float64"):
    """Returns a, b, h0 of a recurrence that neither grows nor dies."""
    rng = np.random.default_rng(seed)
    transitions = {"diag": shape, "row": shape[:-1], "matrix": shape[:-1] + shape[-2:-1]}.get(
        kind, shape + shape[-1:]
    )
    k = 1 if kind in ("diag", "row") else transitions[-1]
    a = rng.uniform(-1, 1, transitions) * scale / k**0.5
    b, h0 = rng.normal(size=shape), rng.normal(size=shape[:axis] + shape[axis + 1 :])
    return a.astype(dtype), b.astype(dtype), h0.astype(dtype)


def loop(a, b, h0, kind="diag", axis=0, reverse=False):
    """The definition, in NumPy, in the precision of what it is given."""
    a, b = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
    h, states = h0, np.empty_like(b)
    for t in range(len(b))[::-1] if reverse else range(len(b)):
        h = np.einsum(PRODUCT[kind], a[t], h) + b[t]
        states[t] = h
    return np.moveaxis(states, 0, axis)


def scan(a, b, h0, kind="diag", axis=0, reverse=False):
    """The same by `lax.scan`, whose derivatives are those of the loop."""

    def step(h, ab):
        h = jnp.einsum(PRODUCT[kind], ab[0], h) + ab[1]
        return h, h

    inputs = (jnp.moveaxis(a, axis, 0), jnp.moveaxis(b, axis, 0))
    return jnp.moveaxis(lax.scan(step, h0, inputs, reverse=reverse)[1], 0, axis)
