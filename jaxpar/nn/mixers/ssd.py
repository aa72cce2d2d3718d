"""Mamba-2's layer (arXiv:2405.21060): a state space whose steps depend on the input, as linear attention."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Positive, check_fields, field
from jaxpar.mesh import mesh_axes
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.matrix_state import HEADS, Names, Time, project
from jaxpar.nn.mixers.options import Readout
from jaxpar.nn.mixers.short_conv import short_conv
from jaxpar.types import UsageError

__all__ = ["Mamba2"]

GROUPED = ("embed", None, None)


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (arXiv:2405.21060, sections 6 and 7): S = exp(-A dt) S + dt B x^T, y = C S + D x.

    x, B and C pass a convolution of `taps` tokens and swish; dt = softplus(. + b_dt) is a number a head, and so is
    A = exp(a_log). B and C are keys and queries, which the H / G heads of a group share; the outputs y * swish(z) of
    these are normalised together. A layer of `MatrixState`.

    Attributes:
      num_heads: H.
      key_dim: N, rows of the state.
      value_dim: V of a head.
      num_groups: G.
      taps: Of the convolutions.
      eps: Of the norm.
    """

    num_heads: int = field(legal=AtLeast(1))
    key_dim: int = field(legal=AtLeast(1))
    value_dim: int = field(legal=AtLeast(1))
    num_groups: int = field(1, AtLeast(1))
    taps: int = field(4, AtLeast(2))
    eps: float = field(1e-5, Positive())

    own = (
        "norm_scale",
        "conv_x",
        "conv_b",
        "conv_c",
        "bias_x",
        "bias_b",
        "bias_c",
        "a_log",
        "d_skip",
    )
    num_inputs = 5

    def __post_init__(self):
        """Refuses groups that do not divide the heads."""
        check_fields(self)
        if self.num_heads % self.num_groups:
            raise UsageError(
                f"num_groups={self.num_groups} must divide num_heads={self.num_heads}."
            )

    @property
    def num_shared(self) -> int:
        """Numbers a token that all heads read: B, C, and the mean square of their outputs."""
        return 2 * self.num_groups * self.key_dim + 1

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares w_x, w_z [D, H, V], w_b, w_c [D, G, N], w_dt [D, H], conv_* [W, ...], biases and each head's own."""
        heads, values, grouped = self.num_heads, self.value_dim, (self.num_groups, self.key_dim)
        out = {name: Leaf((embed_dim, heads, values), HEADS, std) for name in ("w_x", "w_z")}
        out |= {name: Leaf((embed_dim, *grouped), GROUPED, std) for name in ("w_b", "w_c")}
        out["w_dt"] = Leaf((embed_dim, heads), HEADS[:2], std)
        for name, shape, axes in (
            ("x", (heads, values), HEADS[1:]),
            ("b", grouped, (None, None)),
            ("c", grouped, (None, None)),
        ):
            out[f"conv_{name}"] = Leaf((self.taps, *shape), (None, *axes), self.taps**-0.5)
            out[f"bias_{name}"] = Leaf(shape, axes, "zeros")
        of_head = {"b_dt": "rate", "a_log": "log_count", "d_skip": "ones"}
        out |= {name: Leaf((heads,), HEADS[1:2], init) for name, init in of_head.items()}
        return out | {"norm_scale": Leaf((heads, values), HEADS[1:], "ones")}

    def initial(self, batch: int, embed_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        """Returns an empty state: "matrix" [B, H, N, V], and the last W - 1 inputs of each convolution."""
        del embed_dim
        heads, values, grouped = self.num_heads, self.value_dim, (self.num_groups, self.key_dim)
        tails = {"x": (heads, values), "b": grouped, "c": grouped}
        out = {
            name: jnp.zeros((batch, self.taps - 1, *shape), dtype) for name, shape in tails.items()
        }
        return out | {"matrix": jnp.zeros((batch, heads, self.key_dim, values), dtype)}

    def state_axes(self) -> dict[str, Names]:
        """Returns the logical axes of the state."""
        whole: Names = ("batch", None, None, None)
        return {
            "x": ("batch", None, "heads", None),
            "b": whole,
            "c": whole,
            "matrix": ("batch", "heads", None, None),
        }

    def inputs(
        self, params: dict, x: Float[Array, "B T D"], state: dict | None, context: Context
    ) -> tuple[dict[str, tuple[Array, Names]], dict[str, Array]]:
        """Returns the products of x, z, B, C and the logits of dt.

        Raises:
          UsageError: If several groups of queries and keys would lie with heads that a mesh splits.
        """
        del state
        if self.num_groups > 1 and mesh_axes("heads"):
            raise UsageError(
                f"num_groups={self.num_groups} keys with heads over devices; take num_groups=1, or tensor=1."
            )
        v, z, dt = project(params, x, context, "w_x", "w_z", numbers=("w_dt",))
        apart = context.rules.apart
        b, c = (
            contract("btd,dgn->btgn", x, params[name], GROUPED, apart=apart)
            for name in ("w_b", "w_c")
        )
        wide = jnp.promote_types(x.dtype, jnp.float32)
        dt = jax.nn.softplus(dt.astype(wide) + params["b_dt"].astype(wide)[None, None])
        whole: Names = (None, None)
        return {
            "x": (v, HEADS[1:]),
            "z": (z, HEADS[1:]),
            "b": (b, whole),
            "c": (c, whole),
            "dt": (dt, HEADS[1:2]),
        }, {}

    def mix(
        self, params: dict, inputs: dict[str, Array], state: dict[str, Array], time: Time
    ) -> tuple[Float[Array, "B T H V"], dict[str, Array]]:
        """Runs the convolutions and the recurrence."""
        after, lanes, wide = {}, {}, state["matrix"].dtype
        for name in "xbc":
            lane, tail = short_conv(inputs[name], params[f"conv_{name}"], state[name], **time.line)
            lanes[name] = jax.nn.silu(lane + params[f"bias_{name}"].astype(lane.dtype)[None, None])
            after[name] = tail.astype(state[name].dtype)
        dt, x = inputs["dt"], lanes["x"]
        decay = -jnp.exp(params["a_log"].astype(wide))[None, None] * dt
        values = (x.astype(wide) * dt[..., None]).astype(x.dtype)
        out, after["matrix"] = linear_attention(
            lanes["c"],
            lanes["b"],
            values,
            decay,
            state=state["matrix"],
            packing=time.packing,
            readout=Readout(dtype=wide),
            execution=time.execution,
        )
        out = out + params["d_skip"].astype(wide)[None, None, :, None] * x.astype(wide)
        out = out * jax.nn.silu(inputs["z"].astype(wide))
        grouped = out.reshape(*out.shape[:2], self.num_groups, -1, self.value_dim)
        squares = jnp.square(grouped).sum((-1, -2), keepdims=True)
        squares = jax.lax.psum(squares, mesh_axes("heads")) if mesh_axes("heads") else squares
        size, scale = (
            self.num_heads * self.value_dim // self.num_groups,
            params["norm_scale"].astype(wide),
        )
        grouped = grouped * jax.lax.rsqrt(squares / size + self.eps)
        return grouped.reshape(out.shape) * scale[None, None], after
