"""A run from three functions: batches of examples, training with checkpoints and resume, predictions."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar._older_fields import newer_arguments
from jaxpar.io import Checkpoints, open_progress, open_writers
from jaxpar.loop import Fit, FitResult, Hooks, fit, resume
from jaxpar.lower.jaxprs import live_equations
from jaxpar.mesh import MeshSpec, make_mesh, mesh_axes, num_shares, place_rows, use_mesh
from jaxpar.own.layout import lay_out
from jaxpar.own.model import Axes, OwnModel, OwnState, path_of, variables_of
from jaxpar.types import BatchFn, PyTree, UsageError

__all__ = [
    "LayoutOptions",
    "check_finite",
    "examples_in_batches",
    "mean_loss",
    "predictions",
    "train_own",
]


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """Options of how a model's parameters are laid out over devices.

    Attributes:
      mesh: Axes and sizes; by default the ambient mesh, or all devices along data.
      given: Axes of parameters by patterns of their paths, instead of those that the rules give.
      tell: Function that is called with the table of the layout.
    """

    mesh: MeshSpec | None = None
    given: Mapping[str, Axes] | None = None
    tell: Callable[[str], None] = print


_OLDER = {field.name: f"layout.{field.name}" for field in dataclasses.fields(LayoutOptions)}
"""Arguments of `train_own` that are fields of its layout today."""


def train_own(
    model: OwnModel,
    examples: Sequence[object],
    counts: Fit,
    *,
    batch_size: int,
    folder: Path | None = None,
    held_out: Sequence[object] = (),
    seed: int = 0,
    layout: LayoutOptions | MeshSpec | None = None,
    **older: object,
) -> FitResult:
    """Trains a model of one's own: shows how its parameters lie, then runs or goes on from where the folder is.

    Args:
      model: Its three functions and its optimizer.
      examples: What `collate` makes batches of.
      counts: Steps, and steps between evaluations and checkpoints.
      batch_size: Examples in a batch.
      folder: Folder of metrics.jsonl and checkpoints; None writes nothing.
      held_out: Examples whose mean loss is "validation/loss".
      seed: Number that the first parameters, the order of examples and the keys of steps are made
        from.
      layout: Mesh, axes of parameters, and where their table goes; or the mesh alone. None means the
        defaults.
      **older: Fields of `layout`, which were arguments; accepted until the first release.

    Returns:
      The last state and metrics. A finished run is returned as it is; the same call with more steps goes on.

    Raises:
      TypeError: A keyword that is unknown.
      UsageError: What `lay_out`, `OwnModel` and `examples_in_batches` refuse; a loss that is not finite; checkpoints of
        another run.
    """
    if not isinstance(layout, LayoutOptions):
        layout = LayoutOptions(mesh=layout)
    groups = {"layout": layout}
    chosen: LayoutOptions = newer_arguments("train_own", _OLDER, groups, older)["layout"]
    with contextlib.ExitStack() as stack:
        if chosen.mesh is not None or jax.sharding.get_mesh().empty:
            stack.enter_context(use_mesh(make_mesh(chosen.mesh)))
        batches = examples_in_batches(model, examples, batch_size, seed)
        laid = lay_out(model, batches(0), chosen.given)
        chosen.tell(str(laid))
        model = laid.model
        evaluate = (
            functools.partial(mean_loss, model, held_out, batch_size) if len(held_out) else None
        )
        hooks = Hooks(axes=model.axes(), evaluate=evaluate, check=check_finite)
        start, state = 0, None
        if folder is not None:
            checkpoints = stack.enter_context(
                contextlib.closing(Checkpoints(folder / "checkpoints"))
            )
            metadata = {"seed": seed, "batch_size": batch_size, "examples": len(examples)}
            hooks = dataclasses.replace(hooks, checkpoints=checkpoints, metadata=metadata)
            start, state = resume(model, hooks) or (0, None)
            writer = stack.enter_context(
                contextlib.closing(open_writers(folder, resume_step=start or None))
            )
            hooks = dataclasses.replace(hooks, writer=writer)
        hooks = dataclasses.replace(
            hooks, progress=stack.enter_context(open_progress(counts.num_steps, start))
        )
        return fit(model, jax.random.key(seed), batches, counts, hooks, state=state, start=start)


def examples_in_batches(
    model: OwnModel, examples: Sequence[object], batch_size: int, seed: int
) -> BatchFn:
    """Returns step -> batch on the ambient mesh: all examples in random order, again and again, each order its own.

    A pure function of seed and step. Each process collates its own rows alone.

    Raises:
      UsageError: There is no example, or the batch does not divide over the mesh; as `collated`.
    """
    if not len(examples):
        raise UsageError("there is no example to train on.")
    _check_divides(batch_size)

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(len(examples))

    def chosen(number: int) -> object:
        epoch, place = divmod(number, len(examples))
        return examples[int(order(epoch)[place])]

    def batch(step: int) -> PyTree:
        first = step * batch_size
        return place_rows(
            lambda rows: collated(model, [chosen(first + i) for i in range(rows.start, rows.stop)]),
            batch_size,
        )

    return batch


def collated(model: OwnModel, examples: list) -> PyTree:
    """Returns what a model's `collate` makes of examples.

    Raises:
      UsageError: It is not a pytree of arrays with as many rows in front as there are examples.
    """
    rows = model.collate(examples)
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
        if (
            not isinstance(leaf, np.ndarray | jax.Array)
            or not leaf.shape
            or leaf.shape[0] != len(examples)
        ):
            found = (
                f"shape {leaf.shape}"
                if isinstance(leaf, np.ndarray | jax.Array)
                else f"a {type(leaf).__name__}"
            )
            raise UsageError(
                f"collate made {path_of(path) or 'a batch'} of {found} from {len(examples)} examples; legal are arrays "
                f"whose first dimension is {len(examples)}."
            )
    if not jax.tree.leaves(rows):
        raise UsageError("collate made no array; legal are pytrees of arrays, such as a dict.")
    return jax.tree.map(np.asarray, rows)


def _check_divides(batch_size: int) -> None:
    shares = num_shares(*mesh_axes("batch"))
    if batch_size < 1 or batch_size % shares:
        below = batch_size // shares * shares
        legal = f"{below} and {below + shares}" if below > 0 else str(shares)
        over = " x ".join(mesh_axes("batch")) or "one device"
        raise UsageError(
            f"batch_size={batch_size} does not divide over the mesh's {over} = {shares}; the nearest legal: {legal}."
        )


def check_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Stops a run whose loss or update is not finite; the parameters are those before it.

    Raises:
      UsageError: The loss of this step is no number, or its update was not made.
    """
    if not np.isfinite(metrics["train/loss"]):
        loss = metrics["train/loss"]
        raise UsageError(
            f"the loss of step {step} is {loss}; lower the learning rate or mend the loss."
        )
    if metrics["train/skipped"]:
        raise UsageError(
            f"the update of step {step} is not finite, its loss is; lower the learning rate."
        )


def mean_loss(
    model: OwnModel, examples: Sequence[object], batch_size: int, state: OwnState
) -> dict[str, float]:
    """Returns {"validation/loss": ..., "validation/<metric>": ...}, means over all examples.

    Each example counts once. They are judged by `OwnModel.validation_loss`; without one by `loss`
    with the key of seed 0, whatever the step, and a warning says so where that loss draws from its
    key or has statistics of its own. The mean of a batch counts by its examples. Those that are
    left over are a smaller batch; where they do not divide over the mesh, each is repeated as
    often, which leaves their mean as it is.

    Cost: a forward pass of every example, and a program for each size of a batch: two on one
      device.

    Args:
      model: Its losses.
      examples: What `collate` makes batches of.
      batch_size: Examples in a batch, divided over the ambient mesh as in training.
      state: Trained.

    Raises:
      UsageError: There is no example; the batch does not divide over the mesh; as
        `OwnModel.judged`.
    """
    if not len(examples):
        raise UsageError("there is no example to judge.")
    _check_divides(batch_size)
    means: dict[str, float] = {}
    first = 0
    for size, repeats in _sizes_of_batches(len(examples), batch_size):
        rows = [examples[i] for i in range(first, first + size) for _ in range(repeats)]
        batch = place_rows(lambda part, rows=rows: collated(model, rows[part]), len(rows))
        found = _loss_of(model)(state.params, state.collections, batch)
        for name, value in jax.device_get(found).items():
            means[name] = means.get(name, 0.0) + float(value) * size / len(examples)
        first += size
    return {f"validation/{name}": value for name, value in means.items()}


def _sizes_of_batches(count: int, batch_size: int) -> list[tuple[int, int]]:
    """Returns how many examples each batch has, and how often each of them is in it.

    Every batch divides over the mesh, and none is larger than `batch_size`.
    """
    shares = num_shares(*mesh_axes("batch"))
    sizes = [(batch_size, 1)] * (count // batch_size)
    left = count % batch_size
    if left >= shares:
        sizes.append((left // shares * shares, 1))
    left = left % shares
    most = batch_size // shares
    while left:
        size = min(left, most)
        sizes.append((size, shares))
        left -= size
    return sizes


@functools.lru_cache(maxsize=8)
def _loss_of(model: OwnModel) -> Callable:
    def loss(params, collections, batch):
        if model.validation_loss is None and _is_of_training(model, params, collections, batch):
            warnings.warn(
                "held-out examples are judged by loss as in training, with what it draws from its "
                "key (that of seed 0) and with statistics of the batch; expected "
                "OwnModel(validation_loss=...), without dropout.",
                stacklevel=2,
            )
        total, metrics = model.judged(params, collections, batch)
        return {"loss": total} | metrics

    return jax.jit(loss)


def _is_of_training(
    model: OwnModel, params: PyTree, collections: dict[str, PyTree] | None, batch: PyTree
) -> bool:
    """Whether `loss` draws from its key, or has collections, which may be a batch's statistics."""
    if collections:
        return True

    def value(key):
        total, metrics, _ = model.valued(params, collections, batch, key)
        return total, metrics

    program = jax.make_jaxpr(value)(jax.random.key(0)).jaxpr
    (key,) = program.invars
    return any(key in equation.invars for equation in live_equations(program))


def predictions(
    model: OwnModel, state: OwnState, examples: Sequence[object], batch_size: int
) -> PyTree:
    """Returns what `predict` says of every example, NumPy arrays with a row an example in front.

    Args:
      model: Its `predict`.
      state: Trained.
      examples: What to predict; the last batch is filled up, and what fills it is cut off.
      batch_size: Examples in a batch, divided over the ambient mesh as in training.

    Raises:
      UsageError: There is no example; a prediction has no row for each of them.
    """
    if not len(examples):
        raise UsageError("there is no example to predict.")
    _check_divides(batch_size)
    parts, predict = [], _predict_of(model, jax.sharding.get_mesh())
    for first in range(0, len(examples), batch_size):
        rows = [examples[min(i, len(examples) - 1)] for i in range(first, first + batch_size)]
        batch = place_rows(lambda part, rows=rows: collated(model, rows[part]), batch_size)
        part = jax.device_get(predict(state.params, state.collections, batch))
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if leaf.shape[:1] != (batch_size,):
                raise UsageError(f"predict made {path_of(path) or 'an array'} of shape {leaf.shape} from {batch_size} "
                                 "examples; its first dimension must be theirs.")  # fmt: skip
        parts.append(part)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(examples)], *parts)


@functools.lru_cache(maxsize=8)
def _predict_of(model: OwnModel, mesh: jax.sharding.Mesh) -> Callable:
    def predict(params, collections, batch):
        return model.predict(variables_of(params, collections), batch)

    return jax.jit(predict, out_shardings=None if mesh.empty else NamedSharding(mesh, P()))
