"""An actor and its critic, for a step of one environment or rollouts of many.

With several agents, all share one network, and each is a row of its batch. A central critic reads what all of them
observe, and whose value is asked for (MAPPO: Yu et al. 2022, arXiv:2103.01955).
"""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Box, Environment, Space
from jaxpar.rl.distributions import (
    ActionSpace,
    Mask,
    check_actions,
    head_size,
    log_prob,
    masked,
    mode,
    sample_action,
    scale_action,
)
from jaxpar.rl.features import (
    agent_action_space,
    agent_obs_space,
    feature_shape,
    features,
    num_agents,
)
from jaxpar.rl.items import Items, item_shape, items_of, moves_of
from jaxpar.rl.moments import standardised
from jaxpar.rl.network import Network, Outputs
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["ActorCritic", "ActorCriticOutput"]


class ActorCriticOutput(NamedTuple):
    """Outputs of an actor and its critic for T steps of B environments.

    Attributes:
        policy: `[T, B, (N,) ...]`, as `jaxpar.rl.distributions.masked` makes it.
        value: float32 `[T, B, (N)]`.
        carry: of their memories after the last step.
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
        network: of the policy and, unless `central`, of the value: a `Network`, or `Items`.
        central: whether the value reads all agents' observations, through a network of its own.
        greedy: whether it takes the likeliest action instead of drawing one.
    """

    env: Environment | Adapter
    network: Network | Items
    central: bool = False
    greedy: bool = False

    def __post_init__(self):
        """Refuses environments that it cannot act in."""
        check_actions(self.env, self.action_space)
        if self.central and not self.num_agents:
            raise UsageError(
                "a central critic needs several agents; this environment has one: give central=False."
            )
        if isinstance(self.network, Items):
            if self.num_agents:
                raise UsageError(
                    f"{self.env.name} has several agents; a network of items serves one: use Network."
                )
            moves_of(self.env, self.action_space)

    @property
    def num_agents(self) -> int:
        """N, or 0 for a lone agent."""
        return num_agents(self.env)

    @property
    def action_space(self) -> ActionSpace:
        """The actions of one agent."""
        return cast(ActionSpace, agent_action_space(self.env))  # `__post_init__` refuses others

    @property
    def obs_space(self) -> Space:
        """The observations of one agent."""
        return agent_obs_space(self.env)

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the parameters; consumes `key`."""
        heads = {"policy": (head_size(self.action_space), 0.01)}
        if isinstance(self.network, Items):
            moves = moves_of(self.env, self.action_space)
            return {
                "actor": self.network.init(
                    key, item_shape(self.env), heads | {"value": (1, 1.0)}, moves
                )
            }
        shape = feature_shape(self.obs_space)
        if not self.central:
            params = {"actor": self.network.init(key, shape, heads | {"value": (1, 1.0)})}
        else:
            actor_key, critic_key = jax.random.split(key)
            width = self.num_agents * (jnp.zeros(shape).size + 1)
            params = {
                "actor": self.network.init(actor_key, shape, heads),
                "critic": self._critic().init(critic_key, (width,), {"value": (1, 1.0)}),
            }
        if isinstance(self.action_space, Box):
            params["log_std"] = jnp.zeros(head_size(self.action_space))
        return params

    def first_carry(self) -> PyTree:
        """The carry of one environment when an episode starts."""
        one = jax.tree.map(
            lambda x: x if self.num_agents else x[0], self.network.initial(max(self.num_agents, 1))
        )
        return (one, one) if self.central else one

    def apply(
        self,
        params: PyTree,
        obs: PyTree,
        starts: Array,
        carry: PyTree,
        action_mask: Array | None = None,
    ) -> ActorCriticOutput:
        """Policy and value at observations `[T, B, ...]`, from a carry `[B, ...]` on; `starts [T, B]`.

        One parallel pass over all steps, where a memory has one. With "moments" among the parameters, observations are
        standardised by them.
        """
        obs = standardised(params.get("moments"), obs)
        if isinstance(self.network, Items):
            moves = moves_of(self.env, self.action_space)
            out = self.network.apply(params["actor"], items_of(self.env, obs), starts, carry, moves)
            return self._output(params, out, starts.shape, action_mask)
        x = features(self.obs_space, obs)
        rows = (x.shape[0], -1)
        if self.num_agents:
            starts = jnp.broadcast_to(starts[..., None], x.shape[:3])
            carry = jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), carry)
        own, central = carry if self.central else (carry, None)
        out = self.network.apply(params["actor"], x.reshape(*rows, *x.shape[2 + bool(self.num_agents) :]),
                                 starts.reshape(rows), own)  # fmt: skip
        heads, carry, converged = dict(out.heads), out.carry, out.converged
        if self.central:
            joint = _joint_features(x)
            critic = self._critic().apply(
                params["critic"],
                joint.reshape(*rows, joint.shape[-1]),
                starts.reshape(rows),
                central,
            )
            heads["value"], carry = critic.heads["value"], (carry, critic.carry)
            converged &= critic.converged
        if self.num_agents:
            carry = jax.tree.map(lambda c: c.reshape(-1, self.num_agents, *c.shape[1:]), carry)
        return self._output(params, Outputs(heads, carry, converged), starts.shape, action_mask)

    def _output(
        self, params: PyTree, out: Outputs, lead: tuple[int, ...], action_mask: Array | None
    ) -> ActorCriticOutput:
        """The policy, masked, and the value, of heads."""
        policy = out.heads["policy"].reshape(*lead, -1)
        if isinstance(self.action_space, Box):
            log_std = jnp.broadcast_to(params["log_std"], policy.shape)
            policy = jnp.concatenate([policy, log_std], -1)
        policy = masked(self.action_space, policy, action_mask)
        return ActorCriticOutput(policy, out.heads["value"].reshape(lead), out.carry, out.converged)

    def __call__(
        self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Mask = None
    ) -> tuple:
        """Acts in one environment: `(action, carry, extras)`; consumes `key`.

        The extras are what learning needs: "raw_action", its "log_prob", the "value", and the "action_mask" if any.
        """
        out = self._one(params, obs, carry, action_mask)
        head = out.policy[0, 0]
        space = self.action_space
        raw_action = mode(space, head) if self.greedy else sample_action(key, space, head)
        extras = {
            "raw_action": raw_action,
            "log_prob": log_prob(space, head, raw_action),
            "value": out.value[0, 0],
        }
        if action_mask is not None:
            extras["action_mask"] = action_mask
        return scale_action(space, raw_action), jax.tree.map(lambda c: c[0], out.carry), extras

    def value(self, params: PyTree, obs: PyTree, carry: PyTree) -> Array:
        """The value of an observation in one environment: `[]`, or `[N]` agents."""
        return self._one(params, obs, carry, None).value[0, 0]

    def _critic(self) -> Network:
        """The network of a central critic, which reads all observations side by side, flat."""
        assert isinstance(self.network, Network)  # `__post_init__` refuses others
        return dataclasses.replace(self.network, conv=())

    def _one(self, params, obs, carry, action_mask) -> ActorCriticOutput:
        """Outputs for one step of one environment: the axes T and B are 1."""
        obs, action_mask = jax.tree.map(lambda x: x[None, None], (obs, action_mask))
        return self.apply(
            params,
            obs,
            jnp.zeros((1, 1), bool),
            jax.tree.map(lambda c: c[None], carry),
            action_mask,
        )


def _joint_features(x: Array) -> Array:
    """All agents' observations, and a one-hot of the agent that is valued: `[T, B, N, ...]` -> `[T, B, N, N F + N]`."""
    num_agents = x.shape[2]
    shared = jnp.broadcast_to(x.reshape(*x.shape[:2], 1, -1), (*x.shape[:3], x[0, 0].size))
    return jnp.concatenate(
        [shared, jnp.broadcast_to(jnp.eye(num_agents), (*x.shape[:3], num_agents))], -1
    )
