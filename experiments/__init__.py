"""Runnable experiments: `python -m experiments.lm preset=tiny train.steps=50`.

| file | in -> out | called by |
| --- | --- | --- |
| `lm.py` `rnn.py` `digits.py` `neat.py` `rl.py` `own.py` | flags -> a trained run | a user |
| `compare.py` | flags -> language models with one mixer after the other, for equal seconds | a user |
| `env.py` `pomdp.py` `life.py` `hosted.py` | flags -> episodes played, planned, evolved | a user |
| `generate.py` | a saved model, prompts -> texts | a user |
| `estimate.py` `verify.py` `pipeline.py` | a layout -> its cost, whether it equals one device | a user |
| `launch.py` | any of these as several processes on this machine | a user |
| `papers/` | commands of single papers | a user |
| `app/` | the runner, the training harness, helpers | every command |
| `conf/<command>/` | what Hydra reads: defaults, `preset/` | `app/runner.py` |

Flags mean the same in all: `preset`, `seed`, `num_seeds`, `num_envs`, `num_steps`, `max_steps`, `train.steps`,
`train.save_every` are in a table in docs/quickstart.md.
"""

import os
import pathlib
import signal
import sys
import threading
import time

from jaxpar._renamed import find_renamed

find_renamed()

IS_COMMAND = sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) in ("jaxpar", "jaxpar.exe")
"""Whether this process is a command that begins now, seconds before all is imported."""


HERE = pathlib.Path(__file__).parent


def module_of(command: str) -> str:
    """Returns the module of a command, below this package: `lm`, `papers.trading`."""
    is_paper = (HERE / "papers" / f"{command}.py").is_file()
    return f"papers.{command}" if is_paper else command


class Start:
    """What takes long before a command can print: the modules that it imports, most of all the first time."""

    QUIET_S = 4.0

    def __init__(self, is_command: bool):
        self._last, self._ended = time.monotonic(), threading.Event()
        if is_command:
            threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        while not self._ended.wait(self.QUIET_S):
            self._last = time.monotonic()
            os.write(2, b"starting: JAX and the rest are read, which is slowest the first time\n")

    def end(self) -> float:
        """Is silent from now on; returns when it spoke last, or began."""
        self._ended.set()
        return self._last


start = Start(IS_COMMAND)
"""Of this process; ended by what tells from then on how it goes."""


def before_start(number: int, frame: object) -> None:
    """Answers Ctrl-C while modules are imported, when there is nothing to leave behind.

    An exception could be lost in an import, and comes with a traceback.
    """
    os.write(2, b"interrupted before anything began.\n")
    os._exit(128 + number)


def show(text: str) -> None:
    """Prints what was asked for, or as much of it as whoever reads it takes, such as `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # where Python's end would print the rest again


if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # As `python -m experiments.lm` begins, seconds before all is imported.
    signal.signal(signal.SIGINT, before_start)
