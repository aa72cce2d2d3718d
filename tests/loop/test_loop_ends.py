"""How a run ends and what it compiles: signals, failed saves, layouts, profiles."""

import functools
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from noisy_walk import KEY, WALK, Recorder, State, assert_same_bits, batch, first, stacked, whole

from jaxpar import loop, processes
from jaxpar.io import SaveError
from jaxpar.loop import Fit, Hooks, compile_step, fit
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place, last", [("batch", 6), ("check", 7), ("evaluate", 7)])
@pytest.mark.usefixtures("handlers")
def test_an_interrupted_run_saves_and_resumes(tmp_path, opened, number, place, last):
    def signal_at(here, step):
        if here == place and step == 6:
            os.kill(os.getpid(), number)

    def draw(step):
        signal_at("batch", step + 1)
        return batch(step)

    writer = Recorder()
    hooks = Hooks(
        checkpoints=opened(tmp_path),
        writer=writer,
        check=lambda step, values: signal_at("check", step),
        evaluate=lambda state: signal_at("evaluate", int(state.count)) or {},
    )
    result = fit(WALK, KEY, draw, Fit(20, eval_every=3), hooks)
    assert (result.step, result.interrupted) == (last, number)
    assert hooks.checkpoints.steps() == [last]
    assert list(writer.column("train/loss")) == list(range(1, last + 1))
    assert_same_bits(result.state, whole(last)[0])
    again = fit(WALK, KEY, batch, Fit(20), Hooks(checkpoints=opened(tmp_path)))
    assert not again.interrupted
    assert_same_bits(again.state, whole(20)[0])


@pytest.mark.usefixtures("handlers")
def test_a_signal_in_the_last_step_is_told_as_well():
    result = fit(
        WALK,
        KEY,
        lambda step: step == 4 and os.kill(os.getpid(), signal.SIGINT) or batch(step),
        Fit(5),
    )
    assert (result.step, result.interrupted) == (5, signal.SIGINT)


@pytest.mark.usefixtures("handlers")
def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path, opened, monkeypatch):
    def compile_step(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("compiling goes on")

    monkeypatch.setattr(loop, "compile_step", compile_step)
    checkpoints = opened(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(WALK, KEY, batch, Fit(20), Hooks(checkpoints=checkpoints))
    assert checkpoints.steps() == []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with processes.interruptible() as interruption:  # of several processes none leaves the others
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.number == signal.SIGINT


def test_a_run_ends_after_the_chunk_in_which_it_is_done(tmp_path, opened):
    hooks = Hooks(checkpoints=opened(tmp_path))
    result = fit(WALK, KEY, batch, Fit(20, chunk=3, until_done=True), hooks)
    assert (result.step, result.interrupted, hooks.checkpoints.steps()) == (6, False, [6])
    assert_same_bits(result.state, whole(6)[0])
    again = fit(WALK, KEY, None, Fit(20, chunk=3, until_done=True), hooks)
    assert (again.step, again.interrupted) == (6, False)
    assert fit(WALK, KEY, batch, Fit(8, chunk=2)).step == 8


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_ends_at_once_but_a_second_sigterm_does_not(tmp_path, opened):
    def draw(number, step):
        for _ in range(2 * (step == 4)):
            os.kill(os.getpid(), number)
        return batch(step)

    checkpoints = opened(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(
            WALK,
            KEY,
            functools.partial(draw, signal.SIGINT),
            Fit(20, save_every=2),
            Hooks(checkpoints=checkpoints),
        )
    assert checkpoints.steps() == [2, 4]
    assert fit(WALK, KEY, functools.partial(draw, signal.SIGTERM), Fit(20)).step == 5


@pytest.mark.usefixtures("handlers")
def test_signals_while_a_save_is_written_lose_neither_checkpoint(tmp_path, opened, monkeypatch):
    """SIGTERM comes when step 4 is being written, and again when step 5, the last, is."""
    manager, gate = type(opened(tmp_path)._manager), threading.Event()
    save, came = manager.save, []

    def slow(self, step, **kwargs):
        came.append(step)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        assert gate.wait(60)
        return save(self, step, **kwargs)

    def draw(step):
        if step == 4:
            while not came:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.1, gate.set).start()
        return batch(step)

    monkeypatch.setattr(manager, "save", slow)
    checkpoints = opened(tmp_path)
    result = fit(WALK, KEY, draw, Fit(20, save_every=4), Hooks(checkpoints=checkpoints))
    assert (result.step, result.interrupted, came) == (5, signal.SIGTERM, [4, 5])
    assert checkpoints.steps() == [4, 5]


def test_many_processes_agree_within_the_bound(monkeypatch):
    """Whatever the chunk: each process asks at the same steps, at most `AGREE_EVERY` and a chunk apart."""
    asked = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda x: asked.append(step) or [x, other]
    )
    other = 0
    for chunk in (1, 3, 4, 7, 10, 25):
        asked.clear()
        with processes.interruptible() as interruption:
            for step in range(chunk, 20 * chunk, chunk):
                assert not interruption.agreed(step)
        gaps = np.diff([0, *asked])
        assert len(asked) > 1 and gaps.max() <= loop.AGREE_EVERY + chunk
        assert chunk > 1 or list(asked) == [1, 10]
    other = signal.SIGTERM
    assert processes.Interruption().agreed(10) == signal.SIGTERM


def test_fit_outside_the_main_thread_leaves_signals_alone():
    results = []
    thread = threading.Thread(target=lambda: results.append(fit(WALK, KEY, batch, Fit(3))))
    thread.start()
    thread.join()
    assert results[0].step == 3


class FullDisk:
    """Stands in for checkpoints whose save fails; the method `meet` is the one to tell."""

    refused = ()

    def __init__(self, meet):
        self.meet, self.saving = meet, False

    def __getattr__(self, name):
        def call(*args):
            assert name in ("restore_newest", "prepare", "save", "poll", "wait")
            self.saving |= name == "save"
            if self.saving and name == self.meet:
                raise SaveError("no space left on device")

        return call


@pytest.mark.parametrize("meet, last", [("save", 3), ("poll", 3), ("wait", 6)])
@pytest.mark.usefixtures("handlers")
def test_a_failed_save_ends_the_run(meet, last):
    writer = Recorder()
    with pytest.raises(SaveError, match="no space left"):
        fit(
            WALK, KEY, batch, Fit(6, save_every=3), Hooks(checkpoints=FullDisk(meet), writer=writer)
        )
    assert max(writer.column("train/loss")) == last


@pytest.mark.parametrize(
    "counts, sentence",
    [
        (dict(num_steps=0), "num_steps=0 must be at least 1"),
        (dict(num_steps=5, chunk=0), "chunk=0 must be at least 1"),
        (
            dict(num_steps=5, chunk=2, eval_every=3),
            "eval_every=3 must be 0 or a multiple of chunk=2",
        ),
        (
            dict(num_steps=5, chunk=2, save_every=1),
            "save_every=1 must be 0 or a multiple of chunk=2",
        ),
        (dict(num_steps=5, save_every=-1), "save_every=-1 must be at least 0"),
        (dict(num_steps=5, profile="2"), "profile='2' is not first:last"),
        (dict(num_steps=5, profile="3:3"), "profile='3:3' is not first:last"),
        (dict(num_steps=5, profile="5:7"), "profile='5:7' .* 5 steps"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts, sentence):
    with pytest.raises(UsageError, match=sentence):
        Fit(**counts)


def test_programs_are_compiled_once_a_length_and_reported_once(monkeypatch):
    lengths, reported, compile_ = [], [], loop.compile_step
    monkeypatch.setattr(
        loop, "compile_step", lambda *a, **k: lengths.append(k["length"]) or compile_(*a, **k)
    )
    fit(WALK, KEY, batch, Fit(11, 3), Hooks(report=reported.append))
    assert lengths == [3, 2]
    assert len(reported) == 1 and isinstance(reported[0], jax.stages.Compiled)


@pytest.mark.parametrize("length", [1, 4])
def test_the_state_is_donated_and_the_batch_is_not(length):
    state, inputs = first(), batch(0) if length == 1 else stacked(length)
    compiled = compile_step(WALK, jax.eval_shape(lambda s: s, state), inputs, length=length)
    step = np.int32(0)
    new, infos = compiled(KEY, step, state, inputs)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state)) and not inputs.is_deleted()
    assert infos["loss"].shape == (length,)
    assert_same_bits(new, whole(length)[0])


@pytest.mark.parametrize(
    "given", ["nothing", "anywhere", "on another device", "laid out otherwise"]
)
def test_fit_lays_the_state_out_and_keeps_it_there(tmp_path, opened, given):
    layouts, axes = [], State(("embed",), (), ())
    evaluate = lambda state: layouts.append(state.position.sharding.spec) or {}  # noqa: E731
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=4))) as mesh:
        state = None if given == "nothing" else first()
        if given == "on another device":
            state = jax.device_put(state, jax.devices()[3])
        elif given == "laid out otherwise":
            state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        hooks = Hooks(axes=axes, checkpoints=opened(tmp_path), evaluate=evaluate)
        fit(WALK, KEY, batch, Fit(4, eval_every=1), hooks, state=state)
    with use_mesh(make_mesh(MeshSpec(fsdp=8))):
        hooks = Hooks(axes=axes, checkpoints=opened(tmp_path), evaluate=evaluate)
        result = fit(WALK, KEY, batch, Fit(7), hooks)
    assert layouts == [PartitionSpec("fsdp")] * 5
    assert result.state.position.sharding.num_devices == 8
    np.testing.assert_allclose(result.state.position, whole(7)[0].position, rtol=2e-5, atol=1e-6)
    assert_same_bits(result.state.memory, whole(7)[0].memory)


@pytest.mark.parametrize(
    "chunk, profile, resume_at, want",
    [
        (1, "8:30", 0, [("start", 8), ("stop", 10)]),  # the run ends first
        (3, "4:5", 0, [("start", 3), ("stop", 6)]),  # whole chunks
        (1, "2:6", 4, [("start", 4), ("stop", 6)]),
        (1, "2:4", 6, []),
    ],
)
def test_profile_covers_its_steps(
    monkeypatch, sent, tmp_path, opened, chunk, profile, resume_at, want
):
    log = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: log.append(("start", sent[-1])))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append(("stop", sent[-1])))
    sent.append(resume_at)
    if resume_at:
        fit(WALK, KEY, batch, Fit(resume_at), Hooks(checkpoints=opened(tmp_path)))
    hooks = Hooks(profile_folder=tmp_path, checkpoints=opened(tmp_path) if resume_at else None)
    fit(WALK, KEY, batch, Fit(10, chunk, profile=profile), hooks)
    assert log == want


def test_profile_writes_a_trace(tmp_path):
    fit(WALK, KEY, batch, Fit(4, profile="1:3"), Hooks(profile_folder=tmp_path))
    assert [path for path in tmp_path.rglob("*.xplane.pb") if path.stat().st_size]
