"""Attention over a forest's blocks is plain attention of each reader to one line of what it sees."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from forest_twin import (
    BLOCK,
    BLOCKS,
    READERS,
    ROWS,
    SEGMENTS,
    SHAPE,
    Twin,
    lineage_view,
    reserve,
    spawn,
    steps,
    write,
)
from hypothesis import given, settings

from jaxpar.decode import Tree, chain
from jaxpar.decode import forest as tables
from jaxpar.decode.blocks import BlockCache, attend_blocks
from jaxpar.mesh import RULES, MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import PositionRule, Visible, finish, merge_parts
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Alibi, Rope

HEADS, GROUPS, WIDTH = 4, 2, 4
TREE = Tree((-1, 0, 0, 1))
ROPE = Rope(theta=30.0)  # wavelengths such that a distance off by one shows in each number
CASES = {
    "rope": (PositionRule(positions=ROPE), chain(0), True),
    "rope-window-tree": (PositionRule(Visible(window=3), ROPE), TREE, False),
    "rope-chain": (PositionRule(positions=ROPE), chain(2), False),
    "slopes-window": (PositionRule(Visible(window=4), Alibi()), chain(2), False),
    "slopes-tree": (PositionRule(positions=Alibi()), TREE, True),
    "none-window": (PositionRule(Visible(window=2)), chain(1), True),
}


@functools.partial(jit, static_argnums=(0, 1))
def attend(rule, tree, cache, forest, view, q, k, v):
    """As `jaxpar.decode.reader.look` has a layer do it."""
    positions = view.position.reshape(-1, 1) + jnp.asarray(tree.depth, jnp.int32)[None]
    is_chain = tree.size == tree.max_depth + 1
    visible = (
        None if is_chain else jnp.broadcast_to(tree.ancestors[None], (len(q), tree.size, tree.size))
    )
    state, cache = cache.for_pass(forest, view).attend(
        q, k, v, rule, Context(positions, visible=visible)
    )
    return finish(state), cache


store, clear = jit(BlockCache.store), jit(BlockCache.clear)


def rotated(x, positions, frequencies):
    """Heads [S, H, K] of tokens, each pair (i, i + K/2) turned by position times frequency."""
    turn = np.exp(1j * np.multiply.outer(positions, frequencies))[:, None]
    pairs = (x[..., : WIDTH // 2] + 1j * x[..., WIDTH // 2 :]) * turn
    return np.concatenate([pairs.real, pairs.imag], -1)


class Plain:
    """Attention of one query [H, K] to a line of tokens, by their positions alone."""

    def __init__(self, rule):
        slopes, self.window = rule.slopes(HEADS), rule.visible.window or math.inf
        self.slopes = np.zeros(HEADS) if slopes is None else np.asarray(slopes, np.float64)
        is_rope = isinstance(rule.positions, Rope)
        self.frequencies = (
            rule.positions.frequencies(WIDTH, np.float64) if is_rope else np.zeros(WIDTH // 2)
        )

    def __call__(self, q, position, line):
        places, keys, values = (np.array(x) for x in zip(*line, strict=True))
        keys, q = (
            rotated(x, np.array(at), self.frequencies)
            for x, at in ((keys, places), (q[None], [position]))
        )
        distance, out = position - places, []
        for head in range(HEADS):
            group = head * GROUPS // HEADS
            scores = keys[:, group] @ q[0, head] / math.sqrt(WIDTH) - self.slopes[head] * distance
            weights = np.where(
                (distance >= 0) & (distance < self.window), np.exp(scores - scores.max()), 0
            )
            out.append(weights @ values[:, group] / weights.sum())
        return np.array(out)


class Cache:
    """A layer's blocks for a `Twin`: NaN wherever nothing was written, and each token's key and value beside them."""

    def __init__(self, rule):
        hole = np.full((ROWS, GROUPS, BLOCKS, BLOCK, WIDTH), np.nan)
        self.rule, self.blocks, self.known, self.rng = (
            rule,
            BlockCache(hole, hole),
            {},
            np.random.default_rng(0),
        )
        self.plain = Plain(rule)

    def clear(self, fresh):
        self.blocks = jax.device_get(clear(self.blocks, fresh))

    def poison(self, free):
        hole = free[:, None, :, None, None]
        self.blocks = BlockCache(
            *(np.where(hole, np.nan, x) for x in (self.blocks.keys, self.blocks.values))
        )

    def store(self, slots):
        self.blocks = jax.device_get(store(self.after, slots))

    def attend(self, twin, tokens):
        """A pass of random queries, keys and values, compared with the plain form."""
        tree, shape = twin.tree, (ROWS * READERS, twin.tree.size)
        q, k, v = (
            self.rng.normal(size=(*shape, heads, WIDTH)) * 2 for heads in (HEADS, GROUPS, GROUPS)
        )
        got, self.after = attend(self.rule, tree, self.blocks, twin.forest, twin.view, q, k, v)
        readers = [
            (row, reader)
            for row, line in zip(twin.rows, twin.readers, strict=True)
            for reader in line
        ]
        want = np.zeros(got.shape)
        for number, (row, reader) in enumerate(readers):
            past = [(place, *self.known[token]) for place, token in row.line(reader)]
            for node in range(tree.size):
                seen = np.flatnonzero(tree.ancestors[node])
                now = [(reader.position + tree.depth[i], k[number, i], v[number, i]) for i in seen]
                want[number, node] = self.plain(q[number, node], now[-1][0], past + now)
        assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()
        self.known |= {
            int(token): (k[at], v[at]) for at, token in np.ndenumerate(tokens.reshape(shape))
        }


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=20, deadline=None)
@given(steps)
def test_attention_to_blocks_is_attention_to_a_line(case, steps):
    rule, tree, masked = CASES[case]
    with jax.enable_x64(True):
        Twin(masked, tree, Cache(rule)).run(steps)


@pytest.mark.parametrize("slot", [0, 5, BLOCKS * BLOCK - 1, BLOCKS * BLOCK])
def test_one_token_of_one_row_is_written_as_several_are(slot):
    keys, values, k, v = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate(
            [(1, GROUPS, BLOCKS, BLOCK, WIDTH)] * 2 + [(1, 1, GROUPS, WIDTH)] * 2
        )
    )
    cache = dataclasses.replace(BlockCache(keys, values), new=(k, v))
    got = store(cache, jnp.full((1, 1, 1), slot))
    if slot == BLOCKS * BLOCK:  # not kept
        want = keys, values
    else:
        want = (
            x.at[0, :, slot // BLOCK, slot % BLOCK].set(y[0, 0])
            for x, y in ((keys, k), (values, v))
        )
    for one, other in zip((got.keys, got.values), want, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_cache_stays_split_by_heads_when_it_is_written(tokens):
    shape = (1, GROUPS, BLOCKS, BLOCK, WIDTH)
    cache = BlockCache(jnp.zeros(shape), jnp.zeros(shape))
    with use_mesh(make_mesh(MeshSpec(tensor=GROUPS, data=8 // GROUPS)), RULES | {"batch": ()}):
        k = jnp.ones((1, tokens, GROUPS, WIDTH))
        got = jit(
            lambda: dataclasses.replace(cache, new=(k, k)).store(jnp.arange(tokens)[None, None])
        )()
        assert {x.sharding.spec[1] for x in (got.keys, got.values)} == {"tensor"}


def test_sums_over_numbers_of_16_bits_are_of_32():
    rng, (rows, blocks, length) = np.random.default_rng(0), (2, 3, 5)
    q = jnp.asarray(rng.normal(size=(1, rows, length, HEADS, WIDTH)), "bfloat16")
    k, v = (
        jnp.asarray(rng.normal(size=(rows, GROUPS, blocks, BLOCK, WIDTH)), "bfloat16")
        for _ in range(2)
    )
    seen = np.ones((rows, 1, blocks, length, BLOCK), bool)
    states, scores = attend_blocks(q, k, v, seen)
    assert {x.dtype for x in (*states, scores)} == {jnp.dtype("float32")}
    wide, _ = attend_blocks(*(x.astype(jnp.float32) for x in (q, k, v)), seen)
    np.testing.assert_allclose(states.max, wide.max, rtol=0, atol=1e-5)
    np.testing.assert_allclose(states.denominator, wide.denominator, rtol=1e-5)


def test_blocks_are_added_up_as_the_cache_says():
    rows, blocks, length = 2, 3, 2
    given, x = [], jnp.ones((rows, 1, GROUPS, WIDTH))

    def twice(states):  # as if another device held as much
        given.append(states.max.shape[0])
        return merge_parts(jax.tree.map(lambda x: jnp.concatenate([x, x]), states))

    forest, root = tables.spawn(tables.empty(rows, 1, blocks, BLOCK), 1)
    forest, _ = tables.reserve(forest, root, np.full((rows, 1), length, np.int32))
    forest, view, _ = tables.write(
        forest, tables.lineage_view(forest, root), np.full((rows, 1), length), length
    )
    cache = BlockCache.empty(rows, GROUPS, blocks, BLOCK, WIDTH, "float32")
    sums = []
    for merge in (merge_parts, twice):
        read = dataclasses.replace(cache, merge=merge).for_pass(forest, view)
        sums.append(read.attend(x, x, x, PositionRule(), Context(view.position))[0].denominator)
    one = math.exp(
        -math.sqrt(WIDTH)
    )  # of a key of zeros beside the token itself, which counts once and as 1
    np.testing.assert_allclose(sums[0], np.full(sums[0].shape, 1 + length * one), rtol=1e-6)
    np.testing.assert_allclose(sums[1], np.full(sums[1].shape, 1 + 2 * length * one), rtol=1e-6)
    assert given == [blocks]


def test_beams_of_one_segment_are_re_ordered_by_their_slots(x64):
    """Readers of one segment, of which each goes on as another after each token: nothing moves but rows of `slots`."""
    rule, tree, _ = CASES["rope"]
    rng, plain, every = np.random.default_rng(1), Plain(rule), np.arange(ROWS)[:, None]
    forest, root = spawn(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK), 1)
    forest, fresh = reserve(
        forest, np.pad(root, ((0, 0), (0, READERS - 1)), constant_values=-1), np.full(SHAPE, 12)
    )
    view = lineage_view(forest, np.repeat(root, READERS, 1))
    view = dataclasses.replace(view, slots=np.zeros((*SHAPE, BLOCKS, BLOCK), bool))
    hole = np.full((ROWS, GROUPS, BLOCKS, BLOCK, WIDTH), np.nan)
    cache, beams = clear(BlockCache(hole, hole), fresh), [[[]] * READERS] * ROWS
    for place in range(BLOCKS * BLOCK // READERS):
        q, k, v = (rng.normal(size=(*SHAPE, 1, heads, WIDTH)) for heads in (HEADS, GROUPS, GROUPS))
        flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        got, cache = attend(rule, tree, cache, forest, view, *flat)
        beams = [
            [[*beam, (place, k[row, r, 0], v[row, r, 0])] for r, beam in enumerate(line)]
            for row, line in enumerate(beams)
        ]
        want = [
            plain(q[row, r, 0], place, beam)
            for row, line in enumerate(beams)
            for r, beam in enumerate(line)
        ]
        np.testing.assert_allclose(got[:, 0], want, rtol=0, atol=1e-12 * np.abs(want).max())
        forest, view, slots = write(forest, view, np.ones(SHAPE, np.int32), 1)
        cache, parents = store(cache, slots), rng.integers(0, READERS, SHAPE)
        view = dataclasses.replace(view, slots=view.slots[every, parents])
        beams = [
            [line[parent] for parent in which] for line, which in zip(beams, parents, strict=True)
        ]
    assert forest.length[:, 0].tolist() == [BLOCKS * BLOCK] * ROWS and not forest.refused.any()
