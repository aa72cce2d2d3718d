"""Trains the same byte model with one mixer after the other, all for as many seconds of the device.

    python -m experiments.compare                                       # two CPU cores, 9 mixers, 3 seeds, 20 minutes
    python -m experiments.compare mixers=[attention,gla] seconds=10 num_seeds=1        # a minute
    python -m experiments.compare mixers=[gla,rwkv6] seconds=60 num_seeds=5
    python -m experiments.compare mixers=[windowed,block_recurrent] model.mixer.kind=windowed model.mixer.window=64
    python -m experiments.compare mixers=[attention,mamba2] model.embed_dim=512 model.num_layers=8 data.seq_len=1024

The protocol of Languini (Stanic et al. 2023, arXiv:2309.11197): a mixer gets as many tokens as its measured speed makes
of the budget, compiling and validation left out; of each seed a line is fitted to the loss over the logarithm of time.
The same command goes on where it was ended, and trains no finished row again: further mixers and seeds are added.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Column, Table

from jaxpar.fields import AtLeast, Between, Positive, field, replace_nested
from jaxpar.io import ProgressLabels, plot_fits, read_jsonl
from jaxpar.lm import BLOCK_RECURRENT, LMConfig, OptimizerConfig, num_params, with_mixer
from jaxpar.lm.text import Corpus, DataConfig, batches_of, check_batch, open_corpus
from jaxpar.loop import Fit, FitResult, compile_step
from jaxpar.mesh import MeshSpec, named_shardings, place_rows
from jaxpar.types import UsageError

from . import lm
from .app import runner
from .app.harness import Run, train
from .app.run_folder import owning, replace_text
from .app.runner import identifying, say

COLUMNS = ("mixer", "parameters", "tokens/s", "tokens", "loss", "nats a doubling", "seconds taken")
ROUNDS = 5
"""In each of which every mixer is timed once, so that all meet the same load of the machine."""
USUAL = (
    "attention", "gla", "mlstm", "gated_delta", "mamba2", "min_gru", "para_gru", "matmul_free", "block_recurrent"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """Which mixers, for how long, in which model.

    Attributes:
      mixers: Names that `model.mixer.kind=` takes, or matmul_free: hgrn in a model of ternary weights.
        Each has attention's size.
      seconds: Budget of a row, of steady training.
      num_seeds: Rows of a mixer, of seeds seed, seed + 1, ...
      model: What is the same for all. With `model.mixer.kind=` one of them, fields of its own may be given, as
        `model.mixer.window`; all that read them take them. Block-recurrent layers otherwise have windows of a quarter
        of a row, and as many states: with one window a row nothing is carried.
      data: Corpus, window and batch; without data.layout, windows that lie whole in the stream.
      optimizer: By default of a constant rate after the warm-up, so that a loss on the way is that of a shorter budget.
      evaluations: Of each row, at equal distances: the points of its line.
      eval_batches: Of each, random windows that are the same for all rows: the spread of seeds is that of training.
      timed_s: Seconds for which each mixer is timed.
    """

    name: str = "compare"
    mixers: list[str] = dataclasses.field(default_factory=lambda: list(USUAL))
    seconds: float = identifying(20.0, Positive())
    num_seeds: int = field(3, Between(1, 1000))
    model: LMConfig = LMConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluations: int = identifying(8, AtLeast(2))
    eval_batches: int = identifying(8, AtLeast(1))
    timed_s: float = field(2.0, Positive())

    def __post_init__(self):
        """Refuses mixers that no model has, and none at all."""
        super().__post_init__()
        if self.model.mixer.kind not in ("attention", *self.mixers):
            raise UsageError(
                f"model.mixer.kind={self.model.mixer.kind} is not among mixers=[{','.join(self.mixers)}]; add it."
            )
        if not self.mixers or len(set(self.mixers)) < len(self.mixers):
            raise UsageError(f"mixers={self.mixers} must name one at least, and each once.")
        for mixer in self.mixers:
            self.row(mixer, 0, 1)

    def row(self, mixer: str, seed: int, steps: int) -> lm.Config:
        """Returns the run of a mixer and a seed: a language model's."""
        every = -(-steps // self.evaluations)
        model, of = self.model, mixer
        if mixer == "matmul_free":
            model, of = dataclasses.replace(model, weights="ternary"), "hgrn"
        if mixer in BLOCK_RECURRENT and model.mixer.kind == "attention":
            quarter = max(1, self.data.seq_len // 4)
            changes = {"mixer.kind": mixer, "mixer.window": quarter, "mixer.states": quarter}
            model = replace_nested(model, changes)
        return lm.Config(
            name=f"{self.name}-{mixer}", seed=self.seed + seed, metrics=self.metrics, resume=self.resume,
            model=with_mixer(model, of), data=self.data, optimizer=self.optimizer,
            train=lm.TrainConfig(steps, eval_every=every, eval_batches=self.eval_batches, save_every=every, keep=1),
        )  # fmt: skip


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("compare", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> Any:
    """Times and trains what has not been, prints the table, writes rows.jsonl and plots/fits.png."""
    with runner.open_devices(config, MeshSpec()):
        return run(config, folder)


@owning
def run(config: Config, folder: pathlib.Path) -> Any:
    """Does so under the ambient mesh; returns the rows, or the result of a run that was interrupted."""
    corpus = open_corpus(config.data, folder / "data")
    config = lm.with_vocabulary(config, corpus.tokenizer)
    runner.write_start(folder, config)
    say(
        f"run        {runner.short(folder)}\n{corpus.describe().replace('corpus ', 'corpus     ', 1)}"
    )
    speeds, rows = _speeds(config, folder, corpus), []
    for seed in range(config.num_seeds):
        for mixer in config.mixers:
            file = folder / mixer / f"seed-{config.seed + seed}" / "row.json"
            if not file.is_file():
                ended = learn(config, mixer, seed, speeds[mixer], file.parent, corpus)
                if ended.interrupted:
                    return ended
                _write(
                    file, summary(config, mixer, seed, speeds[mixer], file.parent / "metrics.jsonl")
                )
            rows.append(json.loads(file.read_text()))
    tell(folder, rows)
    return rows


def _speeds(config: Config, folder: pathlib.Path, corpus: Corpus) -> dict[str, float]:
    """Returns tokens a second of each mixer; those of an earlier call are kept, since its rows rest on them."""
    files = {mixer: folder / mixer / "speed.json" for mixer in config.mixers}
    missing = [mixer for mixer, file in files.items() if not file.is_file()]
    if missing:
        for mixer, speed in measure(config, missing, corpus).items():
            _write(files[mixer], {"tokens_per_s": speed})
    return {mixer: json.loads(file.read_text())["tokens_per_s"] for mixer, file in files.items()}


def _write(file: pathlib.Path, content: dict) -> None:
    if jax.process_index() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(content) + "\n")


def measure(config: Config, mixers: Sequence[str], corpus: Corpus) -> dict[str, float]:
    """Returns tokens a second of training: the median of rounds, after compiling and two steps."""
    ready, times, key = {}, {mixer: [] for mixer in mixers}, jax.random.key(config.seed)
    for mixer in mixers:
        say(f"timing     {mixer}")
        trainer = lm.make_trainer(config.row(mixer, 0, 10_000))
        shardings = named_shardings(jax.eval_shape(trainer.init, key), trainer.axes())
        state = jax.jit(trainer.init, out_shardings=shardings)(key)
        batch = _batches(config, config.seed, corpus)(0)
        step = compile_step(trainer, state, batch, axes=trainer.axes())
        _, state = _timed(step, key, state, batch, 1)
        once, state = _timed(step, key, state, batch, 1)
        ready[mixer] = step, state, batch, max(1, round(config.timed_s / ROUNDS / once))
    for _ in range(ROUNDS):
        for mixer, (step, state, batch, count) in ready.items():
            seconds, state = _timed(step, key, state, batch, count)
            ready[mixer] = step, state, batch, count
            times[mixer].append(seconds / count)
    tokens = config.data.batch_size * config.data.seq_len
    return {mixer: tokens / statistics.median(each) for mixer, each in times.items()}


def _timed(step: Any, key: jax.Array, state: Any, batch: Any, count: int) -> tuple[float, Any]:
    """Returns the seconds of so many steps, and the state after them."""
    begin = time.perf_counter()
    for number in range(count):
        state, info = step(key, jnp.int32(number), state, batch)
    jax.block_until_ready(info)
    return time.perf_counter() - begin, state


def _batches(config: Config, seed: int, corpus: Corpus):
    """Returns step -> batch."""
    data = config.data
    windows = batches_of(corpus.train, data.layout, data, seed)

    def rows(step: int, part: slice) -> dict[str, np.ndarray]:
        return check_batch(windows(step, part), config.model.vocab_size, first_row=part.start or 0)

    return lambda step: place_rows(functools.partial(rows, step), data.batch_size)


def steps_of(config: Config, speed: float) -> int:
    """Returns how many steps the budget has, two at least: a line has two points."""
    return max(2, round(config.seconds * speed / (config.data.batch_size * config.data.seq_len)))


def learn(
    config: Config, mixer: str, seed: int, speed: float, folder: pathlib.Path, corpus: Corpus
) -> FitResult:
    """Trains a row in its folder; goes on where it was."""
    row = config.row(mixer, seed, steps_of(config, speed))

    def check(step: int, metrics: Mapping[str, float]) -> None:
        if metrics["train/skipped"]:
            raise UsageError(
                f"{mixer} of seed {row.seed} is not finite after step {step}; lower optimizer.learning_rate."
            )

    described = f"{mixer}, seed {row.seed}"
    count = row.data.batch_size * row.data.seq_len
    return train(
        lm.make_trainer(row),
        _batches(config, row.seed, corpus),
        Run(
            row,
            folder,
            Fit(row.train.steps, 1, row.train.eval_every, row.train.save_every),
            ProgressLabels(description=described, tokens_per_step=count),
            lambda start: say(
                f"\n{described}: {num_params(row.model):,} parameters, {row.train.steps} steps"
            ),
            checkpoints=dict(keep=1),
            metadata={"corpus": corpus.hash, "tokenizer": corpus.tokenizer.identity},
            evaluate=lm.make_evaluate(dataclasses.replace(row, seed=config.seed), corpus),
            check=check,
        ),
    )


def summary(config: Config, mixer: str, seed: int, speed: float, metrics: pathlib.Path) -> dict:
    """Returns a row of the table from the metrics of its run."""
    tokens, told = config.data.batch_size * config.data.seq_len, read_jsonl(metrics)
    found = {row["step"]: row["validation/loss"] for row in told if "validation/loss" in row}
    took = sum(
        1 / row["speed/steps_per_s"] for row in told if "speed/steps_per_s" in row
    )  # without validation
    points = [[step * tokens / speed, loss] for step, loss in sorted(found.items())]
    slope, end = fitted(np.array(points))
    row = config.row(mixer, seed, steps_of(config, speed))
    return {
        "mixer": mixer, "seed": row.seed, "params": num_params(row.model), "tokens_per_s": speed,
        "steps": row.train.steps, "tokens": row.train.steps * tokens, "loss": points[-1][1], "slope": slope,
        "line_at_end": end, "took_s": took, "points": points,
    }  # fmt: skip


def fitted(points: Float[np.ndarray, "N 2"]) -> tuple[float, float]:
    """Returns the line of least squares of the loss over log2 of the seconds: its slope, and its value at the last."""
    x, y = np.log2(points[:, 0]), points[:, 1]
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return slope, float(y.mean() + slope * (x[-1] - x.mean()))


def tell(folder: pathlib.Path, rows: list[dict]) -> None:
    """Prints the table, best first; writes rows.jsonl and the plot."""
    of = {
        mixer: [row for row in rows if row["mixer"] == mixer]
        for mixer in dict.fromkeys(r["mixer"] for r in rows)
    }
    mean = {mixer: np.mean([row["loss"] for row in each]) for mixer, each in of.items()}
    table = Table(
        *(Column(name, justify="right") for name in COLUMNS),
        title="equal seconds; ± standard deviation over seeds",
        title_justify="left",
    )
    for mixer in sorted(of, key=lambda mixer: mean[mixer]):
        first, each = (
            of[mixer][0],
            {name: [row[name] for row in of[mixer]] for name in ("loss", "slope", "took_s")},
        )
        sizes = (f"{first[name]:,.0f}" for name in ("params", "tokens_per_s", "tokens"))
        took = f"{min(each['took_s']):.0f} to {max(each['took_s']):.0f}"
        table.add_row(mixer, *sizes, _spread(each["loss"]), _spread(each["slope"]), took)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if jax.process_index() == 0:
        replace_text(folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        lines = {
            mixer: [(r["points"], r["slope"], r["line_at_end"]) for r in each]
            for mixer, each in of.items()
        }
        plot_fits(lines, folder / "plots" / "fits.png", along="seconds of training", value="nats a byte, held out",
                  title="Equal seconds of training: loss on held-out text")  # fmt: skip
    say(
        f"plot       {runner.short(folder / 'plots' / 'fits.png')}\nrows       {runner.short(folder / 'rows.jsonl')}"
    )


def _spread(values: list[float]) -> str:
    """The mean, and the standard deviation over seeds where there are several."""
    text = f"{statistics.mean(values):.4f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.4f}"


if __name__ == "__main__":
    runner.launch("compare", Config, execute)
