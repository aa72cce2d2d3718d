"""Runnable experiments: `python -m experiments.lm model=tiny train.steps=50`."""

import signal
import sys

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # As `python -m experiments.lm` begins, seconds before all is imported. An exception could be lost in an import.
    from experiments import _interrupt

    signal.signal(signal.SIGINT, _interrupt.before_start)
