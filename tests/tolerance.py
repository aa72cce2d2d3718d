"""How far two floats may lie apart and still count as equal; loosened only with a written reason.

The error of a leaf is |got - want| / max(|want|, FLOOR * |whole tree|), in Euclidean norms. A plain relative
error means nothing for a leaf whose true value is zero, as the gradient of an attention key bias is: there
both sides hold rounding noise of the sums that cancel, which is as large as the tree, not as the leaf.
"""

import jax
import numpy as np

FLOOR = 1e-3
"""Share of the whole tree's norm under which a leaf's own norm is no measure."""

LAYOUT = {"float32": 1e-5, "float64": 1e-12}
"""Between device layouts: only the order of sums differs."""

EXACT_MATHS = {"float32": 2e-6, "float64": 1e-13}
"""Against an independent reference of the same formula in double precision."""


def _floats(tree):
    """Returns {path: float64 array} of the floating leaves."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    out = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in flat}
    return {name: x.astype(np.float64) for name, x in out.items() if x.dtype.kind == "f" or x.dtype.name == "bfloat16"}


def errors(got, want, masked=()):
    """Returns the error of each floating leaf by its path, but those whose path has a part in `masked`."""
    got, want = _floats(got), _floats(want)
    assert got.keys() == want.keys() and want, "the trees differ in structure"
    whole = np.sqrt(sum(np.sum(x**2) for x in want.values()))
    kept = [name for name in want if not set(name.split("/")) & set(masked)]
    scale = {name: max(np.linalg.norm(want[name]), FLOOR * whole) for name in kept}
    for name in kept:
        assert got[name].shape == want[name].shape, (name, got[name].shape, want[name].shape)
        assert np.isfinite(got[name]).all() and np.isfinite(want[name]).all(), f"{name} is not finite"
    return {name: np.linalg.norm(got[name] - want[name]) / (scale[name] or 1.0) for name in kept}


def assert_close(got, want, tolerance, masked=()):
    """Asserts that the error of every floating leaf is at most `tolerance`."""
    bad = {name: error for name, error in errors(got, want, masked).items() if not error <= tolerance}
    assert not bad, f"over {tolerance:g}: " + ", ".join(f"{name} {error:.2e}" for name, error in bad.items())
