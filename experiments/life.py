"""Runs a world in which agents evolve, and films it.

    python -m experiments.life                                     # 128 agents with LSTMs, 32 robots
    python -m experiments.life brain=neat                          # their networks grow
    python -m experiments.life agents=1024 robots=256 size=256 births=64
    python -m experiments.life train.steps=200 seed=1              # a first look
    python -m experiments.life laws.upkeep=0.5 laws.fee=8         # a harder life
    python -m experiments.life mode=film run=runs/life/... frames=300   # what comes after a saved step

The same command resumes a run that was ended, on any mesh; more steps extend it. Every step's book of energy balances
to the unit, or the run ends.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, Between, OneOf, field
from jaxpar.io import ProgressLabels, plot_metrics
from jaxpar.life import FIRST_LAWS, Brain, Jitter, Laws, Lstm, World, WorldState, draw_world
from jaxpar.loop import Fit, FitResult
from jaxpar.mesh import MeshSpec
from jaxpar.types import Array, PRNGKey, UsageError

from .app import runner
from .app.env.neat_brains import NeatBrain
from .app.env.world_film import Frame, Frames, frame_interval, plot_lineages, save_film
from .app.harness import Run, TrainConfig, train
from .app.mesh_flags import check_split, refuse_idle
from .app.run_folder import owning
from .app.runner import identifying, say
from .app.saved_runs import newest_state, saved_run

PANELS = {
    "energy a step": ("train/regrowth", "train/heat", "train/eaten"),
    "energy held": ("train/energy_agents", "train/energy_robots", "train/energy_cells"),
    "agents": ("train/alive", "train/lineages"),
    "diversity": ("train/diversity",),
}
USUAL_LAWS = {"first": FIRST_LAWS, "lasting": Laws()}


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The world.

    Attributes:
      brain: "lstm" or "neat", networks whose structure evolves.
      agents: Slots for agents, on all devices together.
      robots: Programmable bodies.
      size: Cells of a side.
      lattice: Waves of the ground along a side; they divide size.
      window: Cells of a side that an agent sees, odd.
      births: At most, in a step, and at most `agents`; as many come when all are dead.
      hidden: Units of an LSTM.
      mutation: Standard deviation of what a child's weights differ by; in NEAT of a changed weight.
      laws: Changes to the laws, such as laws.upkeep=0.5.
      usual_laws: Laws where `laws` names none: "lasting", under which populations last, or "first", those of older
        runs. Empty is what the run in the folder began with, and lasting in a new run.
      train: Length and checkpoints; train.steps are the world's.
      gif: Whether to film the run, from its first to its last chunk, and to draw its lineages.
      frames: Of the film, at most; the run's folder keeps them.
      mode: "train", or "film": each step after the newest checkpoint of the run in run=, of whose settings all but
        frames count.
      run: That run's folder; the film goes there, or to hydra.run.dir.
    """

    name: str = "life"
    brain: str = identifying("lstm", OneOf(("lstm", "neat")))
    agents: int = identifying(128, AtLeast(1))
    robots: int = identifying(32, AtLeast(2))
    size: int = identifying(64, AtLeast(1))
    lattice: int = identifying(4, AtLeast(1))
    window: int = identifying(9, AtLeast(1))
    births: int = identifying(16, AtLeast(1))
    hidden: int = identifying(64, AtLeast(1))
    mutation: float = identifying(0.02, Between(0, 10))
    laws: dict[str, float] = identifying(default_factory=dict)
    usual_laws: str = field("", OneOf(("", *USUAL_LAWS)), identity="changed")
    train: TrainConfig = TrainConfig(2000, 50, 500)
    gif: bool = True
    frames: int = field(150, AtLeast(1))
    mode: str = field("train", OneOf(("train", "film")))
    run: str = ""

    def __post_init__(self):
        """Refuses laws that there are none of."""
        super().__post_init__()
        if self.run and self.mode == "train":
            raise UsageError("run is of mode=film; hydra.run.dir= moves a new run.")
        if self.births > self.agents:
            raise UsageError(f"births={self.births} must be at most agents={self.agents}.")
        known = [each.name for each in dataclasses.fields(Laws)]
        for name in self.laws:
            if name not in known:
                raise UsageError(f"there is no laws.{name}; legal are {', '.join(known)}.")


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("life", Config, list(flags))


def make_world(config: Config, unnamed: str = "lasting") -> World:
    """Returns the world of a configuration; `unnamed` are its laws where it names none."""
    brain: Brain = NeatBrain(std=config.mutation)
    if config.brain == "lstm":
        brain = Lstm(config.hidden, mutation=Jitter(config.mutation))
    return World(
        brain, config.agents, num_robots=config.robots, size=config.size, lattice=config.lattice, window=config.window,
        seen_agents=min(8, config.agents), max_births=config.births, newcomers=config.births,
        laws=dataclasses.replace(USUAL_LAWS[config.usual_laws or unnamed], **config.laws),
    )  # fmt: skip


def with_usual_laws(config: Config, folder: pathlib.Path) -> Config:
    """Returns the configuration with the usual laws of this folder; empty ones are of older runs.

    A resumed run keeps its first laws. Older runs have recorded none, and their identity has none,
    so that their checkpoints are found.
    """
    if config.usual_laws:
        return config
    if (folder / "config.yaml").is_file():
        recorded = runner.load(folder, Config).usual_laws
        return dataclasses.replace(config, usual_laws=recorded)
    return dataclasses.replace(config, usual_laws="lasting")


def execute(config: Config, folder: pathlib.Path) -> Any:
    """Lives under the mesh of the flags."""
    with runner.open_devices(config, MeshSpec(data=2, fsdp=2)):
        refuse_idle("a world", "population")
        if config.mode == "film":
            return film_saved(config, folder)
        check_split("agents", config.agents, "population")
        return evolve(config, folder)


def film_saved(config: Config, folder: pathlib.Path) -> pathlib.Path:
    """Films the steps after the newest checkpoint of `config.run`; returns the path of the film."""
    run, saved, asked = saved_run(config, ("frames",))
    check_split("agents", saved.agents, "population")
    world = make_world(saved, unnamed="first")
    step, state = newest_state(run, world, runner.identity(saved), {}, "step")
    return _save_film(asked, folder / "plots", world, state, step)


@owning
def evolve(config: Config, folder: pathlib.Path) -> FitResult:
    """Runs the world under the ambient mesh, in `folder`; resumes what is there."""
    config = with_usual_laws(config, folder)
    world = make_world(config, unnamed="first")
    length = config.train
    interval = frame_interval(length.steps, length.chunk, config.frames)
    frames = Frames(folder / "frames", interval, _scale(config))

    def tell_start(start: int) -> None:
        say(
            f"run        {runner.short(folder)}" + (f" (resuming at step {start})" if start else "")
        )
        say(f"world      {config.size} x {config.size} cells, {config.agents:,} slots for agents with {config.brain} "
            f"brains, {config.robots:,} robots")  # fmt: skip

    run = Run(
        config,
        folder,
        Fit(length.steps, length.chunk, eval_every=frames.interval, save_every=length.save_every),
        ProgressLabels(description="living", shown=("alive", "lineages", "heat")),
        tell_start,
        watch=frames.keep if config.gif else None,
        check=_check_book,
        extending="goes on with the world as it is",
    )
    result = train(world, lambda _: None, run)
    if not result.interrupted:
        _tell_end(config, folder, frames, result)
    return result


def _check_book(step: int, metrics: Mapping[str, float]) -> None:
    if any(value for name, value in metrics.items() if name.endswith("imbalance")):
        raise AssertionError(f"the book of energy does not balance at step {step}")


def _scale(config: Config) -> int:
    """Pixels of a cell's side in films."""
    return max(1, 384 // config.size)


def _tell_end(config: Config, folder: pathlib.Path, frames: Frames, result: FitResult) -> None:
    state: WorldState = result.state
    plots = folder / "plots"
    if config.gif and not frames.has(result.step):  # a finished run of older code
        frames.keep(result.step, state)
    alive = np.asarray(jax.device_get(state.agents.alive))
    lineages = len(np.unique(np.asarray(state.agents.lineage)[alive]))
    say(f"after      {result.step:,} steps {alive.sum():,} agents live, of {lineages:,} of {int(state.lineages):,} "
        f"lineages; {float(state.ledger.heat.units()):,.1f} units of energy become heat a step")  # fmt: skip
    if jax.process_index():
        return
    kept = frames.read(result.step)
    if kept and config.gif:
        save_film(kept, plots / "life.gif")
        plot_lineages(kept, plots / "lineages.png", folder.name)
        say(f"film           {runner.short(plots / 'life.gif')}")
    plot_metrics(folder / "metrics.jsonl", plots / "life.png", PANELS, title=folder.name)
    for what in ("plots", "metrics.jsonl", "checkpoints"):
        say(f"{what:14} {runner.short(folder / what)}")


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _film(
    key: PRNGKey, state: WorldState, start: int, world: World, frames: int, scale: int
) -> tuple[Array, Array, Array]:
    """Goes on after step `start`; returns of each step a picture, who is alive, and lineages."""

    def body(state, step):
        state, _ = world.step(jax.random.fold_in(key, step), state, None)
        return state, (draw_world(state, scale), state.agents.alive, state.agents.lineage)

    return jax.lax.scan(body, state, start + jnp.arange(frames))[1]


def _save_film(
    config: Config, plots: pathlib.Path, world: World, state: WorldState, start: int
) -> pathlib.Path:
    """Films what comes after step `start`, a frame a step, on all processes; the first writes it."""
    key = jax.random.key(config.seed)
    images, alive, lineages = jax.device_get(
        _film(key, state, start, world, config.frames, _scale(config))
    )
    frames = []
    for number, image in enumerate(images):
        frames.append(Frame(start + 1 + number, image, lineages[number][alive[number]]))
    path = plots / "after.gif"
    if jax.process_index() == 0:
        save_film(frames, path)
        say(f"film           {runner.short(path)}")
    return path


if __name__ == "__main__":
    runner.launch("life", Config, execute)
