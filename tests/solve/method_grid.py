"""Every method on every recurrence: what is called converged has to be the loop's, in value and gradient."""

import functools
from typing import NamedTuple

import inside_recurrences
import jax
import jax.numpy as jnp
import numpy as np
import outside_recurrences
from judge import excess, in_float64, loop_of, nudged

from jaxpar.solve import Elk, GaussSeidel, Jacobi, Newton, Picard, Quasi, parallel_scan

RECURRENCES = (*outside_recurrences.RECURRENCES, *inside_recurrences.RECURRENCES)

METHODS = {
    "newton": Newton(),
    "windows": Newton(window=50),
    "damped": Newton(damping=0.5),
    "quasi": Quasi(),
    "jacobi": Jacobi(),
    "picard": Picard(),
    "blocks": GaussSeidel(block=16),
    "corrected": GaussSeidel(block=16, correction=True),
    "elk": Elk(),
}
DTYPES = ("bfloat16", "float16", "float32", "float64")
LENGTHS = (0, 1, 2, 64, 10_000)


NO_GRADIENT = ("rounding_residue",)
"""Recurrences whose gradient is 1 / eps times a difference of equal numbers: rounding, whatever computes it."""


class Row(NamedTuple):
    """A case of the grid, by names."""

    method: str
    recurrence: str
    dtype: str
    length: int


class Verdict(NamedTuple):
    """Outcome of a row.

    Attributes:
      converged: Whether the solver says so.
      value: Distance of the states to the loop's, in units of what may be: right is up to 1.
      gradient: The same of the gradient of a drawn sum of all states, by start and inputs.
      reported: Largest residual or error that the solver gives, in units of what passes.
    """

    converged: bool
    value: float
    gradient: float
    reported: float

    @property
    def is_right(self):
        is_within = not self.converged or self.reported <= 1
        return self.value <= 1 and self.gradient <= 1 and is_within

    @property
    def is_wrong(self):
        return self.converged and not self.is_right


def whole():
    """All rows."""
    return [
        Row(method, recurrence.name, dtype, length)
        for recurrence in RECURRENCES
        for method in METHODS
        for dtype in DTYPES
        for length in LENGTHS
    ]


def cover():
    """Rows in which each pair of a method, a recurrence, a dtype and a length occurs at least once.

    Each method meets each recurrence once. Dtypes and lengths go round, so that nine methods give
    a recurrence all of them; 4 and 5 have no common factor, so that they meet each other, too.
    """
    rows = []
    for number, recurrence in enumerate(RECURRENCES):
        for place, method in enumerate(METHODS):
            dtype = DTYPES[(place + 2 * number + number // 4) % len(DTYPES)]
            length = LENGTHS[(place + number) % len(LENGTHS)]
            rows.append(Row(method, recurrence.name, dtype, length))
    return rows


def judged(row):
    """Solves a row and judges it."""
    with jax.enable_x64(row.dtype == "float64"):
        loop, loop_gradient = by_loop(row.recurrence, row.dtype, row.length)
    exact, exact_gradient = in_wide(row.recurrence, row.dtype, row.length)
    with jax.enable_x64(row.dtype == "float64"):
        recurrence, start, inputs, weights = case(row.recurrence, row.dtype, row.length)
        method = METHODS[row.method]
        (_, (states, report)), gradient = with_gradient(
            solver(recurrence.step, method), start, inputs, weights
        )
        rtol = 1.5 * float(jnp.finfo(row.dtype).eps) ** 0.75
        value = excess(states, loop, exact, rtol)
        slope = 0.0
        if row.recurrence not in NO_GRADIENT and is_finite(loop_gradient):
            moved = by_moved_loops(row.recurrence, row.dtype, row.length)
            slope = excess(gradient, loop_gradient, exact_gradient, rtol, moved)
    converged, reported = report
    return Verdict(bool(converged), value, slope, float(reported))


def is_finite(tree):
    """True if all numbers are finite; where the loop's gradient overflows there is nothing to compare with."""
    return all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(tree))


def case(name, dtype, length):
    """The recurrence of a name, with start and inputs, and the numbers that its states are weighed with."""
    recurrence = next(row for row in RECURRENCES if row.name == name)
    start = recurrence.start(jnp.dtype(dtype))
    inputs = recurrence.inputs(length, jnp.dtype(dtype))
    rng = np.random.default_rng(7)

    def drawn(leaf):
        return jnp.asarray(rng.normal(size=(length, *leaf.shape)), dtype)

    return recurrence, start, inputs, jax.tree.map(drawn, start)


@functools.lru_cache(maxsize=32)
def by_loop(name, dtype, length):
    """States and gradient of the plain loop."""
    recurrence, start, inputs, weights = case(name, dtype, length)
    (_, (states, _)), gradient = with_gradient(looped(recurrence.step), start, inputs, weights)
    return states, gradient


@functools.lru_cache(maxsize=32)
def by_moved_loops(name, dtype, length):
    """Gradients of the loop from starts and inputs that are moved by the tolerance, twice.

    States that are right may lie on the other side of a kink than the loop's, and have its other
    slope.
    """
    recurrence, start, inputs, weights = case(name, dtype, length)
    rtol = 1.5 * float(jnp.finfo(dtype).eps) ** 0.75
    gradients = []
    for seed in (1, 2):
        moved = nudged((start, inputs), rtol, seed)
        gradients.append(with_gradient(looped(recurrence.step), *moved, weights)[1])
    return gradients


@functools.lru_cache(maxsize=32)
def in_wide(name, dtype, length):
    """The same in float64, of the start and inputs that the narrow loop has; nudged by a rounding where it is wide."""
    with jax.enable_x64(dtype == "float64"):
        recurrence, start, inputs, weights = case(name, dtype, length)
        if dtype == "float64":
            start, inputs = nudged((start, inputs), float(jnp.finfo(dtype).eps))
        data = (start, inputs, weights)
    with jax.enable_x64(True):
        (_, (states, _)), gradient = with_gradient(looped(recurrence.step), *map(in_float64, data))
    return states, gradient


def looped(step):
    """`solve` of the loop, which always finds its states."""
    return lambda start, inputs: (loop_of(step, start, inputs), (True, 0.0))


def solver(step, method):
    """Makes `solve(start, inputs) -> states, (converged, what is reported of errors)` of a method."""

    def solve(start, inputs):
        def body(h, x):
            after = step(h, x)
            return after, after

        _, states, stats = parallel_scan(body, start, inputs, method=method, with_stats=True)
        reported = jnp.stack([stats.residual, *stats.error.values()]).max()
        return states, (stats.converged, reported)

    return solve


def with_gradient(solve, start, inputs, weights):
    """Solves, and differentiates the weighed sum of all states by what is floating in start and inputs.

    Returns:
      The sum with what `solve` returns, and the gradient as a list of arrays with a leading axis.
    """
    leaves, tree = jax.tree.flatten((start, inputs))
    num_start = len(jax.tree.leaves(start))
    floating = [
        number for number, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]

    def loss(values):
        filled = list(leaves)
        for number, value in zip(floating, values, strict=True):
            filled[number] = value
        states, report = solve(*tree.unflatten(filled))
        total = 0.0
        for state, weight in zip(jax.tree.leaves(states), jax.tree.leaves(weights), strict=True):
            if jnp.issubdtype(state.dtype, jnp.floating):
                total = total + jnp.sum(state * weight)
        return total, (states, report)

    values = [leaves[number] for number in floating]
    found, gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(values)
    # Time is first in what the judge sees, also of a start.
    gradient = [
        leaf[None] if number < num_start else leaf
        for number, leaf in zip(floating, gradient, strict=True)
    ]
    return found, gradient
