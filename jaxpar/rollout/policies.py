"""The policy that needs no learning."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["RandomPolicy", "random_policy"]


@dataclasses.dataclass(frozen=True)
class RandomPolicy:
    """Draws uniformly among the legal actions, without memory; its params are the environment's (`random_policy`)."""

    env: Any

    def __call__(
        self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Array | None = None
    ) -> tuple:
        """Returns `(action, carry)`; consumes `key`."""
        space = self.env.action_space(params)
        if action_mask is not None:
            chosen = _below(key, action_mask.shape[:-1], jnp.sum(action_mask, -1, dtype=jnp.uint32))
            # The first action with more legal ones up to it than were to be passed over.
            passed = jnp.cumsum(action_mask, -1, dtype=jnp.int32)
            return jnp.argmax(passed > chosen[..., None], -1).astype(jnp.int32), carry
        if isinstance(getattr(space, "n", None), int) and space.n < 2**16:
            return _below(key, space.shape, jnp.uint32(space.n)).astype(space.dtype), carry
        return space.sample(key), carry


def random_policy(env: Any) -> RandomPolicy:
    """A policy that draws uniformly among the legal actions; its parameters are the environment's.

    `unroll(key, lanes, env, params, random_policy(env), params, num_steps)`.
    """
    return RandomPolicy(env)


def _below(key: PRNGKey, shape: tuple[int, ...], count: Array) -> Array:
    """Uniform int32 below `count` < 2^16: the high word of bits times count, a quarter of the draws of `randint`."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    low = ((bits & jnp.uint32(0xFFFF)) * count) >> 16
    return (((bits >> 16) * count + low) >> 16).astype(jnp.int32)
