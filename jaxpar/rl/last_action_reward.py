"""Environments whose observations include the last action and reward: the input of RL^2."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxpar.env import (
    Adapter,
    Box,
    Discrete,
    Environment,
    Fields,
    Space,
    Transition,
    capabilities,
    reset,
    step,
)
from jaxpar.rl.features import zeros_of
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["LastActionReward", "returns_by_trial"]

SHARED = ("action_mask", "num_agents", "render", "trial")


@dataclasses.dataclass(frozen=True)
class LastActionReward:
    """The environment with its last action and reward in view: observations {"obs", "action", "reward", "after"}.

    "after" is 0 at the first step of an episode, else 1. With a memory that is kept over the trials of an episode, an
    agent can explore in one trial and use what it found in the next (RL^2: Duan et al. 2016, arXiv:1611.02779).
    Where the environment counts trials (`trial`), a step's info has the one that it belongs to, as "trial".

    Attributes:
        env: an environment or adapter.
    """

    env: Environment | Adapter

    def __getattr__(self, name: str) -> object:
        # Forwarded by name, so that an ability that the environment lacks is lacking here. No other parts: the kernel
        # must call `reset` and `step` of this class.
        if name in SHARED:
            return getattr(self.env, name)
        raise AttributeError(name)

    @property
    def name(self) -> str:
        """That of the environment."""
        return self.env.name

    @property
    def default_params(self) -> PyTree:
        """Those of the environment."""
        return self.env.default_params

    def action_space(self, params: PyTree) -> Space:
        """That of the environment."""
        return self.env.action_space(params)

    def observation_space(self, params: PyTree) -> Fields:
        """The observation, and action and reward of the step before."""
        agents = capabilities(self.env).agents
        return Fields.of(
            obs=self.env.observation_space(params),
            action=self.env.action_space(params),
            reward=Box(-jnp.inf, jnp.inf, agents),
            after=Discrete(2, agents),
        )

    def reset(self, key: PRNGKey, params: PyTree) -> tuple[PyTree, PyTree]:
        """Starts an episode: `(obs, state)`; consumes `key`."""
        obs, state = reset(key, self.env, params)
        space = self.observation_space(params)
        return {"obs": obs} | {
            name: zeros_of(inner) for name, inner in space.items if name != "obs"
        }, state

    def step(self, key: PRNGKey, state: PyTree, action: PyTree, params: PyTree) -> Transition:
        """One step; consumes `key`."""
        result = step(key, self.env, state, action, params)
        after: Array = jnp.ones_like(result.reward, jnp.int32)
        count = capabilities(self.env).trial
        trial = {} if count is None else {"trial": count(state, params)}
        return result._replace(
            obs={"obs": result.obs, "action": action, "reward": result.reward, "after": after},
            info=result.info | trial,
        )


def returns_by_trial(
    reward: Float[Array, "T *B"], trial: Int[Array, "T *B"], num_trials: int
) -> Float[Array, "K *B"]:
    """The return of each of `num_trials` trials of an episode, from its steps' rewards and trials.

    Args:
        reward: of one episode in each environment (`jaxpar.rollout.NoReset`), 0 after its end.
        trial: to which each step belongs, as in the info of `LastActionReward`.
        num_trials: K; the rewards of later trials are left out.
    """
    return jax.lax.map(
        lambda number: jnp.sum(jnp.where(trial == number, reward, 0), 0), jnp.arange(num_trials)
    )
