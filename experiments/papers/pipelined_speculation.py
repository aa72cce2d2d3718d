"""Counts ticks a token of speculative decoding whose runs overlap: draft beside target, several runs in flight.

    python -m experiments.papers.pipelined_speculation                           # two CPU cores, about 20 s
    python -m experiments.papers.pipelined_speculation stages=16 guesses=8 early=4 hit=0.9 streamed=2
    python -m experiments.papers.pipelined_speculation guesses=8 draft_ticks=2
    python -m experiments.papers.pipelined_speculation tokens=200 seed=1         # a first look
    python -m experiments.papers.pipelined_speculation pipelined=4 acceptance=[0.9] tokens=10_000

Plain decoding, speculation in turn, Mirror-SD (arXiv:2510.13161) and PipeInfer (arXiv:2407.11798) as schedules of one
simulator (`_ticks.py`). They change no token, which is checked here, and no clock is read: a tick is a stage.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys

import jax
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from jaxpar.fields import AtLeast, Between, Each
from jaxpar.io import open_writers, plot_metrics
from jaxpar.mesh import MeshSpec
from jaxpar.types import UsageError

from ..app import runner
from ..app.mesh_flags import refuse_idle
from ..app.run_folder import run_folder
from ..app.runner import identifying, say
from ._ticks import VOCAB, Schedule, Ticks, expected_ticks, simulate

COLUMNS = (
    "acceptance",
    "schedule",
    "simulated",
    "closed form",
    "runs",
    "cancelled",
    "stale",
    "work",
    "in vain",
)


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The pipeline, the draft and how often it is right.

    Attributes:
      stages: Of the target; a run is in each for a tick.
      guesses: Tokens of the draft in a run, where there is one run at a time.
      pipelined: The same where several are in flight.
      draft_ticks: Ticks of a step of the draft, which has a device of its own.
      streamed: Tokens that such a step gives.
      early: Stages of the target after which its early exit says what the draft goes on from.
      hit: How often what it says holds the token that follows.
      acceptance: How often a guess is right, each a row; guesses are so independently of each other.
      tokens: Decoded at each.
    """

    name: str = "ticks"
    stages: int = identifying(8, Between(1, 1024))
    guesses: int = identifying(4, Between(1, 64))
    pipelined: int = identifying(1, Between(1, 64))
    draft_ticks: int = identifying(1, Between(1, 1024))
    streamed: int = identifying(1, AtLeast(1))
    early: int = identifying(4, AtLeast(1))
    hit: float = identifying(0.8, Between(0, 1))
    acceptance: list[float] = identifying(
        legal=Each(Between(0, 1)), default_factory=lambda: [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
    )
    tokens: int = identifying(2000, Between(2, 2**20))

    def __post_init__(self):
        """Refuses a pipeline whose parts do not fit."""
        super().__post_init__()
        if self.early > self.stages:
            raise UsageError(f"early={self.early} is after the last of stages={self.stages}.")
        percents = [round(100 * rate) for rate in self.acceptance]
        if not percents or sorted(set(percents)) != percents:
            raise UsageError(
                f"acceptance={self.acceptance} must rise, by whole percents, as in [0.5,0.8]."
            )
        if (late := self.ticks_of(self.pipelined)) > self.stages:
            raise UsageError(
                f"pipelined={self.pipelined} guesses take the draft {late} ticks, and the pipeline of stages="
                f"{self.stages} would run empty; lower it, or raise streamed."
            )

    def ticks_of(self, guesses: int) -> int:
        """Returns how long the draft is at so many guesses."""
        return self.draft_ticks * -(-guesses // self.streamed)

    def schedules(self) -> dict[str, Schedule]:
        """Returns each schedule by its name."""
        turn = Schedule(self.stages, self.guesses, self.ticks_of(self.guesses))
        flight = Schedule(
            self.stages, self.pipelined, self.ticks_of(self.pipelined), continuous=True
        )
        return {
            "plain": Schedule(self.stages),
            "in_turn": turn,
            "mirrored": turn._replace(ahead=self.stages - self.early),
            "pipelined": flight,
            "not_cancelled": flight._replace(cancel=False),
        }


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("pipelined_speculation", Config, list(flags))


def language(token, position):
    """The target's next token: any function would do."""
    return (5 * token + 3 * position + 1) % VOCAB


def execute(config: Config, folder: pathlib.Path) -> None:
    """Simulates, prints the table, writes metrics.jsonl and plots/ticks.png."""
    with runner.open_devices(config, MeshSpec()), run_folder(folder, config.resume) as folder:
        refuse_idle("a simulation of ticks", ())
        runner.write_start(folder, config)
        say(f"run        {runner.short(folder)}")
        tell(
            config,
            folder,
            {name: run(config, schedule) for name, schedule in config.schedules().items()},
        )


def run(config: Config, schedule: Schedule) -> Ticks:
    """Returns the end of every simulation, one for each rate of acceptance, after comparing its text."""
    agrees, hits = np.random.default_rng(config.seed).random((2, config.tokens))
    decode = jax.vmap(functools.partial(simulate, schedule, language), in_axes=(0, None))
    ended = jax.device_get(decode(agrees < np.array(config.acceptance)[:, None], hits < config.hit))
    greedy = list(itertools.accumulate(range(1, config.tokens), language, initial=1))
    if (ended.text != greedy).any():  # a schedule that changes a token is wrong, whatever it saves
        raise AssertionError(f"{schedule} gives other tokens than the greedy loop")
    return ended


def tell(config: Config, folder: pathlib.Path, found: dict[str, Ticks]) -> None:
    """Prints a row for each schedule and rate, and writes them."""
    columns = (Column(name, justify="right") for name in COLUMNS)
    table = Table(*columns, title="ticks a token", title_justify="left")
    writer = open_writers(
        folder, tuple(config.metrics), None, name=folder.name, config=runner.identity(config)
    )
    for i, rate in enumerate(config.acceptance):
        values = {}
        for name, schedule in config.schedules().items():
            end = jax.tree.map(lambda x, i=i: x[i], found[name])
            ticks, form = end.ticks / (end.length - 1), expected_ticks(schedule, rate, config.hit)
            work, vain = (
                end.busy / end.ticks / config.stages,
                1 - end.kept / end.busy * config.stages,
            )
            values |= {
                f"{name}/ticks": ticks,
                f"{name}/closed_form": form,
                f"{name}/work": work,
                f"{name}/vain": vain,
            }
            counts = map(str, (end.started, end.cancelled, end.stale))
            table.add_row(
                f"{rate:g}",
                name,
                f"{ticks:.3f}",
                f"{form:.3f}",
                *counts,
                f"{work:.2f}",
                f"{vain:.2f}",
            )
        writer.write(round(100 * rate), values)
    writer.close()
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    shown = {"ticks a token": "ticks", "closed form": "closed_form", "stages at work": "work"}
    panels = {
        label: [f"{name}/{key}" for name in found if name != "not_cancelled"]
        for label, key in shown.items()
    }
    plot = folder / "plots" / "ticks.png"
    plot_metrics(folder / "metrics.jsonl", plot, panels, along="acceptance, percent",
                 title=f"{config.stages} stages, {config.guesses} guesses")  # fmt: skip
    say(f"plot       {runner.short(plot)}\nmetrics    {runner.short(folder / 'metrics.jsonl')}")


if __name__ == "__main__":
    runner.launch("pipelined_speculation", Config, execute)
