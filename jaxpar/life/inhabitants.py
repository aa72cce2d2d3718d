"""The state of a world, and what its inhabitants see of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.life.bodies import ACTION_WIDTHS, SHOWN, Actions, Neighbours
from jaxpar.life.brains import Sight
from jaxpar.life.robots import Robots
from jaxpar.life.terrain import Terrain, window
from jaxpar.life.units import ONE, Wide, wide_sum
from jaxpar.types import Array, Info, PyTree

__all__ = ["Agents", "Ledger", "WorldState", "open_world", "see", "total_energy"]

KIND = 8
"""Numbers of an identity."""
LAST = sum(ACTION_WIDTHS[name] for name in SHOWN)
"""Width of the actions that others see."""


class Agents(NamedTuple):
    """N slots for agents; int32 `[N]` unless said otherwise.

    Attributes:
        alive: bool `[N]`.
        energy: In 1/1024 units; 0 where none lives.
        age: In steps.
        position: `[N, 2]`, in 1/1024 of a cell's side.
        kind: `[N, 8]`, an identity that children have with a little noise.
        own: `[N, 16]`, a message about oneself that lasts.
        spoken: `[N, 16]`, to others, in the last step.
        heard: `[N, 16]`, of others, in the last step: the mean of those who spoke, by strength.
        last: `[N, 11]`, actions of the last step.
        lineage: The number of the newcomer that one comes from.
        genome: Leaves `[N, ...]`.
        carry: The brain's memory, leaves `[N, ...]`.
    """

    alive: Array
    energy: Array
    age: Array
    position: Array
    kind: Array
    own: Array
    spoken: Array
    heard: Array
    last: Array
    lineage: Array
    genome: PyTree
    carry: PyTree


class Ledger(NamedTuple):
    """The book of energy: of the last step, and what there is after it. All exact.

    Attributes:
        regrowth: What came in: gains of cells, newcomers.
        overflow: What cells could not hold.
        heat: What was spent: costs, blows, evaporation, fees.
        total: Of agents, robots and cells.
    """

    regrowth: Wide
    overflow: Wide
    heat: Wide
    total: Wide


class WorldState(NamedTuple):
    """A world between two steps."""

    agents: Agents
    robots: Robots
    terrain: Terrain
    ledger: Ledger
    lineages: Array


def total_energy(agents: Agents, robots: Robots, terrain: Terrain) -> Wide:
    """All energy there is."""
    held = wide_sum(jnp.concatenate((agents.energy, robots.energy)))
    return held.plus(wide_sum(terrain.energy))


def open_world(agents: Agents, robots: Robots, terrain: Terrain, lineages: Array) -> WorldState:
    """A state whose book begins with what is there."""
    nothing = wide_sum(jnp.zeros(1, jnp.int32))
    ledger = Ledger(nothing, nothing, nothing, total_energy(agents, robots, terrain))
    return WorldState(agents, robots, terrain, ledger, lineages)


def see(
    agents: Agents,
    robots: Robots,
    terrain: Terrain,
    near: Neighbours,
    near_robots: Neighbours,
    width: int,
):
    """What each agent sees: `Sight` of N."""
    energy, age = (jnp.log1p(x.astype(jnp.float32)) for x in (agents.energy / ONE, agents.age))
    body = jnp.stack((energy, age), 1)
    signals = jnp.concatenate((agents.last, agents.kind, agents.own), 1).astype(jnp.float32) / ONE
    more = jnp.concatenate((agents.heard, agents.spoken), 1).astype(jnp.float32) / ONE
    way = lambda n: n.offset.astype(jnp.float32) / (8 * ONE)  # noqa: E731
    beside = lambda n, *parts: jnp.where(n.seen[..., None], jnp.concatenate(parts, -1), 0)  # noqa: E731
    flag = lambda n: n.seen[..., None].astype(jnp.float32)  # noqa: E731
    stored = jnp.log1p(robots.energy / ONE)[:, None]
    state = jnp.concatenate((robots.memory, robots.program), 1).astype(jnp.float32) / ONE
    return Sight(
        window(terrain, agents.position >> 10, width),
        beside(near, flag(near), body[near.who], way(near), signals[near.who]),
        beside(
            near_robots,
            flag(near_robots),
            stored[near_robots.who],
            way(near_robots),
            state[near_robots.who],
        ),
        jnp.concatenate((body, signals, more), 1),
    )


def hear(spoken: Array, strength: Array, near: Neighbours) -> Array:
    """What each hears, int32 `[N, 16]`: the mean of its neighbours' messages by strength; 0 where none spoke."""
    weight = jnp.where(near.seen, strength[near.who], 0)
    total = jnp.maximum(jnp.sum(weight, 1), 1)[:, None]
    mixed = jnp.sum(weight[..., None] * spoken[near.who], 1)
    return jnp.sign(mixed) * (jnp.abs(mixed) // total)


def shown(actions: Actions) -> Array:
    """The actions that others see, int32 `[N, 11]`."""
    columns = []
    for name in SHOWN:
        columns.append(getattr(actions, name).reshape(-1, ACTION_WIDTHS[name]))
    return jnp.concatenate(columns, 1)


def put(agents: Agents, slots: Array, new: Agents) -> Agents:
    """Agents with those of `new`, `[B]`, in their slots; a slot of N puts none."""
    return jax.tree.map(lambda old, x: old.at[slots].set(x, mode="drop"), agents, new)


def bury(agents: Agents) -> tuple[Agents, Array]:
    """Agents without those whose energy is spent, bool `[N]`."""
    dead = agents.alive & (agents.energy <= 0)
    return agents._replace(alive=agents.alive & ~dead), dead


def tell(before: WorldState, after: WorldState, births: Array, dead: Array, eaten: Wide) -> Info:
    """The info of a step, float32 `[]` each."""
    agents, book = after.agents, after.ledger
    number = lambda mask: jnp.sum(mask).astype(jnp.float32)  # noqa: E731
    last = jnp.iinfo(jnp.int32).max
    lineages = jnp.sort(jnp.where(agents.alive, agents.lineage, last))
    is_new = jnp.concatenate((jnp.ones(1, bool), lineages[1:] != lineages[:-1])) & (lineages < last)
    change = book.regrowth.plus(book.overflow, -1).plus(book.heat, -1)
    wrong = book.total.plus(before.ledger.total, -1).plus(change, -1)
    kinds, living = agents.kind / ONE, agents.alive[:, None]
    mean = jnp.sum(jnp.where(living, kinds, 0), 0) / jnp.maximum(number(agents.alive), 1)
    spread = jnp.sum(jnp.where(living, (kinds - mean[None]) ** 2, 0), 0) / jnp.maximum(
        number(agents.alive), 1
    )
    return {
        "alive": number(agents.alive),
        "births": number(births),
        "deaths": number(dead),
        "lineages": number(is_new),
        "diversity": jnp.mean(jnp.sqrt(spread)),
        "age": jnp.sum(jnp.where(agents.alive, agents.age, 0))
        / jnp.maximum(number(agents.alive), 1),
        "energy_agents": wide_sum(agents.energy).units(),
        "energy_robots": wide_sum(after.robots.energy).units(),
        "energy_cells": wide_sum(after.terrain.energy).units(),
        "eaten": eaten.units(),
        "regrowth": book.regrowth.units(),
        "overflow": book.overflow.units(),
        "heat": book.heat.units(),
        "imbalance": wrong.units(),
    }
