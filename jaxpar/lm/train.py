"""One optimizer step as a pure function: the `Algorithm` that `jaxpar.loop` drives."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.lm import params as declared
from jaxpar.lm.config import LMConfig
from jaxpar.lm.objectives import ObjectiveConfig, Teacher, objective_report, objective_stages
from jaxpar.lm.text.batches import BatchReport
from jaxpar.lm.tuning import (
    TuningConfig,
    average_of,
    beside_frozen,
    depth_scales,
    frozen_names,
    laid_over,
    next_average,
    without,
)
from jaxpar.mesh import axes_like
from jaxpar.nn.auxiliary import Aux, scalars
from jaxpar.optim import Optimizer, OptimizerConfig, make_optimizer
from jaxpar.pipeline.accumulation import InTurn
from jaxpar.types import Info, PRNGKey, PyTree, UsageError

__all__ = ["LATER_LEAVES", "Health", "TrainState", "Trainer", "update"]

LATER_LEAVES = ("health/empty",)
"""Paths of counts in the state that older checkpoints lack."""
SPIKE_DEVIATIONS = 6.0
MEMORY = 0.98  # of the running mean and deviation of the loss: about the last 50 steps


@struct.dataclass
class Health:
    """Counts of what went wrong, and the running loss that spikes are judged by.

    Attributes:
      skipped: Steps that changed nothing, int32 [], and so the next two.
      skipped_in_a_row: Of these, those up to now.
      spikes: Losses far above the running mean.
      loss_mean: Running mean over good steps; 0 before the first.
      loss_variance: Running mean of twice the square of what lies above `loss_mean`: the variance of a loss that
        scatters evenly, and nearly nothing while it falls, however steeply.
      empty: Number of batches without a token that counts. Their loss and gradient are 0, and move
        no running mean.
    """

    skipped: jax.Array
    skipped_in_a_row: jax.Array
    spikes: jax.Array
    loss_mean: jax.Array
    loss_variance: jax.Array
    empty: jax.Array = struct.field(default_factory=lambda: jnp.zeros((), jnp.int32))

    @classmethod
    def start(cls, dtype: DTypeLike) -> "Health":
        """Returns the counts before the first step, and the running loss in `dtype`."""
        count = jnp.zeros((), jnp.int32)
        zero = jnp.zeros((), dtype)
        return cls(
            skipped=count,
            skipped_in_a_row=count,
            spikes=count,
            loss_mean=zero,
            loss_variance=zero,
        )


@struct.dataclass
class TrainState:
    """All that a run carries from step to step.

    Attributes:
      params: Master weights, float32 unless the model runs in float64.
      opt_state: Of the optimizer, for what is not frozen.
      step: int32 [], steps made, skipped ones included.
      health: Skipped steps and spikes.
      average: Running average of what is not frozen; None where `TuningConfig.ema` is 0.
      reference: What is not frozen, as it was at the start, where the objective is of preferences; else None.
    """

    params: PyTree
    opt_state: PyTree
    step: jax.Array
    health: Health
    average: PyTree = None
    reference: PyTree = None

    @property
    def start(self) -> PyTree:
        """The parameters that preferences are compared with: those of the start."""
        return laid_over(self.params, self.reference)

    @property
    def averaged(self) -> PyTree:
        """The parameters, of their running average where there is one."""
        return self.params if self.average is None else laid_over(self.params, self.average)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains `model` with `optimizer`; static and hashable.

    Attributes:
      model: The transformer.
      optimizer: The update rule.
      num_steps: Length of the run, which the learning-rate schedule needs.
      accumulate: Microbatches that a batch is cut into; equal to the whole batch at once.
      max_skipped: Steps in a row that changed nothing, being not finite, after which `done` is true.
      schedule: How the gradients of microbatches are made, a
        `jaxpar.pipeline.accumulation.Accumulation`; by default one after the other.
      tuning: What is frozen, rates by depth, and whether an average is kept.
      objective: What is made smaller.
      teacher: A model of the same symbols whose laws the objective takes a share of; None for none.
    """

    model: LMConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    num_steps: int = field(1000, AtLeast(1))
    accumulate: int = field(1, AtLeast(1))
    max_skipped: int = field(10, AtLeast(1))
    schedule: Any = InTurn()
    tuning: TuningConfig = TuningConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    teacher: LMConfig | None = None

    def __post_init__(self):
        """Refuses what cannot be trained."""
        check_fields(self)
        check_teacher(self.model, self.objective, self.teacher)
        second = (
            "objective.kind=dpo"
            if self.objective.kind == "dpo"
            else "a teacher"
            if self.teacher
            else ""
        )
        if second and not isinstance(self.schedule, InTurn):
            raise UsageError(
                f"{second} runs a second model, whose layers no stage of a pipeline holds; leave out one."
            )
        frozen_names(self.model, self.tuning.freeze)  # refuses patterns that mean nothing

    def init(self, key: PRNGKey, inputs: PyTree = None) -> TrainState:
        """Draws the parameters and the optimizer's first state. Consumes `key`; ignores `inputs`."""
        del inputs
        dtype = jnp.promote_types(self.model.dtype, jnp.float32)
        return self.begin(declared.init(key, self.model, dtype))

    def begin(self, params: PyTree) -> TrainState:
        """Returns the state that training begins with from given parameters, float32 at least."""
        dtype = jnp.promote_types(self.model.dtype, jnp.float32)
        count = jnp.zeros((), jnp.int32)
        health = Health.start(dtype)
        trained = self._trained(params)
        average = average_of(trained, self.tuning.ema)
        reference = jax.tree.map(jnp.copy, trained) if self.objective.kind == "dpo" else None
        return TrainState(
            params, self.make_optimizer().init(trained), count, health, average, reference
        )

    def axes(self) -> TrainState:
        """Returns the logical axes of every leaf of the state; optimizer moments lie as their parameters."""
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        return axes_like(state, state.params, declared.axes(self.model))

    def step(
        self, key: PRNGKey, state: TrainState, inputs: dict[str, jax.Array]
    ) -> tuple[TrainState, Info]:
        """Makes one optimizer step on a batch as `jaxpar.lm.loss` takes it. Consumes `key` for dropout.

        Of preferences a batch is as `jaxpar.lm.objectives.preference_loss` takes it; with a teacher it has "teacher"
        besides, its parameters, the same at every step: in `jaxpar.loop.fit` take a chunk of 1, which alone does not
        copy them.

        A step whose loss, gradient or new parameters are not finite changes no parameter and no
        optimizer state; it is counted.

        Returns:
          The new state, and scalars: loss (nats a token), grad_norm (before clipping), learning_rate,
          skipped and skipped_in_a_row (counts), spike (1 where the loss is over 6 deviations above its running
          mean, by what lies above it) and spikes (their count), empty (batches so far without a
          token that counts), invalid_tokens and invalid_targets (ids of this batch outside of the
          vocabulary); and what layers and loss told, by its names.
        """
        inputs, teacher = with_teacher(inputs, self.teacher)
        start = None if state.reference is None else state.start
        pieces = objective_stages(self.model, self.objective, teacher=teacher, reference=start)
        if self._frozen:
            pieces = beside_frozen(pieces, state.params, self._frozen)
        trained = self._trained(state.params)
        loss, gradient = self.schedule(pieces, trained, inputs, key, self.accumulate)
        trained, opt_state, health, info = update(
            self.make_optimizer(),
            trained,
            loss,
            gradient,
            state.opt_state,
            state.health,
            objective_report(inputs, self.model, self.objective),
        )
        average = next_average(
            state.average, trained, self.tuning.ema, health.skipped_in_a_row == 0
        )
        params = laid_over(state.params, trained)
        return TrainState(params, opt_state, state.step + 1, health, average, state.reference), info

    @property
    def later_leaves(self) -> tuple[str, ...]:
        """Paths of leaves that older checkpoints lack; they were 0 there."""
        return LATER_LEAVES

    def done(self, state: TrainState) -> jax.Array:
        """Whether the run has broken down: `max_skipped` bad steps in a row."""
        return state.health.skipped_in_a_row >= self.max_skipped

    def make_optimizer(self) -> Optimizer:
        """Returns the optimizer, whose state is `TrainState.opt_state`."""
        axes, decays = map(
            self._trained, (declared.axes(self.model), declared.decay_mask(self.model))
        )
        scales = (
            depth_scales(self.model, self.tuning.layer_decay)
            if self.tuning.layer_decay != 1
            else None
        )
        return make_optimizer(
            self.optimizer, self.num_steps, axes=axes, decays=decays, scales=scales
        )

    @property
    def _frozen(self) -> frozenset[str]:
        return frozen_names(self.model, self.tuning.freeze) if self.tuning.freeze else frozenset()

    def _trained(self, params: PyTree) -> PyTree:
        """The part of a tree of the parameters that is not frozen."""
        return without(params, self._frozen)


def check_teacher(model: LMConfig, objective: ObjectiveConfig, teacher: LMConfig | None) -> None:
    """Refuses a teacher of other symbols, and one that nothing heeds."""
    if teacher is not None and teacher.vocab_size != model.vocab_size:
        raise UsageError(f"the teacher has {teacher.vocab_size} symbols, and the model {model.vocab_size}; "
                         "legal is a teacher of the same.")  # fmt: skip
    if teacher is not None and objective.kind != "tokens":
        raise UsageError(f"objective.kind={objective.kind} has no teacher; leave one out.")


def with_teacher(
    inputs: dict[str, PyTree], teacher: LMConfig | None
) -> tuple[dict[str, PyTree], Teacher | None]:
    """Returns a batch without a teacher's parameters, and those beside its model."""
    if teacher is None:
        return inputs, None
    batch = {name: x for name, x in inputs.items() if name != "teacher"}
    return batch, Teacher(config=teacher, params=inputs["teacher"])


def update(
    optimizer: Optimizer,
    trained: PyTree,
    loss: tuple[jax.Array, Aux],
    gradient: PyTree,
    opt_state: PyTree,
    health: Health,
    report: BatchReport,
) -> tuple[PyTree, PyTree, Health, Info]:
    """Updates parameters by a gradient.

    Args:
      optimizer: The rule.
      trained: The parameters that are trained.
      loss: The loss, with auxiliary losses and metrics.
      gradient: Its gradient by `trained`.
      opt_state: The optimizer's state.
      health: Counts of earlier steps.
      report: Counts of this batch.

    Returns:
      The new `trained`, `opt_state` and `health`, and the scalars of `Trainer.step`.
    """
    value, aux = loss
    trained, opt_state, said = optimizer.update(
        gradient, opt_state, trained, good=jnp.isfinite(value)
    )
    health, spike = _watch(health, value, said["skipped"] == 0, report.empty)
    info = (
        said
        | {
            "loss": value,
            "skipped": health.skipped,
            "skipped_in_a_row": health.skipped_in_a_row,
            "spike": spike,
            "spikes": health.spikes,
            "empty": health.empty,
            "invalid_tokens": report.invalid_tokens,
            "invalid_targets": report.invalid_targets,
        }
        | scalars(aux)
    )
    return trained, opt_state, health, jax.tree.map(jnp.float32, info)


def _watch(
    health: Health, value: jax.Array, good: jax.Array, empty: jax.Array | bool = False
) -> tuple[Health, jax.Array]:
    """Updates the counts, and the mean and deviation of the loss over good steps with tokens."""
    judged = good & jnp.logical_not(empty)
    seen = health.loss_mean != 0
    gap = value - health.loss_mean
    # Under 1 % of the mean nothing is a spike, however quiet the run.
    scale = jnp.sqrt(health.loss_variance) + 0.01 * jnp.abs(health.loss_mean)
    spike = judged & seen & (gap > SPIKE_DEVIATIONS * scale)
    rate = jnp.where(seen, 1 - MEMORY, 1.0)
    mean = health.loss_mean + rate * gap
    # The mean lags behind a falling loss. That lag is trend, not scatter, and only what lies above the mean is counted.
    above = jnp.maximum(gap, 0.0)
    variance = jnp.where(seen, MEMORY * (health.loss_variance + rate * 2 * above**2), 0.0)
    bad = (~good).astype(jnp.int32)
    new = Health(
        skipped=health.skipped + bad,
        skipped_in_a_row=jnp.where(good, 0, health.skipped_in_a_row + 1),
        spikes=health.spikes + spike.astype(jnp.int32),
        loss_mean=jnp.where(judged, mean, health.loss_mean),
        loss_variance=jnp.where(judged, variance, health.loss_variance),
        empty=health.empty + jnp.asarray(empty, jnp.int32),
    )
    return new, spike
