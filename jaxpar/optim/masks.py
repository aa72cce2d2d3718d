"""Which leaf is treated how: what decays, and which dimensions of a leaf are Muon's matrix."""

import jax
from optax.contrib import MuonDimensionNumbers

from jaxpar.types import PyTree

__all__ = ["matrices", "muon_dimensions"]


def matrices(params: PyTree) -> PyTree:
    """Returns True for every leaf of two dimensions or more, False for scalars and vectors: norms and biases."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def muon_dimensions(axes: PyTree, weights: PyTree) -> PyTree:
    """Returns Muon's dimension numbers a leaf, None where AdamW shall do.

    A stack of matrices is a weight whose first axis is "layers" and whose others map "embed" to the rest or back, once
    for each of "experts" where it has them, so the logical axes say which dimensions are contracted. Without dimension
    numbers, optax hands every leaf of three dimensions to Adam, in silence. A recurrence's own weights map units to
    units, have no "embed", and go to Adam.

    Args:
      axes: Logical axes of each parameter, tuples of names or None.
      weights: bool of each: whether it is a matrix, and no norm or bias.

    Returns:
      `MuonDimensionNumbers(reduction_axis, output_axis)` or None, in the structure of `axes`.
    """

    def numbers(names: tuple, is_weight: bool):
        if not is_weight or len(names) < 3 or names[0] != "layers" or "embed" not in names:
            return None
        embed = (names.index("embed"),)
        rest = tuple(i for i in range(1, len(names)) if i not in embed and names[i] != "experts")
        first, second = (embed, rest) if embed < rest else (rest, embed)
        return MuonDimensionNumbers(reduction_axis=first, output_axis=second)

    return jax.tree.map(numbers, axes, weights, is_leaf=lambda x: isinstance(x, tuple))
