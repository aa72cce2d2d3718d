"""Items as rows are the same numbers however they are made."""

import jax.numpy as jnp
import numpy as np
import pytest

from envs.puzzles import items


def test_columns_lie_side_by_side():
    numbers, flags, floats = jnp.arange(4), jnp.arange(4) % 2 == 0, jnp.linspace(0.0, 1.0, 4) / 3
    rows = items.as_items(numbers, flags, floats)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(rows, np.stack([np.arange(4), [1, 0, 1, 0], np.asarray(floats)], 1, dtype=np.float32))


@pytest.mark.parametrize("way", [items._stacked, items._chosen])  # of CPUs, and of the others
def test_both_ways_put_each_column_in_its_place(way):
    parts = [jnp.asarray(column) for column in np.random.default_rng(0).random((5, 7), np.float32)]
    np.testing.assert_array_equal(way(*parts), np.asarray(parts).T)
