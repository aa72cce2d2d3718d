"""Robots: bodies that run a program on the messages of the two speakers nearest to them.

A robot has a memory and a program of 16 signals. The program's first seven choose the operation, the largest, and the
next eight are a truth table. On signals 0 and 1 the operations are logic, so that robots in a row are circuits, and
operation 6 is one cell of an elementary automaton. A bit of the cell that it stands on is its tape.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxpar.life.bodies import Actions, Neighbours, join_actions, read_actions
from jaxpar.life.units import ONE, scaled, whole
from jaxpar.types import Array

__all__ = ["OPERATIONS", "PROGRAM", "TAPE", "Robots"]

OPERATIONS = ("copy", "keep", "and", "and_or", "gated_xor", "nand", "table")
"""Of memory m and messages a, b: a; m; m a; m a + b; m xor a where b is 1, else m; 1 - a b; table[4 a + 2 m + b].

The last two change the last entry alone: 1 - a b of silent neighbours would set all of the body in motion.
"""
TABLE = slice(7, 15)
PROGRAM = 16
TAPE = 4
"""The memory's entry that over 0.99 reads the cell's bit into the last entry, and below -0.99 writes it there."""
_PULL = round(0.99 * ONE)


class Robots(NamedTuple):
    """R robots; they compute without energy, and move, push and eat by the first four entries of their memory.

    Attributes:
        energy: int32 `[R]`.
        position: int32 `[R, 2]`.
        memory: int32 `[R, 16]`, signals; what it holds is what it says.
        program: int32 `[R, 16]`.
    """

    energy: Array
    position: Array
    memory: Array
    program: Array


class Speakers(NamedTuple):
    """The two bodies that each robot hears: of the two nearest the one further west comes first, of x alike by y.

    So a program means the same wherever it runs, and left is left all around the torus. A single one is the first.

    Attributes:
        who: int32 `[R, 2]`.
        heard: bool `[R, 2]`.
    """

    who: Array
    heard: Array


def speakers(near: Neighbours) -> Speakers:
    """Of the two nearest of each robot, among all bodies, those within sight."""
    x, y = near.offset[..., 0], near.offset[..., 1]
    swap = near.seen[:, 1] & ((x[:, 0] > x[:, 1]) | ((x[:, 0] == x[:, 1]) & (y[:, 0] > y[:, 1])))
    order = lambda pair: jnp.where(swap[:, None], pair[:, ::-1], pair)  # noqa: E731
    return Speakers(order(near.who), order(near.seen))


def reprogram(program: Array, messages: Array, strengths: Array) -> Array:
    """Programs drawn to what agents say: p + sum of s (m - p) / max(1, sum of s), of messages `[R, 2, 16]`."""
    total = jnp.maximum(jnp.sum(strengths, 1), ONE)[:, None]
    pull = jnp.sum(strengths[..., None] * (messages - program[:, None]), 1)
    # Towards zero, alike for both signs.
    return program + jnp.sign(pull) * (jnp.abs(pull) // total)


def operate(memory: Array, program: Array, first: Array, second: Array) -> Array:
    """The memories after one operation on the messages `first` and `second`: int32 `[R, 16]`, from -1 to 1."""
    product = scaled(memory, first)
    xor = first - 2 * product
    bits = [(m[:, -1] > 0).astype(jnp.int32) for m in (first, memory, second)]
    entry = jnp.take_along_axis(
        program[:, TABLE], (4 * bits[0] + 2 * bits[1] + bits[2])[:, None], 1
    )
    results = jnp.stack(
        [
            first,
            memory,
            product,
            product + second,
            memory + scaled(second, xor),
            memory.at[:, -1].set(ONE - scaled(first[:, -1], second[:, -1])),
            memory.at[:, -1].set(entry[:, 0]),
        ]
    )
    chosen = jnp.argmax(program[:, : len(OPERATIONS)], 1)
    result = jnp.take_along_axis(results, chosen[None, :, None], 0)[0]
    return jnp.clip(result, -ONE, ONE)


def tick(
    robots: Robots, spoken: Array, near: Speakers, bit: Array, cells: Array
) -> tuple[Robots, Array]:
    """One operation of all robots at once, then their tapes: what is read is the bit from before any writes.

    Args:
        robots: R of them.
        spoken: int32 `[N, 16]`, the agents' messages.
        near: whom each hears.
        bit: int32 `[S^2]`, of the cells.
        cells: int32 `[R]`, where they stand.

    Returns:
        The robots, and the bits. Of several that write one cell, a 1 wins.
    """
    said = jnp.concatenate((spoken, robots.memory))
    first, second = (jnp.where(near.heard[:, i, None], said[near.who[:, i]], 0) for i in (0, 1))
    memory = operate(robots.memory, robots.program, first, second)
    reads, writes = memory[:, TAPE] > _PULL, memory[:, TAPE] < -_PULL
    memory = memory.at[:, -1].set(jnp.where(reads, bit[cells] * ONE, memory[:, -1]))
    # 2 for a 1 that is written, 1 for a 0, 0 for nothing: the largest wins.
    mark = jnp.where(writes, 1 + (memory[:, -1] > 0), 0).astype(jnp.int32)
    marks = jnp.zeros_like(bit).at[cells].max(mark)
    return robots._replace(memory=memory), jnp.where(marks > 0, marks - 1, bit)


def robot_actions(robots: Robots) -> Actions:
    """What robots do with their bodies: moves and pushes while they have energy, and eating."""
    works = (robots.energy > 0)[:, None]
    body = jnp.where(works, robots.memory[:, :3], 0)
    parts = {"move": body[:, :2], "push": body[:, 2:], "eat": robots.memory[:, 3:4]}
    return read_actions(join_actions(parts))


def program_of(operation: str, table: tuple[int, ...] = (0,) * 8) -> Array:
    """The program of an operation of `OPERATIONS`, with its truth table of 8 bits."""
    choice = jnp.asarray([float(name == operation) for name in OPERATIONS])
    return whole(jnp.concatenate((choice, jnp.asarray(table, float), jnp.zeros(1))))
