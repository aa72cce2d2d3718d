"""One optimizer step as a pure function: the `Algorithm` that `jaxpar.loop` drives."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxpar._renamed import warn_of_older
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.lm import params as declared
from jaxpar.lm.adapters import (
    AdapterConfig,
    adapter_axes,
    adapter_decays,
    base_axes,
    check_adapter,
    saved_names,
    trained_adapters,
    with_adapters,
)
from jaxpar.lm.config import LMConfig
from jaxpar.lm.objectives import ObjectiveConfig, Teacher, objective_report, objective_stages
from jaxpar.lm.text.batches import BatchReport
from jaxpar.lm.tuning import (
    Trained,
    TuningConfig,
    average_of,
    depth_scales,
    frozen_names,
    laid_over,
    next_average,
    selected,
    trained_but,
    trained_stages,
    without,
)
from jaxpar.mesh import axes_like
from jaxpar.nn.auxiliary import Aux, scalars
from jaxpar.optim import Optimizer, OptimizerConfig, make_optimizer
from jaxpar.pipeline.accumulation import InTurn
from jaxpar.types import Info, PRNGKey, PyTree, UsageError

__all__ = [
    "LATER_LEAVES",
    "AdaptedState",
    "AdapterTrainer",
    "Health",
    "TrainState",
    "Trainer",
    "update",
]

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
      reference: Trained parameters as they were at the start, for preferences; else None.
    """

    params: PyTree
    opt_state: PyTree
    step: jax.Array
    health: Health
    average: PyTree = None
    reference: PyTree = None

    @property
    def start(self) -> PyTree:
        """The parameters that preferences are compared with, as they were at the start."""
        return laid_over(self.params, self.reference)

    @property
    def averaged(self) -> PyTree:
        """The parameters, of their running average where there is one."""
        return self.params if self.average is None else laid_over(self.params, self.average)


@struct.dataclass
class AdaptedState:
    """All that a run of adapters carries from step to step.

    Attributes:
      base: Frozen parameters.
      adapters: What is trained, float32 at least: changes, and parameters of
        `AdapterConfig.modules_to_save`.
      opt_state: State of the optimizer, for the adapters alone.
      step: int32 [], steps made, skipped ones included.
      health: Skipped steps and spikes.
      average: Running average of the adapters; None where `TuningConfig.ema` is 0.
      scale: Factor of the changes.
      reference: Parameters of `AdapterConfig.modules_to_save`, as they were at the start, where the
        objective is of preferences; else None.
    """

    base: PyTree
    adapters: PyTree
    opt_state: PyTree
    step: jax.Array
    health: Health
    average: PyTree = None
    scale: float = struct.field(pytree_node=False, default=1.0)
    reference: PyTree = None

    @property
    def params(self) -> PyTree:
        """The adapted model's, as `jaxpar.lm.apply` takes them; see `merge_adapters`."""
        return with_adapters(self.base, self.adapters, self.scale)

    @property
    def start(self) -> PyTree:
        """The parameters that preferences are compared with: those without changes."""
        if self.reference is None:
            return self.base
        return laid_over(self.base, self.reference)

    @property
    def averaged(self) -> PyTree:
        """The adapted model's, of the running average where there is one."""
        return with_adapters(
            self.base, self.adapters if self.average is None else self.average, self.scale
        )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains `model`, or its adapters, with `optimizer`; static and hashable.

    What is trained is one function that parts parameters and one that joins them again: all of
    them, those that `tuning` leaves, or `adapter` beside a frozen base. A step knows nothing else.

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
      teacher: Model of the same symbols, for a share of the objective; None for none.
      adapter: Adapters to train of a frozen model, if it is of another kind than "none". All of
        it decays but magnitudes and norms; of preferences the reference is the base.
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
    adapter: AdapterConfig = AdapterConfig()

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
        if self._is_adapted:
            self._check_adapter()
        frozen_names(self.model, self.tuning.freeze)  # refuses patterns that mean nothing

    def _check_adapter(self) -> None:
        if self.tuning.freeze:
            raise UsageError(
                f"tuning.freeze={','.join(self.tuning.freeze)} beside adapters, whose base is "
                "frozen; leave it out, or change adapter.target."
            )
        if self.optimizer.name == "muon":
            raise UsageError(
                "optimizer.name=muon is not for adapters, which are thin; "
                "legal are adamw, radam, rmsprop."
            )
        check_adapter(self.model, self.adapter)

    def init(self, key: PRNGKey, inputs: PyTree = None) -> TrainState | AdaptedState:
        """Draws the parameters, adapters if there are any, and the optimizer's first state.

        Consumes `key`; ignores `inputs`.
        """
        del inputs
        dtype = jnp.promote_types(self.model.dtype, jnp.float32)
        if not self._is_adapted:
            return self.begin(declared.init(key, self.model, dtype))
        drawn, own = jax.random.split(key)
        return self.begin(declared.init(drawn, self.model, dtype), own)

    def begin(self, params: PyTree, key: PRNGKey | None = None) -> TrainState | AdaptedState:
        """Returns the state that training begins with from given parameters, float32 at least.

        Args:
          params: As from `jaxpar.lm.init`; narrower ones, as `load_model` reads them, are widened
            exactly to float32, since small steps would be lost in bfloat16.
          key: Key that draws adapters; consumed, and not read without them. In the older order,
            the key first, both are accepted until the first release.

        Raises:
          UsageError: There are adapters, and no key.
        """
        if key is not None and _is_key(params):
            warn_of_older("Trainer.begin(key, params)", "Trainer.begin(params, key)", level=2)
            params, key = key, params
        dtype = jnp.promote_types(self.model.dtype, jnp.float32)
        params = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), params)
        trained, kept = self.parts.split(params, key)
        opt_state = self.make_optimizer().init(trained)
        step = jnp.zeros((), jnp.int32)
        health = Health.start(dtype)
        average = average_of(trained, self.tuning.ema)
        compared = trained
        if self._is_adapted:
            compared = selected(params, saved_names(self.model, self.adapter))
        reference = None
        if self.objective.kind == "dpo" and compared:
            reference = jax.tree.map(jnp.copy, compared)
        if not self._is_adapted:
            return TrainState(
                params=params,
                opt_state=opt_state,
                step=step,
                health=health,
                average=average,
                reference=reference,
            )
        return AdaptedState(
            base=kept,
            adapters=trained,
            opt_state=opt_state,
            step=step,
            health=health,
            average=average,
            scale=self.adapter.scale,
            reference=reference,
        )

    def axes(self) -> TrainState | AdaptedState:
        """Returns the logical axes of every leaf of the state; moments lie as their parameters."""
        state = jax.eval_shape(lambda: self.init(jax.random.key(0)))
        if not isinstance(state, AdaptedState):
            return axes_like(state, state.params, declared.axes(self.model))
        own = adapter_axes(self.model, state.adapters)
        out = axes_like(state, state.adapters, own)
        return out.replace(base=base_axes(self.model, self.adapter), adapters=own)

    def step(
        self, key: PRNGKey, state: TrainState | AdaptedState, inputs: dict[str, jax.Array]
    ) -> tuple[TrainState | AdaptedState, Info]:
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
        reference = None
        if self.objective.kind == "dpo":
            reference = state.start
        plain = objective_stages(self.model, self.objective, teacher=teacher, reference=reference)
        trained, kept = self._parted(state)
        pieces = trained_stages(plain, self.parts, kept)
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
        new = {
            "opt_state": opt_state,
            "step": state.step + 1,
            "health": health,
            "average": average,
        }
        if self._is_adapted:
            new["adapters"] = trained
        else:
            new["params"] = self.parts.join(trained, kept, None)
        return state.replace(**new), info  # type: ignore[attr-defined]

    def _parted(self, state: TrainState | AdaptedState) -> tuple[PyTree, PyTree]:
        """What of a state is trained, and what is kept."""
        if isinstance(state, AdaptedState):
            return state.adapters, state.base
        return self.parts.split(state.params, None)

    @property
    def parts(self) -> Trained:
        """What of the parameters is trained, as two functions that part and join them."""
        if self._is_adapted:
            return trained_adapters(self.model, self.adapter)
        return trained_but(self._frozen)

    @property
    def _is_adapted(self) -> bool:
        return self.adapter.kind != "none"

    @property
    def later_leaves(self) -> tuple[str, ...]:
        """Paths of leaves that older checkpoints lack; they were 0 there."""
        return LATER_LEAVES

    def done(self, state: TrainState | AdaptedState) -> jax.Array:
        """Whether the run has broken down: `max_skipped` bad steps in a row."""
        return state.health.skipped_in_a_row >= self.max_skipped

    def make_optimizer(self) -> Optimizer:
        """Returns the optimizer; its state is `opt_state` of the state."""
        scales = (
            depth_scales(self.model, self.tuning.layer_decay)
            if self.tuning.layer_decay != 1
            else None
        )
        if self._is_adapted:
            decays = adapter_decays(self.model)
            return make_optimizer(self.optimizer, self.num_steps, decays=decays, scales=scales)
        axes = without(declared.axes(self.model), self._frozen)
        decays = without(declared.decay_mask(self.model), self._frozen)
        return make_optimizer(
            self.optimizer, self.num_steps, axes=axes, decays=decays, scales=scales
        )

    @property
    def _frozen(self) -> frozenset[str]:
        return frozen_names(self.model, self.tuning.freeze) if self.tuning.freeze else frozenset()


def _is_key(value: object) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def AdapterTrainer(  # noqa: N802  # an older name, of a class
    model: LMConfig,
    adapter: AdapterConfig,
    optimizer: OptimizerConfig | None = None,
    num_steps: int = 1000,
    accumulate: int = 1,
    max_skipped: int = 10,
    tuning: TuningConfig | None = None,
    objective: ObjectiveConfig | None = None,
    teacher: LMConfig | None = None,
) -> Trainer:
    """Returns `Trainer(model, adapter=adapter, ...)`, which this was; goes with the first release.

    Args:
      model: The transformer.
      adapter: Adapters to train.
      optimizer: As `Trainer`'s, like all that follow.
      num_steps: Length of the run.
      accumulate: Microbatches that a batch is cut into.
      max_skipped: Steps in a row that changed nothing.
      tuning: Rates by depth, and whether an average is kept.
      objective: What is made smaller.
      teacher: A model of the same symbols, or None.

    Raises:
      UsageError: As `Trainer`, and for an adapter of kind "none".
    """
    warn_of_older("AdapterTrainer(model, adapter)", "Trainer(model, adapter=adapter)", level=2)
    check_adapter(model, adapter)
    return Trainer(
        model=model,
        optimizer=optimizer or OptimizerConfig(),
        num_steps=num_steps,
        accumulate=accumulate,
        max_skipped=max_skipped,
        tuning=tuning or TuningConfig(),
        objective=objective or ObjectiveConfig(),
        teacher=teacher,
        adapter=adapter,
    )


def check_teacher(model: LMConfig, objective: ObjectiveConfig, teacher: LMConfig | None) -> None:
    """Rejects a teacher of other symbols, and one that nothing reads."""
    if teacher is not None and teacher.vocab_size != model.vocab_size:
        raise UsageError(f"the teacher has {teacher.vocab_size} symbols, and the model {model.vocab_size}; "
                         "legal is a teacher of the same.")  # fmt: skip
    if teacher is not None and objective.kind != "tokens":
        raise UsageError(f"objective.kind={objective.kind} has no teacher; leave one out.")


def with_teacher(
    inputs: dict[str, PyTree], teacher: LMConfig | None
) -> tuple[dict[str, PyTree], Teacher | None]:
    """Returns a batch without a teacher's parameters, and the parameters with its model."""
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
