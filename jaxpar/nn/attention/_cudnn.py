"""cuDNN's attention with its log-sum-exp, and its gradient from one that is given: JAX's own calls, which are private.

`jax.nn.dot_product_attention` rounds the log-sum-exp to the outputs' dtype, differentiates by the log-sum-exp of its
own keys alone, so that parts cannot be added up, and knows no packed documents. Callers try what is called here
(`jaxpar.lower.trial`) before they take it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxpar.nn.attention.gradient import Done


class Documents(NamedTuple):
    """Where up to M documents of each row lie.

    Attributes:
      lengths: -1 of none.
      starts: Of each in its row, -1 of none, and a last -1.
      number: Of each token, which document of all rows' it is in.
      place: Its place there.
    """

    lengths: Int[Array, "B M"]
    starts: Int[Array, "B M+1"]
    number: Int[Array, "B T"]
    place: Int[Array, "B T"]


def documents(segments: Int[Array, "B T"], most: int) -> Documents:
    """Returns where documents lie, of which no row has more than `most` and each is a run of tokens."""
    length = segments.shape[1]
    begins = jnp.concatenate(
        [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], 1
    )
    index = jnp.cumsum(begins, 1, dtype=jnp.int32) - 1
    starts = jax.vmap(lambda row: jnp.nonzero(row, size=most, fill_value=length)[0])(begins).astype(
        jnp.int32
    )
    ends = jnp.concatenate([starts[:, 1:], jnp.full_like(starts[:, :1], length)], 1)
    lengths = jnp.where(starts < length, ends - starts, -1)
    counts = (lengths > 0).sum(1, dtype=jnp.int32)
    before = (
        jnp.cumsum(counts, dtype=jnp.int32) - counts
    )  # cuDNN numbers those of all rows, without gaps
    place = jnp.arange(length, dtype=jnp.int32)[None] - jnp.take_along_axis(starts, index, 1)
    starts = jnp.pad(jnp.where(lengths > 0, starts, -1), ((0, 0), (0, 1)), constant_values=-1)
    return Documents(lengths, starts, before[:, None] + index, place)


Lengths = tuple[Int[Array, " B"], Int[Array, " B"]]


def forward(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    packed: Documents | None = None,
    lengths: Lengths | None = None,
) -> tuple[Array, Array]:
    """Returns outputs [B, T, H, K] and log-sum-exp [B, T, H] in float32, of all keys or of those no later.

    With `lengths` of the first so many queries and keys of each row, at least one; of other queries they are anything.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    options: dict[str, Any] = {}
    if packed is not None:
        options = {"q_seqlen": packed.lengths, "kv_seqlen": packed.lengths}
        options |= {"q_offsets": packed.starts, "kv_offsets": packed.starts}
    if lengths is not None:
        options = {"q_seqlen": lengths[0], "kv_seqlen": lengths[1]}
    kind, scale = _kind(fused, causal, bool(options)), 1 / math.sqrt(q.shape[-1])
    both: Any = fused.dot_product_attention(
        q, k, v, **options, scale=scale, mask_type=kind, return_residual=True
    )
    out, log_sum = both
    if packed is None:
        return out, jnp.swapaxes(log_sum, 1, 2)
    return out, log_sum[packed.number, :, packed.place]  # of [B M, H, T]


def backward(
    q: Array,
    k: Array,
    v: Array,
    done: Done,
    causal: bool,
    packed: Documents | None = None,
    lengths: Lengths | None = None,
) -> tuple[Array, Array, Array]:
    """Returns what these keys add to the gradients by q, k and v."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    kind, none = (
        _kind(fused, causal, packed is not None or lengths is not None),
        jnp.zeros(0, q.dtype),
    )
    where = none, none, none, none
    log_sums = jnp.swapaxes(done.log_sum, 1, 2)
    if lengths is not None:
        where = *lengths, none, none
    if packed is not None:
        where = packed.lengths, packed.lengths, packed.starts, packed.starts
        log_sums = jnp.zeros((packed.lengths.size, q.shape[2], q.shape[1]), jnp.float32)
        log_sums = log_sums.at[packed.number, :, packed.place].set(done.log_sum)
    g = done.gradient.astype(q.dtype)
    grads = fused._dot_product_attention_bwd_p_wrapper.bind(
        *(q, k, v, none, *where, none, none, log_sums, done.out, g),  # no bias and no pages
        scale=1 / math.sqrt(q.shape[-1]), seed=42, dropout_rate=0.0, variadic_args=(False, False),
        mask_type=kind, layout=fused.AttentionLayout.BTNH.value, sliding_window_length=None,
    )  # fmt: skip
    dq, dk, dv = grads
    return dq, dk, dv


def _kind(
    fused: Any,  # a private module of JAX
    causal: bool,
    has_lengths: bool,
) -> Any:  # its enumeration
    kinds = fused.MaskType
    if not has_lengths:
        return kinds.CAUSAL if causal else kinds.NO_MASK
    return kinds.PADDING_CAUSAL if causal else kinds.PADDING
