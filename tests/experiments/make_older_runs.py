"""Makes the runs of `older_cases.py` with the code of an older commit, and resumes them there.

    git worktree add /tmp/older d3543d0
    JAX_PLATFORMS=cpu python tests/experiments/make_older_runs.py /tmp/older         # writes the files in older/
    JAX_PLATFORMS=cpu python tests/experiments/make_older_runs.py --check            # resumes with this checkout's code

Writes `runs.tar.xz`, a folder a case as its first call left it, and `expected.json`: of each case the
folder's name that its flags give, and the rows of metrics.jsonl after the second call. `--check`
compares those rows to the bit, which only the machine can do that made them.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

from older_cases import CASES, WORDS, differences, rows_of, words

HERE = pathlib.Path(__file__).resolve().parent / "older"
ROOT = HERE.parents[2]
SKIPPED = ("plots", "env.json", ".lock")
"""What is not kept of a folder: pictures, and what names the machine."""


def call(older, cwd, case, more):
    """Runs a command of the older checkout; returns what it printed."""
    env = os.environ | {"PYTHONPATH": str(older), "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
    line = [sys.executable, "-m", f"experiments.{case.command}", *case.line(more)]
    said = subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"{case.name}: {said.stdout}{said.stderr}")
    return said.stdout


def name_of(older, case):
    """Returns the name of the folder that the flags alone would give."""
    code = (
        "import sys, importlib, importlib.util\n"
        "is_older = importlib.util.find_spec('experiments.app') is None\n"
        "name = 'experiments._run' if is_older else 'experiments.app.runner'\n"
        "runner = importlib.import_module(name)\n"
        f"command = importlib.import_module('experiments.{case.command}')\n"
        "print(runner.folder_name(command.compose(*sys.argv[1:])))"
    )
    env = os.environ | {"PYTHONPATH": str(older)}
    line = [sys.executable, "-c", code, *case.line(case.begin)[:-1]]
    said = subprocess.run(line, env=env, cwd=older, capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(f"{case.name}: {said.stderr}")
    return said.stdout.strip().splitlines()[-1]


def make(older):
    """Makes all runs."""
    work = pathlib.Path(tempfile.mkdtemp())
    kept = work / "kept"
    kept.mkdir()
    (work / WORDS).write_text(words())
    expected = {}
    for case in CASES:
        call(older, work, case, case.begin)
        shutil.copytree(work / case.name, kept / case.name, ignore=shutil.ignore_patterns(*SKIPPED))
        size = sum(path.stat().st_size for path in (kept / case.name).rglob("*") if path.is_file())
        print(f"{case.name}: {size} bytes", flush=True)
    with tarfile.open(HERE / "runs.tar.xz", "w:xz") as archive:
        for case in CASES:
            archive.add(kept / case.name, arcname=case.name)
    # What begins with another run is resumed before that one changes.
    for case in reversed(CASES):
        call(older, work, case, case.resume)
        expected[case.name] = {"folder": name_of(older, case), "rows": rows_of(work / case.name)}
    (HERE / "expected.json").write_text(json.dumps(expected, sort_keys=True) + "\n")


def check():
    """Resumes all runs with the code of this checkout; returns how many differ."""
    work = pathlib.Path(tempfile.mkdtemp())
    (work / WORDS).write_text(words())
    expected = json.loads((HERE / "expected.json").read_text())
    with tarfile.open(HERE / "runs.tar.xz") as archive:
        archive.extractall(work, filter="data")
    count = 0
    for case in reversed(CASES):
        call(ROOT, work, case, case.resume)
        found = differences(rows_of(work / case.name), expected[case.name]["rows"])
        name = name_of(ROOT, case)
        if name != expected[case.name]["folder"]:
            found.append(f"its folder is {name}, not {expected[case.name]['folder']}")
        count += bool(found)
        print(f"{case.name}: {'; '.join(found[:4]) or 'the same'}", flush=True)
    return count


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        sys.exit(check())
    make(pathlib.Path(sys.argv[1]).resolve())
