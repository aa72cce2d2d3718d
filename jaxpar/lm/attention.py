"""Causal attention behind one function: cuDNN on GPU, splash on TPU, dense XLA elsewhere.

Every form runs on one device's own rows and heads, inside `jaxpar.mesh.local`: kernels are opaque to
GSPMD, which would gather their inputs in silence. `dense` is the reference for the other two.
"""

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.mesh import constrain, local, mesh_axes, platform
from jaxpar.types import PRNGKey, UsageError

__all__ = ["attention", "dense", "dropout", "in_blocks"]

QUERIES = 256
"""Queries of a prompt whose dense scores exist at the same time."""

if importlib.util.find_spec("libtpu"):  # before anything is traced, as in `jaxpar.scan._kernels`
    import jax.experimental.pallas.tpu  # noqa: F401

HEADS = ("batch", None, "heads", "head_dim")
KV_HEADS = ("batch", None, "kv_heads", "head_dim")
SPLIT, KV_SPLIT = ("batch", "seq_layer", *HEADS[2:]), ("batch", "seq_layer", *KV_HEADS[2:])


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    *,
    segments: Int[Array, "B T"] | None = None,
    impl: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKey | None = None,
    prompt: bool = False,
) -> Float[Array, "B T H K"]:
    """Computes softmax(q k^T / sqrt(K)) v, each position seeing itself and what came before.

    Query head h reads key head h * G // H.

    Args:
      q: Queries.
      k: Keys; G divides H.
      v: Values.
      segments: Document numbers; positions of another document are not seen.
      impl: "auto", "cudnn", "splash" or "xla" (dense).
      dropout_rate: Share of attention weights dropped; needs `dropout_key` and dense form.
      dropout_key: Key of the dropout; None while not training.
      prompt: Whether this is a prompt, of any length, which no mesh axis splits and nothing is differentiated through.

    Cost: O(B H T^2 K) operations; memory O(B H T^2) for "xla", of a prompt O(B H T), as for the kernels.

    Raises:
      UsageError: If a kernel asked for by name cannot take this dtype, head size, length or dropout.
    """
    # Projected where their tokens are; a split sequence is gathered here and nowhere earlier.
    split, kv_split = (HEADS, KV_HEADS) if prompt else (SPLIT, KV_SPLIT)
    q, k, v = constrain(q, *split), constrain(k, *kv_split), constrain(v, *kv_split)
    if mesh_axes("kv_heads") != mesh_axes("heads"):  # then each device's queries need their own copies of the keys
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        kv_axes = HEADS
    else:
        kv_axes = KV_HEADS
    rate = dropout_rate if dropout_key is not None else 0.0
    impl = _choose(impl, q, rate, segments is not None, prompt)
    key_args = () if dropout_key is None or not rate else (jax.random.bits(dropout_key, (q.shape[0], q.shape[2])),)
    segment_args = () if segments is None else (segments,)

    def block(q, k, v, *rest):
        seg = rest[0] if segments is not None else None
        if impl == "cudnn":
            mask = None if seg is None else (seg[:, None, :, None] == seg[:, None, None, :])
            return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")
        if impl == "splash":
            return _splash(q, k, v, seg)
        if prompt:
            return in_blocks(q, k, v, jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2]))
        seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))[None]
        if seg is not None:
            seen = seen & (seg[:, :, None] == seg[:, None, :])
        return dense(q, k, v, seen, rate, rest[-1] if rate else None)

    in_axes = [HEADS, kv_axes, kv_axes]
    in_axes += [("batch", None)] * len(segment_args) + [("batch", "heads")] * len(key_args)
    out = local(block, in_axes, HEADS, check=impl == "xla")(q, k, v, *segment_args, *key_args)
    return constrain(out, *split)


def dense(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    seen: jax.Array,
    dropout_rate: float = 0.0,
    seeds: jax.Array | None = None,
) -> Float[Array, "B T H K"]:
    """Computes attention with the whole [T, S] score matrix; softmax in float32 at least.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      seen: Bool [B or 1, T, S], True where a query may look.
      dropout_rate: Share of weights dropped.
      seeds: uint32 [B, H], one seed a row and head, so that dropout is the same on any mesh.
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, width)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("btgrk,bsgk->bgrts", q, k, preferred_element_type=wide) / math.sqrt(width)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if seeds is not None:
        shape = weights.shape[3:]
        keep = jax.vmap(jax.vmap(lambda s: jax.random.bernoulli(jax.random.key(s), 1 - dropout_rate, shape)))(seeds)
        weights = jnp.where(keep.reshape(weights.shape), weights / (1 - dropout_rate), 0)
    out = jnp.einsum("bgrts,bsgk->btgrk", weights.astype(v.dtype), v)
    return out.reshape(batch, length, heads, width)


def in_blocks(
    q: Float[Array, "B T H K"], k: Float[Array, "B S G K"], v: Float[Array, "B S G K"], last: Int[Array, "B T"]
) -> Float[Array, "B T H K"]:
    """Computes `dense` attention of queries that see the keys 0 to `last`, `QUERIES` of them at a time.

    A query's sums are those of `dense`, and the scores of all, B H T S, never exist. Memory: B H QUERIES S.
    """
    batch, length = last.shape

    def some(part):
        q, last = part
        return dense(q, k, v, jnp.arange(k.shape[1])[None, None, :] <= last[:, :, None])

    if length <= QUERIES:
        return some((q, last))

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, -length % QUERIES)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, QUERIES, *x.shape[2:]), 1, 0)

    out = jnp.moveaxis(jax.lax.map(some, (cut(q), cut(last))), 0, 1)
    return out.reshape(batch, -1, *q.shape[2:])[:, :length]


def dropout(x: jax.Array, rate: float, key: PRNGKey | None) -> jax.Array:
    """Zeroes a share `rate` of `x` and scales the rest; the identity without a key. Consumes `key`."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def _choose(impl: str, q: jax.Array, rate: float, has_segments: bool, prompt: bool) -> str:
    """Resolves "auto", and refuses a kernel that cannot do what is asked; a prompt's length is filled up for splash."""
    length, width = q.shape[1], q.shape[3]
    limits = {
        "cudnn": [
            (q.dtype in (jnp.bfloat16, jnp.float16), f"dtype bfloat16 or float16, not {q.dtype}"),
            (width % 8 == 0 and width <= 256, f"head_dim a multiple of 8 up to 256, not {width}"),
            (rate == 0.0, "dropout 0"),
        ],
        "splash": [
            (q.dtype in (jnp.bfloat16, jnp.float32), f"dtype bfloat16 or float32, not {q.dtype}"),
            (prompt or length % 128 == 0, f"a length that is a multiple of 128, not {length}"),
            (width % 64 == 0, f"head_dim a multiple of 64, not {width}"),
            (rate == 0.0, "dropout 0"),
        ],
        "xla": [],
    }
    if impl == "auto":
        kernel = {"gpu": "cudnn", "tpu": "splash"}.get(platform(), "xla")
        # cuDNN takes a document mask only as a [T, T] bias, which costs what dense costs.
        dense_is_better = has_segments and kernel == "cudnn"
        return kernel if all(ok for ok, _ in limits[kernel]) and not dense_is_better else "xla"
    for ok, need in limits[impl]:
        if not ok:
            raise UsageError(f"attention={impl} needs {need}; take attention=auto, which falls back to xla.")
    return impl


def _splash(q, k, v, segments):
    """Runs JAX's TPU kernel, whose interface is unbatched, heads first, and leaves scaling to the caller."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    asked = q.shape[1]
    if segments is None:  # what is filled up comes last, so that no query of ours sees it
        q, k, v = (jnp.pad(x, ((0, 0), (0, -asked % 128), (0, 0), (0, 0))) for x in (q, k, v))
    length = q.shape[1]
    size = next(b for b in (512, 256, 128) if length % b == 0)
    blocks = splash.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )
    causal = masks.MultiHeadMask([masks.CausalMask((length, length))] * q.shape[2])
    kernel = splash.make_splash_mha(causal, block_sizes=blocks, head_shards=1, q_seq_shards=1)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q / math.sqrt(q.shape[-1]), k, v))
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    out: Any = jax.vmap(kernel)(q, k, v, ids)
    return jnp.swapaxes(out, 1, 2)[:, :asked]
