"""What tests of split sequences draw."""

import jax.numpy as jnp
import numpy as np

B, H, K = 2, 4, 4


def drawn(length, groups, rows=B, dtype=np.float64):
    rng = np.random.default_rng(length)
    q, k, v, g = (jnp.asarray(rng.standard_normal((rows, length, n, K)), dtype) for n in (H, groups, groups, H))
    return q, k, v, g


def in_turn(rows, length):
    return np.tile(np.arange(length, dtype=np.int32), (rows, 1))
