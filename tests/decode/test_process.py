"""Processors of logits: against one row and one token at a time, and what ties, extremes and mistakes do."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_process import slow_process
from tolerance import EXACT_MATHS, assert_close

from jaxpar.decode import Counts, Sampling, is_stuck, process, token_log_probs
from jaxpar.decode.penalties import count_token, count_tokens
from jaxpar.types import UsageError

V = 12
run = jit(process, static_argnames="sampling")
kept = lambda logits: np.flatnonzero(np.asarray(logits) > -np.inf).tolist()  # noqa: E731

# Few enough to compile, each with a row of logits in which nearly all are tied with another.
SAMPLINGS = [
    Sampling(temperature=0.0, repetition_penalty=1.25, presence_penalty=0.5),
    Sampling(temperature=0.7, top_k=3),
    Sampling(top_p=0.5),
    Sampling(temperature=2.0, top_k=7, top_p=0.75, min_p=0.3),
    Sampling(
        temperature=0.5,
        min_p=0.1,
        frequency_penalty=0.75,
        presence_penalty=-0.5,
        repetition_penalty=0.5,
    ),
]


@functools.cache
def whole(sampling):
    """Everything at once, one compiled program a configuration."""

    def go(logits, tokens, start, length, bias, allowed):
        counts = count_tokens(tokens, start, length, V) if sampling.needs_counts else None
        return process(logits, sampling, counts=counts, bias=bias, allowed=allowed)

    return jit(go)


@pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=["greedy", "top-k", "top-p", "together", "penalties"]
)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_equal_the_slow_form(sampling, data):
    # Of steps that no rounding merges: ties are ties in both forms.
    some = st.one_of(
        st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0]),
        st.integers(-500, 500).map(lambda n: n / 64),
    )
    logits = data.draw(st.lists(some, min_size=V, max_size=V))
    bias = data.draw(st.lists(st.sampled_from([0.0, 0.0, 1.5, -math.inf]), min_size=V, max_size=V))
    allowed = data.draw(st.lists(st.booleans(), min_size=V, max_size=V))
    tokens = data.draw(st.lists(st.integers(0, V - 1), max_size=6))
    start = data.draw(st.integers(0, len(tokens)))
    padded = tokens + [5] * (6 - len(tokens))
    want, margin = slow_process(logits, sampling, tokens, start, bias, allowed)
    args = ([logits], [padded], [start], [len(tokens)], [bias], [allowed])
    kinds = (np.float32, np.int32, np.int32, np.int32, np.float32, bool)
    got = np.asarray(whole(sampling)(*map(np.asarray, args, kinds)))[0]
    if margin < 1e-6:
        return  # float32 cannot tell on which side of p or min_p this row lies
    assert kept(got) == kept(want)
    assert is_stuck(got) == (not kept(want))
    np.testing.assert_allclose(got[kept(want)], np.asarray(want)[kept(want)], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_equal_logits_go_by_token(dtype):
    """Half of these are tied at the cut, wherever it falls; in bf16, 1.001 and 1 are equal as well."""
    logits = jnp.asarray([[-0.0, 1.0, 1.001, -3.0, 1.0, 0.0, -0.0, 1.0]], dtype)
    first = [1, 2, 4, 7, 0, 5, 6, 3] if dtype == jnp.bfloat16 else [2, 1, 4, 7, 0, 5, 6, 3]
    for k in (1, 3, 6, 7):  # between two of them each time
        assert kept(run(logits, Sampling(top_k=k))[0]) == sorted(first[:k])


def test_top_p_of_equal_probabilities_is_exact():
    """Eight of equal mass: after n of them it is n / 8 exactly, and p is reached, not passed."""
    for p in (1e-45, 0.125, 0.1251, 0.875, 0.99):
        wanted = math.ceil(Fraction(p) * 8)
        assert kept(run(jnp.full((1, 8), 2.5), Sampling(top_p=p))[0]) == list(range(wanted)), p


def test_p_is_of_the_mass_that_top_k_left():
    assert kept(run(jnp.zeros((1, 8)), Sampling(top_k=4, top_p=0.5))[0]) == [0, 1]
    rows = np.random.default_rng(0).standard_normal((20, 200)).astype(np.float32) * 2
    got = run(rows, Sampling(top_k=150, top_p=0.9999999))
    assert max(len(kept(row)) for row in got) == 150, (
        "rounding may never reach p, and must not let more through"
    )


def test_p_of_one_keeps_what_has_no_mass_at_all():
    logits = jnp.asarray([[0.0, -200.0, 3.0]])
    np.testing.assert_array_equal(run(logits, Sampling(top_p=1.0)), logits)
    assert kept(run(logits, Sampling(top_p=1 - 1e-7))[0]) == [0, 2]


def test_the_likeliest_token_always_stays():
    logits = jnp.asarray([[0.0, 5.0, 5.0, -1.0]])
    for sampling in (
        Sampling(top_p=1e-30),
        Sampling(top_k=1),
        Sampling(temperature=1e-30, top_p=0.5),
    ):
        assert kept(run(logits, sampling)[0])[0] == 1
    assert kept(run(logits, Sampling(min_p=1.0))[0]) == [1, 2]
    assert np.isfinite(run(logits, Sampling(temperature=1e-30))).all()


def ranking(row):
    return sorted(range(len(row)), key=lambda v: (-row[v], v))


def test_many_symbols_are_cut_as_if_they_were_sorted():
    """Most of these are equal to others, at every scale and of either sign; one program for each number of them."""
    rng = np.random.default_rng(0)
    rows = np.round(
        rng.standard_normal((6, 700)) * np.array([[0], [0.3], [1], [4], [20], [1e30]]), 1
    ).astype(np.float32)
    rows[4, ::7] = -np.inf
    for k in (1, 40, 699):
        for row, got in zip(rows, run(rows, Sampling(top_k=k)), strict=True):
            assert kept(got) == sorted(v for v in ranking(row)[:k] if row[v] > -np.inf)
    sizes = set()
    for p in (1e-6, 0.999):
        for row, got in zip(rows, run(rows, Sampling(top_p=p)), strict=True):
            want, margin = slow_process(row, Sampling(top_p=p))
            assert kept(got) == kept(want) or margin < 1e-6
            assert ranking(row)[: len(kept(got))] == sorted(kept(got), key=lambda v: (-row[v], v))
            sizes.add(len(kept(got)))
    assert min(sizes) == 1 and max(sizes) == 700
    assert (
        "sort"
        not in jit(process, static_argnums=1).lower(rows, Sampling(top_k=9, top_p=0.5)).as_text()
    )


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_a_row_gone_wrong_changes_no_other(value):
    rows = np.random.default_rng(1).standard_normal((2, V)).astype(np.float32)
    bad = rows.copy()
    bad[0, 3] = value
    sampling = Sampling(top_k=5, top_p=0.8)
    got = run(bad, sampling)
    np.testing.assert_array_equal(got[1], run(rows, sampling)[1])
    np.testing.assert_array_equal(is_stuck(got), [True, False])


def test_a_mask_of_nothing_is_seen_and_is_no_nan():
    logits, allowed = (
        jnp.asarray(np.random.default_rng(2).standard_normal((2, V)), np.float32),
        np.ones((2, V), bool),
    )
    allowed[1] = False
    for sampling in SAMPLINGS:
        if not sampling.needs_counts:
            got = run(logits, sampling, allowed=allowed)
            assert (got[1] == -jnp.inf).all()
            np.testing.assert_array_equal(is_stuck(got), [False, True])
    np.testing.assert_array_equal(token_log_probs(got, jnp.array([0, 0]))[1], -np.inf)
    with jax.debug_nans(True):  # one operation at a time: nor in between
        process(logits, Sampling(min_p=0.1), allowed=allowed)


def test_a_model_gone_wrong_is_seen():
    good = np.random.default_rng(2).standard_normal(V).astype(np.float32)
    bad = np.stack(
        [good, np.where(np.arange(V) == 4, np.nan, good), np.where(np.arange(V) == 4, np.inf, good)]
    )
    for sampling in (
        Sampling(),
        Sampling(top_k=3),
        Sampling(top_p=0.5),
        Sampling(temperature=0.5, top_p=0.5, min_p=0.1),
    ):
        np.testing.assert_array_equal(is_stuck(run(bad, sampling)), [False, True, True])


def test_half_precision_is_widened_and_double_kept(x64):
    for given_, wide in (
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.float64, jnp.float64),
    ):
        logits = jnp.linspace(-1, 1, V).astype(given_)[None]
        for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.3, top_k=5, top_p=0.9)):
            made = jax.eval_shape(
                functools.partial(process, sampling=sampling), logits, bias=jnp.ones((1, V))
            )
            assert made.dtype == wide
        assert jax.eval_shape(token_log_probs, logits, jnp.array([0])).dtype == wide


def test_double_precision_equals_the_slow_form(x64):
    rng = np.random.default_rng(5)
    sampling = Sampling(temperature=0.8, top_k=9, top_p=0.85, min_p=0.02)
    logits = rng.standard_normal((5, V)) * 2
    got = jit(process, static_argnums=1)(logits, sampling)
    want = np.array([slow_process(row, sampling)[0] for row in logits])
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    assert_close(np.exp(got), np.exp(want), EXACT_MATHS["float64"])


def test_counts_are_those_of_lists():
    rng = np.random.default_rng(3)
    tokens = rng.integers(-1, V + 1, (4, 9))
    starts, lengths = np.array([3, 0, 5, 2]), np.array([9, 4, 5, 0])
    got = jit(count_tokens, static_argnums=3)(tokens, starts, lengths, V)
    for b in range(4):
        row = tokens[b, : lengths[b]].tolist()
        assert got.seen[b].tolist() == [v in row for v in range(V)]
        assert got.drawn[b].tolist() == [row[starts[b] :].count(v) for v in range(V)]


def test_counting_one_at_a_time_is_counting_all():
    tokens = np.random.default_rng(4).integers(0, V, (2, 6))
    starts, lengths = np.array([2, 2]), np.array([6, 4])
    step = jit(count_token)
    counts = count_tokens(tokens, starts, starts, V)
    for place in range(2, 6):
        counts = step(counts, tokens[:, place], place < lengths)
    jax.tree.map(np.testing.assert_array_equal, counts, count_tokens(tokens, starts, lengths, V))


def test_log_probabilities_are_those_of_the_law():
    logits = np.random.default_rng(6).standard_normal((3, V)).astype(np.float32)
    processed = np.float64(run(logits, Sampling(temperature=0.6, top_k=4)))
    tokens = np.array([int(processed[0].argmax()), int(processed[1].argmin()), 7])
    for given_ in (processed, np.float64(logits)):
        law = np.exp(given_) / np.exp(given_).sum(1, keepdims=True)
        got = jit(token_log_probs)(np.float32(given_), tokens)
        assert_close(np.exp(got), law[np.arange(3), tokens], EXACT_MATHS["float32"])
    assert jit(token_log_probs)(np.float32(processed), tokens)[1] == -np.inf


def test_mistakes_are_told():
    with pytest.raises(
        UsageError, match="penalties of repetition, presence or frequency need the counts"
    ):
        process(jnp.zeros((1, V)), Sampling(presence_penalty=0.1))
    with pytest.raises(UsageError, match="sampling.min_p=1.5 must be at least 0 and at most 1"):
        Sampling(min_p=1.5)
    empty = Counts(jnp.zeros((1, V), bool), jnp.zeros((1, V), jnp.int32))
    np.testing.assert_array_equal(
        process(jnp.ones((1, V)), Sampling(frequency_penalty=3.0), counts=empty), 1
    )
