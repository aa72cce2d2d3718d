"""Trains a recurrent network on whole sequences in parallel, and runs it one step at a time.

    python -m experiments.rnn                                                # digits pixel by pixel, about a minute
    python -m experiments.rnn model.cell=gru model.method=sequential
    python -m experiments.rnn data.task=file data.path=EigenWorms_TRAIN.ts data.validation_path=EigenWorms_TEST.ts
    python -m experiments.rnn data.task=selective_copy data.length=200 model.cell=min_lstm
    python -m experiments.rnn preset=lmu                                     # a Legendre memory, half a minute
    python -m experiments.rnn preset=lmuformer                               # and convolutions before it
    python -m experiments.rnn preset=lmuformer data.task=digits_1d           # generated digits of one dimension
    python -m experiments.rnn data.task=mqar model.cell=gated_delta data.length=40 data.symbols=8
    python -m experiments.rnn mode=eval run=runs/rnn/rnn-1a2b3c4d            # in parallel, and streamed

A byte language model with the same cells is `python -m experiments.lm model.mixer=para_gru`, at attention's size.
The same command resumes a run that was ended, on any mesh.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, OneOf, Positive, check_fields, field
from jaxpar.io import Checkpoints, ProgressLabels, plot_metrics
from jaxpar.loop import Fit, FitResult
from jaxpar.mesh import named_shardings, place_rows
from jaxpar.nn import Mixer, Mlp, SequenceNetwork, SequenceTrainer, Stack
from jaxpar.nn.cells import ConvEmbedding, StackNetwork, solver
from jaxpar.nn.mixers import (
    CELLS,
    LAYERS,
    BlockRecurrent,
    Hgrn,
    Lmu,
    SpikingMlp,
    Tcnca,
    cell_of,
)
from jaxpar.types import PyTree, UsageError, largest

from .app import harness, runner
from .app.harness import Run
from .app.mesh_flags import check_split, refuse_idle
from .app.run_folder import owning
from .app.runner import say
from .app.saved_runs import restored, saved_run
from .app.sequences.series import SeriesConfig, Task, open_task
from .app.solver_flags import method_to_keep

STACKED = ("lmu", "spiking_lmu", "lmuformer", "spiking_lmuformer", "hgrn", "block_recurrent", "block_recurrent_lstm",
           "tcnca")  # fmt: skip
"""Cells that stand in a stack, with an mlp behind each."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The network.

    Attributes:
      cell: A recurrent cell; aaren, which is attention as a recurrence; a layer with a matrix state, such as gla; or
        lmu or spiking_lmu: layers of a stack, whose memories are Legendre's; lmuformer or spiking_lmuformer: the same
        after convolutions, and in the latter the mlps spike as well; or hgrn, block_recurrent, block_recurrent_lstm or
        tcnca, as layers of a stack.
      size: Units of a layer.
      layers: Recurrent layers.
      heads: Blocks of dense recurrent weights (gru, lstm), heads of aaren, of layers with a matrix state, of
        block_recurrent and tcnca, channels of lmu.
      method: How recurrences are solved: "auto" takes a cell's closed form, and what suits its Jacobian otherwise.
      window: Steps that the method solves at once; 0 leaves that to it.
      width: Of layers of a stack: features between them.
      mlp: Of these: units of a layer's mlp.
      memory: Numbers of a channel's memory of lmu, states of block_recurrent.
      theta: Steps that the former holds, and those of a window of block_recurrent and tcnca.
    """

    cell: str = field("para_gru", OneOf((*CELLS, *LAYERS, *STACKED)))
    size: int = field(64, AtLeast(1))
    layers: int = field(2, AtLeast(1))
    heads: int = field(1, AtLeast(1))
    method: str = field("auto", identity=False)
    window: int = field(0, AtLeast(0), identity=False)
    width: int = field(32, AtLeast(1), identity="changed")
    mlp: int = field(64, AtLeast(1), identity="changed")
    memory: int = field(32, AtLeast(1), identity="changed")
    theta: float = field(64.0, Positive(), identity="changed")

    def __post_init__(self):
        """Refuses what no network can be."""
        check_fields(self, "model.")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What of `jaxpar.optim.OptimizerConfig` has a flag here; the rest is `SequenceTrainer`'s.

    Attributes:
      learning_rate: Highest.
      warmup_steps: Of a linear rise.
      weight_decay: On matrices.
      clip_norm: Largest norm of a gradient.
    """

    learning_rate: float = field(1e-2, Positive())
    warmup_steps: int = field(20, AtLeast(0))
    weight_decay: float = field(0.01, AtLeast(0))
    clip_norm: float = field(1.0, Positive())

    def __post_init__(self):
        """Refuses impossible numbers."""
        check_fields(self, "optimizer.")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of a run and what happens on the way.

    Attributes:
      steps: Optimizer steps.
      eval_every: Steps between validations; 0 means at the end alone.
      save_every: Steps between checkpoints; 0 means at the end alone.
      keep: Newest checkpoints to keep; the best is kept as well.
    """

    steps: int = field(300, AtLeast(1))
    eval_every: int = field(100, AtLeast(0))
    save_every: int = field(100, AtLeast(0))
    keep: int = field(2, AtLeast(1))

    def __post_init__(self):
        """Refuses counts that no run can have."""
        check_fields(self, "train.")


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The recurrent experiment.

    Attributes:
      model: The network.
      data: The task.
      optimizer: Update rule and schedule.
      train: Length and events.
      mode: "train" or "eval".
      run: For eval: a run folder.
    """

    name: str = "rnn"
    model: ModelConfig = ModelConfig()
    data: SeriesConfig = SeriesConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    mode: str = "train"
    run: str = ""


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("rnn", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> Any:
    """Does what `config.mode` says."""
    modes = {"train": train, "eval": evaluate}
    if config.mode not in modes:
        raise UsageError(f"mode={config.mode!r} is unknown; legal are {', '.join(modes)}.")
    with runner.open_devices(config):
        return modes[config.mode](config, folder)


@owning
def train(config: Config, folder: pathlib.Path) -> FitResult:
    """Trains under the ambient mesh, in `folder`; resumes what is there."""
    task = open_task(config.data, config.seed)
    config = with_method(config, folder, task)
    return learn(config, folder, make_trainer(config, task), task, _sizes(config, task))


def with_method(config: Config, folder: pathlib.Path, task: Task) -> Config:
    """Returns the configuration with the method that `method=auto` takes in this folder and on this machine."""
    model = config.model
    if model.method != "auto" or model.cell not in CELLS:
        return config
    cell = cell_of(model.cell, model.size, model.heads)
    name = method_to_keep(
        folder, Config, "model.method", [cell], config.data.batch_size, task.length
    )
    return dataclasses.replace(config, model=dataclasses.replace(model, method=name))


def learn(
    config: Any, folder: pathlib.Path, trainer: SequenceTrainer, task: Task, sizes: list[str]
) -> FitResult:
    """Trains any network on any task, in `folder`, by `config.train`; `sizes` are lines to be told at the start."""
    length = config.train
    fit = Fit(
        num_steps=length.steps,
        chunk=1,
        eval_every=length.eval_every,
        save_every=length.save_every,
    )
    run = Run(
        config=config,
        folder=folder,
        fit=fit,
        progress=ProgressLabels(
            description="training", tokens_per_step=config.data.batch_size * task.length
        ),
        tell_start=functools.partial(_tell_start, folder, trainer, sizes),
        checkpoints=dict(keep=length.keep),
        evaluate=make_evaluate(trainer, task),
        check=_check,
        extending="stretches its schedule",
    )
    result = harness.train(trainer, lambda step: _place(task.train(step)), run)
    _tell_end(folder, result)
    return result


def evaluate(config: Config, folder: pathlib.Path) -> dict[str, float]:
    """Prints the validation metrics of a saved run, and those of its network run one step at a time."""
    del folder
    run, saved, _ = saved_run(config)
    task = open_task(saved.data, saved.seed)
    trainer = make_trainer(saved, task)
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))
    shardings = named_shardings(shapes, trainer.axes())
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    _, state = restored(checkpoints, "best", abstract, run)
    params = state.params
    metrics = make_evaluate(trainer, task)(params)
    say("in parallel  " + _text(metrics))
    say(
        f"streamed     largest difference of an output {streaming_error(trainer, task, params):.1e}"
    )
    return metrics


def make_trainer(config: Config, task: Task) -> SequenceTrainer:
    """Returns the algorithm, after checking that its state and batch can be laid out on the ambient mesh."""
    model = config.model
    optimizer = dataclasses.replace(
        SequenceTrainer.optimizer, **dataclasses.asdict(config.optimizer)
    )
    trainer = SequenceTrainer(_network(model, task), optimizer, config.train.steps)
    check_layout("a recurrent network", trainer, config.data.batch_size)
    return trainer


def _mixer(model: ModelConfig) -> Mixer:
    if model.cell == "hgrn":
        return Hgrn(model.size)
    if "lmu" in model.cell:
        return Lmu(
            units=model.size,
            channels=model.heads,
            memory=model.memory,
            theta=model.theta,
            spiking=model.cell.startswith("spiking"),
        )
    if model.size % model.heads:
        raise UsageError(f"model.size={model.size} is no multiple of model.heads={model.heads}.")
    head_dim = model.size // model.heads
    window = max(1, round(model.theta))
    if model.cell == "tcnca":
        return Tcnca(num_heads=model.heads, head_dim=head_dim, chunk=window)
    return BlockRecurrent(
        num_heads=model.heads,
        head_dim=head_dim,
        window=window,
        num_states=model.memory,
        gate="lstm" if model.cell.endswith("lstm") else "fixed",
    )


def _network(model: ModelConfig, task: Task) -> SequenceNetwork | StackNetwork:
    if model.cell not in STACKED:
        return SequenceNetwork(
            inputs=task.inputs,
            outputs=task.outputs,
            cell=model.cell,
            size=model.size,
            layers=model.layers,
            heads=model.heads,
            method=solver(model.method, model.window),
            classes=task.classes,
        )
    spiking = model.cell.startswith("spiking")
    former = model.cell.endswith("lmuformer")
    layers = model.layers
    mixers = _mixer(model)
    mlp = None
    if spiking and former:  # an mlp that spikes has a state, and is a mixer
        layers = 2 * layers
        mixers = (mixers, SpikingMlp(model.mlp))
    else:
        mlp = Mlp(model.mlp, activation="gelu")
    stack = Stack(
        num_layers=layers,
        embed_dim=model.width,
        mixer=mixers,
        mlp=mlp,
        init_std=model.width**-0.5,
        dtype="float32",
    )
    embedding = ConvEmbedding(model.width, spiking=spiking) if former else None
    return StackNetwork(
        stack=stack,
        inputs=task.inputs,
        outputs=task.outputs,
        classes=task.classes,
        embedding=embedding,
    )


def check_layout(job: str, trainer: SequenceTrainer, batch_size: int, *names: str) -> None:
    """Refuses a trainer whose state or batch cannot be laid out on the ambient mesh, and a mesh with an idle axis.

    `names` are logical axes that the job splits besides those of its parameters and the batch.
    """
    refuse_idle(job, (trainer.axes(), "batch", *names))
    named_shardings(jax.eval_shape(trainer.init, jax.random.key(0)), trainer.axes())
    check_split("data.batch_size", batch_size, "batch")


def make_evaluate(trainer: SequenceTrainer, task: Task):
    """Returns a function `state or params -> {"validation/loss": ..., "validation/accuracy": ...}`."""
    metrics = jax.jit(trainer.metrics)

    def evaluate(state) -> Mapping[str, float]:
        params = getattr(state, "params", state)
        rows = [jax.device_get(metrics(params, _place(batch))) for batch in task.validation]
        counts = [batch["weights"].sum() for batch in task.validation]
        names = ("loss", "accuracy") if task.classes else ("loss",)
        return {
            f"validation/{name}": float(np.average([row[name] for row in rows], weights=counts))
            for name in names
        }

    return evaluate


def streaming_error(trainer: SequenceTrainer, task: Task, params: PyTree) -> float:
    """Returns the largest difference between the outputs of whole sequences and those made step by step."""
    network = trainer.network
    inputs = _place(task.validation[0])["inputs"]
    whole = jax.jit(network.apply)(params, inputs)[0]
    one = jax.jit(lambda params, x, states: network.apply(params, x, states)[:2])
    outputs, states = [], None
    for t in range(task.length):
        out, states = one(params, inputs[:, t : t + 1], states)
        outputs.append(out)
    return float(largest(jnp.abs(jnp.concatenate(outputs, 1) - whole)))


def _place(batch: Mapping[str, np.ndarray]) -> PyTree:
    return place_rows(
        lambda rows: {name: x[rows] for name, x in batch.items()}, len(batch["weights"])
    )


def _check(step: int, metrics: Mapping[str, float]) -> None:
    if not np.isfinite(metrics["train/loss"]):
        raise UsageError(
            f"the loss is not finite after step {step}; lower optimizer.learning_rate."
        )
    if metrics["train/skipped"]:
        raise UsageError(
            f"the update is not finite after step {step}; lower optimizer.learning_rate."
        )


def _text(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _sizes(config: Config, task: Task) -> list[str]:
    return [
        f"model      {config.model.layers} layers of {config.model.size} {config.model.cell}",
        f"task       {task.text}",
        f"step       {config.data.batch_size} sequences of {task.length} steps, solved by {config.model.method}",
    ]


def _tell_start(
    folder: pathlib.Path, trainer: SequenceTrainer, sizes: list[str], start: int
) -> None:
    shapes: Any = jax.eval_shape(trainer.init, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
    say(f"run        {runner.short(folder)}" + (f" (resuming at step {start})" if start else ""))
    say(f"parameters {count:,}")
    for line in sizes:
        say(line)


def _tell_end(folder: pathlib.Path, result: FitResult) -> None:
    if result.interrupted:
        return
    plot = folder / "plots" / "training.png"
    if jax.process_index() == 0:
        panels = {
            "loss": ("train/loss", "validation/loss"),
            "accuracy": ("train/accuracy", "validation/accuracy"),
        }
        if result.metrics.get("train/iterations"):  # a sequential run and a closed form make none
            panels["iterations of the solver"] = ("train/iterations",)
        plot_metrics(folder / "metrics.jsonl", plot, panels, title=folder.name)
    chosen = {
        name: value for name, value in result.metrics.items() if name.startswith("validation/")
    }
    say(f"after {result.step} steps: {_text(chosen)}")
    if "train/iterations" in result.metrics:
        names = ("iterations", "residual", "converged")
        say(
            "solver     "
            + "  ".join(f"{name} {result.metrics[f'train/{name}']:.3g}" for name in names)
        )
    runner.say_files(folder, plot)


if __name__ == "__main__":
    runner.launch("rnn", Config, execute)
