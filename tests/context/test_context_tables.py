"""Orders and tables of a split sequence, and what is said of arrays that do not fit them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_arrays import B, H, K, drawn, in_turn
from fast import jit

from jaxpar.mesh import RULES, MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import Visible
from jaxpar.nn.attention.context import Order, Sizes, context_attention, move_for
from jaxpar.nn.attention.context.token_orders import ORDERS
from jaxpar.types import UsageError


def test_orders_are_permutations_and_zigzag_is_even():
    for name in ORDERS:
        places = Order(name).places(48, 4)
        assert sorted(places) == list(range(48))
    pairs = (
        Order("zigzag").places(48, 4).reshape(4, -1).sum(1)
    )  # a query at place p has p earlier keys
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
    assert (
        ring.bytes(sizes._replace(groups=32))["up"] > 3.9 * ring.bytes(sizes)["up"]
    )  # keys travel in their own heads
    assert sum(token.bytes(sizes).values()) > sum(
        ring.bytes(sizes).values()
    )  # few key heads: the ring is cheaper
    assert [step.returns[0].shift for step in token.forward[1:]] == [-1, -2, -3, -4, -5, -6, -7]
    # Of as many key heads as heads it loads either direction alike, over both passes, and half as much as the ring.
    up, down = (
        sum(token.bytes(sizes._replace(groups=32), back)[way] for back in (False, True))
        for way in ("up", "down")
    )
    around = sum(ring.bytes(sizes._replace(groups=32), back)["up"] for back in (False, True))
    assert max(up, down) <= 0.55 * around and abs(up - down) <= 0.05 * up
    mixed = move_for("swap_ring", 8, 4)
    assert mixed.bytes(sizes)["up"] == 64 * (
        2 * 8 * 128 * 2 + 8 * 4
    )  # one hop of four devices' tokens, in G / 4 heads
    assert mixed.bytes(sizes)["all"] == 64 * ((2 * 32 + 2 * 8) * 128 * 2 * 3 / 4 + 3 * 8)
    assert "keys +4, attend" in str(mixed)
    assert str(ring).splitlines()[1:3] == ["  forward 0: attend", "  forward 1: keys +1, attend"]


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: Order("zigzag").places(20, 4),
            "a zigzag order of 20 tokens over context=4 needs a multiple of 8",
        ),
        (lambda: Order("zigzag").places(5, 4), "the smallest is 8"),
        (lambda: Order("spiral"), "zigzag"),
        (lambda: move_for("tree", 4), "context='tree' is unknown; legal are gather, ring"),
        (lambda: move_for("swap_ring", 8, 3), "context=swap_ring over 8 has no groups of 3"),
        (lambda: move_for("ring", 8, 2), "context=ring over 8 has no groups of 2; swap_ring has"),
        (lambda: Order("striped").pairs(4, 0, 1), "take zigzag or contiguous"),
    ],
)
def test_what_does_not_fit_is_told(call, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        call()


def test_swap_needs_as_many_key_heads_as_devices():
    q, k, v, _ = drawn(16, 2, dtype=np.float32)
    positions = jnp.zeros((B, 16), jnp.int32)
    with (
        use_mesh(make_mesh(MeshSpec(context=4, data=2))),
        pytest.raises(UsageError, match="take context=swap_ring"),
    ):
        context_attention(q, k, v, positions, move="swap")


def test_a_promised_order_must_divide():
    q, k, v, _ = drawn(12, 2, dtype=np.float32)
    positions = jnp.zeros((B, 12), jnp.int32)
    with (
        use_mesh(make_mesh(MeshSpec(context=4, data=2))),
        pytest.raises(UsageError, match="a multiple of 8"),
    ):
        context_attention(q, k, v, positions, order="zigzag")
    with pytest.raises(UsageError, match="zigzag"):
        context_attention(q, k, v, positions, order="spiral")


def promised(positions, order, **options):
    """Shapes of the outputs, traced for four devices by positions that are known."""
    q, k, v, _ = drawn(16, 2, dtype=np.float32)
    run = functools.partial(context_attention, positions=positions, order=order, **options)
    with use_mesh(make_mesh(MeshSpec(context=4, data=2))):
        return jax.eval_shape(run, q, k, v).shape


@pytest.mark.parametrize("put", [np.asarray, jnp.asarray])
def test_known_positions_that_break_a_promise_are_told(put):
    turn = in_turn(B, 16)
    zigzag = np.array(Order("zigzag").split(turn, 4))
    for positions, order, words in [
        (
            turn,
            "zigzag",
            "order=zigzag of 16 tokens over context=4 has 14 where row 0 has position 2, at index 2; put",
        ),
        (
            zigzag,
            "contiguous",
            "order=contiguous of 16 tokens over context=4 has 2 where row 0 has position 14",
        ),
        (
            np.where(turn + 8 * np.arange(B)[:, None] == 18, -1, turn),
            "contiguous",
            "has 10 where row 1 has position -1",
        ),
    ]:
        with pytest.raises(UsageError, match=words):
            promised(put(positions), order)
    padded = np.where(turn == 15, -1, turn)
    with pytest.raises(UsageError, match="has no padding where row 0 has position -1, at index 15"):
        promised(put(padded), "striped", visible=Visible(causal=False))
    shape = B, 16, H, K
    assert promised(put(zigzag), "zigzag") == shape
    assert (
        promised(put(turn[:, ::-1]), "striped", visible=Visible(causal=False)) == shape
    )  # nobody is before another
    # Where positions decide, nothing depends on the promise.
    assert promised(put(padded), "zigzag", visible=Visible(window=5)) == shape
    segments = jnp.asarray(turn // 8)
    assert (
        promised(put(turn % 8), "zigzag", segments=segments, visible=Visible(causal=False)) == shape
    )
    # Under a causal rule the order decides within documents too: places are those in the row.
    assert promised(put(zigzag), "zigzag", segments=segments) == shape
    with pytest.raises(UsageError, match="has 14 where row 0 has position 2, at index 2"):
        promised(put(turn % 8), "zigzag", segments=segments)


def test_padding_among_tokens_that_see_all_makes_outputs_nan():
    q, k, v, _ = drawn(16, 2, dtype=np.float32)
    run = jit(functools.partial(context_attention, order="striped", visible=Visible(causal=False)))
    with use_mesh(make_mesh(MeshSpec(context=2), jax.devices()[:2])):
        for turn in (in_turn(B, 16)[:, ::-1], in_turn(B, 16) - (np.arange(B) == 1)[:, None]):
            assert (np.isnan(run(q, k, v, turn)).all((1, 2, 3)) == (turn.min(1) < 0)).all()


def test_a_sequence_has_one_mesh_axis():
    q, k, v, _ = drawn(16, 2, dtype=np.float32)
    mesh, rules = (
        make_mesh(MeshSpec(context=4, tensor=2)),
        RULES | {"seq_layer": ("context", "tensor")},
    )
    with use_mesh(mesh, rules), pytest.raises(UsageError, match="split over context and tensor"):
        context_attention(q, k, v, jnp.zeros((B, 16), jnp.int32))
