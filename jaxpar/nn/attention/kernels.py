"""Attention of tokens to each other behind one function: cuDNN on GPU, splash on TPU, dense XLA elsewhere.

Every form runs on one device's own rows and heads, inside `jaxpar.mesh.local`: kernels are opaque to
GSPMD, which would gather their inputs in silence. The dense form (`attend`) is the reference for the other two.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.mesh import constrain, local, mesh_axes, platform
from jaxpar.nn.attention import _splash
from jaxpar.nn.attention.blockwise import attention_by_blocks
from jaxpar.nn.attention.packed import attention_of_documents, packing_is_right
from jaxpar.nn.attention.state import attend, finish, slopes_bias
from jaxpar.nn.attention.visibility import Visible
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import PRNGKey, UsageError

__all__ = ["attention", "in_blocks"]

CAUSAL = Visible()

QUERIES = 256
"""Queries of a prompt whose dense scores exist at the same time."""

INSIDE = ("batch", "seq_layer", None)


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    *,
    segments: Int[Array, "B T"] | None = None,
    visible: Visible = CAUSAL,
    among: Bool[Array, "B T T"] | None = None,
    slopes: Float[Array, " H"] | None = None,
    cap: float = 0.0,
    impl: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: PRNGKey | None = None,
    prompt: bool = False,
    inside: tuple[str | None, ...] = INSIDE,
    blockwise: bool = False,
) -> Float[Array, "B T H K"]:
    """Computes softmax(q k^T / sqrt(K)) v over what each position sees: by default itself and what came before.

    Query head h reads key head h * G // H.

    Args:
      q: Queries.
      k: Keys; G divides H.
      v: Values.
      segments: Document numbers; positions of another document are not seen.
      visible: The rule.
      among: Which positions each may see besides; dense form.
      slopes: What a score falls by for each step of distance; dense form.
      cap: Of the scores, as of `jaxpar.nn.attention.state.attend`; dense form.
      impl: "auto", "cudnn", "splash" or "xla" (dense).
      dropout_rate: Share of attention weights dropped; needs `dropout_key` and dense form.
      dropout_key: Key of the dropout; None while not training.
      prompt: Whether this is a prompt, of any length, which no mesh axis splits and nothing is differentiated through.
      inside: How the tokens lie, by logical axes of [B, T, D].
      blockwise: Whether "xla" stands for a loop over blocks (`jaxpar.nn.attention.blockwise`), not the dense form.

    Cost: O(B H T^2 K) operations; memory O(B H T^2) for "xla", of a prompt or blockwise O(B H T), as for the kernels.

    Raises:
      UsageError: If what is asked for by name, or blocks, cannot take this dtype, head size, length, rule or dropout.
    """
    # Projected where their tokens are; a split sequence is gathered here and nowhere earlier.
    rows, tokens = inside[0], None if prompt else inside[1]
    whole, kv_whole = (rows, None, "heads", "head_dim"), (rows, None, "kv_heads", "head_dim")
    q, k, v = (
        constrain(x, rows, tokens, *axes[2:])
        for x, axes in ((q, whole), (k, kv_whole), (v, kv_whole))
    )
    if mesh_axes("kv_heads") != mesh_axes(
        "heads"
    ):  # then each device's queries need their own copies of the keys
        k, v, kv_whole = *(jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v)), whole
    rate = dropout_rate if dropout_key is not None else 0.0
    impl = _choose(
        impl,
        q,
        rate,
        segments is not None,
        prompt,
        visible,
        among is None and slopes is None and not cap,
    )
    impl = _linear(impl, rate) if blockwise and among is None else impl
    # One seed a row and head, drawn over the whole batch, so that a mesh does not change what is dropped.
    seeds = (
        None
        if dropout_key is None or not rate
        else jax.random.bits(dropout_key, (q.shape[0], q.shape[2]))
    )
    options = {
        "segments": (segments, (rows, None)),
        "among": (among, (rows, None, None)),
        "slopes": (slopes, ("heads",)),
        "seeds": (seeds, (rows, "heads")),
    }
    # `local` takes arrays alone, by position: what is not given must not be passed.
    given = {name: pair for name, pair in options.items() if pair[0] is not None}
    arrays = [x for x, _ in given.values()]
    axes = [whole, kv_whole, kv_whole, *(names for _, names in given.values())]
    on_device = functools.partial(
        _on_device,
        names=tuple(given),
        impl=impl,
        visible=visible,
        rate=rate,
        prompt=prompt,
        cap=cap,
    )
    # A kernel's result has no type of its own for the check of what varies over which axis.
    out = local(on_device, axes, whole, check=impl == "xla")(q, k, v, *arrays)
    return constrain(out, rows, tokens, *whole[2:])


def _on_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *arrays: jax.Array,
    names: tuple[str, ...],
    impl: str,
    visible: Visible,
    rate: float,
    prompt: bool,
    cap: float,
) -> jax.Array:
    """Computes attention of one device's rows and heads; `names` are those of the arrays."""
    given = dict(zip(names, arrays, strict=True))
    segments, among, slopes = (given.get(name) for name in ("segments", "among", "slopes"))
    if impl == "cudnn":
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=visible.causal, implementation="cudnn"
        )
    if impl == "packed":
        assert segments is not None  # as `_choose` says
        return attention_of_documents(q, k, v, segments, visible.causal)
    if impl == "splash":
        return _splash.forward(q, k, v, segments, visible.causal)
    if impl == "blocks":
        return attention_by_blocks(
            q, k, v, segments=segments, visible=visible, slopes=slopes, cap=cap
        )
    places = jnp.arange(q.shape[1])[None]
    if (
        prompt and segments is None and among is None
    ):  # a block of queries at a time, as no gradient is wanted
        state = in_blocks(q, k, v, places, places, visible=visible, slopes=slopes, cap=cap)
        return finish(state).astype(q.dtype)
    seen = visible(places, places)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    if among is not None:
        seen = seen & among
    bias = None if slopes is None else slopes_bias(slopes, places, places)
    state = attend(q, k, v, seen, bias=bias, cap=cap, dropout_rate=rate, seeds=given.get("seeds"))
    return finish(state).astype(q.dtype)


def in_blocks(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    queries: Int[Array, "B T"],
    keys: Int[Array, "B S"],
    *,
    first: Int[Array, "B T"] | None = None,
    among: Bool[Array, "B T S"] | None = None,
    segments: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    visible: Visible = CAUSAL,
    slopes: Float[Array, " H"] | None = None,
    cap: float = 0.0,
) -> LogSumExp:
    """Computes `attend` by the places of queries and keys, `QUERIES` queries at a time.

    A query's sums are those of `attend`, and the scores of all, B H T S, never exist. Memory: B H QUERIES S.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Places of the queries; B may be 1.
      keys: Places of the keys, negative where there is none; B may be 1.
      first: Of each query, the place where its document began.
      among: What each query may see besides.
      segments: Numbers of documents, of queries and of keys: those of another one are not seen.
      visible: The rule.
      slopes: What a score falls by for each step of distance.
      cap: Of the scores, as of `attend`.
    """
    batch, length = q.shape[:2]

    def some(part):
        q, queries, first, among, own = part
        seen = visible(queries, keys, first)
        if segments is not None:
            seen = seen & (own[:, :, None] == segments[1][:, None, :])
        bias = None if slopes is None else slopes_bias(slopes, queries, keys)
        return attend(q, k, v, seen if among is None else seen & among, bias=bias, cap=cap)

    parts = (
        q,
        jnp.broadcast_to(queries, (batch, length)),
        first,
        among,
        None if segments is None else segments[0],
    )
    if length <= QUERIES:
        return some(parts)

    def cut(x):  # what fills up the last block is cut off by `whole`
        x = jnp.pad(x, [(0, 0), (0, -length % QUERIES)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, QUERIES, *x.shape[2:]), 1, 0)

    def whole(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, -1, *x.shape[3:])[:, :length]

    return jax.tree.map(whole, jax.lax.map(some, jax.tree.map(cut, parts)))


def _choose(
    impl: str,
    q: jax.Array,
    rate: float,
    has_segments: bool,
    prompt: bool,
    visible: Visible,
    plain: bool,
) -> str:
    """Resolves "auto", and refuses a kernel that cannot do what is asked; a prompt's length is filled up for splash."""
    length, width = q.shape[1], q.shape[3]
    rule = [(plain and not visible.window, "no window, slopes, cap or mask of its own")]
    limits = {
        "cudnn": [
            (q.dtype in (jnp.bfloat16, jnp.float16), f"dtype bfloat16 or float16, not {q.dtype}"),
            (width % 8 == 0 and width <= 256, f"head_dim a multiple of 8 up to 256, not {width}"),
            (rate == 0.0, "dropout 0"),
            *rule,
        ],
        "splash": [
            (q.dtype in (jnp.bfloat16, jnp.float32), f"dtype bfloat16 or float32, not {q.dtype}"),
            (
                prompt and visible.causal or length % 128 == 0,
                f"a length that is a multiple of 128, not {length}",
            ),
            (width % 64 == 0, f"head_dim a multiple of 64, not {width}"),
            (rate == 0.0, "dropout 0"),
            *rule,
        ],
        "xla": [],
    }
    if impl == "auto":
        kernel = {"gpu": "cudnn", "tpu": "splash"}.get(platform(), "xla")
        if not all(ok for ok, _ in limits[kernel]):
            return "xla"
        if kernel == "cudnn" and has_segments:
            return "packed" if packing_is_right() else "blocks"
        return kernel
    for ok, need in limits[impl]:
        if not ok:
            raise UsageError(
                f"attention={impl} needs {need}; take attention=auto, which falls back to xla."
            )
    if impl == "cudnn" and has_segments:
        if not packing_is_right():
            raise UsageError(
                "attention=cudnn with packed documents needs a Hopper GPU or later and cuDNN 9.6 or later; take "
                "attention=auto, which falls back to blocks."
            )
        return "packed"
    return impl


def _linear(impl: str, rate: float) -> str:
    """Returns the form without an array of two axes of tokens, or refuses what has none."""
    if rate:
        raise UsageError(
            "remat=blockwise needs dropout 0 in attention, whose masks are drawn for all pairs of tokens at once; take "
            "dropout=0, or remat=full."
        )
    return "blocks" if impl == "xla" else impl
