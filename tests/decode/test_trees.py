"""Trees of drafts: their masks by walking, the best one by trying all, and budgets by trying all."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.decode import Tree, allocate, best_tree, chain
from jaxpar.decode.trees import expected_tokens
from jaxpar.types import UsageError

BUSHY = Tree((-1, 0, 0, 1, 2, 2, 3, 0))


def test_what_a_node_sees_is_on_its_way_to_the_root():
    for node in range(BUSHY.size):
        way = [node]
        while way[-1]:
            way.append(BUSHY.parents[way[-1]])
        way = way[::-1]
        assert np.flatnonzero(BUSHY.ancestors[node]).tolist() == sorted(way)
        assert (
            BUSHY.paths[node].tolist() == way + [-1] * (4 - len(way))
            and BUSHY.depth[node] == len(way) - 1
        )
    assert BUSHY.max_depth == 3 and BUSHY.size == 8


def test_families():
    assert BUSHY.children.tolist() == [
        [1, 2, 7],
        [3, -1, -1],
        [4, 5, -1],
        [6, -1, -1],
        *[[-1] * 3] * 4,
    ]
    assert BUSHY.rank.tolist() == [0, 0, 1, 0, 0, 1, 0, 2]
    assert [np.flatnonzero(row).tolist() for row in BUSHY.elders] == [
        [],
        [],
        [1],
        [],
        [],
        [4],
        [],
        [1, 2],
    ]


def test_a_chain_and_the_window_of_plain_decoding():
    assert (
        chain(3) == Tree((-1, 0, 1, 2))
        and (chain(3).ancestors == np.tril(np.ones((4, 4), bool))).all()
    )
    root = chain(0)
    assert (
        root.size == 1
        and root.max_depth == 0
        and root.children.shape == (1, 0)
        and root.paths.tolist() == [[0]]
    )


def test_a_tree_is_static_and_constant():
    same = Tree(tuple(np.array(BUSHY.parents)))  # type: ignore[arg-type]
    assert same == BUSHY and hash(same) == hash(BUSHY) and repr(same) == repr(BUSHY)
    traces = []
    depths = jax.jit(lambda tree: traces.append(tree) or jnp.asarray(tree.depth), static_argnums=0)
    assert (depths(BUSHY) == depths(same)).all() and len(traces) == 1
    with pytest.raises(ValueError, match="read-only"):
        BUSHY.ancestors[0, 0] = False


@pytest.mark.parametrize(
    "parents, why",
    [
        ((), "begin with -1"),
        ((0, 0), "begin with -1"),
        ((-1, 1), "node 1 needs a parent from 0 to 0"),
        ((-1, 0, -1), "node 2 needs a parent from 0 to 1"),
        ((-1, 0.0), "whole numbers"),
    ],
)
def test_what_is_no_tree_is_refused(parents, why):
    with pytest.raises(UsageError, match=why):
        Tree(parents)


def test_a_chain_of_a_negative_length_is_refused():
    with pytest.raises(UsageError, match="length=-1 of a chain must be at least 0"):
        chain(-1)


# ---------------------------------------------------------------- the best tree


def plain_tokens(parents, rates):
    """The mean count of a tree, node by node; None where it has more depths or ranks than the table."""
    total, reached, depths = 1.0, [1.0], [0]
    for node, parent in enumerate(parents[1:], 1):
        rank, depth = parents[1:node].count(parent), depths[parent]
        if depth >= rates.shape[0] or rank >= rates.shape[1]:
            return None
        reached.append(reached[parent] * rates[depth, rank])
        depths.append(depth + 1)
        total += reached[-1]
    return total


def brute_force(rates, size):
    shapes = itertools.product(*(range(node) for node in range(1, size)))
    return max(
        value for shape in shapes if (value := plain_tokens((-1, *shape), rates)) is not None
    )


def tables():
    rng = np.random.default_rng(0)
    yield np.array([[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.2, 0.1]])  # falls with rank and depth
    yield rng.dirichlet(np.ones(4), 3)[:, :3]  # in no order
    yield np.array(
        [[0.1, 0.8], [0.0, 0.9], [0.5, 0.0], [1.0, 0.0]]
    )  # the better one comes second, and zeros


@pytest.mark.parametrize("rates", list(tables()), ids=["falling", "any", "zeros"])
def test_the_best_tree_is_that_of_trying_all(rates):
    best = {size: brute_force(rates, size) for size in range(1, 9)}
    for size in best:
        tree = best_tree(rates, size)
        assert tree.size == size and plain_tokens(tree.parents, rates) == pytest.approx(
            best[size], rel=1e-12
        )
        assert expected_tokens(tree, rates) == pytest.approx(best[size], rel=1e-12)
        assert (np.diff(tree.depth) >= 0).all()  # a level at a time
    times = {size: 1 + 0.09 * size for size in best}
    chosen = best_tree(rates, 8, times.__getitem__)
    rate = {size: best[size] / times[size] for size in best}
    assert chosen.size == max(rate, key=rate.__getitem__) and 1 < chosen.size < 8
    assert expected_tokens(chosen, rates) == pytest.approx(best[chosen.size], rel=1e-12)


def test_what_costs_the_same_is_decided_by_tokens_and_then_by_size():
    rates = np.array([[0.5, 0.0]])
    assert best_tree(rates, 3, lambda size: 1.0).size == 2  # the third node is never accepted
    assert best_tree(rates, 8, lambda size: 1.0).size == 2  # nor are there eight
    assert best_tree(rates, 3, lambda size: float(size)).size == 1


def test_nodes_outside_of_the_table_are_never_accepted():
    rates = np.array([[0.5, 0.25]])
    assert expected_tokens(Tree((-1, 0, 0, 0, 1)), rates) == 1.75


@pytest.mark.parametrize(
    "rates, size, cost, why",
    [
        ([[0.5, 0.6]], 2, None, "sum to at most 1"),
        ([[0.5, np.nan]], 2, None, "from 0 to 1"),
        ([[1.5, 0.0]], 2, None, "from 0 to 1"),
        ([0.5], 2, None, r"\[depth, rank\], not \[1\]"),
        ([[0.5, 0.1]], 4, None, "size=4 is over the nodes that 1 depths of 2 ranks have"),
        ([[0.5, 0.1]], 0, None, "at least 1"),
        ([[0.5, 0.1]], 2, lambda size: np.nan, "positive and finite"),
        ([[0.5, 0.1]], 2, lambda size: 0.0, "positive and finite"),
    ],
)
def test_rates_sizes_and_costs_are_checked(rates, size, cost, why):
    with pytest.raises(UsageError, match=why):
        best_tree(np.array(rates), size, cost)


# ---------------------------------------------------------------- budgets

share = jax.jit(allocate)
quarters = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 4]), min_size=3, max_size=3), min_size=4, max_size=4
)
COUNTS = np.array(list(itertools.product(range(4), repeat=4)))  # the first in order is the lowest


@settings(deadline=None, max_examples=60)
@given(quarters, st.integers(0, 13))
def test_a_budget_is_shared_as_by_trying_all(table, budget):
    probabilities = np.array(table) / 4  # products and sums of these are exact
    sums = np.pad(probabilities.cumprod(1).cumsum(1), ((0, 0), (1, 0)))
    values = np.where(COUNTS.sum(1) <= budget, sums[np.arange(4), COUNTS].sum(1), -1)
    best = COUNTS[values == values.max()]
    best = best[best.sum(1) == best.sum(1).min()]  # none is spent in vain
    got = share(jnp.asarray(probabilities, jnp.float32), budget)
    assert got.dtype == jnp.int32 and got.tolist() == best[-1].tolist()  # the lowest row first


def test_any_probabilities_are_shared_as_by_trying_all(x64):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        probabilities, budget = rng.uniform(size=(4, 3)), int(rng.integers(1, 12))
        sums = np.pad(probabilities.cumprod(1).cumsum(1), ((0, 0), (1, 0)))
        values = np.where(COUNTS.sum(1) <= budget, sums[np.arange(4), COUNTS].sum(1), -1)
        assert (
            share(jnp.asarray(probabilities), budget).tolist() == COUNTS[values.argmax()].tolist()
        )


def test_what_is_no_probability_is_not_hidden():
    nan, inf = jnp.nan, jnp.inf
    table = jnp.array([[0.5, nan], [1.5, 0.75], [inf, 0.9], [0.9, -1.0], [nan, 0.9], [-1.0, -1.0]])
    assert share(table, 10).tolist() == [0, 2, 0, 1, 0, 0]
    assert share(table, 2).tolist() == [0, 1, 0, 1, 0, 0]  # 1, not 1.5, times 0.75 is under 0.9
    assert share(table, 1).tolist() == [0, 1, 0, 0, 0, 0]
    assert share(jnp.ones((2, 0)), 3).tolist() == [0, 0]


def test_a_negative_budget_is_refused():
    with pytest.raises(UsageError, match="budget=-1"):
        allocate(jnp.ones((1, 1)), -1)
