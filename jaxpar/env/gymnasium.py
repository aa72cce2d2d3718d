"""Our environments in Gymnasium, one or many, for learners outside JAX.

Both adapters draw from the same keys: `jax.random.key(seed)`, folded with the number of the episode and of the step. So
the vector adapter's lane i, seeded with s, lives through what the single one seeded with s + i does, as it does in
Gymnasium's own `SyncVectorEnv`.
"""

import functools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces as theirs
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from jaxpar.env.kernel import Transition, reset, step
from jaxpar.env.spaces import Box, Discrete, Fields, MultiDiscrete, Space
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Single", "Vector", "gymnasium_space", "to_gymnasium", "to_gymnasium_vector"]


def to_gymnasium(env: Any, params: PyTree = None, *, render_mode: str | None = None) -> "Single":
    """`env` as a `gymnasium.Env` that passes Gymnasium's `check_env`.

    Args:
        env: an environment for one agent, ours or adapted.
        params: its parameters; the default ones if None.
        render_mode: "rgb_array" for pictures, where the environment draws any.
    """
    return Single(env, params, render_mode)


def to_gymnasium_vector(
    env: Any,
    params: PyTree = None,
    num_envs: int = 1,
    *,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    render_mode: str | None = None,
) -> "Vector":
    """`num_envs` copies of `env` as a `gymnasium.vector.VectorEnv`, one compiled call a step.

    Equals Gymnasium's `SyncVectorEnv` over `to_gymnasium(env, params)`, in values and in metadata.

    Args:
        env: an environment for one agent, ours or adapted.
        params: its parameters; the default ones if None.
        num_envs: how many copies.
        autoreset_mode: when a lane that ended begins anew: with its next step, in the same one, or not by itself.
        render_mode: "rgb_array" for pictures, where the environment draws any.
    """
    return Vector(env, params, num_envs, AutoresetMode(autoreset_mode), render_mode)


class Single(gymnasium.Env):
    """One environment; made by `to_gymnasium`."""

    def __init__(self, env: Any, params: PyTree = None, render_mode: str | None = None):
        self.env, self.params = env, _params_of(env, params)
        self.metadata, self.render_mode = _metadata(env, render_mode), render_mode
        self.observation_space = gymnasium_space(env.observation_space(self.params))
        self.action_space = gymnasium_space(env.action_space(self.params))
        self.root: Any = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Begins an episode: of `seed` its first, without one the next."""
        super().reset(seed=seed)
        if options:
            raise UsageError(f"{self.env.name} has no options for its reset, but got {sorted(options)}")
        if seed is not None or self.root is None:
            self.root = jax.random.key(int(self.np_random.integers(2**31)) if seed is None else seed)
            self.episode = -1
        self.episode, self.time = self.episode + 1, 0
        obs, self.state = _reset(self.env, self.root, self.episode, self.params)
        return _to_numpy(self.observation_space, obs), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """One step, without a reset."""
        if self.root is None:
            raise UsageError(f"{self.env.name} must be reset before its first step")
        self.time += 1
        action = _action(self.env, self.params, self.action_space, action)
        made = _step(self.env, self.root, self.episode, self.time, self.state, action, self.params)
        self.state = made.state
        obs, info = _to_numpy(self.observation_space, made.obs), jax.tree.map(np.array, made.info)
        return obs, float(made.reward), bool(made.terminated), bool(made.truncated), info

    def render(self) -> np.ndarray | None:
        """The picture uint8 `[H, W, 3]` of the state, in render mode "rgb_array"."""
        return None if self.render_mode is None else np.array(self.env.render(self.state, self.params))


class Vector(VectorEnv):
    """Many copies of one environment; made by `to_gymnasium_vector`."""

    def __init__(self, env: Any, params: PyTree, num_envs: int, mode: AutoresetMode, render_mode: str | None = None):
        if num_envs < 1:
            raise UsageError(f"a vector environment has at least one lane, not {num_envs}")
        self.env, self.params, self.num_envs = env, _params_of(env, params), num_envs
        self.mode, self.render_mode = mode, render_mode
        self.metadata = {**_metadata(env, render_mode), "autoreset_mode": mode}
        self.single_observation_space = gymnasium_space(env.observation_space(self.params))
        self.single_action_space = gymnasium_space(env.action_space(self.params))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.roots: Any = None

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple[Any, dict]:
        """Begins episodes: in all lanes, or in those of `options["reset_mask"]` (bool `[num_envs]`).

        `seed` is one integer, from which the lanes count on, or one for each lane, or None for their next episodes.
        """
        options = dict(options or {})
        chosen = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, bool)))
        if options or chosen.shape != (self.num_envs,) or chosen.dtype != bool:
            raise UsageError(f"a reset takes one option, reset_mask, a bool array [{self.num_envs}]")
        if seed is None and self.roots is None:
            seed = [int(number) for number in self.np_random.integers(2**31, size=self.num_envs)]
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + lane for lane in range(self.num_envs)]
        if seed is not None and len(seed) != self.num_envs:
            raise UsageError(f"{self.num_envs} lanes need as many seeds, not {len(seed)}")
        if self.roots is None:
            self.roots = jnp.broadcast_to(jax.random.key(0), (self.num_envs,))
            self.episodes, self.times = (np.zeros(self.num_envs, np.int32) for _ in range(2))
            self.over, self.state, self.obs = np.ones(self.num_envs, bool), None, None
        if seed is not None:
            given = np.asarray([number is not None for number in seed]) & chosen
            fresh = jnp.stack([jax.random.key(number or 0) for number in seed])
            self.roots = jnp.where(given, fresh, self.roots)
            self.episodes[given] = -1
        self.episodes[chosen] += 1
        self.times[chosen], self.over[chosen] = 0, False
        obs, state = _reset_lanes(self.env, self.roots, self.episodes, self.params)
        if self.state is not None:
            obs, state = _where(chosen, (obs, state), (self.obs, self.state))
        self.obs, self.state = obs, state
        return _to_numpy(self.observation_space, obs), {}

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict]:
        """One step of every lane, with the resets of the autoreset mode."""
        if self.roots is None:
            raise UsageError(f"{self.env.name} must be reset before its first step")
        if self.mode == AutoresetMode.DISABLED and self.over.any():
            raise UsageError(f"lane {np.argmax(self.over)} has ended and resets are disabled: reset it with reset_mask")
        actions = _action(self.env, self.params, self.action_space, actions, lanes=self.num_envs)
        lanes = self.roots, self.episodes, self.times + 1, self.state, actions
        made, self.obs, self.state, fresh = _step_lanes(self.env, self.mode, *lanes, self.over, self.params)
        fresh = np.array(fresh)
        self.times = np.where(fresh, 0, self.times + 1).astype(np.int32)
        self.episodes = self.episodes + fresh.astype(np.int32)
        reward, terminated, truncated = (np.array(x) for x in (made.reward, made.terminated, made.truncated))
        infos: dict[str, Any] = {}
        if self.mode == AutoresetMode.NEXT_STEP:
            reward, terminated, truncated = (
                np.where(fresh, 0, x).astype(x.dtype) for x in (reward, terminated, truncated)
            )
        elif self.mode == AutoresetMode.SAME_STEP and fresh.any():
            last, info = _to_numpy(self.observation_space, made.obs), jax.tree.map(np.array, made.info)
            final = np.full(self.num_envs, None, object)
            for lane in np.flatnonzero(fresh):
                final[lane] = jax.tree.map(lambda x, lane=lane: x[lane], last)
            infos = {"final_obs": final, "final_info": _of_lanes(info, fresh)}
            infos |= {"_final_obs": fresh, "_final_info": fresh.copy()}
        infos |= _of_lanes(jax.tree.map(np.array, made.info), ~fresh)
        self.over = terminated | truncated
        return _to_numpy(self.observation_space, self.obs), reward.astype(float), terminated, truncated, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        """A picture for each lane, in render mode "rgb_array"."""
        if self.render_mode is None:
            return None
        return tuple(np.array(jax.vmap(self.env.render, (0, None))(self.state, self.params)))


def gymnasium_space(space: Space) -> theirs.Space:
    """Gymnasium's space with the same elements."""
    match space:
        case Discrete() if not space.shape:
            return theirs.Discrete(space.n)
        case Discrete():
            return theirs.MultiDiscrete(np.full(space.shape, space.n))
        case MultiDiscrete():
            return theirs.MultiDiscrete(np.asarray(space.ns))
        case Box() if np.dtype(space.dtype).kind == "b":
            return theirs.MultiBinary(space.shape)
        case Box():
            low, high = space.bounds()
            return theirs.Box(low, high, space.shape, np.dtype(space.dtype).type)
        case Fields():
            return theirs.Dict({name: gymnasium_space(inner) for name, inner in space.items})


def _step_key(root: PRNGKey, episode: Any, time: Any) -> PRNGKey:
    return jax.random.fold_in(jax.random.fold_in(root, episode), time)


@functools.partial(jax.jit, static_argnums=0)
def _reset(env: Any, root: PRNGKey, episode: Any, params: PyTree) -> tuple[PyTree, PyTree]:
    return reset(_step_key(root, episode, 0), env, params)


@functools.partial(jax.jit, static_argnums=0)
def _step(
    env: Any, root: PRNGKey, episode: Any, time: Any, state: PyTree, action: PyTree, params: PyTree
) -> Transition:
    return step(_step_key(root, episode, time), env, state, action, params)


@functools.partial(jax.jit, static_argnums=0)
def _reset_lanes(env: Any, roots: PRNGKey, episodes: Array, params: PyTree) -> tuple[PyTree, PyTree]:
    return jax.vmap(lambda root, episode: _reset(env, root, episode, params))(roots, episodes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step_lanes(
    env: Any,
    mode: AutoresetMode,
    roots: PRNGKey,
    episodes: Array,
    times: Array,
    state: PyTree,
    actions: PyTree,
    over: Array,
    params: PyTree,
) -> tuple[Transition, PyTree, PyTree, Array]:
    """The bare step of all lanes, then observations and states after resets, and which lanes were reset."""
    made = jax.vmap(lambda *lane: _step(env, *lane, params))(roots, episodes, times, state, actions)
    if mode == AutoresetMode.DISABLED:
        return made, made.obs, made.state, jnp.zeros_like(over)
    fresh = over if mode == AutoresetMode.NEXT_STEP else made.terminated | made.truncated
    obs, state = jax.lax.cond(
        jnp.any(fresh),
        lambda: _where(fresh, _reset_lanes(env, roots, episodes + 1, params), (made.obs, made.state)),
        lambda: (made.obs, made.state),
    )
    return made, obs, state, fresh


def _where(chosen: Any, new: PyTree, old: PyTree) -> PyTree:
    """The lanes of `new` where `chosen` `[B]`, of `old` elsewhere."""

    def select(x, y):
        return jnp.where(jnp.reshape(chosen, (-1,) + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(select, new, old)


def _of_lanes(info: dict[str, Any], chosen: np.ndarray) -> dict[str, Any]:
    """Gymnasium's form of the infos of some lanes: zeros elsewhere, and a mask under the name with an underscore."""
    result: dict[str, Any] = {}
    for name, value in info.items() if chosen.any() else ():
        if isinstance(value, dict):
            result[name] = _of_lanes(value, chosen)
        else:
            result[name] = np.where(chosen.reshape(-1, *(1,) * (value.ndim - 1)), value, np.zeros_like(value))
        result[f"_{name}"] = chosen.copy()
    return result


def _to_numpy(space: theirs.Space, value: PyTree) -> Any:
    """Arrays of the dtypes of a Gymnasium space, which their owner may overwrite."""
    if isinstance(space, theirs.Dict):
        return {name: _to_numpy(inner, value[name]) for name, inner in space.items()}
    array = np.array(value, space.dtype)
    return array[()] if isinstance(space, theirs.Discrete) else array


def _action(env: Any, params: PyTree, space: theirs.Space, action: Any, lanes: int | None = None) -> PyTree:
    """An action of Gymnasium's as ours; a discrete one must be in the space, a continuous one must have its shape."""
    ours = env.action_space(params)
    if isinstance(ours, Box):
        is_legal = np.shape(action) == space.shape
    else:
        is_legal = space.contains(np.asarray(action, space.dtype) if space.dtype is not None else action)
    if not is_legal:
        raise UsageError(f"{env.name} takes actions of {space}, not {action!r}")
    if isinstance(ours, Fields):
        return {name: jnp.asarray(action[name], inner.dtype) for name, inner in ours.items}
    return jnp.asarray(action, ours.dtype)


def _metadata(env: Any, render_mode: str | None) -> dict[str, Any]:
    modes = ["rgb_array"] if hasattr(env, "render") else []
    if render_mode is not None and render_mode not in modes:
        raise UsageError(f"{env.name} has no render mode {render_mode!r}; it has {', '.join(modes) or 'none'}")
    return {"render_modes": modes, "render_fps": 15}


def _params_of(env: Any, params: PyTree) -> PyTree:
    if hasattr(env, "num_agents"):
        raise UsageError(f"Gymnasium knows no agents, and {env.name} has {env.num_agents}; see `agents_view`")
    return env.default_params if params is None else params
