"""Distances, species and offspring against slow twins; many devices against one."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from plain_neat import distance, offspring_counts, random_genomes, speciate

from jaxpar.loop import run
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.neat import CANONICAL, FAST, Neat, NeatConfig, Score, Table, check_genomes, xor
from jaxpar.neat import species as module
from jaxpar.neat.distance import centres_of, distances, slot_ids
from jaxpar.types import UsageError

MODES = {"fast": FAST, "canonical": CANONICAL}


# Op by op they are dozens of programs.
begun = jit(module.empty_species, static_argnums=0)
shared = jit(module.offspring_counts, static_argnums=0)
stagnant = jit(module.update_stagnation, static_argnums=0)


def config_of(mode, **changes):
    return NeatConfig(
        2,
        2,
        **(dict(population=24, max_nodes=11, max_conns=24, mode=mode, max_species=24) | changes),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spread", [1, 1000])
def test_distances_are_the_papers(mode, spread):
    config = config_of(mode)
    genomes = random_genomes(np.random.default_rng(0), config, 24)
    # Of a pair whose larger genome has exactly so many genes, the distance is divided.
    small = float(max(genomes.on[0].sum(), genomes.on[23].sum()))
    rates = MODES[mode].replace(excess=1.5, disjoint=0.7, small=small)
    genomes = dataclasses.replace(
        genomes, innovation=genomes.innovation * spread
    )  # beyond the hash table
    centres = genomes.rows(slice(0, 5))
    got = jit(lambda g, c: distances(config, rates, g, centres_of(c)))(genomes, centres)
    want = [
        [distance(config, rates, genomes.rows(p), centres.rows(s)) for s in range(5)]
        for p in range(24)
    ]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_slot_ids_survive_collisions():
    genomes = random_genomes(np.random.default_rng(0), config_of("fast"), 6)
    centres = centres_of(genomes.rows(slice(0, 3)))
    for spread in (1, 1024, 4096):  # the last bits are then equal
        spread_out = dataclasses.replace(centres, innovation=centres.innovation * spread)
        own, ids = jit(slot_ids)(spread_out, genomes.innovation * spread)
        known = sorted({int(m) for m in (centres.innovation * spread)[centres.on]})
        for p, c in np.argwhere(genomes.on):
            mark = int(genomes.innovation[p, c]) * spread
            assert (ids[p, c] < 72) == (mark in known)
            twins = [
                int(own[s, k])
                for s, k in np.argwhere(centres.on)
                if centres.innovation[s, k] * spread == mark
            ]
            assert all(twin == ids[p, c] for twin in twins)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0, 1e9])
def test_species_are_those_of_genomes_one_by_one(mode, threshold):
    config, rates = config_of(mode), MODES[mode].replace(threshold=threshold, small=0.0)
    genomes = random_genomes(np.random.default_rng(2), config, 30)
    centres, genomes = genomes.rows(slice(0, 6)), genomes.rows(slice(6, 30))
    # Of species 0, 1, ...; equally near ones are taken in the order of slots.
    slots = [3, 0, 7, 5, 1, 9] if mode == "canonical" else [0, 1, 3, 5, 7, 9]
    before = jax.device_get(begun(config))
    numbers = np.zeros(24, np.int32)
    numbers[slots] = np.arange(6)
    alive = np.isin(np.arange(24), slots)
    before = dataclasses.replace(before, alive=alive, number=numbers, next_number=np.int32(6))
    rows = np.zeros(24, int)
    rows[slots] = np.arange(6)
    found, member = jit(
        lambda g, c: module.speciate(
            config, rates, g, jnp.arange(24), before, centres_of(c), jnp.int32(1), ()
        )
    )(genomes, centres.rows(rows))
    want = speciate(config, rates, genomes, [(n, centres.rows(n)) for n in range(6)])
    np.testing.assert_array_equal(np.asarray(found.number)[np.asarray(member)], want)
    np.testing.assert_array_equal(
        np.asarray(found.size), np.bincount(np.asarray(member), minlength=24)
    )
    np.testing.assert_array_equal(np.asarray(found.alive), np.asarray(found.size) > 0)


def test_when_slots_run_out_the_rest_joins_the_nearest():
    config = config_of("fast", max_species=3)
    rates = FAST.replace(threshold=0.01)
    genomes = random_genomes(np.random.default_rng(2), config, 24)
    centres = centres_of(genomes.rows(slice(0, 3)))
    found, member = jit(lambda g: module.speciate(
        config, rates, g, jnp.arange(24), module.empty_species(config), centres, jnp.int32(0), ()
    ))(genomes)  # fmt: skip
    member = np.asarray(member)
    assert found.alive.all() and found.size.sum() == 24
    founders = [int(np.flatnonzero(member == s)[0]) for s in range(3)]
    for p in range(24):
        near = [distance(config, rates, genomes.rows(p), genomes.rows(f)) for f in founders]
        assert near[member[p]] <= min(near) + 1e-5


def test_offspring_share_the_population():
    config = config_of("canonical", population=40, max_species=5)
    rng, empty = np.random.default_rng(0), jax.device_get(begun(config))
    for seed in range(20):
        member = rng.integers(0, 4, 40)
        fitness = rng.uniform(0, 9, 40).astype(np.float32)
        fitness[seed % 40] = -np.inf
        sizes = np.bincount(member, minlength=5)
        may = (sizes > 0) & (rng.random(5) < 0.8)
        may[member[0]] = True
        species = dataclasses.replace(empty, alive=sizes > 0, size=np.int32(sizes))
        shares = np.where(may, rng.choice([1.0, 0.25], 5), 0).astype(np.float32)
        standing = module.Standing(np.zeros(5, np.int32), shares)
        got = np.asarray(shared(config, species, standing, fitness, np.int32(member)))
        valid = np.where(np.isfinite(fitness), fitness, 0)
        means = [shares[s] * valid[member == s].sum() / max(sizes[s], 1) for s in range(5)]
        assert [int(x) for x in got] == offspring_counts(40, sizes, means, may)
        assert got.sum() == 40


def test_species_that_stand_still_have_no_offspring():
    config = config_of("canonical", max_species=3, population=6)
    species = dataclasses.replace(
        jax.device_get(begun(config)), alive=np.bool_([1, 1, 1]), number=np.int32([0, 1, 2]),
        size=np.int32([2, 2, 2]), best=np.float32([9, 5, 1]), improved=np.int32([0, 10, 12]),
    )  # fmt: skip
    fitness, member = np.float32([9, 8, 5, 5, 2, 1]), np.int32([0, 0, 1, 1, 2, 2])

    def breeds(mode, generation, stalls=False, stale=0.0):
        after, standing = stagnant(
            dataclasses.replace(config, mode=mode, rates=None), MODES[mode].replace(stale=stale), species, fitness,
            member, np.int32(generation), np.bool_(stalls),
        )  # fmt: skip
        return after, standing.share.tolist()

    assert breeds("canonical", 15)[1] == [1, 1, 1]
    after, shares = breeds("canonical", 16)
    assert shares == [0, 1, 1] and after.improved.tolist() == [0, 10, 16]
    assert breeds("canonical", 16, stale=0.25)[1] == [0.25, 1, 1]
    assert breeds("fast", 40)[1] == [1, 1, 1]  # the third has just improved
    assert breeds("canonical", 16, stalls=True)[1] == [1, 1, 0]
    assert breeds("canonical", 16, stalls=True)[0].improved.tolist() == [16, 16, 16]


def trajectory(neat, count, steps=25):
    place = (
        use_mesh(make_mesh(MeshSpec(data=count), devices=jax.devices()[:count]))
        if count
        else contextlib.nullcontext()
    )
    with place:
        state = jit(neat.init)(jax.random.key(0), None)
        inputs = jax.tree.map(lambda x: jnp.broadcast_to(x, (steps, *x.shape)), xor())
        return jax.device_get(
            jit(lambda k, s: run(neat, k, s, inputs, steps))(jax.random.key(1), state)
        )


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("mode", ["fast", pytest.param("canonical", marks=pytest.mark.slow)])
def test_devices_give_the_same_bits(mode, count):
    rates = MODES[mode].replace(add_node=0.3, add_conn=0.3, threshold=1.0)
    config = NeatConfig(
        3, 1, population=32, max_nodes=20, max_conns=32, max_species=6, mode=mode, rates=rates
    )
    neat = Neat(config, Table(tolerance=0.0))
    want = trajectory(neat, 0)
    jax.tree.map(np.testing.assert_array_equal, trajectory(neat, count), want)
    check_genomes(config, want[0].genomes)
    assert want[0].genomes.on.sum(1).max() > 6 and want[1]["species"].max() > 3


def test_a_population_that_devices_do_not_divide_is_refused():
    neat = Neat(NeatConfig(3, 1, population=9, max_nodes=8, max_conns=8), Table())
    with (
        use_mesh(make_mesh(MeshSpec(data=2), devices=jax.devices()[:2])),
        pytest.raises(UsageError, match="8 or 10"),
    ):
        neat.init(jax.random.key(0), None)


SMALL = NeatConfig(3, 1, population=12, max_nodes=8, max_conns=8, max_species=4)


def test_fitness_that_is_no_number_ranks_last_and_is_told():
    neat = Neat(SMALL)
    state = jit(neat.init)(jax.random.key(0), None)
    fitness = np.arange(12, dtype=np.float32)
    fitness[[3, 7]] = np.nan, np.inf
    tell = jit(neat.tell)
    after, info = tell(jax.random.key(1), state, fitness)
    assert (
        info["invalid"] == 2
        and after.invalid == 2
        and after.best == 11
        and info["fitness_max"] == 11
    )
    np.testing.assert_array_equal(after.champion.weight[0], np.asarray(state.genomes.weight)[11])
    after, info = tell(jax.random.key(1), state, np.full(12, np.nan, np.float32))
    assert after.invalid == 12 and after.best == module.LOWEST
    check_genomes(SMALL, after.genomes)


def test_growth_past_capacity_is_counted_and_goes_on():
    config = dataclasses.replace(
        SMALL,
        max_conns=4,
        max_nodes=5,
        rates=FAST.replace(add_node=0.5, add_conn=0.5, del_conn=0.0, del_node=0.0),
    )
    state, info = trajectory(Neat(config, Table(tolerance=0.0)), 0, 6)
    assert state.refused > 0 and info["refused"][-1] == state.refused
    check_genomes(config, state.genomes)


def test_wrong_scores_are_refused():
    neat = Neat(SMALL)
    state = jit(neat.init)(jax.random.key(0), None)
    with pytest.raises(UsageError, match=r"legal is \(12,\)"):
        neat.tell(jax.random.key(0), state, jnp.zeros(11))
    with pytest.raises(UsageError, match="no problem"):
        neat.step(jax.random.key(0), state, None)
    with pytest.raises(UsageError, match="returns a Score"):
        Neat(SMALL, lambda key, networks, inputs: networks.bias[:, 0]).step(
            jax.random.key(0), state, None
        )


def test_champions_of_large_species_live_on():
    neat = Neat(dataclasses.replace(SMALL, rates=FAST.replace(threshold=1e9)))
    state = jit(neat.init)(jax.random.key(0), None)
    after, _ = jit(neat.tell)(jax.random.key(1), state, np.arange(12, dtype=np.float32))
    np.testing.assert_array_equal(
        np.asarray(after.genomes.weight)[0], np.asarray(state.genomes.weight)[11]
    )


def test_rates_are_swept_by_vmap():
    neat = Neat(SMALL, Table(tolerance=0.0))

    def last(power):
        state = neat.init(jax.random.key(0), None)
        state = dataclasses.replace(state, rates=state.rates.replace(weight_power=power))
        return neat.step(jax.random.key(1), state, xor())[0].genomes.weight

    powers = jnp.float32([0.1, 2.0])
    many = jit(jax.vmap(last))(powers)
    for power, one in zip(powers, many, strict=True):
        np.testing.assert_allclose(jit(last)(power), one, rtol=1e-6)
    assert np.abs(many[1] - many[0]).max() > 0.1


@pytest.mark.slow
def test_a_score_may_end_the_search():
    neat = Neat(dataclasses.replace(SMALL, rates=FAST.replace(target=5.0)))
    state = jit(neat.init)(jax.random.key(0), None)
    assert not jit(neat.tell)(jax.random.key(1), state, jnp.full(12, 4.0))[0].solved
    assert jit(neat.tell)(jax.random.key(1), state, jnp.full(12, 5.0))[0].solved
    after, _ = jit(neat.tell)(
        jax.random.key(1), state, Score(jnp.arange(12.0) / 9, jnp.arange(12) == 3)
    )
    assert after.solved and after.best == jnp.float32(3 / 9)
    # The champion is the one that solves it, until a better one does.
    np.testing.assert_array_equal(after.champion.weight[0], np.asarray(state.genomes.weight)[3])
    for solves, champion in (
        (jnp.zeros(12, bool), after.champion),
        (jnp.arange(12) == 5, after.genomes.rows(slice(5, 6))),
    ):
        last, _ = jit(neat.tell)(jax.random.key(2), after, Score(jnp.arange(12.0) / 4, solves))
        np.testing.assert_array_equal(last.champion.weight, champion.weight)


def test_champion_best_and_improved_are_of_one_genome():
    """A solution beats what is none, of either kind the fitter; NaN solves nothing."""
    neat = Neat(dataclasses.replace(SMALL, rates=FAST.replace(target=50.0)))
    tell = jit(neat.tell)
    state = jit(neat.init)(jax.random.key(0), None)
    champion, held = None, (False, module.LOWEST, 0)
    generations = [  # (fitness, solves) of genomes 0, 1, ...; the champion's index, or None
        ([(4.0, False), (np.nan, True)], 0),
        ([(4.0, False), (6.0, False)], 1),
        ([(2.0, True), (3.0, True), (5.5, False)], 1),
        ([(10.0, False), (1.0, True)], None),
        ([(3.0, True), (11.0, False)], None),
        ([(12.0, False), (2.5, True)], None),
        ([(3.5, True), (20.0, False)], 0),
        ([(60.0, False), (40.0, True)], 0),
    ]
    for number, (told, index) in enumerate(generations):
        fitness = np.full(12, -1.0, np.float32)
        solved = np.zeros(12, bool)
        for place, (value, solves) in enumerate(told):
            fitness[place] = value
            solved[place] = solves
        before = state
        state, info = tell(jax.random.key(number), state, Score(fitness, solved))
        solved_now = bool((solved & np.isfinite(fitness)).any() or np.nanmax(fitness) >= 50)
        if index is not None:
            champion = jax.device_get(before.genomes.rows(slice(index, index + 1)))
            held = (held[0], fitness[index], number)
        if solved_now and not held[0]:
            assert state.solved_after == 12 * (number + 1)
            first = state.solved_after
        held = (held[0] or solved_now, *held[1:])
        assert (bool(state.solved), float(state.best), int(state.improved)) == held, number
        assert info["best"] == state.best
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.champion), champion)
    assert state.solved_after == first == 36 and state.evaluations == 12 * len(generations)
