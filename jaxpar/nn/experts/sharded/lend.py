"""Each device computes as many tokens as it has room for: those that are lent go with a copy of their expert's weights.

Who lends how many to whom is planned in the program, by `spill`, from counts that all devices know. What is lent is a
choice of an expert like any other, of one more on the device that it goes to; so the exchange is that of `exchange`.
Weights go to spare slots by an all-to-all, and their gradients come back by its transpose.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, Positive, check_fields, field
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.dispatch import sort_choices
from jaxpar.nn.experts.sharded.all_to_all import in_order, room_for
from jaxpar.nn.experts.sharded.gather import (
    Gather,
    exchange_or_gather,
    on_sharing_devices,
    shared_axes,
)
from jaxpar.nn.experts.sharded.spill import home_of, least_loaded
from jaxpar.nn.experts.transport import SUM, Routed, Weights
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.scan.varying import varying_as, varying_axes
from jaxpar.transfers import Transfer

__all__ = ["Spill"]


@dataclasses.dataclass(frozen=True)
class Spill:
    """An all-to-all of tokens as `AllToAll`'s, planned so that no device gets many more than the others.

    Least-loaded expert parallelism (arXiv:2601.17111). Where loads are tolerated no weights travel. Where more rows go
    from one device to another than there is room for, all devices gather instead, as for `AllToAll`.

    Attributes:
      slots: S, experts of others that a device has memory for.
      alpha: As of `least_loaded`.
      min_chunk: As of `least_loaded`: fewer choices are not worth an expert's weights.
      tolerated: As of `least_loaded`.
      room: As of `AllToAll`, of tokens as they are lent.

    Cost: beside that of `AllToAll`, a copy of a device's weights, and where anything is lent P S experts' weights
    through each device, forward, once more for the backward pass, and their gradients.
    """

    slots: int = field(2, AtLeast(1))
    alpha: float = field(1.1, AtLeast(1))
    min_chunk: int = field(128, AtLeast(1))
    tolerated: float = field(1.3, AtLeast(1))
    room: float | None = field(2.0, Positive())

    __post_init__ = check_fields

    def __call__(
        self, layer: Experts, tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture."""
        return on_sharing_devices(self._on_device, layer, tokens, weights, context)

    def _on_device(
        self, layer: Experts, tokens: Routed, weights: Weights, axes: tuple[str, ...]
    ) -> jax.Array:
        shares = num_shares(*axes)
        num_experts = layer.num_experts
        each = num_experts // shares
        chosen = tokens.expert.reshape(-1, tokens.expert.shape[-1])
        plan = sort_choices(chosen, num_experts)
        counts = checkpoint_name(jax.lax.all_gather(plan.sizes, axes).reshape(shares, -1), "moved")
        lent = least_loaded(
            counts.sum(0),
            shares,
            alpha=self.alpha,
            min_chunk=self.min_chunk,
            tolerated=self.tolerated,
            slots=self.slots,
        )
        lent = checkpoint_name(lent, "moved")
        slot, held = spare_slots(lent, self.slots)
        device = where_computed(chosen, plan.place, counts, lent, jax.lax.axis_index(axes))
        # On its device, the number of an expert: the device's own come before those of its slots.
        known = jnp.minimum(chosen, num_experts - 1)
        number = jnp.where(known // each == device, known % each, each + slot[known, device])
        taken = jnp.where(
            chosen < num_experts,
            device * (each + self.slots) + number,
            shares * (each + self.slots),
        )
        sent = sort_choices(taken, shares * (each + self.slots))
        room, is_bounded = room_for(self.room, layer, len(chosen), shares, self.slots)

        def exchange(tokens, weights):
            spare = _lend(weights, held, axes)
            both = {name: jnp.concatenate([w, spare[name]]) for name, w in weights.items()}
            numbered = tokens._replace(expert=taken.reshape(tokens.expert.shape))
            return in_order(layer, numbered, both, sent, axes, room)

        if not is_bounded:
            return exchange(tokens, weights)
        most = _of_all(sent.sizes.reshape(shares, -1).sum(1).max())
        return exchange_or_gather(most <= room, exchange, layer, tokens, weights, axes)

    def transfers(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares tokens and results as `AllToAll`, weights that are lent and their gradients; or else a gather."""
        if not shared_axes():
            yield from SUM.transfers(layer, sizes)
            return
        yield from self.even(layer, sizes)
        axes, shares = shared_axes(), num_shares(*shared_axes())
        times = sizes.layers * (sizes.again + 2) * (len(layer.parts) + 1)
        size = (
            shares
            * self.slots
            * sizes.embed_dim
            * layer.size
            // num_shares(*mesh_axes("mlp"))
            * sizes.width
        )
        yield Transfer(
            "exchange", axes, times * shares, times * size, "weights of experts that are lent"
        )
        if self._rows(layer, sizes)[1]:
            yield from Gather().transfers(layer, sizes)

    def even(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what travels where there is room for all and nothing is lent."""
        axes, rows = shared_axes(), self._rows(layer, sizes)[0]
        shares, times = num_shares(*axes), sizes.layers * (2 * sizes.again + 2)
        size = times * shares * rows * sizes.embed_dim * sizes.width
        yield Transfer("exchange", axes, times * shares, size, "tokens and results of the experts")
        times = sizes.layers * sizes.again
        each = layer.num_experts + shares * self.slots
        yield Transfer("exchange", axes, times * shares, times * 4 * each, "counts of what is sent")
        yield Transfer(
            "gather", axes, times, times * 4 * shares * layer.num_experts, "counts of choices"
        )

    def _rows(self, layer: Experts, sizes: ActivationSizes) -> tuple[int, bool]:
        tokens = math.ceil(sizes.tokens / num_shares(*mesh_axes("seq_layer")))
        return room_for(self.room, layer, tokens, num_shares(*shared_axes()), self.slots)


def spare_slots(lent: Int[Array, "E N"], slots: int) -> tuple[Int[Array, "E N"], Int[Array, "N S"]]:
    """Returns the slot that each device has for each expert that is lent to it, and the expert of each slot.

    Args:
      lent: The plan of `least_loaded`, with as many slots.
      slots: S.

    Returns:
      Of what is not lent any number, and E for a slot that is empty.
    """
    num_experts, shares = lent.shape
    away = (lent > 0) & (home_of(num_experts, shares)[:, None] != jnp.arange(shares)[None])
    slot = jnp.cumsum(away, 0, dtype=jnp.int32) - away
    is_held = away[..., None] & (slot[..., None] == jnp.arange(slots)[None, None])  # [E, N, S]
    number = jnp.arange(num_experts, dtype=jnp.int32)[:, None, None]
    return slot, jnp.where(is_held, number, num_experts).min(0)


def where_computed(
    expert: Int[Array, "n k"],
    place: Int[Array, "n k"],
    counts: Int[Array, "N E"],
    lent: Int[Array, "E N"],
    me: Array,
) -> Int[Array, "n k"]:
    """Returns the device that computes each of this device's choices; of one that is dropped any.

    The first choice of an expert on every device, then the second ones, and so on: what the plan gives to a device
    comes from all in like numbers, and there need be little room between any two.

    Args:
      expert: What this device's tokens chose.
      place: Of each choice among them, sorted by expert.
      counts: Choices of each expert on each device.
      lent: How many of an expert's choices each device computes; its rows sum to those of `counts`.
      me: Number of this device.

    Cost: O(n k N) integers.
    """
    num_experts, shares = lent.shape
    known = jnp.minimum(expert, num_experts - 1)
    sizes = counts[me]
    rank = place - (jnp.cumsum(sizes) - sizes)[known]
    ahead = rank[..., None] + (jnp.arange(shares) < me)[None, None]
    before = jnp.minimum(counts.T[known], ahead).sum(-1)  # of this expert, of all devices
    return (before[..., None] >= jnp.cumsum(lent, 1)[known]).sum(-1).clip(max=shares - 1)


def _of_all(number: jax.Array) -> jax.Array:
    """The largest of all devices, even of those that share nothing: none waits for one that went another way."""
    return jax.lax.pmax(number, tuple(sorted(varying_axes(number))))


def _lend(weights: Weights, held: Int[Array, "N S"], axes: tuple[str, ...]) -> Weights:
    """Returns the weights of this device's slots, zeros in empty ones; their gradients go to who holds the experts."""
    each = weights["w_down"].shape[0]
    first = jax.lax.axis_index(axes) * each
    mine = (held - first)[..., None] == jnp.arange(each)[None, None]  # [N, S, E / N]

    def lend(w):
        # By a product: its transpose adds up the gradients of an expert's copies in the same order every time.
        sent = jnp.einsum("nse,edf->nsdf", mine.astype(w.dtype), w, precision="highest")
        return jax.lax.all_to_all(sent, axes, 0, 0, tiled=True).sum(0)  # one of them has it

    def keep(w):
        return varying_as(jnp.zeros((held.shape[1], *w.shape[1:]), w.dtype), w)

    lends = _of_all((held < each * held.shape[0]).any().astype(jnp.int32))
    return jax.lax.cond(
        lends > 0, lambda w: jax.tree.map(lend, w), lambda w: jax.tree.map(keep, w), weights
    )
