"""An island drawn from noise: height, forests and caves, smoothed, with a start from which the needful is in reach.

Value noise of five octaves (Perlin 1985, in its plainest form) gives three fields. The lowest quarter of the height,
tilted towards the coast, is sea and the highest third rock; forests and caves are where their fields are high. A
cellular automaton smooths coasts and rocks, a flood finds the largest walkable part, and the agent starts there with a
tree, water and stone in reach: what is missing is put beside it. Of the stone 8 % become coal, 3 % iron and 0.5 %
diamond, and one inside the rock each of these for certain. Drawing costs a thousand times what a step does,
and how long the flood takes depends on the map: this is the environment on which resets are measured.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array, PRNGKey

__all__ = ["WALKABLE", "components", "draw"]

UNSEEN, GRASS, SAND, WATER, STONE, TREE, PATH, COAL, IRON, DIAMOND, TABLE, FURNACE = range(12)
WALKABLE = (GRASS, SAND, PATH)

_OCTAVES = (2, 4, 8, 16, 32)
_SEA, _BEACH, _ROCK = 0.25, 0.3, 0.67  # quantiles of the height
_FOREST, _CAVE = 0.6, 0.85  # quantiles of the other fields
_SMOOTHINGS = 4


def draw(key: PRNGKey, size: int) -> tuple[Array, Array]:
    """A map uint8 `[size, size]` with water all around, and the cell int32 to start from; consumes `key`."""
    field_key, tree_key, ore_key = jax.random.split(key, 3)
    height, forest, caves = _fields(field_key, size)
    steps = np.linspace(-1, 1, size, dtype=np.float32) ** 4
    height = height - jnp.asarray(np.maximum(steps[:, None], steps[None, :]))
    order = jnp.sort(jnp.stack([height, forest, caves]).reshape(3, -1), axis=1)
    sea, beach, rocks, woods, hollow = (
        order[row, int(quantile * size**2)]
        for row, quantile in ((0, _SEA), (0, _BEACH), (0, _ROCK), (1, _FOREST), (2, _CAVE))
    )
    water, rock = height < sea, height > rocks
    for _ in range(_SMOOTHINGS):
        water, rock = _majority(water, True), _majority(rock, False)
    kinds = jnp.where(height < beach, SAND, GRASS)
    kinds = jnp.where(
        (kinds == GRASS) & (forest > woods) & jax.random.bernoulli(tree_key, 0.6, kinds.shape),
        TREE,
        kinds,
    )
    kinds = jnp.where(rock, jnp.where(caves > hollow, PATH, STONE), kinds)
    kinds = jnp.where(water | (steps[:, None] == 1) | (steps[None, :] == 1), WATER, kinds)
    lottery = jnp.where(kinds == STONE, jax.random.uniform(ore_key, kinds.shape), -1.0)
    kinds = jnp.where(
        lottery > 0.92, COAL, jnp.where((lottery >= 0) & (lottery < 0.03), IRON, kinds)
    )
    kinds = jnp.where((lottery > 0.5) & (lottery < 0.505), DIAMOND, kinds)
    kinds, start, beside = _with_start(kinds)
    hidden, cells = jax.lax.top_k(
        jnp.where((kinds == STONE) & ~beside, lottery, -1.0).reshape(-1), 3
    )
    certain = jnp.where(hidden >= 0, jnp.asarray([COAL, IRON, DIAMOND]), kinds.reshape(-1)[cells])
    return kinds.reshape(-1).at[cells].set(certain).reshape(size, size).astype(jnp.uint8), start


def _fields(key: PRNGKey, size: int) -> Array:
    """Three fields of noise, float32 `[3, size, size]`, each a weighted sum of smoothly interpolated lattices."""
    total = jnp.zeros((3, size, size), jnp.float32)
    for octave, points in enumerate(_OCTAVES):
        lattice = jax.random.uniform(jax.random.fold_in(key, octave), (3, points + 1, points + 1))
        weights = jnp.asarray(_interpolation(size, points))
        total += 0.6**octave * jnp.einsum("sp,fpq,tq->fst", weights, lattice, weights)
    return total


@functools.cache
def _interpolation(size: int, points: int) -> np.ndarray:
    """How each of `size` places weighs the `points + 1` lattice values, by the polynomial `3 t^2 - 2 t^3`."""
    place = np.linspace(0, points, size, endpoint=False)
    below, rest = place.astype(int), place % 1
    blend = rest**2 * (3 - 2 * rest)
    weights = np.zeros((size, points + 1), np.float32)
    weights[np.arange(size), below] = 1 - blend
    weights[np.arange(size), below + 1] = blend
    return weights


def _majority(mask: Array, outside: bool) -> Array:
    """Each cell takes the opinion of at least five of the nine cells around it."""
    size = mask.shape[0]
    padded = jnp.pad(mask, 1, constant_values=outside).astype(jnp.int32)
    rows = sum(padded[shift : size + shift] for shift in range(3))
    return sum(rows[:, shift : size + shift] for shift in range(3)) >= 5


def components(open_cells: Array) -> Array:
    """The connected parts of a bool map: int32, in each the largest index of its cells, -1 where it is closed.

    Costs as many sweeps as the longest winding path has cells.
    """
    index = jnp.arange(open_cells.size, dtype=jnp.int32).reshape(open_cells.shape)

    def sweep(_: Array, label: Array) -> Array:
        padded = jnp.pad(label, 1, constant_values=-1)
        around = jnp.maximum(
            jnp.maximum(padded[2:, 1:-1], padded[:-2, 1:-1]),
            jnp.maximum(padded[1:-1, 2:], padded[1:-1, :-2]),
        )
        return jnp.where(open_cells, jnp.maximum(label, around), -1)

    def sweeps(labels: tuple[Array, Array]) -> tuple[Array, Array]:
        # Several a look: on an accelerator every look at the outcome waits for the host.
        return labels[1], jax.lax.fori_loop(0, 8, sweep, labels[1])

    first = jnp.where(open_cells, index, -1)
    return jax.lax.while_loop(
        lambda labels: jnp.any(labels[0] != labels[1]), sweeps, sweeps((first, first))
    )[1]


def _with_start(kinds: Array) -> tuple[Array, Array, Array]:
    """A clearing in the largest walkable part, as near to the middle as there is grass; tree, water, stone in reach.

    Also returns its cell, and which cells are beside what can be reached.
    """
    size = kinds.shape[0]
    index = jnp.arange(size * size, dtype=jnp.int32).reshape(size, size)
    row, column = index // size, index % size
    label = components((kinds == GRASS) | (kinds == SAND) | (kinds == PATH))
    area = (
        jnp.zeros(size * size, jnp.int32)
        .at[jnp.maximum(label, 0).reshape(-1)]
        .add(label.reshape(-1) >= 0)
    )
    largest = (label == jnp.argmax(area)) & (label >= 0)
    distance = (row - size // 2) ** 2 + (column - size // 2) ** 2
    edge = jnp.minimum(jnp.minimum(row, column), size - 1 - jnp.maximum(row, column)) < 4
    fault = distance + size**2 * ((kinds != GRASS) + 4 * edge + 16 * ~largest)
    start = jnp.argmin(fault).astype(jnp.int32)
    down, right = row - start // size, column - start % size
    clearing = (jnp.abs(down) <= 1) & (jnp.abs(right) <= 1)
    kinds = jnp.where(clearing, GRASS, kinds)
    reach = largest | clearing
    padded = jnp.pad(reach, 1)
    beside = padded[2:, 1:-1] | padded[:-2, 1:-1] | padded[1:-1, 2:] | padded[1:-1, :-2]
    for kind, (away, across) in ((TREE, (-2, 0)), (WATER, (2, 0)), (STONE, (0, -2))):
        missing = ~jnp.any(beside & (kinds == kind))
        kinds = jnp.where(missing & (down == away) & (right == across), kind, kinds)
    return kinds, start, beside
