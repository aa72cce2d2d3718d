"""Sequences cut into blocks, and blocks run one after the other inside, all at once.

So the states of blind leaves are shown to be a loop's own: f makes them of each other, to the bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.scan.varying import varying_as
from jaxpar.solve.problem import Problem
from jaxpar.solve.rounding import fractions, over_devices, residual_bound, step_largest, wide
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


def scanned(
    f: Callable, start: Leaves, xs: PyTree, length: int, unroll: int | None = None
) -> Leaves:
    """Returns the outputs of `lax.scan`, unrolled as `run_sequentially` says."""
    run = functools.partial(jax.lax.scan, f, start, xs, length)
    if unroll is not None:
        return run(unroll=unroll)[1]
    return jax.lax.platform_dependent(
        default=lambda: run()[1], cuda=lambda: run(unroll=min(8, length))[1]
    )


class Meeting(NamedTuple):
    """Blocks of steps, each run from the state that the pass before left at its start.

    Attributes:
      starts: States before each block, [blocks, ...], from which a next pass starts.
      inside: States in each block, [blocks, steps, ...].
      is_same: Whether a block started where the one before it ends, to the bit in every leaf,
        [blocks].
      gaps: Largest distance of a start from the end before it, in units of what a residual may be,
        [blocks].
      gap: The largest of all.
      earlier: The same of the pass before.
      least: Least of all entries' largest distances, of those that are not zero.
      rate: What the last pass left of the distances of before: the largest of all entries over the
        least; infinite after the first one.
      passes: Made, int32.
    """

    starts: Leaves
    inside: Leaves
    is_same: Array
    gaps: Array
    gap: Array
    earlier: Array
    least: Array
    rate: Array
    passes: Array


def meet(
    ends: Problem,
    run: Callable[[Leaves, Leaves], Leaves],
    found: Leaves,
    steps: int,
    goes_on: Callable[[Meeting], Array],
    is_exact: bool = False,
) -> Meeting:
    """Runs all blocks at once from the ends of the blocks before them, again and again while `goes_on` is true.

    Where all blocks up to one start where the one before ends, to the bit, they are the loop's own,
    by induction. So is one block more after every pass.

    Args:
      ends: The recurrence from block to block, with the inputs of each.
      run: All states of a block, [steps, ...], of the state before it and its inputs.
      found: States at the end of each block, [blocks, ...], as far as they are known.
      steps: Of a block.
      goes_on: Whether to run the blocks once more; they are run once in any case.
      is_exact: Whether `found` are by Newton's method; see `residual_bound`.
    """
    count = ends.length

    def advance(last: Meeting) -> Meeting:
        inside = jax.vmap(run, axis_size=count)(last.starts, ends.xs)
        starts = ends.shift(tuple(leaf[:, -1] for leaf in inside))
        gap = tuple(
            a.astype(wide(a)) - b.astype(wide(b)) for a, b in zip(starts, last.starts, strict=True)
        )
        parts = fractions(gap, residual_bound(ends, starts, is_exact))
        gaps = step_largest(parts)
        largest = over_devices(ends, jnp.where(jnp.isfinite(gaps), gaps, jnp.inf).max())
        after = Meeting(
            starts=starts,
            inside=inside,
            is_same=_is_same(starts, last.starts),
            gaps=gaps,
            gap=largest,
            earlier=last.gap,
            least=_least(ends, parts),
            rate=jnp.where(last.least > 0, largest / last.least, jnp.inf),
            passes=last.passes + 1,
        )
        return varying_as(after, ends.start)

    def is_open(last: Meeting) -> Array:
        return (last.passes == 0) | (over_devices(ends, goes_on(last).astype(jnp.int32)) > 0)

    no = jnp.zeros(count, bool)
    first = Meeting(
        starts=ends.shift(found),
        inside=tuple(jnp.zeros((count, steps, *leaf.shape[1:]), leaf.dtype) for leaf in found),
        is_same=no,
        gaps=jnp.full(count, jnp.inf, jnp.float32),
        gap=jnp.float32(jnp.inf),
        earlier=jnp.float32(jnp.inf),
        least=jnp.float32(0),
        rate=jnp.float32(jnp.inf),
        passes=jnp.int32(0),
    )
    return jax.lax.while_loop(is_open, advance, varying_as(first, ends.start))


class Settled(NamedTuple):
    """States that f makes of each other.

    Attributes:
      h: States [T, ...].
      passes: Which are right if all before them are, [T].
      residual: Largest distance of a state from f of the one before it, in units of what it may be.
    """

    h: Leaves
    passes: Array
    residual: Array


def settle(problem: Problem, h: Leaves, is_sound: Array, is_padding: Array) -> Settled:
    """Returns states that f itself makes of each other, to the bit in blind leaves, and which pass.

    Every block of steps is run from the state that was found before it. Where a block ends in the
    state from which the next one starts, to the bit, the states are those of the loop, by
    induction. Otherwise all blocks are run again from the new ends. In the end other leaves may
    differ by what a residual may be, if f makes of either the same blind leaves.

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
    ends = dataclasses.replace(problem, xs=cut(problem.xs, length, block), length=count, valid=None)

    def goes_on(last: Meeting) -> Array:
        return is_sound & ~last.is_same.all() & (last.passes < PASSES)

    found = tuple(leaf[:, -1] for leaf in cut(h, length, block))
    last = meet(ends, block_of(problem, block), found, block, goes_on)
    residuals = _residuals(problem, ends, last)
    is_joined = jnp.repeat(residuals <= 1, block, total_repeat_length=count * block)[:length]
    residual = jnp.where(is_padding[::block], 0, residuals).max()
    return Settled(
        joined(last.inside, length),
        (is_joined | is_padding) & is_sound,
        over_devices(problem, residual),
    )


def _residuals(problem: Problem, ends: Problem, last: Meeting) -> Array:
    """Returns how far each block's first state is from f of the state before it, [blocks], in units of what passes.

    Blind leaves have to be the same to the bit: else that is infinite.
    """
    inputs = tuple(leaf[:, :1] for leaf in ends.xs)
    first = jax.vmap(block_of(problem, 1), axis_size=ends.length)(last.starts, inputs)
    there = tuple(leaf[:, :1] for leaf in last.inside)
    gap = tuple(a.astype(wide(a)) - b.astype(wide(b)) for a, b in zip(first, there, strict=True))
    sizes = step_largest(fractions(gap, residual_bound(ends, first)))
    blind = sorted(problem.structure.blind)
    is_blind_same = _is_same(
        [first[number] for number in blind], [there[number] for number in blind]
    )
    # The same states are not looked at: another program could round them differently.
    return jnp.where(last.is_same, 0, jnp.where(is_blind_same, sizes, jnp.inf))


def block_of(problem: Problem, steps: int) -> Callable[[Leaves, Leaves], Leaves]:
    """Returns what runs steps one after the other: all states of the state before and of inputs [steps, ...]."""

    def run(before: Leaves, xs: Leaves) -> Leaves:
        def one(state, row):
            state = problem.step(state, row)
            return state, state

        entry = varying_as(before, (before, xs, problem.start))
        return scanned(one, entry, xs, steps)

    return run


def _is_same(made: Sequence[Array], taken: Sequence[Array]) -> Array:
    """Returns before which blocks the state that was made is the one that was taken, to the bit, [blocks]."""
    is_same = jnp.ones(len(made[0]), bool)
    for a, b in zip(made, taken, strict=True):
        # Zeros of either sign differ in what is made of them, and no NaN is the loop's by a comparison.
        is_equal = (a == b) & (jnp.signbit(a) == jnp.signbit(b))
        is_same &= is_equal.reshape(len(a), -1).all(1)
    return is_same


def _least(ends: Problem, parts: Leaves) -> Array:
    """Returns the least of what each entry's largest is over all blocks; zeros do not count."""
    sizes = [over_devices(ends, leaf.max(0)) for leaf in parts]
    return jnp.stack(
        [jnp.where(leaf > 0, leaf, jnp.inf).min(initial=jnp.inf) for leaf in sizes]
    ).min()
