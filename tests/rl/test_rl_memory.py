"""Memories: a whole unroll at once, starts inside, equals one step after another, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.rl.memory import MEMORIES, WindowAttention, memory_of
from jaxpar.rl.network import Network
from jaxpar.solve import Newton

STEPS, LANES, WIDTH = 6, 3, 4
STARTS = np.zeros((STEPS, LANES), bool)
STARTS[0, 0] = STARTS[2, 1] = STARTS[3, 1] = STARTS[5, 2] = True  # at the first, in a row, at the last; none else


def one_after_another(memory, params, xs, carry):
    """Backpropagation through time: the carry is emptied by hand, and each call sees one step."""
    out, nothing = [], memory.initial(LANES)
    for x, start in zip(xs, STARTS, strict=True):
        carry = jax.tree.map(
            lambda new, old, start=start: jnp.where(start.reshape(-1, *[1] * (old.ndim - 1)), new, old), nothing, carry
        )
        y, carry, _ = memory.apply(params, x[None], np.zeros((1, LANES), bool), carry)
        out.append(y[0])
    return jnp.stack(out), carry


FAST = ("gru", "para_gru", "min_gru", "aaren", "s5", "attention")


@pytest.mark.parametrize("name", [pytest.param(m, marks=() if m in FAST else pytest.mark.slow) for m in MEMORIES])
def test_a_whole_unroll_equals_its_steps(name, x64):
    method = Newton() if name in ("gru", "para_gru") else None
    memory, stepwise = memory_of(name, WIDTH, method), memory_of(name, WIDTH)
    params = memory.init(jax.random.key(0), 5)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    xs = jax.random.normal(jax.random.key(1), (STEPS, LANES, 5), jnp.float64)
    carry = jax.tree.map(lambda x: x.astype(jnp.float64), memory.initial(LANES))
    # What lanes remember from before; the third uses it to the end.
    _, carry, _ = stepwise.apply(params, xs[:1] * 0.5, np.zeros((1, LANES), bool), carry)

    def loss(run, params, xs, carry):
        ys, last = run(params, xs, carry)
        return jnp.sum(ys * jnp.cos(jnp.arange(ys.size).reshape(ys.shape))), (ys, last)

    def whole(params, xs, carry):
        ys, last, converged = memory.apply(params, xs, STARTS, carry)
        return ys, last

    def steps(params, xs, carry):
        return one_after_another(stepwise, params, xs, carry)

    grads = [jit(jax.grad(lambda *a, run=run: loss(run, *a), (0, 1, 2), has_aux=True))(params, xs, carry)
             for run in (whole, steps)]  # fmt: skip
    assert_close(*grads, 1e-10)  # float64; Newton stops at a residual of about 1e-12


def test_the_past_before_a_start_is_forgotten():
    memory = memory_of("min_gru", WIDTH)
    params, xs = memory.init(jax.random.key(0), 5), jax.random.normal(jax.random.key(1), (STEPS, LANES, 5))
    slope = jax.grad(lambda xs: memory.apply(params, xs, STARTS, memory.initial(LANES))[0][3, 1].sum())(xs)
    assert np.abs(slope[3, 1]).max() > 0 and np.abs(slope[:3]).max() == 0


def test_attention_sees_its_window_and_nothing_before():
    memory = WindowAttention(8, window=3)
    params, xs = memory.init(jax.random.key(0), 5), jax.random.normal(jax.random.key(1), (6, 1, 5))
    starts = jnp.zeros((6, 1), bool)
    slope = jax.grad(lambda xs: memory.apply(params, xs, starts, memory.initial(1))[0][4, 0].sum())(xs)
    np.testing.assert_array_equal(np.abs(slope[:, 0]).max(1) > 0, [False, False, True, True, True, False])


def test_a_network_starts_orthogonal():
    network = Network(hidden=(16, 8), conv=(4,))
    params = network.init(jax.random.key(0), (5, 5, 2), {"value": (1, 1.0)})
    layers = params["heads"]["value"]["params"]
    for kernel, gain in ((layers["Dense_1"]["kernel"], np.sqrt(2)), (layers["out"]["kernel"], 1.0)):
        gram = np.asarray(kernel.T @ kernel)
        np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5)
    assert params["encoder"]["params"]["Conv_0"]["kernel"].shape == (3, 3, 2, 4)


def test_a_memory_of_any_width_feeds_the_heads():
    network = Network((), (8,), memory=WindowAttention(12, window=3), memory_size=64)
    params = network.init(jax.random.key(0), (5,), {"q": (2, 1.0)})
    out = network.apply(params, jnp.ones((4, 3, 5)), jnp.zeros((4, 3), bool), network.initial(3))
    assert out.heads["q"].shape == (4, 3, 2)
