"""Recurrences that the tests of `jaxpar.solve` share, and weights at several scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.nn import cells
from jaxpar.solve import Auto

D = 4


def gru(params, h, x):
    """Elementwise; x is [3, D]."""
    a = params["a"]
    z = jax.nn.sigmoid(a[0] * h + x[0])
    r = jax.nn.sigmoid(a[1] * h + x[1])
    h = (1 - z) * h + z * jnp.tanh(a[2] * (r * h) + x[2])
    return h, h


def lstm(params, state, x):
    """Two states coupled elementwise; x is [3, D]."""
    a, (c, h) = params["a"], (state["c"], state["h"])
    f = jax.nn.sigmoid(a[0] * h + x[0])
    c = f * c + (1 - f) * jnp.tanh(a[1] * h + x[1])
    h = jnp.tanh(c) * jax.nn.sigmoid(a[2] * c + x[2])
    return {"c": c, "h": h}, {"out": h * c}


def rnn(params, h, x):
    """Dense; x is [3, D]."""
    h = jnp.tanh(h @ params["w"] + x[0])
    return h, (h, (h**2).sum())


DEFAULTS = [*(kind() for kind in cells.METHODS.values() if kind), Auto()]
"""Every method as it is where nothing is said."""
CELLS = {"gru": gru, "lstm": lstm, "rnn": rnn}
SCALES = ("init", "uniform", "normal", "twice")


def once_each(methods):
    """Every method with one cell, in turn; with the other one it is slow."""
    pairs = []
    for number, name in enumerate(methods):
        often, seldom = ("rnn", "lstm")[:: 1 if number % 2 else -1]
        pairs += [
            pytest.param(name, often),
            pytest.param(name, seldom, marks=pytest.mark.slow),
        ]
    return pytest.mark.parametrize("name, cell", pairs)


def weights(scale="uniform", seed=0):
    """Recurrent weights as at the start of training, U(-0.9, 0.9), N(0, 1) or 2 N(0, 1)."""
    keys = jax.random.split(jax.random.key(seed))
    shapes = {"a": (3, D), "w": (D, D)}

    def draw(key, shape):
        if scale == "uniform":
            return jax.random.uniform(key, shape, minval=-0.9, maxval=0.9)
        return {"init": 0.4, "normal": 1.0, "twice": 2.0}[scale] * jax.random.normal(key, shape)

    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def inputs(length, seed=1):
    return jax.random.normal(jax.random.key(seed), (length, 3, D))


def start(cell):
    h = jnp.linspace(-0.5, 0.5, D)
    return {"c": h, "h": -h} if cell == "lstm" else h


def largest(tree):
    # Python's max may leave NaN out.
    return float(np.max([np.abs(leaf).max() for leaf in jax.tree.leaves(tree)]))


def distance(got, want):
    """The largest difference of any leaf relative to its largest entry; infinite if either is not finite."""
    errors = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)  # nothing to compile
        error = np.abs(a - b).max() / np.maximum(np.abs(b).max(), 1e-30)
        is_finite = np.isfinite(a).all() and np.isfinite(b).all()
        errors.append(float(error) if is_finite else float("inf"))
    return max(errors)
