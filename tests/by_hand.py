"""Gradients of plain NumPy loops, against which those of programs are judged."""

import jax
import numpy as np


def slopes(value, tree):
    """Returns the gradient of `value(tree)` by every number of the tree, each by one imaginary step: nothing cancels.

    `value` is made of analytic functions alone: no maximum, no absolute value.
    """
    leaves, structure = jax.tree.flatten(tree)
    out = [np.zeros(np.shape(x)) for x in leaves]
    for number, x in enumerate(leaves):
        for place in np.ndindex(x.shape):
            moved = np.asarray(x, complex)
            moved[place] += 1e-30j
            there = structure.unflatten([*leaves[:number], moved, *leaves[number + 1 :]])
            out[number][place] = value(there).imag / 1e-30
    return structure.unflatten(out)
