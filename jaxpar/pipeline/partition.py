"""Which layers make a stage, and how many machines share it: the dynamic programme of PipeDream."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.types import UsageError

__all__ = ["Stage", "partition_layers"]


class Stage(NamedTuple):
    """Layers `first` to `last` - 1, computed by `machines` that share the microbatches."""

    first: int
    last: int
    machines: int


def partition_layers(
    compute: Sequence[float],
    send: Sequence[float],
    weights: Sequence[float],
    machines: int,
    *,
    is_replicated: bool = True,
) -> tuple[float, tuple[Stage, ...]]:
    """Returns the time of the slowest stage, and the stages that make it least.

    With T(i..j, n) = max(sum of compute, 2 (n-1)/n sum of weights) / n of a stage of n machines, and A(j, n) of the
    first j layers on n machines,

        A(j, n) = min(T(0..j, n), min over i, n' of max(A(i, n - n'), send[i-1], T(i..j, n'))),

    where `send` and `weights` are times: of an activation and its gradient to the next stage, and of a layer's weights
    over a machine's link. Cost O(L^2 N^2). All N machines are used.

    Args:
      compute: Time of each of L layers, forward and backward.
      send: Time of each layer's output and its gradient, if the next layer lies elsewhere; the last is not asked for.
      weights: Time of sending each layer's weights once.
      machines: N.
      is_replicated: Whether a stage may have several machines; else N stages of one.

    Raises:
      UsageError: If lists differ in length, or there are more stages than layers.

    Reference: arXiv:1806.03377, section 3.2.
    """
    layers = len(compute)
    if not layers or len(send) != layers or len(weights) != layers:
        raise UsageError(
            f"{layers} layers have {len(send)} times of sending and {len(weights)} of weights."
        )
    if machines < 1 or (not is_replicated and machines > layers):
        raise UsageError(
            f"{layers} layers cannot lie on {machines} machines; legal is 1 to {layers}."
        )

    def alone(i: int, j: int, n: int) -> float:
        return max(sum(compute[i:j]), 2 * (n - 1) / n * sum(weights[i:j])) / n

    @functools.cache
    def best(j: int, n: int) -> tuple[float, tuple[Stage, ...]]:
        found: list[tuple[float, tuple[Stage, ...]]]
        found = [(alone(0, j, n), (Stage(0, j, n),))] if is_replicated or n == 1 else []
        for i in range(1, j):
            for last in range(1, n) if is_replicated else ((1,) if n > 1 else ()):
                if not is_replicated and i < n - 1:
                    continue
                time, stages = best(i, n - last)
                found.append(
                    (max(time, send[i - 1], alone(i, j, last)), (*stages, Stage(i, j, last)))
                )
        return min(found)

    return best(layers, machines)
