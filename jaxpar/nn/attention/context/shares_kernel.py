"""Attention of a few queries to a device's shares of a cache in one Triton kernel, every program a part (split-K).

Keys and values are read where they lie, each once for all query heads of its group, and of what is not filled nothing.
A product has slots as rows and queries as columns: its large operand then goes from shared memory to the tensor cores
(wgmma) as it came, and the few queries fill the least width there is. `jaxpar.nn.attention.context.split_cache` has the
plain form, and adds the parts up.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.lower.trial import relative_error, tried
from jaxpar.lower.triton import available, call_kernel
from jaxpar.mesh import platform
from jaxpar.nn.attention import attend, finish, merge_parts
from jaxpar.scan.monoid import LogSumExp

__all__ = ["ShareCut", "attend_shares"]

TILE_BYTES = 32768
"""Of the keys of a step at most; a multiprocessor has 228 KiB for keys and values of all steps under way."""


class ShareCut(NamedTuple):
    """How the work is cut; `bench/context.py --cases C3.sweep` times others.

    Attributes:
      step: Slots that a program multiplies at a time, fewer of wide heads.
      warps: Of a program; four are a warp group, which wgmma needs.
      stages: Steps whose loads are under way.
      programs: At least as many where slots allow it: four for each of 132 multiprocessors, so that none waits long
        for the last.
    """

    step: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 528


def reads_shares(q: Array) -> bool:
    """Whether there is a kernel for these queries here, and it is right: a GPU with Triton, heads of 2^n numbers."""
    width = q.shape[3]
    known = q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    fits = known and 16 <= width <= 256 and width & (width - 1) == 0
    return platform() == "gpu" and fits and available() and _is_right(str(q.dtype))


def attend_shares(
    q: Float[Array, "B T H K"],
    keys: Float[Array, "B S G K"],
    values: Float[Array, "B S G K"],
    lengths: Int[Array, "B N"],
    cut: ShareCut = ShareCut(),  # noqa: B008  # cannot be changed
) -> LogSumExp:
    """Computes the partial states of queries over parts of N shares, of which the first lengths[b, n] slots are filled.

    Returns:
      (maximum [parts, B, T, H], sum, weighted values [parts, B, T, H, K]), float32.

    Cost: reads what is filled once; 4 B H T S K operations. No gradient: `attend_split_cache` has one.
    """
    rows, length, heads, width = q.shape
    slots, groups = keys.shape[1:3]
    shares, queries = lengths.shape[1], length * heads // groups
    tile = min(64, max(16, 1 << (queries - 1).bit_length()))
    tiles = -(-queries // tile)
    step = max(16, min(cut.step, TILE_BYTES // (width * q.dtype.itemsize)))
    cuts = -(-cut.programs // (rows * groups * tiles * shares))
    cuts = max(1, min(cuts, slots // shares // step))
    sizes, wide = (shares * cuts, rows, length, heads), jnp.float32
    top, total, weighted = call_kernel(
        q, keys, values, lengths.astype(jnp.int32),
        text=TEXT,
        name="attend_shares",
        out=[jax.ShapeDtypeStruct(shape, wide) for shape in (sizes, sizes, (*sizes, width))],
        grid=(rows * groups * tiles, shares * cuts),
        num_warps=cut.warps,
        num_stages=cut.stages,
        ROWS=rows, LENGTH=length, HEADS=heads, GROUPS=groups, REPEAT=heads // groups, WIDTH=width, SLOTS=slots,
        ROOM=slots // shares, SHARES=shares, CUTS=cuts, TILE=tile, TILES=tiles, STEP=step,
        SCALE=1 / (math.sqrt(width) * math.log(2)), LOG2=math.log(2), EXACT="ieee" if q.dtype == wide else "tf32",
    )  # fmt: skip
    return LogSumExp(top, total, weighted)


@functools.cache
def _is_right(dtype: str) -> bool:
    """Whether the kernel agrees with the dense form, as it was tried once."""
    return tried(
        "the kernel of a split cache", "the dense form", functools.partial(_errors, dtype), "gpu"
    )


def _errors(dtype: str) -> list[Array]:
    """Relative error of two rows with shares of many lengths; NaN where nothing is filled."""
    draw = np.random.default_rng(0).standard_normal
    lengths = np.array([[512, 0, 100], [1, 300, 0]], np.int32)
    filled = (np.arange(512) < lengths[..., None]).reshape(2, -1)
    q, k, v = (
        jnp.asarray(draw(shape), dtype) for shape in ((2, 1, 8, 128), *2 * ((2, 1536, 2, 128),))
    )
    keys, values = (jnp.where(filled[..., None, None], x, jnp.nan) for x in (k, v))
    want = finish(attend(q, k, v, jnp.asarray(filled)[:, None]))
    return [
        relative_error(
            finish(merge_parts(attend_shares(q, keys, values, jnp.asarray(lengths)))), want
        )
    ]


TEXT = """
@triton.jit
def attend_shares(
    q_ptr, k_ptr, v_ptr, lengths_ptr, top_ptr, total_ptr, values_ptr,
    ROWS: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, REPEAT: tl.constexpr,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, ROOM: tl.constexpr, SHARES: tl.constexpr, CUTS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, LOG2: tl.constexpr,
    EXACT: tl.constexpr,
):
    row = tl.program_id(0) // (GROUPS * TILES)
    group = tl.program_id(0) // TILES % GROUPS
    tile = tl.program_id(0) % TILES
    split = tl.program_id(1)
    share = split // CUTS
    line = tile * TILE + tl.arange(0, TILE)  # queries that share a key head: token by token, head by head
    live = line < LENGTH * REPEAT
    at = (row * LENGTH + line // REPEAT) * HEADS + group * REPEAT + line % REPEAT
    wide = tl.arange(0, WIDTH)
    q = tl.load(q_ptr + at[None, :] * WIDTH + wide[:, None], mask=live[None, :], other=0.0)
    top = tl.full([TILE], float("-inf"), tl.float32)  # scores in units of log 2, so that exp2 is enough
    total = tl.zeros([TILE], tl.float32)
    values = tl.zeros([WIDTH, TILE], tl.float32)

    filled = tl.minimum(tl.load(lengths_ptr + row * SHARES + share), ROOM)
    size = (filled + CUTS * STEP - 1) // (CUTS * STEP) * STEP  # in whole steps, alike for all parts of a share
    begin = split % CUTS * size
    end = tl.minimum(begin + size, filled)
    base = row.to(tl.int64) * SLOTS + share * ROOM
    for start in tl.range(begin, end, STEP):
        slot = start + tl.arange(0, STEP)
        known = slot < end  # of a step some are
        lines = ((base + slot) * GROUPS + group) * WIDTH
        # What is not filled may hold NaN, which a weight of zero would not take away.
        k = tl.load(k_ptr + lines[:, None] + wide[None, :], mask=known[:, None], other=0.0)
        v = tl.load(v_ptr + lines[:, None] + wide[None, :], mask=known[:, None], other=0.0)
        scores = tl.dot(k, q, input_precision=EXACT) * SCALE
        scores = tl.where(known[:, None], scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new[None, :])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(weights, 0)
        values = values * keep[None, :] + tl.dot(tl.trans(v), weights.to(v.dtype), input_precision=EXACT)
        top = new

    at = split * ROWS * LENGTH * HEADS + at
    tl.store(top_ptr + at, top * LOG2, mask=live)
    tl.store(total_ptr + at, total, mask=live)
    tl.store(values_ptr + at[None, :] * WIDTH + wide[:, None], values, mask=live[None, :])
"""
