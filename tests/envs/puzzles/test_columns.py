"""Items as rows are the same numbers however they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs.puzzles import items


def test_columns_lie_side_by_side():
    numbers, flags, floats = jnp.arange(4), jnp.arange(4) % 2 == 0, jnp.linspace(0.0, 1.0, 4) / 3
    rows = items.as_items(numbers, flags, floats)
    assert rows.dtype == jnp.float32
    np.testing.assert_array_equal(
        rows, np.stack([np.arange(4), [1, 0, 1, 0], np.asarray(floats)], 1, dtype=np.float32)
    )


@pytest.mark.parametrize("way", [items._stacked, items._chosen])  # of CPUs, and of the others
def test_both_ways_put_each_column_in_its_place(way):
    parts = [jnp.asarray(column) for column in np.random.default_rng(0).random((5, 7), np.float32)]
    np.testing.assert_array_equal(way(*parts), np.asarray(parts).T)


@pytest.mark.parametrize("name", ["TSP-10", "CVRP-10", "Knapsack-20", "Countdown-4"])
def test_what_is_told_does_not_hang_on_the_way(name, monkeypatch):
    env, params = envs.make(name)
    states = jax.jit(jax.vmap(lambda key: env.init(key, params)))(
        jax.random.split(jax.random.key(0), 3)
    )

    def told():
        return jax.jit(jax.vmap(lambda state: env.observe(jax.random.key(0), state, None, params)))(
            states
        )

    before = told()
    monkeypatch.setattr(items, "_stacked", items._chosen)  # as on an accelerator
    np.testing.assert_array_equal(told(), before)
    assert before.shape[1:] == env.observation_space(params).shape
