"""The look-back kernel against a float64 loop, on a GPU or in Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter

from jaxpar.lower.lookback import Tile
from jaxpar.scan import _triton

pytestmark = [triton_interpreter.NEEDED, pytest.mark.gpu(optional=True)]
SMALL = Tile(8, 4, 4, 4)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    if jax.default_backend() != "gpu":
        triton_interpreter.install(monkeypatch)


def loop(a, b, start, axis, reverse, adjoint):
    """The recurrence in float64, blocks last."""
    a = np.moveaxis(
        np.stack([np.stack([np.asarray(x, float) for x in row], -1) for row in a], -2), axis, 0
    )
    b = np.moveaxis(np.stack([np.asarray(x, float) for x in b], -1), axis, 0)
    h = (
        np.zeros(b.shape[1:])
        if start is None
        else np.stack([np.asarray(x, float) for x in start], -1)
    )
    out, before = np.empty(b.shape), None
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        matrix = a[t] if not adjoint else np.zeros(a[t].shape) if before is None else a[before]
        h = np.einsum("...ij,...j->...i", matrix, h) + b[t]
        out[t], before = h, t
    out = np.moveaxis(out, 0, axis)
    return [out[..., i] for i in range(out.shape[-1])]


def draw(k, shape, axis, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), k * k + 2 * k)
    rest = shape[:axis] + shape[axis + 1 :]
    a = [
        [jax.random.uniform(keys[i * k + j], shape) * (0.9 if i == j else 0.3) for j in range(k)]
        for i in range(k)
    ]
    b = [jax.random.normal(key, shape) for key in keys[k * k : k * k + k]]
    start = [jax.random.normal(key, rest) for key in keys[k * k + k :]]
    return jax.tree.map(lambda x: x.astype(dtype), (a, b, start))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    ("shape", "axis"), [((37, 5), 0), ((2, 37, 5), 1), ((3, 37), 1), ((9, 2, 3), 0), ((1, 1, 2), 1)]
)
def test_states(k, shape, axis, reverse):
    a, b, start = draw(k, shape, axis)
    got = _triton.affine(a, b, start, axis=axis, reverse=reverse, tile=SMALL)
    np.testing.assert_allclose(got, loop(a, b, start, axis, reverse, False), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_the_adjoint_form_takes_coefficients_of_the_step_before(k, reverse):
    a, b, _ = draw(k, (2, 37, 5), 1)
    got = _triton.affine(a, b, axis=1, reverse=reverse, adjoint=True, tile=SMALL)
    np.testing.assert_allclose(got, loop(a, b, None, 1, reverse, True), rtol=1e-5, atol=3e-6)


def test_without_a_start_the_first_transition_does_not_matter():
    a, b, _ = draw(1, (20, 3), 0)
    bad = [[a[0][0].at[0].set(jnp.inf)]]
    run = lambda a: _triton.affine(a, b, axis=0, reverse=False, tile=SMALL)  # noqa: E731
    np.testing.assert_array_equal(run(bad), run(a))


def test_the_carry_of_bfloat16_is_float32():
    a, b, _ = draw(1, (64, 4), 0, "bfloat16")
    a = [[jnp.full_like(a[0][0], 0.99)]]
    (got,) = _triton.affine(a, b, axis=0, reverse=False, tile=SMALL)
    (want,) = loop(a, b, None, 0, False, False)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, float), want, rtol=2**-7, atol=1e-6
    )  # one rounding; the interpreter truncates


def test_a_bad_step_spoils_no_earlier_one():
    a, b, _ = draw(1, (40, 3), 0)
    b = [b[0].at[21, 1].set(jnp.nan)]
    (got,) = _triton.affine(a, b, axis=0, reverse=False, tile=SMALL)
    bad = np.isnan(np.asarray(got))
    assert not bad[:21].any() and bad[21:, 1].all() and not bad[:, [0, 2]].any()


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_forgets_what_is_not_finite(k, reverse):
    """In the tile of the reset and in later ones; and a product that underflows forgets nothing."""
    a, b, start = draw(k, (60, 3), 0)
    position = 40
    if reverse:
        position = 20
    a = jax.tree.map(lambda x: x.at[position].set(0), a)
    spoilt = [x.at[3].set(jnp.nan).at[-3].set(jnp.nan) for x in b]
    got = _triton.affine(a, spoilt, start, axis=0, reverse=reverse, tile=SMALL)
    want = loop(a, b, start, 0, reverse, False)
    seen = slice(40, 57)
    if reverse:
        seen = slice(4, 21)
    assert all(np.isfinite(x[seen]).all() for x in got)
    pair = [[x[seen] for x in states] for states in (got, want)]
    np.testing.assert_allclose(*pair, rtol=1e-5, atol=3e-6)


def test_a_product_that_underflows_forgets_nothing():
    a = [[jnp.full((400, 2), 0.5)]]
    b = [jnp.ones((400, 2)).at[0].set(jnp.nan)]
    (out,) = _triton.affine(a, b, axis=0, reverse=False, tile=SMALL)
    assert np.isnan(out).all()


@pytest.mark.parametrize("has_start", [False, True])
def test_a_zero_of_one_lane_is_seen_next_to_nan(has_start):
    """A tile with a transition of 0 runs another scan: also if it has NaN, and for one lane."""
    a, b, start = draw(1, (60, 3), 0)
    a = [[a[0][0].at[0, 0].set(0).at[41, 1].set(0).at[41, 2].set(jnp.nan)]]
    spoilt = [b[0].at[3, 1].set(jnp.nan)]
    first = None
    if has_start:
        first = start
        start = [start[0].at[0].set(jnp.nan)]
    else:
        start = None
    (got,) = _triton.affine(a, spoilt, start, axis=0, reverse=False, tile=SMALL)
    (want,) = loop(a, b, first, 0, False, False)
    expected = np.array(want, float)
    expected[3:41, 1] = np.nan
    expected[41:, 2] = np.nan
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=3e-6)
