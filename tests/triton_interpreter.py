"""Runs the library's Triton kernels without a GPU: a stand-in for `jax_triton` upon Triton's own interpreter.

Needs triton and torch (CPU builds do); tests that ask for it skip where they are missing. Programs
run one after the other, so that what is tested is arithmetic, masks and addresses; the order of
memory operations is tested on a GPU.
"""

import importlib.util
import os
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.lower.triton import compiled

NEEDED = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "torch")),
    reason="needs triton and torch",
)


ONE_AT_A_TIME = threading.Lock()
"""Triton's interpreter has one program's number for the whole process; JAX may run two callbacks side by side."""


def install(monkeypatch):
    """Puts the stand-in in the place of `jax_triton`, and plain division in that of CUDA's fast one."""
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    from triton import language as tl
    from triton.language.extra.cuda import libdevice
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def counted(tensor, scope):  # an array of one number is no index to numpy
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", counted)

    multiply = interpreter.InterpreterBuilder.create_dot

    def by_value(
        self, a, b, *args
    ):  # the interpreter keeps bfloat16 as its bits, and multiplies those
        wide = (
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return multiply(self, *wide, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", by_value)

    divide = "@triton.jit\ndef divide(x, y):\n    return x / y\n"
    monkeypatch.setattr(libdevice, "fast_dividef", compiled(divide, "divide"))
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))


def triton_call(*args, kernel, out_shape, grid, zeroed_outputs=(), num_warps=4, **constants):
    """Has the signature of `jax_triton.triton_call`; outputs that are not zeroed start as NaN."""
    import torch

    def tensor(x):
        return (
            torch.from_numpy(np.array(x, np.float32)).bfloat16()
            if x.dtype == jnp.bfloat16
            else torch.tensor(x)
        )

    def output(place, like):
        poison = (
            0
            if place in zeroed_outputs
            else np.nan
            if jnp.issubdtype(like.dtype, jnp.floating)
            else 77
        )
        return tensor(np.full(like.shape, poison, like.dtype))

    def run(*args):
        outputs = [output(place, like) for place, like in enumerate(out_shape)]
        with ONE_AT_A_TIME:
            kernel[tuple(grid)](*[tensor(np.asarray(x)) for x in args], *outputs, **constants)
        return tuple(
            x.float().numpy().astype(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
            for x in outputs
        )

    return jax.pure_callback(run, tuple(out_shape), *args)
