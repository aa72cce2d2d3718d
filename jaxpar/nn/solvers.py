"""Names of the ways to solve a recurrence, as flags have them."""

import dataclasses

from jaxpar.solve import Elk, Fused, GaussSeidel, Jacobi, Newton, ParallelBackward, Picard, Quasi, Sequential
from jaxpar.solve.problem import Method
from jaxpar.types import UsageError

__all__ = ["METHODS", "solver"]

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
    windowed = [key for key, kind in METHODS.items() if kind and "window" in kind.__dataclass_fields__]
    if name not in windowed or window < 0:
        raise UsageError(f"window={window} does not fit method={name!r}; windows over 0 are for {', '.join(windowed)}.")
    return dataclasses.replace(method(), window=window)
