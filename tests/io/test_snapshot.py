"""A save does not hold training up, whatever happens to the state and to the disk meanwhile."""

import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.io import Checkpoints, SaveError, checkpoint
from jaxpar.io.snapshot import fits_twice
from jaxpar.types import UsageError

SIZE = 1 << 16
step_of = jax.jit(lambda x: x + 1, donate_argnums=0)


def abstract():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {"x": jax.ShapeDtypeStruct((SIZE,), jnp.float32, sharding=sharding)}


@pytest.fixture
def opened(tmp_path):
    """`opened(...)` is a `Checkpoints` that the test closes at its end."""
    all_opened = []

    def open_(**options):
        all_opened.append(Checkpoints(tmp_path, **options))
        return all_opened[-1]

    yield open_
    for checkpoints in all_opened:
        checkpoints.close()


@pytest.fixture
def gate(monkeypatch):
    """Stops Orbax at the start of a save until the gate is set; `gate.waiting` tells that it came there."""
    gate, save = threading.Event(), checkpoint.storage.ocp.CheckpointManager.save
    gate.waiting = threading.Event()

    def slow(*args, **kwargs):
        gate.waiting.set()
        assert gate.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint.storage.ocp.CheckpointManager, "save", slow)
    yield gate
    gate.set()


@pytest.mark.parametrize("mode", ["auto", "device"])
def test_training_goes_on_with_the_state_donated_before_anything_is_copied_off(opened, gate, mode):
    checkpoints = opened(snapshot=mode)
    x = jnp.zeros(SIZE)
    checkpoints.prepare({"x": x})
    stall = checkpoints.save(1, {"x": x}, {}, {})
    assert gate.waiting.wait(60) and 0 < stall < 30
    for _ in range(5):
        x = step_of(x)
    np.testing.assert_array_equal(x, 5)
    checkpoints.poll()  # no error, and no wait: the gate is shut
    gate.set()
    np.testing.assert_array_equal(checkpoints.restore(1, abstract())["x"], 0)


def test_a_snapshot_on_the_host_waits_for_the_locked_copy_alone(opened, gate):
    checkpoints = opened(snapshot="host")
    x = jnp.zeros(SIZE)
    assert checkpoints.save(1, {"x": x}, {}, {}) > 0  # the gate is shut: nothing is written yet
    np.testing.assert_array_equal(step_of(x), 1)  # which donates x
    gate.set()
    np.testing.assert_array_equal(checkpoints.restore(1, abstract())["x"], 0)


def test_without_locked_memory_a_snapshot_on_the_host_waits_for_orbax(opened, gate, monkeypatch):
    monkeypatch.setattr(checkpoint, "pinned", lambda leaves: None)
    checkpoints = opened(snapshot="host")
    threading.Timer(0.3, gate.set).start()
    began = time.perf_counter()
    stall = checkpoints.save(1, {"x": jnp.zeros(SIZE)}, {}, {})
    assert 0.25 < stall <= time.perf_counter() - began
    np.testing.assert_array_equal(checkpoints.restore(1, abstract())["x"], 0)


def test_the_next_save_waits_for_the_one_under_way_and_says_so(opened, gate):
    checkpoints = opened()
    checkpoints.save(1, {"x": jnp.ones(SIZE)}, {}, {})
    threading.Timer(0.3, gate.set).start()
    assert checkpoints.save(2, {"x": jnp.ones(SIZE)}, {}, {}) > 0.2
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("mode", ["device", "host"])
@pytest.mark.parametrize("meet", ["poll", "wait", "save", "steps", "close"])
def test_an_error_of_the_thread_is_met_once_at_the_next_call(opened, monkeypatch, mode, meet):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    checkpoints = opened(snapshot=mode)
    checkpoints.save(1, {"x": jnp.ones(SIZE)}, {}, {})
    checkpoints.wait()
    save = checkpoint.storage.ocp.CheckpointManager.save
    monkeypatch.setattr(checkpoint.storage.ocp.CheckpointManager, "save", full)
    calls = {"save": lambda: checkpoints.save(3, {"x": jnp.ones(SIZE)}, {}, {})}
    with pytest.raises(
        SaveError,
        match="step 2 could not be written .*: no space left on device .* step 1 and is int",
    ):
        checkpoints.save(
            2, {"x": jnp.ones(SIZE)}, {}, {}
        )  # where the snapshot is on the host it is met here
        deadline = time.monotonic() + 20
        while meet == "poll" and time.monotonic() < deadline:
            checkpoints.poll()
            time.sleep(0.001)
        calls.get(meet, getattr(checkpoints, meet))()
    if meet == "close" and mode == "device":
        return
    monkeypatch.setattr(checkpoint.storage.ocp.CheckpointManager, "save", save)
    checkpoints.save(2, {"x": jnp.zeros(SIZE)}, {}, {})
    assert checkpoints.steps() == [1, 2]


def test_a_snapshot_is_let_go_once_it_is_on_the_host(opened):
    checkpoints = opened(snapshot="device")
    checkpoints.save(1, {"x": jnp.ones(SIZE + 1)}, {}, {})
    checkpoints.wait()
    assert not [x for x in jax.live_arrays() if x.shape == (SIZE + 1,)]


class Device:
    """A device of so many bytes; a CPU does not tell."""

    def __init__(self, limit, peak):
        self.memory_stats = lambda: limit and {"bytes_limit": limit, "peak_bytes_in_use": peak}


def leaf(*parts):
    shards = [
        SimpleNamespace(device=device, data=SimpleNamespace(nbytes=size)) for device, size in parts
    ]
    return SimpleNamespace(addressable_shards=shards)


@pytest.mark.parametrize("limit, peak, fits", [(100, 70, True), (100, 71, False), (None, 0, True)])
def test_room_is_what_was_never_held_at_once(limit, peak, fits):
    tight, roomy = Device(limit, peak), Device(1000, 0)
    leaves = {"a": leaf((tight, 10), (roomy, 500)), "b": leaf((tight, 20))}
    assert fits_twice(leaves) == fits


def test_auto_decides_at_the_first_save_for_good(opened, gate, monkeypatch):
    answers = [False]
    monkeypatch.setattr(checkpoint, "fits_twice", lambda leaves: answers.pop())
    gate.set()
    checkpoints = opened()
    saved = []
    snapshot = checkpoint.snapshot
    monkeypatch.setattr(
        checkpoint, "snapshot", lambda leaves, copy: saved.append(copy) or snapshot(leaves, copy)
    )
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.ones(SIZE)}, {}, {})
    assert saved == [False, False] and not answers


def test_an_unknown_place_is_refused(tmp_path):
    with pytest.raises(UsageError, match="snapshot='disk' is unknown"):
        Checkpoints(tmp_path, snapshot="disk")


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mode", ["device", "host"])
def test_double_precision_of_one_thread_is_saved_by_another(opened, mode):
    checkpoints = opened(snapshot=mode)
    x = jnp.arange(SIZE) / jnp.float64(3)
    checkpoints.save(1, {"x": x}, {}, {})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    restored = checkpoints.restore(
        1, {"x": jax.ShapeDtypeStruct(x.shape, jnp.float64, sharding=sharding)}
    )["x"]
    assert restored.dtype == jnp.float64
    np.testing.assert_array_equal(restored, x)
    np.testing.assert_array_equal(checkpoints.numpy(1)["x"], x)
