"""Random numbers of individuals: all that one needs in a generation, from one key folded with its number."""

import jax
import jax.numpy as jnp

from jaxpar.neat.config import NeatConfig
from jaxpar.types import Array, PRNGKey

__all__ = ["Uniforms", "normal"]

_SINGLE = 24
"""Room for the numbers that a genome needs once."""


class Uniforms:
    """Uniform float32 numbers in [0, 1) of G individuals, handed out column by column.

    They depend on nothing but the key and the individual's number, so not on how the population is split.
    """

    def __init__(self, key: PRNGKey, config: NeatConfig, index: Array):
        """Draws as many as a generation needs at most; consumes `key`. `index` is int32 `[G]`."""
        assert config.activations is not None and config.evolved is not None
        sets = sum(len(names) > 1 for names in (config.activations, config.aggregations))
        genes = 6 if config.mode == "canonical" else 4
        count = (
            _SINGLE
            + genes * config.max_conns
            + (2 * len(config.evolved) + 2 * sets + 1) * config.max_nodes
        )
        numbers = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (count,)))(
            index
        )
        self._numbers = jax.lax.optimization_barrier(
            numbers
        )  # else some readers would compute them again
        self._next = 0

    def take(self, count: int) -> Array:
        """The next columns, `[G, count]`."""
        first, self._next = self._next, self._next + count
        assert self._next <= self._numbers.shape[1], (
            "a generation needs more numbers than Uniforms makes room for"
        )
        return self._numbers[:, first : self._next]

    def one(self) -> Array:
        """The next column, `[G]`."""
        return self.take(1)[:, 0]


def normal(uniform: Array) -> Array:
    """Standard normal numbers from uniform ones, by the inverse of their distribution; within 5.2."""
    return jnp.sqrt(2.0) * jax.scipy.special.erfinv(2 * jnp.maximum(uniform, 1e-7) - 1)
