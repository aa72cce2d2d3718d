"""Attention as one of the mixers: projections around the kernels, and a cache of keys and values."""

import dataclasses
from collections.abc import Iterator

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Between, OneOf, check_fields, field
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.attention.cache import CACHE_AXES, Cache, LinearCache, PositionRule
from jaxpar.nn.attention.kernels import attention
from jaxpar.nn.attention.state import finish
from jaxpar.nn.attention.visibility import Visible
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.position import Alibi, Rope
from jaxpar.types import UsageError
from jaxpar.verify import Transfer

__all__ = ["ATTENTION_IMPLS", "Attention"]

ATTENTION_IMPLS = ("auto", "cudnn", "splash", "xla")
INTO, OUT = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")


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
    """

    num_heads: int = field(legal=AtLeast(1))
    num_kv_heads: int = field(legal=AtLeast(1))
    head_dim: int = field(legal=AtLeast(1))
    bias: bool = False
    positions: Rope | Alibi | None = None
    visible: Visible = Visible()
    dropout: float = field(0.0, Between(0, 1, "[)"))
    impl: str = field("auto", OneOf(ATTENTION_IMPLS))

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
        if isinstance(self.positions, Rope) and self.head_dim % 2:
            raise UsageError(f"head_dim={self.head_dim} must be even for rope.")

    @property
    def causal(self) -> bool:
        """Whether a token sees none after it."""
        return self.visible.causal

    @property
    def score_size(self) -> int:
        """H K."""
        return self.num_heads * self.head_dim

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, Leaf]:
        """Declares wq [D, H, K], wk, wv [D, G, K], wo [H, K, D] and their biases."""
        heads, kv = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        axes = {"q": INTO, "k": ("embed", "kv_heads", "head_dim"), "v": ("embed", "kv_heads", "head_dim")}
        sizes = {"q": heads, "k": kv, "v": kv}
        out = {f"w{name}": Leaf((embed_dim, *sizes[name]), axes[name], std) for name in axes}
        out["wo"] = Leaf((*heads, embed_dim), OUT, out_std)
        if self.bias:
            out |= {f"b{name}": Leaf(sizes[name], axes[name][1:], "zeros") for name in axes}
            out["bo"] = Leaf((embed_dim,), (None,), "zeros")
        return out

    def init_cache(self, batch: int, slots: int, width: int, dtype) -> LinearCache:
        """Returns an empty cache of `slots` tokens, or of the window if that is smaller."""
        del width
        if not self.causal:
            raise UsageError("attention that is not causal has no cache; give causal=true, or apply it to whole rows.")
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
                equation, x, params[f"w{name}"], axes, bias=params.get(f"b{name}"), apart=context.rules.apart
            )

        q = product("btd,dhk->bthk", x, "q", INTO)
        k, v = (product("btd,dgk->btgk", x, name, ("embed", "kv_heads", "head_dim")) for name in "kv")
        out, cache = self._mix(q, k, v, cache, context)
        return product("bthk,hkd->btd", checkpoint_name(out, "attention"), "o", OUT), cache, NOTHING

    def _mix(self, q, k, v, cache: Cache | None, context: Context):
        rule = PositionRule(self.visible, self.positions)
        if cache is not None and not context.fresh:
            state, cache = cache.attend(q, k, v, rule, context)
            return finish(state).astype(q.dtype), cache
        q, k = (rule.rotate(x, context.positions) for x in (q, k))
        q, k, v = (checkpoint_name(part, "qkv") for part in (q, k, v))
        # A kernel that training asked for by name may be another machine's; "auto" takes it wherever it runs.
        impl = self.impl if cache is None or self.impl == "xla" else "auto"
        out = attention(
            q, k, v, segments=context.segments, among=context.visible, impl=impl, dropout_rate=self.dropout,
            dropout_key=context.key, prompt=cache is not None, visible=self.visible, slopes=rule.slopes(self.num_heads),
        )  # fmt: skip
        return out, None if cache is None else cache.fill(k, v, context)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares the gathers of a split sequence: queries once for each time they are made, keys and values twice."""
        inside = mesh_axes("seq_layer")
        head = sizes.tokens * self.head_dim * sizes.width / num_shares(*mesh_axes("heads"))
        queries, keys = head * self.num_heads, head * self.num_kv_heads
        moved = (("queries", sizes.again, queries), ("keys", 2, keys), ("values", 2, keys), ("mixed", 1, queries))
        for what, count, size in moved:
            arrays = sizes.layers * count
            if inside:
                yield Transfer("gather", inside, arrays, int(arrays * size), f"{what} of the whole sequence")
