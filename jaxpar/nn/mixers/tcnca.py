"""Dilated causal convolutions, then attention inside chunks: far and cheap, near and exact."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Each, check_fields, field
from jaxpar.mesh import local, mesh_axes
from jaxpar.nn.attention.cache import CACHE_AXES, LinearCache
from jaxpar.nn.auxiliary import NOTHING, Aux
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mixers.in_windows import attend_windows, places_of
from jaxpar.nn.position import Rope
from jaxpar.scan.varying import varying_over
from jaxpar.transfers import Transfer
from jaxpar.types import PyTree

__all__ = ["Tcnca", "TcncaCache", "dilated"]

INTO, OUT = ("embed", "heads", "head_dim"), ("heads", "head_dim", "embed")


class TcncaCache(NamedTuple):
    """What a layer keeps.

    Attributes:
      lines: Of each convolution its last (k - 1) d inputs, [B, (k - 1) d, D].
      tokens: Keys and values of a chunk.
    """

    lines: tuple[Array, ...]
    tokens: LinearCache


@dataclasses.dataclass(frozen=True)
class Tcnca:
    """A temporal convolution network with chunked attention (arXiv:2312.05605, section 3), in its smallest form.

    With z_0 = x and depthwise convolutions of k taps at distances d_l,

        z_l[t] = z_{l-1}[t] + silu(sum_j w_l[j] z_{l-1}[t - j d_l] + b_l),

    which sees 1 + sum_l (k - 1) d_l tokens; then softmax attention of z's heads, in which a token sees what its own
    chunk of C tokens holds up to itself. Chunks lie at multiples of C of the row. Taps before a document's start
    are zero, and no key of another document is seen.

    Attributes:
      num_heads: H.
      head_dim: K.
      chunk: C.
      dilations: d_l; none for attention in chunks alone.
      taps: k.
      positions: Rotary ones, or None.
    """

    num_heads: int = field(legal=AtLeast(1))
    head_dim: int = field(legal=AtLeast(1))
    chunk: int = field(legal=AtLeast(1))
    dilations: tuple[int, ...] = field((1, 4, 16), Each(AtLeast(1)))
    taps: int = field(4, AtLeast(2))
    positions: Rope | None = None

    causal, score_size, num_inputs = True, 0, 3

    def __post_init__(self):
        """Refuses what is no layer."""
        check_fields(self)

    @property
    def receptive(self) -> int:
        """Tokens that the convolutions see, the token itself counted."""
        return 1 + (self.taps - 1) * sum(self.dilations)

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, PyTree]:
        """Declares, under "mixer", taps [l, k, D] and shift [l, D], wq, wk, wv [D, H, K] and wo [H, K, D]."""
        heads, count = (self.num_heads, self.head_dim), len(self.dilations)
        leaves = {name: Leaf((embed_dim, *heads), INTO, std) for name in ("wq", "wk", "wv")}
        leaves["wo"] = Leaf((*heads, embed_dim), OUT, out_std)
        if count:
            leaves["taps"] = Leaf(
                (count, self.taps, embed_dim), (None, None, None), self.taps**-0.5
            )
            leaves["shift"] = Leaf((count, embed_dim), (None, None), "zeros")
        return {"mixer": leaves}

    def init_cache(self, batch: int, slots: int, width: int, dtype: DTypeLike) -> TcncaCache:
        """Returns the cache before the first token; its size does not depend on `slots`."""
        del slots
        lines = tuple(
            jnp.zeros((batch, (self.taps - 1) * each, width), dtype) for each in self.dilations
        )
        return TcncaCache(
            lines, LinearCache.empty(batch, self.num_heads, self.chunk, self.head_dim, dtype)
        )

    def cache_axes(self) -> TcncaCache:
        """Returns the logical axes of the cache."""
        axes = (*CACHE_AXES[:2], None, None)
        lines: Any = (("batch", None, None),) * len(self.dilations)
        return TcncaCache(lines, LinearCache(axes, axes))  # type: ignore[arg-type]

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: TcncaCache | None, context: Context
    ) -> tuple[Float[Array, "B T D"], TcncaCache | None, Aux]:
        """Returns outputs, the cache after the last token that counts, and nothing to tell.

        Raises:
          UsageError: If the context says which tokens each may see, or a mesh splits the sequence.
        """
        context.refuse("a mixer of convolutions and chunks", "visible")
        context.refuse_split("a mixer of convolutions and chunks")
        params, apart = params["mixer"], context.rules.apart
        x, lines = self._convolve(params, x, cache, context)
        products = [
            contract("btd,dhk->bthk", x, params[name], INTO, apart=apart)
            for name in ("wq", "wk", "wv")
        ]
        q, k, v = (checkpoint_name(each, "qkv") for each in products)
        tokens = None if cache is None else cache.tokens
        options: dict[str, Any] = {"window": self.chunk, "before": 0, "positions": self.positions}
        out, tokens = attend_windows(q, k, v, tokens, context, **options)
        y = contract(
            "bthk,hkd->btd", checkpoint_name(out, "attention"), params["wo"], OUT, apart=apart
        )
        return y, None if tokens is None or lines is None else TcncaCache(lines, tokens), NOTHING

    def _convolve(self, params: dict, x: Array, cache: TcncaCache | None, context: Context):
        """Returns what the convolutions make of each device's own rows, and their last inputs that count."""
        if not self.dilations:
            return x, ()
        length, reach = x.shape[1], [(self.taps - 1) * each for each in self.dilations]
        places, first = places_of(context)
        befores = [jnp.zeros((x.shape[0], size, x.shape[2]), x.dtype) for size in reach]
        befores = befores if cache is None else cache.lines

        def block(x, since, taps, shift, *befores):
            if rows := frozenset(
                mesh_axes("batch")
            ):  # once, so that the gradients of all taps are one sum
                taps, shift = varying_over((taps, shift), rows)
            lines = []
            for layer, dilation in enumerate(self.dilations):
                lines.append(jnp.concatenate([befores[layer], x], 1))
                made = dilated(lines[-1], taps[layer], since, dilation) + _row(shift[layer], x)
                x = x + jax.nn.silu(made)
            return x, tuple(lines)

        line = ("batch", None, None)
        axes = [line, line[:2], (None,) * 3, (None,) * 2, *[line] * len(reach)]
        given = x, places - first, params["taps"], params["shift"], *befores
        x, lines = local(block, axes, (line, (line,) * len(reach)))(*given)
        return x, None if cache is None else tuple(_last(each, length, context) for each in lines)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares nothing: a sequence that is split is refused."""
        del sizes
        return iter(())


def dilated(
    line: Float[Array, "B S D"], taps: Float[Array, "k D"], since: Array, dilation: int
) -> Float[Array, "B T D"]:
    """Computes sum_j taps[j] x[t - j d] of the last T of S = (k - 1) d + T inputs, a channel at a time.

    Args:
      line: Inputs, with the (k - 1) d before the first.
      taps: Weights of each distance.
      since: int [B, T], how many tokens of its document lie before each: taps that would reach further are left out.
      dilation: d.
    """
    length = since.shape[1]
    out = jnp.zeros_like(line[:, -length:])
    for j in range(len(taps)):
        at = line.shape[1] - length - j * dilation
        seen = (since >= j * dilation)[..., None]
        out = out + jnp.where(seen, line[:, at : at + length], 0) * _row(taps[j], line)
    return out


def _row(x: Float[Array, " D"], like: Array) -> Float[Array, "1 1 D"]:
    return x.astype(like.dtype)[None, None]


def _last(line: Float[Array, "B S D"], length: int, context: Context) -> Float[Array, "B S-T D"]:
    """Returns the S - T inputs up to the last token that counts."""
    size = line.shape[1] - length
    if context.valid is None:
        return line[:, length:]
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(
        line, context.valid
    )
