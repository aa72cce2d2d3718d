"""Numbers that are all different, drawn without a sort: where mines, starts and units are placed."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["distinct"]

MOST = 16
"""Numbers from which on a sort is taken: what takes its place grows as their square."""


def distinct(key: PRNGKey, num: int, count: int) -> Array:
    """Draws `count` of the numbers `0 .. num - 1`, all different, in random order: int32 `[count]`; consumes `key`.

    The first `count` steps of a shuffle (Durstenfeld 1964, algorithm 235): step i swaps place i with a place drawn
    from i on. Only what these places hold is followed, in O(count^2) operations on single numbers; a permutation of
    all draws and sorts `num` numbers.

    Raises:
        UsageError: `count` is not between 1 and `num`.
    """
    if not 1 <= count <= num:
        raise UsageError(f"distinct draws 1 to {num} of the numbers below {num}, not {count}")
    if count > MOST:
        return jax.random.permutation(key, num)[:count].astype(jnp.int32)
    places = jax.random.randint(key, (count,), np.arange(count), num, jnp.int32)
    held: list[Array] = []  # by the place that each step left, when it left it

    def at(place: Array, steps: int) -> Array:
        """What a place holds after so many steps."""
        number = place
        for step in range(steps):
            number = jnp.where(places[step] == place, held[step], number)
        return number

    numbers = []
    for step in range(count):
        numbers.append(at(places[step], step))
        held.append(at(jnp.int32(step), step))
    return jnp.stack(numbers)
