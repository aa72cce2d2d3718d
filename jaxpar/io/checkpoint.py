"""Checkpoints that are whole or absent: asynchronous saves by Orbax, restored onto any mesh."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jaxpar.types import PyTree, UsageError

__all__ = ["Checkpoints", "SaveError"]

# What TensorStore writes into a ValueError when the operating system refuses a write.
_REFUSALS = (
    "no space left on device",
    "file too large",
    "quota exceeded",
    "read-only file system",
    "permission denied",
    "resource_exhausted",
)


class SaveError(UsageError):
    """A checkpoint could not be written; every earlier whole one is intact."""


class Checkpoints:
    """The checkpoints of one run: the newest few and the best one.

    Wraps `orbax.checkpoint.CheckpointManager`. Each checkpoint is the folder `folder/<step>`, which gets
    that name only once it is whole; what a killed process left half-written is never listed and is
    removed at the next start. All processes of a run call every method; Orbax coordinates them.

    Args:
      folder: Where the checkpoints live; created where absent.
      keep: How many of the newest to keep, at least 1.
      best_metric: The metric that ranks checkpoints, whose best is kept as well; None ranks none.
      best_mode: Whether "min" or "max" of the metric is best.

    Raises:
      UsageError: `keep` or `best_mode` is illegal, `folder` cannot be written, or a checkpoint's metrics
        are damaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        best_metric: str | None = "validation/loss",
        best_mode: Literal["min", "max"] = "min",
    ):
        if keep < 1:
            raise UsageError(f"keep={keep} would keep no checkpoint; it must be at least 1")
        if best_mode not in ("min", "max"):
            raise UsageError(f'best_mode={best_mode!r} must be "min" or "max"')
        self._folder = Path(folder).absolute()
        self._best_metric = best_metric
        self._worst = math.inf if best_mode == "min" else -math.inf
        self._pending: tuple[int, int] | None = None  # step and bytes of the save under way
        retention: list[policies.PreservationPolicy] = [policies.LatestN(keep)]
        if best_metric is not None:
            best = policies.BestN(
                get_metric_fn=self._rank, reverse=best_mode == "min", n=1, keep_checkpoints_without_metrics=False
            )
            retention.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(retention),
            best_fn=None if best_metric is None else self._rank,
            best_mode=best_mode,
            cleanup_tmp_directories=True,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "metadata": ocp.JsonCheckpointHandler()}
        try:
            self._manager = ocp.CheckpointManager(self._folder, item_handlers=handlers, options=options)
            # Every process writes its own shards, so each probes, under a name of its own.
            probe = self._folder / f".probe-{jax.process_index()}-{os.getpid()}"
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"the checkpoint folder {self._folder} cannot be written ({_storage_reason(error)}); "
                "choose a folder that this user may write, on a disk with free space"
            ) from error
        except json.JSONDecodeError as error:  # Orbax reads the metrics of every checkpoint
            damaged = [path for path in self._folder.glob("*/metrics/metrics") if path.read_text() == error.doc]
            self._refuse_to_read(int(damaged[0].parent.parent.name), error)

    def _rank(self, metrics: Mapping[str, float]) -> float:
        """Returns the number that ranks a save; the worst of all where it has none, or NaN or infinity."""
        value = metrics.get(self._best_metric or "", self._worst)
        return value if math.isfinite(value) else self._worst

    def steps(self) -> list[int]:
        """Returns the steps of all whole checkpoints, ascending; finishes a save under way first."""
        self.wait()
        return sorted(self._manager.all_steps())

    def newest(self) -> int | None:
        """Returns the largest step that has a whole checkpoint; finishes a save under way first."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step whose `best_metric` is best, or None where no save had a finite one."""
        self.wait()
        best = None if self._best_metric is None else self._manager.best_step()
        return None if best is None or self._rank(self._manager.metrics(best) or {}) == self._worst else best

    def save(self, step: int, state: PyTree, metrics: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        """Copies `state` to the host and starts to write it; returns before it is on disk.

        Args:
          step: Number of steps made; larger than every saved step.
          state: Pytree of `jax.Array`, typed keys included. It may be donated right after the call.
          metrics: Numbers by name. Without a finite `best_metric` this save never counts as best.
          metadata: What JSON can hold (identity of the run, versions); saved in the same checkpoint.

        Raises:
          SaveError: Storage refused this save, or the one before.
          UsageError: `step` is not larger than the newest one.
        """
        newest = self.newest()
        if newest is not None and step <= newest:
            raise UsageError(f"step {step} cannot be saved to {self._folder}: step {newest} is there already")
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            metadata=ocp.args.JsonSave(dict(metadata)),
        )
        self._pending = (step, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        try:
            numbers = {name: float(value) for name, value in metrics.items()}
            self._manager.save(step, args=items, metrics=numbers, force=True)
        except Exception as error:
            self._fail(error)

    def poll(self) -> None:
        """Raises the error of a save that failed meanwhile; never waits, so call it every step."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the save under way is on disk; raises its error."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)
        self._pending = None

    def close(self) -> None:
        """Waits as `wait` does, then ends Orbax's threads; the object is of no use afterwards."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the `metadata` that was saved with `step`."""
        return self._read(step, "metadata", ocp.args.JsonRestore())

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        """Reads the state of `step` into the shardings that are asked for.

        Args:
          step: One of `steps()`.
          abstract_state: Pytree of `jax.ShapeDtypeStruct` with `sharding`, of the saved state's
            structure, shapes and dtypes; the mesh may differ from the saved one.

        Returns:
          The state, bit for bit what was saved, in the structure of `abstract_state`.

        Raises:
          UsageError: There is no such step, a leaf differs, or the checkpoint is damaged.
        """
        self._check_listed(step)
        try:
            saved = _layout(self._manager.item_metadata(step)["state"])
            if not saved:
                raise FileNotFoundError("it does not say which arrays it holds")
        except Exception as error:
            self._refuse_to_read(step, error)
        wanted = _layout(abstract_state)
        for path in dict.fromkeys([*wanted, *saved]):
            ours, theirs = wanted.get(path, "absent"), saved.get(path, "absent")
            if ours != theirs:
                raise UsageError(
                    f"the checkpoint of step {step} in {self._folder} does not fit this run: "
                    f"{path} is {theirs} there and {ours} here"
                )
        return self._read(step, "state", ocp.args.StandardRestore(abstract_state))

    def _read(self, step: int, item: str, how: ocp.args.CheckpointArgs) -> Any:
        self._check_listed(step)
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except jax.errors.JaxRuntimeError:
            raise  # the device's memory, not the checkpoint
        except Exception as error:
            self._refuse_to_read(step, error)

    def _check_listed(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise UsageError(f"{self._folder} has no checkpoint of step {step}; it has {steps or 'none'}")

    def _refuse_to_read(self, step: int, error: Exception) -> NoReturn:
        detail = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"the checkpoint of step {step} cannot be read ({type(error).__name__}: {detail:.200}); remove "
            f"the folder {self._folder / str(step)} to go on from the one before it"
        ) from error

    def _fail(self, error: Exception) -> NoReturn:
        """Clears away a failed save and says why; an error that is not the storage's goes on as it is."""
        step, size = self._pending or (-1, 0)
        self._pending = None
        self._manager.reload()  # Orbax already dropped the older steps that it would have deleted
        if jax.process_index() == 0:
            for half in self._folder.glob(f"*{ocp.path.atomicity.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(half, ignore_errors=True)
        reason = _storage_reason(error)
        if reason is None:
            raise error
        newest = max(self._manager.all_steps(), default=None)
        raise SaveError(
            f"the checkpoint of step {step} could not be written to {self._folder}: {reason} "
            f"({shutil.disk_usage(self._folder).free / 1e6:.1f} MB free, about {size / 1e6:.1f} MB needed); "
            + ("no earlier one exists" if newest is None else f"the last whole one is step {newest} and is intact")
        ) from error


def _layout(tree: PyTree) -> dict[str, str]:
    """Returns `path -> "dtype[shape]"` of every leaf, a typed key as the words that are stored for it."""
    layout = {}
    for path, leaf in ocp.tree.to_flat_dict(tree).items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        layout["/".join(path)] = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return layout


def _storage_reason(error: BaseException | None) -> str | None:
    """Says why storage refused, from anywhere in the chain of causes; None for any other error."""
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        if said := [text for text in _REFUSALS if text in str(error).lower()]:
            return said[0]
        if isinstance(error, OSError):
            return (error.strerror or str(error)).lower()
        error = error.__cause__ or error.__context__
    return None
