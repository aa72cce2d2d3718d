"""Selection against a plain breeder: who is whose child, with what chance, and what becomes of species."""

import copy
import dataclasses
import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from plain_breeder import Breeder, Forced, Gene, Member, Species, outcomes

from jaxpar.neat import CANONICAL, FAST, Genomes, Neat, NeatConfig, check_genomes
from jaxpar.neat import species as module
from jaxpar.neat.genome import empty_genomes
from jaxpar.neat.innovation import Counters

MODES = {"fast": FAST, "canonical": CANONICAL}
CANONICALLY = (
    pytest.mark.slow
)  # another program of five seconds to compile; its own operators have tests of theirs
each_mode = pytest.mark.parametrize("mode", ["fast", pytest.param("canonical", marks=CANONICALLY)])
SIZES = NeatConfig(3, 1, population=12, max_nodes=8, max_conns=12, max_species=4)
NOTHING = dict(
    weights=0.0, weight_perturb=0.0, weight_replace=0.0, weight_limit=1e9, node_perturb=0.0, node_replace=0.0,
    redraw=0.0, add_node=0.0, add_conn=0.0, del_node=0.0, del_conn=0.0, toggle=0.0, reenable=0.0, difference=0.0,
    small=0.0, survival=1.0, mutate_only=0.0, mate_only=0.0, interspecies=0.0, disable=1.0, average=0.0,
    champion=1e9, stagnation=1e9, stale=0.0, stall=1e9,
)  # fmt: skip
"""Children of two parents, any members of one species, and nothing else happens."""

# The history that all genomes here share: what each mark joins. Nodes 0, 1 and 2 are inputs, 3 the output.
ENDS = {
    0: (0, 3),
    1: (1, 3),
    2: (2, 3),
    3: (0, 4),
    4: (4, 3),
    5: (1, 5),
    6: (5, 3),
    7: (4, 5),
    8: (5, 4),
    9: (2, 4),
}
NEXT_NODE, NEXT_MARK, TRIALS = 6, 10, 400
KNOWN = {(2.0**p + 2.0**q) / 2 for p in range(12) for q in range(12)}


def member_of(number, marks, fitness, disabled=()):
    """Of the genome with this number all weights are 2^number: a weight tells whose it is, or whose mean."""
    genes = {mark: Gene(mark, *ENDS[mark], 2.0**number, mark not in disabled) for mark in marks}
    return Member(genes, fitness)


SLOTS = [  # the third slot is free; numbers of genomes, and so their order, are not those of the slots
    Species(5, [member_of(0, (0, 1, 2), 3.0), member_of(3, (0, 1, 3, 4), 7.0, (0,)), member_of(6, (0, 2, 9), 5.0),
                member_of(9, (1, 2), 1.0, (2,)), member_of(10, (0, 4), 4.0)], -math.inf, 0),
    Species(2, [member_of(1, (0, 5, 6, 7), 6.0), member_of(2, (5, 6, 8), 6.0), member_of(11, (1, 6), 2.0)],
            -math.inf, 0),
    None,
    Species(7, [member_of(4, (0, 1, 2, 3, 4, 9), 8.0), member_of(5, (2,), 8.5), member_of(7, (1, 4), 0.5),
                member_of(8, (0, 9), 2.5)], -math.inf, 0),
]  # fmt: skip


def number_of(member):
    """The genome's place in the population."""
    return round(math.log2(next(iter(member.genes.values())).weight))


def genomes_of(config, all_genes):
    """Genomes from genes; hidden nodes are in the slots of their identities."""
    nothing = empty_genomes(config, len(all_genes))
    arrays = {f.name: np.array(getattr(nothing, f.name)) for f in dataclasses.fields(Genomes)}
    for p, genes in enumerate(all_genes):
        for row, gene in enumerate(genes.values()):
            for name, value in gene._asdict().items():
                arrays[name][p, row] = value
            arrays["on"][p, row] = True
            arrays["node_id"][p, [gene.source, gene.target]] = gene.source, gene.target
            arrays["node_on"][p, [gene.source, gene.target]] = True
    return Genomes(**arrays)


@functools.cache
def search(mode):
    """A search in this mode, and (state, fitnesses) -> `TRIALS` next generations, each by another key."""
    neat = Neat(
        dataclasses.replace(SIZES, mode=mode, rates=MODES[mode].replace(**NOTHING), evolved=())
    )
    keys = jax.random.split(jax.random.key(3), TRIALS)
    many = jit(lambda state, fitness: jax.vmap(lambda key: neat.tell(key, state, fitness)[0])(keys))
    return neat, lambda *args: jax.device_get(many(*args))


def beginning(mode, homes, members, **rates):
    """The state where genomes are these members, in the slots `homes` of the species of `SLOTS`."""
    neat = search(mode)[0]
    genomes = genomes_of(neat.config, [m.genes for m in members])
    check_genomes(neat.config, genomes)
    species = dataclasses.replace(
        module.empty_species(neat.config),
        alive=jnp.bool_([s is not None for s in SLOTS]),
        number=jnp.int32([s.number if s else 0 for s in SLOTS]),
        size=jnp.int32([len(s.members) if s else 0 for s in SLOTS]),
        next_number=jnp.int32(8),
    )
    state = jax.eval_shape(lambda: neat.init(jax.random.key(0), None))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    rates = neat.config.rates.replace(**rates)
    return dataclasses.replace(
        zeros, genomes=jax.tree.map(jnp.asarray, genomes), member=jnp.int32(homes), species=species,
        counters=Counters(jnp.int32(NEXT_NODE), jnp.int32(NEXT_MARK)), best=jnp.float32(module.LOWEST),
        rates=jax.tree.map(lambda x: jnp.asarray(x, float), rates),
    )  # fmt: skip


def begun(mode, **rates):
    """The state that `SLOTS` is, its fitnesses, and the plain breeder of the same."""
    place = {number_of(m): (slot, m) for slot, s in enumerate(SLOTS) if s for m in s.members}
    homes, members = zip(*(place[p] for p in range(12)), strict=True)
    state = beginning(mode, homes, members, **rates)
    slots = [s and dataclasses.replace(s) for s in SLOTS]
    return state, jnp.float32([m.fitness for m in members]), plain_of(mode, state.rates, slots)


def plain_of(mode, rates, slots):
    return Breeder(mode, jax.tree.map(float, rates), 12, slots, 0, -math.inf, 0, 8)


def seen(genes):
    """What counts of a child: genes that parents had, and how many are new; weights that nobody had are None."""
    old = [
        (m, g.weight if g.weight in KNOWN else None, g.enabled)
        for m, g in genes.items()
        if m < NEXT_MARK
    ]
    return tuple(sorted(old)), len(genes) - len(old)


def children_of(genomes):
    """Genes by mark of each genome of each trial, with the identities of their ends: `[p][t]`."""
    ends = [
        np.take_along_axis(genomes.node_id, place, 2) for place in (genomes.source, genomes.target)
    ]
    fields = [
        x.tolist() for x in (genomes.innovation, *ends, genomes.weight, genomes.enabled, genomes.on)
    ]
    return [[{row[0]: Gene(*row[:5]) for row in zip(*(x[t][p] for x in fields), strict=True) if row[5]}
             for t in range(len(genomes.on))] for p in range(12)]  # fmt: skip


def assert_likely(counts, chances, what):
    """Counts of independent trials against chances: none that may not be, and all within 5 standard deviations."""
    total = sum(counts.values())
    assert set(counts) <= set(chances), f"{what}: {set(counts) - set(chances)} cannot be"
    assert sum(chances.values()) == pytest.approx(1)
    for outcome, chance in chances.items():
        spread = 5 * (total * chance * (1 - chance)) ** 0.5 + 4 * (chance < 0.99)
        count = counts[outcome]
        assert abs(count - total * chance) <= spread, (
            f"{what}: {outcome} {count} of {total} times, chance {chance}"
        )


def assert_bred(mode, **rates):
    """All children of `SLOTS` come as often as the plain breeder's, and independently of each other."""
    state, fitness, breeder = begun(mode, **rates)
    found, place = children_of(search(mode)[1](state, fitness).genomes), 0
    for species, count in zip(SLOTS, breeder.counts({5: 1.0, 2: 1.0, 7: 1.0}), strict=True):
        here = [[seen(genes) for genes in many] for many in found[place : place + count]]
        place += count
        if species is None:
            assert count == 0
            continue
        chances = [
            outcomes(lambda dice, at=at, s=species: seen(breeder.child(dice, s, at)))
            for at in (0, 1)
        ]
        assert_likely(Counter(here[0]), chances[0], f"the first child of species {species.number}")
        assert_likely(
            Counter(sum(here[1:], [])), chances[1], f"children of species {species.number}"
        )
        same = sum(one == two for one, two in zip(*here[1:3], strict=True))
        alike = sum(chance**2 for chance in chances[1].values())
        assert_likely(
            Counter({True: same, False: TRIALS - same}),
            {True: alike, False: 1 - alike},
            "equal children",
        )
    assert place == 12


@each_mode
def test_children_have_the_structure_of_the_fitter_parent(mode):
    """In the mode "canonical", children of equals have genes of both, unless that closes a circle."""
    assert_bred(mode, survival=0.4)


@pytest.mark.parametrize("survival", [0.0, 0.4, 1.0])
def test_parents_are_the_best_of_their_species_and_one_more(survival):
    assert_bred("fast", survival=survival, mutate_only=1.0)


def test_children_are_of_one_parent_or_of_two():
    assert_bred("fast", survival=0.4, mutate_only=0.3)


@pytest.mark.parametrize("interspecies", [0.3, 1.0])
def test_the_second_parent_may_be_any_species_champion(interspecies):
    assert_bred("fast", interspecies=interspecies, survival=0.0)


def test_disabled_genes_and_means_of_weights_are_inherited_by_their_chances():
    assert_bred("fast", disable=0.7, average=0.4, survival=0.4)


def test_a_child_with_a_new_structure_keeps_its_weights():
    assert_bred("fast", survival=0.0, add_node=0.4, del_conn=0.5, weights=0.7, weight_replace=0.6)


@each_mode
def test_only_some_children_of_two_are_mutated(mode):
    assert_bred(mode, survival=0.4, mutate_only=0.2, mate_only=0.6, weights=1.0, weight_replace=1.0)


def test_champions_of_species_that_are_large_enough_are_copied():
    """Of two of the three species here; nothing happens to them, whatever happens to others."""
    assert_bred(
        "fast", champion=3.0, survival=0.0, interspecies=0.5, weights=1.0, weight_replace=1.0
    )


def species_of(species):
    """Number, size, best fitness and when it was found, by slot; None of a free one."""
    fields = (species.alive, species.number, species.size, species.best, species.improved)
    return tuple(
        tuple(x.item() for x in row) if alive else None for alive, *row in zip(*fields, strict=True)
    )


def plain_species(slots):
    lowest = module.LOWEST
    return tuple(s and (s.number, len(s.members), max(s.best, lowest), s.improved) for s in slots)


@pytest.mark.parametrize("threshold", [0.6, 0.9, 1.1])
def test_representatives_are_any_members(threshold):
    """Children are copies of champions, so which species they are of tells the representatives; others found new."""
    state, fitness, breeder = begun("fast", survival=0.0, mutate_only=1.0, threshold=threshold)
    after = search("fast")[1](state, fitness)
    found = [species_of(jax.tree.map(lambda x, t=t: x[t], after.species)) for t in range(TRIALS)]

    def played(dice):
        one = copy.deepcopy(breeder)
        one.breed(dice)
        return plain_species(one.slots)

    chances = outcomes(played)
    assert_likely(Counter(found), chances, "all species")
    for slot in range(4):
        by_slot = Counter()
        for species, chance in chances.items():
            by_slot[species[slot]] += chance
        assert_likely(
            Counter(species[slot] for species in found), by_slot, f"the species in slot {slot}"
        )


STALE, STALLS = dict(stagnation=3.0), dict(stall=3.0, champion=2.0)


@pytest.mark.parametrize("mode, rates, grows", [
    ("fast", STALE | {"stale": 0.25}, (1, 0, 0)), ("fast", STALE, (0, 0, 0)), ("fast", STALLS, (0, 0, 0)),
    pytest.param("canonical", STALE | {"stale": 0.25}, (0, 1, 0), marks=CANONICALLY),
    pytest.param("canonical", STALLS, (-1, 0, 0), marks=CANONICALLY),
])  # fmt: skip
def test_species_grow_stand_still_and_end(mode, rates, grows):
    """Children are copies and species far apart, so nothing is left to chance; fitnesses are told, some are equal."""
    rates = rates | dict(survival=0.0, mutate_only=1.0, threshold=0.1)
    first = [s and max(s.members, key=lambda m: m.fitness) for s in SLOTS]
    homes = [slot for slot, s in enumerate(SLOTS) if s for _ in s.members]
    state = beginning(mode, homes, [first[slot] for slot in homes], **rates)
    slots = [s and dataclasses.replace(s, members=[Member(first[k].genes, 0.0) for _ in s.members])
             for k, s in enumerate(SLOTS)]  # fmt: skip
    breeder, lost = plain_of(mode, state.rates, slots), False
    for generation in range(6):
        fitness = np.zeros(12, np.float32)
        for slot, species in enumerate(breeder.slots):
            for at, p in enumerate(np.flatnonzero(np.asarray(state.member) == slot)):
                by_slot = (5.0, 3.0, None, 3.0)[slot] + grows[min(slot, 2)] * generation
                fitness[p] = species.members[at].fitness = by_slot - 0.5 * at - 2
        after = search(mode)[1](state, jnp.asarray(fitness))
        state = jax.tree.map(lambda x: jnp.asarray(x[0]), after)
        breeder.breed(Forced())
        assert species_of(jax.device_get(state.species)) == plain_species(breeder.slots), generation
        assert (state.improved, state.best) == (breeder.improved, breeder.best)
        lost |= len(breeder.living()) < 3
    assert lost and breeder.generation == 6
