"""The meaning of "the same as the loop": as near to it as the loop is to itself in float64."""

import jax
import jax.numpy as jnp
import numpy as np

NEAR = 16
"""Steps on either side within which the loop's own error is looked for."""


def excess(states, loop_states, exact_states, rtol, moved=()):
    """Largest distance of states to those of the loop, in units of what may be: right is up to 1.

    An entry h may lie `10 * (e + rtol * |h_loop| + rtol / 10 * s)` from h_loop. Its error e is the
    largest `|h_loop - h_64|` within `NEAR` steps, since a rounding may be exact by chance. Its size
    s is the median over time of |h_loop|, the mean where that is zero, and 1 where the entry is
    always zero. Infinities and NaN have to be the same; what is no float has to be equal.

    Args:
        states: What is judged, every leaf with time first.
        loop_states: The same of the loop, in the same dtypes.
        exact_states: The same of the loop in float64, of the same start and inputs: `in_float64`.
        rtol: What is forgiven beside the loop's own rounding, relative to an entry.
        moved: More trees that count like exact_states: of what may as well be right.

    Raises:
        ValueError: The trees, shapes or dtypes of states and loop differ.
    """
    structure = jax.tree.structure(loop_states)
    if jax.tree.structure(states) != structure:
        raise ValueError("the trees of states and of the loop differ")
    if jax.tree.structure(exact_states) != structure:
        raise ValueError("the trees of the loop and of the loop in float64 differ")

    trees = (states, loop_states, exact_states, *moved)
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    found = [excess_of_leaf(*leaf[:3], rtol, leaf[3:]) for leaf in leaves]
    return float(np.max(found, initial=0.0))


def excess_of_leaf(values, loop, exact, rtol, moved=()):
    """`excess` of one leaf."""
    values = np.asarray(values)
    loop = np.asarray(loop)
    exact = np.asarray(exact)
    if not values.shape == loop.shape == exact.shape:
        raise ValueError(f"the shapes differ: {values.shape}, {loop.shape}, {exact.shape}")
    if values.dtype != loop.dtype:
        raise ValueError(f"the dtypes differ: {values.dtype} and {loop.dtype}")
    if values.size == 0:
        return 0.0
    if not jnp.issubdtype(loop.dtype, jnp.inexact):
        if np.array_equal(values, loop):
            return 0.0
        return np.inf

    values = widened(values)
    loop = widened(loop)
    with np.errstate(all="ignore"):
        own = np.max([own_error(loop, other) for other in (exact, *map(np.asarray, moved))], axis=0)
        allowed = 10 * (own + rtol * np.abs(loop) + rtol / 10 * sizes(loop))
        ratio = np.abs(values - loop) / allowed

    # Where one of them is not finite, the ratio says nothing: only the same value is right.
    ratio = np.where(np.isfinite(values) & np.isfinite(loop), ratio, np.inf)
    same = (values == loop) | (np.isnan(values) & np.isnan(loop))
    return float(np.max(np.where(same, 0.0, ratio)))


def widened(array):
    """Array of floats, bfloat16 among them, in NumPy's widest usual dtype."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(np.complex128)
    return array.astype(np.float64)


def own_error(loop, exact):
    """Distance of the loop to itself in float64 near each step, 0 where either is not finite."""
    error = np.abs(loop - widened(exact))
    # An infinite error would allow anything; none is the stricter reading.
    error = np.where(np.isfinite(error), error, 0.0)
    largest = error.copy()
    for shift in range(1, min(NEAR + 1, len(error))):
        np.maximum(largest[shift:], error[:-shift], out=largest[shift:])
        np.maximum(largest[:-shift], error[shift:], out=largest[:-shift])
    return largest


def nudged(tree, size, seed=0):
    """Floats of a tree, each moved by `size` of itself, up or down, or not at all.

    By one rounding: what no arithmetic can tell apart. The loop of these stands for one in more
    than float64.
    """
    rng = np.random.default_rng(seed)

    def move(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        signs = rng.integers(-1, 2, size=leaf.shape)
        return (leaf * (1 + signs * size)).astype(leaf.dtype)

    return jax.tree.map(move, tree)


def sizes(loop):
    """Usual size of each entry over time, above zero, of its finite values."""
    finite = np.isfinite(loop)
    size = np.abs(np.where(finite, loop, 0))
    steps = np.maximum(finite.sum(axis=0), 1)

    # NaN sort to the end, so that the middle of the finite ones is found by their number.
    ordered = np.sort(np.where(finite, size, np.nan), axis=0)
    low = np.take_along_axis(ordered, (steps[None] - 1) // 2, axis=0)[0]
    high = np.take_along_axis(ordered, steps[None] // 2, axis=0)[0]
    median = np.nan_to_num(low / 2 + high / 2)

    mean = (size / steps).sum(axis=0)
    usual = np.where(median > 0, median, mean)
    return np.where(usual > 0, usual, 1.0)


def in_float64(tree):
    """Floats of a tree in float64, the rest as it is: for the loop that the loop is judged by.

    Call it, and run that loop, under `jax.enable_x64(True)`.
    """

    def cast(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(leaf, jnp.float64)
        return leaf

    return jax.tree.map(cast, tree)


def loop_of(step, start, inputs):
    """States after each step of the plain loop."""

    def body(h, x):
        after = step(h, x)
        return after, after

    return jax.lax.scan(body, start, inputs)[1]
