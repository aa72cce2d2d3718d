"""GShard's einsum: tokens are laid into slots by products with masks, and annotations alone say where these lie.

The compiler makes two all-to-alls of them in the forward pass and two in the backward pass (arXiv:2006.16668, section
3.2). A mask is [tokens, E, slots], so this is for few experts or a small capacity, and for comparing.
"""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.mesh import constrain, local, mesh_axes, num_shares
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.dispatch import capacity_of, count_before
from jaxpar.nn.experts.sharded.gather import shared_axes
from jaxpar.nn.experts.transport import SUM, Routed, Weights
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mlp import ACTIVATIONS
from jaxpar.nn.norm import wide_dtype
from jaxpar.transfers import Transfer

__all__ = ["Annotated"]


@dataclasses.dataclass(frozen=True)
class Annotated:
    """Products with masks, split by annotations.

    Without a capacity an expert has a slot for every token of a row that a device has.

    Cost: 4 N E C D operations for the masks' products, beside those of the experts on E C slots a row, empty or not.
    """

    def __call__(
        self, layer: Experts, tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture."""
        x, expert, weight = tokens
        rows, seq, _ = context.rules.inside
        if not shared_axes(rows):
            return SUM(layer, tokens, weights, context)
        parts = num_shares(*mesh_axes(seq)) if seq else 1
        length = x.shape[1] // parts  # a group is what a device has of a row
        slots = layer.slots(x.shape[1], context) or length
        x, expert, weight = (
            a.reshape(a.shape[0], parts, length, a.shape[-1]) for a in (x, expert, weight)
        )
        here = (rows, seq, None, None)
        x, weight = constrain(x, *here), constrain(weight, *here)
        slot = local(lambda e: count_before(e, layer.num_experts), [here], here)(expert)

        def mask(values: jax.Array) -> jax.Array:
            """[B, parts, T, E, slots], of one value a choice; none of an expert or a slot that there is not."""
            choice = values[..., None] * jax.nn.one_hot(
                expert, layer.num_experts, dtype=values.dtype
            )
            return jnp.einsum(
                "bstke,bstkc->bstec", choice, jax.nn.one_hot(slot, slots, dtype=values.dtype)
            )

        there, home = ("experts", f"{rows}-experts", seq, None), (None, rows, seq, None)

        def moved(a: jax.Array, first: tuple, second: tuple) -> jax.Array:
            return checkpoint_name(constrain(constrain(a, *first, None), *second, None), "moved")

        sent = moved(
            jnp.einsum("bstec,bstd->ebscd", mask(jnp.ones_like(weight, x.dtype)), x), home, there
        )
        inside = [
            _product(sent, w, (*there, "mlp"), True)
            for name, w in weights.items()
            if name != "w_down"
        ]
        out = _product(
            ACTIVATIONS[layer.activation](*inside), weights["w_down"], (*there, None), False
        )
        y = jnp.einsum(
            "bstec,ebscd->bstd", mask(weight), moved(out, there, home).astype(weight.dtype)
        )
        y = constrain(y.astype(x.dtype), *here)
        return constrain(y.reshape(y.shape[0], -1, y.shape[-1]), *context.rules.inside)

    def transfers(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares slots and results once for each time they are made, their gradients once."""
        axes = shared_axes()
        if not axes:
            yield from SUM.transfers(layer, sizes)
            return
        length = round(sizes.tokens / sizes.rows)
        slots = length // num_shares(*mesh_axes("seq_layer"))
        if layer.capacity is not None:
            slots = capacity_of(layer.capacity, length, layer.experts_per_token, layer.num_experts)
        size = math.ceil(sizes.rows) * layer.num_experts * slots * sizes.embed_dim * sizes.width
        times = sizes.layers * (2 * sizes.again + 2)
        arrays = times * num_shares(*axes)  # compilers write one for each of the devices
        yield Transfer("exchange", axes, arrays, times * size, "slots and results of the experts")
        if shares := mesh_axes("mlp"):
            # Slots are summed over devices that share F, where the stack declares tokens alone.
            times = sizes.layers * (sizes.again + 2)
            yield Transfer(
                "sum", shares, times, times * size, "results of the experts, and gradients of slots"
            )


def _product(x: jax.Array, w: jax.Array, axes: tuple, is_inner: bool) -> jax.Array:
    y = jnp.einsum("ebscd,edf->ebscf", x, w, preferred_element_type=wide_dtype(x)).astype(x.dtype)
    y = constrain(y, *axes)
    return checkpoint_name(checkpoint_name(y, "product"), "mlp") if is_inner else y
