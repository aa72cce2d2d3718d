"""Derivatives are those of the loop, whatever found the states, and need the memory of one window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells_to_solve import CELLS, distance, inputs, once_each, start, weights
from fast import jit

from jaxpar.solve import (
    Elk,
    Fused,
    GaussSeidel,
    Jacobi,
    Newton,
    ParallelBackward,
    Quasi,
    parallel_scan,
)

METHODS = {
    "newton": Newton(),
    "windows": Newton(window=16),
    "damped": Newton(damping=0.3),
    "quasi": Quasi(),
    "hutchinson": Quasi("hutchinson"),
    "jacobi": Jacobi(),
    "backward": ParallelBackward(window=16),
    "fails": Newton(max_iters=1),
    "gauss_seidel": GaussSeidel(block=7),
    "shot": GaussSeidel(block=7, shot_above=0),
    "shot_in_vain": GaussSeidel(block=4, window=8, max_iters=1, shot_above=0),
    "corrected": GaussSeidel(block=7, correction=True),
    "elk": Elk(),
    "fused": Fused(),
}


def loss(cell, scan, params, h, xs):
    carry, ys = scan(functools.partial(CELLS[cell], params), h, xs)
    return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves((carry, ys)))


def arguments(cell, length=40):
    return weights(), start(cell), inputs(length)


def gradients(cell, scan, argnums=(0, 1, 2)):
    return jit(jax.grad(functools.partial(loss, cell, scan), argnums))


@functools.cache
def gradients_of_the_loop(cell):
    return gradients(cell, jax.lax.scan)(*arguments(cell))


@once_each(METHODS)
def test_gradients_to_everything_are_those_of_the_loop(name, cell, x64):
    scan = functools.partial(parallel_scan, method=METHODS[name])
    got, want = gradients(cell, scan)(*arguments(cell)), gradients_of_the_loop(cell)
    assert (
        distance(got[0]["a" if cell == "lstm" else "w"], want[0]["a" if cell == "lstm" else "w"])
        < 1e-10
    )
    assert distance(got[1:], want[1:]) < 1e-10


TWICE = {
    "windows": Newton(window=16),
    "backward": ParallelBackward(),
    "shot": GaussSeidel(block=7, shot_above=0),
}


def twice(scan):
    params, h, xs = arguments("rnn")
    value = lambda w: loss("rnn", scan, {"w": w}, h, xs)  # noqa: E731
    both = jit(lambda w, v: (jax.jvp(value, (w,), (v,)), jax.jvp(jax.grad(value), (w,), (v,))))
    return both(params["w"], jnp.cos(params["w"]))


@functools.cache
def twice_by_the_loop():
    return twice(jax.lax.scan)


@pytest.mark.parametrize("method", TWICE.values(), ids=TWICE)
def test_forward_and_second_derivatives(method, x64):
    assert (
        distance(twice(functools.partial(parallel_scan, method=method)), twice_by_the_loop())
        < 1e-10
    )


def test_second_derivatives_inside_a_loop_and_under_vmap(x64):
    params, h, xs = arguments("gru", 12)

    def outer(scan, w):
        """Two sequences, each solved twice, the second time from the end of the first."""

        def one(xs):
            step = functools.partial(CELLS["gru"], {"a": w})
            return jax.lax.scan(
                lambda h, part: (scan(step, h, part)[0], None), h, xs.reshape(2, 6, 3, -1)
            )[0].sum()

        return jax.vmap(one)(jnp.stack([xs, -xs])).sum()

    def curvature(scan):
        grad = jax.grad(functools.partial(outer, scan))
        return jit(lambda w: jax.jvp(grad, (w,), (jnp.cos(params["a"]),)))(params["a"])

    assert distance(curvature(parallel_scan), curvature(jax.lax.scan)) < 1e-10


def test_only_what_has_a_tangent_is_differentiated(x64):
    """Integer inputs and closed-over integers stay as they are; a gradient to the start alone is exact too."""
    table, xs = jnp.arange(6.0) / 6, jnp.arange(20) % 6

    def value(scan, h, table):
        f = lambda h, n: (jnp.tanh(h * table[n] + 0.1 * n), h)  # noqa: E731
        return scan(f, h, xs)[1].sum()

    for argnums in (0, 1):
        got, want = (
            jit(jax.grad(functools.partial(value, scan), argnums))(jnp.ones(2), table)
            for scan in (parallel_scan, jax.lax.scan)
        )
        assert distance(got, want) < 1e-12


@functools.cache
def exact_gradients(cell, length):
    """Of float32 arguments, by the loop in float64."""
    args = arguments(cell, length)
    with jax.enable_x64(True):
        return gradients(cell, jax.lax.scan, (0, 2))(
            *jax.tree.map(lambda leaf: leaf.astype(jnp.float64), args)
        )


@pytest.mark.parametrize(
    "name", ["newton", pytest.param("quasi", marks=pytest.mark.slow), "jacobi", "shot"]
)
def test_single_precision(name):
    cell, length = "rnn", 200
    scan = functools.partial(parallel_scan, method=METHODS[name])
    got, want = (
        gradients(cell, scan, (0, 2))(*arguments(cell, length)),
        exact_gradients(cell, length),
    )
    with jax.enable_x64(True):
        assert distance(got[0]["w"], want[0]["w"]) < 1e-5 and distance(got[1], want[1]) < 1e-5


def test_memory_grows_with_the_window_and_not_with_the_length():
    n, window = 16, 128
    method = Newton(window=window)

    def value(w, xs):
        return parallel_scan(
            lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros(n), xs, method=method
        )[1].sum()

    def temporary(length):
        shapes = (
            jax.ShapeDtypeStruct((n, n), jnp.float32),
            jax.ShapeDtypeStruct((length, n), jnp.float32),
        )
        memory = jit(jax.value_and_grad(value, (0, 1))).lower(*shapes).compile().memory_analysis()
        return memory.temp_size_in_bytes

    short, middle, long = map(temporary, (1024, 16384, 262144))
    jacobians = 4 * n * n * window
    per_step = (long - middle) / (262144 - 16384)
    assert short > jacobians  # one window's are alive
    assert per_step < 6 * 4 * n  # what still grows are states [T, n], never Jacobians [T, n, n]
    assert middle - 16384 * per_step < 2 * (short - 1024 * per_step) + 2**16


RESETS = {
    "before": lambda h, x, reset: jnp.sqrt(jnp.abs(jnp.where(reset, 0, h))) / 2 + x,
    "behind": lambda h, x, reset: jnp.where(reset, 0, jnp.sqrt(jnp.abs(h))) / 2 + x,
    "none at zero": lambda h, x, reset: jnp.where(reset, 0, jnp.sqrt(jnp.abs(x * h))),
}
"""Steps with an infinite derivative at 0, which a reset leaves out but in the last one."""


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (Newton(), "before"),
        (Newton(), "behind"),
        (Newton(), "none at zero"),
        (Newton("dense"), "before"),
        (Newton("dense"), "behind"),
        (Jacobi(), "before"),
        (Jacobi(), "none at zero"),
    ],
    ids=repr,
)
def test_gradients_are_finite_where_those_of_the_loop_are(method, name):
    rng = np.random.default_rng(0)
    xs = rng.uniform(0.5, 1, (24, 3)).astype("float32")
    has_nan = name == "none at zero"
    if has_nan:
        xs[5:7, 1] = 0
    resets = np.isin(np.arange(24), (7, 15))

    def step(h, row):
        h = RESETS[name](h, *row)
        return h, h

    def gradient(scan):
        return jit(jax.grad(lambda h, xs: jnp.sin(scan(step, h, (xs, resets))[1]).sum(), (0, 1)))

    got = gradient(functools.partial(parallel_scan, method=method))(jnp.ones(3), xs)
    want = gradient(jax.lax.scan)(jnp.ones(3), xs)
    assert np.isnan(want[1]).any() == has_nan
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
