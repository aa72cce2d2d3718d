"""Bytes moved and alive, against what one writes down for small programs."""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.aot.traffic import traffic_of

N = 64
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
ONE = 4 * N * N  # bytes of a square
PRODUCT = 2 * N**3


def traffic(fn, *args):
    return traffic_of(jax.make_jaxpr(fn)(*args).jaxpr)


def total(fn, *args):
    return traffic(fn, *args).bytes / ONE


@pytest.mark.parametrize(
    ("fn", "squares"),
    [
        (lambda x: jnp.tanh(jnp.sin(x) * 2 + 1), 2),  # one pass: read, write
        (lambda x, y: x + jnp.sin(y), 3),
        (lambda x: x @ x.T, 3),  # a product reads its transposed operand as it lies
        (lambda x: jnp.sin(x) @ x, 2 + 3),  # the sine is written for the product
        (lambda x, y: (x + y, x - y), 4),  # results that share their sources read them once
        (
            lambda x: (x - x.mean(1, keepdims=True)) @ x,
            2 + 3,
        ),  # a row's statistics stay in the pass
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, 5)[0], 5 * 3),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x), 2 * 3),
    ],
)
def test_bytes(fn, squares):
    count = fn.__code__.co_argcount
    assert total(fn, *[SQUARE] * count) == pytest.approx(squares, rel=0.02)


def test_what_many_need_is_written_once():
    def shared(x, *ys):
        h = jnp.sin(x) + sum(ys[:3])  # four squares to read
        return [jnp.cos(h * i) @ x for i in range(6)]

    # h: 4 reads and a write; then each cosine reads it and is written, and each product takes three squares.
    assert total(shared, SQUARE, SQUARE, SQUARE, SQUARE) == pytest.approx(
        5 + 6 * 2 + 6 * 3, rel=0.02
    )


def test_a_block_of_an_array_costs_the_block():
    rows = jax.ShapeDtypeStruct((100 * N, N), jnp.float32)
    assert total(lambda x: jax.lax.dynamic_slice_in_dim(x, 3, N) * 2, rows) == pytest.approx(
        2, rel=0.02
    )
    assert total(
        lambda x, y: jax.lax.dynamic_update_slice(x, y, (0, 0)), rows, SQUARE
    ) == pytest.approx(2, rel=0.02)


def test_kernels_are_bound_one_by_one():
    found = traffic(lambda x: jnp.sin(x @ x), SQUARE)
    assert found.flops == PRODUCT
    # A second a product's operations, and none its bytes; the sine's bytes take one second more.
    assert found.seconds(PRODUCT, 2 * ONE) == pytest.approx(1.5 + 1.0, rel=0.02)
    assert found.seconds(PRODUCT, 1e9 * ONE) == pytest.approx(1.0, rel=0.02)


def test_peak_is_what_is_alive_at_once():
    def chain(x):
        for _ in range(10):
            x = jnp.sin(x) @ x
        return x

    assert traffic(chain, SQUARE).peak / ONE == pytest.approx(
        3, rel=0.02
    )  # a product, its operands' sine and input

    def kept(x):
        parts = [x @ (x * i) for i in range(10)]
        return sum(part @ x for part in reversed(parts))

    assert 10 <= traffic(kept, SQUARE).peak / ONE <= 22


@pytest.mark.parametrize("remat, squares", [(False, 2 * 30), (True, 30)])
def test_the_backward_pass_keeps_what_it_must(remat, squares):
    def layer(x, w):
        return jnp.sin(x @ w), None

    body = jax.checkpoint(layer) if remat else layer
    weights = jax.ShapeDtypeStruct((30, N, N), jnp.float32)

    def loss(weights, x):
        return jax.lax.scan(body, x, weights)[0].sum()

    # Inputs of 30 layers, and without recomputation the cosines, too; and the gradients of 30 weights, a result.
    found = traffic(jax.grad(loss), weights, SQUARE)
    assert found.peak / ONE == pytest.approx(squares + 30, rel=0.15)
