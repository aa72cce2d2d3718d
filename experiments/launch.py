"""Runs an experiment as several processes on this machine, joined as they would be on the hosts of a pod.

    python -m experiments.launch lm                                                    # 2 processes of 4 CPU devices
    python -m experiments.launch --processes 4 --devices-per-process 2 lm train.steps=50

Process 0 has the terminal, the others write to files. When one dies, all are stopped.
"""

import argparse
import contextlib
import os
import pathlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any, NoReturn

from jaxpar.types import UsageError

from . import before_start, module_of
from .app import interrupts, runner

DEVICES = 8
"""Devices of all processes together, if nothing else is asked for: as many as a run in one process simulates."""
GRACE_S = 15.0
"""Seconds from asking the processes to end until they are killed, when one of them has died."""
LAST_LINES = 12
"""Lines that are shown of what a process said before it died."""

EXAMPLES = """examples:
  python -m experiments.launch lm
  python -m experiments.launch --processes 4 --devices-per-process 2 lm train.steps=50
  python -m experiments.launch --processes 2 --devices-per-process 4 lm mesh.data=2 mesh.fsdp=4

The same run goes on with any number of processes: data, losses and checkpoints do not depend on it. Ctrl-C saves and
stops, a second one kills. Several hosts, Slurm and Cloud TPU: docs/pods.md.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help shows examples.")


class Group:
    """The processes of one run, from their start to the end of the last.

    Args:
      command: What each of them runs.
      flags: What comes after it, process by process.
      folder: Where all but process 0, which has the launcher's own output, write `process-<index>.log`.
    """

    def __init__(self, command: list[str], flags: list[list[str]], folder: pathlib.Path):
        self._folder = folder
        self._ends: queue.Queue[tuple[int, int]] = queue.Queue()
        self.asked = 0  # the first signal that was passed on
        # In groups of their own, so that Ctrl-C reaches the launcher alone, which passes it on once.
        env = os.environ | {runner.LAUNCHED: "1", "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        self._processes = []
        for index, own in enumerate(flags):
            with self.log(index).open("wb") if index else contextlib.nullcontext() as output:
                streams: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=output, stderr=output)
                self._processes.append(
                    subprocess.Popen([*command, *own], env=env, process_group=0, **streams)
                )
        for index in range(len(flags)):
            threading.Thread(target=self._watch, args=(index,), daemon=True).start()

    def log(self, index: int) -> pathlib.Path:
        """Returns the file that holds what process `index` said; process 0 has none."""
        return self._folder / f"process-{index}.log"

    def said(self, index: int) -> list[str]:
        """Returns the lines that process `index` said, none for process 0, which said them aloud."""
        return self.log(index).read_text(errors="replace").splitlines() if index else []

    def forward(self, number: int, frame: object = None) -> None:
        """Passes a signal on; a second Ctrl-C kills."""
        self._send(signal.SIGKILL if self.asked and number == signal.SIGINT else number)
        self.asked = self.asked or number

    def wait(self) -> list[tuple[int, int]]:
        """Waits for all, and stops the others when one fails; returns (index, exit code) in the order of their ends.

        Those that are asked to end are killed after `GRACE_S`. After a mistake (exit code 2) each is left to find
        it by itself, so that process 0 can say it.
        """
        ends: list[tuple[int, int]] = []
        failed = False
        while len(ends) < len(self._processes):
            try:
                ends.append(self._ends.get(timeout=GRACE_S if failed else None))
            except queue.Empty:
                self._send(signal.SIGKILL)
                continue
            code = ends[-1][1]
            if code and not failed:
                failed = True
                if code != 2 and not self.asked:  # else all are ending already
                    self._send(signal.SIGTERM)
        return ends

    def close(self) -> None:
        """Kills the processes that are left."""
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
            process.stdin.close()

    def _watch(self, index: int) -> None:
        self._ends.put((index, self._processes[index].wait()))

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)  # which does nothing to one that has ended


def main(arguments: list[str]) -> int:
    """Runs what the command line asks for; returns the exit code."""
    folder = None
    try:
        asked = _parse(arguments)
        flags = _flags(
            asked.processes, asked.devices_per_process or max(1, DEVICES // asked.processes)
        )
        folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxpar-launch-"))
        command = [
            sys.executable,
            "-m",
            f"{__package__}.{module_of(asked.experiment)}",
            *asked.flags,
        ]
        code = _finish(command, flags, folder)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if code != 1:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _finish(command: list[str], flags: list[list[str]], folder: pathlib.Path) -> int:
    group = Group(command, flags, folder)
    before = {
        number: signal.signal(number, group.forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        ends = group.wait()
    finally:
        group.close()
        for number, handler in before.items():
            signal.signal(number, interrupts.at_end if handler is before_start else handler)
    failures = [(index, code) for index, code in ends if code]
    if group.asked and all(code != 2 for _, code in failures):
        if not failures:
            print("interrupted when all was done.", file=sys.stderr)
        elif dict(ends)[0] != 128 + group.asked:  # else process 0 has said how to go on
            print("interrupted; the newest checkpoint, if there is one, is whole.", file=sys.stderr)
        return 128 + group.asked
    if not failures:
        return 0
    index, code = failures[0]
    if code == 2:
        if (0, 2) not in failures:
            print(
                next(line for line in reversed(group.said(index)) if line.startswith("error: ")),
                file=sys.stderr,
            )
        return 2
    print(_report(group, index, code, folder), file=sys.stderr)
    return 1


def _report(group: Group, index: int, code: int, folder: pathlib.Path) -> str:
    """Says which process died, how, and what it said last."""
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    text = f"error: process {index} {how}, so the others were stopped; the same command resumes the run."
    if not index:
        return f"{text} What it said is above; the others wrote to {folder}."
    last = "".join(f"\n    {line}" for line in group.said(index)[-LAST_LINES:])
    return f"{text} It wrote to {group.log(index)}" + (f", at last:{last}" if last else " nothing.")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(
        "python -m experiments.launch",
        description="Runs an experiment as several processes on this machine, with CPU devices.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="how many (default: 2)"
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="D",
        help=f"CPU devices of each (default: {DEVICES} in all)",
    )
    parser.add_argument("experiment", nargs="?", help=", ".join(_experiments()))
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, help="flags of the experiment, such as train.steps=50"
    )
    asked = parser.parse_args(arguments)
    _check(asked)
    return asked


def _check(asked: argparse.Namespace) -> None:
    legal = ", ".join(_experiments())
    if asked.experiment is None:
        raise UsageError(f"no experiment is named; legal are {legal}.")
    if asked.experiment not in _experiments():
        raise UsageError(f"there is no experiment {asked.experiment!r}; legal are {legal}.")
    if asked.processes < 1:
        raise UsageError(f"--processes {asked.processes} must be at least 1.")
    if asked.devices_per_process is not None and asked.devices_per_process < 1:
        raise UsageError(f"--devices-per-process {asked.devices_per_process} must be at least 1.")
    if (kind := runner.accelerator()) and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise UsageError(
            f"this machine has {kind}, which the launcher cannot divide among processes; JAX_PLATFORMS=cpu simulates "
            "devices instead, and docs/pods.md has the commands for accelerators."
        )
    for flag in asked.flags:
        if flag.startswith(("processes.", "cpu_devices=")):
            raise UsageError(
                f"{flag} is set by the launcher; use --processes and --devices-per-process."
            )
        if flag in ("-m", "--multirun"):
            raise UsageError(
                f"{flag} sweeps within one process; start one launcher for each of its runs."
            )
        if flag.startswith("--") and flag.partition("=")[0] in (
            "--processes",
            "--devices-per-process",
        ):
            raise UsageError(f"{flag.partition('=')[0]} must stand before {asked.experiment}.")


def _experiments() -> list[str]:
    """Returns the names of the experiments, which are those that have a configuration."""
    return sorted(path.stem for path in runner.CONF.glob("*/*.yaml"))


def _flags(processes: int, devices: int) -> list[list[str]]:
    """Returns what tells each process who it is."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    together = [f"processes.coordinator=localhost:{port}", f"processes.num_processes={processes}"]
    return [
        [*together, f"processes.process_id={index}", f"cpu_devices={devices}"]
        for index in range(processes)
    ]


if __name__ == "__main__":
    interrupts.leave(main(sys.argv[1:]))
