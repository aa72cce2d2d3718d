"""From the text of a Triton kernel to the function that jax_triton launches, where it is installed."""

import functools
import importlib.util
import inspect
import linecache
from typing import Any

__all__ = ["available", "call_kernel", "compiled", "indented"]

TYPED_CALL = "triton_kernel_call_ffi"
"""jaxlib's launcher of kernels by XLA's typed interface, which takes what the older one takes."""


@functools.cache
def available() -> bool:
    """Whether jax-triton and Triton are installed, with a jaxlib that can launch their kernels."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("jax_triton") is None:
        return False
    try:
        import jax_triton  # noqa: F401
    except ImportError:  # jaxlib without CUDA
        return False
    return True


@functools.cache
def compiled(text: str, name: str):
    """Returns the Triton function `name` of a source text, which stays readable to Triton and to a debugger."""
    import triton
    import triton.language as tl

    place = f"<jaxpar kernel {name} {abs(hash(text)):x}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    scope = {"triton": triton, "tl": tl, "__name__": "jaxpar.kernels"}
    exec(compile(text, place, "exec"), scope)
    return scope[name]


def call_kernel(
    *arrays,
    text: str,
    name: str,
    out: list,
    grid: tuple[int, ...],
    **options: Any,  # those of `jax_triton.triton_call`, and the kernel's constants
) -> list:
    """Runs the function `name` of a source text over arrays; `options` are warps and the kernel's own constants.

    Returns one array for each shape and dtype in `out`. Version 0.4 of jax_triton calls these otherwise than 0.3.
    """
    import jax_triton

    known = inspect.signature(jax_triton.triton_call).parameters
    options["out_type" if "out_type" in known else "out_shape"] = out
    if "custom_call_target_name" in known and _lowers_to_typed_call():
        options["custom_call_target_name"] = TYPED_CALL
    return jax_triton.triton_call(*arrays, kernel=compiled(text, name), grid=grid, **options)


@functools.cache
def _lowers_to_typed_call() -> bool:
    """Makes version 0.3 of jax_triton lower the calls named `TYPED_CALL` as 0.4 lowers all; whether it can.

    XLA captures typed calls in its CUDA graphs. The older ones cut a graph in two: 9 us more a call on an H200.
    """
    from jax.interpreters import mlir
    from jax_triton import triton_lib
    from jaxlib import gpu_triton

    plugin = getattr(gpu_triton, "_cuda_triton", None)
    if plugin is None or TYPED_CALL not in plugin.registrations():
        return False
    rule = functools.partial(triton_lib.triton_kernel_call_lowering, triton_lib.get_cuda_backend)

    def lower(ctx, *args, **params):
        results = rule(ctx, *args, **params)
        return _typed(results) if params["custom_call_target_name"] == TYPED_CALL else results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lower, platform="cuda")
    return True


def _typed(results):
    """Makes the custom call that these are the results of one of XLA's typed kind, its configuration an attribute."""
    from jax.extend.mlir import ir

    call = results[0].owner
    opaque = call.attributes["backend_config"]
    call.attributes["backend_config"] = ir.DictAttr.get({"opaque": opaque})
    call.attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
    return results


def indented(text: str) -> str:
    """Returns the lines one level further in."""
    return "\n".join("    " + line if line else line for line in text.split("\n"))
