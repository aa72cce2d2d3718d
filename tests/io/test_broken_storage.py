"""Checkpoints on storage that fills up, may not be written, or whose process is killed."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpointing import (
    abstract,
    save_scalar,
)

from jaxpar.io import Checkpoints, SaveError
from jaxpar.io.storage import storage_reason, unreadable_reason
from jaxpar.types import UsageError


def test_folder_without_write_permission_is_found_at_once():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        was = os.geteuid()
        if was == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(UsageError, match=r"cannot be written \(permission denied\)"):
                Checkpoints(Path(folder))
            with pytest.raises(UsageError, match=r"cannot be written \(permission denied\)"):
                Checkpoints(Path(folder) / "new")
        finally:
            os.seteuid(was)


def test_errors_that_storage_did_not_cause_keep_their_type(tmp_path, opened):
    checkpoints = opened(tmp_path)
    save_scalar(checkpoints, 1)
    with pytest.raises(TypeError):
        checkpoints.save(2, {"x": jnp.zeros(2)}, {}, {"not json": object()})
        checkpoints.wait()
    save_scalar(checkpoints, 3)
    assert checkpoints.steps() == [1, 3]


TENSORSTORE = {  # as it writes them
    'NOT_FOUND: Error opening "zarr" driver: Metadata at local file "/a/w/.zarray" does not exist [source locations='
    "'tensorstore/driver/kvs_backed_chunk_driver.cc:1271']": (
        "the storage answers not found", "a file of it is missing",
    ),
    "DATA_LOSS: Error reading local file \"/a/ocdbt.process_0/d/1\": CRC-32C checksum verification failed "
    "[source locations='tensorstore/internal/riegeli/digest_suffixed_reader.cc:68']": (
        "the storage answers data loss", "a file of it is not as it was written",
    ),
    'UNAVAILABLE: Error writing "gs://b/a/d/1": HTTP response code: 503 [tensorstore_spec=\'{"driver":"gcs"}\']': (
        "the storage answers unavailable", "the storage cannot be reached",
    ),
    'PERMISSION_DENIED: Error opening "zarr" driver [tensorstore_spec=\'{}\']': (
        "the storage answers permission denied", "permission denied",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", TENSORSTORE, ids=lambda text: text.partition(":")[0])
def test_what_tensorstore_says_is_said_in_our_words(text):
    writing, reading = TENSORSTORE[text]
    wrapped = RuntimeError("Orbax failed")
    wrapped.__cause__ = ValueError(text)
    assert [storage_reason(error) for error in (ValueError(text), wrapped)] == [writing] * 2
    assert [unreadable_reason(error) for error in (ValueError(text), wrapped)] == [reading] * 2
    assert storage_reason(jax.errors.JaxRuntimeError(text)) is None, (
        "of the devices, not of the storage"
    )
    assert storage_reason(ValueError("no status in it: " + text)) is None


def test_a_state_that_no_device_can_hold_is_told(tmp_path, opened, monkeypatch):
    checkpoints = opened(tmp_path)
    save_scalar(checkpoints, 1)

    def full(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."
        )

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", full)
    with pytest.raises(
        UsageError, match=r"1 does not fit into the devices' memory; take more devices"
    ) as caught:
        checkpoints.restore(1, abstract({"x": jnp.zeros(4)}, 1))
    assert "RESOURCE" not in str(caught.value)


def fill_up(folder):
    """Saves 1 and 2 fit, 3 does not; prints what was raised where, then shows that all is well again."""
    small, large = (
        {"x": jnp.arange(1000.0)},
        {"x": jax.random.normal(jax.random.key(0), (1 << 20,))},
    )
    checkpoints = Checkpoints(folder, keep=1)
    for step in (1, 2):
        checkpoints.save(step, small, {"validation/loss": step}, {"step": step})
    checkpoints.wait()
    for meet in (
        checkpoints.poll,
        checkpoints.wait,
        functools.partial(checkpoints.save, 9, small, {}, {}),
    ):
        with pytest.raises(SaveError) as caught:
            checkpoints.save(3, large, {"validation/loss": 0.0}, {})
            deadline = time.monotonic() + 20
            while meet == checkpoints.poll and time.monotonic() < deadline:
                checkpoints.poll()
                time.sleep(0.01)
            meet()
        print(caught.value)
        assert re.search(
            r"^the checkpoint of step 3 could not be written to \S+: (file too large|no space left on device) "
            r"\(\d+\.\d MB free, about 4.2 MB needed\); the last whole one is step 2 and is intact$",
            str(caught.value),
        )
        assert not list(folder.glob("*tmp*"))
        checkpoints.poll()
        assert checkpoints.steps() == [1, 2] and checkpoints.best() == 1
    np.testing.assert_array_equal(checkpoints.restore(2, abstract(small, 1))["x"], small["x"])
    checkpoints.save(4, small, {}, {})
    checkpoints.close()
    again = Checkpoints(folder)
    assert again.steps() == [1, 4] and again.metadata(1) == {"step": 1}
    again.close()


def test_full_disk(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot mount a small disk")
    try:
        fill_up(tmp_path / "checkpoints")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def child(code, *arguments):
    start = "import sys; from pathlib import Path; sys.path[:0] = ['.', 'tests/io']; import test_broken_storage as t; "
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_file_size_limit(tmp_path):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17,) * 2); t.fill_up(Path(sys.argv[1]))"
    process = child(code, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("file too large") == 3


def save_forever(folder):
    checkpoints = Checkpoints(folder, keep=1)
    step = (checkpoints.newest() or 0) + 1
    while True:
        state = {str(i): jnp.full((1 << 14,), step * 10 + i, jnp.float32) for i in range(8)}
        checkpoints.save(step, state, {"validation/loss": -step}, {"step": step})
        print(step, flush=True)
        step += 1


def kill_and_check(folder, num_kills, random):
    half_written = 0
    for _ in range(num_kills):
        process = child("t.save_forever(Path(sys.argv[1]))", folder)
        for _ in range(3):
            assert process.stdout.readline().strip().isdigit()
        time.sleep(random.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        last = int(([*process.stdout.read().split()] or [0])[-1])
        process.wait()
        process.stdout.close()
        half_written += bool(list(folder.glob("*tmp*")))
        checkpoints = Checkpoints(folder, keep=1)
        newest = checkpoints.newest()
        assert newest >= max(last - 1, 2)
        wanted = abstract({str(i): jnp.zeros(1 << 14) for i in range(8)}, 1)
        for i, x in checkpoints.restore(newest, wanted).items():
            np.testing.assert_array_equal(x, newest * 10 + int(i))
        assert checkpoints.metadata(newest) == {"step": newest}
        save_scalar(checkpoints, newest + 1)
        checkpoints.close()
        assert not list(folder.glob("*tmp*"))
        shutil.rmtree(folder / str(newest + 1))
    return half_written


def test_kill_during_save(tmp_path):
    kill_and_check(tmp_path, 2, np.random.default_rng(0))


@pytest.mark.slow
def test_kill_during_save_often(tmp_path):
    assert kill_and_check(tmp_path, 30, np.random.default_rng(1)) >= 5
