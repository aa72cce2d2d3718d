"""Lanes: copies of an environment that walk side by side."""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.env import reset, step
from jaxpar.mesh import mesh_axes
from jaxpar.rollout.draws import check_draw, first_key, lane_keys
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Lanes", "begin", "per_lane", "where"]


@flax.struct.dataclass
class Lanes:
    """Where B copies of an environment stand. On a mesh everything with an axis B is split by the rule of "envs".

    Attributes:
        state: environment states `[B, ...]`.
        obs: what the policy sees next `[B, ...]`.
        start: bool `[B]`, the next step is the first of its episode.
        ended: bool `[B]`, the episode is over and was not begun anew (`NoReset`, `NextStep`).
        carry: what the policy remembers `[B, ...]`.
        episode_return: float32 `[B]`, or `[B, N]` agents: rewards of the episode so far.
        episode_length: int32 `[B]`: its steps so far.
        index: int32 `[B]`, the lane's number among all lanes on all devices.
        first_carry: what the policy remembers when an episode starts, of one lane.
        step: int32 `[]`, steps made; folded into the root key, so that no two `unroll`s of one key repeat a draw.
    """

    state: PyTree
    obs: PyTree
    start: Array
    ended: Array
    carry: PyTree
    episode_return: Array
    episode_length: Array
    index: Array
    first_carry: PyTree
    step: Array


def begin(
    key: PRNGKey, env: Any, params: PyTree, num_lanes: int, carry: PyTree = (), *, level: PyTree = None, draw="lane"
) -> Lanes:
    """Begins an episode in every lane.

    Args:
        key: root key, the same that `unroll` may get; lane i begins from a key that only it and i determine.
        env: an `Environment` or an adapter; static.
        params: its parameters.
        num_lanes: B.
        carry: what the policy remembers at the start of an episode, of one lane.
        level: begins from this level by `env.init_level`: one for all lanes, or one a lane (leading axis B).
        draw: as in `unroll`; it matters only to environments that keep a key in their state.

    Raises:
        UsageError: if B is not positive or the devices do not divide it, for another environment's parameters, or a
            level where the environment takes none.
    """
    check_params(env, params)
    check_lanes(num_lanes)
    check_draw(draw)
    carry = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), carry)
    levels = None if level is None else per_lane_levels(env, params, level, num_lanes)
    return _begun(env, num_lanes, draw, key, params, carry, levels)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begun(env, num_lanes, draw, key, params, carry, levels):
    def started(base, params, index, levels):
        obs, state = vmapped_start(env, params, lane_keys(base, index), levels)
        return _settled(env, params, base, obs, state)

    over = mesh_axes("envs")
    if over:
        started = jax.shard_map(started, in_specs=(P(), P(), P(over), P(over)), out_specs=P(over), check_vma=False)
    index = jnp.arange(num_lanes, dtype=jnp.int32)
    obs, state = started(first_key(key, draw), params, index, levels)
    agents = (env.num_agents,) if hasattr(env, "num_agents") else ()
    return Lanes(
        state=state,
        obs=obs,
        start=jnp.ones(num_lanes, bool),
        ended=jnp.zeros(num_lanes, bool),
        carry=jax.tree.map(lambda x: jnp.broadcast_to(x, (num_lanes, *x.shape)), carry),
        episode_return=jnp.zeros((num_lanes, *agents), jnp.float32),
        episode_length=jnp.zeros(num_lanes, jnp.int32),
        index=index,
        first_carry=carry,
        step=jnp.int32(0),
    )


def vmapped_start(env: Any, params: PyTree, keys: Array, levels: PyTree) -> tuple[PyTree, PyTree]:
    """Observations and states of lanes that start, `[len(keys), ...]`, each from its own level if there are any."""
    if levels is None:
        return jax.vmap(lambda key: reset(key, env, params))(keys)

    def start(key, level):
        init_key, observe_key = jax.random.split(key)
        state = env.init_level(init_key, level, params)
        return env.observe(observe_key, state, None, params), state

    return jax.vmap(start)(keys, levels)


def per_lane_levels(env: Any, params: PyTree, level: PyTree, num_lanes: int) -> PyTree:
    """Levels `[B, ...]` from one level, or from one a lane, told apart by what `env.sample_level` gives."""
    if not hasattr(env, "init_level"):
        raise UsageError(f"{name_of(env)} takes no level: it has no init_level; legal are the other reset policies.")
    one = jax.eval_shape(lambda: env.sample_level(jax.random.key(0), params))

    def spread(path, leaf, shape):
        if jnp.shape(leaf) == shape.shape:
            return jnp.broadcast_to(leaf, (num_lanes, *shape.shape))
        if jnp.shape(leaf) == (num_lanes, *shape.shape):
            return jnp.asarray(leaf)
        where_ = jax.tree_util.keystr(path, simple=True, separator=".") or "itself"
        raise UsageError(
            f"level: {where_} of shape {jnp.shape(leaf)} is not a level of {name_of(env)}; legal are {shape.shape} "
            f"for all lanes and {(num_lanes, *shape.shape)} for one a lane."
        )

    return jax.tree_util.tree_map_with_path(spread, level, one)


def check_lanes(num_lanes: int) -> None:
    """Refuses a number of lanes that is not positive, or that the devices of the ambient mesh do not divide."""
    if not isinstance(num_lanes, int) or num_lanes < 1:
        raise UsageError(f"num_lanes={num_lanes} is not a number of lanes; give 1 or more.")
    shape, over = jax.sharding.get_abstract_mesh().shape, mesh_axes("envs")
    parts = 1
    for axis in over:
        parts *= shape[axis]
    if num_lanes % parts:
        below = num_lanes // parts * parts
        legal = f"{below} or {below + parts}" if below else f"{parts}"
        raise UsageError(
            f"num_lanes={num_lanes} does not divide over {'*'.join(over)}={parts} devices; "
            f"the nearest legal are {legal}."
        )


def check_params(env: Any, params: PyTree) -> None:
    """Refuses the parameters of another environment."""
    expected = type(getattr(env, "default_params", params))
    if type(params) is not expected:
        raise UsageError(
            f"{name_of(env)} takes parameters of type {expected.__qualname__} ({expected.__module__}), "
            f"not {type(params).__qualname__} ({type(params).__module__}); env.default_params are some."
        )


def name_of(env: Any) -> str:
    """The environment's name."""
    return getattr(env, "name", type(env).__name__)


def per_lane(flag: Array, leaf: Array) -> Array:
    """A flag `[B]` in a shape that broadcasts to `leaf [B, ...]`."""
    return flag.reshape(flag.shape + (1,) * (leaf.ndim - flag.ndim))


def where(flag: Array, new: PyTree, old: PyTree) -> PyTree:
    """Leaf by leaf `new` in the lanes where the flag `[B]` is set, else `old`; a leaf of `new` may lack the lanes."""
    return jax.tree.map(lambda n, o: jnp.where(per_lane(flag, o), n, o), new, old)


def cast_like(tree: PyTree, like: PyTree, what: str) -> PyTree:
    """Gives the leaves the dtypes of `like`, without weak types, so that a scan can carry them."""

    def cast(path, leaf, old):
        leaf = jnp.asarray(leaf)
        is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in (leaf, old)]
        if leaf.shape != old.shape or (any(is_key) and leaf.dtype != old.dtype):
            raise UsageError(
                f"{what}: {jax.tree_util.keystr(path, simple=True, separator='.') or 'itself'} is "
                f"{leaf.dtype}{list(leaf.shape)} where {old.dtype}{list(old.shape)} went before; an environment must "
                "keep its shapes (and a key kept in a state its kind: begin and unroll take the same draw)."
            )
        return leaf if any(is_key) else jax.lax.convert_element_type(leaf, old.dtype)

    if jax.tree.structure(tree) != jax.tree.structure(like):
        raise UsageError(f"{what}: {jax.tree.structure(tree)} where {jax.tree.structure(like)} went before.")
    return jax.tree_util.tree_map_with_path(cast, tree, like)


def _settled(env, params, key, obs, state):
    """Gives what starts the types of what steps: some environments count from a Python 0, some from an int32."""

    def stepped(key, state):
        return step(key, env, state, env.action_space(params).sample(key), params)

    following = jax.eval_shape(jax.vmap(stepped, (None, 0)), key, state)
    return cast_like(obs, following.obs, "observation"), cast_like(state, following.state, "state")
