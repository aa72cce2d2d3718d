"""Sequence layers: a cell over a whole sequence in parallel, or over its next tokens with a state of constant size.

Both are one function: `recurrent(cell, params, xs, h0)` returns the state that the next call goes on from, and a call
with T = 1 is a step of decoding. Inside, time is the leading axis: each step reads and writes contiguous rows.
"""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxpar.mesh import platform
from jaxpar.nn.cells.cell import SequenceCell
from jaxpar.solve import Block, Dense, Stats, parallel_scan
from jaxpar.solve.problem import Chooser, Method
from jaxpar.types import PyTree, UsageError

__all__ = ["cell_states", "first_state", "method_for", "recurrent"]


def recurrent(
    cell: SequenceCell,
    params: PyTree,
    xs: Float[Array, "B T D"],
    h0: PyTree | None = None,
    *,
    method: Method | Chooser | None = None,
    resets: Bool[Array, "B T"] | None = None,
    with_stats: bool = False,
) -> Any:  # two results or three, as `with_stats` says
    """Runs a cell over sequences: ys[:, t] = output(h[t]), h[t] = step(h[t-1], xs[:, t]).

    Args:
      cell: What is run; static.
      params: As from `cell.init`.
      xs: Inputs, of any floating dtype; matrix products with them are made in it, the state is float32 at least.
      h0: State before the first step, by default `cell.initial`; pass the last state of an earlier call to go on there.
      method: How the recurrence is solved, one of `jaxpar.solve`. By default the closed form of a cell that has one
        (one scan, no iteration), else what `jaxpar.solve.explain` says.
      resets: True where a sequence starts anew: the step sees the initial state instead of the last one.
      with_stats: Whether to return `jaxpar.solve.Stats` as well; None in their place where nothing was iterated.

    Returns:
      Outputs [B, T, n] in the dtype of xs, and the last state; then the stats, if asked for.

    Raises:
      UsageError: If xs has not three axes or `resets` not the first two of them.
    """
    if xs.ndim != 3:
        raise UsageError(
            f"a recurrent layer takes xs [B, T, D] with three axes, not {xs.ndim}: shape {xs.shape}."
        )
    if resets is not None and resets.shape != xs.shape[:2]:
        raise UsageError(
            f"resets of shape {resets.shape} do not fit xs of shape {xs.shape}; give [B, T]."
        )
    projections = cell.input_projections(params, jnp.swapaxes(xs, 0, 1))
    h0 = first_state(cell, h0, xs.shape[0], projections)
    states, stats = cell_states(
        cell, params, projections, h0, method=method, resets=None if resets is None else resets.T
    )
    last = jax.tree.map(lambda h: h[-1], states) if xs.shape[1] else h0
    ys = jnp.swapaxes(cell.output(params, states), 0, 1).astype(xs.dtype)
    return (ys, last, stats) if with_stats else (ys, last)


def first_state(cell: SequenceCell, h0: PyTree | None, batch: int, projections: PyTree) -> PyTree:
    """Returns the state before the first step, given or the cell's initial one, in float32 at least."""
    wide = jnp.promote_types(jnp.result_type(*jax.tree.leaves(projections)), jnp.float32)
    return (
        cell.initial((batch,), wide) if h0 is None else jax.tree.map(lambda h: h.astype(wide), h0)
    )


def cell_states(
    cell: SequenceCell,
    params: PyTree,
    projections: PyTree,
    h0: PyTree,
    *,
    method: Method | Chooser | None = None,
    resets: Bool[Array, "T B"] | None = None,
) -> tuple[PyTree, Stats | None]:
    """Computes every state from the projections, time first: leaves [T, B, ...] and h0 [B, ...] -> states [T, B, ...].

    `method` and `resets` are those of `recurrent`, which makes the projections and calls this. Returns the states, and
    the solver's stats or None.
    """
    lane: Any = jax.tree.leaves(projections)[0]
    if method is None:
        states = cell.closed_form(params, projections, h0, resets)
        if states is not None:
            return states, None

    is_state = all(h.shape == lane.shape[1:] for h in jax.tree.leaves(h0))
    if (
        resets is not None and platform() == "gpu" and is_state
    ):  # the kernels take inputs like the state
        resets = jnp.broadcast_to(resets[..., None], lane.shape).astype(lane.dtype)

    def step(h, inputs):
        projections, reset = inputs
        if reset is not None:
            h = jax.tree.map(
                lambda new, old: jnp.where(_beside(reset, old) > 0, new, old), cell.initial((1,)), h
            )
        h = jax.tree.map(
            lambda new, old: new.astype(old.dtype), cell.step(params, h, projections), h
        )
        return h, h

    _, states, stats = parallel_scan(
        step, h0, (projections, resets), method=method_for(cell, method), with_stats=True
    )
    return states, stats


def method_for(cell: SequenceCell, method: Method | Chooser | None) -> Method | Chooser | None:
    """Returns the method with the structure of a cell's Jacobian declared; None stays None.

    Without a method `parallel_scan` takes one by platform, shapes and program, and reads the structure itself.
    """
    known = {"diag": "diag", "block": Block(cell.lanes), "dense": Dense(1)}
    if method is not None and cell.jacobian in known and method.jac == "auto":
        return dataclasses.replace(cast(Any, method), jac=known[cell.jacobian])
    return method


def _beside(flags: jax.Array, like: jax.Array) -> jax.Array:
    """Returns flags [..., B] with trailing axes of size 1, to choose rows of an array [..., B, ...]."""
    return flags.reshape(flags.shape + (1,) * (like.ndim - flags.ndim))
