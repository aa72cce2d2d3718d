"""States that are matrices, decayed by rows or multiplied by matrices, equal their loops however they are computed."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import copies
from fast import jit
from recurrences import draw, loop, scan
from tolerance import EXACT_MATHS, assert_close

from jaxpar.scan import _xla, affine_scan, dispatch

EXACT = EXACT_MATHS["float64"]
KINDS, PLAIN = ("row", "matrix"), ("sequential", "associative", "chunked")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_impl = pytest.mark.parametrize("impl", PLAIN)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_xla, "CHUNK", 4)


def loss(out):
    return jnp.sum(jnp.sin(out + 0.3))


@pytest.mark.parametrize(
    ("kind", "impl", "axis", "reverse", "starts"),
    [
        ("row", "sequential", 0, False, True),
        ("row", "associative", 1, True, False),
        ("row", "chunked", 0, True, True),
        ("matrix", "sequential", 1, True, True),
        ("matrix", "associative", 0, False, True),
        ("matrix", "chunked", 1, False, False),
    ],
)
def test_values_and_derivatives_are_those_of_the_loop(kind, impl, axis, reverse, starts, x64):
    args = draw((7, 2, 2, 3) if axis == 0 else (2, 7, 2, 3), kind, axis)
    how = {"kind": kind, "axis": axis, "reverse": reverse}

    def derivatives(f):
        def g(*args):
            return loss(f(args[0], args[1], args[2] if starts else 0 * args[2], **how))

        def second(*args):
            return jax.jvp(jax.grad(g, (0, 1, 2)), args, args)[1]

        return jit(lambda *x: (jax.grad(g, (0, 1, 2))(*x), jax.jvp(g, x, x)[1], second(*x)))(*args)

    def f(a, b, h0, **how):
        return affine_scan(a, b, h0 if starts else None, impl=impl, **how)

    assert_close(
        jit(functools.partial(f, **how))(*args),
        loop(args[0], args[1], starts * args[2], **how),
        EXACT,
    )
    assert_close(derivatives(f), derivatives(scan), 1e-12)


@each_kind
@each_impl
def test_long_and_short_sequences(kind, impl, x64):
    """Three levels of chunks, a last chunk that is not full, one step, none."""
    a, b, h0 = draw((86, 2, 3), kind)
    f = jit(functools.partial(affine_scan, kind=kind, impl=impl))
    for length in (86, 1, 0):
        assert_close(f(a[:length], b[:length], h0), loop(a[:length], b[:length], h0, kind), EXACT)
    np.testing.assert_array_equal(f(a[:1], b[:1]), b[:1])


@each_kind
@each_impl
def test_half_precision_is_carried_in_float32(kind, impl):
    """A bfloat16 carry would stop at 256: from there on, adding one changes nothing."""
    b = jnp.ones((400, 1, 2), jnp.bfloat16)
    a = jnp.ones((400, 1, 1) if kind == "matrix" else (400, 1), jnp.bfloat16)

    def run(b):
        out, pull = jax.vjp(functools.partial(affine_scan, a, kind=kind, impl=impl), b)
        return out, *pull(b)

    out, grad = jit(run)(b)
    assert out.dtype == grad.dtype == jnp.bfloat16
    assert abs(float(out[-1, 0, 1]) - 400) <= 2 and abs(float(grad[0, 0, 1]) - 400) <= 2


@each_kind
@each_impl
def test_what_is_not_finite_moves_forward_only_and_the_first_transition_is_not_used(kind, impl):
    a, b, _ = draw((11, 2, 3), kind, dtype="float32")
    f = jit(functools.partial(affine_scan, kind=kind, impl=impl))
    clean = f(a, b)
    for which, place, value in ((0, 0, np.inf), (0, 6, np.inf), (0, 6, np.nan), (1, 6, -np.inf)):
        bad = [a.copy(), b.copy()]
        bad[which][place] = value
        out = f(*bad)
        np.testing.assert_array_equal(out[: place or 11], clean[: place or 11])
        assert place == 0 or not np.isfinite(out[place]).any()


@each_impl
def test_a_decay_of_zero_starts_anew(impl):
    a, b, h0 = draw((11, 2, 3), "row", dtype="float32")
    a[6, 1] = 0.0
    f = functools.partial(affine_scan, kind="row", impl=impl)
    out, grad = jit(
        lambda *x: (f(*x), jax.grad(lambda h0: jnp.sum(f(x[0], x[1], h0)[6:, 1]))(x[2]))
    )(a, b, h0)
    np.testing.assert_array_equal(out[6, 1], b[6, 1])
    np.testing.assert_array_equal(grad, np.zeros((2, 3)))


@each_kind
def test_vmap_is_a_loop(kind, x64):
    rows = list(zip(*(draw((7, 2, 3), kind, seed=seed) for seed in range(2)), strict=True))
    f = functools.partial(affine_scan, kind=kind, reverse=True, impl="chunked")
    for axes in ((0, 0, 0), (None, 1, None), (1, None, 1)):
        args = [x[0] if i is None else np.stack(x, i) for x, i in zip(rows, axes, strict=True)]
        out = jit(jax.vmap(f, axes))(*args)
        for row in range(2):
            alone = [x[0] if i is None else x[row] for x, i in zip(rows, axes, strict=True)]
            assert_close(out[row], loop(*alone, kind, reverse=True), EXACT)


def test_one_trace(x64):
    def f(rows, matrices):
        return affine_scan(*rows, kind="row"), affine_scan(*matrices, kind="matrix")

    once = jax.jit(chex.assert_max_traces(f, n=1))
    for seed in range(3):
        args = [draw((5, 2, 3), kind, seed=seed) for kind in KINDS]
        assert_close(
            once(*args), tuple(loop(*x, kind) for x, kind in zip(args, KINDS, strict=True)), EXACT
        )


def spread(text, times):
    """Returns the instructions outside fusions that make an array `times` as large as any that they read, or larger."""
    found = []
    for head, body in re.findall(r"^(\S.*) \{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        lines = [
            re.match(r"\s+(?:ROOT )?%(\S+) = \w+\[([\d,]*)\]\S* ([\w-]+)\((.*?)\)", x)
            for x in body.splitlines()
        ]
        sizes = {x[1]: math.prod(map(int, filter(None, x[2].split(",")))) for x in lines if x}
        if f"calls={head.split()[0]}," in text or f"calls={head.split()[0]}\n" in text:
            continue
        for line in filter(None, lines):
            read = max(
                (sizes.get(name, math.inf) for name in re.findall(r"%([^\s,)]+)", line[4])),
                default=math.inf,
            )
            if (
                1 < read * times <= sizes[line[1]] and read > 1
            ):  # numbers, as zeros to start from, may be spread
                found.append(line[0].strip())
    return found


@each_impl
def test_rows_never_make_an_array_of_the_states_size_of_the_decays(impl):
    a, b, _ = draw((9, 2, 96), "row", dtype="float32")

    def compiled(f):
        g = jax.grad(lambda a, b: loss(f(a, b)), (0, 1))
        return jit(lambda *x: (f(*x), g(*x))).lower(a, b).compile().as_text()

    assert spread(compiled(functools.partial(affine_scan, kind="row", impl=impl)), 96) == []
    if impl == "sequential":  # what would be found: decays made as large as the states
        assert spread(
            compiled(lambda a, b: affine_scan(jnp.tile(a[..., None], 96), b, impl=impl)), 96
        )


def test_a_gradient_copies_no_matrix_and_multiplies_at_full_precision():
    """Neither transposed nor shifted: the adjoint multiplies by what lies one step back, transposed there."""
    a, b, h0 = draw((9, 8, 2), "matrix", dtype="float32")
    g = jax.grad(lambda *x: loss(affine_scan(*x, kind="matrix", impl="sequential")), (1, 2))
    lowered = jit(g).lower(a, b, h0)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in products)
    compiled = lowered.compile()
    assert copies(compiled.as_text(), a.shape) == []
    assert compiled.memory_analysis().temp_size_in_bytes < a.nbytes


def test_auto_takes_the_loop_for_matrices_and_not_for_rows():
    for kind, impl in (("matrix", "sequential"), ("row", "chunked"), ("dense", "chunked")):
        assert dispatch.choose_impl("cuda", num_steps=99, kernel=False, kind=kind) == impl
    for kind in KINDS:
        a, b, _ = draw((9, 2, 3), kind, dtype="float32")
        traced = jax.jit(functools.partial(affine_scan, kind=kind)).trace(a, b)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ("stablehlo.while" in text) == (kind == "matrix")
