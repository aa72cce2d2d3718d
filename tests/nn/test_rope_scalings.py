"""Rotary positions scaled by yarn and by the dynamic rule, against their formulas derived again."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.lm import LMConfig, RopeConfig
from jaxpar.nn.position import Rope
from jaxpar.types import UsageError

YARN = Rope(
    theta=1e4, factor=4.0, scaling="yarn", low_freq_factor=1.0, high_freq_factor=32.0,
    original_len=2048,
)  # fmt: skip
DYNAMIC = Rope(theta=1e4, factor=3.0, scaling="dynamic", original_len=8)


def yarn_frequencies(rope, width):
    """Each frequency from its wavelength, by bisection for the indices that make alpha and beta turns."""

    def index_of(turns):
        low, high = -float(width), 2.0 * width
        for _ in range(200):
            middle = (low + high) / 2
            wavelength = 2 * math.pi * rope.theta ** (2 * middle / width)
            if rope.original_len / wavelength > turns:
                low = middle
            else:
                high = middle
        return low

    first = max(math.floor(index_of(rope.high_freq_factor)), 0)
    last = min(math.ceil(index_of(rope.low_freq_factor)), width - 1)
    found = []
    for i in range(width // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * i / width)
        divided = min(max((i - first) / (last - first), 0.0), 1.0)
        found.append(2 * math.pi / wavelength * ((1 - divided) + divided / rope.factor))
    return np.array(found)


@pytest.mark.parametrize("width", [16, 64, 128])
def test_yarn_keeps_short_wavelengths_and_divides_long_ones(width):
    with jax.enable_x64(True):
        got = np.asarray(YARN.frequencies(width, jnp.float64))
        plain = np.asarray(Rope(theta=1e4).frequencies(width, jnp.float64))
    np.testing.assert_allclose(got, yarn_frequencies(YARN, width), rtol=1e-12)
    assert got[0] == plain[0] and got[-1] == pytest.approx(plain[-1] / 4, rel=1e-12)
    assert len(set(np.round(got / plain, 6))) > 3  # and blends those between


def test_yarn_scales_scores_by_the_square_of_its_factor():
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8))
    positions = np.arange(5)[None] + 3
    with jax.enable_x64(True):
        got = np.asarray(YARN.rotate(jnp.asarray(x), positions))
        given = Rope(scaling="yarn", factor=4.0, score_scale=0.5).scale()
        angle = positions[0][:, None] * yarn_frequencies(YARN, 8)
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[None, :, None]
    want = np.concatenate([pairs.real, pairs.imag], -1) * (0.1 * math.log(4) + 1)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert given == 0.5 and Rope(scaling="yarn", factor=1.0, score_scale=0.5).scale() == 1


@pytest.mark.parametrize(
    "rope", [Rope(theta=1e2), YARN, Rope(theta=1e2, share=0.5)], ids=["plain", "yarn", "share"]
)
def test_a_shift_of_rotated_keys_equals_a_rotation_by_the_sum(rope):
    x = np.random.default_rng(0).standard_normal((2, 5, 2, 8))
    positions = np.arange(10).reshape(2, 5)
    with jax.enable_x64(True):
        want = np.asarray(rope.rotate(jnp.asarray(x), positions + 7))
        rotated = rope.rotate(jnp.asarray(x), positions)
        got = np.asarray(rope.shift(rotated, np.full((2, 5), 7)))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_keys_of_the_dynamic_rule_are_not_shifted():
    with pytest.raises(UsageError, match="scaling=dynamic: rotated keys cannot be shifted"):
        DYNAMIC.shift(jnp.ones((1, 2, 1, 8)), np.ones((1, 2), np.int32))


def test_one_index_for_both_bounds_is_a_step():
    rope = Rope(
        theta=1e4, factor=2.0, scaling="yarn", low_freq_factor=1.0, high_freq_factor=1.1,
        original_len=7,
    )  # fmt: skip
    with jax.enable_x64(True):
        ratio = rope.frequencies(8, jnp.float64) / Rope().frequencies(8, jnp.float64)
    assert np.isfinite(ratio).all()
    assert set(np.round(np.asarray(ratio), 9)) <= {0.5, 1.0}


@pytest.mark.parametrize("length", [3, 8, 9, 20])
def test_the_dynamic_base_grows_with_a_text_longer_than_it_was_trained_for(length):
    x = np.random.default_rng(0).standard_normal((2, length, 2, 8))
    positions = np.stack([np.arange(length), np.zeros(length, int)])  # a row of its own each
    with jax.enable_x64(True):
        got = np.asarray(DYNAMIC.rotate(jnp.asarray(x), positions))
    base = 1e4 * (3 * max(length, 8) / 8 - 2) ** (8 / 6)
    angle = np.arange(length)[:, None] * base ** (-np.arange(0, 8, 2) / 8)
    pairs = (x[0, ..., :4] + 1j * x[0, ..., 4:]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(got[0], np.concatenate([pairs.real, pairs.imag], -1), rtol=1e-10)
    np.testing.assert_array_equal(got[1], x[1])
    with jax.enable_x64(True):
        plain = np.asarray(Rope().rotate(jnp.asarray(x), positions))
    assert np.array_equal(got, plain) == (length <= 8)


def test_a_head_of_one_pair_has_one_frequency_whatever_the_length():
    x = jnp.ones((1, 20, 1, 2))
    got = DYNAMIC.rotate(x, jnp.arange(20)[None])
    np.testing.assert_allclose(got, Rope().rotate(x, jnp.arange(20)[None]), rtol=1e-6)


def test_bounds_and_factors_of_other_rules_are_rejected():
    with pytest.raises(UsageError, match="high_freq_factor=1.0 must be over low_freq_factor=1.0"):
        Rope(scaling="yarn", factor=2.0, low_freq_factor=1.0, high_freq_factor=1.0)
    with pytest.raises(UsageError, match="model.rope.score_scale=2: a factor of model.rope.scal"):
        LMConfig(rope=RopeConfig(factor=2.0, score_scale=2.0))
