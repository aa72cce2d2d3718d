"""The drivers against a Python loop over `algorithm.step`, and what `fit` does around the steps."""

import contextlib
import dataclasses
import functools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy_walk import (
    KEY,
    SIZE,
    WALK,
    Recorder,
    Walk,
    assert_same_bits,
    batch,
    first,
    python_loop,
    stacked,
    whole,
)

from jaxpar.io import CorruptCheckpointError
from jaxpar.io.lock import LOCK
from jaxpar.loop import Fit, Hooks, fit, resume, run, run_until
from jaxpar.types import UsageError


def test_run_is_the_python_loop():
    state, infos = whole(9)
    want, rows = python_loop(9, first())
    np.testing.assert_allclose(state.position, want.position, rtol=2e-5, atol=1e-6)
    assert_same_bits((state.count, state.memory), (want.count, want.memory))
    for step, row in enumerate(rows):
        np.testing.assert_allclose(infos["loss"][step], row["loss"], rtol=2e-5)
        assert infos["draw"][step] == jax.random.uniform(jax.random.fold_in(KEY, step), (SIZE,))[0]


def test_algorithms_that_compare_equal_begin_as_each_of_them_says():
    @dataclasses.dataclass(frozen=True)
    class From:
        place: float = dataclasses.field(compare=False)

        def init(self, key, inputs):
            return jnp.full(3, self.place)

        def step(self, key, state, inputs):
            return state, {"loss": state[0]}

    assert From(1.0) == From(2.0)
    for place in (1.0, 2.0):
        assert (fit(From(place), KEY, lambda _: None, Fit(1)).state == place).all()


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
        return jax.jit(function)(first().position, (2 * jnp.arange(SIZE) - 7) / 8)

    ((_, got), got_gradient), ((_, want), want_gradient) = (
        value_and_gradient(cuts),
        value_and_gradient((12,)),
    )
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
    starts = jax.vmap(lambda key: WALK.init(key))(jax.random.split(KEY, 4)).replace(
        count=jnp.array([0, 3, 5, -9])
    )
    keys = jax.random.split(jax.random.key(1), 4)
    states, made = jax.jit(jax.vmap(lambda key, state: run_until(WALK, key, state, None, 8)))(
        keys, starts
    )
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
        assert writer.column(f"train/{name}") == {
            i + 1: float(x) for i, x in enumerate(infos[name])
        }
    assert result.metrics["train/loss"] == float(infos["loss"][-1])


@pytest.mark.parametrize("chunk", [1, 3])
def test_metrics_are_fetched_while_the_next_program_runs(sent, chunk):
    checked, writer = [], Recorder(sent)
    fit(
        WALK,
        KEY,
        batch,
        Fit(7, chunk),
        Hooks(writer=writer, check=lambda step, values: checked.append(step)),
    )
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
    result = fit(
        WALK, KEY, batch, plan, Hooks(checkpoints=checkpoints, writer=writer, evaluate=evaluate)
    )
    assert seen == evals and checkpoints.steps() == saves
    assert writer.column("validation/loss") == {step: 1.0 / step for step in evals}
    assert [step for step, _ in writer.rows] == sorted(step for step, _ in writer.rows)
    assert result.metrics["validation/loss"] == 1.0 / plan.num_steps


@pytest.mark.parametrize("cut", [1, 4, 7, 11])
def test_a_run_cut_within_a_chunk_evaluates_and_saves_on_its_own_steps(tmp_path, opened, cut):
    def events(num_steps, checkpoints, start):
        seen = []

        def evaluate(state):
            seen.append(int(state.count))
            return {"validation/loss": 1.0}

        hooks = Hooks(checkpoints=checkpoints, evaluate=evaluate)
        fit(WALK, KEY, batch, Fit(num_steps, 3, eval_every=6, save_every=3), hooks)
        return seen, [step for step in checkpoints.steps() if step > start]

    evals, saves = events(17, opened(tmp_path / "whole"), 0)
    assert (evals, saves) == ([6, 12, 17], [3, 6, 9, 12, 15, 17])
    events(cut, opened(tmp_path / "cut"), 0)
    later = [step for step in evals if step > cut], [step for step in saves if step > cut]
    assert events(17, opened(tmp_path / "cut"), cut) == later


def test_an_old_evaluation_never_ranks_a_later_checkpoint(tmp_path, opened):
    checkpoints = opened(tmp_path, keep=1)
    losses = {4: 1.0, 8: 5.0, 12: 6.0}
    hooks = Hooks(
        checkpoints=checkpoints,
        evaluate=lambda state: {"validation/loss": losses[int(state.count)]},
    )
    fit(WALK, KEY, batch, Fit(12, eval_every=4, save_every=2), hooks)
    assert checkpoints.best() == 4 and checkpoints.steps() == [4, 12]


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_crashed_run_resumes_with_the_same_bits(tmp_path, opened, chunk):
    plan, writers = Fit(17, chunk, save_every=3), [Recorder() for _ in range(3)]
    for writer, last in zip(writers, (8, 14, 99), strict=True):
        hooks = Hooks(checkpoints=opened(tmp_path), writer=writer)
        hooks.check = lambda step, values, last=last: (
            1 // (last - step)
        )  # divides by zero at the last step
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
    hooks = Hooks(
        checkpoints=opened(tmp_path), evaluate=lambda state: {"count": float(state.count)}
    )

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
    before = content(tmp_path)
    for wanted, field in (({"seed": 2}, "seed=1 .* 2;"), ({"corpus": "b2"}, "corpus='a1' .* 'b2'")):
        with pytest.raises(UsageError, match=f"of step 4 was made with {field}"):
            fit(
                WALK,
                KEY,
                batch,
                Fit(6),
                Hooks(checkpoints=opened(tmp_path), metadata=saved | wanted),
            )
    with pytest.raises(UsageError, match="fresh=None"):
        fit(
            WALK,
            KEY,
            batch,
            Fit(6),
            Hooks(checkpoints=opened(tmp_path), metadata=saved | {"fresh": 1}),
        )
    assert content(tmp_path) == before
    assert (
        fit(WALK, KEY, batch, Fit(6), Hooks(checkpoints=opened(tmp_path), metadata=saved)).step == 6
    )


def content(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK
    }


def spoil(folder):
    """Cuts the arrays of a checkpoint short."""
    for path in folder.rglob("*"):
        if path.parent.name == "d":
            os.truncate(path, path.stat().st_size // 2)


# Orbax closes its event loop under the other leaves' reads when one of them fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("noted", [False, True])
def test_a_damaged_newest_is_told_and_the_run_goes_on_from_the_one_before(
    tmp_path, opened, capsys, noted
):
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
    assert (
        f"the checkpoint {tmp_path}/9 cannot be read" in sentence
        and "it was set aside as 9.refused" in sentence
    )
    assert hooks.checkpoints.steps() == [3, 6, 9, 12] and (tmp_path / "9.refused").is_dir()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_if_all_are_damaged_the_run_does_not_start_anew(tmp_path, opened):
    fit(WALK, KEY, batch, Fit(6, save_every=3), Hooks(checkpoints=opened(tmp_path)))
    for step in (3, 6):
        spoil(tmp_path / str(step))
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match=f"no checkpoint in {tmp_path} is whole"):
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
    progress = types.SimpleNamespace(
        note=shown.append, update=lambda step, values: shown.append(sorted(values))
    )
    hooks = Hooks(checkpoints=opened(tmp_path), writer=writer, progress=progress)
    result = fit(WALK, KEY, batch, Fit(7, save_every=3), hooks)
    stalls = writer.column("speed/save_stall_s")
    assert list(stalls) == [3, 6, 7] and all(0 < stall < 60 for stall in stalls.values())
    assert "stall" not in str(shown) + str(sorted(result.metrics))
    assert [step for step, _ in writer.rows] == sorted(step for step, _ in writer.rows)
