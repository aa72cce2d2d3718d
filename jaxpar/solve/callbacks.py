"""Callbacks of a step that do not read its state: they run before the solve.

A solve differentiates a step by its state and, to estimate rounding, by its inputs. A callback has
no derivative, not even by inputs alone. So its results become inputs themselves.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxpar.lower.jaxprs import equation_names, evaluate_equation, interpret, primitive_names
from jaxpar.solve.program import Traced, trace
from jaxpar.solve.structure import Leaves
from jaxpar.types import Array

CALLBACK = "pure_callback"

OPENED = ("jit", "pjit", "closed_call")
"""Calls that may read the state apart from a callback that they hold."""


def with_callbacks_known(traced: Traced, length: int, axis_name: str | None) -> Traced:
    """Returns the recurrence with the results of callbacks that do not read the state as inputs.

    Cost: these callbacks run once a step, one after the other, as in the loop.
    """
    if CALLBACK not in primitive_names(traced.recurrence.jaxpr):
        return traced

    def f(before: Leaves, row: tuple) -> tuple[Leaves, Leaves]:
        x, known = row
        made = _run(traced, (*before, *x), known)[0]
        return tuple(made[: len(before)]), tuple(made[len(before) :])

    unknown = [None] * len(traced.init)

    def ahead(_, x: Leaves) -> tuple[None, list]:
        return None, _run(traced, (*unknown, *x), None)[1]

    known = jax.lax.scan(ahead, None, traced.xs, length)[1]
    if not jax.tree.leaves(known):
        return traced
    moved = trace(f, traced.init, (traced.xs, known), axis_name)
    return dataclasses.replace(moved, state_tree=traced.state_tree, output_tree=traced.output_tree)


def _run(traced: Traced, inputs: Sequence[Array | None], known: list | None) -> tuple[list, list]:
    """Returns what a step computes, and the results of each callback.

    Args:
      traced: The recurrence.
      inputs: Leaves of the state and of the input; None if unknown.
      known: Results of each callback, in their order; None for those to run. None runs all.
    """
    results = []

    def rule(equation: JaxprEqn, values: list) -> Sequence[Array | None] | None:
        name = equation.primitive.name
        has_callback = CALLBACK in equation_names(equation)
        if has_callback and name in OPENED:
            return None
        made = None
        if has_callback and known is not None:
            made = known[len(results)]
        if made is None and all(value is not None for value in values):
            made = evaluate_equation(equation, values)
        if has_callback:
            results.append(made)
        if made is None:
            return [None] * len(equation.outvars)
        return made

    def constant(value, like):
        if isinstance(value, jax.Array):  # such as random keys
            return value
        return jnp.asarray(value, like.dtype)

    recurrence = traced.recurrence
    return interpret(recurrence.jaxpr, traced.consts, inputs, rule, constant), results
