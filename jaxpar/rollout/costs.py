"""How much a reset costs beside a step: read off their programs when they are traced, to choose the reset policy."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpar.types import PyTree

_DRAW = 100  # operations of one Threefry block
_UNKNOWN = 10  # assumed iterations of a loop whose length the program does not tell


def operations(fn: Callable, *args: PyTree) -> float:
    """Scalar operations of `fn(*args)`, roughly: the sizes of all results, with products and draws at their price.

    The arguments may be abstract. Costs one trace.
    """
    return _of(jax.make_jaxpr(fn)(*args).jaxpr)


def _of(jaxpr: Jaxpr) -> float:
    return sum(map(_equation, jaxpr.eqns))


def _equation(eqn: JaxprEqn) -> float:
    name, params = eqn.primitive.name, eqn.params
    size = sum(math.prod(_shape(v)) for v in eqn.outvars)
    if name in ("random_bits", "random_split", "random_fold_in", "random_seed", "threefry2x32"):
        return _DRAW * size
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        return 2.0 * size * math.prod(_shape(eqn.invars[0])[dim] for dim in contract)
    if name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        return 2.0 * size * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    if name == "sort":
        return size * math.log2(size + 2)
    inner = [_of(jaxpr) for jaxpr in _inner(params)]
    if not inner:
        return size
    if name == "cond":
        return max(inner)
    return sum(inner) * {"scan": params.get("length", 1), "while": _UNKNOWN}.get(name, 1)


def _shape(atom: Var | Literal) -> tuple[int, ...]:
    return cast(ShapedArray, atom.aval).shape


def _inner(params: Mapping[str, object]) -> Iterator[Jaxpr]:
    """The jaxprs that an equation runs, closed or not, alone or in a tuple."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield item.jaxpr if isinstance(item, ClosedJaxpr) else item
