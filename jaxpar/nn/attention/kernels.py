"""Attention of tokens to each other behind one function: cuDNN on GPU, splash on TPU, dense XLA elsewhere.

Every form runs on one device's own rows and heads, inside `jaxpar.mesh.local`: kernels are opaque to
GSPMD, which would gather their inputs in silence. The dense form (`attend`) is the reference for the other two.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxpar._older_fields import newer_arguments
from jaxpar.fields import Between, OneOf, check_fields, field
from jaxpar.mesh import constrain, local, mesh_axes, platform
from jaxpar.nn.attention import _splash
from jaxpar.nn.attention.blockwise import attention_by_blocks
from jaxpar.nn.attention.packed import attention_of_documents, packing_is_right
from jaxpar.nn.attention.state import attend, finish
from jaxpar.nn.attention.visibility import Visibility, Where
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import PRNGKey, UsageError

__all__ = ["Dropout", "AttentionExecution", "attention", "in_blocks"]

QUERIES = 256
"""Queries of a prompt whose dense scores exist at the same time."""

ATTENTION_IMPLS = ("auto", "cudnn", "splash", "xla")

OLDER = {
    "visible": "visibility.rule",
    "among": "visibility.among",
    "slopes": "visibility.slopes",
    "cap": "visibility.cap",
    "dropout_rate": "dropout.rate",
    "dropout_key": "dropout.key",
    "impl": "execution.impl",
    "prompt": "execution.prompt",
    "inside": "execution.inside",
    "blockwise": "execution.blockwise",
}
"""Arguments of `attention` that are fields of other arguments today."""


@flax.struct.dataclass
class Dropout:
    """Dropout of attention weights, which the dense form alone has.

    Attributes:
      rate: Share of the weights that is dropped; static.
      key: Random key, which is consumed; None for no dropout, as while not training.
    """

    rate: float = field(0.0, Between(0, 1, "[)"), pytree_node=False)
    key: PRNGKey | None = None

    __post_init__ = check_fields

    @property
    def is_on(self) -> bool:
        """True where weights are dropped: at a rate over 0, and with a key."""
        return self.key is not None and self.rate != 0

    def seeds(self, batch: int, heads: int) -> UInt32[Array, "B H"] | None:
        """Returns one seed a row and head; None where nothing is dropped."""
        if self.key is None or not self.is_on:
            return None
        return jax.random.bits(self.key, (batch, heads))


@dataclasses.dataclass(frozen=True)
class AttentionExecution:
    """Form in which attention is computed; static.

    Attributes:
      impl: "auto", "cudnn", "splash" or "xla" (dense).
      prompt: Whether this is a prompt, of any length, which no mesh axis splits and nothing is
        differentiated through.
      inside: Layout of the tokens, by logical axes of [B, T, D].
      blockwise: Whether "xla" is a loop over blocks (`jaxpar.nn.attention.blockwise`) in place of
        the dense form.
    """

    impl: str = field("auto", OneOf(ATTENTION_IMPLS))
    prompt: bool = False
    inside: tuple[str | None, ...] = ("batch", "seq_layer", None)
    blockwise: bool = False

    __post_init__ = check_fields


CAUSAL = Visibility()
NO_DROPOUT = Dropout()
AUTO = AttentionExecution()


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    *,
    segments: Int[Array, "B T"] | None = None,
    visibility: Visibility = CAUSAL,
    dropout: Dropout = NO_DROPOUT,
    execution: AttentionExecution = AUTO,
    **older: object,
) -> Float[Array, "B T H K"]:
    """Computes softmax(q k^T / sqrt(K)) v over what each position sees: by default itself and what came before.

    Query head h reads key head h * G // H.

    Args:
      q: Queries.
      k: Keys; G divides H.
      v: Values.
      segments: Document numbers; positions of another document are not seen.
      visibility: Keys that each position sees, and how their scores change. A mask, slopes and a
        cap need the dense form, a window that or blocks.
      dropout: Dropout of the weights; needs the dense form.
      execution: Implementation, and how the tokens lie.
      **older: Values of fields that were arguments, until the first release.

    Cost: O(B H T^2 K) operations; memory O(B H T^2) for "xla", of a prompt or blockwise O(B H T), as for the kernels.

    Raises:
      TypeError: If there never was an argument of a name.
      UsageError: If an implementation by name, or blocks, cannot take this dtype, head size,
        length, visibility or dropout.
    """
    groups = {"visibility": visibility, "dropout": dropout, "execution": execution}
    visibility, dropout, execution = newer_arguments("attention", OLDER, groups, older).values()
    # Projected where their tokens are; a split sequence is gathered here and nowhere earlier.
    rows = execution.inside[0]
    tokens = None if execution.prompt else execution.inside[1]
    whole = (rows, None, "heads", "head_dim")
    kv_whole = (rows, None, "kv_heads", "head_dim")
    q = constrain(q, rows, tokens, *whole[2:])
    k = constrain(k, rows, tokens, *kv_whole[2:])
    v = constrain(v, rows, tokens, *kv_whole[2:])
    # Each device's queries need their own copies of the keys where heads are split in another way.
    if mesh_axes("kv_heads") != mesh_axes("heads"):
        copies = q.shape[2] // k.shape[2]
        k = jnp.repeat(k, copies, axis=2)
        v = jnp.repeat(v, copies, axis=2)
        kv_whole = whole
    form = _choose(q, segments is not None, visibility, dropout, execution)
    options = {
        "segments": (segments, (rows, None)),
        "among": (visibility.among, (rows, None, None)),
        "slopes": (visibility.slopes, ("heads",)),
        # Drawn over the whole batch, so that a mesh does not change what is dropped.
        "seeds": (dropout.seeds(q.shape[0], q.shape[2]), (rows, "heads")),
    }
    # `local` takes arrays alone, by position: what is not given must not be passed.
    given = {name: pair for name, pair in options.items() if pair[0] is not None}
    arrays = [x for x, _ in given.values()]
    axes = [whole, kv_whole, kv_whole, *(names for _, names in given.values())]
    on_device = functools.partial(
        _on_device,
        names=tuple(given),
        visibility=dataclasses.replace(visibility, among=None, slopes=None),
        rate=dropout.rate,
        form=form,
        prompt=execution.prompt,
    )
    # A kernel's result has no type of its own for the check of what varies over which axis.
    out = local(on_device, axes, whole, check=form == "xla")(q, k, v, *arrays)
    return constrain(out, rows, tokens, *whole[2:])


def _on_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *arrays: jax.Array,
    names: tuple[str, ...],
    visibility: Visibility,
    rate: float,
    form: str,
    prompt: bool,
) -> jax.Array:
    """Computes attention of one device's rows and heads.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      *arrays: Those there are of segments, mask, slopes and seeds of dropout.
      names: Names of these arrays.
      visibility: Rule and cap, without arrays.
      rate: Share of weights that is dropped, if there are seeds.
      form: "xla", or what `_choose` returns in its place.
      prompt: As of `AttentionExecution`.
    """
    given = dict(zip(names, arrays, strict=True))
    segments = given.get("segments")
    among = given.get("among")
    visibility = dataclasses.replace(visibility, among=among, slopes=given.get("slopes"))
    causal = visibility.rule.causal
    if form == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
    if form == "packed":
        assert segments is not None  # as `_choose` says
        return attention_of_documents(q, k, v, segments, causal)
    if form == "splash":
        return _splash.forward(q, k, v, segments, causal)
    if form == "blocks":
        return attention_by_blocks(q, k, v, segments=segments, visibility=visibility)
    where = Where(positions=jnp.arange(q.shape[1])[None], segments=segments)
    # A block of queries at a time, as no gradient is wanted.
    if prompt and segments is None and among is None:
        return finish(in_blocks(q, k, v, where, where, visibility)).astype(q.dtype)
    seen = visibility.rule.mask(where, where)
    if among is not None:
        seen = seen & among
    bias = visibility.bias(where, where)
    seeds = given.get("seeds")
    state = attend(q, k, v, seen, bias=bias, cap=visibility.cap, dropout_rate=rate, seeds=seeds)
    return finish(state).astype(q.dtype)


def in_blocks(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    queries: Where,
    keys: Where,
    visibility: Visibility = CAUSAL,
) -> LogSumExp:
    """Computes `attend` by the positions of queries and keys, `QUERIES` queries at a time.

    A query's sums are those of `attend`, and the scores of all, B H T S, never exist. Memory: B H QUERIES S.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      queries: Positions of the queries, their documents, and where these began.
      keys: Positions of the keys, negative where there is none, and their documents. Those of
        another document than a query's are unseen.
      visibility: Keys that each query sees, and how their scores change.
    """
    batch, length = q.shape[:2]

    def some(part):
        q, positions, first, among, segments = part
        block = Where(positions=positions, segments=segments, first=first)
        seen = visibility.rule.mask(block, keys)
        bias = visibility.bias(block, keys)
        if among is not None:
            seen = seen & among
        return attend(q, k, v, seen, bias=bias, cap=visibility.cap)

    assert queries.positions is not None
    positions = jnp.broadcast_to(queries.positions, (batch, length))
    parts = (q, positions, queries.first, visibility.among, queries.segments)
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
    q: jax.Array,
    has_segments: bool,
    visibility: Visibility,
    dropout: Dropout,
    execution: AttentionExecution,
) -> str:
    """Returns "cudnn", "packed", "splash", "blocks" or "xla", and rejects what that cannot do."""
    limits = _limits(q, visibility, dropout, execution)
    impl = _kernel(execution.impl, limits, has_segments)
    if not execution.blockwise or visibility.among is not None:
        return impl
    if dropout.is_on:
        raise UsageError(
            "remat=blockwise needs dropout 0 in attention, whose masks are drawn for all pairs of tokens at once; take "
            "dropout=0, or remat=full."
        )
    return "blocks" if impl == "xla" else impl


def _limits(
    q: jax.Array, visibility: Visibility, dropout: Dropout, execution: AttentionExecution
) -> dict[str, list[tuple[bool, str]]]:
    """Returns what each implementation needs, as (whether it is so, words); splash fills a prompt's length up."""
    length, width = q.shape[1], q.shape[3]
    is_filled_up = execution.prompt and visibility.rule.causal
    limits_of_all = [
        (not dropout.is_on, "dropout 0"),
        (visibility.is_plain, "no window, slopes, cap or mask of its own"),
    ]
    return {
        "cudnn": [
            (q.dtype in (jnp.bfloat16, jnp.float16), f"dtype bfloat16 or float16, not {q.dtype}"),
            (width % 8 == 0 and width <= 256, f"head_dim a multiple of 8 up to 256, not {width}"),
            *limits_of_all,
        ],
        "splash": [
            (q.dtype in (jnp.bfloat16, jnp.float32), f"dtype bfloat16 or float32, not {q.dtype}"),
            (
                is_filled_up or length % 128 == 0,
                f"a length that is a multiple of 128, not {length}",
            ),
            (width % 64 == 0, f"head_dim a multiple of 64, not {width}"),
            *limits_of_all,
        ],
        "xla": [],
    }


def _kernel(impl: str, limits: dict[str, list[tuple[bool, str]]], has_segments: bool) -> str:
    """Resolves "auto", and rejects an implementation that cannot do what is wanted."""
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
