"""Names of the ways to solve a recurrence, as flags have them."""

from typing import Any

from jaxpar.types import UsageError

__all__ = ["METHODS", "solver"]

METHODS = ("auto",)


def solver(name: str, window: int = 0) -> Any:
    if name not in METHODS:
        raise UsageError(f"method={name!r} is unknown; legal are {', '.join(METHODS)}.")
    return None
