"""The block-recurrent transformer's layer as a mixer: attention inside windows, and states from one to the next.

Windows of W tokens lie at multiples of W of the row. Tokens see their own window up to themselves, the one before it,
and S states of width D as they were before their window ("vertical"); at a window's end the states see each other and
its tokens, and are renewed through a gate ("horizontal").

Where documents share a row, tokens of one see no key of another; a token whose document began in its own window sees
states of zero, and at a window's end states that a document began in are zero and see the tokens of the last document
in it alone. So nothing of a document reaches another, and a document that begins within a window has a shorter first
one.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.mesh import in_role, local, mesh_axes
from jaxpar.nn.attention.cache import CACHE_AXES, LinearCache
from jaxpar.nn.attention.state import attend, finish
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mixers.in_windows import attend_windows, into_windows, places_of
from jaxpar.nn.norm import wide_dtype
from jaxpar.nn.position import Alibi
from jaxpar.scan.varying import varying_over
from jaxpar.transfers import Transfer
from jaxpar.types import PyTree

__all__ = ["GATES", "BlockRecurrentCache", "BlockRecurrent"]

GATES = ("fixed", "lstm")
INTO, OUT = ("embed", "heads", "head_dim"), (None, "heads", "head_dim", "embed")
STATES, HEADS = ("batch", None, None), ("batch", None, "heads", None)
STATE_PRODUCTS = ("swk", "swv", "swq", "swq_tokens")
EPS = 1e-5  # of the norm of states


class BlockRecurrentCache(NamedTuple):
    """What a layer keeps: as much however many tokens there were.

    Attributes:
      tokens: Keys and values of two windows.
      states: [B, S, D], in float32 at least.
      keys: [B, S, H, K], of the states; what the first window of a document sees is not among them.
      values: The same.
    """

    tokens: LinearCache
    states: Array
    keys: Array
    values: Array


class Window(NamedTuple):
    """One window of each row, or a stack of them.

    Attributes:
      q: Queries of tokens to the states [B, W, H, K].
      k: Keys of tokens.
      v: Their values.
      reset: Which tokens see states of zero [B, W].
      kept: Which tokens the states see at its end [B, W].
      begun: Whether the states are zero at its end [B].
    """

    q: Array
    k: Array
    v: Array
    reset: Array
    kept: Array
    begun: Array


@dataclasses.dataclass(frozen=True)
class BlockRecurrent:
    """Attention in windows beside S recurrent states (Hutchins et al. 2022, arXiv:2203.07852, sections 3.1 to 3.3).

    Tokens: y = w_o [attend(q, k, v of two windows); attend(q', keys and values of the states)]. States c: with
    s = rms(c) + ids, h = [attend(s to s); attend(s to the window's k, v)] and z = w_z h + b_z,

        fixed: c' = g c + (1 - g) z, g = sigmoid(b_g);   lstm: c' = sigmoid(z_f + 1) c + sigmoid(z_i - 1) tanh(z),

    the paper's "skip" form, without an mlp of the states. Tokens' distances enter by linear biases (`Alibi`), in place
    of the paper's learned ones, so that keys do not depend on places and both directions share them.

    Attributes:
      num_heads: H.
      head_dim: K.
      window: W.
      num_states: S; 0 for attention in windows alone.
      gate: "fixed" or "lstm".
    """

    num_heads: int = field(legal=AtLeast(1))
    head_dim: int = field(legal=AtLeast(1))
    window: int = field(legal=AtLeast(1))
    num_states: int = field(0, AtLeast(0))
    gate: str = field("fixed", OneOf(GATES))

    causal, score_size = True, 0  # what a token sees is bounded

    def __post_init__(self):
        """Refuses what is no layer."""
        check_fields(self)

    @property
    def num_inputs(self) -> int:
        """Queries, keys and values, and queries to the states."""
        return 4 if self.num_states else 3

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, PyTree]:
        """Declares the parameters of tokens and of states, under "mixer".

        Of tokens wq, wk, wv, wq_states [D, H, K] and wo [2, H, K, D]; of states swq, swq_tokens, swk, swv [D, H, K],
        ids [S, D], wz [2, H, K, G, D] and bz [G, D] of z and the gates, and gate [D] of the fixed one.
        """
        heads = (self.num_heads, self.head_dim)
        names = ["wq", "wk", "wv"] + ["wq_states", *STATE_PRODUCTS] * bool(self.num_states)
        leaves = {
            name: Leaf((embed_dim, *heads), INTO, std, raw=name in STATE_PRODUCTS) for name in names
        }
        leaves["wo"] = Leaf((1 + bool(self.num_states), *heads, embed_dim), OUT, out_std)
        if self.num_states:
            gates = 3 if self.gate == "lstm" else 1
            leaves["ids"] = Leaf(
                (self.num_states, embed_dim), (None, None), 1.0
            )  # as loud as what a state says
            leaves["wz"] = Leaf(
                (2, *heads, gates, embed_dim), (*OUT[:3], None, "embed"), embed_dim**-0.5, raw=True
            )
            leaves["bz"] = Leaf((gates, embed_dim), (None, None), "zeros")
            if self.gate == "fixed":
                leaves["gate"] = Leaf((embed_dim,), (None,), "ones")
        return {"mixer": leaves}

    def init_cache(self, batch: int, slots: int, width: int, dtype: DTypeLike) -> PyTree:
        """Returns the cache before the first token; its size does not depend on `slots`."""
        del slots
        tokens = LinearCache.empty(batch, self.num_heads, 2 * self.window, self.head_dim, dtype)
        if not self.num_states:
            return tokens
        states = jnp.zeros((batch, self.num_states, width), jnp.promote_types(dtype, jnp.float32))
        keys = jnp.zeros((batch, self.num_states, self.num_heads, self.head_dim), dtype)
        return BlockRecurrentCache(tokens=tokens, states=states, keys=keys, values=keys)

    def cache_axes(self) -> PyTree:
        """Returns the logical axes of the cache."""
        axes = (*CACHE_AXES[:2], None, None)
        tokens: Any = LinearCache(axes, axes)  # type: ignore[arg-type]
        if not self.num_states:
            return tokens
        states: Any = STATES
        heads: Any = HEADS
        return BlockRecurrentCache(tokens=tokens, states=states, keys=heads, values=heads)

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: PyTree | None, context: Context
    ) -> tuple[Float[Array, "B T D"], PyTree | None, Aux]:
        """Returns outputs, the cache after the last token that counts, and nothing to tell.

        Raises:
          UsageError: If the context says which tokens each may see, or a mesh splits the sequence.
        """
        context.refuse("a block-recurrent mixer", "visible")
        context.refuse_split("a block-recurrent mixer")
        params, apart = params["mixer"], context.rules.apart
        names = ("wq", "wk", "wv", "wq_states")[: self.num_inputs]
        products = [contract("btd,dhk->bthk", x, params[name], INTO, apart=apart) for name in names]
        q, k, v, *to_states = (checkpoint_name(each, "qkv") for each in products)
        tokens = cache.tokens if isinstance(cache, BlockRecurrentCache) else cache
        options: dict[str, Any] = {"window": self.window, "before": 1, "positions": Alibi()}
        out, after = attend_windows(q, k, v, tokens, context, **options)
        out = out[:, :, None]
        if self.num_states:
            other, rest = self._states(params, to_states[0], k, v, cache, context, wide_dtype(x))
            out = jnp.concatenate([out, other[:, :, None]], 2)
            if after is None or rest is None:
                after = None
            else:
                states, keys, values = rest
                after = BlockRecurrentCache(tokens=after, states=states, keys=keys, values=values)
        out = checkpoint_name(out, "attention")
        return contract("btahk,ahkd->btd", out, params["wo"], OUT, apart=apart), after, NOTHING

    def _states(
        self, params: dict, q, k, v, cache: BlockRecurrentCache | None, context: Context, wide
    ):
        """Returns what tokens read of the states, and states, keys and values after the windows that are complete."""
        batch, length, width = *q.shape[:2], params["ids"].shape[-1]
        names = (*STATE_PRODUCTS, "ids", "wz", "bz", "gate")
        weights = {name: params[name] for name in names if name in params}
        declared = self.leaves(width, 1.0, 1.0)["mixer"]
        places, first = places_of(context)
        reset = first >= places // self.window * self.window
        kept = None if context.fresh else cache
        later = kept is not None
        if later and length == 1:
            return self._step(weights, q, k, v, kept, context, reset, first)
        windows = self._windows(q, k, v, kept, context, places, first)
        c = kept.states if later else jnp.zeros((batch, self.num_states, width), wide)
        axes = [
            ("batch", None, *names)
            for names in ((None, "heads", None),) * 3 + ((None,),) * 2 + ((),)
        ]
        axes += [STATES, *(in_role(declared[name].axes, "use") for name in weights)]
        zero = context.starts is not None or later

        def block(q, k, v, reset, kept, begun, c, *arrays):
            own = Window(q=q, k=k, v=v, reset=reset, kept=kept, begun=begun)
            return self._recur(dict(zip(weights, arrays, strict=True)), c, own, zero)

        out, states = local(
            block, axes, (("batch", None, None, "heads", None), ("batch", None, None, None))
        )(*windows, c, *weights.values())
        out = out.reshape(batch, -1, *out.shape[3:])
        seen: Any = context.seen if later else jnp.zeros((batch,), jnp.int32)
        if later:
            out = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, length))(
                out, seen % self.window
            )
        if cache is None:
            return out[:, :length], None
        count = length if context.valid is None else context.valid
        states = states[jnp.arange(batch), (seen + count) // self.window - seen // self.window]
        keys, values = _products(weights, states, STATE_PRODUCTS[:2], q.dtype)
        return out[:, :length], (states, keys, values)

    def _windows(
        self, q, k, v, cache: BlockRecurrentCache | None, context: Context, places, first
    ) -> Window:
        """Lays tokens into windows: from a window's start on, or after what the cache holds of the same window."""
        size, start = self.window, places[:, :1] // self.window * self.window
        if cache is None:
            q, k, v, first = (into_windows(x, size) for x in (q, k, v, first))
        else:
            count = (q.shape[1] + size - 2) // size + 1
            now = start[:, 0] // size % 2
            seen: Any = context.seen

            def put(x, old=None):
                room = jnp.zeros((x.shape[0], count * size, *x.shape[2:]), x.dtype)
                if old is not None:
                    old = jnp.moveaxis(old.reshape(*old.shape[:2], 2, size, -1), 2, 1)
                    old = jnp.moveaxis(old[jnp.arange(len(old)), now], 1, 2)
                    room = jnp.concatenate([old, room[:, size:]], 1)
                room = jax.vmap(
                    lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, 0)
                )(room, x, seen % size)
                return into_windows(room, size)

            q = put(q)
            k = put(k, cache.tokens.keys)
            v = put(v, cache.tokens.values)
            first = put(first)
        begins = start + size * jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        place = begins[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
        last = first[:, :, -1:]
        return Window(
            q=q,
            k=k,
            v=v,
            reset=first >= begins[:, :, None],
            kept=place >= last,
            begun=last[:, :, 0] >= begins,
        )

    def _recur(self, weights: dict, c: Float[Array, "B S D"], windows: Window, zero: bool):
        """Runs along the windows of a device's rows and heads: what tokens read, and states before and after each."""
        rows, heads = frozenset(mesh_axes("batch")), mesh_axes("heads")
        if rows:  # once, so that gradients are summed over devices after the loop and not in each of its turns
            weights, c = varying_over(weights, rows), varying_over(c, rows)
        none = self._zero(weights, windows.q.dtype, heads) if zero else None

        def step(c, now: Window):
            own = _products(weights, c, STATE_PRODUCTS, now.q.dtype, heads)
            out = _read(now.q, *own[:2])
            if none is not None:
                out = jnp.where(now.reset[:, :, None, None], _read(now.q, *none[:2]), out)
            return (new := self._renewed(weights, c, own, none, now, heads)), (out, new)

        _, (out, states) = jax.lax.scan(
            step, c, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), windows)
        )
        return jnp.moveaxis(out, 0, 1), jnp.moveaxis(jnp.concatenate([c[None], states]), 0, 1)

    def _zero(self, weights: dict, dtype: DTypeLike, heads: tuple[str, ...] = ()) -> list[Array]:
        """Keys, values and queries of states of zero, [1, S, H, K]."""
        zeros = jnp.zeros_like(weights["ids"], jnp.promote_types(dtype, jnp.float32))[None]
        return _products(weights, zeros, STATE_PRODUCTS, dtype, heads)

    def _renewed(
        self,
        weights: dict,
        c: Array,
        own: list,
        none: list | None,
        now: Window,
        heads: tuple[str, ...] = (),
    ):
        """Returns the states after a window, from their own products and from those of states of zero."""
        if none is not None:
            begun = now.begun[:, None, None]
            own = [
                jnp.where(begun[..., None], zero, each)
                for zero, each in zip(none, own, strict=True)
            ]
            c = jnp.where(begun, 0, c)
        keys, values, to_states, to_tokens = own
        seen = now.kept[:, None]
        h = jnp.stack([_read(to_states, keys, values), _read(to_tokens, now.k, now.v, seen)], 2)
        z = jnp.einsum(
            "bsahk,ahkgd->bsgd", h, weights["wz"].astype(h.dtype), preferred_element_type=c.dtype
        )
        z = (jax.lax.psum(z, heads) if heads else z) + weights["bz"].astype(c.dtype)[None, None]
        if self.gate == "lstm":
            z, remember, enter = z[:, :, 0], z[:, :, 1], z[:, :, 2]
            return jax.nn.sigmoid(remember + 1) * c + jax.nn.sigmoid(enter - 1) * jnp.tanh(z)
        share = jax.nn.sigmoid(weights["gate"].astype(c.dtype))[None, None]
        return share * c + (1 - share) * z[:, :, 0]

    def _step(
        self, weights: dict, q, k, v, cache: BlockRecurrentCache, context: Context, reset, first
    ):
        """One token a row; the states are renewed where one completes its window, and not looked at elsewhere."""
        seen: Any = context.seen
        ends = (seen + 1) % self.window == 0
        ends = ends if context.valid is None else ends & (context.valid > 0)
        shape = (1, *cache.keys.shape[1:])
        none = jax.lax.cond(
            jnp.any(reset),
            lambda: _products(
                weights, jnp.zeros_like(cache.states[:1]), STATE_PRODUCTS[:2], q.dtype
            ),
            lambda: [jnp.zeros(shape, q.dtype)] * 2,
        )
        keys, values = (
            jnp.where(reset[..., None, None], zero, each)
            for zero, each in zip(none, (cache.keys, cache.values), strict=True)
        )

        def renewed():
            place = seen[:, None] + jnp.zeros_like(first)
            now = jax.tree.map(
                lambda x: x[:, 0], self._windows(q, k, v, cache, context, place, first)
            )
            own = _products(weights, cache.states, STATE_PRODUCTS, q.dtype)
            states = self._renewed(weights, cache.states, own, self._zero(weights, q.dtype), now)
            states = jnp.where(ends[:, None, None], states, cache.states)
            return (states, *_products(weights, states, STATE_PRODUCTS[:2], q.dtype))

        kept = jax.lax.cond(
            jnp.any(ends), renewed, lambda: (cache.states, cache.keys, cache.values)
        )
        return _read(q, keys, values), kept

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares the sums over heads of the states, forward and backward, in each window."""
        axes = mesh_axes("heads")
        if axes and self.num_states:
            windows = -(-int(sizes.tokens / sizes.rows) // self.window)
            gates = 3 if self.gate == "lstm" else 1
            one = sizes.rows * self.num_states * sizes.embed_dim * max(sizes.width, 4)
            count = sizes.layers * windows
            yield Transfer(
                kind="sum",
                axes=axes,
                arrays=count * sizes.again,
                bytes=int(count * sizes.again * one * gates),
                why="states, over heads",
            )
            yield Transfer(
                kind="sum",
                axes=axes,
                arrays=count,
                bytes=int(count * one),
                why="gradients of states, over heads",
            )


def _products(
    weights: dict, c: Float[Array, "B S D"], names: tuple[str, ...], dtype, heads=()
) -> list[Array]:
    """Returns products of rms(c) + ids, each [B, S, H, K]."""
    s = (
        c * jax.lax.rsqrt(jnp.square(c).mean(-1, keepdims=True) + EPS)
        + weights["ids"].astype(c.dtype)[None]
    )
    s = (
        varying_over(s, frozenset(heads)) if heads else s
    )  # once: its gradient is one sum over heads
    return [
        jnp.einsum("bsd,dhk->bshk", s.astype(dtype), weights[name].astype(dtype)) for name in names
    ]


def _read(
    q: Array, k: Array, v: Array, seen: Bool[Array, "B 1 S"] | None = None
) -> Float[Array, "B T H K"]:
    """Softmax attention of queries to all of few keys, or to those that are seen."""
    k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
    seen = jnp.ones((1, 1, k.shape[1]), bool) if seen is None else seen
    return finish(attend(q, k, v, seen)).astype(q.dtype)
