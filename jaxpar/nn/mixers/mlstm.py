"""The mLSTM of xLSTM (arXiv:2405.04517), with exponential input gates or sigmoid ones."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers.exponential_gates import exponential_attention
from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.matrix_state import HEADS, Names, Time, head_norm, project
from jaxpar.nn.mixers.options import Readout

__all__ = ["MLstm"]


@dataclasses.dataclass(frozen=True)
class MLstm:
    """Linear attention with an input and a forget gate a head: out = norm(h) * sigmoid(x W_r), then W_o.

    "exponential": i = exp(x w_i + b_i), h normalised by what its gates add up to, at least 1 (arXiv:2405.04517,
    equations 19 to 27), computed by `exponential_attention`. "sigmoid": i is a sigmoid, and nothing is normalised but
    by the norm of the outputs (arXiv:2503.14376, section 2). f is a sigmoid in both. A layer of `MatrixState`.

    Attributes:
      num_heads: H.
      key_dim: K of a head.
      value_dim: V of a head.
      gate: Of the input.
    """

    num_heads: int = field(legal=AtLeast(1))
    key_dim: int = field(legal=AtLeast(1))
    value_dim: int = field(legal=AtLeast(1))
    gate: str = field("exponential", OneOf(("exponential", "sigmoid")))

    __post_init__ = check_fields
    own = ("norm_scale",)
    num_inputs, num_shared = 6, 0

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares w_q, w_k [D, H, K], w_v, w_r [D, H, V], w_i, w_f [D, H], b_i, b_f [H] and norm_scale [H, V]."""
        heads, keys, values = self.num_heads, self.key_dim, self.value_dim
        widths = {"w_q": keys, "w_k": keys, "w_v": values, "w_r": values}
        out = {name: Leaf((embed_dim, heads, width), HEADS, std) for name, width in widths.items()}
        out |= {name: Leaf((embed_dim, heads), HEADS[:2], std) for name in ("w_i", "w_f")}
        # Some heads forget within a few tokens, others within a hundred.
        out |= {
            "b_i": Leaf((heads,), HEADS[1:2], "zeros"),
            "b_f": Leaf((heads,), HEADS[1:2], "keep"),
        }
        return out | {"norm_scale": Leaf((heads, values), HEADS[1:], "ones")}

    def initial(self, batch: int, embed_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        """Returns an empty state: "matrix" [B, H, K, V], of exponential gates V + 1 and "largest" [B, H]."""
        del embed_dim
        extra = self.gate == "exponential"
        out = {
            "matrix": jnp.zeros(
                (batch, self.num_heads, self.key_dim, self.value_dim + extra), dtype
            )
        }
        return (
            out | {"largest": jnp.full((batch, self.num_heads), -jnp.inf, dtype)} if extra else out
        )

    def state_axes(self) -> dict[str, Names]:
        """Returns the logical axes of the state."""
        axes: dict[str, Names] = {
            "matrix": ("batch", "heads", None, None),
            "largest": ("batch", "heads"),
        }
        return axes if self.gate == "exponential" else {"matrix": axes["matrix"]}

    def inputs(
        self, params: dict, x: Float[Array, "B T D"], state: dict | None, context: Context
    ) -> tuple[dict[str, tuple[Array, Names]], dict[str, Array]]:
        """Returns queries, keys, values, the output's gate, and both gates' logits."""
        del state
        q, k, v, r, i, f = project(
            params, x, context, "w_q", "w_k", "w_v", "w_r", numbers=("w_i", "w_f")
        )
        wide = jnp.promote_types(x.dtype, jnp.float32)
        i, f = (
            lane.astype(wide) + params[bias].astype(wide)[None, None]
            for lane, bias in ((i, "b_i"), (f, "b_f"))
        )
        out = {"q": q * self.key_dim**-0.5, "k": k, "v": v, "r": r, "i": i, "f": f}
        return {name: (lane, HEADS[1 : lane.ndim - 1]) for name, lane in out.items()}, {}

    def mix(
        self, params: dict, inputs: dict[str, Array], state: dict[str, Array], time: Time
    ) -> tuple[Float[Array, "B T H V"], dict[str, Array]]:
        """Runs the recurrence."""
        q, k, v, r, i, f = (inputs[name] for name in "qkvrif")
        matrix, forget = state["matrix"], jax.nn.log_sigmoid(f)
        if self.gate == "exponential":
            old = matrix, state["largest"]
            out, (matrix, largest) = exponential_attention(
                q,
                k,
                v,
                forget,
                i,
                state=old,
                packing=time.packing,
                execution=time.execution,
            )
            after = {"matrix": matrix, "largest": largest}
        else:
            k = (k.astype(i.dtype) * jax.nn.sigmoid(i)[..., None]).astype(k.dtype)
            out, matrix = linear_attention(
                q,
                k,
                v,
                forget,
                state=matrix,
                packing=time.packing,
                readout=Readout(dtype=matrix.dtype),
                execution=time.execution,
            )
            after = {"matrix": matrix}
        out = head_norm(out.astype(matrix.dtype), params["norm_scale"], centred=True)
        return out * jax.nn.sigmoid(r.astype(matrix.dtype)), after
