"""Environments whose observations tell what was done and earned last: what RL^2 learns to learn from."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxpar.env import Box, Discrete, Fields, Transition, reset, step
from jaxpar.rl.features import zeros_of
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["Recalling", "returns_by_trial"]

SHARED = ("action_mask", "action_space", "default_params", "num_agents", "render", "trial")


@dataclasses.dataclass(frozen=True)
class Recalling:
    """The environment with its last action and reward seen: observations {"obs", "action", "reward", "after"}.

    "after" is 0 where nothing was done yet in the episode, else 1. With a memory that is kept over the trials of an
    episode, an agent can find out in one trial what serves it in the next (RL^2: Duan et al. 2016, arXiv:1611.02779).
    Where the environment counts trials (`trial`), a step's info has the one that it belongs to, as "trial".

    Attributes:
        env: an environment or adapter.
    """

    env: Any

    def __getattr__(self, name: str) -> Any:
        # No other parts: the kernel must call `reset` and `step` here.
        if name in SHARED:
            return getattr(self.env, name)
        raise AttributeError(name)

    @property
    def name(self) -> str:
        """That of the environment."""
        return getattr(self.env, "name", type(self.env).__name__)

    def observation_space(self, params: PyTree) -> Fields:
        """What is seen, and what is told of the step before."""
        agents = (self.env.num_agents,) if hasattr(self.env, "num_agents") else ()
        return Fields.of(
            obs=self.env.observation_space(params),
            action=self.env.action_space(params),
            reward=Box(-jnp.inf, jnp.inf, agents),
            after=Discrete(2, agents),
        )

    def reset(self, key: PRNGKey, params: PyTree) -> tuple[PyTree, PyTree]:
        """Begins an episode: `(obs, state)`; consumes `key`."""
        obs, state = reset(key, self.env, params)
        space = self.observation_space(params)
        return {"obs": obs} | {name: zeros_of(inner) for name, inner in space.items if name != "obs"}, state

    def step(self, key: PRNGKey, state: PyTree, action: PyTree, params: PyTree) -> Transition:
        """One step; consumes `key`."""
        made = step(key, self.env, state, action, params)
        after: Array = jnp.ones_like(made.reward, jnp.int32)
        counted = {"trial": self.env.trial(state, params)} if hasattr(self.env, "trial") else {}
        return made._replace(
            obs={"obs": made.obs, "action": action, "reward": made.reward, "after": after}, info=made.info | counted
        )


def returns_by_trial(reward: Float[Array, "T *B"], trial: Int[Array, "T *B"], num_trials: int) -> Float[Array, "K *B"]:
    """What each of `num_trials` trials of an episode earned, from its steps' rewards and trials.

    Args:
        reward: of one episode a lane (`jaxpar.rollout.NoReset`), 0 after its end.
        trial: to which each step belongs, as the info of `Recalling` has it.
        num_trials: K; what others earned is left out.
    """
    return jax.lax.map(lambda number: jnp.sum(jnp.where(trial == number, reward, 0), 0), jnp.arange(num_trials))
