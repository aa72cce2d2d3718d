"""Linear attention by chunks in four Triton kernels, and its gradient; `linear_attention` calls it.

One carries states from chunk to chunk, a tile of rows and columns a program, and writes the one before each chunk; a
second makes the outputs, all chunks at once. Backwards the first runs again, then once more from the end with what is
wanted of the states; the last two make gradients, all chunks at once. Kept for it are the inputs alone. States are
written in the inputs' dtype, in which they are multiplied anyway; what is carried is float32.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.lower.triton import available, call_kernel
from jaxpar.nn.mixers._linear_text import TEXT
from jaxpar.scan.varying import varying_as

__all__ = ["BACKWARD", "FORWARD", "Cut"]

MOST_COLUMNS = 512
"""Of keys and of values."""

LEAST, PLAIN = 16, 64
"""Tokens of a chunk: at least, as a matrix unit multiplies 16 rows; and at most without tensor cores."""


class Inputs(NamedTuple):
    """Arrays that linear attention reads, and that have a gradient.

    Attributes:
      q: Queries; for the kernels of the dtype of v.
      k: Keys; as queries.
      v: Values; for the kernels of 16 bits or float32.
      log_decay: Logarithms of decays, [B, T, H, K] or [B, T, H]; for the kernels None keeps all.
      bonus: Weight of a token's own product; decays are of rows then, and a state is read before it
        is written.
      state: State before the first token, of float32 at least.
      line: Column of the state whose value is 1 at all tokens, where it is held apart, as for the
        kernels.
    """

    q: Float[Array, "B T G K"]
    k: Float[Array, "B T G K"]
    v: Float[Array, "B T H V"]
    log_decay: Array | None
    bonus: Float[Array, "H K"] | None
    state: Float[Array, "B H K V"]
    line: Float[Array, "B H K"] | None = None


class Results(NamedTuple):
    """Outputs, the column of ones read by queries, and both states behind the last token."""

    out: Float[Array, "B T H V"]
    norm: Float[Array, "B T H"] | None
    state: Float[Array, "B H K V"]
    line: Float[Array, "B H K"] | None


class Cut(NamedTuple):
    """Columns of keys and of values a step, warps, and steps under way."""

    deep: int
    wide: int
    warps: int
    stages: int


class Pass(NamedTuple):
    """Tokens of a chunk, and the tiles of each kernel."""

    chunk: int
    cuts: dict[str, Cut]


FORWARD = {
    "heads": Pass(128, {"carry": Cut(64, 128, 4, 2), "outputs": Cut(64, 128, 8, 3)}),
    "rows": Pass(32, {"carry": Cut(16, 128, 4, 3), "outputs": Cut(128, 128, 4, 2)}),
}
BACKWARD = {
    "heads": Pass(
        64,
        {
            "carry": Cut(64, 128, 4, 3),
            "value_gradients": Cut(64, 64, 4, 2),
            "key_gradients": Cut(64, 64, 4, 2),
        },
    ),
    "rows": Pass(
        32,
        {
            "carry": Cut(16, 128, 4, 3),
            "value_gradients": Cut(32, 128, 4, 2),
            "key_gradients": Cut(64, 128, 4, 3),
        },
    ),
}
"""For 16 bits, by what has a decay: heads, if anything, or each row of their states, whose sums are held too.

Chunks of many tokens write fewer states; but with a decay a row their pairs take log2 of them products.
"""


def launches(dtype: DTypeLike) -> bool:
    """Whether the kernels can be launched for this dtype; how fast is another question."""
    return (
        jnp.dtype(dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
        and available()
    )


def fits(depth: int, width: int) -> bool:
    """Whether there are tiles for keys and values of so many columns."""
    return all(size % 16 == 0 and 16 <= size <= MOST_COLUMNS for size in (depth, width))


def cut_for(cut: Cut, depth: int, width: int, dtype: DTypeLike) -> Cut:
    """Returns a kernel's tiles. Those of columns divide.

    Args:
      cut: Of 16 bits.
      depth: Columns of keys.
      width: Columns of values.
      dtype: In which is multiplied.
    """
    if jnp.dtype(dtype) == jnp.float32:  # without tensor cores, in full precision
        return Cut(deep=math.gcd(depth, 32), wide=math.gcd(width, 32), warps=4, stages=1)
    return cut._replace(deep=math.gcd(depth, cut.deep), wide=math.gcd(width, cut.wide))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention_by_kernels(
    chunk: int,
    dtype: DTypeLike,
    x: Inputs,
    documents: Int[Array, "B T1"] | None,
    floor: Float[Array, "B T H"] | None = None,
) -> Results:
    """Returns outputs in `dtype` and the state behind the last token.

    Args:
      chunk: Below 64 the most tokens of a chunk, rounded up to a power of two; else each pass has chunks of its own.
      dtype: Of the outputs.
      x: What is read.
      documents: Number of the document before the first token, and of each token's, if there are several.
      floor: If given, outputs are divided by it or the size of `norm`, whichever is larger. It has no gradient.
    """
    return _forward(chunk, dtype, x, documents, floor)[0]


def _forward(chunk: int, dtype: DTypeLike, x: Inputs, documents, floor):
    @sequential_vmap
    def run(x, documents, floor):
        launch = Launch(FORWARD, chunk, x, documents)
        states, last = launch.carried(x.state, x.line)
        batch, length, heads, width = x.v.shape
        norm = [] if x.line is None else [(batch, length, heads)]
        shapes = [((batch, length, heads, width), dtype), *((shape, jnp.float32) for shape in norm)]
        given = (x.q, x.k, x.v, x.log_decay, x.bonus, documents, *states, floor)
        programs = launch.chunks * heads * batch
        out, norm = launch("outputs", given, shapes, 2, programs, FLOOR=floor is not None)
        if x.line is None:
            norm = None
        state, line = last
        return Results(out=out, norm=norm, state=state, line=line)

    results = varying_as(run(x, documents, floor), (x, documents, floor))
    return results, (x, documents, floor, None if floor is None else results.out, results.norm)


def _backward(chunk: int, dtype: DTypeLike, kept, g: Results):
    del dtype
    x, documents, floor, out, norm = kept
    if floor is not None and norm is not None:
        g = _undivided(g, out, norm, floor)

    @sequential_vmap
    def run(x, documents, g):
        return _gradients(Launch(BACKWARD, chunk, x, documents), x, documents, g)

    return varying_as(run(x, documents, g), (x, documents, g)), None, None


def _undivided(g: Results, out: Array, norm: Array, floor: Array) -> Results:
    """Returns the gradients of what was divided, and of the norm that it was divided by."""
    size = jnp.abs(norm)
    divisor, wide = jnp.maximum(size, floor)[..., None], g.out.astype(jnp.float32)
    share = (size > floor) + 0.5 * (size == floor)  # as of `jnp.maximum`
    by_norm = -(wide * out.astype(jnp.float32)).sum(-1) / divisor[..., 0] * share * jnp.sign(norm)
    by_norm = by_norm if g.norm is None else g.norm + by_norm
    return g._replace(out=(wide / divisor).astype(out.dtype), norm=by_norm)


def _gradients(launch: "Launch", x: Inputs, documents, g: Results) -> Inputs:
    """Returns the gradients of what is read."""
    batch, length, heads, _ = x.v.shape
    depth = x.k.shape[-1]
    rows = x.log_decay is not None and x.log_decay.ndim == 4
    out = g.out.astype(x.v.dtype)
    norm = None if g.norm is None else g.norm.astype(jnp.float32)
    line = None if g.line is None else g.line.astype(jnp.float32)
    states, _ = launch.carried(x.state, x.line)
    wanted, first = launch.carried(g.state.astype(jnp.float32), line, out, norm)
    chunks = launch.chunks
    size = launch.sizes["CHUNK"]
    given = (x.q, x.k, x.v, x.log_decay, x.bonus, documents, out, norm)
    pairs = ((batch, heads, chunks, size, size), x.v.dtype)
    of_heads = (1,)
    if x.log_decay is not None and not rows:
        of_heads = (batch, length, heads)
    shapes = [(x.v.shape, x.v.dtype), pairs, (of_heads, jnp.float32)]
    dv, scores, dg = launch(
        "value_gradients", (*given, wanted[0]), shapes, 3, batch * heads * chunks
    )
    tiles = depth // launch.cut("key_gradients").deep
    groups = x.q.shape[2]
    one = ((batch, length, heads, depth), x.q.dtype if groups == heads else jnp.float32)
    if rows:
        parts = (batch, length, heads, depth)
    elif x.log_decay is not None:
        parts = (batch, length, heads, tiles)
    else:
        parts = (1,)
    of_bonus = (1,) if x.bonus is None else (batch, heads, chunks, depth)
    shapes = [one, one, (parts, jnp.float32), (of_bonus, jnp.float32)]
    given = (*given, *states, *wanted, scores)
    dq, dk, more, dbonus = launch("key_gradients", given, shapes, 4, batch * heads * chunks * tiles)
    dq = dq.reshape(batch, length, groups, -1, depth).sum(3).astype(x.q.dtype)
    dk = dk.reshape(batch, length, groups, -1, depth).sum(3).astype(x.q.dtype)
    dlog_decay = None
    if x.log_decay is not None:
        dlog_decay = more if rows else dg + more.sum(-1)
        dlog_decay = dlog_decay.astype(x.log_decay.dtype)
    if x.bonus is None:
        dbonus = None
    else:
        dbonus = dbonus.sum((0, 2)).astype(x.bonus.dtype)
    dstate, dline = first
    return Inputs(
        q=dq,
        k=dk,
        v=dv,
        log_decay=dlog_decay,
        bonus=dbonus,
        state=dstate,
        line=dline,
    )


attention_by_kernels.defvjp(_forward, _backward)


class Launch:
    """Kernels for arrays of these shapes: the constants that all of them have."""

    def __init__(self, passes: dict[str, Pass], chunk: int, x: Inputs, documents: Array | None):
        """Reads shapes alone."""
        self.x, self.documents = x, documents
        (batch, length, heads, width), depth = x.v.shape, x.k.shape[-1]
        self.rows = x.log_decay is not None and x.log_decay.ndim == 4
        most, self.cuts = passes["rows" if self.rows else "heads"]
        most = min(most, PLAIN) if x.v.dtype == jnp.float32 else most
        size = max(
            LEAST, min(most, 1 << (min(length, chunk if chunk < PLAIN else most) - 1).bit_length())
        )
        self.programs, self.chunks = batch * heads, -(-length // size)
        self.sizes: dict[str, Any] = dict(
            LENGTH=length, CHUNKS=self.chunks, GROUPS=x.q.shape[2], HEADS=heads, DEPTH=depth, WIDTH=width, CHUNK=size,
            LEVELS=size.bit_length() - 1, KIND=0 if x.log_decay is None else 2 if self.rows else 1,
            DOCUMENTS=documents is not None, EXCLUSIVE=x.bonus is not None, NORM=x.line is not None,
            EXACT="ieee" if x.v.dtype == jnp.float32 else "tf32",
        )  # fmt: skip

    def cut(self, name: str) -> Cut:
        """Returns a kernel's tiles."""
        return cut_for(self.cuts[name], self.sizes["DEPTH"], self.sizes["WIDTH"], self.x.v.dtype)

    def __call__(self, name: str, arrays, out, count: int, programs: int, **more) -> list[Array]:
        """Runs a kernel; it is told of what is not given by its constants. Outputs too few are of one number."""
        cut = self.cut(name)
        none = jnp.zeros((1,), jnp.int32)
        out = [*out, *[((1,), jnp.float32)] * (count - len(out))]
        return call_kernel(
            *(none if x is None else x for x in arrays),
            text=TEXT,
            name=name,
            out=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out],
            grid=(programs,),
            num_warps=cut.warps,
            num_stages=cut.stages,
            **self.sizes, DEEP=cut.deep, WIDE=cut.wide, **more,
        )  # fmt: skip

    def carried(
        self, state: Array, line: Array | None, out: Array | None = None, norm: Array | None = None
    ):
        """Returns the state before each chunk and the last; with gradients of outputs, that behind each and the first.

        States are pairs of a matrix and of the column of ones, or None.
        """
        x, sizes, cut = self.x, self.sizes, self.cut("carry")
        reverse = out is not None
        given = (x.q, out, norm) if reverse else (x.k, x.v, None)
        shape = (*state.shape[:2], self.chunks, *state.shape[2:])
        lines = [] if line is None else [(shape[:-1], jnp.float32)]
        none = ((1,), jnp.float32)
        shapes = [(shape, x.v.dtype), *(lines or [none]), (state.shape, jnp.float32)]
        shapes += [none if line is None else (line.shape, jnp.float32)]
        tiles = sizes["DEPTH"] // cut.deep * (sizes["WIDTH"] // cut.wide)
        given = (*given, x.log_decay, self.documents, state, line)
        states, lines, last, last_line = self(
            "carry", given, shapes, 4, self.programs * tiles, REVERSE=reverse
        )
        return (
            ((states, None), (last, None)) if line is None else ((states, lines), (last, last_line))
        )
