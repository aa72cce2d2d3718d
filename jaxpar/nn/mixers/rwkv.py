"""RWKV-6's mixing over time (arXiv:2404.05892): decays of rows from the input, and a token's own weight."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import local, mesh_axes
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.matrix_state import HEADS, Names, Time, head_norm
from jaxpar.nn.mixers.options import Readout
from jaxpar.nn.mixers.short_conv import short_conv

__all__ = ["Rwkv6"]

LANES = ("w", "k", "v", "r", "g")


@dataclasses.dataclass(frozen=True)
class Rwkv6:
    """RWKV-6 (arXiv:2404.05892, section 4.2): o[t] = r (S[t-1] + diag(u) k v^T), S[t] = diag(w[t]) S[t-1] + k v^T.

    Each of w, k, v, r and g is made from the token and the one before it, x + (x' - x) * mix, where mix is mu and a
    product of low rank; w = exp(-exp(w_0 + tanh(x A) B)). Outputs are normalised by head and gated by swish(g). A layer
    of `MatrixState`.

    Attributes:
      num_heads: H.
      key_dim: K of a head.
      value_dim: V of a head.
      rank: Of the products of mix and of w.
    """

    num_heads: int = field(legal=AtLeast(1))
    key_dim: int = field(legal=AtLeast(1))
    value_dim: int = field(legal=AtLeast(1))
    rank: int = field(32, AtLeast(1))

    __post_init__ = check_fields
    own = ("norm_scale", "bonus")
    num_inputs, num_shared = 7, 0

    def leaves(self, embed_dim: int, std: float) -> dict[str, Leaf]:
        """Declares w_k, w_r [D, H, K], w_v, w_g [D, H, V], mu [5, D], mu_mix [D], low ranks, and each head's own."""
        heads, keys, values, rank = self.num_heads, self.key_dim, self.value_dim, self.rank
        widths = {"w_k": keys, "w_r": keys, "w_v": values, "w_g": values}
        out = {name: Leaf((embed_dim, heads, width), HEADS, std) for name, width in widths.items()}
        out["mu"] = Leaf((len(LANES), embed_dim), (None, None), "zeros")
        out["mu_mix"] = Leaf((embed_dim,), (None,), "zeros")
        out["mix_in"] = Leaf((embed_dim, len(LANES), rank), ("embed", None, None), std)
        out["mix_out"] = Leaf((len(LANES), rank, embed_dim), (None, None, "embed"), std)
        out["w_decay_in"] = Leaf((embed_dim, rank), ("embed", None), std)
        out["w_decay_out"] = Leaf((rank, heads, keys), (None, *HEADS[1:]), std)
        out["b_decay"] = Leaf((heads, keys), HEADS[1:], "log_rate")
        return out | {
            "bonus": Leaf((heads, keys), HEADS[1:], "zeros"),
            "norm_scale": Leaf((heads, values), HEADS[1:], "ones"),
        }

    def initial(self, batch: int, embed_dim: int, dtype: DTypeLike) -> dict[str, Array]:
        """Returns an empty state: "matrix" [B, H, K, V], and the last token's input, "last" [B, 1, D]."""
        matrix = jnp.zeros((batch, self.num_heads, self.key_dim, self.value_dim), dtype)
        return {"matrix": matrix, "last": jnp.zeros((batch, 1, embed_dim), dtype)}

    def state_axes(self) -> dict[str, Names]:
        """Returns the logical axes of the state."""
        return {"matrix": ("batch", "heads", None, None), "last": ("batch", None, None)}

    def inputs(
        self, params: dict, x: Float[Array, "B T D"], state: dict | None, context: Context
    ) -> tuple[dict[str, tuple[Array, Names]], dict[str, Array]]:
        """Returns keys, values, what reads, the gate and the log decays."""
        before, last = _before(x, state, context)
        apart, change = context.rules.apart, before - x
        first, mu = (
            params["mu_mix"].astype(x.dtype)[None, None],
            params["mu"].astype(x.dtype)[:, None, None],
        )
        whole = {"mix_in": ("embed", None, None), "mix_out": (None, None, "embed")}
        inner = jnp.tanh(
            contract(
                "btd,dnr->btnr", x + change * first, params["mix_in"], whole["mix_in"], apart=apart
            )
        )
        mixes = (
            contract("btnr,nrd->nbtd", inner, params["mix_out"], whole["mix_out"], apart=apart) + mu
        )
        mixed = {name: x + change * mix for name, mix in zip(LANES, mixes, strict=True)}
        out = {
            name: contract("btd,dhk->bthk", mixed[name], params[f"w_{name}"], HEADS, apart=apart)
            for name in LANES[1:]
        }
        inner = contract(
            "btd,dr->btr", mixed["w"], params["w_decay_in"], ("embed", None), apart=apart
        )
        into = (None, *HEADS[1:])
        decay = contract("btr,rhk->bthk", jnp.tanh(inner), params["w_decay_out"], into, apart=apart)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        out["w"] = -jnp.exp(decay.astype(wide) + params["b_decay"].astype(wide)[None, None])
        return {name: (lane, HEADS[1:]) for name, lane in out.items()}, {"last": last}

    def mix(
        self, params: dict, inputs: dict[str, Array], state: dict[str, Array], time: Time
    ) -> tuple[Float[Array, "B T H V"], dict[str, Array]]:
        """Runs the recurrence."""
        decay, k, v, r, g = (inputs[name] for name in LANES)
        wide = state["matrix"].dtype
        out, matrix = linear_attention(
            r,
            k,
            v,
            decay,
            state=state["matrix"],
            packing=time.packing,
            readout=Readout(bonus=params["bonus"], dtype=wide),
            execution=time.execution,
        )
        out = head_norm(out, params["norm_scale"], centred=True) * jax.nn.silu(g.astype(wide))
        return out, state | {"matrix": matrix}


def _before(x: Array, state: dict | None, context: Context) -> tuple[Array, Array]:
    """Returns the token before each, of the same document and 0 at its first, and the last one that counts."""
    time = context.rules.inside[1]
    axes = mesh_axes("seq_layer") if time == "seq_layer" else ()
    last = jnp.zeros_like(x[:, :1]) if state is None else state["last"]
    flat, tree = jax.tree.flatten((x, last, context.starts, context.valid))
    names = [("batch", time, None), ("batch", None, None)]
    names += [("batch", time)] * (context.starts is not None) + [("batch",)] * (
        context.valid is not None
    )

    def block(*flat):
        x, last, starts, valid = tree.unflatten(flat)
        weight = jnp.zeros((2, x.shape[-1]), x.dtype).at[0].set(1)
        out, tail = short_conv(
            x, weight, last, starts=starts, valid=valid, axis_name=axes[0] if axes else None
        )
        return out if state is None else (out, tail.astype(last.dtype))

    if state is None:
        return local(block, names, names[0])(*flat), last
    return local(block, names, (names[0], names[1]))(*flat)
