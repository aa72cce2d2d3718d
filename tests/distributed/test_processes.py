"""Two real processes on this host compute what one does."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from tolerance import LAYOUT, assert_close
from two_processes import step_of_training

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(process_id, port, out):
    command = [sys.executable, ROOT / "tests/distributed/two_processes.py", f"localhost:{port}", str(process_id), out]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_processes_equal_one(tmp_path):
    port = free_port()
    running = [start(process_id, port, tmp_path / str(process_id)) for process_id in (0, 1)]
    try:
        alone = step_of_training(jax.devices()[:4])
        for process in running:
            said, _ = process.communicate(timeout=200)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in running:
            process.kill()
    first, second = (pickle.loads((tmp_path / name).read_bytes()) for name in "01")
    for result in (first, second):
        assert result["processes"] == 2 and result["joined"]
        assert_close(result["params"], alone["params"], LAYOUT["float32"])
        assert result["loss"] == pytest.approx(alone["loss"], rel=LAYOUT["float32"])
        told = "the configuration on process 1 differs from process 0; start all with the same flags and files."
        assert result["refusal"] == told
    # Each process reads its own rows only.
    assert alone["asked"] == [(0, 8)] and first["asked"] == [(0, 4)] and second["asked"] == [(4, 8)]
