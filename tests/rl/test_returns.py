import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import EXACT_MATHS, assert_close

from jaxpar.rl import (
    RatioLimits,
    advantages,
    collect,
    lambda_returns,
    n_step_returns,
    vtrace,
)
from jaxpar.rl.moments import discounted
from jaxpar.rl.returns import next_values
from jaxpar.types import UsageError

DISCOUNT, TRACE = 0.9, 0.7
GOES, TERMINATES, IS_CUT = range(3)


def rewards_to(reward, next_value, cut, t, length):
    """Up to `length` rewards from t on, and the value of where they led."""
    total, power = 0.0, 1.0
    for s in range(t, len(reward)):
        total += power * reward[s]
        power *= DISCOUNT
        if cut[s] or s == len(reward) - 1 or s == t + length - 1:
            return total + power * next_value[s]
    raise AssertionError


def steps_left(cut, t):
    return next((s - t + 1 for s in range(t, len(cut)) if cut[s]), len(cut) - t)


def by_definition(reward, value, next_value, cut, n):
    """n-step returns, lambda-returns as the mean of all n-step returns, advantages as a sum of errors."""
    count = len(reward)
    n_step, joint_value, advantage = [], [], []
    for t in range(count):
        n_step.append(rewards_to(reward, next_value, cut, t, n))
        left = steps_left(cut, t)
        parts = [
            (1 - TRACE) * TRACE ** (k - 1) * rewards_to(reward, next_value, cut, t, k)
            for k in range(1, left)
        ]
        joint_value.append(
            sum(parts) + TRACE ** (left - 1) * rewards_to(reward, next_value, cut, t, left)
        )
        errors = [reward[s] + DISCOUNT * next_value[s] - value[s] for s in range(t, t + left)]
        advantage.append(sum((DISCOUNT * TRACE) ** i * error for i, error in enumerate(errors)))
    return n_step, joint_value, advantage


def check(ends, n, seed=0):
    """Compares all environments of `ends [T, B]` with the definitions."""
    ends = np.asarray(ends)
    rng = np.random.default_rng(seed)
    reward, value, bootstrap = (rng.standard_normal(ends.shape) for _ in range(3))
    last = rng.standard_normal(ends.shape[1:])
    cut = ends != GOES
    bootstrap = np.where(ends == IS_CUT, bootstrap, 0)
    with jax.enable_x64(True):
        following = next_values(*map(jnp.asarray, (value, last, cut, bootstrap)))
        got = (
            n_step_returns(jnp.asarray(reward), following, jnp.asarray(cut), DISCOUNT, n),
            lambda_returns(jnp.asarray(reward), following, jnp.asarray(cut), DISCOUNT, TRACE),
            advantages(
                jnp.asarray(reward),
                jnp.asarray(value),
                following,
                jnp.asarray(cut),
                DISCOUNT,
                TRACE,
            ),
        )
    want_next = np.concatenate([value[1:], last[None]])
    want_next[ends == TERMINATES] = 0
    want_next[ends == IS_CUT] = bootstrap[ends == IS_CUT]
    envs = [
        by_definition(reward[:, b], value[:, b], want_next[:, b], cut[:, b], n)
        for b in range(ends.shape[1])
    ]
    assert_close(
        got, tuple(np.stack([one[i] for one in envs], 1) for i in range(3)), EXACT_MATHS["float64"]
    )


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_returns_equal_their_definitions_with_ends_in_every_position(n):
    check(np.array(list(itertools.product(range(3), repeat=4))).T, n)


@hypothesis.given(
    st.lists(st.integers(0, 2), min_size=17, max_size=17), st.integers(1, 18), st.integers(0, 99)
)
@hypothesis.settings(max_examples=10, deadline=None)
def test_returns_equal_their_definitions_on_longer_walks(ends, n, seed):
    check(np.array(ends)[:, None], n, seed)


def test_a_lambda_return_of_lambda_0_is_one_step_and_of_lambda_1_is_all():
    rng = np.random.default_rng(0)
    reward, following = (jnp.asarray(rng.standard_normal((6, 2)), jnp.float32) for _ in range(2))
    cut = jnp.zeros((6, 2), bool).at[2, 0].set(True)
    for lambda_, n in ((0.0, 1), (1.0, 6)):
        got = lambda_returns(reward, following, cut, DISCOUNT, lambda_)
        assert_close(
            got, n_step_returns(reward, following, cut, DISCOUNT, n), EXACT_MATHS["float32"]
        )


def numbers_of_vtrace(ends, seed=0):
    """Log ratios far beyond both bounds, rewards, values, what steps led to, and the ends of `ends [T, B]`."""
    rng, cut = np.random.default_rng(seed), ends != GOES
    log_ratio, reward, value, next_value = (rng.standard_normal(ends.shape) for _ in range(4))
    return 2 * log_ratio, reward, value, np.where(ends == TERMINATES, 0, next_value), cut


def by_sums(log_ratio, reward, value, next_value, cut):
    """V-trace as the paper writes it: sums of products, one start after another."""
    target, advantage = np.zeros_like(value), np.zeros_like(value)
    rho, c = np.minimum(1.5, np.exp(log_ratio)), TRACE * np.minimum(0.8, np.exp(log_ratio))
    error = reward + DISCOUNT * next_value - value
    for t, b in np.ndindex(*value.shape):
        product, sums = 1.0, []
        for s in range(t, t + steps_left(cut[:, b], t)):
            sums.append(product * rho[s, b] * error[s, b])
            product *= DISCOUNT * c[s, b]
        target[t, b] = value[t, b] + sum(sums)
    for t, b in np.ndindex(*value.shape):
        over = cut[t, b] or t == len(cut) - 1
        beyond = 0.0 if over else target[t + 1, b] - value[t + 1, b]
        advantage[t, b] = rho[t, b] * (error[t, b] + DISCOUNT * TRACE * beyond)
    return target, advantage


def by_steps(log_ratio, reward, value, next_value, cut):
    """The same, a step after another."""
    ratio = jnp.exp(log_ratio)
    rho, error = jnp.minimum(1.5, ratio), reward + DISCOUNT * next_value - value

    def step(after, row):
        ratio, rho, error, cut = row
        after = jnp.where(cut, 0, DISCOUNT * TRACE * after)
        excess = rho * error + jnp.minimum(0.8, ratio) * after
        return excess, (excess, rho * (error + after))

    rows = ratio, rho, error, cut
    _, (excess, advantage) = jax.lax.scan(step, jnp.zeros_like(value[0]), rows, reverse=True)
    return value + excess, advantage


def test_vtrace_equals_its_sums_and_its_steps_in_value_and_gradient(x64):
    args = numbers_of_vtrace(np.array(list(itertools.product(range(3), repeat=4))).T)
    assert_close(by_steps(*args), by_sums(*args), EXACT_MATHS["float64"])
    weights = np.random.default_rng(1).standard_normal((2, 4, 81))

    def loss(compute):
        def of(log_ratio, reward, value, next_value):
            found = compute(log_ratio, reward, value, next_value, jnp.asarray(args[4]))
            return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True)), found

        return jax.grad(of, (0, 1, 2, 3), has_aux=True)(*map(jnp.asarray, args[:4]))

    limits = RatioLimits(max_rho=1.5, max_c=0.8)
    slopes, found = loss(lambda *args: vtrace(*args, DISCOUNT, TRACE, limits=limits))
    want_slopes, want = loss(by_steps)
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found, by_sums(*args), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(slopes, want_slopes, rtol=1e-12, atol=1e-12)


def test_older_arguments_of_vtrace_are_its_limits():
    args = map(jnp.float32, numbers_of_vtrace(np.array([[0], [2], [0], [1], [0], [0]]))[:4])
    go = functools.partial(vtrace, *args, jnp.zeros((6, 1), bool), DISCOUNT, TRACE)
    want = go(limits=RatioLimits(max_rho=0.7, max_c=0.8))
    calls = (
        lambda: go(0.7, 0.8),
        lambda: go(0.7, max_c=0.8),
        lambda: go(max_rho=0.7, max_c=0.8),
    )
    for older in calls:
        with pytest.warns(
            FutureWarning,
            match=r"vtrace\(.*\) is now \(limits.max_rho, limits.max_c\)",
        ) as warned:
            got = older()
        assert len(warned) == 1 and warned[0].filename == __file__
        np.testing.assert_array_equal(got, want)
    for other in (RatioLimits(max_rho=0.7), RatioLimits(max_c=0.8)):
        assert not np.array_equal(go(limits=other), want)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rho'"):
        go(rho=1.0)
    with pytest.raises(TypeError, match="1 positional arguments too many"):
        go(0.7, 0.8, 0.9)
    with pytest.raises(TypeError, match="multiple values for argument 'max_rho'"):
        go(0.7, max_rho=0.7)


def test_vtrace_of_the_policy_that_acted_is_generalised_advantages_and_lambda_returns(x64):
    _, reward, value, next_value, cut = map(
        jnp.asarray, numbers_of_vtrace(np.array([[0], [2], [0], [1], [0], [0]]))
    )
    value = jnp.where(
        jnp.roll(cut, 1, 0).at[0].set(True), value, jnp.roll(next_value, 1, 0)
    )  # what goes on is one
    target, advantage = vtrace(
        jnp.zeros_like(value), reward, value, next_value, cut, DISCOUNT, TRACE
    )
    np.testing.assert_array_equal(
        advantage, advantages(reward, value, next_value, cut, DISCOUNT, TRACE)
    )
    want = lambda_returns(reward, next_value, cut, DISCOUNT, TRACE)
    np.testing.assert_allclose(target, want, rtol=1e-12, atol=1e-12)


def test_gradients_of_returns_stop_at_a_cut():
    cut = jnp.array([False, True, False, False])[:, None]

    def first(reward, following):
        return lambda_returns(reward, following, cut, DISCOUNT, TRACE)[0, 0]

    by_reward, by_value = jax.grad(first, (0, 1))(jnp.ones((4, 1)), jnp.ones((4, 1)))
    np.testing.assert_allclose(by_reward[:, 0], [1, DISCOUNT * TRACE, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(
        by_value[:, 0], [DISCOUNT * (1 - TRACE), DISCOUNT**2 * TRACE, 0, 0], rtol=1e-6
    )


def test_no_returns_over_no_steps():
    with pytest.raises(UsageError, match="num_steps=0"):
        n_step_returns(jnp.zeros((2, 1)), jnp.zeros((2, 1)), jnp.zeros((2, 1), bool), 0.9, 0)


def test_a_return_that_is_no_number_is_told_and_an_update_without_an_end_keeps_the_last(
    monkeypatch,
):
    before = {"return_mean": jnp.float32(3), "length_mean": jnp.float32(9)}
    for count, value, want in ((2, np.nan, np.nan), (0, np.nan, 3.0), (1, 5.0, 5.0)):
        made = {
            "return_mean": jnp.float32(value),
            "length_mean": jnp.float32(1),
            "num_episodes": jnp.int32(count),
        }
        monkeypatch.setattr(collect, "episode_stats", lambda steps, made=made: made)
        info, after = collect.update_episode_stats({}, before, None)
        np.testing.assert_equal(float(info["return_mean"]), want)
        np.testing.assert_equal(float(after["return_mean"]), want)


def all_returns(reward, value, last, log_ratio, done):
    following = next_values(value, last, done, jnp.zeros_like(value))
    targets = vtrace(log_ratio, reward, value, following, done, DISCOUNT, TRACE)
    return (
        n_step_returns(reward, following, done, DISCOUNT, 3),
        lambda_returns(reward, following, done, DISCOUNT, TRACE),
        advantages(reward, value, following, done, DISCOUNT, TRACE),
        *targets,
    )


@pytest.mark.parametrize("envs", [(), (3,)])
def test_no_steps_have_no_returns(envs):
    arrays = [jnp.zeros((0, *envs))] * 2 + [jnp.ones(envs), jnp.zeros((0, *envs))]

    def loss(*arrays):
        out = all_returns(*arrays, jnp.zeros((0, *envs), bool))
        return sum(jnp.sum(x) for x in out), out

    gradients, out = jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*arrays)
    assert all(x.shape == (0, *envs) for x in out)
    for got, like in zip(gradients, arrays, strict=True):
        np.testing.assert_array_equal(got, np.zeros_like(like))
    running, sums = discounted(jnp.ones(envs), arrays[0], jnp.zeros((0, *envs), bool), 0.9)
    np.testing.assert_array_equal(running, np.ones(envs))
    assert sums.shape == (0, *envs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_returns_before_an_end_do_not_see_what_is_not_finite_behind_it(bad, x64):
    reward, value, log_ratio = np.random.default_rng(0).normal(size=(3, 7, 2))
    done = np.zeros((7, 2), bool)
    done[3] = True
    arrays = [reward, value, np.ones(2), log_ratio]
    spoilt = [np.array(x) for x in arrays]
    for x in (*spoilt[:2], spoilt[3]):
        x[5, 0] = bad

    def before(*arrays):
        out = [x[:4] for x in all_returns(*arrays, done)]
        return sum(jnp.sum(jnp.sin(x)) for x in out), out

    got, want = (jax.jit(jax.grad(before, (0, 1, 3), has_aux=True))(*x) for x in (spoilt, arrays))
    assert_close(got[1], want[1], EXACT_MATHS["float64"])
    assert_close([x[:4] for x in got[0]], [x[:4] for x in want[0]], EXACT_MATHS["float64"])


def test_sums_after_an_end_do_not_see_what_is_not_finite_before_it():
    done = np.arange(5) == 2
    running, sums = discounted(jnp.float32(0), jnp.array([1, np.nan, 1, 1, 1]), done, 0.5)
    np.testing.assert_allclose(sums, [1, np.nan, np.nan, 1, 1.5])
    assert running == 1.5
