"""The two functions that compose an environment's parts: `reset` and `step`."""

import jax
import jax.numpy as jnp

from jaxpar.env.capabilities import capabilities, is_adapter
from jaxpar.env.protocols import Adapter, Environment, Transition
from jaxpar.types import PRNGKey, PyTree

__all__ = ["reset", "step"]


def reset(key: PRNGKey, env: Environment | Adapter, params: PyTree) -> tuple[PyTree, PyTree]:
    """Begins an episode: `(obs, state)`; consumes `key`.

    Takes an `Environment`, or an adapter with its own `reset(key, params)` (`jaxpar.env.adapt`).
    """
    if is_adapter(env):
        return env.reset(key, params)
    init_key, observe_key = jax.random.split(key)
    state = env.init(init_key, params)
    return env.observe(observe_key, state, None, params), state


def step(
    key: PRNGKey, env: Environment | Adapter, state: PyTree, action: PyTree, params: PyTree
) -> Transition:
    """One step of an `Environment`, or of an adapter, without any reset; consumes `key`."""
    if is_adapter(env):
        return env.step(key, state, action, params)
    transition_key, observe_key = jax.random.split(key)
    following = env.transition(transition_key, state, action, params)
    terminated = jnp.asarray(env.terminal(following, params), bool)
    truncated = capabilities(env).truncated
    cut = jnp.zeros_like(terminated) if truncated is None else truncated(following, params)
    return Transition(
        obs=env.observe(observe_key, following, action, params),
        state=following,
        reward=jnp.asarray(env.reward(state, action, following, params), jnp.float32),
        terminated=terminated,
        truncated=jnp.asarray(cut, bool),
        info={},
    )
