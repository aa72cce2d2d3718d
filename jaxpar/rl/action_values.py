"""Values of actions (Q), for a step of one environment or rollouts of many, and the epsilon-greedy policy by them.

With several agents, all share one network, and each is a row of its batch; a value decomposition makes their values a
team's (`jaxpar.rl.value_decomposition`). An agent that has ended still counts in it until its episode ends.
"""

import dataclasses
import math
from typing import NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Discrete, Environment, Space, capabilities
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.rl.distributions import masked
from jaxpar.rl.features import (
    agent_action_space,
    agent_obs_space,
    feature_shape,
    features,
    num_agents,
)
from jaxpar.rl.items import refuse_items
from jaxpar.rl.network import Network
from jaxpar.rl.value_decomposition import DECOMPOSITIONS, init_decomposition, joint_value
from jaxpar.rollout import Trajectory
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = [
    "ActionValues",
    "QBatch",
    "QValues",
    "action_masks",
    "epsilon_schedule",
    "q_loss",
    "team_trajectory",
]


class QValues(NamedTuple):
    """Values of actions in T steps of B environments.

    Attributes:
        q: float32 `[T, B, (N), A]`, of illegal actions -1e9.
        carry: of the memory after the last step.
        converged: bool [], whether the memory's solver did.
    """

    q: Array
    carry: PyTree
    converged: Array


@dataclasses.dataclass(frozen=True)
class ActionValues:
    """Values of actions in an environment, and the policy by them; a `jaxpar.rollout.Policy`, static and hashable.

    Its parameters are the weights where it is greedy, else `(weights, epsilon)`: with probability epsilon an agent acts
    uniformly among its legal actions.

    Attributes:
        env: the environment or adapter, with actions `Discrete`, one choice an agent.
        network: of the values.
        decomposition: "none", "vdn" or "qmix".
        decomposition_size: hidden units of QMIX's mixing network.
        greedy: whether it always takes the best action.
    """

    env: Environment | Adapter
    network: Network
    decomposition: str = field("none", OneOf(DECOMPOSITIONS))
    decomposition_size: int = field(32, AtLeast(1))
    greedy: bool = False

    def __post_init__(self):
        """Refuses action spaces without a largest value, and teams of one."""
        refuse_items(self.network)
        check_fields(self)
        name = self.env.name
        if not isinstance(self.action_space, Discrete) or self.action_space.shape:
            raise UsageError(
                f"{name} takes actions of {self.action_space}; Q-learners act by one Discrete choice for each agent: "
                "learn with Ppo."
            )
        if self.decomposition != "none" and self.num_agents < 2:
            raise UsageError(
                f"decomposition={self.decomposition!r} needs several agents; {name} has one: give decomposition='none'."
            )

    @property
    def num_agents(self) -> int:
        """N, or 0 for a lone agent."""
        return num_agents(self.env)

    @property
    def action_space(self) -> Discrete:
        """The actions of one agent."""
        return cast(Discrete, agent_action_space(self.env))  # `__post_init__` refuses others

    @property
    def obs_space(self) -> Space:
        """The observations of one agent."""
        return agent_obs_space(self.env)

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the weights; consumes `key`."""
        network_key, decomposition_key = jax.random.split(key)
        shape = feature_shape(self.obs_space)
        state_size = self.num_agents * math.prod(shape)
        return {
            "network": self.network.init(network_key, shape, {"q": (self.action_space.n, 1.0)}),
            "decomposition": init_decomposition(
                decomposition_key,
                self.decomposition,
                state_size,
                self.num_agents,
                self.decomposition_size,
            ),
        }

    def first_carry(self) -> PyTree:
        """The carry of one environment when an episode starts."""
        return jax.tree.map(
            lambda x: x if self.num_agents else x[0], self.network.initial(max(self.num_agents, 1))
        )

    def apply(
        self,
        weights: PyTree,
        obs: PyTree,
        starts: Array,
        carry: PyTree,
        action_mask: Array | None = None,
    ) -> QValues:
        """Values of actions at observations `[T, B, ...]`, from a carry `[B, ...]` on; `starts [T, B]`.

        One parallel pass over all steps, where a memory has one.
        """
        x = features(self.obs_space, obs)
        lead = x.shape[: 3 if self.num_agents else 2]
        rows = (lead[0], math.prod(lead[1:]))
        if self.num_agents:
            starts = jnp.broadcast_to(starts[..., None], lead)
            carry = jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), carry)
        x = x.reshape(*rows, *x.shape[len(lead) :])
        out = self.network.apply(weights["network"], x, starts.reshape(rows), carry)
        carry = jax.tree.map(lambda c: c.reshape(*lead[1:], *c.shape[1:]), out.carry)
        return QValues(
            masked(self.action_space, out.heads["q"].reshape(*lead, -1), action_mask),
            carry,
            out.converged,
        )

    def joint(self, weights: PyTree, obs: PyTree, q: Array) -> Array:
        """Values `[T, B]` of the joint action from those of the agents `[T, B, N]`; without a team, those."""
        if self.decomposition == "none":
            return q
        state = features(self.obs_space, obs).reshape(*q.shape[:2], -1)
        return joint_value(weights["decomposition"], self.decomposition, state, q)

    def __call__(
        self,
        key: PRNGKey,
        params: PyTree,
        obs: PyTree,
        carry: PyTree,
        action_mask: Array | None = None,
    ) -> tuple:
        """Acts in one environment: `(action, carry, extras)`; consumes `key`.

        The extras: "raw_action", the action; "value" of the best one, the team's where there is a decomposition;
        "action_mask".
        """
        weights = params if self.greedy else params[0]
        out, value = self._one(weights, obs, carry, action_mask)
        q = out.q[0, 0]
        action = jnp.argmax(q, -1)
        if not self.greedy:
            explore_key, action_key = jax.random.split(key)
            random = jax.random.categorical(
                action_key, masked(self.action_space, jnp.zeros_like(q), action_mask)
            )
            action = jnp.where(
                jax.random.uniform(explore_key, action.shape) < params[1], random, action
            )
        action = action.astype(self.action_space.dtype)
        extras = {"raw_action": action, "value": value}
        if action_mask is not None:
            extras["action_mask"] = action_mask
        return action, jax.tree.map(lambda c: c[0], out.carry), extras

    def value(
        self, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Array | None = None
    ) -> Array:
        """The value of the best legal action in one environment: `[]`, or `[N]` agents, a team's for each of them."""
        value = self._one(params if self.greedy else params[0], obs, carry, action_mask)[1]
        return jnp.broadcast_to(value, (self.num_agents,)) if self.num_agents else value

    def _one(self, weights, obs, carry, action_mask) -> tuple[QValues, Array]:
        """Values of one step of one environment, with axes T and B of 1; and the best of them."""
        obs, action_mask = jax.tree.map(lambda x: x[None, None], (obs, action_mask))
        out = self.apply(
            weights,
            obs,
            jnp.zeros((1, 1), bool),
            jax.tree.map(lambda c: c[None], carry),
            action_mask,
        )
        return out, self.joint(weights, obs, jnp.max(out.q, -1))[0, 0]


@flax.struct.dataclass
class QBatch:
    """Actions and their targets; `[T, B, (N)]` but for the carry, without N where a decomposition makes agents a team.

    Attributes:
        obs: what the policy saw `[T, B, (N), ...]`.
        start: bool `[T, B]`.
        action: int32 `[T, B, (N)]`.
        target: the value that the action is to have.
        weight: float32, 1 where the step counts.
        carry: the memory's `[B, ...]` before the first step.
    """

    obs: PyTree
    start: Array
    action: Array
    target: Array
    weight: Array
    carry: PyTree


def q_loss(weights: PyTree, agent: ActionValues, batch: QBatch) -> tuple[Array, Info]:
    """Half the mean squared error of the values of actions, `mean((Q(s, a) - target)^2) / 2`, by `QBatch.weight`.

    Returns:
        The loss, and "q_loss", "q_mean" and "converged".
    """
    out = agent.apply(weights, batch.obs, batch.start, batch.carry)
    chosen = jnp.take_along_axis(out.q, batch.action[..., None].astype(jnp.int32), -1)[..., 0]
    q = agent.joint(weights, batch.obs, chosen)
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)
    loss = 0.5 * jnp.sum(share * (q - batch.target) ** 2)
    return loss, {
        "q_loss": loss,
        "q_mean": jnp.sum(share * q),
        "converged": out.converged.astype(jnp.float32),
    }


def epsilon_schedule(rates: PyTree, updates: Array) -> Array:
    """The share of random actions: linear from `epsilon_start` to `epsilon_end` over `epsilon_anneal` updates."""
    fraction = jnp.minimum(updates / jnp.maximum(rates.epsilon_anneal, 1), 1)
    return (rates.epsilon_start + (rates.epsilon_end - rates.epsilon_start) * fraction).astype(
        jnp.float32
    )


def action_masks(env: Environment | Adapter, state: PyTree, params: PyTree) -> Array | None:
    """Legal actions of states `[B, ...]`, None where the environment has no mask."""
    mask = capabilities(env).action_mask
    return None if mask is None else jax.vmap(mask, (0, None))(state, params)


def team_trajectory(agent: ActionValues, trajectory: Trajectory) -> Trajectory:
    """The trajectory of a team, if there is a decomposition: its reward is the agents' mean, its end the episode's.

    The episode was truncated if it was for some agent that had not terminated; the bootstrap is then a team's value.
    """
    if agent.decomposition == "none":
        return trajectory
    cut = trajectory.truncated & ~trajectory.terminated
    truncated = trajectory.ended & jnp.any(cut, -1)
    return dataclasses.replace(
        trajectory,
        reward=jnp.mean(trajectory.reward, -1),
        terminated=trajectory.ended & ~truncated,
        truncated=truncated,
        bootstrap=jnp.sum(jnp.where(cut, trajectory.bootstrap, 0), -1)
        / jnp.maximum(jnp.sum(cut, -1), 1),
    )
