"""Names of the ways to solve a recurrence, as flags have them."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.nn.cells.aaren import Aaren
from jaxpar.nn.cells.cell import Cell
from jaxpar.nn.cells.layer import cell_states, first_state
from jaxpar.nn.leaf import init_leaves
from jaxpar.solve import (
    Elk,
    Fused,
    GaussSeidel,
    Jacobi,
    Newton,
    ParallelBackward,
    Picard,
    Quasi,
    Sequential,
)
from jaxpar.solve.problem import Method
from jaxpar.types import UsageError

__all__ = ["METHODS", "name_taken", "solver"]

METHODS = {
    "auto": None,
    "newton": Newton,
    "quasi": Quasi,
    "jacobi": Jacobi,
    "picard": Picard,
    "gauss_seidel": GaussSeidel,
    "elk": Elk,
    "fused": Fused,
    "parallel_backward": ParallelBackward,
    "sequential": Sequential,
}


def solver(name: str, window: int = 0) -> Method | None:
    """Returns the method that a name of `METHODS` means, None for "auto"; in windows of so many steps, if over 0.

    Raises:
      UsageError: If there is no such name, or the method knows no window.
    """
    if name not in METHODS:
        raise UsageError(f"method={name!r} is unknown; legal are {', '.join(METHODS)}.")
    method = METHODS[name]
    if not window:
        return method and method()
    windowed = [
        key for key, kind in METHODS.items() if kind and "window" in kind.__dataclass_fields__
    ]
    if name not in windowed or window < 0:
        raise UsageError(
            f"window={window} does not fit method={name!r}; windows over 0 are for {', '.join(windowed)}."
        )
    return dataclasses.replace(method(), window=window)


def name_taken(cell: Cell | Aaren, batch: int, length: int) -> str:
    """Returns the name of the method that a cell's recurrence takes here where none is named.

    That is "auto" for a cell with a closed form. Nothing is computed: shapes, the
    program of a step and the platform decide (`jaxpar.solve.explain`).
    """

    def stats(key, xs):
        params = init_leaves(key, cell.leaves(1), xs.dtype)
        projections = cell.input_projections(params, xs)
        start = first_state(cell, None, batch, projections)
        return cell_states(cell, params, projections, start)[1]

    xs = jax.ShapeDtypeStruct((length, batch, 1), jnp.float32)
    found = jax.eval_shape(stats, jax.random.key(0), xs)
    if found is None:
        return "auto"
    return next(name for name, kind in METHODS.items() if kind is type(found.method))
