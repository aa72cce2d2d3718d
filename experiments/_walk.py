"""Lanes under a policy that needs no learning: policies by name, a walk that is consumed whole, a film of a few."""

import contextlib
import dataclasses
import inspect
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments._run import say
from jaxpar.env import Box, Fields, gif, grid_of
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.rollout import (
    Episodes,
    Lanes,
    NextStep,
    Steps,
    begin,
    check_steps,
    first_episodes,
    random_policy,
    summary,
    unroll,
)
from jaxpar.rollout.lanes import per_lane, where
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

POLICIES = ("random", "scripted", "noop")
FILMED = 6
"""Lanes in a film."""
_WIDTH = 192
"""Pixels of a lane in a film, at least half as many."""


@dataclasses.dataclass(frozen=True)
class Revealing:
    """An environment whose observation is (observation, state), for play that knows the state."""

    env: Any

    def observe(self, key: PRNGKey, state: PyTree, action: PyTree | None, params: PyTree) -> tuple[PyTree, PyTree]:
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
        action = self.play(self.env, obs[1], params)  # in Combat of both teams, the controlled one first
        return action[: self.env.num_agents] if hasattr(self.env, "num_agents") else action, carry


@dataclasses.dataclass(frozen=True)
class FirstAction:
    """The first legal action, or the numbers nearest to 0; its params are the environment's."""

    env: Any

    def __call__(
        self, key: PRNGKey, params: PyTree, obs: PyTree, carry: PyTree, action_mask: Array | None = None
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
    play = getattr(inspect.getmodule(type(env)), "scripted", None)
    if play is None:
        raise UsageError(f"policy=scripted: {env.name} comes with no scripted play; legal are random and noop.")
    return Revealing(env), Scripted(env, play)


class Call(NamedTuple):
    """What one call of the compiled walk gave.

    Attributes:
      num_steps: Steps that each lane has made so far.
      seconds: Wall-clock time of this call.
      values: `jaxpar.rollout.summary` of its steps; "checksum", the sum of all that they gave; "first_finished",
        "first_return" and "first_length", the means of `first`.
      first: The first episode of each lane, as far as it went by now.
    """

    num_steps: int
    seconds: float
    values: dict[str, float]
    first: Episodes


@dataclasses.dataclass(frozen=True)
class Walk:
    """Many lanes under one policy, on the ambient mesh.

    Attributes:
      env: The environment, as the policy sees it.
      params: Its parameters.
      policy: Of `player`.
      num_lanes: Lanes.
      reset: A reset policy.
      draw: "lane" or "batch".
    """

    env: Any
    params: PyTree
    policy: Any
    num_lanes: int
    reset: Any
    draw: str

    def compiled(self, key: PRNGKey, num_steps: int) -> tuple[Callable, Lanes]:
        """The program of `num_steps` steps for `calls`, and the lanes at their first observations; nothing is run."""
        lanes = begin(key, self.env, self.params, self.num_lanes, draw=self.draw)
        leaves, structure = jax.tree.flatten(lanes)
        axes = [("envs",) * (x.ndim > 0) + (None,) * (x.ndim - 1) for x in leaves]
        shardings = jax.tree.unflatten(structure, named_shardings(leaves, axes))
        lanes = jax.device_put(lanes, shardings)

        def go(key, lanes, first, params):
            lanes, steps = unroll(
                key, lanes, self.env, params, self.policy, params, num_steps,
                reset=self.reset, draw=self.draw, keep=_consumed,
            )  # fmt: skip
            first = where(first.finished, first, first_episodes(steps))
            values = summary(steps) | _means(first)
            values |= {"checksum": jnp.sum(steps.obs), "is_finite": jnp.isfinite(steps.reward).all()}
            return lanes, first, values, steps.replace(obs=None)

        first = _none_finished(lanes)
        kept = jax.tree.map(lambda x: x.sharding, first)
        program = jax.jit(go, out_shardings=(shardings, kept, None, None))
        return program.lower(key, lanes, first, self.params).compile(), lanes

    def calls(self, key: PRNGKey, program: Callable, lanes: Lanes, num_calls: int) -> Iterator[Call]:
        """Runs the program `num_calls` times and yields each call; refuses rewards that are no numbers."""
        first, made = _none_finished(lanes), 0
        for _ in range(num_calls):
            began = time.perf_counter()
            out = jax.block_until_ready(program(key, lanes, first, self.params))
            seconds = time.perf_counter() - began
            lanes, first, values, steps = out
            values = {name: float(value) for name, value in values.items()}
            if not values.pop("is_finite"):
                check_steps(steps, first_step=made)
            made += len(steps.start)
            yield Call(made, seconds, values, first)


def _none_finished(lanes: Lanes) -> Episodes:
    """The first episodes of lanes that have just begun, laid out as the lanes are."""
    return Episodes(lanes.episode_return, lanes.episode_length, lanes.ended, lanes.ended)


def _means(first: Episodes) -> dict[str, Array]:
    """The share of lanes that finished their first episode, and the means over these (NaN if none did)."""
    done = first.finished
    returns = first.returns.reshape(len(done), -1).mean(1)
    means = (jnp.sum(jnp.where(done, x, 0)) / jnp.sum(done) for x in (returns, first.lengths))
    return {"first_finished": jnp.mean(done)} | dict(zip(("first_return", "first_length"), means, strict=True))


def _consumed(row: Steps) -> Steps:
    """A step with a checksum a lane, of all that it gave, in the place of what statistics do not read."""
    read = (row.obs, row.action, row.reward, row.terminated, row.truncated, row.info)
    leaves = [leaf for leaf in jax.tree.leaves(read) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    total: Any = sum(leaf.astype(jnp.float32).reshape(len(leaf), -1).sum(1) for leaf in leaves)
    return dataclasses.replace(row, obs=total, action=None, bootstrap=None, extras=None, info=None)


def film(
    key: PRNGKey, walk: Walk, num_lanes: int, num_frames: int, *, weights: PyTree = None, carry: PyTree = ()
) -> np.ndarray:
    """Pictures uint8 `[T, B, H, W, 3]` of the first lanes of a walk.

    Their first episodes are those of the walk of the same key. The last state of an episode is one frame, faded, before
    the next begins (`NextStep`). `weights` are the policy's parameters where they are not the environment's, `carry`
    what it remembers when an episode starts.
    """

    def frame(params):
        def show(lanes, _):
            images = jax.vmap(walk.env.render, (0, None))(lanes.state, params)
            images = jnp.where(per_lane(lanes.ended, images), 128 + images // 2, images)
            lanes, _ = unroll(
                key, lanes, walk.env, params, walk.policy, params if weights is None else weights, 1,
                reset=NextStep(), draw=walk.draw, keep=lambda row: row.ended,
            )  # fmt: skip
            return lanes, images

        return show

    lanes = begin(key, walk.env, walk.params, num_lanes, carry, draw=walk.draw)
    shown = jax.jit(lambda lanes, params: jax.lax.scan(frame(params), lanes, None, num_frames)[1])
    return np.asarray(shown(lanes, walk.params))


def shoot(
    seed: int, walk: Walk, name: str, path: pathlib.Path, num_frames: int, fps: float, **policy: PyTree
) -> pathlib.Path | None:
    """Films the first lanes of a walk side by side into a GIF, on one device of this process.

    Args:
      seed: Of its key.
      walk: What is filmed.
      name: Of the environment.
      path: Of the GIF.
      num_frames: Steps.
      fps: Of them in a second.
      policy: `weights` and `carry`, as `film` takes them.

    Returns:
      The path, or None, which is told, where the environment has no `render`.
    """
    if not hasattr(walk.env, "render"):
        say(f"note       no film, since {name} has no render.")
        return None
    params, policy = jax.device_get((walk.params, policy))  # which may lie on another mesh
    with on_one_device():
        walk = dataclasses.replace(walk, params=params)
        frames = film(jax.random.key(seed), walk, min(FILMED, walk.num_lanes), num_frames, **policy)
    scale = max(1, _WIDTH // max(frames.shape[2:4]))
    path.parent.mkdir(exist_ok=True)
    gif(grid_of(frames.repeat(scale, 2).repeat(scale, 3), gap=6), path, fps=fps)
    return path


def on_one_device() -> contextlib.AbstractContextManager:
    """A mesh of one device of this process, whatever the ambient one."""
    return use_mesh(make_mesh(MeshSpec(data=1), devices=jax.local_devices()[:1]))
