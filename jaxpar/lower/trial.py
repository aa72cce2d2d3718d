"""Kernels behind private interfaces are tried before their first use: traced, and compared where their device is."""

import threading
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

__all__ = ["relative_error", "tried"]

TOLERANCE = 2e-2
"""Of relative errors: bfloat16 rounds each of a few hundred numbers by 2^-9, a kernel's partial outputs too."""


def tried(what: str, instead: str, errors: Callable[[], list[Array]], kind: str) -> bool:
    """Whether a kernel does what it says; if not, one warning tells why.

    Args:
      what: The kernel, for the warning.
      instead: What is taken in its place.
      errors: Computes relative errors against the dense form; called without arguments.
      kind: The platform whose device can compute them; on any other they are traced alone.
    """
    told: list[str] = []

    def trial():
        try:
            if jax.default_backend() != kind:
                jax.eval_shape(errors)
                return
            worst = float(np.max(np.asarray(errors())))  # NaN if one is
            if not worst <= TOLERANCE:
                told.append(f"its error is {worst:.1e}, over {TOLERANCE:g}")
        except Exception as error:  # whatever a private interface raises after a change of it
            told.append(f"{type(error).__name__}: {str(error)[:200]}")

    # A thread of its own is inside no trace and no mesh, as whoever asks may be.
    thread = threading.Thread(target=trial)
    thread.start()
    thread.join()
    if told:
        warnings.warn(f"{what} is not used, {instead} is: {told[0]}.", stacklevel=2)
    return not told


def relative_error(got: Array, want: Array) -> Array:
    """Norm of the difference over that of what it should be."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm((got - want).reshape(-1)) / jnp.linalg.norm(want.reshape(-1))
