"""Layers to the devices of their chunks, and gradients back: a few rounds of messages before and after the loop."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.mesh import constrain, in_role, is_axes
from jaxpar.nn.linear import on_weight
from jaxpar.pipeline.accumulation import Stages
from jaxpar.pipeline.ops import Schedule
from jaxpar.types import Array, PyTree

AXIS = "stage"


class Round(NamedTuple):
    """One message from and to each device, itself maybe.

    Attributes:
      pairs: (from, to) of all devices.
      read: Which of its chunks at rest each device sends, int32 [P].
      put: Which of its chunks of the schedule each device gets, int32 [P].
    """

    pairs: tuple[tuple[int, int], ...]
    read: np.ndarray
    put: np.ndarray


@functools.cache
def rounds_of(schedule: Schedule) -> tuple[Round, ...]:
    """Returns how layers, which lie at rest in order over the devices, come to where the schedule has them.

    Each device sends and gets as many chunks as it has, of two copies each twice; so rounds of one message each exist
    (Koenig's theorem on the edges of regular bipartite graphs), and each is found by augmenting paths.
    """
    devices, depth = schedule.devices, schedule.depth
    at_rest = depth // devices
    edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for goal in range(devices):
        for put, chunk in enumerate(schedule.chunks_of(goal)):
            source, read = divmod(chunk % depth, at_rest)
            edges.setdefault((source, goal), []).append((read, put))
    rounds = []
    while any(edges.values()):
        source_of: dict[int, int] = {}

        def matched(source: int, seen: set[int], source_of=source_of) -> bool:
            for goal in range(devices):
                if edges.get((source, goal)) and goal not in seen:
                    seen.add(goal)
                    if goal not in source_of or matched(source_of[goal], seen):
                        source_of[goal] = source
                        return True
            return False

        for source in range(devices):
            matched(source, set())
        read, put = np.zeros(devices, np.int32), np.zeros(devices, np.int32)
        for goal, source in source_of.items():
            read[source], put[goal] = edges[source, goal].pop()
        rounds.append(Round(tuple(sorted((s, g) for g, s in source_of.items())), read, put))
    return tuple(rounds)


def spread_chunks(layers: PyTree, schedule: Schedule, chunk_size: int) -> PyTree:
    """Returns a device's chunks of the schedule, [v, turns of a chunk, ...], from its turns at rest, [N / P, ...].

    For the inside of a program that is manual over the axis `stage`.
    """
    me = jax.lax.axis_index(AXIS)

    def one(x: Array) -> Array:
        parts = x.reshape(-1, chunk_size, *x.shape[1:])
        out = jnp.zeros((len(schedule.placement) // schedule.devices, *parts.shape[1:]), x.dtype)
        for pairs, read, put in rounds_of(schedule):
            out = out.at[jnp.asarray(put)[me]].set(_moved(parts[jnp.asarray(read)[me]], pairs))
        return out

    return jax.tree.map(one, layers)


def collect_chunks(gradients: PyTree, schedule: Schedule) -> PyTree:
    """Returns the sums at rest of gradients of a device's chunks: what `spread_chunks` is transposed to."""
    me = jax.lax.axis_index(AXIS)

    def one(x: Array) -> Array:
        out = jnp.zeros((schedule.depth // schedule.devices, *x.shape[1:]), x.dtype)
        for pairs, read, put in rounds_of(schedule):
            back = tuple((goal, source) for source, goal in pairs)
            out = out.at[jnp.asarray(read)[me]].add(_moved(x[jnp.asarray(put)[me]], back))
        return out.reshape(-1, *x.shape[2:])

    return jax.tree.map(one, gradients)


def gathered_chunk(layers: PyTree, stages: Stages) -> PyTree:
    """Returns a chunk's layers, [turns, ...], as products read them: whole, but for what tensor parallelism splits."""
    assert stages.axes is not None  # which `Pipelined.check` says

    def one(axes: tuple, x: PyTree) -> PyTree:
        split, whole = ((None, *in_role(axes, role)) for role in ("weight", "use"))
        return on_weight(lambda w: constrain(constrain(w, *split), *whole), x)

    return jax.tree.map(one, stages.axes(), layers, is_leaf=is_axes)


def _moved(x: Array, pairs: tuple[tuple[int, int], ...]) -> Array:
    return x if all(a == b for a, b in pairs) else jax.lax.ppermute(x, AXIS, pairs)
