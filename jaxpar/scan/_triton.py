"""The kernel of affine scans on CUDA GPUs, over arrays; `jaxpar.lower.lookback` writes, launches and explains it."""

import jax

from jaxpar.lower import lookback
from jaxpar.lower.lookback import KernelSource, ScanAxis, Tile, launch

LARGEST_BLOCK = lookback.LARGEST_BLOCK  # which `_kernels` asks of every platform's module


def arrays(k: int, has_start: bool) -> KernelSource:
    """Coefficients read from arrays, one a component; with SHIFT those of a belong to the step before."""
    body, pairs = [], [(i, j) for i in range(k) for j in range(k)]
    # Without a start the first step's a must not matter, even if it is infinite: it is not loaded, but 0.
    body.append("used = mask" if has_start else "used = mask & (step > 0)[:, None]")
    # In float32 whatever the arrays are: the carry of a long scan would lose a 16-bit state's last bits at every step.
    for i, j in pairs:
        body.append(
            f"a{i}{j} = tl.load(a{i}{j}_ptr + at + SHIFT, mask=used, other=0.0).to(tl.float32)"
        )
    body += [
        f"b{i} = tl.load(b{i}_ptr + at, mask=mask, other=0.0).to(tl.float32)" for i in range(k)
    ]
    inputs = [f"a{i}{j}_ptr" for i, j in pairs] + [f"b{i}_ptr" for i in range(k)]
    start = KernelSource.start
    if has_start:
        inputs += [f"start{i}_ptr" for i in range(k)]
        start = "tl.load(start{i}_ptr + lane, mask=live, other=0.0).to(tl.float32)"
    return KernelSource(
        k=k,
        inputs=tuple(inputs),
        outputs=tuple(f"h{i}_ptr" for i in range(k)),
        body="\n".join(body),
        finish="\n".join(f"tl.store(h{i}_ptr + at, h{i}, mask=mask)" for i in range(k)),
        start=start,
        used="used",
    )


def affine(
    a, b, start=None, *, axis: int, reverse: bool, adjoint: bool = False, tile: Tile | None = None
):
    """Solves h[t] = a[t] h[t-1] + b[t] in one kernel.

    Args:
      a: k x k arrays, a[i][j] of the shape of b[i]; float32, bfloat16 or float16. k is 1 or 2.
      b: k arrays.
      start: The state before the first step, k arrays of b's shape without `axis`; None for zeros.
      axis: The axis of time.
      reverse: Whether h[t] depends on h[t+1].
      adjoint: Whether step t takes the coefficients of the step before it, in the order of the scan: with a
        transposed and `reverse` flipped that is the transposed system, and no array needs to be shifted for it.
      tile: How the work is cut; None takes the measured best.

    Returns:
      k arrays like b; the carry between steps is float32.
    """
    k, like = len(b), b[0]
    source = arrays(k, start is not None)
    buffers = [x for row in a for x in row] + list(b) + list(start or ())
    out = [jax.ShapeDtypeStruct(like.shape, like.dtype)] * k
    along = ScanAxis(shape=like.shape, axis=axis, reverse=reverse, adjoint=adjoint)
    return launch(source, buffers, out, along, tile=tile)
