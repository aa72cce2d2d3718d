"""One product of many weights: each row by the weight of its group. Rows lie group after group.

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.experts import grouped_matmul

    rows = jax.random.normal(jax.random.key(0), (5, 3))
    weights = jax.random.normal(jax.random.key(1), (3, 3, 2))
    y = grouped_matmul(rows, weights, jnp.array([1, 0, 3]))  # the last row belongs to nobody
    want = jnp.concatenate([rows[:1] @ weights[0], rows[1:4] @ weights[2], jnp.zeros((1, 2))])
    assert jnp.allclose(y, want, atol=1e-6)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.fields import OneOf
from jaxpar.mesh import platform
from jaxpar.nn.norm import wide_dtype
from jaxpar.scan.varying import varying_as
from jaxpar.types import UsageError

__all__ = ["GROUPED_IMPLS", "grouped_matmul"]

GROUPED_IMPLS = ("auto", "tiles", "ragged")
MOST_ROWS = 128
"""Of a tile: as many as keep a matrix unit busy, few enough that the last tile of a group wastes little."""


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Int[Array, " E"], *, impl: str = "auto"
) -> Float[Array, "M F"]:
    """Computes y_m = x_m w_e, e being the group of row m; 0 for rows beyond the sum of the sizes. Reverse mode only.

    Rows beyond the sum may hold anything, have the gradient 0 and give none to a weight. Any sizes will do: all rows in
    one group, or none in most, whose weights' gradients are exactly 0. Sums are float32 at least.

    Args:
      x: The rows of group 0, then those of group 1, and so on.
      w: A weight a group, multiplied in the dtype of `x`.
      group_sizes: Rows of each, not negative; of those over M in sum the last are cut.
      impl: "tiles" (a loop over tiles of one group's rows each), "ragged" (`jax.lax.ragged_dot`, which multiplies every
        row by every weight where the back end has no kernel for it), or "auto": ragged on TPU, tiles elsewhere.

    Cost: of tiles of R rows, 2 (M + min(E, M) R) D F operations, and twice that for the gradients.

    Raises:
      UsageError: If shapes do not fit each other, or for an unknown `impl`.
    """
    if impl not in GROUPED_IMPLS:
        raise UsageError(f"impl={impl!r} is unknown; legal are {OneOf(GROUPED_IMPLS)}.")
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
        raise UsageError(
            f"x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit; "
            "legal are [M, D], [E, D, F] and [E]."
        )
    if impl == "auto":
        impl = "ragged" if platform() == "tpu" else "tiles"
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), x.shape[0])
    return _product(impl, x, w.astype(x.dtype), jnp.diff(ends, prepend=0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(impl: str, x: Array, w: Array, sizes: Array) -> Array:
    if 0 in (x.size, w.size):
        return jnp.zeros((x.shape[0], w.shape[2]), x.dtype)
    if impl == "ragged":
        y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=wide_dtype(x)).astype(x.dtype)
    else:
        y = _by_tiles(x, w, sizes)
    return _mask(y, sizes)


def _product_backward(impl: str, kept: tuple, g: Array) -> tuple[Array, Array, None]:
    x, w, sizes = kept
    dx: Any = _product(impl, g, w.swapaxes(1, 2), sizes)
    if 0 in (x.size, w.size):
        dw = jnp.zeros_like(w)
    elif impl == "ragged":
        x, g = _mask(x, sizes), _mask(g, sizes)
        wide = w.astype(wide_dtype(w))  # the gradient is of its dtype

        def product(w):
            return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes, preferred_element_type=wide.dtype)

        dw = jax.vjp(product, wide)[1](g.astype(wide.dtype))[0]
    else:
        dw = _weight_gradient(x, g, sizes)
    return dx, dw.astype(w.dtype), None


_product.defvjp(lambda impl, x, w, sizes: (_product(impl, x, w, sizes), (x, w, sizes)), _product_backward)


def _mask(rows: Array, sizes: Array) -> Array:
    """Zeroes the rows beyond the sum: by choice, not by a product, since they may not be finite."""
    return jnp.where((jnp.arange(rows.shape[0]) < sizes.sum())[:, None], rows, 0)


def _tiles(num_rows: int, sizes: Array) -> tuple[int, tuple[Array, Array, Array]]:
    """Cuts groups into tiles: their number of rows, and each tile's group, first row and count of rows.

    There are as many as may be needed, the last of them without a row.
    """
    num_groups = sizes.shape[0]
    most = min(num_groups, num_rows)
    rows = min(MOST_ROWS, max(8, -(-num_rows // num_groups)), num_rows)
    count = (num_rows + most * (rows - 1)) // rows
    ends = jnp.cumsum(sizes)
    tiles = -(-sizes // rows)
    tile_ends = jnp.cumsum(tiles)
    tile = jnp.arange(count, dtype=sizes.dtype)
    group = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), num_groups - 1)
    start = (ends - sizes)[group] + (tile - (tile_ends - tiles)[group]) * rows
    start = jnp.where(tile < tile_ends[-1], start, num_rows)
    return rows, (group, start, jnp.clip(ends[group] - start, 0, rows))


def _by_tiles(x: Array, w: Array, sizes: Array) -> Array:
    """Tile after tile: what one writes beyond its group the next one writes again."""
    rows, tiles = _tiles(x.shape[0], sizes)
    x = jnp.pad(x, ((0, rows), (0, 0)))

    def one(y, tile):
        group, start, _ = tile
        mine = jax.lax.dynamic_slice_in_dim(x, start, rows)
        out = jnp.matmul(mine, w[group], preferred_element_type=wide_dtype(x)).astype(y.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, out, start, 0), None

    zero = varying_as(jnp.zeros((x.shape[0], w.shape[2]), x.dtype), (x, w, sizes))
    return jax.lax.scan(one, zero, tiles)[0][:-rows]


def _weight_gradient(x: Array, g: Array, sizes: Array) -> Array:
    """Of each group x^T g, in float32 at least."""
    rows, tiles = _tiles(x.shape[0], sizes)
    x, g = (jnp.pad(a, ((0, rows), (0, 0))) for a in (x, g))

    def one(dw, tile):
        group, start, count = tile
        is_mine = (jnp.arange(rows) < count)[:, None]
        mine, theirs = (jnp.where(is_mine, jax.lax.dynamic_slice_in_dim(a, start, rows), 0) for a in (x, g))
        share = jnp.matmul(mine.T, theirs, preferred_element_type=dw.dtype)
        return dw.at[group].add(share), None

    zero = jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), wide_dtype(x))
    return jax.lax.scan(one, varying_as(zero, (x, g, sizes)), tiles)[0]
