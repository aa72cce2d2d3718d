import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from jaxpar.rl.buffer import add, empty_buffer, sample
from jaxpar.types import UsageError


def test_a_ring_is_a_queue_that_forgets_the_oldest():
    row = {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int8)}
    buffer, queue, put = empty_buffer(row, 7), collections.deque(maxlen=7), jit(add)
    rng = np.random.default_rng(0)
    for round_ in range(40):
        count = 4
        keep = rng.random(count) < 0.6
        rows = {
            "x": rng.standard_normal((count, 2), np.float32),
            "y": rng.integers(-99, 99, count, np.int8),
        }
        buffer = put(buffer, rows, jnp.asarray(keep))
        queue.extend((rows["x"][i].tolist(), int(rows["y"][i])) for i in np.flatnonzero(keep))
        size, head = int(buffer.size), int(buffer.head)
        assert size == len(queue), round_
        order = [(head - size + i) % 7 for i in range(size)]
        held = [(buffer.rows["x"][i].tolist(), int(buffer.rows["y"][i])) for i in order]
        assert held == list(queue), round_


def test_a_full_load_fits_and_more_does_not():
    buffer = add(
        empty_buffer(jax.ShapeDtypeStruct((), jnp.int32), 3), jnp.arange(3), jnp.ones(3, bool)
    )
    assert buffer.rows.tolist() == [0, 1, 2] and int(buffer.size) == 3
    with pytest.raises(UsageError, match="4 rows at once do not fit into a buffer of capacity=3"):
        add(buffer, jnp.arange(4), jnp.ones(4, bool))
    with pytest.raises(UsageError, match="capacity=0"):
        empty_buffer(jax.ShapeDtypeStruct((), jnp.int32), 0)


def test_samples_are_uniform_over_what_is_held():
    buffer = empty_buffer(jax.ShapeDtypeStruct((), jnp.int32), 8)
    buffer = add(buffer, jnp.arange(10, 15), jnp.array([True, True, False, True, True]))
    drawn = np.asarray(sample(jax.random.key(0), buffer, 4000))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [10, 11, 13, 14]
    assert abs(counts - 1000).max() < 4 * np.sqrt(4000 * 0.25 * 0.75)
