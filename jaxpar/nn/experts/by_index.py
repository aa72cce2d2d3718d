"""Grouped products in two Triton kernels: rows by their group's weight, and each group's gradient of its weight.

Rows are read where they are, by an index, and written to where they belong, so that no sorted copy of them exists. A
program multiplies one tile of rows of one group by one tile of columns; which rows these are stands in a table
(`dispatch.cut_tiles`). Sums are float32, on a Hopper GPU by `wgmma`. `jaxpar.nn.experts.grouped` has the plain form.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.lower.triton import available, call_kernel
from jaxpar.nn.experts.dispatch import cut_tiles
from jaxpar.scan.varying import varying_as

__all__ = ["Cut", "Index", "cut_for", "launches", "product", "weight_gradient"]

BAND = 8
"""Tiles of rows that share a tile of columns while it is in the second-level cache."""

DEEP = 2048
"""Terms of a sum from which on the larger tile is worth that no second program fits beside it."""


class Cut(NamedTuple):
    """How the work is cut: rows x columns of the result a program, terms of the sum a step, warps, steps under way."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


class Index(NamedTuple):
    """Where rows are: row m is row `of[m] // copies`; as they lie where `of` is None."""

    of: Int[Array, " M"] | None
    copies: int


def launches(dtype: DTypeLike) -> bool:
    """Whether the kernels can be launched for this dtype; how fast is another question."""
    return (
        jnp.dtype(dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
        and available()
    )


def cut_for(rows: int, columns: int, terms: int, dtype: DTypeLike) -> Cut:
    """Returns the tile of a product of so many rows a group, columns, and terms of a sum; by estimate, not timed.

    128 x 256 needs the fewest bytes of the second-level cache; its sums take so many registers that one program fills
    a multiprocessor, and nobody multiplies while it begins and ends. Of 128 x 128 there are two.
    """
    if jnp.dtype(dtype) == jnp.float32:  # without tensor cores, in full precision
        return Cut(64, 64, 32, 4, 2)
    high = 128 if rows > 64 else 64
    if high == 128 and columns >= 256 and terms >= DEEP:
        return Cut(128, 256, 64, 8, 3)
    return Cut(high, 128 if columns > 64 else 64, 64, 4, 3)


def product(
    x: Float[Array, "N D"], w: Array, sizes: Int[Array, " E"], read: Index, write: Int[Array, " M"] | None,
    transposed: bool,
) -> Float[Array, "M F"]:  # fmt: skip
    """Multiplies each row by its group's weight; rows beyond the sum of the sizes are not read and give 0.

    Args:
      x: Where rows are read.
      w: [E, D, F], or [E, F, D] if `transposed`.
      sizes: Rows of each group.
      read: Which row of x each is.
      write: Where each goes to, a permutation; None for as they are.
      transposed: Of which form w is.
    """
    groups, depth, width = len(w), x.shape[1], w.shape[1 if transposed else 2]
    rows = len(x) if read.of is None else len(read.of)
    tile = cut_for(rows // groups, width, depth, x.dtype)

    @sequential_vmap
    def run(x, w, sizes, of, write):
        # What is beyond the sum is a group too, of which nothing is multiplied: every row is written.
        table = cut_tiles(rows, jnp.append(sizes, rows - sizes.sum()), tile.rows)
        tiles, columns = len(table[0]), -(-width // tile.columns)
        return call_kernel(
            x, w, _index_array(of), _index_array(write), *table,
            text=TEXT,
            name="product",
            out=[jax.ShapeDtypeStruct((rows, width), x.dtype)],
            grid=(tiles * columns,),
            num_warps=tile.warps,
            num_stages=tile.stages,
            GROUPS=groups, DEPTH=depth, WIDTH=width, READ=0 if of is None else read.copies, WRITE=write is not None,
            TRANSPOSED=transposed, TILES=tiles, COLUMNS=columns, BAND=BAND, HIGH=tile.rows, WIDE=tile.columns,
            STEP=tile.terms, EXACT=_precision(x),
        )[0]  # fmt: skip

    return varying_as(run(x, w, sizes, read.of, write), (x, w, sizes, read.of, write))


def weight_gradient(
    x: Float[Array, "N D"],
    g: Float[Array, "L F"],
    sizes: Int[Array, " E"],
    read: Index,
    write: Index,
) -> Float[Array, "E D F"]:
    """Returns of each group the sum over its rows of x^T g; of a group without rows exactly 0.

    Args:
      x: Where rows are read.
      g: The gradient of the results, where these are.
      sizes: Rows of each group.
      read: Which row of x each is.
      write: Which row of g each is.
    """
    groups, depth, width = len(sizes), x.shape[1], g.shape[1]
    given = [index.of for index in (read, write) if index.of is not None]
    tile = cut_for(depth, width, (len(given[0]) if given else len(x)) // groups, x.dtype)
    high, wide = -(-depth // tile.rows), -(-width // tile.columns)

    @sequential_vmap
    def run(x, g, sizes, of_x, of_g):
        return call_kernel(
            x, g, _index_array(of_x), _index_array(of_g), jnp.cumsum(jnp.append(jnp.zeros_like(sizes[:1]), sizes)),
            text=TEXT,
            name="weight_gradient",
            out=[jax.ShapeDtypeStruct((groups, depth, width), x.dtype)],
            grid=(groups * high * wide,),
            num_warps=tile.warps,
            # Triton has indices under way for as long as what they point to, and deals the steps out to both.
            num_stages=2 * tile.stages - 1 if given else tile.stages,
            DEPTH=depth, WIDTH=width, READ=0 if of_x is None else read.copies,
            WRITE=0 if of_g is None else write.copies, ROWS=high, COLUMNS=wide, BAND=BAND, HIGH=tile.rows,
            WIDE=tile.columns, STEP=tile.terms, EXACT=_precision(x),
        )[0]  # fmt: skip

    return varying_as(run(x, g, sizes, read.of, write.of), (x, g, sizes, read.of, write.of))


def _index_array(index: Array | None) -> Array:
    """Returns an array in any case; the kernel ignores one of no index."""
    return jnp.zeros((1,), jnp.int32) if index is None else index.astype(jnp.int32)


def _precision(x: Array) -> str:
    return "ieee" if x.dtype == jnp.float32 else "tf32"


TEXT = """
@triton.jit
def place_of(number, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    # Bands of a few rows of tiles, column after column: what runs at the same time shares rows of x and columns of w.
    first = number // (BAND * COLUMNS) * BAND
    height = tl.minimum(ROWS - first, BAND)
    within = number % (BAND * COLUMNS)
    return first + within % height, within // height


@triton.jit
def product(
    x_ptr, w_ptr, read_ptr, write_ptr, group_ptr, start_ptr, count_ptr, y_ptr,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    TRANSPOSED: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, STEP: tl.constexpr, EXACT: tl.constexpr,
):
    tile, column = place_of(tl.program_id(0), TILES, COLUMNS, BAND)
    count = tl.load(count_ptr + tile)
    if count == 0:
        return
    group = tl.load(group_ptr + tile)
    line = tl.arange(0, HIGH)
    row = tl.load(start_ptr + tile) + tl.minimum(line, count - 1)  # lines too many repeat the last
    source = row
    if READ > 0:
        source = tl.load(read_ptr + row) // READ
    wide, deep = column * WIDE + tl.arange(0, WIDE), tl.arange(0, STEP)
    whose = tl.minimum(group, GROUPS - 1).to(tl.int64) * DEPTH * WIDTH
    x_at = x_ptr + source.to(tl.int64)[:, None] * DEPTH + deep[None, :]
    if TRANSPOSED:
        w_at = w_ptr + whose + wide[None, :] * DEPTH + deep[:, None]
    else:
        w_at = w_ptr + whose + deep[:, None] * WIDTH + wide[None, :]
    sums = tl.zeros([HIGH, WIDE], tl.float32)
    for k in tl.range(0, tl.where(group < GROUPS, DEPTH, 0), STEP):
        if DEPTH % STEP == 0:
            x = tl.load(x_at)
        else:
            x = tl.load(x_at, mask=(k + deep < DEPTH)[None, :], other=0.0)
        if DEPTH % STEP == 0 and WIDTH % WIDE == 0:
            w = tl.load(w_at)
        else:
            w = tl.load(w_at, mask=(k + deep < DEPTH)[:, None] & (wide < WIDTH)[None, :], other=0.0)
        sums = tl.dot(x, w, sums, input_precision=EXACT)
        x_at += STEP
        w_at += STEP if TRANSPOSED else STEP * WIDTH
    if WRITE:
        row = tl.load(write_ptr + row)
    at = y_ptr + row.to(tl.int64)[:, None] * WIDTH + wide[None, :]
    tl.store(at, sums.to(y_ptr.dtype.element_ty), mask=(line < count)[:, None] & (wide < WIDTH)[None, :])


@triton.jit
def weight_gradient(
    x_ptr, g_ptr, read_ptr, write_ptr, bounds_ptr, dw_ptr,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BAND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
    EXACT: tl.constexpr,
):
    group = tl.program_id(0) // (ROWS * COLUMNS)
    tile, column = place_of(tl.program_id(0) % (ROWS * COLUMNS), ROWS, COLUMNS, BAND)
    end = tl.load(bounds_ptr + group + 1)
    deep, wide = tile * HIGH + tl.arange(0, HIGH), column * WIDE + tl.arange(0, WIDE)
    sums = tl.zeros([HIGH, WIDE], tl.float32)
    for first in tl.range(tl.load(bounds_ptr + group), end, STEP):
        row = first + tl.arange(0, STEP)
        live = row < end  # rows of others may be anything: what is summed must not hold them
        source, target = row, row
        if READ > 0:
            source = tl.load(read_ptr + row, mask=live, other=0) // READ
        if WRITE > 0:
            target = tl.load(write_ptr + row, mask=live, other=0) // WRITE
        mask = live[None, :] if DEPTH % HIGH == 0 else live[None, :] & (deep < DEPTH)[:, None]
        x = tl.load(x_ptr + source.to(tl.int64)[None, :] * DEPTH + deep[:, None], mask=mask, other=0.0)
        mask = live[:, None] if WIDTH % WIDE == 0 else live[:, None] & (wide < WIDTH)[None, :]
        g = tl.load(g_ptr + target.to(tl.int64)[:, None] * WIDTH + wide[None, :], mask=mask, other=0.0)
        sums = tl.dot(x, g, sums, input_precision=EXACT)
    at = dw_ptr + group.to(tl.int64) * DEPTH * WIDTH + deep[:, None] * WIDTH + wide[None, :]
    tl.store(at, sums.to(dw_ptr.dtype.element_ty), mask=(deep < DEPTH)[:, None] & (wide < WIDTH)[None, :])
"""
