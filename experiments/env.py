"""Walks many copies of an environment at once: steps a second with all consumed, what episodes give, a film of some.

    python -m experiments.env                                        # DoorKey-8x8 at random, 4,096 environments
    python -m experiments.env env=Foraging-8x8-2p-2f policy=scripted num_steps=200
    python -m experiments.env env=CartPole-v1 params.gravity=5 prng=batch num_envs=65536
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

from jaxpar.env import capabilities
from jaxpar.fields import AtLeast, OneOf, field
from jaxpar.io import ProgressLabels, open_progress, open_writers, plot_histograms
from jaxpar.mesh import MeshSpec
from jaxpar.rollout import Chunked, EpisodeResults, NextStep, NoReset, Pool, SameStep, check_prng

from .app import runner
from .app.env.environment import make_world
from .app.env.policies import POLICIES, Call, PolicyRun, older_prng, player, save_film
from .app.mesh_flags import check_split, refuse_idle
from .app.run_folder import run_folder
from .app.runner import identifying, say

RESETS = {
    "chunked": Chunked,
    "same_step": SameStep,
    "next_step": NextStep,
    "none": NoReset,
    "pool": Pool,
}


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The rollout.

    Attributes:
      env: Name of an environment, ours or gymnax's.
      env_fields: Changes to its fields, such as env_fields.size=16: what changes compilation.
      params: Changes to its parameters, such as params.gravity=5; a list, such as params.reach=[1,3,3], where there are
        several numbers.
      policy: "random" among the legal actions, "scripted" where `_policy_run.SCRIPTED` has some for it, or "noop", the
        first legal action (0), whatever it does.
      num_envs: Environments, on all devices together.
      num_steps: Steps of each environment, rounded up to whole calls of the compiled program.
      reset: What happens to finished environments: "chunked", "same_step", "next_step", "none", "pool".
      prng: Keys of environments: "env", or "batch", which is faster and gives other numbers.
      gif: Whether to film the first environments, where the environment can be rendered.
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
    prng: str = identifying("env", before=older_prng)
    gif: bool = True
    frames: int = field(120, AtLeast(1))

    def __post_init__(self):
        """Refuses counts that no rollout can have, and unknown names."""
        super().__post_init__()
        check_prng(self.prng)


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("env", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> None:
    """Walks under the mesh of the flags; writes metrics.jsonl, plots/episodes.png and plots/environments.gif."""
    with runner.open_devices(config, MeshSpec(data=2, fsdp=2)):
        refuse_idle("a rollout", "envs")
        check_split("num_envs", config.num_envs, "envs")
        policy_run = make_policy_run(config)
        with run_folder(folder, config.resume) as folder:
            runner.write_start(folder, config)
            _tell_start(config, folder, policy_run)
            with runner.ending_together():
                calls = run(config, folder, policy_run)
                _tell_end(config, folder, policy_run, calls)


def make_policy_run(config: Config) -> PolicyRun:
    """Returns what is to be run, with the changes that the flags make to the environment and its parameters."""
    env, params = make_world(config.env, config.env_fields, config.params)
    env, policy = player(config.policy, env)
    return PolicyRun(
        env=env,
        params=params,
        policy=policy,
        num_envs=config.num_envs,
        reset=RESETS[config.reset](),
        prng=config.prng,
    )


def run(config: Config, folder: pathlib.Path, policy_run: PolicyRun) -> list[Call]:
    """Runs it and returns what each call gave, having written its statistics as a line of metrics.jsonl."""
    key = jax.random.key(config.seed)
    num_calls, num_steps = divided(config.num_steps, config.num_envs)
    began = time.perf_counter()
    program, env_state = policy_run.compiled(key, num_steps)
    say(f"compiled   in {time.perf_counter() - began:.1f} s, counted apart")
    total = num_calls * num_steps * config.num_envs
    writer = open_writers(
        folder, tuple(config.metrics), None, name=folder.name, config=runner.identity(config)
    )
    calls = []
    try:
        with open_progress(total, labels=ProgressLabels(description="rollout")) as progress:
            for call in policy_run.calls(key, program, env_state, num_calls):
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
    return found | {
        "seconds": seconds,
        "done_rate": found["num_episodes"] / max(found["num_steps"], 1),
    }


def _tell_start(config: Config, folder: pathlib.Path, policy_run: PolicyRun) -> None:
    space, params = str(policy_run.env.action_space(policy_run.params)), policy_run.params
    space = re.sub(r", (dtype=(<[^>]*>|dtype\('\w+'\))|shape=\(\))", "", space)
    agents = capabilities(policy_run.env).num_agents
    count = f", {agents} agents" if agents else ""
    numbers = (
        {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
        if params
        else {}
    )
    plain = [f"{k}={v:.4g}" for k, v in numbers.items() if isinstance(v, int | float)]
    num_calls, num_steps = divided(config.num_steps, config.num_envs)
    say(f"run        {runner.short(folder)}")
    say(f"env        {config.env}{count}: {'  '.join(plain) or 'no parameters'}")
    say(f"actions    {space}, policy={config.policy}")
    say(f"rollout    {config.num_envs:,} environments, {num_calls * num_steps:,} steps each, over "
        f"{jax.sharding.get_abstract_mesh().size} {jax.devices()[0].device_kind} device(s), reset={config.reset} "
        f"prng={config.prng}")  # fmt: skip


def _tell_end(
    config: Config, folder: pathlib.Path, policy_run: PolicyRun, calls: Sequence[Call]
) -> None:
    found = totals(calls)
    first = multihost_utils.process_allgather(calls[-1].first, tiled=True)
    rate = found["num_steps"] / found["seconds"]
    made = calls[-1].num_steps * config.num_envs
    say(f"speed      {rate:,.0f} steps/s: {found['num_steps']:,.0f} in {found['seconds']:.2f} s, every observation, "
        f"action, reward and flag in a checksum ({found['checksum']:.6g})")  # fmt: skip
    if found["num_steps"] < made:
        say(
            f"           {1 - found['num_steps'] / made:.1%} of the steps came after an episode's end and do not count"
        )
    leaning = " (short ones come more often)" if found["num_episodes"] > config.num_envs else ""
    say(f"ended      {found['num_episodes']:,.0f} episodes, at {found['done_rate']:.3%} of the steps; "
        f"{found['truncated']:.1%} were cut, mean return {found['return_mean']:.4g}, mean length "
        f"{found['length_mean']:.4g}{leaning}")  # fmt: skip
    plot = _tell_first(config, folder, first, calls[-1].num_steps)
    if jax.process_index() == 0:
        film = folder / "plots" / "environments.gif"
        if config.gif:
            save_film(config.seed, policy_run, config.env, film, config.frames, fps=10)
        for what, path in (("plot", plot), ("metrics", folder / "metrics.jsonl")):
            if path:
                say(f"{what:10} {runner.short(path)}")


def _tell_first(
    config: Config, folder: pathlib.Path, first: EpisodeResults, num_steps: int
) -> pathlib.Path | None:
    """Tells the first episode of each environment, and returns its plot, if any is finished."""
    done, mean = first.finished, " (mean of agents)" if first.returns.ndim > 1 else ""
    if not done.any():
        say(
            f"first      no environment finished its first episode within {num_steps:,} steps; raise num_steps."
        )
        return None
    returns, lengths = first.returns.reshape(len(done), -1).mean(1)[done], first.lengths[done]
    parts = [
        f"{name} {x.mean():.4g} ± {x.std():.4g} ({x.min():.4g} to {x.max():.4g})"
        for name, x in ((f"return{mean}", returns), ("length", lengths))
    ]
    say(
        f"first      one episode each, ± standard deviation: {', '.join(parts)}, {first.truncated[done].mean():.1%} cut"
    )
    title = (
        f"{config.env}, policy={config.policy}: the first episode of {done.sum():,} environments"
    )
    if not done.all():
        title += f" (of {done.size:,}: the others are longer)"
        say(f"           of the {done.sum():,} of {done.size:,} environments that finished it, so short ones are "
            "favoured: raise num_steps")  # fmt: skip
    plot = folder / "plots" / "episodes.png"
    if jax.process_index() == 0:
        plot_histograms(
            {f"return{mean}": returns, "length in steps": lengths},
            plot,
            title=title,
            counted="episodes",
        )
    return plot


if __name__ == "__main__":
    runner.launch("env", Config, execute)
