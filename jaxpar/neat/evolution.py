"""Evolution: `Neat`, an `Algorithm` whose step is a generation."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import mesh_axes, partition
from jaxpar.neat.config import NeatConfig, Rates
from jaxpar.neat.crossover import crossover
from jaxpar.neat.distance import Centres, centres_of
from jaxpar.neat.genome import Genomes, Packed, initial
from jaxpar.neat.innovation import Counters, assign_innovations
from jaxpar.neat.modes import normal
from jaxpar.neat.mutate import apply_edit, choose_edit, mutate_numbers, noise
from jaxpar.neat.network import Networks, apply, express, init_carry, with_networks
from jaxpar.neat.reproduce import choose_parents
from jaxpar.neat.species import (
    LOWEST,
    Species,
    empty_species,
    offspring_counts,
    ordered_sum,
    rank_genomes,
    safe_scale,
    speciate,
    update_stagnation,
)
from jaxpar.neat.uniforms import Uniforms
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["RENAMED", "Neat", "NeatState", "Problem", "Score"]

RENAMED = {"innovation": "mark"}
"""Names in states that older checkpoints have under another one, for `jaxpar.loop.Hooks.renamed`."""


class Score(NamedTuple):
    """Scores of G networks: float32 `[G]` fitness, more is better, and bool `[G]`, whether the problem is solved."""

    fitness: Array
    solved: Array


class Problem(Protocol):
    """Scores networks; static under jit, so hashable, and best equal by value."""

    def __call__(self, key: PRNGKey, networks: Networks, inputs: PyTree) -> Score:
        """Scores G networks; consumes `key`; random numbers of each come from the key folded with `networks.index`."""
        ...


@flax.struct.dataclass
class NeatState:
    """A generation that is not scored yet. On a mesh, genomes and `member` are split by the rule of "population".

    Attributes:
        genomes: G of them.
        member: int32 `[G]`, the slot of each one's species.
        species: S slots.
        counters: the next free identities.
        rates: float32 scalars; replace them to sweep, as long as the run.
        generation: int32 `[]`.
        evaluations: int32 `[]`, genomes scored so far.
        solved: bool `[]`, whether some genome solved the problem.
        solved_after: int32 `[]`, evaluations up to and with the generation of the first that did; 0 before.
        champion: the best genome so far, `[1]`; from the first solution on, the best of those that solve it.
        best: float32 `[]`, the champion's fitness.
        improved: int32 `[]`, the generation of the champion, or when all last stood still for `rates.stall`.
        refused: int32 `[]`, changes of structure that capacity forbade so far.
        invalid: int32 `[]`, fitnesses so far that were not finite.
    """

    genomes: Genomes
    member: Array
    species: Species
    counters: Counters
    rates: Rates
    generation: Array
    evaluations: Array
    solved: Array
    solved_after: Array
    champion: Genomes
    best: Array
    improved: Array
    refused: Array
    invalid: Array


@dataclasses.dataclass(frozen=True)
class Neat:
    """NeuroEvolution of Augmenting Topologies, a whole population at once.

    `jaxpar.loop.run`, `run_until` and `fit` drive it; `ask`, `express`, `apply` and `tell` are its parts, for genomes
    that are scored elsewhere. With a mesh ambient, the whole generation runs on each device's share of the population
    and gives the same bits for any number of devices.

    Reference: K. Stanley and R. Miikkulainen, "Evolving neural networks through augmenting topologies", Evolutionary
    Computation 10(2), 2002. The page on NEAT lists every deviation.

    Attributes:
        config: sizes, kinds and first rates.
        problem: scores the networks; None where only `ask` and `tell` are used.
    """

    config: NeatConfig
    problem: Callable[..., Score] | None = None

    def init(self, key: PRNGKey, inputs: PyTree) -> NeatState:
        """The first generation: one structure, random weights. Consumes `key`; `inputs` is not read."""
        del inputs
        over = self._over()
        rates = jax.tree.map(lambda x: jnp.asarray(x, float), self.config.rates)

        def made(key, rates, index):
            return _first_generation(key, self.config, rates, index, over)

        return self._mapped(made, (P(), P(), P(over)), over)(key, rates, self._index())

    def step(self, key: PRNGKey, state: NeatState, inputs: PyTree) -> tuple[NeatState, Info]:
        """Scores a generation and makes the next; consumes `key`. `inputs` goes to the problem, whole."""
        if self.problem is None:
            raise UsageError("this Neat has no problem; give one, or use ask and tell.")
        problem, over = self.problem, self._over()
        self._check(state)
        score_key = jax.random.fold_in(
            key, self.config.population
        )  # `tell` folds in smaller numbers, the genomes'

        def scored(key, genomes, inputs, index):
            use = lambda networks: _check_score(problem(key, networks, inputs), len(index))  # noqa: E731
            return with_networks(self.config, genomes, use, index=index, over=over)

        if over:
            specs = (P(), P(over), P(), P(over))
            scored = jax.shard_map(scored, in_specs=specs, out_specs=P(over), check_vma=False)
        score = scored(score_key, state.genomes, inputs, self._index())
        return self.tell(key, state, score)

    def done(self, state: NeatState) -> Array:
        """Whether some genome solved the problem or reached `rates.target`."""
        return state.solved

    def ask(self, state: NeatState) -> Genomes:
        """The genomes to score."""
        return state.genomes

    def express(self, genomes: Genomes) -> Networks:
        """Their networks, at full width; `with_networks` finds a smaller one."""
        return express(self.config, genomes)

    def init_carry(self, networks: Networks, *batch: int) -> PyTree:
        """The carry of networks before their first call."""
        return init_carry(networks, *batch)

    def apply(self, networks: Networks, carry: PyTree, x: Array) -> tuple[Array, PyTree]:
        """One call of every network; see `jaxpar.neat.network.apply`."""
        return apply(networks, carry, x)

    def tell(self, key: PRNGKey, state: NeatState, score: Score | Array) -> tuple[NeatState, Info]:
        """Makes the next generation from fitnesses, float32 `[G]`, or a `Score`; consumes `key`.

        A fitness that is not finite counts as the lowest and is reported.
        """
        if not isinstance(score, Score):
            fitness = jnp.asarray(score)
            score = Score(fitness, jnp.zeros(fitness.shape, bool))
        self._check(state)
        score, over = _check_score(score, self.config.population), self._over()

        def made(key, state, score, index):
            return _next_generation(key, self.config, state, score, index, over)

        specs = self._specs(over)
        return self._mapped(made, (P(), specs, P(over), P(over)), over, with_info=True)(
            key, state, score, self._index()
        )

    def _check(self, state: NeatState) -> None:
        sizes, genomes = self.config, state.genomes
        found = [jnp.shape(x) for x in (genomes.on, genomes.node_on, state.species.alive)]
        legal = [
            (sizes.population, sizes.max_conns),
            (sizes.population, sizes.max_nodes),
            (sizes.max_species,),
        ]
        if found != legal:
            raise UsageError(f"the state is of another configuration: connections, nodes and species have the shapes "
                             f"{found}; legal are {legal}.")  # fmt: skip
        held, real = genomes.weight.dtype, jnp.result_type(float)
        if held != real:
            raise UsageError(f"the state's numbers are {held}, and JAX makes {real} now; legal is one made "
                             "under the same jax_enable_x64.")  # fmt: skip

    def axes(self) -> NeatState:
        """Logical axes of the state."""
        shapes = jax.eval_shape(lambda: self._plain_init(jax.random.key(0)))
        split = {"genomes", "member"}

        def named(path, leaf):
            first = "population" if path[0].name in split else None
            return (first,) + (None,) * (leaf.ndim - 1) if leaf.ndim else ()

        return jax.tree_util.tree_map_with_path(named, shapes)

    def _plain_init(self, key):
        rates = jax.tree.map(lambda x: jnp.asarray(x, float), self.config.rates)
        return _first_generation(key, self.config, rates, self._index(), ())

    def _index(self) -> Array:
        return jnp.arange(self.config.population, dtype=jnp.int32)

    def _over(self) -> tuple[str, ...]:
        over = mesh_axes("population")
        if over:
            partition(("population",), (self.config.population,), "the population")
        return over

    def _specs(self, over):
        names = [field.name for field in dataclasses.fields(NeatState)]
        split: dict[str, PyTree] = {
            name: P(over) if name in ("genomes", "member") else P() for name in names
        }
        return NeatState(**split)

    def _mapped(self, made, in_specs, over, with_info=False):
        if not over:
            return made
        out_specs = (self._specs(over), P()) if with_info else self._specs(over)
        return jax.shard_map(made, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _check_score(score: object, count: int) -> Score:
    if not isinstance(score, Score):
        raise UsageError(f"a problem returns a Score, not {type(score).__name__}.")
    for name, value in score._asdict().items():
        if jnp.shape(value) != (count,):
            raise UsageError(
                f"{name} has shape {jnp.shape(value)}; legal is ({count},), one number a genome."
            )
    return Score(jnp.asarray(score.fitness, float), jnp.asarray(score.solved, bool))


def _first_generation(
    key: PRNGKey, config: NeatConfig, rates: Rates, index: Array, over
) -> NeatState:
    uniforms = Uniforms(key, config, index)
    weights = rates.weight_init * noise(config, uniforms.take(config.max_conns))
    weights = jnp.clip(weights, -rates.weight_limit, rates.weight_limit)
    biases = rates.bias_init * normal(uniforms.take(config.max_nodes))
    genomes = initial(config, weights, biases)
    shape = (config.max_species, config.max_conns)
    centres = Centres(
        innovation=jnp.zeros(shape, jnp.int32),
        on=jnp.zeros(shape, bool),
        weight=jnp.zeros(shape, float),
    )
    zero = jnp.int32(0)
    # Behind a barrier, or XLA folds the distances to empty species while it compiles, which takes seconds.
    none, centres = jax.lax.optimization_barrier((empty_species(config), centres))
    species, member = speciate(config, rates, genomes, index, none, centres, zero, over)
    count = config.num_inputs * config.num_outputs if config.initial == "full" else 0
    return NeatState(
        genomes=genomes,
        member=member,
        species=species,
        counters=Counters(jnp.int32(config.num_io), jnp.int32(count)),
        rates=rates,
        generation=zero,
        evaluations=zero,
        solved=jnp.zeros((), bool),
        solved_after=zero,
        champion=_gather_all(genomes, over).rows(slice(0, 1)),
        best=jnp.asarray(LOWEST, float),
        improved=zero,
        refused=zero,
        invalid=zero,
    )


def _gather_all(tree: PyTree, over: tuple[str, ...]) -> PyTree:
    """All genomes' values, behind a barrier: XLA then compiles, and rounds, what follows alike for any split."""
    tree = jax.tree.map(lambda x: jax.lax.all_gather(x, over, tiled=True), tree) if over else tree
    return jax.lax.optimization_barrier(tree)


def _next_generation(
    key: PRNGKey, config: NeatConfig, state: NeatState, score: Score, index: Array, over
) -> tuple[NeatState, Info]:
    """One generation of a device's share of the population; what concerns all is computed on every device alike."""
    rates = state.rates
    population, member, fitness, solved = _gather_all(
        (Packed.of(state.genomes), state.member, *score), over
    )
    valid = jnp.isfinite(fitness)
    fitness = jnp.where(valid, fitness, -jnp.inf)
    state = _update_best(
        config, state, population, fitness, solved, jnp.sum(~valid, dtype=jnp.int32)
    )

    stalls = state.generation - state.improved > rates.stall
    state = dataclasses.replace(state, improved=jnp.where(stalls, state.generation, state.improved))
    species, standing = update_stagnation(
        config, rates, state.species, fitness, member, state.generation, stalls
    )
    ranking = rank_genomes(species, fitness, member)
    counts = offspring_counts(config, species, standing, fitness, member)
    uniforms = Uniforms(key, config, index)
    parents = choose_parents(config, rates, uniforms, index, species, counts, ranking, fitness)
    alone = parents.fitter == parents.other
    pairs = population.rows(config, parents.fitter), population.rows(config, parents.other)
    children = crossover(config, rates, uniforms, *pairs, alone, parents.equal)
    edit = choose_edit(config, rates, uniforms, children, parents.may_mutate)
    # As in the paper's program: a child with a new structure keeps its weights, to begin with.
    children = mutate_numbers(
        config, rates, uniforms, children, parents.may_mutate & ~edit.is_change
    )
    requests, shares = _gather_all((edit.requests(children), uniforms.one()), over)
    node, innovation, counters = assign_innovations(requests, state.counters)
    children = jax.lax.optimization_barrier(
        apply_edit(children, edit, node[index], innovation[index])
    )

    # Individual s gives the random number that picks the representative of the species in slot s.
    share = shares[jnp.arange(config.max_species) % config.population]
    pick = jnp.minimum((share * species.size).astype(jnp.int32), species.size - 1)
    centres = centres_of(
        population.rows(config, ranking.order[ranking.start + jnp.maximum(pick, 0)])
    )
    info = _info(state, species, fitness, valid, population.rows(config, slice(None)))
    species, member = speciate(
        config, rates, children, index, species, centres, state.generation + 1, over
    )
    refused = jnp.sum(edit.refused, dtype=jnp.int32)
    state = dataclasses.replace(
        state,
        genomes=children,
        member=member,
        species=species,
        counters=counters,
        generation=state.generation + 1,
        refused=state.refused + (jax.lax.psum(refused, over) if over else refused),
    )
    return state, info | {"refused": state.refused.astype(float)}


def _update_best(
    config: NeatConfig,
    state: NeatState,
    population: Packed,
    fitness: Array,
    solves: Array,
    invalid: Array,
) -> NeatState:
    # What has no finite fitness solves nothing.
    solves = jnp.isfinite(fitness) & (solves | (fitness >= state.rates.target))
    solved = jnp.any(solves)
    first = jnp.argmax(jnp.where(solves | ~solved, fitness, -jnp.inf))

    # A solution beats all that are none; of either kind, the fitter. `best` and `improved` follow.
    is_champion = fitness[first] > state.best
    is_champion &= solved | ~state.solved
    is_champion |= solved & ~state.solved
    newest = population.rows(config, first[None])
    evaluations = state.evaluations + len(fitness)
    return dataclasses.replace(
        state,
        evaluations=evaluations,
        solved=state.solved | solved,
        solved_after=jnp.where(solved & ~state.solved, evaluations, state.solved_after),
        champion=jax.tree.map(
            lambda new, old: jnp.where(is_champion, new, old), newest, state.champion
        ),
        best=jnp.where(is_champion, fitness[first], state.best),
        improved=jnp.where(is_champion, state.generation, state.improved),
        invalid=state.invalid + invalid,
    )


def _info(
    state: NeatState, species: Species, fitness: Array, valid: Array, population: Genomes
) -> Info:
    count = jnp.maximum(jnp.sum(valid), 1)
    scale = safe_scale(fitness)
    info = {
        "fitness_max": jnp.max(fitness),
        "fitness_mean": ordered_sum(jnp.where(valid, fitness, 0) * scale) / count / scale,
        "best": state.best,
        "species": jnp.sum(species.alive).astype(float),
        "nodes": jnp.mean(jnp.sum(population.node_on, 1).astype(float)),
        "conns": jnp.mean(jnp.sum(population.on & population.enabled, 1).astype(float)),
        "evaluations": state.evaluations.astype(float),
        "solved": state.solved.astype(float),
        "invalid": state.invalid.astype(float),
    }
    sizes = {
        f"size_{slot:02}": species.size[slot].astype(float) for slot in range(len(species.size))
    }
    return info | sizes
