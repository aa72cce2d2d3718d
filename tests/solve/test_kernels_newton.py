"""Newton's method by kernels, with the kernel's step written in plain JAX: when it stops, goes on, and gives up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.lower import triton
from jaxpar.solve import _fused, fused, newton
from jaxpar.solve.fused import MAX_ITERATIONS, newton_states
from jaxpar.solve.problem import Problem
from jaxpar.solve.structure import elementwise
from jaxpar.solve.windows import run_sequentially

LENGTH, LANES = 400, (3,)
XS = jax.random.normal(jax.random.key(0), (LENGTH, *LANES))


def gated(h, x):
    z = jax.nn.sigmoid(0.5 * h[0] + x[0])
    return ((1 - z) * h[0] + z * jnp.tanh(0.8 * h[0] + x[0]),)


def quartered(h, x):
    """A slope that says nothing of the step: Newton's method goes nowhere near the solution."""
    return (jnp.sin(1e3 * h[0]) + 3.9 * h[0] * (1 - h[0]) + 0 * x[0],)


def solve(monkeypatch, step, start, xs, on_fail="nan", most=None):
    """Returns what `newton_states` does, with a step in place of the kernel's."""

    def newton_step(cell, states, start, xs, constants, *, bound, reverse=False):
        assert not (constants or reverse)
        at = (jnp.concatenate([start[0][None], states[0][:-1]]),)
        run = jax.vmap(lambda h, x: step((h,), x)[0])
        xs = tuple(x.reshape(len(x), *(1,) * (at[0].ndim - x.ndim), *x.shape[1:]) for x in xs)
        xs = tuple(jnp.broadcast_to(x, at[0].shape) for x in xs)
        new, slope = jax.jvp(lambda at: run(at, xs), at, (jnp.ones_like(at[0]),))
        combine = lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1])  # noqa: E731
        delta = jax.lax.associative_scan(combine, (slope, new - states[0]))[1]
        after = states[0] + delta
        limit = bound[0] * jnp.abs(after) + bound[1] + bound[2] * jnp.abs(slope * at[0])
        return (after,), ((jnp.abs(delta) / limit).max(0),)

    monkeypatch.setattr(triton, "available", lambda: True)
    monkeypatch.setattr(_fused, "newton_step", newton_step)
    monkeypatch.setattr(fused, "fused_states", run_sequentially)
    problem = Problem(step, (start,), (xs,), len(xs), elementwise([start.shape]))
    (states,), outcome = newton_states(problem, most, on_fail)
    return states, outcome


def by_steps(step, start, xs):
    return jax.lax.scan(lambda h, x: (step((h,), (x,))[0],) * 2, start, xs)[1]


def test_it_stops_as_soon_as_the_updates_promise_enough(monkeypatch):
    states, outcome = solve(monkeypatch, gated, jnp.zeros(LANES), XS)
    np.testing.assert_allclose(states, by_steps(gated, jnp.zeros(LANES), XS), rtol=1e-5, atol=1e-6)
    assert outcome.iterations <= 5 and outcome.first_bad == LENGTH and outcome.residual <= 1


def test_it_goes_on_where_updates_promised_too_much(monkeypatch):
    """The second update is 1e-6 of the first, which promises all, and the residual is large: twice it sets out."""
    start = jnp.full(LANES, 1e7)
    states, outcome = solve(monkeypatch, gated, start, XS)
    np.testing.assert_allclose(states, by_steps(gated, start, XS), rtol=1e-5, atol=1e-6)
    assert 2 + 4 <= outcome.iterations < MAX_ITERATIONS and outcome.first_bad == LENGTH


def test_a_residual_of_rounding_is_not_enough_where_errors_grow(monkeypatch):
    """Along an unstable path every iterate solves the equations but for rounding, and is far from the next one."""
    path = jnp.tile(jnp.sin(jnp.arange(61.0))[:, None], LANES)
    states, outcome = solve(
        monkeypatch, lambda h, x: (1.5 * h[0] + x[0],), path[0], path[1:] - 1.5 * path[:-1], most=2
    )
    assert (
        outcome.residual <= 1 < outcome.error[0]
        and outcome.first_bad < 60
        and np.isnan(states[-1]).all()
    )


def test_what_it_does_not_find_is_run_sequentially_or_nan(monkeypatch):
    start = jnp.full(LANES, 0.3)
    states, outcome = solve(monkeypatch, quartered, start, XS)
    assert outcome.first_bad < LENGTH and not np.isfinite(states[-1]).any()
    states, again = solve(monkeypatch, quartered, start, XS, "finish")
    assert again.first_bad == outcome.first_bad
    np.testing.assert_array_equal(states, by_steps(quartered, start, XS))


def test_a_nan_ends_the_iteration_at_once(monkeypatch):
    _, outcome = solve(monkeypatch, gated, jnp.zeros(LANES), XS.at[9, 1].set(jnp.nan))
    assert outcome.iterations == 1 and outcome.first_bad <= 9


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None)])
def test_a_batch_of_sequences_is_more_lanes(monkeypatch, in_axes):
    starts, xs = jnp.array([[0.0] * 3, [1e7] * 3]), jnp.stack([XS, -XS])
    xs = xs if in_axes[1] == 0 else XS

    def one(start, xs):
        states, outcome = solve(monkeypatch, gated, start, xs)
        return states, outcome.first_bad

    states, first_bad = jax.vmap(one, in_axes)(starts, xs)
    assert (first_bad == LENGTH).all()
    want = jax.vmap(lambda start, xs: by_steps(gated, start, xs), in_axes)(starts, xs)
    np.testing.assert_allclose(states, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_float16_which_overflows_where_iterates_overshoot_takes_the_way_that_resets(
    monkeypatch, dtype
):
    asked = []

    def kernels(problem, *rest):
        asked.append(problem)
        return newton.by_windows(newton.Newton(), problem, None, "nan")

    monkeypatch.setattr(newton, "takes", lambda problem: True)
    monkeypatch.setattr(newton, "newton_states", kernels)
    problem = Problem(
        gated, (jnp.zeros(LANES, dtype),), (XS[:8].astype(dtype),), 8, elementwise([LANES])
    )
    jax.make_jaxpr(
        lambda: newton.Newton().states(problem, None, "nan")
    )()  # all platforms' ways are traced
    assert len(asked) == (dtype != "float16")
