"""The recurrence in plain XLA: step by step, as a tree, and in two levels of chunks.

Each function computes h[t] = a[t] h[t-1] + b[t] along `axis` (h[t+1] if `reverse`) over a `Ring`, accumulates in
`carry` and returns arrays of b's dtypes. Without `h0`, h at the first step is b there and the first a is not used.
None is differentiated through: `affine` owns the adjoint.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.scan._rings import Ring, cast, put_first, take

__all__ = ["associative", "sequential"]


def sequential(ring: Ring, a, b, h0, *, axis: int, reverse: bool, carry):
    """One step after the other: T steps of latency, each array read once; the twin that the others must equal.

    The buffer of the results starts as b, so that every step reads its b where it writes its h.
    """
    num_steps = jax.tree.leaves(b)[0].shape[axis]

    def at(step):
        return num_steps - 1 - step if reverse else step

    def put(buffer, h, place):
        return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), place, axis), buffer, h)

    def advance(step, state):
        h, buffer = state
        place = at(step)
        drive = cast(take(buffer, place, axis), carry)
        h = jax.tree.map(jnp.add, ring.apply(cast(take(a, place, axis), carry), h), drive)
        return h, put(buffer, h, place)

    if h0 is not None:
        return lax.fori_loop(0, num_steps, advance, (cast(h0, carry), b))[1]
    first = cast(take(b, at(0), axis), carry)
    return lax.fori_loop(1, num_steps, advance, (first, b))[1]


def associative(ring: Ring, a, b, h0, *, axis: int, reverse: bool, carry):
    """`lax.associative_scan`: log2(T) levels of depth, about twice the work, every level a pass over memory."""

    def combine(earlier, later):
        (p, h), (q, g) = earlier, later
        return ring.multiply(q, p), jax.tree.map(jnp.add, ring.apply(q, h), g)

    dtypes = jax.tree.map(lambda x: x.dtype, b)
    a, b = cast(a, carry), cast(b, carry)
    if h0 is not None:
        b = _enter(ring, a, b, cast(h0, carry), axis, reverse)
    h = lax.associative_scan(combine, (a, b), axis=axis, reverse=reverse)[1]
    return jax.tree.map(lambda x, dtype: x.astype(dtype), h, dtypes)


def _enter(ring, a, b, h0, axis, reverse):
    """Adds a[first] h0 to b[first]."""
    num_steps = jax.tree.leaves(b)[0].shape[axis]
    first, rest = (num_steps - 1, slice(0, -1)) if reverse else (0, slice(1, None))
    entered = jax.tree.map(jnp.add, ring.apply(take(a, first, axis), h0), take(b, first, axis))
    where = (slice(None),) * axis + (rest,)
    return put_first(jax.tree.map(lambda x: x[where], b), entered, axis, last=reverse)
