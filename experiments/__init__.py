"""Runnable experiments: `python -m experiments.lm preset=tiny train.steps=50`.

| file | what | called by |
| --- | --- | --- |
| `lm.py` `rnn.py` `neat.py` `rl.py` | commands that train: flags, algorithm, what is told | a user |
| `compare.py` | language models with one mixer after the other, for equal seconds | a user |
| `digits.py` `moving_digits.py` | the same, of images and of films | a user |
| `own.py` `_own.py` | models of flax's own layers in three functions each | a user |
| `env.py` `pomdp.py` | commands that play and plan episodes, without checkpoints | a user |
| `estimate.py` `verify.py` | what a layout of a language model costs, and whether it equals one device | a user |
| `launch.py` | any of these as several processes on this machine | a user |
| `conf/<command>/` | what Hydra reads: defaults, `preset/` | `_run.py` |
| `_run.py` | the one runner: flags -> configuration -> run folder, devices and mesh | every command |
| `_train.py` | the one training harness: checkpoints, metrics, progress, resume | the commands that train |
| `_folder.py` | one run at a time has a folder; its checkpoints | `_train.py`, commands |
| `_mistakes.py` | a user's mistake in one sentence; old names of flags | `_run.py` |
| `_interrupt.py` | Ctrl-C at any moment | `_run.py`, `_folder.py`, `launch.py` |
| `_mesh.py` | layouts as the user types them; whether a job fits the mesh | every command |
| `_series.py` `_digits_1d.py` `_memory.py` | series, images, symbols to remember | `rnn.py`, `digits.py` |
| `_world.py` | an environment by name, with what flags change in it | `env.py`, `rl.py`, `pomdp.py` |
| `_policy_run.py` | policies by name, many environments under one of them, a film of a few | `env.py`, `rl.py` |
| `_judge.py` `_rocks.py` `_pomdp_film.py` | exact regrets, beliefs on maps, a film | `pomdp.py` |
| `_estimate_moves.py` `_estimate_report.py` | what moving between layouts sends, the report | `estimate.py` |

Flags mean the same in all: `preset`, `seed`, `num_seeds`, `num_envs`, `num_steps`, `max_steps`, `train.steps`,
`train.save_every` are in a table in docs/quickstart.md.
"""

import os
import signal
import sys
import threading
import time

IS_COMMAND = sys.argv[0] == "-m" or os.path.basename(sys.argv[0]) in ("jaxpar", "jaxpar.exe")
"""Whether this process is a command that begins now, seconds before all is imported."""


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
