"""The trainings that `experiments.verify` judges: the trainer's own step, its plain twin, and uneven batches."""

import dataclasses
import functools
import threading
from typing import Any

import jax
import numpy as np
import optax

from jaxpar.aot import count_flops
from jaxpar.fields import replace_nested
from jaxpar.lm import (
    Leaf,
    LMConfig,
    Trainer,
    TuningConfig,
    init,
    leaves,
    pipeline_transfers,
    plain_state,
    plain_step,
    step_transfers,
)
from jaxpar.mesh import MeshSpec, rules_from
from jaxpar.nn.attention.context import in_order, padded
from jaxpar.pipeline import InTurn, Pipelined, Schedule, named_schedule, with_gathers
from jaxpar.types import PyTree
from jaxpar.verify import (
    ROOM_FOR_FLOPS,
    Case,
    Layout,
    Limits,
    Outcome,
    Program,
    bytes_of_batch,
    bytes_on_device,
    compile_program,
    on_mesh,
    run_program,
)

from ..mesh_flags import shares
from .validation import place, row_length

STEPS = 3
NUM_STEPS = 10
"""Length of the run that the steps begin."""

ROOM_FOR_TEMPORARIES = 3.0
"""Largest ratio of temporary bytes to their analytic account. XLA for CPUs took 0.5 to 1.9."""

NAMES = ("tokens", "targets", "weights", "segments", "positions")


@dataclasses.dataclass(frozen=True)
class Training:
    """The task of a layout: a model and its batches; one twin serves all layouts of one task.

    Attributes:
      model: The transformer; its dtype is replaced.
      length: Tokens of a row.
      parts: Microbatches of a batch.
    """

    model: LMConfig
    length: int
    parts: int


def cases_of(config: Any, layouts: list[Layout]) -> list[Case]:
    """Returns what is judged for each layout: its training, program, twin and limits.

    Args:
      config: The configuration of `experiments.verify`.
      layouts: The layouts; where it may, every third has rows one token shorter, which do not divide.
    """
    made = Proof(config)
    cases = []
    for number, layout in enumerate(layouts):
        case = made.case(layout, made.training(layout, number))
        if number % config.float32_every and len(config.dtypes) > 1:
            case = case._replace(skips=("float32",))
        cases.append(case)
    return cases


def schedule_of(config: Any, layout: Layout) -> Schedule:
    """Returns the schedule that a layout's stages run."""
    schedule = named_schedule(
        layout.schedule, layout.mesh.stage, config.microbatches, config.chunks
    )
    if config.gather_chunks:
        return with_gathers(schedule)
    return schedule


def expert_model(config: Any) -> LMConfig:
    """Returns the model of layouts that split experts: the configured one, or one with experts for mlps."""
    if config.model.experts.num_experts or not config.num_experts:
        return config.model
    return replace_nested(config.model, {"experts.num_experts": config.num_experts})


class Proof:
    """Trainings, twins and counts of one configuration; each is made once."""

    def __init__(self, config: Any):
        self.config = config
        self.flops = functools.cache(self._flops)
        self._outcomes = functools.cache(self._outcome)
        self._making = threading.Lock()  # two layouts that train the same wait for one twin

    def training(self, layout: Layout, number: int) -> Training:
        """Returns what is trained under a layout, which is number `number` of all."""
        config = self.config
        is_split = layout.mesh.context > 1
        model = config.model
        if layout.mesh.expert > 1:
            model = expert_model(config)
        if is_split and config.dropout_off:
            # Dropout on attention weights would gather whole rows: rings and orders are judged without it.
            model = dataclasses.replace(model, dropout=0.0)
        may_be_odd = "sequence" not in layout.name and not (is_split and model.experts.num_experts)
        odd = number % 3 == 2 and may_be_odd and config.data.seq_len > 2
        parts = config.accumulate
        if layout.schedule:
            parts = config.microbatches
        return Training(model, config.data.seq_len - odd, parts)

    def case(self, layout: Layout, training: Training) -> Case:
        """Returns all that judging a layout needs."""
        return Case(
            layout=layout,
            rules=rules_from(self.config.rules, layout.name),
            program=lambda dtype: self.program(layout, training, dtype),
            twin=lambda dtype: self.twin(training, dtype),
            limits=lambda program, dtype: self.limits(layout, training, program, dtype),
            transfer_dtype="bfloat16",
        )

    def trainer(self, layout: Layout, training: Training, dtype: str) -> Trainer:
        """Returns the trainer of a layout, in one dtype."""
        schedule = InTurn()
        if layout.schedule:
            schedule = Pipelined(schedule_of(self.config, layout))
        return Trainer(
            model=dataclasses.replace(training.model, dtype=dtype),
            optimizer=self.config.optimizer,
            num_steps=NUM_STEPS,
            accumulate=training.parts,
            schedule=Noting(schedule),
            tuning=TuningConfig(ema=self.config.ema),
        )

    def program(self, layout: Layout, training: Training, dtype: str) -> Program:
        """Returns the trainer's step on the ambient mesh."""
        trainer = self.trainer(layout, training, dtype)
        placing = _placing(self.config, training)
        rows = functools.partial(rows_of, self.config, training, dtype)

        def step(key, state, batch):
            state, _ = trainer.step(key, state, batch)
            # The step itself reports its loss in float32 alone.
            (loss, _), gradient = trainer.schedule.noted.pop()
            return loss, gradient, state

        return Program(
            state=_first_state(dataclasses.replace(trainer, schedule=InTurn()), self.config.seed),
            axes=trainer.axes(),
            step=step,
            batch=lambda number: _ordered(placing, rows(number, slice(None))),
            batch_axes=_batch_axes(layout.mesh.context > 1),
            place=lambda number: place(placing, functools.partial(rows, number)),
            observed=observed,
        )

    def limits(self, layout: Layout, training: Training, program: Program, dtype: str) -> Limits:
        """Returns what one device may do in a step, and must, on the ambient mesh."""
        model = dataclasses.replace(training.model, dtype=dtype)
        rows = self.config.data.batch_size
        length = row_length(_placing(self.config, training))
        if layout.schedule:
            schedule = schedule_of(self.config, layout)
            transfers = pipeline_transfers(
                model, rows, length, schedule, self.config.optimizer.name
            )
        else:
            transfers = step_transfers(
                model, rows, length, training.parts, self.config.optimizer.name
            )
        expected = _expected_axes(model)
        held = bytes_on_device(program.state, program.state.params, expected) + bytes_of_batch(
            program
        )
        unjudged = []
        if training.model.dropout != self.config.model.dropout:
            unjudged.append("dropout, which gathers whole rows where a sequence is split")
        if layout.schedule:
            unjudged.append(
                "operations and memory of a pipeline's device: see experiments.pipeline"
            )
        return Limits(
            transfers=transfers,
            flops=self._most_flops(layout, training),
            held=held,
            room=None if layout.schedule else ROOM_FOR_TEMPORARIES,
            unjudged=tuple(unjudged),
        )

    def _most_flops(self, layout: Layout, training: Training) -> float | None:
        if layout.schedule:
            return (
                None  # a compiled program has the tasks of all stages; a device does its own only
            )
        room = ROOM_FOR_FLOPS
        if training.model.experts.num_experts:
            # XLA for CPU multiplies the rows of a device with all experts that it holds, and masks.
            room = 1 + training.model.experts.num_experts // layout.mesh.expert
        return room * self.flops(training) / layout.num_devices

    def _flops(self, training: Training) -> float:
        """Operations of the plain step on one device, all of a batch."""
        trainer = self.trainer(Layout(MeshSpec()), training, "float32")

        def start():
            params = init(jax.random.key(0), trainer.model)
            return plain_state(trainer, params), rows_of(self.config, training, "float32", 0)

        shapes = jax.eval_shape(start)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with on_mesh(Layout(MeshSpec()), rules_from(self.config.rules)):
            return count_flops(functools.partial(plain_step, trainer), key, *shapes).total

    def twin(self, training: Training, dtype: str) -> Outcome:
        """Returns what the plain step gave on one device."""
        with self._making:
            return self._outcomes(training, dtype)

    def _outcome(self, training: Training, dtype: str) -> Outcome:
        """Runs the plain step on one device."""
        alone = Layout(MeshSpec())
        trainer = self.trainer(alone, training, dtype)
        params = _params(trainer.model, self.config.seed)
        state = jax.device_get(plain_state(trainer, params))
        program = Program(
            state=state,
            axes=jax.tree.map(lambda x: (None,) * np.ndim(x), state),
            step=functools.partial(plain_step, trainer),
            batch=lambda number: rows_of(self.config, training, dtype, number),
            batch_axes=_batch_axes(is_split=False),
            observed=observed_plain,
        )
        with on_mesh(alone, rules_from(self.config.rules)):
            return run_program(program, compile_program(program), STEPS)


@dataclasses.dataclass(frozen=True)
class Noting:
    """A schedule of microbatches that notes what another one returns, so that gradients can be compared.

    Attributes:
      schedule: The schedule that runs.
      noted: Losses and gradients that it returned while a step was traced.
    """

    schedule: Any
    noted: list = dataclasses.field(default_factory=list, compare=False)

    def __call__(self, *args: Any) -> Any:
        """Returns what the schedule does."""
        out = self.schedule(*args)
        self.noted.append(out)
        return out


def observed(state: Any) -> dict[str, PyTree]:
    """Returns what of a trainer's state is compared, by the names of `observed_plain`."""
    average = state.average
    if average is None:
        average = {}
    return {"params": state.params, "average": average} | _moments(state.opt_state)


def observed_plain(state: dict[str, PyTree]) -> dict[str, PyTree]:
    """Returns the same of the plain step's state."""
    return {"params": state["params"], "average": state["average"]} | _moments(state["optimizer"])


def _moments(state: PyTree) -> dict[str, PyTree]:
    """Moments of Adam, wherever a chain holds them; of another optimizer, all of its state."""
    is_adam = functools.partial(lambda kind, x: isinstance(x, kind), optax.ScaleByAdamState)
    found = [part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part)]
    if len(found) != 1:
        return {"optimizer": state}
    (adam,) = found
    return {"count": adam.count, "mu": adam.mu, "nu": adam.nu}


def rows_of(
    config: Any, training: Training, dtype: str, number: int, part: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Returns rows of the batch of a step: several documents each, uneven weights, rows and ends of padding.

    Weights are multiples of a quarter: their sums are exact in any order and in any dtype.
    """
    draw = np.random.default_rng((config.seed, number))
    rows = config.data.batch_size
    length = training.length
    tokens = draw.integers(0, config.model.vocab_size, (rows, length + 1)).astype(np.int32)
    weights = draw.integers(0, 9, (rows, length)) / 4
    starts = draw.random((rows, length)) < 3 / max(length, 3)
    starts[:, 0] = True
    index = np.broadcast_to(np.arange(length), (rows, length))
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    ends = length - draw.integers(0, max(length // 3, 1), rows)
    weights = np.where(index < ends[:, None], weights, 0)
    if rows > 2:
        weights[rows // 2 :: rows // 2 + 1] = 0
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights.astype(np.float64 if dtype == "float64" else np.float32),
        "segments": np.cumsum(starts, axis=1).astype(np.int32),
        "positions": (index - first).astype(np.int32),
    }
    return {name: x[part] for name, x in batch.items()}


@functools.cache
def _params(model: LMConfig, seed: int) -> PyTree:
    """Parameters of a model on the host: the same numbers in every dtype that holds them."""
    wide = "float64" if model.dtype == "float64" else "float32"
    return jax.device_get(jax.jit(lambda key: init(key, model, wide))(jax.random.key(seed)))


@functools.cache
def _first_state(trainer: Trainer, seed: int) -> PyTree:
    """The state that a trainer begins with, on the host; no schedule changes it."""
    params = _params(trainer.model, seed)
    shapes = jax.eval_shape(lambda: trainer.begin(params))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    state = zeros.replace(params=params)
    if zeros.average is None:
        return state
    return state.replace(average=params)


def _placing(config: Any, training: Training) -> Any:
    """The configuration by which training places rows of this length for this model."""
    data = dataclasses.replace(config.data, seq_len=training.length)
    return dataclasses.replace(config, model=training.model, data=data)


def _ordered(config: Any, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows of the whole batch on the host, padded and in the order of the ambient mesh."""
    length = row_length(config)
    return in_order(padded(rows, length), config.model.order(length), shares("seq_layer"))


def _batch_axes(is_split: bool) -> dict[str, tuple[str | None, ...]]:
    names = list(NAMES)
    if is_split:
        names.append("places")  # rows of the batch carry the order of their tokens
    return dict.fromkeys(names, ("batch", "seq_layer"))


def _expected_axes(model: LMConfig) -> PyTree:
    """Axes by which the parameters' shares are counted: matrices of attention and mlp, by what fsdp has to split."""

    def one(path, leaf: Leaf):
        is_known = path[-1].key in ("wq", "wk", "wv", "wo", "w_up", "w_gate", "w_down")
        if not is_known or "embed" in leaf.axes or model.embed_dim not in leaf.shape:
            return leaf.axes
        axes = list(leaf.axes)
        axes[leaf.shape.index(model.embed_dim)] = "embed"
        return tuple(axes)

    return jax.tree_util.tree_map_with_path(
        one, leaves(model), is_leaf=lambda x: isinstance(x, Leaf)
    )
