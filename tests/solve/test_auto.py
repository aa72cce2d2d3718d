"""The choice of method: ruled out where it must be, tried where it may pay, and said."""

import jax
import jax.numpy as jnp
import pytest
from tolerance import assert_close

from jaxpar.solve import GaussSeidel, Newton, ParallelBackward, Sequential, parallel_scan
from jaxpar.solve.auto import Auto, choose
from jaxpar.solve.default import COSTS, explain
from jaxpar.solve.lyapunov import lyapunov
from jaxpar.types import UsageError

TIME = 4096


def gated(a):
    """An elementwise cell that forgets."""

    def f(h, x):
        h = jnp.tanh(a * h + x)
        return h, h

    return f


INIT, XS = jnp.zeros(3), jax.random.normal(jax.random.key(0), (TIME, 3))


def logistic(h, _):
    h = 4 * h * (1 - h)
    return h, h


def test_a_predictable_elementwise_cell_is_iterated_on_a_gpu():
    f = gated(0.5)
    choice = choose(f, INIT, XS, platform="gpu")
    assert isinstance(choice.method, Newton | GaussSeidel)
    assert choice.exponent == pytest.approx(
        float(jax.jit(lambda: lyapunov(f, INIT, XS[:128]))()), rel=1e-5
    )
    seconds = [row.seconds for row in choice.table]
    assert seconds == sorted(seconds) and len(seconds) == 5
    newton = next(row for row in choice.table if isinstance(row.method, Newton))
    assert 2 <= newton.iterations <= 8 and "measured" in newton.note
    assert (
        f"{type(choice.method).__name__} for 4096 steps on gpu" in str(choice)
        and "exponent -" in choice.reason
    )


def test_shooting_takes_as_many_passes_as_blocks_until_a_start_is_forgotten():
    passes = []
    for a in (0.1, 0.9):
        choice = choose(gated(a), INIT, 0 * XS, platform="gpu")
        row = next(row for row in choice.table if isinstance(row.method, GaussSeidel))
        passes.append(row.iterations)
        _, _, stats = parallel_scan(
            gated(a), INIT + 0.5, 0 * XS[:2048], method=row.method, with_stats=True, atol=1e-6
        )
        assert stats.converged and int(stats.iterations) <= row.iterations + 2
    assert passes == [1, 3]


def test_a_chaotic_one_is_not():
    choice = choose(logistic, jnp.array(0.3), None, TIME, platform="gpu")
    assert choice.exponent == pytest.approx(0.69, abs=0.1)
    assert isinstance(choice.method, ParallelBackward) and "errors grow" in choice.reason
    without = choose(logistic, jnp.array(0.3), None, TIME, platform="gpu", gradient=False)
    assert isinstance(without.method, Sequential | ParallelBackward)


@pytest.mark.parametrize("rounds", [True, False])
def test_a_state_that_is_rounded_inside_is_run_sequentially(rounds):
    """Iterates of a float32 state that passes through bfloat16 differ by its rounding for ever; outputs may be."""

    def f(h, x):
        new = jnp.tanh(0.5 * (h.astype(jnp.bfloat16).astype(jnp.float32) if rounds else h) + x)
        return new, new.astype(jnp.bfloat16)

    choice = choose(jax.jit(f), INIT, XS, platform="gpu")
    row = next(row for row in choice.table if isinstance(row.method, GaussSeidel))
    assert ("narrower type" in row.note) == rounds
    assert isinstance(choice.method, Sequential | ParallelBackward) == rounds


def test_a_wide_dense_cell_is_run_sequentially():
    """Its Jacobians alone take longer than the loop: what a fused or cuDNN loop is for."""
    w = jnp.eye(512) * 0.5

    def f(h, x):
        h = jnp.tanh(w @ h + x)
        return h, h

    xs = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    seen = []

    def inside(xs):
        seen.append(choose(f, jnp.zeros(512), xs, platform="gpu", gradient=False))
        return xs

    jax.eval_shape(inside, xs)
    newton = next(row for row in seen[0].table if isinstance(row.method, Newton))
    assert (
        isinstance(seen[0].method, Sequential | ParallelBackward)
        and newton.seconds > seen[0].table[0].seconds
    )


def test_blocks_are_weighed_where_jacobians_are_too_dear():
    """A network of 64 over 16,384 steps: two iterations of Newton's method cost more than the loop, blocks do not."""
    w = jnp.eye(64) * 0.5

    def f(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    choice = explain(
        f, jnp.zeros((16, 64)), jnp.zeros((16_384, 16, 64)), platform="gpu", gradient=False
    )
    newton = next(row for row in choice.table if isinstance(row.method, Newton))
    loop = next(row for row in choice.table if isinstance(row.method, Sequential))
    assert isinstance(choice.method, GaussSeidel) and newton.seconds > loop.seconds

    def blind(h, x):
        h = jnp.tanh(h @ w + x) + 0.1 * jnp.round(h)
        return h, h

    choice = explain(
        blind, jnp.zeros((16, 64)), jnp.zeros((16_384, 16, 64)), platform="gpu", gradient=False
    )
    assert isinstance(choice.method, Sequential | ParallelBackward)


def test_short_sequences_and_cpus_are_run_sequentially():
    for length, platform in ((16, "gpu"), (TIME, "cpu")):
        choice = choose(gated(0.5), INIT, XS[:length], platform=platform, gradient=False)
        assert isinstance(choice.method, Sequential | ParallelBackward), choice


def test_parallel_scan_takes_the_choice_and_says_so():
    f = gated(0.5)
    want = jax.lax.scan(f, INIT, XS[:50])[1]
    eager = parallel_scan(f, INIT, XS[:50], method=Auto(), with_stats=True)
    assert_close(eager[1], want, 1e-5)
    assert eager[2].method == choose(f, INIT, XS[:50]).method
    traced = jax.jit(
        lambda xs: parallel_scan(
            f, INIT, xs, reverse=True, method=Auto(gradient=False), with_stats=True
        )
    )
    assert_close(traced(XS[:50])[1], jax.lax.scan(f, INIT, XS[:50], reverse=True)[1], 1e-5)
    assert isinstance(traced(XS[:50])[2].method, Sequential | ParallelBackward)


def test_traced_values_are_not_looked_at():
    seen = []

    def inside(xs):
        seen.append(choose(gated(0.5), INIT, xs, platform="gpu"))
        return xs

    jax.eval_shape(inside, XS)
    assert seen[0].exponent is None and isinstance(seen[0].method, Newton | GaussSeidel)
    assert "assumed" in seen[0].reason and "assumed" in seen[0].table[0].note
    jax.eval_shape(lambda: inside(XS))  # known inputs, but nothing can be run here
    assert seen[1].exponent is None


def test_every_constant_has_a_source_and_platforms_are_known():
    assert all(costs.source and min(costs[:-2]) > 0 for costs in COSTS.values())
    with pytest.raises(UsageError, match="no costs"):
        choose(gated(0.5), INIT, XS, platform="abacus")


def test_growth_counts_over_the_whole_sequence_and_not_over_the_steps_that_were_tried():
    """A hundredth of a nat a step is harmless over 128 steps, and e^40 over 4,000."""
    grown = choose(lambda h, x: (1.01 * h + x, h), jnp.zeros(2), XS[:4000, :2], platform="gpu")
    assert grown.exponent == pytest.approx(0.00995, rel=1e-3)
    tried = [row for row in grown.table if isinstance(row.method, Newton | GaussSeidel)]
    assert tried and all(row.seconds == float("inf") and "errors grow" in row.note for row in tried)
    calm = choose(lambda h, x: (1.0001 * h + x, h), jnp.zeros(2), XS[:4000, :2], platform="gpu")
    assert not any("errors grow" in row.note for row in calm.table)
