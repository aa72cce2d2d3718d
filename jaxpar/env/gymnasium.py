"""Our environments in Gymnasium, one or many, for learners outside JAX.

Both adapters draw from the same keys: `jax.random.key(seed)`, folded with the number of the episode and of the step. So
environment i of the vector adapter, seeded with s, has the episodes of the single one seeded with s + i, as in
Gymnasium's own `SyncVectorEnv`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces as theirs
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jax.typing import ArrayLike

from jaxpar.env.capabilities import capabilities
from jaxpar.env.kernel import reset, step
from jaxpar.env.protocols import Adapter, Environment, Transition
from jaxpar.env.spaces import Box, Discrete, Fields, MultiDiscrete, Space
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["gymnasium_space", "to_gymnasium", "to_gymnasium_vector"]


def to_gymnasium(
    env: Environment | Adapter, params: PyTree = None, *, render_mode: str | None = None
) -> "Single":
    """`env` as a `gymnasium.Env` that passes Gymnasium's `check_env`.

    Args:
        env: an environment for one agent, ours or adapted.
        params: its parameters; the default ones if None.
        render_mode: "rgb_array" for pictures, where the environment draws any.
    """
    return Single(env, params, render_mode)


def to_gymnasium_vector(
    env: Environment | Adapter,
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
        autoreset_mode: when an environment that ended is reset: in its next step, in the same one, or not by itself.
        render_mode: "rgb_array" for pictures, where the environment draws any.
    """
    return Vector(env, params, num_envs, AutoresetMode(autoreset_mode), render_mode)


class Single(gymnasium.Env):
    """One environment; made by `to_gymnasium`."""

    def __init__(
        self, env: Environment | Adapter, params: PyTree = None, render_mode: str | None = None
    ):
        self.env, self.params = env, _params_of(env, params)
        self.metadata, self.render_mode = _metadata(env, render_mode), render_mode
        self._draw = capabilities(env).render
        self.observation_space = gymnasium_space(env.observation_space(self.params))
        self.action_space = gymnasium_space(env.action_space(self.params))
        self.root: PRNGKey | None = None

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[PyTree, dict]:
        """Begins an episode: of `seed` its first, without one the next."""
        super().reset(seed=seed)
        if options:
            raise UsageError(
                f"{self.env.name} has no options for its reset, but got {sorted(options)}"
            )
        if seed is not None or self.root is None:
            self.root = jax.random.key(
                int(self.np_random.integers(2**31)) if seed is None else seed
            )
            self.episode = -1
        self.episode, self.time = self.episode + 1, 0
        obs, self.state = _reset(self.env, self.root, self.episode, self.params)
        return _to_numpy(self.observation_space, obs), {}

    def step(self, action: PyTree) -> tuple[PyTree, float, bool, bool, dict]:
        """One step, without a reset."""
        if self.root is None:
            raise UsageError(f"{self.env.name} must be reset before its first step")
        self.time += 1
        action = _action(self.env, self.params, self.action_space, action)
        now = _Inputs(
            root=self.root, episode=self.episode, time=self.time, state=self.state, action=action
        )
        made = _step(self.env, now, self.params)
        self.state = made.state
        obs, info = _to_numpy(self.observation_space, made.obs), jax.tree.map(np.array, made.info)
        return obs, float(made.reward), bool(made.terminated), bool(made.truncated), info

    def render(self) -> np.ndarray | None:
        """The picture uint8 `[H, W, 3]` of the state, in render mode "rgb_array"."""
        if self.render_mode is None or self._draw is None:
            return None
        return np.array(self._draw(self.state, self.params))


class Vector(VectorEnv):
    """Many copies of one environment; made by `to_gymnasium_vector`."""

    def __init__(
        self,
        env: Environment | Adapter,
        params: PyTree,
        num_envs: int,
        mode: AutoresetMode,
        render_mode: str | None = None,
    ):
        if num_envs < 1:
            raise UsageError(f"a vector environment has at least one environment, not {num_envs}")
        self.env, self.params, self.num_envs = env, _params_of(env, params), num_envs
        self.mode, self.render_mode, self._draw = mode, render_mode, capabilities(env).render
        self.metadata = {**_metadata(env, render_mode), "autoreset_mode": mode}
        self.single_observation_space = gymnasium_space(env.observation_space(self.params))
        self.single_action_space = gymnasium_space(env.action_space(self.params))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.roots: PRNGKey | None = None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None
    ) -> tuple[PyTree, dict]:
        """Begins episodes: in all environments, or in those of `options["reset_mask"]` (bool `[num_envs]`).

        `seed` is one integer, from which the environments count on, or one for each, or None for their next episodes.
        """
        options = dict(options or {})
        chosen = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, bool)))
        if options or chosen.shape != (self.num_envs,) or chosen.dtype != bool:
            raise UsageError(
                f"a reset takes one option, reset_mask, a bool array [{self.num_envs}]"
            )
        if seed is None and self.roots is None:
            seed = [int(number) for number in self.np_random.integers(2**31, size=self.num_envs)]
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + index for index in range(self.num_envs)]
        if seed is not None and len(seed) != self.num_envs:
            raise UsageError(f"{self.num_envs} environments need as many seeds, not {len(seed)}")
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
        obs, state = _reset_envs(self.env, self.roots, self.episodes, self.params)
        if self.state is not None:
            obs, state = _where(chosen, (obs, state), (self.obs, self.state))
        self.obs, self.state = obs, state
        return _to_numpy(self.observation_space, obs), {}

    def step(self, actions: PyTree) -> tuple[PyTree, np.ndarray, np.ndarray, np.ndarray, dict]:
        """One step of every environment, with the resets of the autoreset mode."""
        if self.roots is None:
            raise UsageError(f"{self.env.name} must be reset before its first step")
        if self.mode == AutoresetMode.DISABLED and self.over.any():
            raise UsageError(
                f"environment {np.argmax(self.over)} has ended and resets are disabled: reset it with reset_mask"
            )
        actions = _action(self.env, self.params, self.action_space, actions, envs=self.num_envs)
        now = _Inputs(
            root=self.roots,
            episode=self.episodes,
            time=self.times + 1,
            state=self.state,
            action=actions,
        )
        made, self.obs, self.state, fresh = _step_envs(
            self.env, self.mode, now, self.over, self.params
        )
        fresh = np.array(fresh)
        self.times = np.where(fresh, 0, self.times + 1).astype(np.int32)
        self.episodes = self.episodes + fresh.astype(np.int32)
        reward, terminated, truncated = (
            np.array(x) for x in (made.reward, made.terminated, made.truncated)
        )
        infos: dict[str, PyTree] = {}
        if self.mode == AutoresetMode.NEXT_STEP:
            reward, terminated, truncated = (
                np.where(fresh, 0, x).astype(x.dtype) for x in (reward, terminated, truncated)
            )
        elif self.mode == AutoresetMode.SAME_STEP and fresh.any():
            last, info = (
                _to_numpy(self.observation_space, made.obs),
                jax.tree.map(np.array, made.info),
            )
            final = np.full(self.num_envs, None, object)
            for index in np.flatnonzero(fresh):
                final[index] = jax.tree.map(lambda x, index=index: x[index], last)
            infos = {"final_obs": final, "final_info": _of_envs(info, fresh)}
            infos |= {"_final_obs": fresh, "_final_info": fresh.copy()}
        infos |= _of_envs(jax.tree.map(np.array, made.info), ~fresh)
        self.over = terminated | truncated
        return (
            _to_numpy(self.observation_space, self.obs),
            reward.astype(float),
            terminated,
            truncated,
            infos,
        )

    def render(self) -> tuple[np.ndarray, ...] | None:
        """A picture for each environment, in render mode "rgb_array"."""
        if self.render_mode is None or self._draw is None:
            return None
        return tuple(np.array(jax.vmap(self._draw, (0, None))(self.state, self.params)))


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


class _Inputs(NamedTuple):
    """Inputs of a step of one environment, or with an axis B in front of many.

    Attributes:
        root: root key of its episodes.
        episode: number of the episode.
        time: number of the step in it, from 1.
        state: state before the step.
        action: action as our space takes it.
    """

    root: PRNGKey
    episode: ArrayLike
    time: ArrayLike
    state: PyTree
    action: PyTree


def _step_key(root: PRNGKey, episode: ArrayLike, time: ArrayLike) -> PRNGKey:
    return jax.random.fold_in(jax.random.fold_in(root, episode), time)


@functools.partial(jax.jit, static_argnums=0)
def _reset(
    env: Environment | Adapter, root: PRNGKey, episode: ArrayLike, params: PyTree
) -> tuple[PyTree, PyTree]:
    return reset(_step_key(root, episode, 0), env, params)


@functools.partial(jax.jit, static_argnums=0)
def _step(env: Environment | Adapter, now: _Inputs, params: PyTree) -> Transition:
    key = _step_key(now.root, now.episode, now.time)
    return step(key, env, now.state, now.action, params)


@functools.partial(jax.jit, static_argnums=0)
def _reset_envs(
    env: Environment | Adapter, roots: PRNGKey, episodes: Array, params: PyTree
) -> tuple[PyTree, PyTree]:
    return jax.vmap(lambda root, episode: _reset(env, root, episode, params))(roots, episodes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step_envs(
    env: Environment | Adapter,
    mode: AutoresetMode,
    now: _Inputs,
    over: Array,
    params: PyTree,
) -> tuple[Transition, PyTree, PyTree, Array]:
    """The bare step of all environments, then observations and states after resets, and which were reset.

    `over` are those whose episodes had ended before, bool `[B]`.
    """
    made = jax.vmap(lambda row: _step(env, row, params))(now)
    if mode == AutoresetMode.DISABLED:
        return made, made.obs, made.state, jnp.zeros_like(over)
    fresh = over if mode == AutoresetMode.NEXT_STEP else made.terminated | made.truncated
    obs, state = jax.lax.cond(
        jnp.any(fresh),
        lambda: _where(
            fresh, _reset_envs(env, now.root, now.episode + 1, params), (made.obs, made.state)
        ),
        lambda: (made.obs, made.state),
    )
    return made, obs, state, fresh


def _where(chosen: ArrayLike, new: PyTree, old: PyTree) -> PyTree:
    """The environments of `new` where `chosen` `[B]`, of `old` elsewhere."""

    def select(x, y):
        return jnp.where(jnp.reshape(chosen, (-1,) + (1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(select, new, old)


def _of_envs(info: dict[str, PyTree], chosen: np.ndarray) -> dict[str, PyTree]:
    """Gymnasium's form of some environments' infos: zeros elsewhere, and a mask under the name with an underscore."""
    result: dict[str, PyTree] = {}
    for name, value in info.items() if chosen.any() else ():
        if isinstance(value, dict):
            result[name] = _of_envs(value, chosen)
        else:
            result[name] = np.where(
                chosen.reshape(-1, *(1,) * (value.ndim - 1)), value, np.zeros_like(value)
            )
        result[f"_{name}"] = chosen.copy()
    return result


def _to_numpy(space: theirs.Space, value: PyTree) -> PyTree:
    """Arrays of the dtypes of a Gymnasium space, which their owner may overwrite."""
    if isinstance(space, theirs.Dict):
        return {name: _to_numpy(inner, value[name]) for name, inner in space.items()}
    array = np.array(value, space.dtype)
    return array[()] if isinstance(space, theirs.Discrete) else array


def _action(
    env: Environment | Adapter,
    params: PyTree,
    space: theirs.Space,
    action: PyTree,
    envs: int | None = None,
) -> PyTree:
    """An action of Gymnasium's as ours; a discrete one must be in the space, a continuous one must have its shape."""
    ours = env.action_space(params)
    if isinstance(ours, Box):
        is_legal = np.shape(action) == space.shape
    else:
        is_legal = space.contains(
            np.asarray(action, space.dtype) if space.dtype is not None else action
        )
    if not is_legal:
        raise UsageError(f"{env.name} takes actions of {space}, not {action!r}")
    return _to_jax(ours, action)


def _to_jax(space: Space, value: PyTree) -> PyTree:
    """Arrays of the dtypes of our space."""
    if isinstance(space, Fields):
        return {name: _to_jax(inner, value[name]) for name, inner in space.items}
    return jnp.asarray(value, space.dtype)


def _metadata(env: Environment | Adapter, render_mode: str | None) -> dict[str, list[str] | int]:
    modes = [] if capabilities(env).render is None else ["rgb_array"]
    if render_mode is not None and render_mode not in modes:
        raise UsageError(
            f"{env.name} has no render mode {render_mode!r}; it has {', '.join(modes) or 'none'}"
        )
    return {"render_modes": modes, "render_fps": 15}


def _params_of(env: Environment | Adapter, params: PyTree) -> PyTree:
    if (count := capabilities(env).num_agents) is not None:
        raise UsageError(
            f"Gymnasium knows no agents, and {env.name} has {count}; see `agents_view`"
        )
    return env.default_params if params is None else params
