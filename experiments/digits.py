"""Trains a transformer on images: handwritten digits of 8 x 8 pixels, cut into patches that see each other.

    python -m experiments.digits                                  # two CPU cores, about a minute
    python -m experiments.digits model.patch=4 model.layers=4
    python -m experiments.digits model.mixer=retention            # a recurrence over patches, of attention's size
    python -m experiments.digits train.steps=200 seed=1           # a first look
    python -m experiments.digits data.shift=0 model.dropout=0     # what moving the images about is worth
    python -m experiments.digits mesh.data=2 mesh.tensor=4 cpu_devices=8

A third of the digits is held out, and their accuracy told at the end. The same command resumes a run that was ended, on
any mesh.
"""

import dataclasses
import pathlib

import numpy as np

from jaxpar.fields import AtLeast, Between, OneOf, check_fields, field
from jaxpar.loop import FitResult
from jaxpar.nn import ImageClassifier, Mlp, Norm, SequenceTrainer, Stack
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.mixers import LAYERS, MatrixState, layer_of, layer_size
from jaxpar.types import UsageError

from .app import runner
from .app.run_folder import owning
from .app.sequences.series import Task, handwritten, held_out_batches
from .rnn import OptimizerConfig, TrainConfig, check_layout, learn


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The network.

    Attributes:
      mixer: What mixes the patches: attention of all to all, or a layer with a matrix state, which reads them in turn,
        at attention's size; a token behind them is then what is classified.
      patch: Pixels along a side of a patch: 1, 2, 4 or 8.
      layers: Of the stack.
      width: Of the residual stream.
      heads: Of the mixer.
      mlp: Units of a layer's mlp.
      dropout: Rate on the layers' branches, while training.
    """

    mixer: str = field("attention", OneOf(("attention", *LAYERS)))
    patch: int = field(2, AtLeast(1))
    layers: int = field(2, AtLeast(1))
    width: int = field(64, AtLeast(1))
    heads: int = field(4, AtLeast(1))
    mlp: int = field(128, AtLeast(1))
    dropout: float = field(0.1, Between(0, 1, "[)"))

    def __post_init__(self):
        """Refuses what no network can be."""
        check_fields(self, "model.")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The digits.

    Attributes:
      batch_size: B, rows of a step.
      held_out: Share of the digits that are not trained on.
      shift: Pixels by which a digit is moved at random while training, in each direction.
    """

    batch_size: int = field(64, AtLeast(1))
    held_out: float = field(1 / 3, Between(0, 1, "()"))
    shift: int = field(1, Between(0, 7))

    def __post_init__(self):
        """Refuses what is no share."""
        check_fields(self, "data.")


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The experiment on digits.

    Attributes:
      model: The network.
      data: The digits.
      optimizer: Update rule and schedule.
      train: Length and events.
    """

    name: str = "digits"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-3, weight_decay=0.1)
    train: TrainConfig = TrainConfig(steps=1500)


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("digits", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> FitResult:
    """Trains under the mesh of the flags; writes metrics.jsonl, checkpoints and plots/training.png."""
    with runner.open_devices(config):
        return train(config, folder)


@owning
def train(config: Config, folder: pathlib.Path) -> FitResult:
    """Trains under the ambient mesh, in `folder`; resumes what is there."""
    task, trainer = open_digits(config.data, config.seed), make_trainer(config)
    model = config.model
    sizes = [
        f"model      {model.layers} layers of {model.width}, {trainer.network.num_patches} patches of "
        f"{model.patch} x {model.patch} pixels",
        f"task       {task.text}",
        f"step       {config.data.batch_size} images",
    ]
    return learn(config, folder, trainer, task, sizes)


def make_trainer(config: Config) -> SequenceTrainer:
    """Returns the algorithm, after checking that its state and batch can be laid out on the ambient mesh."""
    model = config.model
    heads, size = model.heads, head_size(model.width, model.heads)
    if model.mixer == "attention":
        mixer = Attention(heads, heads, size, visible=Visible(causal=False))
    else:
        units = layer_size(model.mixer, model.width, heads, 4 * model.width**2)
        mixer = MatrixState(layer_of(model.mixer, units, heads))
    stack = Stack(model.layers, model.width, mixer, Mlp(model.mlp, "gelu"), Norm("layer"), dropout=model.dropout,
                  init_std=model.width**-0.5)  # fmt: skip
    readout = "mean" if model.mixer == "attention" else "token"
    network = ImageClassifier(stack, model.patch, (8, 8, 1), 10, readout)
    optimizer = dataclasses.replace(
        SequenceTrainer.optimizer, **dataclasses.asdict(config.optimizer)
    )
    trainer = SequenceTrainer(network, optimizer, config.train.steps)
    check_layout("an image classifier", trainer, config.data.batch_size)
    return trainer


def head_size(width: int, heads: int) -> int:
    """Returns the width of a head of attention, of flags; refuses what does not divide."""
    if width % heads:
        raise UsageError(f"model.width={width} must be a multiple of model.heads={heads}.")
    return width // heads


def open_digits(config: DataConfig, seed: int) -> Task:
    """Returns the digits as batches {"inputs" [B, 8, 8, 1], "targets" [B], "weights" [B]}; batch s by (seed, s).

    Raises:
      UsageError: If scikit-learn is absent, or nothing is left to train on.
    """
    images, labels = handwritten("experiments.digits")
    order = np.random.default_rng([seed, 2]).permutation(len(images))
    held, rest = np.split(order, [max(1, round(config.held_out * len(images)))])
    if not len(rest):
        raise UsageError(f"data.held_out={config.held_out} leaves no digit to train on; lower it.")

    def batch(images, labels):
        return {
            "inputs": images[..., None].astype(np.float32),
            "targets": labels.astype(np.int32),
            "weights": np.ones(len(labels), np.float32),
        }

    def drawn(step: int):
        rng = np.random.default_rng([seed, 0, step])
        rows = rest[rng.integers(0, len(rest), config.batch_size)]
        return batch(
            moved(images[rows], rng.integers(-config.shift, config.shift + 1, (len(rows), 2))),
            labels[rows],
        )

    validation = held_out_batches(lambda rows: batch(images[held[rows]], labels[held[rows]]), len(held),
                                  config.batch_size)  # fmt: skip
    text = f"digits of 8 x 8 pixels: {len(rest)} to train on, {len(held)} held out, 10 classes"
    return Task(64, 10, True, 1, drawn, validation, text)


def moved(images: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Returns images [B, H, W] moved down and right by so many pixels [B, 2]; what comes in is background, -1."""
    height, width = images.shape[1:]
    edge = max(height, width)
    wide = np.pad(images, ((0, 0), (edge, edge), (edge, edge)), constant_values=-1.0)
    rows, down, right = np.arange(len(images))[:, None, None], np.arange(height), np.arange(width)
    return wide[rows, edge + (down - by[:, :1])[:, :, None], edge + (right - by[:, 1:])[:, None, :]]


if __name__ == "__main__":
    runner.launch("digits", Config, execute)
