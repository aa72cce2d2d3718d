"""Numbers that are all different are those of a shuffle's first steps."""

import itertools

import jax
import numpy as np
import pytest

from jaxpar.env import distinct
from jaxpar.types import UsageError


@pytest.mark.parametrize(("num", "count"), [(1, 1), (4, 4), (6, 3), (36, 10), (20, 16)])
def test_they_are_the_first_of_a_shuffle(num, count):
    def shuffle(places):
        row = list(range(num))
        for step, place in enumerate(places):
            row[step], row[place] = row[place], row[step]
        return row[:count]

    keys = jax.random.split(jax.random.key(0), 40)
    places = jax.vmap(lambda key: jax.random.randint(key, (count,), np.arange(count), num))(keys)
    got = np.asarray(jax.jit(jax.vmap(lambda key: distinct(key, num, count)))(keys))
    np.testing.assert_array_equal(got, [shuffle(row) for row in np.asarray(places)])
    assert got.dtype == np.int32 and all(len({*row}) == count for row in got.tolist())


def test_all_orders_are_alike():
    """Chi-square over the 60 ordered triples of five, 59 degrees of freedom, p = 1e-4."""
    drawn = jax.jit(jax.vmap(lambda key: distinct(key, 5, 3)))(
        jax.random.split(jax.random.key(1), 30_000)
    )
    counts = {triple: 0 for triple in itertools.permutations(range(5), 3)}
    for triple in map(tuple, np.asarray(drawn).tolist()):
        counts[triple] += 1
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 109


def test_many_are_those_of_a_permutation():
    key = jax.random.key(2)
    np.testing.assert_array_equal(distinct(key, 40, 17), jax.random.permutation(key, 40)[:17])


@pytest.mark.parametrize("count", [0, 6])
def test_more_than_there_are(count):
    with pytest.raises(
        UsageError, match=f"distinct draws 1 to 5 of the numbers below 5, not {count}"
    ):
        distinct(jax.random.key(0), 5, count)
