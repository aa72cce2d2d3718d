"""Values of actions (Q) at steps of environments, and the epsilon-greedy policy by them.

With several agents, all share one network, and each is a row of its batch; a value decomposition
makes their values a team's (`jaxpar.rl.value_decomposition`). An agent that has ended still counts
in it until its episode ends.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol, cast

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Discrete, Environment, Space, capabilities
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.rl.collect import carry_at_start, done_and_weight, normalized_weights
from jaxpar.rl.distributions import Mask, masked
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
from jaxpar.rollout import EnvState, Trajectory
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = [
    "ActionValues",
    "QBatch",
    "QLearner",
    "QValues",
    "action_masks",
    "action_values_agent",
    "epsilon_schedule",
    "last_values",
    "q_loss",
    "team_steps",
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
    """Values of actions in an environment, and the policy by them; a `jaxpar.rollout.Policy`.

    It is static and hashable. Its parameters are the weights where it is greedy, else
    `(weights, epsilon)`: with probability epsilon an agent acts uniformly among its legal actions.

    Attributes:
        env: the environment or adapter, with actions `Discrete`, one choice an agent.
        network: the network, with a head of the values.
        decomposition: "none", "vdn" or "qmix".
        decomposition_size: hidden units of QMIX's mixing network.
        greedy: True if it always takes the best action.
    """

    env: Environment | Adapter
    network: Network
    decomposition: str = field("none", OneOf(DECOMPOSITIONS))
    decomposition_size: int = field(32, AtLeast(1))
    greedy: bool = False

    def __post_init__(self):
        """Rejects action spaces without a largest value, and teams of one."""
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
        """Values of actions at observations `[T, B, ...]`, with `starts [T, B]`, `carry [B, ...]`.

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
        """Values `[T, B]` of the joint action, by `q [T, B, N]` of agents; without a team, `q`."""
        if self.decomposition == "none":
            return q
        state = features(self.obs_space, obs).reshape(*q.shape[:2], -1)
        return joint_value(weights["decomposition"], self.decomposition, state, q)

    def __call__(
        self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Mask = None
    ) -> tuple:
        """Acts in one environment: `(action, carry, extras)`; consumes `key`.

        The extras: "raw_action", the action; "value" of the best one, the team's where there is a
        decomposition; "action_mask".
        """
        weights = self._weights(params)
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
        """The value of the best legal action in one environment: `[]`, or `[N]` agents.

        A team's value is that of each agent.
        """
        weights = self._weights(params)
        _, value = self._one(weights, obs, carry, action_mask)
        if self.num_agents:
            value = jnp.broadcast_to(value, (self.num_agents,))
        return value

    def _weights(self, params: PyTree) -> PyTree:
        if self.greedy:
            return params
        return params[0]

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


class QLearner(Protocol):
    """Fields of a learner from which its `ActionValues` are made: `Dqn` and `Pqn`."""

    @property
    def env(self) -> Environment | Adapter:
        """The environment or adapter, with actions `Discrete`."""
        ...

    @property
    def network(self) -> Network:
        """The network of the values."""
        ...

    @property
    def decomposition(self) -> str:
        """Decomposition of a team's mean reward: "none", "vdn" or "qmix"."""
        ...

    @property
    def decomposition_size(self) -> int:
        """Hidden units of QMIX's mixing network."""
        ...


def action_values_agent(learner: QLearner, greedy: bool = False) -> ActionValues:
    """The policy, by a state's weights if greedy, else by `(weights, epsilon)`."""
    return ActionValues(
        env=learner.env,
        network=learner.network,
        decomposition=learner.decomposition,
        decomposition_size=learner.decomposition_size,
        greedy=greedy,
    )


@flax.struct.dataclass
class QBatch:
    """Actions and their targets `[T, B, (N)]`, without N where a decomposition makes agents a team.

    Attributes:
        obs: observations of the policy `[T, B, (N), ...]`.
        start: bool `[T, B]`.
        action: int32 `[T, B, (N)]`.
        target: the value that the action shall have.
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
    """Half the mean squared error of values, `mean((Q(s, a) - target)^2) / 2`, by `QBatch.weight`.

    Returns:
        The loss, and "q_loss", "q_mean" and "converged".
    """
    out = agent.apply(weights, batch.obs, batch.start, batch.carry)
    chosen = jnp.take_along_axis(out.q, batch.action[..., None].astype(jnp.int32), -1)[..., 0]
    q = agent.joint(weights, batch.obs, chosen)
    share = normalized_weights(batch.weight)
    loss = 0.5 * jnp.sum(share * (q - batch.target) ** 2)
    return loss, {
        "q_loss": loss,
        "q_mean": jnp.sum(share * q),
        "converged": out.converged.astype(jnp.float32),
    }


def epsilon_schedule(rates: PyTree, updates: Array) -> Array:
    """The share of random actions after a number of updates.

    It is linear from `epsilon_start` to `epsilon_end` over `epsilon_anneal` updates.
    """
    fraction = jnp.minimum(updates / jnp.maximum(rates.epsilon_anneal, 1), 1)
    epsilon = rates.epsilon_start + (rates.epsilon_end - rates.epsilon_start) * fraction
    return epsilon.astype(jnp.float32)


def action_masks(env: Environment | Adapter, state: PyTree, params: PyTree) -> Array | None:
    """Legal actions of states `[B, ...]`, None where the environment has no mask."""
    mask = capabilities(env).action_mask
    if mask is None:
        return None
    return jax.vmap(mask, (0, None))(state, params)


def last_values(agent: ActionValues, acting: PyTree, env_state: EnvState, params: PyTree) -> Array:
    """Values of the best legal actions after a rollout: `[B]`, or `[B, N]` agents."""
    masks = action_masks(agent.env, env_state.state, params)
    return jax.vmap(agent.value, (None, 0, 0, 0))(
        acting, env_state.obs, carry_at_start(env_state), masks
    )


def team_trajectory(agent: ActionValues, trajectory: Trajectory) -> Trajectory:
    """The trajectory of a team, if there is a decomposition.

    Its reward is the agents' mean, and its end the episode's. The episode was truncated if it was
    for some agent that had not terminated; the bootstrap is then a team's value.
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


def team_steps(
    agent: ActionValues, trajectory: Trajectory, agent_done: Array | None
) -> tuple[Trajectory, Array, Array]:
    """Returns the `team_trajectory` with its `done_and_weight`; a team ends as one."""
    trajectory = team_trajectory(agent, trajectory)
    if agent.decomposition != "none":
        agent_done = None
    done, weight = done_and_weight(trajectory, agent_done)
    return trajectory, done, weight
