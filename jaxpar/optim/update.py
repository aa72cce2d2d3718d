"""The last step of every update: nothing that is not finite is kept."""

import jax
import jax.numpy as jnp
import optax

from jaxpar.types import Array, PyTree

__all__ = ["finite_or_old", "in_widest_float"]


def finite_or_old(
    new: tuple[PyTree, PyTree], old: tuple[PyTree, PyTree], grad_norm: Array, good: Array | bool = True
) -> tuple[tuple[PyTree, PyTree], Array]:
    """Keeps a step whole or not at all: `new` if its parameters and the gradient are finite, else `old`.

    A finite loss and gradient are not enough: 0 / (sqrt(0) + eps) where eps rounds to 0, a rate times an update that
    overflows, or Newton-Schulz far from its unit norm give a NaN or an infinity that no later step can mend. Moments
    need no look of their own: they are means of gradients and of their squares, finite where the norm is, and a pass
    over them would double the cost, of one more reading of what the update reads.

    Args:
      new: Parameters and optimizer state after the step.
      old: The same before.
      grad_norm: Root of the sum of squares of the gradient that the step was made from.
      good: bool [], what else the step depends on, such as whether its loss is finite.

    Returns:
      The pair to go on with, and bool [], whether it is the new one.
    """
    good = good & jnp.isfinite(grad_norm)
    for leaf in jax.tree.leaves(new[0]):
        good = good & jnp.isfinite(leaf).all()
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old), good


def in_widest_float(schedule: optax.Schedule) -> optax.Schedule:
    """Returns the schedule computed in float64 where that is enabled: optax's take a count of int32 to float32."""
    return lambda step: schedule(jnp.asarray(step, float))
