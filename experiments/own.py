"""Trains a model of flax's own layers from three functions, laid out by its own program.

    python -m experiments.own                              # a transformer of linen, on sums
    python -m experiments.own preset=maml                  # MAML on sinusoids
    python -m experiments.own preset=policy                # REINFORCE on CartPole, of NNX
    python -m experiments.own mode=axes cpu_devices=8      # the table of axes alone
    python -m experiments.own mode=verify cpu_devices=8    # each layout against one device

The same command resumes a run that was ended, on any mesh. Models of your own: docs/own_model.md.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.fields import AtLeast, OneOf, Positive, field
from jaxpar.io import ProgressLabels, plot_metrics
from jaxpar.loop import Fit, FitResult
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.own import (
    check_finite,
    examples_in_batches,
    lay_out,
    mean_loss,
    predictions,
    verify_own,
)
from jaxpar.types import UsageError
from jaxpar.verify import VerifyOptions

from .app import harness, own_models, runner
from .app.harness import Run
from .app.mesh_flags import parse_layout
from .app.run_folder import owning
from .app.runner import identifying, say
from .rnn import TrainConfig
from .verify import line_of


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """A model of flax's own layers.

    Attributes:
      task: "lm", "maml" or "policy".
      width: Units of a layer; lm: a multiple of 4, the number of heads.
      layers: lm: of the transformer.
      batch_size: Examples of a batch.
      learning_rate: Of Adam, constant.
      train: Length and events.
      mode: "train"; "axes" shows the table alone; "verify" compares layouts with one device.
      run: Not read: a command that has it makes a run folder only to train.
      layouts: verify: such as [data2.tensor4,data2.fsdp4].
    """

    name: str = "own"
    task: str = identifying("lm", OneOf(("lm", "maml", "policy")))
    width: int = identifying(64, AtLeast(4))
    layers: int = identifying(2, AtLeast(1))
    batch_size: int = identifying(64, AtLeast(1))
    learning_rate: float = identifying(3e-3, Positive())
    train: TrainConfig = TrainConfig(steps=1000)
    mode: str = field("train", OneOf(("train", "axes", "verify")))
    run: str = ""
    layouts: list[str] = dataclasses.field(
        default_factory=lambda: ["data2.tensor4", "data2.fsdp2.tensor2"]
    )

    def __post_init__(self):
        """Refuses what no model can be."""
        super().__post_init__()
        if self.task == "lm" and self.width % 4:
            raise UsageError(f"width={self.width} must be a multiple of 4, the number of heads.")


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("own", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> FitResult | None:
    """Does what `config.mode` says."""
    with runner.open_devices(config):
        return {"train": train, "axes": show_axes, "verify": verify}[config.mode](config, folder)


def open_own(config: Config) -> own_models.OwnTask:
    """Returns the model and its examples."""
    seed = config.seed
    adam = OptimizerConfig(learning_rate=config.learning_rate, schedule="constant", warmup_steps=0, weight_decay=0.0,
                           eps=1e-6)  # fmt: skip
    rule = make_optimizer(adam, config.train.steps).transformation()
    if config.task == "lm":
        return own_models.language(config.width, config.layers, seed, rule)
    return (own_models.sinusoids if config.task == "maml" else own_models.balance)(
        config.width, seed, rule
    )


@owning
def train(config: Config, folder: pathlib.Path) -> FitResult:
    """Trains under the ambient mesh, in `folder`; resumes what is there."""
    task, length = open_own(config), config.train
    batches = examples_in_batches(task.model, task.examples, config.batch_size, config.seed)
    laid = lay_out(task.model, batches(0))
    model = laid.model

    def evaluate(state) -> Mapping[str, float]:
        judged = task.judge(
            predictions(model, state, task.held_out, config.batch_size), task.held_out
        )
        means = mean_loss(model, task.held_out, config.batch_size, state)
        return means | {f"validation/{name}": x for name, x in judged.items()}

    run = Run(
        config,
        folder,
        Fit(length.steps, 1, length.eval_every, length.save_every),
        ProgressLabels(description="training"),
        functools.partial(_tell_start, folder, task.text, str(laid)),
        checkpoints=dict(keep=length.keep),
        evaluate=evaluate,
        check=check_finite,
        extending="goes on at the same rate",
    )
    result = harness.train(model, batches, run)
    _tell_end(folder, result)
    return result


def show_axes(config: Config, folder: pathlib.Path) -> None:
    """Prints how the parameters lie on the mesh of the flags."""
    del folder
    task = open_own(config)
    say(task.text)
    say(
        str(
            lay_out(
                task.model,
                examples_in_batches(task.model, task.examples, config.batch_size, config.seed)(0),
            )
        )
    )


def verify(config: Config, folder: pathlib.Path) -> None:
    """Compares the layouts with one device, in float32; ends with exit code 1 if one does not hold."""
    del folder
    if jax.process_count() > 1:
        raise UsageError(
            "mode=verify compares with one device of this process; start it with one process."
        )
    task = open_own(config)

    def batch(number: int) -> Any:
        chosen = np.random.default_rng([config.seed, number]).integers(
            0, len(task.examples), config.batch_size
        )
        return task.model.collate([task.examples[int(i)] for i in chosen])

    layouts = [parse_layout(text) for text in config.layouts]
    rows = verify_own(
        task.model,
        batch,
        layouts,
        allow=task.allow,
        options=VerifyOptions(dtypes=["float32"], report=lambda row: say(line_of(row))),
    )
    for row in rows:
        for breach in [*row.breaches, *([row.refused] if row.refused else [])]:
            say(f"{row.layout}: {breach}")
    bad = sum(bool(row.breaches) for row in rows)
    say(f"{len(rows) - bad} of {len(rows)} layouts hold" + (f", {bad} DO NOT" if bad else ""))
    if bad:
        sys.exit(1)


def _tell_start(folder: pathlib.Path, text: str, table: str, start: int) -> None:
    say(f"run        {runner.short(folder)}" + (f" (resuming at step {start})" if start else ""))
    say(f"model      {text}")
    say(table)


def _tell_end(folder: pathlib.Path, result: FitResult) -> None:
    if result.interrupted:
        return
    plot = folder / "plots" / "training.png"
    if jax.process_index() == 0:
        plot_metrics(
            folder / "metrics.jsonl",
            plot,
            {"loss": ("train/loss", "validation/loss")},
            title=folder.name,
        )
    chosen = {
        name: value for name, value in result.metrics.items() if name.startswith("validation/")
    }
    say(
        f"after {result.step} steps: "
        + "  ".join(f"{name} {value:.4f}" for name, value in chosen.items())
    )
    runner.say_files(folder, plot)


if __name__ == "__main__":
    runner.launch("own", Config, execute)
