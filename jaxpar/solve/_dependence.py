"""Which axes of a function's outputs follow which axes of its inputs, read off its jaxpr.

A relation says of one value, for each input that it depends on, where each axis of that input is found in the value:
at axis p, so that the value at an index depends only on the input at the same index along p, or lost. What is lost
because a known primitive mixes entries (a product, a sum) is certain; what is lost in a primitive that has no rule here
is not.

`structure` applies this to the derivative of f, a linear program, so that the relations are exactly the pattern of the
Jacobian: integers, comparisons and `stop_gradient` have no part in it, and custom derivatives are what they say.
`carries` applies it to f itself: there a comparison carries values on, and so does what a loop or a branch turns on.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxpar.lower.jaxprs import CALLS, array_of, called, opened
from jaxpar.types import UsageError


@dataclasses.dataclass(frozen=True)
class Lost:
    """An axis along which entries are coupled.

    Attributes:
      by: The primitive that lost it.
      certain: Whether that primitive is known to couple entries, whatever its operands hold.
    """

    by: str
    certain: bool


Relation = dict[int, tuple[int | Lost, ...]]
"""Number of an input -> for each of its axes, the axis of the value that follows it."""

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma imag "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not optimization_barrier "
    "or pcast pow pvary real reduce_precision rem round rsqrt select_n sharding_constraint sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
_REDUCTIONS = set(
    "reduce_sum reduce_max reduce_min reduce_prod argmax argmin reduce_and reduce_or".split()
)
_RUNNING = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
}
_RUNNING |= {"sort": "dimension", "concatenate": "dimension", "split": "axis"}


def relations(jaxpr: Jaxpr, inputs: Sequence[Relation]) -> list[Relation]:
    """Returns the relation of each output of a jaxpr, given those of its inputs; constants have none."""
    known: dict[Any, Relation] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom) -> Relation:
        return {} if isinstance(atom, Literal) else known.get(atom, {})

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if any(operands):
            known.update(zip(eqn.outvars, _after(eqn, operands), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def join(*parts: Relation) -> Relation:
    """Returns the relation of a value whose every entry depends on the entries of `parts` at the same place."""
    joined: Relation = {}
    for part in parts:
        for leaf, axes in part.items():
            joined[leaf] = tuple(map(_meet, joined[leaf], axes)) if leaf in joined else axes
    return joined


def _meet(a: int | Lost, b: int | Lost) -> int | Lost:
    if a == b:
        return a
    lost = [side for side in (a, b) if isinstance(side, Lost)]
    return (
        max(lost, key=lambda side: side.certain) if lost else Lost("a sum of different axes", True)
    )


def _moved(relation: Relation, where: Callable[[int], int | Lost]) -> Relation:
    """Returns a relation whose axes have moved."""
    return {
        leaf: tuple(axis if isinstance(axis, Lost) else where(axis) for axis in axes)
        for leaf, axes in relation.items()
    }


def _after(eqn: JaxprEqn, operands: list[Relation]) -> list[Relation]:
    """Returns the relations of what one equation computes."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return relations(called(eqn)[0], operands)
    if name in _LOOPS:
        return _LOOPS[name](eqn, operands)
    if name == "custom_lin":
        raise UsageError(
            "f calls a function with a custom_vjp, which has no forward derivative; "
            "define it with custom_jvp, or use method=Sequential()."
        )
    outs = len(eqn.outvars)
    if name in ELEMENTWISE:
        return [join(*operands)] if outs == 1 else operands
    if name == "dot_general":
        return [join(*(_moved(part, _product(eqn, side)) for side, part in enumerate(operands)))]
    if name in _RUNNING:
        at, lost = params[_RUNNING[name]], Lost(name, True)
        return [join(*(_moved(part, lambda p: lost if p == at else p) for part in operands))] * outs
    if name in ("pad", "dynamic_update_slice", "select_and_scatter_add", "scatter", "scatter-add"):
        return [join(*(_moved(part, _kept_axes(eqn, side)) for side, part in enumerate(operands)))]
    where = _AXES[name](eqn) if name in _AXES else lambda p: Lost(name, False)
    return [join(*(_moved(part, where) for part in operands))] * outs


def _kept_axes(eqn: JaxprEqn, side: int) -> Callable[[int], int | Lost]:
    """Axes that keep their size and place; of a scatter none is sure to."""
    name, shape = eqn.primitive.name, array_of(eqn.invars[side]).shape
    if name == "pad":
        plain = [config == (0, 0, 0) for config in eqn.params["padding_config"]]
    elif name == "dynamic_update_slice":
        plain = [a == b for a, b in zip(shape, array_of(eqn.outvars[0]).shape, strict=True)]
    else:
        plain = [False] * len(shape)
    return lambda p: p if p < len(plain) and plain[p] else Lost(name, False)


def _product(eqn: JaxprEqn, side: int) -> Callable[[int], int | Lost]:
    contract, batch = eqn.params["dimension_numbers"]
    shapes = [array_of(var).shape for var in eqn.invars]
    free = [
        [p for p in range(len(shapes[s])) if p not in contract[s] and p not in batch[s]]
        for s in range(2)
    ]
    first = len(batch[0]) + (len(free[0]) if side else 0)
    place = {p: number for number, p in enumerate(batch[side])}
    place |= {p: first + number for number, p in enumerate(free[side])}
    return lambda p: place.get(p, Lost("dot_general", True))


def _broadcast(eqn):
    dims, before, after = (
        eqn.params["broadcast_dimensions"],
        eqn.invars[0].aval.shape,
        array_of(eqn.outvars[0]).shape,
    )
    return lambda p: dims[p] if before[p] == after[dims[p]] else Lost("broadcast_in_dim", True)


def _reshape(eqn):
    before, after = eqn.invars[0].aval.shape, array_of(eqn.outvars[0]).shape

    def where(p):
        ahead = math.prod(before[:p])
        same = [
            q for q, size in enumerate(after) if size == before[p] and math.prod(after[:q]) == ahead
        ]
        return same[0] if same else Lost("reshape", before[p] > 1)

    return where


def _removed(axes, certain):
    def rule(eqn):
        gone = set(eqn.params[axes])
        return lambda p: (
            Lost(eqn.primitive.name, certain) if p in gone else p - sum(q < p for q in gone)
        )

    return rule


def _sliced(eqn):
    before, after = eqn.invars[0].aval.shape, array_of(eqn.outvars[0]).shape
    return lambda p: p if before[p] == after[p] else Lost(eqn.primitive.name, True)


def _gather(eqn):
    """Axes of which every slice takes the whole, and which no index chooses."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window = [p for p in range(len(sizes)) if p not in gone]
    place = dict(zip(window, numbers.offset_dims, strict=True))
    whole = {p for p in window if sizes[p] == eqn.invars[0].aval.shape[p]}
    return lambda p: place[p] if p in whole else Lost("gather", False)


def _reversed(eqn):
    return lambda p: Lost("rev", True) if p in eqn.params["dimensions"] else p


_AXES: dict[str, Callable[[Any], Callable[[int], int | Lost]]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _removed("dimensions", False),
    "transpose": lambda eqn: eqn.params["permutation"].index,
    "slice": _sliced,
    "dynamic_slice": _sliced,
    "gather": _gather,
    "rev": _reversed,
    **{name: _removed("axes", True) for name in _REDUCTIONS},
}


def _fixed_point(
    body: Callable[[list[Relation]], list[Relation]], carry: list[Relation]
) -> list[Relation]:
    """Returns what the carry of a loop depends on after any number of rounds; axes only ever get lost."""
    while True:
        after = [join(a, b) for a, b in zip(carry, body(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def _ruled(name: str, ruler: Relation, results: list[Relation]) -> list[Relation]:
    """Returns the relations of results that control flow by `ruler` chooses: every entry depends on all of it."""
    lost = Lost(name, True)
    whole: Relation = {leaf: (lost,) * len(axes) for leaf, axes in ruler.items()}
    return [join(result, whole) for result in results]


def _while(eqn, operands):
    params = eqn.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    test, consts, carry = operands[:first], operands[first:last], operands[last:]

    def after(carry):
        [goes_on] = relations(opened(params["cond_jaxpr"]), [*test, *carry])
        return _ruled("while", goes_on, relations(opened(params["body_jaxpr"]), [*consts, *carry]))

    return _fixed_point(after, carry)


def _scan(eqn, operands):
    body, lost = opened(eqn.params["jaxpr"]), Lost("scan", True)
    # What is scanned over, or stacked, has an axis more than the body sees; the names of the counts depend on JAX.
    num_xs = sum(
        array_of(a).ndim > array_of(b).ndim for a, b in zip(eqn.invars, body.invars, strict=True)
    )
    num_carry = sum(
        array_of(a).ndim == array_of(b).ndim for a, b in zip(eqn.outvars, body.outvars, strict=True)
    )
    num_consts = len(operands) - num_carry - num_xs
    consts, xs = operands[:num_consts], operands[num_consts + num_carry :]
    rows = [_moved(part, lambda p: p - 1 if p else lost) for part in xs]

    def after(carry):
        return relations(body, [*consts, *carry, *rows])

    carry = _fixed_point(
        lambda carry: after(carry)[:num_carry], operands[num_consts : num_consts + num_carry]
    )
    return [*carry, *(_moved(part, lambda p: p + 1) for part in after(carry)[num_carry:])]


def _cond(eqn, operands):
    results = [relations(opened(branch), operands[1:]) for branch in eqn.params["branches"]]
    return _ruled("cond", operands[0], [join(*parts) for parts in zip(*results, strict=True)])


_LOOPS = {"while": _while, "scan": _scan, "cond": _cond}
