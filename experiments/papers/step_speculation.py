"""Sums in steps by a small model whose doubtful lines a larger one writes again, and what that saves.

    python -m experiments.papers.step_speculation                                  # two CPU cores, some five minutes
    python -m experiments.papers.step_speculation score=target                     # the same models, another judge
    python -m experiments.papers.step_speculation terms=6 digits=2                 # longer sums
    python -m experiments.papers.step_speculation thresholds=[0.9] alphas=[0.2]    # one row of each table
    python -m experiments.papers.step_speculation target_width=512 target_layers=8 target_steps=5000 terms=8

A line is kept if its score is at least a threshold (SSR, arXiv:2505.15340), or if its conformal p-value among the same
step of the questions before it is at least alpha (ATTS, arXiv:2509.15148). Both models are trained at the first call.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpar.decode import Prompts, Sampling
from jaxpar.experimental.conformal import conformal_rejects, empty_calibration
from jaxpar.fields import AtLeast, Between, Each, OneOf, Positive, field
from jaxpar.io import ProgressLabels, open_writers, plot_metrics
from jaxpar.lm import (
    AttentionConfig,
    LMConfig,
    MlpConfig,
    OptimizerConfig,
    Trainer,
    apply,
    generate,
    num_params,
)
from jaxpar.loop import Fit
from jaxpar.mesh import MeshSpec, place_rows
from jaxpar.types import PyTree, UsageError

from ..app import runner
from ..app.harness import Run, train
from ..app.mesh_flags import refuse_idle
from ..app.run_folder import owning
from ..app.runner import identifying, say
from ..app.sequences import sums

COLUMNS = ("rule", "level", "rewritten", "right", "target tokens", "of the target's FLOPs")


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The two models, their task, and who judges.

    Attributes:
      terms: Numbers of a sum, one more than its steps.
      digits: Of each at most.
      target_layers: Of the larger model.
      target_width: Of its residual stream, a multiple of 32.
      target_steps: Of its training.
      draft_layers: Of the smaller model.
      draft_width: Of its residual stream, a multiple of 32.
      draft_steps: Of its training.
      learning_rate: Highest, of both.
      batch_size: Sums of a training step.
      questions: Asked of both; none was trained on but by chance.
      score: Whose mean log-probability of a line's bytes is its score: the "target" reads every line, the "draft" has
        its own at hand.
      thresholds: Of the mean probability, exp(score); over 1 every line is written again.
      alphas: Shares of the lines to be written again.
    """

    name: str = "sums"
    terms: int = identifying(4, Between(2, 10))
    digits: int = identifying(1, Between(1, 9))
    target_layers: int = identifying(2, AtLeast(1))
    target_width: int = identifying(64, AtLeast(32))
    target_steps: int = identifying(600, AtLeast(1))
    draft_layers: int = identifying(1, AtLeast(1))
    draft_width: int = identifying(32, AtLeast(32))
    draft_steps: int = identifying(550, AtLeast(1))
    learning_rate: float = identifying(3e-3, Positive())
    batch_size: int = identifying(64, AtLeast(1))
    questions: int = field(500, Between(1, 2**16))
    score: str = field("draft", OneOf(("draft", "target")))
    thresholds: list[float] = field(
        legal=Each(AtLeast(0)), default_factory=lambda: [0.8, 0.9, 0.95, 0.99]
    )
    alphas: list[float] = field(legal=Each(Between(0, 1)), default_factory=lambda: [0.1, 0.2, 0.4])

    def __post_init__(self):
        """Refuses widths that heads do not divide."""
        super().__post_init__()
        for name in ("target_width", "draft_width"):
            if getattr(self, name) % 32:
                raise UsageError(f"{name}={getattr(self, name)} must be a multiple of 32.")

    @property
    def room(self) -> int:
        """Bytes of a line at most: one more than those of a right one."""
        return sums.line_length(self.digits) + 1

    def sizes(self, name: str) -> LMConfig:
        """Returns the shape of "target" or "draft"."""
        layers, width = getattr(self, f"{name}_layers"), getattr(self, f"{name}_width")
        longest = (self.digits + 1) * self.terms + self.room * self.terms
        return LMConfig(
            vocab_size=sums.VOCAB,
            max_seq_len=longest,
            num_layers=layers,
            embed_dim=width,
            attention=AttentionConfig(num_heads=width // 32),
            mlp=MlpConfig(dim=3 * width),
            positions="learned",
            dtype="float32",
        )


class Answers(NamedTuple):
    """Texts int32 [B, S], their lengths [B], lines that were written again [B, J], tokens of either model [B]."""

    texts: np.ndarray
    lengths: np.ndarray
    rewritten: np.ndarray
    target_tokens: np.ndarray
    draft_tokens: np.ndarray


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("step_speculation", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> Any:
    """Trains what is not trained, asks, prints the table, writes metrics.jsonl and plots/steps.png."""
    with runner.open_devices(config, MeshSpec()):
        refuse_idle("speculation by steps", ())
        return run(config, folder)


@owning
def run(config: Config, folder: pathlib.Path) -> Any:
    """Does so under the ambient mesh."""
    runner.write_start(folder, config)
    models, params = {name: config.sizes(name) for name in ("target", "draft")}, {}
    for name, model in models.items():
        result = learn(config, folder / name, name, model)
        if result.interrupted:
            return result
        params[name] = result.state.params
    tell(config, folder, models, params)


def learn(config: Config, folder: pathlib.Path, name: str, model: LMConfig):
    """Trains a model on sums of its own, in a folder of its own; goes on where it was."""
    steps = getattr(config, f"{name}_steps")
    trainer = Trainer(
        model, OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=20), steps
    )

    def batches(step: int) -> PyTree:
        rows = sums.batch(
            np.random.default_rng([config.seed, step]),
            config.batch_size,
            config.terms,
            config.digits,
        )
        return place_rows(
            lambda some: {key: value[some] for key, value in rows.items()}, config.batch_size
        )

    def told(start):
        return say(f"{name:10} {num_params(model):,} parameters, {steps} steps from {start} on")

    return train(
        trainer,
        batches,
        Run(config, folder, Fit(steps), ProgressLabels(description=f"training the {name}"), told),
    )


rejects = jax.jit(conformal_rejects)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def step(room: int, target: LMConfig, draft: LMConfig, params: dict[str, PyTree], texts, lengths):
    """Writes the next line of every text by either model; returns both, and the draft's by either's log-probability."""
    sampling = Sampling(room, temperature=0, stop_token=ord("\n"))
    prompts = Prompts(texts, lengths)
    lines = [
        generate(jax.random.key(0), params[name], prompts, model, sampling)
        for name, model in (("target", target), ("draft", draft))
    ]
    own, line = lines
    width, made = texts.shape[1], line.lengths - lengths
    new = jnp.arange(room)[None] < made[:, None]
    law = jax.nn.log_softmax(apply(params["target"], line.tokens[:, :width], target))
    places = jnp.minimum(lengths[:, None] + jnp.arange(room)[None], width - 1)
    rows = jnp.arange(len(texts))[:, None]
    read = jnp.where(new, law[rows, places - 1, line.tokens[rows, places]], 0)
    scores = {"target": read.sum(1) / made, "draft": line.log_probs.sum(1) / made}
    return tuple((each.tokens[:, :width], each.lengths) for each in (own, line)), scores


def answer(
    config: Config, models: dict, params: dict, numbers: np.ndarray, rule: str, level: float
) -> Answers:
    """Answers sums step by step; `rule` is "threshold" or "conformal", and `level` the threshold or alpha.

    Tokens are those that a model would run with a cache. A target that judges reads every line, and writes again after
    it has; one that does not reads what it has not seen when it must write: nothing where no line is doubtful.
    """
    whole, prompt = sums.written(numbers, config.digits)
    count, steps = len(numbers), numbers.shape[1] - 1
    texts = np.zeros((count, prompt + steps * config.room), np.int32)
    texts[:, :prompt], lengths = whole[:, :prompt], np.full(count, prompt)
    rewritten, key = np.zeros((count, steps), bool), jax.random.key(config.seed)
    wrote, read, seen = np.zeros(count, int), np.zeros(count, int), np.zeros(count, int)
    for number in range(steps):
        ((own, own_ends), (line, ends)), scores = jax.device_get(
            step(
                config.room,
                models["target"],
                models["draft"],
                params,
                texts,
                lengths.astype(np.int32),
            )
        )
        if rule == "threshold":
            reject = np.exp(scores[config.score]) < level
        else:  # a step is one among the same steps of other questions
            key, used = jax.random.split(key)
            reject = np.asarray(
                rejects(used, empty_calibration(count), scores[config.score], level)[0]
            )
        read, wrote = read + ends - lengths, wrote + np.where(reject, own_ends - lengths, 0)
        rewritten[:, number] = reject
        texts, lengths = np.where(reject[:, None], own, line), np.where(reject, own_ends, ends)
        seen = np.where(
            reject, lengths, seen
        )  # of a target that writes, up to the end of what it writes
    target = prompt + read + wrote if config.score == "target" else seen
    return Answers(texts, lengths, rewritten, target, prompt + read + wrote)


def tell(config: Config, folder: pathlib.Path, models: dict, params: dict) -> None:
    """Asks by each rule and level, and prints and writes what came of it."""
    numbers = sums.draw(
        np.random.default_rng([config.seed, 2**31]), config.questions, config.terms, config.digits
    )
    ask = functools.partial(answer, config, models, params, numbers)
    alone, sizes = (
        ask("threshold", np.inf),
        {name: num_params(model) for name, model in models.items()},
    )
    table = Table(
        title=f"{config.questions} sums, lines judged by the {config.score}", title_justify="left"
    )
    for column in COLUMNS:
        table.add_column(column, justify="right")
    writer = open_writers(
        folder, tuple(config.metrics), None, name=folder.name, config=runner.identity(config)
    )
    asked = [("threshold", 0.0), *(("threshold", level) for level in config.thresholds)]
    asked += [("conformal", level) for level in config.alphas]
    rows = [("target alone", 0.0, alone, 0.0)] + [(*each, ask(*each), 1.0) for each in asked]
    for number, (rule, level, found, drafted) in enumerate(rows):
        tokens = (found.target_tokens if drafted else alone.lengths).sum() / alone.lengths.sum()
        flops = (
            tokens
            + drafted
            * found.draft_tokens.sum()
            * sizes["draft"]
            / sizes["target"]
            / alone.lengths.sum()
        )
        right, share = (
            sums.answered(found.texts, numbers, config.digits).mean(),
            found.rewritten.mean(),
        )
        writer.write(number, dict(right=right, rewritten=share, target_tokens=tokens, flops=flops))
        table.add_row(
            rule, f"{level:g}", f"{share:.3f}", f"{right:.3f}", f"{tokens:.3f}", f"{flops:.3f}"
        )
    writer.close()
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    plot = folder / "plots" / "steps.png"
    panels = {"right": ["right"], "share": ["flops", "target_tokens", "rewritten"]}
    plot_metrics(folder / "metrics.jsonl", plot, panels, along="row of the table",
                 title="Right answers, and what they cost in shares of the large model alone")  # fmt: skip
    say(f"plot       {runner.short(plot)}\nmetrics    {runner.short(folder / 'metrics.jsonl')}")


if __name__ == "__main__":
    runner.launch("step_speculation", Config, execute)
