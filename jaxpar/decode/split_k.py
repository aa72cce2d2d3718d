"""Attention over a forest's blocks in one Triton kernel: every program adds up a share of them (split-K).

A program reads some of the blocks that its queries see, each once for all readers in its tile, and keeps a partial
state; what nobody sees is not read. Queries come as they left their product and are rotated here to the coordinates of
each block's segment, by cosines and sines that are the same for all layers. One more program for each tile does the
same for the tokens of the pass itself. `jaxpar.decode.blocks` has the plain form, and adds the parts up.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.decode.forest import Forest, View
from jaxpar.lower.triton import available, call_kernel
from jaxpar.mesh import mesh_axes, platform
from jaxpar.nn.attention import PositionRule
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Rope
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import Array

PROGRAMS = 528
"""At least as many where blocks allow it, four for each multiprocessor of an H100 or H200; timed on an H200."""

MOST_SPLITS = 32
"""Parts that a query's state is made of at most: each is written, and read again to be added up."""

STAGES, SLOTS_A_STEP = 3, 64
"""Of a program: steps whose loads are under way, and slots a step."""


class Shape(NamedTuple):
    """How the work is cut: queries a tile, tiles, splits."""

    tile: int
    tiles: int
    splits: int


class Blocks(NamedTuple):
    """Blocks of a cache, and the readers that see them.

    Attributes:
      keys: [B, G, N, b, K], each rotated to its position in its segment.
      values: Values of the same shape.
      forest: Owners of the blocks.
      view: Parts of the forest that each reader sees.
    """

    keys: Array
    values: Array
    forest: Forest
    view: View


def has_kernel(rule: PositionRule, dtype: DTypeLike, block: int, width: int) -> bool:
    """Whether there is a kernel for these keys here: a GPU with Triton, sizes that are powers of two, one device."""
    sizes = all(size >= low and size & (size - 1) == 0 for size, low in ((block, 16), (width, 32)))
    known = jnp.dtype(dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
    split = any(mesh_axes(name) for name in ("batch", "kv_heads", "slots", "heads"))
    plain = not rule.cap and not (isinstance(rule.positions, Rope) and rule.positions.share != 1)
    return (
        platform() == "gpu"
        and sizes
        and known
        and rule.visible.causal
        and not split
        and plain
        and available()
    )


def shape_for(rows: int, groups: int, queries: int, blocks: int) -> Shape:
    """Returns the tile, a power of two of 16 to 64 queries of a key head, and splits to keep the card busy."""
    tile = min(64, max(16, 1 << (queries - 1).bit_length()))
    tiles = -(-queries // tile)
    splits = -(-PROGRAMS // (rows * groups * tiles))
    return Shape(tile, tiles, min(splits, MOST_SPLITS, blocks))


def attend_forest(
    q: Array, k: Array, v: Array, rule: PositionRule, cached: Blocks, context: Context
) -> LogSumExp:
    """Returns the partial states of queries over shares of the blocks and, as the last, over the tokens of the pass.

    Args:
      q: Queries [B R, T, H, K], not rotated.
      k: Keys of the pass [B R, T, G, K], rotated to their places in the segments that their readers write to.
      v: Their values.
      rule: Who sees whom, and how positions enter.
      cached: Blocks of the tokens before.
      context: Positions [B R, T] of the pass, and which of its T tokens each sees besides.

    Returns:
      (maximum [parts, B R, T, H], sum, weighted values [parts, B R, T, H, K]), float32.
    """
    keys = cached.keys
    values = cached.values
    forest = cached.forest
    view = cached.view
    among = context.visible
    rows, readers = view.write.shape
    length, heads, width = q.shape[1:]
    groups, blocks, block = keys.shape[1:4]
    queries = readers * length
    shape = shape_for(rows, groups, queries * heads // groups, blocks)
    position = context.positions.reshape(rows, queries)
    own = jnp.maximum(view.write, 0)
    none = jnp.zeros((1,), jnp.int32)  # stands where the kernel is told that there is nothing
    is_rope, slopes, slots = isinstance(rule.positions, Rope), rule.slopes(heads), view.slots
    cosine, sine = _turns(rule, position, view, length, width) if is_rope else (none, none)
    order, count = _needed(forest, view, length, heads // groups, shape)
    sizes = (shape.splits + 1, rows, queries, heads)
    wide = jnp.float32
    out = call_kernel(
        q, keys, values, k, v, cosine, sine, order, count, forest.owner, forest.place, view.seen, view.offset, own,
        position, none if slots is None else slots.astype(jnp.int8), none if among is None else among.astype(jnp.int8),
        none.astype(wide) if slopes is None else slopes.astype(wide),
        text=TEXT,
        name="attend",
        out=[jax.ShapeDtypeStruct(s, wide) for s in (sizes, sizes, (*sizes, width))],
        grid=(rows * groups * shape.tiles, shape.splits + 1),
        num_warps=2 if shape.tile == 16 else 4,
        num_stages=STAGES,
        READERS=readers, LENGTH=length, HEADS=heads, GROUPS=groups, REPEAT=heads // groups, WIDTH=width,
        HALF=width // 2, BLOCKS=blocks, BLOCK=block, SEGMENTS=forest.num_segments, ROWS=rows, TILE=shape.tile,
        TILES=shape.tiles, SPLITS=shape.splits, STEP=min(block, SLOTS_A_STEP), WINDOW=rule.visible.window, ROPE=is_rope,
        SLOTS=slots is not None, AMONG=among is not None, SLOPES=slopes is not None, SCALE=1 / math.sqrt(width),
        EXACT="ieee" if q.dtype == wide else "tf32",
    )  # fmt: skip
    flat = (shape.splits + 1, rows * readers, length, heads)
    return LogSumExp(out[0].reshape(flat), out[1].reshape(flat), out[2].reshape(*flat, width))


def _turns(
    rule: PositionRule, position: Array, view: View, length: int, width: int
) -> tuple[Array, Array]:
    """Returns cosines and sines [B, R T, M, K/2] of queries in each segment's coordinates.

    Angles are formed from integers, so that they keep their digits far from a segment's beginning.
    """
    assert isinstance(rule.positions, Rope)
    rows, queries = position.shape
    readers = view.offset.shape[1]
    offset = jnp.repeat(view.offset, length, axis=1)
    # A line a reader, as a rule that depends on the length of a text sees it.
    local = (position[..., None] - offset).reshape(rows * readers, -1)
    cosine, sine = rule.positions.cosines_and_sines(local, width)
    shape = (rows, queries, -1, width // 2)
    return cosine.reshape(shape), sine.reshape(shape)


def _needed(
    forest: Forest, view: View, length: int, repeat: int, shape: Shape
) -> tuple[Array, Array]:
    """Which blocks some query of each tile sees, [B, tiles, N] in order and then any, and how many, [B, tiles]."""
    owner = jnp.maximum(forest.owner, 0)
    first = jnp.where(forest.place >= 0, forest.place, jnp.iinfo(jnp.int32).max).min(-1)
    seen = jnp.take_along_axis(view.seen, owner[:, None], 2)  # [B, R, N]
    seen = (
        seen > first[:, None]
    )  # nobody sees so much of a block without tokens, such as a free one
    if view.slots is not None:
        seen = seen & view.slots.any(-1)
    if shape.tiles > 1:
        line = np.minimum(
            np.arange(shape.tiles * shape.tile), view.write.shape[1] * length * repeat - 1
        )
        reader = (line // (repeat * length)).reshape(shape.tiles, shape.tile)
        seen = jnp.stack([seen[:, part[0] : part[-1] + 1].any(1) for part in reader], 1)
    else:
        seen = seen.any(1, keepdims=True)
    rank, index = jnp.cumsum(seen, -1), jnp.arange(seen.shape[-1], dtype=jnp.int32)

    def ordered(seen, rank):
        return (
            jnp.zeros(seen.shape, jnp.int32)
            .at[jnp.where(seen, rank - 1, len(seen))]
            .set(index, mode="drop")
        )

    return jax.vmap(jax.vmap(ordered))(seen, rank), rank[..., -1].astype(jnp.int32)


TEXT = """
@triton.jit
def add(q, k, v, seen, bias, top, total, values, SCALE: tl.constexpr, EXACT: tl.constexpr):
    # One more part of the keys: the state (maximum, sum, weighted values) moves to the new maximum.
    scores = tl.dot(q, k, input_precision=EXACT)
    scores = tl.where(seen, scores * SCALE + bias, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    unit = tl.where(new == float("-inf"), 0.0, new)  # no difference of infinities where nothing is seen
    weights = tl.exp(scores - unit[:, None])
    keep = tl.exp(top - unit)
    total = total * keep + tl.sum(weights, 1)
    values = values * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=EXACT)
    return new, total, values


@triton.jit
def turned(q, other, cosine_ptr, sine_ptr, at, live, wide, HALF: tl.constexpr, ROPE: tl.constexpr):
    # The pair (x[i], x[i + K/2]) by the angle of its position in a segment's coordinates; `other` has its other half.
    if ROPE:
        place = at[:, None] * HALF + (wide % HALF)[None, :]
        c = tl.load(cosine_ptr + place, mask=live[:, None], other=0.0)
        s = tl.load(sine_ptr + place, mask=live[:, None], other=0.0)
        s = tl.where(wide < HALF, -1.0, 1.0)[None, :] * s
        return (q.to(tl.float32) * c + other.to(tl.float32) * s).to(q.dtype)
    else:
        return q


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, now_k_ptr, now_v_ptr, cosine_ptr, sine_ptr, order_ptr, count_ptr, owner_ptr, place_ptr,
    seen_ptr, offset_ptr, own_ptr, position_ptr, slots_ptr, among_ptr, slopes_ptr, top_ptr, total_ptr, values_ptr,
    READERS: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, REPEAT: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    WINDOW: tl.constexpr, ROPE: tl.constexpr, SLOTS: tl.constexpr, AMONG: tl.constexpr, SLOPES: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr,
):
    row = tl.program_id(0) // (GROUPS * TILES)
    group = tl.program_id(0) // TILES % GROUPS
    tile = tl.program_id(0) % TILES
    split = tl.program_id(1)
    QUERIES: tl.constexpr = READERS * LENGTH
    line = tile * TILE + tl.arange(0, TILE)  # queries that share a key head: token by token, head by head
    live = line < QUERIES * REPEAT
    query = tl.minimum(line // REPEAT, QUERIES - 1)
    head = group * REPEAT + line % REPEAT
    reader = query // LENGTH
    wide = tl.arange(0, WIDTH)
    at = ((row * QUERIES + query) * HEADS + head)[:, None] * WIDTH
    q = tl.load(q_ptr + at + wide[None, :], mask=live[:, None], other=0.0)
    other = tl.load(q_ptr + at + ((wide + HALF) % WIDTH)[None, :], mask=live[:, None], other=0.0)
    position = tl.load(position_ptr + row * QUERIES + query)
    slope = tl.zeros([TILE], tl.float32)
    if SLOPES:
        slope = tl.load(slopes_ptr + head)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    values = tl.zeros([TILE, WIDTH], tl.float32)

    if split < SPLITS:
        count = tl.load(count_ptr + row * TILES + tile)
        share = (count + SPLITS - 1) // SPLITS
        CUTS: tl.constexpr = BLOCK // STEP
        # What depends on a block's segment is the same for many blocks in turn.
        last = 0
        into = (row * READERS + reader) * SEGMENTS
        sees, shift = tl.load(seen_ptr + into), tl.load(offset_ptr + into)
        turn = (row * QUERIES + query) * SEGMENTS
        x = turned(q, other, cosine_ptr, sine_ptr, turn, live, wide, HALF, ROPE)
        for step in tl.range(split * share * CUTS, tl.minimum((split + 1) * share, count) * CUTS):
            block = tl.load(order_ptr + (row * TILES + tile) * BLOCKS + step // CUTS)
            if SEGMENTS > 1:
                owner = tl.load(owner_ptr + row * BLOCKS + block)
                if owner != last:
                    sees, shift = tl.load(seen_ptr + into + owner), tl.load(offset_ptr + into + owner)
                    x = turned(q, other, cosine_ptr, sine_ptr, turn + owner, live, wide, HALF, ROPE)
                    last = owner
            slot = (row * BLOCKS + block) * BLOCK + step % CUTS * STEP + tl.arange(0, STEP)
            place = tl.load(place_ptr + slot)
            key = place[None, :] + shift[:, None]  # position as the reader counts
            seen = (place >= 0)[None, :] & (place[None, :] < sees[:, None]) & live[:, None]
            seen = seen & (key >= 0) & (key <= position[:, None])
            if WINDOW > 0:
                seen = seen & (position[:, None] - key < WINDOW)
            if SLOTS:
                mine = (row * READERS + reader) * BLOCKS * BLOCK
                mine = mine[:, None] + block * BLOCK + (step % CUTS * STEP + tl.arange(0, STEP))[None, :]
                seen = seen & (tl.load(slots_ptr + mine) != 0)
            bias = tl.zeros([TILE, STEP], tl.float32)
            if SLOPES:
                bias = -slope[:, None] * (position[:, None] - key).to(tl.float32)
            base = ((row * GROUPS + group) * BLOCKS + block).to(tl.int64) * BLOCK + step % CUTS * STEP
            lines = (base + tl.arange(0, STEP)) * WIDTH
            k = tl.load(k_ptr + lines[None, :] + wide[:, None])
            # What holds no token may hold NaN, which a weight of zero would not take away.
            v = tl.load(v_ptr + lines[:, None] + wide[None, :], mask=(place >= 0)[:, None], other=0.0)
            top, total, values = add(x, k, v, seen, bias, top, total, values, SCALE, EXACT)
    else:
        own = tl.load(own_ptr + row * READERS + reader)
        own = (row * QUERIES + query) * SEGMENTS + own
        x = turned(q, other, cosine_ptr, sine_ptr, own, live, wide, HALF, ROPE)
        first = tile * TILE // REPEAT // LENGTH * LENGTH
        end = tl.minimum(((tile + 1) * TILE - 1) // REPEAT // LENGTH * LENGTH + LENGTH, QUERIES)
        for start in tl.range(first, end, 16):
            token = start + tl.arange(0, 16)
            known = token < end
            key = tl.load(position_ptr + row * QUERIES + token, mask=known, other=0)[None, :]
            seen = known[None, :] & live[:, None] & (token[None, :] // LENGTH == reader[:, None])
            seen = seen & (key <= position[:, None])
            if WINDOW > 0:
                seen = seen & (position[:, None] - key < WINDOW)
            if AMONG:
                pair = ((row * READERS + reader) * LENGTH + query % LENGTH) * LENGTH
                seen = seen & (tl.load(among_ptr + pair[:, None] + (token % LENGTH)[None, :]) != 0)
            bias = tl.zeros([TILE, 16], tl.float32)
            if SLOPES:
                bias = -slope[:, None] * (position[:, None] - key).to(tl.float32)
            lines = ((row * QUERIES + token) * GROUPS + group) * WIDTH
            k = tl.load(now_k_ptr + lines[None, :] + wide[:, None], mask=known[None, :], other=0.0)
            v = tl.load(now_v_ptr + lines[:, None] + wide[None, :], mask=known[:, None], other=0.0)
            top, total, values = add(x, k, v, seen, bias, top, total, values, SCALE, EXACT)

    at = ((split * ROWS + row) * QUERIES + query) * HEADS + head
    tl.store(top_ptr + at, top, mask=live)
    tl.store(total_ptr + at, total, mask=live)
    tl.store(values_ptr + at[:, None] * WIDTH + wide[None, :], values, mask=live[:, None])
"""
