"""Attention over a split sequence equals dense attention, and sends what its table says."""

import functools
import itertools
import math
import re

import cudnn_by_xla
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_arrays import B, H, K, dense_with_gradients, documents, drawn, in_turn
from context_programs import bytes_said, bytes_sent, compiled, sent_by_shift
from fast import jit
from tolerance import assert_close
from two_rings import by_two_rings

from jaxpar.aot import count_flops, hlo
from jaxpar.mesh import RULES, MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import Visible, kernels, pairs
from jaxpar.nn.attention import gradient as pieces
from jaxpar.nn.attention.context import MOVES, Order, Sizes, context_attention, move_for
from jaxpar.nn.attention.context.token_orders import ORDERS

LONG = 8 * 26  # a size that nothing else has
MOST_ROWS = 4
CAUSAL = Visible()
# Every move, order and factorisation of 8 devices at least once, each with documents or without,
# some with fewer key heads: pairwise covering.
# (move, order, data, context, tensor, key heads, T, documents, rule)
CASES = [
    ("gather", "zigzag", 2, 2, 2, 4, 24, True, Visible()),
    ("ring", "striped", 1, 8, 1, 4, 32, True, Visible()),
    ("ring", "contiguous", 4, 2, 1, 1, 24, True, Visible(window=7)),
    ("two_way", "striped", 2, 4, 1, 4, 24, False, Visible(causal=False)),
    ("token_ring", "contiguous", 1, 2, 4, 4, 32, False, Visible()),
    ("swap", "zigzag", 2, 4, 1, 4, 24, False, Visible(window=5)),
    ("swap_ring", "zigzag", 1, 8, 1, 4, 48, True, Visible()),
    ("ring", "zigzag", 2, 1, 4, 4, 24, True, Visible()),  # nothing is split, whatever the move
]
# The same where the order is promised: pairs by a table, with parts of odd sizes, and by positions.
PROMISED = [
    ("gather", "zigzag", 1, 4, 2, 4, 40, True, Visible()),
    ("ring", "contiguous", 2, 4, 1, 1, 20, False, Visible()),
    ("ring", "striped", 2, 4, 1, 2, 24, False, Visible(causal=False)),
    ("two_way", "zigzag", 2, 4, 1, 2, 40, True, Visible()),
    # Parts of one token, with an empty first half.
    ("two_way", "zigzag", 2, 4, 1, 2, 8, True, Visible()),
    ("token_ring", "contiguous", 1, 8, 1, 2, 40, True, Visible()),
    ("swap", "zigzag", 2, 4, 1, 4, 40, True, Visible()),
    ("swap_ring", "zigzag", 1, 4, 2, 4, 24, False, Visible()),
    ("ring", "zigzag", 2, 2, 2, 2, 24, True, Visible()),
]
MORE = [
    ("gather", "contiguous", 1, 8, 1, 2, 32, False, Visible()),
    ("ring", "zigzag", 1, 4, 2, 2, 40, False, Visible()),
    ("two_way", "zigzag", 1, 8, 1, 2, 48, True, Visible()),
    ("token_ring", "contiguous", 2, 4, 1, 2, 32, True, Visible()),
    ("token_ring", "zigzag", 1, 8, 1, 4, 48, False, Visible()),
    ("swap", "contiguous", 2, 2, 2, 4, 24, True, Visible()),
    ("swap_ring", "striped", 2, 4, 1, 2, 24, False, Visible(window=7)),
]
MORE_PROMISED = [
    ("gather", "contiguous", 2, 2, 2, 2, 20, False, Visible()),
    ("ring", "zigzag", 1, 8, 1, 2, 48, False, Visible()),
    ("two_way", "contiguous", 1, 8, 1, 4, 56, False, Visible()),
    ("token_ring", "zigzag", 2, 4, 1, 4, 24, False, Visible()),
    ("swap_ring", "zigzag", 1, 8, 1, 2, 48, False, Visible()),
    ("swap_ring", "contiguous", 1, 8, 1, 4, 40, False, Visible()),
    ("swap_ring", "zigzag", 2, 4, 1, 2, 24, False, Visible(window=5)),
    ("two_way", "striped", 4, 2, 1, 4, 12, False, Visible()),
    ("swap_ring", "zigzag", 2, 4, 1, 2, 24, True, Visible()),
    ("swap", "contiguous", 2, 2, 2, 4, 24, True, Visible()),
    ("ring", "contiguous", 1, 8, 1, 2, 48, True, Visible()),
]


def dense_rows(q, k, v, g, positions, segments=None, visible=CAUSAL):
    """Returns value and gradients of dense attention, by one program for rows of LONG tokens.

    Rows are filled up with tokens that see themselves alone. A head of the keys has a copy for each
    head of the queries that reads it, and the sum of the gradients of all copies.
    """
    rows, length, groups = k.shape[:3]
    again = q.shape[2] // groups
    seen = np.tile(np.eye(LONG, dtype=bool), (MOST_ROWS, 1, 1))
    seen[:rows, :length, :length] = visible(positions, positions)
    if segments is not None:
        seen[:rows, :length, :length] &= np.asarray(segments[:, :, None] == segments[:, None, :])

    def filled(x, again=1):
        missing = (0, MOST_ROWS - rows), (0, LONG - length), (0, 0), (0, 0)
        return np.pad(np.repeat(np.asarray(x), again, 2), missing)

    whole = dense_with_gradients(filled(q), filled(k, again), filled(v, again), filled(g), seen)
    out, dq, *more = (np.asarray(x)[:rows, :length] for x in whole)
    return out, dq, *(x.reshape(rows, length, groups, again, -1).sum(3) for x in more)


def with_gradients(f, *args):
    def value_and_gradients(q, k, v, g, positions, segments):
        out, pull = jax.vjp(lambda q, k, v: f(q, k, v, positions, segments), q, k, v)
        return out, *pull(g)

    return jit(value_and_gradients)(*args)


def test_cases_cover_moves_orders_and_factorisations():
    """Each once at least in CI; a sequence that is whole has one program, whatever else is split."""
    factors = {
        (8 // n // tensor, n, tensor) for n in (2, 4, 8) for tensor in (1, 2, 4) if n * tensor <= 8
    }
    for cases in (CASES, PROMISED):
        assert {case[0] for case in cases} == set(MOVES)
        assert {case[1] for case in cases} == set(ORDERS)
    assert {case[2:5] for case in CASES + PROMISED} >= factors and len(factors) == 6


PAIRS = (0, 1), (2, 3), (4, 5), (6, 7)
ALL_CASES = [(case, False) for case in CASES] + [(case, True) for case in PROMISED]
SLOW_CASES = [(case, False) for case in MORE]
SLOW_CASES += [(case, True) for case in MORE_PROMISED]
# 3 seconds of a processor each.
ALL_CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


def name_of(value):
    """Returns the name of a case, or of the flag behind it."""
    if isinstance(value, tuple):
        return "-".join(map(str, value[:6]))
    return {True: "promised", False: "by positions"}[value]


@pytest.mark.parametrize(("case", "promised"), ALL_CASES, ids=name_of)
def test_every_move_equals_dense_attention_in_value_and_gradient(case, promised, x64, monkeypatch):
    """Rows of one document end in padding, which adds nothing, where no order is promised."""
    move, order, data, context, tensor, groups, length, has_documents, visible = case
    options = {"visible": visible, "move": move}
    if promised:
        options["order"] = order
    # So few that a piece's queries come in parts, the last filled up.
    monkeypatch.setattr(kernels, "QUERIES", 6)
    monkeypatch.setattr(pieces, "QUERIES", 5)
    rows = max(B, data)
    segments = None
    used = length
    if has_documents:
        segments = documents(rows, length)
    elif not promised:
        used = length - 3
    args = [*drawn(length, groups, rows), in_turn(rows, length), segments]
    args = jax.tree.map(np.array, args)
    want = dense_rows(*jax.tree.map(lambda x: x[:, :used], args), visible)
    args[4][:, used:] = -1
    index = Order(order).places(length, context)

    # Split on the host, where nothing is compiled for it.
    split = jax.tree.map(lambda x: np.take(x, index, 1), args)
    with use_mesh(make_mesh(MeshSpec(data=data, context=context, tensor=tensor))):
        got = with_gradients(functools.partial(context_attention, **options), *split)
    for ours, theirs in zip(got, want, strict=True):
        ours = np.take(np.asarray(ours), np.argsort(index), 1)
        assert_close(ours[:, :used], theirs, 1e-12)
        np.testing.assert_array_equal(ours[:, used:], 0)


def pairs_of_rows():
    """Returns numbers of documents [2, 48] three times, for parts of 6 tokens.

    Documents go over borders of parts and end within them. In the last row a number comes again, so
    that no pair of parts is left out.
    """
    lengths = [5, 20, 2, 2, 19], [6, 1, 5, 24, 12], [6] * 8, [48], [1] * 6 + [42]
    rows = [np.repeat(np.arange(len(row)), row) for row in lengths]
    rows.append(np.repeat([1, 2, 1], 16))
    return [jnp.asarray(np.stack(rows[first : first + 2]), jnp.int32) for first in (0, 2, 4)]


@pytest.mark.parametrize("has_documents", [False, True])
def test_kernels_are_taken_for_the_pairs_of_a_table(has_documents, monkeypatch):
    calls = cudnn_by_xla.install(monkeypatch)
    monkeypatch.setattr(pairs, "platform", lambda: "gpu")
    monkeypatch.setattr(pairs, "_is_right", lambda name: True)
    monkeypatch.setattr(pairs, "packing_is_right", lambda: True)
    monkeypatch.setattr(pairs._documents, "is_right", lambda: True)
    length = 48
    context = 4
    draw = np.random.default_rng(0).standard_normal
    arrays = [jnp.asarray(draw((2, length, n, 8)), jnp.bfloat16) for n in (H, 2, 2, H)]
    positions = jnp.asarray(in_turn(2, length))
    order = Order("zigzag")

    @jit
    def run(q, k, v, g, positions, segments):
        attend = functools.partial(context_attention, order="zigzag")
        out, pull = jax.vjp(lambda *x: attend(*x, positions, segments), q, k, v)
        return out, *pull(g)

    kinds = ("CAUSAL", "NO_MASK")
    all_segments = [None]
    if has_documents:
        kinds = ("PADDING_CAUSAL", "PADDING")
        all_segments = pairs_of_rows()
    for segments in all_segments:
        want = dense_rows(*(x.astype(jnp.float32) for x in arrays), positions, segments)
        whole = *arrays, positions, segments
        with use_mesh(make_mesh(MeshSpec(context=context, data=2))):
            got = run(*jax.tree.map(lambda x: order.split(x, context), whole))
        for ours, theirs in zip(got, want, strict=True):
            # Operands and partial outputs in bfloat16, 2^-8 a number, averaged over the sums.
            assert_close(order.join(ours, context).astype(jnp.float32), theirs, 1e-2)
    # Keys of the device give causal and full pairs, other keys full ones, in both passes.
    made = {(call["mask_type"].name, "is_training" in call) for call in calls}
    assert made == set(itertools.product(kinds, (True, False)))


def test_key_heads_that_are_not_split_serve_queries_that_are(x64):
    length = 16
    q, k, v, g = drawn(length, 1)
    positions = in_turn(B, length)
    with use_mesh(make_mesh(MeshSpec(context=4, tensor=2)), RULES | {"kv_heads": ()}):
        got = with_gradients(context_attention, q, k, v, g, positions, None)
    for ours, theirs in zip(got, dense_rows(q, k, v, g, positions), strict=True):
        assert_close(ours, theirs, 1e-12)


def devices_and_key_heads(move):
    """Returns how many of eight devices a move splits the sequence over, and the key heads."""
    if move == "swap":
        return 4, 4
    return 8, 2


@functools.cache
def of_eight(move, order, backward):
    """Returns the program for eight devices, of a number of tokens that nothing else has."""
    context, groups = devices_and_key_heads(move)
    program, mesh = compiled(move, backward, LONG, groups=groups, context=context, order=order)
    return program, program.as_text(), mesh


@pytest.mark.parametrize("move", MOVES)
def test_sums_in_float32_differ_by_rounding_and_a_broken_promise_by_nan(move):
    program, _, _ = of_eight(move, "zigzag", True)
    context, groups = devices_and_key_heads(move)
    order = Order("zigzag")
    q, k, v, g = drawn(LONG, groups, dtype=np.float32)
    args = q, k, v, g, in_turn(B, LONG)

    def run(positions):
        given = *(order.split(jnp.asarray(x), context) for x in args[:4]), positions
        out, grads = program(*map(jax.device_put, given, program.input_shardings[0]))
        return out, *grads

    positions = np.asarray(order.split(args[4], context))
    for ours, theirs in zip(run(positions), dense_rows(*args), strict=True):
        assert_close(order.join(ours, context), theirs, 1e-5)
    # What sees the broken promise is NaN: all but the first part, and one token that no other sees.
    out, dq, dk, _ = run(args[4])
    assert np.isnan(out[:, LONG // (2 * context) :]).all()
    assert np.isnan(dq).any()
    assert np.isnan(dk).any()
    last = positions.argmax(1)[0]
    positions = positions + LONG * (np.arange(LONG) == last) * (np.arange(B) == 1)[:, None]
    found = np.isnan(run(positions.astype(np.int32))[0]).any((2, 3))
    assert found[1, last] and not found[0].any()


def test_one_ring_of_partial_sums_is_two_rings_of_whole_rows():
    program, _, _ = of_eight("ring", "zigzag", True)
    order = Order("zigzag")
    args = drawn(LONG, 2, dtype=np.float32)
    given = *(order.split(x, 8) for x in args), order.split(jnp.asarray(in_turn(B, LONG)), 8)
    out, grads = program(*map(jax.device_put, given, program.input_shardings[0]))
    for ours, theirs in zip((out, *grads), by_two_rings(*args, 8), strict=True):
        assert_close(order.join(ours, 8), theirs, 1e-5)


def kinds_sent(move, order):
    """Returns the kinds of a move's collectives; without an order positions are gathered."""
    exchanges = {"all-to-all"}
    if order is None:
        exchanges.add("all-gather")
    kinds = {
        "gather": {"all-gather"},
        "swap": exchanges,
        "swap_ring": exchanges | {"collective-permute"},
    }
    return kinds.get(move, {"collective-permute"})


def kinds_summed(move):
    """Returns the kinds that sum gradients of gathered keys; CPUs have no reduce-scatter."""
    if move == "gather":
        return {"reduce-scatter", "all-reduce"}
    return set()


def sent_by(move, order, backward):
    """Returns a program's text, and its collectives but the sums of gradients."""
    _, text, mesh = of_eight(move, order, backward)
    found = hlo.collectives(text, mesh)
    axes = {("context",)}
    if move == "swap_ring":
        axes.add(None)  # a group is a part of the axis
    assert {each.axes for each in found} == axes
    found = [each for each in found if each.kind not in kinds_summed(move)]
    assert {each.kind for each in found} == kinds_sent(move, order)
    return text, found


def check_partners(move, table, text):
    """Checks which devices send to which in a backward pass's text; device i is at index i."""
    if "collective-permute" in kinds_sent(move, "zigzag"):
        sent = re.findall(r"source_target_pairs=\{\{(\d+),(\d+)\}", text)
        shifts = {send.shift % 8 for send in table.sends(True) if send.shift}
        assert {(int(to) - int(by)) % 8 for by, to in sent} == shifts
    if move == "swap_ring":
        groups = re.findall(r" all-to-all\(.*replica_groups=([^ ]*?), ", text)
        assert {tuple(hlo.replica_groups(each, 8)) for each in groups} == {PAIRS}


def check_shifts(move, order, by_shift, declared):
    """Checks the bytes that go to a device some indices on, by both passes of the table."""
    halves = {}
    if order is not None and move == "two_way":  # parts of 13 tokens
        halves = {1: 12 / 13, 7: 14 / 13}
    assert any(by_shift) == ("collective-permute" in kinds_sent(move, order))
    for shift in by_shift.keys() - {None}:
        size = declared(False, shift) + declared(True, shift)
        assert math.isclose(by_shift[shift], size * halves.get(shift, 1)), shift


BY_HALVES = [(None, "two_way"), (None, "swap")]  # by positions they send what ring and swap_ring do


@pytest.mark.parametrize(
    ("order", "move"),
    [case for case in itertools.product((None, "zigzag"), MOVES) if case not in BY_HALVES]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in BY_HALVES],  # 3 s each
)
def test_a_program_sends_what_the_table_says(move, order):
    """Rings by positions forward alone, too; steps of all other moves show both passes."""
    context, groups = devices_and_key_heads(move)
    sizes = Sizes(B * context // 8, LONG // context, H, groups, K, 4)
    within = 1
    if move == "swap_ring":
        within = groups
    table = move_for(move, context, within)

    def declared(backward, shift=all):
        total = bytes_said(table, sizes, backward, order, shift)
        if backward and move == "gather" and shift is all:  # sums of gradients, left out above
            total -= (context - 1) * sizes.rows * sizes.tokens * 2 * groups * K * 4
        return total

    if order is None and move in ("ring", "token_ring"):
        _, forward = sent_by(move, order, False)
        assert math.isclose(bytes_sent(forward, table), declared(False))
    text, found = sent_by(move, order, True)
    check_partners(move, table, text)
    size = bytes_sent(found, table)
    if jax.__version_info__ < (0, 11):
        # An older compiler for CPUs keeps some of what travels twice.
        assert size <= declared(False) + declared(True)
        return
    assert math.isclose(size, declared(False) + declared(True))
    check_shifts(move, order, sent_by_shift(found, table, text), declared)


def shapes_of(text, length):
    """Returns shapes in a program with an axis of all tokens, or of devices and one of tokens."""
    names = re.findall(rf"\w+\[(?:\d+,)*{length}(?:,\d+)*\]", text)
    names += re.findall(rf"\w+\[8,{B},{length // 8}(?:,\d+)*\]", text)
    numbers = [re.search(r"\[(.*)\]", name).group(1) for name in set(names)]
    return {tuple(map(int, each.split(","))) for each in numbers}


@pytest.mark.parametrize(
    ("order", "move"),
    [(None, "ring"), (None, "token_ring"), (None, "gather"), (None, "swap_ring")]
    + [("zigzag", move) for move in MOVES]
    + [pytest.param(None, move, marks=pytest.mark.slow) for move in ("two_way", "swap")],  # 3 s
)
def test_no_buffer_has_the_whole_sequence_but_what_the_table_says(move, order):
    _, text, _ = of_eight(move, order, True)
    shapes = shapes_of(text, LONG)
    holds = move_for(move, 8).holds
    assert holds == {"gather": ("keys", "sums"), "swap": ("heads", "outputs")}.get(move, ())
    if holds == ("keys", "sums"):
        # A piece a device: keys, values, their gradients and positions.
        assert shapes and shapes <= {(8, B, LONG // 8, 2, K), (8, B, LONG // 8)}
    elif holds:
        # Of one of four heads and one of two rows; the dense form's scores are tokens by tokens.
        numbers = {math.prod(n for n in shape if n != LONG) for shape in shapes}
        assert max(numbers) == K < H * K
    else:
        assert not shapes


def test_half_of_the_pairs_are_computed_by_every_device_under_zigzag():
    for shares in (1, 2, 5, 8):
        order = Order("zigzag")
        index = order.places(2 * shares, shares).reshape(shares, 2)
        for device, other in itertools.product(range(shares), repeat=2):
            found = order.pairs(shares, device, other)
            assert len(found) == 2 + (device == other)
            every = itertools.product(range(2), repeat=2)
            seen = {(i, j) for i, j in every if index[device, i] >= index[other, j]}
            assert {pair[:2] for pair in found} == seen
            assert all(causal == (index[device, i] == index[other, j]) for i, j, causal in found)


@pytest.mark.parametrize("move", ["gather", "ring", "two_way", "token_ring"])
def test_a_table_halves_the_products_of_both_passes(move):
    q, k, v, g = drawn(32, 2, dtype=np.float32)

    def run(order, context):
        positions = Order("zigzag").split(in_turn(B, 32), context)

        def value(q, k, v):
            return context_attention(q, k, v, positions, move=move, order=order)

        with use_mesh(make_mesh(MeshSpec(context=context), jax.devices()[:context])):
            return count_flops(lambda *args: jax.vjp(value, *args)[1](g), q, k, v).total

    products = 14 * B * H * 32**2 * K  # 4 forward, 10 backward
    assert run(None, 4) == products
    for context in (2, 4):
        assert run("zigzag", context) == products * (2 + 1 / context) / 4


def test_the_compiled_program_has_half_the_products():
    def run(order):  # of two devices: no loop, whose body XLA would count once
        mesh = make_mesh(MeshSpec(context=2), jax.devices()[:2])
        shapes = [jax.ShapeDtypeStruct((1, 256, n, 64), np.float32) for n in (H, H, H)]
        with use_mesh(mesh):
            program = jit(functools.partial(context_attention, order=order)).lower(
                *shapes, jax.ShapeDtypeStruct((1, 256), np.int32)
            )
            return program.compile().cost_analysis()["flops"]

    assert 0.6 < run("zigzag") / run(None) < 0.66  # 5/8, and a little that is no product


@pytest.mark.parametrize("move", ["gather", "swap", "swap_ring"])
def test_positions_are_sent_when_keys_have_come(move):
    """Sent at the same time, they lock simulated devices up now and then."""
    _, text, _ = of_eight(move, None, True)
    made = dict(re.findall(r"^ *(?:ROOT )?(%?[\w.-]+) = (.*)$", text, re.MULTILINE))

    def waits(name, seen):
        """Returns whether an instruction depends on floats that were sent."""
        line = made.get(name, "")
        if re.match(r"\(?f32\[.*(all-gather|all-to-all)", line):
            return True
        operands = re.findall(r"%[\w.-]+", line.partition("(")[2])
        below = [each for each in operands if each not in seen]
        seen.update(below)
        return any(waits(each, seen) for each in below)

    sent = [name for name, line in made.items() if re.match(r"s32\[\S+ all-gather\(", line)]
    assert sent and all(waits(name, {name}) for name in sent)
