"""Every device is given the tokens of all that share experts with it, and sends back what its own experts make of them.

Whatever tokens choose, as many bytes travel: the static and dropless form.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
from jaxtyping import Array, Bool, Float

from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.transport import SUM, Routed, Weights, mine_of, mixture, on_devices
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.transfers import Transfer

__all__ = ["Gather", "exchange_or_gather", "gather_tokens", "on_sharing_devices", "shared_axes"]

OnDevice = Callable[[Experts, Routed, Weights, tuple[str, ...]], jax.Array]
"""(layer, tokens, weights, mesh axes) -> mixture of a device's tokens."""


def shared_axes(rows: str | None = "batch") -> tuple[str, ...]:
    """Returns the mesh axes that hold experts, if logical axis `rows` is split over all of them.

    None where it is not: tokens are then known to devices that share experts, or all are brought together.
    """
    axes = mesh_axes("experts")
    return axes if rows and set(axes) <= set(mesh_axes(rows)) else ()


@dataclasses.dataclass(frozen=True)
class Gather:
    """Tokens are gathered over the devices that share experts, results are summed and scattered back.

    Gathered tokens are not kept for the backward pass but gathered again.
    """

    def __call__(
        self, layer: Experts, tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture."""
        return on_sharing_devices(gather_tokens, layer, tokens, weights, context)

    def transfers(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares gathers of tokens and choices, as often as these are made, and sums of what comes back."""
        axes = shared_axes()
        if not axes:
            yield from SUM.transfers(layer, sizes)
            return
        tokens = sizes.tokens * num_shares(*axes) / num_shares(*mesh_axes("seq_layer"))
        row = int(tokens * sizes.embed_dim * sizes.width)
        ids, weight = (
            int(tokens * layer.experts_per_token * size) for size in (4, max(4, sizes.width))
        )
        again = sizes.again + 1  # those of a layer's experts are made again for their gradients
        yield Transfer(
            "gather",
            axes,
            3 * sizes.layers * again,
            sizes.layers * again * (row + ids + weight),
            "tokens",
        )
        yield Transfer(
            "sum",
            axes,
            sizes.layers * sizes.again,
            sizes.layers * sizes.again * row,
            "experts' results",
        )
        yield Transfer(
            "gather", axes, sizes.layers, sizes.layers * row, "gradients of the experts' results"
        )
        yield Transfer(
            "sum",
            axes,
            2 * sizes.layers,
            sizes.layers * (row + weight),
            "gradients of tokens and weights",
        )


def on_sharing_devices(
    own: OnDevice, layer: Experts, tokens: Routed, weights: Weights, context: Context
) -> Float[Array, "B T D"]:
    """Runs `own(layer, tokens, weights, axes)` on each device that shares experts over `axes`; without any, `SUM`."""
    axes = shared_axes(context.rules.inside[0])
    if not axes:
        return SUM(layer, tokens, weights, context)

    def on_device(tokens, weights):
        return own(layer, tokens, weights, axes)

    return on_devices(on_device, layer, tokens, weights, context.rules.inside)


def gather_tokens(
    layer: Experts, tokens: Routed, weights: Weights, axes: tuple[str, ...], *, kept: bool = True
) -> Float[Array, "B T D"]:
    """Computes the mixture of gathered tokens on each device; their products are kept, or computed again backward."""
    x, expert, weight = (jax.lax.all_gather(a, axes, axis=0, tiled=True) for a in tokens)
    y = mixture(layer.activation, x, mine_of(expert, weights), weight, weights, kept=kept)
    return jax.lax.psum_scatter(y, axes, scatter_dimension=0, tiled=True)


def exchange_or_gather(
    has_room: Bool[Array, ""],
    exchange: Callable[[Routed, Weights], jax.Array],
    layer: Experts,
    tokens: Routed,
    weights: Weights,
    axes: tuple[str, ...],
) -> Float[Array, "B T D"]:
    """Computes an exchange on each device where there is room for all choices, else a gather."""

    def run_exchange(x, weight, weights):
        return exchange(tokens._replace(x=x, weight=weight), weights)

    def run_gather(x, weight, weights):
        each = tokens._replace(x=x, weight=weight)
        return gather_tokens(layer, each, weights, axes, kept=False)

    return jax.lax.cond(has_room, run_exchange, run_gather, tokens.x, tokens.weight, weights)
