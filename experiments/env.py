"""Walks many copies of an environment at once: steps a second with all consumed, what episodes give, a film of some.

    python -m experiments.env                                                 # DoorKey-8x8 at random, 4,096 lanes
    python -m experiments.env env=Foraging-8x8-2p-2f policy=scripted num_steps=200
    python -m experiments.env env=CartPole-v1 params.gravity=5 draw=batch num_envs=65536
    python -m experiments.env env=MineSweeper-8x8 env_fields.num_mines=6 reset=next_step
    python -m experiments.env env=Breakout-MinAtar                            # gymnax's by their names

There are no checkpoints: the same command writes its folder anew, resume=false writes another one.
"""

import dataclasses
import math
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments import _run
from experiments._folder import run_folder
from experiments._mesh import check_split, refuse_idle
from experiments._run import identifying, say
from experiments._walk import POLICIES, Call, Walk, player, shoot
from experiments._world import make_world
from jaxpar.fields import AtLeast, OneOf, field
from jaxpar.io import open_progress, open_writers, plot_histograms
from jaxpar.mesh import MeshSpec
from jaxpar.rollout import Chunked, Episodes, NextStep, NoReset, Pool, SameStep
from jaxpar.rollout.draws import check_draw

RESETS = {"chunked": Chunked, "same_step": SameStep, "next_step": NextStep, "none": NoReset, "pool": Pool}


@dataclasses.dataclass(frozen=True)
class Config(_run.RunConfig):
    """The walk.

    Attributes:
      env: Name of an environment, ours or gymnax's.
      env_fields: Changes to its fields, such as env_fields.size=16: what changes compilation.
      params: Changes to its parameters, such as params.gravity=5; a list, such as params.reach=[1,3,3], where there are
        several numbers.
      policy: "random" among the legal actions, "scripted" where the environment's file offers it, or "noop", the first
        legal action (0), whatever it does.
      num_envs: Lanes, on all devices together.
      num_steps: Steps of each lane, rounded up to whole calls of the compiled program.
      reset: What happens to finished lanes: "chunked", "same_step", "next_step", "none", "pool".
      draw: "lane", or "batch", which draws faster, other numbers.
      gif: Whether to film the first lanes, where the environment can be rendered.
      frames: Of the film, a step each.
    """

    name: str = "env"
    env: str = identifying("DoorKey-8x8")
    env_fields: dict[str, Any] = identifying(default_factory=dict)
    params: dict[str, Any] = identifying(default_factory=dict)
    policy: str = identifying("random", OneOf(POLICIES))
    num_envs: int = identifying(4096, AtLeast(1))
    num_steps: int = field(1024, AtLeast(1))
    reset: str = identifying("chunked", OneOf(RESETS))
    draw: str = identifying("lane")
    gif: bool = True
    frames: int = field(120, AtLeast(1))

    def __post_init__(self):
        """Refuses counts that no walk can have, and unknown names."""
        super().__post_init__()
        check_draw(self.draw)


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return _run.compose("env", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> None:
    """Walks under the mesh of the flags; writes metrics.jsonl, plots/episodes.png and plots/lanes.gif."""
    with _run.open_devices(config, MeshSpec(data=2, fsdp=2)):
        refuse_idle("a walk", "envs")
        check_split("num_envs", config.num_envs, "envs")
        walk = make_walk(config)
        with run_folder(folder, config.resume) as folder:
            _run.write_start(folder, config)
            _tell_start(config, folder, walk)
            with _run.ending_together():
                calls = run(config, folder, walk)
                _tell_end(config, folder, walk, calls)


def make_walk(config: Config) -> Walk:
    """Returns what is to be walked, with the changes that the flags make to the environment and its parameters."""
    env, params = make_world(config.env, config.env_fields, config.params)
    env, policy = player(config.policy, env)
    return Walk(env, params, policy, config.num_envs, RESETS[config.reset](), config.draw)


def run(config: Config, folder: pathlib.Path, walk: Walk) -> list[Call]:
    """Walks and returns what each call gave, having written its statistics as a line of metrics.jsonl."""
    key = jax.random.key(config.seed)
    num_calls, num_steps = divided(config.num_steps, config.num_envs)
    began = time.perf_counter()
    program, lanes = walk.compiled(key, num_steps)
    say(f"compiled   in {time.perf_counter() - began:.1f} s, counted apart")
    total = num_calls * num_steps * config.num_envs
    writer = open_writers(folder, tuple(config.metrics), None, name=folder.name, config=_run.identity(config))
    calls = []
    try:
        with open_progress(total, 0, "walking") as progress:
            for call in walk.calls(key, program, lanes, num_calls):
                rate = num_steps * config.num_envs / call.seconds
                values = {f"rollout/{name}": value for name, value in call.values.items()}
                writer.write(call.num_steps, values | {"rollout/steps_per_s": rate})
                progress.update(call.num_steps * config.num_envs, {})
                calls.append(call)
    finally:
        writer.close()
    return calls


def divided(num_steps: int, num_envs: int) -> tuple[int, int]:
    """Returns how many calls of how many steps: short enough to show progress, long enough to hide their own cost."""
    longest = max(16, (2**19 if jax.default_backend() == "cpu" else 2**24) // num_envs)
    num_calls = math.ceil(num_steps / longest)
    return num_calls, math.ceil(num_steps / num_calls)


def totals(calls: Sequence[Call]) -> dict[str, float]:
    """Returns counts, seconds, the done rate and means over all episodes that ended in any of the calls.

    Keys: "num_steps", "num_episodes", "seconds", "done_rate", "checksum", and, NaN where no episode ended,
    "return_mean", "length_mean" and "truncated", the share of episodes that were cut.
    """
    values = {name: np.array([call.values[name] for call in calls]) for name in calls[0].values}
    count = values["num_episodes"]
    found = {name: float(values[name].sum()) for name in ("num_steps", "num_episodes", "checksum")}
    for name in ("return_mean", "length_mean", "truncated"):
        weighted = np.where(count > 0, values[name] * count, 0).sum()
        found[name] = float(weighted / count.sum()) if count.any() else float("nan")
    seconds = sum(call.seconds for call in calls)
    return found | {"seconds": seconds, "done_rate": found["num_episodes"] / max(found["num_steps"], 1)}


def _tell_start(config: Config, folder: pathlib.Path, walk: Walk) -> None:
    space, params = str(walk.env.action_space(walk.params)), walk.params
    space = re.sub(r", (dtype=(<[^>]*>|dtype\('\w+'\))|shape=\(\))", "", space)
    count = f", {walk.env.num_agents} agents" if hasattr(walk.env, "num_agents") else ""
    numbers = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)} if params else {}
    plain = [f"{k}={v:.4g}" for k, v in numbers.items() if isinstance(v, int | float)]
    num_calls, num_steps = divided(config.num_steps, config.num_envs)
    say(f"run        {_run.short(folder)}")
    say(f"env        {config.env}{count}: {'  '.join(plain) or 'no parameters'}")
    say(f"actions    {space}, policy={config.policy}")
    say(f"walk       {config.num_envs:,} lanes, {num_calls * num_steps:,} steps each, over "
        f"{jax.sharding.get_abstract_mesh().size} {jax.devices()[0].device_kind} device(s), reset={config.reset} "
        f"draw={config.draw}")  # fmt: skip


def _tell_end(config: Config, folder: pathlib.Path, walk: Walk, calls: Sequence[Call]) -> None:
    found = totals(calls)
    first = Episodes(*multihost_utils.process_allgather(calls[-1].first, tiled=True))
    rate, made = found["num_steps"] / found["seconds"], calls[-1].num_steps * config.num_envs
    say(f"speed      {rate:,.0f} steps/s: {found['num_steps']:,.0f} in {found['seconds']:.2f} s, every observation, "
        f"action, reward and flag in a checksum ({found['checksum']:.6g})")  # fmt: skip
    if found["num_steps"] < made:
        say(f"           {1 - found['num_steps'] / made:.1%} of the lanes' steps were waits after the end, not counted")
    leaning = " (short ones come more often)" if found["num_episodes"] > config.num_envs else ""
    say(f"ended      {found['num_episodes']:,.0f} episodes, at {found['done_rate']:.3%} of the steps; "
        f"{found['truncated']:.1%} were cut, mean return {found['return_mean']:.4g}, mean length "
        f"{found['length_mean']:.4g}{leaning}")  # fmt: skip
    plot = _tell_first(config, folder, first, calls[-1].num_steps)
    if jax.process_index() == 0:
        film = folder / "plots" / "lanes.gif"
        shot = shoot(config.seed, walk, config.env, film, config.frames, fps=10) if config.gif else None
        for what, path in (("film", shot), ("plot", plot), ("metrics", folder / "metrics.jsonl")):
            if path:
                say(f"{what:10} {_run.short(path)}")


def _tell_first(config: Config, folder: pathlib.Path, first: Episodes, num_steps: int) -> pathlib.Path | None:
    """Tells the first episode of each lane, and returns its plot, if any is finished."""
    done, mean = first.finished, " (mean of agents)" if first.returns.ndim > 1 else ""
    if not done.any():
        say(f"first      no lane finished its first episode within {num_steps:,} steps; raise num_steps.")
        return None
    returns, lengths = first.returns.reshape(len(done), -1).mean(1)[done], first.lengths[done]
    parts = [
        f"{name} {x.mean():.4g} ± {x.std():.4g} ({x.min():.4g} to {x.max():.4g})"
        for name, x in ((f"return{mean}", returns), ("length", lengths))
    ]
    say(f"first      one episode a lane: {', '.join(parts)}, {first.truncated[done].mean():.1%} cut")
    title = f"{config.env}, policy={config.policy}: the first episode of {done.sum():,} lanes"
    if not done.all():
        title += f" (of {done.size:,}: the others are longer)"
        say(f"           of the {done.sum():,} of {done.size:,} lanes that finished it, so short ones are favoured: "
            "raise num_steps")  # fmt: skip
    plot = folder / "plots" / "episodes.png"
    if jax.process_index() == 0:
        plot_histograms({f"return{mean}": returns, "length in steps": lengths}, plot, title=title)
    return plot


if __name__ == "__main__":
    _run.launch("env", Config, execute)
