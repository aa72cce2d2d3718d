"""Attention to a cache in shares of any sizes equals dense attention, at a price that its length does not change."""

import functools
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter
from compiled import needs_libtpu, on_a_tpu
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

from jaxpar.aot import hlo
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import attend, finish, merge, merge_parts
from jaxpar.nn.attention.context import attend_split_cache, spread_blocks
from jaxpar.nn.attention.context import shares_kernel as kernel
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import UsageError

B, T, H, G, K, N, ROOM = 2, 1, 4, 2, 4, 8, 6


def dense(q, keys, values, filled):
    """Softmax over the slots that are filled."""
    keys, values = (jnp.repeat(x, q.shape[2] // G, axis=2) for x in (keys, values))
    scores = jnp.einsum("bthk,bshk->bhts", q, keys) / math.sqrt(q.shape[3])
    weights = jax.nn.softmax(scores, axis=-1, where=filled[:, None, None])
    return jnp.einsum("bhts,bshk->bthk", jnp.where(filled[:, None, None], weights, 0), values)


def drawn(slots, dtype=np.float64):
    rng = np.random.default_rng(0)
    return tuple(
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((B, T, H, K), *2 * ((B, slots, G, K),))
    )


def test_any_split_is_exact_and_what_is_not_filled_may_hold_anything(x64):
    rng = np.random.default_rng(1)
    splits = [rng.integers(0, ROOM + 1, (B, N)) for _ in range(200)]
    one = np.zeros((B, N), int)
    one[:, 3] = ROOM
    splits += [np.zeros((B, N), int), np.full((B, N), ROOM), one, np.eye(B, N, dtype=int)]
    q, keys, values = drawn(N * ROOM)
    mesh = make_mesh(MeshSpec(context=4, tensor=2))
    with use_mesh(mesh):
        run = jit(attend_split_cache)
        for lengths in splits:
            filled = (np.arange(ROOM)[None, None] < lengths[..., None]).reshape(
                B, -1
            )  # two shares a device
            poisoned = [jnp.where(filled[..., None, None], x, jnp.nan) for x in (keys, values)]
            got = run(q, *poisoned, jnp.asarray(lengths, jnp.int32))
            assert_close(got, dense(q, keys, values, filled), 1e-12)


def with_gradients(run, q, keys, values, rest, g):
    out, pull = jax.vjp(lambda *x: run(*x, rest), q, keys, values)
    return out, *pull(g)


@pytest.mark.parametrize("context, tensor", [(4, 2), (1, 1)])
def test_gradients_are_of_what_is_filled_alone(context, tensor, x64):
    """Of one row nothing is; NaN where nothing is filled, whose gradient is 0."""
    lengths = np.random.default_rng(5).integers(0, ROOM + 1, (B, N))
    lengths[1] = 0
    filled = (np.arange(ROOM) < lengths[..., None]).reshape(B, -1)
    q, keys, values = drawn(N * ROOM)
    want = jit(functools.partial(with_gradients, dense))(q, keys, values, filled, q + 1)
    poisoned = [jnp.where(filled[..., None, None], x, jnp.nan) for x in (keys, values)]
    with use_mesh(
        make_mesh(MeshSpec(context=context, tensor=tensor), jax.devices()[: context * tensor])
    ):
        run = jit(functools.partial(with_gradients, attend_split_cache))
        assert_close(run(q, *poisoned, jnp.asarray(lengths), q + 1), want, 1e-12)


def test_it_is_the_gradient_of_the_energy(x64):
    q, keys, values = drawn(N * ROOM)

    def energy(z):
        repeated, weighed = (jnp.repeat(x, H // G, axis=2) for x in (keys, values))
        scores = jnp.einsum("bthk,bshk->bths", q, repeated) / math.sqrt(K)
        return jax.nn.logsumexp(scores + jnp.einsum("bthk,bshk->bths", z, weighed), axis=-1).sum()

    want = jax.grad(energy)(jnp.zeros_like(q))
    lengths = jnp.full((B, N), ROOM, jnp.int32)
    with use_mesh(make_mesh(MeshSpec(context=N))):
        assert_close(jit(attend_split_cache)(q, keys, values, lengths), want, 1e-12)
    assert_close(attend_split_cache(q, keys, values, lengths), want, 1e-12)


def for_a_tpu():
    """Of a million cached tokens on 64 chips, and of a thousandth: the shapes that each collective sends."""
    from jaxpar.aot import devices, parse_topology

    mesh, found = make_mesh(MeshSpec(context=64), devices(parse_topology("v5p:4x4x4"))), {}
    for slots in (2**10, 2**20):
        shapes = [((1, 1, 32, 128), "bfloat16", ())] + [
            ((1, slots, 8, 128), "bfloat16", (None, "context"))
        ] * 2
        args = [
            jax.ShapeDtypeStruct(
                shape,
                dtype,
                sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*part)),
            )
            for shape, dtype, part in [*shapes, ((1, 64), "int32", (None, "context"))]
        ]
        with use_mesh(mesh):
            program = jax.jit(attend_split_cache).lower(*args).compile()
        each = hlo.collectives(program.as_text(), mesh)
        found[str(slots)] = sorted([one.kind, one.bytes] for one in each)
    return found


def stand_in(*arrays, out, grid, text, name, num_warps, num_stages, **sizes):
    """Has the signature of `jaxpar.lower.triton.call_kernel`: what each program makes, query by query, in NumPy."""

    def run(q, keys, values, lengths):
        top, total, mean = (np.full(x.shape, np.nan, np.float32) for x in out)
        groups, repeat, tiles, tile = (
            sizes[name] for name in ("GROUPS", "REPEAT", "TILES", "TILE")
        )
        for first, split in np.ndindex(*grid):
            row, group, part = np.unravel_index(first, (sizes["ROWS"], groups, tiles))
            share, number = divmod(split, sizes["CUTS"])
            size = -(-lengths[row, share] // (sizes["CUTS"] * sizes["STEP"])) * sizes["STEP"]
            slots = (
                np.arange(number * size, min((number + 1) * size, lengths[row, share]))
                + share * sizes["ROOM"]
            )
            for line in range(part * tile, min((part + 1) * tile, sizes["LENGTH"] * repeat)):
                at = row, line // repeat, group * repeat + line % repeat
                scores = keys[row, slots, group] @ q[at] / math.sqrt(sizes["WIDTH"])
                top[split, *at] = scores.max(initial=-np.inf)
                weights = np.exp(scores - top[split, *at])
                total[split, *at], mean[split, *at] = (
                    weights.sum(),
                    weights @ values[row, slots, group],
                )
        return top, total, mean

    def wide(*arrays):
        return run(*(np.asarray(x, np.float32) for x in arrays[:3]), np.asarray(arrays[3]))

    return list(jax.pure_callback(wide, tuple(out), *arrays))


@pytest.mark.parametrize(
    "how", ["twin", pytest.param("interpreter", marks=triton_interpreter.NEEDED)]
)
@pytest.mark.parametrize(
    "tokens, devices, dtype", [(1, 1, "float32"), (9, 1, "float32"), (2, 2, "bfloat16")]
)
def test_the_kernel_reads_what_is_filled_and_is_attention(how, tokens, devices, dtype, monkeypatch):
    """Of three shares a device, one empty, one cut within a step; NaN where nothing is filled. Gradients are dense."""
    room, width, shares = 96, 16, 3 * devices
    lengths = np.random.default_rng(3).integers(1, room, (B, shares)).astype(np.int32)
    lengths[0, 1], lengths[1, 0], lengths[1, 2] = 0, room, 7
    rng = np.random.default_rng(4)
    q, *both = (
        jnp.asarray(rng.normal(size=(B, *n, width)), dtype)
        for n in ((tokens, 8), *2 * ((shares * room, G),))
    )
    filled = (np.arange(room) < lengths[..., None]).reshape(B, -1)
    g = jnp.asarray(rng.normal(size=q.shape), dtype)
    wide = [x.astype(jnp.float32) for x in (q, *both)]
    want = jax.jit(functools.partial(with_gradients, dense))(*wide, filled, g.astype(jnp.float32))
    poisoned = [jnp.where(filled[..., None, None], x, jnp.nan) for x in both]
    monkeypatch.setattr(kernel, "platform", lambda: "gpu")
    monkeypatch.setattr(kernel, "_is_right", lambda dtype: True)
    monkeypatch.setattr(kernel, "available", lambda: True)
    monkeypatch.setattr(
        kernel.attend_shares, "__defaults__", (kernel.ShareCut(step=16, programs=40),)
    )
    if how == "interpreter":
        triton_interpreter.install(monkeypatch)
    else:
        monkeypatch.setattr(kernel, "call_kernel", stand_in)
    with use_mesh(make_mesh(MeshSpec(context=devices), jax.devices()[:devices])):
        run = jax.jit(lambda *x: with_gradients(attend_split_cache, *x))
        got = run(q, *poisoned, jnp.asarray(lengths), g)
    assert all(x.dtype == q.dtype for x in got)
    # Sums in another order; weights, outputs and gradients rounded to 2^-9.
    assert_close(got, want, {"float32": 1e-5, "bfloat16": 1.5e-2}[dtype])


def test_the_kernel_is_cut_for_the_whole_card(monkeypatch):
    calls = []
    monkeypatch.setattr(kernel, "call_kernel", lambda *x, **call: calls.append(call) or call["out"])
    for rows, tokens, shares, width, dtype in (
        (1, 1, 1, 128, "bfloat16"),
        (1, 1, 2, 256, "float32"),
        (64, 20, 1, 128, "bfloat16"),
    ):
        given = [
            jax.ShapeDtypeStruct((rows, *n, width), dtype)
            for n in ((tokens, 32), (2**14, 8), (2**14, 8))
        ]
        jax.eval_shape(kernel.attend_shares, *given, jax.ShapeDtypeStruct((rows, shares), "int32"))
    one, two, many = calls
    assert (
        one["grid"] == (8, 66) and one["TILE"] == 16 and one["STEP"] == 64
    )  # of 4 queries a key head
    assert (
        two["grid"] == (8, 66)
        and two["CUTS"] == 33
        and two["STEP"] == 32
        and two["EXACT"] == "ieee"
    )
    assert many["grid"] == (64 * 8 * 2, 1) and many["TILE"] == 64 and many["TILES"] == 2  # of 80


@needs_libtpu
@pytest.mark.slow  # 30 s
def test_a_tpu_sends_two_small_sums_however_many_tokens_there_are():
    found = on_a_tpu(__file__)
    assert found[str(2**10)] == found[str(2**20)] and {kind for kind, _ in found[str(2**20)]} == {
        "all-reduce"
    }
    assert len(found[str(2**20)]) == 2 and sum(size for _, size in found[str(2**20)]) <= 64 * 1024


@pytest.mark.parametrize("slots", [N * 4, N * 512])
def test_two_all_reduces_whatever_the_length(slots):
    mesh = make_mesh(MeshSpec(context=N))
    with use_mesh(mesh):
        shapes = [jax.ShapeDtypeStruct(x.shape, np.float32) for x in drawn(slots, np.float32)]
        lengths = jax.ShapeDtypeStruct((B, N), np.int32)
        parts = [(), (None, "context"), (None, "context"), (None, "context")]
        shardings = [
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*part)) for part in parts
        ]
        program = jit(attend_split_cache, in_shardings=shardings).lower(*shapes, lengths).compile()
    found = hlo.collectives(program.as_text(), mesh)
    assert sorted((each.kind, math.prod(each.shapes[0])) for each in found) == [
        ("all-reduce", B * T * H), ("all-reduce", B * T * H * (K + 1)),
    ]  # fmt: skip


def by_a_ring(q, keys, values):
    """On one device: a token's attention where queries stay and every device's keys and values pass by."""
    ring = [(i, (i + 1) % N) for i in range(N)]
    seen = jnp.ones((B, T, keys.shape[1]), bool)

    def hop(carry, _):
        state, *both = carry
        both = [jax.lax.ppermute(x, "context", ring) for x in both]
        return (merge(state, attend(q, *both, seen)), *both), None

    return finish(
        jax.lax.scan(hop, (attend(q, keys, values, seen), keys, values), length=N - 1)[0][0]
    )


def test_a_ring_sends_the_whole_cache_and_the_sums_send_little():
    slots = N * 16
    mesh, args = make_mesh(MeshSpec(context=N)), drawn(slots, np.float32)
    whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, "context")
    ring = jax.shard_map(
        by_a_ring, mesh=mesh, in_specs=(whole, split, split), out_specs=whole, check_vma=False
    )
    lengths = jnp.full((B, N), slots // N, jnp.int32)
    shardings = [jax.sharding.NamedSharding(mesh, part) for part in (whole, split, split, split)]
    args = [jax.device_put(x, where) for x, where in zip((*args, lengths), shardings, strict=True)]
    with use_mesh(mesh):
        programs = (
            jit(attend_split_cache).lower(*args).compile(),
            jit(ring).lower(*args[:3]).compile(),
        )
    found = [hlo.collectives(program.as_text(), mesh) for program in programs]
    assert [{each.kind for each in one} for one in found] == [
        {"all-reduce"},
        {"collective-permute"},
    ]
    by_sums, by_ring = (sum(each.bytes * each.trips for each in one) for one in found)
    assert (
        by_sums == 4 * B * T * H * (K + 2) and by_ring == 4 * B * 2 * G * K * (N - 1) * slots // N
    )
    assert by_ring > 70 * by_sums  # of 16 tokens a device; in proportion to them
    assert_close(programs[0](*args), programs[1](*args[:3]), 1e-5)


def test_parts_of_all_devices_are_added_up(x64):
    rng = np.random.default_rng(2)
    shape = (N, 3, B, T, H)  # devices, parts of each
    top = jnp.where(rng.random(shape) < 0.2, -jnp.inf, rng.standard_normal(shape))
    states = LogSumExp(
        top, jnp.asarray(rng.random(shape)), jnp.asarray(rng.standard_normal((*shape, K)))
    )
    states = states._replace(
        numerator=jnp.where(top[..., None] > -jnp.inf, states.numerator, jnp.nan)
    )
    states = states._replace(denominator=jnp.where(top > -jnp.inf, states.denominator, 0))
    want = merge_parts(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states))
    mesh = make_mesh(MeshSpec(context=N))
    split = jax.sharding.PartitionSpec("context")
    run = jax.shard_map(
        lambda states: merge_parts(jax.tree.map(lambda x: x[0], states), "context"),
        mesh=mesh, in_specs=split, out_specs=jax.sharding.PartitionSpec(), check_vma=False,
    )  # fmt: skip
    assert_close(jit(run)(states), want, 1e-13)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_blocks_are_lent_wherever_there_is_room(needs, free, random):
    home = [random.randrange(len(free)) for _ in needs]
    plan = spread_blocks(needs, free, home)
    assert (plan is None) == (sum(needs) > sum(free))
    if plan is None:
        return
    assert plan.sum(1).tolist() == needs and (plan.sum(0) <= free).all() and (plan >= 0).all()
    for request, device in itertools.product(
        range(len(needs)), range(len(free))
    ):  # none borrows with room at home
        if device != home[request] and plan[request, device]:
            assert plan[:, home[request]].sum() == free[home[request]]


def test_short_requests_stay_whole():
    assert spread_blocks([2, 7], [6, 6], [0, 0]).tolist() == [[2, 0], [4, 3]]


def test_two_devices_serve_a_request_of_twice_what_one_serves():
    """In blocks of 64 tokens of Llama 3 8B's keys and values, of which 100 GiB of each device have room."""
    room = 100 * 2**30 // (64 * 32 * 2 * 8 * 128 * 2)
    assert (
        spread_blocks([room], [room], [0]) is not None
        and spread_blocks([room + 1], [room], [0]) is None
    )
    assert spread_blocks([2 * room], [room, room], [0]).tolist() == [[room, room]]
    assert spread_blocks([2 * room + 1], [room, room], [0]) is None
    # Beside a short one at home on the other device, which stays there.
    assert spread_blocks([2 * room - 9, 9], [room, room], [0, 1]).tolist() == [
        [room, room - 9],
        [0, 9],
    ]


def test_the_longest_borrows_first_so_that_few_devices_serve_it():
    assert spread_blocks([4, 6], [2, 5, 6], [0, 0]).tolist() == [[2, 2, 0], [0, 0, 6]]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: spread_blocks([-1], [2], [0]), "must not be negative"),
        (lambda: spread_blocks([1], [2], [1]), "must be a device from 0 to 0"),
        (lambda: spread_blocks([1, 2], [2], [0]), "for each of 2 requests"),
        (lambda: attend_split_cache(*drawn(7, np.float32), jnp.zeros((B, 2), int)), "7 slots do not divide over the 2"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(call, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        call()


if __name__ == "__main__":
    print(json.dumps(for_a_tpu()))
