"""Layers of several mixers in turn: a plain loop over them, cached, on a ladder, and on devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn import MinGRU, ParaGRU
from jaxpar.nn.attention import Attention
from jaxpar.nn.block import ResidualBlock
from jaxpar.nn.mixer import TokenInfo
from jaxpar.nn.mixers import Hgrn, Recurrent
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

B, T, D, L = 4, 6, 8, 4
ATTENTION, MIN_GRU = Attention(2, 2, 4, positions=Rope()), Recurrent(MinGRU(8))
STACK = Stack(L, D, (ATTENTION, MIN_GRU), Mlp(12), dtype="float64", init_std=0.3)
TOLERANCE = EXACT_MATHS["float64"]
STARTS = np.zeros((B, T), bool)
STARTS[1, 2] = STARTS[3, 0] = True


def drawn(stack=STACK):
    rng = np.random.default_rng(0)
    leaves = jax.eval_shape(lambda: stack.init(jax.random.key(0), stack.dtype))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype), leaves
    )
    return params, jnp.asarray(rng.standard_normal((B, T, D)), stack.dtype)


def by_hand(params, x, stack=STACK):
    """One layer after the other, each found by its number."""
    context = stack.context(x, TokenInfo(starts=STARTS))
    for number in range(L):
        mixer = (ATTENTION, MIN_GRU)[number % 2]
        layer = jax.tree.map(lambda leaf, n=number: leaf[n // 2], params["layers"][str(number % 2)])
        block = ResidualBlock(mixer=mixer, mlp=stack.mlp, norm=stack.norm)
        x, _, _ = block.apply(layer, x, context)
    return stack.norm.apply(params["final_norm"], x)


def value_and_gradients(run, params, x):
    def weighted(params, x):
        y = run(params, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

    return jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(params, x)


@functools.cache
def plain():
    return value_and_gradients(by_hand, *drawn())


@pytest.mark.parametrize(
    "changes", [{}, {"scan_layers": False}, {"remat": "full"}], ids=["scan", "unrolled", "remat"]
)
def test_it_is_a_plain_loop_over_its_layers_in_value_and_gradient(changes, x64):
    stack, (params, x) = dataclasses.replace(STACK, **changes), drawn()
    got = value_and_gradients(
        lambda p, x: stack.apply(p, x, TokenInfo(starts=STARTS))[0], params, x
    )
    assert_close(got, plain(), TOLERANCE)


def test_parts_from_the_cache_are_the_whole(x64):
    """A prompt, which is scanned, and tokens after it, from unstacked parameters."""
    params, x = drawn()
    small = STACK.for_decoding(params)
    assert (
        len(small["layers"]) == L and "wqkv" in small["layers"][2] and "mixer" in small["layers"][3]
    )

    def parts(params, x):
        first, cache, _ = STACK.apply(
            params,
            x[:, :4],
            TokenInfo(starts=STARTS[:, :4]),
            cache=STACK.init_cache(B, T),
            fresh=True,
        )
        assert cache.layers[1].shape == (B, 8) and cache.layers[2].keys.shape == (B, 2, T, 4)
        second, _, _ = STACK.apply(STACK.for_decoding(params), x[:, 4:], cache=cache)
        return jnp.concatenate([first, second], 1)

    assert_close(jit(parts)(params, x), plain()[0][1], TOLERANCE)
    axes = STACK.unstacked_axes(
        jax.tree.map(lambda leaf: leaf.axes, STACK.leaves(), is_leaf=lambda v: hasattr(v, "init"))
    )
    kept = jax.eval_shape(STACK.unstacked, params)
    assert jax.tree.all(jax.tree.map(lambda w, names: w.ndim == len(names), kept, axes))


def test_a_ladder_may_begin_within_a_turn(x64):
    """Scanned, where the turns before, that one, and those after are three loops; and unrolled, by the same draws."""
    ladder = dataclasses.replace(
        STACK, num_layers=6, residual="ladder", ladder_from=3, ranges=True, dropout=0.2
    )
    key = jax.random.key(0)
    params, x = drawn(ladder)
    scanned, unrolled = (
        jit(dataclasses.replace(ladder, scan_layers=scan).apply)(params, x, key=key)
        for scan in (True, False)
    )
    assert_close(scanned, unrolled, TOLERANCE)
    other = jit(dataclasses.replace(ladder, ladder_from=2).apply)(params, x, key=key)[0]
    assert np.abs(other - scanned[0]).max() > 1e-3


def test_what_one_mixer_tells_alone_is_told():
    stack = dataclasses.replace(
        STACK, mixer=(MIN_GRU, Recurrent(ParaGRU(8))), num_layers=2, dtype="float32", ranges=True
    )
    params, x = drawn(stack)
    told = [
        jit(dataclasses.replace(stack, scan_layers=s).apply)(params, x)[2].metrics
        for s in (True, False)
    ]
    assert set(told[0]) == {"iterations", "residual", "converged", "residual_max"} == set(told[1])
    assert_close(told[0], told[1], 1e-5)
    assert told[0]["converged"].value == 1


def test_on_devices_it_is_what_it_is_on_one():
    stack = dataclasses.replace(STACK, dtype="float32")
    params, x = drawn(stack)
    run = lambda p, x: stack.apply(p, x, TokenInfo(starts=STARTS))[0]  # noqa: E731
    want = value_and_gradients(run, params, x)
    axes = jax.tree.map(
        lambda leaf: leaf.axes, stack.leaves(), is_leaf=lambda v: hasattr(v, "init")
    )
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
        placed = shard(params, axes)
        assert placed["layers"]["1"]["mixer"]["wz"].sharding.spec == jax.P(None, "fsdp", "tensor")
        got = value_and_gradients(run, placed, x)
    assert_close(jax.device_get(got), jax.device_get(want), 2 * EXACT_MATHS["float32"])


def test_of_one_mixer_nothing_changes():
    one = Stack(2, D, MIN_GRU, Mlp(8))
    assert one == Stack(2, D, (MIN_GRU,), Mlp(8)) == Stack(2, D, (MIN_GRU, MIN_GRU), Mlp(8))
    assert set(one.leaves()["layers"]) == {
        "attn_norm",
        "mlp_norm",
        "w_gate",
        "w_up",
        "w_down",
        "mixer",
    }
    assert one.leaves()["layers"]["mixer"]["wz"].shape == (2, D, 8)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="num_layers=3 is not a multiple of the 2 mixers"):
        dataclasses.replace(STACK, num_layers=3)
    with pytest.raises(UsageError, match="num_layers=4 is not a multiple of the 0 mixers"):
        dataclasses.replace(STACK, mixer=())
    x, params = jnp.ones((1, 2, D)), jax.eval_shape(STACK.init, jax.random.key(0))
    layer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), params["layers"]["0"])
    stack = dataclasses.replace(STACK, dtype="float32")
    with pytest.raises(UsageError, match="take a number that is known, or their mixer"):
        stack.layer(layer, jnp.int32(0), x, stack.context(x))
    assert stack.layer(layer, 2, x, stack.context(x))[0].shape == x.shape
    with pytest.raises(UsageError, match="experts have no ternary weights"):
        from jaxpar.nn.experts import Experts

        Stack(2, D, (ATTENTION, Hgrn(8)), Experts(8, 4, 2), weights="ternary")
