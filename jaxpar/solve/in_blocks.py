"""Sequences cut into blocks, and blocks run one after the other inside, all at once.

So the states of blind leaves are shown to be a loop's own: f makes them of each other, to the bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.scan.varying import varying_as
from jaxpar.solve.problem import Problem
from jaxpar.solve.rounding import residual_bound, wide, within
from jaxpar.solve.structure import Leaves
from jaxpar.types import Array, PyTree

BLOCK = 128
"""Steps that are run one after the other, in all blocks at once."""

PASSES = 4
"""Runs of all blocks. Two suffice where a recurrence forgets a start within a block."""


def cut(tree: PyTree, length: int, size: int) -> PyTree:
    """Returns arrays [T, ...] as windows [ceil(T / size), size, ...]; the last step fills up the last one."""
    count = math.ceil(length / size)
    rows = jnp.minimum(jnp.arange(count * size), length - 1)

    def one(leaf):
        whole = leaf if count * size == length else leaf[rows]
        return whole.reshape(count, size, *leaf.shape[1:])

    return jax.tree.map(one, tree)


def joined(tree: PyTree, length: int) -> PyTree:
    """Returns windows of arrays as arrays [T, ...], without what filled them up."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:length], tree)


def scanned(f: Callable, start: Leaves, xs: PyTree, length: int, unroll: int | None = None) -> Leaves:
    """Returns the outputs of `lax.scan`, whose loop is unrolled as `run_sequentially` says."""
    run = functools.partial(jax.lax.scan, f, start, xs, length)
    if unroll is not None:
        return run(unroll=unroll)[1]
    return jax.lax.platform_dependent(default=lambda: run()[1], cuda=lambda: run(unroll=min(8, length))[1])


class _Run(NamedTuple):
    """States before each block and inside of it, and up to which block they are the loop's."""

    starts: Leaves
    inside: Leaves
    is_met: Array
    passes: Array


def settle(problem: Problem, h: Leaves, is_sound: Array, is_padding: Array) -> tuple[Leaves, Array]:
    """Returns states that f itself makes of each other, and which pass, [T]: the loop's where all before pass too.

    Every block of steps is run from the state that was found before it. Where a block ends in
    the state from which the next one starts, to the bit in blind leaves, the states are those
    of the loop, by induction. Otherwise all blocks are run again from the new ends.

    Cost: `BLOCK` steps in sequence a pass, of all blocks at once; an evaluation of f at each step.

    Args:
      problem: The recurrence.
      h: States [T, ...] that were found.
      is_sound: Whether the state before the first step can be trusted.
      is_padding: Steps that do not count, [T].
    """
    length = problem.length
    block = min(BLOCK, length)
    if problem.axis_name is not None:
        # A part ends with a block, so that the next device can start from its end.
        block = max(size for size in range(1, block + 1) if length % size == 0)
    count = math.ceil(length / block)
    xs = cut(problem.xs, length, block)
    ends = dataclasses.replace(problem, length=count, valid=None)

    def run(before: Leaves, x: Leaves) -> Leaves:
        def one(state, row):
            state = problem.step(state, row)
            return state, state

        entry = varying_as(before, (before, x, problem.start))
        return scanned(one, entry, x, block)

    def advance(last: _Run) -> _Run:
        inside = jax.vmap(run, axis_size=count)(last.starts, xs)
        starts = ends.shift(tuple(leaf[:, -1] for leaf in inside))
        is_met = _is_met(ends, starts, last.starts)
        return varying_as(_Run(starts, inside, is_met, last.passes + 1), problem.start)

    def goes_on(last: _Run) -> Array:
        is_open = ~last.is_met.all()
        if problem.axis_name is not None:
            is_open = jax.lax.pmax(is_open.astype(jnp.int32), problem.axis_name) > 0
        return is_sound & is_open & (last.passes < PASSES)

    found = tuple(leaf[:, -1] for leaf in cut(h, length, block))
    empty = tuple(jnp.zeros((count, block, *leaf.shape[1:]), leaf.dtype) for leaf in h)
    first = _Run(ends.shift(found), empty, jnp.zeros(count, bool), jnp.int32(0))
    last = jax.lax.while_loop(goes_on, advance, varying_as(first, problem.start))
    out = joined(last.inside, length)
    passes = jnp.repeat(last.is_met, block, total_repeat_length=count * block)[:length]
    return out, (passes | is_padding) & is_sound


def _is_met(ends: Problem, made: Leaves, taken: Leaves) -> Array:
    """Returns before which blocks the state that was made is the one that was taken, [blocks]."""
    is_met = jnp.ones(ends.length, bool)
    for number in ends.structure.blind:
        a = made[number]
        b = taken[number]
        # Zeros of either sign differ in what is made of them, and no NaN is the loop's by a comparison.
        is_same = (a == b) & (jnp.signbit(a) == jnp.signbit(b))
        is_met &= is_same.reshape(ends.length, -1).all(1)
    gap = tuple(a.astype(wide(a)) - b.astype(wide(b)) for a, b in zip(made, taken, strict=True))
    return is_met & within(gap, residual_bound(ends, made))
