"""Checkpoints that are whole or absent, of no topology: asynchronous saves by Orbax, restored onto any mesh."""

import contextlib
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from jaxpar.fields import AtLeast, OneOf, check_value
from jaxpar.io import layers, reading, storage
from jaxpar.io.lock import unlock_folder
from jaxpar.io.reading import CorruptCheckpointError, RunMismatchError
from jaxpar.io.snapshot import fits_twice, on_all_processes, pinned, prepare, snapshot
from jaxpar.types import PyTree, UsageError

T = TypeVar("T")

__all__ = ["Checkpoints", "CorruptCheckpointError", "RunMismatchError", "SaveError"]


class SaveError(UsageError):
    """A checkpoint could not be written; every earlier whole one is intact."""


class Checkpoints:
    """The checkpoints of one run: the newest few, one every so often, and the best one.

    Wraps `orbax.checkpoint.CheckpointManager`. Each checkpoint is the folder `folder/<step>`, which gets
    that name only once it is whole; what a killed process left half-written is never listed and is
    removed at the next start. It holds arrays by logical name and global shape with a digest of each, and
    nothing of the mesh that they were on. All processes of a run call every method.

    One object at a time writes to a local folder, from its construction to `close`, by a lock on
    `folder/.lock`. Any number may read there meanwhile, with `read_only=True`.

    Args:
      folder: Where the checkpoints live, a local path or one such as gs://bucket/folder; created where absent.
      keep: How many of the newest to keep, at least 1.
      keep_every_s: Seconds from one checkpoint to the next that is kept for good; 0 keeps none for good.
      best_metric: The metric that ranks checkpoints, whose best is kept as well; None ranks none.
      best_mode: Whether "min" or "max" of the metric is best.
      snapshot: Where a save puts the state before it is written: a copy on the "device", which takes the state's
        memory again and stalls training for no more than the copy; on the "host", which stalls until all has left the
        devices (0.02 s a GB, to page-locked memory); "auto" decides at the first save by the devices' free memory, for
        all that follow.
      read_only: Never to write, delete or set aside anything, as beside a run that trains.

    Attributes:
      refused: One sentence about each checkpoint that was set aside or, with `read_only`, passed
        over; in order.

    Raises:
      UsageError: An option is illegal, `folder` cannot be written, or another object writes there.
    """

    # Of a writer alone: it lists the folder once, and fails at the metrics of a damaged checkpoint.
    _manager: ocp.CheckpointManager

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep: int = 2,
        keep_every_s: float = 0,
        best_metric: str | None = "validation/loss",
        best_mode: Literal["min", "max"] = "min",
        snapshot: Literal["auto", "device", "host"] = "auto",
        read_only: bool = False,
    ):
        check_value("keep", keep, AtLeast(1), int)
        check_value("keep_every_s", keep_every_s, AtLeast(0))
        check_value("best_mode", best_mode, OneOf(("min", "max")))
        check_value("snapshot", snapshot, OneOf(("auto", "device", "host")))
        self._folder = storage.absolute(folder)
        self._order = storage.CheckpointOrder(best_metric, best_mode)
        self._on_device = None if snapshot == "auto" else snapshot == "device"
        self._read_only = read_only
        self._pending: tuple[int, int] | None = None  # step and bytes of the save under way
        self._job: Future | None = None
        self._closed = False
        # One thread, so that Orbax's barriers come in the same order on all processes.
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self.refused: list[str] = []
        storage.open_folder(self._folder, read_only)
        # Before anything is tidied up: another object's save under way looks half-written.
        file = -1
        if not read_only:
            file = storage.lock(self._folder)
        self._unlock = weakref.finalize(self, unlock_folder, file)
        try:
            if not read_only:
                self.refused += storage.set_unlistable_aside(self._folder)
                self._manager = storage.open_manager(self._folder, keep, keep_every_s, self._order)
        except BaseException:
            self._unlock()
            raise

    @property
    def folder(self) -> epath.Path:
        """Whole path of the folder."""
        return self._folder

    def steps(self) -> list[int]:
        """Returns the steps of all whole checkpoints, ascending; finishes a save under way first."""
        self.wait()
        if self._read_only:
            return self.on_disk()
        return sorted(self._manager.all_steps())

    def on_disk(self) -> list[int]:
        """Returns the steps of the checkpoints that are whole now, ascending; waits for no save that is under way."""
        if not self._folder.exists():
            return []
        return sorted(ocp.utils.checkpoint_steps(self._folder))

    def newest(self) -> int | None:
        """Returns the largest step that has a whole checkpoint; finishes a save under way first."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step whose `best_metric` is best, or None where no save had a finite one."""
        return self._order.best_step(self._folder, self.steps())

    def prepare(self, state: PyTree) -> None:
        """Compiles what a save of such a state runs on the devices, so that the first save does not stall for it."""
        prepare(reading.flatten(state), self._on_device is not False)

    def save(
        self, step: int, state: PyTree, metrics: Mapping[str, float], metadata: Mapping[str, object]
    ) -> float:
        """Copies `state` and starts to write it; returns before it is on disk.

        With a snapshot on the device, this waits for nothing but an earlier save that is still under way.

        Args:
          step: Number of steps made; larger than every saved step.
          state: Pytree of `jax.Array`, typed keys included. It may be donated right after the call.
          metrics: Numbers by name. Without a finite `best_metric` this save never counts as best.
          metadata: What JSON can hold (identity of the run, versions); saved in the same checkpoint.

        Returns:
          The seconds that this call took, which training stood still for.

        Raises:
          SaveError: Storage refused this save, or the one before.
          UsageError: `step` is not larger than the newest one, or this is `read_only`.
        """
        began = time.perf_counter()
        if self._read_only:
            raise UsageError(
                f"step {step} cannot be saved to {self._folder}, which was opened to be read only"
            )
        newest = self.newest()
        if newest is not None and step <= newest:
            raise UsageError(
                f"step {step} cannot be saved to {self._folder}: step {newest} is there already"
            )
        leaves = reading.flatten(state)
        if self._on_device is None:
            self._on_device = not on_all_processes(not fits_twice(leaves))
        copies, digests = snapshot(leaves, self._on_device)
        numbers = {name: float(value) for name, value in metrics.items()}
        self._pending = (step, sum(leaf.nbytes for leaf in leaves.values()))
        handed = threading.Event()
        self._job = self._worker.submit(
            self._write, step, copies, digests, numbers, dict(metadata), handed
        )
        if not self._on_device:
            handed.wait()
            self.poll()
        return time.perf_counter() - began

    def _write(
        self,
        step: int,
        leaves: dict[str, jax.Array],
        digests: Callable[[], dict[str, str]],
        metrics: dict[str, float],
        metadata: Mapping[str, object],
        handed: threading.Event,
    ) -> None:
        """Hands a save to Orbax and sees it through, in the worker; empties `leaves` once they are on the host."""
        try:
            layout = reading.describe(leaves, digests(), metadata)
            if (host := pinned(leaves)) is not None:
                leaves.clear()  # of what was on the devices nothing is needed any more
                leaves.update(host)
                handed.set()
            del host
            items = ocp.args.Composite(
                layout=ocp.args.JsonSave(layout),
                metadata=ocp.args.JsonSave(metadata),
                state=ocp.args.StandardSave(reading.nest(leaves)),
            )
            self._manager.save(step, args=items, metrics=metrics, force=True)
            del items
            leaves.clear()
        finally:
            handed.set()
        self._manager.wait_until_finished()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way; waits for nothing."""
        return self._job is not None and not self._job.done()

    def poll(self) -> None:
        """Raises the error of a save that failed meanwhile; never waits, so call it every step."""
        if not self.is_saving:
            self.wait()

    def wait(self) -> None:
        """Waits until the save under way is on disk; raises its error."""
        if self._job is None:
            return
        try:
            self._job.result()
        except Exception as error:
            self._fail(error)
        self._job = self._pending = None

    def close(self) -> None:
        """Waits as `wait` does, ends all threads and unlocks the folder; nothing can be done with it then."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._closed = True
            # Orbax raises the error of a save once a thread, and the worker's has been told.
            try:
                if not self._read_only:
                    self._worker.submit(self._manager.close).result()
                self._worker.shutdown()
            finally:
                self._unlock()

    def metadata(self, step: int) -> dict[str, object]:
        """Returns the `metadata` that was saved with `step`."""
        return self._refusing(step, lambda folder: reading.read_description(folder)[1])

    def numpy(self, step: int) -> dict[str, PyTree]:
        """Returns the state of `step` as nested dicts of NumPy arrays by logical name; typed keys as their words.

        Needs no mesh and no device; all of the state is held in this host's memory.

        Raises:
          UsageError: There is no such step, or the checkpoint is damaged.
        """
        return reading.nest(self._refusing(step, reading.read_numpy))

    def restore(self, step: int, abstract_state: PyTree, later: Collection[str] = ()) -> PyTree:
        """Reads the state of `step` into the shardings that are asked for.

        Leaves stacked over layers are cut into leaves of a layer and back where `abstract_state` has them so: see
        `jaxpar.io.layers.match_layers`.

        Args:
          step: One of `steps()`.
          abstract_state: Pytree of `jax.ShapeDtypeStruct` with `sharding`, of the saved state's names, shapes and
            dtypes; classes of containers, devices and mesh may all differ from the saved ones.
          later: Paths of leaves that older checkpoints may lack, and which are then zeros.

        Returns:
          The state, bit for bit what was saved, in the structure of `abstract_state`.

        Raises:
          UsageError: There is no such step, a leaf differs, or the checkpoint is damaged.
        """

        def read(folder: epath.Path) -> PyTree:
            return self._restore(folder, abstract_state, {}, {}, later)

        return self._refusing(step, read)

    def restore_newest(
        self,
        abstract_state: PyTree,
        metadata: Mapping[str, object],
        renamed: Mapping[str, str] | None = None,
        later: Collection[str] = (),
    ) -> tuple[int, PyTree] | None:
        """Restores the newest checkpoint that is whole and of this run; sets newer ones aside as `<step>.refused`.

        Nothing is ever deleted or overwritten: what was set aside stays until the user removes it. `refused` then says
        what and why. Where none can be restored, nothing is set aside; nor is it with `read_only`.

        Args:
          abstract_state: As for `restore`.
          metadata: What must be among the metadata saved.
          renamed: Parts of paths that older checkpoints have under another name, from today's to that one.
          later: Paths of leaves that older checkpoints may lack, and which are then zeros.

        Returns:
          The step and its state, or None where there is no checkpoint at all.

        Raises:
          RunMismatchError: The only whole ones are of another configuration; names what differs in the newest of them.
          CorruptCheckpointError: There are checkpoints, and none is whole.
        """
        problems: dict[int, UsageError] = {}
        for step in reversed(self.steps()):
            try:
                folder = self._folder / str(step)
                state = self._restore(folder, abstract_state, metadata, renamed or {}, later)
            except (CorruptCheckpointError, RunMismatchError) as error:
                problems[step] = error
                continue
            if problems and self._read_only:
                self._pass_over(problems.values(), step)
            elif problems:
                for refused, problem in problems.items():
                    if jax.process_index() == 0:
                        self.refused.append(
                            storage.set_aside(self._folder / str(refused), str(problem))
                        )
                on_all_processes(0)
                self._manager.reload()
            return step, state
        for problem in problems.values():
            if isinstance(problem, RunMismatchError):
                raise problem
        damaged = [*problems.values(), *self.refused]
        earlier = (
            [path.name for path in self._folder.glob("*.refused*")] if self._folder.exists() else []
        )
        if damaged or earlier:
            why = (
                damaged[0]
                if damaged
                else f"only {', '.join(sorted(earlier))} is left of those refused earlier"
            )
            raise CorruptCheckpointError(
                f"no checkpoint in {self._folder} is whole: {why}; start anew with resume=false, or in another folder"
            )
        return None

    def restore_first(
        self,
        steps: Sequence[int],
        abstract_state: PyTree,
        later: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> tuple[int, PyTree]:
        """Restores the first of `steps` that is whole; `refused` names those before it.

        Args:
          steps: Steps to read, the one wanted most first.
          abstract_state: As for `restore`.
          later: As for `restore`.
          ignored: First parts of the paths of leaves that are not read, such as "opt_state", and
            that `abstract_state` lacks; neither memory nor time is spent on them, and their
            damage goes unnoticed.

        Returns:
          The step and its state.

        Raises:
          UsageError: None of `steps` is whole, or a leaf differs.
        """
        problems: list[UsageError] = []
        for step in steps:
            try:
                state = self._restore(
                    self._folder / str(step), abstract_state, {}, {}, later, ignored
                )
            except CorruptCheckpointError as error:
                problems.append(error)
                continue
            self._pass_over(problems, step)
            return step, state
        why = "there is none"
        if problems:
            why = str(problems[0])
        raise CorruptCheckpointError(f"no checkpoint in {self._folder} is whole: {why}")

    def _pass_over(self, problems: Iterable[UsageError], step: int) -> None:
        """Notes which checkpoints were not read, on process 0, and which one was instead."""
        if jax.process_index() == 0:
            self.refused += [f"{problem}; step {step} is read instead" for problem in problems]

    def _restore(
        self,
        folder: epath.Path,
        abstract_state: PyTree,
        metadata: Mapping[str, object],
        renamed: Mapping[str, str],
        later: Collection[str],
        ignored: Collection[str] = (),
    ) -> PyTree:
        """Reads one checkpoint; all processes raise if one does."""
        every = reading.flatten(abstract_state)
        wanted = every
        described: dict[str, reading.ArrayDescription] = {}
        leaves, sources, problem = {}, {}, None
        try:
            described, saved = reading.read_description(folder)
            reading.check_same_run(folder, saved, metadata)
            described = {
                path: entry
                for path, entry in described.items()
                if path.partition("/")[0] not in ignored
            }
            absent = {path for path in later if path not in described}
            wanted = {path: leaf for path, leaf in every.items() if path not in absent}
            sources, form = reading.match_state(folder, described, wanted, renamed)
            leaves = reading.read_arrays(folder, form, partial=bool(ignored))
        except (CorruptCheckpointError, RunMismatchError) as error:
            problem = error
        # Before the next collective: a process that failed would not come to it.
        worst = on_all_processes(
            {type(None): 0, RunMismatchError: 1, CorruptCheckpointError: 2}[type(problem)]
        )
        if worst:
            kind = RunMismatchError if worst == 1 else CorruptCheckpointError
            raise problem or kind(f"the checkpoint {folder} cannot be read by another process")
        _, digests = snapshot(leaves, False)
        reading.check_digests(folder, described, digests())
        leaves = layers.assemble(leaves, sources, wanted)
        zeros = {path: _zeros(leaf) for path, leaf in every.items() if path not in wanted}
        leaves = leaves | zeros
        structure = jax.tree.structure(abstract_state)
        return jax.tree.unflatten(structure, [leaves[path] for path in every])

    def _refusing(self, step: int, read: Callable[[epath.Path], T]) -> T:
        """Reads from the step that the user named; there is no other to go on from, so the user is told what to do."""
        steps = self.steps()
        if step not in steps:
            raise UsageError(
                f"{self._folder} has no checkpoint of step {step}; it has {steps or 'none'}"
            )
        folder = self._folder / str(step)
        try:
            return read(folder)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{error}; move that folder away to go on from the one before it"
            ) from error

    def _fail(self, error: Exception) -> NoReturn:
        """Clears away a failed save and says why; an error that is not the storage's goes on as it is."""
        step, size = self._pending or (-1, 0)
        self._job = self._pending = None
        self._manager.reload()  # Orbax already dropped the older steps that it would have deleted
        if jax.process_index() == 0:
            for half in self._folder.glob(f"*{ocp.path.atomicity.TMP_DIR_SUFFIX}*"):
                with contextlib.suppress(
                    OSError
                ):  # other writes of it may not have ended; the next start tidies up
                    half.rmtree()
        reason = storage.storage_reason(error)
        if reason is None:
            raise error
        newest = max(self._manager.all_steps(), default=None)
        free = (
            ""
            if "://" in str(self._folder)
            else f"{shutil.disk_usage(self._folder).free / 1e6:.1f} MB free, "
        )
        raise SaveError(
            f"the checkpoint of step {step} could not be written to {self._folder}: {reason} "
            f"({free}about {size / 1e6:.1f} MB needed); "
            + (
                "no earlier one exists"
                if newest is None
                else f"the last whole one is step {newest} and is intact"
            )
        ) from error


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros on the sharding of a leaf."""

    def make() -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.jit(make, out_shardings=leaf.sharding)()
