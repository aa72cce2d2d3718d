"""Generated digits of one dimension: pure, balanced, learnable; LMUFormer reads them whole and streamed alike."""

import jax
import numpy as np
import pytest

from experiments import rnn
from experiments.app.sequences import curves
from experiments.app.sequences.curves import LENGTH, PENS, digits_1d
from experiments.app.sequences.series import SeriesConfig, open_task


def test_curves_are_a_pure_function_of_the_generator_and_each_digit_comes_as_often():
    curves, labels = digits_1d(np.random.default_rng(3), 205)
    again, other = (
        digits_1d(np.random.default_rng(3), 205),
        digits_1d(np.random.default_rng(4), 205),
    )
    np.testing.assert_array_equal(curves, again[0])
    np.testing.assert_array_equal(labels, again[1])
    assert (
        not np.array_equal(curves, other[0])
        and curves.shape == (205, LENGTH)
        and labels.shape == (205,)
    )
    assert sorted(np.bincount(labels)) == [20] * 5 + [21] * 5 and not np.array_equal(
        labels, np.sort(labels)
    )


def test_a_curve_is_its_pen_moved_and_scaled_on_a_ramp(monkeypatch):
    monkeypatch.setattr(curves, "NOISE", 0.0)
    places = set()
    for curve, label in zip(*digits_1d(np.random.default_rng(0), 300), strict=True):
        slope = np.median(np.diff(curve))  # that of the silence, which is most of a curve
        pen = curve - slope * (np.arange(LENGTH) - (LENGTH - 1) / 2)
        first, last = np.flatnonzero(~np.isclose(pen, 0))[[0, -1]]
        want = np.trim_zeros(np.array(PENS[label]) / 5.0)
        scale = pen[first] / want[0]
        np.testing.assert_allclose(pen[first : last + 1], scale * want, atol=1e-9)
        assert 0.6 <= scale <= 1.4 and abs(slope) * (LENGTH - 1) / 2 <= 0.6
        places.add(first - (PENS[label][0] == 0))
    assert places == set(range(LENGTH - len(PENS[0]) + 1))


def test_noise_is_as_large_at_each_step_and_smooth(monkeypatch):
    noisy, labels = digits_1d(np.random.default_rng(0), 4000)
    monkeypatch.setattr(curves, "NOISE", 0.0)
    noise = noisy - digits_1d(np.random.default_rng(0), 4000)[0]
    np.testing.assert_allclose(noise.std(0), 0.4, rtol=0.05)
    assert (
        0.9 < np.corrcoef(noise[:, 20], noise[:, 21])[0, 1]
        and abs(np.corrcoef(noise[:, 5], noise[:, 20])[0, 1]) < 0.1
    )
    assert labels.shape == (4000,)


def test_a_linear_classifier_is_far_above_chance():
    curves, labels = digits_1d(np.random.default_rng(1), 3000)
    rows = np.concatenate([curves, np.ones((3000, 1))], 1)
    weights = np.linalg.lstsq(rows[:2000], np.eye(10)[labels[:2000]], rcond=None)[0]
    assert (
        (rows[2000:] @ weights).argmax(1) == labels[2000:]
    ).mean() > 0.17  # of a tenth, by more than seven deviations


def test_the_task_holds_a_fifth_out():
    task = open_task(SeriesConfig(task="digits_1d"), 0)
    assert (task.inputs, task.outputs, task.classes, task.length) == (1, 10, True, LENGTH)
    assert sum(batch["weights"].sum() for batch in task.validation) == 1000
    seen = {row.tobytes() for step in range(50) for row in task.train(step)["inputs"]}
    assert not seen & {row.tobytes() for batch in task.validation for row in batch["inputs"]}


@pytest.mark.parametrize("task", ["digits", "digits_1d"])
def test_lmuformer_streams_what_it_makes_of_the_whole(task):
    """In float32, to 1e-5, on digits of two dimensions and of one."""
    if task == "digits":
        pytest.importorskip("sklearn")
    config = rnn.compose("preset=lmuformer", f"data.task={task}")
    opened = open_task(config.data, 0)
    trainer = rnn.make_trainer(config, opened)
    params = jax.jit(trainer.init)(jax.random.key(0)).params
    assert rnn.streaming_error(trainer, opened, params) < 1e-5
