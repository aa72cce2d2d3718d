"""Runnable experiments: `python -m experiments.lm model=tiny train.steps=50`."""

import sys

if sys.argv[0] == "-m":  # as `python -m experiments.lm` begins, seconds before all is imported

    def _end(kind, error, trace) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            print("interrupted before anything began.", file=sys.stderr)

    sys.excepthook = _end
