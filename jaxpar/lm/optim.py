"""Optimizers and schedules from optax, with their masks read from the parameter declarations."""

import dataclasses

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.lm import params as declared
from jaxpar.lm.config import LMConfig
from jaxpar.nn.muon import scale_by_whole_muon
from jaxpar.optim import in_widest_float
from jaxpar.types import PyTree

__all__ = ["OptimizerConfig", "learning_rate", "make_optimizer"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated. Numbers are those of nanoGPT and Llama unless said.

    Attributes:
      name: "adamw" or "muon" (Muon on the matrices of the layers, AdamW on all else).
      learning_rate: Highest rate; for Muon, of its matrices, scaled to AdamW's update size.
      final_ratio: Rate at the end over the highest rate.
      schedule: "cosine", "linear", "constant", or "wsd" (constant, then linear over the last fifth).
      warmup_steps: Steps of linear warm-up from 0.
      decay_steps: Step at which the rate has reached its end; 0 means the last step of the run.
      b1: Decay of the first moment (and Muon's momentum).
      b2: Decay of the second moment.
      eps: Added to the root of the second moment.
      weight_decay: Decoupled decay, of matrices only: norms and biases keep theirs.
      clip_norm: Largest global gradient norm; 0 switches clipping off.
    """

    name: str = field("adamw", OneOf(("adamw", "muon")))
    learning_rate: float = field(1e-3, Positive())
    final_ratio: float = field(0.1, Between(0, 1))
    schedule: str = field("cosine", OneOf(("cosine", "linear", "constant", "wsd")))
    warmup_steps: int = field(20, AtLeast(0))
    decay_steps: int = field(0, AtLeast(0))
    b1: float = field(0.9, Between(0, 1, "[)"))
    b2: float = field(0.95, Between(0, 1, "[)"))
    eps: float = field(1e-8, Positive())
    weight_decay: float = field(0.1, AtLeast(0))
    clip_norm: float = field(1.0, AtLeast(0))

    def __post_init__(self):
        """Refuses unknown names and impossible numbers."""
        check_fields(self, "optimizer.")


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns `step -> learning rate` for a run of `num_steps` steps."""
    peak, end = config.learning_rate, config.learning_rate * config.final_ratio
    steps = max(1, (config.decay_steps or num_steps) - config.warmup_steps)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps, config.final_ratio)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, steps)
    else:
        fall = max(1, steps // 5)
        after = optax.linear_schedule(peak, end, fall, transition_begin=steps - fall)
    if config.warmup_steps:
        rise = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps)
        after = optax.join_schedules([rise, after], [config.warmup_steps])
    return in_widest_float(after)


def muon_dimensions(model: LMConfig) -> PyTree:
    """Returns Muon's dimension numbers a leaf, None where AdamW shall do.

    Matrices of the layers map "embed" to the rest or back, so the logical axes say which dimensions
    are contracted; "layers" is a batch of matrices. Without this, optax hands stacked leaves to Adam. A recurrence's
    own weights map units to units, and go to Adam.
    """

    def numbers(path, leaf: declared.Leaf):
        if isinstance(leaf.init, str) or leaf.axes[0] != "layers" or "embed" not in leaf.axes:
            return None
        embed = (leaf.axes.index("embed"),)
        rest = tuple(i for i in range(1, len(leaf.axes)) if i not in embed)
        first, second = (embed, rest) if embed[0] == 1 else (rest, embed)
        return MuonDimensionNumbers(reduction_axis=first, output_axis=second)

    return jax.tree_util.tree_map_with_path(
        numbers, declared.leaves(model), is_leaf=lambda leaf: isinstance(leaf, declared.Leaf)
    )


def make_optimizer(config: OptimizerConfig, model: LMConfig, num_steps: int) -> optax.GradientTransformation:
    """Returns clipping, then AdamW or Muon, with decay on matrices only.

    Muon's updates are rescaled to AdamW's root mean square of 0.2 (arXiv:2502.16982, eq. 4), so that one
    learning rate serves both. Its Newton-Schulz products are taken in the gradients' dtype.
    """
    rate, mask = learning_rate(config, num_steps), declared.is_weight(model)
    if config.name == "adamw":
        update = (optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=mask),)
    else:
        labels = jax.tree.map(
            lambda numbers: "adam" if numbers is None else "muon",
            muon_dimensions(model),
            is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
        )
        whole = scale_by_whole_muon(declared.axes(model), muon_dimensions(model), config.b1, config.eps)
        adam = optax.scale_by_adam(config.b1, config.b2, config.eps, nesterov=True)
        step = optax.chain(optax.partition({"muon": whole, "adam": adam}, labels), optax.scale_by_learning_rate(rate))
        # Decay apart: optax's Muon would decay every parameter that it hands to Adam, norms and biases too.
        decay = optax.add_decayed_weights(lambda count: -config.weight_decay * rate(count), mask)
        update = (step, decay)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, *update)
