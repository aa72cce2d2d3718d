"""Reset policies: when a finished lane begins anew, and where its new state comes from.

All but `Pool` and `GivenLevel` draw from the environment's own start distribution, each lane with a key of its own; so
`SameStep` and `Chunked`, of any size, give the same bits.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import step
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import platform
from jaxpar.rollout.costs import operations
from jaxpar.rollout.draws import first_key, lane_keys
from jaxpar.rollout.lanes import cast_like, per_lane, per_lane_levels, vmapped_start, where
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Chunked", "GivenLevel", "NextStep", "NoReset", "Pool", "Reset", "SameStep"]


@flax.struct.dataclass
class NoReset:
    """A finished lane stays in its last state: reward 0, `valid` False. For evaluation: one episode a lane."""


@flax.struct.dataclass
class SameStep:
    """The step that ends an episode also begins the next (gymnax): every lane resets at every step, most in vain.

    Costs B resets a step. Derivatives pass through the reset (to `params`), as through no other policy.
    """


@flax.struct.dataclass
class Chunked:
    """The same, but only finished lanes reset, `size` at a time: exact, and nothing is done where none finished.

    Costs `ceil(finished / size) * size` resets a step, and on a device one loop of so many trips. Reverse mode sees the
    new states as constants.

    Attributes:
        size: lanes a trip; by default so many that a trip costs about a sixteenth of a step of all lanes, by the
            operations of both (`jaxpar.rollout.costs`); on accelerators, cheap resets go without a loop, all at once.
    """

    size: int | None = field(None, AtLeast(1), pytree_node=False)

    def __post_init__(self):
        """Refuses an empty chunk."""
        check_fields(self, "Chunked.")


@flax.struct.dataclass
class Pool:
    """Finished lanes begin from one of `size` states that each `unroll` draws anew: cheap, and it duplicates starts.

    Lanes share starts, so episodes are not independent. Where `Chunked` is fast enough, there is no reason to.

    Attributes:
        size: states in the pool. Every device holds all of them.
    """

    size: int = field(256, AtLeast(1), pytree_node=False)

    def __post_init__(self):
        """Refuses an empty pool."""
        check_fields(self, "Pool.")


@flax.struct.dataclass
class GivenLevel:
    """Finished lanes begin from a level, by `env.init_level`: for environment design.

    Attributes:
        level: one for all lanes, or one a lane (leading axis B). Traced.
    """

    level: PyTree


@flax.struct.dataclass
class NextStep:
    """The step after the end ignores its action and gives the new observation with reward 0, not `valid` (Gymnasium).

    Attributes:
        by: where the new states come from: `Chunked`, `SameStep`, `Pool` or `GivenLevel`.
    """

    by: Any = Chunked()

    def __post_init__(self):
        """Refuses what says itself when to begin."""
        if isinstance(self.by, NextStep | NoReset):
            raise UsageError(
                f"NextStep(by={type(self.by).__name__}) contradicts itself; legal are Chunked, SameStep, Pool and "
                "GivenLevel."
            )


Reset = NoReset | SameStep | Chunked | Pool | GivenLevel | NextStep


def prepared(policy: Reset, env: Any, params: PyTree, num_lanes: int) -> Reset:
    """The policy with one level a lane, if it gives levels.

    Raises:
        UsageError: if it is no reset policy, or the environment takes no levels.
    """
    if not isinstance(policy, Reset):
        names = ", ".join(sorted(kind.__name__ for kind in Reset.__args__))
        raise UsageError(f"reset={policy!r} is no reset policy; legal are {names}.")
    if isinstance(policy, NextStep):
        return NextStep(prepared(policy.by, env, params, num_lanes))
    if isinstance(policy, GivenLevel):
        return GivenLevel(per_lane_levels(env, params, policy.level, num_lanes))
    return policy


def pool_of(policy: Reset, key: PRNGKey, draw: str, env: Any, params: PyTree) -> PyTree:
    """The pool's (observations, states) `[size, ...]`, or None."""
    policy = policy.by if isinstance(policy, NextStep) else policy
    if not isinstance(policy, Pool):
        return None
    keys = lane_keys(first_key(key, draw, of_pool=True), jnp.arange(policy.size))
    return vmapped_start(env, params, keys, None)


def restarted(
    policy: Reset, env: Any, params: PyTree, base: PRNGKey, index: Array, finished: Array, pool: PyTree, now: PyTree
) -> PyTree:
    """Begins the finished lanes anew.

    Args:
        policy: any but `NoReset`.
        env: the environment.
        params: its parameters.
        base: the step's key for resets; lane i takes `lane_keys(base, i)`.
        index: int32 `[B]`, the lanes' numbers.
        finished: bool `[B]`.
        pool: of `pool_of`.
        now: (observations, states) `[B, ...]` before.

    Returns:
        (observations, states) `[B, ...]`.
    """
    policy = policy.by if isinstance(policy, NextStep) else policy
    levels = policy.level if isinstance(policy, GivenLevel) else None
    size = _chunk_size(policy, env, params, base, levels, now)
    if size is None:
        fresh = cast_like(vmapped_start(env, params, lane_keys(base, index), levels), now, "reset")
        if not isinstance(policy, SameStep):
            fresh = jax.lax.stop_gradient(fresh)
        return where(finished, fresh, now)
    fill = jax.custom_jvp(functools.partial(_filled, env, min(size, len(finished))))

    @fill.defjvp
    def _fill_jvp(primals, tangents):
        # What is filled in does not depend on what was there: its derivative is zero, and the loop has none to take.
        def masked(t):
            return t if t.dtype == jax.dtypes.float0 else jnp.where(per_lane(primals[0], t), 0, t)

        return fill(*primals), jax.tree.map(masked, tangents[-1])

    return fill(finished, base, index, params, levels, pool, now)


def _filled(env, size, finished, base, index, params, levels, pool, now):
    """Resets the finished lanes, `size` a trip; no trip where none finished."""
    num_finished, lane_of_rank = _ranked(finished)

    def body(trip_and_now):
        trip, now = trip_and_now
        lanes = lane_of_rank(trip * size + jnp.arange(size))
        keys = lane_keys(base, jnp.take(index, lanes, mode="clip"))
        if pool is None:
            mine = jax.tree.map(lambda x: jnp.take(x, lanes, axis=0, mode="clip"), levels)
            fresh = vmapped_start(env, params, keys, mine)
        else:
            chosen = jax.vmap(lambda key: jax.random.randint(key, (), 0, jax.tree.leaves(pool)[0].shape[0]))(keys)
            fresh = jax.tree.map(lambda x: x[chosen], pool)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), now)
        fresh = cast_like(fresh, like, "reset")
        # The last trip is filled up with lanes beyond the last, which are dropped.
        return trip + 1, jax.tree.map(lambda x, f: x.at[lanes].set(f, mode="drop"), now, fresh)

    trips = (num_finished + size - 1) // size
    return jax.lax.while_loop(lambda c: c[0] < trips, body, (jnp.int32(0), now))[1]


def _ranked(flags: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The number of set flags, and the function from ranks to their places in `flags [B]`: B or more beyond the last.

    Flags are packed into words of 32 bits: `jnp.nonzero`, which sums and scatters over all flags, took ten times as
    long on CPU, more than a step of a small environment.
    """
    bits = jnp.pad(flags, (0, -len(flags) % 32)).reshape(-1, 32).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32)[None], 1, dtype=jnp.uint32)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    up_to = jnp.cumsum(counts)

    def place(ranks):
        at = jnp.searchsorted(up_to, ranks, side="right", method="scan_unrolled")
        word, rank = jnp.take(words, at, mode="clip"), ranks - jnp.take(up_to - counts, at, mode="clip")
        bit = jnp.zeros_like(rank)
        for half in (16, 8, 4, 2, 1):
            below = jax.lax.population_count(word & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
            is_above = rank >= below
            rank, bit = jnp.where(is_above, rank - below, rank), jnp.where(is_above, bit + half, bit)
            word = jnp.where(is_above, word >> half, word)
        return jnp.where(ranks < up_to[-1], at * 32 + bit, len(flags))

    return up_to[-1], place


def _chunk_size(policy, env, params, base, levels, now) -> int | None:
    """The lanes of a trip; None to reset all lanes without a loop.

    By default a trip costs about a sixteenth of a step of all lanes. On an accelerator every trip waits for the host,
    and a small one leaves the device idle: there resets that are cheap or few (1e8 operations take about 0.1 ms on an
    H100, as two trips do) need no loop, and no trip is small.
    """
    num_lanes = len(jax.tree.leaves(now)[0])
    if isinstance(policy, SameStep):
        return None
    if isinstance(policy, Chunked) and policy.size is not None:
        return policy.size
    if isinstance(policy, Pool):
        return max(64, num_lanes // 16)
    of_reset, of_step = _operations(env, params, base, levels, now[1])
    size = math.ceil(num_lanes / 16 * min(1.0, of_step / of_reset))
    if platform() == "cpu":
        return size
    return None if of_reset < 2 * of_step or of_reset * num_lanes < 1e8 else max(256, size)


def _operations(env, params, base, levels, states) -> tuple[float, float]:
    """What a reset and a step of one lane cost."""

    def start(key, level):
        return vmapped_start(env, params, key[None], jax.tree.map(lambda x: x[None], level))

    def walk(key, state):
        return step(key, env, state, env.action_space(params).sample(key), params)

    key, level, state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (base[None], levels, states))
    return operations(start, key, level), operations(walk, key, state)
