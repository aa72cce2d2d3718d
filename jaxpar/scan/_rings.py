"""The algebras of an affine recurrence: k x k blocks as k^2 separate arrays, rows, and matrices as trailing axes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.scan.varying import varying_as


class Ring(NamedTuple):
    """How transitions multiply and act; elementwise over every other axis.

    Axes are counted from the front, so that time is at one place in a and h, whatever axes of the state follow it.

    Attributes:
      multiply: `(later, earlier) -> later @ earlier`.
      apply: `(a, h) -> a @ h`.
      transpose: `a -> a^T`.
    """

    multiply: Callable[[Any, Any], Any]
    apply: Callable[[Any, Any], Any]
    transpose: Callable[[Any], Any]


def _sum(terms):
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


@jax.custom_jvp
def _push(a, h):
    """Returns a h, and 0 where a is 0, whatever h is: a reset forgets NaN and infinity too."""
    return a * jnp.where(a == 0, 0, h)


@_push.defjvp
def _push_derivative(primals, tangents):
    a, h = primals
    da, dh = tangents
    # A gate that happens to be 0 has h as its derivative; only what a reset forgets must not return.
    forgotten = (a == 0) & ~jnp.isfinite(h)
    return _push(a, h), da * jnp.where(forgotten, 0, h) + _push(a, dh)


def _compose(later, earlier):
    """Returns the product of transitions, which is 0 only where one of them is.

    Products of large transitions overflow before they meet a zero; products of small ones underflow. An
    underflow to 0 would forget a state that step after step would keep. So the least normal number
    is added: it moves an underflow off 0 and is lost in every other product.
    """
    least = jnp.asarray(jnp.finfo(later.dtype).tiny, later.dtype)
    product = later * earlier + least
    return jnp.where((later == 0) | (earlier == 0), 0, product)


def _multiply_lanes(later, earlier):
    columns = tuple(zip(*earlier, strict=True))
    return tuple(tuple(_sum(map(_compose, row, column)) for column in columns) for row in later)


def _apply_lanes(a, h):
    return tuple(_sum(map(_push, row, h)) for row in a)


LANE_RING = Ring(_multiply_lanes, _apply_lanes, lambda a: tuple(zip(*a, strict=True)))
"""a is a tuple of rows of arrays, h a tuple of arrays: unrolled, and one lane is the diagonal recurrence."""


def _apply_matrix(a, h):
    return jnp.einsum("...ij,...j->...i", a, h, precision=lax.Precision.HIGHEST)


def _multiply_matrices(later, earlier):
    return jnp.matmul(later, earlier, precision=lax.Precision.HIGHEST)


MATRIX_RING = Ring(_multiply_matrices, _apply_matrix, lambda a: jnp.swapaxes(a, -1, -2))
"""a ends in two axes, h in one. Products at full precision: nothing refines a scan, so TF32 would stay in it."""

ROW_RING = Ring(_compose, lambda a, h: _push(a[..., None], h), lambda a: a)
"""a lacks h's last axis. It is spread where it is multiplied, inside a fusion: no array of h's size is made of it."""

STATE_RING = Ring(_multiply_matrices, _multiply_matrices, lambda a: jnp.swapaxes(a, -1, -2))
"""a ends in two axes, and so does h: the columns of h share what is read of a."""


def transposed(ring: Ring, a):
    """Returns ring and transitions of a^T; a matrix stays where it lies, and is transposed where it is multiplied."""
    if ring is LANE_RING:  # nothing moves, and kernels know this ring
        return ring, ring.transpose(a)
    later_last = lambda later, earlier: ring.multiply(earlier, later)  # (E L)^T is L^T E^T  # noqa: E731
    return Ring(later_last, lambda x, h: ring.apply(ring.transpose(x), h), ring.transpose), a


def cast(tree, dtype):
    """Returns the tree with arrays of `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def take(tree, index, axis):
    """Returns what lies at one index of `axis` (which may be traced), without that axis."""
    index_in_dim = lax.index_in_dim if isinstance(index, int) else lax.dynamic_index_in_dim
    return jax.tree.map(lambda x: index_in_dim(x, index, axis, keepdims=False), tree)


def num_steps(tree, axis):
    """Returns the length of `axis`."""
    return jax.tree.leaves(tree)[0].shape[axis]


def together(tree):
    """Returns arrays that all vary over the same axes of an enclosing `shard_map`, so that loops can carry them."""
    return varying_as(tree, tree)


def span(tree, start, stop, axis):
    """Returns what lies from `start` to before `stop` of `axis`."""
    return jax.tree.map(lambda x: lax.slice_in_dim(x, start, stop, axis=axis), tree)


def put_first(tree, first, axis, *, reverse):
    """Returns the arrays with `first` (without the axis) before them in time: in front, or at the end if `reverse`."""

    def put(x, one):
        parts = [jnp.expand_dims(one, axis), x]
        return lax.concatenate(parts[::-1] if reverse else parts, axis)

    return jax.tree.map(put, tree, first)


def shifted(tree, first, axis, *, reverse):
    """Returns x[t-1] at t (x[t+1] if `reverse`), and `first` where there is none."""
    length = num_steps(tree, axis)
    rest = span(tree, 1, length, axis) if reverse else span(tree, 0, length - 1, axis)
    return put_first(rest, first, axis, reverse=reverse)
