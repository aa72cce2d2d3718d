"""What enters each piece of a sequence whose time is split over devices: one summary a piece is exchanged."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.scan._rings import take, together
from jaxpar.stage import refuse_in_stage

__all__ = ["from_earlier", "is_first"]


def is_first(axis_name: str, reverse: bool):
    """Returns whether this device holds the piece with the first step (the last one if `reverse`)."""
    return lax.axis_index(axis_name) == (lax.axis_size(axis_name) - 1 if reverse else 0)


def from_earlier(tree, axis_name: str, reverse: bool):
    """Returns `tree` of the device whose piece comes just before this one's; zeros where there is none."""
    refuse_in_stage("a recurrence over a split sequence", "take mesh.context=1")
    size = lax.axis_size(axis_name)
    # No pair for the piece at the end: `ppermute` gives zeros to who is sent nothing.
    hops = [(i, i - 1) if reverse else (i, i + 1) for i in range(size)]
    return jax.tree.map(
        lambda x: lax.ppermute(x, axis_name, [hop for hop in hops if 0 <= hop[1] < size]), tree
    )


def incoming(advance, summary, start, axis_name: str, reverse: bool):
    """Returns the state that enters this device's piece.

    Moves one summary a device, whatever the length of the pieces; each device then adds up those before its own.

    Args:
      advance: `(state, summary) -> state` after a piece.
      summary: Of this device's piece.
      start: State before the first step.
      axis_name: Mesh axis over which time is split.
      reverse: Whether time runs from the last device to the first.
    """
    gathered = lax.all_gather(summary, axis_name)
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def add(step, state):
        place = size - 1 - step if reverse else step
        earlier = place > here if reverse else place < here
        after = advance(state, take(gathered, place, 0))
        return jax.tree.map(lambda x, y: jnp.where(earlier, x, y), after, state)

    # Not a product with 0 where a piece is later: its summary may be infinite.
    _, start = together((summary, start))
    return lax.fori_loop(0, size, add, start)
