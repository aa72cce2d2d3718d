"""The affine recurrence equals its loop, in value and in every derivative, however it is computed."""

import functools
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from recurrences import draw, loop, scan
from tolerance import EXACT_MATHS, assert_close

from jaxpar.scan import _xla, affine_lanes, affine_scan, dispatch
from jaxpar.types import UsageError

PLAIN = ("sequential", "associative", "chunked")
each_impl = pytest.mark.parametrize("impl", PLAIN)
EXACT = EXACT_MATHS["float64"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three levels of chunks within a hundred steps, and little to compile."""
    monkeypatch.setattr(_xla, "CHUNK", 4)


def loss(out):
    return jnp.sum(jnp.sin(out + 0.3))


@given(st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_equals_the_loop(data):
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_xla, "CHUNK", data.draw(st.integers(2, 5), "chunk"))
        kind = data.draw(st.sampled_from(("diag", "block", "dense")), "kind")
        batch = data.draw(st.lists(st.integers(1, 3), max_size=2), "batch")
        axis = data.draw(st.integers(0, len(batch)), "axis")
        length = data.draw(st.sampled_from((1, 3, 7, 26)), "length")
        entries = () if kind == "diag" else (data.draw(st.integers(1, 3), "k"),)
        reverse, starts, impl = (
            data.draw(st.sampled_from(x)) for x in ((False, True), (False, True), PLAIN)
        )
        shape = (*batch[:axis], length, *batch[axis:], *entries)
        a, b, h0 = draw(shape, kind, axis)
        how = {"kind": kind, "axis": axis, "reverse": reverse, "impl": impl}
        got = jit(functools.partial(affine_scan, **how))(a, b, h0 if starts else None)
        assert_close(got, loop(a, b, h0 if starts else 0 * h0, kind, axis, reverse), EXACT)


@pytest.mark.parametrize(
    ("impl", "kind", "reverse", "starts"),
    [
        ("sequential", "diag", True, True),
        ("associative", "block", False, True),
        ("chunked", "dense", True, False),
        ("auto", "diag", False, True),
        slow("associative", "diag", True, False),
        slow("chunked", "diag", True, True),
        slow("chunked", "block", False, False),
        slow("auto", "dense", False, True),
    ],
)
def test_derivatives_are_those_of_the_loop(impl, kind, reverse, starts, x64):
    args = draw((2, 7, 2), kind, 1)

    def derivatives(f):
        def g(*args):
            return loss(
                f(
                    args[0],
                    args[1],
                    args[2] if starts else 0 * args[2],
                    kind=kind,
                    axis=1,
                    reverse=reverse,
                )
            )

        def second(*args):
            return jax.jvp(jax.grad(g, (0, 1, 2)), args, args)[1]

        return jit(
            lambda *x: (jax.value_and_grad(g, (0, 1, 2))(*x), jax.jvp(g, x, x)[1], second(*x))
        )(*args)

    def f(a, b, h0, **how):
        return affine_scan(a, b, h0 if starts else None, impl=impl, **how)

    assert_close(derivatives(f), derivatives(scan), 1e-12)


def test_a_cotangent_and_a_tangent_agree(x64):
    args, tangent = draw((17, 3), seed=1), draw((17, 3), seed=2)
    f = functools.partial(affine_scan, reverse=True, impl="chunked")
    out, pushed = jit(lambda x, v: jax.jvp(f, x, v))(args, tangent)
    back = jit(lambda x, u: jax.vjp(f, *x)[1](u))(args, np.cos(out))
    assert_close(
        jnp.vdot(np.cos(out), pushed),
        sum(jnp.vdot(x, y) for x, y in zip(back, tangent, strict=True)),
        EXACT,
    )


def test_a_gradient_is_one_scan_in_the_other_direction():
    a, b, _ = draw((9, 3), dtype="float32")
    g = jax.grad(lambda *x: loss(affine_scan(*x, impl="sequential")), (0, 1))
    assert str(jax.make_jaxpr(g)(a, b)).count("custom_linear_solve[") == 2
    assert jit(g).lower(a, b).compile().as_text().count(" while(") == 2


def test_lanes_are_the_entries_of_blocks(x64):
    a, b, h0 = draw((11, 2, 2), "block")
    rows = tuple(tuple(a[..., i, j] for j in range(2)) for i in range(2))
    got = affine_lanes(rows, (b[..., 0], b[..., 1]), (h0[..., 0], h0[..., 1]), reverse=True)
    assert_close(jnp.stack(got, -1), loop(a, b, h0, "block", reverse=True), EXACT)


@each_impl
def test_half_precision_is_carried_in_float32(impl):
    """A bfloat16 carry would stop at 256: from there on, adding one changes nothing."""
    ones = jnp.ones(500, jnp.bfloat16)

    def run(b):
        out, pull = jax.vjp(functools.partial(affine_scan, ones, impl=impl), b)
        return out, *pull(ones)

    out, grad = jit(run)(ones)
    assert out.dtype == grad.dtype == jnp.bfloat16
    assert abs(float(out[-1]) - 500) <= 2 and abs(float(grad[0]) - 500) <= 2


@each_impl
def test_half_precision_errs_by_one_rounding(impl):
    a, b, h0 = (jnp.asarray(x, jnp.bfloat16) for x in draw((200, 4), scale=0.99))
    exact = loop(*(np.asarray(x, np.float64) for x in (a, b, h0)))
    error = np.abs(
        np.asarray(jit(functools.partial(affine_scan, impl=impl))(a, b, h0), np.float64) - exact
    )
    assert (error <= 2.0**-8 * np.abs(exact) + 1e-5).all()


@pytest.mark.parametrize(("kind", "reverse"), [("diag", True), ("dense", False)])
@each_impl
def test_what_is_not_finite_moves_forward_only(impl, kind, reverse):
    place, length = 9, 23
    a, b, _ = draw((length, 2), kind, dtype="float32")
    before = slice(place + 1, None) if reverse else slice(0, place)
    f = jit(functools.partial(affine_scan, kind=kind, reverse=reverse, impl=impl))
    clean = f(a, b)
    for which, value in ((0, np.inf), (0, np.nan), (1, np.inf), (1, -np.inf), (1, np.nan)):
        bad = [a.copy(), b.copy()]
        bad[which][place] = value
        out = f(*bad)
        np.testing.assert_array_equal(out[before], clean[before])
        assert not np.isfinite(out[place]).any()


@each_impl
def test_without_a_start_the_first_transition_is_not_used(impl):
    a, b, _ = draw((9, 2), dtype="float32")
    a[0], a[-1] = np.inf, 0.5
    assert np.isfinite(jit(functools.partial(affine_scan, impl=impl))(a, b)).all()
    assert np.isfinite(
        jit(functools.partial(affine_scan, reverse=True, impl=impl))(a[::-1], b)
    ).all()


def test_states_inside_a_chunk_do_not_come_from_products():
    """A product over three steps would be infinite, and infinity times a state of zero is no number."""
    a, b = np.full((20, 2), 1e3, np.float32), np.zeros((20, 2), np.float32)
    a[1:4], a[12:] = 1e15, 1e-30
    np.testing.assert_array_equal(jit(functools.partial(affine_scan, impl="chunked"))(a, b), b)


@each_impl
def test_vmap_is_a_loop(impl, x64):
    rows = list(zip(*(draw((7, 2), seed=seed) for seed in range(3)), strict=True))
    f = functools.partial(affine_scan, impl=impl, reverse=True)
    for axes in ((0, 0, 0), (None, 0, None), (2, 1, 1)):
        args = [x[0] if i is None else np.stack(x, i) for x, i in zip(rows, axes, strict=True)]
        out = jit(jax.vmap(f, axes))(*args)
        for row in range(3):
            alone = [x[0] if i is None else x[row] for x, i in zip(rows, axes, strict=True)]
            assert_close(out[row], loop(*alone, reverse=True), EXACT)


def test_it_runs_eagerly_compiled_in_loops_and_is_traced_once(x64):
    a, b, h0 = draw((7, 2))

    def f(a, b, h0):
        return affine_scan(a, b, h0)

    once = jax.jit(chex.assert_max_traces(f, n=1))
    for seed in range(10):
        args = draw((7, 2), seed=seed)
        assert_close(once(*args), affine_scan(*args), EXACT)
    states = lax.scan(lambda h, x: (affine_scan(a, b + x, h)[-1],) * 2, h0, jnp.arange(3.0))[1]
    for x in range(3):
        h0 = loop(a, b + x, h0)[-1]
        assert_close(states[x], h0, EXACT)


def test_complex_numbers(x64):
    a, b, h0 = (x + 1j * y for x, y in zip(draw((9, 2)), draw((9, 2), seed=1), strict=True))
    assert_close(
        jnp.abs(affine_scan(a, b, h0, impl="chunked") - loop(a, b, h0)), np.zeros((9, 2)), EXACT
    )
    gradient = lambda f: jit(jax.grad(lambda *x: jnp.abs(f(*x)).sum(), (0, 1, 2)))(a, b, h0)  # noqa: E731
    ours, theirs = gradient(affine_scan), gradient(scan)
    chex.assert_trees_all_close(ours, theirs, atol=1e-13)


def test_the_result_has_the_dtype_of_b():
    a, b, h0 = draw((6, 2), dtype="float32")
    b = jnp.asarray(b, jnp.bfloat16)
    assert affine_scan(a, b, h0).dtype == jnp.bfloat16
    grads = jit(jax.grad(lambda *x: loss(affine_scan(*x).astype(jnp.float32)), (0, 1, 2)))(a, b, h0)
    assert [x.dtype.name for x in grads] == ["float32", "bfloat16", "float32"]


@pytest.mark.parametrize("kind", ["diag", "block", "dense"])
def test_short_sequences(kind):
    a, b, h0 = draw((2, 1, 1), kind, 1, dtype="float32")
    assert_close(
        affine_scan(a, b, h0, kind=kind, axis=1), loop(a, b, h0, kind, 1), EXACT_MATHS["float32"]
    )
    np.testing.assert_array_equal(affine_scan(a, b, kind=kind, axis=1), b)
    empty = jax.grad(lambda b: affine_scan(a[:, :0], b, h0, kind=kind, axis=1).sum())(
        jnp.asarray(b[:, :0])
    )
    assert empty.shape == (2, 0, 1)
    for impl in PLAIN:
        assert affine_scan(
            a[:0].repeat(9, 1), b[:0].repeat(9, 1), h0[:0], kind=kind, axis=1, impl=impl
        ).shape == (
            0,
            9,
            1,
        )


ONES = np.ones((4, 2), np.float32)


@pytest.mark.parametrize(
    ("sentence", "args", "how"),
    [
        (
            "kind='full' is unknown; legal are 'diag', 'block', 'dense', 'row', 'matrix'\\.",
            (ONES, ONES),
            {"kind": "full"},
        ),
        (
            "impl='fast' is unknown; legal are 'auto', 'kernel', 'seq",
            (ONES, ONES),
            {"impl": "fast"},
        ),
        (r"takes a of shape \(4, 2, 2\), but a has \(4, 2\)", (ONES, ONES), {"kind": "block"}),
        (r"takes a of shape \(4, 2\), but a has \(4, 1\)", (ONES[:, :1], ONES), {}),
        ("axis=2 is no time axis of b .* legal are 0 to 1", (ONES, ONES), {"axis": 2}),
        (
            "axis=-1 is no time axis of b .* legal are 0 to 0",
            (np.ones((4, 2, 2)), ONES),
            {"axis": -1, "kind": "dense"},
        ),
        (
            r"kind='row' with b of shape \(4, 2\) takes a of shape \(4,\), but a has \(4, 2\)",
            (ONES,) * 2,
            {"kind": "row"},
        ),
        (
            r"takes a of shape \(1, 4, 4\), but a has \(1, 4, 2\)",
            (ONES[None], ONES[None]),
            {"kind": "matrix"},
        ),
        (
            "axis=1 is no time axis of b .* legal are 0 to 0",
            (ONES[:, 0], ONES),
            {"axis": 1, "kind": "row"},
        ),
        (
            "axis=1 is no time axis of b .* legal are 0 to 0",
            (ONES[None], ONES[None]),
            {"axis": 1, "kind": "matrix"},
        ),
        (
            r"no time axis of b with shape \(4, 2\); it takes one before the 2",
            (ONES, ONES),
            {"kind": "matrix"},
        ),
        (
            r"h0 takes b's shape without time, \(2,\), but has \(4,\)",
            (ONES[:, 0], ONES, ONES[:, 0]),
            {"kind": "row"},
        ),
        (
            "b is of int32|a takes floating or complex numbers, but is of int32",
            (ONES.astype(int), ONES),
            {},
        ),
        ("b takes floating or complex numbers, but is of int32", (ONES, ONES.astype(int)), {}),
        (r"h0 takes b's shape without time, \(2,\), but has \(4,\)", (ONES, ONES, ONES[:, 0]), {}),
        ("a or h0 is complex; make b complex", (ONES.astype(np.complex64), ONES), {}),
        ("b is a scalar|axis=0 is no time axis", (ONES[0, 0], ONES[0, 0]), {}),
    ],
)
def test_mistakes_are_told_in_a_sentence(sentence, args, how):
    with pytest.raises(UsageError, match=sentence):
        affine_scan(*args, **how)


@pytest.mark.parametrize(
    ("sentence", "args"),
    [
        (
            r"2 lanes of b take a square of as many rows in a, but a has \[2\]",
            (((ONES, ONES),), (ONES, ONES)),
        ),
        ("lanes of b take one dtype and b's shape", ([[ONES] * 2] * 2, (ONES, ONES[:2]))),
        ("lanes of a take one dtype", ([[ONES, ONES.astype(np.float16)]] * 2, (ONES, ONES))),
        ("h0 takes one array a lane of b, 1, but has 2", (((ONES,),), (ONES,), (ONES[0], ONES[0]))),
        ("0 lanes of b", ((), ())),
    ],
)
def test_lanes_that_do_not_fit_are_told(sentence, args):
    with pytest.raises(UsageError, match=sentence):
        affine_lanes(*args)


@pytest.mark.parametrize("impl", ["sequential", "chunked", slow("associative")])
def test_a_gradient_takes_a_few_times_the_memory_of_its_inputs(impl, monkeypatch):
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    g = jax.grad(lambda a, b: loss(affine_scan(a, b, impl=impl)), (0, 1))
    used = jax.jit(g).lower(x, x).compile().memory_analysis().temp_size_in_bytes
    assert used <= 6 * x.size * 4


def test_every_rule_can_be_reached():
    found = {
        (platform, dispatch.choose_impl(platform, num_steps=steps, kernel=kernel, kind=kind))
        for platform in ("cpu", "cuda", "tpu", "other")
        for steps in (1, 10**6)
        for kernel in (False, True)
        for kind in ("diag", "row", "matrix")
    }
    assert found == {(rule.platform, rule.impl) for rule in dispatch.IMPL_RULES}


@pytest.mark.parametrize("package", ["libtpu", ""])
def test_tracing_imports_no_part_of_jax(package):
    # jax 0.11 traces and compiles a program twice if its first tracing imported Pallas for TPUs.
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "libtpu" != sys.argv[1] else find(name, *rest)
import jax, jax.numpy as jnp
from jaxpar.nn.attention import attention
from jaxpar.scan import affine_scan
args = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)] * 3
program = jax.jit(jax.grad(lambda a, b, *qkv: affine_scan(a, b).sum() + attention(*qkv).sum()))
before = set(sys.modules)
program.trace(*args)
print(*sorted(name for name in set(sys.modules) - before if name.startswith(("jax.", "jax._src."))))
"""
    traced = subprocess.run(
        [sys.executable, "-c", code, package], capture_output=True, text=True, check=True
    )
    assert traced.stdout.split() == []


def with_resets(kind, batch=3, length=30):
    """A recurrence with and without a NaN and an infinity, each before a reset."""
    shape = (length, batch)
    if kind != "diag":
        shape = (length, batch, 2)
    a, b, h0 = draw(shape, kind)
    a[7] = a[20] = 0
    bad = b.copy()
    bad[3, 0] = np.nan
    bad[15, 1] = np.inf
    sees = np.zeros((length, batch), bool)
    sees[3:7, 0] = True
    sees[15:20, 1] = True
    documents = np.zeros((length, batch), bool)  # with a step that sees them
    documents[:7, 0] = True
    documents[7:20, 1] = True
    if kind != "diag":
        sees = sees[..., None]
        documents = documents[..., None]
    return a, b, bad, h0, sees, documents


@pytest.mark.parametrize("kind", ["diag", "row", "block"])
@each_impl
def test_a_reset_forgets_what_is_not_finite(impl, kind, x64):
    a, b, bad, h0, sees, documents = with_resets(kind)

    def run(a, b):
        return affine_scan(a, b, h0, kind=kind, impl=impl)

    def later(a, b):
        return jnp.sum(jnp.where(sees, 0, jnp.sin(run(a, b))))

    def results(a, b):
        tangents = jax.jvp(run, (a, b), (jnp.zeros_like(a), jnp.ones_like(b)))[1]
        return run(a, b), jax.grad(later, (0, 1))(a, b), tangents

    got = jit(results)(a, bad)
    want = jit(results)(a, b)
    np.testing.assert_allclose(np.where(sees, 0, got[0]), np.where(sees, 0, want[0]), rtol=1e-12)
    assert not np.isfinite(np.asarray(got[0])[np.broadcast_to(sees, b.shape)]).any()
    gradients = [np.where(documents, 0, x[1][1]) for x in (got, want)]
    np.testing.assert_allclose(*gradients, atol=1e-12)
    np.testing.assert_allclose(np.where(sees, 0, got[2]), np.where(sees, 0, want[2]), rtol=1e-12)


@each_impl
def test_a_zero_that_resets_nothing_keeps_its_derivative(impl, x64):
    a, b, _, h0, _, _ = with_resets("diag")
    f = functools.partial(affine_scan, impl=impl)
    gradient = jit(jax.grad(lambda a: loss(f(a, b, h0))))(a)
    assert_close(gradient, jit(jax.grad(lambda a: loss(scan(a, b, h0))))(a), 1e-12)
    assert (np.abs(gradient[7]) > 1e-6).all()


@each_impl
def test_products_that_overflow_before_a_zero_do_not_matter(impl):
    rng = np.random.default_rng(0)
    a = np.exp(20 * rng.normal(size=(70, 3))).astype("float32")
    a[rng.uniform(size=a.shape) < 0.2] = 0
    b = rng.normal(size=a.shape).astype("float32")
    want = b.copy()
    with np.errstate(over="ignore"):
        for t in range(1, len(b)):
            want[t] += np.multiply(a[t], want[t - 1], where=a[t] != 0, out=np.zeros(3, "float32"))
    got = jit(functools.partial(affine_scan, impl=impl))(a, b)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-4)


@each_impl
def test_a_product_that_overflows_in_a_state_of_zero_ends_at_a_zero(impl):
    a = jnp.array([1, 1, 1e30, 1e30, 0, 1, 1], jnp.float32)
    b = jnp.array([0, 0, 0, 0, 1, 1, 1], jnp.float32)
    out = jit(functools.partial(affine_scan, impl=impl))(a, b)
    np.testing.assert_array_equal(out[4:], [1, 2, 3])


@each_impl
def test_a_product_that_underflows_forgets_nothing(impl):
    b = jnp.ones(300).at[0].set(jnp.nan)
    out = jit(functools.partial(affine_scan, impl=impl))(jnp.full(300, 0.5), b)
    assert np.isnan(out).all()


def test_a_call_outside_of_jit_is_traced_once(monkeypatch):
    a, b, _ = draw((12, 3), dtype="float32")
    want = affine_scan(a, b)
    monkeypatch.setattr(dispatch, "choose_impl", None)  # which tracing calls
    np.testing.assert_array_equal(affine_scan(a, b), want)
