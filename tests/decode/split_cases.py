"""What the kernel of attention over blocks is given: tables of all kinds, and a cache that holds NaN where no token is.

`stand_in` is its sequential twin: what each program makes, query by query and block by block, in
NumPy.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit

from jaxpar.decode import chain, split_k
from jaxpar.decode import forest as tables
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.trees import Tree
from jaxpar.nn.attention import PositionRule, Visible, finish
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Alibi, Rope

ROWS, GROUPS, HEADS, WIDTH, BLOCK, PROMPT, ROOM = 2, 2, 6, 32, 16, 37, 20
ROPE = PositionRule(positions=Rope(theta=100.0))
YARN = Rope(theta=100.0, factor=4.0, scaling="yarn", high_freq_factor=32.0, original_len=32)
TREE = Tree((-1, 0, 0, 1))
CASES = {
    "one reader": (ROPE, chain(0), 1, "float32"),
    "three readers, a tree": (ROPE, TREE, 3, "float32"),
    "more queries than a tile": (ROPE, chain(3), 9, "float32"),
    "window": (PositionRule(Visible(window=9), ROPE.positions), chain(2), 3, "float32"),
    "window within a pass": (
        PositionRule(Visible(window=2), ROPE.positions),
        chain(2),
        2,
        "float32",
    ),
    "yarn": (PositionRule(positions=YARN), TREE, 3, "float32"),
    "slopes": (PositionRule(Visible(), Alibi()), TREE, 2, "float32"),
    "no positions": (PositionRule(), chain(1), 2, "float16"),
    "float16": (ROPE, chain(1), 2, "float16"),
    "bfloat16": (ROPE, TREE, 3, "bfloat16"),
}


def made(readers, dtype, slots):
    """A prompt, read by readers that have each written some tokens; NaN in what nobody wrote.

    Offsets differ from reader to reader, and what is seen ends before its segment does: tables that
    no one step makes, but that tell apart whose are read. Blocks lie in no order, the last of
    several readers writes nowhere.
    """
    rng, reserved = (
        np.random.default_rng(readers),
        [-(-PROMPT // BLOCK), *[-(-ROOM // BLOCK)] * readers],
    )
    blocks = sum(reserved) + 3
    counts = np.arange(ROWS * readers).reshape(ROWS, readers) * 7 % ROOM
    length = np.concatenate([[[PROMPT], [PROMPT - 9]], counts], 1)
    owner = np.tile(np.repeat([*range(readers + 1), -1], [*reserved, 3]), (ROWS, 1))
    order = np.concatenate([*map(np.arange, reserved), np.zeros(3)])
    place = np.arange(BLOCK) + BLOCK * np.tile(order[:, None], (ROWS, 1, 1))
    place = np.where(
        (owner >= 0)[..., None] & (place < np.take_along_axis(length, owner, 1)[..., None]),
        place,
        -1,
    )
    later = rng.permuted(np.tile(np.arange(1, blocks), (ROWS, 1)), axis=1)
    at = (
        np.arange(ROWS)[:, None],
        np.pad(later, ((0, 0), (1, 0))),
    )  # block 0, which stands for none in a list, is seen
    forest = tables.empty(ROWS, readers + 1, blocks, BLOCK)
    forest = dataclasses.replace(forest, owner=np.int32(owner[at]), place=np.int32(place[at]))

    own = np.stack([np.roll(np.arange(1, readers + 1), row) for row in range(ROWS)])
    sees = np.isin(np.arange(readers + 1), 0) | (own[..., None] == np.arange(readers + 1))
    seen = np.where(sees, length[:, None], 0)
    short, away = rng.integers(0, 5, seen.shape), rng.integers(-6, 5, seen.shape)
    offset = np.where(np.arange(readers + 1) > 0, length[:, :1, None], 0) + away
    write = np.where((own == readers) & (readers > 1), -1, own)
    position = length[:, :1] + np.take_along_axis(length, own, 1)
    view = tables.View(*map(np.int32, (np.maximum(seen - short, 0), offset, write, position)))
    if slots:
        mask = rng.uniform(size=(ROWS, readers, blocks, BLOCK)) < 0.7
        mask[:, :, 1 :: readers + 1] = False
        view = dataclasses.replace(view, slots=mask)
    known = (forest.place >= 0)[:, None, :, :, None]
    shape = ROWS, GROUPS, blocks, BLOCK, WIDTH
    keys, values = (
        jnp.asarray(np.where(known, rng.normal(size=shape), np.nan), dtype) for _ in range(2)
    )
    return forest, view, keys, values


def attend(rule, tree, cache, forest, view, q, k, v):
    positions = view.position.reshape(-1, 1) + jnp.asarray(tree.depth, jnp.int32)[None]
    is_chain = tree.size == tree.max_depth + 1
    some = (
        np.random.default_rng(2).uniform(size=(len(q), tree.size, tree.size)) < 0.7
    )  # no two readers the same
    visible = (
        None if is_chain else jnp.asarray(tree.ancestors & (some | np.eye(tree.size, dtype=bool)))
    )
    state, after = cache.for_pass(forest, view).attend(
        q, k, v, rule, Context(positions, visible=visible)
    )
    return finish(state), after.new


def both(name, slots, monkeypatch):
    """What the plain form gives, and then what is in the kernel's place: (output, new keys and values) of each."""
    rule, tree, readers, dtype = CASES[name]
    forest, view, keys, values = made(readers, dtype, slots)
    rng, shape = np.random.default_rng(1), (ROWS * readers, tree.size)
    q, k, v = (
        jnp.asarray(rng.normal(size=(*shape, heads, WIDTH)), dtype)
        for heads in (HEADS, GROUPS, GROUPS)
    )

    def run(values):
        cache = BlockCache(keys, values)
        with jax.default_matmul_precision("highest"):
            return jit(functools.partial(attend, rule, tree))(cache, forest, view, q, k, v)

    monkeypatch.setattr(split_k, "platform", lambda: "cpu")
    yield run(jnp.nan_to_num(values))  # the kernel needs no clean values, the plain form does
    monkeypatch.setattr(split_k, "platform", lambda: "gpu")
    monkeypatch.setattr(split_k, "PROGRAMS", 12)
    yield run(values)


def stand_in(*arrays, out, grid, text, name, num_warps, num_stages, **sizes):
    """Has the signature of `jaxpar.lower.triton.call_kernel`."""

    def run(*arrays):
        return programs(
            *(np.asarray(x) for x in arrays), grid=grid, shapes=[x.shape for x in out], **sizes
        )

    return list(jax.pure_callback(run, tuple(out), *arrays))


def programs(
    q, keys, values, now_k, now_v, cosine, sine, order, count, owner, place, seen, offset, own, position, slots, among,
    slopes, *, grid, shapes, READERS, LENGTH, HEADS, GROUPS, REPEAT, WIDTH, TILE, TILES, SPLITS, SEGMENTS, WINDOW, ROPE,
    SLOTS, AMONG, SLOPES, SCALE, **_,
):  # fmt: skip
    """States (maximum, sum, weighted values) of each part of the keys; NaN where no program wrote."""
    queries = READERS * LENGTH
    top, total, mean = (np.full(shape, np.nan, np.float32) for shape in shapes)
    q = np.float32(q).reshape(-1, queries, HEADS, WIDTH)
    now = [np.float32(x).reshape(-1, queries, GROUPS, WIDTH) for x in (now_k, now_v)]
    if ROPE:
        turns = (cosine + 1j * sine).reshape(-1, queries, SEGMENTS, WIDTH // 2)
    if AMONG:
        among = among.reshape(-1, READERS, LENGTH, LENGTH)

    def turned(row, query, head, segment):
        x = q[row, query, head]
        if not ROPE:
            return x
        pairs = (x[: WIDTH // 2] + 1j * x[WIDTH // 2 :]) * turns[row, query, segment]
        return np.concatenate([pairs.real, pairs.imag])

    def lines(row, group, tile, split, query, head):
        """Scores and values of what one query sees of its share, block by block."""
        reader, here = query // LENGTH, position[row, query]
        slope = slopes[head] if SLOPES else 0

        def of(x, k, v, at, sees):
            sees = sees & (at >= 0) & (at <= here) & ((here - at < WINDOW) | (WINDOW == 0))
            yield from zip((k[sees] @ x) * SCALE - slope * (here - at[sees]), v[sees], strict=True)

        if split == SPLITS:
            mine = np.arange(reader * LENGTH, (reader + 1) * LENGTH)
            sees = among[row, reader, query % LENGTH] != 0 if AMONG else np.ones(LENGTH, bool)
            x = turned(row, query, head, own[row, reader])
            yield from of(x, *(x[row, mine, group] for x in now), position[row, mine], sees)
            return
        share = math.ceil(count[row, tile] / SPLITS)
        for block in order[row, tile, : count[row, tile]][split * share : (split + 1) * share]:
            segment = owner[row, block]
            sees = (place[row, block] >= 0) & (place[row, block] < seen[row, reader, segment])
            if SLOTS:
                sees &= slots[row, reader, block] != 0
            k, v = np.float32(keys[row, group, block]), np.float32(values[row, group, block])
            x = turned(row, query, head, segment)
            yield from of(x, k, v, place[row, block] + offset[row, reader, segment], sees)

    for first, split in np.ndindex(*grid):
        row, group, tile = np.unravel_index(first, (grid[0] // GROUPS // TILES, GROUPS, TILES))
        for line in range(tile * TILE, min((tile + 1) * TILE, queries * REPEAT)):
            query, head = line // REPEAT, group * REPEAT + line % REPEAT
            at = split, row, query, head
            scores, vectors = [
                list(x) for x in zip(*lines(row, group, tile, split, query, head), strict=True)
            ] or (
                [],
                [],
            )
            top[at] = max(scores, default=-np.inf)
            weights = np.exp(np.array(scores) - top[at])
            total[at], mean[at] = weights.sum(), weights @ np.reshape(vectors, (-1, WIDTH))
    return top, total, mean
