"""The laws of a world: prices, speeds and ranges, in units as people say them and in whole numbers as it reckons."""

import dataclasses
import math
from typing import NamedTuple

from jaxpar.fields import Between, check_fields, field
from jaxpar.life.units import ONE
from jaxpar.types import Array, UsageError

__all__ = ["FIRST_LAWS", "Prices", "Laws"]

_RELAX = 2**18
_TURN = 2**32 / (2 * math.pi)


class Prices(NamedTuple):
    """The laws in 1/1024, int32 `[]` each or Python's int; a step takes them as `inputs`, so they may be traced."""

    start: Array | int
    child: Array | int
    fee: Array | int
    upkeep: Array | int
    aging: Array | int
    move: Array | int
    push: Array | int
    hit: Array | int
    speak: Array | int
    shape: Array | int
    bite: Array | int
    stomach: Array | int
    speed: Array | int
    shaping: Array | int
    evaporation: Array | int
    relax: Array | int
    drift: Array | int


@dataclasses.dataclass(frozen=True)
class Laws:
    """The laws of a world, in units of energy, sides of a cell and steps.

    With the defaults, worlds of the command's size kept a population for 100,000 steps in ten of ten
    seeds (`bench/life_laws.py`; docs/life.md has the table).

    Attributes:
      start: Energy of who comes from outside.
      child: What a child gets from its parent.
      fee: Heat of a birth in a full world, times the cell's cost of reproducing.
      upkeep: Heat of being alive, a step.
      aging: More of it a step of age.
      move: Price of moving at full speed along one axis, times the cell's cost of moving.
      push: Price of a full push, times the cell's cost.
      hit: Price of a full hit, and of giving.
      speak: Price of speaking at full strength, times the cell's cost.
      shape: Price of changing a field of the terrain at full strength.
      bite: Share of a cell's energy that a full mouth asks for.
      stomach: The most that a body holds; what it eats above is heat.
      speed: Sides of a cell a step.
      shaping: The most that one changes a field by, a step.
      evaporation: What a cell loses a step.
      relax: Share of the way back to its base map that a field goes, a step, where a cell may hold 8 units.
      drift: The most that the base map's angles turn, a step, in radians.
    """

    start: float = field(64.0, Between(0, 1024))
    child: float = field(4.0, Between(0.01, 1024))
    fee: float = field(0.0, Between(0, 32))
    upkeep: float = field(1 / 8, Between(0, 8))
    aging: float = field(1 / 2048, Between(0, 1))
    move: float = field(0.05, Between(0, 8))
    push: float = field(0.02, Between(0, 8))
    hit: float = field(0.05, Between(0, 8))
    speak: float = field(0.02, Between(0, 8))
    shape: float = field(0.001, Between(0, 8))
    bite: float = field(0.5, Between(0, 1))
    stomach: float = field(1024.0, Between(1, 2**18))
    speed: float = field(1 / 16, Between(0, 1))
    shaping: float = field(0.1, Between(0, 1))
    evaporation: float = field(0.25, Between(0, 8))
    relax: float = field(0.005, Between(0, 0.01))
    drift: float = field(0.001, Between(0, 0.1))

    def __post_init__(self):
        """Refuses what no law can be."""
        check_fields(self, "laws.")
        if self.stomach < max(self.start, self.child):
            raise UsageError(f"laws.stomach={self.stomach:g} must hold laws.start={self.start:g} and "
                             f"laws.child={self.child:g}.")  # fmt: skip

    def prices(self) -> Prices:
        """The laws in whole numbers: a price over 0 that 1/1024 would round away is 1."""
        scales = {"relax": _RELAX, "drift": _TURN}
        found = {}
        for name in Prices._fields:
            value = getattr(self, name) * scales.get(name, ONE)
            found[name] = max(round(value), 1 if value > 0 else 0)
        return Prices(**found)


FIRST_LAWS = Laws(
    start=32,
    child=16,
    fee=8,
    upkeep=1 / 4,
    aging=1 / 256,
    move=0.5,
    push=0.25,
    hit=0.4,
    speak=0.25,
)
"""The first defaults, of runs that were made before these had a name; their populations die out."""
