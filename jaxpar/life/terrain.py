"""The ground: a torus of cells that hold energy, and the fields that say what living there gives and costs.

Base maps are gradient noise (K. Perlin, "An image synthesizer", 1985) on a coarse lattice whose angles drift: weather.
Fields relax towards them, and inhabitants change them. All in whole numbers; fields in 1/2^20, for slow changes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.life.laws import Prices
from jaxpar.life.units import ONE, Wide, wide_sum
from jaxpar.types import Array, PRNGKey

__all__ = ["FIELDS", "Terrain", "base_maps", "init_terrain"]

FIELDS = ("most", "gain", "move", "push", "message", "reproduce")
"""What a cell holds at most and gains a step; the costs of moving, pushing, speaking and reproducing there."""
RANGES = np.asarray([(1.0, 8.0), (0.0, 1.5), (0.5, 2.0), (0.5, 2.0), (0.5, 2.0), (0.5, 1.5)])
"""The ends of each base map."""
SHAPED = slice(1, 6)
"""The fields that inhabitants change."""
LIMIT = 31 * 2**20
"""No field goes above: products with it must fit."""
_ANGLES = 4096
_COSINES = np.round(ONE * np.cos(2 * np.pi * np.arange(_ANGLES) / _ANGLES)).astype(np.int32)
_SINES = np.round(ONE * np.sin(2 * np.pi * np.arange(_ANGLES) / _ANGLES)).astype(np.int32)


class Terrain(NamedTuple):
    """The ground of S x S cells, `[x, y]`.

    Attributes:
        energy: int32 `[S, S]`, in 1/1024 units.
        fields: int32 `[6, S, S]`, in 1/2^20 units, in the order of `FIELDS`.
        bit: int32 `[S, S]`, 0 or 1: the tape of robots.
        angles: int32 `[6, L, L]`, 2^32 a turn, of the base maps' lattice.
    """

    energy: Array
    fields: Array
    bit: Array
    angles: Array


class Growth(NamedTuple):
    """What a step of the ground brought in, spilled and lost, in 1/1024 units."""

    regrowth: Wide
    overflow: Wide
    heat: Wide


def init_terrain(key: PRNGKey, size: int, lattice: int) -> Terrain:
    """The ground at its base maps, full of energy. Consumes `key`."""
    angles = jax.random.bits(key, (len(FIELDS), lattice, lattice)).astype(jnp.int32)
    fields = base_maps(angles, size)
    return Terrain(fields[0] >> 10, fields, jnp.zeros((size, size), jnp.int32), angles)


@functools.cache
def _constants(per: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the `per` cells of a lattice's side lie in it, and how much they are of its far end, in 1/1024."""
    at = (2 * np.arange(per) + 1) * (ONE // 2) // per
    t = at / ONE
    return at.astype(np.int32), np.round(ONE * (6 * t**5 - 15 * t**4 + 10 * t**3)).astype(np.int32)


def base_maps(angles: Array, size: int) -> Array:
    """The fields that lattice angles ask for, int32 `[6, S, S]` in 1/2^20 units; L must divide S."""
    count, lattice, _ = angles.shape
    at, far = _constants(size // lattice)
    turn = (angles >> 20) & (_ANGLES - 1)
    x, y = jnp.asarray(_COSINES)[turn], jnp.asarray(_SINES)[turn]
    along_x, along_y = at.reshape(1, 1, -1, 1, 1), at.reshape(1, 1, 1, 1, -1)

    def corner(a: int, b: int) -> Array:
        """The slope of a corner of each lattice's side times the way from it: `[6, L, per, L, per]`."""
        slope_x, slope_y = (jnp.roll(s, (-a, -b), (1, 2))[:, :, None, :, None] for s in (x, y))
        return (slope_x * (along_x - ONE * a) + slope_y * (along_y - ONE * b)) >> 10

    far_x, far_y = far.reshape(1, 1, -1, 1, 1), far.reshape(1, 1, 1, 1, -1)
    near = (corner(0, 0) * (ONE - far_x) + corner(1, 0) * far_x) >> 10
    beyond = (corner(0, 1) * (ONE - far_x) + corner(1, 1) * far_x) >> 10
    noise = ((near * (ONE - far_y) + beyond * far_y) >> 10).reshape(count, size, size)
    noise = jnp.clip(
        (3 * noise) >> 1, -ONE, ONE
    )  # half of all noise lies within a third of its range
    low, high = np.round(ONE * RANGES).astype(np.int32).T[:, :, None, None]
    return (low << 10) + (((high - low) * (noise + ONE)) >> 1)


def grow(key: PRNGKey, terrain: Terrain, prices: Prices) -> tuple[Terrain, Growth]:
    """A step of weather and growth: a cell gains, spills what is above its most, and evaporates. Consumes `key`."""
    turn = jax.random.bits(key, terrain.angles.shape) >> 16
    high, low = prices.drift >> 16, prices.drift & 0xFFFF  # a product of 32 bits, in two
    turn = turn.astype(jnp.int32)
    angles = terrain.angles + turn * high + ((turn >> 1) * (low >> 1) >> 14)
    base = base_maps(angles, terrain.energy.shape[0])
    rate = ((prices.relax * (base[0] >> 10)) >> 13)[None]
    fields = terrain.fields + (((base - terrain.fields) >> 9) * rate >> 9)
    most, gain = fields[0] >> 10, fields[1] >> 10
    full = terrain.energy + gain
    overflow = jnp.maximum(full - most, 0)
    evaporated = jnp.minimum(full - overflow, prices.evaporation)
    growth = Growth(wide_sum(gain), wide_sum(overflow), wide_sum(evaporated))
    return Terrain(full - overflow - evaporated, fields, terrain.bit, angles), growth


def window(terrain: Terrain, cells: Array, width: int) -> Array:
    """What bodies at `cells`, int32 `[N, 2]`, see around them, over the edges: float32 `[N, width^2 8]`.

    Of each cell energy, the six fields and the bit, in units, over 8.
    """
    size = terrain.energy.shape[0]
    steps = np.arange(width) - width // 2
    x, y = ((cells[:, i, None] + steps[None]) % size for i in (0, 1))
    flat = (x[:, :, None] * size + y[:, None, :]).reshape(len(cells), -1)
    layers = [terrain.energy, *(terrain.fields >> 10), terrain.bit * ONE]
    seen = jnp.stack(layers, -1).reshape(size * size, -1)[flat]
    return (seen.astype(jnp.float32) / (8 * ONE)).reshape(len(cells), -1)
