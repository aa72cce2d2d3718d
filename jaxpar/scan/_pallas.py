"""The diagonal recurrence on a TPU: one pass over memory, time in sequence, the state in VMEM.

The grid is (rows, blocks of lanes, blocks of time), and time is its last, sequential dimension, so that the state of
a lane waits in scratch memory for the next block while that one is fetched. Inside a block a step is one row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LARGEST_BLOCK = 1
"""Diagonal recurrences only."""

STEPS = 128
"""Steps of a block: with `LANES` lanes in float32, three arrays twice are 3 MiB of the 16 that a kernel may have."""

LANES = 1024
"""Lanes of a block: eight times the 128 of a vector."""


def affine(a, b, h0, *, axis: int, reverse: bool, interpret: bool = False):
    """Returns h[t] = a[t] h[t-1] + b[t] in b's dtype, carried in float32; without `h0` the first a is not used.

    Args:
      a: `((a,),)`, one lane: `[..., T, D]`, T at least `STEPS`, float32 or bfloat16.
      b: `(b,)`, of that shape.
      h0: `(h0,)`, `[..., D]`, or None.
      axis: Of time: the last but one.
      reverse: From the last step to the first.
      interpret: Runs on any platform, slowly.
    """
    ((a,),), (b,) = a, b
    if axis != b.ndim - 2 or b.shape[axis] < STEPS:
        raise ValueError(
            f"takes {STEPS} steps or more at the last axis but one, not at axis {axis} of {b.shape}"
        )
    *batch, length, width = b.shape
    rows = math.prod(batch)
    # Rows of a tile in VMEM, which a slice of rows must start at: 8 of 32 bits, 16 of 16 bits.
    group = 8 if a.dtype == b.dtype == jnp.float32 else 16
    steps, lanes = STEPS, min(LANES, width)
    grid = (rows, pl.cdiv(width, lanes), pl.cdiv(length, steps))

    def block(row, lane, time):
        # The grid always counts upwards; backwards in time the blocks are fetched from the last one on.
        return row, (grid[2] - 1 - time if reverse else time), lane

    timed = pl.BlockSpec((None, steps, lanes), block)
    start = pl.BlockSpec((None, 1, lanes), lambda row, lane, time: (row, 0, lane))
    starts = () if h0 is None else (h0[0].reshape(rows, 1, width),)
    h = pl.pallas_call(
        functools.partial(_kernel, length=length, group=group, reverse=reverse),
        # Inside `shard_map` the result varies over the mesh axes that b does, which a kernel has to say itself.
        out_shape=jax.ShapeDtypeStruct(
            (rows, length, width), b.dtype, manual_axis_type=jax.typeof(b).manual_axis_type
        ),
        grid=grid,
        in_specs=[timed, timed] + [start] * len(starts),
        out_specs=timed,
        scratch_shapes=[pltpu.VMEM((1, lanes), jnp.float32)],
        # Time is "arbitrary", that is, in order: the scratch memory carries the state from block to block.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="affine",
    )(a.reshape(rows, length, width), b.reshape(rows, length, width), *starts)
    return (h.reshape(b.shape),)


def _kernel(a_ref, b_ref, *refs, length, group, reverse):
    *start_ref, h_ref, state_ref = refs
    steps = a_ref.shape[0]
    time, num_blocks = pl.program_id(2), pl.num_programs(2)
    place = (num_blocks - 1 - time if reverse else time) * steps  # of the block's first step

    @pl.when(
        time == 0
    )  # a new row and block of lanes: what the scratch holds is another one's last state
    def _():
        state_ref[...] = (
            start_ref[0][...].astype(jnp.float32) if start_ref else jnp.zeros_like(state_ref)
        )

    def advance(index, state):
        # The compiler takes a slice at a computed row only if it is told that a tile starts there.
        begin = pl.multiple_of((steps // group - 1 - index if reverse else index) * group, group)
        a, b = (ref[pl.ds(begin, group), :].astype(jnp.float32) for ref in (a_ref, b_ref))
        step = place + begin + lax.broadcasted_iota(jnp.int32, a.shape, 0)
        if (
            not start_ref
        ):  # from zeros the first a must not matter: where it is infinite, 0 * inf would be NaN
            a = jnp.where(step == (length - 1 if reverse else 0), 0.0, a)
        if (
            reverse and length % steps
        ):  # what lies beyond the end comes first, and must leave the state at zero or h0
            a, b = jnp.where(step < length, a, 1.0), jnp.where(step < length, b, 0.0)
        # A row at a time in float32: the vector unit works along lanes, and 16-bit states would round at every step.
        states: list = [None] * group
        for row in range(group)[::-1] if reverse else range(group):
            keep = a[row : row + 1]
            # Selected, as in plain XLA: a reset forgets NaN and infinity too.
            state = keep * jnp.where(keep == 0, 0.0, state) + b[row : row + 1]
            states[row] = state
        h_ref[pl.ds(begin, group), :] = jnp.concatenate(states, 0).astype(h_ref.dtype)
        return state

    state_ref[...] = lax.fori_loop(0, steps // group, advance, state_ref[...])
