"""A task of a tick that may not be due."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.types import Array, PyTree


def at_most_once(is_due: Array, task: Callable, cell: dict, state: PyTree) -> PyTree:
    """Returns `task(cell, state)`, or `state`.

    A loop of one turn or none: XLA changes in place what a loop carries, and copies what passes a condition. The cell's
    numbers are given with the number of the turn added, which is 0: of what depends on none of them XLA sees that all
    turns compute the same, and it would do so before the loop, due or not.
    """

    def once(carry):
        turn, state = carry
        return turn + 1, task({name: value + turn for name, value in cell.items()}, state)

    turns = is_due.astype(jnp.int32)
    return jax.lax.while_loop(lambda carry: carry[0] < turns, once, (jnp.zeros_like(turns), state))[
        1
    ]
