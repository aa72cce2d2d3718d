"""Metrics of a run: a JSONL file that survives kills and resumes, and the services that copy it."""

import contextlib
import importlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import jax

from jaxpar.types import UsageError

__all__ = [
    "JsonlWriter",
    "TensorBoardWriter",
    "WandbWriter",
    "Writer",
    "Writers",
    "open_writers",
    "read_jsonl",
]


class Writer(Protocol):
    """Where the numbers of a step go."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records `values` by name, once a step, steps ascending."""
        ...

    def close(self) -> None:
        """Ends recording."""
        ...


def read_jsonl(path: Path) -> list[dict[str, float]]:
    """Reads what `JsonlWriter` wrote: one dict a line, `step` an int, all else floats, NaN and inf included.

    A last line that a killed process left without its end is not read.

    Raises:
      UsageError: The file is absent, or another line is not a JSON object with an int `step`.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; a run writes it at its first step") from None
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            row = json.loads(line)
            rows.append({k: v if k == "step" else float(v) for k, v in row.items()})
            is_row = isinstance(row["step"], int)
        except (ValueError, TypeError, KeyError, AttributeError):
            is_row = False
        if not is_row:
            raise UsageError(
                f'line {number} of {path} is not a JSON object of numbers by name with an int "step"'
            )
    return rows


class JsonlWriter:
    """Appends one JSON object a line, `{"step": 7, "train/loss": 2.5}`, flushed at each write.

    JSON has no NaN and no infinity: they are written as the strings "nan", "inf", "-inf".

    Args:
      path: The file; its folder is created.
      resume_step: The step that the run goes on after: later lines are dropped, so that no step is there
        twice. None starts over and drops all lines.
    """

    def __init__(self, path: Path, resume_step: int | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [] if resume_step is None or not path.exists() else read_jsonl(path)
        kept = path.with_name(path.name + ".tmp")
        kept.write_text("".join(_line(row) for row in rows if row["step"] <= (resume_step or 0)))
        os.replace(kept, path)
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends the line of `step`."""
        try:
            self._file.write(
                _line({"step": step, **{name: float(value) for name, value in values.items()}})
            )
            self._file.flush()
        except OSError as error:  # of a full disk says not which file
            error.filename = self._file.name
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _line(row: Mapping[str, float]) -> str:
    return json.dumps({k: v if math.isfinite(v) else str(v) for k, v in row.items()}) + "\n"


class TensorBoardWriter:
    """Writes TensorBoard event files to `folder`; steps after `resume_step` are hidden when resuming."""

    def __init__(self, folder: Path, resume_step: int | None = None):
        purge = None if resume_step is None else resume_step + 1
        self._events = _package("tensorboardX", "tensorboard").SummaryWriter(
            str(folder), purge_step=purge
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds each value as a scalar."""
        for name, value in values.items():
            self._events.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._events.close()


class WandbWriter:
    """Logs to the Weights & Biases run `name` of `project`, the same one again when a run resumes."""

    def __init__(self, project: str, name: str, config: Mapping[str, object], folder: Path):
        identity = re.sub(r"[^\w.-]", "-", name)  # what the service allows in an identifier
        wandb = _package("wandb", "wandb")
        self._run = wandb.init(
            project=project,
            name=name,
            id=identity,
            resume="allow",
            config=dict(config),
            dir=str(folder),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of `step`."""
        self._run.log({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Finishes the upload."""
        self._run.finish()


class Writers:
    """Hands the numbers of a step to every one of `writers`."""

    def __init__(self, writers: Sequence[Writer]):
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes to each, in order."""
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Closes each, also after one failed to close."""
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def open_writers(
    folder: Path,
    also: Sequence[str] = (),
    resume_step: int | None = None,
    *,
    project: str = "jaxpar",
    name: str | None = None,
    config: Mapping[str, object] | None = None,
) -> Writers:
    """Opens `folder/metrics.jsonl`, and the services named in `also`; writes on process 0 only.

    Args:
      folder: The run's folder.
      also: Any of "tensorboard", "wandb".
      resume_step: The step that the run goes on after, None when it starts.
      project: The project at a service.
      name: The run's name at a service; the folder's name by default.
      config: What a service shows as the run's configuration.

    Raises:
      UsageError: A name in `also` is unknown, or its package is missing.
    """
    openers = {
        "tensorboard": lambda: TensorBoardWriter(folder / "tensorboard", resume_step),
        "wandb": lambda: WandbWriter(project, name or folder.absolute().name, config or {}, folder),
    }
    for service in also:
        if service not in openers:
            raise UsageError(f"metrics cannot go to {service!r}; choose among {', '.join(openers)}")
    if jax.process_index() != 0:
        return Writers([])
    services = [openers[service]() for service in also]  # first, since a package may be missing
    return Writers([JsonlWriter(folder / "metrics.jsonl", resume_step), *services])


def _package(package: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f'metrics to {extra} need {package}: pip install "jaxpar[{extra}]"'
        ) from error
