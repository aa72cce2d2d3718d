"""States that are called converged are the loop's: recurrences whose small residuals and updates say nothing."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from jaxpar.solve import Elk, GaussSeidel, Jacobi, Newton, Quasi, Sequential, explain, parallel_scan
from jaxpar.solve.iterate import _remaining_errors
from jaxpar.solve.problem import Problem
from jaxpar.solve.rounding import typical_size
from jaxpar.solve.structure import elementwise
from jaxpar.types import UsageError

NOISE = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
DOSES = np.random.default_rng(0).uniform(0, 1.2e-8, 400).astype(np.float32)


@jax.custom_jvp
def rounded(v):
    return jnp.round(1e6 * v) / 1e6


rounded.defjvp(lambda primals, tangents: (rounded(*primals), jnp.zeros_like(primals[0])))


def ledger(c, x):
    s, cash = c
    s = 0.01 * s + jnp.tanh(x)
    cash = jnp.round((cash + 0.05 + 0.02 * s) * 100) / 100
    return (s, cash), None


def counter(c, x):
    s, n = c
    s = 0.01 * s + jnp.tanh(x)
    n = jnp.floor(n + 0.002 * (s > 0) + jnp.where(s > 0, 1.0, 0.0))
    return (s, n), None


def quantised(c, x):
    p, e = c
    p = 0.01 * p + 0.5 * jnp.tanh(x)
    return (p, rounded(e + 4e-6 + 1e-6 * p)), None


def fed(step):
    """Returns a step whose blind leaf feeds the other one, so that it cannot be run afterwards."""

    def one(c, x):
        (s, other), _ = step(c, x)
        return (s + 1e-9 * c[1], other), None

    return one


def slow(h, x):
    fast = 0.01 * h[0] + jnp.tanh(x)
    return jnp.stack([fast, 0.9999 * h[1] + 1e-4 + 2e-6]), None


def chain(s, u):
    """A Michaelis-Menten chain in mol/L."""
    a = 8e-9 * s[0] / (5e-8 + s[0])
    b = 0.7 * 8e-9 * s[1] / (5e-8 + s[1])
    s = jnp.stack([s[0] + u - a, s[1] + a - b, s[2] + b - 0.05 * s[2]])
    return s, 1e9 * s


def spiking(v, x):
    v = 0.9 * v + x
    v = jnp.where(v > 1, 0.0, v)
    return v, v


def solved(f, init, xs, method, **options):
    run = jit(
        lambda init, xs: parallel_scan(f, init, xs, method=method, with_stats=True, **options)
    )
    return run(init, xs)


def by_steps(f, init, xs):
    return jit(lambda init, xs: jax.lax.scan(f, init, xs))(init, xs)


def start(*numbers):
    return tuple(jnp.float32(number) for number in numbers)


BLIND = {
    "ledger": (ledger, start(0, 1e4), NOISE),
    "counter": (counter, start(0, 2e5), NOISE[:2000]),
    "quantised": (quantised, start(0, 0.5), NOISE),
}


@pytest.mark.parametrize("name", BLIND)
def test_blind_leaves_are_the_loop_s_own(name):
    """Run afterwards where they feed nothing: the rest is solved, and they are exact."""
    f, init, xs = BLIND[name]
    carry, _, stats = solved(f, init, xs, Newton())
    want, _ = by_steps(f, init, xs)
    assert stats.converged and isinstance(stats.method, Newton) and list(stats.error) == ["[0]"]
    np.testing.assert_allclose(carry[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(carry[1], want[1], rtol=1e-6)


@pytest.mark.parametrize("method", [Newton(), GaussSeidel(block=16)], ids=repr)
@pytest.mark.parametrize("name", BLIND)
def test_a_blind_leaf_that_feeds_others_is_not_found_by_small_residuals(name, method):
    f, init, xs = BLIND[name]
    carry, _, stats = solved(fed(f), init, xs, method)
    want, _ = by_steps(fed(f), init, xs)
    assert not stats.converged and stats.first_bad < len(xs)
    np.testing.assert_array_equal(carry[1], want[1])


@pytest.mark.parametrize("method", [Newton(), Jacobi(), GaussSeidel(block=16)], ids=repr)
def test_blind_states_that_forget_are_solved_to_the_bit(method):
    _, ys, stats = solved(spiking, jnp.float32(0), NOISE[:2000], method)
    assert stats.converged and stats.iterations < 200
    np.testing.assert_array_equal(ys, by_steps(spiking, jnp.float32(0), NOISE[:2000])[1])


def test_the_gradient_of_a_blind_solution_is_the_loop_s():
    def value(scan, gain):
        f = lambda v, x: spiking(v, gain * x)  # noqa: E731
        return (scan(f, jnp.float32(0), NOISE[:500])[1] ** 2).sum()

    solve = lambda *args: parallel_scan(*args, method=Newton())  # noqa: E731
    got = jit(jax.grad(lambda gain: value(solve, gain)))(jnp.float32(1.1))
    want = jit(jax.grad(lambda gain: value(jax.lax.scan, gain)))(jnp.float32(1.1))
    np.testing.assert_allclose(got, want, rtol=1e-4)


METHODS = [
    Jacobi(),
    Quasi(),
    Newton(damping=0.5),
    GaussSeidel(block=16),
    Elk(lam=100.0, adaptive=False),
]


@pytest.mark.parametrize("method", [Newton(), *METHODS], ids=repr)
def test_a_fast_entry_says_nothing_of_a_slow_one(method):
    init = jnp.array([0.0, 1.0])
    carry, _, stats = solved(slow, init, NOISE, method)
    # The loop's own rounding over 10,000 steps allows no more.
    assert abs(carry[1] - by_steps(slow, init, NOISE)[0][1]) < 1e-4
    assert not stats.converged or max(stats.error.values()) <= 1


@pytest.mark.parametrize("block", [16, 64])
def test_blocks_of_a_wide_cell_are_certified_by_shooting_too(block):
    """Updates of roundings are a wrong state, if an entry is slow; no Jacobian is made of so many entries."""

    def wide_and_slow(h, x, drift=1.2e-7):
        fast = jnp.tanh(0.01 * h + x)
        slow = 0.9999 * h[0] + 1e-4 + drift + 1e-12 * h.sum()
        return fast.at[0].set(slow), None

    init = jnp.zeros(20).at[0].set(1.0)
    carry, _, stats = solved(wide_and_slow, init, NOISE, GaussSeidel(block=block))
    want, _ = by_steps(wide_and_slow, init, NOISE)
    np.testing.assert_allclose(carry, want, rtol=1e-5)
    if block == 16:
        assert not stats.converged and stats.first_bad >= 16

    # Blocks that have met are the loop's, whatever becomes of the errors behind them.
    _, _, stats = solved(
        lambda h, x: wide_and_slow(h, x, 2e-6), init, NOISE, GaussSeidel(block=block)
    )
    if block == 64:
        assert not stats.converged and stats.first_bad > 2000

    carry, _, stats = solved(
        lambda h, x: wide_and_slow(h.at[0].set(0.5), x), init, NOISE, GaussSeidel(block=block)
    )
    assert stats.converged and all(error <= 1 for error in stats.error.values())


@pytest.mark.parametrize("method", [Newton(), Jacobi()], ids=repr)
def test_small_states_are_judged_by_their_own_size(method):
    def value(scan, scale):
        return scan(chain, jnp.zeros(3, jnp.float32), scale * DOSES)[1][-1].sum()

    solve = lambda *args: parallel_scan(*args, method=method)  # noqa: E731
    scale = jnp.float32(1)
    pairs = [
        jit(jax.value_and_grad(lambda scale, scan=scan: value(scan, scale)))
        for scan in (solve, jax.lax.scan)
    ]
    got, want = (pair(scale) for pair in pairs)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_tolerances_are_given_for_each_leaf():
    def f(c, x):
        new = {"a": jnp.tanh(0.9 * c["a"] + x), "b": jnp.tanh(0.9 * c["b"] + x)}
        return new, None

    init = {"a": jnp.float32(0), "b": jnp.float32(0)}
    counts = []
    for rtol in ({"a": 1e-2, "b": 1e-2}, {"a": 1e-2, "b": None}):
        stats = solved(f, init, NOISE[:200], Jacobi(), rtol=rtol)[2]
        assert stats.converged and set(stats.error) == {"['a']", "['b']"}
        counts.append(int(stats.iterations))
    assert counts[0] < counts[1]
    with pytest.raises(UsageError, match="rtol must be a number, None, or a tree"):
        parallel_scan(f, init, NOISE[:9], rtol={"a": 1e-2})


def relaxing(h, x):
    h = jnp.tanh(0.5 * h + x)
    return h, h


def test_the_default_depends_on_the_platform_and_the_program():
    xs = jnp.ones((100_000, 4))
    assert isinstance(explain(relaxing, jnp.zeros(4), xs, platform="cpu").method, Sequential)
    choice = explain(relaxing, jnp.zeros(4), xs, platform="gpu")
    assert not isinstance(choice.method, Sequential) and "assumed" in str(choice)
    blind = explain(spiking, jnp.zeros(4), xs, platform="gpu")
    assert "is blind" in str(blind) and not isinstance(blind.method, Newton | GaussSeidel)
    affine = explain(lambda h, x: (0.9 * h + x, None), jnp.zeros(4), xs, platform="gpu")
    assert "affine" in str(affine)


def test_the_default_says_what_it_took():
    _, ys, stats = parallel_scan(relaxing, jnp.float32(0), NOISE[:50], with_stats=True)
    assert isinstance(stats.method, Sequential) and "on cpu" in stats.reason
    np.testing.assert_array_equal(ys, jax.lax.scan(relaxing, jnp.float32(0), NOISE[:50])[1])


def test_states_of_padding_have_no_part_in_a_size():
    size = jnp.concatenate([jnp.array([3.0, 1.0, 2.0]), jnp.full(5, 0.5)])
    problem = Problem(
        lambda h, x: h, (jnp.float32(0),), (), 8, elementwise([()]), valid=jnp.int32(3)
    )
    assert typical_size(problem, size) == 2
    assert typical_size(dataclasses.replace(problem, valid=None), size) == 0.5


@pytest.mark.parametrize("is_exact", [True, False])
def test_each_entry_has_its_own_rate_of_convergence(is_exact):
    """One that shrinks is bounded by its rest; one that stays or grows bounds nothing."""
    start = tuple(jnp.zeros(2, jnp.float32) for _ in range(1))
    problem = Problem(lambda h, x: h, start, (), 4, elementwise([(2,)]))
    earlier = types.SimpleNamespace(iterations=jnp.int32(3), sizes=(jnp.array([[1.0, 0.4]]),))
    updates = jnp.full((4, 2), 0.5)
    sizes = jnp.array([[0.2, 0.5]])
    [errors] = _remaining_errors(problem, earlier, (updates,), (sizes,), is_exact)
    np.testing.assert_allclose(errors[:, 0], 0.5 * 0.2 / 0.8)
    assert np.isinf(errors[:, 1]).all()


def test_blocks_of_blind_states_meet_to_the_bit():
    """A state in whole millions may be off by one for ever, which is within the tolerance."""

    def whole(h, x):
        h = jnp.round(0.9 * h + 1e6 * x)
        return h, h

    _, ys, stats = solved(whole, jnp.zeros(3), NOISE[:3000].reshape(1000, 3), GaussSeidel(block=16))
    want = by_steps(whole, jnp.zeros(3), NOISE[:3000].reshape(1000, 3))[1]
    np.testing.assert_array_equal(ys, want)
    assert stats.method == GaussSeidel(block=16)


@pytest.mark.parametrize("keep", [0.98, 0.997])
def test_blocks_that_forget_slowly_are_not_taken_for_right(keep):
    """A pass leaves 0.72 or 0.95 of a difference: what is left is 4 or 20 times the last gap."""

    def leaky(h, x):
        h = keep * h + (1 - keep) * (1 + x)
        return h, h

    _, ys, stats = solved(leaky, jnp.float32(0), NOISE[:4000], GaussSeidel(block=16))
    assert stats.residual > 0
    want = by_steps(leaky, jnp.float32(0), NOISE[:4000])[1]
    np.testing.assert_allclose(ys, want, rtol=1e-5, atol=1e-6)


def test_small_gaps_of_blocks_say_nothing_of_their_sum():
    """Each block starts by 0.8 of what is allowed from where the one before ends, 400 times; a fast entry does not."""
    step = 0.05 * 1.5 * float(jnp.finfo(jnp.float32).eps) ** 0.75

    def growing(h, x):
        fast = 0.5 * h[0] + jnp.tanh(x)
        h = jnp.stack([fast, h[1] + step])
        return h, h

    init = jnp.array([0.0, 1.0])
    xs = NOISE[:6400]
    _, ys, _ = solved(growing, init, xs, GaussSeidel(block=16))
    want = by_steps(growing, init, xs)[1]
    np.testing.assert_allclose(ys[:, 1], want[:, 1], rtol=1e-5)


def test_blind_states_that_forget_are_those_of_the_loop():
    """Blocks forget a start to within roundings, but not to the bit of a state in steps of a rounding."""

    def fine(h, x):
        h = jnp.round(2.0**22 * (0.75 * h + x)) / 2.0**22
        return h, h

    _, ys, stats = solved(fine, jnp.zeros(8), NOISE[:8000].reshape(1000, 8), GaussSeidel(block=16))
    want = by_steps(fine, jnp.zeros(8), NOISE[:8000].reshape(1000, 8))[1]
    assert stats.converged
    np.testing.assert_array_equal(ys, want)


@pytest.mark.parametrize("bits", [4, 22])
def test_blind_leaves_are_made_of_either_state_where_blocks_meet(bits):
    """Others meet to within a rounding there, of which a blind leaf in steps of a rounding makes another."""

    def read(c, x):
        p, e = c
        p = 0.99 * p + 0.01 * (0.7 + 0.1 * jnp.tanh(x)) + 1e-9 * e
        e = jnp.round(2.0**bits * p) / 2.0**bits
        return (p, e), p

    *_, stats = solved(read, start(0.7, 0.7), NOISE[:4000], GaussSeidel(block=16))
    assert stats.converged == (bits == 4)
    if stats.converged:
        assert 0 < stats.residual <= 1


def test_what_blocks_report_is_within_its_limit():
    def leaky(h, x):
        h = 0.7 * h + 0.3 * (1 + x)
        return h, h

    *_, stats = solved(leaky, jnp.float32(0), NOISE[:4000], GaussSeidel(block=8))
    assert stats.converged and 0 < stats.residual <= 1
    assert 0 < max(stats.error.values()) <= 1


def test_blocks_that_are_the_loop_s_own_stay_where_others_fail():
    """Chaos, of which a pass finds one block more."""

    def logistic(h, _):
        h = 3.9 * h * (1 - h)
        return h, h

    xs = jnp.zeros(160)
    *_, stats = solved(logistic, jnp.float32(0.3), xs, GaussSeidel(block=16, max_iters=5))
    assert not stats.converged and stats.first_bad >= 5 * 16


@pytest.mark.parametrize("window", [25, 50])
def test_no_window_goes_on_from_a_state_that_is_not_trusted(window):
    """Errors of chaos grow from window to window; each window alone would converge."""
    f = lambda h, _: (3.9 * h * (1 - h),) * 2  # noqa: E731
    init = jnp.float32(0.3)
    run = functools.partial(
        parallel_scan, f, init, None, 300, method=Newton(window=window), with_stats=True
    )
    _, ys, stats = jit(functools.partial(run, on_fail="nan"))()
    first_bad = int(stats.first_bad)
    assert not stats.converged and 5 < first_bad < 100
    np.testing.assert_array_equal(np.isnan(ys), np.arange(300) >= first_bad)

    _, finished, stats = jit(functools.partial(run, on_fail="finish"))()
    first_bad = int(stats.first_bad)
    rest = by_steps(f, finished[first_bad - 1], jnp.zeros(300 - first_bad))[1]
    np.testing.assert_allclose(finished[first_bad:][:5], rest[:5], rtol=1e-5)
    assert float(jnp.abs(f(finished[:-1], None)[0] - finished[1:]).max()) < 1e-6
