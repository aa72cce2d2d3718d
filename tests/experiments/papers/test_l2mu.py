"""A Legendre memory in spikes: one step at a time is the scan, it has a gradient, and more neurons are nearer to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from experiments.papers import l2mu

THETA, SIZE, UNITS, NEURONS = 8.0, 4, 5, 12


def test_the_scan_is_its_steps_and_spikes_are_equal(x64):
    """Potentials within 1e-6 of the threshold, whose spikes may differ, are counted: none."""
    xs = np.random.default_rng(0).standard_normal((2, 15, 3))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), l2mu.init(0, 3, SIZE, UNITS, 2))
    state = l2mu.begin(2, SIZE, UNITS, NEURONS, jnp.float64)
    last, (memories, spikes) = jit(functools.partial(l2mu.run, theta=THETA))(params, xs, state)
    step, near = jit(functools.partial(l2mu.one_step, theta=THETA)), 0
    for t in range(xs.shape[1]):
        state, (m, fired) = step(params, state, xs[:, t])
        near += sum(int((np.minimum(np.abs(v), np.abs(v - 1)) < 1e-6).sum()) for v in state[:3])
        np.testing.assert_array_equal(fired, spikes[t])
        assert_close(m, memories[t], 1e-12)
    assert near == 0
    assert_close(state, last, 1e-12)
    assert 0 < spikes.mean() < 1

    def read(params):
        return l2mu.run(params, xs, l2mu.begin(2, SIZE, UNITS, NEURONS, jnp.float64), THETA)[
            0
        ].trace.sum()

    grads = jit(jax.grad(read))(params)
    assert all(np.any(np.asarray(grads[name]) != 0) for name in ("w_u", "b_u", "w_x", "w_m", "b"))


def test_more_neurons_are_nearer_to_the_memory():
    errors = [l2mu.memory_error(neurons, length=120) for neurons in (8, 64, 512)]
    assert errors[0] > 2 * errors[1] > 2.5 * errors[2] and errors[2] < 0.25, errors


def test_a_population_says_what_it_is_told():
    """Decoded rates of 256 neurons are the number, within 3 % of its range."""
    x, v = jnp.linspace(-0.9, 0.9, 7)[None], l2mu.begin(1, 7, 1, 256).m
    step = jax.jit(l2mu.through)
    total = jnp.zeros_like(x)
    for t in range(150):
        said, _, v = step(x, v)
        total += said * (t >= 50) / 100
    np.testing.assert_allclose(total, x, atol=0.06)


@pytest.mark.slow  # 60 s
def test_it_learns_digits_through_its_spikes():
    assert l2mu.learn(100, 16, 0) > 0.25
