"""Lyapunov exponents where they are known, and the parallel product against the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.solve.lyapunov import lyapunov
from jaxpar.types import UsageError

jitted = jax.jit(lyapunov, static_argnums=(0,), static_argnames=("length", "discard", "seed"))


def scanned(f, init, xs, length=None):
    return jax.lax.scan(lambda h, x: (f(h, x)[0],) * 2, init, xs, length)[1]


def logistic_map(h, _):
    return 4 * h * (1 - h), None


def scaled(h, a):
    return a * h, None


def network(h, x):
    new = jnp.tanh(x["w"] @ jnp.concatenate([h["a"], h["b"]]))
    return {"a": new[:2], "b": new[2:]}, new.sum()


def test_a_scalar_system_has_the_mean_of_the_logarithms(x64):
    a = jax.random.normal(jax.random.key(0), (50,))
    want = np.log(np.abs(a))
    np.testing.assert_allclose(jitted(scaled, jnp.ones(1), a), want.mean(), rtol=1e-12)
    np.testing.assert_allclose(
        jitted(scaled, jnp.ones(1), a, discard=9), want[9:].mean(), rtol=1e-12
    )


@pytest.mark.parametrize("gain", [0.6, 1.4])
def test_a_linear_system_has_the_logarithm_of_its_spectral_radius(gain, x64):
    w = gain * jax.random.normal(jax.random.key(1), (4, 4)) / 2
    want = np.log(np.abs(np.linalg.eigvals(w)).max())
    got = jitted(lambda h, _: (w @ h, None), jnp.ones(4), None, length=4000)
    assert abs(got - want) < 2e-3 and np.sign(got) == np.sign(gain - 1)


def test_the_logistic_map_doubles_distances(x64):
    got = jitted(logistic_map, jnp.array(0.3), None, length=20_000, discard=100)
    assert abs(got - np.log(2)) < 5e-3


@pytest.mark.parametrize(("length", "discard"), [(1, 0), (7, 0), (23, 5)])
def test_the_parallel_product_is_that_of_the_loop(length, discard, x64):
    init = {"a": jnp.ones(2), "b": -jnp.ones(1)}
    xs = {"w": 2 * jax.random.normal(jax.random.key(2), (length, 3, 3))}
    states = scanned(network, init, xs)
    parallel = jitted(network, init, xs, states=states, discard=discard)
    # v meets the first Jacobian that counts in both, so without discarding they are one number.
    start = init if discard == 0 else jax.tree.map(lambda leaf: leaf[discard - 1], states)
    loop = jitted(network, start, jax.tree.map(lambda x: x[discard:], xs))
    np.testing.assert_allclose(parallel, loop, rtol=1e-10)


def test_long_products_neither_overflow_nor_vanish():
    for gain in (1e-3, 1e3):
        xs = jnp.full((300,), gain)
        np.testing.assert_allclose(jitted(scaled, jnp.zeros(2), xs), np.log(gain), rtol=1e-5)
        np.testing.assert_allclose(
            jitted(scaled, jnp.zeros(2), xs, states=jnp.zeros((300, 2))), np.log(gain), rtol=1e-5
        )


def test_a_state_that_is_forgotten_wholly():
    xs = jnp.array([1.0, 0.0, 1.0])
    assert jitted(scaled, jnp.ones(2), xs) == -jnp.inf
    assert jitted(scaled, jnp.ones(2), xs, states=jnp.zeros((3, 2))) == -jnp.inf


@pytest.mark.parametrize(
    ("init", "options", "match"),
    [
        (1, {}, "floating"),
        (1.0, {"discard": 5}, "discard"),
        (1.0, {"states": jnp.zeros(3)}, "after each of the 5 steps"),
    ],
)
def test_bad_input(init, options, match):
    with pytest.raises(UsageError, match=match):
        lyapunov(lambda h, x: (h, None), init, jnp.zeros(5), **options)
