"""The noise of a token: a function of key, seed, position and lineage, and of nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.decode import gumbel, token_keys
from jaxpar.types import UsageError

KEY = jax.random.key(3)
draw = jax.jit(gumbel, static_argnums=4)


def rows(*columns):
    return [np.array(column, np.int32) for column in columns]


def test_noise_is_that_of_one_token_alone():
    seeds, positions, lineage = rows([7, 7, 2, 0, 1, 1], [5, 6, 5, 0, 9, 1], [0, 0, 1, 3, 0, 9])
    got = draw(KEY, seeds, positions, lineage, 4)
    for row, numbers in enumerate(zip(seeds, positions, lineage, strict=True)):
        key = KEY
        for number in numbers:
            key = jax.random.fold_in(key, number)
        np.testing.assert_array_equal(
            got[row], jax.random.gumbel(key, (4,), jnp.float32, mode="high")
        )


def test_the_place_in_the_batch_does_not_enter():
    seeds, positions, lineage = rows([4, 9, 4, 1, 4, 0], [3, 3, 3, 8, 3, 0], [0, 0, 0, 2, 1, 0])
    got = np.asarray(draw(KEY, seeds, positions, lineage, 4))
    for order in ([3, 0, 4, 2, 1, 5], [1] * 6):
        np.testing.assert_array_equal(
            draw(KEY, seeds[order], positions[order], lineage[order], 4), got[order]
        )
    np.testing.assert_array_equal(got[0], got[2])  # one prompt, one seed
    assert (got[0] != got[4]).all()  # siblings


def test_all_four_enter_each_in_its_own_place():
    seeds, positions, lineage = rows([1, 2, 1, 1, 2, 1], [1, 1, 2, 1, 2, 2], [1, 1, 1, 2, 1, 2])
    noise = np.asarray(draw(KEY, seeds, positions, lineage, 4))
    assert len(np.unique(noise)) == noise.size
    assert (np.asarray(draw(jax.random.key(4), seeds, positions, lineage, 4)) != noise).all()


def test_noise_of_any_shape_is_float32_in_any_precision(x64):
    seeds, positions, lineage = (each.reshape(2, 3) for each in rows(range(6), range(6), [0] * 6))
    got = draw(KEY, seeds, positions, lineage, 4)
    assert got.shape == (2, 3, 4) and got.dtype == jnp.float32
    with jax.enable_x64(False):
        flat = draw(KEY, *(each.reshape(-1) for each in (seeds, positions, lineage)), 4)
    np.testing.assert_array_equal(got.reshape(6, 4), flat)


def test_the_law_of_argmax_is_softmax():
    num, logits = 20_000, jnp.array([0.0, 1.0, -1.0, 2.0, -4.0])
    zeros, positions = jnp.zeros(num, jnp.int32), jnp.arange(num, dtype=jnp.int32)
    tokens = (logits[None] + draw(KEY, zeros, positions, zeros, 5)).argmax(-1)
    law, counts = np.asarray(jax.nn.softmax(logits)), np.bincount(tokens, minlength=5)
    assert (abs(counts - num * law) < 4 * np.sqrt(num * law * (1 - law))).all()


def test_the_largest_values_of_a_large_vocabulary_are_not_tied():
    noise = np.sort(draw(KEY, *rows([0], [0], [0]), 2**18)[0])[-256:]
    assert len(np.unique(noise)) == 256  # about four are lost where u has 23 bits


def test_unequal_shapes_are_refused():
    seeds, positions, _ = rows([1, 2], [1], [0])
    with pytest.raises(UsageError, match=r"one shape, not \[2\], \[1\], \[2\]\.$"):
        token_keys(KEY, seeds, positions, seeds)
