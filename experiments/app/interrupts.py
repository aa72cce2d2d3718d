"""Ctrl-C at any moment of a command: no crash, one sentence that says what was saved, exit code 130.

`experiments.before_start` answers while modules are imported, an `Answer` while the experiment runs, `at_end` when the
process ends.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .. import before_start

SHUTDOWN_S = 3.0
"""Seconds that a process of several which ends early waits for the others to end as well."""
SHOW_CURSOR = "\x1b[?25h\n"
"""Restores the cursor of a terminal on which a progress bar is being drawn."""
PATIENCE_S = 3.0
"""Seconds after which a Ctrl-C that has not ended the process yet is acknowledged, and a second one ends it."""

HEARD = "Ctrl-C: it ends when what runs now is done; a second one does not wait."


def at_end(number: int, frame: object) -> NoReturn:
    """Answers when the experiment has ended, and all that is left is for the process to end."""
    _leave_with(number, "interrupted when all was done.")


class Answer:
    """What Ctrl-C does while an experiment runs: the first raises `KeyboardInterrupt`, a second ends the process.

    An exception may be lost, or become another one, in code that is not ours. So `number` is what tells that Ctrl-C
    came, and whatever the experiment then ends with counts as its end.

    Attributes:
      number: Of the signal that ended the experiment, 0 while none has; 2 is Ctrl-C.
      saved: Returns what is there to go on from.
    """

    def __init__(self):
        self.number = 0
        self.saved: Callable[[], str] = lambda: "no checkpoint had been saved since this start"

    def sentence(self) -> str:
        """Says what there is to go on from, as the disk has it now."""
        try:
            return f"interrupted; {self.saved()}."
        except Exception:  # storage may be gone, and the process still has to end
            return "interrupted; the checkpoints cannot be listed now."

    def leave(self) -> NoReturn:
        """Says the sentence and ends the process, from the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # or a second Ctrl-C would say it again
        with contextlib.suppress(OSError):
            print(self.sentence(), file=sys.stderr, flush=True)
        leave(128 + self.number)

    def handle(self, number: int, frame: object) -> None:
        """Is the handler of SIGINT."""
        if self.number:
            _leave_with(number, self.sentence())
        self.number = number
        raise KeyboardInterrupt

    def lost(self, unraisable: Any) -> None:
        """Is the hook for exceptions that Python would only print, such as one raised while an object is deleted."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt) and self.number:
            _leave_with(self.number, self.sentence())
        sys.__unraisablehook__(unraisable)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=lambda: signal.set_wakeup_fd(-1)
    )  # or a child's signals would count as ours

answer = Answer()
"""That of the experiment which runs now, or ran last."""


class Watch:
    """Hears Ctrl-C while the main thread computes in native code, where no handler of Python's runs, for minutes even.

    A thread of its own reads what the system's handler writes at once. It says that the first was heard, and ends the
    process after a second one that the main thread does not answer, or a third, each after `PATIENCE_S`.
    """

    def __init__(self, answer: Answer):
        self._answer, self._ended = answer, threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        heard = 0
        while (numbers := os.read(self._read, 1)) and not self._ended.is_set():
            if numbers[0] != signal.SIGINT:
                continue
            heard += 1
            if self._ended.wait(PATIENCE_S):
                return
            if heard > (2 if self._answer.number else 1):
                _leave_with(signal.SIGINT, self._answer.sentence())
            if heard == 1:
                with contextlib.suppress(OSError):
                    print(HEARD, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the thread, and gives the signals back to whoever heard them before."""
        self._ended.set()
        signal.set_wakeup_fd(self._before)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def answering() -> Iterator[Answer]:
    """Has a fresh `answer` handle Ctrl-C while inside, where this is the main thread and Ctrl-C is not ignored."""
    global answer
    answer = Answer()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield answer
        return
    hook, watch = sys.unraisablehook, Watch(answer)
    try:
        sys.unraisablehook = answer.lost
        signal.signal(signal.SIGINT, answer.handle)
        yield answer
    finally:
        watch.close()
        signal.signal(signal.SIGINT, at_end if before is before_start else before)
        sys.unraisablehook = hook


def leave(code: int) -> NoReturn:
    """Ends this process now.

    Python's own end takes the devices' runtime apart, also under a compilation that an interrupted main thread no
    longer waits for: jaxlib then uses freed memory, which is a segmentation fault. And it waits for other
    processes, which may never come.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(SHUTDOWN_S)
    _end(code)


def finish(code: int) -> None:
    """Ends a command that has come to its end, as Python would, but Ctrl-C is answered to the last moment.

    Where this process is not the command's own, as in a test, `SystemExit` tells the code, if it is not 0.
    """
    if signal.getsignal(signal.SIGINT) is at_end:
        atexit._run_exitfuncs()  # JAX waits for the other processes here; what Python does next cannot be interrupted
        _end(code)
    if code:
        sys.exit(code)


def _leave_with(number: int, sentence: str) -> NoReturn:
    """Says a sentence and ends this process, from a signal handler: the main thread may be in the middle of a print."""
    lead = getattr(sys.stderr, "lead", "")  # of `_silence`
    with contextlib.suppress(OSError):
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}{lead}{sentence}\n".encode())
    _end(128 + number)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
