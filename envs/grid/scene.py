"""The kernel of the grid worlds: a map of bytes, an agent with one pocket, six actions, an egocentric view.

Rules, those of MiniGrid (Chevalier-Boisvert et al. 2023), without its action "done":

| action | it is legal when | what it does |
| --- | --- | --- |
| 0 left, 1 right | always | turns by 90 degrees |
| 2 forward | floor, goal, lava or an open door is ahead | moves there |
| 3 pick | a thing is ahead and the pocket is empty | the thing goes into the pocket |
| 4 put | floor is ahead and the pocket is full | the thing lies there |
| 5 toggle | a door is ahead; a locked one wants the key of its colour in the pocket | opens or closes it |

An illegal action does nothing. Directions: 0 right, 1 down, 2 left, 3 up. Everything is arithmetic on bytes and
comparisons, which vectorise over environments, but for the slice that a view begins with.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array, PRNGKey

from . import tiles

__all__ = [
    "ACTIONS",
    "Scene",
    "act",
    "ahead",
    "free_cells",
    "legal",
    "neighbours",
    "room",
    "unpacked",
    "view",
    "whole",
]

ACTIONS = ("left", "right", "forward", "pick", "put", "toggle")
LEFT, RIGHT, FORWARD, PICK, PUT, TOGGLE = range(6)
_FLOOR, _WALL = tiles.code(tiles.FLOOR), tiles.code(tiles.WALL, tiles.GREY)


@flax.struct.dataclass
class Scene:
    """A map and its agent.

    Attributes:
        grid: uint8 `[H, W]`, `envs.tiles` bytes; the border is never walked on.
        cell: int32, where the agent is, `row * W + column`.
        direction: int32, 0 right, 1 down, 2 left, 3 up.
        pocket: uint8, the byte of what is held, 0 if nothing is.
    """

    grid: Any
    cell: Any
    direction: Any
    pocket: Any


def neighbours(width: int) -> tuple[int, int, int, int]:
    """The steps in `cell` to the right, down, left and up."""
    return 1, width, -1, -width


def ahead(scene: Scene) -> Array:
    """The cell before the agent."""
    width = scene.grid.shape[1]
    return scene.cell + jax.lax.select_n(
        scene.direction, *(jnp.int32(step) for step in neighbours(width))
    )


def _permitted(scene: Scene, thing: Array) -> tuple[Array, Array, Array, Array]:
    """Whether one may go forward, pick, put and toggle with the byte `thing` ahead."""
    tile, colour = thing >> 4, thing & 15
    forward = tiles.member(tile, tiles.WALKABLE)
    pick = tiles.member(tile, tiles.PICKABLE) & (scene.pocket == 0)
    put = (thing == _FLOOR) & (scene.pocket != 0)
    unlock = (tile == tiles.LOCKED) & (scene.pocket == tiles.code(tiles.KEY) + colour)
    return forward, pick, put, tiles.member(tile, (tiles.OPEN, tiles.CLOSED)) | unlock


def legal(scene: Scene) -> Array:
    """The legal actions, bool `[6]`."""
    forward, pick, put, toggle = _permitted(scene, scene.grid.reshape(-1)[ahead(scene)])
    always = jnp.ones((), bool)
    return jnp.stack([always, always, forward, pick, put, toggle])


def act(scene: Scene, action: Array) -> tuple[Scene, Array, Array]:
    """The scene after `action`, the cell that was ahead, and whether the action was legal."""
    front = ahead(scene)
    thing = scene.grid.reshape(-1)[front]
    forward, pick, put, toggle = _permitted(scene, thing)
    forward, pick, put, toggle = (
        ok & (action == code) for code, ok in enumerate((forward, pick, put, toggle), start=FORWARD)
    )
    turn = jnp.where(action == RIGHT, 1, 0) - jnp.where(action == LEFT, 1, 0)
    door = jnp.where(thing >> 4 == tiles.OPEN, tiles.CLOSED, tiles.OPEN).astype(jnp.uint8) * 16 + (
        thing & 15
    )
    left_there = jnp.where(pick, jnp.uint8(_FLOOR), jnp.where(put, scene.pocket, door))
    place = jnp.arange(scene.grid.size, dtype=jnp.int32).reshape(scene.grid.shape)
    changed = Scene(
        grid=jnp.where((place == front) & (pick | put | toggle), left_there, scene.grid),
        cell=jnp.where(forward, front, scene.cell),
        direction=(scene.direction + turn) & 3,
        pocket=jnp.where(pick, thing, jnp.where(put, jnp.uint8(0), scene.pocket)),
    )
    return changed, front, forward | pick | put | toggle | (action < FORWARD)


def view(scene: Scene, size: int, see_through: bool) -> Array:
    """What the agent sees: uint8 `[size, size, 2]` of tile and colour, turned so that it looks up.

    The agent is in the middle of the last row, where what it holds is shown (floor, if nothing). Beyond the map there
    is wall. Unless one can `see_through` walls, what they hide is 0; who hides what is MiniGrid's rule (`_visible`).
    """
    width, margin, half = scene.grid.shape[1], size - 1, size // 2
    padded = jnp.pad(scene.grid, margin, constant_values=_WALL)
    towards = scene.direction
    top = scene.cell // width + jnp.where(
        towards == 1, margin, jnp.where(towards == 3, 0, margin - half)
    )
    left = scene.cell % width + jnp.where(
        towards == 0, margin, jnp.where(towards == 2, 0, margin - half)
    )
    # A slice of whole rows and four fixed turns cost a sixth of gathering turned cells one by one (CPU).
    square = jax.lax.dynamic_slice(padded, (top, left), (size, size))
    seen = jax.lax.select_n(towards, *(jnp.rot90(square, turns) for turns in (1, 2, 3, 0)))
    if not see_through:
        seen = jnp.where(_visible(~tiles.member(seen >> 4, tiles.OPAQUE)), seen, jnp.uint8(0))
    held = jnp.where(scene.pocket == 0, jnp.uint8(_FLOOR), scene.pocket)
    place = np.arange(size * size).reshape(size, size)
    seen = jnp.where(place == margin * size + half, held, seen)
    return unpacked(seen)


def unpacked(codes: Array) -> Array:
    """Tile and colour of every byte, uint8 `[..., 2]`.

    The two are the halves of one word: stacking them would compute `codes`, with its gather, once for each.
    """
    word = (codes >> 4).astype(jnp.uint16) | ((codes & 15).astype(jnp.uint16) << 8)
    return jax.lax.bitcast_convert_type(word, jnp.uint8)


def _visible(clear: Array) -> Array:
    """Which cells of a view are seen, bool `[V, V]`, given which let light through.

    MiniGrid's rule: from the agent's row upwards, light walks along a row through clear cells, first to the right and
    then to the left; a clear cell that it reaches lights those beside, above, and diagonally above in that direction.
    Each row is a word of V bits, and walking is a carry that doubles its reach, so no cell waits for its neighbour.
    """
    size = clear.shape[0]
    bits = np.arange(size, dtype=np.uint32)
    rows = jnp.sum(clear.astype(jnp.uint32) << bits[None, :], axis=1, dtype=jnp.uint32)

    def upwards(lit: Array, row: Array) -> tuple[Array, Array]:
        rightward = _walk(lit, row, size, jnp.left_shift)
        lit = lit | (rightward << 1)
        leftward = _walk(lit, row, size, jnp.right_shift)
        return rightward | (rightward << 1) | leftward | (leftward >> 1), lit | (leftward >> 1)

    def words_of(rows: Array, unroll: int) -> Array:
        return jax.lax.scan(
            upwards, jnp.uint32(1 << (size // 2)), rows, reverse=True, unroll=unroll
        )[1]

    # On CPUs unrolled rows would be computed again for each cell above them; on others a loop is a launch a row.
    words = jax.lax.platform_dependent(
        rows, cpu=lambda rows: words_of(rows, 1), default=lambda rows: words_of(rows, size)
    )
    return (words[:, None] >> bits[None, :] & 1) == 1


def _walk(lit: Array, clear: Array, size: int, shift: Any) -> Array:
    """The clear cells that light reaches from `lit`, going one way along a row through clear cells."""
    reached, passage, reach = lit & clear, clear, 1
    while reach < size:
        reached = reached | (passage & shift(reached, jnp.uint32(reach)))
        passage = passage & shift(passage, jnp.uint32(reach))
        reach *= 2
    return reached


def whole(scene: Scene) -> Array:
    """The map with the agent on it, uint8 `[H, W]`; what it holds lies in the corner (0, 0)."""
    place = jnp.arange(scene.grid.size, dtype=jnp.int32).reshape(scene.grid.shape)
    agent = (tiles.code(tiles.AGENT) + scene.direction).astype(jnp.uint8)
    corner = jnp.where((place == 0) & (scene.pocket != 0), scene.pocket, scene.grid)
    return jnp.where(place == scene.cell, agent, corner)


def room(height: int, width: int) -> np.ndarray:
    """Floor with a border of grey wall, uint8 `[height, width]`."""
    grid = np.full((height, width), _FLOOR, np.uint8)
    grid[[0, -1]] = grid[:, [0, -1]] = _WALL
    return grid


def free_cells(key: PRNGKey, grid: Array, num: int) -> Array:
    """`num` different cells of bare floor, uniformly, int32 `[num]`; consumes `key`. There must be as many."""
    scores = jnp.where(grid.reshape(-1) == _FLOOR, jax.random.uniform(key, (grid.size,)), -1.0)
    return jax.lax.top_k(scores, num)[1].astype(jnp.int32)
