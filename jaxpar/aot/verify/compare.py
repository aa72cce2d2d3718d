"""Errors between two trees of arrays, leaf by leaf, and the leaves that hold nothing but rounding."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import PyTree, UsageError

__all__ = ["FLOOR", "TOLERANCE"]

FLOOR = 1e-3
"""Share of the whole tree's norm under which a leaf's own norm is no measure."""

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
"""Between layouts only the order of sums differs; float64 separates rounding from bugs."""

NOISE = {"float32": 1e-6, "float64": 1e-14}
"""Share of the whole gradient's norm under which a leaf's gradient counts as zero but for rounding."""


def leaf_errors(got: PyTree, want: PyTree, floor: float = FLOOR) -> dict[str, float]:
    """Returns the error of each floating leaf by its path: `|got - want| / max(|want|, floor |tree|)`.

    Euclidean norms, in float64. A plain relative error means nothing for a leaf with a true value of
    zero, as the gradient of an attention key bias is. Both sides then hold rounding noise of the sums
    that cancel, which is as large as the tree, not as the leaf. A leaf that is not finite on either side
    has an infinite error. A tree without floating leaves has no errors.

    Raises:
      UsageError: If the trees differ in structure or in a shape.
    """
    got_leaves = _floats(got)
    want_leaves = _floats(want)
    if got_leaves.keys() != want_leaves.keys():
        missing = sorted(got_leaves.keys() ^ want_leaves.keys())
        raise UsageError(
            f"two trees that differ in structure cannot be compared: {missing[0]} is in one alone."
        )
    whole = _norm(want_leaves)
    errors = {}
    for name, right in want_leaves.items():
        left = got_leaves[name]
        if left.shape != right.shape:
            raise UsageError(
                f"{name} has shape {left.shape} on one side and {right.shape} on the other."
            )
        scale = max(float(np.linalg.norm(right)), floor * whole) or 1.0
        error = float(np.linalg.norm(left - right)) / scale
        if not math.isfinite(error):
            error = math.inf
        errors[name] = error
    return errors


def count_differences(got: PyTree, want: PyTree) -> dict[str, int]:
    """Returns, for each leaf that is not compared by its error and differs, in how many entries it does."""
    want_leaves = dict(_flat(want))
    out = {}
    for name, left in _flat(got):
        if jnp.issubdtype(left.dtype, jnp.inexact):
            continue
        different = int(np.sum(left != want_leaves[name]))
        if different:
            out[name] = different
    return out


def dead_leaves(gradient: PyTree, share: float) -> set[str]:
    """Returns the paths of the leaves with a gradient of zero but for rounding."""
    leaves = _floats(gradient)
    whole = _norm(leaves)
    return {name for name, leaf in leaves.items() if float(np.linalg.norm(leaf)) <= share * whole}


def of_live(errors: dict[str, float], params: PyTree, dead: set[str]) -> dict[str, float]:
    """Returns the errors without dead parameters, their moments and their averages.

    An infinite error stays whosever it is: rounding explains no NaN.

    A leaf of a state belongs to the parameter with the longest path that ends the leaf's own:
    `mu/mlp/b` belongs to `mlp/b`, never to a `b` at the top.
    """
    names = {name for name, _ in _flat(params)}

    def owner(path: str) -> str:
        parts = path.split("/")
        ends = ["/".join(parts[start:]) for start in range(len(parts))]
        return next((end for end in ends if end in names), "")

    kept = {}
    for path, error in errors.items():
        if math.isinf(error) or owner(path) not in dead:
            kept[path] = error
    return kept


def _norm(leaves: dict[str, np.ndarray]) -> float:
    """Euclidean norm of all leaves together."""
    return math.sqrt(sum(float(np.sum(np.abs(x) ** 2)) for x in leaves.values()))


def _flat(tree: PyTree) -> list[tuple[str, np.ndarray]]:
    """Paths and arrays of a tree."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf))
        for path, leaf in flat
    ]


def _floats(tree: PyTree) -> dict[str, np.ndarray]:
    """Floating and complex leaves by path, in double precision."""
    out = {}
    for name, leaf in _flat(tree):
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            out[name] = leaf.astype(np.complex128)
        elif jnp.issubdtype(
            leaf.dtype, jnp.floating
        ):  # 8 and 16 bits among them, which NumPy has no kind for
            out[name] = leaf.astype(np.float64)
    return out
