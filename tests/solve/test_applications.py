"""Trajectories and chains: one parallel solve each, against `lax.scan` in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.solve import Newton, parallel_scan
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.systems import (
    intervals,
    langevin_step,
    leapfrog,
    leapfrog_step,
    ode_step,
    sde_step,
)
from jaxpar.types import UsageError

NUM = 48


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


NEWTON = Newton()


def agrees(make, params, init, xs, length=None, method=NEWTON):
    """Asserts that states and gradients (of params and the start) are those of the loop; returns the stats."""

    def loss(scan):
        def value(params, init):
            last, states, *stats = scan(make(params), init, xs, length)
            leaves = jax.tree.leaves((last, states))
            return sum((jnp.cos(leaf) * leaf).sum() for leaf in leaves), (states, stats)

        return jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))

    def parallel(*args):
        return parallel_scan(*args, method=method or Newton(), with_stats=True)

    (_, (got, (stats,))), got_grad = loss(parallel)(params, init)
    (_, (want, _)), want_grad = loss(jax.lax.scan)(params, init)
    assert_close(got, want, 1e-10)
    assert_close(got_grad, want_grad, 1e-8)
    return stats


def irregular(num, mean=0.1, seed=9):
    """num + 1 times, some of them a hundred times as far apart as others."""
    gaps = np.random.default_rng(seed).lognormal(sigma=1.0, size=num)
    return np.concatenate([[3.0], 3.0 + np.cumsum(mean * np.minimum(gaps / gaps.mean(), 4.0))])


def neural_field(params):
    """A driven and damped network that knows the time."""
    return lambda t, h, x: (
        params["v"] @ jnp.tanh(params["w"] @ h + params["b"] * jnp.sin(t)) - h + x
    )


NEURAL = {"w": 0.7 * normal(0, 5, 2), "v": 0.7 * normal(1, 2, 5), "b": jnp.ones(5)}


def test_a_neural_ode_at_times_of_its_own(x64):
    """Over a thousand steps; also by the times themselves."""
    num = 1024
    xs = normal(2, num, 2)

    def make(scan):
        def value(params, ts, init):
            last, states, *stats = scan(ode_step(neural_field(params)), init, intervals(ts, xs))
            return (jnp.cos(states) * states).sum() + last.sum(), (states, stats)

        return jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))

    args = (
        jax.tree.map(lambda a: a.astype(jnp.float64), NEURAL),
        jnp.asarray(irregular(num)),
        jnp.ones(2),
    )
    (_, (got, (stats,))), got_grad = make(
        lambda *args: parallel_scan(*args, with_stats=True, method=Newton())
    )(*args)
    (_, (want, _)), want_grad = make(jax.lax.scan)(*args)
    assert stats.converged and stats.iterations < 12
    assert_close(got, want, 1e-10)
    assert_close(got_grad, want_grad, 1e-9)


def test_steps_are_of_order_four_in_their_length(x64):
    """Against dh/dt = x h cos(t), h = exp(x sin(t)), on a grid and on its halves; and backwards in time."""

    def error(ts):
        xs = jnp.full(len(ts) - 1, 1.5)
        step = jax.jit(
            lambda h, over: jax.lax.scan(ode_step(lambda t, h, x: x * h * jnp.cos(t)), h, over)[1]
        )
        got = step(jnp.exp(1.5 * jnp.sin(ts[0])), intervals(ts, xs))
        return np.abs(np.asarray(got) - np.exp(1.5 * np.sin(ts[1:]))).max()

    ts = irregular(64)
    halved = np.interp(np.arange(129) / 2, np.arange(65), ts)
    coarse, fine, back = error(ts), error(halved), error(halved[::-1])
    assert 12 < coarse / fine < 22 and fine < 1e-4 and back < 1e-3


def test_inputs_are_held_between_times(x64):
    """dh/dt = -h + x has an exact step."""
    ts, xs = irregular(16, 0.02), np.arange(16.0)
    got = jax.lax.scan(
        ode_step(lambda t, h, x: x - h), jnp.array(2.0), intervals(ts, jnp.asarray(xs))
    )[1]
    want, h = [], 2.0
    for dt, x in zip(np.diff(ts), xs, strict=True):
        h = x + (h - x) * np.exp(-dt)
        want.append(h)
    np.testing.assert_allclose(got, want, rtol=1e-7)


def test_late_times_keep_their_distance():
    """In float32 the times around 1e6 are 0.06 apart."""
    ts = irregular(32)
    run = jax.jit(
        lambda over: jax.lax.scan(ode_step(lambda t, h, x: -h), jnp.ones(2, jnp.bfloat16), over)[1]
    )
    assert_close(run(intervals(1e6 + ts)), run(intervals(ts)), 1e-6)
    assert run(intervals(ts)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "ts, xs, sentence",
    [
        (np.zeros((3, 1)), None, "has shape"),
        (np.zeros(0), None, "has shape"),
        (np.array([0.0, 2.0, 1.0]), None, "in order"),
        (np.array([0.0, np.nan, 1.0]), None, "finite"),
        (jnp.array([0.0, jnp.inf]), None, "finite"),
        (
            np.array([0.0, 1.0, 2.0]),
            {"u": np.zeros(3)},
            r"\['u'\] has shape \(3,\); 3 times leave 2 steps",
        ),
    ],
)
def test_a_grid_that_is_none(ts, xs, sentence):
    with pytest.raises(UsageError, match=sentence):
        intervals(ts, xs)


def test_a_stochastic_differential_equation(x64):
    def make(params):
        pull, noise = params
        drift = lambda h: {"x": -pull * h["x"] ** 3 + h["x"]}  # noqa: E731
        return sde_step(drift, lambda h: {"x": noise * jnp.cos(h["x"])}, 0.05)

    stats = agrees(
        make, (jnp.array(1.0), jnp.array(0.5)), {"x": jnp.zeros(2)}, {"x": normal(3, NUM, 2)}
    )
    assert stats.converged and stats.iterations < 12


def pendulum(frequency):
    """A pendulum in angle and angular velocity; each step gives its state as output."""

    def step(h, _):
        h = leapfrog(lambda angle: -(frequency**2) * jnp.sin(angle), *h, 0.1)
        return h, h

    return step


SHOOTING = pytest.param(GaussSeidel(block=7, correction=True), marks=pytest.mark.slow)


@pytest.mark.parametrize("method", [Newton(), SHOOTING])
def test_a_pendulum(method, x64):
    """It neither forgets nor amplifies: an exponent of zero."""
    init = (jnp.array(2.5), jnp.array(0.0))
    stats = agrees(pendulum, jnp.array(1.0), init, None, NUM, method)
    assert stats.converged and stats.iterations < 12


def double_well(x):
    return -jnp.sum((x**2 - 1) ** 2) - 0.5 * x[0] * x[1]


@pytest.mark.slow
def test_langevin_samples(x64):
    def make(strength):
        return langevin_step(lambda x: strength * double_well(x), 0.05)

    stats = agrees(make, jnp.array(1.0), jnp.ones(2), normal(4, NUM, 2))
    assert stats.converged


@pytest.mark.parametrize("num_steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_chain_that_accepts_and_rejects(num_steps, x64):
    uniforms = jnp.log(jax.random.uniform(jax.random.key(6), (NUM,)))

    def make(strength):
        return leapfrog_step(lambda x: strength * double_well(x), 0.45, num_steps)

    xs = normal(5, NUM, 2), uniforms
    agrees(make, jnp.array(1.0), jnp.ones(2), xs)
    states = jax.lax.scan(make(1.0), jnp.ones(2), xs)[1]
    stays = np.asarray((states[1:] == states[:-1]).all(1))
    assert 0 < stays.sum() < len(stays), "both decisions must occur"


def test_the_chain_samples_its_density():
    """Of a standard normal: mean 0, variance 1; a wrong acceptance rule would show."""
    f = leapfrog_step(lambda x: -jnp.sum(x * x) / 2, 1.2, 2)
    num = 20_000
    uniforms = jnp.log(jax.random.uniform(jax.random.key(8), (num,)))
    states = jax.lax.scan(f, jnp.zeros(2), (normal(7, num, 2), uniforms))[1]
    np.testing.assert_allclose(states.mean(0), 0, atol=0.05)
    np.testing.assert_allclose(states.var(0), 1, atol=0.05)


def lorenz(h):
    x, y, z = h
    return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])


def test_a_stabilised_observer_of_a_chaotic_system(x64):
    """Lorenz's system is chaotic; a copy that is pulled towards what is seen of it forgets its own start."""
    step, ts = ode_step(lambda t, h, _: lorenz(h)), 0.02 * np.arange(301)
    truth = jax.lax.scan(step, jnp.array([1.0, 1.0, 20.0]), intervals(ts))[1]

    def observer(gain):
        return ode_step(
            lambda t, h, seen: lorenz(h) + gain * jnp.array([0.0, 1.0, 0.0]) * (seen - h[0])
        )

    seen = intervals(ts, truth[:, 0])
    stats = agrees(observer, jnp.array(30.0), jnp.array([-5.0, 5.0, 15.0]), seen)
    assert stats.converged and stats.iterations < 20


def test_an_unstable_system_is_run_sequentially_and_reported():
    step, over = ode_step(lambda t, h, _: lorenz(h)), intervals(0.02 * np.arange(601))
    init = jnp.array([1.0, 1.0, 20.0])
    want = jax.jit(lambda init: jax.lax.scan(step, init, over)[1])(init)
    _, got, stats = jax.jit(
        lambda init: parallel_scan(step, init, over, with_stats=True, method=Newton())
    )(init)
    assert not stats.converged and 0 < stats.first_bad < 600
    # The part that was iterated on is as close as rounding lets any two evaluations be.
    assert jnp.isfinite(got).all()
    assert_close(got[:100], want[:100], 1e-3)
