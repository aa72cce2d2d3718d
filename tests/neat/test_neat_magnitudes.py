"""Offspring for fitnesses of any magnitude and sign: nothing overflows, and selection goes on."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.neat import Neat, NeatConfig, check_genomes
from jaxpar.neat import species as module

SPECIES = 5


@functools.cache
def program(population):
    """Worths, children by species and mean of a generation of so many."""
    config = NeatConfig(2, 1, population, max_nodes=4, max_conns=4, max_species=SPECIES)

    @jit
    def run(fitness, member, share):
        size = jax.numpy.zeros(SPECIES, int).at[member].add(1)
        species = dataclasses.replace(module.empty_species(config), alive=size > 0, size=size)
        standing = module.Standing(size, jax.numpy.where(size > 0, share, 0.0))
        counts = module.offspring_counts(config, species, standing, fitness, member)
        return module.offspring_worth(fitness), counts

    return run


def children(fitness, member, share=1.0):
    """Children by species; not a number is the lowest, as in a generation."""
    fitness = np.where(np.isfinite(fitness), fitness, -np.inf).astype(np.float32)
    share = np.broadcast_to(np.float32(share), SPECIES)
    worth, counts = jax.device_get(program(len(fitness))(fitness, np.int32(member), share))
    assert np.isfinite(worth).all() and (worth >= 0).all()
    assert counts.sum() == len(fitness) and (counts >= 0).all()
    return counts


def assert_better_have_as_many(fitness, member, counts):
    """A species all of whose members are at least as fit as all of another has as many, up to one."""
    finite = np.where(np.isfinite(fitness), fitness, -np.inf)
    for one in np.unique(member):
        for two in np.unique(member):
            if finite[member == one].min() >= finite[member == two].max():
                assert counts[one] >= counts[two] - 1, (one, two, counts)


@pytest.mark.parametrize("population", [2, 3, 64, 10_000])
@pytest.mark.parametrize("exponent", [-12, -6, 0, 6, 12, 19, 30, 37, 38])
def test_species_that_are_better_have_more_children(population, exponent):
    rng = np.random.default_rng(0)
    member = np.sort(np.arange(population) % SPECIES)
    for sign in (1, -1):
        for spread in (1e-3, 1.0):
            shape = 1 + spread * np.sort(rng.random(population))
            fitness = np.float32(sign * 10.0**exponent) * np.float32(
                shape if sign > 0 else 3 - shape
            )
            for bad in (None, np.nan, np.inf, -np.inf, -3e38, -1e37):
                scores = fitness.copy()
                if bad is not None:
                    scores[0] = bad
                counts = children(scores, member)
                assert_better_have_as_many(scores, member, counts)


NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, 1e-12, 1.0, -1.0, 1e38, -1e38, 3e38, -3.4e38, -1e37, np.nan, np.inf]),
)


@settings(max_examples=200, deadline=None)
@given(
    fitness=st.lists(NUMBERS, min_size=8, max_size=8),
    member=st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_any_fitness_gives_children(fitness, member):
    fitness, member = np.float32(fitness), np.array(member)
    assert_better_have_as_many(fitness, member, children(fitness, member))


def test_one_huge_negative_fitness_ends_no_selection():
    member, fitness = np.arange(64) % 4, np.float32(np.arange(64) % 4)
    usual = children(fitness, member)
    assert usual.tolist() == [0, 11, 21, 32, 0]
    for worst in (-1e5, -1e10, -1e37, -3.4e38):
        fitness[60] = worst  # of the worst species
        counts = children(fitness, member)
        assert counts[3] > counts[2] + 5 and counts[2] > counts[1] + 5 and counts[1] > counts[0] + 5


def test_huge_fitness_has_children():
    fitness = np.float32([1e38] * 6 + [1.0] * 58)
    member = np.int32([0] * 6 + [1] * 58)
    assert children(fitness, member).tolist() == [64, 0, 0, 0, 0]
    assert children(-fitness, member).tolist() == [0, 64, 0, 0, 0]


@pytest.mark.parametrize("size", [1e-33, 1e-20, 1e-12, 1.0, 1e9, 1e30])
def test_powers_of_two_change_no_count(size):
    """Sums of tiny and of huge numbers neither vanish nor overflow."""
    rng = np.random.default_rng(3)
    power = 2.0 ** np.round(np.log2(size))
    for trial in range(8):
        member = rng.integers(0, SPECIES, 64)
        plain = (rng.random(64) - 0.5 * (trial % 2)).astype(np.float32)
        want = children(plain, member)
        np.testing.assert_array_equal(children(np.float32(plain * power), member), want)


def test_a_generation_survives_and_reports_huge_fitness():
    config = NeatConfig(2, 1, population=8, max_nodes=5, max_conns=6, max_species=3)
    neat = Neat(config)
    tell = jit(neat.tell)
    state = jit(neat.init)(jax.random.key(0), None)
    for fitness, mean in ((np.full(8, 3e38), 3e38), (np.full(8, -3e38), -3e38)):
        after, info = tell(jax.random.key(1), state, np.float32(fitness))
        check_genomes(config, after.genomes)
        assert info["fitness_mean"] == pytest.approx(mean) and after.species.size.sum() == 8
        assert all(np.isfinite(value).all() for value in info.values())
