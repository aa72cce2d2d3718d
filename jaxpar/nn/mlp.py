"""The branch of a block that looks at each token alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.norm import wide_dtype

__all__ = ["ACTIVATIONS", "Mlp"]


def _elementwise(forward, same_for_gradient):
    """Returns `forward`, of which the backward pass keeps only the arguments.

    The gradient is that of the same function written in another way: of a literal copy XLA would keep
    intermediates of the forward pass, each as large as the arguments; and a barrier against that, as
    `jax.checkpoint` sets, would keep the gradient out of the epilogue of the product before it.
    """
    function = jax.custom_vjp(forward)

    def backward(args, g):
        wide = [x.astype(wide_dtype(x)) for x in args]
        grads = jax.vjp(same_for_gradient, *wide)[1](g.astype(wide[0].dtype))
        return tuple(grad.astype(x.dtype) for grad, x in zip(grads, args, strict=True))

    function.defvjp(lambda *args: (forward(*args), args), backward)
    return function


ACTIVATIONS = {
    "swiglu": _elementwise(
        lambda gate, up: jax.nn.silu(gate) * up,
        lambda gate, up: 0.5 * gate * (1 + jnp.tanh(gate / 2)) * up,
    ),
    "gelu": _elementwise(
        lambda x: jax.nn.gelu(x, approximate=True),
        lambda x: x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    ),
    "gelu_exact": _elementwise(
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda x: 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2))),
    ),
}


@dataclasses.dataclass(frozen=True)
class Mlp:
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)).

    Attributes:
      size: F.
      activation: "swiglu" (gated), "gelu" (tanh form, GPT-2's) or "gelu_exact" (erf form).
      bias: Whether its products have biases.
    """

    size: int = field(legal=AtLeast(1))
    activation: str = field("swiglu", OneOf(ACTIVATIONS))
    bias: bool = False

    __post_init__ = check_fields

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the products into it."""
        return ("gate", "up") if self.activation == "swiglu" else ("up",)

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, Leaf]:
        """Declares w_up, w_gate [D, F], w_down [F, D] and their biases."""
        out = {f"w_{part}": Leaf((embed_dim, self.size), ("embed", "mlp"), std) for part in self.parts}
        out["w_down"] = Leaf((self.size, embed_dim), ("mlp", "embed"), out_std)
        if self.bias:
            out |= {f"b_{part}": Leaf((self.size,), ("mlp",), "zeros") for part in self.parts}
            out["b_down"] = Leaf((embed_dim,), (None,), "zeros")
        return out

    def apply(self, params: dict, x: Float[Array, "B T D"], *, apart: bool = False) -> Float[Array, "B T D"]:
        """Computes [B, T, D] -> [B, T, F] -> [B, T, D]; `apart` is that of `contract`."""

        def product(equation, x, part, axes):
            return contract(equation, x, params[f"w_{part}"], axes, bias=params.get(f"b_{part}"), apart=apart)

        up = checkpoint_name(product("btd,df->btf", x, "up", ("embed", "mlp")), "mlp")
        inside = [up]
        if "gate" in self.parts:
            inside = [checkpoint_name(product("btd,df->btf", x, "gate", ("embed", "mlp")), "mlp"), up]
        return product("btf,fd->btd", ACTIVATIONS[self.activation](*inside), "down", ("mlp", "embed"))
