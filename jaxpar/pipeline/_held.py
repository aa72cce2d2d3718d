"""What a stage is given, and what it holds from tick to tick."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.types import Array, PRNGKey, PyTree


class Slots(NamedTuple):
    """What a device holds between ticks; the first axis is that of slots.

    Attributes:
      inbox: Residual streams and their gradients that have come.
      stash: What forward passes keep, [slots, turns of a chunk, ...].
      factors: Of weights whose gradients are put off, the same.
      head: Of a head that is split over stages, what S leaves to T.
      host: As the stash, in the host's memory.
      weights: Of gathered chunks, like a chunk's layers, [slots, turns of a chunk, ...].
    """

    inbox: PyTree
    stash: list[Array]
    factors: list[tuple[Array, Array]]
    head: PyTree = ()
    host: Sequence[Array] = ()
    weights: PyTree = ()


class Sums(NamedTuple):
    """Gradients so far.

    Attributes:
      layers: Of each array of the layers that has a gradient, [v, turns of a chunk, ...].
      ends: Of what lies outside of them.
      rows: Of a stage's rows of the head, where it is split; and then:
      entered: Of each microbatch's residual stream before the first layer, [m, ...].
    """

    layers: list[Array]
    ends: PyTree
    rows: PyTree = ()
    entered: PyTree = ()


class State(NamedTuple):
    """What a tick's tasks change, and the exchanges after them.

    Attributes:
      message: A residual stream or its gradient, of this tick's task.
      slots: What was kept for other ticks.
      sums: Gradients so far.
      loss: The sum over microbatches so far.
      told: Of each turn and microbatch, [v, m, turns of a chunk, ...].
      last: What the loss told, [m, ...].
      versions: Parameters and optimizer state, where updates are made between ticks.
    """

    message: PyTree
    slots: Slots
    sums: Sums
    loss: Array
    told: PyTree
    last: PyTree
    versions: PyTree = ()


class Given(NamedTuple):
    """What a stage is given.

    Attributes:
      layers: Its turns at rest.
      ends: Parameters outside of the layers that it reads.
      parts: The microbatches, [m, ...].
      key: Of dropout, or None.
      total: What sums over tokens are divided by.
      rows: Its rows of a head that is split, [n, D].
      entered: Then also each microbatch's residual stream before the first layer, [m, ...].
    """

    layers: PyTree
    ends: PyTree
    parts: PyTree
    key: PRNGKey | None
    total: Array
    rows: PyTree = ()
    entered: PyTree = ()
