"""ELK's filter against a dense least-squares solve; ELK and multiple shooting against the plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import assert_close

from jaxpar.solve import Newton, parallel_scan
from jaxpar.solve.elk import Elk, damped_dynamics
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.types import UsageError

TIME, N = 9, 3


def system(n=N):
    keys = jax.random.split(jax.random.key(0), 3)
    a = 1.5 * jax.random.normal(keys[0], (TIME, n, n))
    return (
        a,
        jnp.exp(2 * jax.random.normal(keys[1], (TIME,))),
        jax.random.normal(keys[2], (TIME, n)),
    )


def filtered(a, lam):
    """M[t] A[t] by the filter's recursion, step by step."""
    covariance, out, eye = np.zeros_like(a[0]), [], np.eye(a.shape[-1])
    for a_t, lam_t in zip(np.asarray(a), np.asarray(lam), strict=True):
        predicted = a_t @ covariance @ a_t.T + eye
        m = np.linalg.inv(eye + lam_t * predicted)
        covariance = m @ predicted
        out.append(m @ a_t)
    return np.stack(out)


@pytest.mark.parametrize("n", [1, N])
def test_the_parallel_filter_is_that_of_the_recursion(n, x64):
    a, lam, _ = system(n)
    assert_close(jax.jit(damped_dynamics)(a, lam), filtered(a, lam), 1e-12)
    both = jax.jit(damped_dynamics)(jnp.stack([a, 2 * a], 1), jnp.stack([lam, lam], 1))
    assert_close(both[:, 1], filtered(2 * a, lam), 1e-12)


def test_the_filter_is_the_levenberg_marquardt_step(x64):
    """With r shrunk as A is, the last state of each prefix is that of the dense least-squares problem on it."""
    a, lam, r = system()
    eye = np.eye(N)
    predicted_gain = filtered(a, lam) @ np.linalg.inv(np.asarray(a))  # M itself
    delta = np.zeros(N)
    for t in range(TIME):
        delta = predicted_gain[t] @ (np.asarray(a[t]) @ delta + np.asarray(r[t]))
        rows = [
            [eye if s == u else -np.asarray(a[s]) if s == u + 1 else 0 * eye for u in range(t + 1)]
            for s in range(t + 1)
        ]
        big = np.block(rows)
        weights = np.repeat(np.asarray(lam[: t + 1]), N)
        dense = np.linalg.solve(
            big.T @ big + np.diag(weights), big.T @ np.asarray(r[: t + 1]).reshape(-1)
        )
        np.testing.assert_allclose(delta, dense[-N:], rtol=1e-9)


def test_what_is_not_finite_is_not_trusted():
    a, lam, _ = system()
    ma = damped_dynamics(a.at[4].set(1e30), lam.at[4].set(0.0))
    assert jnp.isfinite(ma).all()


def network(params, h, x):
    h = {
        "a": jnp.tanh(params @ jnp.concatenate([h["a"], h["b"]]) + x)[:2],
        "b": h["b"] * 0.5 + h["a"][:1],
    }
    return h, h


METHODS = [
    Elk(),
    pytest.param(Elk(quasi=True, lam=0.3, adaptive=False), marks=pytest.mark.slow),
    pytest.param(GaussSeidel(block=5, window=10), marks=pytest.mark.slow),
    GaussSeidel(block=4, correction=True),
]


@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_are_those_of_the_loop(method, x64):
    params = jax.random.normal(jax.random.key(1), (3, 3))
    xs = 0.3 * jax.random.normal(jax.random.key(2), (22, 3))
    init = {"a": jnp.ones(2), "b": jnp.zeros(1)}

    def loss(scan):
        def value(params, init):
            _, states, *stats = scan(lambda h, x: network(params, h, x), init, xs)
            return sum(jnp.sin(3 * leaf).sum() for leaf in jax.tree.leaves(states)), (states, stats)

        return jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))

    (_, (got, (stats,))), got_grad = loss(
        lambda *a: parallel_scan(*a, method=method, with_stats=True)
    )(params, init)
    (_, (want, _)), want_grad = loss(jax.lax.scan)(params, init)
    assert stats.converged and stats.method == method
    assert_close(got, want, 1e-10)
    assert_close(got_grad, want_grad, 1e-8)


def unstable_start(h, x):
    """Euler steps of a double well from its hilltop: Jacobians there grow, and the cube makes overshoots explode."""
    h = h + 0.3 * (h - h**3) + x
    return h, h


def test_a_trust_region_shortens_the_way_from_an_unstable_point(x64):
    xs = 0.01 * jax.random.normal(jax.random.key(0), (128,))
    init = jnp.array(0.01)
    want = jax.lax.scan(unstable_start, init, xs)[1]

    def solve(method):
        got, stats = jax.jit(
            lambda xs: parallel_scan(unstable_start, init, xs, method=method, with_stats=True)[1:]
        )(xs)
        assert_close(got, want, 1e-10)
        return stats

    trusting, newton, none = (
        solve(Elk(max_iters=128)),
        solve(Newton(max_iters=128)),
        solve(Elk(lam=0.0, max_iters=128)),
    )
    assert trusting.converged and trusting.iterations < newton.iterations / 2
    assert none.iterations == newton.iterations


def test_chaos_is_reported(x64):
    def logistic(h, _):
        h = 3.99 * h * (1 - h)
        return h, h

    for method in (Elk(max_iters=20), GaussSeidel(block=4, max_iters=10)):
        _, got, stats = jax.jit(
            lambda h, method=method: parallel_scan(
                logistic, h, None, 120, method=method, with_stats=True, on_fail="nan"
            )
        )(jnp.array(0.3))
        assert not stats.converged and stats.first_bad < 100
        assert (
            jnp.isnan(got[stats.first_bad :]).all() and jnp.isfinite(got[: stats.first_bad]).all()
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Elk(lam=-1.0),
        lambda: Elk(window=0),
        lambda: GaussSeidel(0),
        lambda: GaussSeidel(8, window=4),
    ],
)
def test_bad_fields(make):
    with pytest.raises(UsageError):
        make()
