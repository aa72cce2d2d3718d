"""Parts that benchmarks share: workers, a budget of time, medians, and tables that fill as they go.

A worker is a process of one framework. It reads a line of JSON from its standard input for every row and answers with
one. So no framework holds the other's memory pool, a row that crashes or hangs costs itself only (the worker is
started again for the next one), and both sides of a case are measured minutes apart on the same card.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

HERE = pathlib.Path(__file__).resolve().parent
CACHE = 128e6  # bytes that push everything else out of the second-level cache of today's cards


class Worker:
    """A process that answers requests."""

    def __init__(self, command: list[str], env: dict[str, str], python: str = sys.executable):
        """Starts `command` with `env` added to the environment, by this interpreter or the one that a peer needs.

        A PYTHONPATH in `env` comes before that of the environment: what is installed there is found, too.
        """
        paths = [*filter(None, (env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")))]
        env = env | {"PYTHONPATH": os.pathsep.join(paths)} if paths else env
        self.log = tempfile.TemporaryFile("w+")
        # A process group of its own, so that a compiler that a row started does not outlive it.
        self.process = subprocess.Popen(
            [python, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=os.environ | env, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, request: dict, timeout_s: float) -> dict:
        """Returns the answer, or {"failed": reason}; a worker that failed to answer is dead afterwards."""
        try:
            assert self.process.stdin
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=timeout_s)
        except (queue.Empty, BrokenPipeError) as error:
            self.close()
            return {
                "failed": f"no answer in {timeout_s:.0f} s"
                if isinstance(error, queue.Empty)
                else self._last()
            }
        return json.loads(line) if line else {"failed": self._last()}

    def _last(self) -> str:
        self.process.wait()
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        return f"died with {self.process.returncode}: {lines[-1][:300] if lines else 'silently'}"

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.process.poll() is None

    def close(self) -> None:
        """Ends the process and what it started."""
        if self.alive:
            try:
                os.killpg(self.process.pid, 9)
            except ProcessLookupError:
                pass
            self.process.wait()


def serve(answer: Callable[[dict], dict]) -> None:
    """Answers the requests on standard input until it closes; an exception is an answer too.

    What libraries print goes to standard error, so that the channel stays clean.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # any row may fail, and is a row then
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = (
                " ".join(str(error).split())[:300]
                or f"in {where.name} of {pathlib.Path(where.filename).name}"
            )
            reply = {"failed": f"{type(error).__name__}: {said}"}
        print(json.dumps(reply), file=channel, flush=True)


class Row:
    """A row that a worker holds; `made` is what is known of it."""

    made: dict

    def warm(self) -> dict:
        """Returns what is known of the row; its rounds warm up by themselves."""
        return self.made


class ProgramRow(Row):
    """A row that calls one compiled program of JAX, `program`, with `args`."""

    program: Callable
    args: tuple
    spend_s: float

    def round(self) -> dict:
        """Median of several queued calls."""
        return time_jax(self.program, [self.args], self.spend_s)


class Rows:
    """Rows that a worker holds by name; `do` is prepare, make, round, drop or one of `others`."""

    def __init__(
        self,
        make: Callable[[dict], Any],  # a row, which has `warm` and `round`
        others: dict[str, Callable[[dict], dict]] | None = None,
        free: Callable[[], None] | None = None,
    ):
        """Takes what returns a new row, what answers others, and what frees memory after a drop."""
        self.make, self.others, self.free = make, others or {}, free
        self.held, self.ready = {}, {}

    def __call__(self, request: dict) -> dict:
        """Answers one request."""
        if request["do"] in self.others:
            return self.others[request["do"]](request)
        if request["do"] == "prepare":  # what fails will fail its row
            with concurrent.futures.ThreadPoolExecutor(request["jobs"]) as pool:
                self.ready = {row["name"]: pool.submit(self.make, row) for row in request["rows"]}
            return {}
        if request["do"] == "make":
            ready = self.ready.pop(request["name"], None)
            row = self.held[request["name"]] = ready.result() if ready else self.make(request)
            return row.warm()
        if request["do"] == "drop":
            self.held.clear()
            self.ready.clear()
            if self.free:
                self.free()
            return {}
        return self.held[request["name"]].round()


class Programs:
    """JAX programs of rows, compiled one at a time or, to save a lease's minutes, several side by side."""

    def __init__(self, program: Callable[[dict], tuple[Callable, tuple]]):
        """Takes what returns the function of a row and its arguments."""
        self.program, self.ready = program, {}

    def prepare(self, requests: list[dict], jobs: int) -> dict:
        """Compiles the rows of a case with so many threads; what fails will fail its row."""
        self.ready = {}
        if jobs > 1:
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                self.ready = {json.dumps(row): pool.submit(self.compile, row) for row in requests}
        return {}

    def compile(self, request: dict) -> tuple:
        """Returns the compiled function, its arguments and the seconds that it took."""
        import jax

        function, args = self.program(request)
        lowered, start = jax.jit(function), time.perf_counter()
        compiled = lowered.lower(*args).compile()
        return compiled, args, time.perf_counter() - start

    def __call__(self, request: dict) -> tuple:
        """Returns the same, from those that are ready if it is there."""
        ready = self.ready.pop(json.dumps(request), None)
        return ready.result() if ready else self.compile(request)


def say(line: str) -> None:
    """Tells of what goes on, beside a table."""
    print(line, file=sys.stderr, flush=True)


def copy_rate(request: dict) -> dict:
    """Returns the bytes/s, read plus written, of a copy of 1 GiB, and the time of an empty call."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((2**20 if request["tiny"] else 2**28,), jnp.float32)
    full = time_jax(jax.jit(lambda x: -x), [(x,)], request["spend_s"])
    empty = time_jax(jax.jit(lambda x: x + 1), [(x[:8],)], request["spend_s"])
    device = jax.devices()[0]
    return {
        "rate": 2 * x.nbytes / full["ms"] * 1e3,
        "empty_ms": empty["ms"],
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
    }


class CaseWorker(Protocol):
    """Programs of the rows of a case, whose arrays it keeps from row to row."""

    programs: Programs

    def load(self, request: dict) -> None:
        """Draws the case of a row, unless it is in hand."""
        ...

    def measure(self, request: dict) -> dict:
        """Checks and times a row of the case in hand."""
        ...


def answer_row(worker: CaseWorker, request: dict) -> dict:
    """Compiles, checks and times a row of JAX; or prepares several, or times a copy."""
    if request["row"] == "copy":
        return copy_rate(request)
    if request["row"] == "prepare":
        worker.load(request["rows"][0])
        return worker.programs.prepare(request["rows"], request["jobs"])
    worker.load(request)
    return worker.measure(request)


SPEED_COLUMNS: dict[str, Callable[[dict], str]] = {
    "M steps/s": lambda row: f"{row['msps']:.4g}",
    "ratio (quartiles)": lambda row: f"{row['ratio']:.2f}x ({row['low']:.2f}-{row['high']:.2f})",
    "done %": lambda row: f"{100 * row['done']:.2f}",
    "compile s": lambda row: f"{row['compile_s']:.1f}",
}
"""Columns of benchmarks of environments, by their heads."""


class Table:
    """Rows that are printed as they come and kept in a JSON file."""

    def __init__(self, columns: dict[str, Callable[[dict], str]], out: pathlib.Path):
        """Takes what each column shows of a row, and the file."""
        self.columns, self.out, self.rows = columns, out, []
        out.parent.mkdir(parents=True, exist_ok=True)

    def head(self, title: str) -> None:
        """Starts a table of its own under a title."""
        print(
            f"\n### {title}\n\n| {' | '.join(self.columns)} |\n{'|---' * len(self.columns)}|",
            flush=True,
        )

    def add(self, row: dict) -> None:
        """Prints a row; one that failed shows why."""
        self.rows.append(row)
        shown = dict.fromkeys(self.columns, "")
        for name, show in self.columns.items():
            try:
                shown[name] = show(row)
            except (KeyError, TypeError, ZeroDivisionError):
                shown[name] = ""  # this kind of row has no such figure
        if "failed" in row:
            shown[list(shown)[-1]] = f"FAILED: {row['failed']}".replace("|", "/")
        print(f"| {' | '.join(shown.values())} |", flush=True)
        self.out.write_text(json.dumps(self.rows, indent=1))

    @contextlib.contextmanager
    def keep_failure(self, case: dict) -> Iterator[None]:
        """Adds a row if a case fails inside: one that may not stop the others."""
        try:
            yield
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            self.add(case | {"side": "", "failed": f"{type(error).__name__}: {said}"})


def ratio_to_peer(row: dict) -> str:
    """Returns how many times faster than the best peer of the case a row of ours is."""
    is_known = row["row"].startswith("jaxpar") and row["best_peer_ms"] < 1e9
    return f"{row['best_peer_ms'] / row['ms']:.2f}x" if is_known else ""


class Bench:
    """Asks the workers of several sides under one budget."""

    def __init__(
        self, sides: dict[str, tuple[list[str], dict[str, str]]], budget_s: float, row_s: float
    ):
        """Takes each side's command and environment, the seconds for everything and those for one row."""
        self.sides, self.row_s, self.workers = sides, row_s, {}
        self.end = time.monotonic() + budget_s

    def answers(self, plan: list[tuple[str, dict]], jobs: int) -> Iterator[tuple[str, dict, dict]]:
        """Yields (side, request, answer) of a case; with several jobs, what JAX compiles is compiled at once."""
        if jobs > 1:
            rows = {side: [request for other, request in plan if other == side] for side, _ in plan}
            with (
                concurrent.futures.ThreadPoolExecutor() as pool
            ):  # all sides at once: nothing is timed yet
                for side in rows:
                    pool.submit(
                        self.ask,
                        side,
                        {"row": "prepare", "rows": rows[side], "jobs": jobs},
                        3 * self.row_s,
                    )
        for side, request in plan:
            yield side, request, self.ask(side, request)

    def ask(self, side: str, request: dict, row_s: float | None = None) -> dict:
        """Returns the side's answer; {"failed": ...} if it has none, also when the budget is spent."""
        left = self.end - time.monotonic()
        if left < 5:
            return {"failed": "skipped: the budget is spent"}
        if side not in self.workers or not self.workers[side].alive:
            command, env, *others = self.sides[side]
            python = sys.executable
            if others:
                python = others[0]
            self.workers[side] = Worker(command=command, env=env, python=python)
        began = time.monotonic()
        answer = self.workers[side].ask(request, min(row_s or self.row_s, left))
        return answer | {"took_s": round(time.monotonic() - began, 2)}

    def close(self, side: str | None = None) -> None:
        """Ends one worker, or all."""
        for name in [side] if side else list(self.workers):
            if name in self.workers:
                self.workers.pop(name).close()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits until no other benchmark times anything, where several run beside each other (BENCH_LOCK names a file)."""
    path = os.environ.get("BENCH_LOCK")
    if not path:
        yield
        return
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def arguments(doc: str, cases: Iterable[str], out: str, budget_s: float) -> argparse.ArgumentParser:
    """Returns a parser with the flags that these benchmarks have in common."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", help=f"separated by commas, of {','.join(cases)}; by default all"
    )
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help="no row starts after these seconds"
    )
    parser.add_argument(
        "--row-s", type=float, default=90, help="a row without an answer by then has failed"
    )
    parser.add_argument(
        "--spend-s", type=float, default=0.8, help="seconds of measuring for a row, compiling apart"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="programs compiled side by side; more spoil the compile time",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny shapes, for any machine: checks that the script runs",
    )
    parser.add_argument(
        "--only", help="only rows whose name contains one of these words, separated by commas"
    )
    parser.add_argument("--no-peer", action="store_true", help="only jaxpar and lax")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / out)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def plan(
    rows: list[tuple[str, str]], request: dict, sides: Iterable[str], args: argparse.Namespace
) -> list:
    """Returns (side, request) of every wanted row of a case, forward and forward + backward."""
    words = args.only.split(",") if args.only else [""]
    return [
        (side, request | {"row": row, "direction": direction, "spend_s": args.spend_s})
        for side, row in rows
        if side in sides and any(word in row for word in words)
        for direction in ("fwd", "fwd+bwd")
    ]


def chosen(names: str | None, known: Iterable[str]) -> list[str]:
    """Returns the cases that a flag names, in its order; "C2" stands for all that begin with "C2."."""
    known, found = list(known), []
    for name in names.split(",") if names else known:
        fits = (
            [name] if name in known else [other for other in known if other.startswith(f"{name}.")]
        )
        if not fits:
            raise SystemExit(f"--cases knows no {name}; legal are {', '.join(known)}")
        found += [other for other in fits if other not in found]
    return found


def plan_timing(once_s: float, spend_s: float) -> tuple[int, int]:
    """Returns the calls of a timing and the number of timings.

    Calls are queued until a timing takes 3 ms, so that the host's launches overlap with the device's work; 20 timings,
    fewer when they would take longer than `spend_s`: 3 at least, 1 of calls longer than a second.
    """
    calls = min(100, max(1, round(3e-3 / max(once_s, 1e-7))))
    return calls, max(3 if once_s < 1 else 1, min(20, int(spend_s / max(calls * once_s, 1e-6))))


def medians(seconds: Callable[[int], float], spend_s: float) -> dict:
    """Returns the median ms of `seconds(calls)` a call after warm-up, and how it was timed."""
    once = seconds(1)
    if once < 0.1:
        once = min(seconds(1) for _ in range(2))
    calls, timings = plan_timing(once, spend_s)
    taken = [seconds(calls) for _ in range(timings)]
    return {"ms": 1e3 * statistics.median(taken), "timings": timings, "calls": calls}


def time_jax(call, inputs: list[tuple], spend_s: float) -> dict:
    """Times a compiled JAX function on inputs in turns."""
    import jax

    return medians(lambda calls: _seconds(call, inputs, calls, jax.block_until_ready), spend_s)


def _seconds(call, inputs: list[tuple], calls: int, wait) -> float:
    begin, out = time.perf_counter(), None
    for i in range(calls):
        out = call(*inputs[i % len(inputs)])
    wait(out)
    return (time.perf_counter() - begin) / calls


def copies_beyond_cache(num_bytes: float) -> int:
    """Returns how many copies of an input of so many bytes keep a loop over them out of the cache."""
    return max(1, min(16, -(-int(CACHE) // max(1, int(num_bytes))))) if num_bytes > 1e5 else 1


def error_of(out, expected) -> float:
    """Returns the largest error of the leaves, each relative to the largest entry of the expected one; NaN stays."""
    import numpy as np

    worst = 0.0
    for got, want in zip(out, expected, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        worst = np.maximum(worst, np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30))
    return float(worst)
