"""The tensor tree against a tree of dictionaries, and its parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from plain_tree import PlainTree, Recorded, RecordedVopp, recorded
from pomdp_worlds import Known, Leaving, Tiger

from envs.pomdp.rocksample import RockSample
from jaxpar.pomdp import ParticleBelief, Pomcp, Vopp
from jaxpar.pomdp.planners._loops import while_live
from jaxpar.pomdp.planners.tree import EMPTY, DenseChildren, HashedChildren, empty_tree, insert
from jaxpar.types import UsageError


def named(tree, children):
    """Rows of a tensor tree by history."""
    edge, key, node = (np.asarray(x) for x in children.links(tree.children))
    parents = {
        int(n): (int(e), int(k)) for e, k, n in zip(edge, key, node, strict=True) if n != EMPTY
    }
    owners = {
        int(tree.edges[v, a]): (int(v), int(a))
        for v, a in np.argwhere(np.asarray(tree.edges) != EMPTY)
    }
    assert sorted(owners) == list(range(int(tree.num_edges)))
    assert sorted(parents) == list(range(1, int(tree.num_nodes)))

    def of_node(n):
        return () if n == 0 else of_edge(parents[n][0]) + (parents[n][1],)

    def of_edge(e):
        return of_node(owners[e][0]) + (owners[e][1],)

    return {of_node(n): n for n in range(int(tree.num_nodes))}, {
        of_edge(e): e for e in range(int(tree.num_edges))
    }


WORLDS = {
    "tiger": (Tiger(), Tiger().default_params.replace(leaf=3.0), Known(0.5), 2),
    "leaving": (Leaving(), Leaving().default_params, None, 1),
    "rocks": (RockSample(3, 2), RockSample(3, 2).default_params, None, 3),
}


KINDS = {"dense": ("dense", "leaf", 2.0), "hashed": ("hashed", "mask", 8.0)}
PAIRS = {("tiger", "dense"), ("rocks", "hashed"), ("leaving", "dense")}


@pytest.mark.parametrize(
    ("world", "back_end", "unvisited", "widen"),
    [
        pytest.param(world, *KINDS[kind], marks=[] if (world, kind) in PAIRS else pytest.mark.slow)
        for world in WORLDS
        for kind in KINDS
    ],
)
def test_equals_a_plain_tree_node_for_node(world, back_end, unvisited, widen):
    env, params, belief, num_observations = WORLDS[world]
    belief = ParticleBelief(32).init(jax.random.key(1), env, params) if belief is None else belief
    inner = DenseChildren(num_observations) if back_end == "dense" else HashedChildren()
    leaf = "zero" if world == "leaving" else "heuristic"
    options = {"leaf": leaf, "unvisited": unvisited, "widen": widen}
    planner = RecordedVopp(32, 8, max_depth=5, eta=0.3, children=Recorded(inner), **options)
    tree, log = recorded(planner, env, params, belief, jax.random.key(0))
    plain = PlainTree(planner, 0.95)
    plain.replay(log)
    nodes, edges = named(tree, inner)
    assert set(nodes) == set(plain.nodes) and set(edges) == set(plain.edges)
    assert int(tree.overflow) == 0 and len(plain.nodes) > 10
    for history, (visits, leaf_sum, leaf_visits, value) in plain.nodes.items():
        row = nodes[history]
        assert (int(tree.node_visits[row]), int(tree.leaf_visits[row])) == (visits, leaf_visits)
        np.testing.assert_allclose(float(tree.leaf_sum[row]), leaf_sum, rtol=1e-5, atol=1e-4)
        if history:
            np.testing.assert_allclose(
                float(tree.weighted[row]), visits * value, rtol=1e-4, atol=1e-3
            )
    for history, (visits, rewards, psi, value) in plain.edges.items():
        row = edges[history]
        assert int(tree.edge_visits[row]) == visits
        got = [float(x[row]) for x in (tree.reward_sum, tree.psi, tree.value)]
        np.testing.assert_allclose(got, [rewards, psi, value], rtol=1e-4, atol=1e-3)


FULL = {"max_depth": 6, "max_nodes": 8, "max_edges": 4096, "children": DenseChildren(2)}


@pytest.mark.parametrize(
    "planner",
    [
        Vopp(64, 100, leaf="rollout", eta=0.1, depth_scale=6.0, **FULL),
        Vopp(64, 100, leaf="rollout", eta=0.1, depth_scale=6.0, sweep="tree", **FULL),
        Pomcp(64, 100, backup="best", **FULL),
    ],
    ids=["visited", "tree", "best"],
)
def test_edges_of_a_full_tree_hold_the_sums_of_the_nodes_below_them(planner):
    """And edges that ended hold 0: a simulation that is nowhere must not write the last node."""
    search = jax.jit(lambda key: planner.search(key, Tiger(), Tiger().default_params, Known(0.5)))
    tree = search(jax.random.key(0)).tree
    edge, _, node = planner.children.links(tree.children)
    mass = jnp.where(node == EMPTY, 0.0, tree.weighted.at[node].get(mode="clip"))
    assert int(tree.overflow) > 0 and int(tree.num_nodes) == 8
    want = jnp.zeros(tree.future_sum.shape).at[edge].add(mass)
    np.testing.assert_allclose(tree.future_sum, want, rtol=1e-3, atol=2.0)


@pytest.mark.parametrize(
    "planner",
    [
        Vopp(1, 60, eta=0.1, expand_after=3, leaf="zero", depth_scale=30.0),
        Pomcp(1, 60, expand_after=2, leaf="zero"),
    ],
    ids=["vopp", "pomcp"],
)
def test_simulations_stop_at_a_node_until_it_has_its_visits(planner):
    """One at a time: exactly the first `expand_after` of those that arrive stop there, and none goes on before."""
    search = jit(lambda key: planner.search(key, Tiger(), Tiger().default_params, Known(0.5)))
    tree = search(jax.random.key(0)).tree
    used = slice(1, int(tree.num_nodes))
    visits, stopped = np.asarray(tree.node_visits)[used], np.asarray(tree.leaf_visits)[used]
    assert (stopped == np.minimum(visits, planner.expand_after)).all() and (
        visits > planner.expand_after
    ).any()
    with pytest.raises(UsageError, match='expand_after=2 needs unvisited="leaf"'):
        Vopp(expand_after=2, unvisited="mask")


def test_insertion_gives_equal_slots_one_id_and_counts_what_has_no_room():
    table = jnp.full((8,), EMPTY, jnp.int32).at[5].set(0)
    slots, wanted = (
        jnp.asarray([5, 2, 2, 7, 1, 1, 3]),
        jnp.asarray([True, True, True, True, True, True, False]),
    )
    table, ids, count, made = insert(table, slots, wanted, jnp.asarray(1), 3)
    assert ids.tolist() == [0, 1, 1, 2, EMPTY, EMPTY, EMPTY]
    assert int(count) == 3 and made.tolist() == [False, True, False, True, False, False, False]
    assert table.tolist() == [EMPTY, EMPTY, 1, EMPTY, EMPTY, 0, EMPTY, 2]


def test_hashed_and_dense_name_the_same_children():
    rng = np.random.default_rng(0)
    dense, hashed, count = DenseChildren(50), HashedChildren(), [jnp.asarray(1)] * 2
    tables, names = [dense.empty(5000, 100), hashed.empty(5000, 100)], [{}, {}]
    for _ in range(20):
        edges, keys = (jnp.asarray(rng.integers(0, high, 200), jnp.int32) for high in (100, 50))
        wanted = jnp.asarray(rng.random(200) < 0.8)
        for i, back_end in enumerate((dense, hashed)):
            tables[i], ids, count[i] = back_end.find(tables[i], edges, keys, wanted, count[i], 5000)
            for e, k, w, got in zip(*(x.tolist() for x in (edges, keys, wanted, ids)), strict=True):
                assert (got != EMPTY) == w
                assert not w or names[i].setdefault((e, k), got) == got
    assert set(names[0]) == set(names[1]) and int(count[0]) == int(count[1]) == len(names[0]) + 1
    assert all(len(set(n.values())) == len(n) for n in names)


def test_keys_outside_a_dense_row_find_no_room():
    table, ids, count = DenseChildren(2).find(
        DenseChildren(2).empty(4, 4),
        jnp.zeros(3, jnp.int32),
        jnp.asarray([0, 2, -1]),
        jnp.ones(3, bool),
        jnp.asarray(1),
        4,
    )
    assert ids.tolist() == [1, EMPTY, EMPTY] and int(count) == 2


def test_capacities_that_int32_cannot_index_are_refused():
    with pytest.raises(UsageError, match="int32"):
        empty_tree(3000, 2**20, 2**20, DenseChildren(2))
    with pytest.raises(UsageError, match="hash table"):
        empty_tree(3, 4, 2**20, DenseChildren(2**12))


def test_levels_end_when_nobody_lives_and_a_batch_keeps_one_count_for_all():
    """An unbatched number of levels (out_axes None) is what spares the trees of a batch a copy at each of them."""

    def walked(last):
        first = (jnp.zeros((3,)), jnp.ones((3,), bool))
        return while_live(
            jnp.asarray(9), lambda d, c: (c[0] + c[1], c[1] & (d < last)), first, lambda c: c[1]
        )

    count, (passed, _) = walked(2)
    assert int(count) == 3 and passed.tolist() == [3, 3, 3]
    assert int(walked(99)[0]) == 9
    count, (passed, _) = jax.vmap(walked, out_axes=(None, 0))(jnp.asarray([0, 4, 1]))
    assert int(count) == 5 and passed[:, 0].tolist() == [1, 5, 2]
