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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.fields import OneOf
from jaxpar.lower.trial import relative_error, tried
from jaxpar.mesh import platform
from jaxpar.nn.experts import by_index
from jaxpar.nn.experts.dispatch import cut_tiles
from jaxpar.nn.norm import wide_dtype
from jaxpar.scan.varying import varying_as
from jaxpar.types import UsageError

__all__ = ["GROUPED_IMPLS", "grouped_matmul", "has_index_kernel"]

GROUPED_IMPLS = ("auto", "tiles", "ragged", "kernel")
MOST_ROWS = 128
"""Of a tile: as many as keep a matrix unit busy, few enough that the last tile of a group wastes little."""


class Way(NamedTuple):
    """How a product is computed, known when it is compiled.

    Attributes:
      impl: One of `GROUPED_IMPLS`, not "auto".
      copies: Rows of the product that one row of x is.
      summed: Rows of the product that one row of the result adds up.
      transposed: Whether w is [E, F, D].
    """

    impl: str
    copies: int = 1
    summed: int = 1
    transposed: bool = False


def grouped_matmul(
    x: Float[Array, "N D"],
    w: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    read: Int[Array, " M"] | None = None,
    write: Int[Array, " M"] | None = None,
    summed: int = 1,
    impl: str = "auto",
) -> Float[Array, "L F"]:
    """Computes y_m = x_m w_e, e being the group of row m; 0 for rows beyond the sum of the sizes. Reverse mode only.

    Rows beyond the sum may hold anything, have the gradient 0 and give none to a weight. Any sizes will do: all rows in
    one group, or none in most, whose weights' gradients are exactly 0. Sums are float32 at least.

    Rows need not lie in the order of their groups. With `read`, row m is row read[m] // k of x, which has N = M / k;
    with `write`, its product is added to row write[m] // summed of the result, which has L = M / summed. A mixture of
    experts reads its tokens by `read=plan.order` and adds up their choices by `write=plan.order, summed=k`. The kernel
    then makes no sorted copy of x, of y, or of their gradients (arXiv:2403.08245).

    Args:
      x: The rows of group 0, then those of group 1, and so on; with `read` in any order.
      w: A weight a group, multiplied in the dtype of `x`.
      group_sizes: Rows of each, not negative; of those over M in sum the last are cut.
      read: A permutation of 0 to M - 1: where row m is read. None for where it lies.
      write: A permutation of 0 to M - 1: where row m is written. None for the order of groups.
      summed: Consecutive rows that are added up, in `x`'s dtype each and as a sum in float32 at least.
      impl: "kernel" (in Triton, of bfloat16, float16 or, in full precision and slowly, float32), "tiles" (a loop over
        tiles of one group's rows each), "ragged" (`jax.lax.ragged_dot`, which multiplies every row by every weight
        where the back end has no kernel for it), or "auto": ragged on TPU, the kernel where there is one
        (`has_index_kernel`), else tiles.

    Cost: of tiles of R rows, 2 (M + min(E, M) R) D F operations, and twice that for the gradients.

    Raises:
      UsageError: If shapes do not fit each other, for an unknown `impl`, or for a kernel where there is none.
    """
    num_rows = _checked(x, w, group_sizes, read, write, summed, impl)
    if impl == "auto" and platform() == "tpu":
        impl = "ragged"
    elif impl == "auto":
        impl = "kernel" if has_index_kernel(x.dtype, x.shape[1], w.shape[2]) else "tiles"
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), num_rows)
    way = Way(impl, num_rows // max(1, x.shape[0]), summed)
    return _product(way, x, w.astype(x.dtype), jnp.diff(ends, prepend=0), read, write)


def has_index_kernel(dtype: DTypeLike, depth: int, width: int) -> bool:
    """Whether "auto" is the kernel for rows of this dtype and weights [E, depth, width].

    So it is for 16 bits and sizes in multiples of 16 on a CUDA GPU with jax_triton, if before its first use in this
    process it passed a trial against tiles. If it fails, one warning tells of it.
    """
    known = jnp.dtype(dtype).itemsize == 2 and by_index.launches(dtype)
    return platform() == "gpu" and known and depth % 16 == 0 and width % 16 == 0 and _is_right()


def _checked(x: Array, w: Array, sizes: Array, read, write, summed: int, impl: str) -> int:
    """Returns M, or says what does not fit."""
    if impl not in GROUPED_IMPLS:
        raise UsageError(f"impl={impl!r} is unknown; legal are {OneOf(GROUPED_IMPLS)}.")
    if impl == "kernel" and not by_index.launches(x.dtype):
        raise UsageError(
            f"impl='kernel' needs a CUDA GPU with jax_triton, and bfloat16, float16 or float32 (x is {x.dtype}); legal "
            "are the others, and auto."
        )
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or sizes.shape != w.shape[:1]:
        raise UsageError(
            f"x {x.shape}, w {w.shape} and group_sizes {sizes.shape} do not fit; legal are [M, D], [E, D, F] and [E]."
        )
    rows = (x if read is None else read).shape[0]
    if any(index is not None and index.shape != (rows,) for index in (read, write)) or rows % max(
        1, x.shape[0]
    ):
        shapes = [None if index is None else index.shape for index in (read, write)]
        raise UsageError(
            f"read {shapes[0]} and write {shapes[1]} do not fit x {x.shape}; legal are [M] of both, M a multiple of "
            f"{x.shape[0]} rows, and that itself without read."
        )
    if summed < 1 or rows % summed or (summed > 1 and write is None):
        raise UsageError(
            f"summed={summed} is not a divisor of the {rows} rows that `write` places."
        )
    return rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    way: Way, x: Array, w: Array, sizes: Array, read: Array | None, write: Array | None
) -> Array:
    num_rows, width = x.shape[0] * way.copies, w.shape[1 if way.transposed else 2]
    if 0 in (x.size, w.size):
        return jnp.zeros((num_rows // way.summed, width), x.dtype)
    if way.impl == "kernel":
        y = by_index.product(x, w, sizes, by_index.Index(read, way.copies), write, way.transposed)
    else:
        x, w = _rows(x, read, way.copies), w.swapaxes(1, 2) if way.transposed else w
        if way.impl == "ragged":
            y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=wide_dtype(x)).astype(
                x.dtype
            )
        else:
            y = _by_tiles(x, w, sizes)
        y = _mask(y, sizes)
        y = y if write is None else jnp.zeros_like(y).at[write].set(y, unique_indices=True)
    if way.summed == 1:
        return y
    return jnp.sum(y.reshape(-1, way.summed, width), 1, dtype=wide_dtype(y)).astype(y.dtype)


def _product_forward(
    way: Way, x: Array, w: Array, sizes: Array, read: Array | None, write: Array | None
):
    return _product(way, x, w, sizes, read, write), (x, w, sizes, read, write)


def _product_backward(way: Way, kept: tuple, g: Array) -> tuple[Array, Array, None, None, None]:
    x, w, sizes, read, write = kept
    back = Way(impl=way.impl, copies=way.summed, summed=way.copies, transposed=not way.transposed)
    dx: Any = _product(back, g, w, sizes, write, read)  # read and written the other way round
    left = (x, read, way.copies)
    right = (g, write, way.summed)
    if way.transposed:
        left, right = right, left
    dw = _weight_gradient(way.impl, w, sizes, left, right)
    return dx, dw.astype(w.dtype), None, None, None


_product.defvjp(_product_forward, _product_backward)


def _weight_gradient(impl: str, w: Array, sizes: Array, left: tuple, right: tuple) -> Array:
    """Of each group left^T right; each side is an array, where its rows are, and how many times it has each."""
    x, x_index, x_copies = left
    g, g_index, g_copies = right
    if 0 in (x.size, w.size):
        return jnp.zeros_like(w)
    if impl == "kernel":
        x_rows = by_index.Index(of=x_index, copies=x_copies)
        g_rows = by_index.Index(of=g_index, copies=g_copies)
        return by_index.weight_gradient(x, g, sizes, x_rows, g_rows)
    x = _rows(x, x_index, x_copies)
    g = _rows(g, g_index, g_copies)
    if impl == "tiles":
        return _weight_gradient_by_tiles(x, g, sizes)
    x = _mask(x, sizes)
    g = _mask(g, sizes)
    wide = w.astype(wide_dtype(w))  # the gradient is of its dtype

    def product(w):
        return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes, preferred_element_type=wide.dtype)

    return jax.vjp(product, wide)[1](g.astype(wide.dtype))[0]


def _rows(x: Array, index: Array | None, copies: int) -> Array:
    return x if index is None else x[index // copies]


def _mask(rows: Array, sizes: Array) -> Array:
    """Zeroes the rows beyond the sum: by choice, not by a product, since they may not be finite."""
    return jnp.where((jnp.arange(rows.shape[0]) < sizes.sum())[:, None], rows, 0)


def _tiles(num_rows: int, sizes: Array) -> tuple[int, tuple[Array, Array, Array]]:
    """Rows of a tile, and each tile's group, first row and count of rows."""
    rows = min(MOST_ROWS, max(8, -(-num_rows // sizes.shape[0])), num_rows)
    return rows, cut_tiles(num_rows, sizes, rows)


def _by_tiles(x: Array, w: Array, sizes: Array) -> Array:
    """Cut after tile: what one writes beyond its group the next one writes again."""
    rows, tiles = _tiles(x.shape[0], sizes)
    x = jnp.pad(x, ((0, rows), (0, 0)))

    def one(y, tile):
        group, start, _ = tile
        mine = jax.lax.dynamic_slice_in_dim(x, start, rows)
        out = jnp.matmul(mine, w[group], preferred_element_type=wide_dtype(x)).astype(y.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, out, start, 0), None

    zero = varying_as(jnp.zeros((x.shape[0], w.shape[2]), x.dtype), (x, w, sizes))
    return jax.lax.scan(one, zero, tiles)[0][:-rows]


def _weight_gradient_by_tiles(x: Array, g: Array, sizes: Array) -> Array:
    """Of each group x^T g, in float32 at least."""
    rows, tiles = _tiles(x.shape[0], sizes)
    x, g = (jnp.pad(a, ((0, rows), (0, 0))) for a in (x, g))

    def one(dw, tile):
        group, start, count = tile
        is_mine = (jnp.arange(rows) < count)[:, None]
        mine, theirs = (
            jnp.where(is_mine, jax.lax.dynamic_slice_in_dim(a, start, rows), 0) for a in (x, g)
        )
        share = jnp.matmul(mine.T, theirs, preferred_element_type=dw.dtype)
        return dw.at[group].add(share), None

    zero = jnp.zeros((sizes.shape[0], x.shape[1], g.shape[1]), wide_dtype(x))
    return jax.lax.scan(one, varying_as(zero, (x, g, sizes)), tiles)[0]


@functools.cache
def _is_right() -> bool:
    """Whether the kernel's values and gradients are those of tiles, in every way in which it reads and writes."""

    def errors() -> list[Array]:
        keys = jax.random.split(jax.random.key(0), 4)
        tokens, sizes = (
            300,
            jnp.array([200, 0, 331, 60], jnp.int32),
        )  # the last 9 of 600 rows are nobody's
        shapes = (
            (tokens, by_index.DEEP),
            (4, by_index.DEEP, 256),
            (tokens, by_index.DEEP),
        )  # so that all tiles are tried
        x, w, g = (
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(keys, shapes, strict=False)
        )
        order = jax.random.permutation(keys[3], 2 * tokens)

        def both(impl):
            def run(x, w):
                rows = grouped_matmul(x, w, sizes, read=order, impl=impl)
                return grouped_matmul(
                    rows, w.swapaxes(1, 2), sizes, write=order, summed=2, impl=impl
                )

            y, pull = jax.vjp(run, x, w)
            return y, *pull(g)

        run = jax.jit(both, static_argnums=0)
        return [relative_error(*pair) for pair in zip(run("kernel"), run("tiles"), strict=True)]

    return tried("Triton's grouped product", "the loop over tiles", errors, "gpu")
