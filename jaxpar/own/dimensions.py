"""Which dimensions of a program are one: those that it adds, multiplies or compares entry by entry, or sums together.

`follow` reads a program equation by equation. A weight's output dimension and the next weight's input dimension come
out as one `Dimension`, and so do all that a residual stream passes through, the heads of attention, the vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpar.lower.jaxprs import CALLS, array_of, called, live_equations, opened

__all__ = ["Dimension", "follow"]


@dataclasses.dataclass
class Dimension:
    """What is known of dimensions that are one.

    Attributes:
      divisor: Greatest common divisor of their sizes, those before and after a reshape: what shares must divide.
      sums: Products and look-ups of the program's text that sum over it: sums over devices where it is split.
      whole: Why it cannot be split at no cost but these sums; "" if it can.
      batched: Whether a product has it as a batch dimension, as heads are.
      looked_up: Whether an index chooses along it, as a token does in a vocabulary.
      first: Number of the first product that reads or makes it.
    """

    divisor: int
    sums: int = 0
    whole: str = ""
    batched: bool = False
    looked_up: bool = False
    first: int = 2**31

    def taken_with(self, other: "Dimension") -> "Dimension":
        """Returns what is known of both, as one."""
        return Dimension(
            math.gcd(self.divisor, other.divisor),
            self.sums + other.sums,
            self.whole or other.whole,
            self.batched or other.batched,
            self.looked_up or other.looked_up,
            min(self.first, other.first),
        )


Names = tuple[int, ...]  # of an array: a number for each dimension, known to `_Dimensions`


def follow(jaxpr: ClosedJaxpr, whole: Sequence[str]) -> list[tuple[Dimension, ...]]:
    """Returns the dimensions of each argument of a program; two that are one are the same object.

    Args:
      jaxpr: The program.
      whole: For each argument why its dimensions stay as they are, as those of a batch do; "" for a parameter.

    Returns:
      A tuple for each argument, one `Dimension` for each of its dimensions. Those of size 1 are never another.
    """
    known = _Dimensions()
    inputs = [
        known.fresh(array_of(var).shape, why)
        for var, why in zip(jaxpr.jaxpr.invars, whole, strict=True)
    ]
    known.walk(jaxpr.jaxpr, inputs)
    return [tuple(known.of(number) for number in names) for names in inputs]


class _Dimensions:
    """Sets of dimensions that are one, joined while a program is read."""

    def __init__(self):
        self.parents: list[int] = []
        self.sizes: list[int] = []
        self.facts: dict[int, Dimension] = {}
        self.products = 0

    def fresh(self, shape: Sequence[int], whole: str = "") -> Names:
        start = len(self.parents)
        for size in shape:
            self.facts[len(self.parents)] = Dimension(size, whole=whole)
            self.parents.append(len(self.parents))
            self.sizes.append(size)
        return tuple(range(start, len(self.parents)))

    def find(self, number: int) -> int:
        while self.parents[number] != number:
            self.parents[number] = self.parents[self.parents[number]]
            number = self.parents[number]
        return number

    def of(self, number: int) -> Dimension:
        return self.facts[self.find(number)]

    def join(self, one: int, other: int) -> None:
        if 1 in (self.sizes[one], self.sizes[other]):  # it is repeated along the other
            return
        one, other = self.find(one), self.find(other)
        if one != other:
            self.parents[other] = one
            self.facts[one] = self.facts[one].taken_with(self.facts.pop(other))

    def join_all(self, ones: Names, others: Names) -> None:
        for one, other in zip(ones, others, strict=True):
            self.join(one, other)

    def keep(self, names: Sequence[int], why: str) -> None:
        for number in names:
            if self.sizes[number] > 1:
                self.of(number).whole = self.of(number).whole or why

    def walk(self, jaxpr: Jaxpr, inputs: Sequence[Names]) -> list[Names]:
        """Reads a jaxpr and returns the dimensions of its results."""
        names = dict(zip(jaxpr.invars, inputs, strict=True))
        names |= {var: self.fresh(array_of(var).shape) for var in jaxpr.constvars}

        def read(atom) -> Names:
            return self.fresh(array_of(atom).shape) if isinstance(atom, Literal) else names[atom]

        for equation in live_equations(jaxpr):
            results = self.results(equation, [read(atom) for atom in equation.invars])
            names |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def results(self, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
        name = equation.primitive.name
        if name in CALLS:
            return self.walk(called(equation)[0], ins)
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, equation, ins)
        shapes = [array_of(var).shape for var in equation.outvars]
        if name.startswith("reduce_") and "axes" in equation.params or name in ("argmax", "argmin"):
            kept = [i for i in range(len(ins[0])) if i not in equation.params["axes"]]
            return [tuple(operand[i] for i in kept) for operand in ins[: len(shapes)]]
        if name.startswith("random_") or name in ("iota", "rng_bit_generator"):
            return [self.fresh(shape) for shape in shapes]
        if name in _MIXING or _holds_programs(equation) or any(
            not _entrywise(array_of(atom).shape, shapes[0]) for atom in equation.invars
        ):  # fmt: skip
            for operand in ins:
                self.keep(operand, f"passes through {name}")
            return [self.fresh(shape, f"comes out of {name}") for shape in shapes]
        first = self.fresh(shapes[0])
        for operand in ins:
            if operand:
                self.join_all(first, operand)
        return [first if shape == shapes[0] else self.fresh(shape) for shape in shapes]

    def product(self, summed: Sequence[int], around: Sequence[int]) -> None:
        """Notes a product or a look-up that sums over some dimensions and has the others of its operands around."""
        self.products += 1
        for number in (*summed, *around):
            self.of(number).first = min(self.of(number).first, self.products)
        for number in {self.find(number) for number in summed}:
            self.facts[number].sums += 1


# Entries along a dimension are brought together in other ways than a sum.
_MIXING = frozenset(
    "cumsum cumprod cummax cummin cumlogsumexp sort top_k approx_top_k rev fft cholesky triangular_solve lu qr eig "
    "eigh svd reduce_window_sum reduce_window_max reduce_window select_and_scatter_add ragged_dot "
    "ragged_dot_general".split()
)


def _entrywise(shape: Sequence[int], result: Sequence[int]) -> bool:
    """Whether an operand of this shape may meet a result's entries one by one, repeated where its size is 1."""
    same_rank = len(shape) == len(result)
    return not shape or (same_rank and all(n in (1, m) for n, m in zip(shape, result, strict=True)))


def _holds_programs(equation: JaxprEqn) -> bool:
    values = jax.tree.leaves(
        tuple(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    )
    return any(isinstance(value, Jaxpr | ClosedJaxpr) for value in values)


def _dot_general(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    (left, right), (contract, batch) = ins, equation.params["dimension_numbers"]
    for dims in (contract, batch):
        known.join_all(tuple(left[i] for i in dims[0]), tuple(right[i] for i in dims[1]))
    shared = tuple(left[i] for i in batch[0])
    free = [
        number
        for side, names in enumerate((left, right))
        for i, number in enumerate(names)
        if i not in contract[side] and i not in batch[side]
    ]
    for number in shared:
        known.of(number).batched = True
    known.product([left[i] for i in contract[0]], (*shared, *free))
    return [(*shared, *free)]


def _convolution(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    (image, kernel), numbers = ins, equation.params["dimension_numbers"]
    out = list(known.fresh(array_of(equation.outvars[0]).shape, "of a convolution's window"))
    known.keep([image[i] for i in numbers.lhs_spec[2:]], "of a convolution's window")
    known.keep([kernel[i] for i in numbers.rhs_spec[2:]], "of a convolution's window")
    out[numbers.out_spec[0]] = image[numbers.lhs_spec[0]]
    if equation.params["feature_group_count"] > 1 or equation.params["batch_group_count"] > 1:
        known.keep([*image, *kernel], "of a convolution in groups")
        return [tuple(out)]
    features = image[numbers.lhs_spec[1]]
    known.join(features, kernel[numbers.rhs_spec[1]])
    out[numbers.out_spec[1]] = kernel[numbers.rhs_spec[0]]
    known.product([features], [kernel[numbers.rhs_spec[0]]])
    return [tuple(out)]


def _reshape(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    """Joins what is the same before and after; of dimensions that are merged, or cut apart, the outer one."""
    before, out = ins[0], known.fresh(array_of(equation.outvars[0]).shape)
    sides = [[n for n in names if known.sizes[n] != 1] for names in (before, out)]
    left, right = sides
    while left and right:
        groups = ([left.pop(0)], [right.pop(0)])
        while (lengths := [math.prod(known.sizes[n] for n in group) for group in groups])[
            0
        ] != lengths[1]:
            shorter = lengths.index(min(lengths))
            groups[shorter].append(sides[shorter].pop(0))
        if min(len(group) for group in groups) > 1:
            known.keep([*groups[0], *groups[1]], "is reshaped across another")
            continue
        known.join(groups[0][0], groups[1][0])
        known.keep([*groups[0][1:], *groups[1][1:]], "is the inner part of another")
    return [out]


def _broadcast(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    out = list(known.fresh(array_of(equation.outvars[0]).shape))
    for number, place in zip(ins[0], equation.params["broadcast_dimensions"], strict=True):
        if known.sizes[number] == known.sizes[out[place]]:
            out[place] = number
    return [tuple(out)]


def _parts(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    """Of slices, concatenations and padding: dimensions of one size are one, the others are cut."""
    outs = [known.fresh(array_of(var).shape) for var in equation.outvars]
    rank = len(outs[0])
    for out in outs:
        for operand in (operand for operand in ins if len(operand) == rank):
            for one, other in zip(operand, out, strict=True):
                if known.sizes[one] == known.sizes[other]:
                    known.join(one, other)
                else:
                    known.keep((one, other), f"is cut or put together ({equation.primitive.name})")
    return outs


def _gather(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    (table, index), numbers = ins, equation.params["dimension_numbers"]
    out = list(known.fresh(array_of(equation.outvars[0]).shape))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    for i, place in zip(
        (i for i in range(len(table)) if i not in gone), numbers.offset_dims, strict=True
    ):
        if known.sizes[table[i]] == known.sizes[out[place]]:
            out[place] = table[i]
        else:
            known.keep((table[i],), "is cut (gather)")
    rest = [place for place in range(len(out)) if place not in numbers.offset_dims]
    for number, place in zip(index[:-1], rest, strict=True):
        out[place] = number
    for i, j in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        known.join(table[i], index[j])
    chosen = [table[i] for i in numbers.collapsed_slice_dims]
    for number in chosen:
        known.of(number).looked_up = True
    kept = [out[place] for place in numbers.offset_dims]
    if kept:  # rows of a table; single numbers, such as the score of a target, cost no more than what a loss sums
        known.product(chosen, kept)
    return [tuple(out)]


def _scatter(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    (table, index, rows), numbers = ins, equation.params["dimension_numbers"]
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    for i, place in zip(
        (i for i in range(len(table)) if i not in gone), numbers.update_window_dims, strict=True
    ):
        if known.sizes[table[i]] == known.sizes[rows[place]]:
            known.join(table[i], rows[place])
        else:
            known.keep((table[i], rows[place]), "is cut (scatter)")
    rest = [place for place in range(len(rows)) if place not in numbers.update_window_dims]
    known.join_all(tuple(rows[place] for place in rest), index[:-1])
    for i, j in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        known.join(table[i], index[j])
    return [table]


def _scan(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    inner, length = opened(equation.params["jaxpr"]), equation.params["length"]
    # What is scanned over, or stacked, has an axis more than the body sees; the names of the counts depend on JAX.
    scanned = sum(
        array_of(a).ndim > array_of(b).ndim
        for a, b in zip(equation.invars, inner.invars, strict=True)
    )
    carries = sum(
        array_of(a).ndim == array_of(b).ndim
        for a, b in zip(equation.outvars, inner.outvars, strict=True)
    )
    first = len(ins) - scanned
    fixed, carry, xs = ins[: first - carries], ins[first - carries : first], ins[first:]
    known.keep([names[0] for names in xs], "counts the steps of a scan")
    results = known.walk(inner, [*fixed, *carry, *(names[1:] for names in xs)])
    for before, after in zip(carry, results, strict=False):
        known.join_all(before, after)
    ys = [
        (*known.fresh((length,), "counts the steps of a scan"), *names)
        for names in results[carries:]
    ]
    return [*results[:carries], *ys]


def _while(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = ins[second:]
    known.walk(opened(params["cond_jaxpr"]), [*ins[:first], *carry])
    for before, after in zip(
        carry, known.walk(opened(params["body_jaxpr"]), ins[first:]), strict=True
    ):
        known.join_all(before, after)
    return carry


def _cond(known: _Dimensions, equation: JaxprEqn, ins: list[Names]) -> list[Names]:
    results = [known.walk(opened(branch), ins[1:]) for branch in equation.params["branches"]]
    for other in results[1:]:
        for one, names in zip(results[0], other, strict=True):
            known.join_all(one, names)
    return results[0]


_Rule = Callable[[_Dimensions, JaxprEqn, list[Names]], list[Names]]
_RULES: dict[str, _Rule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda known, eqn, ins: [tuple(ins[0][i] for i in eqn.params["permutation"])],
    "squeeze": lambda known, eqn, ins: [
        tuple(n for i, n in enumerate(ins[0]) if i not in eqn.params["dimensions"])
    ],
    "optimization_barrier": lambda known, eqn, ins: ins,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
} | dict.fromkeys(
    ("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "split"), _parts
)
