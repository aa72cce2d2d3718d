"""Slots in the host's memory: in every tick one goes there, and one comes back where the table says so.

What XLA keeps on the host in a loop is an array of which slices are put on the device, and into which slices from here
are written: so does it, on TPUs and GPUs, with what rematerialisation offloads. Both are that, and nothing else.

The way there stands in no condition or loop of its own, so that it takes its time beside the tick's task; a tick with
nothing to offload sends a slot all the same, into one that nobody reads. The way back ends before the task, which may
read what has come; where none is due it takes no time.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.pipeline._once import at_most_once
from jaxpar.types import Array

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def empty_on_host(kept: list[jax.ShapeDtypeStruct], *leading: int) -> list[Array]:
    """Returns arrays [*leading, ...] in the host's memory, which hold nothing of meaning.

    Each is filled with another number: of equal ones XLA makes one, and then copies it on the host.
    """
    return [
        jax.device_put(jnp.full((*leading, *like.shape), number, like.dtype), HOST)
        for number, like in enumerate(kept)
    ]


def exchanged(
    stash: list[Array], host: Sequence[Array], cell: dict[str, Array]
) -> tuple[list[Array], list[Array]]:
    """Returns the stash with what comes back, and the host's slots with what goes, of what both held before."""
    source = jnp.maximum(cell["offload"], 0)
    goal = jnp.where(cell["offload_to"] >= 0, cell["offload_to"], host[0].shape[0] - 1)

    def fetch(cell, stash):
        back = [jax.device_put(_slot(each, cell["fetch"]), DEVICE) for each in host]
        return [
            _with_slot(slots, cell["fetch_to"], new) for slots, new in zip(stash, back, strict=True)
        ]

    # All reads come before all writes, by barriers: else XLA copies the slots.
    stash, here = jax.lax.optimization_barrier((stash, [_slot(each, source) for each in stash]))
    stash = at_most_once(cell["fetch"] >= 0, fetch, cell, stash)
    stash, here = jax.lax.optimization_barrier((stash, here))
    there = [
        _with_slot(slots, goal, jax.device_put(new, HOST))
        for slots, new in zip(host, here, strict=True)
    ]
    return stash, there


def _slot(slots: Array, number: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(slots, number, 1)


def _with_slot(slots: Array, number: Array, new: Array) -> Array:
    return jax.lax.dynamic_update_slice(slots, new, (number, *(jnp.int32(0),) * (slots.ndim - 1)))
