"""What jax_triton is asked for when a kernel is called, by either name that its versions have for outputs."""

import sys
import types

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

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
    called = triton.call_kernel(
        1, 2, text="a text", name="f", out=OUT, grid=(4, 5), num_warps=2, SIZE=7
    )
    assert called == ((1, 2), "f of a text", OUT, (4, 5), 2, {"SIZE": 7})


def test_a_call_of_the_older_kind_becomes_a_typed_one():
    primitive = jax.extend.core.Primitive("kernel")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x: [jax.core.ShapedArray(x.shape, x.dtype)] * 2)
    older = jax.ffi.ffi_lowering("a_kernel", api_version=2, backend_config=b"how")
    mlir.register_lowering(primitive, lambda ctx, x: triton._typed(older(ctx, x)), platform="cpu")
    call = jax.jit(primitive.bind)
    text = call.lower(jnp.ones(3)).as_text()
    assert (
        "@a_kernel" in text
        and "api_version = 4" in text
        and 'backend_config = {opaque = "how"}' in text
    )
    with pytest.raises(
        Exception, match="FFI"
    ):  # so XLA reads it as a typed call, which nobody registered
        call(jnp.ones(3))


def test_only_calls_that_ask_for_it_are_typed(monkeypatch):
    rules, lowered = {}, []
    lib = types.SimpleNamespace(
        triton_kernel_call_lowering=lambda backend, ctx, *args, **params: (backend, ctx, args),
        triton_kernel_call_p="primitive", get_cuda_backend="cuda backend",
    )  # fmt: skip
    plugin = types.SimpleNamespace(registrations=lambda: {triton.TYPED_CALL: None})
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_lib=lib))
    monkeypatch.setattr("jax._src.lib.gpu_triton._cuda_triton", plugin)
    monkeypatch.setattr(
        mlir, "register_lowering", lambda primitive, rule, platform: rules.update({primitive: rule})
    )
    monkeypatch.setattr(triton, "_typed", lambda results: lowered.append(results) or "typed")
    assert triton._lowers_to_typed_call.__wrapped__()
    assert rules["primitive"]("ctx", 1, custom_call_target_name="theirs") == (
        "cuda backend",
        "ctx",
        (1,),
    )
    assert rules["primitive"]("ctx", 1, custom_call_target_name=triton.TYPED_CALL) == "typed"
    assert lowered == [("cuda backend", "ctx", (1,))]


def test_a_jaxlib_without_typed_kernels_keeps_the_older_kind(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_lib=None))
    for plugin in (None, types.SimpleNamespace(registrations=dict)):
        monkeypatch.setattr("jax._src.lib.gpu_triton._cuda_triton", plugin)
        assert not triton._lowers_to_typed_call.__wrapped__()
