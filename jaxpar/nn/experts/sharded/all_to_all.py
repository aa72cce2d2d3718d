"""Each device sends every other the tokens that chose its experts, and gets back what these make of them.

Shapes are static: there is room for so many rows between any two devices. With a capacity it is a slot for each choice
that an expert may take of a row (GShard: arXiv:2006.16668); without one it is a share of all choices, and where more
go one way than there is room for, all devices gather instead, so that nothing is ever dropped.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.fields import Positive, check_fields, field
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.dispatch import (
    Plan,
    capacity_of,
    combine,
    count_before,
    rows_of,
    sort_choices,
)
from jaxpar.nn.experts.sharded.gather import (
    Gather,
    exchange_or_gather,
    on_sharing_devices,
    shared_axes,
)
from jaxpar.nn.experts.transport import SUM, Routed, Weights, products
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.scan.varying import varying_axes
from jaxpar.transfers import Transfer

__all__ = ["AllToAll", "in_order", "room_for"]


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """One all-to-all of tokens and one of results, and as many of their gradients.

    Attributes:
      room: Rows that a device has room for of each other one, as a multiple of n k / P: n tokens of a device, k experts
        a token, P devices. None for as many as there can be, P times or more; a capacity has its own slots.
    """

    room: float | None = field(2.0, Positive())

    __post_init__ = check_fields

    def __call__(
        self, layer: Experts, tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture."""
        own = self._by_room
        slots = layer.slots(tokens.x.shape[1], context)
        if slots is not None:
            own = functools.partial(_by_slots, slots=slots)
        return on_sharing_devices(own, layer, tokens, weights, context)

    def _by_room(
        self, layer: Experts, tokens: Routed, weights: Weights, axes: tuple[str, ...]
    ) -> jax.Array:
        """Exchanges on each device where there is room for all, else gathers."""
        num_tokens = math.prod(tokens.x.shape[:2])
        room, is_bounded = room_for(self.room, layer, num_tokens, num_shares(*axes))
        choices = tokens.expert.reshape(-1, tokens.expert.shape[-1])
        plan = sort_choices(choices, layer.num_experts)

        def exchange(tokens, weights):
            return in_order(layer, tokens, weights, plan, axes, room)

        if not is_bounded:
            return exchange(tokens, weights)
        counts = plan.sizes.reshape(num_shares(*axes), -1).sum(1)
        # Of all devices, even of those that share nothing: none waits for one that went another way.
        most = jax.lax.pmax(counts.max(), tuple(sorted(varying_axes(counts))))
        return exchange_or_gather(most <= room, exchange, layer, tokens, weights, axes)

    def transfers(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares tokens and results once for each time they are made, their gradients once; or else a gather."""
        if not shared_axes():
            yield from SUM.transfers(layer, sizes)
            return
        yield from self.even(layer, sizes)
        if layer.capacity is None and self._rows(layer, sizes)[1]:
            yield from Gather().transfers(layer, sizes)

    def even(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what travels where there is room for all."""
        axes, rows = shared_axes(), self._rows(layer, sizes)[0]
        times, shares = sizes.layers * (2 * sizes.again + 2), num_shares(*axes)
        # Compilers write it as an array for each of the devices.
        size = times * rows * sizes.embed_dim * sizes.width
        yield Transfer("exchange", axes, times * shares, size, "tokens and results of the experts")
        if layer.capacity is None:
            times = sizes.layers * sizes.again
            yield Transfer(
                "exchange", axes, times * shares, times * 4 * layer.num_experts, "counts of choices"
            )

    def _rows(self, layer: Experts, sizes: ActivationSizes) -> tuple[int, bool]:
        """Rows that a device sends, empty ones and those that stay with it, and whether there may be more."""
        shares = num_shares(*shared_axes())
        if layer.capacity is not None:
            length = round(sizes.tokens / sizes.rows)
            slots = capacity_of(layer.capacity, length, layer.experts_per_token, layer.num_experts)
            return math.ceil(sizes.rows) * layer.num_experts * slots, False
        tokens = math.ceil(sizes.tokens / num_shares(*mesh_axes("seq_layer")))
        room, is_bounded = room_for(self.room, layer, tokens, shares)
        return room * shares, is_bounded


def room_for(
    room: float | None, layer: Experts, num_tokens: int, shares: int, slots: int = 0
) -> tuple[int, bool]:
    """Returns the rows from one device to another, and whether there may be more than that.

    Args:
      room: As of `AllToAll`.
      layer: For its experts.
      num_tokens: Of one device.
      shares: P.
      slots: Experts of others that a device may compute besides its own.
    """
    most = num_tokens * min(layer.experts_per_token, layer.num_experts // shares + slots)
    rows = (
        most
        if room is None
        else min(most, math.ceil(room * num_tokens * layer.experts_per_token / shares))
    )
    return rows, rows < most


def _moved(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Part p of the first axis goes to device p; what comes back is by device as well."""
    return checkpoint_name(jax.lax.all_to_all(rows, axes, 0, 0, tiled=True), "moved")


def in_order(
    layer: Experts,
    tokens: Routed,
    weights: Weights,
    plan: Plan,
    axes: tuple[str, ...],
    room: int,
) -> jax.Array:
    """Computes the mixture on each device: rows go to others in the order of their experts, with a count of each.

    Args:
      layer: The layer, for its activation.
      tokens: Tokens of this device; a choice's expert is its number in the order of the plan, P times as many as a
        device computes for a choice that is dropped.
      weights: Weights of the experts that this device computes, its own and those of others.
      plan: The choices sorted by device, and by expert on it; as many sizes a device as it computes experts.
      axes: Mesh axes of the devices.
      room: Rows from one device to another; there must be enough.
    """
    x, expert, weight = tokens
    k = expert.shape[-1]
    width = x.shape[-1]
    shares = num_shares(*axes)
    sizes = plan.sizes.reshape(shares, -1)
    ends = jnp.cumsum(sizes.sum(1))
    starts = jnp.append(ends - sizes.sum(1), 0)
    device = expert.reshape(-1, k) // sizes.shape[1]  # of a dropped choice none
    slot = jnp.arange(room)[None]
    of_slot = plan.order.at[starts[:-1, None] + slot].get(mode="clip")
    order = jnp.where(slot < sizes.sum(1)[:, None], of_slot, plan.order.size)
    place = device * room + plan.place - starts[device]
    sent = Plan(order.reshape(-1), jnp.where(device < shares, place, shares * room), plan.sizes)
    rows = _moved(rows_of(x.reshape(-1, width), sent), axes)
    got = jnp.cumsum(_moved(sizes, axes), 1)
    theirs = jax.vmap(lambda ends: jnp.searchsorted(ends, slot[0], side="right"))(got)
    mine = sort_choices(theirs.reshape(-1, 1), sizes.shape[1])
    y = products(layer.activation, rows_of(rows, mine), mine.sizes, weights)
    back = rows_of(y, Plan(mine.place.reshape(-1), mine.order[:, None], mine.sizes))
    return combine(_moved(back, axes), weight.reshape(-1, k), sent).reshape(x.shape)


def _by_slots(
    layer: Experts, tokens: Routed, weights: Weights, axes: tuple[str, ...], *, slots: int
) -> jax.Array:
    """A slot for each choice that an expert may take of a row: [E, B, slots], empty ones 0."""
    x, expert, weight = tokens
    rows, length, k = expert.shape
    num_experts, width, shares = layer.num_experts, x.shape[-1], num_shares(*axes)
    count = rows * slots
    row = jnp.arange(rows, dtype=expert.dtype)[:, None, None]
    place = jnp.where(
        expert < num_experts,
        expert * count + row * slots + count_before(expert, num_experts),
        num_experts * count,
    ).reshape(-1, k)
    nobody = jnp.full(num_experts * count, place.size, place.dtype)
    order = nobody.at[place.reshape(-1)].set(jnp.arange(place.size, dtype=place.dtype), mode="drop")
    each = num_experts // shares
    sent = Plan(order, place, jnp.full(each, shares * count, jnp.int32))
    got = _moved(rows_of(x.reshape(-1, width), sent), axes).reshape(shares, each, count, width)
    y = products(layer.activation, got.swapaxes(0, 1).reshape(-1, width), sent.sizes, weights)
    back = y.reshape(each, shares, count, width).swapaxes(0, 1).reshape(-1, width)
    return combine(_moved(back, axes), weight.reshape(-1, k), sent).reshape(x.shape)
