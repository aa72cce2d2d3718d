"""Runs that are read again: mode=eval and mode=film of the folder that run= names."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxpar.io import Checkpoints
from jaxpar.loop import Hooks, resume
from jaxpar.types import Algorithm, PyTree, SupportsAxes, UsageError

from . import runner


def saved_run(config: Any, given: Sequence[str] = ()) -> tuple[pathlib.Path, Any, Any]:
    """Returns the folder that `config.run` names, the configuration of the run that made it, and that with changes.

    Args:
      config: Of this call.
      given: Flags of this call that are the changes, where they are not the default.

    Raises:
      UsageError: There is no such folder, or it is that of another experiment.
    """
    folder = pathlib.Path(config.run)
    if not config.run or not folder.is_dir():
        raise UsageError(
            f"mode={config.mode} needs run= to name the folder of a run, not {config.run!r}."
        )
    saved, usual = runner.load(folder, type(config)), type(config)()
    changed = {
        name: getattr(config, name)
        for name in given
        if getattr(config, name) != getattr(usual, name)
    }
    return folder, saved, dataclasses.replace(saved, **changed)


def restored(
    checkpoints: Checkpoints,
    which: str,
    abstract_state: PyTree,
    run: pathlib.Path,
    later: Collection[str] = (),
    ignored: Collection[str] = (),
) -> tuple[int, PyTree]:
    """Returns the step and the state of a run's best or newest checkpoint, and prints the step.

    A damaged one is left as it is, and the newest whole one is read instead.

    Args:
      checkpoints: Opened to be read only, since the run may be training; closed at the end.
      which: "best" or "newest"; without a best one, the newest.
      abstract_state: As for `Checkpoints.restore`.
      run: Folder of the run.
      later: As for `Checkpoints.restore`.
      ignored: As for `Checkpoints.restore_first`.

    Raises:
      UsageError: There is no checkpoint, or none is whole.
    """
    with contextlib.closing(checkpoints):
        steps = checkpoints.steps()[::-1]
        if not steps:
            raise UsageError(f"{run} has no checkpoint yet; train it first.")
        best = checkpoints.best() if which == "best" else None
        if best is not None:
            steps.remove(best)
            steps.insert(0, best)
        step, state = checkpoints.restore_first(steps, abstract_state, later, ignored)
    for sentence in checkpoints.refused:
        runner.say(sentence)
    runner.say(f"checkpoint of step {step} of {runner.short(run)}")
    return step, state


def newest_state(
    folder: pathlib.Path,
    algorithm: Algorithm,
    metadata: Mapping[str, Any],
    renamed: Mapping[str, str],
    unit: str,
) -> tuple[int, PyTree]:
    """Returns the step and the state of a run's newest checkpoint, on the ambient mesh, and tells which it is.

    Args:
      folder: That of the run.
      algorithm: What was trained.
      metadata: Saved with its checkpoints.
      renamed: Names in the state that older checkpoints have under another one, from today's to that.
      unit: What its steps are called.

    Raises:
      UsageError: There is no checkpoint.
    """
    checkpoints = Checkpoints(folder / "checkpoints", read_only=True)
    axes = algorithm.axes() if isinstance(algorithm, SupportsAxes) else None
    with contextlib.closing(checkpoints):
        found = resume(
            algorithm, Hooks(axes=axes, checkpoints=checkpoints, metadata=metadata, renamed=renamed)
        )
    if found is None:
        raise UsageError(f"{folder} has no checkpoint yet; train it first.")
    runner.say(f"checkpoint of {unit} {found[0]} of {runner.short(folder)}")
    return found
