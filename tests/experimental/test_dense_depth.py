"""Depth in parallel is depth in sequence, in values and derivatives."""

import jax
import jax.numpy as jnp
import pytest
from tolerance import assert_close

from jaxpar.experimental.dense_depth import DenseDepth
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.types import UsageError

NET = DenseDepth(input_dim=3, num_layers=9, width=4)


@pytest.mark.parametrize("method", [Jacobi(), GaussSeidel(block=4)], ids=repr)
def test_values_and_gradients_are_those_of_the_layers_in_order(method, x64):
    params = jax.tree.map(lambda w: w.astype(jnp.float64), NET.init(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (5, 3))

    def loss(evaluate):
        return lambda params, x: jnp.sin(jax.vmap(lambda x: evaluate(params, x))(x)).sum()

    def parallel(params, x):
        return NET.parallel(params, x, method=method)

    want = jax.vmap(lambda x: NET.sequential(params, x))(x)
    assert_close(jax.vmap(lambda x: parallel(params, x))(x), want, 1e-13)
    assert jnp.abs(want).mean() > 0.1
    got = jax.grad(loss(parallel), (0, 1))(params, x)
    assert_close(got, jax.grad(loss(NET.sequential), (0, 1))(params, x), 1e-12)


def test_a_tolerance_saves_sweeps():
    params = NET.init(jax.random.key(0))
    x = jnp.ones(3)
    exact, most = NET.parallel(params, x, with_stats=True)
    loose, fewer = NET.parallel(params, x, tol=1e-2, with_stats=True)
    assert fewer.iterations < most.iterations <= 9
    assert_close(loose, exact, 0.1)


def test_bad_sizes():
    with pytest.raises(UsageError, match="num_layers=0 must be at least 1"):
        DenseDepth(3, 0, 4)
