"""What is around the kernel of attention over blocks, without it: who takes it, its shares, and its sequential twin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from split_cases import BLOCK, CASES, GROUPS, HEADS, ROWS, both, made, stand_in
from tolerance import EXACT_MATHS, assert_close

from jaxpar.decode import SinksAndWindow, split_k
from jaxpar.decode.blocks import BlockCache
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import PositionRule, Visible, merge_parts
from jaxpar.scan.monoid import LogSumExp


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(split_k, "platform", lambda: "gpu")
    monkeypatch.setattr(split_k, "available", lambda: True)


@pytest.mark.parametrize(
    "name",
    [
        "three readers, a tree",
        "more queries than a tile",
        "window within a pass",
        "yarn",
        "slopes",
    ],
)
def test_the_sequential_twin_equals_the_plain_form(name, on_a_gpu, monkeypatch):
    monkeypatch.setattr(split_k, "call_kernel", stand_in)
    (want, want_new), (got, new) = both(name, name != "more queries than a tile", monkeypatch)
    assert_close(got, want, EXACT_MATHS["float32"])
    np.testing.assert_array_equal(new[0], want_new[0])


def test_what_the_kernel_takes(on_a_gpu, monkeypatch):
    rule = PositionRule()
    assert all(
        split_k.has_kernel(rule, dtype, block, width)
        for dtype in ("bfloat16", jnp.float16, np.float32)
        for block in (16, 64, 128)
        for width in (32, 128)
    )
    assert split_k.has_kernel(PositionRule(Visible(window=3)), "float32", 16, 32)
    no = [
        ("float64", 64, 64),
        ("int8", 64, 64),
        ("float32", 8, 64),
        ("float32", 48, 64),
        ("float32", 64, 16),
    ]
    assert not any(split_k.has_kernel(rule, *each) for each in [*no, ("float32", 64, 96)])
    assert not split_k.has_kernel(PositionRule(Visible(causal=False)), "float32", 64, 64)
    monkeypatch.setattr(split_k, "available", lambda: False)
    assert not split_k.has_kernel(rule, "float32", 64, 64)
    monkeypatch.setattr(split_k, "available", lambda: True)
    monkeypatch.setattr(split_k, "platform", lambda: "cpu")
    assert not split_k.has_kernel(rule, "float32", 64, 64)


@pytest.mark.parametrize("name", ["batch", "kv_heads", "slots", "heads"])
def test_one_device_alone_takes_the_kernel(name, on_a_gpu):
    rules = {axis: () for axis in ("batch", "kv_heads", "slots", "heads")}
    with use_mesh(make_mesh(MeshSpec(data=8)), rules):
        assert split_k.has_kernel(PositionRule(), "float32", 64, 64)
    with use_mesh(make_mesh(MeshSpec(data=8)), rules | {name: ("data",)}):
        assert not split_k.has_kernel(PositionRule(), "float32", 64, 64)


def test_a_policy_keeps_the_plain_form(on_a_gpu, monkeypatch):
    """Which is told apart from the kernel by that nothing is in the kernel's place."""
    monkeypatch.setattr(
        split_k, "attend_forest", lambda *_: pytest.fail("the kernel knows no policy")
    )
    forest, view, keys, values = made(1, "float32", False)
    cache = (
        BlockCache(keys, jnp.nan_to_num(values))
        .with_policy(SinksAndWindow(), 1)
        .for_pass(forest, view)
    )
    q, k, v = (jnp.ones((ROWS, 1, heads, keys.shape[-1])) for heads in (HEADS, GROUPS, GROUPS))
    context = type("Context", (), {"positions": view.position, "visible": None})
    assert jax.eval_shape(lambda: cache.attend(q, k, v, PositionRule(), context)[0]).max.shape == (
        ROWS,
        1,
        HEADS,
    )


def test_shapes_of_the_work():
    """Tiles hold all queries, as few as they need; splits fill the card, but for what there is to split."""
    for queries in (1, 2, 16, 17, 33, 64, 65, 200):
        tile, tiles, _ = split_k.shape_for(1, 1, queries, 99)
        assert tile in (16, 32, 64) and (tiles - 1) * tile < queries <= tiles * tile
        assert tile == 16 or queries > tile // 2  # a smaller tile would not have held them
        assert tiles == 1 or tile == 64
    for rows, groups, queries in ((1, 8, 1), (3, 5, 70), (4, 16, 1)):
        tiles = -(-queries // 64)
        splits = split_k.shape_for(rows, groups, queries, 10**6).splits
        assert splits == min(split_k.MOST_SPLITS, -(-split_k.PROGRAMS // (rows * groups * tiles)))
        assert split_k.shape_for(rows, groups, queries, 5).splits == min(splits, 5)
    assert split_k.shape_for(999, 8, 1, 5).splits == 1


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", ["three readers, a tree", "more queries than a tile"])
def test_a_tile_reads_the_blocks_that_its_readers_see_and_no_others(name, slots):
    _, tree, readers, dtype = CASES[name]
    forest, view, *_ = made(readers, dtype, slots)
    repeat, queries = HEADS // GROUPS, readers * tree.size
    shape = split_k.shape_for(ROWS, GROUPS, queries * repeat, 9)
    order, count = jax.device_get(
        jit(split_k._needed, static_argnums=(2, 3, 4))(forest, view, tree.size, repeat, shape)
    )
    assert (
        order.shape == (ROWS, shape.tiles, forest.num_blocks)
        and order.dtype == count.dtype == np.int32
    )
    for row, tile in np.ndindex(ROWS, shape.tiles):
        lines = range(tile * shape.tile, min((tile + 1) * shape.tile, queries * repeat))
        want = set()
        for reader, block in {
            (line // repeat // tree.size, b) for line in lines for b in range(forest.num_blocks)
        }:
            place, owner = forest.place[row, block], forest.owner[row, block]
            sees = any(0 <= place[slot] < view.seen[row, reader, owner] for slot in range(BLOCK))
            if sees and (view.slots is None or view.slots[row, reader, block].any()):
                want.add(block)
        assert (
            order[row, tile, : count[row, tile]].tolist() == sorted(want)
            and 0 < len(want) < forest.num_blocks
        )


def states(parts):
    rng = np.random.default_rng(0)
    top = rng.normal(size=(parts, 3, 2, 4))
    top[0, 0], top[:-1, 1] = -np.inf, -np.inf  # a part of nothing, and all but the last of nothing
    held = top > -np.inf
    total, values = (
        rng.uniform(1, 2, top.shape) * held,
        rng.normal(size=(*top.shape, 5)) * held[..., None],
    )
    return LogSumExp(*(jnp.asarray(x) for x in (top, total, values)))


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_are_added_up_and_the_last_by_no_other_device(parts, x64):
    """A merge of one's own, as over a mesh axis, is given all parts but the last, which every device has alike."""
    given = states(parts)
    scale = np.exp(np.asarray(given.max))
    want = (scale[..., None] * given.numerator).sum(0) / (scale * given.denominator).sum(0)[
        ..., None
    ]
    mean = lambda state: np.asarray(state.numerator / state.denominator[..., None])  # noqa: E731
    np.testing.assert_allclose(mean(BlockCache(None, None)._added(given)), want, rtol=1e-13)

    def twice(calls, states):  # two devices, each with the same blocks
        calls.append(len(states.max))
        return merge_parts(jax.tree.map(lambda x: jnp.concatenate([x, x]), states))

    calls = []
    got = BlockCache(None, None, merge=functools.partial(twice, calls))._added(given)
    scale = scale * np.where(np.arange(parts) < parts - 1, 2, 1)[:, None, None, None]
    want = (scale[..., None] * given.numerator).sum(0) / (scale * given.denominator).sum(0)[
        ..., None
    ]
    np.testing.assert_allclose(mean(got), want, rtol=1e-13)
    assert calls == [parts - 1]
