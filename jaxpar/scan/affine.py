"""Affine recurrences h[t] = a[t] h[t-1] + b[t] in parallel over t, with their exact adjoint."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.scan import _xla, dispatch, sharded
from jaxpar.scan._kernels import kernel_for
from jaxpar.scan._rings import (
    LANE_RING,
    MATRIX_RING,
    ROW_RING,
    STATE_RING,
    Ring,
    cast,
    num_steps,
    shifted,
    take,
    together,
    transposed,
)
from jaxpar.scan.varying import moving_with
from jaxpar.types import Array, UsageError

__all__ = ["affine_lanes", "affine_scan"]

KINDS = ("diag", "block", "dense", "row", "matrix")
IMPLS = ("auto", "kernel", "sequential", "associative", "chunked")

_RINGS = {
    "dense": MATRIX_RING,
    "row": ROW_RING,
    "matrix": STATE_RING,
}  # of the kinds whose a is one array
_STATE_AXES = {
    "diag": 0,
    "block": 1,
    "dense": 1,
    "row": 1,
    "matrix": 2,
}  # the last ones of b, which time is not among
_PLAIN = {"sequential": _xla.sequential, "associative": _xla.associative, "chunked": _xla.chunked}

Lanes = tuple[Array, ...]


class _Spec(NamedTuple):
    kind: str
    axis: int
    reverse: bool
    axis_name: str | None
    impl: str
    carry: Any


def affine_scan(
    a: Array,
    b: Array,
    h0: Array | None = None,
    *,
    kind: str = "diag",
    axis: int = 0,
    reverse: bool = False,
    axis_name: str | None = None,
    impl: str = "auto",
) -> Array:
    """Returns every state of the affine recurrence h[t] = a[t] h[t-1] + b[t].

    Differentiable to any order, forwards and backwards: the recurrence is a linear solve, so a
    gradient costs one more scan in the other direction, and nothing is kept from inside the tree.

    A zero in a resets: of "diag", "block" and "row", 0 h is 0 even if h is NaN or infinite, in
    values and in gradients, whatever the `impl`. "dense" and "matrix" multiply matrices, where
    0 NaN is NaN. All but "sequential" multiply transitions over spans without a zero; such a
    product may overflow although the states, being small, would not.

    Args:
      a: Transitions. "diag": of b's shape. "block" and "dense": b's shape and another k at the end,
        so that `a[..., t, ..., :, :] @ h`. "row": b's shape without its last axis, `[..., T, ...,
        K]` for b `[..., K, V]`, one number a row. "matrix": `[..., K, K]` for b `[..., K, V]`,
        which multiplies all V columns.
      b: Drives, `[..., T, ...]` with time at `axis`; "block" and "dense" end in the k entries of
        the state. Floating, or complex; a and h0 may differ in dtype, but cannot be complex alone.
      h0: State before the first step (after the last if `reverse`), b's shape without time; zeros
        by default.
      kind: "diag"; "block", whose k x k products are written out elementwise (k up to 8 or so);
        "dense", which multiplies matrices, at full precision; for states that are matrices
        themselves, "row", h[t] = a[t][..., None] * h[t-1] + b[t], and "matrix", h[t] = a[t] @
        h[t-1] + b[t], at full precision. Both read a as it is, not once a column, and so do their
        derivatives. One number a head is "row" with K and V flattened.
      axis: Of time in b; not the last one of "block", "dense" and "row", nor the last two of
        "matrix".
      reverse: Computes h[t] = a[t] h[t+1] + b[t] instead.
      axis_name: Mesh axis over which time is split, inside `jax.shard_map`; shard i holds the i-th
        piece.
      impl: "auto" picks by `jaxpar.scan.dispatch` for the platform compiled for; "sequential",
        "associative" and "chunked" insist, and "kernel" does where the platform has one that takes
        these arrays (else it is "auto").

    Returns:
      h, of b's shape and dtype. The carry is at least float32, also where a and b are bfloat16 or
      float16.

    Raises:
      UsageError: For shapes, dtypes, kinds or an axis that do not fit.
    """
    if kind not in KINDS:
        raise UsageError(f"kind={kind!r} is unknown; legal are {', '.join(map(repr, KINDS))}.")
    a, b = jnp.asarray(a), jnp.asarray(b)
    h0 = None if h0 is None else jnp.asarray(h0)
    axis = _time_axis(axis, b.shape, _STATE_AXES[kind])
    wanted = _transition_shape(kind, b.shape)
    if a.shape != wanted:
        raise UsageError(
            f"kind={kind!r} with b of shape {b.shape} takes a of shape {wanted}, but a has {a.shape}."
        )
    _check_start(h0, b, axis)
    spec = _Spec(kind, axis, reverse, axis_name, _known(impl), _carry_dtype(a, b, h0))
    if kind in _RINGS:
        return _solve(_RINGS[kind], a, b, h0, spec)
    if kind == "diag":
        return _solve(LANE_RING, ((a,),), (b,), None if h0 is None else (h0,), spec)[0]
    k = b.shape[-1]
    rows = tuple(tuple(a[..., i, j] for j in range(k)) for i in range(k))
    return jnp.stack(
        _solve(LANE_RING, rows, _unstack(b), None if h0 is None else _unstack(h0), spec), -1
    )


def affine_lanes(
    a: tuple[Lanes, ...],
    b: Lanes,
    h0: Lanes | None = None,
    *,
    axis: int = 0,
    reverse: bool = False,
    axis_name: str | None = None,
    impl: str = "auto",
) -> Lanes:
    """Returns the states of k x k affine recurrences whose entries are separate arrays.

    The same as `affine_scan(kind="block")` with a[i][j], b[i] and h[i] apart, which needs no
    strided access.

    Args:
      a: k rows of k arrays, all of one shape and dtype with time at `axis`.
      b: k arrays of that shape.
      h0: k arrays of that shape without time; zeros by default.
      axis: As in `affine_scan`, and so are the rest.
      reverse: As there.
      axis_name: As there.
      impl: As there.

    Returns:
      k arrays, of b's shape and dtype.

    Raises:
      UsageError: For lanes that do not fit each other.
    """
    a, b = jax.tree.map(jnp.asarray, (tuple(map(tuple, a)), tuple(b)))
    h0 = None if h0 is None else tuple(map(jnp.asarray, h0))
    if not b or len(a) != len(b) or any(len(row) != len(b) for row in a):
        raise UsageError(
            f"{len(b)} lanes of b take a square of as many rows in a, but a has {list(map(len, a))}."
        )
    for name, lanes in (("a", [x for row in a for x in row]), ("b", b)):
        if any(x.shape != b[0].shape or x.dtype != lanes[0].dtype for x in lanes):
            found = sorted({f"{x.dtype}{list(x.shape)}" for x in lanes})
            raise UsageError(
                f"lanes of {name} take one dtype and b's shape {b[0].shape}, but they are {found}."
            )
    axis = _time_axis(axis, b[0].shape, 0)
    if h0 is not None and len(h0) != len(b):
        raise UsageError(f"h0 takes one array a lane of b, {len(b)}, but has {len(h0)}.")
    for x in h0 or ():
        _check_start(x, b[0], axis)
    spec = _Spec(
        "block", axis, reverse, axis_name, _known(impl), _carry_dtype(a[0][0], b[0], *(h0 or ()))
    )
    return _solve(LANE_RING, a, b, h0, spec)


@functools.partial(jax.jit, static_argnums=(0, 4))  # a call outside of jit compiles once
def _solve(ring: Ring, a, b, h0, spec: _Spec):
    """Solves h - a shift(h) = b as a linear system in (h0, h), which is what makes derivatives exact and cheap."""
    axis, reverse = spec.axis, spec.reverse
    if num_steps(b, axis) == 0:
        return b
    a, b, h0 = together((a, b, h0))
    # `custom_linear_solve` transposes all of its right-hand side or none of it.
    h0, b = moving_with(h0, (a, b)), moving_with(b, h0)

    def matvec(x):
        start, h = x
        pushed = ring.apply(cast(a, spec.carry), cast(_before(h, start, spec), spec.carry))
        return start, jax.tree.map(lambda y, z: y - z.astype(y.dtype), h, pushed)

    def solve(_, rhs):
        start, b = rhs
        return start, _scan(ring, a, b, start, spec)

    def transpose_solve(_, cotangent):
        # (I - A S)^T g = cotangent: the same recurrence backwards in time, with transposed transitions one step later.
        start, cotangents = cotangent
        back = spec._replace(reverse=not reverse)
        other, transitions = transposed(ring, a)
        g = _scan(other, transitions, cotangents, None, back, adjoint=True)
        if start is None:
            return None, g
        first = -1 if reverse else 0
        out = other.apply(*(cast(take(x, first, axis), spec.carry) for x in (transitions, g)))
        if spec.axis_name is not None:  # only the piece with the first step has h0 in it
            here = sharded.is_first(spec.axis_name, reverse)
            out = jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros_like(x)), out)
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), start, out), g

    return lax.custom_linear_solve(matvec, (h0, b), solve, transpose_solve)[1]


def _scan(ring: Ring, a, b, h0, spec: _Spec, adjoint: bool = False):
    """Computes the recurrence, of which a piece if time is split over devices.

    The `adjoint` one takes at each step the transition of the step before it, in the order of the
    scan.
    """
    how = {"axis": spec.axis, "reverse": spec.reverse}
    if spec.axis_name is not None:
        a, adjoint = (_before(a, None, spec), False) if adjoint else (a, False)
        piece = _xla.compose_steps(ring, a, b, carry=spec.carry, **how)
        start = jax.tree.map(jnp.zeros_like, piece[1]) if h0 is None else cast(h0, spec.carry)
        push = lambda h, piece: jax.tree.map(jnp.add, ring.apply(piece[0], h), piece[1])  # noqa: E731
        h0 = sharded.incoming(push, piece, start, spec.axis_name, spec.reverse)
    plain = {
        name: functools.partial(_plain, run, ring, spec, adjoint) for name, run in _PLAIN.items()
    }
    if spec.impl in plain:
        return plain[spec.impl](a, b, h0)
    runs = {}
    for platform in ("cpu", "cuda", "tpu", "other"):
        kernel = kernel_for(platform, ring, a, b, h0, axis=spec.axis)
        asked = {
            "num_steps": num_steps(b, spec.axis),
            "kernel": kernel is not None,
            "kind": spec.kind,
        }
        impl = dispatch.choose_impl(platform, **asked)
        if kernel is not None and "kernel" in (impl, spec.impl):
            runs[platform] = functools.partial(_kernel, kernel, platform, spec, adjoint)
        else:
            runs[platform] = plain[impl]
    other = runs.pop("other")
    return lax.platform_dependent(
        a, b, h0, default=other, **{k: run for k, run in runs.items() if run is not other}
    )


def _kernel(run, platform, spec: _Spec, adjoint: bool, a, b, h0):
    if platform == "cuda":  # reads each step's transition where it lies
        return run(a, b, h0, axis=spec.axis, reverse=spec.reverse, adjoint=adjoint)
    a = _before(a, None, spec) if adjoint else a
    return run(a, b, h0, axis=spec.axis, reverse=spec.reverse)


def _plain(run, ring, spec: _Spec, adjoint: bool, a, b, h0):
    how = {"axis": spec.axis, "reverse": spec.reverse, "carry": spec.carry}
    if adjoint and run is _xla.sequential:  # which can look one step back: no copy
        return run(ring, a, b, h0, **how, adjoint=True)
    return run(ring, _before(a, None, spec) if adjoint else a, b, h0, **how)


def _before(x, start, spec: _Spec):
    """Returns x[t-1] at t (x[t+1] if `reverse`), and `start`, by default zeros, where there is none."""
    axis, reverse = spec.axis, spec.reverse
    start = jax.tree.map(jnp.zeros_like, take(x, 0, axis)) if start is None else start
    start = jax.tree.map(lambda y, z: y.astype(z.dtype), start, x)
    if spec.axis_name is not None:
        earlier = sharded.from_earlier(take(x, 0 if reverse else -1, axis), spec.axis_name, reverse)
        here = sharded.is_first(spec.axis_name, reverse)
        start = jax.tree.map(lambda y, z: jnp.where(here, y, z), start, earlier)
    return shifted(x, start, axis, reverse=reverse)


def _unstack(x):
    return tuple(x[..., i] for i in range(x.shape[-1]))


def _known(impl):
    if impl not in IMPLS:
        raise UsageError(f"impl={impl!r} is unknown; legal are {', '.join(map(repr, IMPLS))}.")
    return impl


def _transition_shape(kind, shape):
    """Returns the shape of a for b's."""
    if kind == "row":
        return shape[:-1]
    if kind == "matrix":
        return (*shape[:-1], shape[-2])
    return shape if kind == "diag" else shape + shape[-1:]


def _time_axis(axis, shape, state_axes):
    """Returns the axis counted from the front."""
    place, last = axis + len(shape) if axis < 0 else axis, len(shape) - state_axes - 1
    if not 0 <= place <= last:
        legal = (
            f"legal are 0 to {last}"
            if last >= 0
            else f"it takes one before the {state_axes} of the state"
        )
        raise UsageError(f"axis={axis} is no time axis of b with shape {shape}; {legal}.")
    return place


def _check_start(h0, b, axis):
    wanted = b.shape[:axis] + b.shape[axis + 1 :]
    if h0 is not None and h0.shape != wanted:
        raise UsageError(f"h0 takes b's shape without time, {wanted}, but has {h0.shape}.")


def _carry_dtype(a, b, *h0):
    """Returns the dtype of the carry: what a, b and h0 promote to, and at least float32."""
    arrays = [("a", a), ("b", b)] + [("h0", x) for x in h0 if x is not None]
    for name, x in arrays:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise UsageError(f"{name} takes floating or complex numbers, but is of {x.dtype}.")
    dtype = functools.reduce(jnp.promote_types, (x.dtype for _, x in arrays), jnp.dtype("float32"))
    if jnp.issubdtype(dtype, jnp.complexfloating) and not jnp.issubdtype(
        b.dtype, jnp.complexfloating
    ):
        raise UsageError(
            f"b is of {b.dtype}, and so would be the result, but a or h0 is complex; make b complex."
        )
    return dtype
