"""Worlds with robots set by hand, whose outcome is known: gates, an adder, elementary automata.

Signals of memories are 0 and 1, and a circuit is where robots stand: each hears the two speakers nearest to it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.life.brains import Reflex
from jaxpar.life.inhabitants import WorldState, open_world
from jaxpar.life.robots import TAPE, Robots, program_of
from jaxpar.life.units import ONE
from jaxpar.life.world import World
from jaxpar.types import Array, UsageError

__all__ = ["automaton_ring", "gate_world", "half_adder", "nand_gate", "ring_bits", "set_robots"]

# Tables by 4 a + 2 m + b, of which the second bit, one's own, changes nothing.
_NAND_TABLE = tuple(int(not (i & 4 and i & 1)) for i in range(8))
_XOR_TABLE = tuple(int(bool(i & 4) != bool(i & 1)) for i in range(8))
_NOT_SECOND = tuple(int(not i & 1) for i in range(8))


def gate_world() -> World:
    """A world for circuits: one slot for an agent, in which none lives, and five robots of one operation a step."""
    return World(
        Reflex(), num_agents=1, num_robots=5, size=16, window=1, sight=16, seen_agents=1, max_births=1, newcomers=0,
        ticks=1,
    )  # fmt: skip


def set_robots(
    world: World, places: Array, programs: Array, last: Array, tape: Array | None = None
) -> WorldState:
    """A state of `world` without agents, whose robots stand where they are put.

    Args:
        world: static.
        places: float `[R, 2]`, in cells.
        programs: int32 `[R, 16]`, as `program_of` makes them.
        last: `[R]`, the last entry of each memory: 0 or 1.
        tape: `[R]`, 1 for those that read the bit of their cell, -1 for those that write it; none by default.
    """
    state = world.init(jax.random.key(0))
    memory = (
        jnp.zeros((world.num_robots, 16), jnp.int32)
        .at[:, -1]
        .set(jnp.asarray(last, jnp.int32) * ONE)
    )
    if tape is not None:
        memory = memory.at[:, TAPE].set(jnp.asarray(tape, jnp.int32) * ONE)
    where = jnp.mod(jnp.round(jnp.asarray(places) * ONE).astype(jnp.int32), world.side)
    robots = Robots(state.robots.energy, where, memory, programs)
    agents = state.agents._replace(
        alive=jnp.zeros_like(state.agents.alive), energy=jnp.zeros_like(state.agents.energy)
    )
    return open_world(agents, robots, state.terrain, state.lineages)


def nand_gate(kind: str, inputs: Array) -> tuple[World, WorldState]:
    """Three robots, of which the third is NAND of the first two after one step; two more stand aside.

    Args:
        kind: "nand", the operation; "table", the truth table; "bit", inputs read off the ground and the result written
            there, which takes two steps.
        inputs: `[2]`, 0 or 1.
    """
    if kind not in ("nand", "table", "bit"):
        raise UsageError(f"kind={kind!r} is no gate; legal are nand, table and bit.")
    world, keep = gate_world(), program_of("keep")
    gate = program_of("nand") if kind == "nand" else program_of("table", _NAND_TABLE)
    bits, rest = jnp.asarray(inputs, jnp.int32), jnp.zeros(3, jnp.int32)
    places = jnp.asarray([[2.5, 2.5], [4.5, 2.5], [3.5, 3.5], [10.5, 10.5], [11.5, 10.5]])
    on_ground = kind == "bit"
    shown = jnp.concatenate((jnp.zeros_like(bits) if on_ground else bits, rest))
    tape = jnp.asarray([1, 1, -1, 0, 0]) if on_ground else None
    state = set_robots(world, places, jnp.stack([keep, keep, gate, keep, keep]), shown, tape)
    if on_ground:
        ground = state.terrain.bit.at[jnp.asarray([2, 4]), 2].set(bits)
        state = state._replace(terrain=state.terrain._replace(bit=ground))
    return world, state


def half_adder(inputs: Array) -> tuple[World, WorldState]:
    """Five robots: a, b, their NAND, and after two steps a + b: the fourth is the sum's bit, the fifth the carry."""
    world, keep = gate_world(), program_of("keep")
    # The fifth hears the NAND and, as it stands a little west, a, which its table leaves aside.
    places = jnp.asarray([[8.0, 8.0], [8.5, 8.0], [8.25, 6.0], [8.25, 10.0], [8.125, 3.0]])
    programs = [
        keep,
        keep,
        program_of("nand"),
        program_of("table", _XOR_TABLE),
        program_of("table", _NOT_SECOND),
    ]
    bits = jnp.concatenate((jnp.asarray(inputs, jnp.int32), jnp.zeros(3, jnp.int32)))
    return world, set_robots(world, places, jnp.stack(programs), bits)


def automaton_ring(rule: Array | int, bits: Array, ticks: int = 4) -> tuple[World, WorldState]:
    """Robots around the torus, each a cell of an elementary automaton (S. Wolfram, 1983); `ticks` generations a step.

    Args:
        rule: int32 `[]`, 0 to 255, may be traced: bit 4 l + 2 c + r is what follows on left l, centre c, right r.
        bits: `[R]`, the cells; R is a multiple of 8.
        ticks: static.
    """
    count = len(bits)
    if count % 8:
        raise UsageError(f"a ring of {count} robots does not fit; legal are multiples of 8.")
    world = World(
        Reflex(), num_agents=1, num_robots=count, size=count // 8, lattice=1, window=1, sight=1, seen_agents=1,
        max_births=1, newcomers=0, ticks=ticks,
    )  # fmt: skip
    table = ((jnp.asarray(rule, jnp.int32) >> np.arange(8)) & 1) * ONE
    program = program_of("table").at[7:15].set(table)
    places = jnp.stack((jnp.arange(count) / 8 + 1 / 16, jnp.full(count, 0.5)), 1)
    return world, set_robots(world, places, jnp.broadcast_to(program, (count, 16)), bits)


def ring_bits(state: WorldState) -> Array:
    """The robots' bits, int32 `[..., R]`, of states with any leading axes."""
    return (state.robots.memory[..., -1] > 0).astype(jnp.int32)
