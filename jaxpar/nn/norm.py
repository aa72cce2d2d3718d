"""Normalisation of the residual stream: RMSNorm and LayerNorm."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.fields import OneOf, Positive, check_fields, field
from jaxpar.nn.leaf import Leaf

__all__ = ["Norm", "wide_dtype"]


def wide_dtype(x: jax.Array):
    """Returns float32, or the dtype of `x` if that is wider: in which sums are taken."""
    return jnp.promote_types(x.dtype, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467) or LayerNorm (arXiv:1607.06450), in float32 at least.

    Attributes:
      kind: "rms" or "layer".
      eps: Added to the variance.
      bias: Whether a LayerNorm has a bias.
      plus_one: Whether the scale is 1 + w of a parameter w that starts at 0 (Gemma), so that decay pulls it to 1.
    """

    kind: str = field("rms", OneOf(("rms", "layer")))
    eps: float = field(1e-5, Positive())
    bias: bool = False
    plus_one: bool = False

    __post_init__ = check_fields

    def leaves(self, width: int, stack: tuple = (), names: tuple = ()) -> dict[str, Leaf]:
        """Declares `scale` [D], and `bias` [D] where there is one; of stacks, [L, D]."""
        shape, axes = (*stack, width), (*names, None)
        out = {"scale": Leaf(shape, axes, "zeros" if self.plus_one else "ones")}
        if self.kind == "layer" and self.bias:
            out["bias"] = Leaf(shape, axes, "zeros")
        return out

    def apply(
        self, weights: dict[str, jax.Array], x: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        """Returns the normalised `x` in its dtype."""
        row = (1,) * (x.ndim - 1) + (-1,)

        # Recomputed in the backward pass: it costs a read of x, and saves keeping its intermediates.
        @jax.checkpoint
        def normed(x, weights):
            wide = x.astype(wide_dtype(x))
            wide = wide - wide.mean(-1, keepdims=True) if self.kind == "layer" else wide
            out = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
            scale = weights["scale"].reshape(row)
            out = out * (1 + scale.astype(wide.dtype) if self.plus_one else scale)
            return (out + weights["bias"].reshape(row) if "bias" in weights else out).astype(
                x.dtype
            )

        return normed(x, weights)
