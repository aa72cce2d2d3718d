"""Places of set flags are those that NumPy lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.rollout.flags import place_by_rank, uniform_place


@pytest.mark.parametrize("num_flags", [1, 31, 32, 70, 300])
def test_places_by_rank(num_flags):
    rng = np.random.default_rng(num_flags)
    for rate in (0, 0.05, 0.5, 1):
        flags = rng.random(num_flags) < rate
        count, place = place_by_rank(jnp.asarray(flags))
        want = np.flatnonzero(flags)
        got = np.asarray(place(jnp.arange(num_flags + 3)))
        assert count == len(want)
        np.testing.assert_array_equal(got[: len(want)], want)
        assert (got[len(want) :] >= num_flags).all()


@pytest.mark.parametrize("num_flags", [4, 32, 33, 100, 257])
def test_a_place_that_is_drawn(num_flags):
    """Of rows of several agents, among them rows without a set flag and words without one."""
    rng = np.random.default_rng(num_flags)
    flags = rng.random((200, 2, num_flags)) < rng.choice([0, 0.02, 0.5, 1], (200, 2, 1))
    wild = rng.integers(0, 1000, (200, 2)).astype(np.int32)

    def place(flags, wild):
        return uniform_place(flags, lambda count: wild % jnp.maximum(count, 1).astype(jnp.int32))

    got = jax.jit(jax.vmap(place))(flags, wild)
    want = [np.flatnonzero(row)[w % row.sum()] if row.any() else 0
            for row, w in zip(flags.reshape(-1, num_flags), wild.reshape(-1), strict=True)]  # fmt: skip
    np.testing.assert_array_equal(got, np.reshape(want, (200, 2)))
    assert got.dtype == jnp.int32
