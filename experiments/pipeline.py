"""Compares and draws schedules of pipelines: how long devices wait, and what they keep, at given costs.

    python -m experiments.pipeline                                        # every schedule, about 10 s
    python -m experiments.pipeline devices=8 microbatches=16 backward=1.3 weights=0.7 latency=0.1
    python -m experiments.pipeline 'schedules=[1f1b]' text=true                # as letters
    python -m experiments.pipeline devices=2 chunks=4 latency=0.5
    python -m experiments.pipeline 'schedules=[1f1b,zb_v,searched]' cap=8 softmax=2 rows=1 lockstep=true

Nothing is trained: schedules are tables, and time is counted. `experiments.lm pipeline=` runs them. PipeDream has the
table of 1f1b, once for many steps; `jaxpar.pipeline.PipeDream` runs that.
"""

import dataclasses
import json
import pathlib
import sys

from rich.console import Console
from rich.table import Column, Table

from jaxpar.fields import AtLeast, Each, OneOf
from jaxpar.mesh import MeshSpec
from jaxpar.pipeline import (
    PIPELINES,
    Schedule,
    TaskCosts,
    Timing,
    draw_schedule,
    loop,
    named_schedule,
    schedule_text,
    search_schedule,
    simulate_schedule,
    vee,
    with_vocabulary,
)
from jaxpar.types import UsageError

from .app import runner
from .app.mesh_flags import refuse_idle
from .app.run_folder import run_folder
from .app.runner import identifying, say

NAMES = (*PIPELINES, "searched", "searched_v")
COLUMNS = ("schedule", "time", "idle", "kept", "kept, of layers", "messages", "chunks")


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The pipeline and the time of its tasks, in any unit: of all layers of a device and one microbatch.

    Attributes:
      devices: P, stages in a row.
      microbatches: m, parts of a batch.
      chunks: Groups of layers on each device, where a schedule leaves it open; each takes its share of the time.
      schedules: Which are compared, in order; "searched" and "searched_v" are found for these costs, of one and of two
        groups on each device. Empty for all.
      forward: Of F, a forward pass.
      backward: Of B, the gradient of the input.
      weights: Of W, the gradient of the weights.
      softmax: Of S, a device's share of a head that is split over all; 0 for no such head.
      rows: Of T, the gradient of its rows.
      latency: Of a message.
      cap: Microbatches of a group that a searched schedule may keep on a device; 0 for any number.
      lockstep: Whether all devices keep step, as the program does.
      text: Prints each schedule as letters.
    """

    name: str = "schedules"
    devices: int = identifying(4, AtLeast(1))
    microbatches: int = identifying(8, AtLeast(1))
    chunks: int = identifying(2, AtLeast(1))
    schedules: list[str] = identifying(legal=Each(OneOf(NAMES)), default_factory=list)
    forward: float = identifying(1.0, AtLeast(0))
    backward: float = identifying(1.0, AtLeast(0))
    weights: float = identifying(1.0, AtLeast(0))
    softmax: float = identifying(0.0, AtLeast(0))
    rows: float = identifying(0.0, AtLeast(0))
    latency: float = identifying(0.0, AtLeast(0))
    cap: int = identifying(0, AtLeast(0))
    lockstep: bool = identifying(False)
    text: bool = False

    def __post_init__(self):
        """Refuses tasks that take no time."""
        super().__post_init__()
        if not self.forward + self.backward + self.weights:
            raise UsageError(
                "forward, backward and weights are all 0, so that no schedule takes any time."
            )

    def costs(self, chunks: int) -> TaskCosts:
        """Returns the time of a task, with so many groups of layers on each device."""
        return TaskCosts(
            F=self.forward / chunks,
            B=self.backward / chunks,
            W=self.weights / chunks,
            S=self.softmax,
            T=self.rows,
        )

    def schedule(self, name: str) -> Schedule:
        """Returns a schedule by its name."""
        if name.startswith("searched"):
            placement = vee(self.devices) if name == "searched_v" else loop(self.devices)
            costs = self.costs(len(placement) // self.devices)
            found = search_schedule(
                placement, self.microbatches, costs, self.cap or None, latency=self.latency
            )
        else:
            found = named_schedule(name, self.devices, self.microbatches, self.chunks)
        chunks = len(found.placement) // found.devices // found.copies
        return (
            with_vocabulary(found, self.costs(chunks), self.latency)
            if self.has_head(found)
            else found
        )

    def has_head(self, schedule: Schedule) -> bool:
        """Whether the head is split over the devices; of two copies of a model it is not."""
        return bool(self.softmax + self.rows) and schedule.copies == 1


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("pipeline", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> None:
    """Simulates, prints the table, writes schedules.json and a plot of each schedule."""
    with runner.open_devices(config, MeshSpec()), run_folder(folder, config.resume) as folder:
        refuse_idle("a simulation of schedules", ())
        runner.write_start(folder, config)
        say(f"run        {runner.short(folder)}")
        tell(
            config, folder, {name: run(config, folder, name) for name in config.schedules or NAMES}
        )


def run(config: Config, folder: pathlib.Path, name: str) -> tuple[Schedule, Timing]:
    """Returns a schedule and its times, and draws it."""
    schedule = config.schedule(name)
    chunks = len(schedule.placement) // schedule.devices // schedule.copies
    options = dict(latency=config.latency, lockstep=config.lockstep)
    draw_schedule(schedule, folder / "plots" / f"{name}.png", config.costs(chunks), **options)
    return schedule, simulate_schedule(schedule, config.costs(chunks), **options)


def tell(config: Config, folder: pathlib.Path, found: dict[str, tuple[Schedule, Timing]]) -> None:
    """Prints a row for each schedule, and writes them."""
    columns = (Column(name, justify="left" if name == "schedule" else "right") for name in COLUMNS)
    table = Table(
        *columns,
        title=f"{config.devices} devices, {config.microbatches} microbatches",
        title_justify="left",
    )
    rows = []
    for name, (schedule, timing) in found.items():
        chunks, kept = len(schedule.placement) // schedule.devices, max(timing.held)
        row = dict(
            schedule=name, time=timing.makespan, idle=timing.idle_fraction, kept=kept, chunks=chunks
        )
        rows.append(
            row
            | dict(
                layers=kept * schedule.copies / chunks,
                messages=timing.messages,
                span=max(timing.span),
            )
        )
        numbers = (
            f"{timing.makespan:.2f}",
            f"{timing.idle_fraction:.1%}",
            str(kept),
            f"{rows[-1]['layers']:.2f}",
        )
        table.add_row(name, *numbers, str(timing.messages), str(chunks))
        if config.text:
            say(f"{schedule}\n{schedule_text(schedule)}\n")
    (folder / "schedules.json").write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    best = min(rows, key=lambda row: row["time"])
    say(f"least time {best['schedule']}, idle {best['idle']:.1%}")
    say(
        f"table      {runner.short(folder / 'schedules.json')}\nplots      {runner.short(folder / 'plots')}"
    )


if __name__ == "__main__":
    runner.launch("pipeline", Config, execute)
