"""The judge of states finds what is planted, and forgives what the loop's own rounding explains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells_to_solve import distance, largest
from fast import jit
from judge import NEAR, excess, in_float64, loop_of, nudged, sizes
from outside_recurrences import RECURRENCES

T = 50
RTOL = 1e-5


def walked():
    """States of three leaves: one of usual size, one of 1e-9, one of integers."""
    rng = np.random.default_rng(0)
    return {
        "usual": (1 + rng.uniform(size=(T, 2))).astype(np.float32),
        "tiny": (1e-9 * (1 + rng.uniform(size=T))).astype(np.float32),
        "count": np.arange(T, dtype=np.int32),
    }


def exact(states):
    """States in float64 of a loop that made no error of its own."""

    def widened(leaf):
        if leaf.dtype.kind == "f":
            return leaf.astype(np.float64)
        return leaf

    return jax.tree.map(widened, states)


def judged(states, loop):
    return excess(states, loop, exact(loop), RTOL)


def changed(name, where, value):
    """States of which some are replaced by a function of them."""
    states = walked()
    states[name][where] = value(states[name][where])
    return states


def test_the_loop_itself_is_right():
    assert judged(walked(), walked()) == 0


@pytest.mark.parametrize(
    ("name", "where", "value"),
    [
        ("usual", (-1, 0), lambda h: h * (1 + 1e-3)),
        ("usual", (0, 1), lambda h: -h),
        ("usual", slice(None), lambda h: h[::-1]),
        ("tiny", slice(None), lambda h: 3 * h),
        ("tiny", -1, lambda h: 3 * h),
        ("tiny", slice(None), lambda h: 0),
    ],
    ids=["last step", "first step", "whole leaf", "tiny leaf", "tiny last step", "tiny leaf of 0"],
)
def test_a_planted_error_is_found(name, where, value):
    assert 3 < judged(changed(name, where, value), walked()) < np.inf


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_to_be_the_same(value):
    states = changed("usual", (7, 1), lambda h: value)
    assert judged(states, walked()) == np.inf
    assert judged(walked(), states) == np.inf
    assert judged(states, states) == 0


@pytest.mark.parametrize("shape", [(10_000, 1), (100, 64)])
def test_one_nan_among_many_entries_is_found(shape):
    """XLA for CPUs leaves it out of maxima of thousands."""
    right = jnp.ones(shape)
    bad = right.at[7, -1].set(jnp.nan)
    for states, loop in ((bad, right), (right, bad)):
        assert excess(states, loop, np.asarray(loop, np.float64), RTOL) == np.inf
        # The right leaf comes first: Python's maximum would keep it and drop the NaN.
        assert distance([right, states], [right, loop]) == np.inf
        assert not largest([right, bad]) < 2


def test_infinities_of_other_sign_differ():
    plus = changed("usual", (7, 1), lambda h: np.inf)
    minus = changed("usual", (7, 1), lambda h: -np.inf)
    assert judged(minus, plus) == np.inf


def test_an_integer_off_by_one_is_found():
    assert judged(changed("count", 3, lambda h: h + 1), walked()) == np.inf
    assert judged(changed("count", -1, lambda h: h - 1), walked()) == np.inf


def test_a_switch_is_no_float():
    loop = np.asarray([True, False, True])
    assert excess(loop, loop, loop, RTOL) == 0
    assert excess(~loop, loop, loop, RTOL) == np.inf


@pytest.mark.parametrize("place", [0, NEAR, NEAR + 1, 2 * NEAR + 2])
def test_the_formula(place):
    """The loop's own error counts for the steps near it alone."""
    loop = np.full(3 * NEAR, 4.0)
    exact = loop.copy()
    exact[2 * NEAR + 2] -= 0.5
    states = loop.copy()
    states[place] += 0.3
    near = 0.5 if place > NEAR + 1 else 0.0
    wanted = 0.3 / (10 * (near + 0.01 * 4 + 0.001 * 4))
    np.testing.assert_allclose(excess(states, loop, exact, 0.01), wanted, rtol=1e-9)


def test_what_may_as_well_be_right_widens_what_is_allowed():
    loop = np.ones((T, 1))
    states = loop + 0.1
    assert excess(states, loop, loop, RTOL) > 100
    assert excess(states, loop, loop, RTOL, [loop, loop + 0.02]) < 1


def test_numbers_are_nudged_by_one_rounding_at_most():
    tree = {"a": jnp.linspace(1, 2, 100), "n": jnp.arange(3)}
    moved = nudged(tree, np.finfo(np.float32).eps)
    assert np.array_equal(moved["n"], tree["n"])
    steps = np.abs(np.asarray(moved["a"]) - np.asarray(tree["a"])) / np.finfo(np.float32).eps
    assert 0 < steps.max() <= 2 and (steps == 0).any()


def test_errors_of_the_loop_are_forgiven_tenfold():
    loop = np.ones((T, 1), np.float32)
    exact = loop + np.float64(1e-3)
    assert 0.8 < excess(loop + np.float32(9e-3), loop, exact, 1e-6) < 1
    assert 1 < excess(loop + np.float32(11e-3), loop, exact, 1e-6) < 1.2


def test_an_error_that_is_not_finite_forgives_nothing():
    loop = np.ones(T, np.float32)
    exact = np.full(T, np.inf)
    assert excess(loop + np.float32(0.1), loop, exact, RTOL) > 100


def test_sizes_are_medians_then_means_then_one():
    loop = np.asarray([[1, 0, 0, np.nan], [3, 0, 0, 4], [-5, 6, 0, 8], [9, 0, 0, np.inf]])
    np.testing.assert_array_equal(sizes(loop), [4, 1.5, 1, 6])
    np.testing.assert_array_equal(sizes(np.full((T, 2), np.nan)), [1, 1])


def test_each_entry_is_judged_by_its_own_size():
    loop = np.ones((T, 2)) * np.asarray([1e6, 1e-6])
    states = loop + np.asarray([0, 1e-9])
    assert judged(states, loop) > 9
    assert judged(loop + np.asarray([1e-9, 0]), loop) < 1e-9


def test_an_entry_that_is_always_zero_may_be_off_by_rtol():
    loop = np.zeros((T, 1))
    assert judged(loop + 0.9 * RTOL, loop) < 1
    assert judged(loop + 1.1 * RTOL, loop) > 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.complex64])
def test_other_dtypes(dtype):
    loop = (1 + np.random.default_rng(1).uniform(size=(T, 2))).astype(dtype)
    assert excess(loop, loop, loop, 1e-3) == 0
    states = loop.copy()
    states[-1, 0] *= 2
    assert excess(states, loop, loop, 1e-3) > 10


def test_no_steps_and_no_leaves_are_right():
    empty = jax.tree.map(lambda leaf: leaf[:0], walked())
    assert excess(empty, empty, exact(empty), RTOL) == 0
    assert excess({}, {}, {}, RTOL) == 0


def test_states_of_another_form_are_refused():
    loop = walked()
    less = {"usual": loop["usual"]}
    short = jax.tree.map(lambda leaf: leaf[1:], loop)
    wide = exact(loop)
    for states in (less, short, wide):
        with pytest.raises(ValueError, match="differ"):
            judged(states, loop)
    with pytest.raises(ValueError, match="differ"):
        excess(loop, loop, less, RTOL)


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda recurrence: recurrence.name)
def test_a_lost_step_is_found_in_every_recurrence(recurrence):
    start = recurrence.start(jnp.float32)
    inputs = recurrence.inputs(20, jnp.float32)
    run = jit(lambda h, xs: loop_of(recurrence.step, h, xs))
    loop = run(start, inputs)
    with jax.enable_x64(True):
        wide = run(in_float64(start), in_float64(inputs))
    assert excess(loop, loop, wide, RTOL) == 0

    # In float64, as some move by a few roundings of float32 a step.
    late = jax.tree.map(lambda leaf: np.concatenate([leaf[:1], leaf[:-1]]), wide)
    assert excess(late, wide, wide, 1e-12) > 1
