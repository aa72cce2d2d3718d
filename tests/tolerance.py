"""How far two floats may lie apart and still count as equal; loosened only with a written reason.

The measure is that of `jaxpar.verify.leaf_errors`.
"""

from jaxpar.aot.verify.compare import leaf_errors
from jaxpar.verify import TOLERANCE

LAYOUT = TOLERANCE
"""Between device layouts: only the order of sums differs."""

EXACT_MATHS = {"float32": 2e-6, "float64": 1e-13}
"""Against an independent reference of the same formula in double precision."""


def errors(got, want, masked=()):
    """Returns the error of each floating leaf by its path, but those whose path has a part in `masked`."""
    return {
        name: error
        for name, error in leaf_errors(got, want).items()
        if not set(name.split("/")) & set(masked)
    }


def assert_close(got, want, tolerance, masked=()):
    """Asserts that the error of every floating leaf is at most `tolerance`; one that is not finite errs infinitely."""
    bad = {
        name: error for name, error in errors(got, want, masked).items() if not error <= tolerance
    }
    assert not bad, f"over {tolerance:g}: " + ", ".join(
        f"{name} {error:.2e}" for name, error in bad.items()
    )
