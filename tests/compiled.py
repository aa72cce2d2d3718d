"""What compiled programs tell of themselves, and programs for a TPU that is not here."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

TRANSFERS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "send(",
    "recv(",
)


def copies(text, shape):
    """Returns the lines of a program that copy or transpose arrays of a shape, its axes in any order."""
    sizes = sorted(size for size in shape if size > 1)

    def is_whole(line):
        made = re.search(r"= \w+\[([\d,]+)\]\S* (copy|copy-start|transpose)\(", line)
        return made and sorted(int(size) for size in made[1].split(",") if size != "1") == sizes

    return [line.strip() for line in text.splitlines() if is_whole(line)]


def transfers_in(text):
    """Returns the operations of a program by which devices send to each other."""
    return [word for word in TRANSFERS if word in text]


def on_a_tpu(file, *args):
    """Runs a test's file in a process of its own, which may compile for TPUs; returns what it prints last, as JSON.

    libtpu takes a whole process: what else runs there must not have chosen its devices.
    """
    env = os.environ | {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
    }
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    env.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, file, *args], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
