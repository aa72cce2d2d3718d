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
MOST_ROWS, LONGEST = 4, LONG
CAUSAL = Visible()
# Every move, order and factorisation of 8 devices at least once, each with documents or without, some with fewer key
# heads: pairwise covering. (move, order, data, context, tensor, key heads, T, documents, rule)
CASES = [
    ("gather", "zigzag", 2, 2, 2, 4, 24, True, Visible()),
    ("ring", "striped", 1, 8, 1, 4, 32, True, Visible()),
    ("ring", "contiguous", 4, 2, 1, 1, 24, True, Visible(window=7)),
    ("two_way", "striped", 2, 4, 1, 4, 24, False, Visible(causal=False)),
    ("token_ring", "contiguous", 1, 2, 4, 4, 32, False, Visible()),
    ("swap", "zigzag", 2, 4, 1, 4, 24, False, Visible(window=5)),
    ("swap_ring", "zigzag", 1, 8, 1, 4, 48, True, Visible()),
    ("ring", "zigzag", 2, 1, 4, 4, 24, True, Visible()),  # nothing is split, whatever is asked for
]
# The same where the order is promised: of what a table decides, with parts of odd sizes, and of what positions decide.
PROMISED = [
    ("gather", "zigzag", 1, 4, 2, 4, 40, True, Visible()),
    ("ring", "contiguous", 2, 4, 1, 1, 20, False, Visible()),
    ("ring", "striped", 2, 4, 1, 2, 24, False, Visible(causal=False)),
    ("two_way", "zigzag", 2, 4, 1, 2, 40, True, Visible()),
    (
        "two_way",
        "zigzag",
        2,
        4,
        1,
        2,
        8,
        True,
        Visible(),
    ),  # parts of one token, whose first half is empty
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


def wanted(q, k, v, g, positions, segments=None, visible=CAUSAL):
    """Value and gradients in rows of LONGEST tokens, for which there is one program: what fills up sees itself alone.

    A head of the keys has as many copies as queries' heads that read it, and the gradients of all
    of them.
    """
    (rows, length, groups), again = k.shape[:3], q.shape[2] // k.shape[2]
    seen = np.tile(np.eye(LONGEST, dtype=bool), (MOST_ROWS, 1, 1))
    seen[:rows, :length, :length] = visible(positions, positions)
    if segments is not None:
        seen[:rows, :length, :length] &= np.asarray(segments[:, :, None] == segments[:, None, :])

    def filled(x, again=1):
        missing = (0, MOST_ROWS - rows), (0, LONGEST - length), (0, 0), (0, 0)
        return np.pad(np.repeat(np.asarray(x), again, 2), missing)

    both = dense_with_gradients(filled(q), filled(k, again), filled(v, again), filled(g), seen)
    out, dq, *more = (np.asarray(x)[:rows, :length] for x in both)
    return out, dq, *(x.reshape(rows, length, groups, again, -1).sum(3) for x in more)


def with_gradients(f, *args):
    def both(q, k, v, g, positions, segments):
        out, pull = jax.vjp(lambda q, k, v: f(q, k, v, positions, segments), q, k, v)
        return out, *pull(g)

    return jit(both)(*args)


def test_cases_cover_moves_orders_and_factorisations():
    """Each once at least in CI; where nothing is split over the sequence there is one program, whatever else is."""
    factors = {
        (8 // n // tensor, n, tensor) for n in (2, 4, 8) for tensor in (1, 2, 4) if n * tensor <= 8
    }
    for cases in (CASES, PROMISED):
        assert {case[0] for case in cases} == set(MOVES) and {case[1] for case in cases} == set(
            ORDERS
        )
    assert {case[2:5] for case in CASES + PROMISED} >= factors and len(factors) == 6


PAIRS = (0, 1), (2, 3), (4, 5), (6, 7)
ALL_CASES = [(case, False) for case in CASES] + [(case, True) for case in PROMISED]
SLOW_CASES = [(case, False) for case in MORE] + [
    (case, True) for case in MORE_PROMISED
]  # 3 CPU s each
ALL_CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


@pytest.mark.parametrize(
    ("case", "promised"),
    ALL_CASES,
    ids=lambda x: (
        "-".join(map(str, x[:6]))
        if isinstance(x, tuple)
        else {True: "promised", False: "by places"}[x]
    ),
)
def test_every_move_equals_dense_attention_in_value_and_gradient(case, promised, x64, monkeypatch):
    """Rows without documents of which no order is promised end in padding, which gives nothing and takes nothing."""
    move, order, data, context, tensor, groups, length, has_documents, visible = case
    told = {"order": order} if promised else {}
    monkeypatch.setattr(kernels, "QUERIES", 6)
    monkeypatch.setattr(
        pieces, "QUERIES", 5
    )  # so that a piece's queries come in parts, the last filled up
    rows = max(B, data)
    args = (
        *drawn(length, groups, rows),
        in_turn(rows, length),
        documents(rows, length) if has_documents else None,
    )
    args = [x if x is None else np.array(x) for x in args]
    used = length if promised or has_documents else length - 3
    want = wanted(*(x if x is None else x[:, :used] for x in args), visible)
    args[4][:, used:] = -1
    places = Order(order).places(length, context)

    def split(x):  # on the host: nothing to compile
        return None if x is None else np.take(x, places, 1)

    with use_mesh(make_mesh(MeshSpec(data=data, context=context, tensor=tensor))):
        run = functools.partial(context_attention, visible=visible, move=move, **told)
        got = with_gradients(run, *map(split, args))
    for ours, theirs in zip(got, want, strict=True):
        ours = np.take(np.asarray(ours), np.argsort(places), 1)
        assert_close(ours[:, :used], theirs, 1e-12)
        np.testing.assert_array_equal(ours[:, used:], 0)


@pytest.mark.parametrize("has_documents", [False, True])
def test_kernels_are_taken_for_the_pairs_of_a_table(has_documents, monkeypatch):
    calls = cudnn_by_xla.install(monkeypatch)
    monkeypatch.setattr(pairs, "platform", lambda: "gpu")
    monkeypatch.setattr(pairs, "_is_right", lambda name: True)
    monkeypatch.setattr(pairs, "packing_is_right", lambda: True)
    monkeypatch.setattr(pairs._documents, "is_right", lambda: True)
    length, context, width = 48, 4, 8
    draw = np.random.default_rng(0).standard_normal
    q, k, v, g = (jnp.asarray(draw((2, length, n, width)), jnp.bfloat16) for n in (H, 2, 2, H))
    positions, order = jnp.asarray(in_turn(2, length)), Order("zigzag")

    @jit
    def run(q, k, v, g, positions, segments):
        attend = functools.partial(context_attention, order="zigzag")
        out, pull = jax.vjp(lambda *x: attend(*x, positions, segments), q, k, v)
        return out, *pull(g)

    # Over borders of parts, of 6 tokens; within them; in numbers that come again, of which none is left out.
    lengths = [5, 20, 2, 2, 19], [6, 1, 5, 24, 12], [6] * 8, [48], [1] * 6 + [42]
    rows = [np.repeat(np.arange(len(row)), row) for row in lengths] + [np.repeat([1, 2, 1], 16)]
    for both in (
        ((rows[0], rows[1]), (rows[2], rows[3]), (rows[4], rows[5])) if has_documents else (None,)
    ):
        segments = None if both is None else jnp.asarray(np.stack(both), jnp.int32)
        want = wanted(*(x.astype(jnp.float32) for x in (q, k, v, g)), positions, segments)
        with use_mesh(make_mesh(MeshSpec(context=context, data=2))):
            split = (
                x if x is None else order.split(x, context)
                for x in (q, k, v, g, positions, segments)
            )
            got = run(*split)
        for ours, theirs in zip(got, want, strict=True):
            # Operands and partial outputs in bfloat16, 2^-8 a number, averaged over the sums.
            assert_close(order.join(ours, context).astype(jnp.float32), theirs, 1e-2)
    # Of itself causal and full pairs, of any other device full ones, in both passes.
    asked = {(call["mask_type"].name, "is_training" in call) for call in calls}
    kinds = ("PADDING_CAUSAL", "PADDING") if has_documents else ("CAUSAL", "NO_MASK")
    assert asked == {(kind, is_forward) for kind in kinds for is_forward in (True, False)}


def test_key_heads_that_are_not_split_serve_queries_that_are(x64):
    length, context = 16, 4
    q, k, v, g = drawn(length, 1)
    positions = in_turn(B, length)
    with use_mesh(make_mesh(MeshSpec(context=context, tensor=2)), RULES | {"kv_heads": ()}):
        got = with_gradients(context_attention, q, k, v, g, positions, None)
    for ours, theirs in zip(got, wanted(q, k, v, g, positions), strict=True):
        assert_close(ours, theirs, 1e-12)


@functools.cache
def of_eight(move, order, backward):
    """The program for eight devices, of a number of tokens that nothing else has."""
    options = {"groups": 4, "context": 4} if move == "swap" else {}
    program, mesh = compiled(move, backward, LONG, order=order, **options)
    return program, program.as_text(), mesh


@pytest.mark.parametrize("move", MOVES)
def test_sums_in_float32_differ_by_rounding_and_a_broken_promise_by_nan(move):
    program, _, _ = of_eight(move, "zigzag", True)
    context, order = 4 if move == "swap" else 8, Order("zigzag")
    q, k, v, g = drawn(LONG, 4 if move == "swap" else 2, dtype=np.float32)
    args = q, k, v, g, in_turn(B, LONG)

    def run(positions):
        given = *(order.split(jnp.asarray(x), context) for x in args[:4]), positions
        out, grads = program(*map(jax.device_put, given, program.input_shardings[0]))
        return out, *grads

    places = np.asarray(order.split(args[4], context))
    for ours, theirs in zip(run(places), wanted(*args), strict=True):
        assert_close(order.join(ours, context), theirs, 1e-5)
    # Where the promise is broken, what sees it is NaN: all but the first part, and one token that nobody else sees.
    out, dq, dk, _ = run(args[4])
    assert (
        np.isnan(out[:, LONG // (2 * context) :]).all()
        and np.isnan(dq).any()
        and np.isnan(dk).any()
    )
    last = places.argmax(1)[0]
    places = places + LONG * (np.arange(LONG) == last) * (np.arange(B) == 1)[:, None]
    found = np.isnan(run(places.astype(np.int32))[0]).any((2, 3))
    assert found[1, last] and not found[0].any()


def test_one_ring_of_partial_sums_is_two_rings_of_whole_rows():
    program, _, _ = of_eight("ring", "zigzag", True)
    order, args = Order("zigzag"), drawn(LONG, 2, dtype=np.float32)
    given = *(order.split(x, 8) for x in args), order.split(jnp.asarray(in_turn(B, LONG)), 8)
    out, grads = program(*map(jax.device_put, given, program.input_shardings[0]))
    for ours, theirs in zip((out, *grads), by_two_rings(*args, 8), strict=True):
        assert_close(order.join(ours, 8), theirs, 1e-5)


BY_HALVES = [(None, "two_way"), (None, "swap")]  # which by places send what ring and swap_ring do


@pytest.mark.parametrize(
    ("order", "move"),
    [case for case in itertools.product((None, "zigzag"), MOVES) if case not in BY_HALVES]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in BY_HALVES],  # 3 s each
)
def test_a_program_sends_what_the_table_says(move, order):
    """Forward alone too where places are sent, of hops: training steps that are made again tell of all others."""
    alone = () if order or move not in ("ring", "token_ring") else (False,)
    context, groups = (4, 4) if move == "swap" else (8, 2)
    sizes = Sizes(B * context // 8, LONG // context, H, groups, K, 4)
    table, found = move_for(move, context, groups if move == "swap_ring" else 1), {}
    for backward in (*alone, True):
        _, text, mesh = of_eight(move, order, backward)
        found[backward] = hlo.collectives(text, mesh)
        axes = {("context",)} | (
            {None} if move == "swap_ring" else set()
        )  # a group is a part of the axis
        assert {each.axes for each in found[backward]} == axes
    exchanged = {"all-to-all"} if order else {"all-to-all", "all-gather"}  # a table needs no places
    kinds = {
        "gather": {"all-gather"},
        "swap": exchanged,
        "swap_ring": exchanged | {"collective-permute"},
    }
    kinds = kinds.get(move, {"collective-permute"})
    summed = (
        {"reduce-scatter", "all-reduce"} if move == "gather" else set()
    )  # CPUs have no reduce-scatter
    assert kinds <= {each.kind for each in found[True]} <= kinds | summed
    assert not alone or {each.kind for each in found[False]} == kinds
    if "collective-permute" in kinds:
        pairs = re.findall(
            r"source_target_pairs=\{\{(\d+),(\d+)\}", text
        )  # of the backward pass; device i at place i
        shifts = {send.shift % 8 for send in table.sends(True) if send.shift}
        assert {(int(to) - int(by)) % 8 for by, to in pairs} == shifts
    if move == "swap_ring":
        groups_of = re.findall(r" all-to-all\(.*replica_groups=([^ ]*?), ", text)
        assert groups_of and {tuple(hlo.replica_groups(each, 8)) for each in groups_of} == {PAIRS}

    def sent(backward):
        return bytes_sent([each for each in found[backward] if each.kind not in summed], table)

    def said(backward):
        scattered = (context - 1) * sizes.rows * sizes.tokens * 2 * groups * K * 4
        return bytes_said(table, sizes, backward, order) - (scattered if backward and summed else 0)

    assert not alone or math.isclose(sent(False), said(False))
    if jax.__version_info__ >= (0, 11):
        assert math.isclose(sent(True), said(False) + said(True))
        by_shift = sent_by_shift(
            [each for each in found[True] if each.kind not in summed], table, text
        )
        assert any(by_shift) == ("collective-permute" in kinds)
        halves = (
            {1: 12 / 13, 7: 14 / 13} if order and move == "two_way" else {}
        )  # of parts of 13 tokens
        for shift in by_shift.keys() - {None}:
            both = sum(
                bytes_said(table, sizes, backward, order, shift) for backward in (False, True)
            )
            assert math.isclose(by_shift[shift], both * halves.get(shift, 1)), shift
    else:  # an older compiler for CPUs finds what travels again to be what travelled, and keeps some of it
        assert sent(True) <= said(False) + said(True)


@pytest.mark.parametrize(
    ("order", "move"),
    [(None, "ring"), (None, "token_ring"), (None, "gather"), (None, "swap_ring")]
    + [("zigzag", move) for move in MOVES]
    + [pytest.param(None, move, marks=pytest.mark.slow) for move in ("two_way", "swap")],  # 3 s
)
def test_no_buffer_has_the_whole_sequence_but_what_the_table_says(move, order):
    length, (_, text, _) = LONG, of_eight(move, order, True)
    whole = set(re.findall(rf"\w+\[(?:\d+,)*{length}(?:,\d+)*\]", text)) | set(
        re.findall(rf"\w+\[8,{B},{length // 8}(?:,\d+)*\]", text)
    )
    shapes = {
        tuple(int(n) for n in re.search(r"\[(.*)\]", name).group(1).split(",")) for name in whole
    }
    holds = move_for(move, 8).holds
    assert holds == {"gather": ("keys", "sums"), "swap": ("heads", "outputs")}.get(move, ())
    if holds == ("keys", "sums"):  # a piece a device: keys, values, their gradients and places
        assert shapes <= {(8, B, length // 8, 2, K), (8, B, length // 8)} and shapes
    elif (
        holds
    ):  # of one of four heads, and of one of two rows; tokens by tokens are the dense form's scores
        numbers = {math.prod(n for n in shape if n != length) for shape in shapes}
        assert max(numbers) == K < H * K
    else:
        assert not shapes


def test_half_of_the_pairs_are_computed_by_every_device_under_zigzag():
    for shares in (1, 2, 5, 8):
        order = Order("zigzag")
        places = order.places(2 * shares, shares).reshape(shares, 2)
        for device, other in itertools.product(range(shares), repeat=2):
            pairs = order.pairs(shares, device, other)
            assert len(pairs) == (2 if device != other else 3)
            seen = {
                (i, j) for i in range(2) for j in range(2) if places[device, i] >= places[other, j]
            }
            assert {pair[:2] for pair in pairs} == seen
            assert all(causal == (places[device, i] == places[other, j]) for i, j, causal in pairs)


@pytest.mark.parametrize("move", ["gather", "ring", "two_way", "token_ring"])
def test_a_table_halves_the_products(move):
    """Of both passes."""
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
def test_places_are_sent_when_keys_have_come(move):
    """Sent beside them, they lock simulated devices up now and then."""
    _, text, _ = of_eight(move, None, True)
    made = dict(re.findall(r"^ *(?:ROOT )?(%?[\w.-]+) = (.*)$", text, re.MULTILINE))

    def waits(name, seen):
        """Whether floats that were sent are among what makes this."""
        line = made.get(name, "")
        if re.match(r"\(?f32\[.*(all-gather|all-to-all)", line):
            return True
        below = [
            each for each in re.findall(r"%[\w.-]+", line.partition("(")[2]) if each not in seen
        ]
        seen.update(below)
        return any(waits(each, seen) for each in below)

    places = [name for name, line in made.items() if re.match(r"s32\[\S+ all-gather\(", line)]
    assert places and all(waits(name, {name}) for name in places)
