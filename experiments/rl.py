"""Learns in an environment: many seeds side by side, each a whole run; what they return, and a film of one.

    python -m experiments.rl                                                   # PPO on CartPole, four seeds
    python -m experiments.rl env=Acrobot-v1 num_seeds=8 rates.learning_rate=1e-3
    python -m experiments.rl preset=memory memory=para_gru num_steps=1024
    python -m experiments.rl preset=memory memory=transformer
    python -m experiments.rl preset=minatar env=Asterix-MinAtar
    python -m experiments.rl env=Spread-3 central=true num_envs=64             # MAPPO; without `central`, IPPO
    python -m experiments.rl algorithm=dqn rates.reward_scale=0.1
    python -m experiments.rl preset=pendulum_sac                               # a tenth of PPO's steps
    python -m experiments.rl fields.lag=4                                      # actors four updates late, V-trace
    python -m experiments.rl num_seeds=8 exploit_every=20                      # a population
    python -m experiments.rl preset=rl2                                        # RL^2: the return of each trial
    python -m experiments.rl preset=self_play                                  # against its own past
    python -m experiments.rl preset=cube_zero                                  # AlphaZero: it learns what a search says
    python -m experiments.rl mode=eval run=runs/rl/... eval_episodes=1000      # a saved policy plays again
    python -m experiments.rl mode=eval run=runs/rl/... search.simulations=64   # and leads a search
    python -m experiments.rl mode=film run=runs/rl/... seed=7 frames=400

`algorithm` is one of those below, `memory` none or a sequence layer of the library, which is then trained over whole
rollouts at once. The same command resumes a run that was ended, on any mesh; more steps extend it, if rates are not
annealed over them (anneal=false).
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.env import capabilities
from jaxpar.fields import AtLeast, Each, OneOf, field
from jaxpar.io import ProgressLabels, plot_metrics, plot_seeds, read_jsonl
from jaxpar.loop import Fit, FitResult
from jaxpar.mesh import MeshSpec
from jaxpar.nn.cells import METHODS, solver
from jaxpar.nn.mixers import CELLS
from jaxpar.rl import (
    RENAMED,
    A2c,
    Against,
    AlphaZero,
    Dqn,
    Items,
    LastActionReward,
    Pbt,
    Ppo,
    Pqn,
    Sac,
    Seeds,
    SelfPlay,
    Td3,
    memory_of,
)
from jaxpar.rollout import NextStep
from jaxpar.types import PyTree, UsageError

from .app import runner
from .app.env.environment import changes, make_world
from .app.env.policies import FILMED, PolicyRun, older_prng, save_film
from .app.env.returns import (
    compared,
    comparison_lines,
    evaluation_against_itself,
    evaluation_by_search,
    evaluation_by_trial,
    evaluation_returns,
    evaluation_while_learning,
    in_play,
)
from .app.harness import Run, TrainConfig, train
from .app.mesh_flags import check_split, refuse_idle
from .app.run_folder import owning
from .app.runner import identifying, say
from .app.saved_runs import newest_state, saved_run
from .app.solver_flags import method_to_keep

ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (Ppo, {}),
    "a2c": (A2c, {}),
    "pqn": (Pqn, {}),
    "dqn": (Dqn, {}),
    "vdn": (Pqn, {"decomposition": "vdn"}),
    "qmix": (Pqn, {"decomposition": "qmix"}),
    "td3": (Td3, {}),
    "sac": (Sac, {}),
    "alpha_zero": (AlphaZero, {}),
}
OLDER_RATES = {new[6:]: old[6:] for new, old in RENAMED.items() if new.startswith("rates/")}
OLDER_FIELDS = {"gradient_steps": "gradients", "decomposition_size": "mixer_size"}
MODES = ("train", "eval", "film")


def _older(flag: str, names: dict[str, str], changes: dict[str, Any]) -> dict[str, Any]:
    """What stood in identities for a flag's changes to fields that were renamed since."""
    return {flag: {names.get(name, name): value for name, value in changes.items()}}


PERTURBED = ("learning_rate",)


def _perturbed(names: list[str]) -> dict[str, Any]:
    """What stands in identities: nothing where it is as always, as in runs from before there was a choice."""
    return {} if tuple(names) == PERTURBED else {"perturb": list(names)}


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """What is learned, and how.

    Attributes:
      env: Name of an environment, ours or gymnax's.
      env_fields: Changes to its fields, such as env_fields.size=16.
      params: Changes to its parameters, such as params.gravity=5.
      last_action_reward: Whether observations include the last action and reward (RL^2, with a memory).
      algorithm: ppo, a2c, pqn, dqn, vdn, qmix, td3, sac or alpha_zero.
      num_seeds: Learners side by side, which differ in their keys alone.
      exploit_every: Updates after which the worst quarter of the seeds goes on from the best with other rates; or 0.
      perturb: Names of the rates that then change, and in which seeds differ from the start.
      train: Length and checkpoints; train.steps are environment steps of each seed, rounded up to whole chunks of
        updates.
      num_envs: Environments of each; 0 is the algorithm's own number, and so below.
      num_steps: Steps of a rollout.
      epochs: Times that each rollout is gone through.
      minibatches: Parts of a rollout.
      rates: Changes to the algorithm's numbers, such as rates.entropy_coef=0.
      anneal: Whether the learning rate falls to 0 over the run; else as rates.anneal says.
      fields: Changes to other fields of the algorithm, of alpha_zero to its search too, such as fields.simulations=64.
      self_play: Changes to play against its own past, such as self_play.pool=16, which is then what it learns by; none:
        all agents learn together.
      central: Whether values read all agents' observations.
      encoder: Widths of layers before the memory.
      hidden: Widths of layers after it; none are the algorithm's own, and so below.
      activation: tanh, relu or silu.
      items: Changes to the encoder of attention over the environment's items, such as items.width=64, which then stands
        in for all layers named here; none: no such encoder.
      conv: Channels of 3 x 3 convolutions that read boards, such as conv=[16].
      layer_norm: Whether layers are normalised.
      memory: none, or a sequence layer of the library, such as gru, para_gru, min_gru, aaren, transformer.
      memory_size: Its units.
      method: Method that solves its recurrence, a name of `jaxpar.nn.cells.solvers`; auto leaves it to the platform.
      method_taken: Method that `method=auto` took when the run began; filled in by the run, which keeps it.
      prng: Keys of environments: env, or batch, which is faster and gives other numbers.
      eval_every: Updates between evaluations while it learns, a multiple of train.chunk; 0 means at the end alone.
      eval_episodes: Of each seed, acting by the likeliest action.
      eval_steps: Most steps of such an episode.
      beside: Whether to tell at the end what chance and scripted play return, where there is such play.
      gif: Whether to film the first seed's agent, where the environment can be rendered.
      frames: Of the film.
      mode: "train", or of a saved run "eval", whole episodes, or "film". Of the flags beside run= those count that say
        which episodes and how many: seed, eval_episodes, eval_steps, frames.
      run: The folder of the run that mode=eval and mode=film read; a film goes there, or to hydra.run.dir.
      search: With mode=eval, changes to the tree search that the saved policy and value then lead, such as
        search.simulations=64; none: likeliest actions.
    """

    name: str = "rl"
    env: str = identifying("CartPole-v1")
    env_fields: dict[str, Any] = identifying(default_factory=dict)
    params: dict[str, Any] = identifying(default_factory=dict)
    last_action_reward: bool = identifying(False, before=lambda on: {"recall": on})
    algorithm: str = identifying("ppo")
    num_seeds: int = identifying(4, AtLeast(1))
    exploit_every: int = identifying(
        0, AtLeast(0), before=lambda every: {"exploit_every": every} if every else {}
    )
    perturb: list[str] = identifying(default_factory=lambda: list(PERTURBED), before=_perturbed)
    train: TrainConfig = TrainConfig(500_000, 10, 0)
    num_envs: int = identifying(0, AtLeast(0))
    num_steps: int = identifying(0, AtLeast(0))
    epochs: int = identifying(0, AtLeast(0))
    minibatches: int = identifying(0, AtLeast(0))
    rates: dict[str, float] = identifying(
        default_factory=dict, before=functools.partial(_older, "rates", OLDER_RATES)
    )
    anneal: bool = identifying(True)
    fields: dict[str, Any] = identifying(
        default_factory=dict, before=functools.partial(_older, "fields", OLDER_FIELDS)
    )
    self_play: dict[str, Any] = identifying(
        default_factory=dict, before=lambda how: {"self_play": how} if how else {}
    )
    central: bool = identifying(False)
    encoder: list[int] = identifying(legal=Each(AtLeast(1)), default_factory=list)
    hidden: list[int] = identifying(legal=Each(AtLeast(1)), default_factory=list)
    activation: str = identifying("")
    conv: list[int] = identifying(legal=Each(AtLeast(1)), default_factory=list)
    layer_norm: bool | None = identifying(None)
    items: dict[str, Any] = identifying(
        default_factory=dict, before=lambda items: {"items": items} if items else {}
    )
    memory: str = identifying("none")
    memory_size: int = identifying(64, AtLeast(1))
    method: str = identifying("auto")
    method_taken: str = field("", OneOf(("", *METHODS)))
    prng: str = identifying("env", before=older_prng)
    eval_every: int = field(0, AtLeast(0))
    eval_episodes: int = field(64, AtLeast(1))
    eval_steps: int = field(1000, AtLeast(1))
    beside: bool = False
    gif: bool = True
    frames: int = field(200, AtLeast(1))
    mode: str = "train"
    run: str = ""
    search: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Refuses counts that no run can have, and unknown names."""
        super().__post_init__()
        for name, legal in (("algorithm", ALGORITHMS), ("method", METHODS), ("mode", MODES)):
            if getattr(self, name) not in legal:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is unknown; legal are {', '.join(legal)}."
                )
        if self.search and self.mode != "eval":
            raise UsageError(
                "search is of mode=eval; a search to learn from is algorithm=alpha_zero."
            )
        if self.run and self.mode == "train":
            raise UsageError("run is of mode=eval and mode=film; hydra.run.dir= moves a new run.")


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("rl", Config, list(flags))


def make_learner(config: Config) -> tuple[Any, PyTree]:
    """Returns the learner of one seed, and the environment's parameters."""
    env: Any
    env, params = make_world(config.env, config.env_fields, config.params)
    env = LastActionReward(env) if config.last_action_reward else env
    kind, fixed = ALGORITHMS[config.algorithm]
    usual: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
    chosen: dict[str, Any] = {"prng": config.prng, **fixed} if "prng" in usual else dict(fixed)
    if "prng" not in usual and config.prng != "env":
        raise UsageError(
            f"prng={config.prng} does not apply: algorithm={config.algorithm} has none."
        )
    for name in ("num_envs", "num_steps", "epochs", "minibatches", "central"):
        value = getattr(config, name)
        if value and name not in usual:
            raise UsageError(
                f"{name}={value} does not apply: algorithm={config.algorithm} has none."
            )
        chosen |= {name: value} if value else {}
    asked = {
        name: getattr(config, name)
        for name in ("encoder", "hidden", "activation", "conv", "layer_norm")
    }
    asked = {
        name: tuple(x) if isinstance(x, list) else x
        for name, x in asked.items()
        if x not in ("", [], None)
    }
    if config.items:
        network = _item_network(config, kind, asked)
    else:
        network = dataclasses.replace(usual["network"], memory=config.memory, memory_size=config.memory_size,
                                      method=solver(config.method_taken or config.method), **asked)  # fmt: skip
    searches = dataclasses.asdict(usual["search"]) if config.algorithm == "alpha_zero" else {}
    free = {
        name: value for name, value in usual.items() if isinstance(value, bool | int | float | str)
    } | searches
    _refuse_older("fields", OLDER_FIELDS, config.fields, free)
    asked = changes("fields", f"algorithm={config.algorithm}", free, config.fields)
    chosen |= {name: value for name, value in asked.items() if name not in searches}
    if searches:
        changed = {name: value for name, value in asked.items() if name in searches}
        chosen["search"] = dataclasses.replace(usual["search"], **changed)
    if config.self_play:
        if config.algorithm not in ("ppo", "a2c"):
            raise UsageError(
                f"self_play does not apply: algorithm={config.algorithm} has none; legal: ppo, a2c."
            )
        if isinstance(network, Items):
            raise UsageError("self_play and items exclude each other: rivals act by a Network.")
        env = Against(env, network)
    learner = kind(env, network, **chosen)
    usual = dataclasses.asdict(learner.rates)
    _refuse_older("rates", OLDER_RATES, config.rates, usual)
    rates = changes("rates", f"algorithm={config.algorithm}", usual, config.rates)
    if config.anneal and "anneal" in rates:
        raise UsageError(
            "rates.anneal needs anneal=false: with anneal=true the rate falls over the whole run."
        )
    if config.anneal:
        rates["anneal"] = float(num_updates(config, learner))
    return dataclasses.replace(learner, rates=learner.rates.replace(**rates)), params


def with_method(config: Config, folder: pathlib.Path) -> Config:
    """Returns the configuration with the method that `method=auto` takes in this folder and on this machine."""
    if config.items or config.memory not in CELLS or config.method != "auto" or config.method_taken:
        return config
    learner: Any = make_learner(config)[0]
    memory: Any = memory_of(config.memory, config.memory_size)
    name = method_to_keep(
        folder, Config, "method_taken", [memory.cell], learner.num_envs, learner.num_steps
    )
    return dataclasses.replace(config, method_taken=name)


def _item_network(config: Config, kind: Any, asked: dict[str, Any]) -> Items:
    """The network of items; refuses what it has no use for."""
    if kind not in (Ppo, A2c, AlphaZero):
        raise UsageError(
            f"items={config.items} does not apply: algorithm={config.algorithm} has none; legal: ppo, a2c, alpha_zero."
        )
    spare = sorted(asked.keys() - {"activation"}) + (["memory"] if config.memory != "none" else [])
    if spare:
        raise UsageError(
            f"{spare[0]} does not apply: a network of items has none; leave it out, or items."
        )
    usual = {field.name: field.default for field in dataclasses.fields(Items)}
    chosen = changes("items", "a network of items", usual, config.items)
    return Items(**({"activation": asked["activation"]} if asked else {}), **chosen)


def _refuse_older(
    flag: str, names: dict[str, str], changes: dict[str, Any], usual: dict[str, Any]
) -> None:
    """Refuses changes to fields by their older names with today's."""
    for name in changes.keys() - usual.keys():
        for new in (new for new, old in names.items() if old == name and new in usual):
            raise UsageError(f"{flag}.{name} is called {flag}.{new} now.")


def side_by_side(config: Config, learner: Any, params: PyTree) -> Seeds:
    """Returns the learners of all seeds, by `exploit_every` a population, by `self_play` each against its past."""
    if config.self_play:
        if config.exploit_every:
            raise UsageError(
                "self_play and exploit_every exclude each other: a pool belongs to one learner."
            )
        usual = {
            field.name: field.default
            for field in dataclasses.fields(SelfPlay)
            if field.name != "learner"
        }
        learner = SelfPlay(learner, **changes("self_play", "self-play", usual, config.self_play))
    if not config.exploit_every:
        return Seeds(learner, config.num_seeds, params)
    return Pbt(
        learner,
        config.num_seeds,
        params,
        period=config.exploit_every,
        perturb=tuple(config.perturb),
    )


def num_updates(config: Config, learner: Any) -> int:
    """Returns how many updates make `train.steps` environment steps: whole chunks, so that one program does it."""
    length = config.train
    return -(-length.steps // (learner.num_envs * learner.num_steps * length.chunk)) * length.chunk


def execute(config: Config, folder: pathlib.Path) -> FitResult | np.ndarray | pathlib.Path | None:
    """Learns under the mesh of the flags; writes metrics.jsonl, checkpoints, plots/returns.png and plots/agent.gif.

    With mode=eval it plays a saved run's episodes and writes nothing; with mode=film it writes plots/agent.gif.
    """
    with runner.open_devices(config, MeshSpec(data=2, fsdp=2)):
        return learn(config, folder) if config.mode == "train" else play_saved(config, folder)


@owning
def learn(config: Config, folder: pathlib.Path) -> FitResult:
    """Learns under the ambient mesh, in `folder`; resumes what is there."""
    config = with_method(config, folder)
    learner, params = make_learner(config)
    refuse_idle("learning", "envs")
    check_split("num_envs", learner.num_envs, "envs")
    seeds, updates = side_by_side(config, learner, params), num_updates(config, learner)
    per_update = learner.num_envs * learner.num_steps
    warmup, capacity = (
        (learner.warmup, learner.capacity) if isinstance(learner, Dqn | Td3 | Sac) else (0, 0)
    )
    if updates * per_update < warmup:
        raise UsageError(
            f"train.steps={config.train.steps} end before the warmup of {warmup} experiences, and nothing would be "
            "learned; give more steps or a smaller fields.warmup."
        )
    run = Run(
        config,
        folder,
        Fit(updates, config.train.chunk, config.eval_every, config.train.save_every),
        ProgressLabels(
            description="learning", unit="update", shown=("return_mean",),
            tokens_per_step=per_update * config.num_seeds, token="env steps",
        ),
        functools.partial(_tell_start, config, folder, learner, updates),
        metadata={"steps": config.train.steps} if config.anneal else {},  # which the rates depend on
        renamed=RENAMED,
        evaluate=functools.partial(evaluation_while_learning, config, learner, in_play(learner, params))
        if config.eval_every else None,
        check=functools.partial(_check, min(warmup + per_update, capacity)),
    )  # fmt: skip
    result = train(seeds, lambda _: params, run)
    _tell_end(config, folder, learner, in_play(learner, params), result)
    return result


def play_saved(config: Config, folder: pathlib.Path) -> np.ndarray | pathlib.Path | None:
    """Plays the run in `config.run` by likeliest actions or searches; returns `[S]` returns, or where its film is."""
    run, saved, asked = saved_run(config, ("seed", "eval_episodes", "eval_steps", "frames"))
    asked = dataclasses.replace(asked, mode=config.mode, search=config.search)
    learner, params = make_learner(saved)
    metadata = runner.identity(saved) | ({"steps": saved.train.steps} if saved.anneal else {})
    _, state = newest_state(run, side_by_side(saved, learner, params), metadata, RENAMED, "update")
    params = in_play(learner, params)
    if config.mode == "film":
        return _film_agent(asked, learner, params, state, folder / "plots")
    plain = evaluation_returns(asked, learner, params, state)
    _tell_returns(asked, "return", "likeliest actions", plain)
    if not config.search:
        return plain
    searched = evaluation_by_search(asked, learner, params, state)
    _tell_returns(
        asked, "searched", " ".join(f"{name}={x}" for name, x in config.search.items()), searched
    )
    return searched


def _film_agent(
    config: Config, learner: Any, params: PyTree, state: PyTree, plots: pathlib.Path
) -> pathlib.Path | None:
    """Films the first seed's agent by its likeliest actions; None where there is nothing to see."""
    agent = learner.agent(greedy=True)
    policy_run = PolicyRun(learner.env, params, agent, FILMED, NextStep(), config.prng)
    first = jax.tree.map(lambda x: x[0], jax.device_get(state.weights))
    return save_film(config.seed, policy_run, config.env, plots / "agent.gif", config.frames, fps=20, weights=first,
                     carry=agent.first_carry())  # fmt: skip


def _tell_returns(config: Config, name: str, how: str, returns: np.ndarray) -> None:
    error = returns.std(ddof=1) / np.sqrt(len(returns)) if len(returns) > 1 else float("nan")
    say(f"{name:10} {returns.mean():.5g}" + (f" ± {error:.2g} (standard error over seeds)" if len(returns) > 1 else "")
        + f", {config.eval_episodes} episodes a seed, {how}: " + ", ".join(f"{x:.4g}" for x in returns))  # fmt: skip


def _check(warm: int, step: int, metrics: Mapping[str, float]) -> None:
    """Ends a run whose gradient, of any seed, is no number; with a buffer there is none until it is warm."""
    if (
        not np.isfinite(metrics["train/grad_norm"])
        and metrics.get("train/buffer_size", np.inf) >= warm
    ):
        raise UsageError(
            f"the gradient is not finite after update {step}; lower rates.learning_rate."
        )
    if metrics["train/skipped"]:
        raise UsageError(
            f"the new weights are not finite after update {step}; lower rates.learning_rate."
        )


def _tell_start(
    config: Config, folder: pathlib.Path, learner: Any, updates: int, start: int
) -> None:
    agents = capabilities(learner.env).num_agents
    count = f", {agents} agents" if agents else ""
    per_update = learner.num_envs * learner.num_steps
    say(f"run        {runner.short(folder)}" + (f" (resuming at update {start})" if start else ""))
    say(f"env        {config.env}{count}")
    solved = ""
    if (config.method_taken or config.method) != "auto":
        solved = f" solved by method={config.method_taken or config.method}"
    say(
        f"learner    {config.algorithm}, memory={config.memory}{solved}, {config.num_seeds} seed(s)"
    )
    say(f"updates    {updates:,} of {learner.num_envs:,} environments x {learner.num_steps:,} steps: "
        f"{updates * per_update:,} steps a seed")  # fmt: skip


def _tell_end(
    config: Config, folder: pathlib.Path, learner: Any, params: PyTree, result: FitResult
) -> None:
    if result.interrupted:
        return
    returns = evaluation_returns(config, learner, params, result.state)
    _tell_returns(
        config,
        "return",
        "likeliest actions" + ", rivals by chance" * bool(config.self_play),
        returns,
    )
    if config.self_play:
        itself = evaluation_against_itself(config, learner, params, result.state)
        _tell_returns(config, "itself", "against its own weights", itself)
    for line in (
        comparison_lines(returns, *compared(config, learner, params)) if config.beside else ()
    ):
        say(line)
    trials = evaluation_by_trial(config, learner, params, result.state)
    if trials is not None:
        spread = (
            trials.std(0, ddof=1) / np.sqrt(len(trials))
            if len(trials) > 1
            else np.full(len(trials[0]), np.nan)
        )
        say("trials     " + ", ".join(f"{x:.3g} ± {e:.2g}" for x, e in zip(trials.mean(0), spread, strict=True))
            + " (standard errors over seeds)")  # fmt: skip
    if result.metrics.get("train/converged", 1.0) < 1:
        say("note       the memory's solver did not converge in the last update (train/converged); method=sequential "
            "has none")  # fmt: skip
    if jax.process_index():
        return
    metrics, plots = folder / "metrics.jsonl", folder / "plots"
    rows = [row for row in read_jsonl(metrics) if "train/seed_00" in row]
    per_update = learner.num_envs * learner.num_steps
    steps = np.array([row["step"] * per_update for row in rows])
    values = np.array(
        [[row.get(f"train/seed_{i:02}", np.nan) for row in rows] for i in range(config.num_seeds)],
        float,
    )
    if np.isfinite(values).all(0).any():
        plot_seeds({f"{config.algorithm}, memory={config.memory}": (steps, values)}, plots / "returns.png",
                   xlabel="environment steps of a seed", ylabel="return of episodes", title=config.env)  # fmt: skip
    else:
        say(
            f"note       no curve: not every seed has finished an episode within {int(steps[-1]):,} steps"
        )
    if trials is not None:
        plot_seeds({f"{config.algorithm}, memory={config.memory}": (1 + np.arange(len(trials[0])), trials)},
                   plots / "trials.png", xlabel="trial of an episode", ylabel="return of the trial",
                   title=config.env)  # fmt: skip
    panels = {"policy": ("train/entropy", "train/clip_fraction", "train/approx_kl"),
              "value": ("train/explained_variance",), "gradient": ("train/grad_norm",),
              "Q": ("train/q_mean", "train/q_loss", "train/critic_loss"),
              "temperature": ("train/temperature",), "solved": ("train/solved", "train/ended")}  # fmt: skip
    plot_metrics(
        metrics,
        plots / "learning.png",
        panels,
        along="update",
        title=f"{config.env}, {config.algorithm}",
    )
    if config.gif:
        _film_agent(config, learner, params, result.state, plots)
    for path in (plots, metrics, folder / "checkpoints"):
        say(f"{path.name:14} {runner.short(path)}")


if __name__ == "__main__":
    runner.launch("rl", Config, execute)
