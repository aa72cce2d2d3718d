"""From the text of a Triton kernel to the function that jax_triton launches, where it is installed."""

import functools
import importlib.util
import linecache

__all__ = ["available", "compiled", "indented"]


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


def indented(text: str) -> str:
    """Returns the lines one level further in."""
    return "\n".join("    " + line if line else line for line in text.split("\n"))
