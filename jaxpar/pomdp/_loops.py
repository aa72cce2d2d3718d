"""Loops over simulations that go side by side, which end when none of them has anything left to do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.types import Array, PyTree

__all__ = ["anyone", "map_lanes", "while_live"]


@jax.custom_batching.custom_vmap
def anyone(flags: Array) -> Array:
    """Whether any of the flags is set, bool; under `vmap` in any member of the batch, which is one answer for all."""
    return jnp.any(flags)


@anyone.def_vmap
def _(size: int, batched: list[bool], flags: Array) -> tuple[Array, bool]:
    return anyone(flags), False


def while_live(
    most: Array, level: Callable[[Array, Any], Any], first: Any, live: Callable[[Any], Array]
) -> tuple[Array, Any]:
    """`carry = level(d, carry)` for d = 0, 1, ..., `most - 1` while any of `live(carry)`; how many those were, int32.

    Levels at which nobody lives must change nothing: under `vmap` all members walk as deep as the deepest, so that none
    of them has its tree copied to keep it from a level that is not its own.
    """

    def going(state: tuple) -> Array:
        return (state[0] < most) & anyone(live(state[1]))

    return jax.lax.while_loop(going, lambda state: (state[0] + 1, level(*state)), (jnp.zeros((), jnp.int32), first))


def map_lanes(apply: Callable[[Array], PyTree], active: Array, block: int) -> PyTree:
    """`apply(indices [block])` of the active ones of n lanes, block by block, as a pytree of `[n, ...]`.

    What comes back in the place of a lane that is not active means nothing, and may be NaN. Costs a scatter of n, and
    work in proportion to how many are active, which is worth it where `apply` handles long rows and lanes share them.
    With a block of n or more it is one call for all.

    Args:
        apply: of int32 lane numbers `[block]`, or `[n]`.
        active: bool `[n]`.
        block: lanes a call.
    """
    count = active.shape[0]
    if block >= count:
        return apply(jnp.arange(count, dtype=jnp.int32))
    so_far, room = jnp.cumsum(active, dtype=jnp.int32), count + -count % block
    most, place = so_far[-1], jnp.where(active, so_far - 1, room)
    padded = jnp.zeros((room,), jnp.int32).at[place].set(jnp.arange(count, dtype=jnp.int32), mode="drop")

    def going(state: tuple) -> Array:
        return anyone(state[0] < most)

    def advance(state: tuple) -> tuple:
        first, made = state
        indices = jax.lax.dynamic_slice(padded, (first,), (block,))
        made = jax.tree.map(lambda all, new: all.at[indices].set(new), made, apply(indices))
        return first + block, made

    shapes = jax.eval_shape(apply, jax.ShapeDtypeStruct((block,), jnp.int32))
    empty = jax.tree.map(lambda x: jax.lax.empty((count, *x.shape[1:]), x.dtype), shapes)
    return jax.lax.while_loop(going, advance, (jnp.zeros((), jnp.int32), empty))[1]
