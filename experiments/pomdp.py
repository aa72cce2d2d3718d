"""Plans under partial observability: episodes of belief, planner and environment, what they return, a film of one.

    python -m experiments.pomdp                                                     # RockSample(7, 8), 32 episodes
    python -m experiments.pomdp env=Tag planner=pomcp planner.num_simulations=64 episodes=200 max_steps=60
    python -m experiments.pomdp env=Tag planner=pomcp trees=4 planner.num_simulations=16    # four trees a belief
    python -m experiments.pomdp env=LightDark planner.iterations=128 belief.num_particles=4000
    python -m experiments.pomdp env=Tiger planner.leaf=zero planner.eta=1 judge=true    # and what its decisions lose
    python -m experiments.pomdp env=MARS-20-20 belief.kind=rocks budget_s=0.1 episodes=4 max_steps=90
    python -m experiments.pomdp env=Navigation-13 belief.num_particles=20000 belief.flips=0.001 budget_s=0.1 episodes=4
    python -m experiments.pomdp env=file:tiger.POMDP planner=exact belief.kind=exact
    python -m experiments.pomdp env=file:tiger.POMDP planner=qmdp belief.kind=exact
    python -m experiments.pomdp env=Tiger planner=exact planner.policy=tiger.policy belief.kind=exact
    python -m experiments.pomdp mode=eval run=runs/pomdp/... seed=1 episodes=200    # the same planner, other episodes
    python -m experiments.pomdp mode=film run=runs/pomdp/... seed=7

With budget_s=0 each plan makes planner.iterations batches, and all episodes of a batch run in one compiled program;
with a budget plans stop at the clock, one episode after another. There are no checkpoints: the same command writes its
folder anew, resume=false writes another one.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Environment, capabilities, gif, is_adapter
from jaxpar.fields import AtLeast, OneOf, field
from jaxpar.io import ProgressLabels, open_progress, open_writers, plot_histograms
from jaxpar.mesh import MeshSpec
from jaxpar.pomdp import (
    AnytimePlanner,
    Belief,
    BeliefUpdater,
    Despot,
    Exact,
    ExactBelief,
    FixedReference,
    ParticleBelief,
    Pft,
    Pomcp,
    Pomcpow,
    RootParallel,
    Vopp,
    discount_of,
    dishonesty,
    save_policy,
    simulate,
)
from jaxpar.types import PRNGKey, PyTree, UsageError

from .app import runner
from .app.env.environment import changes, make_world
from .app.env.pomdp_film import Move, film, moves, planned
from .app.env.regrets import Judge
from .app.env.rock_beliefs import BELIEF, make_updater
from .app.env.solved_policies import ExactPolicy, QmdpPolicy, load_model, tabular_of
from .app.mesh_flags import refuse_idle
from .app.run_folder import run_folder
from .app.runner import identifying, say
from .app.saved_runs import saved_run

PLANNERS: dict[str, Any] = {
    "vopp": Vopp,
    "fixed_reference": FixedReference,
    "pomcp": Pomcp,
    "despot": Despot,
    "pft": Pft,
    "pomcpow": Pomcpow,
    "exact": ExactPolicy,
    "qmdp": QmdpPolicy,
}
SOLVED = ("exact", "qmdp")
"""Planners that solve a finite model before the first episode, and search nothing later."""


COUNTED = ("depleted", "overflow", "illegal", "unweighed")
"""What is summed over an episode's steps."""

UNSET: dict[str, Any] = {
    "discount": 0.95, "max_edges": 1024, "default": 0, "upper": "reward", "max_reward": 10.0, "k_actions": 4.0,
    "keyed": True,
}  # fmt: skip
"""Fields of planners that are None unless given, with values of the kind that they take."""


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The planned episodes.

    Attributes:
      env: Name of an environment, or file:path of a finite model, in .POMDP or .pomdpx format.
      env_fields: Changes to its fields, such as env_fields.layout=3.
      params: Changes to its parameters, such as params.discount=0.9.
      planner: A preset by its name, and changes to the planner's fields, such as planner.num_simulations=512.
      trees: Independent trees on each belief, merged at their roots: less noise, at as many times the
        cost; all planners but despot take them.
      belief: belief.kind is "particles", "exact" for finite models, or "rocks", which is exact for
        RockSample and MARS. Particles have belief.num_particles, belief.resample_below (the share of
        them below which the effective sample size has them drawn again) and, on maps of Navigation,
        belief.flips, the chance that an unknown cell changes in a particle and step.
      episodes: How many.
      max_steps: Most steps of each.
      budget_s: Seconds a plan; 0 makes planner.iterations batches instead.
      judge: Whether to say also what the decisions lose against the best policy, exactly, in a model of at most 64
        states that has `tabular`; the error is then far smaller than that of returns. Needs budget_s=0.
      at_once: Most episodes that are planned together, in one program; more fill an accelerator.
      gif: Whether to film the first episode.
      mode: "plan", or, with the settings of the run in run=, "eval", other episodes, of which nothing is written, or
        "film", of one. Of the flags beside run= those count that say which episodes and how many: seed, episodes,
        max_steps, budget_s, judge, at_once.
      run: The folder of the run whose settings mode=eval and mode=film read; a film goes there, or to hydra.run.dir.
    """

    name: str = "pomdp"
    env: str = identifying("RockSample-7-8")
    env_fields: dict[str, Any] = identifying(default_factory=dict)
    params: dict[str, Any] = identifying(default_factory=dict)
    planner: dict[str, Any] = identifying(
        default_factory=lambda: {"kind": "vopp"},
        of=lambda config: PLANNERS.get(config.planner.get("kind"), Vopp),
    )
    trees: int = field(1, AtLeast(1), identity="changed")
    belief: dict[str, Any] = identifying(default_factory=dict)
    episodes: int = identifying(32, AtLeast(1))
    max_steps: int = identifying(40, AtLeast(1), before=lambda steps: {"steps": steps})
    budget_s: float = identifying(0.0, AtLeast(0))
    judge: bool = identifying(False)
    at_once: int = field(32, AtLeast(1))
    gif: bool = True
    mode: str = field("plan", OneOf(("plan", "eval", "film")))
    run: str = ""

    def __post_init__(self):
        """Refuses counts that no run can have."""
        super().__post_init__()
        if self.run and self.mode == "plan":
            raise UsageError("run is of mode=eval and mode=film; hydra.run.dir= moves a new run.")
        if self.judge and self.budget_s:
            raise UsageError(
                "judge=true judges plans of a fixed number of batches; leave budget_s=0."
            )


@dataclasses.dataclass(frozen=True)
class Setting:
    """Who plans what with which beliefs."""

    env: Environment
    params: PyTree
    planner: AnytimePlanner | Exact
    updater: BeliefUpdater


@dataclasses.dataclass(frozen=True)
class Results:
    """Of E episodes, NumPy arrays `[E]`; `seconds` are those of planning them all, `latency` of a step's plan.

    `promised` is the planner's value of the first belief; `optimism` is that less the return and what a cut `left`.
    With `judge=true`, `losses` are sums of discounted regrets, and `best` is what the best policy earns.
    """

    returns: np.ndarray
    lengths: np.ndarray
    depleted: np.ndarray
    overflow: np.ndarray
    illegal: np.ndarray
    unweighed: np.ndarray
    promised: np.ndarray
    optimism: np.ndarray
    seconds: float
    latency: float
    losses: np.ndarray | None = None
    best: float = float("nan")


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("pomdp", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> Any:
    """Plans, on one device; writes metrics.jsonl, plots/returns.png and plots/episode.gif."""
    with runner.open_devices(config, MeshSpec()):
        refuse_idle("planning", ())
        if config.mode != "plan":
            return play_saved(config, folder)
        setting = make_setting(config)
        with run_folder(folder, config.resume) as folder:
            runner.write_start(folder, config)
            _tell_start(config, folder, setting)
            found = run(config, folder, setting)
            _tell_end(config, found)
            _draw(config, folder, setting, found)


def play_saved(config: Config, folder: pathlib.Path) -> Results | pathlib.Path | None:
    """Plans other episodes by the settings of the run in `config.run`, or films one; returns either."""
    run, _, asked = saved_run(
        config, ("seed", "episodes", "max_steps", "budget_s", "judge", "at_once")
    )
    setting = make_setting(asked)
    _tell_start(asked, run, setting)
    if config.mode == "film":
        return save_film(asked, folder, setting)
    found = play(asked, setting, lambda done, rows: None)
    _tell_end(asked, found)
    return found


def make_setting(config: Config) -> Setting:
    """Returns the environment, the planner and the belief updater of the flags."""
    kind = config.planner.get("kind")
    asked = {name: value for name, value in config.planner.items() if name != "kind"}
    if kind not in PLANNERS:
        raise UsageError(f"planner.kind={kind!r} is unknown; legal are {', '.join(PLANNERS)}.")
    env, params = _open_model(config)
    if kind in SOLVED or config.belief.get("kind") == "exact":
        params = tabular_of(env, params)
        env = params.environment
    usual = _usual_options(PLANNERS[kind])
    options = changes("planner", kind, usual, asked)
    has_heuristic = capabilities(env).heuristic is not None
    if "leaf" not in asked and usual.get("leaf") == "heuristic" and not has_heuristic:
        options["leaf"] = _leaf_by_play(config.env)
    planner = PLANNERS[kind](**options)
    if kind in SOLVED:
        _check_solved(config)
        planner = planner.solve(params)
    elif config.trees > 1:
        planner = RootParallel(planner, trees=config.trees)
    discount_of(params, planner.discount)
    if is_adapter(env):
        raise UsageError(
            f"{config.env} hides its states, and planners need to draw them; take one of envs.names()."
        )
    return Setting(
        env,
        params,
        planner,
        make_updater(env, **changes("belief", config.env, BELIEF, config.belief)),
    )


def _usual_options(planner: type) -> dict[str, Any]:
    """Returns the default of each field of a planner, or a value of its kind where that is None."""
    usual = {field.name: field.default for field in dataclasses.fields(planner)}
    return usual | {name: value for name, value in UNSET.items() if usual.get(name, value) is None}


def _leaf_by_play(env: str) -> str:
    """Returns the kind of leaf values where there is no heuristic, and reports it."""
    say(f"note: {env} has no heuristic, so leaves are valued by random play: planner.leaf=rollout.")
    return "rollout"


def _open_model(config: Config) -> tuple[Any, Any]:  # as `make_world`
    """Returns the environment of the flags, named or from a file, and its parameters."""
    model = load_model(config.env)
    if model is None:
        return make_world(config.env, config.env_fields, config.params)
    changes("env_fields", config.env, {}, config.env_fields)
    own = changes("params", config.env, {"discount": float(model.discount)}, config.params)
    if own:
        discount = discount_of(None, own["discount"])
        changed = jnp.asarray(discount, model.discount.dtype)
        model = dataclasses.replace(model, discount=changed)
    return model.environment, model


def _check_solved(config: Config) -> None:
    """Rejects what a planner that searches nothing cannot use."""
    kind = config.planner["kind"]
    if config.budget_s:
        raise UsageError(
            f"budget_s={config.budget_s:g}: planner={kind} searches nothing; expected budget_s=0."
        )
    if config.trees > 1:
        raise UsageError(f"trees={config.trees}: planner={kind} grows no tree; expected trees=1.")


def run(config: Config, folder: pathlib.Path, setting: Setting) -> Results:
    """Plans all episodes, with lines of metrics.jsonl on the way, and returns the results."""
    writer = open_writers(
        folder, tuple(config.metrics), None, name=folder.name, config=runner.identity(config)
    )
    try:
        labels = ProgressLabels(description="planning", unit="episode")
        with open_progress(config.episodes, labels=labels) as progress:

            def told(done: int, rows: dict[str, np.ndarray]) -> None:
                mean, error = mean_and_error(rows["returns"])
                values = {"episodes/return": mean, "episodes/length": float(rows["lengths"].mean())}
                values["episodes/optimism"] = float(np.mean(rows["optimism"]))
                writer.write(
                    done, values | ({"episodes/error": error} if np.isfinite(error) else {})
                )
                progress.update(done, {"return": mean})

            return play(config, setting, told)
    finally:
        writer.close()


def play(
    config: Config, setting: Setting, told: Callable[[int, dict[str, np.ndarray]], None]
) -> Results:
    """Plans all episodes; `told` gets how many are done and what came of these."""
    return (clocked if config.budget_s else batched)(config, setting, told)


def batched(config: Config, setting: Setting, told: Any) -> Results:
    """Plans episodes in batches of equal size by one program; episode i has `fold_in(key, i)`."""
    size = min(config.at_once, config.episodes)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(config.seed), i))(
        jnp.arange(-(-config.episodes // size) * size)
    )
    env, params, planner, updater = setting.env, setting.params, setting.planner, setting.updater
    judge = Judge(env, params) if config.judge else None

    @jax.jit
    def play(keys: PRNGKey) -> dict[str, jax.Array]:
        got = jax.vmap(lambda key: simulate(key, env, params, planner, updater, config.max_steps))(
            keys
        )
        sums = {name: jnp.sum(got._asdict()[name], axis=1) for name in COUNTED}
        sums |= {
            "promised": got.value[:, 0],
            "optimism": got.value[:, 0] - got.discounted_return - got.left,
        }
        done = {"actions": got.action, "obs": got.obs, "live": got.live} if judge else {}
        return sums | done | {"returns": got.discounted_return, "lengths": got.length}

    began = time.perf_counter()
    program = play.lower(keys[:size]).compile()
    say(f"compiled   in {time.perf_counter() - began:.1f} s, counted apart")
    rows, seconds = [], 0.0
    for first in range(0, config.episodes, size):
        began = time.perf_counter()
        rows.append(jax.device_get(program(keys[first : first + size])))
        seconds += time.perf_counter() - began
        whole = {
            name: np.concatenate([row[name] for row in rows])[: config.episodes] for name in rows[0]
        }
        told(min(first + size, config.episodes), whole)
    kept: dict[str, Any] = {
        name: whole[name] for name in ("returns", "lengths", "promised", "optimism", *COUNTED)
    }
    found = Results(
        **kept,
        seconds=seconds,
        latency=seconds / len(rows) / config.max_steps,
    )
    if judge is None:
        return found
    losses = judge.losses(whole["actions"], whole["obs"], whole["live"])
    return dataclasses.replace(found, losses=losses, best=judge.value)


def clocked(config: Config, setting: Setting, told: Any) -> Results:
    """Episodes one by one, each plan until `budget_s` after its start; the first plan compiles and is made twice."""
    planner = cast(AnytimePlanner, setting.planner)  # `make_setting` lets no other have a budget
    env, params = setting.env, setting.params
    discount, warm = float(discount_of(params, planner.discount)), False

    def plan(key: PRNGKey, belief: Belief) -> tuple:
        nonlocal warm
        if not warm:
            began = time.monotonic()
            planner.plan_until(
                key, env, params, belief, began + 3600 if planner.iterations < 3 else began + 1e-3
            )
            say(f"compiled   in {time.monotonic() - began:.1f} s, counted apart")
            warm = True
        began = time.monotonic()
        action, info = planner.plan_until(key, env, params, belief, began + config.budget_s)
        action = jax.block_until_ready(action)
        return action, info, None, time.monotonic() - began

    rows: dict[str, list] = {
        name: [] for name in ("returns", "lengths", "promised", "optimism", *COUNTED)
    }
    spent = []
    for i in range(config.episodes):
        key = jax.random.fold_in(jax.random.key(config.seed), i)
        made = list(moves(key, env, params, setting.updater, config.max_steps, plan))
        spent += [move.seconds for move in made]
        rows["returns"].append(sum(move.reward * discount**t for t, move in enumerate(made)))
        rows["lengths"].append(len(made))
        rows["depleted"].append(
            sum(bool(move.evidence.depleted) and not move.terminated for move in made)
        )
        rows["overflow"].append(sum(int(move.info.overflow) for move in made))
        rows["illegal"].append(sum(is_illegal(move, env, params) for move in made))
        rows["unweighed"].append(
            sum(int(move.evidence.invalid) for move in made if not move.terminated)
        )
        promised, left = promised_and_left(made, discount)
        rows["promised"].append(promised)
        rows["optimism"].append(promised - rows["returns"][-1] - left)
        told(i + 1, {name: np.asarray(row) for name, row in rows.items()})
    kept: dict[str, Any] = {name: np.asarray(row) for name, row in rows.items()}
    return Results(**kept, seconds=sum(spent), latency=float(np.mean(spent)))


def promised_and_left(made: list[Move], discount: float) -> tuple[float, float]:
    """What the planner promised at the start, and what was left of that at the cut, as `jaxpar.pomdp.Episode.left`."""
    if not made:
        return 0.0, 0.0
    last, weight = made[-1], discount ** (len(made) - 1)
    left = 0.0 if last.terminated else weight * (float(last.info.value) - last.reward)
    return float(made[0].info.value), left


def is_illegal(move: Move, env: Environment, params: PyTree) -> bool:
    """Whether the environment's mask refuses what was done."""
    mask = capabilities(env).action_mask
    return mask is not None and not bool(mask(move.state, params)[move.action])


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean and its standard error, NaN of a single value."""
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return float(values.mean()), float(error)


def save_film(config: Config, folder: pathlib.Path, setting: Setting) -> pathlib.Path | None:
    """Films the first episode; returns the GIF, or None where the environment has no `render`."""
    if capabilities(setting.env).render is None:
        say(f"note: no film, since {config.env} has no render.")
        return None
    env, params, planner = setting.env, setting.params, setting.planner
    key, draw_key = jax.random.fold_in(jax.random.key(config.seed), 0), jax.random.key(config.seed)
    made = list(
        moves(key, env, params, setting.updater, config.max_steps, planned(planner, env, params))
    )
    path = folder / "plots" / "episode.gif"
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = film(made, env, params, draw_key, f"{config.env}, {config.planner['kind']}")
    gif(frames, path, fps=1.5)
    say(f"film       {runner.short(path)}")
    return path


def _tell_start(config: Config, folder: pathlib.Path, setting: Setting) -> None:
    planner = setting.planner
    fields = vars(planner)
    if isinstance(planner, RootParallel):
        fields = vars(planner.planner) | {"trees": planner.trees}
    shown = "  ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    how = "by vectors over the states"
    if isinstance(planner, Exact):
        shown = (
            f"{len(planner.alphas):,} vectors, value at the start "
            f"[{float(planner.lower):.6g}, {float(planner.upper):.6g}]"
        )
    elif config.budget_s:
        how = f"{config.budget_s:g} s a plan"
    else:
        how = f"{planner.iterations} batches a plan"
    belief = "exact, rock by rock"
    if isinstance(setting.updater, ParticleBelief):
        belief = f"{setting.updater.num_particles:,} particles"
    elif isinstance(setting.updater, ExactBelief):
        belief = "exact, state by state"
    say(f"run        {runner.short(folder)}")
    say(f"env        {config.env}: {setting.env.action_space(setting.params).n} actions, discount "
        f"{float(discount_of(setting.params, setting.planner.discount)):g}")  # fmt: skip
    say(f"planner    {config.planner['kind']}: {shown}")
    say(f"belief     {belief}")
    say(f"plan       {config.episodes:,} episodes of at most {config.max_steps} steps, {how}, on one "
        f"{jax.devices()[0].device_kind} device")  # fmt: skip


def _tell_end(config: Config, found: Results) -> None:
    mean, error = mean_and_error(found.returns)
    steps = int(found.lengths.sum())
    together = 1 if config.budget_s else min(config.at_once, config.episodes)
    say(f"return     {mean:.4g} ± {error:.2g} (standard error of {len(found.returns):,} episodes, discounted from "
        f"discount^0), mean length {found.lengths.mean():.3g}")  # fmt: skip
    optimism, error = mean_and_error(found.optimism)
    promised = float(found.promised.mean())
    say(f"promise    {promised:.4g} at the start, {optimism:+.3g} ± {error:.2g} beside what was earned "
        "(standard error of the same episodes)")  # fmt: skip
    if why := dishonesty(optimism, error, promised):
        say(f"note: {why}.")
    if found.losses is not None:
        loss, error = mean_and_error(found.losses)
        say(f"loss       {loss:.3g} ± {error:.2g} of the best policy's {found.best:.4g} (standard error of "
            "the episodes' exact regrets)")  # fmt: skip
    say(f"time       {found.latency:.4g} s a step of {together} episode(s) together, "
        f"{found.seconds / max(steps, 1):.4g} s a step made; {found.seconds:.1f} s in all")  # fmt: skip
    for name, what in (
        (
            "depleted",
            "updates left no particle that explains what was seen; raise belief.num_particles",
        ),
        ("overflow", "simulated steps found no room in the tree; raise planner.max_nodes"),
        ("illegal", "actions were illegal"),
        (
            "unweighed",
            "likelihoods were no numbers, and their particles were left out; mend log_likelihood",
        ),
    ):
        if total := int(vars(found)[name].sum()):
            say(f"note: {total:,} {what}.")


def _draw(config: Config, folder: pathlib.Path, setting: Setting, found: Results) -> None:
    plot = folder / "plots" / "returns.png"
    panels = {"discounted return": found.returns, "steps": found.lengths}
    plot_histograms(panels, plot, title=f"{config.env}, {config.planner['kind']}: {len(found.returns):,} episodes",
                    counted="episodes")  # fmt: skip
    if config.gif:
        save_film(config, folder, setting)
    files = {"plot": plot, "metrics": folder / "metrics.jsonl"}
    if isinstance(setting.planner, Exact):
        files["policy"] = folder / "policy.alpha"
        save_policy(setting.planner, files["policy"])
    for what, path in files.items():
        say(f"{what:10} {runner.short(path)}")


if __name__ == "__main__":
    runner.launch("pomdp", Config, execute)
