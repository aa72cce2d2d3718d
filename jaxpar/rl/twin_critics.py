"""A policy over a bounded box and two critics of its actions, which `Td3` and `Sac` train."""

import dataclasses
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Adapter, Box, Environment, Space, capabilities
from jaxpar.optim import Optimizer
from jaxpar.rl.buffer import Buffer, sample
from jaxpar.rl.collect import normalized_weights
from jaxpar.rl.distributions import draw_squashed, head_size, scale_action
from jaxpar.rl.features import (
    agent_action_space,
    agent_obs_space,
    feature_shape,
    features,
)
from jaxpar.rl.items import refuse_items
from jaxpar.rl.learner import LearnerState
from jaxpar.rl.moments import standardised
from jaxpar.rl.network import Network
from jaxpar.rl.replay import (
    Experience,
    ReplayLearner,
    ReplayState,
    collect_experience,
    init_replay,
    learned,
)
from jaxpar.rollout import EnvState, Trajectory
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar, UsageError

__all__ = [
    "TwinCritics",
    "collect_by_actor",
    "critic_loss",
    "init_optimizers",
    "init_twin_critics",
    "moved_targets",
    "sample_rows",
    "standard_rows",
    "update_part",
]


@dataclasses.dataclass(frozen=True)
class TwinCritics:
    """An actor in a bounded box and two critics; a `jaxpar.rollout.Policy`, static and hashable.

    Its parameters are the weights where it is greedy, else `(weights, warm, noise)`. Until `warm`,
    actions are uniform in the box; then they are drawn, or the actor's with normal noise of that
    deviation. Actions are in units of the box, -1 to 1, and scaled to it for the environment.

    Attributes:
        env: the environment or adapter, of one agent, with actions of a bounded float `Box`.
        network: shape of the actor, and of each critic, which reads observations and actions side
            by side, flat.
        drawn: True if the actor gives a distribution, the tanh of a normal one, instead of an
            action.
        greedy: True if it acts without noise.
    """

    env: Environment | Adapter
    network: Network
    drawn: bool = False
    greedy: bool = False

    def __post_init__(self):
        """Rejects environments that it cannot act in."""
        refuse_items(self.network)
        space = self.action_space
        name = self.env.name
        if capabilities(self.env).num_agents:
            raise UsageError(
                f"{name} has several agents; Td3 and Sac learn for one: learn with Ppo."
            )
        if (
            not isinstance(space, Box)
            or not jnp.issubdtype(space.dtype, jnp.floating)
            or not all(np.isfinite(end).all() for end in space.bounds())
        ):
            raise UsageError(
                f"{name} takes actions of {space}; Td3 and Sac act by a float Box with bounds."
            )

    @property
    def num_agents(self) -> int:
        """0: there is a lone one."""
        return 0

    @property
    def action_space(self) -> Box:
        """The actions."""
        return cast(Box, agent_action_space(self.env))  # `__post_init__` refuses others

    @property
    def obs_space(self) -> Space:
        """The observations."""
        return agent_obs_space(self.env)

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the weights of "actor", and of "critics" `[2, ...]`; consumes `key`."""
        actor_key, critics_key = jax.random.split(key)
        shape = feature_shape(self.obs_space)
        size = head_size(self.action_space)
        seen = (math.prod(shape) + size,)
        return {
            "actor": self.network.init(
                actor_key, shape, {"policy": ((1 + self.drawn) * size, 0.01)}
            ),
            "critics": jax.vmap(lambda key: self._critic().init(key, seen, {"value": (1, 1.0)}))(
                jax.random.split(critics_key)
            ),
        }

    def first_carry(self) -> PyTree:
        """Nothing: there is no memory."""
        return {}

    def head(self, actor: PyTree, obs: PyTree) -> Array:
        """The actor's head at observations `[M, ...]`: `[M, n]`, or `[M, 2 n]` for draws."""
        return self._head(self.network, actor, features(self.obs_space, obs), "policy")

    def action(self, actor: PyTree, obs: PyTree) -> Array:
        """The actor's action `[M, n]` without noise: of a distribution, the tanh of its mean."""
        head = self.head(actor, obs)
        if self.drawn:
            head = head[..., : head.shape[-1] // 2]
        return jnp.tanh(head)

    def values(self, critics: PyTree, obs: PyTree, action: Array) -> Array:
        """Both critics' values `[2, M]` of actions `[M, n]` at observations `[M, ...]`."""
        x = features(self.obs_space, obs).reshape(len(action), -1)
        x = jnp.concatenate([x, action], -1)
        return jax.vmap(lambda critic: self._head(self._critic(), critic, x, "value"))(critics)[
            ..., 0
        ]

    def __call__(self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree) -> tuple:
        """Acts in one environment: `(action, carry, extras)`; consumes `key`.

        The extras are "raw_action", in units of the box.
        """
        weights = params if self.greedy else params[0]
        obs = standardised(weights.get("moments"), jax.tree.map(lambda x: x[None], obs))
        if self.greedy:
            raw_action = self.action(weights["actor"], obs)[0]
        else:
            _, warm, noise = params
            draw_key, random_key = jax.random.split(key)
            draw = jax.random.normal(draw_key, (head_size(self.action_space),))
            if self.drawn:
                raw_action = draw_squashed(self.head(weights["actor"], obs)[0], draw)[0]
            else:
                raw_action = jnp.clip(self.action(weights["actor"], obs)[0] + noise * draw, -1, 1)
            anyhow = jax.random.uniform(random_key, raw_action.shape, raw_action.dtype, -1, 1)
            raw_action = jnp.where(warm, raw_action, anyhow)
        return scale_action(self.action_space, raw_action), carry, {"raw_action": raw_action}

    def _critic(self) -> Network:
        return dataclasses.replace(self.network, conv=())

    def _head(self, network: Network, weights: PyTree, x: Array, name: str) -> Array:
        return network.apply(weights, x[None], jnp.zeros((1, len(x)), bool), {}).heads[name][0]


def init_twin_critics(learner: ReplayLearner, key: PRNGKey, inputs: PyTree) -> ReplayState:
    """Draws weights and starts an episode in every environment; consumes `key`."""
    return init_optimizers(learner.optimizer, init_replay(learner, key, inputs))


def init_optimizers(optimizer: Optimizer, state: ReplayState) -> ReplayState:
    """Gives each part of a state's weights that is learned an optimizer's state of its own."""
    parts = learned(state.weights)
    opt_state = {name: optimizer.init(part) for name, part in parts.items()}
    return dataclasses.replace(state, opt_state=opt_state)


def collect_by_actor(
    learner: ReplayLearner, key: PRNGKey, state: LearnerState, warm: Array, params: PyTree
) -> tuple[EnvState, Trajectory, Experience]:
    """Makes a rollout, by uniform actions until it is `warm`, and its experiences `[T, B]`.

    It consumes `key`.
    """
    agent = learner.agent()
    assert isinstance(agent, TwinCritics)
    noise = None
    if not agent.drawn:
        noise = state.rates.noise
    return collect_experience(learner, key, state, (state.weights, warm, noise), params)


def sample_rows(key: PRNGKey, weights: PyTree, buffer: Buffer, num_rows: int) -> Experience:
    """Samples experiences `[num_rows]`, standardised where the weights have moments, by `key`."""
    return standard_rows(weights, sample(key, buffer, num_rows))


def standard_rows(weights: PyTree, rows: Experience) -> Experience:
    """Experiences whose observations are standardised, where the weights have moments."""
    moments = weights.get("moments")
    return dataclasses.replace(
        rows, obs=standardised(moments, rows.obs), next_obs=standardised(moments, rows.next_obs)
    )


def critic_loss(
    critics: PyTree, agent: TwinCritics, rows: Experience, target: Array
) -> tuple[Array, Info]:
    """The sum of both critics' mean squared errors, `sum_i mean((Q_i(s, a) - target)^2)`.

    Means are over experiences `[M]` by `Experience.weight`.

    Returns:
        The loss, and "critic_loss", "q_mean" and "converged".
    """
    q = agent.values(critics, rows.obs, rows.action)
    share = normalized_weights(rows.weight)
    loss = jnp.sum(share[None] * (q - target[None]) ** 2)
    return loss, {
        "critic_loss": loss,
        "q_mean": jnp.sum(share * jnp.mean(q, 0)),
        "converged": jnp.float32(1),
    }


def update_part(
    optimizer: Optimizer,
    name: str,
    loss: Callable,
    weights: PyTree,
    opt_state: PyTree,
    rate: Array,
    *args: object,
) -> tuple[PyTree, PyTree, Info]:
    """Makes a gradient step of one part of the weights, with an optimizer's state of its own.

    Args:
        optimizer: of all parts.
        name: of the part.
        loss: `(part, *args) -> (loss, info)`.
        weights: by part.
        opt_state: by part.
        rate: the learning rate.
        *args: of the loss.
    """
    grads, info = jax.grad(loss, has_aux=True)(weights[name], *args)
    part, moved, optimizer_info = optimizer.update(grads, opt_state[name], weights[name], rate=rate)
    return weights | {name: part}, opt_state | {name: moved}, info | optimizer_info


def moved_targets(target: PyTree, weights: PyTree, tau: Scalar) -> PyTree:
    """Target networks, moved by the share `tau` to the parts of the weights that they follow."""
    return {
        name: jax.tree.map(lambda old, new: (1 - tau) * old + tau * new, old, weights[name])
        for name, old in target.items()
    }
