"""Runnable experiments: `python -m experiments.lm model=tiny train.steps=50`."""

import os
import signal
import sys


def before_start(number: int, frame: object) -> None:
    """Answers Ctrl-C while modules are imported, when there is nothing to leave behind.

    An exception could be lost in an import, and comes with a traceback.
    """
    os.write(2, b"interrupted before anything began.\n")
    os._exit(128 + number)


if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # As `python -m experiments.lm` begins, seconds before all is imported.
    signal.signal(signal.SIGINT, before_start)
