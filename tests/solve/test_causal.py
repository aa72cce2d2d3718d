"""Causal fixed points against the plain loop over elements: values, bits, gradients, NaN and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import assert_close

from jaxpar.solve.causal import causal_fixed_point, check_causal
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.sequential import Sequential
from jaxpar.types import UsageError

METHODS = [Jacobi(), GaussSeidel(block=5), Sequential()]
NUM = 12


def couplings(scale, dtype=jnp.float32):
    """A strictly lower triangular matrix and a bias."""
    keys = jax.random.split(jax.random.key(0))
    w = scale * jnp.tril(jax.random.normal(keys[0], (NUM, NUM)), -1)
    return w.astype(dtype), jax.random.normal(keys[1], (NUM,)).astype(dtype)


def float_update(params, x):
    return jnp.tanh(jnp.tril(params[0], -1) @ x + params[1])


def one_by_one(update, x):
    """The definition: element i from the elements before it."""
    for i in range(NUM):
        x = jax.tree.map(lambda a, b, i=i: a.at[i].set(b[i]), x, update(x))
    return x


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_integers_are_those_of_the_loop(method):
    w, noise = couplings(1.5)

    def update(x):
        return {"spin": jnp.where(w @ x["spin"].astype(jnp.float32) + noise > 0, 1, -1)}

    start = {"spin": jnp.ones(NUM, jnp.int32)}
    got, stats = jax.jit(lambda x: causal_fixed_point(update, x, method=method, with_stats=True))(
        start
    )
    assert jnp.array_equal(got["spin"], one_by_one(update, start)["spin"])
    assert stats.converged and stats.iterations <= NUM
    if method == Sequential():
        assert stats.iterations == NUM


def test_weak_couplings_take_fewer_evaluations_than_elements():
    params = couplings(0.01)
    x, stats = causal_fixed_point(
        lambda x: float_update(params, x), jnp.zeros(NUM), with_stats=True
    )
    assert stats.iterations < NUM and jnp.array_equal(x, float_update(params, x))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_values_and_derivatives_of_floats(method, x64):
    params = couplings(0.8, jnp.float64)

    def parallel(params):
        start = jnp.zeros(NUM)
        return jnp.sin(
            causal_fixed_point(lambda x: float_update(params, x), start, method=method)
        ).sum()

    def plain(params):
        return jnp.sin(one_by_one(lambda x: float_update(params, x), jnp.zeros(NUM))).sum()

    assert_close(parallel(params), plain(params), 1e-13)
    assert_close(jax.grad(parallel)(params), jax.grad(plain)(params), 1e-12)
    tangent = jax.tree.map(jnp.cos, params)
    assert_close(
        jax.jvp(parallel, (params,), (tangent,))[1], jax.jvp(plain, (params,), (tangent,))[1], 1e-12
    )


def test_each_sequence_of_a_batch_stops_by_itself():
    w, b = couplings(1.0)
    strength = jnp.array([0.0, 0.01, 1.0])

    def solve(s):
        return causal_fixed_point(
            lambda x: float_update((s * w, b), x), jnp.zeros(NUM), with_stats=True
        )

    got, stats = jax.vmap(solve)(strength)
    alone = [solve(s) for s in strength]
    assert stats.iterations.tolist() == [int(one.iterations) for _, one in alone]
    assert len(set(stats.iterations.tolist())) == 3
    assert_close(got, jnp.stack([x for x, _ in alone]), 1e-6)


def test_other_axes_and_several_leaves():
    w, b = couplings(0.5)

    def update(x):
        mixed = float_update((w, b), x["a"].mean(0)) + 0.1 * (jnp.tril(w, -1) @ x["b"])
        return {"a": jnp.stack([mixed, jnp.cos(mixed)]), "b": jnp.sin(mixed)}

    start = {"a": jnp.zeros((2, NUM)), "b": jnp.zeros(NUM)}
    x = causal_fixed_point(update, start, axis=-1)
    assert_close(x, update(x), 1e-6)


def test_no_nan_of_an_early_iterate_survives():
    """A wild guess overflows; masked weights turn an infinite later element into NaN earlier (0 * inf)."""
    w = jnp.tril(jnp.full((NUM, NUM), -3.0), -1)

    def update(x):
        return jnp.exp(jnp.exp(w @ x))

    x, stats = causal_fixed_point(update, jnp.full(NUM, -5.0), with_stats=True)
    assert stats.converged
    assert_close(x, one_by_one(update, jnp.zeros(NUM)), 1e-6)


def test_a_true_nan_is_reported_and_does_not_count_as_settled():
    def update(x):
        before = jnp.concatenate([jnp.zeros(1), x[:-1]])
        return jnp.where(jnp.arange(NUM) == 4, jnp.nan, 0.5 * before + 1)

    x, stats = causal_fixed_point(update, jnp.zeros(NUM), with_stats=True)
    assert not stats.converged
    np.testing.assert_array_equal(x, one_by_one(update, jnp.zeros(NUM)))


def test_a_tolerance_ends_earlier_and_too_few_evaluations_are_reported():
    params = couplings(0.3)

    def solve(**options):
        return causal_fixed_point(
            lambda x: float_update(params, x), jnp.zeros(NUM), with_stats=True, **options
        )

    exact, loose, short = solve(), solve(tol=1e-3), solve(max_iters=2)
    assert loose[1].iterations < exact[1].iterations and loose[1].converged
    assert_close(loose[0], exact[0], 1e-3)
    assert not short[1].converged and short[1].iterations == 2
    assert_close(short[0][:2], exact[0][:2], 0)


def test_causality_is_checked():
    params = couplings(1.0)
    check_causal(lambda x: float_update(params, x), jnp.zeros(NUM))
    check_causal(lambda x: jnp.cumsum(x) - x, jnp.arange(NUM))
    peeking = params[0].at[3, 7].set(1.0)
    with pytest.raises(UsageError, match="element 3 moves with elements"):
        check_causal(lambda x: jnp.tanh(peeking @ x), jnp.zeros(NUM))
    with pytest.raises(UsageError, match="not causal along axis 1"):
        check_causal(jnp.logical_not, jnp.zeros((2, 3), bool), axis=1)
    with pytest.raises(UsageError, match="outside"):
        jax.jit(lambda x: check_causal(lambda x: x, x))(jnp.zeros(3))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_iters": 3}, "with_stats"),
        ({"axis": 1}, "same positive number of elements at axis 1"),
        ({"method": "jacobi"}, "method of causal_fixed_point"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(UsageError, match=match):
        causal_fixed_point(lambda x: 0 * x, jnp.zeros(4), **options)


@pytest.mark.parametrize("update", [lambda x: x[:2], lambda x: x > 0, lambda x: (x, x)])
def test_an_update_must_return_what_it_is_given(update):
    with pytest.raises(UsageError, match="must return what it is given"):
        causal_fixed_point(update, jnp.zeros(4))
