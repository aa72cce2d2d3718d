"""Products with weights: plain, adapted, of eight bits, and with the weight's gradient made later."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.aot import hlo
from jaxpar.mesh import MeshSpec, constrain, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn.linear import (
    Deferred,
    Frozen,
    Lora,
    Transposed,
    _with_enough_rows,
    contract,
    deferred_gradient,
    on_weight,
    transposed_is_faster,
    whole_weight,
)
from jaxpar.nn.weights.narrow import quantise
from jaxpar.types import UsageError

INTO, OUT = "btd,dhk->bthk", "bthk,hkd->btd"
AXES = {INTO: ("embed", "heads", "head_dim"), OUT: ("heads", "head_dim", "embed")}
SHAPES = {INTO: ((4, 3, 8), (8, 4, 2)), OUT: ((4, 3, 4, 2), (4, 2, 8))}
CONTRACTED = {INTO: 1, OUT: 2}
each = pytest.mark.parametrize("equation", [INTO, OUT])


def drawn(equation, dtype=np.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES[equation])


def value_and_gradients(f, *args):
    def weighted(*args):
        y = f(*args)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    return jit(jax.value_and_grad(weighted, tuple(range(len(args)))))(*args)


@each
def test_it_is_the_product_plus_bias(equation, x64):
    x, w = drawn(equation, np.float64)
    bias = jnp.arange(float(np.prod(w.shape[CONTRACTED[equation] :]))).reshape(
        w.shape[CONTRACTED[equation] :]
    )

    def plain(x, w, bias):
        return jnp.einsum(equation, x, w) + bias[(None,) * 2]

    def ours(x, w, bias):
        return contract(equation, x, w, AXES[equation], bias=bias)

    assert_close(
        value_and_gradients(ours, x, w, bias),
        value_and_gradients(plain, x, w, bias),
        EXACT_MATHS["float64"],
    )


@each
@pytest.mark.parametrize("spec", [MeshSpec(data=2, fsdp=2, tensor=2), MeshSpec(fsdp=4, tensor=2)])
def test_it_is_the_same_on_a_mesh(equation, spec):
    args = drawn(equation)

    def ours(x, w):
        return contract(equation, x, w, AXES[equation])

    want = value_and_gradients(ours, *args)
    with use_mesh(make_mesh(spec)):
        got = value_and_gradients(ours, *args)
    assert_close(jax.device_get(got), jax.device_get(want), EXACT_MATHS["float32"])


@each
def test_a_product_of_two_dimensions_gathers_no_weight(equation):
    """Equal in value and gradients; the weight lies in four parts, and each device multiplies its own."""
    x, w = drawn(equation)
    want = value_and_gradients(functools.partial(contract, equation, axes=AXES[equation]), x, w)

    def value(x, w):
        y = contract(equation, x, w, AXES[equation])
        y = constrain(y, "batch", None, *((None,) if equation == OUT else ("heads", None)))
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum()

    with use_mesh(
        make_mesh(MeshSpec(data=2, fsdp=2, inner=2, tensor=2)), rules_from(layout="2d")
    ) as mesh:
        args = shard((x, w), (("batch", *(None,) * (x.ndim - 1)), AXES[equation]))
        assert args[1].addressable_shards[0].data.size * 4 == w.size
        run = jit(jax.value_and_grad(value, (0, 1))).lower(*args).compile()
        assert_close(jax.device_get(run(*args)), jax.device_get(want), EXACT_MATHS["float32"])
        found = [
            (c.kind, c.axes, shape)
            for c in hlo.collectives(run.as_text(), mesh)
            for shape in c.shapes
        ]
    assert any("inner" in axes for _, axes, _ in found)
    assert not [shape for kind, _, shape in found if kind == "all-gather" and shape[1:2] != (3,)], (
        found
    )  # but tokens


def test_precision_reaches_the_product():
    x, w = drawn(INTO)
    for args in ((x, w), (x, quantise(w, 1)), (x, Lora.of(jax.random.key(0), w, 1, 2))):
        text = str(
            jax.make_jaxpr(lambda x, w: contract(INTO, x, w, AXES[INTO], precision="highest"))(
                *args
            )
        )
        assert "HIGHEST" in text


# ---------------------------------------------------------------- adapters


@each
def test_an_adapter_is_the_sum_of_both_weights(equation, x64):
    x, w = drawn(equation, np.float64)
    start = Lora.of(jax.random.key(0), w, CONTRACTED[equation], rank=3, scale=0.5)
    np.testing.assert_array_equal(
        contract(equation, x, start, AXES[equation]), contract(equation, x, w, AXES[equation])
    )
    adapted = start.replace(
        up=jnp.asarray(np.random.default_rng(1).standard_normal(start.up.shape))
    )

    def ours(x, adapted):
        return contract(equation, x, adapted, AXES[equation])

    def merged(x, adapted):
        return jnp.einsum(
            equation, x, adapted.weight + 0.5 * jnp.tensordot(adapted.down, adapted.up, 1)
        )

    got, want = (value_and_gradients(f, x, adapted) for f in (ours, merged))
    assert_close(got, want, EXACT_MATHS["float64"])
    assert np.abs(got[1][1].down).min() > 0


def test_an_adapter_of_what_it_cannot_read_is_refused():
    x, w = drawn(INTO)
    adapted = Lora.of(jax.random.key(0), w, 1, rank=2)
    with pytest.raises(UsageError, match="contracted axes come first"):
        contract(
            "btd,hkd->bthk",
            x,
            adapted.replace(weight=jnp.moveaxis(w, 0, 2)),
            ("heads", "head_dim", "embed"),
        )


@each
def test_magnitudes_are_trained_apart_from_directions(equation, x64):
    """DoRA against its formula in NumPy, the norm a constant in gradients."""
    x, w = (np.asarray(a) for a in drawn(equation, np.float64))
    rng, num = np.random.default_rng(1), CONTRACTED[equation]
    made = Lora.of(jax.random.key(0), jnp.asarray(w), num, rank=3, scale=0.5)
    up, m = rng.standard_normal(made.up.shape), rng.standard_normal(w.shape[num:])
    adapted = made.replace(
        weight=Frozen(jnp.asarray(w)), up=jnp.asarray(up), magnitude=jnp.asarray(m)
    )
    y, back = jax.vjp(
        lambda x, a: contract(equation, x, a, AXES[equation]), jnp.asarray(x), adapted
    )
    g = rng.standard_normal(y.shape)
    dx, grads = back(jnp.asarray(g))

    flat = (
        x.reshape(12, -1),
        w.reshape(x[0, 0].size, -1),
        np.asarray(made.down).reshape(-1, 3),
        up.reshape(3, -1),
    )
    x2, w2, a, b = flat
    g2, m2, total = g.reshape(12, -1), m.reshape(-1), w2 + 0.5 * a @ b
    ratio = m2 / np.sqrt((total**2).sum(0))
    want = x2 @ total * ratio, (g2 * ratio) @ total.T
    want += (
        0.5 * x2.T @ (g2 * ratio) @ b.T,
        0.5 * a.T @ x2.T @ (g2 * ratio),
        (g2 * (x2 @ total)).sum(0) / (m2 / ratio),
    )
    got = y, dx, grads.down, grads.up, grads.magnitude
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours).reshape(theirs.shape), theirs, rtol=1e-11, atol=1e-12
        )
    assert_close(jnp.einsum(equation, x, whole_weight(adapted)), y, EXACT_MATHS["float64"])


def test_the_change_sees_what_its_key_keeps():
    x, w = drawn(INTO)
    made = Lora.of(jax.random.key(0), w, 1, rank=2, scale=0.5).replace(
        key=jax.random.key(5), rate=0.25
    )
    adapted = made.replace(up=jnp.ones_like(made.up))
    seen = np.where(jax.random.bernoulli(jax.random.key(5), 0.75, x.shape), x / 0.75, 0)
    want = jnp.einsum(INTO, x, w) + 0.5 * jnp.einsum(
        INTO, seen, jnp.tensordot(adapted.down, adapted.up, 1)
    )
    assert_close(contract(INTO, x, adapted, AXES[INTO]), want, EXACT_MATHS["float32"])
    assert 0.1 < (seen == 0).mean() < 0.4


def test_outputs_of_zeros_stay_zero():
    w = jnp.zeros((8, 4))
    made = Lora.of(jax.random.key(0), w, 1, rank=2)
    y = contract(
        "btd,df->btf", jnp.ones((1, 2, 8)), made.replace(magnitude=made.norm()), ("embed", "mlp")
    )
    assert not np.asarray(y).any()


# ---------------------------------------------------------------- eight bits


@each
def test_eight_bits_are_off_by_half_a_scale_at_most(equation):
    x, w = drawn(equation)
    small = quantise(w, CONTRACTED[equation])
    assert small.values.dtype == jnp.int8 and int(jnp.abs(small.values).max()) == 127
    off = jnp.abs(small.values * small.scales[(None,) * CONTRACTED[equation]] - w)
    assert (off / small.scales[(None,) * CONTRACTED[equation]] <= 0.5 + 1e-5).all()
    wide = small.values * small.scales[(None,) * CONTRACTED[equation]]
    got = contract(equation, x, small, AXES[equation])
    assert_close(got, jnp.einsum(equation, x, wide), EXACT_MATHS["float32"])


def test_a_weight_of_zeros_stays_zero():
    small = quantise(jnp.zeros((8, 4)), 1)
    assert not np.asarray(
        contract("btd,df->btf", jnp.ones((1, 2, 8)), small, ("embed", "mlp"))
    ).any()


# ---------------------------------------------------------------- the weight's gradient later


@each
def test_a_deferred_gradient_is_the_gradient(equation, x64):
    x, w = drawn(equation, np.float64)
    y = contract(equation, x, w, AXES[equation])
    deferred = Deferred(w, (jnp.zeros_like(x), jnp.zeros_like(y)))

    def ours(x, w):
        return contract(equation, x, w, AXES[equation])

    value, (dx, dw) = value_and_gradients(ours, x, w)
    late_value, (late_dx, kept) = value_and_gradients(ours, x, deferred)
    assert_close((late_value, late_dx), (value, dx), EXACT_MATHS["float64"])
    assert not np.asarray(kept.weight).any()
    assert_close(
        deferred_gradient(equation, kept.slot, w, AXES[equation]), dw, EXACT_MATHS["float64"]
    )


def test_what_is_done_to_a_weight_is_done_to_it_alone():
    _, w = drawn(INTO)
    adapted = Lora.of(jax.random.key(0), w, 1, rank=2)
    doubled = on_weight(lambda w: 2 * w, adapted)
    np.testing.assert_array_equal(doubled.weight, 2 * w)
    np.testing.assert_array_equal(doubled.down, adapted.down)
    small = quantise(w, 1)
    assert on_weight(lambda w: 2 * w, small) is small


@pytest.mark.parametrize(
    "equation, x, w, is_filled",
    [
        (INTO, (1, 1, 64), (64, 4, 8), True),
        (OUT, (3, 2, 4, 8), (4, 8, 64), True),
        ("tbd,dn->tbn", (2, 3, 64), (64, 8), True),
        ("btd,df->btf", (4, 4, 64), (64, 7), False),  # 16 rows
        ("btd,df->btf", (1, 4, 1000), (1000, 2500), False),  # 10^7 multiplications
        ("bd,dc->bc", (1, 8), (8, 5), False),  # no second axis of rows
        ("btd,df->tbf", (3, 2, 64), (64, 8), False),  # the result has them in another order
        ("tbn,nd->btd", (5, 2, 64), (64, 8), False),
        ("btd,tdf->btf", (1, 3, 64), (3, 64, 8), False),  # each row has a weight of its own
    ],
)
def test_a_gpu_is_given_small_products_of_16_rows(equation, x, w, is_filled, monkeypatch):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in (x, w))
    axes = (None,) * w.ndim

    def value(x, w):
        y = contract(equation, x, w, axes)
        return (jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y).sum(), y

    run = jax.value_and_grad(value, (0, 1), has_aux=True)
    (_, want), want_grads = run(x, w)
    monkeypatch.setattr("jaxpar.nn.linear.platform", lambda: "gpu")
    (_, got), grads = run(x, w)
    assert_close(
        (got, grads), (want, want_grads), 1e-2
    )  # rows beside it may change how a sum is split
    assert got.shape == want.shape
    text = str(jax.make_jaxpr(value)(x, w))
    assert (" pad[" in text) == is_filled
    filled = _with_enough_rows(equation, x, w)
    rows = filled.shape[0] * filled.shape[1]
    assert (
        (16 <= rows < 16 + len(x) and not filled[:, x.shape[1] :].any())
        if is_filled
        else filled is x
    )


def test_what_is_split_or_of_32_bits_is_not_filled(monkeypatch):
    monkeypatch.setattr("jaxpar.nn.linear.platform", lambda: "gpu")

    def text(dtype="bfloat16", **options):
        args = jnp.ones((1, 1, 64), dtype), jnp.ones((64, 8), dtype)
        return str(
            jax.make_jaxpr(lambda x, w: contract("btd,df->btf", x, w, ("embed", "mlp"), **options))(
                *args
            )
        )

    assert " pad[" in text() and " pad[" not in text("float32")
    assert "HIGHEST" in text(precision="highest")
    for spec in (MeshSpec(data=8), MeshSpec(tensor=8)):  # rows are split, and the weight is
        with use_mesh(make_mesh(spec)):
            assert " pad[" not in text()


@each
@pytest.mark.parametrize("rows", [(1, 1), (1, 3), (4, 1)])
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_a_transposed_weight_is_the_weight(equation, rows, platform, x64, monkeypatch):
    x, w = drawn(equation, np.float64)
    x, bias = x[: rows[0], : rows[1]], jnp.arange(2.0)
    want = value_and_gradients(
        lambda x, w: contract(equation, x, w, AXES[equation]) + bias[0], x, w
    )
    monkeypatch.setattr("jaxpar.nn.linear.platform", lambda: platform)

    def ours(x, w):
        return contract(equation, x, Transposed.of(w, CONTRACTED[equation]), AXES[equation])

    got = value_and_gradients(ours, x, w)
    assert_close(got, want, EXACT_MATHS["float64"])
    # One row on a GPU is summed up along memory, and no product.
    assert ("dot_general" in str(jax.make_jaxpr(ours)(x, w))) == (
        platform == "cpu" or rows != (1, 1)
    )


def test_one_row_of_16_bits_is_summed_in_float32(monkeypatch):
    monkeypatch.setattr("jaxpar.nn.linear.platform", lambda: "gpu")
    x, w = jnp.ones((1, 1, 4096), jnp.bfloat16), jnp.ones((4096, 3), jnp.bfloat16)
    y = contract("btd,df->btf", x, Transposed.of(w, 1), (None, None))
    assert y.dtype == jnp.bfloat16 and (y == 4096).all()  # sums of ones in bfloat16 end at 256


@pytest.mark.parametrize("equation", ["bd,df->bf", "btd,fd->btf", "btdk,df->btkf"])
def test_a_transposed_weight_refuses_other_equations(equation):
    with pytest.raises(UsageError, match="rows of two axes"):
        Transposed(jnp.ones((2, 2))).contract(equation, jnp.ones((1, 1, 2)), (None, None))


def test_weights_are_transposed_on_gpus_alone_and_of_16_bits(monkeypatch):
    small, wide = jnp.ones((2, 2), jnp.bfloat16), jnp.ones((2, 2))
    assert not transposed_is_faster(small)
    monkeypatch.setattr("jaxpar.nn.linear.platform", lambda: "gpu")
    assert transposed_is_faster(small, small)
    assert not transposed_is_faster(small, wide) and not transposed_is_faster(
        small, quantise(wide, 1)
    )
