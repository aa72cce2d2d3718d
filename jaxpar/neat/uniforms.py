"""Random numbers of individuals: all that one needs in a generation, from one key."""

import jax

from jaxpar._renamed import renamed
from jaxpar.neat.config import NeatConfig
from jaxpar.types import Array, PRNGKey

__all__ = ["Uniforms"]

_SINGLE = 24
"""Numbers that a genome needs once, at most."""


class Uniforms:
    """Uniform float32 numbers in [0, 1) of G individuals, handed out column by column.

    They depend on nothing but the key and the individual's number, which are folded together, so
    not on how the population is split.
    """

    def __init__(self, key: PRNGKey, config: NeatConfig, index: Array):
        """Draws as many as a generation needs at most; consumes `key`. `index` is int32 `[G]`."""
        assert config.activations is not None and config.evolved is not None
        sets = sum(len(names) > 1 for names in (config.activations, config.aggregations))
        per_node = 2 * len(config.evolved) + 2 * sets + 1
        count = (
            _SINGLE + config.rules.numbers_per_conn * config.max_conns + per_node * config.max_nodes
        )

        def draw(index):
            return jax.random.uniform(jax.random.fold_in(key, index), (count,))

        # Without the barrier XLA would compute the numbers again for some readers.
        self._numbers = jax.lax.optimization_barrier(jax.vmap(draw)(index))
        self._next = 0

    def take(self, count: int) -> Array:
        """The next columns, `[G, count]`."""
        first = self._next
        self._next += count
        assert self._next <= self._numbers.shape[1], "a generation needs more numbers than drawn"
        return self._numbers[:, first : self._next]

    def one(self) -> Array:
        """The next column, `[G]`."""
        return self.take(1)[:, 0]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
