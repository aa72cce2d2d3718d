"""Partially observable Monte-Carlo planning with observation widening (POMCPOW).

Each simulation keeps a state. Every visit adds the state that arrives to the node, weighted by the likelihood of the
node's observation, and goes on with one drawn from all of them.

Source: Sunberg and Kochenderfer (2018), "Online algorithms for POMDPs with continuous state, action, and observation
spaces", algorithm 2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.pomdp.belief import is_weight
from jaxpar.pomdp.pft import Pft
from jaxpar.pomdp.pomcp import ranks
from jaxpar.pomdp.search import Lanes, Path, is_waiting
from jaxpar.pomdp.tree import EMPTY
from jaxpar.pomdp.widening import Step, Store, chosen_rows, drawn_index, speaks
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["Pomcpow"]


@dataclasses.dataclass(frozen=True)
class Pomcpow(Pft):
    """Partially observable Monte-Carlo planning with observation widening: fields as `Pft`.

    A node keeps the `num_particles` newest of the weighted states that arrived; the published algorithm keeps all. A
    simulation that finds its node new in the batch stops there. Nodes of keys take the states that made their
    observation, all with the same weight. A batch costs n steps and O(n m) a level.
    """

    def _is_over(self, env: Any, params: PyTree, move: Step) -> Array:
        return move.result.terminated

    def _arrive(
        self, key: PRNGKey, env: Any, params: PyTree, store: Store, lanes: Lanes, move: Step, before: Array
    ) -> tuple[Store, PyTree, Array, Array]:
        size, moved = self.num_particles, move.edge != EMPTY
        named = jnp.where(speaks(move, before), move.child, EMPTY)
        obs = jax.tree.map(lambda old, new: old.at[named].set(new, mode="drop"), store.obs, move.result.obs)
        seen = jax.tree.map(lambda x: x.at[move.child].get(mode="clip"), obs)
        weight = jax.vmap(lambda *row: env.log_likelihood(*row, params))(
            seen, lanes.states, move.action, move.result.state
        )
        good = is_weight(weight)
        weight = jnp.where(good, weight, -jnp.inf)
        if self.is_keyed(env, params):  # who made the observation itself must not be weighted by it again
            weight, good = jnp.zeros_like(weight), jnp.ones_like(good)
        place = ranks(move.child)
        held = store.held.at[move.child].get(mode="clip")
        row = jnp.where(place < size, move.child, EMPTY)  # of one batch a node takes m states at most
        slot = (held + place) % size
        store = dataclasses.replace(
            store,
            obs=obs,
            states=jax.tree.map(
                lambda old, new: old.at[row, slot].set(new, mode="drop"), store.states, move.result.state
            ),
            log_weights=store.log_weights.at[row, slot].set(jnp.asarray(weight, jnp.float32), mode="drop"),
            held=store.held.at[row].add(1, mode="drop"),
            invalid=store.invalid + jnp.sum((row != EMPTY) & ~good, dtype=jnp.int32),
        )
        on = (move.child != EMPTY) & ~move.fresh
        chosen = drawn_index(key, store.log_weights.at[move.child].get(mode="clip"))
        states = jax.tree.map(lambda x: x.at[move.child, chosen].get(mode="clip"), store.states)
        earned = jax.vmap(lambda *row: env.reward(*row, params))(lanes.states, move.action, states)
        reward = jnp.where(moved, jnp.where(on, earned, move.result.reward), 0.0).astype(jnp.float32)
        kept = jax.tree.map(lambda new, old: chosen_rows(moved, new, old), move.result.state, lanes.states)
        return store, jax.tree.map(lambda new, old: chosen_rows(on, new, old), states, kept), reward, on

    def _fill(
        self,
        key: PRNGKey,
        env: Any,
        params: PyTree,
        belief: Any,
        store: Store,
        path: Path,
        lanes: Lanes,
        last: Step,
        before: Array,
    ) -> tuple[Store, Path, Lanes, Array]:
        return store, path, lanes, is_waiting(lanes)
