"""The kernels of the platforms: whether one takes given arrays, and how it is batched.

A kernel is `affine(a, b, h0, *, axis, reverse) -> h` over lanes, as in `affine_lanes`; CUDA's also takes `adjoint`.
`_triton` (CUDA) is there with jax_triton, `_pallas` (TPU) where libtpu is.
"""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import custom_batching

from jaxpar.lower import triton
from jaxpar.scan import _triton
from jaxpar.scan._rings import LANE_RING, Ring, num_steps, together

# Not once it is wanted: jax 0.11 traces and compiles a program twice if its tracing is what imports Pallas for TPUs.
_pallas = (
    importlib.import_module("jaxpar.scan._pallas") if importlib.util.find_spec("libtpu") else None
)
_DTYPES = {jnp.dtype("float32"), jnp.dtype("bfloat16")}


def kernel_for(platform: str, ring: Ring, a, b, h0, *, axis: int) -> Callable | None:
    """Returns the platform's kernel as `(a, b, h0, *, axis, reverse) -> h` if it takes these arrays."""
    module = _module(platform)
    if module is None or ring is not LANE_RING or len(b) > module.LARGEST_BLOCK:
        return None
    if {x.dtype for x in jax.tree.leaves((a, b, h0))} - _DTYPES:
        return None
    shape = b[0].shape
    # The TPU's kernel wants steps as rows and whole vectors of lanes.
    if platform == "tpu" and (
        axis != len(shape) - 2 or shape[-1] < 128 or num_steps(b, axis) < module.STEPS
    ):
        return None
    return lambda a, b, h0, *, axis, **how: batched(module.affine, axis, **how)(a, b, h0)


def batched(kernel: Callable, axis: int, **how) -> Callable:
    """Returns `(a, b, h0) -> h`, which under `vmap` is the same kernel on arrays with one more axis in front."""

    @custom_batching.custom_vmap
    def run(a, b, h0):
        return together((kernel(a, b, h0, axis=axis, **how), b))[0]

    @run.def_vmap
    def _(size, is_batched, a, b, h0):
        whole = jax.tree.map(
            lambda x, yes: x if yes else jnp.broadcast_to(x, (size, *x.shape)),
            (a, b, h0),
            tuple(is_batched),
        )
        return batched(kernel, axis + 1, **how)(*whole), jax.tree.map(lambda _: True, b)

    return run


def _module(platform: str) -> ModuleType | None:
    if platform == "tpu":
        return _pallas
    return _triton if platform == "cuda" and triton.available() else None
