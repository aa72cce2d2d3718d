"""Loops over simulations that run side by side, which end when none of them is live."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpar.types import Array, PyTree

Carry = TypeVar("Carry")


@jax.custom_batching.custom_vmap
def any_in_batch(flags: Array) -> Array:
    """Disjunction of the flags, bool; under `vmap` in any member of the batch, which is one answer for all.

    A loop whose condition is one answer for all keeps its carry as it is. One whose condition is batched selects, for
    each member and at each turn, between the old and the new carry, which copies every tree of the batch.
    """
    return jnp.any(flags)


@any_in_batch.def_vmap
def _(size: int, batched: list[bool], flags: Array) -> tuple[Array, bool]:
    return any_in_batch(flags), False


def while_live(
    most: Array,
    level: Callable[[Array, Carry], Carry],
    first: Carry,
    live: Callable[[Carry], Array],
) -> tuple[Array, Carry]:
    """`carry = level(d, carry)` for d = 0, 1, ..., `most - 1` while any of `live(carry)`; how many those were, int32.

    Levels at which none is live must change nothing: under `vmap` all members go as deep as the deepest, so that no
    tree is copied to keep it from a level that is not its own.
    """

    def going(state: tuple) -> Array:
        return (state[0] < most) & any_in_batch(live(state[1]))

    return jax.lax.while_loop(
        going, lambda state: (state[0] + 1, level(*state)), (jnp.zeros((), jnp.int32), first)
    )


def map_active(apply: Callable[[Array], PyTree], active: Array, block: int) -> PyTree:
    """`apply(indices [block])` of the active ones of n simulations, block by block, as a pytree of `[n, ...]`.

    What comes back in the place of one that is not active means nothing, and may be NaN. Costs a scatter of n, and
    work in proportion to how many are active, which is worth it where `apply` handles long rows and simulations share
    them.
    With a block of n or more it is one call for all.

    Args:
        apply: of int32 numbers of simulations `[block]`, or `[n]`.
        active: bool `[n]`.
        block: simulations a call.
    """
    count = active.shape[0]
    if block >= count:
        return apply(jnp.arange(count, dtype=jnp.int32))
    # Active numbers are packed to the front; `room` is a multiple of the block, so that no slice is moved by clamping.
    so_far = jnp.cumsum(active, dtype=jnp.int32)
    room = count + -count % block
    most = so_far[-1]
    place = jnp.where(active, so_far - 1, room)
    padded = (
        jnp.zeros((room,), jnp.int32).at[place].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
    )

    def going(state: tuple) -> Array:
        return any_in_batch(state[0] < most)

    def advance(state: tuple) -> tuple:
        first, made = state
        indices = jax.lax.dynamic_slice(padded, (first,), (block,))
        made = jax.tree.map(lambda all, new: all.at[indices].set(new), made, apply(indices))
        return first + block, made

    shapes = jax.eval_shape(apply, jax.ShapeDtypeStruct((block,), jnp.int32))
    empty = jax.tree.map(lambda x: jax.lax.empty((count, *x.shape[1:]), x.dtype), shapes)
    return jax.lax.while_loop(going, advance, (jnp.zeros((), jnp.int32), empty))[1]
