"""An analytic account of memory, from shapes and the jaxpr alone: seconds, where compiling takes minutes.

Arguments are exact. What lives besides them is `jaxpar.aot.traffic`'s count of bytes alive, whose arrays are divided
over the devices by their sizes: an array with a parameter's shape lies as the parameter, one with a dimension of rows
is split as the batch, and a later dimension of a size that the table splits (heads, mlp, vocabulary) is split so too.
"""

import collections
import math
from typing import NamedTuple

import jax
from jax.core import AbstractValue
from jax.extend.core import Jaxpr

from jaxpar.aot.job import Job, placements
from jaxpar.aot.traffic import ArrayLayout, Traffic, bytes_of, traffic_of

__all__ = ["JobLayout", "MemoryEstimate", "analyse", "arguments", "saved_bytes"]

ROWS = ("batch", "population", "envs", "particles")
"""Logical axes of independent things, which an array of intermediate results is split over."""


class MemoryEstimate(NamedTuple):
    """Bytes on one device.

    Attributes:
      parameters: Of the arguments.
      optimizer: Of the arguments.
      other: Of the arguments: batch, key, counters.
      temporaries: The most that is alive besides: activations, gradients, gathered weights.
    """

    parameters: float
    optimizer: float
    other: float
    temporaries: float

    @property
    def peak(self) -> float:
        """The most bytes alive at once."""
        return sum(self)


def analyse(job: Job, jaxpr: Jaxpr | None = None) -> tuple[MemoryEstimate, Traffic]:
    """Returns the analytic account of a job's memory, and its traffic. Costs one trace unless its jaxpr is given."""
    if jaxpr is None:
        jaxpr = job.trace()
    traffic = traffic_of(jaxpr, JobLayout(job), job.mesh.size, donated_leaves(job))
    parameters, optimizer, other = arguments(job)
    memory = MemoryEstimate(
        parameters=parameters, optimizer=optimizer, other=other, temporaries=traffic.peak
    )
    return memory, traffic


def donated_leaves(job: Job) -> tuple[int, ...]:
    """Returns the numbers of the leaves of donated arguments, among the leaves of all arguments."""
    found: list[int] = []
    number = 0
    for place, argument in enumerate(job.args):
        leaves = range(number, number + len(jax.tree.leaves(argument)))
        if place in job.donate:
            found += leaves
        number = leaves.stop
    return tuple(found)


def arguments(job: Job) -> tuple[float, float, float]:
    """Returns the bytes of parameters, optimizer state and other arguments on one device."""
    held: collections.Counter = collections.Counter()
    for row in placements(job):
        held[row.group] += row.bytes
    return held["parameters"], held["optimizer"], held["other"]


def saved_bytes(job: Job) -> float | None:
    """Returns the bytes that the backward pass of `job.loss` keeps of the forward pass; None without a loss.

    They are the leaves of `jax.vjp`'s function that are no parameters: what JAX saves, of which a compiler may make
    some anew instead.
    """
    loss = job.loss
    if loss is None:
        return None
    with job.ambient():
        saved = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], job.params)
    kinds = collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(job.params))
    layout, total = JobLayout(job), 0.0
    for leaf in jax.tree.leaves(saved):
        kind = (leaf.shape, leaf.dtype)
        if kinds[kind]:
            kinds[kind] -= 1
        else:
            total += layout.bytes(leaf)
    return total


class JobLayout(ArrayLayout):
    """The layout of a job's arrays, told from their shapes and those of its arguments."""

    def __init__(self, job: Job):
        self.sizes = dict(job.mesh.shape)
        self._exact: dict[tuple[int, ...], tuple[tuple[str, ...], ...]] = {}
        self._split: dict[int, tuple[str, ...]] = {}
        self._rows: list[tuple[int, tuple[str, ...]]] = []
        leaves, shardings = jax.tree.leaves(job.args), jax.tree.leaves(job.shardings())
        flat_axes = jax.tree.structure(job.args).flatten_up_to(job.axes)
        for leaf, sharding, logical in zip(leaves, shardings, flat_axes, strict=True):
            spec = [
                entry if isinstance(entry, tuple) else () if entry is None else (entry,)
                for entry in sharding.spec
            ]
            spec += [()] * (len(leaf.shape) - len(spec))
            for start in range(len(leaf.shape) - 1):  # a slice of stacked layers lies as they do
                self._exact.setdefault(tuple(leaf.shape[start:]), tuple(spec[start:]))
            for dim, entry, name in zip(leaf.shape, spec, logical, strict=True):
                if name in ROWS:  # unsplit rows still tell an activation
                    self._rows.append((dim, entry))
                elif entry:
                    self._split.setdefault(dim, entry)

    def axes(self, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        """Returns the mesh axes that split each dimension, as the file's docstring says."""
        if shape in self._exact:
            return self._exact[shape]
        out: list[tuple[str, ...]] = [()] * len(shape)
        for place, dim in enumerate(shape):
            for count, over in self._rows:
                if dim and dim % self._parts(over) == 0 and (count % dim == 0 or dim % count == 0):
                    out[place], taken = over, set(over)
                    for later in range(place + 1, len(shape)):
                        out[later] = tuple(
                            axis for axis in self._split.get(shape[later], ()) if axis not in taken
                        )
                        taken |= set(out[later])
                    return tuple(out)
        return tuple(out)

    def bytes(self, aval: AbstractValue) -> float:
        """Returns an array's bytes on one device."""
        return bytes_of(aval) / math.prod(
            self._parts(entry) for entry in self.axes(tuple(getattr(aval, "shape", ())))
        )

    def _parts(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)
