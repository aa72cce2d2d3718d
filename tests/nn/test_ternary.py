"""Ternary weights: sums of integers, exactly; gradients straight through; two bits a number; layers of them."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_libtpu, on_a_tpu
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import Attention
from jaxpar.nn.experts import Experts
from jaxpar.nn.linear import Lora, contract
from jaxpar.nn.mixers import Hgrn
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack
from jaxpar.nn.weights.ternary import PackedTernary, Ternary, int8_rows, pack, ternary
from jaxpar.types import UsageError

INTO, OUT, SWAPPED = "btd,dhk->bthk", "bthk,hkd->btd", "btd,df->tbf"
AXES = {
    INTO: ("embed", "heads", "head_dim"),
    OUT: ("heads", "head_dim", "embed"),
    SWAPPED: ("embed", "mlp"),
}
SHAPES = {
    INTO: ((4, 3, 6), (6, 4, 2)),
    OUT: ((4, 3, 5, 2), (5, 2, 8)),
    SWAPPED: ((4, 3, 7), (7, 4)),
}
CONTRACTED = {INTO: 1, OUT: 2, SWAPPED: 1}
each = pytest.mark.parametrize("equation", SHAPES)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def drawn(equation, dtype="float32"):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape) for shape in SHAPES[equation])
    return jnp.asarray(3 * x, dtype), jnp.asarray(w, "float64" if dtype == "float64" else "float32")


def ours(equation):
    return lambda x, w: contract(equation, x, ternary(w), AXES[equation])


def added_up(integers, values):
    """Sums along the last axis of rows [N, R] for columns [K, R]: added where 1, taken away where -1, in int32."""
    out = np.zeros((len(integers), len(values)), np.int32)
    for n, row in enumerate(integers):
        for k, column in enumerate(values):
            for number, sign in zip(row, column, strict=True):
                out[n, k] += number if sign > 0 else -number if sign < 0 else np.int32(0)
    return out


def by_integers(equation, x, w):
    """The product in NumPy: rounded, added up in int32, and multiplied once."""
    x, w = np.asarray(x.astype("float32")), np.asarray(w)
    count, batch = CONTRACTED[equation], x.shape[:2]
    rows, columns = x.reshape(batch[0] * batch[1], -1), w.reshape(-1, np.prod(w.shape[count:])).T
    scale = np.abs(w).mean(dtype=np.float64)
    values = np.round(np.clip(columns / scale, -1, 1)).astype(np.int32)
    integers = np.round(rows * (np.float32(127) / np.abs(rows).max(1, keepdims=True))).astype(
        np.int32
    )
    sums = added_up(integers, values).reshape(*batch, *w.shape[count:])
    normed = rows / np.sqrt(np.square(rows, dtype=np.float64).mean(1, keepdims=True) + 1e-8)
    scales = (np.abs(normed).max(1) / 127).reshape(*batch, *(1,) * (sums.ndim - 2))
    if equation == SWAPPED:
        sums, scales = sums.swapaxes(0, 1), scales.swapaxes(0, 1)
    return integers, values, sums, scales * scale


@each
@each_dtype
def test_it_is_sums_and_differences_of_integers_exactly(equation, dtype):
    """The integers, the signs and their int32 sums bit by bit; the one scale to the rounding of float32."""
    x, w = drawn(equation, dtype)
    integers, values, sums, scales = by_integers(equation, x, w)
    small = ternary(w)
    contracted = tuple(range(2, 2 + CONTRACTED[equation]))
    here, factors, _ = int8_rows(x, contracted)
    np.testing.assert_array_equal(np.asarray(here, np.float32).reshape(integers.shape), integers)
    np.testing.assert_array_equal(np.asarray(small.values).reshape(-1, len(values)).T, values)
    assert set(np.unique(values)) == {-1, 0, 1} and np.abs(integers).max() == 127
    factors = np.asarray(factors * small.scale).reshape(*x.shape[:2], *(1,) * (sums.ndim - 2))
    factors = factors.swapaxes(0, 1) if equation == SWAPPED else factors
    np.testing.assert_allclose(np.broadcast_to(factors, scales.shape), scales, rtol=6e-7)
    got = contract(equation, x, small, AXES[equation])
    assert got.dtype == x.dtype
    want = jnp.asarray(sums.astype(np.float32) * factors).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@each
def test_gradients_pass_straight_through_both_roundings(equation, x64):
    """As of x + stop(round(x) - x), of the normalised rows and of the weight."""
    x, w = drawn(equation, "float64")
    contracted = tuple(range(2, 2 + CONTRACTED[equation]))

    def plain(x, w):
        stop = jax.lax.stop_gradient
        normed = x / jnp.sqrt(jnp.square(x).mean(contracted, keepdims=True) + 1e-8)
        step = jnp.abs(normed).max(contracted, keepdims=True) / 127
        size = jnp.abs(w).mean()
        rounded = normed + stop(jnp.round(normed / step) * step - normed)
        return jnp.einsum(
            equation, rounded, w + stop(jnp.round(jnp.clip(w / size, -1, 1)) * size - w)
        )

    def value(f):
        def weighted(x, w):
            y = f(x, w)
            return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

        return jit(jax.value_and_grad(weighted, (0, 1)))(x, w)

    assert_close(value(ours(equation)), value(plain), EXACT_MATHS["float64"])


@each
@pytest.mark.parametrize("rows", [(1, 1), (4, 3)], ids=["row", "rows"])
def test_two_bits_a_number_are_the_weight_exactly(equation, rows):
    x, w = drawn(equation)
    x, small = x[: rows[0], : rows[1]], ternary(w)
    packed = pack(small, CONTRACTED[equation])
    length = np.prod(w.shape[: CONTRACTED[equation]])
    assert packed.values.dtype == jnp.uint8 and packed.values.shape == (
        *w.shape[CONTRACTED[equation] :],
        -(-length // 4),
    )
    got, want = (
        jit(lambda x, w: contract(equation, x, w, AXES[equation]))(x, each)
        for each in (packed, small)
    )
    np.testing.assert_array_equal(got, want)
    text = str(jax.make_jaxpr(lambda x: contract(equation, x, packed, AXES[equation]))(x))
    assert "i32" in text and ("dot_general" in text) == (rows != (1, 1))


def test_sums_are_of_32_bits():
    """127 times 40,000 numbers: more than 16 bits hold, and than a float32 of 24 does not round."""
    x, w = jnp.ones((1, 1, 140_001)), jnp.ones((140_001, 1))
    y = contract("btd,df->btf", x, pack(ternary(w), 1), (None, None))
    assert float(y[0, 0, 0]) == 140_001


def test_a_row_of_zeros_stays_zero_and_what_is_no_number_is_told():
    x, w = drawn(SWAPPED)
    x = x.at[0, 0].set(0).at[1, 1, 2].set(jnp.nan).at[2, 0].set(1e-38)
    for small in (ternary(w), pack(ternary(w), 1), ternary(0 * w)):
        y = np.asarray(contract(SWAPPED, x, small, AXES[SWAPPED]))
        assert (
            not y[0, 0].any()
            and np.isnan(y[1, 1]).all()
            and np.isfinite(np.delete(y.reshape(12, 4), 5, 0)).all()
        )


def test_what_packed_weights_cannot_read_is_refused():
    packed = pack(ternary(jnp.ones((4, 2, 3))), 1)
    for equation in ("btd,hkd->bthk", "bhd,dhk->bhk"):
        with pytest.raises(
            UsageError, match="packed weights take rows and contract their first axes"
        ):
            contract(equation, jnp.ones((1, 2, 4)), packed, (None,) * 3)


# ---------------------------------------------------------------- layers

MIXERS = {"attention": Attention(2, 1, 4, positions=Rope()), "hgrn": Hgrn(8)}


@functools.cache
def stack_of(name, **changes):
    return Stack(
        2,
        8,
        MIXERS[name],
        Mlp(12),
        init_std=0.3,
        weights="ternary",
        **{"dtype": "float64"} | changes,
    )


def drawn_for(stack):
    rng = np.random.default_rng(0)
    leaves = jax.eval_shape(lambda: stack.init(jax.random.key(0), stack.dtype))
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype), leaves
    )


def by_hand(stack):
    """The same weights, each rounded by itself, in a stack that knows of nothing."""
    plain = Stack(2, 8, stack.mixer, stack.mlp, init_std=0.3, dtype=stack.dtype)

    def apply(params, x):
        def rounded(names, w):
            return jax.vmap(ternary)(w) if "embed" in names and w.ndim > 2 else w

        axes = jax.tree.map(
            lambda leaf: leaf.axes, plain.leaves()["layers"], is_leaf=lambda v: hasattr(v, "init")
        )
        layers = jax.tree.map(rounded, axes, params["layers"], is_leaf=lambda v: type(v) is tuple)
        return plain.apply(params | {"layers": layers}, x)[0]

    return apply


@pytest.mark.parametrize(
    "name, changes", [("attention", {}), ("hgrn", {"scan_layers": False, "remat": "blockwise"})]
)
def test_a_stack_rounds_every_weight_between_the_stream_and_a_branch(name, changes, x64):
    stack = stack_of(name, **changes)
    params, x = drawn_for(stack), jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 8)))

    def of(apply):
        return jit(jax.value_and_grad(lambda p, x: jnp.sin(apply(p, x)).sum(), (0, 1)))(params, x)

    got, want = of(lambda p, x: stack.apply(p, x)[0]), of(by_hand(stack))
    assert_close(got, want, EXACT_MATHS["float64"])
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(got[1]))
    kept = jax.eval_shape(stack.hold, params)["layers"]
    arrays = [
        leaf
        for leaf in jax.tree.leaves(kept, is_leaf=lambda v: isinstance(v, Ternary))
        if not isinstance(leaf, Ternary)
    ]
    assert all(len(leaf.shape) == 2 for leaf in arrays), "norms and biases alone are not rounded"


def test_decoding_reads_an_eighth_of_16_bits_and_computes_the_same(x64):
    stack = stack_of("hgrn")
    params, x = drawn_for(stack), jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 8)))
    small = stack.for_decoding(params)
    assert (
        stack.for_decoding(small)["layers"][1]["mixer"]["wf"] is small["layers"][1]["mixer"]["wf"]
    )

    step, cache, out = (
        jit(lambda p, x, cache: stack.apply(p, x, cache=cache)[:2]),
        stack.init_cache(1, 8),
        [],
    )
    for t in range(5):
        y, cache = step(small, x[:, t : t + 1], cache)
        out.append(y)
    whole = jit(lambda p, x: stack.apply(p, x)[0])(params, x)
    assert_close(jnp.concatenate(out, 1), whole, EXACT_MATHS["float64"])
    wide = Stack(2, 64, Hgrn(64), Mlp(128), dtype="bfloat16", weights="ternary")
    held = jax.eval_shape(wide.for_decoding, jax.eval_shape(wide.init, jax.random.key(0)))
    weights = [
        w
        for w in jax.tree.leaves(held, is_leaf=lambda v: isinstance(v, PackedTernary))
        if isinstance(w, PackedTernary)
    ]
    numbers = 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert (
        len(weights) == 14
        and sum(w.size * w.dtype.itemsize for w in jax.tree.leaves(weights)) <= 2 * numbers / 7.5
    )


def test_it_is_the_same_on_a_mesh_where_weights_have_eight_bits():
    stack = stack_of("hgrn", dtype="float32")
    params, x = (
        drawn_for(stack),
        jnp.asarray(np.random.default_rng(1).standard_normal((4, 1, 8)), jnp.float32),
    )
    want = jit(lambda p, x: stack.apply(stack.for_decoding(p), x)[0])(params, x)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
        held = jit(stack.for_decoding)(params)
        got = jit(lambda p, x: stack.apply(p, x)[0])(held, x)
        assert held["layers"][0]["w_down"].values.dtype == jnp.int8
    assert_close(jax.device_get(got), jax.device_get(want), EXACT_MATHS["float32"])


def test_adapters_add_to_ternary_weights(x64):
    x, w = drawn(SWAPPED, "float64")
    adapted = Lora.of(jax.random.key(0), ternary(w).values, 1, 2)
    adapted = adapted.replace(weight=ternary(w), up=adapted.up + 1)
    want = ours(SWAPPED)(x, w) + jnp.einsum("btd,df->tbf", x, adapted.down @ adapted.up)
    assert_close(contract(SWAPPED, x, adapted, AXES[SWAPPED]), want, EXACT_MATHS["float64"])


def test_experts_are_refused():
    with pytest.raises(UsageError, match="experts have no ternary weights"):
        Stack(1, 8, Hgrn(8), Experts(8, 4, 2), weights="ternary")


# ---------------------------------------------------------------- memory and fusions


def _unfused(equation, x, w):
    """As eager autograd keeps it: the normalised rows, the rounded ones and the rounded weight, each an array."""
    stop, whole = jax.lax.stop_gradient, jax.lax.optimization_barrier
    wide = x.astype(jnp.float32)
    normed = whole(
        (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-8)).astype(x.dtype)
    )
    step = 127 / jnp.abs(normed.astype(jnp.float32)).max(-1, keepdims=True)
    rounded = whole(
        normed + stop(whole((jnp.round(normed * step) / step).astype(x.dtype)) - normed)
    )
    size = jnp.abs(w).mean()
    w = whole(w + stop(jnp.round(jnp.clip(w / size, -1, 1)) * size - w)).astype(x.dtype)
    return jnp.einsum(equation, rounded, w)


@pytest.mark.slow
def test_training_needs_at_most_six_tenths_of_the_memory_of_an_unfused_form():
    """Four gated mlps in a scan, 1,024 tokens in bfloat16: 0.56 on CPU (20 s). Unrolled: docs/stack.md."""

    def fused(equation, x, w):
        return contract(equation, x, ternary(w), (None, None))

    def temp(f):
        def layer(x, p):
            inside = jax.nn.silu(f("btd,df->btf", x, p["gate"])) * f("btd,df->btf", x, p["up"])
            return x + f("btf,fd->btd", inside, p["down"]), None

        def total(params, x):
            return jax.lax.scan(layer, x, params)[0].astype(jnp.float32).sum()

        shapes = {"gate": (4, 256, 704), "up": (4, 256, 704), "down": (4, 704, 256)}
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        x = jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16)
        return (
            jax.jit(jax.grad(total)).lower(params, x).compile().memory_analysis().temp_size_in_bytes
        )

    assert temp(fused) <= 0.6 * temp(_unfused)


def fusions_on_a_tpu():
    """Of the program that normalises and rounds [4, 256, 512]: what reads it, and what else of its size is written."""
    from jaxpar.aot.topology import devices, parse_topology

    here = jax.sharding.SingleDeviceSharding(devices(parse_topology("v5e:2x2"))[0])
    x = jax.ShapeDtypeStruct((4, 256, 512), jnp.bfloat16, sharding=here)
    text = jax.jit(lambda x: int8_rows(x, (2,))[:2]).lower(x).compile().as_text()
    lines = text[text.index("ENTRY") :].splitlines()
    return {
        "fusions": sum(" fusion(" in line for line in lines),
        "wide": sum("= f32[4,256,512]" in line for line in lines),
    }


@pytest.mark.slow
@needs_libtpu
def test_a_tpu_reads_a_row_once_for_its_scales_and_once_to_round_it():
    """Both reductions are one fusion, rounding another; between them is a row's scale. Nothing wide is written."""
    assert on_a_tpu(__file__) == {"fusions": 3, "wide": 0}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(fusions_on_a_tpu()))
