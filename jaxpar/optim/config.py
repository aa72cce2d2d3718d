"""The one configuration of optimizers: which rule, its numbers, its schedule, its clip and its decay."""

import dataclasses

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field

__all__ = ["OptimizerConfig"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated. Defaults are those of nanoGPT and Llama unless said.

    Attributes:
      name: "adamw" (Adam where nothing decays), "muon" (Muon on the matrices of the layers, AdamW with Nesterov's
        momentum on all else), "radam" or "rmsprop".
      learning_rate: Highest rate; for Muon, of its matrices, scaled to AdamW's update size. Not read where every update
        is given its rate.
      final_ratio: Rate at the end over the highest rate.
      schedule: "cosine", "linear", "constant", or "wsd" (constant, then linear over the last fifth).
      warmup_steps: Steps of linear warm-up.
      warmup_start: Rate of the first of these over the highest; None is 1 / warmup_steps, so that no step is lost.
      decay_steps: Step at which the rate has reached its end; 0 means the last step of the run.
      b1: Decay of the first moment (and Muon's momentum); rmsprop has none.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment; for rmsprop, to the second moment under the root.
      weight_decay: Decoupled decay, of matrices only: norms and biases keep theirs.
      clip_norm: Largest global gradient norm; 0 switches clipping off.
    """

    name: str = field("adamw", OneOf(("adamw", "muon", "radam", "rmsprop")))
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
    # After the first runs, and so last, and part of a run's identity only where it is given.
    warmup_start: float | None = field(None, Between(0, 1), identity="changed")

    def __post_init__(self):
        """Refuses unknown names and impossible numbers."""
        check_fields(self, "optimizer.")
