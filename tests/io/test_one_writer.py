"""One object at a time writes to a folder of checkpoints, and readers change nothing there."""

import gc
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checkpointing import (
    HOWS,
    abstract,
    bits,
    closed_loop,
    damage,
    make_state,
    names,
    save_scalar,
    three_saved,
)

from jaxpar.io import Checkpoints, CorruptCheckpointError, storage
from jaxpar.io.lock import LOCK
from jaxpar.types import UsageError

ROOT = Path(__file__).parents[2]


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@closed_loop
@pytest.mark.parametrize("how", HOWS)
def test_a_reader_leaves_a_damaged_newest_as_it_is_and_reads_the_one_before(tmp_path, opened, how):
    states = three_saved(tmp_path, opened)
    damage(tmp_path / "3", how)
    before = content(tmp_path)
    reader = opened(tmp_path, read_only=True)
    assert reader.best() == 1
    step, restored = reader.restore_newest(abstract(states[3]), {"seed": 3})
    assert step == 2 and bits(restored) == bits(states[2])
    step, restored = reader.restore_first([3, 1, 2], abstract(states[3]))
    assert step == 1 and bits(restored) == bits(states[1])
    first, second = reader.refused
    assert re.search(rf"^the checkpoint {tmp_path}/3 .*; step 2 is read instead$", first)
    assert re.search(rf"^the checkpoint {tmp_path}/3 .*; step 1 is read instead$", second)
    with pytest.raises(
        CorruptCheckpointError, match=f"no checkpoint in {tmp_path} is whole: .*{tmp_path}/3 "
    ):
        reader.restore_first([3], abstract(states[3]))
    reader.close()
    assert content(tmp_path) == before and names(tmp_path) == ["1", "2", "3"]


def test_what_a_reader_wants_most_is_read_first(tmp_path, opened):
    states = three_saved(tmp_path, opened)
    reader = opened(tmp_path, read_only=True)
    step, restored = reader.restore_first([2, 3, 1], abstract(states[3]))
    assert step == 2 and bits(restored) == bits(states[2]) and reader.refused == []
    with pytest.raises(CorruptCheckpointError, match="is whole: there is none"):
        reader.restore_first([], abstract(states[3]))


@pytest.mark.parametrize("mode, best", [("min", 4), ("max", 3)])
def test_a_reader_ranks_as_the_writer_does(tmp_path, opened, mode, best):
    writer = opened(tmp_path, keep=9, best_mode=mode)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 2.0), (4, 1.0), (5, float("nan"))):
        save_scalar(writer, step, loss=loss)
    assert writer.best() == best
    assert Checkpoints(tmp_path, read_only=True, best_mode=mode).best() == best


def test_a_second_writer_is_one_sentence_and_the_first_loses_nothing(tmp_path, opened):
    first = opened(tmp_path)
    state = {"x": jnp.arange(1000.0)}
    first.save(1, state, {}, {})
    with pytest.raises(UsageError) as caught:
        Checkpoints(tmp_path)
    said = rf"folder={tmp_path}: {tmp_path} is in use by process {os.getpid()} on \S+; "
    remedy = (
        "expected no other writer: close that Checkpoints, take another folder, or read_only=True."
    )
    assert re.fullmatch(said + remedy, str(caught.value))
    reader = Checkpoints(tmp_path, read_only=True)  # which takes no lock
    first.save(2, state, {}, {})
    assert first.steps() == [1, 2]
    first.close()
    assert (tmp_path / LOCK).read_bytes() == b"" and reader.numpy(2)["x"].shape == (1000,)
    second = opened(tmp_path)
    second.save(3, state, {}, {})
    assert second.steps() == [2, 3]


def test_a_writer_that_nobody_holds_lets_go(tmp_path, opened):
    state = make_state()
    kept = [Checkpoints(tmp_path)]
    kept[0].save(1, state, {}, {})
    kept[0].wait()
    kept.append(kept)  # a cycle, as a notebook's output history makes, goes with the garbage
    del kept
    assert opened(tmp_path).steps() == [1]
    gc.collect()


def test_a_writer_that_cannot_open_the_folder_holds_nothing(tmp_path, opened, monkeypatch):
    def refuse(*_):
        raise UsageError("not today")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "open_manager", refuse)
        with pytest.raises(UsageError, match="not today") as caught:
            Checkpoints(tmp_path)
    assert opened(tmp_path).steps() == [] and caught.value


WRITER = """
import sys, time
import jax.numpy as jnp
from jaxpar.io import Checkpoints
from jaxpar.types import UsageError
try:
    checkpoints = Checkpoints(sys.argv[1])
except UsageError as error:
    sys.exit(str(error))
checkpoints.save(1, {"x": jnp.zeros(4)}, {}, {})
checkpoints.wait()
print("saved", flush=True)
time.sleep(100)
"""


def writer(folder):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], env=env, **pipes)


def test_a_second_process_is_one_sentence_and_a_killed_one_holds_nothing(tmp_path, opened):
    first = writer(tmp_path)
    try:
        assert first.stdout.readline() == "saved\n"
        second = writer(tmp_path)
        _, said = second.communicate(timeout=100)
        assert second.returncode == 1
        (line,) = [line for line in said.splitlines() if str(tmp_path) in line]
        assert f"{tmp_path} is in use by process {first.pid} on " in line
        assert "Traceback" not in said
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert opened(tmp_path).steps() == [1]


def test_one_process_locks_and_all_refuse(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(storage, "on_all_processes", lambda own: told.append(own) or of_0)
    of_0 = 0
    assert storage.lock(storage.absolute(tmp_path)) == -1 and names(tmp_path) == []
    of_0 = 1
    with pytest.raises(UsageError, match="process 0 could not lock it"):
        storage.lock(storage.absolute(tmp_path))
    assert told == [False, False]


def test_a_bucket_has_no_lock():
    assert storage.lock(storage.absolute("gs://bucket/run")) == -1
