"""The recurrence in plain XLA: step by step, as a tree, and in two levels of chunks.

Each function computes h[t] = a[t] h[t-1] + b[t] along `axis` (h[t+1] if `reverse`) over a `Ring`, accumulates in
`carry` and returns arrays of b's dtypes. Without `h0`, h at the first step is b there and the first a is not used.
None is differentiated through: `affine` owns the adjoint.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.scan._rings import Ring, cast, num_steps, put_first, shifted, span, take

CHUNK = 16
"""Steps of a chunk, which are unrolled: 8 were slower on an H100, and 32 as fast but slower to compile."""


def sequential(ring: Ring, a, b, h0, *, axis: int, reverse: bool, carry, adjoint: bool = False):
    """One step after the other: T steps of latency, each array read once; the twin that the others must equal.

    The buffer of the results starts as b, so that every step reads its b where it writes its h. The `adjoint` has no
    h0, and takes at each step the transition of the step before it.
    """
    length = num_steps(b, axis)

    def advance(step, state):
        h, buffer = state
        place = length - 1 - step if reverse else step
        used = place if not adjoint else place + 1 if reverse else place - 1
        h = _step(ring, cast(take(a, used, axis), carry), h, cast(take(buffer, place, axis), carry))
        put = lambda x, y: lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), place, axis)  # noqa: E731
        return h, jax.tree.map(put, buffer, h)

    if h0 is not None:
        return lax.fori_loop(0, length, advance, (cast(h0, carry), b))[1]
    first = cast(take(b, length - 1 if reverse else 0, axis), carry)
    return lax.fori_loop(1, length, advance, (first, b))[1]


def associative(ring: Ring, a, b, h0, *, axis: int, reverse: bool, carry):
    """`lax.associative_scan`: log2(T) levels of depth, about twice the work, every level a pass over memory."""

    def combine(earlier, later):
        (p, h), (q, g) = earlier, later
        return ring.multiply(q, p), _step(ring, q, h, g)

    dtypes = jax.tree.map(lambda x: x.dtype, b)
    a, b = cast(a, carry), cast(b, carry)
    if h0 is not None:
        b = _enter(ring, a, b, cast(h0, carry), axis, reverse)
    h = lax.associative_scan(combine, (a, b), axis=axis, reverse=reverse)[1]
    return jax.tree.map(lambda x, dtype: x.astype(dtype), h, dtypes)


def chunked(ring: Ring, a, b, h0, *, axis: int, reverse: bool, carry):
    """Two levels: chunks of `CHUNK` unrolled steps reduce in parallel, their ends are scanned, each chunk runs again.

    Five passes over memory that XLA fuses into two kernels and a small scan. Each state comes from the recurrence
    itself, never from a product over a chunk times a state, so that products over- or underflow without harm.
    """
    length = num_steps(b, axis)
    chunk = min(CHUNK, length)
    start = None if h0 is None else cast(h0, carry)
    a, b = _fold((a, b), axis, chunk, reverse)
    if length <= CHUNK:
        starts = jax.tree.map(lambda x: jnp.expand_dims(x, axis), start)
    else:
        p, h = _reduce(ring, a, b, axis, reverse, carry)
        # More ends than three levels of chunks hold are scanned in chunks again, fewer by a tree.
        level = chunked if num_steps(h, axis) > CHUNK**3 else associative
        ends = level(ring, p, h, start, axis=axis, reverse=reverse, carry=carry)
        first = jax.tree.map(jnp.zeros_like, take(ends, 0, axis)) if start is None else start
        starts = shifted(ends, first, axis, reverse=reverse)
    # Each chunk starts from the end of the one before, now that all ends are known.
    h = _run_chunks(ring, a, b, starts, axis, reverse, carry, h0 is None)
    return jax.tree.map(lambda x: _unfold(x, axis, length, reverse), h)


def compose_steps(ring: Ring, a, b, *, axis: int, reverse: bool, carry):
    """Returns (p, h) with which all steps take a state x to p x + h; arrays without time, of dtype `carry`."""
    while (length := num_steps(b, axis)) > 1:
        chunk = min(CHUNK, length)
        whole = length - length % chunk
        folded = _fold(span((a, b), 0, whole, axis), axis, chunk, reverse)
        rest = cast(span((a, b), whole, length, axis), carry)
        pieces = _reduce(ring, *folded, axis, reverse, carry), rest
        a, b = jax.tree.map(lambda *x: lax.concatenate(x, axis), *pieces)
    return cast((take(a, 0, axis), take(b, 0, axis)), carry)


def _step(ring, a, h, b):
    return jax.tree.map(jnp.add, ring.apply(a, h), b)


def _order(length, reverse):
    return range(length)[::-1] if reverse else range(length)


def _reduce(ring, a, b, axis, reverse, carry):
    """Returns product and end state of each chunk, the steps of a chunk being at `axis + 1`."""
    first, *rest = _order(num_steps(b, axis + 1), reverse)
    p, h = cast(take((a, b), first, axis + 1), carry)
    for place in rest:
        q, drive = cast(take((a, b), place, axis + 1), carry)
        p, h = ring.multiply(q, p), _step(ring, q, h, drive)
    return p, h


def _run_chunks(ring, a, b, h, axis, reverse, carry, cleared):
    """Runs every chunk from its state in `h`; None are zeros, and so is the first one if `cleared`, whatever its a."""
    states = []
    for place in _order(num_steps(b, axis + 1), reverse):
        q, drive = cast(take((a, b), place, axis + 1), carry)
        if h is None:
            h = drive
        elif cleared and not states:
            h = jax.tree.map(jnp.add, _without_first(ring.apply(q, h), axis, reverse), drive)
        else:
            h = _step(ring, q, h, drive)
        states.append(jax.tree.map(lambda x, y: x.astype(y.dtype), h, b))
    return jax.tree.map(lambda *x: jnp.stack(x, axis + 1), *(states[::-1] if reverse else states))


def _without_first(pushed, axis, reverse):
    """Returns zeros at the first chunk: an infinite a would make NaN of the zero state there."""

    def clear(x):
        first = x.shape[axis] - 1 if reverse else 0
        return jnp.where(
            lax.broadcasted_iota("int32", x.shape, axis) == first, jnp.zeros_like(x), x
        )

    return jax.tree.map(clear, pushed)


def _fold(tree, axis, chunk, reverse):
    """Splits time into (chunks, steps); what fills the last chunk up comes after all steps, and is cut off again."""

    def fold(x):
        missing = -x.shape[axis] % chunk
        if missing:
            widths = [(0, 0, 0)] * x.ndim
            widths[axis] = (missing, 0, 0) if reverse else (0, missing, 0)
            x = lax.pad(x, jnp.zeros((), x.dtype), widths)
        return x.reshape(*x.shape[:axis], x.shape[axis] // chunk, chunk, *x.shape[axis + 1 :])

    return jax.tree.map(fold, tree)


def _unfold(x, axis, length, reverse):
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    start = x.shape[axis] - length if reverse else 0
    return lax.slice_in_dim(x, start, start + length, axis=axis)


def _enter(ring, a, b, h0, axis, reverse):
    """Adds a[first] h0 to b[first]."""
    length = num_steps(b, axis)
    rest = span(b, 0, length - 1, axis) if reverse else span(b, 1, length, axis)
    first = -1 if reverse else 0
    entered = _step(ring, take(a, first, axis), h0, take(b, first, axis))
    return put_first(rest, entered, axis, reverse=reverse)
