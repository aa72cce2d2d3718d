"""A world as an algorithm: its step is the world's, one program for all of its inhabitants.

After JaxLife (C. Lu et al., "JaxLife: an open-ended agentic simulator", arXiv:2409.00853), from its description.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.life import bodies, robots, terrain
from jaxpar.life.births import (
    Births,
    birth_fee,
    born,
    newcomers,
    next_lineage,
    noisy_kind,
    pair_parents,
)
from jaxpar.life.bodies import Actions, Neighbours, all_neighbours, nearest, read_actions
from jaxpar.life.brains import Brain, Lstm, sight_of_one
from jaxpar.life.inhabitants import (
    Agents,
    Ledger,
    WorldState,
    bury,
    hear,
    open_world,
    put,
    see,
    shown,
    tell,
    total_energy,
)
from jaxpar.life.laws import Laws, Prices
from jaxpar.life.robots import PROGRAM, Robots
from jaxpar.life.units import ONE, Wide, whole, wide_sum
from jaxpar.mesh import constrain
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["World"]


@dataclasses.dataclass(frozen=True)
class World:
    """A torus on which agents with genomes and robots with programs live: `init`, `step`, `axes`.

    A step's `inputs` are `Prices`, which may be traced, or None for those of `laws`. It costs the brains, N + R
    squared comparisons for neighbours, and size^2 numbers of ground; its memory grows with N + R.

    Attributes:
      brain: What agents are; its `mutate` is what children differ by.
      num_agents: Slots, N.
      num_start: Agents that come at the start; 0 takes a quarter of the slots.
      num_robots: R.
      size: Cells of a side, S.
      lattice: Lattice sides of the base maps along one of the world's; they divide `size`.
      window: Cells of a side that an agent sees, odd.
      sight: Cells that it sees others within.
      seen_agents: Of the nearest, K.
      seen_robots: Of the nearest, L.
      max_births: Of a step, B.
      newcomers: Agents that come when none is left; 0 leaves the world empty.
      ticks: Operations that a robot makes in a step.
      laws: The laws.
    """

    brain: Brain = Lstm()
    num_agents: int = field(128, Between(1, 8192))
    num_start: int = field(0, AtLeast(0))
    num_robots: int = field(32, Between(2, 8192))
    size: int = field(128, Between(1, 1024))
    lattice: int = field(4, AtLeast(1))
    window: int = field(9, AtLeast(1))
    sight: int = field(8, Between(1, 16))
    seen_agents: int = field(8, AtLeast(1))
    seen_robots: int = field(2, AtLeast(1))
    max_births: int = field(16, AtLeast(1))
    newcomers: int = field(16, AtLeast(0))
    ticks: int = field(4, AtLeast(1))
    laws: Laws = Laws()

    def __post_init__(self):
        """Refuses sizes that do not fit together."""
        check_fields(self)
        if self.size % self.lattice:
            raise UsageError(f"lattice={self.lattice} must divide size={self.size}.")
        if self.window % 2 == 0:
            raise UsageError(f"window={self.window} must be odd: an agent stands in its middle.")
        for name, most in (("num_start", "num_agents"), ("seen_agents", "num_agents"), ("seen_robots", "num_robots"),
                           ("max_births", "num_agents"), ("newcomers", "max_births")):  # fmt: skip
            if getattr(self, name) > getattr(self, most):
                raise UsageError(f"{name}={getattr(self, name)} must be at most "
                                 f"{most}={getattr(self, most)}.")  # fmt: skip

    @property
    def side(self) -> int:
        """The torus' side, in 1/1024 of a cell's."""
        return self.size * ONE

    def init(self, key: PRNGKey, inputs: Prices | None = None) -> WorldState:
        """The first newcomers on untouched ground, robots with random programs. Consumes `key`."""
        prices = self._prices(inputs)
        ground_key, agents_key, place_key, program_key = jax.random.split(key, 4)
        ground = terrain.init_terrain(ground_key, self.size, self.lattice)
        count = self.num_start or -(-self.num_agents // 4)
        agents = self._newcomers(agents_key, self.num_agents, prices, jnp.int32(0))
        first = jnp.arange(self.num_agents) < count
        agents = agents._replace(alive=first, energy=jnp.where(first, agents.energy, 0))
        places = jax.random.randint(place_key, (self.num_robots, 2), 0, self.side, jnp.int32)
        programs = jax.random.randint(
            program_key, (self.num_robots, PROGRAM), -ONE, ONE + 1, jnp.int32
        )
        energy = jnp.full(self.num_robots, prices.start, jnp.int32)
        machines = Robots(energy, places, jnp.zeros_like(programs), programs)
        return open_world(agents, machines, ground, jnp.int32(count))

    def step(
        self, key: PRNGKey, state: WorldState, inputs: Prices | None = None
    ) -> tuple[WorldState, Info]:
        """All see, think and act at once; then deaths, births, growth. Consumes `key`.

        Returns:
            The state; info: `alive`, `births`, `deaths`, `lineages` (alive), `diversity` (standard
            deviation of identities), `age` (mean), energies in units
            (`energy_agents`, `energy_robots`, `energy_cells`, `eaten`, `regrowth`, `overflow`, `heat`), and
            `imbalance`, which is 0 where the book balances.
        """
        prices = self._prices(inputs)
        growth_key, birth_key = jax.random.split(key)
        near = self.look(state)
        signals, carry = self.think(state, near)
        before, state = state, state._replace(agents=state.agents._replace(carry=carry))
        state, heat, eaten = self.live(state, near, signals, prices)
        agents, dead = bury(state.agents)
        agents, births, fees, arrivals = self.bear(birth_key, agents, state, prices)
        ground, growth = terrain.grow(growth_key, state.terrain, prices)
        regrowth, heat = growth.regrowth.plus(arrivals), heat.plus(growth.heat).plus(fees)
        ledger = Ledger(regrowth, growth.overflow, heat, total_energy(agents, state.robots, ground))
        after = WorldState(
            agents, state.robots, ground, ledger, next_lineage(state.lineages, agents)
        )
        return after, tell(before, after, births, dead, eaten)

    def axes(self) -> PyTree:
        """Genomes and memories along `population`; the rest is on every device."""
        state = jax.eval_shape(self.init, jax.random.key(0))
        along = lambda first: lambda x: (first, *[None] * (x.ndim - 1)) if x.ndim else ()  # noqa: E731
        axes = jax.tree.map(along(None), state)
        genome, carry = (
            jax.tree.map(along("population"), x) for x in (state.agents.genome, state.agents.carry)
        )
        return axes._replace(agents=axes.agents._replace(genome=genome, carry=carry))

    def look(self, state: WorldState) -> tuple[Neighbours, Neighbours, Neighbours]:
        """Whom agents see among agents and robots, and whom robots hear among all bodies."""
        agents, machines = state.agents, state.robots
        numbers, others = jnp.arange(self.num_agents), jnp.full(self.num_agents, -1)
        working = jnp.ones(self.num_robots, bool)
        sizes = self.side, min(self.sight * ONE, bodies.FAR)
        places = jnp.concatenate((agents.position, machines.position))
        there = jnp.concatenate((agents.alive, working))
        mine = self.num_agents + jnp.arange(self.num_robots)
        return (
            nearest(
                agents.position, numbers, agents.position, agents.alive, self.seen_agents, *sizes
            ),
            nearest(agents.position, others, machines.position, working, self.seen_robots, *sizes),
            nearest(machines.position, mine, places, there, 2, *sizes),
        )

    def think(
        self, state: WorldState, near: tuple[Neighbours, Neighbours, Neighbours]
    ) -> tuple[Array, PyTree]:
        """What the agents do, as signals int32 `[N, 44]`, and their brains' next memory."""
        agents = state.agents
        sight = see(agents, state.robots, state.terrain, near[0], near[1], self.window)
        sight = jax.tree.map(lambda x: constrain(x, "population", *[None] * (x.ndim - 1)), sight)
        outputs, carry = self.brain.act(agents.genome, agents.carry, sight)
        signals = whole(constrain(outputs, None, None))  # the bodies are on every device
        return jnp.where(agents.alive[:, None], signals, 0), carry

    def live(
        self,
        state: WorldState,
        near: tuple[Neighbours, Neighbours, Neighbours],
        signals: Array,
        prices: Prices,
    ) -> tuple[WorldState, Wide, Wide]:
        """Robots compute, all act, and are nobody's but physics' from there: the state, heat, what was eaten."""
        agents, ground = state.agents, state.terrain
        acts = read_actions(signals)
        machines, bits = self._compute(state, near[2], acts)
        ground = ground._replace(bit=bits)
        every = jax.tree.map(lambda *x: jnp.concatenate(x), acts, robots.robot_actions(machines))
        around = all_neighbours(*near)
        alive = jnp.concatenate((agents.alive, jnp.ones(self.num_robots, bool)))
        energy = jnp.concatenate((agents.energy, machines.energy))
        places = jnp.concatenate((agents.position, machines.position))
        cells = bodies.flat_cells(places, self.size)
        cost = bodies.costs(ground, cells, every, prices)
        cost = cost.at[: self.num_agents].add(prices.upkeep + agents.age * prices.aging)
        ground, eaten = bodies.eat(ground, cells, every.eat, prices)
        energy = energy + eaten
        spilled = jnp.maximum(energy - prices.stomach, 0)
        spent = jnp.minimum(energy - spilled, jnp.where(alive, cost, 0))
        energy, lost = bodies.strike(energy - spilled - spent, around, every.hit)
        places = bodies.travel(places, around, every, prices, self.side)
        ground = bodies.shape(ground, cells[: self.num_agents], acts.shape, prices)
        own = jnp.clip(agents.own + acts.own, -ONE, ONE)
        agents = agents._replace(
            energy=energy[: self.num_agents],
            age=jnp.minimum(agents.age + agents.alive, 2**20),
            position=places[: self.num_agents],
            own=own,
            spoken=acts.message,
            heard=hear(acts.message, acts.strength, near[0]),
            last=shown(acts),
        )
        machines = machines._replace(
            energy=energy[self.num_agents :], position=places[self.num_agents :]
        )
        heat = bodies.heat_of(spilled, spent, lost)
        return state._replace(agents=agents, robots=machines, terrain=ground), heat, wide_sum(eaten)

    def _compute(self, state: WorldState, near: Neighbours, acts: Actions) -> tuple[Robots, Array]:
        """Robots after being programmed and their ticks, and the bits of the ground."""
        machines, heard = state.robots, robots.speakers(near)
        said = jnp.concatenate((acts.message, jnp.zeros_like(machines.memory)))[heard.who]
        strengths = jnp.concatenate((acts.strength, jnp.zeros_like(machines.energy)))[heard.who]
        program = robots.reprogram(machines.program, said, jnp.where(heard.heard, strengths, 0))
        cells = bodies.flat_cells(machines.position, self.size)

        def tick(_, carried):
            return robots.tick(carried[0], acts.message, heard, carried[1], cells)

        first = machines._replace(program=program), state.terrain.bit.reshape(-1)
        machines, bits = jax.lax.fori_loop(0, self.ticks, tick, first, unroll=min(self.ticks, 4))
        return machines, bits.reshape(state.terrain.bit.shape)

    def bear(
        self, key: PRNGKey, agents: Agents, state: WorldState, prices: Prices
    ) -> tuple[Agents, Array, Wide, Wide]:
        """Children in free slots, or newcomers where all are dead: agents, who was born, fees, energy from outside."""
        fee = birth_fee(
            state.terrain, bodies.flat_cells(agents.position, self.size), agents.alive, prices
        )
        births = pair_parents(agents, fee + prices.child, self.max_births)
        paid = jnp.where(births.born, fee[births.parent], 0)
        slots, extinct = births.slot, jnp.zeros((), bool)
        have = lambda: self.children(key, agents, births, prices)  # noqa: E731
        # Noise for genomes is much of a step's work: where nobody is born, rows that no slot takes do as well:
        # not zeros, which XLA makes once for each shape and then copies for each leaf.
        none = lambda: jax.tree.map(lambda x: (x[: self.max_births] * 0).astype(x.dtype), agents)  # noqa: E731
        cases, case = [none, have], jnp.any(births.born).astype(jnp.int32)
        if self.newcomers:
            extinct, number = ~jnp.any(agents.alive), jnp.arange(self.max_births)
            cases.append(lambda: self._newcomers(key, self.max_births, prices, state.lineages))
            case = jnp.where(extinct, 2, case)
            slots = jnp.where(
                extinct, jnp.where(number < self.newcomers, number, self.num_agents), slots
            )
        rows = jax.lax.switch(case, cases)
        payer = jnp.where(births.born, births.parent, self.num_agents)
        agents = agents._replace(
            energy=agents.energy.at[payer].add(-(paid + prices.child), mode="drop")
        )
        arrivals = jnp.where(extinct, self.newcomers * prices.start, 0)
        return put(agents, slots, rows), births.born, wide_sum(paid), wide_sum(arrivals[None])

    def children(self, key: PRNGKey, agents: Agents, births: Births, prices: Prices) -> Agents:
        """The B children, each where its parent is, by its parent's genome. Consumes `key`."""
        kind_key, genome_key = jax.random.split(key)
        parents = jax.tree.map(lambda x: x[births.parent], agents)
        genome = self.brain.mutate(genome_key, parents.genome)
        kind = noisy_kind(kind_key, parents.kind)
        rest = self.brain.rest(self.max_births)
        return born(genome, rest, parents.position, kind, parents.lineage, prices.child)

    def _newcomers(self, key: PRNGKey, count: int, prices: Prices, lineages: Array) -> Agents:
        sight = sight_of_one(self.window, self.seen_agents, self.seen_robots)
        return newcomers(key, self.brain, sight, count, self.side, prices.start, lineages)

    def _prices(self, inputs: Prices | None) -> Prices:
        return jax.tree.map(jnp.int32, self.laws.prices() if inputs is None else inputs)
