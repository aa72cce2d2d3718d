"""How tokens and the experts that they chose come together where devices share the experts.

A transport is given the choices of all tokens and returns the mixture. The one here makes every token known to all
devices that share experts, whatever a mesh looks like; `jaxpar.nn.experts.sharded` has those that move less.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.mesh import constrain, in_role, local, mesh_axes, num_shares
from jaxpar.nn.experts.dispatch import Plan, combine, rows_of, sort_choices
from jaxpar.nn.experts.grouped import grouped_matmul, has_index_kernel
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mlp import ACTIVATIONS
from jaxpar.scan.varying import varying_over
from jaxpar.transfers import Transfer

if TYPE_CHECKING:
    from jaxpar.nn.experts.layer import Experts

__all__ = [
    "Routed",
    "SUM",
    "Transport",
    "Weights",
    "WholeBatch",
    "mine_of",
    "mixture",
    "on_devices",
    "products",
]

Weights = dict[str, jax.Array]
"""w_up, w_gate, w_down of a layer as products want them: [E, D, F] split over "experts" and "mlp" alone."""


class Routed(NamedTuple):
    """Tokens and the experts that they chose.

    Attributes:
      x: Tokens.
      expert: Numbers of the experts; E of a choice that is dropped.
      weight: Weight of each choice in the mixture.
    """

    x: Float[Array, "B T D"]
    expert: Int[Array, "B T k"]
    weight: Float[Array, "B T k"]


class Transport(Protocol):
    """Brings tokens to their experts and results back, on the ambient mesh; frozen and hashable.

    Where a mesh splits the batch over the axes that hold the experts, tokens have to travel. Where it does not, and
    without a mesh, there is nothing to move, and a transport does as `WholeBatch`.

    Most do their work on each device, by `on_devices`; others leave it to GSPMD. What they must keep: the mixture of
    the choices that they are given, in value and in every gradient, however skewed, and no collective but those that
    `transfers` declares. Arrays that the backward pass shall keep, not move again, are named "moved" by
    `jax.ad_checkpoint.checkpoint_name`; products are named "product" by `mixture`.
    """

    def __call__(
        self, layer: "Experts", tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture, split as the tokens are.

        Args:
          layer: Whose experts these are.
          tokens: Tokens and their choices, split by `context.rules.inside`.
          weights: Of the experts.
          context: That of the layer.
        """
        ...

    def transfers(self, layer: "Experts", sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what a training step moves over the axes that hold experts; sums over those of F are the stack's."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """Every token is known to all devices that share experts; each computes its own experts, and results are summed.

    Tokens that a mesh splits over these devices are gathered. Cheap where they are not split, as of one sampled row.
    """

    def __call__(
        self, layer: "Experts", tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture."""
        axes = tuple(name and f"{name}-experts" for name in context.rules.inside)

        def own(tokens, weights):
            expert = mine_of(tokens.expert, weights)
            return mixture(layer.activation, tokens.x, expert, tokens.weight, weights)

        y = on_devices(own, layer, tokens, weights, axes, sums=mesh_axes("experts"))
        return constrain(y, *context.rules.inside)

    def transfers(self, layer: "Experts", sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares sums of results and, backward, of the gradients of tokens and weights; of split tokens gathers."""
        axes = mesh_axes("experts")
        if not axes:
            return
        split = tuple(
            axis for axis in axes if axis in (*mesh_axes("batch"), *mesh_axes("seq_layer"))
        )
        tokens = sizes.tokens * num_shares(*split) / num_shares(*mesh_axes("seq_layer"))
        row, few = sizes.embed_dim * sizes.width, layer.experts_per_token
        each = int(tokens * row)
        small = int(tokens * few * max(4, sizes.width))
        over = (
            (*axes, *mesh_axes("mlp")) if split else axes
        )  # what it is of tokens that are not split, the stack says
        yield Transfer(
            "sum",
            over,
            sizes.layers * sizes.again,
            sizes.layers * sizes.again * each,
            "of the experts",
        )
        yield Transfer(
            "sum",
            over,
            2 * sizes.layers,
            sizes.layers * (each + small),
            "into the experts, backward",
        )
        if split:
            times = sizes.layers * (sizes.again + 1)
            yield Transfer(
                "gather",
                split,
                3 * times,
                times * (each + 2 * small),
                "tokens of the experts and choices",
            )
            yield Transfer(
                "gather",
                split,
                sizes.layers,
                sizes.layers * each,
                "gradients of the experts' results",
            )


SUM = WholeBatch()


def mixture(
    activation: str,
    x: Float[Array, "*N D"],
    expert: Int[Array, "*N k"],
    weight: Float[Array, "*N k"],
    weights: Weights,
    *,
    kept: bool = True,
) -> Float[Array, "*N D"]:
    """Computes the mixture of one device's tokens by its experts, of which one out of range is none.

    Args:
      activation: As of `jaxpar.nn.mlp.Mlp`.
      x: Tokens.
      expert: Whom of the E experts of `weights` they chose; E for nobody here.
      weight: What each choice counts.
      weights: Of this device's experts [E, D, F], its share of F: results are then to be summed.
      kept: Whether products are kept for the backward pass.
    """
    k, width = expert.shape[-1], x.shape[-1]
    plan = sort_choices(expert.reshape(-1, k), weights["w_down"].shape[0])
    if has_index_kernel(x.dtype, *weights["w_down"].shape[:0:-1]):
        flat = x.reshape(-1, width), weight.reshape(-1)
        return _without_copies(activation, *flat, weights, plan, kept=kept).reshape(x.shape)
    out = products(activation, rows_of(x.reshape(-1, width), plan), plan.sizes, weights, kept=kept)
    return combine(out, weight.reshape(-1, k), plan).reshape(x.shape)


def products(
    activation: str,
    rows: Float[Array, "M D"],
    sizes: Int[Array, " E"],
    weights: Weights,
    *,
    kept: bool = True,
) -> Float[Array, "M D"]:
    """Computes each row by its expert; rows lie expert after expert, and those beyond the sum of the sizes become 0."""

    def product(rows, w, *names):
        y = grouped_matmul(rows, w, sizes)
        for name in names if kept else ():
            y = checkpoint_name(y, name)
        return y

    inside = [product(rows, w, "product", "mlp") for name, w in weights.items() if name != "w_down"]
    return product(ACTIVATIONS[activation](*inside), weights["w_down"], "product")


def _without_copies(
    activation: str, x: jax.Array, weight: jax.Array, weights: Weights, plan: Plan, *, kept: bool
) -> jax.Array:
    """The mixture of tokens [N, D] where rows are read and written by index: of D columns there is no sorted array.

    Results are weighted before the last product, which needs them for no gradient then: nothing of it is saved.
    """
    # Integers, so that the backward pass does not sort again.
    order = checkpoint_name(plan.order, "product") if kept else plan.order

    def product(w):
        y = grouped_matmul(x, w, plan.sizes, read=order)
        return checkpoint_name(checkpoint_name(y, "product"), "mlp") if kept else y

    inside = [product(w) for name, w in weights.items() if name != "w_down"]
    share = weight.at[order].get(unique_indices=True)[:, None]
    rows = (ACTIVATIONS[activation](*inside).astype(weight.dtype) * share).astype(x.dtype)
    return grouped_matmul(
        rows, weights["w_down"], plan.sizes, write=order, summed=plan.place.shape[1]
    )


def mine_of(expert: Int[Array, "*N"], weights: Weights) -> Int[Array, "*N"]:
    """Returns the number of each expert among those of this device, and their count for all others."""
    if not mesh_axes("experts"):
        return expert
    count = weights["w_down"].shape[0]
    first = jax.lax.axis_index(mesh_axes("experts")) * count
    return jnp.where((expert >= first) & (expert < first + count), expert - first, count)


def on_devices(
    own: Callable[[Routed, Weights], jax.Array],
    layer: "Experts",
    tokens: Routed,
    weights: Weights,
    axes: tuple[str | None, ...],
    *,
    sums: tuple[str, ...] = (),
) -> Float[Array, "B T D"]:
    """Runs `own(tokens, weights)` on each device's tokens, experts and share of F, and sums over F.

    Args:
      own: Returns its tokens' results; collectives over `mesh_axes("experts")` are its own affair.
      layer: Whose experts these are.
      tokens: Tokens and their choices.
      weights: Weights of the experts.
      axes: Logical axes of tokens, choices and results.
      sums: Mesh axes besides those of F over which results are summed.
    """
    leaves = layer.leaves(tokens.x.shape[-1], 1.0, 1.0)
    used = [in_role(leaves[name].axes, "use") for name in weights]
    shares = (*sums, *mesh_axes("mlp"))
    over = frozenset((*mesh_axes("experts"), *shares)).union(
        *(mesh_axes(name) for name in axes if name)
    )

    def on_device(x, expert, weight, *held):
        # Typed as different on all devices, so that gradients are summed over those that held the same.
        x, expert, weight, *held = varying_over((x, expert, weight, *held), over)
        y = own(Routed(x, expert, weight), dict(zip(weights, held, strict=True)))
        return jax.lax.psum(y, shares) if shares else y

    return local(on_device, [axes, axes, axes, *used], axes)(*tokens, *weights.values())
