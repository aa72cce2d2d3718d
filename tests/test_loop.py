"""The drivers against a Python loop over `algorithm.step`, and what `fit` does around the steps."""

import contextlib
import dataclasses
import functools
import os
import signal
import threading
import time
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import loop
from jaxpar.io import Checkpoints, Damaged, SaveError
from jaxpar.loop import Fit, Hooks, compile_step, fit, resume, run, run_until
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

KEY = jax.random.key(7)
SIZE = 8
_programs = {}  # of `Walk`, by length


@flax.struct.dataclass
class State:
    position: jax.Array
    count: jax.Array
    memory: jax.Array  # a typed key, which every driver and checkpoint has to carry


@dataclasses.dataclass(frozen=True)
class Walk:
    """A noisy walk; done when it has made `patience` steps."""

    patience: int = 5

    def init(self, key, inputs=None):
        return State(jax.random.uniform(key, (SIZE,)), jnp.int32(0), key)

    def step(self, key, state, inputs):
        noise = jax.random.uniform(key, (SIZE,))
        position = jnp.sin(2 * state.position) + 0.1 * noise + (0.0 if inputs is None else inputs)
        info = {"loss": jnp.mean(position**2), "draw": noise[0]}
        return State(position, state.count + 1, jax.random.fold_in(state.memory, 1)), info

    def done(self, state):
        return state.count >= self.patience


WALK = Walk()


def batch(step):
    return jnp.cos(step + jnp.arange(SIZE, dtype=jnp.float32))


def first():
    return WALK.init(jax.random.fold_in(KEY, 2**32 - 1))


def python_loop(num_steps, state):
    infos = []
    for step in range(num_steps):
        state, info = WALK.step(jax.random.fold_in(KEY, step), state, batch(step))
        infos.append(info)
    return state, infos


def stacked(num_steps, start=0):
    return jnp.stack([batch(step) for step in range(start, start + num_steps)])


@functools.cache
def whole(num_steps):
    return jax.jit(run, static_argnums=(0, 4))(WALK, KEY, first(), stacked(num_steps), num_steps)


def assert_same_bits(got, want):
    def words(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    jax.tree.map(lambda a, b: np.testing.assert_array_equal(words(a), words(b)), got, want)


class Recorder:
    """A writer that keeps its rows, and appends to a common log."""

    def __init__(self, log=None):
        self.rows, self.log = [], [] if log is None else log

    def write(self, step, values):
        self.rows.append((step, dict(values)))
        self.log.append(f"write {step}")

    def column(self, name):
        return {step: values[name] for step, values in self.rows if name in values}


@pytest.fixture
def opened():
    """`opened(folder)` is a `Checkpoints` that the test closes at its end."""
    all_opened = []

    def open_(folder, keep=100):
        all_opened.append(Checkpoints(folder, keep=keep))
        return all_opened[-1]

    yield open_
    for checkpoints in all_opened:
        checkpoints.close()


@pytest.fixture(autouse=True)
def reused(monkeypatch):
    """Compiles each program of the toy once for all tests."""

    def compile_once(algorithm, state, inputs, *, length, axes):
        if axes is not None or type(algorithm) is not Walk:
            return compile_step(algorithm, state, inputs, length=length, axes=axes)
        if length not in _programs:
            _programs[length] = compile_step(algorithm, state, inputs, length=length)
        return _programs[length]

    monkeypatch.setattr(loop, "compile_step", compile_once)


@pytest.fixture
def sent(monkeypatch, reused):
    """The steps that were made when each program had been sent off."""
    steps, compile_ = [], loop.compile_step

    def compile_and_log(*args, length, **kwargs):
        compiled = compile_(*args, length=length, **kwargs)

        def call(key, step, state, inputs):
            steps.append(int(step) + length)
            return compiled(key, step, state, inputs)

        return call

    monkeypatch.setattr(loop, "compile_step", compile_and_log)
    return steps


def test_run_is_the_python_loop():
    state, infos = whole(9)
    want, rows = python_loop(9, first())
    np.testing.assert_allclose(state.position, want.position, rtol=2e-5, atol=1e-6)
    assert_same_bits((state.count, state.memory), (want.count, want.memory))
    for step, row in enumerate(rows):
        np.testing.assert_allclose(infos["loss"][step], row["loss"], rtol=2e-5)
        assert infos["draw"][step] == jax.random.uniform(jax.random.fold_in(KEY, step), (SIZE,))[0]


def test_run_takes_no_inputs_and_no_steps():
    state, infos = run(WALK, KEY, first(), None, 3)
    assert state.count == 3 and infos["loss"].shape == (3,)
    assert_same_bits(run(WALK, KEY, first(), None, 0)[0], first())


@pytest.mark.parametrize("cuts", [(6, 6), (5, 7), (10, 2), (1, 2, 9)])
def test_cutting_a_run_changes_no_bit_of_value_or_gradient(cuts):
    def whole_run(cuts, position, weights):
        state, start, losses = first().replace(position=position), 0, []
        for length in cuts:
            state, infos = run(WALK, KEY, state, stacked(length, start), length, start=start)
            start += length
            losses.append(infos["loss"])
        losses = jnp.concatenate(losses)
        return jnp.vdot(state.position, weights) + losses.sum(), (state, losses)

    def value_and_gradient(cuts):
        function = jax.value_and_grad(functools.partial(whole_run, cuts), has_aux=True)
        return jax.jit(function)(first().position, jnp.linspace(-1.0, 1.0, SIZE))

    ((_, got), got_gradient), ((_, want), want_gradient) = value_and_gradient(cuts), value_and_gradient((12,))
    assert_same_bits(got, want)
    assert_same_bits(got_gradient, want_gradient)
    assert np.abs(want_gradient).min() > 0


def test_gradient_of_run_is_that_of_the_python_loop():
    def through_run(position):
        return run(WALK, KEY, first().replace(position=position), stacked(6), 6)[1]["loss"].sum()

    def through_loop(position):
        return sum(info["loss"] for info in python_loop(6, first().replace(position=position))[1])

    got, want = (jax.jit(jax.grad(f))(first().position) for f in (through_run, through_loop))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("patience, steps", [(0, 0), (4, 4), (10, 10), (11, 10)])
def test_run_until_stops_at_done_or_at_the_bound(patience, steps):
    state, made = run_until(Walk(patience), KEY, first(), batch(0), 10)
    assert made == steps and state.count == steps
    want = first()
    for step in range(steps):
        want, _ = WALK.step(jax.random.fold_in(KEY, step), want, batch(0))
    np.testing.assert_allclose(state.position, want.position, rtol=2e-5, atol=1e-6)
    assert_same_bits(state.memory, want.memory)


def test_run_until_under_vmap_is_each_one_alone():
    starts = jax.vmap(lambda key: WALK.init(key))(jax.random.split(KEY, 4)).replace(count=jnp.array([0, 3, 5, -9]))
    keys = jax.random.split(jax.random.key(1), 4)
    states, made = jax.jit(jax.vmap(lambda key, state: run_until(WALK, key, state, None, 8)))(keys, starts)
    np.testing.assert_array_equal(made, [5, 2, 0, 8])
    for i in range(4):
        alone, _ = run_until(WALK, keys[i], jax.tree.map(lambda x, i=i: x[i], starts), None, 8)
        np.testing.assert_allclose(states.position[i], alone.position, rtol=1e-6)
        assert_same_bits((states.count[i], states.memory[i]), (alone.count, alone.memory))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 20])
def test_fit_in_any_chunks_is_run_bit_for_bit(chunk):
    writer = Recorder()
    result = fit(WALK, KEY, batch, Fit(11, chunk), Hooks(writer=writer))
    state, infos = whole(11)
    assert_same_bits(result.state, state)
    assert (result.step, result.interrupted) == (11, False) and result.compile_s > 0
    for name in ("loss", "draw"):
        assert writer.column(f"train/{name}") == {i + 1: float(x) for i, x in enumerate(infos[name])}
    assert result.metrics["train/loss"] == float(infos["loss"][-1])


@pytest.mark.parametrize("chunk", [1, 3])
def test_metrics_are_fetched_while_the_next_program_runs(sent, chunk):
    checked, writer = [], Recorder(sent)
    fit(WALK, KEY, batch, Fit(7, chunk), Hooks(writer=writer, check=lambda step, values: checked.append(step)))
    ends, want = [*range(chunk, 7, chunk), 7], []
    for before, now in zip([0, *ends], ends, strict=False):
        want += [now] + [f"write {step}" for step in range(max(before - chunk, 0) + 1, before + 1)]
    assert sent == want + [f"write {step}" for step in range(ends[-2] + 1, 8)]
    assert checked == list(range(1, 8))
    speeds = writer.column("speed/steps_per_s")
    assert list(speeds) == ends and min(speeds.values()) > 0


def test_an_algorithm_without_diagnostics_runs():
    class Silent(Walk):
        def step(self, key, state, inputs):
            return super().step(key, state, inputs)[0], {}

    for chunk in (1, 2):
        assert_same_bits(fit(Silent(), KEY, batch, Fit(4, chunk)).state, whole(4)[0])


@pytest.mark.parametrize(
    "plan, evals, saves",
    [
        (Fit(10, 1, eval_every=4, save_every=3), [4, 8, 10], [3, 6, 9, 10]),
        (Fit(10, 2, eval_every=4, save_every=2), [4, 8, 10], [2, 4, 6, 8, 10]),
        (Fit(5), [5], [5]),
    ],
)
def test_evaluations_and_saves_come_on_their_steps(tmp_path, opened, plan, evals, saves):
    seen = []

    def evaluate(state):
        seen.append(int(state.count))
        return {"validation/loss": 1.0 / seen[-1]}

    writer, checkpoints = Recorder(), opened(tmp_path)
    result = fit(WALK, KEY, batch, plan, Hooks(checkpoints=checkpoints, writer=writer, evaluate=evaluate))
    assert seen == evals and checkpoints.steps() == saves
    assert writer.column("validation/loss") == {step: 1.0 / step for step in evals}
    assert [step for step, _ in writer.rows] == sorted(step for step, _ in writer.rows)
    assert result.metrics["validation/loss"] == 1.0 / plan.num_steps


def test_an_old_evaluation_never_ranks_a_later_checkpoint(tmp_path, opened):
    checkpoints = opened(tmp_path, keep=1)
    losses = {4: 1.0, 8: 5.0, 12: 6.0}
    hooks = Hooks(checkpoints=checkpoints, evaluate=lambda state: {"validation/loss": losses[int(state.count)]})
    fit(WALK, KEY, batch, Fit(12, eval_every=4, save_every=2), hooks)
    assert checkpoints.best() == 4 and checkpoints.steps() == [4, 12]


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_crashed_run_resumes_with_the_same_bits(tmp_path, opened, chunk):
    plan, writers = Fit(17, chunk, save_every=3), [Recorder() for _ in range(3)]
    for writer, last in zip(writers, (8, 14, 99), strict=True):
        hooks = Hooks(checkpoints=opened(tmp_path), writer=writer)
        hooks.check = lambda step, values, last=last: 1 // (last - step)  # divides by zero at the last step
        with pytest.raises(ZeroDivisionError) if last < 99 else contextlib.nullcontext():
            result = fit(WALK, KEY, batch, plan, hooks)
        hooks.checkpoints.wait()
    state, infos = whole(17)
    assert_same_bits(result.state, state)
    starts = [min(writer.column("train/loss")) for writer in writers]
    assert starts[0] == 1 and 1 < starts[1] < starts[2] and all(start % 3 == 1 for start in starts)
    for writer in writers:
        for step, value in writer.column("train/loss").items():
            assert value == float(infos["loss"][step - 1])


def test_a_finished_run_is_extended_with_the_same_bits(tmp_path, opened):
    fit(WALK, KEY, batch, Fit(7), Hooks(checkpoints=opened(tmp_path)))
    hooks = Hooks(checkpoints=opened(tmp_path), evaluate=lambda state: {"count": float(state.count)})

    def no_batch(step):
        raise AssertionError

    again = fit(WALK, KEY, no_batch, Fit(7), hooks)
    assert again.step == 7 and again.metrics == {"count": 7.0} and again.compile_s == 0
    assert_same_bits(again.state, whole(7)[0])
    ignored = first().replace(position=jnp.ones(SIZE))  # the checkpoint wins over a given state
    result = fit(WALK, KEY, batch, Fit(12, 3), Hooks(checkpoints=opened(tmp_path)), state=ignored)
    assert_same_bits(result.state, whole(12)[0])


def test_another_runs_checkpoint_is_refused_by_the_field(tmp_path, opened):
    saved = {"seed": 1, "corpus": "a1"}
    fit(WALK, KEY, batch, Fit(4), Hooks(checkpoints=opened(tmp_path), metadata=saved))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for wanted, field in (({"seed": 2}, "seed=1 .* 2;"), ({"corpus": "b2"}, "corpus='a1' .* 'b2'")):
        with pytest.raises(UsageError, match=f"of step 4 was made with {field}"):
            fit(WALK, KEY, batch, Fit(6), Hooks(checkpoints=opened(tmp_path), metadata=saved | wanted))
    with pytest.raises(UsageError, match="fresh=None"):
        fit(WALK, KEY, batch, Fit(6), Hooks(checkpoints=opened(tmp_path), metadata=saved | {"fresh": 1}))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert fit(WALK, KEY, batch, Fit(6), Hooks(checkpoints=opened(tmp_path), metadata=saved)).step == 6


def spoil(folder):
    """Cuts the arrays of a checkpoint short."""
    for path in folder.rglob("*"):
        if path.parent.name == "d":
            os.truncate(path, path.stat().st_size // 2)


# Orbax closes its event loop under the other leaves' reads when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("noted", [False, True])
def test_a_damaged_newest_is_told_and_the_run_goes_on_from_the_one_before(tmp_path, opened, capsys, noted):
    fit(WALK, KEY, batch, Fit(9, save_every=3), Hooks(checkpoints=opened(tmp_path)))
    spoil(tmp_path / "9")
    writer, notes = Recorder(), []
    hooks = Hooks(checkpoints=opened(tmp_path), writer=writer)
    if noted:
        hooks.progress = types.SimpleNamespace(note=notes.append, update=lambda step, values: None)
    result = fit(WALK, KEY, batch, Fit(12, save_every=3), hooks)
    assert_same_bits(result.state, whole(12)[0])
    assert min(writer.column("train/loss")) == 7
    said = capsys.readouterr().out.splitlines()
    (sentence,) = notes if noted else said
    assert f"the checkpoint {tmp_path}/9 cannot be read" in sentence and "it was set aside as 9.refused" in sentence
    assert hooks.checkpoints.steps() == [3, 6, 9, 12] and (tmp_path / "9.refused").is_dir()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_if_all_are_damaged_the_run_does_not_start_anew(tmp_path, opened):
    fit(WALK, KEY, batch, Fit(6, save_every=3), Hooks(checkpoints=opened(tmp_path)))
    for step in (3, 6):
        spoil(tmp_path / str(step))
    for _ in range(2):
        with pytest.raises(Damaged, match=f"no checkpoint in {tmp_path} is whole"):
            fit(WALK, KEY, batch, Fit(9), Hooks(checkpoints=opened(tmp_path)))


def test_resume_tells_the_step_before_the_run_starts(tmp_path, opened):
    hooks = Hooks(checkpoints=opened(tmp_path), metadata={"seed": 1})
    assert resume(WALK, hooks) is None and resume(WALK, Hooks()) is None
    fit(WALK, KEY, batch, Fit(5), hooks)
    step, state = resume(WALK, hooks)
    assert step == 5
    assert_same_bits(state, whole(5)[0])
    hooks.checkpoints = opened(tmp_path / "other")  # which has none: the state that is given counts
    result = fit(WALK, KEY, batch, Fit(8), hooks, state=state, start=step)
    assert_same_bits(result.state, whole(8)[0])
    assert hooks.checkpoints.steps() == [8]


def test_the_stall_of_each_save_is_written_and_not_shown(tmp_path, opened):
    shown, writer = [], Recorder()
    progress = types.SimpleNamespace(note=shown.append, update=lambda step, values: shown.append(sorted(values)))
    hooks = Hooks(checkpoints=opened(tmp_path), writer=writer, progress=progress)
    result = fit(WALK, KEY, batch, Fit(7, save_every=3), hooks)
    stalls = writer.column("speed/save_stall_s")
    assert list(stalls) == [3, 6, 7] and all(0 < stall < 60 for stall in stalls.values())
    assert "stall" not in str(shown) + str(sorted(result.metrics))
    assert [step for step, _ in writer.rows] == sorted(step for step, _ in writer.rows)


@pytest.fixture
def handlers():
    """Fails if the test leaves other signal handlers than it found."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


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
    assert (result.step, result.interrupted) == (last, True)
    assert hooks.checkpoints.steps() == [last]
    assert list(writer.column("train/loss")) == list(range(1, last + 1))
    assert_same_bits(result.state, whole(last)[0])
    again = fit(WALK, KEY, batch, Fit(20), Hooks(checkpoints=opened(tmp_path)))
    assert not again.interrupted
    assert_same_bits(again.state, whole(20)[0])


@pytest.mark.usefixtures("handlers")
def test_a_signal_in_the_last_step_is_no_interruption():
    result = fit(WALK, KEY, lambda step: step == 4 and os.kill(os.getpid(), signal.SIGINT) or batch(step), Fit(5))
    assert (result.step, result.interrupted) == (5, False)


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_ends_at_once_but_a_second_sigterm_does_not(tmp_path, opened):
    def draw(number, step):
        for _ in range(2 * (step == 4)):
            os.kill(os.getpid(), number)
        return batch(step)

    checkpoints = opened(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(WALK, KEY, functools.partial(draw, signal.SIGINT), Fit(20, save_every=2), Hooks(checkpoints=checkpoints))
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
    assert (result.step, result.interrupted, came) == (5, True, [4, 5])
    assert checkpoints.steps() == [4, 5]


def test_many_processes_agree_within_the_bound(monkeypatch):
    """Whatever the chunk: each process asks at the same steps, at most `AGREE_EVERY` and a chunk apart."""
    asked = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda x: asked.append(step) or x)
    for chunk in (1, 3, 4, 7, 10, 25):
        asked.clear()
        with loop._interruptible() as interrupted:
            for step in range(chunk, 20 * chunk, chunk):
                assert not interrupted(step)
        gaps = np.diff([0, *asked])
        assert len(asked) > 1 and gaps.max() <= loop.AGREE_EVERY + chunk
        assert chunk > 1 or list(asked) == [1, 10]


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
        fit(WALK, KEY, batch, Fit(6, save_every=3), Hooks(checkpoints=FullDisk(meet), writer=writer))
    assert max(writer.column("train/loss")) == last


@pytest.mark.parametrize(
    "counts, sentence",
    [
        (dict(num_steps=0), "num_steps=0 must be at least 1"),
        (dict(num_steps=5, chunk=0), "chunk=0 must be at least 1"),
        (dict(num_steps=5, chunk=2, eval_every=3), "eval_every=3 must be 0 or a multiple of chunk=2"),
        (dict(num_steps=5, chunk=2, save_every=1), "save_every=1 must be 0 or a multiple of chunk=2"),
        (dict(num_steps=5, save_every=-1), "save_every=-1 must be 0"),
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
    monkeypatch.setattr(loop, "compile_step", lambda *a, **k: lengths.append(k["length"]) or compile_(*a, **k))
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


@pytest.mark.parametrize("given", ["nothing", "anywhere", "on another device", "laid out otherwise"])
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
def test_profile_covers_its_steps(monkeypatch, sent, tmp_path, opened, chunk, profile, resume_at, want):
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
