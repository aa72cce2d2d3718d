"""Gated linear attention (arXiv:2312.06635), its simple form, and retention (arXiv:2307.08621), with a fixed gate."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, OneOf, Positive, check_fields, field
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.matrix_state import HEADS, Names, Time, head_norm, project
from jaxpar.nn.mixers.options import Readout
from jaxpar.nn.position import Rope

__all__ = ["GatedLinear"]


@dataclasses.dataclass(frozen=True)
class GatedLinear:
    """Linear attention whose state decays: out = norm(q S) * swish(x W_r) in each head, then W_o.

    Decays by `gate`: "rows", a[t] = sigmoid(x W_1 W_2 + b)^(1 / 16) of each row of the state (GLA, arXiv:2312.06635,
    section 4.4); "heads", sigmoid(x W)^(1 / 16) of each head (simple GLA); "fixed", 1 - 2^(-5 - h) of head h, with
    rotated queries and keys (retention, arXiv:2307.08621, equation 8). A layer of `jaxpar.nn.mixers.MatrixState`.

    Attributes:
      num_heads: H.
      key_dim: K of a head.
      value_dim: V of a head.
      gate: Where decays come from.
      rank: Width between W_1 and W_2.
      temperature: 16 above: decays are near 1, and states last.
      positions: Rotary ones, of queries and keys; None for none.
    """

    num_heads: int = field(legal=AtLeast(1))
    key_dim: int = field(legal=AtLeast(1))
    value_dim: int = field(legal=AtLeast(1))
    gate: str = field("rows", OneOf(("rows", "heads", "fixed")))
    rank: int = field(16, AtLeast(1))
    temperature: float = field(16.0, Positive())
    positions: Rope | None = None

    __post_init__ = check_fields
    own, num_shared = ("norm_scale",), 0

    @property
    def num_inputs(self) -> int:
        """Queries, keys, values, the output's gate, and the decay's."""
        return 4 + (self.gate != "fixed")

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares w_q, w_k [D, H, K], w_v, w_r [D, H, V], the gate's weights, and norm_scale [H, V]."""
        heads, keys, values = self.num_heads, self.key_dim, self.value_dim
        into = lambda width: Leaf((embed_dim, heads, width), HEADS, std)  # noqa: E731
        out = {"w_q": into(keys), "w_k": into(keys), "w_v": into(values), "w_r": into(values)}
        out["norm_scale"] = Leaf((heads, values), HEADS[1:], "ones")
        if self.gate == "rows":
            out["w_gate_in"] = Leaf((embed_dim, self.rank), ("embed", None), std)
            out["w_gate_out"] = Leaf((self.rank, heads, keys), (None, *HEADS[1:]), std)
            out["b_gate"] = Leaf((heads, keys), HEADS[1:], "zeros")
        elif self.gate == "heads":
            out |= {
                "w_gate": Leaf((embed_dim, heads), HEADS[:2], std),
                "b_gate": Leaf((heads,), HEADS[1:2], "zeros"),
            }
        return out

    def initial(self, batch: int, embed_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        """Returns a state of zeros, {"matrix": [B, H, K, V]}."""
        del embed_dim
        return {"matrix": jnp.zeros((batch, self.num_heads, self.key_dim, self.value_dim), dtype)}

    def state_axes(self) -> dict[str, Names]:
        """Returns the logical axes of the state."""
        return {"matrix": ("batch", "heads", None, None)}

    def inputs(
        self, params: dict, x: Float[Array, "B T D"], state: dict | None, context: Context
    ) -> tuple[dict[str, tuple[Array, Names]], dict[str, Array]]:
        """Returns queries, keys, values, gates and log decays."""
        del state
        q, k, v, r = project(params, x, context, "w_q", "w_k", "w_v", "w_r")
        if self.positions is not None:
            q, k = (self.positions.rotate(part, context.positions) for part in (q, k))
        out = {
            "q": q * self.key_dim**-0.5,
            "k": k,
            "v": v,
            "r": r,
            "decay": self._log_decay(params, x, context),
        }
        return {name: (lane, HEADS[1 : lane.ndim - 1]) for name, lane in out.items()}, {}

    def _log_decay(self, params: dict, x: Array, context: Context) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if self.gate == "fixed":
            rates = jnp.log1p(-(2.0 ** (-5 - jnp.arange(self.num_heads, dtype=wide))))
            return jnp.broadcast_to(rates[None, None], (*x.shape[:2], self.num_heads))
        if self.gate == "heads":
            (logits,) = project(params, x, context, numbers=("w_gate",))
        else:
            apart = context.rules.apart
            inner = contract("btd,dr->btr", x, params["w_gate_in"], ("embed", None), apart=apart)
            logits = contract(
                "btr,rhk->bthk", inner, params["w_gate_out"], (None, *HEADS[1:]), apart=apart
            )
        logits = logits.astype(wide) + params["b_gate"].astype(wide)[None, None]
        return jax.nn.log_sigmoid(logits) / self.temperature

    def mix(
        self, params: dict, inputs: dict[str, Array], state: dict[str, Array], time: Time
    ) -> tuple[Float[Array, "B T H V"], dict[str, Array]]:
        """Runs the recurrence."""
        q, k, v, r, decay = (inputs[name] for name in ("q", "k", "v", "r", "decay"))
        wide = state["matrix"].dtype
        out, matrix = linear_attention(
            q,
            k,
            v,
            decay,
            state=state["matrix"],
            packing=time.packing,
            readout=Readout(dtype=wide),
            execution=time.execution,
        )
        return head_norm(out, params["norm_scale"]) * jax.nn.silu(r.astype(wide)), {
            "matrix": matrix
        }
