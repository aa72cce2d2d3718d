"""Decoding from blocks that devices share: the tokens of one, two small sums a layer, blocks wherever one lends."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from tolerance import assert_close

from jaxpar import decode
from jaxpar.aot import hlo
from jaxpar.decode import Sampling
from jaxpar.decode import forest as tables
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.reader import ReadingOptions, begin
from jaxpar.lm.params import axes as axes_of
from jaxpar.lm.sample import Decoder
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn.attention import PositionRule, finish, merge_parts
from jaxpar.nn.attention.context import Sizes, blocks_in_turn, merge_shares, move_for, spread_blocks
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import StackCache
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import UsageError

SMALL = dataclasses.replace(tiny.LLAMA, num_layers=1)
SPLIT = rules_from({"slots": "context"})
ROOM, BLOCK, SHARES = 3, 4, 4  # blocks a device, slots a block, devices
HEADS, GROUPS, WIDTH = 4, 2, 4


def test_a_cache_split_over_devices_gives_the_tokens_of_one_for_two_sums_a_layer():
    """Two samples of each prompt: blocks of the prompt and of either sample, more than devices and no multiple."""
    prompt, params = jnp.asarray(tiny.tokens(length=9)), tiny.params_of(SMALL)

    def run(params, prompt):
        decoding = decode.Decoding(num_samples=2, block=BLOCK, merge=merge_shares)
        return decode.generate(
            jax.random.key(0),
            params,
            prompt,
            Decoder(SMALL),
            Sampling(max_new_tokens=5, temperature=0.0),
            decoding,
        )

    want = jit(run)(params, prompt)
    with use_mesh(mesh := make_mesh(MeshSpec(context=4, tensor=2)), SPLIT):
        args = shard(params, axes_of(SMALL)), prompt
        program = jit(run).lower(*args).compile()
        got = program(*args)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=0, atol=1e-5)
    # Of numbers nothing else crosses: queries of a token of four rows meet the blocks in two of four heads.
    found = [
        one
        for one in hlo.collectives(program.as_text(), mesh)
        if "context" in (one.axes or ("context",))
    ]
    sums = [
        (one.kind, math.prod(one.shapes[0])) for one in found if set(one.dtypes) & {"f32", "f64"}
    ]
    state = 4 * 2
    assert sorted(sums) == [("all-reduce", state), ("all-reduce", state * (4 + 1))]


class Silent(NamedTuple):
    """A model without layers."""

    def init_cache(self, rows, slots):
        return StackCache((), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32))

    def prefill(self, params, tokens, lengths, cache):
        return jnp.zeros((len(tokens), 2)), cache


def test_devices_are_dealt_the_blocks_of_a_row_in_turn():
    """So that each reads as much of it as any other, however long it is: 7 of 8 blocks are needed."""
    with use_mesh(make_mesh(MeshSpec(context=4, tensor=2)), SPLIT):
        options = ReadingOptions(room=5, readers=2, block=BLOCK)
        run = jit(functools.partial(begin, Silent(), None, options=options))
        _, reading = run(jnp.zeros((1, 9), jnp.int32), jnp.full((1,), 9))
    assert reading.forest.owner[0].reshape(4, 2).T.tolist() == [[0, 0, 0, 1], [1, 2, 2, -1]]
    assert reading.forest.order[0].reshape(4, 2).T.tolist() == [[0, 1, 2, 0], [1, 0, 1, 0]]


def test_two_sums_are_less_than_a_ring_would_send():
    """A token, a million cached ones on 64 chips, heads of Llama 3 8B: arithmetic of the tables, in float32 sums."""
    sizes = Sizes(1, 2**20 // 64, 32, 8, 128, 2)
    sums = 1 * 32 * (128 + 2) * 4
    assert sums <= 64 * 1024
    assert move_for("ring", 64).bytes(sizes)["up"] / (2 * sums) >= 1000


@jit
def lent(slots, first):
    """Requests that are readers of one row: a forest whose blocks are taken in this order, and who sees what."""
    forest, roots = tables.spawn(
        tables.empty(1, slots.shape[1], SHARES * ROOM, BLOCK), slots.shape[1]
    )
    forest, _ = tables.reserve(forest, roots, slots, first)
    counts = (
        slots - jnp.arange(slots.shape[1], dtype=jnp.int32)[None] % BLOCK
    )  # the last block of some is not full
    return tables.write(forest, tables.lineage_view(forest, roots), counts, SHARES * ROOM * BLOCK)[
        :2
    ]


PLANS = [
    spread_blocks(
        [5, 2, 3], [ROOM] * SHARES, [0, 0, 3]
    ),  # the first and the second are at home on one device
    spread_blocks([3, 3, 6], [ROOM] * SHARES, [1, 2, 0]),
    spread_blocks([1, 1, 1], [ROOM] * SHARES, [2, 2, 2]),  # all on one, and three that hold nothing
]


def test_requests_borrow_blocks_and_see_what_they_would_at_home(x64):
    """One program of any plan; what nobody wrote holds NaN in keys, and zeros in values, as `clear` leaves them."""
    rule, rng, draw = (
        PositionRule(positions=Rope(theta=30.0)),
        np.random.default_rng(0),
        np.random.default_rng(1),
    )
    q, k, v = (jnp.asarray(draw.standard_normal((3, 1, n, WIDTH))) for n in (HEADS, GROUPS, GROUPS))

    def attend(cache, forest, view, q, k, v):
        context = Context(view.position.reshape(-1, 1))
        return finish(cache.for_pass(forest, view).attend(q, k, v, rule, context)[0])

    with use_mesh(make_mesh(MeshSpec(context=SHARES, tensor=2)), SPLIT):
        shared = jit(attend)
        for plan in PLANS:
            forest, view = lent(
                jnp.asarray(plan.sum(1)[None] * BLOCK, jnp.int32), blocks_in_turn(plan, ROOM)
            )
            assert not forest.refused.any()
            owner = np.asarray(forest.owner[0]).reshape(SHARES, ROOM)
            np.testing.assert_array_equal(
                [(owner == request).sum(1) for request in range(len(plan))], plan
            )
            for request, order in (
                (n, forest.order[0][forest.owner[0] == n]) for n in range(len(plan))
            ):
                assert order.tolist() == list(range(plan[request].sum()))  # device by device
            held = np.asarray(forest.place >= 0)[:, None, :, :, None]
            full = rng.standard_normal((2, 1, GROUPS, SHARES * ROOM, BLOCK, WIDTH))
            keys, values = np.where(held, full[0], np.nan), np.where(held, full[1], 0)
            got = shared(BlockCache(keys, values, merge=merge_shares), forest, view, q, k, v)
            assert_close(got, by_request(rule, forest, keys, values, q, k, v), 1e-12)


def by_request(rule, forest, keys, values, q, k, v):
    """Each request by itself: softmax over its tokens, in the order of their places, and the new one."""
    out = []
    for request in range(q.shape[0]):
        owned = np.asarray(forest.owner[0] == request)[:, None] & (np.asarray(forest.place[0]) >= 0)
        places = np.asarray(forest.place[0])[owned]
        at = len(places)
        assert sorted(places.tolist()) == list(range(at))
        turned = rule.rotate(q[request : request + 1], jnp.full((1, 1), at))[0, 0]
        new = rule.rotate(k[request : request + 1], jnp.full((1, 1), at))[0]
        line = np.concatenate([np.moveaxis(keys[0][:, owned], 0, 1), new])
        worth = np.concatenate([np.moveaxis(values[0][:, owned], 0, 1), v[request]])
        line, worth = (np.repeat(x, HEADS // GROUPS, 1) for x in (line, worth))
        weights = jax.nn.softmax(np.einsum("hk,shk->hs", turned, line) / math.sqrt(WIDTH), axis=-1)
        out.append(np.einsum("hs,shk->hk", weights, worth)[None])
    return np.stack(out)


def test_blocks_are_taken_in_the_order_of_the_plan():
    assert blocks_in_turn(np.array([[1, 0, 2], [0, 2, 0]]), 3).tolist() == [
        0,
        6,
        7,
        3,
        4,
        1,
        2,
        5,
        8,
    ]
    assert blocks_in_turn(np.zeros((0, 2), int), 1).tolist() == [0, 1]


def test_where_no_axis_splits_blocks_they_are_added_up_alone(x64):
    rng = np.random.default_rng(0)
    state = LogSumExp(
        *(jnp.asarray(rng.random((3, 2, 1, 1, 2, *more))) for more in ((), (), (WIDTH,)))
    )
    assert_close(merge_shares(state), merge_parts(state), 1e-15)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: blocks_in_turn(np.array([[2, 1], [2, 0]]), 3),
            "a plan takes 4 blocks of a device, which has 3",
        ),
        (
            lambda: tables.reserve(
                tables.empty(1, 1, 3, 4), np.zeros((1, 1), int), np.ones((1, 1), int), [0, 0, 2]
            ),
            "first=[0, 0, 2] must name each of 3 blocks once",
        ),
    ],
)
def test_what_does_not_fit_is_told(call, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        call()


def test_blocks_divide_over_the_devices():
    state = LogSumExp(*(jnp.ones((3, 2, 2, 1, 2, *more)) for more in ((), (), (WIDTH,))))
    with (
        use_mesh(make_mesh(MeshSpec(context=4, tensor=2)), SPLIT),
        pytest.raises(UsageError, match="3 does not divide"),
    ):
        merge_shares(state)
