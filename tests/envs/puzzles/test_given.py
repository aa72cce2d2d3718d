import copy

import jax
import numpy as np
import pytest

from envs.puzzles.given import Given, check_generator
from jaxpar.types import UsageError

LEVELS = [{"numbers": np.arange(3) + i, "target": np.int32(i)} for i in range(3)]


def test_given_is_hashed_by_value_and_draws_each_equally_often():
    given = Given.of(*LEVELS)
    assert (
        given == Given.of(*LEVELS)
        and hash(given) == hash(Given.of(*LEVELS))
        and given != Given.of(*LEVELS[:2])
    )
    assert copy.deepcopy(given) == copy.copy(given) == given
    drawn = jax.vmap(given)(jax.random.split(jax.random.key(0), 3000))
    assert (np.asarray(drawn["numbers"])[:, 0] == drawn["target"]).all()
    assert abs(np.bincount(drawn["target"]) - 1000).max() < 150
    one = Given.of(LEVELS[1])(jax.random.key(1))
    np.testing.assert_array_equal(one["numbers"], LEVELS[1]["numbers"])
    for level, same in zip(given.levels(), LEVELS, strict=True):
        jax.tree.map(np.testing.assert_array_equal, level, same)


def test_what_is_no_instance_is_refused():
    with pytest.raises(UsageError, match="holds no instance"):
        Given.of()
    with pytest.raises(UsageError, match="instance 1 of Given.of has arrays"):
        Given.of(LEVELS[0], {"numbers": np.arange(4), "target": np.int32(0)})
    with pytest.raises(UsageError, match="takes a generator, .* not 'uniform'"):
        check_generator("Knapsack", "uniform", tuple, "Uniform")
    with pytest.raises(
        UsageError, match="Knapsack takes a generator of builtins.tuple .*, but Given draws"
    ):
        check_generator("Knapsack", Given.of(*LEVELS), tuple, "Uniform")
