"""From one generation to the next in plain Python: one species, one child and one gene after the other.

Stanley and Miikkulainen 2002, sections 3.2 and 3.3, with the deviations that the table of
docs/neat.md lists. Nothing of jaxpar is called: only the numbers of a `Rates` are read.

What is left to chance is asked of dice, so the same rules can be played with all dice forced, or
followed into every side of every throw, which gives what may happen with its exact probability.
"""

import dataclasses
import math
from collections import Counter
from typing import NamedTuple


class Gene(NamedTuple):
    """A connection between the nodes of two identities; a weight of None was drawn anew."""

    innovation: int
    source: int
    target: int
    weight: float | None
    enabled: bool


@dataclasses.dataclass
class Member:
    """A genome: its genes by mark, and how fit it is."""

    genes: dict[int, Gene]
    fitness: float


@dataclasses.dataclass
class Species:
    """A species: its number, its members, and when the best of all its fitnesses was found."""

    number: int
    members: list[Member]
    best: float
    improved: int


class Forced:
    """Dice of which every chance is 0 or 1, and every choice is one among equals."""

    def happens(self, chance):
        assert chance in (0, 1), f"{chance} is left to chance"
        return chance == 1

    def below(self, count):
        return 0


class Followed:
    """Dice that fall as they are told, and on their first side from then on."""

    def __init__(self, told):
        self.told, self.thrown, self.probability, self.untried = told, [], 1.0, []

    def _throw(self, chances):
        place = len(self.thrown)
        side = self.told[place] if place < len(self.told) else 0
        if place >= len(self.told):
            self.untried += [[*self.thrown, other] for other in range(1, len(chances))]
        self.thrown.append(side)
        self.probability *= chances[side]
        return side

    def happens(self, chance):
        chance = float(chance)
        return chance == 1 if chance in (0, 1) else self._throw([chance, 1 - chance]) == 0

    def below(self, count):
        return self._throw([1 / count] * count) if count > 1 else 0


def outcomes(play):
    """All that `play(dice)` may return, with its probability."""
    found, untried = Counter(), [[]]
    while untried:
        dice = Followed(untried.pop())
        found[play(dice)] += dice.probability
        untried += dice.untried
    return found


def apart(mode, rates, one, two):
    """The distance of two genomes: equation 1."""
    matching = one.keys() & two.keys()
    last = max(one, default=-1), max(two, default=-1)
    excess = [m for m in one if m > last[1]] + [m for m in two if m > last[0]]
    disjoint = len(one) + len(two) - 2 * len(matching) - len(excess)
    larger = max(len(one), len(two), 1)
    size = 1 if larger < rates.small else larger
    weights = sum(abs(one[m].weight - two[m].weight) for m in matching) / max(len(matching), 1)
    excess_rate = rates.disjoint if mode == "fast" else rates.excess
    return (
        excess_rate * len(excess) + rates.disjoint * disjoint
    ) / size + rates.difference * weights


def circle(genes):
    """Whether connections, disabled ones too, lead back to where they come from."""
    into: dict[int, list[int]] = {}
    for gene in genes.values():
        into.setdefault(gene.target, []).append(gene.source)

    def follows(node, path):
        return node in path or any(follows(before, path | {node}) for before in into.get(node, []))

    return any(follows(node, frozenset()) for node in into)


def cross(dice, mode, rates, first, second):
    """A child of two parents, the first of which is at least as fit."""
    average = dice.happens(rates.average)
    child = {}
    for mark, gene in first.genes.items():
        other = second.genes.get(mark)
        if other is None:
            child[mark] = gene._replace(enabled=gene.enabled or not dice.happens(rates.disable))
            continue
        weight = (
            (gene.weight + other.weight) / 2
            if average
            else gene.weight
            if dice.happens(0.5)
            else other.weight
        )
        child[mark] = gene._replace(
            weight=weight,
            enabled=(gene.enabled and other.enabled) or not dice.happens(rates.disable),
        )
    if mode == "fast" or first.fitness != second.fitness:
        return child
    mixed = {m: gene for m, gene in child.items() if m in second.genes or dice.happens(0.5)}
    edges = {(gene.source, gene.target) for gene in mixed.values()}
    for mark, gene in second.genes.items():
        if (
            mark not in first.genes
            and dice.happens(0.5)
            and (gene.source, gene.target) not in edges
        ):
            mixed[mark] = gene
    return child if circle(mixed) else mixed


FRESH = 10**6
"""Marks from here on are of this generation."""


def mutate(dice, rates, genes):
    """A child after its mutations, in the mode "fast": a new structure, or new weights, never both."""
    live = sorted(mark for mark, gene in genes.items() if gene.enabled)
    if dice.happens(rates.add_node):
        if live:
            old = genes[live[dice.below(len(live))]]
            return genes | {
                old.innovation: old._replace(enabled=False),
                FRESH: Gene(FRESH, old.source, -1, 1.0, True),
                FRESH + 1: Gene(FRESH + 1, -1, old.target, old.weight, True),
            }
    elif dice.happens(rates.del_conn):
        marks = sorted(genes)
        gone = marks[dice.below(len(marks))]
        return {mark: gene for mark, gene in genes.items() if mark != gone}
    if not dice.happens(rates.weights):
        return genes
    return {
        m: gene._replace(weight=None) if dice.happens(rates.weight_replace) else gene
        for m, gene in genes.items()
    }


@dataclasses.dataclass
class Breeder:
    """A judged generation.

    Attributes:
        mode: "fast" or "canonical".
        rates: numbers by name.
        population: children to make.
        slots: species by slot, None where there is none.
        generation: its number.
        best: of all fitnesses before.
        improved: the generation when that was found, or when all last stood still.
        next_number: of the next new species.
    """

    mode: str
    rates: object
    population: int
    slots: list[Species | None]
    generation: int
    best: float
    improved: int
    next_number: int

    def living(self):
        """Species in the order of their slots."""
        return [species for species in self.slots if species is not None]

    def ranked(self):
        """Species from best to worst by their fittest member; of equals the older first."""
        return sorted(self.living(), key=lambda s: (-max(m.fitness for m in s.members), s.number))

    def judge(self):
        """Notes progress, and gives the share of its fitness that counts, by the number of the species."""
        now = max(m.fitness for species in self.living() for m in species.members)
        if now > self.best:
            self.best, self.improved = now, self.generation
        stands_still = self.generation - self.improved > self.rates.stall
        if stands_still:
            self.improved = self.generation
        best_two, shares = self.ranked()[:2], {}
        for species in self.living():
            now = max(m.fitness for m in species.members)
            if now > species.best:
                species.best, species.improved = now, self.generation
            is_stale = self.generation - species.improved > self.rates.stagnation
            if self.mode == "fast" and species in best_two:
                is_stale = False
            shares[species.number] = self.rates.stale if is_stale else 1.0
        if stands_still or not any(shares.values()):
            shares = {s.number: float(s in best_two) for s in self.living()}
        for species in best_two if stands_still else []:
            species.improved = self.generation
        return shares

    def counts(self, shares):
        """Children of each slot, by explicit sharing: every fitness is divided by the size of its species."""
        lowest = min(0.0, *(m.fitness for species in self.living() for m in species.members))
        shared = [
            0.0
            if s is None
            else shares[s.number] * sum((m.fitness - lowest) / len(s.members) for m in s.members)
            for s in self.slots
        ]
        if not any(shared):
            shared = [0.0 if s is None else shares[s.number] for s in self.slots]
        running = [
            round(self.population * sum(shared[: k + 1]) / sum(shared)) for k in range(len(shared))
        ]
        return [until - before for before, until in zip([0, *running], running, strict=False)]

    def child(self, dice, species, place):
        """The child of this place among those of its species: genes by mark."""
        by_fitness = sorted(
            species.members, key=lambda m: -m.fitness
        )  # stable: of equals the first
        if place == 0 and len(species.members) > self.rates.champion:
            return by_fitness[0].genes
        pool = by_fitness[: math.floor(self.rates.survival * len(by_fitness)) + 1]
        one, two = pool[dice.below(len(pool))], pool[dice.below(len(pool))]
        if dice.happens(self.rates.interspecies):
            strangers = self.living()[dice.below(len(self.living()))].members
            two = max(strangers, key=lambda m: m.fitness)
        if dice.happens(self.rates.mutate_only) or one is two:
            return mutate(dice, self.rates, one.genes)
        first, second = (two, one) if two.fitness > one.fitness else (one, two)
        genes = cross(dice, self.mode, self.rates, first, second)
        return genes if dice.happens(self.rates.mate_only) else mutate(dice, self.rates, genes)

    def assign(self, children, representatives):
        """Species of the next generation by slot: children one by one, each to the first or nearest that is near."""
        slots: list[Species | None] = [
            s and Species(s.number, [], s.best, s.improved) if r else None
            for s, r in zip(self.slots, representatives, strict=True)
        ]
        centres = {s.number: r for s, r in zip(slots, representatives, strict=True) if s}
        old, number = set(centres), self.next_number
        placed = []
        for child in children:
            far = {n: apart(self.mode, self.rates, child, centre) for n, centre in centres.items()}
            near = {n for n, d in far.items() if d < self.rates.threshold}
            if self.mode == "fast" and near & old:
                near = {
                    min(centres, key=lambda n: far[n] if n in old else math.inf)
                }  # of equals the first slot's
            if not near:
                centres[number] = child
                near, number = {number}, number + 1
            placed.append(min(near))
        slots = [s if s and s.number in placed else None for s in slots]
        for new in range(self.next_number, number):
            slots[slots.index(None)] = Species(new, [], -math.inf, self.generation + 1)
        by_number = {s.number: s for s in slots if s}
        for child, chosen in zip(children, placed, strict=True):
            by_number[chosen].members.append(Member(child, math.nan))
        self.next_number = number
        return slots

    def breed(self, dice):
        """Makes the next generation: it is not judged yet, so its fitnesses are NaN."""
        counts = self.counts(self.judge())
        children = [self.child(dice, species, place)
                    for species, count in zip(self.slots, counts, strict=True) for place in range(count)]  # fmt: skip
        representatives = [s and s.members[dice.below(len(s.members))].genes for s in self.slots]
        self.slots = self.assign(children, representatives)
        self.generation += 1
