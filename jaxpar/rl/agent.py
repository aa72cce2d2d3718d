"""An actor and its critic in one environment: what a network reads, remembers and answers, lane by lane or all at once.

With several agents, all share one network, and each is a row of its batch. A central critic reads what all of them
observe, and which of them it judges (MAPPO: Yu et al. 2022, arXiv:2103.01955).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.env import Box
from jaxpar.rl.distributions import action_of, check_actions, draw, head_size, log_prob, masked, mode
from jaxpar.rl.features import acted, feature_shape, features, num_agents, observed
from jaxpar.rl.network import Network
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["ActorCritic", "Answers"]


class Answers(NamedTuple):
    """What an actor and its critic say of T steps of B lanes.

    Attributes:
        policy: `[T, B, (N,) ...]`, as `jaxpar.rl.distributions.masked` makes it.
        value: float32 `[T, B, (N)]`.
        carry: what they remember after the last step.
        converged: bool [], whether their memories' solvers did.
    """

    policy: Array
    value: Array
    carry: PyTree
    converged: Array


@dataclasses.dataclass(frozen=True)
class ActorCritic:
    """A policy and a value function for an environment; a `jaxpar.rollout.Policy`, static and hashable.

    Attributes:
        env: the environment or adapter.
        network: of the policy and, unless `central`, of the value.
        central: whether the value reads all agents' observations, through a network of its own.
        greedy: whether it takes the likeliest action instead of drawing one.
    """

    env: Any
    network: Network
    central: bool = False
    greedy: bool = False

    def __post_init__(self):
        """Refuses environments that it cannot act in."""
        check_actions(self.space, getattr(self.env, "name", type(self.env).__name__))
        if self.central and not self.agents:
            raise UsageError("a central critic needs several agents; this environment has one: give central=False.")

    agents, space, seen = property(num_agents), property(acted), property(observed)

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the parameters; consumes `key`."""
        shape = feature_shape(self.seen)
        heads = {"policy": (head_size(self.space), 0.01)}
        if not self.central:
            params = {"actor": self.network.init(key, shape, heads | {"value": (1, 1.0)})}
        else:
            actor_key, critic_key = jax.random.split(key)
            width = self.agents * (jnp.zeros(shape).size + 1)
            params = {
                "actor": self.network.init(actor_key, shape, heads),
                "critic": self._critic().init(critic_key, (width,), {"value": (1, 1.0)}),
            }
        if isinstance(self.space, Box):
            params["log_std"] = jnp.zeros(head_size(self.space))
        return params

    def first_carry(self) -> PyTree:
        """What one lane remembers when an episode starts."""
        one = jax.tree.map(lambda x: x if self.agents else x[0], self.network.initial(max(self.agents, 1)))
        return (one, one) if self.central else one

    def answers(
        self, params: PyTree, obs: PyTree, starts: Array, carry: PyTree, action_mask: Array | None = None
    ) -> Answers:
        """What it says of observations `[T, B, ...]`, from a carry `[B, ...]` on; `starts [T, B]`.

        One parallel pass over all steps, where a memory has one.
        """
        x = features(self.seen, obs)
        rows = (x.shape[0], -1)
        if self.agents:
            starts = jnp.broadcast_to(starts[..., None], x.shape[:3])
            carry = jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), carry)
        own, central = carry if self.central else (carry, None)
        out = self.network.apply(params["actor"], x.reshape(*rows, *x.shape[2 + bool(self.agents) :]),
                                 starts.reshape(rows), own)  # fmt: skip
        heads, carry, converged = dict(out.heads), out.carry, out.converged
        if self.central:
            seen = _together(x)
            judged = self._critic().apply(
                params["critic"], seen.reshape(*rows, seen.shape[-1]), starts.reshape(rows), central
            )
            heads["value"], carry = judged.heads["value"], (carry, judged.carry)
            converged &= judged.converged
        lead = starts.shape
        if self.agents:
            carry = jax.tree.map(lambda c: c.reshape(-1, self.agents, *c.shape[1:]), carry)
        policy = heads["policy"].reshape(*lead, -1)
        if isinstance(self.space, Box):
            log_std = jnp.broadcast_to(params["log_std"], policy.shape)
            policy = jnp.concatenate([policy, log_std], -1)
        return Answers(masked(self.space, policy, action_mask), heads["value"].reshape(lead), carry, converged)

    def __call__(
        self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Array | None = None
    ) -> tuple:
        """Acts in one lane: `(action, carry, extras)`, with what learning needs of the draw; consumes `key`."""
        said = self._one(params, obs, carry, action_mask)
        head = said.policy[0, 0]
        drawn = mode(self.space, head) if self.greedy else draw(key, self.space, head)
        extras = {"drawn": drawn, "log_prob": log_prob(self.space, head, drawn), "value": said.value[0, 0]}
        if action_mask is not None:
            extras["action_mask"] = action_mask
        return action_of(self.space, drawn), jax.tree.map(lambda c: c[0], said.carry), extras

    def value(self, params: PyTree, obs: PyTree, carry: PyTree) -> Array:
        """The value of an observation in one lane: `[]`, or `[N]` agents."""
        return self._one(params, obs, carry, None).value[0, 0]

    def _critic(self) -> Network:
        """The network of a central critic, which reads what all see side by side, flat."""
        return dataclasses.replace(self.network, conv=())

    def _one(self, params, obs, carry, action_mask) -> Answers:
        """Answers for one step of one lane: the axes T and B are 1."""
        alone = jax.tree.map(lambda x: x[None, None], (obs, action_mask))
        return self.answers(params, alone[0], jnp.zeros((1, 1), bool), jax.tree.map(lambda c: c[None], carry), alone[1])


def _together(x: Array) -> Array:
    """What all agents see, and which of them is asked: `[T, B, N, ...]` -> `[T, B, N, N F + N]`."""
    agents = x.shape[2]
    everything = jnp.broadcast_to(x.reshape(*x.shape[:2], 1, -1), (*x.shape[:3], x[0, 0].size))
    return jnp.concatenate([everything, jnp.broadcast_to(jnp.eye(agents), (*x.shape[:3], agents))], -1)
