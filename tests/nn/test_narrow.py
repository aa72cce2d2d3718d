"""Weights of few bits and without a gradient: what they round, what they multiply, what the backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import ndtri
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn.linear import Frozen, contract, whole_weight
from jaxpar.nn.weights.narrow import LEVELS, nf4, quantise
from jaxpar.types import UsageError

AXES = ("embed", "mlp")
KINDS = {"frozen": Frozen, "int8": lambda w: quantise(w, 1), "nf4": nf4}


def drawn(shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_the_levels_are_quantiles_of_a_normal_distribution(x64):
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    up, down = (np.asarray(ndtri(np.linspace(offset, 0.5, n)[:-1])) for n in (9, 8))
    levels = np.sort(np.concatenate([-down, [0.0], up]) / up.max())
    np.testing.assert_allclose(np.array(LEVELS), levels, atol=1e-6)


def test_four_bits_are_off_by_half_the_widest_gap_at_most():
    w = drawn((3, 8, 96))
    w = w.at[0, 0, :2].set(
        jnp.array([-100.0, -84.8])
    )  # near the middle of the gap, which is the worst
    small = nf4(w)
    assert small.values.shape == (3, 8, 48) and small.values.dtype == jnp.uint8
    assert small.scales.shape == (3, 8, 3)  # blocks of 32: 64 does not divide 96
    share = (
        np.abs(np.asarray(whole_weight(small) - w)).reshape(3, 8, 3, 32)
        / np.asarray(small.scales)[..., None]
    )
    widest = np.diff(np.array(LEVELS)).max() / 2
    assert 0.99 * widest < share.max() <= widest + 1e-6
    nearest = np.array(LEVELS)[np.abs(np.asarray(w).reshape(3, 8, 3, 32, 1) / np.asarray(small.scales)[..., None, None]
                                      - np.array(LEVELS)).argmin(-1)]  # fmt: skip
    np.testing.assert_allclose(
        whole_weight(small).reshape(nearest.shape),
        nearest * np.asarray(small.scales)[..., None],
        1e-6,
    )


# Of normal numbers, contracted over 2,048: what docs/adapters.md states.
STATED = {"bfloat16": 0.00166, "int8": 0.0083, "nf4": 0.092}


@pytest.mark.parametrize("kind", STATED)
def test_errors_are_within_their_bounds_and_as_stated_beside_bfloat16(kind):
    w, x = drawn((2048, 256)), drawn((1, 64, 2048), seed=1)
    small = Frozen(w.astype(jnp.bfloat16)) if kind == "bfloat16" else KINDS[kind](w)
    off, size = (
        np.abs(np.asarray(whole_weight(small).astype(np.float32) - w)),
        np.abs(np.asarray(w)),
    )
    blocks = size.reshape(2048, 4, 64).max(2).repeat(64, 1)
    bound = {
        "bfloat16": size / 2**8,
        "int8": np.broadcast_to(size.max(0) / 254, w.shape),
        "nf4": np.diff(LEVELS).max() / 2 * blocks,
    }[kind]
    assert (off <= bound * (1 + 1e-5)).all()
    assert np.sqrt(np.square(off).mean() / np.square(size).mean()) == pytest.approx(
        STATED[kind], rel=0.02
    )
    got, want = (
        contract("btd,df->btf", x, whole_weight(small).astype(np.float32), AXES),
        np.asarray(x) @ np.asarray(w),
    )
    assert (np.abs(got - want) <= np.abs(x) @ bound + 1e-3).all()
    assert np.sqrt(np.square(got - want).mean() / np.square(want).mean()) == pytest.approx(
        STATED[kind], rel=0.05
    )


def test_what_is_rounded_stays_as_it_is():
    w = drawn((8, 128)).at[:, :64].set(0.0)
    for kind in ("int8", "nf4"):
        once = KINDS[kind](w)
        again = KINDS[kind](whole_weight(once))
        np.testing.assert_array_equal(once.values, again.values)
        np.testing.assert_allclose(once.scales, again.scales, rtol=0 if kind == "nf4" else 1e-6)
        assert not np.asarray(whole_weight(once))[:, :64].any()


@pytest.mark.parametrize("shape", [(5000, 2), (100, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_nan_stays_so(kind, shape):
    """Whole numbers have none, and XLA for CPUs leaves it out of the maxima that make scales."""
    w = drawn(shape).at[7, 1].set(jnp.nan)
    assert not np.isfinite(whole_weight(jax.jit(KINDS[kind])(w))[7, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_their_gradients_are_those_of_the_whole_weight(kind, x64):
    x, w = drawn((2, 3, 8), np.float64), KINDS[kind](drawn((8, 64), np.float64))
    g = drawn((2, 3, 64), np.float64, 1)
    got, back = jax.vjp(lambda x: contract("btd,df->btf", x, w, AXES), x)
    want = (
        np.einsum("btd,df->btf", x, whole_weight(w)),
        np.einsum("btf,df->btd", g, whole_weight(w)),
    )
    assert_close((got, back(g)[0]), want, EXACT_MATHS["float64"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_keeps_the_weight_as_it_is_stored(kind):
    x, w = drawn((2, 3, 8)), KINDS[kind](drawn((8, 64)))
    kept = jax.eval_shape(lambda x: jax.vjp(lambda x: contract("btd,df->btf", x, w, AXES), x)[1], x)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    assert size <= sum(leaf.nbytes for leaf in jax.tree.leaves(w))


def test_an_odd_axis_is_refused():
    with pytest.raises(UsageError, match="last axis is even, not of 3"):
        nf4(jnp.ones((4, 3)))
    with pytest.raises(UsageError, match="kind dict multiplies as no array"):
        whole_weight({})
