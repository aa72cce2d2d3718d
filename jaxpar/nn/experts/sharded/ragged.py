"""Tokens sent where their experts are, as many as there are: where the back end has an all-to-all of ragged parts."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.mesh import mesh_axes, num_shares, platform
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.dispatch import Plan, combine, rows_of, sort_choices
from jaxpar.nn.experts.sharded.all_to_all import room_for
from jaxpar.nn.experts.sharded.gather import on_sharing_devices, shared_axes
from jaxpar.nn.experts.transport import SUM, Routed, Weights, products
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.scan.varying import varying_as
from jaxpar.transfers import Transfer
from jaxpar.types import UsageError

__all__ = ["Ragged"]


@dataclasses.dataclass(frozen=True)
class Ragged:
    """An all-to-all of as many rows as were chosen, by `jax.lax.ragged_all_to_all`: dropless, without an empty slot.

    Memory: of the worst case, P n min(k, E / P) rows of D and of F numbers a device, for n tokens of each of P devices.
    """

    def __call__(
        self, layer: Experts, tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture.

        Raises:
          UsageError: On CPU, where JAX has no such collective.
        """
        if shared_axes(context.rules.inside[0]) and platform() == "cpu":
            raise UsageError(
                "transport=ragged is made of jax.lax.ragged_all_to_all, which CPUs do not have; take all_to_all there."
            )
        return on_sharing_devices(_on_device, layer, tokens, weights, context)

    def transfers(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares buffers of the worst case, once for each time they are made and once for their gradients."""
        axes = shared_axes()
        if not axes:
            yield from SUM.transfers(layer, sizes)
            return
        tokens, shares = _tokens(sizes), num_shares(*axes)
        rows = shares * room_for(None, layer, tokens, shares)[0] + tokens * layer.experts_per_token
        times = sizes.layers * (sizes.again + 1)
        size = times * rows * sizes.embed_dim * sizes.width
        yield Transfer("exchange", axes, 2 * times, size, "tokens and results of the experts")
        yield from self._counts(layer, sizes)

    def even(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what travels where choices are even."""
        times = sizes.layers * (2 * sizes.again + 2)
        size = times * _tokens(sizes) * layer.experts_per_token * sizes.embed_dim * sizes.width
        yield Transfer("exchange", shared_axes(), times, size, "tokens and results of the experts")
        yield from self._counts(layer, sizes)

    def _counts(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        axes, times = shared_axes(), sizes.layers * sizes.again
        yield Transfer(
            "gather",
            axes,
            times,
            times * num_shares(*axes) * layer.num_experts * 4,
            "counts of choices",
        )


def _tokens(sizes: ActivationSizes) -> int:
    return round(sizes.tokens / num_shares(*mesh_axes("seq_layer")))


def _on_device(
    layer: Experts, tokens: Routed, weights: Weights, axes: tuple[str, ...]
) -> jax.Array:
    x, expert, weight = tokens
    k = expert.shape[-1]
    width = x.shape[-1]
    shares = num_shares(*axes)
    plan = sort_choices(expert.reshape(-1, k), layer.num_experts)
    # Of each device, how many choose each expert.
    sizes = jax.lax.all_gather(plan.sizes, axes).reshape(shares, shares, -1)
    sizes = checkpoint_name(sizes, "moved")
    counts, me = sizes.sum(2), jax.lax.axis_index(axes)
    room = shares * room_for(None, layer, x.size // width, shares)[0]
    rows = checkpoint_name(
        _travel(rows_of(x.reshape(-1, width), plan), counts, axes, room), "moved"
    )
    got = jnp.take(sizes, me, axis=1).reshape(-1)  # runs of my experts, device after device
    run = jnp.searchsorted(jnp.cumsum(got), jnp.arange(room), side="right")
    theirs = jnp.where(run < got.size, run % sizes.shape[2], sizes.shape[2])
    mine = sort_choices(theirs[:, None], sizes.shape[2])
    y = products(layer.activation, rows_of(rows, mine), mine.sizes, weights)
    back = rows_of(y, Plan(mine.place.reshape(-1), mine.order[:, None], mine.sizes))
    home = checkpoint_name(_travel(back, counts.T, axes, plan.order.size), "moved")
    return combine(home, weight.reshape(-1, k), plan).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _travel(rows: jax.Array, counts: jax.Array, axes: tuple[str, ...], room: int) -> jax.Array:
    """Sends rows that lie by where they go, `counts[i, j]` from device i to device j, where they lie by sender."""
    me = jax.lax.axis_index(axes)
    sent, got = counts[me], counts[:, me]
    written = (jnp.cumsum(counts, 0) - counts)[me]
    empty = varying_as(jnp.zeros((room, rows.shape[1]), rows.dtype), rows)
    starts = jnp.cumsum(sent) - sent
    name = axes[0] if len(axes) == 1 else axes
    return jax.lax.ragged_all_to_all(rows, empty, starts, sent, written, got, axis_name=name)


def _back(axes: tuple[str, ...], room: int, kept: tuple, g: jax.Array):
    counts, num_rows = kept
    return _travel(g, counts.T, axes, num_rows), None


_travel.defvjp(
    lambda rows, counts, axes, room: (_travel(rows, counts, axes, room), (counts, rows.shape[0])),
    _back,
)
