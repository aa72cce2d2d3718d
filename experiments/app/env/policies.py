"""Environments under a policy that needs no learning: policies by name, rollouts consumed whole, a film of a few."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxpar.envs.multi import combat, foraging, particles

from jaxpar.env import Box, Fields, capabilities, captioned, gif, grid_of
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.rollout import (
    EnvState,
    EpisodeResults,
    NextStep,
    RolloutOptions,
    Trajectory,
    check_trajectory,
    episode_stats,
    first_episodes,
    init,
    per_env,
    random_policy,
    rollout,
    where,
)
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

from ..run_folder import short
from ..runner import say

POLICIES = ("random", "scripted", "noop")
SCRIPTED: dict[type, Callable[[Any, PyTree, PyTree], Array]] = {
    combat.Combat: combat.scripted,
    foraging.Foraging: foraging.scripted,
    particles.Spread: particles.scripted,
    particles.Tag: particles.scripted,
    particles.SpeakerListener: particles.scripted,
}
"""Play that knows the state, by environments that come with some: `(env, state, params) -> action`."""
FILMED = 6
"""Environments in a film."""
_WIDTH = 192
"""Pixels of an environment in a film, at least half as many."""


@dataclasses.dataclass(frozen=True)
class Revealing:
    """An environment whose observation is (observation, state), for play that knows the state."""

    env: Any

    def observe(
        self, key: PRNGKey, state: PyTree, action: PyTree | None, params: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The environment's observation, and the state; consumes `key`."""
        return self.env.observe(key, state, action, params), state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Play by `play(env, state, params)`, on what `Revealing` shows; its params are the environment's."""

    env: Any
    play: Callable[[Any, PyTree, PyTree], Array]

    def __call__(self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree) -> tuple:
        """Returns `(action, carry)`."""
        action = self.play(
            self.env, obs[1], params
        )  # in Combat of both teams, the controlled one first
        agents = capabilities(self.env).num_agents
        return action if agents is None else action[:agents], carry


@dataclasses.dataclass(frozen=True)
class FirstAction:
    """The first legal action, or the numbers nearest to 0; its params are the environment's."""

    env: Any

    def __call__(
        self,
        key: PRNGKey,
        params: PyTree,
        obs: PyTree,
        carry: PyTree,
        action_mask: Array | None = None,
    ) -> tuple:
        """Returns `(action, carry)`."""
        if action_mask is not None:
            return jnp.argmax(action_mask, -1).astype(jnp.int32), carry
        return _nearest_to_zero(self.env.action_space(params)), carry


def _nearest_to_zero(space: Any) -> PyTree:
    if isinstance(space, Fields):
        return {name: _nearest_to_zero(inner) for name, inner in space.items}
    zeros = jnp.zeros(space.shape, space.dtype)
    return jnp.clip(zeros, *map(jnp.asarray, space.bounds())) if isinstance(space, Box) else zeros


def player(name: str, env: Any) -> tuple[Any, Any]:
    """Returns the environment as the policy of that name sees it, and the policy; its params are the environment's."""
    if name == "random":
        return env, random_policy(env)
    if name == "noop":
        return env, FirstAction(env)
    play = SCRIPTED.get(type(env))
    if play is None:
        raise UsageError(
            f"policy=scripted: {env.name} comes with no scripted play; legal are random and noop."
        )
    return Revealing(env), Scripted(env, play)


class Call(NamedTuple):
    """What one call of the compiled rollout gave.

    Attributes:
      num_steps: Steps that each environment has made so far.
      seconds: Wall-clock time of this call.
      values: `jaxpar.rollout.episode_stats` of its steps; "checksum", the sum of all that they gave; "first_finished",
        "first_return" and "first_length", the means of `first`.
      first: The first episode of each environment, as far as it went by now.
    """

    num_steps: int
    seconds: float
    values: dict[str, float]
    first: EpisodeResults


@dataclasses.dataclass(frozen=True)
class PolicyRun:
    """Many environments under one policy, on the ambient mesh.

    Attributes:
      env: The environment, as the policy sees it.
      params: Its parameters.
      policy: Of `player`.
      num_envs: Environments.
      reset: A reset policy.
      prng: "env" or "batch".
    """

    env: Any
    params: PyTree
    policy: Any
    num_envs: int
    reset: Any
    prng: str

    def compiled(self, key: PRNGKey, num_steps: int) -> tuple[Callable, EnvState]:
        """The program of `num_steps` steps for `calls`, and the state of environments that have just started."""
        env_state = init(key, self.env, self.params, self.num_envs, prng=self.prng)
        leaves, structure = jax.tree.flatten(env_state)
        axes = [("envs",) * (x.ndim > 0) + (None,) * (x.ndim - 1) for x in leaves]
        shardings = jax.tree.unflatten(structure, named_shardings(leaves, axes))
        env_state = jax.device_put(env_state, shardings)

        def go(key, env_state, first, params):
            options = RolloutOptions(reset=self.reset, prng=self.prng, keep=_consumed)
            env_state, steps = rollout(
                key, env_state, self.env, params, self.policy, params, num_steps, options
            )
            first = where(first.finished, first, first_episodes(steps))
            values = episode_stats(steps) | _means(first)
            values |= {
                "checksum": jnp.sum(steps.obs),
                "is_finite": jnp.isfinite(steps.reward).all(),
            }
            return env_state, first, values, steps.replace(obs=None)

        first = _none_finished(env_state)
        kept = jax.tree.map(lambda x: x.sharding, first)
        program = jax.jit(go, out_shardings=(shardings, kept, None, None))
        return program.lower(key, env_state, first, self.params).compile(), env_state

    def calls(
        self, key: PRNGKey, program: Callable, env_state: EnvState, num_calls: int
    ) -> Iterator[Call]:
        """Runs the program `num_calls` times and yields each call; refuses rewards that are no numbers."""
        first = _none_finished(env_state)
        made = 0
        for _ in range(num_calls):
            began = time.perf_counter()
            out = jax.block_until_ready(program(key, env_state, first, self.params))
            seconds = time.perf_counter() - began
            env_state, first, values, steps = out
            values = {name: float(value) for name, value in values.items()}
            if not values.pop("is_finite"):
                check_trajectory(steps, first_step=made)
            made += len(steps.start)
            yield Call(num_steps=made, seconds=seconds, values=values, first=first)


def _none_finished(env_state: EnvState) -> EpisodeResults:
    """The first episodes of environments that have just started, laid out as they are."""
    return EpisodeResults(
        returns=env_state.episode_return,
        lengths=env_state.episode_length,
        finished=env_state.ended,
        truncated=env_state.ended,
    )


def _means(first: EpisodeResults) -> dict[str, Array]:
    """The share of environments that finished their first episode, and the means over these (NaN if none did)."""
    done = first.finished
    returns = first.returns.reshape(len(done), -1).mean(1)
    means = (jnp.sum(jnp.where(done, x, 0)) / jnp.sum(done) for x in (returns, first.lengths))
    return {"first_finished": jnp.mean(done)} | dict(
        zip(("first_return", "first_length"), means, strict=True)
    )


def _consumed(row: Trajectory) -> Trajectory:
    """A step with a checksum for each environment, of all that it gave, in place of what statistics do not read."""
    read = (row.obs, row.action, row.reward, row.terminated, row.truncated, row.info)
    leaves = [
        leaf
        for leaf in jax.tree.leaves(read)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    total: Any = sum(leaf.astype(jnp.float32).reshape(len(leaf), -1).sum(1) for leaf in leaves)
    return dataclasses.replace(row, obs=total, action=None, bootstrap=None, extras=None, info=None)


class Shot(NamedTuple):
    """What a film shows of T steps of B environments, on the host.

    Attributes:
      images: uint8 `[T, B, H, W, 3]`, of the state that each step began with.
      steps: int32 `[T, B]`, made in the episode before it.
      returns: float32 `[T, B]` or `[T, B, N]`, earned in the episode before it.
      over: bool `[T, B]`, whether the episode has ended with that state, and the step begins the next.
      actions: of the steps, leaves `[T, B, ...]`.
    """

    images: np.ndarray
    steps: np.ndarray
    returns: np.ndarray
    over: np.ndarray
    actions: PyTree


def film(
    key: PRNGKey,
    policy_run: PolicyRun,
    num_envs: int,
    num_frames: int,
    *,
    weights: PyTree = None,
    carry: PyTree = (),
) -> Shot:
    """Films the first environments of a rollout.

    Their first episodes are those of the rollout of the same key. The last state of an episode is one frame, faded,
    before the next begins (`NextStep`). `weights` are the policy's parameters where they are not the environment's,
    `carry` what it remembers when an episode starts.
    """

    def frame(params):
        def show(env_state, _):
            images = jax.vmap(policy_run.env.render, (0, None))(env_state.state, params)
            images = jnp.where(per_env(env_state.ended, images), 128 + images // 2, images)
            after, actions = rollout(
                key,
                env_state,
                policy_run.env,
                params,
                policy_run.policy,
                params if weights is None else weights,
                1,
                RolloutOptions(reset=NextStep(), prng=policy_run.prng, keep=lambda row: row.action),
            )
            shot = Shot(
                images=images,
                steps=env_state.episode_length,
                returns=env_state.episode_return,
                over=env_state.ended,
                actions=jax.tree.map(lambda x: x[0], actions),
            )
            return after, shot

        return show

    env_state = init(key, policy_run.env, policy_run.params, num_envs, carry, prng=policy_run.prng)
    shown = jax.jit(
        lambda env_state, params: jax.lax.scan(frame(params), env_state, None, num_frames)[1]
    )
    return jax.device_get(shown(env_state, policy_run.params))


def action_text(space: Any, action: PyTree) -> str:
    """Returns an action as films tell it: by its names, else as numbers; "" of more than four."""
    if isinstance(space, Fields) or np.size(action) > 4:
        return ""
    numbers = np.ravel(action).tolist()
    if names := getattr(space, "names", ()):
        return ", ".join(names[number] for number in numbers)
    return ", ".join(
        f"{number:.2f}" if isinstance(number, float) else str(number) for number in numbers
    )


def captions(space: Any, shot: Shot) -> list[str]:
    """Returns what stands under the picture of each step and environment: `[T B]` texts of two lines."""
    texts = []
    for at in np.ndindex(*shot.steps.shape):
        earned = float(np.mean(shot.returns[at]))
        did = action_text(space, jax.tree.map(lambda x, at=at: x[at], shot.actions))
        mean = " (mean)" if np.ndim(shot.returns[at]) else ""
        texts.append(
            f"step {shot.steps[at]}  return {earned:.4g}{mean}\n"
            + ("ended" if shot.over[at] else did)
        )
    return texts


def save_film(
    seed: int,
    policy_run: PolicyRun,
    name: str,
    path: pathlib.Path,
    num_frames: int,
    fps: float,
    **policy: PyTree,
) -> pathlib.Path | None:
    """Films the first environments of a rollout side by side into a GIF, on one device of this process.

    Under each stand the step, the return so far, which is the mean of several agents, and the action.

    Args:
      seed: Of its key.
      policy_run: What is filmed.
      name: Of the environment.
      path: Of the GIF.
      num_frames: Steps.
      fps: Of them in a second.
      policy: `weights` and `carry`, as `film` takes them.

    Returns:
      The path, or None, either of which is told: None where the environment has no `render`.
    """
    if capabilities(policy_run.env).render is None:
        say(f"note       no film, since {name} has no render.")
        return None
    params, policy = jax.device_get((policy_run.params, policy))  # which may lie on another mesh
    with on_one_device():
        policy_run = dataclasses.replace(policy_run, params=params)
        shot = film(
            jax.random.key(seed), policy_run, min(FILMED, policy_run.num_envs), num_frames, **policy
        )
    scale = max(1, _WIDTH // max(shot.images.shape[2:4]))
    images = shot.images.repeat(scale, 2).repeat(scale, 3)
    told = captioned(
        images.reshape(-1, *images.shape[2:]), captions(policy_run.env.action_space(params), shot)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    gif(grid_of(told.reshape(*images.shape[:2], *told.shape[1:]), gap=6), path, fps=fps)
    say(f"film       {short(path)}")
    return path


def on_one_device() -> contextlib.AbstractContextManager:
    """A mesh of one device of this process, whatever the ambient one."""
    return use_mesh(make_mesh(MeshSpec(data=1), devices=jax.local_devices()[:1]))


def older_prng(prng: str) -> dict[str, str]:
    """What stood in identities of runs before the flag `prng` had that name."""
    return {"draw": {"env": "lane"}.get(prng, prng)}
