"""Chains of products: which conversions go where, given how the weights lie.

In x @ w1 @ w2 @ ... each product has a few placements of its operands that need no communication, one row of
`MATMUL_PLACEMENTS` per mesh axis. `place_chain` tries all of them by dynamic programming over the placement of the
activation, and pays `conversion` in between.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax.typing import DTypeLike

from jaxpar.aot.placement import Broadcast, ConversionStep, Partial, Placement, Split, conversion
from jaxpar.types import UsageError

__all__ = ["MATMUL_PLACEMENTS", "ChainPlacement", "Stage", "matmul_placements", "place_chain"]

MATMUL_PLACEMENTS: dict[tuple, Split | Broadcast | Partial] = {
    (Split(0), Broadcast()): Split(0),
    (Broadcast(), Split(1)): Split(1),
    (Split(1), Split(0)): Partial("sum"),
    (Partial("sum"), Broadcast()): Partial("sum"),
    (Broadcast(), Partial("sum")): Partial("sum"),
    (Broadcast(), Broadcast()): Broadcast(),
}
"""Placements along one mesh axis of a [M, K] and b [K, N] -> that of a @ b, computed without communication."""


def matmul_placements(a: Placement, b: Placement) -> dict[str, Split | Broadcast | Partial]:
    """Returns the placement of a @ b, for a [M, K] and b [K, N], each device multiplying what it has.

    Raises:
      UsageError: If the operands do not fit without a conversion.
    """
    out = {}
    for axis in (*a, *(axis for axis in b if axis not in a)):
        pair = a.get(axis, Broadcast()), b.get(axis, Broadcast())
        if pair not in MATMUL_PLACEMENTS:
            legal = "; ".join(f"{left} @ {right}" for left, right in MATMUL_PLACEMENTS)
            raise UsageError(
                f"{axis}: {pair[0]} @ {pair[1]} needs a conversion first; legal are {legal}."
            )
        out[axis] = MATMUL_PLACEMENTS[pair]
    inner = [
        [axis for axis, where in side.items() if where == Split(dim)]
        for side, dim in ((a, 1), (b, 0))
    ]
    if inner[0] != inner[1]:
        raise UsageError(
            f"the contracted dimension is cut in another order by each operand: {inner[0]} and {inner[1]}."
        )
    return out


@dataclasses.dataclass(frozen=True)
class Stage:
    """One product of a chain, or its end.

    Attributes:
      x: Placement of the activation as the product takes it; at the end, as the chain returns it.
      steps: What brings the activation there.
      w: Placement of the weight as the product takes it; None at the end.
      weight_steps: What brings the weight there.
    """

    x: Placement
    steps: Sequence[ConversionStep]
    w: Placement | None = None
    weight_steps: Sequence[ConversionStep] = ()


@dataclasses.dataclass(frozen=True)
class ChainPlacement:
    """The cheapest placement of a chain: a stage for each product and one for the end, and the bytes a device sends."""

    bytes: float
    stages: tuple[Stage, ...]


def place_chain(
    x: tuple[Sequence[int], Placement],
    weights: Sequence[tuple[Sequence[int], Placement]],
    target: Placement,
    dtype: DTypeLike,
    sizes: Mapping[str, int],
    *,
    linear: bool = False,
) -> ChainPlacement:
    """Returns the placement of x @ w1 @ w2 @ ... that sends the fewest bytes in the forward pass.

    Cost: for each product the placements over the axes that are named here, squared: one or two axes.

    Args:
      x: Shape [M, K] and placement of the input.
      weights: Shapes and placements of w1 [K, N], w2 [N, ...], ..., as they rest.
      target: Placement of the result.
      dtype: Of all arrays.
      sizes: Size of each mesh axis.
      linear: Whether the products follow each other directly. By default a function that acts on each entry stands
        between them, which partial sums cannot pass.

    Raises:
      UsageError: As `conversion`.
    """
    named = {
        axis for placement in (x[1], target, *(rest for _, rest in weights)) for axis in placement
    }
    choices = list(_choices([axis for axis in sizes if axis in named and sizes[axis] > 1]))
    shape, start = tuple(x[0]), x[1]
    reached = {_key(start): (0.0, ())}
    for number, (of_w, rest) in enumerate(weights):
        if of_w[0] != shape[1]:
            raise UsageError(
                f"weight {number} of shape {tuple(of_w)} cannot follow an activation of shape {shape}."
            )
        after: dict[_Key, tuple[float, tuple[Stage, ...]]] = {}
        for a, b in choices:
            partial = any(isinstance(where, Partial) for where in a.values())
            if (partial and number and not linear) or not (
                _fits(a, shape, sizes) and _fits(b, of_w, sizes)
            ):
                continue
            result = _key(matmul_placements(a, b))
            for_w = conversion(rest, b, of_w, dtype, sizes)
            for here, (spent, stages) in reached.items():
                for_x = conversion(dict(here), a, shape, dtype, sizes)
                total = spent + sum(step.bytes for step in (*for_x, *for_w))
                if result not in after or total < after[result][0]:
                    after[result] = total, (*stages, Stage(a, for_x, b, for_w))
        reached, shape = after, (shape[0], of_w[1])
    ends = []
    for here, (spent, stages) in reached.items():
        steps = conversion(dict(here), target, shape, dtype, sizes)
        ends.append(
            ChainPlacement(
                spent + sum(step.bytes for step in steps), (*stages, Stage(target, steps))
            )
        )
    return min(ends, key=lambda chain: chain.bytes)


_Key = tuple[tuple[str, Split | Broadcast | Partial], ...]


def _key(placement: Placement) -> _Key:
    """One form for equal placements: no broadcasts, dimensions in order, each one's axes outermost first."""
    named = [item for item in placement.items() if item[1] != Broadcast()]
    return tuple(
        sorted(
            named, key=lambda item: (str(item[1]), item[0] if isinstance(item[1], Partial) else "")
        )
    )


def _choices(axes: Sequence[str]) -> Iterator[tuple[Placement, Placement]]:
    """Operands that multiply without communication: a row of the table for each axis, in each order of axes."""
    for order in itertools.permutations(axes):
        for rows in itertools.product(MATMUL_PLACEMENTS, repeat=len(order)):
            left, right = (
                {axis: row[side] for axis, row in zip(order, rows, strict=True)} for side in (0, 1)
            )
            if not (Partial("sum") in left.values() and Partial("sum") in right.values()):
                yield left, right


def _fits(placement: Placement, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether each dimension divides."""
    return not any(
        size % math.prod(sizes[axis] for axis, where in placement.items() if where == Split(dim))
        for dim, size in enumerate(shape)
    )
