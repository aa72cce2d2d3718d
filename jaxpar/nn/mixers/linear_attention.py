"""Linear attention with decays: a matrix for a state, read by queries; by chunks of tokens, or step by step.

Inside a chunk all pairs of tokens are multiplied, as in attention; between chunks, and between devices that share the
sequence, states follow an affine recurrence (`affine_scan(kind="row")`). Decays are logarithms, and only sums of
neighbouring ones are exponentiated, never a difference of two long sums nor its inverse: where gates are not positive
nothing overflows, and a sum keeps its relative precision however strong the gates before it were. On a CUDA GPU kernels
do the same (`linear_kernels`).
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar._older_fields import newer_arguments
from jaxpar.lower.trial import relative_error, tried
from jaxpar.mesh import mesh_axes, platform
from jaxpar.nn.mixers import linear_kernels as kernels
from jaxpar.nn.mixers.fence import Marks, finite, finite_log, mark, marks_of
from jaxpar.nn.mixers.options import OLDER, Packing, Readout, RecurrenceExecution
from jaxpar.scan import affine_scan
from jaxpar.scan.sharded import from_earlier, is_first
from jaxpar.scan.varying import varying_axes
from jaxpar.types import UsageError

__all__ = ["gates_of", "linear_attention"]

Arrays = TypeVar("Arrays")

TRIAL = (2, 200, 2, 128)
"""Shape of the queries, keys and values that the kernels are tried with."""

OLDER_READOUT = {
    "bonus": "readout.bonus",
    "floor": "readout.floor",
    "normaliser": "readout.normaliser",
    "dtype": "readout.dtype",
}
"""Fields of `Readout` that were arguments of `linear_attention`, as those in `OLDER`."""


def linear_attention(
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    log_decay: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    *,
    state: Float[Array, "B H K V"] | None = None,
    packing: Packing = Packing(),
    readout: Readout = Readout(),
    execution: RecurrenceExecution = RecurrenceExecution(),
    **older: object,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Returns o[t] = q[t] S[t] with S[t] = exp(log_decay[t]) S[t-1] + k[t] v[t]^T, and the state after the last token.

    Cost, for chunks of C: 2 T H (C (K + V) / 2 + 2 K V) operations forward; memory of T H (C + log2(C) K) numbers and
    of T / C states, never of a state a token; kernels have these states alone. Backward all of it is made again.

    Args:
      q: Queries, scaled as they shall be; G divides H, and queries and keys are shared by H / G heads.
      k: Keys.
      v: Values, in whose dtype products are made; sums and states are float32 at least.
      log_decay: Logarithms of what is kept of a head's state, or of each of its rows; not positive. None keeps all.
      state: State before the first token; zeros by default. With a normaliser it has V + 1 columns.
      packing: Documents in the rows, and their tokens that count.
      readout: Bonus and normaliser with which queries read the state, and the dtype of outputs.
      execution: Form of the computation; static under jit.
      **older: Values of fields that were arguments, until the first release.

    Returns:
      Outputs, and the state; inside `jax.shard_map` that after this device's last token.

    Raises:
      UsageError: For shapes that do not fit, or a kernel where there is none.
    """
    groups = {"packing": packing, "readout": readout, "execution": execution}
    packing, readout, execution = newer_arguments(
        "linear_attention", OLDER | OLDER_READOUT, groups, older
    ).values()
    impl = execution.impl
    if impl == "auto" and execution.axis_name is None:
        impl = _form(k, v, log_decay, readout)
    columns = v.shape[-1]
    dtype = readout.dtype_for(v)
    if readout.has_ones:
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)
    heads = _heads(q, k, v, log_decay, state, packing, readout.bonus)
    if v.size == 0:  # no token, or no row: there is no chunk to read a last state from
        out, last = _of_nothing(k, v, state, dtype)
        if readout.floor is not None:
            out = out[..., :columns]
        return out, last
    if impl == "kernel":
        v = v[..., :columns]
        return _by_kernel(q, k, v, log_decay, state, packing, readout, execution)
    wide = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    first = (
        jnp.zeros((len(v), heads, k.shape[-1], v.shape[-1]), wide)
        if state is None
        else state.astype(wide)
    )
    log_decay = _decays(log_decay, v.shape[:3], k.shape[-1], readout.bonus).astype(wide)
    (q, k, v, log_decay), starts = only_valid((q, k, v, log_decay), packing)
    inputs = kernels.Inputs(q=q, k=k, v=v, log_decay=log_decay, bonus=readout.bonus, state=first)
    if impl == "sequential":
        refuse_split(execution)
        out, last = _steps(inputs, starts)
    else:
        # Keeps its arguments alone, whatever encloses it keeps.
        run = jax.checkpoint(_documents, static_argnums=3)
        out, last = run(inputs, starts, readout.floor, execution)
    return _divided(out, readout.floor).astype(dtype), last


def _of_nothing(k, v, state, dtype) -> tuple[Array, Array]:
    """Returns no outputs, and the state that no token changes."""
    wide = jnp.promote_types(jnp.result_type(k, v), jnp.float32)
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), wide)
    return jnp.zeros(v.shape, dtype), state.astype(wide)


def _documents(
    inputs: kernels.Inputs,
    starts: Array | None,
    floor: Array | None,
    execution: RecurrenceExecution,
) -> tuple[Array, Array]:
    """Runs chunks so that no document sees what is not finite in another one."""
    if starts is None:
        return _chunks(inputs, starts, execution)
    inputs, _, marks = _fenced(inputs, floor, starts, execution.axis_name)
    out, last = _chunks(inputs, starts, execution)
    return mark(out, marks.tokens), mark(last, marks.last)


def _fenced(
    inputs: kernels.Inputs, floor: Array | None, starts: Array, axis_name: str | None
) -> tuple[kernels.Inputs, Array | None, Marks]:
    """Returns finite inputs and a finite floor, and the marks of what was not."""
    repeats = inputs.v.shape[2] // inputs.k.shape[2]
    q, own = finite(inputs.q)
    k, drive = finite(inputs.k)
    v, drive_of_values = finite(inputs.v)
    own = jnp.repeat(own, repeats, 2)
    drive = jnp.repeat(drive, repeats, 2) + drive_of_values
    log_decay = inputs.log_decay
    if log_decay is not None:
        log_decay, drive_of_decays = finite_log(log_decay)
        if log_decay.ndim == 4:
            drive_of_decays = drive_of_decays.sum(-1)
        drive = drive + drive_of_decays
    state, first = finite(inputs.state)
    if floor is not None:
        missing = jnp.isnan(floor)
        own = jnp.where(missing, jnp.nan, own)
        floor = jnp.where(missing, 1, floor)
    marks = marks_of(drive, own, first.sum(-1), starts, axis_name=axis_name)
    inputs = inputs._replace(q=q, k=k, v=v, log_decay=log_decay, state=state)
    return inputs, floor, marks


def _decays(
    log_decay: Array | None, shape: tuple[int, ...], depth: int, bonus: Array | None
) -> Array:
    """Returns log decays, zeros where there are none; with a bonus those of rows."""
    log_decay = jnp.zeros(shape, jnp.float32) if log_decay is None else log_decay
    by_rows = bonus is None or log_decay.ndim == 4
    return log_decay if by_rows else jnp.broadcast_to(log_decay[..., None], (*shape, depth))


def _divided(out: Array, floor: Array | None) -> Array:
    """Divides by the last column, which is left out; by nothing without a floor."""
    if floor is None:
        return out
    return _quotient(
        out[..., :-1], jnp.maximum(jnp.abs(out[..., -1:]), jax.lax.stop_gradient(floor)[..., None])
    )


@jax.custom_jvp
def _quotient(x: Array, y: Array) -> Array:
    """Divides; no square of y is in the derivative, which would be 0 where y is exp(-80)."""
    return x / y


@_quotient.defjvp
def _quotient_derivative(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    ratio = x / y
    return ratio, (dx - ratio * dy) / y


def _form(k: Array, v: Array, log_decay: Array | None, readout: Readout) -> str:
    """Returns what "auto" is."""
    if v.shape[1] == 1:
        return "sequential"
    return "kernel" if has_linear_kernel(k, v, log_decay, readout) else "chunked"


def has_linear_kernel(k: Array, v: Array, log_decay: Array | None, readout: Readout) -> bool:
    """Whether "auto" is the kernel for more than one token: 16 bits, sizes in tiles, a CUDA GPU with jax_triton.

    Before its first use for such decays in this process it has to pass a trial against chunks; if it fails, one warning
    tells of it. Where a mesh splits rows or heads, it is taken inside `jaxpar.mesh.local` alone, as GSPMD cannot split
    it.
    """
    fits = (
        kernels.fits(k.shape[-1], v.shape[-1])
        and v.dtype.itemsize == 2
        and kernels.launches(v.dtype)
    )
    if platform() != "gpu" or not fits:
        return False
    split = any(mesh_axes(name) for name in ("batch", "heads", "seq")) and not varying_axes(v)
    kind = 0 if log_decay is None else log_decay.ndim
    return not split and _is_right(kind, readout.bonus is not None, readout.has_ones)


def _by_kernel(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    state: Array | None,
    packing: Packing,
    readout: Readout,
    execution: RecurrenceExecution,
) -> tuple[Array, Array]:
    """Prepares what the kernels read; a state of V + 1 columns has the normaliser's as its last."""
    wide = jnp.float32
    columns = v.shape[-1]
    if execution.axis_name is not None or not (
        kernels.launches(v.dtype) and kernels.fits(k.shape[-1], columns)
    ):
        raise UsageError(
            f"impl='kernel' needs a CUDA GPU with jax_triton, bfloat16, float16 or float32, keys and values of a "
            f"multiple of 16 columns up to {kernels.MOST_COLUMNS} and no axis_name (keys have {k.shape[-1]}, values "
            f"{columns} of {v.dtype}, axis_name is {execution.axis_name}); legal are the others, and auto."
        )
    shape = (v.shape[0], v.shape[2], k.shape[-1], columns + readout.has_ones)
    first = jnp.zeros(shape, wide) if state is None else state.astype(wide)
    bonus = readout.bonus
    if bonus is not None:
        log_decay = _decays(log_decay, v.shape[:3], k.shape[-1], bonus)
        bonus = bonus.astype(wide)
    arrays = (q.astype(v.dtype), k.astype(v.dtype), v, log_decay)
    (q, k, v, log_decay), starts = only_valid(arrays, packing)
    inputs = kernels.Inputs(q=q, k=k, v=v, log_decay=log_decay, bonus=bonus, state=first)
    floor = readout.floor
    marks = None
    documents = None
    if starts is not None:
        inputs, floor, marks = _fenced(inputs, floor, starts, None)
        documents = jnp.cumsum(jnp.pad(starts, ((0, 0), (1, 0))), 1, dtype=jnp.int32)
    line = inputs.state[..., columns] if readout.has_ones else None
    inputs = inputs._replace(state=inputs.state[..., :columns], line=line)
    floor = None if floor is None else floor.astype(wide)
    dtype = readout.dtype_for(v)
    results: Any = kernels.attention_by_kernels(
        execution.chunk, dtype, inputs, documents, floor
    )  # custom_vjp forgets its type
    out, norm, last, last_line = results
    if readout.has_ones:
        if floor is None:
            out = jnp.concatenate([out, norm[..., None].astype(dtype)], -1)
        last = jnp.concatenate([last, last_line[..., None]], -1)
    if marks is None:
        return out, last
    return mark(out, marks.tokens), mark(last, marks.last)


@functools.cache
def _is_right(kind: int, exclusive: bool, normaliser: bool) -> bool:
    """Whether the kernels' values and gradients are those of chunks, over documents and a last chunk that is not full.

    Args:
      kind: Dimensions of the log decays, 0 if there are none.
      exclusive: Whether there is a bonus.
      normaliser: Whether values have a column of ones, by which outputs are divided.
    """

    def errors() -> list[Array]:
        keys = jax.random.split(jax.random.key(0), 8)
        shape = TRIAL
        q, k, v, g = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:4])
        decay = (
            -jnp.exp(jax.random.uniform(keys[4], shape[: max(kind, 1)], minval=-6, maxval=2))
            if kind
            else None
        )
        bonus = jax.random.normal(keys[5], shape[2:]) if exclusive else None
        state = jax.random.normal(keys[6], (shape[0], *shape[2:], shape[3] + normaliser))
        packing = Packing(starts=jax.random.bernoulli(keys[7], 0.01, shape[:2]))
        floor = jnp.ones(shape[:3]) if normaliser else None

        def both(impl):
            def run(q, k, v, decay, bonus, state):
                return linear_attention(
                    q / 8,
                    k / 8,
                    v,
                    decay,
                    state=state,
                    packing=packing,
                    readout=Readout(bonus=bonus, floor=floor),
                    execution=RecurrenceExecution(impl=impl),
                )

            (out, last), pull = jax.vjp(run, q, k, v, decay, bonus, state)
            return out, last, pull((g, last))

        run = jax.jit(both, static_argnums=0)
        got, want = (jax.tree.leaves(run(impl)) for impl in ("kernel", "chunked"))
        return [relative_error(*pair) for pair in zip(got, want, strict=True)]

    return tried("Triton's linear attention", "its form by chunks in XLA", errors, "gpu")


def _steps(inputs: kernels.Inputs, starts: Array | None) -> tuple[Array, Array]:
    """One token after the other: what the chunks must equal."""
    q, k, v, log_decay, bonus, state, _ = inputs
    repeats = v.shape[2] // q.shape[2]

    def step(state, now):
        q, k, v, log_decay, start = now
        q, k = (jnp.repeat(x, repeats, 1).astype(state.dtype) for x in (q, k))
        state = state if start is None else jnp.where(start[:, None, None, None], 0, state)
        decay = jnp.exp(log_decay).reshape(*log_decay.shape, *(1,) * (4 - log_decay.ndim))
        own = k[..., None] * v.astype(state.dtype)[..., None, :]
        after = decay * state + own
        seen = after if bonus is None else state + bonus.astype(state.dtype)[None, ..., None] * own
        return after, jnp.einsum("bhk,bhkv->bhv", q, seen, precision="highest")

    line = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, k, v, log_decay, starts))
    if v.shape[1] == 1:
        state, out = step(state, jax.tree.map(lambda x: x[0], line))
        return out[:, None], state
    state, outs = jax.lax.scan(step, state, line)
    return jnp.swapaxes(outs, 0, 1), state


def _chunks(
    inputs: kernels.Inputs, starts: Array | None, execution: RecurrenceExecution
) -> tuple[Array, Array]:
    """All chunks at once; arrays [B, G, H / G, N, C, ...] inside, N chunks."""
    q, k, v, log_decay, bonus, state, _ = inputs
    assert log_decay is not None  # `_decays` fills in zeros
    chunk = execution.chunk
    axis_name = execution.axis_name
    batch, length, heads, _ = v.shape
    groups = q.shape[2]
    rows = log_decay.ndim == 4
    repeats = heads // groups
    if rows and repeats > 1:  # each head's decays of rows are its own
        q, k, groups, repeats = jnp.repeat(q, repeats, 2), jnp.repeat(k, repeats, 2), heads, 1
    q, k, v, log_decay = (in_chunks(x, groups, chunk) for x in (q, k, v, log_decay))
    dtype, wide = v.dtype, state.dtype
    if rows:
        weight = 1 if bonus is None else bonus.astype(wide)[None, :, None, None, None]
        scores, gates = _scores(
            q.astype(wide), k.astype(wide), log_decay, weight, bonus is not None
        )
    else:
        gates, pairs = gates_of(log_decay)
        scores = dot(q, jnp.swapaxes(k, -1, -2), dtype, wide) * jnp.exp(pairs)
    scores, read, write, kept = gates.applied(q, k, scores, starts, chunk)
    drive = dot(jnp.swapaxes(write, -1, -2), v, dtype, wide)
    state = state.reshape(batch, groups, repeats, *state.shape[2:])
    kept = kept if rows else jnp.broadcast_to(kept[..., None], drive.shape[:-1])
    states = affine_scan(kept, drive, state, kind="row", axis=3, axis_name=axis_name)
    out = dot(scores, v, dtype, wide) + dot(
        read, states_before(states, state, axis_name), dtype, wide
    )
    return out_of_chunks(out, length), states[:, :, :, -1].reshape(batch, heads, *states.shape[-2:])


class Gates(NamedTuple):
    """Sums of neighbouring log decays within chunks of C tokens, [..., C] or [..., C, K].

    Attributes:
      before: From the chunk's first token to each.
      after: From behind each to the chunk's last.
      total: Of the whole chunk, [...] or [..., K].
    """

    before: Array
    after: Array
    total: Array

    def applied(self, q: Array, k: Array, scores: Array, starts: Array | None, chunk: int):
        """Returns scores within documents; queries of the state before a chunk, keys of that behind, what it keeps."""
        tail = (1,) * (q.ndim - self.before.ndim)
        before, after = (jnp.exp(x).reshape(*x.shape, *tail) for x in (self.before, self.after))
        kept = jnp.exp(self.total)
        if starts is not None:
            document = jnp.cumsum(
                in_chunks(starts.astype(jnp.int32)[..., None], 1, chunk), -1
            )  # [B, 1, 1, N, C]
            last = document[..., -1:]
            scores = jnp.where(document[..., :, None] == document[..., None, :], scores, 0)
            before = jnp.where((document == 0)[..., None], before, 0)
            after = jnp.where((document == last)[..., None], after, 0)
            none = (last == 0) if kept.ndim == last.ndim else last[..., 0] == 0
            kept = jnp.where(none, kept, 0)
        return scores, q * before, k * after, kept


def gates_of(log_decay: Float[Array, "... C"]) -> tuple[Gates, Float[Array, "... C C"]]:
    """Returns the sums of a head's log decays, and those from behind token j to token i at [i, j]; -inf for j > i.

    Made by merging blocks of 1, 2, 4, ... tokens, C being a power of two: each is a sum of neighbours alone.
    """
    axis = log_decay.ndim - 1
    before = log_decay[..., None]
    after = jnp.zeros_like(log_decay)[..., None]
    total = log_decay
    pairs = jnp.zeros_like(log_decay)[..., None, None]
    while before.shape[-2] > 1:
        a, b = _halves(before, axis)
        c, d = _halves(after, axis)
        s, t = _halves(total, axis)
        p, r = _halves(pairs, axis)
        across = b[..., :, None] + c[..., None, :]
        pairs = _square(p, across, r, -jnp.inf)
        before = jnp.concatenate([a, s[..., None] + b], -1)
        after = jnp.concatenate([c + t[..., None], d], -1)
        total = s + t
    gates = Gates(before=before.squeeze(axis), after=after.squeeze(axis), total=total.squeeze(axis))
    return gates, pairs[..., 0, :, :]


def _scores(q, k, log_decay, weight, exclusive):
    """Returns q_i k_j with each row's decay between j and i, and `Gates`; merged as in `gates_of`.

    Of two neighbouring blocks the decay from j in the first to i in the second is a factor of i and one of j, both at
    most 1, so that all pairs of them are one product of matrices.
    """
    axis = log_decay.ndim - 2
    before = log_decay
    if exclusive:
        before = jnp.zeros_like(log_decay)
    before = jnp.expand_dims(before, axis + 1)
    after = jnp.expand_dims(jnp.zeros_like(log_decay), axis + 1)
    total = log_decay
    scores = (q * k * weight).sum(-1)[..., None, None]
    q = jnp.expand_dims(q, axis + 1)
    k = jnp.expand_dims(k, axis + 1)
    while before.shape[axis] > 1:
        a, b = _halves(before, axis)
        c, d = _halves(after, axis)
        s, t = _halves(total, axis)
        p, r = _halves(scores, axis)
        q_first, q_last = _halves(q, axis)
        k_first, k_last = _halves(k, axis)
        reads = q_last * jnp.exp(b)
        writes = k_first * jnp.exp(c)
        # A few numbers each: on accelerators no product of matrices is as fast as a sum. On CPUs
        # the sum ends the process under jaxlib 0.10, which hands arrays of eight axes to YNNPACK.
        if reads.shape[-2] > 4 or platform() == "cpu":
            across = jnp.einsum("...ik,...jk->...ij", reads, writes, precision="highest")
        else:
            across = (reads[..., :, None, :] * writes[..., None, :, :]).sum(-1)
        scores = _square(p, across, r, 0)
        before = jnp.concatenate([a, jnp.expand_dims(s, -2) + b], -2)
        after = jnp.concatenate([c + jnp.expand_dims(t, -2), d], -2)
        total = s + t
        q = jnp.concatenate([q_first, q_last], -2)
        k = jnp.concatenate([k_first, k_last], -2)
    gates = Gates(before=before.squeeze(axis), after=after.squeeze(axis), total=total.squeeze(axis))
    return scores.squeeze(axis), gates


def _halves(x, axis):
    """Splits an even number of blocks into first ones and second ones."""
    pairs = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    return jax.lax.index_in_dim(pairs, 0, axis + 1, False), jax.lax.index_in_dim(
        pairs, 1, axis + 1, False
    )


def _square(first, across, second, empty):
    """Joins two blocks of pairs: what is above the diagonal is `empty`."""
    above = jnp.full_like(across, empty)
    top, bottom = jnp.concatenate([first, above], -1), jnp.concatenate([across, second], -1)
    return jnp.concatenate([top, bottom], -2)


def dot(x: Array, y: Array, dtype: jnp.dtype, wide: jnp.dtype) -> Array:
    """Multiplies matrices in `dtype` with sums in `wide`; of float32 at full precision on every platform."""
    precision = None if jnp.dtype(dtype).itemsize < 4 else jax.lax.Precision.HIGHEST
    return jnp.matmul(
        x.astype(dtype), y.astype(dtype), precision=precision, preferred_element_type=wide
    )


def only_valid(arrays: Arrays, packing: Packing) -> tuple[Arrays, Bool[Array, "B T"] | None]:
    """Returns arrays [B, T, ...] that are 0 at tokens that do not count, and starts that are not among these."""
    starts, valid = packing
    if valid is None:
        return arrays, starts
    length = jax.tree.leaves(arrays)[0].shape[1]
    counts = jnp.arange(length)[None] < valid[:, None]

    def zeroed(x):
        return jnp.where(counts.reshape(*counts.shape, *(1,) * (x.ndim - 2)), x, 0)

    return jax.tree.map(zeroed, arrays), None if starts is None else starts & counts


def in_chunks(x: Float[Array, "B T H *D"], groups: int, chunk: int) -> Float[Array, "B G R N C *D"]:
    """Returns heads in `groups` and time in chunks, filled up with zeros."""
    length = x.shape[1]
    size = 1 << (max(1, min(chunk, length)) - 1).bit_length()
    x = jnp.pad(x, [(0, 0), (0, -length % size), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(x.shape[0], -1, size, groups, x.shape[2] // groups, *x.shape[3:])
    return jnp.moveaxis(x, (3, 4), (1, 2))


def out_of_chunks(x: Float[Array, "B G R N C V"], length: int) -> Float[Array, "B T H V"]:
    """Returns time and heads as `in_chunks` was given them."""
    x = jnp.moveaxis(x, (1, 2), (3, 4))
    return x.reshape(x.shape[0], -1, x.shape[3] * x.shape[4], x.shape[5])[:, :length]


def states_before(states: Array, first: Array, axis_name: str | None) -> Array:
    """Returns the state before each chunk, from those after each and the one before all; chunks are axis 3."""
    if axis_name is not None:
        earlier = from_earlier(states[:, :, :, -1], axis_name, False)
        first = jnp.where(is_first(axis_name, False), first, earlier)
    return jnp.concatenate([first[:, :, :, None], states[:, :, :, :-1]], 3)


def refuse_split(execution: RecurrenceExecution) -> None:
    """Rejects steps along a sequence that devices share."""
    if execution.axis_name is not None:
        raise UsageError(
            "impl='sequential' runs along the whole sequence; take impl='chunked' where it is split."
        )


def _heads(q, k, v, log_decay, state, packing: Packing, bonus) -> int:
    """Returns H of arrays that fit each other."""
    heads = v.shape[2]
    wanted = {
        "k": (k, [q.shape]),
        "v": (v, [(*q.shape[:2], heads, v.shape[-1])]),
        "log_decay": (log_decay, [v.shape[:3], (*v.shape[:3], k.shape[-1])]),
        "bonus": (bonus, [(heads, k.shape[-1])]),
        "state": (state, [(v.shape[0], heads, k.shape[-1], v.shape[-1])]),
        "starts": (packing.starts, [v.shape[:2]]),
        "valid": (packing.valid, [v.shape[:1]]),
    }
    for name, (x, shapes) in wanted.items():
        if x is not None and x.shape not in shapes:
            legal = " or ".join(map(str, shapes))
            raise UsageError(
                f"{name} of shape {x.shape} does not fit q of {q.shape} and v of {v.shape}; give {legal}."
            )
    if heads % q.shape[2]:
        raise UsageError(f"v has {heads} heads, no multiple of the {q.shape[2]} of q and k.")
    return heads
