"""The folder of checkpoints: local or in a bucket, whether it can be written, what is kept there and for how long."""

import gc
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import CheckpointManager
from orbax.checkpoint import checkpoint_managers as policies

from jaxpar.io.lock import lock_folder
from jaxpar.io.snapshot import on_all_processes
from jaxpar.types import UsageError, causes_of

# What TensorStore writes into a ValueError when the operating system refuses a write.
_REFUSALS = (
    "no space left on device",
    "file too large",
    "quota exceeded",
    "read-only file system",
    "permission denied",
    "resource_exhausted",
)
# How TensorStore's messages begin, in front of what only its authors can read.
_STATUS = re.compile(
    r"(ABORTED|ALREADY_EXISTS|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|INVALID_ARGUMENT|"
    r"NOT_FOUND|OUT_OF_RANGE|PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|UNIMPLEMENTED|UNKNOWN): "
)
# What stands anywhere in an error of reading, and what it means; else the content is at fault.
_UNREADABLE = {
    "permission denied": (
        "permission denied",
        "permission_denied",
        "permissionerror",
        "unauthenticated",
    ),
    "the storage cannot be reached": (
        "unavailable",
        "deadline_exceeded",
        "connection",
        "timed out",
    ),
    "a file of it is missing": (
        "not_found",
        "not found",
        "filenotfound",
        "no such file",
        "does not exist",
        "keyerror",
    ),
}


_REMEDY = "expected no other writer: close that Checkpoints, take another folder, or read_only=True"


class CheckpointOrder:
    """How good a checkpoint is by its `metric`; None ranks none."""

    def __init__(self, metric: str | None, mode: str):
        self.metric, self.mode = metric, mode
        self._worst = math.inf if mode == "min" else -math.inf

    def __call__(self, metrics: Mapping[str, float]) -> float:
        """Returns the number that ranks a save; the worst of all where it has none, or NaN or infinity."""
        value = metrics.get(self.metric or "", self._worst)
        return value if math.isfinite(value) else self._worst

    def best_step(self, folder: epath.Path, steps: Sequence[int]) -> int | None:
        """Returns the best of `steps`, the newest of equals; None if none has a finite metric."""
        found: tuple[float, int] | None = None
        for step in sorted(steps):
            value = self._metric_of(folder / str(step))
            if value == self._worst:
                continue
            if self.mode == "min":
                value = -value
            if found is None or value >= found[0]:
                found = value, step
        if found is None:
            return None
        return found[1]

    def _metric_of(self, checkpoint: epath.Path) -> float:
        try:
            return self(json.loads((checkpoint / "metrics" / "metrics").read_text()))
        except (OSError, ValueError, TypeError, AttributeError):
            # Damaged, or deleted by its run meanwhile.
            return self._worst


def absolute(folder: str | os.PathLike) -> epath.Path:
    """Returns the whole path of a local folder, or gs://bucket/folder as it is.

    Raises:
      UsageError: For a kind of storage that there is not, such as s4://.
    """
    try:
        path = epath.Path(folder)
    except KeyError as error:
        raise UsageError(
            f"checkpoints cannot be kept in {os.fspath(folder)}: {error.args[0]} is no storage; legal are a local "
            "folder and gs://bucket/folder."
        ) from None
    return (
        path if "://" in str(path) else path.absolute()
    )  # which would take gs: for a folder's name


def open_folder(folder: epath.Path, read_only: bool) -> None:
    """Makes the folder and tries to write there from each process; for `read_only`, looks there.

    Raises:
      UsageError: Some process cannot write there, or for `read_only` cannot look there.
    """
    problem = None
    try:
        if read_only:
            folder.exists()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # Every process writes its own shards, so each probes, under a name of its own.
            probe = folder / f".probe-{jax.process_index()}-{os.getpid()}"
            probe.write_bytes(b"probe")
            probe.unlink()
    except (OSError, ImportError) as error:  # a bucket needs a package that not everybody has
        problem = error
    if on_all_processes(problem is not None):
        reason = (storage_reason(problem) or str(problem)) if problem else "from another process"
        raise UsageError(
            f"the checkpoint folder {folder} cannot be {'read' if read_only else 'written'} ({reason}); "
            "choose a folder that this user may write, on a disk with free space"
        ) from problem


def lock(folder: epath.Path) -> int:
    """Locks a local folder for one `Checkpoints`, from process 0; a bucket has no locks.

    Returns:
      The open lock file for `unlock_folder`, or -1.

    Raises:
      UsageError: Another `Checkpoints`, of this process or of another one, writes there.
    """
    file = -1
    problem = ""
    if jax.process_index() == 0 and "://" not in str(folder):
        file, problem = lock_folder(pathlib.Path(folder), "checkpoint folder", _REMEDY)
        if problem:
            # A `Checkpoints` without a reference, as where a notebook's cell ran twice, unlocks it.
            gc.collect()
            file, problem = lock_folder(pathlib.Path(folder), "checkpoint folder", _REMEDY)
    if on_all_processes(bool(problem)):
        raise UsageError(f"folder={folder}: {problem or 'process 0 could not lock it.'}")
    return file


def set_unlistable_aside(folder: epath.Path) -> list[str]:
    """Sets aside what Orbax could not list; returns a sentence about each, on process 0."""
    refused = []
    for path in folder.glob("*/metrics/metrics") if jax.process_index() == 0 else ():
        step = path.parent.parent
        try:
            json.loads(path.read_text())
        except ValueError:
            if step.name.isdigit():
                refused.append(
                    set_aside(step, f"the checkpoint {step} is damaged: its metrics cannot be read")
                )
    on_all_processes(0)
    return refused


def set_aside(checkpoint: epath.Path, why: str) -> str:
    """Renames a checkpoint, so that it is neither listed nor deleted nor in the way; returns why, and the new name."""
    aside, count = checkpoint.parent / f"{checkpoint.name}.refused", 1
    while aside.exists():
        count += 1
        aside = checkpoint.parent / f"{checkpoint.name}.refused-{count}"
    checkpoint.rename(aside)
    return f"{why}; it was set aside as {aside.name}"


def open_manager(
    folder: epath.Path, keep: int, every_s: float, order: CheckpointOrder
) -> CheckpointManager:
    """Returns Orbax's manager of `folder`, with our items and retention."""
    retention: list[policies.PreservationPolicy] = [policies.LatestN(keep)]
    if every_s:
        retention.append(policies.EveryNSeconds(every_s))  # pyright: ignore[reportArgumentType]
    if order.metric is not None:
        best = policies.BestN(
            get_metric_fn=order,
            reverse=order.mode == "min",
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        retention.append(best)
    processes = jax.process_count()
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(retention),
        best_fn=None if order.metric is None else order,
        best_mode=order.mode,
        cleanup_tmp_directories=True,
        create=False,
        # Named processes meet through the coordinator. The default is a collective on the devices.
        # From a thread it would come between the step's own, in another order on each process.
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            active_processes=set(range(processes)) if processes > 1 else None
        ),
    )
    handlers = {
        "state": ocp.StandardCheckpointHandler(),
        "layout": ocp.JsonCheckpointHandler(),
        "metadata": ocp.JsonCheckpointHandler(),
    }
    return CheckpointManager(folder, item_handlers=handlers, options=options)


def storage_reason(error: BaseException | None) -> str | None:
    """Says why storage refused, from anywhere in the chain of causes; None for any other error."""
    if error is None:
        return None
    for link in causes_of(error):
        if isinstance(link, jax.errors.JaxRuntimeError):
            return None
        if said := [text for text in _REFUSALS if text in str(link).lower()]:
            return said[0]
        if isinstance(link, OSError):
            return (link.strerror or str(link)).lower()
        if isinstance(link, (ValueError, RuntimeError)) and (status := _STATUS.match(str(link))):
            return f"the storage answers {status[1].lower().replace('_', ' ')}"
    return None


def unreadable_reason(error: BaseException) -> str:
    """Says in our words why a checkpoint cannot be read, whatever Orbax, TensorStore or JSON said of it."""
    said = " ".join(f"{type(link).__name__} {link}" for link in causes_of(error)).lower()
    reasons = (
        reason for reason, words in _UNREADABLE.items() if any(word in said for word in words)
    )
    return next(reasons, "a file of it is not as it was written")
