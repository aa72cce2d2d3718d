"""What jax_triton is asked for when a kernel is called, by either name that its versions have for outputs."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from jaxpar.lower import triton

OUT = [jax.ShapeDtypeStruct((3,), jnp.float32)]


def old(*args, kernel, out_shape, grid, num_warps=4, **constants):
    return args, kernel, out_shape, grid, num_warps, constants


def new(*args, kernel, out_type, grid, num_warps=4, **constants):
    return args, kernel, out_type, grid, num_warps, constants


@pytest.mark.parametrize("triton_call", [old, new])
def test_outputs_are_called_as_this_version_does(triton_call, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
    monkeypatch.setattr(triton, "compiled", lambda text, name: f"{name} of {text}")
    called = triton.call_kernel(1, 2, text="a text", name="f", out=OUT, grid=(4, 5), num_warps=2, SIZE=7)
    assert called == ((1, 2), "f of a text", OUT, (4, 5), 2, {"SIZE": 7})
