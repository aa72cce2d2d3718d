"""Two real processes save in the background while they train, agree on what is damaged, and one goes on alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from two_savers import abstract, at

from jaxpar.io import Checkpoints

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(num_processes, folder, out):
    port, env = free_port(), os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    script = ROOT / "tests/io/two_savers.py"
    return [
        subprocess.Popen(
            [sys.executable, script, f"localhost:{port}", str(num_processes), str(i), folder, out / f"{i}.json"],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(num_processes)
    ]  # fmt: skip


def test_two_processes_save_and_resume_and_one_goes_on(tmp_path):
    folder = tmp_path / "checkpoints"
    running = start(2, folder, tmp_path)
    try:
        for process in running:
            said, _ = process.communicate(timeout=200)
            assert process.returncode == 0, said[-4000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()
    first, second = (json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2))
    for result in (first, second):
        assert result["steps"] == [32, 40] and len(result["stalls"]) == 5
        assert result["found"] == 32 and result["right"] and result["after"] == [32, 40]
    assert (
        len(first["refused"]) == 1 and "40.refused" in first["refused"][0] and not second["refused"]
    )
    assert "by another process" in first["other"] and "seed=1 and this run has 2" in second["other"]

    checkpoints = Checkpoints(folder)  # one process of other devices goes on where two were
    for devices in (8, 3, 1):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
        step, state = checkpoints.restore_newest(abstract(mesh), {"seed": 1})
        assert step == 40
        for name, want in at(33).items():
            np.testing.assert_array_equal(state[name], want)
    for name, got in checkpoints.numpy(40).items():
        np.testing.assert_array_equal(got, at(33)[name])
    checkpoints.close()
