"""JAX's attention kernel for TPUs: unbatched, heads first, queries scaled by the caller.

Its gradient from a log-sum-exp that is given is private; callers ask `jaxpar.nn.attention.pairs` whether it is there.
"""

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxpar.nn.attention.gradient import Done

if importlib.util.find_spec("libtpu"):  # before anything is traced, as in `jaxpar.scan._kernels`
    import jax.experimental.pallas.tpu


def forward(
    q: Array, k: Array, v: Array, segments: Array | None = None, causal: bool = True
) -> Array:
    """Returns outputs [B, T, H, K]; differentiable."""
    asked = q.shape[1]
    if (
        segments is None and causal
    ):  # what is filled up comes last, so that no query of ours sees it
        q, k, v = (jnp.pad(x, ((0, 0), (0, -asked % 128), (0, 0), (0, 0))) for x in (q, k, v))
    kernel, segment_ids = _kernel(q, k, causal)
    ids = None if segments is None else segment_ids(segments, segments)
    out: Any = jax.vmap(kernel)(*_heads_first(_scaled(q), k, v), ids)
    return jnp.swapaxes(out, 1, 2)[:, :asked]


def forward_with_sum(q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, Array]:
    """Returns outputs [B, T, H, K] and log-sum-exp [B, T, H] in float32."""
    kernel, _ = _kernel(q, k, causal, save_residuals=True)
    both: Any = jax.vmap(kernel)(*_heads_first(_scaled(q), k, v))
    out, (log_sum,) = both
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(log_sum, 1, 2)


def backward(q: Array, k: Array, v: Array, done: Done, causal: bool) -> tuple[Array, Array, Array]:
    """Returns what these keys add to the gradients by q, k and v."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    kernel, _ = _kernel(q, k, causal)
    kept = kernel.kwargs

    def row(q, k, v, out, log_sum, g):
        masks = kernel.dq_mask_info, kernel.dkv_mask_info
        grads = splash._splash_attention_bwd(
            False, kept["mask_value"], kept["is_mqa"], kept["block_sizes"], None, kept["mask_function"], None,
            kept["interpret"], (q, k, v, None, None, out, log_sum, *masks), g,
        )  # fmt: skip
        return grads[3:6]

    q_scaled = _scaled(q)
    g = done.gradient.astype(q.dtype)
    arrays = _heads_first(q_scaled, k, v, done.out, done.log_sum, g)
    dq, dk, dv = _heads_first(*jax.vmap(row)(*arrays))
    return _scaled(dq), dk, dv  # the kernel's queries were scaled


def _scaled(q: Array) -> Array:
    return q / math.sqrt(q.shape[-1])


def _heads_first(*arrays: Array) -> tuple[Array, ...]:
    return tuple(jnp.swapaxes(x, 1, 2) for x in arrays)


def _kernel(q: Array, k: Array, causal: bool, save_residuals: bool = False):
    """The kernel of these lengths, multiples of 128, and the type of its numbers of documents."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    # The largest blocks that divide the lengths, as the kernel asks for.
    queries, keys = (next(b for b in (512, 256, 128) if x.shape[1] % b == 0) for x in (q, k))
    blocks = splash.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
    kind = masks.CausalMask if causal else masks.FullMask
    mask = masks.MultiHeadMask([kind((q.shape[1], k.shape[1]))] * q.shape[2])
    kernel = splash.make_splash_mha(
        mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, save_residuals=save_residuals
    )
    return kernel, splash.SegmentIds
