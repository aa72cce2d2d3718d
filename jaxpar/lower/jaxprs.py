"""Walks of jaxprs: which equations matter, what a call holds, and an interpreter whose values are its user's.

A value may be anything that a rule can make of an equation's operands: a Triton variable (`jaxpar.solve`), an array of
numbers (`jaxpar.neat`), JAX's own tracers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal

__all__ = ["CALLS", "called", "inner_jaxpr", "interpret", "live_equations", "opened"]

CALLS = frozenset(("jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"))
"""Primitives that run one jaxpr once, on their own operands, and return its results."""


def opened(jaxpr: Any) -> Any:
    """Returns a jaxpr, closed or not, without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner_jaxpr(equation: Any) -> Any:
    """Returns the one jaxpr that an equation holds, without its constants; None where it holds none, or several.

    That of a call, of a `shard_map`, of a kernel and of a scan's step; a while loop and a conditional have several.
    """
    inner = _inner(equation)
    return None if inner is None else opened(inner)


def called(equation: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the jaxpr that an equation of `CALLS` calls, and its constants."""
    inner = _inner(equation)
    return opened(inner), getattr(inner, "consts", ())


def _inner(equation: Any) -> Any:
    found = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr"))
    return next((jaxpr for jaxpr in found if jaxpr is not None), None)


def live_equations(jaxpr: Any) -> list[Any]:
    """Returns the equations that the results of a jaxpr need, in their order."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    live = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            live.append(equation)
            needed.update(var for var in equation.invars if not isinstance(var, Literal))
    return live[::-1]


def interpret(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    rule: Callable[[Any, list[Any]], Sequence[Any] | None],
    constant: Callable[[Any, Any], Any],
) -> list[Any]:
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
    names |= {var: constant(const, var.aval) for var, const in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> Any:
        return constant(atom.val, atom.aval) if isinstance(atom, Literal) else names[atom]

    for equation in live_equations(jaxpr):
        values = [read(atom) for atom in equation.invars]
        results = rule(equation, values)
        if results is None:
            results = interpret(*called(equation), values, rule, constant)
        names.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
