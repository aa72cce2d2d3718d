"""What lies on a cell of a grid world: one byte, `16 * tile + colour`, its properties and its picture.

| tile | | tile | | tile | | tile | |
| --- | --- | --- | --- | --- | --- | --- | --- |
| 0 | unseen, or nothing held | 4 | key | 8 | hexagon | 12 | closed door |
| 1 | floor | 5 | ball | 9 | star | 13 | locked door |
| 2 | wall | 6 | square | 10 | lava | 14 | the agent (its colour is its direction) |
| 3 | goal | 7 | pyramid | 11 | open door | | |

Colours: 0 none, 1 red, 2 green, 3 blue, 4 purple, 5 yellow, 6 grey, 7 orange, 8 white, 9 brown, 10 pink.
"""

import numpy as np

from jaxpar.types import Array

__all__ = ["SPRITES", "member", "code", "bitmap", "picture"]

(
    NOTHING,
    FLOOR,
    WALL,
    GOAL,
    KEY,
    BALL,
    SQUARE,
    PYRAMID,
    HEXAGON,
    STAR,
    LAVA,
    OPEN,
    CLOSED,
    LOCKED,
    AGENT,
) = range(15)
NO_COLOUR, RED, GREEN, BLUE, PURPLE, YELLOW, GREY, ORANGE, WHITE, BROWN, PINK = range(11)
NUM_COLOURS = 11

WALKABLE = (FLOOR, GOAL, LAVA, OPEN)
PICKABLE = (KEY, BALL, SQUARE, PYRAMID, HEXAGON, STAR)
OPAQUE = (WALL, CLOSED, LOCKED)


def code(tile: int, colour: int = NO_COLOUR) -> int:
    """The byte of a tile in a colour."""
    return 16 * tile + colour


def member(tile: Array, tiles: tuple[int, ...]) -> Array:
    """Whether `tile` (any shape) is one of `tiles`, without a table: comparisons vectorise, gathers do not."""
    found = tile == tiles[0]
    for other in tiles[1:]:
        found = found | (tile == other)
    return found


def bitmap(rows: str) -> np.ndarray:
    """An 8 x 8 bool picture of eight words, in which `#` is drawn."""
    return np.array([[mark == "#" for mark in row] for row in rows.split()])


def picture(grid: Array, sprites: Array) -> Array:
    """Codes `[H, W]` drawn with `sprites` `[codes, 8, 8, 3]`: uint8 `[8 H, 8 W, 3]`."""
    height, width = grid.shape
    return sprites[grid].transpose(0, 2, 1, 3, 4).reshape(8 * height, 8 * width, 3)


_PAINT = np.array(
    [
        (60, 60, 60), (230, 60, 50), (60, 190, 80), (70, 110, 240), (160, 80, 210), (240, 210, 60), (130, 130, 130),
        (245, 145, 40), (240, 240, 240), (140, 95, 55), (245, 140, 190),
    ],
    np.uint8,
)  # fmt: skip

_SHAPES = {
    WALL: "######## ######## ######## ######## ######## ######## ######## ########",
    GOAL: "........ .######. .######. .######. .######. .######. .######. ........",
    KEY: "........ ...##... ..#..#.. ...##... ....#... ...##... ....#... ...##...",
    BALL: "........ ..####.. .######. .######. .######. .######. ..####.. ........",
    SQUARE: "........ .######. .#....#. .#....#. .#....#. .#....#. .######. ........",
    PYRAMID: "........ ...##... ...##... ..####.. ..####.. .######. .######. ........",
    HEXAGON: "........ ...##... .######. .##..##. .##..##. .######. ...##... ........",
    STAR: "........ ...##... ...##... .######. ..####.. ..####.. .##..##. ........",
    LAVA: "######## #..##..# .##..##. ######## #..##..# .##..##. ######## ########",
    OPEN: "######## #....... #....... #....... #....... #....... #....... ########",
    CLOSED: "######## #......# #......# #....#.# #......# #......# #......# ########",
    LOCKED: "######## ######## ##....## ##.##.## ##.##.## ##....## ######## ########",
}
_ARROW = "........ .##..... .####... .######. .######. .####... .##..... ........"  # to the right


def _sprites() -> np.ndarray:
    """`[256, 8, 8, 3]`: every tile in every colour on a dark floor with a faint lattice; the agent on light."""
    floor = np.full((8, 8, 3), 24, np.uint8)
    floor[0], floor[:, 0] = 40, 40
    table = np.zeros((256, 8, 8, 3), np.uint8)
    table[16 * FLOOR : 16 * AGENT] = floor
    for tile, shape in _SHAPES.items():
        for colour in range(NUM_COLOURS):
            table[code(tile, colour)][bitmap(shape)] = _PAINT[colour]
    for direction in range(4):
        table[code(AGENT, direction)] = 210
        table[code(AGENT, direction)][np.rot90(bitmap(_ARROW), -direction)] = _PAINT[RED]
    return table


SPRITES = _sprites()
