"""Trains a transformer on films of digits that fly about and bounce: of each frame it draws the next.

    python -m experiments.papers.moving_digits                           # two CPU cores, three minutes
    python -m experiments.papers.moving_digits data.digits=2 data.size=16 model.patch=4
    python -m experiments.papers.moving_digits train.steps=100 seed=1    # a first look
    python -m experiments.papers.moving_digits data.frames=16 model.pairs=4
    python -m experiments.papers.moving_digits mesh.data=2 mesh.context=4 cpu_devices=8

Its layers look along space and along time in turn, and `mesh.context` splits the axis along which they do not look. The
same command resumes a run that was ended, on any mesh.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.io import plot_frames
from jaxpar.loop import FitResult
from jaxpar.mesh import constrain
from jaxpar.nn import FramePredictor, SpaceTimeStack
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.cells.network import SequenceTrainer
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.norm import Norm
from jaxpar.nn.stack import Stack
from jaxpar.types import PRNGKey

from ..app import runner
from ..app.run_folder import owning
from ..app.sequences.series import Task
from ..digits import head_size
from ..rnn import OptimizerConfig, TrainConfig, check_layout, learn

FONT = (  # 0 to 9, each in five rows of three pixels
    "###  #  ### ### # # ### ### ### ### ###",
    "# # ##    #   # # # #   #     # # # # #",
    "# #  #  ### ### ### ### ###   # ### ###",
    "# #  #  #     #   #   # # #   # # #   #",
    "### ### ### ###   # ### ###   # ### ###",
)
ROWS, COLUMNS = 5, 3


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The network.

    Attributes:
      patch: Pixels along a side of a patch.
      pairs: Of layers, of which the first looks along space and the second along time.
      width: Of the residual stream.
      heads: Of attention.
      mlp: Units of a layer's mlp.
    """

    patch: int = field(3, AtLeast(1))
    pairs: int = field(2, AtLeast(1))
    width: int = field(64, AtLeast(1))
    heads: int = field(4, AtLeast(1))
    mlp: int = field(128, AtLeast(1))

    def __post_init__(self):
        """Refuses what no network can be."""
        check_fields(self, "model.")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The films.

    Attributes:
      batch_size: B, rows of a step.
      frames: T, of each of which the next is to be drawn.
      size: Pixels along a side of a frame.
      digits: How many fly about.
    """

    batch_size: int = field(32, AtLeast(1))
    frames: int = field(8, AtLeast(1))
    size: int = field(12, AtLeast(ROWS + 1))
    digits: int = field(1, AtLeast(1))

    def __post_init__(self):
        """Refuses frames that a digit fills."""
        check_fields(self, "data.")


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """The experiment on moving digits.

    Attributes:
      model: The network.
      data: The films.
      optimizer: Update rule and schedule.
      train: Length and events.
    """

    name: str = "moving_digits"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-3)
    train: TrainConfig = TrainConfig(steps=1000)


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("moving_digits", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> FitResult:
    """Trains under the mesh of the flags; writes metrics.jsonl, checkpoints, plots/training.png, plots/frames.png."""
    with runner.open_devices(config):
        return train(config, folder)


@owning
def train(config: Config, folder: pathlib.Path) -> FitResult:
    """Trains under the ambient mesh, in `folder`; resumes what is there."""
    model, data, trainer, task = (
        config.model,
        config.data,
        make_trainer(config),
        open_films(config.data, config.seed),
    )
    sizes = [
        f"model      {model.pairs} pairs of layers of {model.width}, {(data.size // model.patch) ** 2} patches of "
        f"{model.patch} x {model.patch} pixels a frame",
        f"task       {task.text}",
        f"step       {data.batch_size} films of {data.frames} frames",
    ]
    result = learn(config, folder, trainer, task, sizes)
    if not result.interrupted:
        batch = task.validation[0]

        @jax.jit
        def drawn(params):
            films = trainer.network.apply(params, jnp.asarray(batch["inputs"]))[0]
            return constrain(jax.nn.sigmoid(films[0]), None, None, None)

        films = {
            "next frame": batch["targets"][0],
            "predicted": np.asarray(drawn(result.state.params)),
        }
        if jax.process_index() == 0:
            plot_frames(
                films,
                plot := folder / "plots" / "frames.png",
                title="Each next frame, and what is predicted",
            )
            runner.say(f"{'frames':10} {runner.short(plot)}")
    return result


def make_trainer(config: Config) -> SequenceTrainer:
    """Returns the algorithm, after checking that its state and batch can be laid out on the ambient mesh."""
    model, data = config.model, config.data
    time = Attention(
        num_heads=model.heads,
        num_kv_heads=model.heads,
        head_dim=head_size(model.width, model.heads),
    )
    space = dataclasses.replace(time, visible=Visible(causal=False))
    stack = Stack(
        num_layers=model.pairs,
        embed_dim=model.width,
        mixer=space,
        mlp=Mlp(model.mlp, activation="gelu"),
        norm=Norm("layer"),
        init_std=model.width**-0.5,
    )
    network = FramePredictor(
        stack=SpaceTimeStack(stack=stack, time=time),
        patch=model.patch,
        shape=(data.frames, data.size, data.size),
    )
    optimizer = dataclasses.replace(
        SequenceTrainer.optimizer, **dataclasses.asdict(config.optimizer)
    )
    trainer = SequenceTrainer(network=network, optimizer=optimizer, num_steps=config.train.steps)
    check_layout("a predictor of frames", trainer, data.batch_size, "time", "space")
    return trainer


def open_films(config: DataConfig, seed: int) -> Task:
    """Returns films as batches {"inputs", "targets" [B, T, H, W], "weights" [B]}; batch s by (seed, s)."""
    key = jax.random.key(seed)

    def batch(kind: int, step: int):
        drawn = jax.random.fold_in(jax.random.fold_in(key, kind), step)
        films = np.asarray(
            moving_digits(drawn, config.batch_size, config.frames + 1, config.size, config.digits)
        )
        return {
            "inputs": films[:, :-1],
            "targets": films[:, 1:],
            "weights": np.ones(len(films), np.float32),
        }

    validation = [batch(1, step) for step in range(4)]
    lit = float(np.mean([each["targets"].mean() for each in validation]))
    constant = -lit * np.log(lit) - (1 - lit) * np.log(1 - lit)
    noun = "digit" if config.digits == 1 else "digits"
    text = f"{config.digits} {noun} on {config.size} x {config.size} pixels; a constant answer has loss {constant:.3f}"
    return Task(
        inputs=config.size**2,
        outputs=1,
        classes=False,
        length=config.frames,
        train=functools.partial(batch, 0),
        validation=validation,
        text=text,
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def moving_digits(
    key: PRNGKey, batch: int, frames: int, size: int, digits: int
) -> Float[Array, "B T H W"]:
    """Draws films of digits that fly straight on, by up to two pixels a frame each way, and bounce off the edges.

    A digit in front hides none: a pixel is 1 where any digit has one, and 0 elsewhere. Consumes `key`.

    Args:
      key: Of which digits, where they begin, and how fast they fly.
      batch: B.
      frames: T.
      size: H and W.
      digits: How many fly.
    """
    which, where, speed = jax.random.split(key, 3)
    font = np.array(
        [[[row[4 * n + j] == "#" for j in range(COLUMNS)] for row in FONT] for n in range(10)],
        np.float32,
    )
    room = jnp.array([size - ROWS, size - COLUMNS]).reshape(1, 1, 1, 2)
    start = jax.random.randint(where, (batch, 1, digits, 2), 0, room + 1)
    step = jax.random.randint(speed, (batch, 1, digits, 2), -2, 3)
    # The way of a ball that passes through the wall, folded at it.
    way = start + jnp.arange(frames).reshape(1, -1, 1, 1) * step
    corner = room - jnp.abs(room - way % (2 * room))
    glyphs = jnp.asarray(font)[jax.random.randint(which, (batch, digits), 0, 10)]

    def place(glyph, corner):
        return jax.lax.dynamic_update_slice(jnp.zeros((size, size)), glyph, (corner[0], corner[1]))

    over_frames = jax.vmap(jax.vmap(place), in_axes=(None, 0))  # of [n, 5, 3] and [T, n, 2]
    return jax.vmap(over_frames)(glyphs, corner).max(2)


if __name__ == "__main__":
    runner.launch("moving_digits", Config, execute)
