"""What tests of split sequences draw, and dense attention to it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit

B, H, K = 2, 4, 4


def drawn(length, groups, rows=B, dtype=np.float64):
    rng = np.random.default_rng(length)
    q, k, v, g = (
        jnp.asarray(rng.standard_normal((rows, length, n, K)), dtype)
        for n in (H, groups, groups, H)
    )
    return q, k, v, g


def in_turn(rows, length):
    return np.tile(np.arange(length, dtype=np.int32), (rows, 1))


def documents(rows, length):
    return jnp.asarray(
        np.sort(np.random.default_rng(1).integers(0, 3, (rows, length)), 1), jnp.int32
    )


def dense(q, k, v, seen):
    """Softmax over all keys at once, with the whole matrix."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum(
        "bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), v
    )


@jit
def dense_with_gradients(q, k, v, g, seen):
    out, pull = jax.vjp(lambda q, k, v: dense(q, k, v, seen), q, k, v)
    return out, *pull(g)
