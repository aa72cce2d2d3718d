"""MiniGrid's rooms: an empty one, the key and the door, four rooms, the hallway of the memory task.

Source: Chevalier-Boisvert et al. 2023, "Minigrid & Miniworld", and the published rules of the package `minigrid`.
Starts, transitions, views, rewards and ends are those of `minigrid` with the same arguments, step by step. What
deviates: the action "done" does not exist; an observation is the picture alone (tile and colour, a door's state being
a tile), without mission and compass; `see_through` and `view` are fields, and `view=0` shows the whole map.

A layout draws a level; a world plays it. Entering the cell `win` earns `1 - 0.9 time / max_steps` and ends the
episode, as do, for nothing, the cell `lose` and lava.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from . import scene, tiles

__all__ = [
    "VARIANTS",
    "DoorKey",
    "Empty",
    "FourRooms",
    "GridWorld",
    "Level",
    "Memory",
    "Params",
    "State",
    "level_of",
]

_FLOOR, _WALL = tiles.code(tiles.FLOOR), tiles.code(tiles.WALL, tiles.GREY)
_GOAL = tiles.code(tiles.GOAL, tiles.GREEN)


@flax.struct.dataclass
class Level:
    """A scene to begin with, and the cells (int32, -1 for none) that end the episode."""

    scene: scene.Scene
    win: Any
    lose: Any


@flax.struct.dataclass
class State:
    """A level being played, and its clock (int32)."""

    level: Level
    time: Any


@flax.struct.dataclass
class Params:
    """After `max_steps` steps the episode is cut."""

    max_steps: Any


def level_of(grid: Array, cell: Array, direction: Array, win: Array, lose: Any = -1) -> Level:
    """A level with an empty pocket, from a map of `envs.tiles` bytes and cells `row * W + column`."""
    body = scene.Scene(
        grid=jnp.asarray(grid, jnp.uint8),
        cell=jnp.asarray(cell, jnp.int32),
        direction=jnp.asarray(direction, jnp.int32),
        pocket=jnp.zeros((), jnp.uint8),
    )
    return Level(scene=body, win=jnp.asarray(win, jnp.int32), lose=jnp.asarray(lose, jnp.int32))


@dataclasses.dataclass(frozen=True)
class Empty:
    """A room with the goal in its lower right corner; the agent starts in the upper left one, or anywhere."""

    size: int = field(8, AtLeast(4))
    random_start: bool = False

    def __post_init__(self):
        check_fields(self)

    name = "Empty"
    picks = True

    @property
    def max_steps(self) -> int:
        """MiniGrid's limit."""
        return 4 * self.size**2

    def sample(self, key: PRNGKey) -> Level:
        """Draws a level; consumes `key`."""
        grid = scene.room(self.size, self.size)
        grid[-2, -2] = _GOAL
        win = self.size * (self.size - 1) - 2
        if not self.random_start:
            return level_of(
                jnp.asarray(grid), jnp.int32(self.size + 1), jnp.int32(0), jnp.int32(win)
            )
        cell_key, direction_key = jax.random.split(key)
        cell = scene.free_cells(cell_key, jnp.asarray(grid), 1)[0]
        return level_of(
            jnp.asarray(grid), cell, jax.random.randint(direction_key, (), 0, 4), jnp.int32(win)
        )


@dataclasses.dataclass(frozen=True)
class DoorKey:
    """A wall with a locked yellow door parts the room; agent and key are on its left, the goal on its right."""

    size: int = field(8, AtLeast(5))

    def __post_init__(self):
        check_fields(self)

    name = "DoorKey"
    picks = True

    @property
    def max_steps(self) -> int:
        """MiniGrid's limit."""
        return 10 * self.size**2

    def sample(self, key: PRNGKey) -> Level:
        """Draws a level; consumes `key`. Every one can be solved."""
        size = self.size
        wall_key, rest_key = jax.random.split(key)
        wall = jax.random.randint(wall_key, (), 2, size - 2)
        room = (wall - 1) * (size - 2)
        agent, thing, door, direction = jax.random.randint(
            rest_key, (4,), 0, jnp.stack([room, room - 1, jnp.int32(size - 3), jnp.int32(4)])
        )
        thing = thing + (thing >= agent)

        def cell(index: Array) -> Array:
            return (1 + index // (wall - 1)) * size + 1 + index % (wall - 1)

        grid = scene.room(size, size)
        grid[-2, -2] = _GOAL
        place = jnp.arange(size * size, dtype=jnp.int32).reshape(size, size)
        grid = jnp.where(place % size == wall, jnp.uint8(_WALL), grid)
        grid = jnp.where(
            place == (1 + door) * size + wall,
            jnp.uint8(tiles.code(tiles.LOCKED, tiles.YELLOW)),
            grid,
        )
        grid = jnp.where(place == cell(thing), jnp.uint8(tiles.code(tiles.KEY, tiles.YELLOW)), grid)
        return level_of(grid, cell(agent), direction, jnp.int32(size * (size - 1) - 2))


@dataclasses.dataclass(frozen=True)
class FourRooms:
    """Four rooms, joined by four gaps; agent and goal anywhere (Sutton, Precup and Singh 1999)."""

    size: int = field(19, AtLeast(7))
    max_steps: int = field(100, AtLeast(1))

    def __post_init__(self):
        check_fields(self)

    name = "FourRooms"
    picks = True

    def sample(self, key: PRNGKey) -> Level:
        """Draws a level; consumes `key`. Every one can be solved."""
        size, middle = self.size, self.size // 2
        gap_key, cell_key, direction_key = jax.random.split(key, 3)
        ends = jnp.asarray(
            [middle - 1, size - middle - 2, middle - 1, size - middle - 2], jnp.int32
        )
        gaps = 1 + jax.random.randint(gap_key, (4,), 0, ends)
        grid = scene.room(size, size)
        grid[middle] = grid[:, middle] = _WALL
        place = jnp.arange(size * size, dtype=jnp.int32).reshape(size, size)
        row, column = place // size, place % size
        open_row = (row == middle) & ((column == gaps[0]) | (column == middle + gaps[1]))
        open_column = (column == middle) & ((row == gaps[2]) | (row == middle + gaps[3]))
        grid = jnp.where(open_row | open_column, jnp.uint8(_FLOOR), grid)
        agent, goal = scene.free_cells(cell_key, grid, 2)
        grid = jnp.where(place == goal, jnp.uint8(_GOAL), grid)
        return level_of(grid, agent, jax.random.randint(direction_key, (), 0, 4), goal)


@dataclasses.dataclass(frozen=True)
class Memory:
    """A thing in the first room, a hallway, and at its end two things: beside the same one is `win`, else `lose`."""

    size: int = field(13, AtLeast(7))
    random_length: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.size % 2 == 0:
            raise UsageError(f"Memory needs an odd size, not {self.size}")

    name = "Memory"
    picks = False  # nothing can be taken along

    @property
    def max_steps(self) -> int:
        """MiniGrid's limit."""
        return 5 * self.size**2

    def sample(self, key: PRNGKey) -> Level:
        """Draws a level; consumes `key`."""
        size, middle = self.size, self.size // 2
        end_key, rest_key = jax.random.split(key)
        end = (
            jax.random.randint(end_key, (), 4, size - 2)
            if self.random_length
            else jnp.int32(size - 3)
        )
        start, first, upper = jax.random.randint(
            rest_key, (3,), 0, jnp.stack([end, jnp.int32(2), jnp.int32(2)])
        )
        place = jnp.arange(size * size, dtype=jnp.int32).reshape(size, size)
        row, column = place // size, place % size
        off = jnp.abs(row - middle)
        first_room = (off == 2) & (column <= 4) | (off == 1) & (column == 4)
        hallway = (off == 1) & (column >= 5) & (column < end)
        across = (column == end) & (off != 0) | (column == end + 2)
        grid = jnp.where(first_room | hallway | across, jnp.uint8(_WALL), scene.room(size, size))
        things = jnp.asarray(
            [tiles.code(tile, tiles.GREEN) for tile in (tiles.KEY, tiles.BALL)], jnp.uint8
        )
        grid = jnp.where((row == middle - 1) & (column == 1), things[first], grid)
        grid = jnp.where((row == middle - 2) & (column == end + 1), things[upper], grid)
        grid = jnp.where((row == middle + 2) & (column == end + 1), things[1 - upper], grid)
        above, below = (middle - 1) * size + end + 1, (middle + 1) * size + end + 1
        same = first == upper
        return level_of(
            grid,
            middle * size + 1 + start,
            jnp.int32(0),
            jnp.where(same, above, below),
            jnp.where(same, below, above),
        )


@dataclasses.dataclass(frozen=True)
class GridWorld:
    """A layout, played from an egocentric `view` (odd; 0 for the whole map), through walls or not."""

    layout: Any = DoorKey()
    view: int = field(7, Between(3, 31, also=(0,)))
    see_through: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.view and self.view % 2 == 0:
            raise UsageError(
                f"a view is an odd number of cells from 3 to 31, or 0 for the whole map, not {self.view}"
            )

    @property
    def name(self) -> str:
        """The layout's name and size."""
        return f"{self.layout.name}-{self.layout.size}x{self.layout.size}"

    @property
    def default_params(self) -> Params:
        """The layout's limit."""
        return Params(max_steps=self.layout.max_steps)

    def observation_space(self, params: Params) -> Box:
        """Tile and colour of every cell seen."""
        side = self.view or self.layout.size
        return Box(0, 15, (side, side, 2), jnp.uint8)

    def action_space(self, params: Params) -> Discrete:
        """`envs.scene.ACTIONS`."""
        return Discrete(len(scene.ACTIONS), names=scene.ACTIONS)

    def init(self, key: PRNGKey, params: Params) -> State:
        """Begins a level of the layout; consumes `key`."""
        return State(level=self.layout.sample(key), time=jnp.zeros((), jnp.int32))

    def sample_level(self, key: PRNGKey, params: Params) -> Level:
        """Draws a level of the layout; consumes `key`."""
        return self.layout.sample(key)

    def init_level(self, key: PRNGKey, level: Level, params: Params) -> State:
        """Begins `level`; `key` is not needed."""
        return State(level=level, time=jnp.zeros((), jnp.int32))

    def mutate_level(self, key: PRNGKey, level: Level, params: Params) -> Level:
        """Turns one inner cell from floor to wall or back, but for the agent's and those that end the episode.

        Consumes `key`. A cell with anything else on it is left as it is, and what comes out may have no solution: the
        designer judges that (Parker-Holder et al. 2022).
        """
        size = self.layout.size
        row, column = jax.random.randint(key, (2,), 1, size - 1)
        cell, grid = row * size + column, level.scene.grid
        place = jnp.arange(size * size, dtype=jnp.int32).reshape(size, size)
        here = (
            (place == cell)
            & (place != level.scene.cell)
            & (place != level.win)
            & (place != level.lose)
        )
        turned = jnp.where(here & (grid == _FLOOR), jnp.uint8(_WALL), grid)
        turned = jnp.where(here & (grid == _WALL), jnp.uint8(_FLOOR), turned)
        return level.replace(scene=level.scene.replace(grid=turned))

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """One action of the kernel; `key` is not needed."""
        if not self.layout.picks:
            action = jnp.where(action == scene.PICK, -1, action)
        body, _, _ = scene.act(state.level.scene, action)
        return State(level=state.level.replace(scene=body), time=state.time + 1)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """The view, uint8 `[view, view, 2]`, or the map, uint8 `[H, W, 2]` (`scene.whole`); `key` is not needed."""
        if self.view:
            return scene.view(state.level.scene, self.view, self.see_through)
        return scene.unpacked(scene.whole(state.level.scene))

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """`1 - 0.9 time / max_steps` on `win`, else 0."""
        won = next_state.level.scene.cell == next_state.level.win
        return jnp.where(won, 1 - 0.9 * next_state.time / params.max_steps, 0.0).astype(jnp.float32)

    def terminal(self, state: State, params: Params) -> Array:
        """On `win`, on `lose`, in lava."""
        level = state.level
        lava = level.scene.grid.reshape(-1)[level.scene.cell] >> 4 == tiles.LAVA
        return (level.scene.cell == level.win) | (level.scene.cell == level.lose) | lava

    def truncated(self, state: State, params: Params) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def action_mask(self, state: State, params: Params) -> Array:
        """The actions that change anything, bool `[6]`."""
        mask = scene.legal(state.level.scene)
        return mask if self.layout.picks else mask.at[scene.PICK].set(False)

    def render(self, state: State, params: Params) -> Array:
        """The whole map, 8 pixels a cell."""
        return tiles.picture(scene.whole(state.level.scene), jnp.asarray(tiles.SPRITES))


def _variants() -> dict[str, Callable[..., GridWorld]]:
    layouts: dict[str, Any] = {f"Empty-{size}x{size}": Empty(size) for size in (5, 6, 8, 16)}
    layouts |= {
        f"Empty-Random-{size}x{size}": Empty(size, random_start=True) for size in (5, 6, 8, 16)
    }
    layouts |= {f"DoorKey-{size}x{size}": DoorKey(size) for size in (5, 6, 8, 16)}
    layouts |= {f"Memory-S{size}": Memory(size) for size in (7, 9, 11, 13)}
    layouts |= {f"Memory-S{size}Random": Memory(size, random_length=True) for size in (13, 17)}
    layouts["FourRooms"] = FourRooms()
    # MiniGrid's choice: where there is nothing to hide, looking through walls is cheaper.
    return {
        name: functools.partial(GridWorld, layout, see_through=isinstance(layout, Empty))
        for name, layout in layouts.items()
    }


VARIANTS: dict[str, Callable[..., GridWorld]] = _variants()
