"""What actions are worth, lane by lane or all at once, and the policy that takes the best of them but for some.

With several agents, all share one network, and each is a row of its batch; a mixer makes their values a team's
(`jaxpar.rl.mixers`). All of them stay in the mix until the episode ends, also who is out of it.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Discrete
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.rl.distributions import masked
from jaxpar.rl.features import acted, feature_shape, features, num_agents, observed
from jaxpar.rl.mixers import MIXERS, init_mixer, mixed
from jaxpar.rl.network import Network
from jaxpar.rollout import Steps
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["ActionValues", "Estimates", "Lesson", "epsilon_at", "masks_of", "of_team", "q_loss"]


class Estimates(NamedTuple):
    """What a network thinks of T steps of B lanes.

    Attributes:
        q: float32 `[T, B, (N), A]`, of illegal actions -1e9.
        carry: what it remembers after the last step.
        converged: bool [], whether its memory's solver did.
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
        mixer: "none", "vdn" or "qmix".
        mixer_size: hidden units of QMIX.
        greedy: whether it always takes the best action.
    """

    env: Any
    network: Network
    mixer: str = field("none", OneOf(MIXERS))
    mixer_size: int = field(32, AtLeast(1))
    greedy: bool = False

    def __post_init__(self):
        """Refuses environments that have no best action, and teams of one."""
        check_fields(self)
        name = getattr(self.env, "name", type(self.env).__name__)
        if not isinstance(self.space, Discrete) or self.space.shape:
            raise UsageError(
                f"{name} takes actions of {self.space}; Q-learners act by one Discrete choice an agent: learn with Ppo."
            )
        if self.mixer != "none" and self.agents < 2:
            raise UsageError(f"mixer={self.mixer!r} needs several agents; {name} has one: give mixer='none'.")

    agents, space, seen = property(num_agents), property(acted), property(observed)

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the weights; consumes `key`."""
        network_key, mixer_key = jax.random.split(key)
        shape = feature_shape(self.seen)
        state_size = self.agents * math.prod(shape)
        return {
            "network": self.network.init(network_key, shape, {"q": (self.space.n, 1.0)}),
            "mixer": init_mixer(mixer_key, self.mixer, state_size, self.agents, self.mixer_size),
        }

    def first_carry(self) -> PyTree:
        """What one lane remembers when an episode starts."""
        return jax.tree.map(lambda x: x if self.agents else x[0], self.network.initial(max(self.agents, 1)))

    def estimates(
        self, weights: PyTree, obs: PyTree, starts: Array, carry: PyTree, action_mask: Array | None = None
    ) -> Estimates:
        """What it thinks of observations `[T, B, ...]`, from a carry `[B, ...]` on; `starts [T, B]`.

        One parallel pass over all steps, where a memory has one.
        """
        x = features(self.seen, obs)
        lead = x.shape[: 3 if self.agents else 2]
        rows = (lead[0], math.prod(lead[1:]))
        if self.agents:
            starts = jnp.broadcast_to(starts[..., None], lead)
            carry = jax.tree.map(lambda c: c.reshape(-1, *c.shape[2:]), carry)
        x = x.reshape(*rows, *x.shape[len(lead) :])
        out = self.network.apply(weights["network"], x, starts.reshape(rows), carry)
        carry = jax.tree.map(lambda c: c.reshape(*lead[1:], *c.shape[1:]), out.carry)
        return Estimates(masked(self.space, out.heads["q"].reshape(*lead, -1), action_mask), carry, out.converged)

    def joined(self, weights: PyTree, obs: PyTree, q: Array) -> Array:
        """Values `[T, B]` of what the team does from those of its members `[T, B, N]`; without a mixer, just those."""
        if self.mixer == "none":
            return q
        return mixed(weights["mixer"], self.mixer, features(self.seen, obs).reshape(*q.shape[:2], -1), q)

    def __call__(
        self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Array | None = None
    ) -> tuple:
        """Acts in one lane: `(action, carry, extras)`; consumes `key`.

        The extras: "drawn", the action; "value" of the best one, the team's where there is a mixer; "action_mask".
        """
        weights = params if self.greedy else params[0]
        out, value = self._one(weights, obs, carry, action_mask)
        q = out.q[0, 0]
        action = jnp.argmax(q, -1)
        if not self.greedy:
            anyhow_key, legal_key = jax.random.split(key)
            legal = jax.random.categorical(legal_key, masked(self.space, jnp.zeros_like(q), action_mask))
            action = jnp.where(jax.random.uniform(anyhow_key, action.shape) < params[1], legal, action)
        action = action.astype(self.space.dtype)
        extras = {"drawn": action, "value": value}
        if action_mask is not None:
            extras["action_mask"] = action_mask
        return action, jax.tree.map(lambda c: c[0], out.carry), extras

    def value(self, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Array | None = None) -> Array:
        """The value of the best legal action in one lane: `[]`, or `[N]` agents, where a team's is that of each."""
        value = self._one(params if self.greedy else params[0], obs, carry, action_mask)[1]
        return jnp.broadcast_to(value, (self.agents,)) if self.agents else value

    def _one(self, weights, obs, carry, action_mask) -> tuple[Estimates, Array]:
        """Estimates for one step of one lane, with axes T and B of 1; and the best value there."""
        obs, action_mask = jax.tree.map(lambda x: x[None, None], (obs, action_mask))
        out = self.estimates(weights, obs, jnp.zeros((1, 1), bool), jax.tree.map(lambda c: c[None], carry), action_mask)
        return out, self.joined(weights, obs, jnp.max(out.q, -1))[0, 0]


@flax.struct.dataclass
class Lesson:
    """What values are taught; `[T, B, (N)]` but for the carry, without N where a mixer makes agents a team.

    Attributes:
        obs: what was seen `[T, B, (N), ...]`.
        start: bool `[T, B]`.
        drawn: what was done, int32 `[T, B, (N)]`.
        target: what that was worth.
        weight: float32, 1 where the step counts.
        carry: what lanes `[B, ...]` remembered before the first step.
    """

    obs: PyTree
    start: Array
    drawn: Array
    target: Array
    weight: Array
    carry: PyTree


def q_loss(weights: PyTree, agent: ActionValues, lesson: Lesson) -> tuple[Array, Info]:
    """Half the mean squared error of the values of what was done, `mean((Q(s, a) - target)^2) / 2`, over what counts.

    Returns:
        The loss, and "q_loss", "q_mean" and "converged".
    """
    out = agent.estimates(weights, lesson.obs, lesson.start, lesson.carry)
    done = jnp.take_along_axis(out.q, lesson.drawn[..., None].astype(jnp.int32), -1)[..., 0]
    q = agent.joined(weights, lesson.obs, done)
    share = lesson.weight / jnp.maximum(jnp.sum(lesson.weight), 1)
    loss = 0.5 * jnp.sum(share * (q - lesson.target) ** 2)
    return loss, {"q_loss": loss, "q_mean": jnp.sum(share * q), "converged": out.converged.astype(jnp.float32)}


def epsilon_at(rates: Any, updates: Array) -> Array:
    """How often actions are random after so many updates: from `epsilon` in a line to `last_epsilon` over `explore`."""
    gone = jnp.minimum(updates / jnp.maximum(rates.explore, 1), 1)
    return (rates.epsilon + (rates.last_epsilon - rates.epsilon) * gone).astype(jnp.float32)


def masks_of(env: Any, state: PyTree, params: PyTree) -> Array | None:
    """Legal actions of states `[B, ...]`, None where the environment has no mask."""
    return jax.vmap(env.action_mask, (0, None))(state, params) if hasattr(env, "action_mask") else None


def of_team(agent: ActionValues, steps: Steps) -> Steps:
    """Steps as a team's, if a mixer makes one of the agents: their mean reward, until the episode has ended for all.

    The episode was truncated if it was for some agent that had not terminated; the bootstrap is then a team's value.
    """
    if agent.mixer == "none":
        return steps
    cut = steps.truncated & ~steps.terminated
    truncated = steps.ended & jnp.any(cut, -1)
    return dataclasses.replace(
        steps,
        reward=jnp.mean(steps.reward, -1),
        terminated=steps.ended & ~truncated,
        truncated=truncated,
        bootstrap=jnp.sum(jnp.where(cut, steps.bootstrap, 0), -1) / jnp.maximum(jnp.sum(cut, -1), 1),
    )
