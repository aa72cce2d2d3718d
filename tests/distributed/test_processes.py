"""Two real processes on this host compute what one does."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from pillars import PILLARS, outcome
from tolerance import EXACT_MATHS, LAYOUT, assert_close
from two_processes import step_of_training

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(process_id, port, out, names):
    script = ROOT / "tests/distributed/two_processes.py"
    command = [sys.executable, script, f"localhost:{port}", str(process_id), out, ",".join(names)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    }
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    "names", [("ppo", "neat"), pytest.param(tuple(PILLARS), marks=pytest.mark.slow)]
)
def test_two_processes_equal_one(tmp_path, names):
    """A learner's rows, evolved genomes; 15 s more for planners, whose episodes lie on devices as rows do."""
    port = free_port()
    running = [start(process_id, port, tmp_path / str(process_id), names) for process_id in (0, 1)]
    try:
        alone = step_of_training(jax.devices()[:4])
        pillars = {name: outcome(name, jax.devices()[:4]) for name in names}
        for process in running:
            said, _ = process.communicate(timeout=200)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()  # what fails here must not fail again where the object is collected
            process.stdout.close()
    first, second = (pickle.loads((tmp_path / name).read_bytes()) for name in "01")
    for result in (first, second):
        assert result["processes"] == 2 and result["joined"]
        assert_close(result["params"], alone["params"], LAYOUT["float32"])
        assert result["loss"] == pytest.approx(alone["loss"], rel=LAYOUT["float32"])
        # Adam divides by the root of small squares.
        assert_close(result["pillars"], pillars, 100 * EXACT_MATHS["float32"])
        for got, want in zip(
            jax.tree.leaves(result["pillars"]), jax.tree.leaves(pillars), strict=True
        ):
            assert got.dtype.kind == "f" or (got == want).all()
        told = "the configuration on process 1 differs from process 0; start all with the same flags and files."
        assert result["refusal"] == told
    # Each process reads its own rows only.
    assert alone["asked"] == [(0, 8)] and first["asked"] == [(0, 4)] and second["asked"] == [(4, 8)]


SILENT = """
import os, signal, sys
from jax.experimental.multihost_utils import process_allgather
from jaxpar.processes import start_processes

start_processes(sys.argv[1], 2, int(sys.argv[2]), timeout_s=60, heartbeat_s=10)
process_allgather(0)
print("met", flush=True)
if sys.argv[2] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
process_allgather(1)
"""


@pytest.mark.slow
def test_a_process_that_falls_silent_ends_the_others_in_bounded_time():
    address = f"localhost:{free_port()}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first, second = (
        subprocess.Popen([sys.executable, "-c", SILENT, address, index], env=env, **pipes)
        for index in "01"
    )
    try:
        while first.stdout.readline() not in ("met\n", ""):
            pass
        began = time.monotonic()
        _, said = first.communicate(timeout=100)
        assert (
            5 < time.monotonic() - began < 30
        )  # its connections stay open, so nothing but the heartbeat tells
        assert first.returncode == -signal.SIGABRT and "stopped sending heartbeats" in said
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
