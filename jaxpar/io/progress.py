"""How far a run is: a bar on a terminal, one changing line in a notebook, a few lines in a log."""

import dataclasses
import importlib.util
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, TextIO

import jax
from numpy.typing import ArrayLike

from jaxpar._older_fields import join_positions, newer_arguments
from jaxpar.fields import AtLeast, check_fields, field

__all__ = ["Progress", "ProgressLabels", "open_progress"]

_SMOOTHING = 5.0  # seconds that a rate looks back


@dataclasses.dataclass(frozen=True)
class ProgressLabels:
    """Words and numbers that progress is shown with.

    Attributes:
      description: Text before the bar.
      unit: Name of one step.
      shown: Names of the numbers to show.
      tokens_per_step: Tokens in one step, to show tokens a second; None shows none.
      token: Name of a token in that rate.
    """

    description: str = ""
    unit: str = "step"
    shown: tuple[str, ...] = ("loss",)
    tokens_per_step: int | None = field(None, AtLeast(1))
    token: str = "tok"

    __post_init__ = check_fields


_OLDER = {each.name: f"labels.{each.name}" for each in dataclasses.fields(ProgressLabels)}
"""Arguments of `open_progress` that are fields of its labels today."""


class _Form(NamedTuple):
    """One way of showing progress."""

    show: Callable[[int, str], Any]
    note: Callable[[str], Any]
    close: Callable[[], Any] = lambda: None
    interval: float = float("inf")  # seconds from one show to the next
    each_tenth: bool = False  # shows at every tenth of the run as well


def _bar(total: int, start: int, description: str, stream: TextIO) -> _Form:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # Drawn by the caller's thread alone, so that nothing writes to the terminal after an exception.
    texts = [
        TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]")
    ]
    console = Console(file=stream, force_terminal=True)
    bar = Progress(texts[0], BarColumn(30), texts[1], console=console, auto_refresh=False)
    task = bar.add_task(description, total=total, completed=start, text="compiling")
    bar.start()
    return _Form(
        show=lambda step, text: bar.update(task, completed=step, text=text, refresh=True),
        note=lambda text: console.print(text, markup=False, highlight=False),
        close=bar.stop,
        interval=0.1,
    )


def _notebook_line(prefix: str) -> _Form:
    from IPython.display import display

    handle: Any = display({"text/plain": f"{prefix}compiling"}, raw=True, display_id=True)
    return _Form(
        lambda _, text: handle.update({"text/plain": prefix + text}, raw=True), print, interval=0.5
    )


def _lines(prefix: str, stream: TextIO) -> _Form:
    def note(text: str) -> None:
        print(text, file=stream, flush=True)

    return _Form(lambda _, text: note(prefix + text), note, interval=10, each_tenth=True)


class Progress:
    """Shows step, loss (or other numbers), rates and time left; a context manager that leaves the terminal as it was.

    Rates look back a few seconds and start at the first `update`, so compiling is not counted.
    `open_progress` makes it.
    """

    def __init__(self, form: _Form, total: int, labels: ProgressLabels, clock: Callable[[], float]):
        self._form = form
        self._total = total
        self._labels = labels
        self._clock = clock
        self._marks: deque[tuple[float, int]] = (
            deque()
        )  # times and steps that the rate looks back to
        self._latest: tuple[int, Mapping[str, Any]] | None = None
        self._shown = (-float("inf"), -1)  # when, and which step

    def update(self, step: int, values: Mapping[str, ArrayLike]) -> None:
        """Tells that `step` steps are made; cheap, for every step.

        Args:
          step: Steps made so far, of `total`.
          values: Numbers by name; of those to show, "loss" or else "train/loss". An array is read only when shown.
        """
        now = self._clock()
        self._latest = step, values
        if not self._marks or now - self._marks[-1][0] >= 0.1:
            self._marks.append((now, step))
        while len(self._marks) > 2 and now - self._marks[1][0] >= _SMOOTHING:
            self._marks.popleft()
        when, before = self._shown
        in_new_tenth = (
            self._form.each_tenth and 10 * step // self._total > 10 * before // self._total
        )
        if before < 0 or now - when >= self._form.interval or in_new_tenth or step >= self._total:
            self._show(now)

    def note(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        self._form.note(text)

    def close(self) -> None:
        """Shows the last update and gives the terminal back."""
        try:
            if self._latest is not None and self._latest[0] != self._shown[1]:
                self._show(self._clock())
        finally:
            self._form.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _show(self, now: float) -> None:
        assert self._latest is not None
        step, values = self._latest
        self._shown = now, step
        labels = self._labels
        parts = [f"{step}/{self._total} {labels.unit}s"]
        for name in labels.shown:
            value = values.get(name, values.get(f"train/{name}"))
            if value is not None:
                parts.append(f"{name.replace('_', ' ')} {float(value):.4g}")
        then, from_step = self._marks[0]
        if step > from_step and now > then:
            rate = (step - from_step) / (now - then)
            if rate >= 1:
                parts.append(f"{_short(rate)} {labels.unit}s/s")
            else:
                parts.append(f"{1 / rate:.3g} s/{labels.unit}")
            if labels.tokens_per_step is not None:
                parts.append(f"{_short(rate * labels.tokens_per_step)} {labels.token}/s")
            if step < self._total:
                parts.append(f"{_duration((self._total - step) / rate)} left")
        self._form.show(step, "  ".join(parts))


def open_progress(
    total: int,
    start: int = 0,
    *older_labels: str,
    labels: ProgressLabels | None = None,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    **older: object,
) -> Progress:
    """Opens the form that fits: notebook, terminal with rich, or plain lines; silent off process 0.

    Args:
      total: The step at which the run ends.
      start: Steps already made, by an earlier part of the run.
      *older_labels: Description and unit by position, until the first release.
      labels: Words and numbers to show; None means the defaults.
      stream: Where to print, `sys.stderr` by default.
      clock: Seconds, ascending.
      **older: Fields of `labels`, which were arguments; accepted until the first release.

    Raises:
      TypeError: An unknown keyword, or too many arguments.
    """
    older = join_positions("open_progress", ("description", "unit"), older_labels, older)
    groups = {"labels": labels or ProgressLabels()}
    words: ProgressLabels = newer_arguments("open_progress", _OLDER, groups, older)["labels"]

    out: TextIO = sys.stderr if stream is None else stream
    prefix = f"{words.description}  " if words.description else ""
    is_terminal = out.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown")
    if jax.process_index() != 0:
        form = _Form(lambda *_: None, lambda _: None)
    elif _has_kernel():
        form = _notebook_line(prefix)
    elif is_terminal and importlib.util.find_spec("rich"):
        form = _bar(total, start, words.description, out)
    else:
        form = _lines(prefix, out)
    return Progress(form, total, words, clock)


def _has_kernel() -> bool:
    """Tells whether this is a notebook; a terminal's IPython shell has no kernel."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def _short(number: float) -> str:
    for suffix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{suffix}"
        number /= 1000
    return f"{number:.3g}T"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
