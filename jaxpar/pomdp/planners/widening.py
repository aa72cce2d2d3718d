"""Observation widening: the slots of an edge, what nodes hold, and one filter step.

Every new observation would make a new node, and no node be visited twice; so an edge ba opens slots for observations as
its visits N grow, while `|C(ba)| <= k N^alpha`, and later visits choose among the slots that are open. The rule depends
on the number of the visit alone: after t of them m(t) = min(t, floor(k (t - 1)^alpha) + 1) slots are open (since
k s^alpha - s is concave, it is lowest at an end), so that n simulations at one edge decide together exactly as they
would one after another.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Transition, step
from jaxpar.pomdp.beliefs.belief import Belief, is_weight, systematic
from jaxpar.pomdp.model import Model, with_likelihood
from jaxpar.pomdp.planners.simulations import Path, SearchState, Simulations
from jaxpar.pomdp.planners.tree import EMPTY, Children, Tree
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

__all__ = ["Descent", "NodeBeliefs", "ParticleBatch", "ParticleSearchState", "ParticleState"]


@flax.struct.dataclass
class NodeBeliefs:
    """Contents of the nodes, `[N]` rows of m particles.

    Attributes:
        states: `[N, m, ...]`.
        log_weights: float32 `[N, m]`, -inf where there is no particle.
        obs: `[N, ...]`, the node's observation.
        reward: float32 `[N]`, mean reward of the step to the node (Pft).
        terminal: bool `[N]`, the episode has ended there (Pft).
        num_added: int32 `[N]`, states that were added (Pomcpow).
        invalid: int32, likelihoods that were no numbers; their particles have no weight.
    """

    states: PyTree
    log_weights: Array
    obs: PyTree
    reward: Array
    terminal: Array
    num_added: Array
    invalid: Array


@flax.struct.dataclass
class ParticleSearchState(SearchState):
    """A search, and what its nodes hold.

    Attributes:
        beliefs: of the nodes.
    """

    beliefs: NodeBeliefs


class ParticleBatch(NamedTuple):
    """Configuration and root of one batch.

    Attributes:
        model: environment, parameters and discount.
        belief: of the root.
        children: where the nodes below an edge are looked up.
        before: int32, the number of nodes before the batch.
        is_keyed: whether nodes are those of observation keys, else of slots.
    """

    model: Model
    belief: Belief
    children: Children
    before: Array
    is_keyed: bool


class ParticleState(NamedTuple):
    """Arrays that a batch changes on its way down.

    Attributes:
        tree: the tree.
        beliefs: of its nodes.
        path: where the simulations went so far.
        simulations: where they are.
        last: for each simulation the step that led to a new node, if one did.
    """

    tree: Tree
    beliefs: NodeBeliefs
    path: Path
    simulations: Simulations
    last: "Descent"


class Descent(NamedTuple):
    """One level's move of n simulations: from `node` by `action` over `edge` to `child`.

    Attributes:
        node: int32 `[n]`.
        edge: int32 `[n]`, `EMPTY` where it did not move.
        child: int32 `[n]`, `EMPTY` where it ended or found no room.
        action: int32 `[n]`.
        result: the environment's step, `[n, ...]`.
        fresh: bool `[n]`, the child is new in this batch.
    """

    node: Array
    edge: Array
    child: Array
    action: Array
    result: Transition
    fresh: Array


def open_slots(visits: Array, rate: Scalar, power: Scalar) -> Array:
    """m(t): how many slots are open after `visits`, int32; 1e-4 forgives the rounding of the power."""
    grown = jnp.floor(rate * jnp.maximum(visits - 1, 0).astype(jnp.float32) ** power + 1e-4) + 1
    return jnp.minimum(visits, grown.astype(jnp.int32))


def slot_of_visit(draws: Array, visits: Array, rate: Scalar, power: Scalar) -> Array:
    """The slot of the visit that follows `visits`: a new one if one opens, else uniformly by `draws` in [0, 1)."""
    before = open_slots(visits, rate, power)
    opens = open_slots(visits + 1, rate, power) > before
    return jnp.where(opens, before, jnp.minimum((draws * before).astype(jnp.int32), before - 1))


def filter_step(
    key: PRNGKey,
    model: Model,
    states: PyTree,
    log_weights: Array,
    action: Array,
    result: Transition,
) -> tuple[PyTree, Array, Array, Array]:
    """One filter step of m particles for the observation of `result`: new ones, log weights, mean reward.

    And how many likelihoods were no numbers, int32: their particles have no weight. Resampled below half of the
    effective sample size. Where no particle explains the observation the node is the one state that made it.
    """
    env = with_likelihood(model.env)
    params = model.params
    move_key, pick_key = jax.random.split(key)
    size = log_weights.shape[0]

    keys = jax.random.split(move_key, size)
    following = jax.vmap(lambda key, state: env.transition(key, state, action, params))(
        keys, states
    )
    rewards = jax.vmap(lambda state, after: env.reward(state, action, after, params))(
        states, following
    )
    seen = jax.vmap(
        lambda state, after: env.log_likelihood(result.obs, state, action, after, params)
    )(states, following)
    ended = jax.vmap(lambda state: env.terminal(state, params))(following)
    prior = jax.nn.softmax(log_weights)
    reward = jnp.sum(
        jnp.where(prior > 0, prior * rewards, 0.0)
    )  # a reward that is NaN counts only where it can come
    joint = jnp.where(ended, -jnp.inf, log_weights + seen)
    good = is_weight(joint)
    joint = jnp.where(good, joint, -jnp.inf)
    total = jax.nn.logsumexp(joint)
    lost = ~jnp.isfinite(total)  # then -inf less -inf would be NaN
    weights = jnp.where(lost, -jnp.log(size), joint - jnp.where(lost, 0.0, total))
    poor = jnp.exp(-jax.nn.logsumexp(2 * weights)) < 0.5 * size
    chosen = jnp.where(poor, systematic(pick_key, weights, size), jnp.arange(size, dtype=jnp.int32))
    kept = jax.tree.map(lambda x, one: jnp.where(lost, one, x[chosen]), following, result.state)
    weights = jnp.where(poor, -jnp.log(size), weights).astype(jnp.float32)
    return kept, weights, reward.astype(jnp.float32), jnp.sum(~good, dtype=jnp.int32)


def drawn_index(key: PRNGKey, log_weights: Array) -> Array:
    """One index of each row `[n, m]` by its weights, int32 `[n]`; 0 where there is none."""
    log_weights = jnp.where(is_weight(log_weights), log_weights, -jnp.inf)
    top = jnp.max(
        log_weights, axis=1, keepdims=True
    )  # taken off, so that the largest weight is 1 and none overflows
    total = jnp.cumsum(jnp.exp(log_weights - jnp.where(jnp.isfinite(top), top, 0.0)), axis=1)
    draws = jax.random.uniform(key, (log_weights.shape[0], 1)) * total[:, -1:]
    return jnp.argmax(total > draws, axis=1).astype(jnp.int32)


def is_first_at_node(descent: Descent, before: Array) -> Array:
    """Simulations that are the first at a new node, bool `[n]`; new nodes of a batch are numbered from `before`.

    Its number among the batch's new nodes is below n, so that the scratch that finds the lowest simulation has n rows.
    """
    count = descent.fresh.shape[0]
    numbers = jnp.arange(count, dtype=jnp.int32)
    place = jnp.where(descent.fresh, descent.child - before, EMPTY)
    first = jnp.full((count,), count, jnp.int32).at[place].min(numbers, mode="drop")
    return first.at[place].get(mode="fill", fill_value=-1) == numbers


def no_descent(model: Model, simulations: Simulations) -> Descent:
    """A descent in which no simulation moves, for the start of a loop."""
    count = simulations.node.shape[0]
    none = jnp.full((count,), EMPTY, jnp.int32)
    action = jnp.zeros((count,), jnp.int32)

    def steps(keys: PRNGKey, states: PyTree) -> Transition:
        return jax.vmap(lambda key, state: step(key, model.env, state, action[0], model.params))(
            keys, states
        )

    keys = jax.random.split(jax.random.key(0), count)
    result = jax.eval_shape(steps, keys, simulations.states)
    return Descent(
        node=none,
        edge=none,
        child=none,
        action=action,
        result=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result),
        fresh=jnp.zeros((count,), bool),
    )
