"""No error in silence: weights at several scales, overflow, NaN, chaos, and scans of low precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells_to_solve import CELLS, SCALES, distance, inputs, start, weights
from fast import jit

from jaxpar.solve import GaussSeidel, Jacobi, Newton, Picard, Quasi, parallel_scan
from jaxpar.solve.rounding import within
from jaxpar.solve.windows import SHORT

METHODS = {
    "newton": Newton(),
    "windows": Newton(window=256),
    "quasi": Quasi(),
    "hutchinson": Quasi("hutchinson"),
    "jacobi": Jacobi(),
    "picard": Picard(),
}


def compare(cell, method, length, on_fail="finish"):
    """Returns for each scale of weights: distance from the loop, over all steps and over those found; statistics."""
    xs = inputs(length)

    def both(params):
        step = functools.partial(CELLS[cell], params)
        got = parallel_scan(step, start(cell), xs, method=method, with_stats=True, on_fail=on_fail)
        return got[1], jax.lax.scan(step, start(cell), xs)[1], got[2]

    run = jit(both)
    for scale in SCALES:
        got, want, stats = run(weights(scale))
        cut = [
            jax.tree.map(lambda leaf, n=int(stats.first_bad): leaf[:n], tree)
            for tree in (got, want)
        ]
        yield scale, distance(got, want), distance(*cut), stats


def check_table(cell, method, length):
    for scale, error, found_error, stats in compare(cell, method, length):
        where = f"{cell} {method} {scale} {length}: {stats}"
        assert found_error < 1e-8, (
            where
        )  # what is said to be found is; 1e-8 leaves room for growing rounding errors
        if stats.converged:
            assert error < 1e-8 and stats.residual <= 1 and stats.first_bad == length, where
        if scale in ("init", "uniform") and isinstance(method, Newton):
            assert stats.converged and error < 1e-10, where


@pytest.mark.parametrize("cell, name", [("gru", "newton"), ("rnn", "windows")])
def test_no_error_is_silent(cell, name, x64):
    check_table(cell, METHODS[name], 512)


@pytest.mark.slow
@pytest.mark.parametrize("length", [512, 8192])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", METHODS)
def test_no_error_of_any_method_is_silent(name, cell, length, x64):
    check_table(cell, METHODS[name], length)


def chaotic(h, x):
    """A tanh network of gain 2: its largest Lyapunov exponent is positive."""
    w = 2 * jax.random.normal(jax.random.key(0), (16, 16)) / 4
    h = jnp.tanh(h @ w + x)
    return h, h


@pytest.mark.parametrize("window", [32, pytest.param(None, marks=pytest.mark.slow)])
def test_chaos_is_not_called_converged(window, x64):
    xs = 0.1 * jax.random.normal(jax.random.key(0), (1024, 16))
    solve = jit(
        lambda xs: parallel_scan(
            chaotic, jnp.ones(16), xs, method=Newton(window=window), with_stats=True
        )
    )
    _, ys, stats = solve(xs)
    assert not stats.converged and 0 < stats.first_bad < 1024
    nearby = jax.lax.scan(chaotic, jnp.ones(16) + 1e-12, xs)[1]
    want = jax.lax.scan(chaotic, jnp.ones(16), xs)[1]
    assert distance(nearby[-100:], want[-100:]) > 1e-2  # it is chaos
    assert distance(ys[:50], want[:50]) < 1e-10  # before it has grown
    residual = jnp.abs(jax.vmap(chaotic)(ys[:-1], xs[1:])[0] - ys[1:])
    assert (residual < 1e-10).all()  # what stands there is a trajectory all the same


@pytest.mark.parametrize("on_fail", ["finish", "nan"])
def test_blocks_that_were_not_found_leave_no_jump(on_fail):
    """In float32 a block run again ends elsewhere after 64 steps of chaos: what follows has to start from there."""
    xs = jax.random.normal(jax.random.key(1), (2, 4096, 16)).swapaxes(0, 1)
    solve = functools.partial(parallel_scan, method=GaussSeidel(), with_stats=True, on_fail=on_fail)
    _, ys, stats = jit(lambda xs: solve(chaotic, jnp.ones((2, 16)), xs))(xs)
    bad = int(stats.first_bad)
    assert not stats.converged and 0 < bad < 4096
    residual = jnp.abs(jax.vmap(chaotic)(ys[:-1], xs[1:])[0] - ys[1:])
    assert (residual[: bad - 1] < 1e-5).all()
    assert (residual < 1e-5).all() if on_fail == "finish" else bool(jnp.isnan(ys[bad:]).all())


def test_an_observer_of_a_chaotic_system_converges_fast(x64):
    """Driven by the true states, the same network forgets its own."""
    xs = 0.1 * jax.random.normal(jax.random.key(0), (512, 16))
    truth = jax.lax.scan(chaotic, jnp.ones(16), xs)[1]

    def observer(h, row):
        x, seen = row
        return chaotic(h + 0.9 * (seen - h), x)

    rows = xs, jnp.concatenate([jnp.ones((1, 16)), truth[:-1]])
    _, ys, stats = jit(
        lambda rows: parallel_scan(observer, jnp.zeros(16), rows, with_stats=True, method=Newton())
    )(rows)
    assert stats.converged and stats.iterations < 12
    assert distance(ys, jax.lax.scan(observer, jnp.zeros(16), rows)[1]) < 1e-10


def test_overflow_and_nan_are_those_of_the_loop(x64):
    def f(h, x):
        h = h**2 + x
        return h, h

    def g(h, x):
        h = jnp.sqrt(h) - x
        return h, h

    for step, init, xs in ((f, 0.5, jnp.linspace(0, 1, 100)), (g, 4.0, jnp.linspace(0, 2, 100))):
        want = jax.lax.scan(step, init, xs)[1]
        _, ys, stats = jit(
            lambda xs, step=step, init=init: parallel_scan(
                step, init, xs, with_stats=True, method=Newton()
            )
        )(xs)
        first = int(jnp.argmin(jnp.isfinite(want)))
        assert not stats.converged and 0 < stats.first_bad <= first
        assert bool((jnp.isnan(ys) == jnp.isnan(want)).all()) and bool(
            (jnp.isinf(ys) == jnp.isinf(want)).all()
        )
        assert distance(ys[:first], want[:first]) < 1e-10


def test_iterates_may_overflow_on_the_way(x64):
    """Far from the solution the Jacobians are huge; only what follows the first bad iterate is reset."""

    def f(h, x):
        h = 0.5 * h - 0.1 * h**3 + x
        return h, h

    xs, guess = jnp.sin(jnp.arange(200.0)), jnp.full(200, 1e60)
    _, ys, stats = jit(
        lambda xs: parallel_scan(
            f, 0.0, xs, guess=guess, with_stats=True, method=Newton(window=200)
        )
    )(xs)
    assert distance(ys, jax.lax.scan(f, 0.0, xs)[1]) < 1e-10 and 200 > SHORT


@dataclasses.dataclass(frozen=True)
class Rounded(Newton):
    """Newton whose scan takes and gives bfloat16, as tensor cores might."""

    def update(self, problem, h, residual):
        def low(tree):
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), tree)

        return low(problem.solve(low(problem.jacobian(h)), low(residual)))


@pytest.mark.parametrize("cell", ["rnn", pytest.param("gru", marks=pytest.mark.slow)])
def test_a_scan_of_low_precision_costs_iterations_and_no_accuracy(cell):
    params, init, xs = weights(), start(cell), inputs(300)

    def value(params, method):
        step = functools.partial(CELLS[cell], params)
        ys = jax.tree.leaves(parallel_scan(step, init, xs, method=method)[1])
        return ys[0].sum(), ys[0]

    grad, ys = jit(jax.grad(functools.partial(value, method=Rounded()), has_aux=True))(params)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, init, xs))

        def loop(params):
            ys = jax.tree.leaves(
                jax.lax.scan(functools.partial(CELLS[cell], params), *exact[1:])[1]
            )
            return ys[0].sum(), ys[0]

        want, want_ys = jax.grad(loop, has_aux=True)(exact[0])
        assert distance(ys, want_ys) < 1e-5
        name = "a" if cell == "gru" else "w"
        assert distance(grad[name], want[name]) < 1e-5


def test_half_precision_states_stay_within_their_rounding():
    params, xs = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), (weights("init"), inputs(100))
    )
    step, init = functools.partial(CELLS["gru"], params), start("gru").astype(jnp.bfloat16)
    _, ys, stats = jit(lambda xs: parallel_scan(step, init, xs, with_stats=True, method=Newton()))(
        xs
    )
    assert ys.dtype == jnp.bfloat16 and stats.converged
    want = jax.lax.scan(step, init, xs)[1]
    assert distance(ys.astype(jnp.float32), want.astype(jnp.float32)) < 0.05


@pytest.mark.parametrize("width", [1, 33, 64, 200])
def test_one_nan_among_many_entries_is_seen(width):
    """On CPUs the largest of 64 numbers and more may be a number although one of them is NaN."""
    values = jnp.full((50, width), 0.5).at[20, width // 2].set(jnp.nan)
    passes = jit(lambda values: within((values,), (jnp.ones((50, width)),)))(values)
    assert np.flatnonzero(~np.asarray(passes)).tolist() == [20]

    xs = jnp.zeros((50, width)).at[20, width // 2].set(jnp.nan)
    f = lambda h, x: (jnp.tanh(0.5 * h + x),) * 2  # noqa: E731
    for method in (Newton(), Jacobi(), GaussSeidel(block=16)):
        run = jit(
            lambda xs, m=method: parallel_scan(f, jnp.zeros(width), xs, method=m, with_stats=True)
        )
        _, ys, stats = run(xs)
        assert not stats.converged and stats.first_bad == 20
        np.testing.assert_array_equal(np.isnan(ys).any(1), np.arange(50) >= 20)
