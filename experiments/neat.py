"""Evolves networks, structure and all, until the task is solved.

    python -m experiments.neat                                               # exclusive or
    python -m experiments.neat task=xor mode=canonical population=150 seed=3 # as in the paper of 2002
    python -m experiments.neat task=multiplexer population=1000 train.steps=500
    python -m experiments.neat task=CartPole-v1 population=100
    python -m experiments.neat preset=double_pole_velocities           # two poles, velocities seen, as in the paper
    python -m experiments.neat preset=double_pole_no_velocities        # as in the paper: damping fitness, 625 starts
    python -m experiments.neat preset=paper_xor num_seeds=100          # how often, and after how many evaluations?
    python -m experiments.neat rates.threshold=3 rates.add_node=0.05
    python -m experiments.neat mode=eval run=runs/neat/... eval_episodes=1000   # a saved champion and its population
    python -m experiments.neat mode=film run=runs/neat/... seed=7

Tasks are xor, multiplexer, regression, and every environment of `envs` and of gymnax whose actions are one number or a
box. The same command resumes a run that was ended, on any mesh; more steps extend it.
"""

import dataclasses
import difflib
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxpar.envs.classic.double_pole import DoublePole, generalisation_starts

from jaxpar import envs
from jaxpar.fields import AtLeast, Between, OneOf, field
from jaxpar.io import ProgressLabels, plot_metrics, plot_stream
from jaxpar.loop import Fit, FitResult, run_until
from jaxpar.mesh import MeshSpec
from jaxpar.neat import (
    CANONICAL,
    FAST,
    RENAMED,
    Episodes,
    GeneralizationInputs,
    GeneralizationTest,
    Neat,
    NeatConfig,
    Rates,
    Table,
    draw_network,
    expressions,
    io_sizes,
    multiplexer,
    to_dot,
    to_json,
    xor,
)
from jaxpar.types import PyTree, UsageError

from .app import runner
from .app.env.champions import evaluate_episodes, evaluate_table, film_champion
from .app.harness import Run, TrainConfig, train
from .app.mesh_flags import check_split, refuse_idle
from .app.run_folder import owning
from .app.runner import identifying, say
from .app.saved_runs import newest_state, saved_run

TABLES: dict[str, Callable[[], dict[str, Any]]] = {
    "xor": xor,
    "multiplexer": lambda: multiplexer(2),
    "regression": lambda: _curve(),
}
GOALS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "DoublePole": 100_000.0, "DoublePole-Discrete": 100_000.0,
         "DoublePole-NoVelocities-Discrete": 100_000.0}  # fmt: skip
"""Mean returns that count as solved, where a task has a usual one."""
STEPS = {"CartPole-v1": 500, "Acrobot-v1": 500}
SEARCHES = ("fast", "canonical")
EXAMINED = "DoublePole-NoVelocities"
"""The task whose best network of each generation is examined, as in the paper, unless another goal is given."""


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The search.

    Attributes:
      task: A table (xor, multiplexer, regression) or an environment.
      mode: How it searches, "fast" or "canonical"; or, of a saved run, "eval", which plays episodes that it was not
        evolved on, or "film", of its champion. Of the flags beside run= those count that say which episodes and how
        many: seed, eval_episodes, frames.
      kind: "feedforward", "recurrent" or "ctrnn".
      sub_steps: Steps of a recurrent or ctrnn network in one call; tables need two or more.
      population: Genomes, on all devices together.
      train: Length and checkpoints; train.steps are generations, at most.
      max_nodes: Capacity of a genome.
      max_conns: Capacity of a genome.
      max_species: At once.
      activations: Functions of nodes; none leaves that to the mode.
      aggregations: Functions of nodes.
      rates: Changes to the mode's rates, such as rates.threshold=3.
      goal: Mean return that solves an environment; inf takes the usual one, if there is any. Without it,
        DoublePole-NoVelocities has Gruau's damping fitness and is solved by the paper's test: 100,000 balanced steps,
        then 1,000 from at least 200 of 625 starts.
      episodes: Of each network, in an environment.
      max_steps: Of an episode; 0 takes the usual number.
      num_seeds: Searches; of more than one, only how each ended is told, with means, and nothing is saved or resumed.
      together: Of these, in one batched program, which ends with the longest; a divisor of num_seeds, 0 means all.
      run: The folder of the run that mode=eval and mode=film read; a film goes there, or to hydra.run.dir.
      eval_episodes: Of the champion, with mode=eval.
      frames: Of a film, a step each.
    """

    name: str = "neat"
    task: str = identifying("xor")
    mode: str = identifying("fast", OneOf((*SEARCHES, "eval", "film")))
    kind: str = identifying("feedforward")
    population: int = identifying(150, AtLeast(2))
    train: TrainConfig = TrainConfig(300, 5, 100)
    max_nodes: int = identifying(32, AtLeast(1))
    max_conns: int = identifying(64, AtLeast(1))
    max_species: int = identifying(20, AtLeast(1))
    activations: list[str] = identifying(default_factory=list)
    aggregations: list[str] = identifying(default_factory=lambda: ["sum"])
    rates: dict[str, float] = identifying(
        default_factory=dict, of=lambda config: CANONICAL if config.mode == "canonical" else FAST
    )
    goal: float = identifying(float("inf"), Between(-math.inf, math.inf))
    episodes: int = identifying(1, AtLeast(1))
    max_steps: int = identifying(0, AtLeast(0))
    sub_steps: int = field(1, AtLeast(1), identity="changed")
    num_seeds: int = field(1, AtLeast(1))
    together: int = field(0, AtLeast(0))
    run: str = ""
    eval_episodes: int = field(100, AtLeast(1))
    frames: int = field(200, AtLeast(1))

    def __post_init__(self):
        """Refuses counts that no search can have, and unknown rates."""
        super().__post_init__()
        if self.run and self.mode in SEARCHES:
            raise UsageError("run is of mode=eval and mode=film; hydra.run.dir= moves a new run.")
        if self.num_seeds % (self.together or self.num_seeds):
            raise UsageError(
                f"together={self.together} must divide num_seeds={self.num_seeds}, or be 0."
            )
        known = [field.name for field in dataclasses.fields(Rates)]
        for name in self.rates:
            if name not in known:
                raise UsageError(f"there is no rates.{name}; legal are {', '.join(known)}.")


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("neat", Config, list(flags))


def make_search(config: Config) -> tuple[Neat, PyTree]:
    """Returns the algorithm and what its steps get: the table, or the environment's parameters."""
    problem: Any
    if config.task in TABLES:
        inputs: Any = TABLES[config.task]()
        num_inputs = inputs["inputs"].shape[1]
        num_outputs = inputs["targets"].shape[1]
        is_curve = config.task == "regression"
        problem = Table("squared", tolerance=0.1) if is_curve else Table("paper", tolerance=0.5)
    elif config.task == EXAMINED and np.isinf(config.goal):
        problem, inputs = _examined(config)
        num_inputs, num_outputs = io_sizes(problem.env, inputs.params, constant=True)
    else:
        env, inputs = _environment(config)
        goal = GOALS.get(config.task, float("inf")) if np.isinf(config.goal) else config.goal
        steps = config.max_steps or STEPS.get(config.task, 100_000)
        num_inputs, num_outputs = io_sizes(env, inputs, constant=True)
        problem = Episodes(env=env, goal=goal, episodes=config.episodes, max_steps=steps)
    rates = (CANONICAL if config.mode == "canonical" else FAST).replace(**config.rates)
    sizes = NeatConfig(
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        population=config.population,
        max_nodes=config.max_nodes,
        max_conns=config.max_conns,
        max_species=config.max_species,
        mode=config.mode,
        kind=config.kind,
        sub_steps=config.sub_steps,
        activations=tuple(config.activations) or None,
        aggregations=tuple(config.aggregations),
        rates=rates,
        widths=(config.max_nodes,)
        if config.num_seeds > 1
        else (),  # a batch would compute every width
    )
    return Neat(sizes, problem), inputs


def _environment(config: Config) -> tuple[Any, PyTree]:
    try:
        return envs.make(config.task)
    except UsageError as error:
        if near := difflib.get_close_matches(config.task, [*TABLES, *envs.names()], n=1):
            hint = f"did you mean {near[0]}?"
        else:
            hint = str(error)
        raise UsageError(
            f"task={config.task!r} is neither of {', '.join(TABLES)} nor an environment; {hint}"
        ) from None


def _examined(config: Config) -> tuple[GeneralizationTest, GeneralizationInputs]:
    searched, judged = (DoublePole(velocities=False, damping=damping) for damping in (True, False))
    params = searched.default_params
    search = Episodes(
        searched, float("inf"), config.episodes, max_steps=config.max_steps or params.max_steps
    )
    inputs = GeneralizationInputs(params, judged.default_params, generalisation_starts())
    return GeneralizationTest(search, judged), inputs


def _curve() -> dict[str, Any]:
    """x^3 - x on 21 points of [-1, 1], scaled into [0, 1], and a constant input."""
    x = np.linspace(-1, 1, 21)
    inputs = np.stack([x, np.ones_like(x)], 1)
    return {
        "inputs": jnp.asarray(inputs, float),
        "targets": jnp.asarray(0.5 + (x**3 - x)[:, None], float),
    }


def execute(config: Config, folder: pathlib.Path) -> Any:
    """Searches under the mesh of the flags, or evaluates or films what a search has saved."""
    with runner.open_devices(config, MeshSpec(data=2, fsdp=2)):
        if config.mode not in SEARCHES:
            return play_saved(config, folder)
        refuse_idle("a search", "population")
        check_split("population", config.population, "population")
        return (search if config.num_seeds == 1 else repeat)(config, folder)


@functools.partial(owning, resume=False)
def repeat(config: Config, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Makes `num_seeds` searches that end when solved, and tells how each ended: a row of `folder/seeds.jsonl` each."""
    neat, inputs = make_search(config)
    runner.write_start(folder, config)

    def one(key):
        init_key, run_key = jax.random.split(key)
        return run_until(neat, run_key, neat.init(init_key, None), inputs, config.train.steps)[0]

    together = config.together or config.num_seeds
    program = jax.jit(jax.vmap(one) if together > 1 else lambda keys: jax.lax.map(one, keys))
    keys, rows = jax.random.split(jax.random.key(config.seed), config.num_seeds), []
    for begin in range(0, config.num_seeds, together):
        state: Any = jax.device_get(program(keys[begin : begin + together]))
        champion = jax.tree.map(lambda x: x[:, 0], state.champion)
        hidden = champion.node_on.sum(1) - neat.config.num_io
        conns = (champion.on & champion.enabled).sum(1)
        for k in range(together):
            row = {"seed": begin + k, "solved": bool(state.solved[k]), "evaluations": int(state.solved_after[k]),
                   "best": float(state.best[k]), "hidden": int(hidden[k]), "connections": int(conns[k]),
                   "species": int(state.species.alive[k].sum()), "refused": int(state.refused[k])}  # fmt: skip
            rows.append(row)
            with (folder / "seeds.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        say(
            f"seeds      {len(rows)} of {config.num_seeds}: {sum(row['solved'] for row in rows)} solved"
        )
    _tell_seeds(rows)
    say(f"rows       {runner.short(folder / 'seeds.jsonl')}")
    return rows


def _tell_seeds(rows: list[dict[str, Any]]) -> None:
    solved = [row for row in rows if row["solved"]]
    say(f"solved     {len(solved)} of {len(rows)}")
    for name in ("evaluations", "hidden", "connections") if solved else ():
        values = np.asarray([row[name] for row in solved], float)
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        say(
            f"{name:11} mean {values.mean():,.2f}, standard error {spread / len(values) ** 0.5:,.2f}, "
            f"standard deviation {spread:,.2f}, median {np.median(values):,.0f}, most {values.max():,.0f}"
        )


@owning
def search(config: Config, folder: pathlib.Path) -> FitResult:
    """Evolves under the ambient mesh, in `folder`, until solved; resumes what is there."""
    neat, inputs = make_search(config)
    length = config.train

    def tell_start(start: int) -> None:
        say(
            f"run        {runner.short(folder)}"
            + (f" (resuming at generation {start})" if start else "")
        )
        say(
            f"task       {config.task}: {neat.config.num_inputs} inputs, {neat.config.num_outputs} outputs"
        )
        say(f"search     {config.mode}, {config.kind}, population {config.population:,}")

    fit = Fit(
        num_steps=length.steps,
        chunk=length.chunk,
        save_every=length.save_every,
        until_done=True,
    )
    run = Run(
        config=config,
        folder=folder,
        fit=fit,
        progress=ProgressLabels(
            description="evolving", unit="generation", shown=("best", "species", "nodes")
        ),
        tell_start=tell_start,
        renamed=RENAMED,
    )
    result = train(neat, lambda _: inputs, run)
    _tell_end(config, folder, neat, inputs, result)
    return result


def play_saved(config: Config, folder: pathlib.Path) -> np.ndarray | pathlib.Path | None:
    """Plays, or with mode=film films, the run in `config.run`, as it was at its newest checkpoint.

    Returns:
      The champion's returns `[E]`, or its fitness `[1]` on a table; or where its film is.
    """
    run, saved, asked = saved_run(config, ("seed", "eval_episodes", "frames"))
    if saved.num_seeds > 1:
        raise UsageError(
            f"{run} has num_seeds={saved.num_seeds}, of which nothing is saved but how each ended."
        )
    neat, inputs = make_search(saved)
    check_split("population", saved.population, "population")
    _, state = newest_state(run, neat, runner.identity(saved), RENAMED, "generation")
    problem: Any = neat.problem
    if isinstance(problem, Table):
        if config.mode == "film":
            raise UsageError(f"mode=film needs an environment, and task={saved.task} is a table; {run}/plots has its "
                             "champion as a picture.")  # fmt: skip
        return evaluate_table(neat, problem, state, inputs)
    episodes, params = (
        (problem.training, inputs.params)
        if isinstance(problem, GeneralizationTest)
        else (problem, inputs)
    )
    if config.mode == "film":
        return film_champion(asked, neat, episodes, state, params, folder / "plots")
    if isinstance(problem, GeneralizationTest):
        _tell_test(asked, neat, problem, jax.device_get(state.champion), inputs)
    return evaluate_episodes(asked, neat, episodes, state, params)


def _tell_end(
    config: Config, folder: pathlib.Path, neat: Neat, inputs: PyTree, result: FitResult
) -> None:
    state: Any = result.state
    if result.interrupted:
        return
    count = int(state.solved_after) if bool(state.solved) else int(state.evaluations)
    verdict = "solved" if bool(state.solved) else "unsolved"
    say(f"{verdict:10} after {count // config.population} generations, {count:,} evaluations; best fitness so far "
        f"{float(state.best):.6g}")  # fmt: skip
    if int(state.refused) or int(state.invalid):
        say(f"note       {int(state.refused):,} changes did not fit into max_nodes={config.max_nodes} and "
            f"max_conns={config.max_conns}; {int(state.invalid):,} fitnesses were no finite numbers")  # fmt: skip
    if not bool(state.solved):
        say(f"           go on with train.steps={2 * config.train.steps}")
    champion = jax.device_get(state.champion)
    if isinstance(neat.problem, GeneralizationTest):
        _tell_test(config, neat, neat.problem, champion, inputs)
    for name, text in expressions(neat.config, champion).items():
        say(f"           {name} = {text}")
    if jax.process_index():
        return
    plots, metrics = folder / "plots", folder / "metrics.jsonl"
    panels = {"fitness": ("train/best", "train/fitness_max", "train/fitness_mean"), "species": ("train/species",),
              "size": ("train/nodes", "train/conns")}  # fmt: skip
    title = f"{config.task}: the champion, fitness {float(state.best):.4g}"
    plots.mkdir(exist_ok=True)
    (folder / "champion.json").write_text(
        to_json(neat.config, champion, metadata={"fitness": float(state.best)})
    )
    (folder / "champion.dot").write_text(to_dot(neat.config, champion))
    plot_metrics(metrics, plots / "fitness.png", panels, along="generation",
                 title=f"{config.task}: {config.mode}, population {config.population:,}")  # fmt: skip
    plot_stream(metrics, plots / "species.png", "train/size_", ylabel="members by species",
                along="generation", title=f"{config.task}: networks of each species, a colour each")  # fmt: skip
    draw_network(neat.config, champion, plots / "champion.png", title=title)
    for what in ("plots", "metrics.jsonl", "champion.json", "champion.dot", "checkpoints"):
        say(f"{what:14} {runner.short(folder / what)}")


def _tell_test(
    config: Config,
    neat: Neat,
    problem: GeneralizationTest,
    champion: PyTree,
    inputs: GeneralizationInputs,
) -> None:
    result = jax.jit(lambda key: problem.test(key, neat.express(champion), inputs))(
        jax.random.key(config.seed)
    )
    say(f"test       the champion balances {int(result.steps):,} of {problem.long_steps:,} steps; it passes "
        f"{int(result.passed)} of {len(inputs.levels.x)} starts")  # fmt: skip


if __name__ == "__main__":
    runner.launch("neat", Config, execute)
