"""The one training harness: what every run that trains has around `jaxpar.loop.fit`.

`train(algorithm, batches, run)` resumes the newest checkpoint, opens what the run writes to, drives it to its end and
closes all. An experiment says what is trained on what, and what is its own to measure, to check and to tell.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.io import ProgressLabels, open_progress, open_writers
from jaxpar.loop import Fit, FitResult, Hooks, fit, resume
from jaxpar.types import Algorithm, BatchFn, PyTree, SupportsAxes

from . import runner
from .run_folder import saving


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of a run that makes several updates in one program, and its checkpoints.

    Attributes:
      steps: How long it is: rl counts a seed's environment steps, neat generations.
      chunk: Updates, or generations, in one program.
      save_every: Of these between checkpoints, a multiple of chunk; 0 means at the end alone.
    """

    steps: int = field(1000, AtLeast(1))
    chunk: int = field(1, AtLeast(1))
    save_every: int = field(0, AtLeast(0))

    def __post_init__(self):
        """Refuses counts that no run can have."""
        check_fields(self, "train.")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run in its folder, for `train`.

    Attributes:
      config: The experiment's.
      folder: Its run folder, which the caller owns (`_folder.owning`).
      fit: Length and events.
      progress: Words and numbers to show while it runs.
      tell_start: Called with the steps already made, before anything is written; prints what will be trained.
      checkpoints: What `saving` takes besides the folder: how many are kept, and where.
      metadata: Saved with each checkpoint besides the run's identity; other metadata are another run.
      renamed: Names in the state that older checkpoints have under another one, from today's to that.
      evaluate: State -> metrics.
      watch: Called with the step and the state, when `evaluate` is.
      check: Called with each step's number and metrics; may raise to stop the run.
      extending: What more steps do to a run that had been finished; where given, such a run says how to extend it.
      first: Makes the state that a new run begins with, laid out; by default the algorithm draws it.
    """

    config: Any
    folder: pathlib.Path
    fit: Fit
    progress: ProgressLabels
    tell_start: Callable[[int], None]
    checkpoints: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"keep": 2})
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None
    watch: Callable[[int, PyTree], None] | None = None
    check: Callable[[int, Mapping[str, float]], None] | None = None
    extending: str = ""
    first: Callable[[], PyTree] | None = None


def train(algorithm: Algorithm, batches: BatchFn, run: Run) -> FitResult:
    """Trains under the ambient mesh, in the run's folder; goes on from the newest checkpoint there.

    Args:
      algorithm: What is trained; its state is laid out by its `axes()`.
      batches: Step number -> inputs, placed on the devices.
      run: Where, how long, and what happens on the way.

    Returns:
      The last state and metrics.

    Raises:
      UsageError: The checkpoints are of another run or damaged, or what `check` refuses.
    """
    config, folder, identity = run.config, run.folder, runner.identity(run.config)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(saving(folder, config.resume, **run.checkpoints))
        hooks = Hooks(
            axes=algorithm.axes()
            if isinstance(algorithm, SupportsAxes)
            else None,  # once: most trace `init` for it
            checkpoints=checkpoints,
            metadata=identity | dict(run.metadata),
            renamed=run.renamed,
        )
        start, state = resume(algorithm, hooks) or (
            0,
            None,
        )  # before a file of another run is touched
        run.tell_start(start)
        if state is None and run.first is not None:
            state = run.first()
        writer = open_writers(
            folder, tuple(config.metrics), start or None, name=folder.name, config=identity
        )
        stack.callback(writer.close)
        stack.enter_context(
            runner.ending_together()
        )  # closing what stands above waits for all processes
        hooks = dataclasses.replace(
            hooks,
            writer=writer,
            progress=stack.enter_context(
                open_progress(run.fit.num_steps, start, labels=run.progress)
            ),
            evaluate=run.evaluate,
            watch=run.watch,
            check=run.check,
            report=lambda _: runner.write_start(folder, config),
            profile_folder=folder / "profile",
        )
        result = fit(
            algorithm,
            jax.random.key(config.seed),
            batches,
            run.fit,
            hooks,
            state=state,
            start=start,
        )
    if run.extending and start >= run.fit.num_steps and not result.interrupted:
        runner.say(
            f"this run is finished; extend it with train.steps={2 * result.step} (which {run.extending})."
        )
    return result
