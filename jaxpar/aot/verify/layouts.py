"""Layouts: a mesh, the named changes of the rule table that go with it, and the schedule of its stages."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxpar.mesh import MeshSpec

__all__ = ["Layout", "every_layout"]


class Layout(NamedTuple):
    """A mesh and the named changes of the rule table that go with it.

    Attributes:
      mesh: Sizes of its axes.
      name: Names from `jaxpar.mesh.LAYOUTS`, joined by +.
      schedule: Schedule by which microbatches pass through the stages; empty without stages.
    """

    mesh: MeshSpec
    name: str = "zero3"
    schedule: str = ""

    @property
    def num_devices(self) -> int:
        """Number of devices that the mesh needs; `inner` is a part of `fsdp`."""
        sizes = dataclasses.asdict(self.mesh)
        return math.prod(size for name, size in sizes.items() if name != "inner")

    def __str__(self):
        """Such as "data2.fsdp4 zero2"."""
        fields = dataclasses.fields(self.mesh)
        sizes = [(field.name, getattr(self.mesh, field.name)) for field in fields]
        axes = ".".join(f"{name}{size}" for name, size in sizes if size != 1)
        return f"{axes} {self.name} {self.schedule}".rstrip()


def every_layout(
    num_devices: int, axes: Sequence[str] = ("data", "fsdp", "tensor", "context")
) -> list[Layout]:
    """Returns every factorisation of the devices over the axes, under the default table."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    found = []
    for sizes in itertools.product(divisors, repeat=len(axes)):
        if math.prod(sizes) == num_devices:
            size_of_axis = dict(zip(axes, sizes, strict=True))
            found.append(Layout(mesh=MeshSpec(**size_of_axis)))
    return found
