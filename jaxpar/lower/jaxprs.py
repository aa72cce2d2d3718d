"""Readers of jaxprs: which equations matter, what a call holds, and an interpreter whose values are its user's.

A value may be anything that a rule can make of an equation's operands: a Triton variable (`jaxpar.solve`), an array of
numbers (`jaxpar.neat`), JAX's own tracers.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike

__all__ = [
    "CALLS",
    "array_of",
    "called",
    "equation_names",
    "evaluate_equation",
    "inner_jaxpr",
    "interpret",
    "live_equations",
    "opened",
    "primitive_names",
]

Value = TypeVar("Value")

CALLS = frozenset(
    ("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
)
"""Primitives that run one jaxpr once, on their own operands, and return its results."""


def array_of(atom: Var | Literal) -> ShapedArray:
    """Returns shape and dtype of an operand or a result, which all have but tokens."""
    return cast(ShapedArray, atom.aval)


def opened(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """Returns a jaxpr, closed or not, without its constants."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner_jaxpr(equation: JaxprEqn) -> Jaxpr | None:
    """Returns the one jaxpr that an equation holds, without its constants; None where it holds none, or several.

    That of a call, of a `shard_map`, of a kernel and of a scan's step; a while loop and a conditional have several.
    """
    inner = _inner(equation)
    return None if inner is None else opened(inner)


def called(equation: JaxprEqn) -> tuple[Jaxpr, Sequence[Array]]:
    """Returns the jaxpr that an equation of `CALLS` calls, and its constants."""
    inner = _inner(equation)
    assert inner is not None  # every primitive of `CALLS` holds one
    return opened(inner), inner.consts if isinstance(inner, ClosedJaxpr) else ()


def _inner(equation: JaxprEqn) -> Jaxpr | ClosedJaxpr | None:
    found = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr"))
    return next((jaxpr for jaxpr in found if jaxpr is not None), None)


def primitive_names(jaxpr: Jaxpr) -> set[str]:
    """Returns the names of all primitives of a jaxpr, and of the jaxprs in its equations."""
    names = set()
    for equation in jaxpr.eqns:
        names |= equation_names(equation)
    return names


def equation_names(equation: JaxprEqn) -> set[str]:
    """Returns the name of an equation's primitive, and of those in the jaxprs that it holds."""
    names = {equation.primitive.name}
    for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(parameter):
            names |= primitive_names(opened(parameter))
    return names


def _is_jaxpr(parameter: object) -> bool:
    return isinstance(parameter, Jaxpr | ClosedJaxpr)


def evaluate_equation(equation: JaxprEqn, arguments: Sequence) -> list:
    """Returns the results of an equation for these arguments."""
    primitive = equation.primitive
    params: Any = primitive.get_bind_params(equation.params)
    functions = ()
    if isinstance(params, tuple):  # jax 0.10 returns the functions of a call apart
        functions, params = params
    out = primitive.bind(*functions, *arguments, **params)
    if primitive.multiple_results:
        return out
    return [out]


def live_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Returns the equations that the results of a jaxpr need, in their order."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    live = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            live.append(equation)
            needed.update(var for var in equation.invars if not isinstance(var, Literal))
    return live[::-1]


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[Array],
    inputs: Sequence[Value],
    rule: Callable[[JaxprEqn, list[Value]], Sequence[Value] | None],
    constant: Callable[[ArrayLike, ShapedArray], Value],
) -> list[Value]:
    """Returns the values of a jaxpr's results, of its live equations only.

    Args:
      jaxpr: Without its constants.
      consts: The constants.
      inputs: A value for each argument.
      rule: `(equation, values of its operands) -> values of its results`; None has a call of `CALLS` opened, and its
        equations interpreted in its place.
      constant: `(number or array, its abstract value) -> value` of constants and literals.
    """
    names = dict(zip(jaxpr.invars, inputs, strict=True))
    names |= {
        var: constant(const, array_of(var))
        for var, const in zip(jaxpr.constvars, consts, strict=True)
    }

    def read(atom: Var | Literal) -> Value:
        return constant(atom.val, array_of(atom)) if isinstance(atom, Literal) else names[atom]

    for equation in live_equations(jaxpr):
        values = [read(atom) for atom in equation.invars]
        results = rule(equation, values)
        if results is None:
            results = interpret(*called(equation), values, rule, constant)
        names.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
