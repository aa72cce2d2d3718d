"""Attention as one of the mixers: projections around the kernels, and a cache of keys and values."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Between, OneOf, check_fields, field
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.attention.cache import CACHE_AXES, Cache, LinearCache, PositionRule
from jaxpar.nn.attention.kernels import ATTENTION_IMPLS, AttentionExecution, Dropout, attention
from jaxpar.nn.attention.state import finish
from jaxpar.nn.attention.visibility import Visible
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import Transposed, contract, transposed_is_faster
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import Alibi, Rope
from jaxpar.transfers import Transfer
from jaxpar.types import PyTree, UsageError

__all__ = ["ATTENTION_IMPLS", "Attend", "Attention", "WholeSequence"]

INTO, OUT = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")


class Attend(Protocol):
    """Attention of T tokens to each other on the ambient mesh, where none were before; frozen and hashable.

    `WholeSequence` brings a sequence that devices share together. `jaxpar.nn.attention.context.SplitSequence` leaves it
    split: it stands right of this room, and so is given to a mixer.
    """

    def __call__(
        self,
        mixer: "Attention",
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        context: Context,
    ) -> Float[Array, "B T H K"]:
        """Returns the outputs, split over "seq_layer" as the queries are, which are rotated as the keys are."""
        ...

    def transfers(self, mixer: "Attention", sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what this moves between devices in a training step."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeSequence:
    """Attention over whole rows, whose tokens lie in turn: queries, keys and values of a split sequence are gathered.

    The form of everything that is asked of attention: kernels by name, dropout of weights, slopes, masks.
    """

    def __call__(
        self,
        mixer: "Attention",
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        context: Context,
    ) -> Float[Array, "B T H K"]:
        """Returns the outputs."""
        rules = context.rules
        return attention(
            q,
            k,
            v,
            segments=context.segments,
            visibility=mixer.rule.visibility(mixer.num_heads, context.visible),
            dropout=Dropout(rate=mixer.dropout, key=context.key),
            execution=AttentionExecution(
                impl=mixer.impl, inside=rules.inside, blockwise=rules.blockwise
            ),
        )

    def transfers(self, mixer: "Attention", sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares the gathers of a split sequence: queries once for each time they are made, keys and values twice."""
        inside = mesh_axes("seq_layer")
        head = sizes.tokens * mixer.head_dim * sizes.width / num_shares(*mesh_axes("heads"))
        queries, keys = head * mixer.num_heads, head * mixer.num_kv_heads
        moved = (
            ("queries", sizes.again, queries),
            ("keys", 2, keys),
            ("values", 2, keys),
            ("mixed", 1, queries),
        )
        for what, count, size in moved:
            arrays = sizes.layers * count
            if inside:
                yield Transfer(
                    "gather", inside, arrays, int(arrays * size), f"{what} of the whole sequence"
                )


WHOLE = WholeSequence()


@dataclasses.dataclass(frozen=True)
class Attention:
    """Softmax attention of H heads to G keys and values: multi-head, grouped-query or multi-query.

    Attributes:
      num_heads: H, query heads.
      num_kv_heads: G, key and value heads, a divisor of H.
      head_dim: K.
      bias: Whether the products have biases.
      positions: Rotary ones, slopes over the distance, or None.
      visible: Who sees whom.
      dropout: Rate on attention weights, while training.
      impl: "auto" takes cuDNN on GPU, splash on TPU, dense XLA elsewhere.
      attend: How tokens attend to each other where a mesh splits them and no cache is kept.
      qkv_bias: Whether the products into queries, keys and values have biases, even if the one out has none.
      score_cap: c, where a score s is c tanh(s / c) (soft-capping); 0 for none.
      score_dim: Of scores q . k / sqrt(this); 0 means K.
      qk_norm: Of each head's queries and keys before they are rotated, one scale [K] for all heads (QK norm:
        arXiv:2302.05442, section 2, there a LayerNorm); None for none.
    """

    num_heads: int = field(legal=AtLeast(1))
    num_kv_heads: int = field(legal=AtLeast(1))
    head_dim: int = field(legal=AtLeast(1))
    bias: bool = False
    positions: Rope | Alibi | None = None
    visible: Visible = Visible()
    dropout: float = field(0.0, Between(0, 1, "[)"))
    impl: str = field("auto", OneOf(ATTENTION_IMPLS))
    attend: Attend = WHOLE
    qk_norm: Norm | None = None
    qkv_bias: bool = False
    score_cap: float = field(0.0, AtLeast(0))
    score_dim: float = field(0.0, AtLeast(0))

    num_inputs = 3

    def __post_init__(self):
        """Refuses heads that do not divide, and halves of a number to rotate."""
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            legal = [g for g in range(1, self.num_heads + 1) if self.num_heads % g == 0]
            raise UsageError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"legal are {', '.join(map(str, legal))}."
            )
        if isinstance(self.positions, Rope):
            if self.head_dim % 2:
                raise UsageError(f"head_dim={self.head_dim} must be even for rope.")
            self.positions.width(self.head_dim)

    @property
    def causal(self) -> bool:
        """Whether a token sees none after it."""
        return self.visible.causal

    @property
    def rule(self) -> PositionRule:
        """Keys that a query sees, and dependence of scores on positions."""
        return PositionRule(visible=self.visible, positions=self.positions, cap=self.score_cap)

    @property
    def score_size(self) -> int:
        """H K."""
        return self.num_heads * self.head_dim

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, PyTree]:
        """Declares wq [D, H, K], wk, wv [D, G, K], wo [H, K, D] and their biases, and q_norm, k_norm."""
        heads, kv = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        axes = {
            "q": INTO,
            "k": ("embed", "kv_heads", "head_dim"),
            "v": ("embed", "kv_heads", "head_dim"),
        }
        sizes = {"q": heads, "k": kv, "v": kv}
        out: dict[str, PyTree] = {
            f"w{name}": Leaf((embed_dim, *sizes[name]), axes[name], std) for name in axes
        }
        out["wo"] = Leaf((*heads, embed_dim), OUT, out_std)
        if self.bias or self.qkv_bias:
            out |= {f"b{name}": Leaf(sizes[name], axes[name][1:], "zeros") for name in axes}
        if self.bias:
            out["bo"] = Leaf((embed_dim,), (None,), "zeros")
        if self.qk_norm is not None:
            out |= {name: self.qk_norm.leaves(self.head_dim) for name in ("q_norm", "k_norm")}
        return out

    def for_decoding(self, params: dict) -> dict:
        """Returns the parameters with "wqkv" [D, H + 2 G, K] in place of wq, wk and wv, and their biases alike.

        Left alone where a mesh splits heads, whose shares would not be those of the three, and where a weight is no
        array.
        """
        names = [
            f"{kind}{name}" for kind in ("w", "b") for name in "qkv" if f"{kind}{name}" in params
        ]
        split = any(mesh_axes(name) for name in ("embed_weight", "heads", "kv_heads", "head_dim"))
        if split or not all(isinstance(params[name], jax.Array) for name in names):
            return params
        out = {name: x for name, x in params.items() if name not in names}
        for kind in sorted({name[0] for name in names}):
            out[f"{kind}qkv"] = jnp.concatenate([params[f"{kind}{name}"] for name in "qkv"], -2)
        if transposed_is_faster(out["wqkv"], out["wo"]):
            out |= {"wqkv": Transposed.of(out["wqkv"], 1), "wo": Transposed.of(out["wo"], 2)}
        return out

    def init_cache(self, batch: int, slots: int, width: int, dtype) -> LinearCache:
        """Returns an empty cache of `slots` tokens, or of the window if that is smaller."""
        del width
        if not self.causal:
            raise UsageError(
                "attention that is not causal has no cache; give causal=true, or apply it to whole rows."
            )
        room = min(slots, self.visible.window or slots)
        return LinearCache.empty(batch, self.num_kv_heads, room, self.head_dim, dtype)

    def cache_axes(self) -> LinearCache:
        """Returns the logical axes of the cache."""
        return LinearCache(CACHE_AXES, CACHE_AXES)  # type: ignore[arg-type]

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: Cache | None, context: Context
    ) -> tuple[Float[Array, "B T D"], Cache | None, Aux]:
        """Returns outputs, the cache with the new keys and values, and nothing to tell."""

        def product(equation, x, name, axes):
            return contract(
                equation,
                x,
                params[f"w{name}"],
                axes,
                bias=params.get(f"b{name}"),
                apart=context.rules.apart,
            )

        if "wqkv" in params:
            ends = self.num_heads, self.num_heads + self.num_kv_heads
            q, k, v = jnp.split(product("btd,dhk->bthk", x, "qkv", INTO), ends, axis=2)
        else:
            q = product("btd,dhk->bthk", x, "q", INTO)
            k, v = (
                product("btd,dgk->btgk", x, name, ("embed", "kv_heads", "head_dim"))
                for name in "kv"
            )
        if self.qk_norm is not None:
            q, k = (
                self.qk_norm.apply(params[name], part)
                for name, part in (("q_norm", q), ("k_norm", k))
            )
        if self.score_dim:
            q = q * math.sqrt(self.head_dim / self.score_dim)
        out, cache = self.mix(q, k, v, cache, context)
        return product("bthk,hkd->btd", checkpoint_name(out, "attention"), "o", OUT), cache, NOTHING

    def mix(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        cache: Cache | None,
        context: Context,
    ) -> tuple[Float[Array, "B T H K"], Cache | None]:
        """Returns what new tokens' queries, keys and values make, not rotated yet, and the cache with these."""
        rule = self.rule
        if cache is not None and not context.fresh:
            state, cache = cache.attend(q, k, v, rule, context)
            return finish(state).astype(q.dtype), cache
        q, k = (rule.rotate(x, context.positions) for x in (q, k))
        q, k, v = (checkpoint_name(part, "qkv") for part in (q, k, v))
        # `attend` moves what devices hold of one sequence: where none is split, nothing is moved.
        rules = context.rules
        is_split = rules.inside[1] == "seq_layer" and bool(mesh_axes("seq_layer"))
        if cache is None and is_split:
            return self.attend(self, q, k, v, context), None

        impl = self.impl
        if cache is not None and impl != "xla":
            # A kernel that training asked for by name may be another machine's; "auto" takes it wherever it runs.
            impl = "auto"
        out = attention(
            q,
            k,
            v,
            segments=context.segments,
            visibility=rule.visibility(self.num_heads, context.visible),
            dropout=Dropout(rate=self.dropout, key=context.key),
            execution=AttentionExecution(
                impl=impl,
                prompt=cache is not None,
                inside=rules.inside,
                blockwise=rules.blockwise,
            ),
        )
        if cache is None:
            return out, None
        return out, cache.fill(k, v, context)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what `attend` moves, and the sums over heads of the gradients of their norms."""
        yield from self.attend.transfers(self, sizes)
        if self.qk_norm is not None and mesh_axes("heads"):
            axes = (*mesh_axes("batch"), *mesh_axes("seq_layer"), *mesh_axes("heads"))
            size = 2 * sizes.layers * self.head_dim * max(sizes.width, 4)
            yield Transfer(
                "sum", axes, 2 * sizes.layers, size, "gradients of q_norm and k_norm, over heads"
            )
