"""Large numbers hide nothing: entries, rows, steps and types of other magnitudes, judged entry by entry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.solve import Elk, GaussSeidel, Jacobi, Newton, Picard, Quasi, parallel_scan
from jaxpar.solve.problem import Outcome, Problem
from jaxpar.solve.rounding import rounding_noise
from jaxpar.solve.structure import elementwise
from jaxpar.solve.windows import _merged
from jaxpar.types import UsageError

NEWTON = Newton()


def excess(states, loop, exact, dtype):
    """The largest |h - h64| / (10 (|h_loop - h64| + rtol |h64| + atol)) of any entry; over one is an error."""
    states, loop, exact = (np.asarray(leaf).astype(np.float64) for leaf in (states, loop, exact))
    rtol = 1.5 * float(jnp.finfo(dtype).eps) ** 0.75
    return np.max(
        np.abs(states - exact) / (10 * (np.abs(loop - exact) + rtol * np.abs(exact) + rtol / 10))
    )


def loop(step, init, xs):
    return jax.lax.scan(lambda h, x: (step(h, x),) * 2, init, xs)[1]


def solved(step, init, xs, method=NEWTON):
    return parallel_scan(lambda h, x: (step(h, x),) * 2, init, xs, method=method, with_stats=True)[
        1:
    ]


def judged(step, init, xs, method, dtype=jnp.float32):
    """Returns the excess and the statistics of a solution in a type."""
    init, xs = (np.asarray(x) for x in (init, xs))
    args = jnp.asarray(init, dtype), jnp.asarray(xs, dtype)
    ys, stats = jit(lambda *args: solved(step, *args, method))(*args)
    plain = jit(functools.partial(loop, step))(*args)
    with jax.enable_x64(True):
        exact = jit(functools.partial(loop, step))(*(arg.astype(jnp.float64) for arg in args))
    return excess(ys, plain, exact, dtype), stats


def large_entry(h, x):
    return jnp.stack([h[0] + 1000, 0.3 * h[1] + 0.6 * jnp.tanh(2 * h[1] + x)])


def dense(h, x):
    """Its 16-bit iterates never settle: rounding has the last word."""
    return (
        0.5 * h
        + 0.3 * jnp.tanh(jnp.matmul(h, jnp.asarray(WEIGHTS, h.dtype), precision="highest"))
        + x
    )


def settling(h, x):
    return 0.3 * h + 0.6 * jnp.tanh(h + x)


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape)


WEIGHTS = np.random.default_rng(1).normal(size=(8, 8)) * 0.3
LARGE_ROW = np.where(np.arange(8) == 0, 1e6, 1.0)[:, None]
ROWS = np.where(np.arange(4) == 0, 1e6, 1.0)[:, None]
HARD = {
    "an entry": (large_entry, np.zeros(2), normal(400), jnp.float32),
    "a start": (settling, np.array([1e5, 1e6, 1e7]), normal(100, 3), jnp.float32),
    "a row": (
        lambda h, x: 0.9 * h + 0.1 * jnp.tanh(h) + x,
        np.zeros((4, 2)),
        normal(200, 4, 2) * ROWS,
        jnp.float32,
    ),
    "a row of a dense cell in bfloat16": (
        dense,
        np.zeros((8, 8)),
        normal(100, 8, 8) * LARGE_ROW,
        jnp.bfloat16,
    ),
    "a start in bfloat16": (settling, np.full(2, 1000.0), normal(200, 2), jnp.bfloat16),
    "a start in float16": (settling, np.full(2, 1000.0), normal(200, 2), jnp.float16),
}


@pytest.mark.parametrize("name", HARD)
def test_what_is_large_hides_nothing(name):
    step, init, xs, dtype = HARD[name]
    error, stats = judged(step, init, xs, Newton(), dtype)
    assert stats.converged and error <= 1, f"{error} {stats}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [Quasi(), Jacobi(), Picard(), GaussSeidel(block=16), Elk()], ids=repr
)
@pytest.mark.parametrize("name", HARD)
def test_what_is_large_hides_nothing_from_any_method(name, method):
    step, init, xs, dtype = HARD[name]
    error, _ = judged(step, init, xs, method, dtype)
    assert error <= 1  # what did not converge was run sequentially


def test_gradients_at_a_large_start_are_those_of_the_loop():
    xs, start = normal(200), 1e6

    def value(scan, gain, start, xs):
        return jnp.square(
            scan(lambda h, x: 0.3 * h + gain * jnp.tanh(h + x), start, xs)[50:]
        ).mean()

    grads = [
        jit(jax.grad(functools.partial(value, scan)))
        for scan in (lambda *args: solved(*args)[0], loop)
    ]
    got = grads[0](jnp.float32(0.6), jnp.float32(start), jnp.asarray(xs, jnp.float32))
    with jax.enable_x64(True):
        want = grads[1](jnp.float64(0.6), jnp.float64(start), jnp.asarray(xs, jnp.float64))
    np.testing.assert_allclose(got, want, rtol=2e-5)


COUPLING = normal(6, 6) / 10


def scaled(state, x):
    """Six coupled entries, each with a unit of its own, that forget: where errors grow, the loop is off as well."""
    h, unit = state
    v = h / unit
    return 0.3 * h + unit * 0.6 * jnp.tanh(v + x + v @ jnp.asarray(COUPLING, h.dtype)), unit


@functools.cache
def scaled_programs(method):
    def run(solve, init, unit, xs):
        return solve(lambda h, x: scaled((h, unit), x)[0], init, xs)

    return jit(functools.partial(run, functools.partial(solved, method=method))), jit(
        functools.partial(run, loop)
    )


@pytest.mark.parametrize(
    "method",
    [
        Newton(),
        Newton(window=24),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (Quasi(), Jacobi(), GaussSeidel(block=8), Elk())
        ),
    ],
    ids=repr,
)
@settings(max_examples=25, deadline=None)
@given(
    unit=st.lists(st.floats(-6, 6), min_size=6, max_size=6),
    start=st.lists(st.floats(-3, 3), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_magnitudes_over_twelve_decades(method, unit, start, seed):
    unit = 10.0 ** np.array(unit)
    args = unit * np.array(start), unit, np.random.default_rng(seed).standard_normal((60, 6))
    solve, loop = scaled_programs(method)
    narrow = tuple(jnp.asarray(arg, jnp.float32) for arg in args)
    ys, stats = solve(*narrow)
    with jax.enable_x64(True):
        exact = loop(*(arg.astype(jnp.float64) for arg in narrow))
    assert excess(ys, loop(*narrow), exact, jnp.float32) <= 1, str(stats)


def test_a_small_residual_is_not_a_small_error(x64):
    """Where a recurrence hardly forgets, a residual grows two hundredfold: the updates have to pass as well."""

    def step(h, x):
        return 0.995 * h + x

    args = jnp.zeros(2), jnp.abs(jnp.asarray(normal(400, 2)))
    solve = functools.partial(
        parallel_scan, lambda h, x: (step(h, x),) * 2, *args, method=Jacobi(max_iters=400)
    )
    _, ys, stats = jit(lambda: solve(rtol=1e-2, atol=1e-2, with_stats=True))()
    want = loop(step, *args)
    np.testing.assert_allclose(ys, want, rtol=1e-2, atol=1e-2, err_msg=str(stats))


def test_a_small_update_is_not_a_small_residual():
    """A step that is small for a large entry may change all for one that is a function of it."""

    def step(h, x):
        return jnp.stack([h[0] + 1e4, jnp.tanh(h[0] - x)])

    count = 4e6 + 1e4 * np.arange(40)
    xs = jnp.asarray(count + normal(40), jnp.float32)
    near = (count + 1e4) * (1 + 6e-6)  # allowed, and 24 off, where tanh is flat
    guess = (
        jnp.stack([jnp.asarray(near, jnp.float32), jnp.ones(40)], 1)
        .at[0, 1]
        .set(jnp.tanh(4e6 - xs[0]))
    )
    start = jnp.array([4e6, 0.0])
    _, ys, _ = jit(
        lambda guess: parallel_scan(
            lambda h, x: (step(h, x),) * 2, start, xs, guess=guess, with_stats=True, method=Newton()
        )
    )(guess)
    np.testing.assert_allclose(ys, loop(step, start, xs), rtol=1e-4, atol=1e-4)


def test_an_iterate_that_overflows_is_started_anew():
    def f(h, x):
        h = 0.5 * h - 0.1 * h**3 + x
        return h, h

    xs, guess = (
        jnp.sin(jnp.arange(40.0)),
        jnp.full(40, 20.0),
    )  # where the Jacobian is -120, and its powers overflow
    solve = jit(
        lambda xs: parallel_scan(
            f, jnp.float32(0), xs, guess=guess, with_stats=True, method=Newton(max_iters=60)
        )
    )
    _, ys, stats = solve(xs)
    assert stats.converged and stats.windows == 1, str(stats)
    np.testing.assert_allclose(ys, jax.lax.scan(f, jnp.float32(0), xs)[1], atol=1e-5)


def test_damping_and_clipping_change_the_jacobian(x64):
    """Damped wholly, or clipped to almost nothing, Newton's update is Jacobi's: as many iterations."""

    def count(method):
        run = jit(
            lambda xs: parallel_scan(
                lambda h, x: (jnp.tanh(h + x),) * 2, 0.1, xs, method=method, with_stats=True
            )
        )
        return int(run(jnp.asarray(normal(60)))[2].iterations)

    jacobi = count(Jacobi(max_iters=60))
    assert count(Newton()) < jacobi
    assert (
        count(Newton(damping=1.0, max_iters=60))
        == count(Newton(clip=1e-12, max_iters=60))
        == jacobi
    )
    assert (
        count(Quasi(damping=1.0, max_iters=60)) == count(Quasi(clip=1e-12, max_iters=60)) == jacobi
    )


def test_windows_report_the_worst_of_them():
    each = [jnp.array([3, 2, 5]), jnp.array([1, 1, 4]), jnp.array([0.1, 0.4, 0.2])]
    each.append(jnp.array([[2.0, 0.5], [3.0, 0.1], [1.0, 0.7]]))
    total = _merged(Outcome(*each, jnp.array([8, 3, 8])), 8, 20)
    assert (total.iterations, total.windows, total.first_bad) == (10, 6, 11)
    np.testing.assert_allclose([total.residual, *total.error], [0.4, 3.0, 0.7])
    assert _merged(Outcome(*each, jnp.array([8, 8, 8])), 8, 20).first_bad == 20


def test_looser_tolerances_take_fewer_iterations_and_are_kept(x64):
    xs = jnp.asarray(normal(80))
    run = functools.partial(
        parallel_scan, lambda h, x: (jnp.tanh(0.9 * h + x),) * 2, 0.0, method=Jacobi(max_iters=80)
    )
    want, counts = loop(lambda h, x: jnp.tanh(0.9 * h + x), 0.0, xs), []
    for tol in (1e-3, 1e-6, 1e-10):
        _, ys, stats = jit(lambda xs, tol=tol: run(xs, rtol=tol, atol=tol, with_stats=True))(xs)
        assert stats.converged and np.abs(np.asarray(ys - want)).max() <= 2 * tol
        counts.append(int(stats.iterations))
    assert counts[0] < counts[1] < counts[2]
    absolute = jit(lambda xs: run(xs, rtol=1e-10, atol=1e-3, with_stats=True))(xs)[2]
    assert absolute.converged and absolute.iterations < counts[1]


@pytest.mark.parametrize(
    "name, value", [("rtol", float("nan")), ("rtol", 0.0), ("rtol", 1.0), ("atol", -1.0)]
)
def test_tolerances_that_mean_nothing_are_refused(name, value):
    with pytest.raises(UsageError, match=f"{name}={value} must"):
        parallel_scan(lambda h, x: (h, x), 1.0, jnp.ones(3), **{name: value}, method=Newton())


def test_a_slow_iteration_is_not_taken_for_rounding():
    """In bfloat16 a count that Jacobi's iterates reach step by step moves by a few roundings at a time."""

    def step(h, x):
        return jnp.stack([h[0] + 1, 0.3 * h[1] + 0.6 * jnp.tanh(h[1] + jnp.sin(0.1 * h[0]) + x)])

    error, stats = judged(step, np.zeros(2), normal(300), Jacobi(), jnp.bfloat16)
    assert error <= 1, f"{error} {stats}"


def test_an_overflow_allows_nothing():
    problem = Problem(lambda h, _: (h[0] * 1e30,), (jnp.float32(1e30),), (), 3, elementwise([()]))
    (level,) = rounding_noise(problem, (jnp.full(3, 1e30, jnp.float32),), 0)
    np.testing.assert_allclose(level, jnp.finfo(jnp.float32).eps * 1e30, rtol=1e-6)
