"""Proof that an environment keeps its promises: what learners, planners and rollouts take for granted.

`check_environment` runs every check; each is a function of its own, and each raises `UsageError` with the first promise
that is broken.
"""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jaxpar.env.capabilities import capabilities, is_adapter
from jaxpar.env.kernel import reset, step
from jaxpar.env.protocols import Adapter, Environment
from jaxpar.env.spaces import Box, Discrete, MultiDiscrete, Space, legal_sample, mask_shape
from jaxpar.types import Array, PRNGKey, PyTree, UsageError, concrete_values

__all__ = ["Report", "Walk", "check_action", "check_environment", "check_params", "walk"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was seen of an environment that passed.

    Attributes:
        name: of the environment.
        steps: how many random legal steps were made, over all environments.
        episodes: how many of them ended an episode.
        checks: the names of the checks that applied and passed.
    """

    name: str
    steps: int
    episodes: int
    checks: tuple[str, ...]


class Walk(NamedTuple):
    """Random legal steps, every leaf `[T, B, ...]`, with a new episode after each end.

    `inside` says whether the observation was in its space, `legal` whether each agent had a legal action.
    """

    state: PyTree
    action: PyTree
    next_state: PyTree
    obs: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    inside: Array
    legal: Array


def check_environment(
    env: Environment | Adapter,
    params: PyTree = None,
    *,
    key: PRNGKey | None = None,
    num_envs: int = 8,
    num_steps: int = 64,
    num_samples: int = 4096,
) -> Report:
    """Checks an environment, or an adapter, on `num_envs * num_steps` random legal steps.

    Types, spaces, finiteness, masks, value semantics, optional parts, absorption where it is claimed, and the
    likelihood of discrete observations. Costs one compilation of a scan and a few small ones.

    Args:
        env: the environment.
        params: its parameters; the default ones if None.
        key: consumed; `jax.random.key(0)` if None.
        num_envs: independent copies.
        num_steps: steps of each.
        num_samples: observations drawn for the likelihood, from each of 8 transitions.

    Raises:
        UsageError: what is wrong, with environment and step where that applies.
    """
    params = env.default_params if params is None else params
    walk_key, likelihood_key, absorbing_key = jax.random.split(
        jax.random.key(0) if key is None else key, 3
    )
    check_identity(env)
    check_params(env, params)
    check_types(env, params)
    check_parts(env, params)
    steps = _once(lambda key: walk(key, env, params, num_envs, num_steps))(walk_key)
    check_walk(env, steps)
    checks = ["identity", "params", "types", "parts", "walk"]
    if check_likelihood(likelihood_key, env, params, steps, num_samples=num_samples):
        checks.append("likelihood")
    if check_absorbing(absorbing_key, env, params, steps):
        checks.append("absorbing")
    return Report(env.name, num_envs * num_steps, int(np.sum(_over(steps))), tuple(checks))


def check_identity(env: Environment | Adapter) -> None:
    """A copy is equal and hashes alike, so a new instance with the same fields compiles nothing again."""
    twin = copy.deepcopy(env)
    try:
        alike = twin == env and hash(twin) == hash(env)
    except TypeError as error:
        raise UsageError(
            f"{env.name} cannot be hashed by value ({error}); make its fields numbers and tuples"
        ) from None
    if not alike:
        raise UsageError(
            f"a copy of {env.name} is not equal to it, so every new instance would compile again"
        )


def check_params(env: Environment | Adapter, params: PyTree) -> None:
    """Parameters are of the kind and structure that the environment's own are."""
    own = env.default_params
    if jax.tree.structure(params) != jax.tree.structure(own):
        raise UsageError(
            f"{env.name} takes parameters like its default ones, {_kind(own)}, not those of another, {_kind(params)}"
        )


def check_action(env: Environment | Adapter, params: PyTree, action: PyTree) -> None:
    """An action has the shape and the kind of dtype of the action space, and lies in it if its value is known."""
    space = env.action_space(params)
    if isinstance(space, Box | Discrete | MultiDiscrete):
        kind = jnp.floating if isinstance(space, Box) else jnp.integer
        dtype = jnp.result_type(action)
        if jnp.shape(action) != space.shape or not jnp.issubdtype(dtype, kind):
            raise UsageError(
                f"{env.name} takes actions of {space}, not {dtype} {list(jnp.shape(action))}; "
                f"a policy is written for one environment"
            )
    if concrete_values(action) is None:
        return
    # `contains` computes by JAX, which a trace around this would record.
    with jax.ensure_compile_time_eval():
        if isinstance(space, Box):
            action = jnp.asarray(action, space.dtype)
        is_legal = bool(space.contains(action))
    if not is_legal:
        raise UsageError(f"the action {action} is not in the action space of {env.name}, {space}")


def check_types(env: Environment | Adapter, params: PyTree) -> None:
    """Structure, shapes, dtypes and weak types: the same after a reset and a step, traced and eager."""
    keys = jax.random.split(jax.random.key(1), 3)
    if not is_adapter(env):
        _check_states(env, params, keys)
    agents = capabilities(env).agents

    def both(keys, params):
        first = reset(keys[0], env, params)
        action = legal_sample(keys[1], env.action_space(params), _mask(env, first[1], params))
        return first, step(keys[2], env, first[1], action, params)

    traced = jax.eval_shape(both, keys, params)
    eager = jax.tree.map(jax.typeof, both(keys, params))
    for how, ((obs, state), made) in {"traced": traced, "eager": eager}.items():
        _same(f"{env.name}, {how}: state", state, made.state)
        _same(f"{env.name}, {how}: observation", obs, made.obs)
        ends = {"reward": (made.reward, jnp.float32), "terminated": (made.terminated, bool)}
        ends["truncated"] = made.truncated, bool
        for field, (value, dtype) in ends.items():
            if value.shape != agents or value.dtype != dtype:
                raise UsageError(
                    f"{env.name}, {how}: {field} is {_type(value)} but must be {jnp.dtype(dtype)} {list(agents)}"
                )
    _same(f"{env.name}, eager against traced: state", traced[0][1], eager[0][1])


def _check_states(env: Environment, params: PyTree, keys: PRNGKey) -> None:
    """The parts that make states, alone: whatever reads a state of another type fails in words of its own."""
    state = jax.eval_shape(env.init, keys[0], params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UsageError(
                f"{env.name} stores a key in state{_at(path)}: a planner could read the future in it"
            )
    action = jax.eval_shape(env.action_space(params).sample, keys[1])
    _same(
        f"{env.name}: state", state, jax.eval_shape(env.transition, keys[2], state, action, params)
    )


def check_parts(env: Environment | Adapter, params: PyTree) -> None:
    """The optional parts that it has return the shapes and dtypes of the protocol."""
    obs, state = jax.eval_shape(lambda key: reset(key, env, params), jax.random.key(0))
    can = capabilities(env)
    if can.render is not None:
        image = jax.eval_shape(can.render, state, params)
        if image.dtype != jnp.uint8 or len(image.shape) != 3 or image.shape[-1] != 3:
            raise UsageError(
                f"{env.name}: render gives {_type(image)} but must give uint8 [H, W, 3]"
            )
    if can.action_mask is not None:
        space, mask = env.action_space(params), jax.eval_shape(can.action_mask, state, params)
        if (expected := mask_shape(space)) is None:
            raise UsageError(
                f"{env.name} has an action mask, but its actions are not discrete: {space}"
            )
        if mask.dtype != bool or mask.shape != expected:
            raise UsageError(
                f"{env.name}: the action mask is {_type(mask)} but must be bool {list(expected)}"
            )
    numbers = {
        "heuristic": (can.heuristic, state, jnp.float32),
        "obs_key": (can.obs_key, obs, jnp.int32),
    }
    for part, (function, argument, dtype) in numbers.items():
        if function is not None:
            value = jax.eval_shape(function, argument, params)
            if value.shape != () or value.dtype != dtype:
                raise UsageError(
                    f"{env.name}: {part} is {_type(value)} but must be {jnp.dtype(dtype)} []"
                )


def walk(
    key: PRNGKey, env: Environment | Adapter, params: PyTree, num_envs: int, num_steps: int
) -> Walk:
    """Random legal steps of several environments, each with its own keys; consumes `key`."""
    observations, actions = env.observation_space(params), env.action_space(params)

    def begun(key):
        return reset(key, env, params)[1]

    def anew(over, key, before):
        return jax.tree.map(lambda new, old: jnp.where(over, new, old), begun(key), before)

    def act(state, action_key, step_key):
        mask = _mask(env, state, params)
        action = legal_sample(action_key, actions, mask)
        made = step(step_key, env, state, action, params)
        legal = jnp.ones((), bool) if mask is None else jnp.all(jnp.any(mask, axis=-1))
        return Walk(
            state,
            action,
            made.state,
            made.obs,
            made.reward,
            made.terminated,
            made.truncated,
            inside=observations.contains(made.obs),
            legal=legal,
        )

    def one(carry, keys):
        before, over = carry
        state = jax.lax.cond(
            over.any(), lambda: jax.vmap(anew)(over, keys[0], before), lambda: before
        )
        made = jax.vmap(act)(state, keys[1], keys[2])
        ended = (made.terminated | made.truncated).reshape(num_envs, -1).all(-1)
        return (made.next_state, ended), made

    # The first episode begins as all others do, after an end: the program has one reset, which is most of it.
    keys = jax.random.split(key, (num_steps, 3, num_envs))
    kinds = jax.eval_shape(lambda keys: jax.vmap(begun)(keys[0, 0]), keys)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kinds)
    return jax.lax.scan(one, (nothing, jnp.ones((num_envs,), bool)), keys)[1]


def check_walk(env: Environment | Adapter, steps: Walk) -> None:
    """Every reward and observation of a walk is finite and in its space, and some action is always legal."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(steps.obs):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            _refuse(env, np.isnan(leaf), f"observation{_at(path)} is NaN")
    _refuse(env, ~np.isfinite(steps.reward), "the reward is not finite")
    _refuse(env, ~np.asarray(steps.legal), "no action is legal in the state before")
    if not np.all(steps.inside):
        time, index = np.argwhere(~np.asarray(steps.inside))[0]
        obs = jax.tree.map(lambda x: np.asarray(x[time, index]), steps.obs)
        _refuse(
            env,
            ~np.asarray(steps.inside),
            f"the observation is not in the observation space: {obs}"[:400],
        )


def check_absorbing(key: PRNGKey, env: Environment | Adapter, params: PyTree, steps: Walk) -> bool:
    """Where `env.absorbing` claims it: a step from a terminal state earns 0 and ends again. False: nothing to check."""
    ended = np.asarray(jnp.all(_per_step(steps.terminated), axis=-1))
    if not capabilities(env).absorbing or not ended.any():
        return False
    states = jax.tree.map(lambda x: x[ended], steps.next_state)
    actions = jax.tree.map(lambda x: x[ended], steps.action)
    keys = jax.random.split(key, int(ended.sum()))
    after = _once(jax.vmap(lambda key, state, action: step(key, env, state, action, params)))(
        keys, states, actions
    )
    if np.any(np.asarray(after.reward) != 0) or not np.all(after.terminated):
        raise UsageError(
            f"{env.name} claims that terminal states absorb, but a step from one earns something or goes on"
        )
    return True


def check_likelihood(
    key: PRNGKey,
    env: Environment | Adapter,
    params: PyTree,
    steps: Walk,
    *,
    num_samples: int = 4096,
    max_z: float = 5.0,
) -> bool:
    """Frequencies of drawn observations against `exp(log_likelihood)`, from 8 transitions of a walk; consumes `key`.

    For spaces of at most 4096 discrete observations; returns False, unchecked, for others. A count k of n draws with
    probability p is refused where |k - n p| > z sqrt(n p (1 - p) + z^2 / 36) + z^2 / 6 with z = `max_z`: by Bernstein's
    inequality a right likelihood is refused with a chance below 2 exp(-z^2 / 2), 7e-6 for each observation.
    """
    log_likelihood = capabilities(env).log_likelihood
    if log_likelihood is None or is_adapter(env):
        return False
    space = env.observation_space(params)
    everything = _every(space)
    if everything is None:
        return False
    places = np.linspace(0, steps.reward.shape[0] - 1, 8).astype(int)
    state, action, following = (
        jax.tree.map(lambda x: x[places, 0], tree)
        for tree in (steps.state, steps.action, steps.next_state)
    )

    @_once
    @jax.vmap
    def one(key, state, action, following):
        draws = jax.vmap(lambda key: env.observe(key, following, action, params))(
            jax.random.split(key, num_samples)
        )
        likelihood = jax.vmap(lambda obs: log_likelihood(obs, state, action, following, params))(
            everything
        )
        same = (
            (draws[:, None] == everything[None]).reshape(num_samples, len(everything), -1).all(-1)
        )
        return same.sum(0), likelihood

    counts, logs = (
        np.asarray(x, float)
        for x in one(jax.random.split(key, len(places)), state, action, following)
    )
    p, n = np.exp(logs), num_samples
    if np.isnan(p).any() or np.abs(p.sum(-1) - 1).max() > 1e-3:
        raise UsageError(
            f"{env.name}: the likelihoods of all observations sum to {p.sum(-1)}, not to 1"
        )
    bound = max_z * np.sqrt(np.maximum(n * p * (1 - p), 0) + max_z**2 / 36) + max_z**2 / 6
    bound[p == 0] = 0
    if (wrong := np.abs(counts - n * p) > bound).any():
        row, which = np.argwhere(wrong)[0]
        raise UsageError(
            f"{env.name}: observation {np.asarray(everything[which])} came {counts[row, which]:.0f} times "
            f"in {n} draws, but its likelihood is {p[row, which]:.4g}"
        )
    return True


def _once(f: Callable) -> Callable:
    """`f` compiled with little optimisation where that is most of the cost: a check runs its programs once."""
    lazily = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(f, compiler_options=lazily if jax.default_backend() == "cpu" else None)


def _mask(env: Environment | Adapter, state: PyTree, params: PyTree) -> Array | None:
    mask = capabilities(env).action_mask
    return None if mask is None else mask(state, params)


def _every(space: Space) -> Array | None:
    """All observations of a small discrete space, `[count, *space.shape]`."""
    if not isinstance(space, Discrete | MultiDiscrete):
        return None
    sizes = space.ns if isinstance(space, MultiDiscrete) else (space.n,) * math.prod(space.shape)
    if math.prod(sizes) > 4096:
        return None
    rows = np.asarray(list(itertools.product(*map(range, sizes))))
    return jnp.asarray(rows.reshape(-1, *space.shape), space.dtype)


def _per_step(flags: Array) -> Array:
    """`[T, B]` or `[T, B, N]` flags as `[T, B, 1 or N]`."""
    return flags.reshape(*flags.shape[:2], -1)


def _over(steps: Walk) -> np.ndarray:
    return np.asarray(jnp.all(_per_step(steps.terminated | steps.truncated), axis=-1))


def _refuse(env: Environment | Adapter, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        time, index = np.argwhere(wrong)[0][:2]
        raise UsageError(f"{env.name}, step {time} of environment {index}: {what}")


def _same(what: str, before: PyTree, after: PyTree) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise UsageError(
            f"{what} changes its structure, from {jax.tree.structure(before)} to {jax.tree.structure(after)}"
        )
    for (path, first), second in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        if _type(first) != _type(second):
            raise UsageError(
                f"{what}{_at(path)} changes its type, from {_type(first)} to {_type(second)}"
            )
        if first.weak_type:
            raise UsageError(
                f"{what}{_at(path)} has a weak type; give the Python number in it a dtype"
            )


def _type(leaf: jax.ShapeDtypeStruct | ShapedArray) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" + (" (weak)" if leaf.weak_type else "")


def _at(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path)


def _kind(params: PyTree) -> str:
    return f"{type(params).__module__}.{type(params).__qualname__}"
