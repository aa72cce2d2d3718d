"""The kernel of affine scans on CUDA GPUs, through jax-triton; `jaxpar.scan._lookback` writes and explains it."""

import dataclasses
import functools
import importlib.util
import math

import jax
import jax.numpy as jnp

from jaxpar.scan._lookback import Source, arrays, compiled, kernel_text

__all__ = ["LARGEST_BLOCK", "Tile", "affine", "available", "launch", "tile_for"]

LARGEST_BLOCK = 2
"""Blocks of more components do not fit a tile's registers."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How the work is cut: `steps` x `lanes` a program of `warps` warps, which looks back `span` tiles at a time."""

    steps: int
    lanes: int
    span: int
    warps: int


@functools.cache
def available() -> bool:
    """Whether jax-triton and Triton are installed, with a jaxlib that can launch their kernels."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
        return False
    try:
        import jax_triton  # noqa: F401
    except ImportError:  # jaxlib without CUDA
        return False
    return True


def tile_for(steps: int, columns: int, lanes: int, k: int) -> Tile:
    """The fastest tile of those timed on one H100, over 64 to 12,288 lanes.

    With many lanes the tiles before a tile are mostly done, and looking back at two is enough; with few, longer tiles
    make fewer of them. 24 to 48 tiles were tried at each shape; half of them cost more than 1.2 times the best.
    """
    width = min(32, 1 << max(0, columns - 1).bit_length())
    length = 256 if lanes <= 128 else 128
    length = min(length if k == 1 else 64, max(16, 1 << (steps - 1).bit_length()))
    return Tile(length, width, 2 if lanes >= 8192 else 4, 4)


def affine(a, b, start=None, *, axis: int, reverse: bool, adjoint: bool = False, tile: Tile | None = None):
    """Solves h[t] = a[t] h[t-1] + b[t] in one kernel.

    Args:
      a: k x k arrays, a[i][j] of the shape of b[i]; float32, bfloat16 or float16. k is 1 or 2.
      b: k arrays.
      start: The state before the first step, k arrays of b's shape without `axis`; None for zeros.
      axis: The axis of time.
      reverse: Whether h[t] depends on h[t+1].
      adjoint: Whether step t takes the coefficients of the step before it, in the order of the scan: with a
        transposed and `reverse` flipped that is the transposed system, and no array needs to be shifted for it.
      tile: How the work is cut; None takes the measured best.

    Returns:
      k arrays like b; the carry between steps is float32.
    """
    k, like = len(b), b[0]
    source = arrays(k, start is not None)
    buffers = [x for row in a for x in row] + list(b) + list(start or ())
    out = [jax.ShapeDtypeStruct(like.shape, like.dtype)] * k
    return launch(source, buffers, out, like.shape, axis, reverse=reverse, adjoint=adjoint, tile=tile)


def launch(
    source: Source, buffers, out_shape, shape, axis: int, *, reverse=False, adjoint=False, tile=None, zeroed=()
) -> tuple:
    """Runs the look-back kernel of a source over arrays of one `shape`; outputs at the places `zeroed` start zero."""
    import jax_triton

    steps, lanes = shape[axis], math.prod(shape[:axis] + shape[axis + 1 :])
    columns = math.prod(shape[axis + 1 :])
    batch_stride, time_stride, column_stride = steps * columns, columns, 1
    if columns == 1:  # time is contiguous: the batch becomes the columns
        columns, batch_stride, time_stride, column_stride = lanes, 0, 1, steps
    tile = tile or tile_for(steps, columns, lanes, source.k)
    chunks, per_batch = -(-steps // tile.steps), -(-columns // tile.lanes)
    blocks = per_batch * (lanes // columns)
    words = chunks * lanes * source.k * (source.k + 2)
    scratch = [jax.ShapeDtypeStruct((2 * words,), jnp.uint32), jax.ShapeDtypeStruct((1,), jnp.int32)]
    outputs = jax_triton.triton_call(
        *buffers,
        kernel=compiled(kernel_text(source), "lookback"),
        out_shape=[*out_shape, *scratch],
        zeroed_outputs=(*zeroed, len(out_shape), len(out_shape) + 1),
        grid=(chunks * blocks,),
        num_warps=tile.warps,
        T=steps,
        L=tile.steps,
        W=tile.lanes,
        SPAN=tile.span,
        LANES=lanes,
        COLUMNS=columns,
        PER_BATCH=per_batch,
        BLOCKS=blocks,
        BATCH_STRIDE=batch_stride,
        TIME_STRIDE=time_stride,
        COLUMN_STRIDE=column_stride,
        REVERSE=reverse,
        BACK=-time_stride if reverse else time_stride,
        SHIFT=(time_stride if reverse else -time_stride) if adjoint else 0,
    )
    return tuple(outputs[: len(out_shape)])
