"""Reset policies: when a finished environment is reset, and where its new state comes from.

All but `Pool` and `GivenLevel` draw from the environment's own start distribution, each environment with a key of its
own; so `SameStep` and `Chunked`, of any size, give the same bits.
"""

import functools
import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment, step
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import platform
from jaxpar.rollout.costs import operations
from jaxpar.rollout.env_state import cast_like, per_env, per_env_levels, vmapped_reset, where
from jaxpar.rollout.flags import place_by_rank
from jaxpar.rollout.prng import env_keys, first_key
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Chunked", "GivenLevel", "NextStep", "NoReset", "Pool", "Reset", "SameStep"]


@flax.struct.dataclass
class NoReset:
    """A finished environment stays in its last state: reward 0, `valid` False. For evaluation: one episode each."""


@flax.struct.dataclass
class SameStep:
    """The step that ends an episode also starts the next (gymnax): all environments are reset at every step.

    Costs B resets a step, of which those of finished environments are kept. Derivatives pass through the reset (to
    `params`), as through no other policy.
    """


@flax.struct.dataclass
class Chunked:
    """As `SameStep`, but only finished environments are reset, `size` at a time: the same bits for less work.

    Costs `ceil(finished / size) * size` resets a step, in one loop on each device. Reverse mode sees the new states
    as constants.

    Attributes:
        size: environments in one iteration of the loop; by default so many that it costs about a sixteenth of a step
            of all environments, by the operations of both (`jaxpar.rollout.costs`); on accelerators, cheap resets go
            without a loop, all at once.
    """

    size: int | None = field(None, AtLeast(1), pytree_node=False)

    def __post_init__(self):
        """Refuses an empty chunk."""
        check_fields(self, "Chunked.")


@flax.struct.dataclass
class Pool:
    """Finished environments start from one of `size` states, drawn once in each `rollout`: cheap, with duplicates.

    Environments share starts, so episodes are not independent. Where `Chunked` is fast enough, there is no reason to.

    Attributes:
        size: states in the pool. Every device holds all of them.
    """

    size: int = field(256, AtLeast(1), pytree_node=False)

    def __post_init__(self):
        """Refuses an empty pool."""
        check_fields(self, "Pool.")


@flax.struct.dataclass
class GivenLevel:
    """Finished environments start from a level, by `env.init_level`: for environment design.

    Attributes:
        level: one for all environments, or one for each (leading axis B). Traced.
    """

    level: PyTree


@flax.struct.dataclass
class NextStep:
    """The step after the end ignores its action and gives the new observation with reward 0, not `valid` (Gymnasium).

    Attributes:
        by: where the new states come from: `Chunked`, `SameStep`, `Pool` or `GivenLevel`.
    """

    by: Chunked | SameStep | Pool | GivenLevel = Chunked()

    def __post_init__(self):
        """Refuses policies that say themselves when an environment is reset."""
        if isinstance(self.by, NextStep | NoReset):
            raise UsageError(
                f"NextStep(by={type(self.by).__name__}) contradicts itself; legal are Chunked, SameStep, Pool and "
                "GivenLevel."
            )


Reset = NoReset | SameStep | Chunked | Pool | GivenLevel | NextStep


def with_levels(policy: Reset, env: Environment | Adapter, params: PyTree, num_envs: int) -> Reset:
    """The policy with a level for each environment, if it gives levels.

    Raises:
        UsageError: if it is no reset policy, or the environment takes no levels.
    """
    if not isinstance(policy, Reset):
        names = ", ".join(sorted(kind.__name__ for kind in Reset.__args__))
        raise UsageError(f"reset={policy!r} is no reset policy; legal are {names}.")
    if isinstance(policy, NextStep):
        by = with_levels(policy.by, env, params, num_envs)
        assert not isinstance(by, NoReset | NextStep)  # `NextStep` refuses these
        return NextStep(by)
    if isinstance(policy, GivenLevel):
        return GivenLevel(per_env_levels(env, params, policy.level, num_envs))
    return policy


def draw_pool(
    key: PRNGKey, policy: Reset, prng: str, env: Environment | Adapter, params: PyTree
) -> PyTree:
    """The pool's (observations, states) `[size, ...]`, or None."""
    policy = policy.by if isinstance(policy, NextStep) else policy
    if not isinstance(policy, Pool):
        return None
    keys = env_keys(first_key(key, prng, of_pool=True), jnp.arange(policy.size))
    return vmapped_reset(env, params, keys, None)


def reset_finished(
    policy: Reset,
    env: Environment | Adapter,
    params: PyTree,
    base: PRNGKey,
    index: Array,
    finished: Array,
    pool: PyTree,
    now: PyTree,
) -> PyTree:
    """Resets the finished environments.

    Args:
        policy: any but `NoReset`.
        env: the environment.
        params: its parameters.
        base: the step's key for resets; environment i takes `env_keys(base, i)`.
        index: int32 `[B]`, the environments' numbers.
        finished: bool `[B]`.
        pool: of `draw_pool`.
        now: (observations, states) `[B, ...]` before.

    Returns:
        (observations, states) `[B, ...]`.
    """
    policy = policy.by if isinstance(policy, NextStep) else policy
    levels = policy.level if isinstance(policy, GivenLevel) else None
    size = _chunk_size(policy, env, params, base, levels, now)
    if size is None:
        fresh = cast_like(vmapped_reset(env, params, env_keys(base, index), levels), now, "reset")
        if not isinstance(policy, SameStep):
            fresh = jax.lax.stop_gradient(fresh)
        return where(finished, fresh, now)
    starts = _Starts(base=base, numbers=index, params=params, levels=levels, pool=pool)
    fill = jax.custom_jvp(functools.partial(_reset_chunks, env, min(size, len(finished))))

    @fill.defjvp
    def _fill_jvp(primals, tangents):
        # A reset state does not depend on the one before, so its derivative is zero; reverse mode could not pass
        # through the while loop anyway.
        def masked(t):
            return t if t.dtype == jax.dtypes.float0 else jnp.where(per_env(primals[0], t), 0, t)

        return fill(*primals), jax.tree.map(masked, tangents[-1])

    return fill(finished, starts, now)


class _Starts(NamedTuple):
    """All that new episodes of B environments start from.

    Attributes:
        base: the step's key for resets.
        numbers: int32 `[B]`, the environments' numbers.
        params: the environment's parameters.
        levels: a level for each environment `[B, ...]`, or None.
        pool: (observations, states) of `draw_pool` to choose from, or None.
    """

    base: PRNGKey
    numbers: Array
    params: PyTree
    levels: PyTree
    pool: PyTree


def _reset_chunks(env, size, finished, starts, now):
    """Resets the finished environments, `size` in an iteration; there is none where nothing finished."""
    num_finished, env_of_rank = place_by_rank(finished)

    def body(carry):
        iteration, now = carry
        envs = env_of_rank(iteration * size + jnp.arange(size))
        keys = env_keys(starts.base, jnp.take(starts.numbers, envs, mode="clip"))
        if starts.pool is None:
            mine = jax.tree.map(lambda x: jnp.take(x, envs, axis=0, mode="clip"), starts.levels)
            fresh = vmapped_reset(env, starts.params, keys, mine)
        else:
            count = jax.tree.leaves(starts.pool)[0].shape[0]
            chosen = jax.vmap(lambda key: jax.random.randint(key, (), 0, count))(keys)
            fresh = jax.tree.map(lambda x: x[chosen], starts.pool)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), now)
        fresh = cast_like(fresh, like, "reset")
        # Ranks beyond the last finished one give the index B, which the scatter drops.
        return iteration + 1, jax.tree.map(lambda x, f: x.at[envs].set(f, mode="drop"), now, fresh)

    num_iterations = (num_finished + size - 1) // size
    return jax.lax.while_loop(lambda carry: carry[0] < num_iterations, body, (jnp.int32(0), now))[1]


def _chunk_size(policy, env, params, base, levels, now) -> int | None:
    """How many environments one iteration resets; None to reset all of them without a loop.

    By default an iteration costs about a sixteenth of a step of all environments. On an accelerator every iteration
    waits for the host, and a small one leaves the device idle: there resets that are cheap or few (1e8 operations take
    about 0.1 ms on an H100, as two iterations do) need no loop, and no iteration is small.
    """
    num_envs = len(jax.tree.leaves(now)[0])
    if isinstance(policy, SameStep):
        return None
    if isinstance(policy, Chunked) and policy.size is not None:
        return policy.size
    if isinstance(policy, Pool):
        return max(64, num_envs // 16)
    of_reset, of_step = _operations(env, params, base, levels, now[1])
    size = math.ceil(num_envs / 16 * min(1.0, of_step / of_reset))
    if platform() == "cpu":
        return size
    return None if of_reset < 2 * of_step or of_reset * num_envs < 1e8 else max(256, size)


def _operations(env, params, base, levels, states) -> tuple[float, float]:
    """What a reset and a step of one environment cost."""

    def one_reset(key, level):
        return vmapped_reset(env, params, key[None], jax.tree.map(lambda x: x[None], level))

    def one_step(key, state):
        return step(key, env, state, env.action_space(params).sample(key), params)

    key, level, state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (base[None], levels, states)
    )
    return operations(one_reset, key, level), operations(one_step, key, state)
