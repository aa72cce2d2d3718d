"""Tree search in the environment itself, led by a policy and a value that a network has learned.

One tree a lane, in arrays of `simulations + 1` nodes; lanes are `vmap`ped, so that a level of all trees is one gather
and a leaf of each is one batch of the network. Every simulation goes down by

    argmax_a  q(s, a) + exploration prior(s, a) sqrt(visits(s)) / (1 + visits(s, a))

with visits(s) counting the node's own guess and q scaled to [0, 1] by the least and greatest mean of any edge of the
tree (Schrittwieser et al. 2020, arXiv:1911.08265, equation 5), makes one step, asks the network for the new node's
policy and value, and adds the discounted return to every edge on the way (Silver et al. 2018, AlphaZero). Of a random
environment an edge keeps the first outcome that was drawn.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Environment, capabilities, mask_shape, step
from jaxpar.fields import AtLeast, Between, Positive, check_fields, field
from jaxpar.rl.agent import ActorCritic
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

__all__ = ["GuidedSearch", "guide_of"]

ROUNDING = 1e-5  # means closer than this differ by rounding alone: scaled to [0, 1] it would decide

Guide = Callable[[PyTree, Array], tuple[Array, Array]]
"""`(obs, legal [A]) -> (prior [A], value [])`: probabilities, 0 where it is illegal, and the discounted return."""


class Searched(NamedTuple):
    """What a search says of its root.

    Attributes:
        visits: int32 `[A]`, of its actions; they sum to the number of simulations.
        q: float32 `[A]`, mean returns of its actions, 0 where none went.
        value: float32 `[]`, the mean over all simulations and the network's own guess.
    """

    visits: Array
    q: Array
    value: Array


@flax.struct.dataclass
class _Nodes:
    """A tree of M nodes: what is known of each, and of its actions; child -1 is none."""

    state: PyTree
    ended: Array
    value: Array
    parent: Array
    action: Array
    reward: Array
    prior: Array
    child: Array
    visits: Array
    total: Array
    low: Array
    high: Array


@dataclasses.dataclass(frozen=True)
class GuidedSearch:
    """The search's numbers; static and hashable. Memory is linear in `simulations` times the environment's state.

    Attributes:
        simulations: steps of the environment, and evaluations of the network, a decision.
        exploration: how much the prior counts beside q.
        noise: share of Dirichlet noise in the root's prior; 0 searches the same way every time.
        concentration: of that noise; small numbers favour single actions.
    """

    simulations: int = field(32, AtLeast(1))
    exploration: float = field(1.25, AtLeast(0))
    noise: float = field(0.0, Between(0, 1))
    concentration: float = field(0.3, Positive())

    __post_init__ = check_fields

    def __call__(
        self,
        key: PRNGKey,
        env: Environment,
        state: PyTree,
        params: PyTree,
        guide: Guide,
        discount: Scalar,
    ) -> Searched:
        """Searches from one state; consumes `key`. Cost: `simulations` steps, guesses, and ways down and up a tree.

        Illegal actions are never taken. A terminal node is worth 0, one that is cut what the guide says; no simulation
        goes on from either.
        """
        root_key, key = jax.random.split(key)
        nodes = self._root(root_key, env, state, params, guide)

        def simulate(new: Array, nodes: _Nodes) -> _Nodes:
            node, action = self._down(nodes)
            now = jax.random.fold_in(key, new)
            nodes, leaf = _expanded(now, env, nodes, node, action, new, params, guide)
            return _up(nodes, leaf, discount)

        nodes = jax.lax.fori_loop(1, 1 + self.simulations, simulate, nodes)
        visits, total = nodes.visits[0], nodes.total[0]
        value = (nodes.value[0] + jnp.sum(total)) / (1 + self.simulations)
        return Searched(visits, jnp.where(visits > 0, total / jnp.maximum(visits, 1), 0.0), value)

    def _root(
        self, key: PRNGKey, env: Environment, state: PyTree, params: PyTree, guide: Guide
    ) -> _Nodes:
        """A tree of the root alone."""
        legal = legal_actions_at(env, state, params)
        key, noise_key = jax.random.split(key)
        prior, value = guide(env.observe(key, state, None, params), legal)
        if self.noise:
            drawn = jax.random.gamma(noise_key, self.concentration, prior.shape) * legal
            drawn = drawn / jnp.maximum(jnp.sum(drawn), 1e-30)
            prior = (1 - self.noise) * prior + self.noise * drawn
        count, many = self.simulations + 1, prior.shape[0]
        zeros, none = jnp.zeros((count,), jnp.float32), jnp.full((count,), -1, jnp.int32)
        return _Nodes(
            state=jax.tree.map(
                lambda x: jnp.zeros((count, *jnp.shape(x)), jnp.result_type(x)).at[0].set(x), state
            ),
            ended=jnp.zeros((count,), bool),
            value=zeros.at[0].set(value),
            parent=none,
            action=none,
            reward=zeros,
            prior=jnp.zeros((count, many), jnp.float32).at[0].set(_marked(prior, legal)),
            child=jnp.full((count, many), -1, jnp.int32),
            visits=jnp.zeros((count, many), jnp.int32),
            total=jnp.zeros((count, many), jnp.float32),
            low=jnp.float32(jnp.inf),
            high=jnp.float32(-jnp.inf),
        )

    def _down(self, nodes: _Nodes) -> tuple[Array, Array]:
        """The edge at which a simulation leaves the tree, or enters a node that has ended."""

        def choose(node: Array) -> Array:
            visits, prior = nodes.visits[node], nodes.prior[node]
            mean = nodes.total[node] / jnp.maximum(visits, 1)
            q = jnp.where(visits > 0, mean, nodes.value[node])
            width = nodes.high - nodes.low
            spread = width > ROUNDING * (1 + abs(nodes.low) + abs(nodes.high))
            q = jnp.where(spread, jnp.clip((q - nodes.low) / width, 0, 1), 0.0)
            bonus = self.exploration * prior * jnp.sqrt(1.0 + jnp.sum(visits)) / (1 + visits)
            return jnp.argmax(jnp.where(prior < 0, -jnp.inf, q + bonus))

        def goes_on(edge: tuple[Array, Array]) -> Array:
            below = nodes.child[edge]
            return (below >= 0) & ~nodes.ended[below]

        def on(edge: tuple[Array, Array]) -> tuple[Array, Array]:
            below = nodes.child[edge]
            return below, choose(below)

        root = jnp.int32(0)
        return jax.lax.while_loop(goes_on, on, (root, choose(root)))


def guide_of(agent: ActorCritic, weights: PyTree) -> Guide:
    """What an agent without a memory says at one observation: probabilities of legal actions, and the value."""

    def guess(obs: PyTree, legal: Array) -> tuple[Array, Array]:
        obs, legal = jax.tree.map(
            lambda x: x[None, None], (obs, legal)
        )  # one step of one environment
        out = agent.apply(weights, obs, jnp.zeros((1, 1), bool), {}, legal)
        return jax.nn.softmax(out.policy[0, 0]) * legal[0, 0], out.value[0, 0]

    return guess


def legal_actions_at(env: Environment, state: PyTree, params: PyTree) -> Array:
    """What may be done, bool `[A]`, or `[N, A]` of several agents; all where the environment has no mask."""
    mask = capabilities(env).action_mask
    if mask is not None:
        return mask(state, params)
    shape = mask_shape(env.action_space(params))
    assert shape is not None  # whoever searches refuses boxes
    return jnp.ones(shape, bool)


def _marked(prior: Array, legal: Array) -> Array:
    """A prior with -1 where it is illegal: a legal action of probability 0 may still be taken."""
    return jnp.where(legal, prior, -1.0)


def _expanded(
    key: PRNGKey,
    env: Environment,
    nodes: _Nodes,
    node: Array,
    action: Array,
    new: Array,
    params: PyTree,
    guide: Guide,
) -> tuple[_Nodes, Array]:
    """The tree with the node below an edge written at `new`, and that node; the old one where there is one."""
    now = jax.tree.map(lambda x: x[node], nodes.state)
    said = step(key, env, now, action, params)
    legal = legal_actions_at(env, said.state, params)
    prior, value = guide(said.obs, legal)
    old = nodes.child[node, action]
    leaf = jnp.where(old >= 0, old, new)
    nodes = dataclasses.replace(
        nodes,
        state=jax.tree.map(lambda xs, x: xs.at[new].set(x), nodes.state, said.state),
        ended=nodes.ended.at[new].set(said.terminated | said.truncated),
        value=nodes.value.at[new].set(jnp.where(said.terminated, 0.0, value)),
        parent=nodes.parent.at[new].set(node),
        action=nodes.action.at[new].set(action),
        reward=nodes.reward.at[new].set(said.reward),
        prior=nodes.prior.at[new].set(_marked(prior, legal)),
        child=nodes.child.at[node, action].set(leaf),
    )
    return nodes, leaf


def _up(nodes: _Nodes, leaf: Array, discount: Scalar) -> _Nodes:
    """The tree with the return of a simulation that ended at `leaf` added to the edges above it."""

    def more(carry: tuple) -> Array:
        return carry[0] > 0

    def climb(carry: tuple) -> tuple:
        node, earned, visits, total, low, high = carry
        above, action = nodes.parent[node], nodes.action[node]
        earned = nodes.reward[node] + discount * earned
        visits = visits.at[above, action].add(1)
        total = total.at[above, action].add(earned)
        mean = total[above, action] / visits[above, action]
        return above, earned, visits, total, jnp.minimum(low, mean), jnp.maximum(high, mean)

    start = (leaf, nodes.value[leaf], nodes.visits, nodes.total, nodes.low, nodes.high)
    _, _, visits, total, low, high = jax.lax.while_loop(more, climb, start)
    return dataclasses.replace(nodes, visits=visits, total=total, low=low, high=high)
