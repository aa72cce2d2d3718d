"""Scans over monoids equal their loop, and that of the log-sum-exp monoid is masked softmax attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from recurrences import loop
from tolerance import EXACT_MATHS, assert_close

from jaxpar.scan import LOGSUMEXP, LogSumExp, Monoid, attention_scan, attention_step, scan_monoid
from jaxpar.types import UsageError

EXACT = EXACT_MATHS["float64"]
AFFINE = Monoid(
    lambda x, y: (y[0] * x[0], y[0] * x[1] + y[1]),
    lambda x: (jnp.ones_like(x[0]), jnp.zeros_like(x[1])),
)
TREE = LOGSUMEXP._replace(scan=None)


def dense(scores, values, reverse=False):
    """Masked softmax attention of one constant query; rows that see nothing give zeros."""
    length = scores.shape[1]
    seen = np.tril(np.ones((length, length), bool))
    seen = (seen.T if reverse else seen)[None] & (scores > -jnp.inf)[:, None]
    logits = jnp.where(seen, scores[:, None], -1e30)
    weights = jnp.where(seen, jax.nn.softmax(logits, -1), 0)
    return jnp.einsum("bts,bsv->btv", weights, values)


def masked(seed=0, length=11):
    """Scores with a hidden beginning, hidden steps, a wholly hidden row, and a peak that would overflow."""
    rng = np.random.default_rng(seed)
    scores, values = rng.normal(size=(3, length)) * 20, rng.normal(size=(3, length, 2))
    scores[0, :3] = scores[1, 5] = scores[2] = -np.inf
    scores[0, 6] = 1e3
    return scores, values


@pytest.mark.parametrize("reverse", [False, True])
def test_attention_is_masked_softmax(reverse, x64):
    scores, values = masked()

    def derivatives(f):
        def loss(*args):
            return jnp.sum(jnp.sin(3 * f(*args, reverse=reverse)))

        return jit(lambda *x: (f(*x, reverse=reverse), jax.grad(loss, (0, 1))(*x)))(scores, values)

    got = derivatives(functools.partial(attention_scan, axis=1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    assert_close(got, derivatives(dense), 1e-13)


def test_the_log_of_the_sum_is_differentiated_exactly(x64):
    scores, values = masked()
    scores = np.maximum(scores, -300)

    def log_sums(scan):
        return jit(jax.value_and_grad(lambda s: jnp.sum(jnp.sin(scan(s)))))(scores)

    def ours(s):
        return scan_monoid(LOGSUMEXP, LogSumExp(s, jnp.ones_like(s), values), axis=1).log_sum

    assert_close(log_sums(ours), log_sums(functools.partial(jax.lax.cumlogsumexp, axis=1)), 1e-13)


def test_the_fast_scan_is_the_tree(x64):
    scores, values = masked(1)
    elements = LogSumExp(
        scores, (scores > -np.inf) * 2.5, np.where(scores[..., None] > -np.inf, values, 0)
    )
    f = jit(
        lambda monoid, reverse: scan_monoid(monoid, elements, axis=1, reverse=reverse),
        static_argnums=(0, 1),
    )
    for reverse in (False, True):
        got, want = f(LOGSUMEXP, reverse), f(TREE, reverse)
        np.testing.assert_array_equal(got.max, want.max)
        assert_close((got.denominator, got.numerator), (want.denominator, want.numerator), EXACT)


def test_the_tree_has_no_holes_in_its_gradient_either(x64):
    scores, values = masked()

    def loss(s, v):
        elements = LogSumExp(s, (s > -jnp.inf).astype(s.dtype), v)
        return jnp.sum(jnp.sin(3 * scan_monoid(TREE, elements, axis=1).mean))

    want = jit(jax.grad(lambda s, v: jnp.sum(jnp.sin(3 * dense(s, v))), (0, 1)))(scores, values)
    assert_close(jit(jax.grad(loss, (0, 1)))(scores, values), want, 1e-13)


def test_streaming_gives_the_same_numbers(x64):
    scores, values = masked()
    step, state, out = jit(attention_step), None, []
    for t in range(scores.shape[1]):
        state, y = step(state, scores[:, t], values[:, t])
        out.append(y)
    assert_close(
        jnp.stack(out, 1), jit(functools.partial(attention_scan, axis=1))(scores, values), EXACT
    )
    assert [x.shape for x in state] == [(3,), (3,), (3, 2)]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_monoid_of_the_user(reverse, x64):
    a, b = np.random.default_rng(0).normal(size=(2, 2, 6))
    f = jit(lambda a, b: scan_monoid(AFFINE, (a, b), axis=1, reverse=reverse))
    assert_close(f(a, b)[1], loop(a, b, np.zeros(2), axis=1, reverse=reverse), EXACT)
    element = (a[:, 0], b[:, 0])
    nothing = AFFINE.identity(element)
    assert_close(AFFINE.combine(nothing, element), element, 0)
    assert_close(AFFINE.combine(element, nothing), element, 0)


@pytest.mark.parametrize("empty", [(0.3, 1.0, [2.0, 3.0]), (-np.inf, 0.0, [0.0, 0.0])])
def test_nothing_changes_nothing(empty):
    element = LogSumExp(*(jnp.asarray(x, jnp.float32) for x in empty))
    for merged in (
        LOGSUMEXP.combine(LOGSUMEXP.identity(element), element),
        LOGSUMEXP.combine(element, LOGSUMEXP.identity(element)),
    ):
        for x, y in zip(merged, element, strict=True):
            np.testing.assert_array_equal(x, y)


def test_empty_sequences_and_half_precision():
    assert attention_scan(jnp.ones((2, 0)), jnp.ones((2, 0, 3)), axis=1).shape == (2, 0, 3)
    scores, values = (jnp.asarray(x, jnp.bfloat16) for x in masked())
    out = jit(functools.partial(attention_scan, axis=-1))(scores, values)
    assert out.dtype == jnp.bfloat16
    assert np.abs(np.asarray(out, np.float32) - dense(*masked())).max() < 0.05


@pytest.mark.parametrize(
    ("sentence", "call"),
    [
        (
            r"values take the shape of scores, \(3,\), and one",
            lambda: attention_scan(jnp.ones(3), jnp.ones((4, 1))),
        ),
        (
            "axis=-1 counts from the back",
            lambda: scan_monoid(AFFINE, (jnp.ones(3), jnp.ones((3, 1))), axis=-1),
        ),
        (
            "axis=1 is no axis of every element",
            lambda: scan_monoid(AFFINE, (jnp.ones(3), jnp.ones((3, 1))), axis=1),
        ),
        (
            r"one length of time, but have \[3, 4\] at axis 0",
            lambda: scan_monoid(AFFINE, (jnp.ones(3), jnp.ones(4))),
        ),
        ("at least one array", lambda: scan_monoid(AFFINE, ())),
    ],
)
def test_mistakes_are_told_in_a_sentence(sentence, call):
    with pytest.raises(UsageError, match=sentence):
        call()


def stream(scores, values):
    """Outputs of `attention_step`, one after the other."""
    state = None
    out = []
    for t in range(scores.shape[1]):
        state, y = attention_step(state, scores[:, t], values[:, t])
        out.append(y)
    return jnp.stack(out, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 4])
def test_a_score_without_an_exponential_is_no_hidden_step(bad, position, x64):
    scores, values = masked(2)
    scores[1, position] = bad
    clean = jit(functools.partial(attention_scan, axis=1))(*masked(2))
    wanted = np.array(clean)
    wanted[1, position:] = np.nan

    def tree(scores, values):
        shown = (scores != -jnp.inf).astype(scores.dtype)
        values = jnp.where(scores[..., None] == -jnp.inf, 0, values)
        out = scan_monoid(TREE, LogSumExp(scores, shown, values), axis=1).mean
        return out.at[:, 0].set(wanted[:, 0])  # a tree weighs nothing at its first element

    for f in (functools.partial(attention_scan, axis=1), stream, tree):
        np.testing.assert_allclose(jit(f)(scores, values), wanted, rtol=1e-12)

    def loss(scores, values):
        return jnp.sum(jnp.sin(attention_scan(scores, values, axis=1)))

    by_scores, by_values = jit(jax.grad(loss, (0, 1)))(scores, values)
    assert np.isnan(by_scores[1, position:]).any() and np.isnan(by_values[1, : position + 1]).any()
    other_rows = [0, 2]
    assert np.isfinite(by_scores[other_rows, :]).all()
    assert np.isfinite(by_values[other_rows, :]).all()


def test_the_log_of_a_sum_with_nan_is_nan():
    element = LogSumExp(jnp.float32(0), jnp.float32(np.nan), jnp.full(2, np.nan))
    assert np.isnan(element.log_sum) and np.isnan(element.mean).all()


def test_a_nan_among_the_values_outlasts_any_score():
    scores = jnp.array([0.0, 500.0, 1e4])
    values = jnp.array([[np.nan], [1.0], [2.0]])
    assert np.isnan(attention_scan(scores, values)).all()
    hidden = attention_scan(scores.at[0].set(-jnp.inf), values)
    np.testing.assert_allclose(hidden, [[0.0], [1.0], [2.0]])
