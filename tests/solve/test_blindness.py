"""Parts of a step that its derivative does not see, and those that only look like it."""

import jax
import jax.numpy as jnp
import pytest

from jaxpar.solve.blindness import blind_leaves
from jaxpar.solve.program import trace


@jax.custom_jvp
def silent(v):
    return v * v


silent.defjvp(lambda primals, tangents: (silent(*primals), jnp.zeros_like(primals[0])))


def causes(f):
    """Returns the texts of the blind parts of a step on three numbers."""
    traced = trace(lambda h, x: (f(h, x), None), jnp.ones(3), jnp.ones((2, 3)), None)
    [found] = blind_leaves(traced.recurrence.jaxpr, 1)
    return {cause.text for cause in found}


def root(x):
    inside = jnp.where(x > 0, x, 1.0)
    return jnp.where(x > 0, jnp.sqrt(inside), 0.0)


def length(x):
    square = jnp.sum(x * x)
    safe = jnp.where(square == 0, 1.0, square)
    return jnp.where(square == 0, 0.0, jnp.sqrt(safe))


def huber(x):
    return jnp.where(jnp.abs(x) < 1, 0.5 * x * x, jnp.abs(x) - 0.5)


def shrunk(h):
    return jnp.where(h > 0.5, h - 0.5, jnp.where(h < -0.5, h + 0.5, 0.0))


SEEING = {
    "relu": lambda h, x: jnp.where(h > 0, h, 0.0) + x,
    "jax's relu": lambda h, x: jax.nn.relu(h) + x,
    "leaky relu": lambda h, x: jax.nn.leaky_relu(h) + x,
    "elu": lambda h, x: jax.nn.elu(h) + x,
    "selu": lambda h, x: jax.nn.selu(h) + x,
    "gelu": lambda h, x: jax.nn.gelu(h) + x,
    "silu": lambda h, x: jax.nn.silu(h) + x,
    "softplus": lambda h, x: jax.nn.softplus(h) + x,
    "hard tanh": lambda h, x: jax.nn.hard_tanh(h) + x,
    "clip": lambda h, x: jnp.clip(h, -1, 1) + x,
    "abs": lambda h, x: jnp.abs(h) + x,
    "a Huber loss": lambda h, x: h - 0.1 * huber(h - x),
    "a root with a guard": lambda h, x: root(h) + x,
    "a norm with a guard": lambda h, x: h / (1 + length(h)) + x,
    "a clipped norm": lambda h, x: jnp.where(length(h) > 1, h / length(h), h) + x,
    "softmax": lambda h, x: jax.nn.softmax(h) + x,
    "log-sum-exp": lambda h, x: jax.scipy.special.logsumexp(h) + x * h,
    "a dead zone": lambda h, x: 0.9 * h + shrunk(h),
    "a sorted state": lambda h, x: jnp.sort(h) + x,
    "a select by an input": lambda h, x: jnp.where(x > 0, 0.0, h),
    "nan_to_num": lambda h, x: jnp.nan_to_num(h) + x,
    "a linear system": lambda h, x: jnp.linalg.solve(jnp.eye(3) + jnp.outer(h, h), h) + x,
    "a scan": lambda h, x: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), h, None, 3)[0] + x,
}
BLIND = {
    "round": (lambda h, x: jnp.round(h) + x, "round"),
    "floor": (lambda h, x: 0.5 * h + jnp.floor(h), "floor"),
    "sign": (lambda h, x: h + jnp.sign(h), "sign"),
    "a comparison as a number": (lambda h, x: h + (h > 0), "gt"),
    "a cast": (lambda h, x: h + h.astype(jnp.int32), "a cast to int32"),
    "a spike": (lambda h, x: jnp.where(h > 1, 0.0, 0.9 * h + x), "a select"),
    "a stopped gradient": (lambda h, x: 0.5 * h + jax.lax.stop_gradient(h), "stop_gradient"),
    "a derivative of zero": (lambda h, x: 0.5 * h + silent(h), "the derivative of silent"),
    "a remainder": (lambda h, x: jnp.mod(h + x, 1.0), "rem"),
    "a small jump": (lambda h, x: jnp.where(h > 1e6, h + 0.01, h), "a select"),
    "a small threshold": (lambda h, x: jnp.where(h > 5e-8, 0.5 * h, 0.25 * h), "a select"),
    "an index": (lambda h, x: h + jnp.arange(3) * jnp.argmax(h), "argmax"),
    "one point": (lambda h, x: jnp.where(h == 0, 1.0, 0.5 * h), "a select"),
    "a branch": (
        lambda h, x: jax.lax.cond(h[0] > 0, lambda h: 0.5 * h, lambda h: h + 1, h),
        "the choice",
    ),
    "rounds": (
        lambda h, x: jax.lax.while_loop(lambda c: c[0] > 1, lambda c: c / 2, h),
        "the number",
    ),
    "an order": (lambda h, x: h[jnp.argsort(x + h)], "sort"),
    "straight through": (lambda h, x: h + jax.lax.stop_gradient(jnp.round(h) - h), "round"),
    "inside of a scan": (
        lambda h, x: jax.lax.scan(lambda c, _: (jnp.round(c), None), h, None, 3)[0],
        "round",
    ),
}


@pytest.mark.parametrize("name", SEEING)
def test_what_only_bends_is_not_blind(name):
    assert causes(SEEING[name]) == set()


@pytest.mark.parametrize("name", BLIND)
def test_what_jumps_or_is_flat_is_blind(name):
    f, text = BLIND[name]
    assert any(found.startswith(text) for found in causes(f))


def test_a_leaf_that_is_made_of_a_blind_one_is_not_blind():
    """The heater is found to the bit, and the temperature is smooth given the heater."""

    def f(h, x):
        warmth, heater = h
        heater = jnp.where(warmth < 19, 1.0, jnp.where(warmth > 21, 0.0, heater))
        return (0.99 * warmth + heater + x, heater), None

    traced = trace(f, (20.0, 0.0), jnp.ones(2), None)
    warmth, heater = blind_leaves(traced.recurrence.jaxpr, 2)
    assert heater and not warmth


def test_two_leaves_of_one_blind_part_are_both_blind():
    def f(h, x):
        spike = (h[0] > 1).astype(h[0].dtype)
        return (0.9 * h[0] + x - spike, 0.5 * h[1] + spike), None

    traced = trace(f, (0.0, 0.0), jnp.ones(2), None)
    assert all(blind_leaves(traced.recurrence.jaxpr, 2))


def test_a_leaf_is_blind_by_what_reaches_it():
    def f(h, x):
        seen, count = h
        return (jnp.tanh(seen + x), jnp.floor(count + seen)), None

    traced = trace(f, (0.0, 0.0), jnp.ones(2), None)
    seen, count = blind_leaves(traced.recurrence.jaxpr, 2)
    assert not seen and {cause.leaves for cause in count} == {frozenset({0, 1})}
