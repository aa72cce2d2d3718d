"""Gated DeltaNet (arXiv:2412.06464): keys overwrite what was stored under them, and heads forget."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers.delta_rule import delta_rule
from jaxpar.nn.mixers.matrix_state import HEADS, Names, Time, head_norm, project
from jaxpar.nn.mixers.short_conv import short_conv

__all__ = ["GatedDelta"]


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule: out = norm(q S) * swish(x W_r) in each head, then W_o (arXiv:2412.06464, section 3.4).

    Queries, keys and values pass a convolution of `taps` tokens and swish; queries and keys have length 1. A step's
    size is beta = sigmoid(x w_b), and a = exp(-exp(a_log) softplus(x w_a + b_a)). A layer of `MatrixState`.

    Attributes:
      num_heads: H.
      key_dim: K of a head.
      value_dim: V of a head.
      taps: Of the convolutions.
    """

    num_heads: int = field(legal=AtLeast(1))
    key_dim: int = field(legal=AtLeast(1))
    value_dim: int = field(legal=AtLeast(1))
    taps: int = field(4, AtLeast(2))

    __post_init__ = check_fields
    own = ("norm_scale", "conv_q", "conv_k", "conv_v", "a_log")
    num_inputs, num_shared = 6, 0

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares w_q, w_k [D, H, K], w_v, w_r [D, H, V], w_a, w_b [D, H], conv_* [W, H, ...] and each head's own."""
        heads, keys, values = self.num_heads, self.key_dim, self.value_dim
        widths = {"w_q": keys, "w_k": keys, "w_v": values, "w_r": values}
        out = {name: Leaf((embed_dim, heads, width), HEADS, std) for name, width in widths.items()}
        out |= {name: Leaf((embed_dim, heads), HEADS[:2], std) for name in ("w_a", "w_b")}
        for name, width in (("conv_q", keys), ("conv_k", keys), ("conv_v", values)):
            out[name] = Leaf((self.taps, heads, width), (None, *HEADS[1:]), self.taps**-0.5)
        out |= {
            "b_a": Leaf((heads,), HEADS[1:2], "rate"),
            "a_log": Leaf((heads,), HEADS[1:2], "log_count"),
        }
        return out | {"norm_scale": Leaf((heads, values), HEADS[1:], "ones")}

    def initial(self, batch: int, embed_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        """Returns an empty state: "matrix" [B, H, K, V], and the last W - 1 inputs of each convolution."""
        del embed_dim
        heads, keys, values, reach = self.num_heads, self.key_dim, self.value_dim, self.taps - 1
        tails = {"q": (heads, keys), "k": (heads, keys), "v": (heads, values)}
        out = {name: jnp.zeros((batch, reach, *shape), dtype) for name, shape in tails.items()}
        return out | {"matrix": jnp.zeros((batch, heads, keys, values), dtype)}

    def state_axes(self) -> dict[str, Names]:
        """Returns the logical axes of the state."""
        tail: Names = ("batch", None, "heads", None)
        return {"q": tail, "k": tail, "v": tail, "matrix": ("batch", "heads", None, None)}

    def inputs(
        self, params: dict, x: Float[Array, "B T D"], state: dict | None, context: Context
    ) -> tuple[dict[str, tuple[Array, Names]], dict[str, Array]]:
        """Returns the products of queries, keys, values, the output's gate, and the logits of both gates."""
        del state
        q, k, v, r, a, b = project(
            params, x, context, "w_q", "w_k", "w_v", "w_r", numbers=("w_a", "w_b")
        )
        wide = jnp.promote_types(x.dtype, jnp.float32)
        a = a.astype(wide) + params["b_a"].astype(wide)[None, None]
        out = {"q": q, "k": k, "v": v, "r": r, "a": a, "b": b.astype(wide)}
        return {name: (lane, HEADS[1 : lane.ndim - 1]) for name, lane in out.items()}, {}

    def mix(
        self, params: dict, inputs: dict[str, Array], state: dict[str, Array], time: Time
    ) -> tuple[Float[Array, "B T H V"], dict[str, Array]]:
        """Runs the convolutions and the recurrence."""
        after, lanes = {}, {}
        for name in "qkv":
            lane, tail = short_conv(inputs[name], params[f"conv_{name}"], state[name], **time.line)
            lanes[name], after[name] = jax.nn.silu(lane), tail.astype(state[name].dtype)
        q, k = (_unit_length(lanes[name]) for name in "qk")
        wide = state["matrix"].dtype
        decay = -jnp.exp(params["a_log"].astype(wide))[None, None] * jax.nn.softplus(inputs["a"])
        beta = jax.nn.sigmoid(inputs["b"])
        out, after["matrix"] = delta_rule(
            q * self.key_dim**-0.5,
            k,
            lanes["v"],
            beta,
            decay,
            state=state["matrix"],
            packing=time.packing,
            execution=time.execution,
        )
        out = head_norm(out.astype(wide), params["norm_scale"])
        return out * jax.nn.silu(inputs["r"].astype(wide)), after


def _unit_length(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """Divides by the length; vectors shorter than 0.001 stay shorter than 1."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)
