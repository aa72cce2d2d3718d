"""Checkpoints: bit for bit on any mesh, kept and tidied, damaged ones refused."""

import gc
import os
import re
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpointing import (
    HOWS,
    abstract,
    bits,
    closed_loop,
    damage,
    flip,
    make_state,
    names,
    over,
    save_scalar,
    three_saved,
)

from jaxpar.io import Checkpoints, CorruptCheckpointError, RunMismatchError, storage
from jaxpar.types import UsageError


def test_state_returns_bit_for_bit_on_another_mesh(tmp_path, opened):
    state, metadata = (
        make_state(),
        {"corpus": "a1b2", "versions": {"jax": jax.__version__}, "seed": 3},
    )
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
    losses = [
        {"loss": 3.0},
        {},
        {"loss": 1.0},
        {"loss": 2.0},
        {"loss": -sign * np.inf},
        {"loss": np.nan},
        {"x": -9.0},
    ]
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


@pytest.mark.parametrize("every, kept", [(3600, [0, 4]), (1e-6, [0, 1, 2, 3, 4])])
def test_one_every_so_often_is_kept_for_good(tmp_path, opened, every, kept):
    checkpoints = opened(tmp_path, keep=1, keep_every_s=every, best_metric=None)
    for step in range(5):
        save_scalar(checkpoints, step)
    assert checkpoints.steps() == kept
    again = opened(
        tmp_path, keep=1, keep_every_s=every, best_metric=None
    )  # the times are on disk as well
    save_scalar(again, 5)
    assert again.steps() == [step for step in kept if step < 4 or every < 1] + [5]


def test_numpy_has_every_leaf_and_needs_no_sharding(tmp_path, opened):
    state, checkpoints = make_state(), opened(tmp_path)
    checkpoints.save(5, state, {}, {})
    arrays = checkpoints.numpy(5)
    want = {
        "key": jax.random.key_data(state.key),
        "optimizer": {"0": {"count": state.optimizer[0].count, "mean": state.optimizer[0].mean}},
        "params": {
            "w": state.params["w"],
            "b": {"0": state.params["b"][0], "1": state.params["b"][1]},
        },
    }
    assert jax.tree.structure(arrays) == jax.tree.structure(want)
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(arrays))
    assert bits(arrays) == bits(want)


@closed_loop
@pytest.mark.parametrize("how", ["short data", "no layout", "other metadata", "other arrays"])
def test_numpy_refuses_what_is_damaged(tmp_path, opened, how):
    three_saved(tmp_path, opened)
    damage(tmp_path / "3", how)
    with pytest.raises(CorruptCheckpointError, match=f"the checkpoint {tmp_path}/3 "):
        opened(tmp_path).numpy(3)
    assert opened(tmp_path).numpy(2)["optimizer"]["0"]["count"] == 3


def test_containers_may_be_of_other_classes(tmp_path, opened):
    """Names count: a list is as good as a dict of its numbers, a struct as a dict of its fields."""
    state, checkpoints = make_state(), opened(tmp_path)
    checkpoints.save(5, state, {}, {})
    wanted = abstract(state, 2)
    other = {
        "key": wanted.key,
        "params": {"w": wanted.params["w"], "b": dict(enumerate(wanted.params["b"]))},
        "optimizer": [{"mean": wanted.optimizer[0].mean, "count": wanted.optimizer[0].count}],
    }
    restored = checkpoints.restore(5, other)
    assert jax.tree.structure(restored) == jax.tree.structure(other)
    assert bits(restored["params"]["b"][1]) == bits(state.params["b"][1])
    assert bits(restored["optimizer"][0]["count"]) == bits(state.optimizer[0].count)


def test_a_reader_beside_a_run_touches_nothing_and_warns_of_nothing(tmp_path, opened, caplog):
    states = three_saved(tmp_path, opened)
    half = shutil.copytree(
        tmp_path / "2", tmp_path / "9.orbax-checkpoint-tmp"
    )  # a save under way in the run
    before = sorted(path for path in tmp_path.rglob("*"))
    caplog.clear()
    reader = opened(tmp_path, read_only=True)
    assert not [record for record in caplog.records if record.levelname == "WARNING"], caplog.text
    assert reader.steps() == [1, 2, 3] and reader.best() == 1
    assert bits(reader.restore(3, abstract(states[3]))) == bits(states[3])
    with pytest.raises(UsageError, match="step 4 cannot be saved to .* read only"):
        reader.save(4, states[3], {}, {})
    reader.close()
    assert half.exists() and sorted(path for path in tmp_path.rglob("*")) == before
    assert (
        opened(tmp_path / "absent", read_only=True).steps() == []
        and not (tmp_path / "absent").exists()
    )


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Stands in for the package that reads gs:// paths: folders here. TensorStore, for the arrays, is not faked."""
    from etils.epath import backend, gpath

    class Local(type(backend.os_backend)):
        pass

    def mapped(name):
        method = getattr(backend.os_backend, name)

        def call(self, path, *args, **kwargs):
            args = [local(x) if str(x).startswith(("gs://", "/gs/")) else x for x in args]
            return method(local(path), *args, **kwargs)

        return call

    def local(path):
        return str(path).replace("gs://", "/gs/").replace("/gs/", f"{tmp_path}/", 1)

    for name in (
        "open",
        "exists",
        "isdir",
        "listdir",
        "mkdir",
        "makedirs",
        "rmtree",
        "remove",
        "rename",
        "stat",
    ):
        setattr(Local, name, mapped(name))
    Local.glob = lambda self, path: [
        str(x).replace(f"{tmp_path}/", "gs://", 1) for x in backend.os_backend.glob(local(path))
    ]
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Local())
    return tmp_path


def test_a_bucket_is_opened_and_tidied_as_a_folder_is(bucket):
    folder = storage.absolute("gs://bucket/runs/a")
    assert str(folder) == "gs://bucket/runs/a"
    storage.open_folder(folder, False)
    assert storage.set_unlistable_aside(folder) == [] and not list(
        (bucket / "bucket/runs/a").iterdir()
    )
    for step, text in ((1, '{"validation/loss": 1.0}'), (2, "{")):
        (folder / str(step) / "metrics").mkdir(parents=True)
        (folder / str(step) / "metrics" / "metrics").write_text(text)
    (sentence,) = storage.set_unlistable_aside(folder)
    assert (
        "the checkpoint gs://bucket/runs/a/2 is damaged" in sentence
        and "set aside as 2.refused" in sentence
    )
    assert sorted(path.name for path in (bucket / "bucket/runs/a").iterdir()) == ["1", "2.refused"]


def test_a_bucket_without_its_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for read_only in (False, True):
        with pytest.raises(
            UsageError,
            match=r"the checkpoint folder gs://b/f cannot be \w+ \(.*gcsfs.*choose a folder",
        ):
            Checkpoints("gs://b/f", read_only=read_only)


def test_wrong_use_is_one_sentence(tmp_path, opened):
    state = make_state()
    checkpoints = opened(tmp_path)
    checkpoints.save(5, state, {}, {})
    wanted = abstract(state)
    narrow = wanted.replace(params=abstract(make_state(rows=16)).params)
    with pytest.raises(
        UsageError, match=r"params/b/0 is float32\[24,4\] there and float32\[16,4\] here"
    ):
        checkpoints.restore(5, narrow)
    recast = wanted.replace(params=wanted.params | {"w": wanted.params["b"][0]})
    with pytest.raises(
        UsageError, match=r"params/w is bfloat16\[24,4\] there and float32\[24,4\] here"
    ):
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
    with pytest.raises(UsageError, match="keep_every_s=-1 must be"):
        Checkpoints(tmp_path, keep_every_s=-1)
    with pytest.raises(UsageError, match="best_mode='least' is unknown"):
        Checkpoints(tmp_path, best_mode="least")


@closed_loop
@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_newest_is_named_and_set_aside_and_the_one_before_it_used(tmp_path, opened, how):
    states = three_saved(tmp_path, opened)
    damage(tmp_path / "3", how)
    before = {path: path.read_bytes() for path in (tmp_path / "3").rglob("*") if path.is_file()}
    again = opened(tmp_path, keep=2)
    if how != "empty files":  # Orbax cannot even list that
        with pytest.raises(CorruptCheckpointError) as caught:
            again.restore(3, abstract(states[3]))
        reasons = (
            "cannot be read: a file of it is missing",
            "cannot be read: a file of it is not as it was written",
        )
        reasons += (r"is damaged: [\w/]+( and \d+ others)? is not what was saved",)
        said = rf"the checkpoint {tmp_path}/3 ({'|'.join(reasons)}); move that folder away to go on from .*"
        assert re.fullmatch(said, str(caught.value)), caught.value
        assert again.steps() == [1, 2, 3]
    step, restored = again.restore_newest(abstract(states[3], 3), {"seed": 3})
    assert step == 2 and bits(restored) == bits(states[2])
    assert again.steps() == [1, 2]
    (sentence,) = again.refused
    assert re.search(rf"^the checkpoint {tmp_path}/3 .*; it was set aside as 3\.refused$", sentence)
    aside = tmp_path / "3.refused"
    assert {path: path.read_bytes() for path in aside.rglob("*") if path.is_file()} == {
        aside / path.relative_to(tmp_path / "3"): content for path, content in before.items()
    }
    for step in (3, 4, 5):  # the same step is saved again, and retention deletes only its own
        again.save(step, states[1], {}, {"seed": 3})
    assert again.steps() == [1, 4, 5]  # 1 is the best
    assert names(tmp_path) == ["1", "3.refused", "4", "5"]


@closed_loop
def test_if_all_are_damaged_nothing_is_touched_and_nothing_starts_anew(tmp_path, opened):
    states = three_saved(tmp_path, opened)
    for step in (1, 2, 3):
        damage(tmp_path / str(step), "short data")
    for _ in range(2):
        with pytest.raises(
            CorruptCheckpointError,
            match=rf"no checkpoint in {tmp_path} is whole: .*{tmp_path}/3 .*resume=false",
        ):
            opened(tmp_path).restore_newest(abstract(states[1]), {"seed": 3})
        assert names(tmp_path) == ["1", "2", "3"]
    for step in (1, 2, 3):
        (tmp_path / str(step)).rename(tmp_path / f"{step}.refused")
    with pytest.raises(
        CorruptCheckpointError,
        match="only 1.refused, 2.refused, 3.refused is left of those refused earlier",
    ):
        opened(tmp_path).restore_newest(abstract(states[1]), {"seed": 3})


@closed_loop
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(tmp_path, opened):
    states = three_saved(tmp_path, opened)
    with pytest.raises(
        RunMismatchError, match="the checkpoint of step 3 was made with seed=3 and this run has 4"
    ):
        opened(tmp_path).restore_newest(abstract(states[1]), {"seed": 4})
    damage(
        tmp_path / "3", "no layout"
    )  # a whole one of another run is no reason to call all damaged
    with pytest.raises(RunMismatchError, match="the checkpoint of step 2 was made with seed=3"):
        opened(tmp_path).restore_newest(abstract(states[1]), {"seed": 4})
    narrow = abstract(states[1]).replace(params=abstract(make_state(rows=16)).params)
    with pytest.raises(
        RunMismatchError,
        match=r"of step 2 .* does not fit this run: params/b/0 is float32\[24,4\] there",
    ):
        opened(tmp_path).restore_newest(narrow, {"seed": 3})
    assert names(tmp_path) == ["1", "2", "3"]
    checkpoints = opened(tmp_path, keep=10)
    checkpoints.save(4, states[1], {}, {"seed": 5})
    step, _ = checkpoints.restore_newest(abstract(states[1]), {"seed": 3})
    assert step == 2 and [text.rsplit(" ", 1)[1] for text in checkpoints.refused] == [
        "4.refused",
        "3.refused",
    ]
    assert "seed=5" in checkpoints.refused[0] and checkpoints.steps() == [1, 2]


def test_an_empty_folder_has_nothing_to_restore(tmp_path, opened):
    assert opened(tmp_path).restore_newest(abstract(make_state()), {}) is None


@closed_loop
@pytest.mark.slow
def test_no_flip_of_any_file_goes_unseen(tmp_path, opened):
    """A flip is either harmless, and the state comes back bit for bit, or the checkpoint is refused."""
    states, random, refused = three_saved(tmp_path / "all", opened), np.random.default_rng(0), 0
    files = sorted(
        p.relative_to(tmp_path / "all/3") for p in (tmp_path / "all/3").rglob("*") if p.is_file()
    )
    for round_ in range(120):
        folder = Path(shutil.copytree(tmp_path / "all", tmp_path / str(round_)))
        path = folder / "3" / files[round_ % len(files)]
        if not path.stat().st_size:
            continue
        if random.random() < 0.2:
            os.truncate(path, random.integers(path.stat().st_size))
        else:
            flip(path, random.integers(path.stat().st_size), random.integers(8))
        checkpoints = Checkpoints(folder)
        step, restored = checkpoints.restore_newest(abstract(states[1]), {"seed": 3})
        checkpoints.close()
        assert bits(restored) == bits(states[step]), path
        refused += step == 2
        assert step in (2, 3)
        shutil.rmtree(folder)
        gc.collect()  # what Orbax leaves unfinished complains now, not in another test
    assert refused > 30
