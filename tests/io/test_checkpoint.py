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
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.io.checkpoint import Checkpoints, SaveError
from jaxpar.types import UsageError


class Moments(NamedTuple):
    mean: dict
    count: jax.Array


class Nothing(NamedTuple):
    pass


@flax.struct.dataclass
class State:
    params: dict
    optimizer: tuple
    key: jax.Array


def over(num_devices, *axes):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("d",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_state(rows=24):
    def leaf(dtype):
        bits = np.random.default_rng(0).integers(0, 2**16, (rows, 4), dtype=np.uint16)
        return jax.device_put(bits.astype(np.float32).astype(dtype) / 7, over(8, "d"))

    params = {"w": leaf(jnp.bfloat16), "b": [leaf(jnp.float32), leaf(jnp.int32)]}
    optimizer = (Moments({"w": leaf(jnp.float32)}, jnp.int32(3)), Nothing())
    return State(params, optimizer, jax.device_put(jax.random.split(jax.random.key(1), 24), over(8, "d")))


def abstract(state, num_devices=8):
    def leaf(x):
        axes = ("d",) if x.ndim else ()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over(num_devices, *axes))

    return jax.tree.map(leaf, state)


def bits(state):
    def leaf(x):
        x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.asarray(x).tobytes(), x.dtype, x.shape

    return jax.tree.map(leaf, state)


def save_scalar(checkpoints, step, **metrics):
    state = {"x": jnp.full((4,), step, jnp.float32)}
    checkpoints.save(step, state, {f"validation/{name}": v for name, v in metrics.items()}, {})


@pytest.fixture
def opened():
    """`opened(folder, ...)` is a `Checkpoints` that the test closes at its end."""
    all_opened = []

    def open_(folder, **options):
        all_opened.append(Checkpoints(folder, **options))
        return all_opened[-1]

    yield open_
    for checkpoints in all_opened:
        checkpoints.close()


def test_state_returns_bit_for_bit_on_another_mesh(tmp_path, opened):
    state, metadata = make_state(), {"corpus": "a1b2", "versions": {"jax": jax.__version__}, "seed": 3}
    first = opened(tmp_path / "a" / "b")
    first.save(5, state, {}, metadata)
    first.wait()
    again = opened(tmp_path / "a" / "b")
    assert again.steps() == [5]
    assert again.metadata(5) == metadata
    restored = again.restore(5, abstract(state, 3))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert all(leaf.sharding.num_devices == 3 for leaf in jax.tree.leaves(restored))
    np.testing.assert_array_equal(jax.random.bits(restored.key[0]), jax.random.bits(state.key[0]))


def test_state_may_be_donated_right_after_save(tmp_path, opened):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    checkpoints = opened(tmp_path, keep=10)
    for step in range(4):
        x = jax.device_put(jnp.full((1 << 18,), step, jnp.float32), over(8, "d"))
        checkpoints.save(step, {"x": x}, {}, {})
        jax.block_until_ready(overwrite(x))
    for step in range(4):
        restored = checkpoints.restore(step, abstract({"x": jnp.zeros(1 << 18)}))
        np.testing.assert_array_equal(restored["x"], step)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_keeps_newest_and_best(tmp_path, opened, mode):
    sign = 1 if mode == "min" else -1
    losses = [{"loss": 3.0}, {}, {"loss": 1.0}, {"loss": 2.0}, {"loss": -sign * np.inf}, {"loss": np.nan}, {"x": -9.0}]
    checkpoints = opened(tmp_path, keep=2, best_mode=mode)
    assert checkpoints.newest() is None and checkpoints.best() is None
    for step, metrics in enumerate(losses):
        save_scalar(checkpoints, step, **{name: sign * v for name, v in metrics.items()})
        checkpoints.wait()
    for each in (checkpoints, opened(tmp_path, keep=2, best_mode=mode)):
        assert each.steps() == [2, 5, 6]
        assert each.newest() == 6
        assert each.best() == 2
    save_scalar(each, 7, loss=sign * 0.5)
    assert each.steps() == [6, 7] and each.best() == 7


def test_what_a_kill_left_half_written_or_half_deleted_goes_away(tmp_path, opened):
    checkpoints = opened(tmp_path, keep=1)
    for step in (1, 2):
        save_scalar(checkpoints, step, loss=float(step))
    checkpoints.wait()
    shutil.rmtree(tmp_path / "1" / "metrics")
    half = shutil.copytree(tmp_path / "2", tmp_path / "9.orbax-checkpoint-tmp")
    again = opened(tmp_path, keep=1)
    assert again.newest() == 2 and again.best() == 2
    deadline = time.monotonic() + 20
    while half.exists() and time.monotonic() < deadline:  # removed in the background
        time.sleep(0.01)
    assert not half.exists()
    save_scalar(again, 3, loss=0.0)
    assert again.steps() == [3]


def test_without_metric_nothing_is_best(tmp_path, opened):
    checkpoints = opened(tmp_path, keep=1, best_metric=None)
    for step in range(3):
        save_scalar(checkpoints, step, loss=float(step))
    assert checkpoints.steps() == [2] and checkpoints.best() is None


def test_wrong_use_is_one_sentence(tmp_path, opened):
    state = make_state()
    checkpoints = opened(tmp_path)
    checkpoints.save(5, state, {}, {})
    wanted = abstract(state)
    narrow = wanted.replace(params=abstract(make_state(rows=16)).params)
    with pytest.raises(UsageError, match=r"params/b/0 is float32\[24,4\] there and float32\[16,4\] here"):
        checkpoints.restore(5, narrow)
    recast = wanted.replace(params=wanted.params | {"w": wanted.params["b"][0]})
    with pytest.raises(UsageError, match=r"params/w is bfloat16\[24,4\] there and float32\[24,4\] here"):
        checkpoints.restore(5, recast)
    with pytest.raises(UsageError, match=r"params/c is absent there and float32\[24,4\] here"):
        checkpoints.restore(5, wanted.replace(params=wanted.params | {"c": wanted.params["b"][0]}))
    with pytest.raises(UsageError, match=r"optimizer/0/count is int32\[\] there and absent here"):
        checkpoints.restore(5, wanted.replace(optimizer=()))
    with pytest.raises(UsageError, match=r"has no checkpoint of step 4; it has \[5\]"):
        checkpoints.restore(4, wanted)
    with pytest.raises(UsageError, match="step 5 is there already"):
        checkpoints.save(5, state, {}, {})
    with pytest.raises(UsageError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(UsageError, match='"min" or "max"'):
        Checkpoints(tmp_path, best_mode="least")


# Orbax closes its event loop under the other leaves' reads when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["short data", "no layout", "no manifest", "no files", "empty files"])
def test_damaged_newest_is_named_and_never_replaced_silently(tmp_path, opened, damage):
    state = make_state()
    checkpoints = opened(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state, {"validation/loss": 1.0}, {})
    checkpoints.wait()
    files = [path for path in (tmp_path / "2").rglob("*") if path.is_file()]
    for path in files:
        if damage == "empty files":  # what a power cut leaves
            os.truncate(path, 0)
        if damage == "short data" and path.parent.name == "d":
            os.truncate(path, path.stat().st_size // 2)
        if (
            damage == "no files"
            or (damage == "no layout" and path.name == "_METADATA")
            or (damage == "no manifest" and path.name == "manifest.ocdbt")
        ):
            path.unlink()
    with pytest.raises(UsageError, match=f"step 2 cannot be read .*remove the folder {tmp_path}/2 to go on"):
        again = opened(tmp_path)
        assert again.newest() == 2
        again.restore(2, abstract(state))
    shutil.rmtree(tmp_path / "2")
    assert bits(opened(tmp_path).restore(1, abstract(state))) == bits(state)


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


def fill_up(folder):
    """Saves 1 and 2 fit, 3 does not; prints what was raised where, then shows that all is well again."""
    small, large = {"x": jnp.arange(1000.0)}, {"x": jax.random.normal(jax.random.key(0), (1 << 20,))}
    checkpoints = Checkpoints(folder, keep=1)
    for step in (1, 2):
        checkpoints.save(step, small, {"validation/loss": step}, {"step": step})
    checkpoints.wait()
    for meet in (checkpoints.poll, checkpoints.wait, functools.partial(checkpoints.save, 9, small, {}, {})):
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
    start = "import sys; from pathlib import Path; sys.path[:0] = ['.', 'tests/io']; import test_checkpoint as t; "
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
