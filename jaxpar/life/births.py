"""Births: who may, into which slot, for what price, and what a newborn is."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.life.bodies import SHOWN, SIGNALS, action_index
from jaxpar.life.brains import Brain, Sight
from jaxpar.life.inhabitants import KIND, LAST, Agents
from jaxpar.life.laws import Prices
from jaxpar.life.terrain import Terrain
from jaxpar.life.units import ONE
from jaxpar.types import Array, PRNGKey, PyTree

REPRODUCE = action_index("reproduce", SHOWN)
"""Index in `Agents.last`."""


class Births(NamedTuple):
    """Up to B births: int32 `[B]`; where none happens, the slot is N, which scatters drop.

    Attributes:
        parent: Richest first, of equal ones the lower number.
        slot: The k-th free slot for the k-th parent.
        born: bool `[B]`.
    """

    parent: Array
    slot: Array
    born: Array


def pair_parents(agents: Agents, price: Array, count: int) -> Births:
    """The k-th free slot for the k-th richest of those that want to and hold over twice the price, int32 `[N]`."""
    wants = agents.alive & (agents.last[:, REPRODUCE] > 0) & (agents.energy > 2 * price)
    wealth, parent = jax.lax.top_k(jnp.where(wants, agents.energy, -1), count)
    free = jnp.nonzero(~agents.alive, size=count, fill_value=len(price))[0].astype(jnp.int32)
    is_born = (wealth >= 0) & (free < len(price))
    return Births(parent, jnp.where(is_born, free, len(price)), is_born)


def birth_fee(terrain: Terrain, cells: Array, alive: Array, prices: Prices) -> Array:
    """The heat of a birth at each cell, int32 `[N]`: the more are alive, the dearer."""
    full = jnp.sum(alive, dtype=jnp.int32) * prices.fee // len(alive)
    return (full * (terrain.fields[5].reshape(-1)[cells] >> 10)) >> 10


def noisy_kind(key: PRNGKey, kind: Array) -> Array:
    """Identities of children, int32 `[B, 8]`: their parents', up to 1/16 away. Consumes `key`."""
    noise = jax.random.randint(key, kind.shape, -ONE // 16, ONE // 16 + 1, jnp.int32)
    return jnp.clip(kind + noise, -ONE, ONE)


def born(
    genome: PyTree, rest: PyTree, places: Array, kind: Array, lineage: Array, energy: Array | int
) -> Agents:
    """B agents of age 0 that have said, heard and done nothing."""
    count = len(places)
    zero, signals = jnp.zeros(count, jnp.int32), jnp.zeros((count, SIGNALS), jnp.int32)
    alive, energy, last = (
        jnp.ones(count, bool),
        jnp.full(count, energy, jnp.int32),
        jnp.zeros((count, LAST), jnp.int32),
    )
    return Agents(
        alive, energy, zero, places, kind, signals, signals, signals, last, lineage, genome, rest
    )


def newcomers(
    key: PRNGKey,
    brain: Brain,
    sight: Sight,
    count: int,
    side: int,
    energy: Array | int,
    lineages: Array,
) -> Agents:
    """`count` agents from outside at random places, each the first of its lineage. Consumes `key`."""
    place_key, kind_key, genome_key = jax.random.split(key, 3)
    places = jax.random.randint(place_key, (count, 2), 0, side, jnp.int32)
    kind = jax.random.randint(kind_key, (count, KIND), -ONE, ONE + 1, jnp.int32)
    lineage = lineages + jnp.arange(count, dtype=jnp.int32)
    return born(
        brain.init(genome_key, sight, count), brain.rest(count), places, kind, lineage, energy
    )


def next_lineage(lineages: Array, agents: Agents) -> Array:
    """The number of the next newcomer, int32 `[]`."""
    return jnp.maximum(lineages, jnp.max(jnp.where(agents.alive, agents.lineage, -1)) + 1)
