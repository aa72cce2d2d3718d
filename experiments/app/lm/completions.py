"""A file of texts, one JSON object a line, that is added to by whole lines and gone on with after an interruption."""

import collections
import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxpar.types import UsageError

from .. import interrupts
from ..run_folder import replace_text, short
from .requests import Request

NAME = ("prompt", "seed", "id", "sample")
"""The entries of a line that say which text it is."""


def name_of(request: Request, sample: int) -> tuple[Any, ...]:
    """Returns by what `Completions.done` counts one text of a request."""
    return request.prompt, request.seed, request.id, sample


class Completions:
    """An open file of texts.

    Attributes:
      done: How many lines there are of each text, by `name_of`.
    """

    def __init__(self, path: pathlib.Path, file: Any, lines: Sequence[Mapping[str, Any]]):
        self._path, self._file = path, file
        self.done = collections.Counter(tuple(line[name] for name in NAME) for line in lines)

    def write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines, on the disk when this returns; from process 0."""
        if self._file is not None:
            self._file.write(
                b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)
            )
            self._file.flush()
            os.fsync(self._file.fileno())
        self.done.update(tuple(line[name] for name in NAME) for line in lines)

    def told(self) -> str:
        """Says what there is to go on from."""
        return f"{self.done.total()} lines of {short(self._path)} are whole, and the same command goes on from them"


def flags_of(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns what the lines of a file depend on; None where it has none, or nothing says so."""
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        return json.loads(_beside(path).read_text())
    except (OSError, ValueError):
        return None


def _beside(path: pathlib.Path) -> pathlib.Path:
    """The file that says what texts depend on."""
    return path.with_name(path.name + ".flags")


@contextlib.contextmanager
def open_completions(
    path: pathlib.Path, flags: Mapping[str, Any], resume: bool, older: Mapping[str, Any]
) -> Iterator[Completions]:
    """Opens a file to add to, held for this run while inside; what its texts depend on stands beside it, in `.flags`.

    Args:
      path: Of the file; its folder is made.
      flags: Plain values by name: what decides on a text besides prompt, seed and sample.
      resume: Whether to go on with a file that has lines.
      older: Values of flags in files that were begun before these flags existed.

    Raises:
      UsageError: It has lines and shall not have, its lines are none of these or of other flags, or another run has it.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"out={path} is no file; name one that is there, or none yet.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("ab")) if jax.process_index() == 0 else None
        if file is not None:
            _lock(path, file)
        lines = _whole(path, file)
        beside = _beside(path)
        if lines:
            _check(path, flags, resume, older)
        elif file is not None:
            replace_text(beside, json.dumps(flags, indent=1) + "\n")
        completions = Completions(path, file, lines)
        interrupts.answer.saved = completions.told
        yield completions


def _lock(path: pathlib.Path, file: Any) -> None:
    try:
        fcntl.flock(
            file, fcntl.LOCK_EX | fcntl.LOCK_NB
        )  # taken back by the system, however this run ends
    except BlockingIOError:
        raise UsageError(
            f"out={path} is in use by another run; wait for its end, or name another file."
        ) from None
    except OSError:
        pass  # storage without locks


def _whole(path: pathlib.Path, file: Any) -> list[Mapping[str, Any]]:
    """The lines that are there; of a last one that a kill or a full disk cut short the file is freed."""
    content = path.read_bytes() if path.exists() else b""
    *whole, last = content.split(b"\n")
    lines = [_read(path, number, line) for number, line in enumerate(whole, 1)]
    if last and file is not None:
        try:
            lines.append(_read(path, 0, last))
            file.write(b"\n")
        except UsageError:
            os.truncate(path, len(content) - len(last))
    return lines


def _read(path: pathlib.Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
        hash(tuple(content[name] for name in NAME))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UsageError(
            f"line {number} of out={path} is none that this command has written; name another file."
        ) from None
    return content


def _check(
    path: pathlib.Path, flags: Mapping[str, Any], resume: bool, older: Mapping[str, Any]
) -> None:
    """Refuses to add lines to those of other flags."""
    if not resume:
        raise UsageError(
            f"out={path} has lines, which resume=false does not go on with; name another file."
        )
    before = flags_of(path)
    if before is None:
        beside = _beside(path).name
        raise UsageError(
            f"out={path} has lines, and no {beside} says by which flags; name another file."
        )
    before = {**older, **before}
    for name in (*flags, *before):
        if flags.get(name) != before.get(name):
            raise UsageError(
                f"out={path} has lines of {name}={before.get(name)!r}, and these would be of "
                f"{name}={flags.get(name)!r}; name another file."
            )
