"""Readers of jaxprs: calls opened, dead equations left out, and an interpreter beside JAX's own evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.lower.jaxprs import CALLS, called, inner_jaxpr, interpret, live_equations

X, Y = jnp.arange(1.0, 4.0), jnp.float32(0.5)
TABLE = np.array([2.0, -1.0, 4.0], np.float32)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (doubled(x), None), lambda _, t: (2 * t,))

ONE_CALL = {
    "jit": jax.jit(jnp.sin),
    "checkpoint": jax.checkpoint(jnp.sin),
    "custom_jvp": jax.nn.relu,
    "custom_vjp": doubled,
}


def nested(x, y):
    """Calls in calls, constants of each, literals, a dead equation, and a result that is an argument."""
    inner = jax.checkpoint(lambda x: jax.nn.relu(x - TABLE) + doubled(y))
    jnp.cos(x)
    return jax.jit(lambda x: inner(x) * TABLE - 3)(x), y, jnp.float32(7)


def evaluated(equation, values):
    """A rule that computes, and that opens every call."""
    if equation.primitive.name in CALLS:
        return None
    results = equation.primitive.bind(*values, **equation.params)
    return results if equation.primitive.multiple_results else [results]


@pytest.mark.parametrize("name", ONE_CALL)
def test_every_kind_of_call_is_known_and_opened(name):
    (equation,) = jax.make_jaxpr(ONE_CALL[name])(X).eqns
    assert equation.primitive.name in CALLS
    jaxpr, consts = called(equation)
    assert jaxpr is inner_jaxpr(equation) and jaxpr.eqns
    results = interpret(jaxpr, consts, [X], evaluated, lambda value, _: value)
    np.testing.assert_array_equal(results[0], ONE_CALL[name](X))


def test_what_is_no_call_holds_one_jaxpr_or_none():
    def program(x):
        x = jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)
        x = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
        return jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=2)[0]

    found = {eqn.primitive.name: inner_jaxpr(eqn) for eqn in jax.make_jaxpr(program)(X).eqns}
    assert found["while"] is found["cond"] is None and not CALLS & {"while", "cond", "scan"}
    assert [eqn.primitive.name for eqn in found["scan"].eqns] == ["mul"]


def test_the_interpreter_equals_the_function():
    closed = jax.make_jaxpr(nested)(X, Y)
    seen = []

    def rule(equation, values):
        seen.append(equation.primitive.name)
        return evaluated(equation, values)

    def constant(value, like):
        assert np.shape(value) == like.shape
        return jnp.asarray(value, like.dtype)

    found = interpret(closed.jaxpr, closed.consts, [X, Y], rule, constant)
    for got, want in zip(found, nested(X, Y), strict=True):
        assert isinstance(got, jax.Array)  # a literal too went through `constant`
        np.testing.assert_array_equal(got, want)
    assert "cos" not in seen and {"sub", "mul", "max"} <= set(seen)


def test_equations_are_alive_through_others_and_in_order():
    def program(x):
        a = jnp.sin(x)
        b = jnp.cos(x)
        jnp.tan(b)
        return jnp.exp(b), jnp.float32(0), jnp.log(a)

    names = [eqn.primitive.name for eqn in live_equations(jax.make_jaxpr(program)(X).jaxpr)]
    assert names == ["sin", "cos", "exp", "log"]
