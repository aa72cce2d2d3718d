"""Routing and dispatch against loops in Python; the losses of routers against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn.experts.dispatch import capacity_of, combine, rows_of, sort_choices, within_capacity
from jaxpar.nn.experts.losses import balance_loss, bias_loss, information_gain, load, router_z_loss
from jaxpar.nn.experts.route import SCORES, expert_choice, heard, noisy, route, weights_by_expert
from jaxpar.types import UsageError

N, E, K = 7, 5, 3
each_scores = pytest.mark.parametrize("scores", SCORES)
# Few values, so that many are equal.
LOGITS = arrays(np.float32, (N, E), elements=st.sampled_from([-200.0, -1.0, 0.0, 0.5, 2.0, 200.0]))
CHOICES = arrays(np.int32, (N, K), elements=st.integers(0, E))


def slow_route(logits, k, scores, normalise, bias):
    """Each token by itself, in double precision."""
    rows = []
    for row in logits.astype(np.float64):
        score = (
            np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            if scores == "softmax"
            else 1 / (1 + np.exp(-row))
        )
        rank = (
            row if bias is None else (score + bias).astype(np.float32)
        )  # scores that vanish beside it are equal
        expert = sorted(range(len(row)), key=lambda e: (-rank[e], e))[:k]
        total = sum(score[e] for e in expert) if normalise else 1.0
        rows.append((expert, [score[e] / total for e in expert], score))
    return [np.array(column) for column in zip(*rows, strict=True)]


ROUTES = {
    (scores, normalise, biased): jit(
        lambda x, b, s=scores, n=normalise: route(x, K, scores=s, normalise=n, bias=b)
    )
    for scores in SCORES
    for normalise in (True, False)
    for biased in (True, False)
}


@settings(deadline=None, max_examples=25)
@given(LOGITS, st.sampled_from([*ROUTES]))
def test_a_route_equals_a_loop(logits, how):
    scores, normalise, biased = how
    bias = np.array([0.2503, -0.5011, 0.0, 1.0031, 0.0], np.float32) if biased else None
    got = ROUTES[how](logits, bias)
    want = slow_route(logits, K, scores, normalise, bias)
    np.testing.assert_array_equal(got.expert, want[0])
    np.testing.assert_allclose(got.weight, want[1], rtol=3e-6, atol=1e-30)
    np.testing.assert_allclose(got.scores, want[2], rtol=3e-6, atol=1e-30)


def test_logits_decide_where_scores_are_rounded_alike():
    logits = np.float32([[0, 40, 41], [300, -1e4, -9e3], [-500, -500, -500]])
    by_sigmoid, by_softmax = (
        jit(lambda x, s=s: route(x, 2, scores=s))(logits) for s in ("sigmoid", "softmax")
    )
    np.testing.assert_array_equal(by_sigmoid.expert, [[2, 1], [0, 2], [0, 1]])
    np.testing.assert_array_equal(by_softmax.expert, by_sigmoid.expert)
    np.testing.assert_allclose(by_sigmoid.weight[2], [0.5, 0.5])  # of scores that are both 0


@each_scores
def test_the_bias_has_no_gradient_and_chosen_logits_have_the_weights(scores, x64):
    rng = np.random.default_rng(0)
    logits, bias, mix = (
        rng.standard_normal((N, E)),
        rng.standard_normal(E),
        rng.standard_normal((N, K)),
    )

    def value(logits, bias, normalise):
        return (route(logits, K, scores=scores, normalise=normalise, bias=bias).weight * mix).sum()

    for normalise in (True, False):
        dlogits, dbias = jit(jax.grad(lambda a, b, n=normalise: value(a, b, n), (0, 1)))(
            logits, bias
        )
        assert not dbias.any()
        step, token, expert = 1e-6, 2, int(route(logits, K, scores=scores, bias=bias).expert[2, 1])
        ahead, behind = (
            slow_route(logits + sign * step * (np.arange(N) == token)[:, None] * (np.arange(E) == expert),
                       K, scores, normalise, bias)[1] for sign in (1, -1)
        )  # fmt: skip
        slope = ((ahead - behind) * mix).sum() / (2 * step)
        np.testing.assert_allclose(dlogits[token, expert], slope, rtol=1e-6)


def test_half_precision_is_routed_in_float32():
    got = jit(lambda x: route(x, 2))(jnp.ones((2, 4), jnp.bfloat16))
    assert got.weight.dtype == got.scores.dtype == jnp.float32
    np.testing.assert_array_equal(got.expert, [[0, 1], [0, 1]])


def test_noise_is_of_the_key_and_of_its_scale():
    logits, key = jnp.zeros((4000, 3)), jax.random.key(0)
    run = jit(noisy)
    np.testing.assert_allclose(np.std(run(key, logits, 0.5)), 0.5, rtol=0.03)
    np.testing.assert_array_equal(run(key, logits, 0.5), run(key, logits, 0.5))
    np.testing.assert_array_equal(run(key, logits + 1, 0.0), logits + 1)


@each_scores
def test_experts_choose_their_best_tokens(scores):
    logits = np.random.default_rng(0).standard_normal((N, E)).astype(np.float32)
    logits[3] = logits[1]
    got = jit(lambda x: expert_choice(x, 2, scores=scores))(logits)
    values = slow_route(logits, E, scores, False, None)[2]
    for expert in range(E):
        want = sorted(range(N), key=lambda n, e=expert: (-np.float32(values[n, e]), n))[:2]
        np.testing.assert_array_equal(got.token[expert], want)
        np.testing.assert_allclose(got.weight[expert], values[want, expert], rtol=3e-6)


def test_weights_by_expert_are_the_chosen_ones():
    got, by_expert = jit(lambda x: (route(x, K), weights_by_expert(route(x, K))))(
        np.random.default_rng(0).standard_normal((2, N, E), np.float32)
    )
    want = np.zeros((2, N, E))
    for place in np.ndindex(2, N, K):
        want[(*place[:2], got.expert[place])] = got.weight[place]
    np.testing.assert_allclose(by_expert, want, rtol=1e-6)


def test_those_that_answer_count_for_those_that_do_not(x64):
    rng = np.random.default_rng(0)
    expert = np.argsort(rng.random((N, E + 1)), -1)[:, :K]  # E is nobody
    weight, answers, mix = rng.random((N, K)), rng.random((N, E)) < 0.6, rng.standard_normal((N, K))
    answers[0], weight[1] = False, 0

    def value(weight):
        chosen, out = heard(expert, weight, answers)
        return (out * mix).sum(), (chosen, out)

    (_, (chosen, got)), grad = jit(jax.value_and_grad(value, has_aux=True))(weight)
    for n in range(N):
        left = [
            weight[n, j] if expert[n, j] < E and answers[n, expert[n, j]] else 0.0 for j in range(K)
        ]
        scale = weight[n].sum() / sum(left) if sum(left) else 0.0
        np.testing.assert_allclose(got[n], np.array(left) * scale, rtol=1e-12)
        silent = [expert[n, j] == E or not answers[n, expert[n, j]] for j in range(K)]
        np.testing.assert_array_equal(chosen[n], np.where(silent, E, expert[n]))
    assert np.isfinite(grad).all() and not grad[0].any()
    same = jit(heard)(expert % E, weight, np.ones((N, E), bool))
    np.testing.assert_array_equal(same[0], expert % E)
    np.testing.assert_array_equal(same[1], weight)  # no bit is another


# ---------------------------------------------------------------- dispatch

SORT = jit(lambda expert: sort_choices(expert, E))
KEEP = {
    capacity: jit(lambda expert, c=capacity: within_capacity(expert, E, c))
    for capacity in (1, 2, N)
}


def slow_sort(expert):
    groups = [
        [choice for choice in range(expert.size) if expert.flat[choice] == e] for e in range(E + 1)
    ]
    order = sum(groups, [])
    place = [order.index(choice) for choice in range(expert.size)]
    return order, np.reshape(place, expert.shape), [len(group) for group in groups[:E]]


def slow_keep(expert, capacity):
    """GShard's loops: the first choices of all tokens, then their second ones."""
    taken, kept = [0] * (E + 1), np.zeros(expert.shape, bool)
    for choice in range(expert.shape[1]):
        for token in range(expert.shape[0]):
            kept[token, choice] = taken[expert[token, choice]] < capacity
            taken[expert[token, choice]] += 1
    return kept


@settings(deadline=None, max_examples=50)
@given(CHOICES)
def test_choices_are_sorted_as_by_a_loop(expert):
    for got, want in zip(SORT(expert), slow_sort(expert), strict=True):
        np.testing.assert_array_equal(got, want)


@settings(deadline=None, max_examples=50)
@given(CHOICES, st.sampled_from([*KEEP]))
def test_a_capacity_keeps_what_a_loop_keeps(expert, capacity):
    np.testing.assert_array_equal(KEEP[capacity](expert), slow_keep(expert, capacity))


def test_groups_do_not_know_each_other():
    expert = np.random.default_rng(0).integers(0, E, (2, 2, N, K))
    want = [[slow_keep(group, 2) for group in row] for row in expert]
    np.testing.assert_array_equal(jit(lambda x: within_capacity(x, E, 2))(expert), want)


def test_a_capacity_is_a_multiple_of_the_mean_load():
    assert (
        capacity_of(1.0, 8, 2, 4) == 4
        and capacity_of(1.25, 8, 2, 4) == 5
        and capacity_of(1.01, 8, 2, 4) == 5
    )
    assert capacity_of(100.0, 8, 2, 4) == 8 and capacity_of(1e-9, 8, 2, 4) == 1


def test_taking_and_combining_and_their_gradients_equal_indexing(x64):
    rng = np.random.default_rng(0)
    expert, x = rng.integers(0, E, (N, K)), rng.standard_normal((N, 2))
    weight, scale = rng.standard_normal((N, K)), rng.standard_normal(N * K)
    plan = jit(lambda x: sort_choices(x, E))(expert)
    order = np.array(slow_sort(expert)[0])

    def fast(x, weight):
        return combine(rows_of(x, plan) * scale[:, None], weight, plan)

    def plain(x, weight):
        rows = x[order // K] * scale[:, None]
        return jnp.zeros_like(x).at[order // K].add(rows * weight.reshape(-1)[order][:, None])

    def outcome(fn):
        grads = jax.grad(lambda *args: jnp.sin(fn(*args)).sum(), (0, 1))
        return jit(lambda *args: (fn(*args), grads(*args)))(x, weight)

    assert_close(outcome(fast), outcome(plain), EXACT_MATHS["float64"])


# ---------------------------------------------------------------- losses


def test_balance_is_one_where_all_are_used_alike_and_e_where_one_is():
    even = np.full((E, E), 1 / E, np.float32)
    run = jit(balance_loss)
    assert float(run(even, np.arange(E)[:, None])) == pytest.approx(1)
    one = np.eye(E, dtype=np.float32)[[2] * E]
    assert float(run(one, np.full((E, 1), 2))) == pytest.approx(E)


def test_balance_is_the_sum_of_loads_and_means(x64):
    rng = np.random.default_rng(0)
    scores, expert = rng.uniform(size=(2, N, E)), rng.integers(0, E, (2, N, K))
    share = scores / scores.sum(-1, keepdims=True)
    counts = np.bincount(expert.ravel(), minlength=E) / expert.size
    loads, value, got = jit(
        lambda x, y: (
            load(expert, E, x.dtype),
            balance_loss(x, expert),
            jax.grad(balance_loss)(y, expert),
        )
    )(scores, share)
    np.testing.assert_allclose(loads, counts, rtol=1e-12)
    np.testing.assert_allclose(value, E * (counts * share.mean((0, 1))).sum(), rtol=1e-12)
    pull = E / (2 * N) * (counts - (counts * share).sum(-1, keepdims=True))
    np.testing.assert_allclose(got, pull, rtol=1e-10)


def test_z_is_the_mean_square_of_the_normaliser(x64):
    logits = np.random.default_rng(0).standard_normal((N, E)) + 3
    np.testing.assert_allclose(
        jit(router_z_loss)(logits), (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-12
    )


def test_the_bias_of_busy_experts_falls():
    value, grad = jit(jax.value_and_grad(bias_loss))(
        np.float32([3, 1, 0, 0]), np.array([[0, 0], [0, 1], [1, 2], [2, 2]])
    )
    assert value == 0
    np.testing.assert_array_equal(grad, [1, 0, 1, -1])


def test_information_gain_is_what_the_choice_says_of_the_class(x64):
    told, classes = np.eye(4)[[0, 1, 2, 3, 0, 1, 2, 3]], np.array([0, 1, 2, 3, 0, 1, 2, 3])
    run, alone = (
        jit(lambda p, c: information_gain(p, c, 4)),
        jit(jax.value_and_grad(information_gain)),
    )
    assert float(run(told, classes)) == pytest.approx(math.log(4))
    assert float(run(told, classes // 2)) == pytest.approx(math.log(2))
    assert float(run(np.full((8, 4), 0.25), classes)) == pytest.approx(0, abs=1e-12)
    value, grad = alone(told)
    assert float(value) == pytest.approx(math.log(4)) and np.isfinite(grad).all()
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 8)

    def entropy(q):
        return -(q * np.log(q)).sum()

    given_class = sum(entropy(p[classes == c].mean(0)) / 4 for c in range(4))
    np.testing.assert_allclose(run(p, classes), entropy(p.mean(0)) - given_class, rtol=1e-12)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda: route(np.ones((2, 3)), 4),
            "k=4 is over the 3 experts that there are; legal are 1 to 3",
        ),
        (lambda: route(np.ones((2, 3)), 0), "k=0 must be at least 1"),
        (
            lambda: route(np.ones((2, 3)), 1, scores="tanh"),
            "scores='tanh' is unknown; legal are softmax, sigmoid",
        ),
        (
            lambda: expert_choice(np.ones((2, 3)), 3),
            "capacity=3 is over the 2 tokens that there are",
        ),
        (lambda: capacity_of(0.0, 8, 2, 4), "capacity=0.0 must be over 0"),
        (lambda: capacity_of(math.nan, 8, 2, 4), "capacity=nan must be a finite number"),
    ],
)
def test_mistakes_are_told(wrong, message):
    with pytest.raises(UsageError, match=message):
        wrong()
