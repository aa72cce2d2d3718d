"""What acts in an environment: the protocol of a policy, and the policy that needs no learning.

Example:
    from jaxpar import envs
    import jax
    from jaxpar.rollout import init, rollout

    def left(key, params, obs, carry, action_mask=None):  # its memory counts the steps of the episode
        return jax.numpy.int32(0), carry + 1

    (env, params), key = envs.make("CartPole-v1"), jax.random.key(0)
    first = init(key, env, params, num_envs=4, carry=jax.numpy.int32(0))
    last, trajectory = rollout(key, first, env, params, left, (), num_steps=3)
    assert last.carry.tolist() == [3, 3, 3, 3] and not trajectory.action.any()
"""

import dataclasses
import inspect
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Discrete, Environment
from jaxpar.rollout.flags import uniform_place
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["MaskedPolicy", "Policy", "RandomPolicy", "Value", "random_policy", "takes_mask"]


class Policy(Protocol):
    """Acts in one environment; hashable, since it is static. Its `params` are traced, its `carry` is its memory."""

    def __call__(self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree) -> tuple:
        """Returns `(action, carry)` or `(action, carry, extras)`; consumes `key`."""
        ...


class MaskedPolicy(Policy, Protocol):
    """A policy that reads the legal actions, which its parameter `action_mask` declares."""

    def __call__(
        self,
        key: PRNGKey,
        params: PyTree,
        obs: PyTree,
        carry: PyTree,
        action_mask: Array | None = None,
    ) -> tuple:
        """Returns as a `Policy` does; `action_mask` is the environment's, or None where it has none."""
        ...


class Value(Protocol):
    """The value of an observation in one environment, float32 `[]` or `[N]` agents; it may declare `action_mask`, too.

    Its parameters are the policy's.
    """

    def __call__(self, params: PyTree, obs: PyTree, carry: PyTree) -> Array:
        """Returns the value of `obs`, which the policy sees with `carry` in memory."""
        ...


def takes_mask(function: Policy | Value) -> bool:
    """Whether a policy or a value function names a parameter `action_mask`.

    Policies are plain functions as often as objects, and a function can declare it by its signature alone. A mask for
    every function would put an unread parameter into each. A mask wherever the environment has one would make errors
    of functions that ignore it, such as scripted play. So the signature decides, read here once a trace.
    """
    return "action_mask" in inspect.signature(function).parameters


@dataclasses.dataclass(frozen=True)
class RandomPolicy:
    """Draws uniformly among the legal actions, without memory; its params are the environment's (`random_policy`)."""

    env: Environment | Adapter

    def __call__(
        self,
        key: PRNGKey,
        params: PyTree,
        obs: PyTree,
        carry: PyTree,
        action_mask: Array | None = None,
    ) -> tuple:
        """Returns `(action, carry)`; consumes `key`."""
        space = self.env.action_space(params)
        if action_mask is not None:
            return uniform_place(
                action_mask, lambda count: _below(key, action_mask.shape[:-1], count)
            ), carry
        if isinstance(space, Discrete) and space.n < 2**16:
            return _below(key, space.shape, jnp.uint32(space.n)).astype(space.dtype), carry
        return space.sample(key), carry


def random_policy(env: Environment | Adapter) -> RandomPolicy:
    """A policy that draws uniformly among the legal actions; its parameters are the environment's.

    `rollout(key, environments, env, params, random_policy(env), params, num_steps)`.
    """
    return RandomPolicy(env)


def _below(key: PRNGKey, shape: tuple[int, ...], count: Array) -> Array:
    """Uniform int32 below `count` < 2^16: the high word of bits times count, a quarter of the draws of `randint`."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    low = ((bits & jnp.uint32(0xFFFF)) * count) >> 16
    return (((bits >> 16) * count + low) >> 16).astype(jnp.int32)
