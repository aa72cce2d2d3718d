"""The state of many copies of an environment, and the first observations."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpar.env import Adapter, Environment, capabilities, is_adapter, reset, step
from jaxpar.mesh import mesh_axes
from jaxpar.rollout.prng import check_prng, env_keys, first_key
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["EnvState", "init", "per_env", "where"]


@flax.struct.dataclass
class EnvState:
    """The state of B copies of an environment. On a mesh every axis B is split by the rule of "envs".

    Attributes:
        state: environment states `[B, ...]`.
        obs: what the policy sees next `[B, ...]`.
        start: bool `[B]`, the next step is the first of its episode.
        ended: bool `[B]`, the episode is over and no new one has started (`NoReset`, `NextStep`).
        carry: the policy's, such as its memory `[B, ...]`.
        episode_return: float32 `[B]`, or `[B, N]` agents: rewards of the episode so far.
        episode_length: int32 `[B]`: its steps so far.
        index: int32 `[B]`, each one's number among the environments of all devices.
        first_carry: the policy's at the start of an episode; without the axis B.
        step: int32 `[]`, steps made; folded into the root key, so no two calls of `rollout` repeat a random number.
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


def init(
    key: PRNGKey,
    env: Environment | Adapter,
    params: PyTree,
    num_envs: int,
    carry: PyTree = (),
    *,
    level: PyTree = None,
    prng="env",
) -> EnvState:
    """Starts an episode in every environment.

    Args:
        key: root key, the same that `rollout` may get; environment i starts from a key made of this one and i.
        env: an `Environment` or an adapter; static.
        params: its parameters.
        num_envs: B.
        carry: the policy's at the start of an episode; without the axis B.
        level: starts from this level by `env.init_level`: one for all environments, or one for each (leading axis B).
        prng: as in `rollout`; it matters only to environments that keep a key in their state.

    Raises:
        UsageError: if B is not positive or the devices do not divide it, for another environment's parameters, or a
            level where the environment takes none.
    """
    check_params_type(env, params)
    check_num_envs(num_envs)
    check_prng(prng)
    carry = jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), carry)
    levels = None if level is None else per_env_levels(env, params, level, num_envs)
    return _init(env, num_envs, prng, key, params, carry, levels)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init(env, num_envs, prng, key, params, carry, levels):
    def start(base, params, index, levels):
        obs, state = vmapped_reset(env, params, env_keys(base, index), levels)
        return _with_step_dtypes(env, params, base, obs, state)

    over = mesh_axes("envs")
    if over:
        # Each environment's key is made from its index, so every device starts its own without communication.
        start = jax.shard_map(
            start, in_specs=(P(), P(), P(over), P(over)), out_specs=P(over), check_vma=False
        )
    index = jnp.arange(num_envs, dtype=jnp.int32)
    obs, state = start(first_key(key, prng), params, index, levels)
    return EnvState(
        state=state,
        obs=obs,
        start=jnp.ones(num_envs, bool),
        ended=jnp.zeros(num_envs, bool),
        carry=jax.tree.map(lambda x: jnp.broadcast_to(x, (num_envs, *x.shape)), carry),
        episode_return=jnp.zeros((num_envs, *capabilities(env).agents), jnp.float32),
        episode_length=jnp.zeros(num_envs, jnp.int32),
        index=index,
        first_carry=carry,
        step=jnp.int32(0),
    )


def vmapped_reset(
    env: Environment | Adapter, params: PyTree, keys: Array, levels: PyTree
) -> tuple[PyTree, PyTree]:
    """Observations and states of new episodes `[len(keys), ...]`, each from its own level if `levels` are given."""
    init_level = capabilities(env).init_level
    if (
        levels is None or init_level is None or is_adapter(env)
    ):  # `per_env_levels` refuses levels without `init_level`
        return jax.vmap(lambda key: reset(key, env, params))(keys)

    def start(key, level):
        init_key, observe_key = jax.random.split(key)
        state = init_level(init_key, level, params)
        return env.observe(observe_key, state, None, params), state

    return jax.vmap(start)(keys, levels)


def per_env_levels(
    env: Environment | Adapter, params: PyTree, level: PyTree, num_envs: int
) -> PyTree:
    """Levels `[B, ...]` from one level, or from one for each environment; which it is shows by its shapes.

    They are compared with those of `env.sample_level`.
    """
    can = capabilities(env)
    if can.init_level is None or can.sample_level is None:
        raise UsageError(
            f"{env.name} takes no level: it has no init_level; legal are the other reset policies."
        )
    one = jax.eval_shape(can.sample_level, jax.random.key(0), params)

    def spread(path, leaf, shape):
        if jnp.shape(leaf) == shape.shape:
            return jnp.broadcast_to(leaf, (num_envs, *shape.shape))
        if jnp.shape(leaf) == (num_envs, *shape.shape):
            return jnp.asarray(leaf)
        where_ = jax.tree_util.keystr(path, simple=True, separator=".") or "itself"
        raise UsageError(
            f"level: {where_} of shape {jnp.shape(leaf)} is not a level of {env.name}; legal are {shape.shape} "
            f"for all environments and {(num_envs, *shape.shape)} for one each."
        )

    return jax.tree_util.tree_map_with_path(spread, level, one)


def check_num_envs(num_envs: int) -> None:
    """Refuses a number of environments that is not positive, or that the devices of the ambient mesh do not divide."""
    if not isinstance(num_envs, int) or num_envs < 1:
        raise UsageError(f"num_envs={num_envs} is not a number of environments; give 1 or more.")
    shape, over = jax.sharding.get_abstract_mesh().shape, mesh_axes("envs")
    parts = 1
    for axis in over:
        parts *= shape[axis]
    if num_envs % parts:
        below = num_envs // parts * parts
        legal = f"{below} or {below + parts}" if below else f"{parts}"
        raise UsageError(
            f"num_envs={num_envs} does not divide over {'*'.join(over)}={parts} devices; the nearest legal are {legal}."
        )


def check_params_type(env: Environment | Adapter, params: PyTree) -> None:
    """Refuses the parameters of another environment."""
    expected = type(env.default_params)
    if type(params) is not expected:
        raise UsageError(
            f"{env.name} takes parameters of type {expected.__qualname__} ({expected.__module__}), "
            f"not {type(params).__qualname__} ({type(params).__module__}); env.default_params are some."
        )


def per_env(flag: Array, leaf: Array) -> Array:
    """A flag `[B]` in a shape that broadcasts to `leaf [B, ...]`."""
    return flag.reshape(flag.shape + (1,) * (leaf.ndim - flag.ndim))


def where(flag: Array, new: PyTree, old: PyTree) -> PyTree:
    """Leaf by leaf `new` where the flag `[B]` is set, else `old`; a leaf of `new` may lack the axis B."""
    return jax.tree.map(lambda n, o: jnp.where(per_env(flag, o), n, o), new, old)


def cast_like(tree: PyTree, like: PyTree, what: str) -> PyTree:
    """Gives the leaves the dtypes of `like`, without weak types, so that a scan can carry them."""

    def cast(path, leaf, old):
        leaf = jnp.asarray(leaf)
        is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in (leaf, old)]
        if leaf.shape != old.shape or (any(is_key) and leaf.dtype != old.dtype):
            raise UsageError(
                f"{what}: {jax.tree_util.keystr(path, simple=True, separator='.') or 'itself'} is "
                f"{leaf.dtype}{list(leaf.shape)} where {old.dtype}{list(old.shape)} went before; an environment must "
                "keep its shapes (and a key kept in a state its kind: give init and rollout the same prng)."
            )
        return leaf if any(is_key) else jax.lax.convert_element_type(leaf, old.dtype)

    if jax.tree.structure(tree) != jax.tree.structure(like):
        raise UsageError(
            f"{what}: {jax.tree.structure(tree)} where {jax.tree.structure(like)} went before."
        )
    return jax.tree_util.tree_map_with_path(cast, tree, like)


def _with_step_dtypes(env, params, key, obs, state):
    """Casts what a reset gives to the dtypes that a step gives: some environments count from a Python 0.

    A `lax.scan` over steps needs them to be the same.
    """

    def stepped(key, state):
        return step(key, env, state, env.action_space(params).sample(key), params)

    following = jax.eval_shape(jax.vmap(stepped, (None, 0)), key, state)
    return cast_like(obs, following.obs, "observation"), cast_like(state, following.state, "state")
