"""From the text of a Triton kernel to the function that jax_triton launches, where it is installed."""

import functools
import importlib.util
import inspect
import linecache
from typing import Any

__all__ = ["available", "call_kernel", "compiled", "indented"]


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
    return jax_triton.triton_call(*arrays, kernel=compiled(text, name), grid=grid, **options)


def indented(text: str) -> str:
    """Returns the lines one level further in."""
    return "\n".join("    " + line if line else line for line in text.split("\n"))
