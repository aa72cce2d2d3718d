"""Every device is given the tokens of all that share experts with it, and sends back what its own experts make of them.

Whatever tokens choose, as many bytes travel: the static and dropless form.
"""

import dataclasses
from collections.abc import Iterator

import jax
from jaxtyping import Array, Float, Int

from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.transport import SUM, Routed, Weights, mine_of, mixture, on_devices
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.transfers import Transfer

__all__ = ["Gather", "shared_axes"]


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
        x, expert, weight = tokens
        axes = shared_axes(context.rules.inside[0])
        if not axes:
            return SUM(layer, tokens, weights, context)

        def own(x, expert, weight, weights):
            return gathered(layer.activation, x, expert, weight, weights, axes)

        return on_devices(own, layer, x, expert, weight, weights, context.rules.inside)

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


def gathered(
    activation: str,
    x: Float[Array, "B T D"],
    expert: Int[Array, "B T k"],
    weight: Float[Array, "B T k"],
    weights: Weights,
    axes: tuple[str, ...],
    *,
    kept: bool = True,
) -> Float[Array, "B T D"]:
    """Computes it on each device, inside `on_devices`; products are kept for the backward pass, or made again."""
    x, expert, weight = (
        jax.lax.all_gather(a, axes, axis=0, tiled=True) for a in (x, expert, weight)
    )
    y = mixture(activation, x, mine_of(expert, weights), weight, weights, kept=kept)
    return jax.lax.psum_scatter(y, axes, scatter_dimension=0, tiled=True)
