"""A fence between documents of a row for what is not finite: NaN and infinity stay in their own.

Matrix products over a chunk of tokens multiply pairs of different documents by 0, and 0 NaN is NaN.
So inputs that are not finite are replaced by 0 before the products, in values and derivatives.
A mark per token is added to the outputs afterwards: 0, or NaN from such an input to the end of its
document. It is a sum of 0 x, so that cotangents that are NaN reach the document's inputs too.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.scan import affine_scan


class Marks(NamedTuple):
    """Numbers to add to results, 0 or NaN.

    Attributes:
      tokens: Marks of each token's output.
      last: Marks of the state after the last token.
    """

    tokens: Float[Array, "B T H"]
    last: Float[Array, "B H"]


def finite(x: Array) -> tuple[Array, Array]:
    """Returns x with 0 where it is not finite, and a sum over the last axis that is 0 or NaN."""
    return jnp.where(jnp.isfinite(x), x, 0), _zero(x).sum(-1)


def finite_log(x: Array) -> tuple[Array, Array]:
    """Returns the same of logarithms, x and its 0 or NaN; minus infinity is the logarithm of 0."""
    legal = jnp.isfinite(x) | (x == -jnp.inf)
    return jnp.where(legal, x, 0), _zero(jnp.where(x == -jnp.inf, 0, x))


def marks_of(
    drive: Float[Array, "B T H"],
    own: Float[Array, "B T H"],
    first: Float[Array, "B H"],
    starts: Bool[Array, "B T"],
    *,
    axis_name: str | None = None,
) -> Marks:
    """Returns the marks of a row of documents.

    Args:
      drive: 0 or NaN, of what enters the state with each token.
      own: 0 or NaN, of what reaches a token's output alone.
      first: 0 or NaN, of the state before the first token.
      starts: Where another document begins.
      axis_name: Mesh axis over which time is split, inside `jax.shard_map`.
    """
    keep = jnp.broadcast_to(~starts[..., None], drive.shape).astype(drive.dtype)
    states = affine_scan(keep, drive, first, axis=1, axis_name=axis_name)
    return Marks(tokens=states + own, last=states[:, -1])


def mark(x: Array, marks: Array) -> Array:
    """Returns x where its mark is 0, else NaN; what is added there passes no cotangent to x."""
    marks = marks.reshape(*marks.shape, *(1,) * (x.ndim - marks.ndim))
    # A loss that leaves a NaN out still has 0 NaN as its cotangent: it must not enter the products.
    return jnp.where(jnp.isnan(marks), 0, x) + marks.astype(x.dtype)


def _zero(x: Array) -> Array:
    """Returns 0 x in float32 at least: 0, or NaN where x is not finite."""
    return 0 * x.astype(jnp.promote_types(x.dtype, jnp.float32))
