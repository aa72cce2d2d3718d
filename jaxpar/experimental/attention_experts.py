"""A mixture of attention heads: each token's queries, and what its heads become, are those of the experts it chose.

Keys and values are of all experts together, and so is the cache: as large as without experts.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.mesh import gather, in_role, local, mesh_axes
from jaxpar.nn.attention import Attention
from jaxpar.nn.attention.cache import Cache, LinearCache
from jaxpar.nn.auxiliary import Aux, Max
from jaxpar.nn.experts.dispatch import sort_choices
from jaxpar.nn.experts.grouped import grouped_matmul
from jaxpar.nn.experts.losses import balance_loss, load
from jaxpar.nn.experts.route import SCORES, check_router, route
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.norm import wide_dtype
from jaxpar.scan.varying import varying_over
from jaxpar.transfers import Transfer
from jaxpar.types import UsageError

__all__ = ["AttentionExperts"]


@dataclasses.dataclass(frozen=True)
class AttentionExperts:
    """E experts of h heads each, in the place of `jaxpar.nn.attention.Attention`; a token attends with those of k.

    y_t = sum over the chosen e of weight_e attend(x_t Wq_e; x Wk, x Wv) Wo_e (mixture of attention heads:
    arXiv:2210.05144, section 3; by grouped products over sorted choices: arXiv:2403.08245, section 3.3). Devices hold
    all experts, and each multiplies its own tokens: no transport is needed, and heads are split by no mesh axis.

    Attributes:
      heads: Of one expert: h, G and K, and how tokens attend; its queries, k h of a token, see the same G.
      num_experts: E.
      experts_per_token: k.
      scores: As of `Experts`.
      normalise: As of `Experts`.
      balance_loss: Weight of `losses.balance_loss`.
    """

    heads: Attention
    num_experts: int = field(legal=AtLeast(1))
    experts_per_token: int = field(2, AtLeast(1))
    scores: str = field("softmax", OneOf(SCORES))
    normalise: bool = True
    balance_loss: float = field(0.01, AtLeast(0))

    num_inputs = 3

    def __post_init__(self):
        """Refuses what is out of range, and what is not done by experts."""
        check_fields(self)
        check_router(self.num_experts, self.experts_per_token, self.normalise)
        if self.heads.bias or self.heads.qk_norm is not None:
            raise UsageError(
                "experts of attention have neither bias=True nor a qk_norm; leave both out."
            )

    @property
    def causal(self) -> bool:
        """Whether a token sees none after it."""
        return self.heads.causal

    @property
    def score_size(self) -> int:
        """Multiplications a token and token seen: k h K."""
        return self.experts_per_token * self.heads.score_size

    @property
    def _chosen(self) -> Attention:
        """The attention of one token's heads: k h of them, an expert's next to the others' that see the same keys."""
        return dataclasses.replace(
            self.heads, num_heads=self.experts_per_token * self.heads.num_heads
        )

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, Leaf]:
        """Declares w_heads [D, E], wq [E, D, h K], wo [E, h K, D] and wk, wv [D, G, K]."""
        shared, size = self.heads.leaves(embed_dim, std, out_std), self.heads.score_size
        return {
            "w_heads": Leaf((embed_dim, self.num_experts), ("embed", None), std, raw=True),
            "wq": Leaf((self.num_experts, embed_dim, size), (None, "embed", None), std, raw=True),
            "wo": Leaf(
                (self.num_experts, size, embed_dim), (None, None, "embed"), out_std, raw=True
            ),
            "wk": shared["wk"],
            "wv": shared["wv"],
        }

    def init_cache(self, batch: int, slots: int, width: int, dtype) -> LinearCache:
        """Returns that of the keys and values."""
        return self.heads.init_cache(batch, slots, width, dtype)

    def cache_axes(self) -> LinearCache:
        """Returns the logical axes of the cache."""
        return self.heads.cache_axes()

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: Cache | None, context: Context
    ) -> tuple[Float[Array, "B T D"], Cache | None, Aux]:
        """Returns outputs, the cache with the new keys and values, and the loads of the experts.

        Raises:
          UsageError: If it is to go by blocks.
        """
        if context.rules.blockwise:
            raise UsageError(
                "experts of attention have no remat=blockwise; legal are the others, such as full."
            )
        (rows, length, _), heads, k = x.shape, self.heads, self.experts_per_token
        whole = {
            name: self._whole(params[name].astype(x.dtype), name, x.shape[-1])
            for name in ("w_heads", "wq", "wo")
        }
        run = functools.partial(self._on_tokens, context)
        logits, expert, weight, scores = run(self._choose, (x,), (whole["w_heads"],), 4)
        (q,) = run(self._queries, (x, expert), (whole["wq"],), 1)
        # Heads that see the same keys lie next to each other: an expert's number is the last.
        q = q.reshape(rows, length, k, heads.num_heads, heads.head_dim).swapaxes(2, 3)
        q = q.reshape(rows, length, -1, heads.head_dim)
        keys, values = (
            contract(
                "btd,dgk->btgk",
                x,
                params[name],
                ("embed", "kv_heads", "head_dim"),
                apart=context.rules.apart,
            )
            for name in ("wk", "wv")
        )
        out, cache = self._chosen.mix(q, keys, values, cache, context)
        out = checkpoint_name(out, "attention").reshape(
            rows, length, heads.num_heads, k, heads.head_dim
        )
        out = out.swapaxes(2, 3).reshape(rows, length, -1)
        (y,) = run(self._results, (out, expert, weight), (whole["wo"],), 1)
        return y, cache, self._aux(scores, expert, logits.dtype, context.weights)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what attention moves, and the means over all tokens that the loss takes."""
        yield from self._chosen.transfers(sizes)
        if axes := (*mesh_axes("batch"), *mesh_axes("seq_layer")):
            size = 8 * sizes.layers * 8 * self.num_experts
            yield Transfer(
                "sum",
                axes,
                8 * sizes.layers,
                size,
                "means over all tokens of what heads they chose",
            )

    def _whole(self, w: jax.Array, name: str, embed_dim: int) -> jax.Array:
        of = self.leaves(embed_dim, 1.0, 1.0)[name].axes
        rest, use, grad = (in_role(of, role) for role in ("weight", "use", "grad"))
        return gather(w, rest, use, grad, name)

    def _on_tokens(
        self, context: Context, fn, tokens: tuple, weights: tuple, results: int
    ) -> tuple[jax.Array, ...]:
        """Runs `fn` on each device's own tokens; gradients of weights are summed over devices."""
        axes = context.rules.inside
        over = frozenset(axis for name in axes if name for axis in mesh_axes(name))

        def own(*args):
            return fn(*varying_over(args, over))

        spread = [axes] * len(tokens) + [(None,) * w.ndim for w in weights]
        return local(own, spread, (axes,) * results)(*tokens, *weights)

    def _choose(self, x: jax.Array, router: jax.Array) -> tuple[jax.Array, ...]:
        logits = jnp.einsum(
            "btd,de->bte", x, router, precision="highest", preferred_element_type=wide_dtype(x)
        )
        return logits, *route(
            logits, self.experts_per_token, scores=self.scores, normalise=self.normalise
        )

    def _queries(self, x: jax.Array, expert: Int[Array, "B T k"], w: jax.Array) -> tuple[jax.Array]:
        """Those of a token's k experts, in the order in which it chose them: [B, T, k h K]."""
        plan = sort_choices(expert.reshape(-1, expert.shape[-1]), self.num_experts)
        flat = x.reshape(-1, x.shape[-1])
        q = grouped_matmul(flat, w, plan.sizes, read=plan.order, write=plan.order)
        return (q.reshape(*x.shape[:2], -1),)

    def _results(
        self, out: jax.Array, expert: jax.Array, weight: jax.Array, w: jax.Array
    ) -> tuple[jax.Array]:
        """The weighted sum of what each expert makes of its heads."""
        k = expert.shape[-1]
        plan = sort_choices(expert.reshape(-1, k), self.num_experts)
        rows = out.reshape(-1, w.shape[1]).astype(weight.dtype) * weight.reshape(-1, 1)
        y = grouped_matmul(
            rows.astype(out.dtype), w, plan.sizes, read=plan.order, write=plan.order, summed=k
        )
        return (y.reshape(*out.shape[:2], -1),)

    def _aux(self, scores: jax.Array, expert: jax.Array, dtype, weights: jax.Array | None) -> Aux:
        loads = load(expert, self.num_experts, dtype, weights)
        losses = {}
        if self.balance_loss:
            balance = balance_loss(scores, expert, weights)
            losses["heads_balance_loss"] = self.balance_loss * balance
        return Aux(losses, {"heads_load": Max(self.num_experts * loads.max())})
