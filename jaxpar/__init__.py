"""jaxpar: loops as single parallel JAX programs, each shown to equal its loop."""

import importlib
from typing import TYPE_CHECKING

from jaxpar._renamed import find_renamed

if TYPE_CHECKING:
    from jaxpar import envs, lm, neat, pomdp, rl, verify
    from jaxpar.loop import fit
    from jaxpar.mesh import make_mesh
    from jaxpar.scan import affine_scan
    from jaxpar.solve import parallel_scan

__version__ = "0.1.0"

__all__ = [
    "affine_scan",
    "envs",
    "fit",
    "lm",
    "make_mesh",
    "neat",
    "parallel_scan",
    "pomdp",
    "rl",
    "verify",
]

_HOMES = {
    "affine_scan": "jaxpar.scan",
    "fit": "jaxpar.loop",
    "make_mesh": "jaxpar.mesh",
    "parallel_scan": "jaxpar.solve",
}
"""Modules of the functions; the other names are packages themselves."""

find_renamed()


def __getattr__(name: str) -> object:
    # Imported when they are asked for: `import jaxpar` reads not even JAX.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in __all__:
        return importlib.import_module(f"jaxpar.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
