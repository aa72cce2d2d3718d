"""Mutation, crossover and innovation: what no genome may become, and what each operator does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_neat import random_genomes

from jaxpar.neat import FAST, NeatConfig, check_genomes
from jaxpar.neat.crossover import crossover, match
from jaxpar.neat.genome import Packed, first, initial, pick_random
from jaxpar.neat.graph import reachable, singleton, unpack_set
from jaxpar.neat.innovation import NOTHING, SPLIT, Counters, Requests, assign_innovations
from jaxpar.neat.mutate import apply_edit, choose_edit, mutate_numbers
from jaxpar.neat.uniforms import Uniforms

NEVER = FAST.replace(add_node=0.0, add_conn=0.0, del_node=0.0, del_conn=0.0, toggle=0.0, reenable=0.0, weights=0.0,
                     node_perturb=0.0, node_replace=0.0, redraw=0.0)  # fmt: skip
CONFIGS = {
    kind: NeatConfig(2, 2, population=24, max_nodes=11, max_conns=20, kind=kind, activations=("tanh", "sin"),
                     evolved=("bias", "response", "time_constant"))
    for kind in ("feedforward", "recurrent")
}  # fmt: skip


@functools.cache
def compiled(kind):
    """One generation of structural change: (seed, genomes, counters, rates) -> genomes, counters, edit."""
    config = CONFIGS[kind]

    def change(seed, genomes, counters, rates):
        uniforms = Uniforms(jax.random.key(seed), config, jnp.arange(24))
        may = jnp.ones(24, bool)
        genomes = mutate_numbers(config, rates, uniforms, genomes, may)
        edit = choose_edit(config, rates, uniforms, genomes, may)
        node, mark, counters = assign_innovations(edit.requests(genomes), counters)
        return apply_edit(genomes, edit, node, mark), counters, edit

    return jit(change)


@functools.cache
def compiled_crossover(kind, mode="fast"):
    """(seed, rates, one, two, alone, equal) -> children."""
    config = dataclasses.replace(CONFIGS[kind], mode=mode)

    def cross(seed, rates, one, two, alone=False, equal=False):
        uniforms = Uniforms(jax.random.key(seed), config, jnp.arange(24))
        return crossover(
            config, rates, uniforms, one, two, *(jnp.broadcast_to(x, 24) for x in (alone, equal))
        )

    return jit(cross)


# Op by op they are dozens of programs.
assigned = jit(assign_innovations)
followers = jit(lambda slot, genomes: unpack_set(
    reachable(singleton(slot, 11), genomes.source, genomes.target, genomes.on, 11), 11
))  # fmt: skip


def begin(kind, seed):
    genomes = random_genomes(np.random.default_rng(seed), CONFIGS[kind], 24)
    return genomes, Counters(np.int32(300), np.int32(300))


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6), rates=st.tuples(*[st.floats(0, 1, width=16)] * 6), mates=st.booleans(),
    mode=st.sampled_from(["fast", "canonical"]),
)  # fmt: skip
def test_no_genome_is_ever_wrong(kind, seed, rates, mates, mode):
    config = CONFIGS[kind]
    genomes, counters = begin(kind, seed)
    names = ("add_node", "add_conn", "del_node", "del_conn", "toggle", "reenable")
    rates = FAST.replace(**dict(zip(names, rates, strict=True)), redraw=0.3)
    rng = np.random.default_rng(seed)
    for step in range(6):
        if mates:
            one, two = rng.integers(0, 24, (2, 24))
            pairs = (jax.tree.map(lambda x, i=i: np.asarray(x)[i], genomes) for i in (one, two))
            genomes = compiled_crossover(kind, mode)(
                seed + step, rates, *pairs, one == two, rng.random(24) < 0.5
            )
            check_genomes(config, genomes)
        before = counters
        genomes, counters, _ = compiled(kind)(seed + step, genomes, counters, rates)
        check_genomes(config, genomes)
        assert counters.node >= before.node and counters.innovation >= before.innovation
        assert np.asarray(genomes.innovation).max() < counters.innovation
        assert np.asarray(genomes.node_id).max() < counters.node


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), mode=st.sampled_from(["fast", "canonical"]))
def test_a_genome_with_itself_is_itself(kind, seed, mode):
    genomes, _ = begin(kind, seed)
    child = compiled_crossover(kind, mode)(
        seed, FAST.replace(average=0.5), genomes, genomes, True, True
    )
    jax.tree.map(np.testing.assert_array_equal, child, genomes)


def edges(genomes, p):
    """By mark: the identities of the ends, and the weight."""
    ids, rows = np.asarray(genomes.node_id)[p], np.flatnonzero(np.asarray(genomes.on)[p])
    ends = [np.asarray(getattr(genomes, name))[p] for name in ("source", "target")]
    marks, weights = np.asarray(genomes.innovation)[p], np.asarray(genomes.weight)[p]
    return {
        int(marks[c]): (int(ids[ends[0][c]]), int(ids[ends[1][c]]), float(weights[c])) for c in rows
    }


def relatives(seed):
    """Two populations of one history: each of 24 pairs descends from one genome, by other innovations."""
    genomes, counters = begin("recurrent", seed)
    genomes = jax.tree.map(lambda x: np.concatenate([x[:12], x[:12]]), genomes)
    rates = NEVER.replace(weights=1.0, weight_replace=1.0, add_node=0.5, add_conn=1.0, del_conn=0.3)
    for step in range(6):
        genomes, counters, _ = compiled("recurrent")(seed + step, genomes, counters, rates)
    swapped = np.r_[12:24, :12]
    return genomes, jax.tree.map(lambda x: np.asarray(x)[swapped], genomes)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_children_of_equals_have_genes_of_both(seed):
    one, two = relatives(seed)
    child = compiled_crossover("recurrent", "canonical")(seed, FAST, one, two, False, True)
    check_genomes(CONFIGS["recurrent"], child)
    for p in range(24):
        first, second, third = (edges(x, p) for x in (one, two, child))
        assert set(first) & set(second) <= set(third) <= set(first) | set(second)
        for mark, (source, target, weight) in third.items():
            homes = [parent[mark] for parent in (first, second) if mark in parent]
            assert all(home[:2] == (source, target) for home in homes) and weight in [
                home[2] for home in homes
            ]
        alive = set(np.asarray(child.node_id)[p][np.asarray(child.node_on)[p]].tolist())
        assert alive == set(range(4)) | {end for edge in third.values() for end in edge[:2]}


def test_children_of_equals_have_half_of_what_one_parent_lacks():
    counts = np.zeros((2, 2))
    for seed in range(8):
        one, two = relatives(seed)
        child = compiled_crossover("recurrent", "canonical")(seed, FAST, one, two, False, True)
        for p in range(24):
            if np.asarray(one.on | two.on)[p].sum() > 16:
                continue  # it may not fit
            first, second, third = (set(edges(x, p)) for x in (one, two, child))
            for row, own in enumerate((first - second, second - first)):
                counts[row] += len(own & third), len(own)
    assert (counts[:, 1] > 50).all()
    # Of two genes of one edge the first parent's stands, so the second parent's share may be a little less.
    assert abs(counts[0, 0] / counts[0, 1] - 0.5) < 4 * 0.5 / counts[0, 1] ** 0.5
    assert 0.3 < counts[1, 0] / counts[1, 1] < 0.5 + 2 / counts[1, 1] ** 0.5


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_children_have_the_fitter_parents_structure(seed):
    kind = "feedforward"
    one, two = begin(kind, seed)[0], begin(kind, seed + 1)[0]
    child = compiled_crossover(kind)(seed, FAST.replace(disable=1.0), one, two)
    again = compiled_crossover(kind)(seed, FAST.replace(disable=0.0), one, two)
    np.testing.assert_array_equal(again.enabled, one.on)
    for name in ("node_id", "node_on", "innovation", "source", "target", "on"):
        np.testing.assert_array_equal(getattr(child, name), getattr(one, name))
    for p in range(24):
        theirs = {int(two.innovation[p, c]): c for c in np.flatnonzero(two.on[p])}
        for c in np.flatnonzero(one.on[p]):
            other = theirs.get(int(one.innovation[p, c]))
            legal = (
                [one.weight[p, c]] if other is None else [one.weight[p, c], two.weight[p, other]]
            )
            assert child.weight[p, c] in legal
            assert child.enabled[p, c] == (
                one.enabled[p, c] and (other is None or two.enabled[p, other])
            )


def test_three_quarters_of_the_disabled_stay_disabled():
    config = NeatConfig(20, 20, population=24, max_nodes=40, max_conns=400)
    genomes = random_genomes(np.random.default_rng(0), config, 24, conns=400)
    genomes = dataclasses.replace(genomes, enabled=genomes.on)
    other = dataclasses.replace(genomes, enabled=np.zeros_like(genomes.on))
    uniforms = Uniforms(jax.random.key(0), config, jnp.arange(24))
    never = jnp.zeros(24, bool)
    child = jit(lambda a, b: crossover(config, FAST, uniforms, a, b, never, never))(genomes, other)
    share = np.asarray(child.enabled).sum() / genomes.on.sum()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / genomes.on.sum()) ** 0.5


@pytest.mark.parametrize("size", [10, 60, 300])
def test_matches_are_a_dictionarys(size):
    rng = np.random.default_rng(size)
    keys, others = (
        np.stack([rng.permutation(2 * size)[:size] for _ in range(6)]).astype(np.int32)
        for _ in range(2)
    )
    on, others_on = rng.random((2, 6, size)) < 0.6
    place, found = jit(match)(keys, on, others, others_on)
    for p in range(6):
        known = {others[p, k]: k for k in range(size) if others_on[p, k]}
        for k in range(size):
            assert found[p, k] == bool(on[p, k] and keys[p, k] in known)
            assert place[p, k] == (known[keys[p, k]] if found[p, k] else 0)


def test_equal_requests_get_equal_numbers():
    rows = [(SPLIT, 5), (3, 4), (NOTHING, 0), (SPLIT, 5), (SPLIT, 2), (3, 4), (4, 3), (NOTHING, 0)]
    requests = Requests(*map(np.int32, zip(*rows, strict=True)))
    node, mark, counters = jax.device_get(assigned(requests, Counters(np.int32(10), np.int32(100))))
    assert node[0] == node[3] != node[4] and mark[0] == mark[3] and mark[1] == mark[5] != mark[6]
    assert (int(counters.node), int(counters.innovation)) == (
        12,
        106,
    )  # two splits of two marks each, two connections
    taken = [
        {int(mark[0]), int(mark[0]) + 1},
        {int(mark[4]), int(mark[4]) + 1},
        {int(mark[1])},
        {int(mark[6])},
    ]
    assert set.union(*taken) == set(range(100, 106)) and {int(node[0]), int(node[4])} == {10, 11}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_numbers_do_not_depend_on_the_order_of_children(seed):
    rng = np.random.default_rng(seed)
    first, second = (
        rng.integers(-2, 4, 24).astype(np.int32),
        rng.integers(0, 3, 24).astype(np.int32),
    )
    second = np.where(first == NOTHING, 0, second)
    shuffle = rng.permutation(24)
    start = Counters(np.int32(0), np.int32(0))
    requests = Requests(first, second), Requests(first[shuffle], second[shuffle])
    one, two = (assigned(each, start) for each in requests)
    asks = first != NOTHING
    np.testing.assert_array_equal(
        np.where(asks, one[1], 0)[shuffle], np.where(asks[shuffle], two[1], 0)
    )
    assert [int(x) for x in one[2]] == [int(x) for x in two[2]]


def only(kind, **rates):
    genomes, counters = begin(kind, 0)
    return genomes, *compiled(kind)(1, genomes, counters, NEVER.replace(**rates))


def test_nothing_changes_by_itself():
    before, after, counters, edit = only("feedforward")
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert counters == (300, 300) and not edit.is_change.any()


def test_a_split_keeps_the_weight_and_disables_the_old():
    before, after, _, edit = only("feedforward", add_node=1.0)
    done = np.asarray(edit.adds_node)
    assert done.sum() > 5
    for p in np.flatnonzero(done):
        old, one, two, slot = (int(x[p]) for x in (edit.old, edit.row, edit.row2, edit.slot))
        assert before.enabled[p, old] and not after.enabled[p, old] and after.on[p, old]
        assert (after.source[p, one], after.target[p, one], after.weight[p, one]) == (
            before.source[p, old],
            slot,
            1,
        )
        assert (after.source[p, two], after.target[p, two]) == (slot, before.target[p, old])
        assert after.weight[p, two] == before.weight[p, old] and after.enabled[p, [one, two]].all()
        assert (
            not before.node_on[p, slot] and after.node_on[p, slot] and after.response[p, slot] == 1
        )
    for p in np.flatnonzero(~done):
        full = before.on[p].sum() > 18 or before.node_on[p].all() or not before.enabled[p].any()
        assert full and (edit.refused[p] or not before.enabled[p].any())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_connection_is_added_wherever_one_is_legal(kind):
    before, after, _, edit = only(kind, add_conn=1.0)
    grown = np.asarray(after.on).sum(1) - before.on.sum(1)
    np.testing.assert_array_equal(grown, edit.adds_conn)
    reached = np.asarray(followers(edit.target, before))
    for p in np.flatnonzero(~np.asarray(edit.adds_conn)):
        target = int(edit.target[p])
        if target < 2:  # no node lacks an edge
            sources = [
                n
                for n in np.flatnonzero(before.node_on[p])
                if kind == "recurrent" or not 2 <= n < 4
            ]
            edges = set(
                zip(before.source[p][before.on[p]], before.target[p][before.on[p]], strict=True)
            )
            for t in np.flatnonzero(before.node_on[p])[2:]:
                assert all((n, t) in edges or (n == t and kind == "feedforward") for n in sources)
            continue
        into = set(before.source[p][before.on[p] & (before.target[p] == target)])
        after_target = reached[p]
        legal = [n for n in np.flatnonzero(before.node_on[p]) if n not in into]
        if kind == "feedforward":
            legal = [n for n in legal if not after_target[n] and not 2 <= n < 4]
        assert not legal or before.on[p].all()
        assert bool(edit.refused[p]) == bool(legal and before.on[p].all())


def test_deletions_take_what_hangs_on_them():
    before, after, _, edit = only("feedforward", del_node=1.0)
    hidden = before.node_on[:, 4:].sum(1)
    np.testing.assert_array_equal(
        np.asarray(after.node_on).sum(1), before.node_on.sum(1) - (hidden > 0)
    )
    for p in np.flatnonzero(edit.del_node):
        slot = int(edit.slot[p])
        gone = before.on[p] & ((before.source[p] == slot) | (before.target[p] == slot))
        np.testing.assert_array_equal(np.asarray(after.on)[p], before.on[p] & ~gone)
    before, after, _, edit = only("feedforward", del_conn=1.0)
    np.testing.assert_array_equal(np.asarray(after.on).sum(1), np.maximum(before.on.sum(1) - 1, 0))


def test_the_paper_splits_no_connection_of_the_constant_input():
    config = dataclasses.replace(CONFIGS["feedforward"], mode="canonical")
    genomes, _ = begin("feedforward", 3)
    uniforms = Uniforms(jax.random.key(0), config, jnp.arange(24))
    edit = jit(
        lambda g: choose_edit(config, NEVER.replace(add_node=1.0), uniforms, g, jnp.ones(24, bool))
    )(genomes)
    legal = genomes.on & genomes.enabled & (genomes.source != 1)
    room = (genomes.on.sum(1) <= 18) & ~genomes.node_on.all(1)
    assert not np.any(np.asarray(edit.adds_node) & ~(legal.any(1) & room))
    assert (
        all(legal[p, edit.old[p]] for p in np.flatnonzero(edit.adds_node))
        and edit.adds_node.sum() > 5
    )


def test_the_paper_splits_the_oldest_of_few_connections():
    """Each legal one, from the first slot on, is passed with the chance 0.3, even the last: then nothing is split."""
    config = dataclasses.replace(CONFIGS["feedforward"], mode="canonical", max_conns=40)
    few = dataclasses.replace(config, num_inputs=3, num_outputs=1, max_nodes=30, initial="full")
    count = 4000
    uniforms = Uniforms(jax.random.key(1), few, jnp.arange(count))
    splits = jit(
        lambda g: choose_edit(few, NEVER.replace(add_node=1.0), uniforms, g, jnp.ones(count, bool))
    )
    for extra, shares in ((0, (0.7, 0.21)), (20, None)):
        weights, biases = np.ones((count, 40), np.float32), np.zeros((count, 30), np.float32)
        one = jax.device_get(jit(initial, static_argnums=0)(few, weights, biases))
        slots = np.arange(40)[None] < 3 + extra  # more than 14: any of them, alike
        one = dataclasses.replace(one, on=one.on | slots, enabled=one.enabled | slots)
        edit = splits(one)
        times = np.bincount(np.asarray(edit.old)[np.asarray(edit.adds_node)], minlength=40) / count
        legal = np.flatnonzero(np.asarray(one.on & (one.source != 2))[0])
        expected = shares or [1 / len(legal)] * len(legal)
        np.testing.assert_allclose(times[legal], expected, atol=4 * 0.5 / count**0.5)
        np.testing.assert_allclose(times.sum(), sum(expected), atol=0.03)


def test_toggle_and_reenable():
    before, after, _, _ = only("feedforward", toggle=1.0)
    flipped = (np.asarray(after.enabled) != before.enabled).sum(1)
    np.testing.assert_array_equal(flipped, before.on.any(1))
    before, after, _, _ = only("feedforward", reenable=1.0)
    off = before.on & ~before.enabled
    np.testing.assert_array_equal(
        np.asarray(after.enabled).sum(1), before.enabled.sum(1) + off.any(1)
    )


def test_identities_stay_unique_for_long():
    fuzz("feedforward", 300)


@pytest.mark.slow
def test_identities_stay_unique_for_100_000_generations():
    fuzz("feedforward", 100_000)


def one_meaning(genomes):
    """Whether a mark joins the same two nodes in every genome that has it."""
    ends = [
        jnp.take_along_axis(genomes.node_id, place, 1) for place in (genomes.source, genomes.target)
    ]
    mark, source, target, on = (x.reshape(-1) for x in (genomes.innovation, *ends, genomes.on))
    same = on[:, None] & on[None] & (mark[:, None] == mark[None])
    return ~jnp.any(same & ((source[:, None] != source[None]) | (target[:, None] != target[None])))


def fuzz(kind, generations):
    """Counters never fall, marks mean one thing and genomes stay right, over generations of changes as one program."""
    config = CONFIGS[kind]
    rates = FAST.replace(add_node=0.2, add_conn=0.3, del_node=0.4, del_conn=0.3)

    @jit
    def long(genomes, counters):
        def body(carry, seed):
            genomes, counters, fine = carry
            uniforms = Uniforms(jax.random.key(seed), config, jnp.arange(24))
            mates = jax.random.permutation(jax.random.key(seed + 10**6), 24)
            others = jax.tree.map(lambda x: x[mates], genomes)
            genomes = crossover(
                config, rates, uniforms, genomes, others, mates == jnp.arange(24), mates < 12
            )
            edit = choose_edit(config, rates, uniforms, genomes, jnp.ones(24, bool))
            node, mark, new = assign_innovations(edit.requests(genomes), counters)
            genomes = apply_edit(genomes, edit, node, mark)
            for values, on in (
                (genomes.node_id, genomes.node_on),
                (genomes.innovation, genomes.on),
            ):
                twice = (values[:, :, None] == values[:, None]) & on[:, :, None] & on[:, None]
                fine &= jnp.sum(twice) == jnp.sum(on)
                fine &= jnp.max(jnp.where(on, values, 0)) < 2**31 - 1
            fine &= one_meaning(genomes) & jnp.all(genomes.innovation < new.innovation)
            fine &= jnp.all(genomes.node_id < new.node)
            fine &= (new.node >= counters.node) & (new.innovation >= counters.innovation)
            return (genomes, new, fine), None

        return jax.lax.scan(body, (genomes, counters, jnp.bool_(True)), jnp.arange(generations))[0]

    genomes, counters = begin(kind, 0)
    # Random genomes share no history: all begin as the first.
    genomes, counters, fine = long(
        jax.tree.map(lambda x: jnp.repeat(x[:1], 24, 0), genomes), counters
    )
    assert fine and counters.innovation > generations
    check_genomes(config, genomes)


def test_every_place_is_picked_as_often():
    mask = np.zeros(40, bool)
    mask[[0, 3, 4, 11, 17, 22, 38, 39]] = True
    uniforms = jax.random.uniform(jax.random.key(0), (40_000,))
    place, found = jit(pick_random)(np.broadcast_to(mask, (40_000, 40)), uniforms)
    counts = np.bincount(place, minlength=40)
    assert found.all() and counts[~mask].sum() == 0
    assert ((counts[mask] - 5000) ** 2 / 5000).sum() < 41  # 7 degrees of freedom: 1e-6
    assert not jit(pick_random)(np.zeros((2, 5), bool), np.asarray(uniforms)[:2])[1].any()


def test_the_first_place_is_numpys():
    mask = np.random.default_rng(0).random((50, 6)) < 0.2
    for axis in (0, 1):
        place, found = jit(first, static_argnums=1)(mask, axis)
        np.testing.assert_array_equal(place, mask.argmax(axis))
        np.testing.assert_array_equal(found, mask.any(axis))


def test_packed_rows_are_the_genomes_rows():
    config = CONFIGS["recurrent"]
    genomes, index = random_genomes(np.random.default_rng(0), config, 24), np.asarray([5, 0, 23, 5])
    got = jit(lambda genomes, index: Packed.of(genomes).rows(config, index))(genomes, index)
    want = genomes.rows(index)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]
    jax.tree.map(np.testing.assert_array_equal, got, want)
