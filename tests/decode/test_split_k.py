"""The kernel of attention over blocks equals the plain form: on a GPU, or in Triton's interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter
from tolerance import assert_close

from jaxpar.decode import _split_k, chain
from jaxpar.decode import forest as tables
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.trees import Tree
from jaxpar.nn.attention import PositionRule, Visible, finish
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Alibi, Rope

pytestmark = triton_interpreter.NEEDED

ROWS, GROUPS, HEADS, WIDTH, BLOCK, PROMPT, ROOM = 2, 2, 4, 32, 16, 37, 20
ON_GPU = jax.default_backend() == "gpu"
ROPE = PositionRule(positions=Rope(theta=100.0))
TREE = Tree((-1, 0, 0, 1))
CASES = {
    "one reader": (ROPE, chain(0), 1, "float32"),
    "three readers, a tree": (ROPE, TREE, 3, "float32"),
    "more queries than a tile": (ROPE, chain(3), 9, "float32"),
    "window": (PositionRule(Visible(window=9), ROPE.positions), chain(2), 3, "float32"),
    "slopes": (PositionRule(Visible(), Alibi()), TREE, 2, "float32"),
    "no positions": (PositionRule(), chain(1), 2, "float16"),
    "float16": (ROPE, chain(1), 2, "float16"),
    "bfloat16": (ROPE, TREE, 3, "bfloat16"),
}


def made(readers, dtype, slots):
    """A prompt, read by readers that have each written some tokens; NaN in what nobody wrote."""
    blocks = -(-PROMPT // BLOCK) + 2 * readers + 3
    forest, root = tables.spawn(tables.empty(ROWS, readers + 1, blocks, BLOCK))
    forest, _ = tables.reserve(forest, root, jnp.full((ROWS, 1), PROMPT, jnp.int32))
    lengths = jnp.array([[PROMPT], [PROMPT - 9]], jnp.int32)
    forest, _, _ = tables.write(forest, tables.lineage_view(forest, root), lengths, PROMPT)
    forest, children = tables.fork(forest, root[:, 0], readers)
    forest, _ = tables.reserve(forest, children, jnp.full((ROWS, readers), ROOM, jnp.int32))
    counts = (jnp.arange(ROWS * readers, dtype=jnp.int32).reshape(ROWS, readers) * 7) % ROOM
    forest, view, _ = tables.write(forest, tables.lineage_view(forest, children), counts, ROOM)
    if slots:
        mask = jax.random.bernoulli(jax.random.key(5), 0.7, (ROWS, readers, blocks, BLOCK))
        view = dataclasses.replace(view, slots=mask)
    shape = ROWS, GROUPS, blocks, BLOCK, WIDTH
    known = (forest.place >= 0)[:, None, :, :, None]
    keys, values = (
        jnp.where(known, jax.random.normal(key, shape), jnp.nan).astype(dtype)
        for key in jax.random.split(jax.random.key(0))
    )
    return forest, view, keys, values


def attend(rule, tree, cache, forest, view, q, k, v):
    positions = view.position.reshape(-1, 1) + jnp.asarray(tree.depth, jnp.int32)[None]
    is_chain = tree.size == tree.max_depth + 1
    visible = None if is_chain else jnp.broadcast_to(tree.ancestors[None], (len(q), tree.size, tree.size))
    state, after = cache.for_pass(forest, view).attend(q, k, v, rule, Context(positions, visible=visible))
    return finish(state), after.new


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_plain_form(name, slots, monkeypatch):
    rule, tree, readers, dtype = CASES[name]
    if dtype == "bfloat16" and not ON_GPU:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    forest, view, keys, values = made(readers, dtype, slots)
    lanes = [(HEADS, 1), (GROUPS, 2), (GROUPS, 3)]
    q, k, v = (
        jax.random.normal(jax.random.key(seed), (ROWS * readers, tree.size, heads, WIDTH), dtype)
        for heads, seed in lanes
    )

    def run(values):
        cache = BlockCache(keys, values)
        with jax.default_matmul_precision("highest"):
            return jax.jit(functools.partial(attend, rule, tree))(cache, forest, view, q, k, v)

    monkeypatch.setattr(_split_k, "platform", lambda: "cpu")
    want, want_new = run(jnp.nan_to_num(values))  # the kernel needs no clean values, the plain form does
    if not ON_GPU:
        triton_interpreter.install(monkeypatch)
        monkeypatch.setattr(_split_k, "available", lambda: True)
    monkeypatch.setattr(_split_k, "platform", lambda: "gpu")
    monkeypatch.setattr(_split_k, "PROGRAMS", 24)
    got, new = run(values)
    # float32: sums in another order; 16 bits: weights are rounded beside another maximum.
    assert_close(got, want, {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype])
    np.testing.assert_array_equal(np.float32(new[0]), np.float32(want_new[0]))
