"""Sums by index that depend on no order."""

import jax
import numpy as np
import pytest
from fast import jit

import envs
from jaxpar.pomdp import Despot, ParticleBelief, Pomcp, Vopp
from jaxpar.pomdp.planners.adding import add_at

# One program a shape: op by op there are forty. All that call it do as a GPU does.
added = jit(lambda table, ids, values: add_at(table, ids, values))


@pytest.fixture
def gpu_ways(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def case(count, columns=(), scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 40, count).astype(np.int32)
    ids[::7] = 2**31 - 1  # nowhere
    values = (
        scale * rng.normal(size=(count, *columns)) * 10.0 ** rng.integers(-3, 1, (count, *columns))
    ).astype(np.float32)
    return rng.normal(size=(32, *columns)).astype(np.float32), ids, values


@pytest.mark.parametrize("count, columns, scale", [(1, (), 1), (100, (2,), 1e6), (300, (), 1), (5000, (), 1e-20),
                                                   (5000, (3,), 1e30), (1 << 18, (), 1.0)])  # fmt: skip
def test_sums_are_those_of_float64_in_any_order(gpu_ways, count, columns, scale):
    table, ids, values = case(count, columns, scale)
    expected = table.astype(np.float64)
    there = ids < 32
    np.add.at(expected, ids[there], values[there].astype(np.float64))
    found = np.asarray(added(table, ids, values))
    # Each value to 2^-26 of the largest, and the rounding of sums to float32.
    bound = (
        count * np.abs(values).max() * 2.0**-25 / 32
        + 4e-7 * np.abs(expected)
        + np.abs(values).max() * 1e-6
    )
    assert (np.abs(found - expected) <= bound).all()
    order = np.random.default_rng(1).permutation(count)
    if count > 256:  # whole numbers: the same bits in whatever order
        np.testing.assert_array_equal(added(table, ids[order], values[order]), found)


@pytest.mark.parametrize("count", [200, 400])
def test_minus_infinity_stays_where_it_is(gpu_ways, count):
    table, ids, values = case(count)
    values[3] = -np.inf
    ids[3] = 5
    found = np.asarray(added(table, ids, values))
    assert found[5] == -np.inf and np.isfinite(np.delete(found, 5)).all()


def test_nothing_and_zeros(gpu_ways):
    for count in (10, 1000):
        ids, zeros = np.zeros(count, np.int32), np.zeros(count, np.float32)
        np.testing.assert_array_equal(added(np.ones(3, np.float32), ids, zeros), np.ones(3))


PLANNERS = [
    Vopp(300, 6, max_nodes=2048, max_depth=6, leaf="zero"),
    Pomcp(300, 6, max_nodes=2048, max_depth=6),
    Despot(40, 12, max_depth=6),
]


@pytest.mark.parametrize(
    "planner", [PLANNERS[0], pytest.param(PLANNERS[1], marks=pytest.mark.slow), PLANNERS[2]]
)
def test_a_plan_is_the_same_to_rounding(monkeypatch, planner):
    env, params = envs.make("Tiger")
    belief = ParticleBelief(64).init(jax.random.key(0), env, params)

    def planned():
        return jax.jit(lambda key, belief: planner.plan(key, env, params, belief))(
            jax.random.key(1), belief
        )

    action, info = planned()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    other, there = planned()
    assert int(action) == int(other)
    # Values are sums of some thousand float32 rewards of 1 to 100; draws follow preferences that differ by rounding.
    np.testing.assert_allclose(there.value, info.value, rtol=1e-3, atol=1e-2)
