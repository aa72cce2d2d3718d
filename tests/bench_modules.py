"""Modules of the folder `bench/`, which is no package, for as long as a test needs them."""

import contextlib
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "bench"


@contextlib.contextmanager
def bench_modules(*names):
    """Yields modules by name; forgets them and all others of their folder afterwards."""
    path = list(sys.path)
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").parent == BENCH:
                del sys.modules[name]
