"""Partially observable Monte-Carlo planning with observation widening (POMCPOW).

Each simulation keeps a state. Every visit adds the state that arrives to the node, weighted by the likelihood of the
node's observation, and goes on with one drawn from all of them.

Source: Sunberg and Kochenderfer (2018), "Online algorithms for POMDPs with continuous state, action, and observation
spaces", algorithm 2.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.pomdp.beliefs.belief import is_weight
from jaxpar.pomdp.model import where_rows, with_likelihood
from jaxpar.pomdp.planners.particle_search import ExpandParticles
from jaxpar.pomdp.planners.pft import Pft
from jaxpar.pomdp.planners.pomcp import ranks
from jaxpar.pomdp.planners.simulations import is_waiting
from jaxpar.pomdp.planners.tree import EMPTY
from jaxpar.pomdp.planners.widening import (
    Descent,
    NodeBeliefs,
    ParticleBatch,
    ParticleState,
    drawn_index,
    is_first_at_node,
)
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["Pomcpow"]


@dataclasses.dataclass(frozen=True)
class WeighArrivals:
    """Nodes that gain a weighted state at every visit, and give one of all that they hold."""

    def has_ended(self, descent: Descent, is_keyed: bool) -> Array:
        """Simulations whose step ended the episode."""
        return descent.result.terminated

    def visit(
        self, key: PRNGKey, batch: ParticleBatch, state: ParticleState, descent: Descent
    ) -> tuple[NodeBeliefs, PyTree, Array, Array]:
        """As `ExpandParticles.visit`: the state that arrives is weighted and kept, and one of the node's goes on."""
        env = with_likelihood(batch.model.env)
        params = batch.model.params
        beliefs = state.beliefs
        simulations = state.simulations
        size = beliefs.log_weights.shape[1]
        moved = descent.edge != EMPTY
        named = jnp.where(is_first_at_node(descent, batch.before), descent.child, EMPTY)
        obs = jax.tree.map(
            lambda old, new: old.at[named].set(new, mode="drop"), beliefs.obs, descent.result.obs
        )
        seen = jax.tree.map(lambda x: x.at[descent.child].get(mode="clip"), obs)
        weight = jax.vmap(
            lambda obs, state, action, after: env.log_likelihood(obs, state, action, after, params)
        )(seen, simulations.states, descent.action, descent.result.state)
        good = is_weight(weight)
        weight = jnp.where(good, weight, -jnp.inf)
        if batch.is_keyed:  # who made the observation itself must not be weighted by it again
            weight = jnp.zeros_like(weight)
            good = jnp.ones_like(good)

        place = ranks(descent.child)
        added = beliefs.num_added.at[descent.child].get(mode="clip")
        # Of one batch a node takes m states at most.
        row = jnp.where(place < size, descent.child, EMPTY)
        slot = (added + place) % size  # the oldest are written over
        beliefs = dataclasses.replace(
            beliefs,
            obs=obs,
            states=jax.tree.map(
                lambda old, new: old.at[row, slot].set(new, mode="drop"),
                beliefs.states,
                descent.result.state,
            ),
            log_weights=beliefs.log_weights.at[row, slot].set(
                jnp.asarray(weight, jnp.float32), mode="drop"
            ),
            num_added=beliefs.num_added.at[row].add(1, mode="drop"),
            invalid=beliefs.invalid + jnp.sum((row != EMPTY) & ~good, dtype=jnp.int32),
        )
        on = (descent.child != EMPTY) & ~descent.fresh
        chosen = drawn_index(key, beliefs.log_weights.at[descent.child].get(mode="clip"))
        states = jax.tree.map(
            lambda x: x.at[descent.child, chosen].get(mode="clip"), beliefs.states
        )
        earned = jax.vmap(lambda state, action, after: env.reward(state, action, after, params))(
            simulations.states, descent.action, states
        )
        reward = jnp.where(moved, jnp.where(on, earned, descent.result.reward), 0.0).astype(
            jnp.float32
        )
        kept = jax.tree.map(
            lambda new, old: where_rows(moved, new, old), descent.result.state, simulations.states
        )
        states = jax.tree.map(lambda new, old: where_rows(on, new, old), states, kept)
        return beliefs, states, reward, on

    def fill(
        self, key: PRNGKey, batch: ParticleBatch, state: ParticleState
    ) -> tuple[ParticleState, Array]:
        """As `ExpandParticles.fill`: new nodes were filled on arrival, and nothing is left to do."""
        return state, is_waiting(state.simulations)


@dataclasses.dataclass(frozen=True)
class Pomcpow(Pft):
    """Partially observable Monte-Carlo planning with observation widening: fields as `Pft`.

    A node keeps the `num_particles` newest of the weighted states that arrived; the published algorithm keeps all. A
    simulation that finds its node new in the batch stops there. Nodes of keys take the states that made their
    observation, all with the same weight. A batch costs n steps and O(n m) a level.
    """

    def expansion(self) -> ExpandParticles:
        """Contents of nodes: the states that arrived."""
        return WeighArrivals()
