"""Items as rows: columns of numbers side by side, as `jaxpar.rl.Items` reads them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array

__all__ = ["as_items"]


def as_items(*columns: Array) -> Array:
    """Columns `[N]` of any dtype as float32 `[N, F]`, the same numbers on every platform.

    On accelerators each number is chosen from its row's by its column: fused into what reads it, a concatenation takes
    one branch for each column there, which the threads of a warp run one after another.
    """
    parts = [jnp.asarray(column).astype(jnp.float32) for column in columns]
    return jax.lax.platform_dependent(*parts, cpu=_stacked, default=_chosen)


def _stacked(*parts: Array) -> Array:
    return jnp.stack(parts, axis=1)


def _chosen(*parts: Array) -> Array:
    at, found = (
        np.arange(len(parts)),
        jnp.broadcast_to(parts[0][:, None], (len(parts[0]), len(parts))),
    )
    for number, part in enumerate(parts[1:], 1):
        found = jnp.where(at == number, part[:, None], found)
    return found
