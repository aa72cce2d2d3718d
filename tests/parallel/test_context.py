"""Attention over a split sequence equals dense attention, and sends what its table says."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_libtpu, on_a_tpu
from fast import jit
from tolerance import assert_close

from jaxpar.aot import hlo
from jaxpar.mesh import RULES, MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import Visible, kernels
from jaxpar.parallel.context import MOVES, ORDERS, Order, Sizes, context_attention, move_for
from jaxpar.parallel.context import _partial as pieces
from jaxpar.types import UsageError

B, H, K = 2, 4, 4
# Every move, order and factorisation of 8 devices at least once, each with documents or without, some with fewer key
# heads: pairwise covering. (move, order, data, context, tensor, key heads, T, documents, rule)
CASES = [
    ("gather", "contiguous", 1, 8, 1, 2, 32, False, Visible()),
    ("gather", "zigzag", 2, 2, 2, 4, 24, True, Visible()),
    ("ring", "zigzag", 1, 4, 2, 2, 40, False, Visible()),
    ("ring", "striped", 1, 8, 1, 4, 32, True, Visible()),
    ("ring", "contiguous", 4, 2, 1, 1, 24, True, Visible(window=7)),
    ("two_way", "zigzag", 1, 8, 1, 2, 48, True, Visible()),
    ("two_way", "striped", 2, 4, 1, 4, 24, False, Visible(causal=False)),
    ("token_ring", "contiguous", 2, 4, 1, 2, 32, True, Visible()),
    ("token_ring", "zigzag", 1, 8, 1, 4, 48, False, Visible()),
    ("swap", "contiguous", 2, 2, 2, 4, 24, True, Visible()),
    ("swap", "zigzag", 2, 4, 1, 4, 24, False, Visible(window=5)),
]


def drawn(length, groups, rows=B, dtype=np.float64):
    rng = np.random.default_rng(length)
    q, k, v, g = (jnp.asarray(rng.standard_normal((rows, length, n, K)), dtype) for n in (H, groups, groups, H))
    return q, k, v, g


def documents(rows, length):
    return jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (rows, length)), 1), jnp.int32)


def dense(q, k, v, positions, segments, visible):
    """Softmax over all keys at once, with the whole matrix."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    seen = visible(positions, positions)
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1, where=seen[:, None])
    return jnp.einsum("bhts,bshk->bthk", jnp.where(seen[:, None], weights, 0), v)


def with_gradients(f, *args):
    def both(q, k, v, g, positions, segments):
        out, pull = jax.vjp(lambda q, k, v: f(q, k, v, positions, segments), q, k, v)
        return out, *pull(g)

    return jit(both)(*args)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_every_move_equals_dense_attention_in_value_and_gradient(case, x64, monkeypatch):
    move, order, data, context, tensor, groups, length, has_documents, visible = case
    monkeypatch.setattr(kernels, "QUERIES", 6)
    monkeypatch.setattr(pieces, "QUERIES", 5)  # so that a piece's queries come in parts, the last filled up
    rows = max(B, data)
    q, k, v, g = drawn(length, groups, rows)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    segments = documents(rows, length) if has_documents else None
    want = with_gradients(functools.partial(dense, visible=visible), q, k, v, g, positions, segments)
    order = Order(order)

    def split(x):
        return None if x is None else order.split(x, context)

    with use_mesh(make_mesh(MeshSpec(data=data, context=context, tensor=tensor))):
        got = with_gradients(
            functools.partial(context_attention, visible=visible, move=move),
            *map(split, (q, k, v, g, positions, segments)),
        )
    for ours, theirs in zip(got, want, strict=True):
        assert_close(order.join(ours, context), theirs, 1e-12)


def test_key_heads_that_are_not_split_serve_queries_that_are(x64):
    length, context = 16, 4
    q, k, v, g = drawn(length, 1)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (B, length))
    want = with_gradients(functools.partial(dense, visible=Visible()), q, k, v, g, positions, None)
    with use_mesh(make_mesh(MeshSpec(context=context, tensor=2)), RULES | {"kv_heads": ()}):
        got = with_gradients(context_attention, q, k, v, g, positions, None)
    for ours, theirs in zip(got, want, strict=True):
        assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("move", MOVES)
def test_padding_gives_nothing_and_takes_nothing(move, x64):
    length, context = 16, 2
    q, k, v, g = drawn(length, H)
    positions = jnp.where(jnp.arange(length) < 13, jnp.arange(length), -1)[None].repeat(B, 0).astype(jnp.int32)
    want = with_gradients(
        functools.partial(dense, visible=Visible()), *(x[:, :13] for x in (q, k, v, g, positions)), None
    )
    order = Order("zigzag")
    with use_mesh(make_mesh(MeshSpec(context=context, data=4))):
        got = with_gradients(
            functools.partial(context_attention, move=move),
            *(order.split(jnp.concatenate([x, x]), context) for x in (q, k, v, g, positions)),
            None,
        )
    for ours, theirs in zip(got, want, strict=True):
        ours = order.join(ours, context)[:B]
        assert_close(ours[:, :13], theirs, 1e-12)
        np.testing.assert_array_equal(ours[:, 13:], 0)


def compiled(move, backward, length=48, groups=2, context=8, width=K, devices=None, jit=jit):
    """The program's text and mesh; inputs are split as they come."""
    mesh = make_mesh(MeshSpec(context=context, data=8 // context), devices)
    shapes = [jax.ShapeDtypeStruct((B, length, n, width), np.float32) for n in (H, groups, groups, H)]
    places = jax.ShapeDtypeStruct((B, length), np.int32)

    def value(q, k, v, positions):
        return context_attention(q, k, v, positions, move=move)

    def gradients(q, k, v, g, positions):
        out, pull = jax.vjp(lambda *args: value(*args, positions), q, k, v)
        return out, pull(g)

    with use_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "context"))

        def put(shape):
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        args = [*map(put, shapes), put(places)] if backward else [*map(put, shapes[:3]), put(places)]
        text = jit(gradients if backward else value).lower(*args).compile().as_text()
    return text, mesh


@pytest.mark.parametrize("move", MOVES)
def test_a_program_sends_what_the_table_says(move):
    context, groups = (4, 4) if move == "swap" else (8, 2)
    sizes = Sizes(B * context // 8, 48 // context, H, groups, K, 4)
    table, found = move_for(move, context), {}
    for backward in (False, True):
        text, mesh = compiled(move, backward, groups=groups, context=context)
        found[backward] = hlo.collectives(text, mesh)
        assert {each.axes for each in found[backward]} == {("context",)}
    kinds = {"gather": {"all-gather"}, "swap": {"all-to-all", "all-gather"}}.get(move, {"collective-permute"})
    assert {each.kind for each in found[False]} == kinds
    summed = {"reduce-scatter", "all-reduce"} if move == "gather" else set()  # CPUs have no reduce-scatter
    assert {each.kind for each in found[True]} <= kinds | summed
    if kinds == {"collective-permute"}:
        pairs = re.findall(r"source_target_pairs=\{\{(\d+),(\d+)\}", text)  # of the backward pass; device i at place i
        assert {(int(to) - int(by)) % 8 for by, to in pairs} == {send.shift % 8 for send in table.sends(True)}

    def sent(backward):
        share = {"collective-permute": 1}  # of what a collective returns on each device, 1/N was there before
        return sum(
            each.trips * share.get(each.kind, 1 - 1 / context) * sum(4 * math.prod(shape) for shape in each.shapes)
            for each in found[backward]
            if each.kind not in summed
        )

    def said(backward):  # numbers of documents, which there are none of here, are counted in the table
        each = [(send.what, 1 if send.shift else context - 1) for send in table.sends(backward)]
        hops = {"keys": 1, "queries": 1, "places": 1, "low": 1 / 2, "high": 1 / 2}
        none = sum(hops.get(what, 0) * times for what, times in each) * sizes.rows * sizes.tokens * 4
        total = sum(table.bytes(sizes, backward).values()) - none
        scattered = (context - 1) * sizes.rows * sizes.tokens * 2 * groups * K * 4
        return total - (scattered if backward and summed else 0)

    assert math.isclose(sent(False), said(False))
    assert math.isclose(sent(True), said(False) + said(True))


@pytest.mark.parametrize("move", ["ring", "two_way", "token_ring", "gather"])
def test_no_buffer_has_the_whole_sequence_but_what_is_gathered(move):
    length = 8 * 26  # a size that nothing else has
    text, _ = compiled(move, True, length)
    whole = set(re.findall(rf"\w+\[(?:\d+,)*{length}(?:,\d+)*\]", text)) | set(
        re.findall(rf"\w+\[8,{B},{length // 8}(?:,\d+)*\]", text)
    )
    shapes = {tuple(int(n) for n in re.search(r"\[(.*)\]", name).group(1).split(",")) for name in whole}
    if move == "gather":  # a piece a device: keys, values, their gradients and places
        assert shapes <= {(8, B, length // 8, 2, K), (8, B, length // 8)} and shapes
    else:
        assert not shapes


def test_orders_are_permutations_and_zigzag_is_even():
    for name in ORDERS:
        places = Order(name).places(48, 4)
        assert sorted(places) == list(range(48))
    pairs = Order("zigzag").places(48, 4).reshape(4, -1).sum(1)  # a query at place p has p earlier keys
    assert len(set(pairs.tolist())) == 1
    assert Order("striped").places(8, 4).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    x = jnp.arange(48).reshape(1, 48, 1)
    np.testing.assert_array_equal(Order("zigzag").join(Order("zigzag").split(x, 4), 4), x)


def test_tables_say_what_travels():
    sizes = Sizes(1, 64, 32, 8, 128, 2)
    ring, two, token = (move_for(name, 8) for name in ("ring", "two_way", "token_ring"))
    assert ring.bytes(sizes)["down"] == 0
    assert two.bytes(sizes)["up"] == two.bytes(sizes)["down"] == ring.bytes(sizes)["up"] / 2
    assert ring.bytes(sizes)["up"] == 7 * 64 * (2 * 8 * 128 * 2 + 8)
    assert ring.bytes(sizes._replace(groups=32))["up"] > 3.9 * ring.bytes(sizes)["up"]  # keys travel in their own heads
    assert sum(token.bytes(sizes).values()) > sum(ring.bytes(sizes).values())  # few key heads: the ring is cheaper
    assert [step.returns[0].shift for step in token.forward[1:]] == [-1, -2, -3, -4, -5, -6, -7]
    assert str(ring).splitlines()[1:3] == ["  forward 0: attend", "  forward 1: keys +1, attend"]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Order("zigzag").places(20, 4), "a zigzag order of 20 tokens over context=4 needs a multiple of 8"),
        (lambda: Order("zigzag").places(5, 4), "the smallest is 8"),
        (lambda: Order("spiral"), "zigzag"),
        (lambda: move_for("tree", 4), "context='tree' is unknown; legal are gather, ring"),
    ],
)
def test_what_does_not_fit_is_told(call, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        call()


def test_swap_needs_as_many_key_heads_as_devices():
    q, k, v, _ = drawn(16, 2, dtype=np.float32)
    positions = jnp.zeros((B, 16), jnp.int32)
    with use_mesh(make_mesh(MeshSpec(context=4, data=2))), pytest.raises(UsageError, match="2 key heads of a device"):
        context_attention(q, k, v, positions, move="swap")


def test_a_sequence_has_one_mesh_axis():
    q, k, v, _ = drawn(16, 2, dtype=np.float32)
    mesh, rules = make_mesh(MeshSpec(context=4, tensor=2)), RULES | {"seq_layer": ("context", "tensor")}
    with use_mesh(mesh, rules), pytest.raises(UsageError, match="split over context and tensor"):
        context_attention(q, k, v, jnp.zeros((B, 16), jnp.int32))


def for_a_tpu():
    from jaxpar.aot import devices, parse_topology

    slice_of_eight, found = devices(parse_topology("v5e:2x4")), {}
    for move in MOVES:
        sizes = {"groups": 4, "context": 4} if move == "swap" else {}
        text, mesh = compiled(move, True, 2048, width=128, devices=slice_of_eight, jit=jax.jit, **sizes)
        found[move] = sorted({each.kind for each in hlo.collectives(text, mesh)})
    return found


@needs_libtpu
def test_a_tpu_sends_what_the_table_says():
    assert on_a_tpu(__file__) == {
        "gather": ["all-gather", "reduce-scatter"],
        "ring": ["collective-permute"],
        "two_way": ["collective-permute"],
        "token_ring": ["collective-permute"],
        "swap": ["all-gather", "all-to-all"],
    }


if __name__ == "__main__":
    print(json.dumps(for_a_tpu()))
