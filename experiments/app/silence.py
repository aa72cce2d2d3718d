"""No silence over five seconds: a line on standard error says what is compiled, or that the program runs.

    compiling play ........ 34 s

A dot every few seconds and the time at the end, so that it is one line in a log however long it takes. Where a progress
bar holds the terminal's line there is none.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import jax

from .. import IS_COMMAND, start

FIRST_S, QUIET_S, DOT_S, BEAT_S = 2.0, 4.0, 4.0, 0.5
"""Seconds of compiling, and of anything else, until a line begins; from one dot to the next; from look to look."""
RUNNING = "running"
"""The line of anything but a long compilation."""
COMPILING = "/jax/core/compile/"
"""What JAX's events of tracing, lowering and compiling begin with."""


class Pulse:
    """Hears what is printed and what JAX compiles, and prints where neither is heard for long.

    Args:
      out: Where to.
      clock: Seconds, ascending.
      began: When the process did, by this clock; nothing was printed since then.
    """

    def __init__(
        self, out: TextIO, clock: Callable[[], float] = time.monotonic, began: float | None = None
    ):
        self._out, self._clock = out, clock
        self._lock = threading.RLock()  # the thread of `tick` and those that print
        self._phases: list[str] = []  # the programs of phases that have begun, outermost first
        self._name, self._since = "", clock()  # what is compiled, "" for nothing, and since when
        self._line, self._from = (
            "",
            clock(),
        )  # the line that is being written, and since when what it tells goes on
        self._last = clock() if began is None else began  # when anything was printed last
        self._is_whole = True  # whether what others printed ended with a line's end

    def printed(self, text: str) -> None:
        """Is told of whatever is printed, before it is."""
        with self._lock:
            self._end()
            self._last = self._clock()
            self._is_whole = text.endswith("\n") or (self._is_whole and not text)

    def began(self, event: str, value: float, fun_name: str = "", **kinds: Any) -> None:
        """Listens to JAX's scalars, of which some are told when a phase of a compilation begins."""
        if event.startswith(COMPILING) and threading.current_thread() is threading.main_thread():
            with self._lock:
                self._phases.append(fun_name)
                name = re.sub(r"^jit[_(](.*?)\)?$", r"\1", self._phases[0])
                self._compiles("a program" if "lambda" in name else name)

    def ended(self, event: str, value: float, fun_name: str = "", **kinds: Any) -> None:
        """Listens to JAX's durations, told when a phase ends."""
        if event.startswith(COMPILING) and threading.current_thread() is threading.main_thread():
            with self._lock:
                while self._phases and self._phases.pop() != fun_name:
                    pass  # phases that an error has ended

    def tick(self) -> None:
        """Prints what is due; called now and then."""
        with self._lock:
            now = self._clock()
            if not self._phases and self._name:
                self._compiles("")
            if self._line == RUNNING and self._name and now - self._since >= FIRST_S:
                self._end()  # short compilations are a part of it
            if self._line:
                if now - self._last >= DOT_S:
                    self._print(".")
                return
            compiles = bool(self._name) and now - max(self._since, self._last) >= FIRST_S
            if self._is_whole and (compiles or now - self._last >= QUIET_S):
                self._line = f"compiling {self._name}" if compiles else RUNNING
                self._from = self._since if compiles else self._last
                self._print(f"{self._line} .")

    def close(self) -> None:
        """Ends a line that has begun."""
        with self._lock:
            self._end()

    @property
    def lead(self) -> str:
        """What ends a line that has begun, for a signal's handler, which cannot wait for the lock."""
        return "\n" if self._line else ""

    def _compiles(self, name: str) -> None:
        if name != self._name:
            if self._line != RUNNING:
                self._end()
            self._name, self._since = name, self._clock()

    def _end(self) -> None:
        if self._line:
            self._print(f" {self._clock() - self._from:.0f} s\n")
            self._line = ""

    def _print(self, text: str) -> None:
        self._last = self._clock()
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
            self._out.write(text)
            self._out.flush()


class _Heard:
    """A stream that tells a pulse what goes through it."""

    def __init__(self, stream: TextIO, pulse: Pulse):
        self._stream, self._pulse = stream, pulse

    def write(self, text: str) -> int:
        self._pulse.printed(text)
        return self._stream.write(text)

    @property
    def lead(self) -> str:
        return self._pulse.lead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def broken() -> Iterator[None]:
    """Breaks silences while inside; inside of another one it does nothing."""
    if isinstance(sys.stderr, _Heard):
        yield
        return
    spoke = start.end()
    pulse, streams = (
        Pulse(sys.stderr, began=spoke if IS_COMMAND else None),
        (sys.stdout, sys.stderr),
    )
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_S):
            pulse.tick()

    thread = threading.Thread(target=beat, daemon=True)
    jax.monitoring.register_scalar_listener(pulse.began)
    jax.monitoring.register_event_duration_secs_listener(pulse.ended)
    heard: Any = [_Heard(stream, pulse) for stream in streams]
    sys.stdout, sys.stderr = heard
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        pulse.close()
        sys.stdout, sys.stderr = streams
        jax.monitoring.unregister_scalar_listener(pulse.began)
        jax.monitoring.unregister_event_duration_listener(pulse.ended)


def hide_gloo() -> None:
    """Keeps Python's output and drops that of C++, where Gloo prints a line for every group of devices that meets."""
    sys.stdout.flush()
    sys.stdout = open(
        os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors
    )
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
