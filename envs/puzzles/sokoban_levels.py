"""Levels of Sokoban: drawn by reverse play on the device, or given as text; and a search for their solutions.

Reverse play starts at the end, every box on its goal, and pulls: read in the other order its moves are a solution.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Given

__all__ = ["ReversePlay", "Room", "given_levels", "home", "neighbours", "solve", "walled"]


@flax.struct.dataclass
class Room:
    """A level: `walls`, `goals` and `boxes` bool `[H, W]`; `player` int32, a cell row by row. Outside are walls."""

    walls: Array
    goals: Array
    boxes: Array
    player: Array


@functools.cache
def neighbours(height: int, width: int) -> np.ndarray:
    """Cells int32 `[H W + 1, 4]` up, right, down and left of each; the last, H W, is all that lies outside."""
    row, column = np.divmod(np.arange(height * width)[:, None], width)
    row, column = row + np.array([[-1, 0, 1, 0]]), column + np.array([[0, 1, 0, -1]])
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    table = np.where(inside, row * width + column, height * width)
    return np.concatenate([table, np.full((1, 4), height * width)]).astype(np.int32)


def walled(grid: Array, value: bool) -> Array:
    """Cells bool `[H W + 1]`, with one for all outside."""
    return jnp.append(grid.reshape(-1), value)


@dataclasses.dataclass(frozen=True)
class ReversePlay:
    """Levels of `size` x `size` with walls around, made backwards; a second is drawn where no box was moved.

    A random walk of `carved` steps makes the floor; goals with boxes and the player are put on it at random. Then
    `played` random moves are made backwards: the player steps away and mostly pulls the box behind him. The last of the
    positions is kept in which as many boxes as ever were off the goals.
    """

    size: int = field(8, Between(5, 32))
    boxes: int = field(2, AtLeast(1))
    carved: int = field(80, AtLeast(8))
    played: int = field(100, AtLeast(1))

    def __post_init__(self) -> None:
        """Refuses more boxes than there is room for."""
        check_fields(self)
        if self.boxes > (self.size - 2) ** 2 // 4:
            raise UsageError(
                f"ReversePlay puts 1 to {(self.size - 2) ** 2 // 4} boxes into a room of size {self.size}, "
                f"not {self.boxes}"
            )

    def __call__(self, key: PRNGKey) -> Room:
        """Draws until a box has moved, mostly once or twice; consumes `key`."""

        def again(carry: tuple[PRNGKey, Room, Array]) -> tuple[PRNGKey, Room, Array]:
            next_key, key = jax.random.split(carry[0])
            room = self.attempt(key)
            return next_key, room, home(room) == self.boxes

        nothing = jnp.zeros(
            (self.size, self.size), bool
        )  # the program has one attempt, which is most of it
        first = key, Room(nothing, nothing, nothing, jnp.zeros((), jnp.int32)), jnp.ones((), bool)
        return jax.lax.while_loop(lambda carry: carry[2], again, first)[1]

    def attempt(self, key: PRNGKey) -> Room:
        """One level, which may be solved from the start; consumes `key`."""
        walk_key, place_key, play_key = jax.random.split(key, 3)
        table, cells = jnp.asarray(neighbours(self.size, self.size)), np.arange(self.size**2)
        row, column = np.divmod(cells, self.size)
        inner = (np.minimum(row, column) > 0) & (np.maximum(row, column) < self.size - 1)

        def carve(carry: tuple[Array, Array], way: Array) -> tuple[tuple[Array, Array], None]:
            place, floor = carry
            target = table[place, way]
            place = jnp.where(jnp.asarray(inner)[target], target, place)
            return (place, floor | (cells == place)), None

        middle = jnp.int32(self.size // 2 * (self.size + 1))
        directions = jax.random.randint(walk_key, (self.carved,), 0, 4)
        (_, floor), _ = jax.lax.scan(
            carve, (middle, jnp.asarray(cells == self.size // 2 * (self.size + 1))), directions
        )
        order = jnp.argsort(
            jnp.where(floor, jax.random.uniform(place_key, (self.size**2,)), 2.0)
        ).astype(jnp.int32)
        goals = jnp.any(cells[:, None] == order[None, : self.boxes], axis=1)
        fits = (
            jnp.sum(floor) > self.boxes
        )  # else a box or the player would stand in a wall: drawn again
        start = goals, order[self.boxes], goals, order[self.boxes], jnp.zeros((), jnp.int32)

        def play(carry: tuple[Array, ...], chance: Array) -> tuple[tuple[Array, ...], None]:
            boxes, player, kept, kept_player, most = carry
            free = walled(floor & ~boxes, False)[table[player]]
            behind = jnp.roll(table[player], 2)  # of a step up, the cell below
            box = walled(boxes, False)[behind]
            way = jnp.argmax(jnp.where(free, chance[:4] + 0.5 * box, -1.0))
            pulls = box[way] & (chance[4] < 0.8) & jnp.any(free)
            boxes = (boxes & ~(pulls & (cells == behind[way]))) | (pulls & (cells == player))
            player = jnp.where(jnp.any(free), table[player, way], player)
            off = jnp.sum(boxes & ~goals, dtype=jnp.int32)
            keeps = off >= most
            kept, kept_player = jnp.where(keeps, boxes, kept), jnp.where(keeps, player, kept_player)
            return (boxes, player, kept, kept_player, jnp.maximum(most, off)), None

        (_, _, boxes, player, _), _ = jax.lax.scan(
            play, start, jax.random.uniform(play_key, (self.played, 5))
        )
        grids = [
            jnp.reshape(grid, (self.size, self.size))
            for grid in (~floor, goals, jnp.where(fits, boxes, goals))
        ]
        return Room(*grids, player)


def home(room: Room) -> Array:
    """How many boxes stand on goals, int32 `[]`."""
    return jnp.sum(room.boxes & room.goals, dtype=jnp.int32)


def given_levels(*texts: str, searched: int = 200_000) -> Given:
    """A generator of given levels in the usual signs: # wall, @ player, $ box, . goal, * both, + player on a goal.

    Anything outside of the lines is wall; smaller levels are walled to the size of the greatest.

    Raises:
        UsageError: a level has another sign, not one player, not as many boxes as goals, nothing to do or to move, or
            a search of at most `searched` positions has shown that it has no solution.
    """
    lines = [[line.rstrip() for line in text.splitlines() if line.strip()] for text in texts]
    height, width = (
        max(map(len, lines), default=0),
        max((len(line) for level in lines for line in level), default=0),
    )
    rooms = []
    for level in lines:
        grid = np.full((height, width), "#")
        for i, line in enumerate(level):
            grid[i, : len(line)] = list(line)
        if strange := set(grid.flat) - set("# -_@+$*."):
            raise UsageError(
                f"levels of Sokoban are written with # @ $ . * + and spaces, not with {str(min(strange))!r}"
            )
        walls, goals, boxes = grid == "#", np.isin(grid, [".", "*", "+"]), np.isin(grid, ["$", "*"])
        players = np.flatnonzero(np.isin(grid, ["@", "+"]))
        if len(players) != 1 or boxes.sum() != goals.sum() or not np.any(boxes & ~goals):
            raise UsageError(
                f"a level of Sokoban has one player and as many boxes as goals, not all of them there; this one has "
                f"{len(players)} players, {boxes.sum()} boxes, {goals.sum()} goals and {(boxes & goals).sum()} there"
            )
        room = Room(walls, goals, boxes, np.int32(players[0]))
        if searched and solve(room, searched) == []:
            raise UsageError("a level of Sokoban has no solution:\n" + "\n".join(level))
        rooms.append(room)
    return Given.of(*rooms)


def solve(room: Room, searched: int = 1_000_000) -> list[int] | None:
    """A shortest solution by breadth-first search on the host; [] if there is none, None if the search is too long."""
    table, walls = (
        neighbours(*np.shape(room.walls)).tolist(),
        [*np.asarray(room.walls).reshape(-1).tolist(), True],
    )
    boxes, goals = (frozenset(np.flatnonzero(grid).tolist()) for grid in (room.boxes, room.goals))
    start = int(room.player), boxes
    came, queue = {start: (start, -1)}, [start]
    for player, boxes in queue:
        for action in range(4):
            first = table[player][action]
            second, pushed = table[first][action], boxes
            if first in boxes and not walls[second] and second not in boxes:
                pushed = boxes - {first} | {second}
            elif walls[first] or first in boxes:
                continue
            if (after := (first, pushed)) not in came:
                came[after] = (player, boxes), action
                queue.append(after)
            if pushed == goals:
                moves = []
                while after != start:
                    after, move = came[after]
                    moves.append(move)
                return moves[::-1]
        if len(queue) > searched:
            return None
    return []
