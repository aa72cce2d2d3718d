"""The folder of a run: one run at a time has it, and its files are whole or absent."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.io import LOCK, Checkpoints, lock_folder, unlock_folder
from jaxpar.types import UsageError

from . import interrupts

_REMEDY = "wait for its end, or begin another run with resume=false"


def fresh_folder(folder: pathlib.Path, resume: bool) -> pathlib.Path:
    """Returns `folder`, or if the run shall not resume and it is used, the next of folder-2, folder-3, ..."""
    count, candidate = 1, folder
    while (
        not resume and candidate.exists() and any(path.name != LOCK for path in candidate.iterdir())
    ):
        count += 1
        candidate = folder.with_name(f"{folder.name}-{count}")
    if (
        not resume and jax.process_count() > 1
    ):  # a process that looks later finds the files of the others
        count = int(multihost_utils.broadcast_one_to_all(np.int32(count)))
        candidate = folder if count == 1 else folder.with_name(f"{folder.name}-{count}")
    candidate.mkdir(parents=True, exist_ok=True)
    return candidate


@contextlib.contextmanager
def run_folder(folder: pathlib.Path, resume: bool) -> Iterator[pathlib.Path]:
    """Gives `fresh_folder`, which no other run can take while inside.

    Raises:
      UsageError: Another run has it.
    """
    folder = fresh_folder(folder, resume)
    with held(folder):
        yield folder


def owning(
    run: Callable[[Any, pathlib.Path], Any], resume: bool | None = None
) -> Callable[[Any, pathlib.Path], Any]:
    """Has `run(config, folder)` own its `run_folder` to the end; `resume` is the configuration's unless given."""

    @functools.wraps(run)
    def call(config: Any, folder: pathlib.Path) -> Any:
        with run_folder(folder, config.resume if resume is None else resume) as folder:
            return run(config, folder)

    return call


@contextlib.contextmanager
def saving(
    folder: pathlib.Path, resume: bool, where: str = "", **options: Any
) -> Iterator[Checkpoints]:
    """Opens the checkpoints of the run in `folder`, of which Ctrl-C then tells; closes them at the end.

    Args:
      folder: That of the run.
      resume: Whether the same command goes on in it.
      where: The checkpoints' folder, or `folder/checkpoints`.
      **options: Of `Checkpoints`.
    """
    checkpoints = Checkpoints(where or folder / "checkpoints", **options)
    again = "the same command" + (
        "" if resume else f" with resume=true hydra.run.dir={short(folder)}"
    )

    def tell() -> str:
        step = max(checkpoints.on_disk(), default=None)
        if step is None:
            return "nothing had been saved yet, and the same command begins anew"
        return f"the checkpoint of step {step} is whole, and {again} goes on from it"

    interrupts.answer.saved = tell
    with contextlib.closing(checkpoints):
        yield checkpoints


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[None]:
    """Holds a folder, which is made, for this run while inside; all processes of the run call this, process 0 locks.

    Where storage has no locks, as some network file systems, a note says so. What only reads needs no lock.

    Raises:
      UsageError: Another run has it, or it cannot be written.
    """
    file = -1
    problem = ""
    if jax.process_index() == 0:
        file, problem = lock_folder(folder, "run folder", _REMEDY)
    try:
        if jax.process_count() > 1 and np.any(
            multihost_utils.process_allgather(np.array(bool(problem)))
        ):
            problem = problem or f"{folder} could not be locked by process 0."
        if problem:
            raise UsageError(problem)
        yield
    finally:
        unlock_folder(file)


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that is whole or as before at any moment; a link in its place is replaced, not followed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.write_text(text)
    os.replace(partial, path)


def short(path: pathlib.Path) -> str:
    """Returns a path as a person would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
