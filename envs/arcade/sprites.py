"""Small bitmaps, and the square sprites stamped from them: figures, letters and suits for games drawn by tiles."""

from typing import Any

import numpy as np

FIGURES = {
    "0": "### #.# #.# #.# ###",
    "1": ".#. ##. .#. .#. ###",
    "2": "### ..# ### #.. ###",
    "3": "### ..# ### ..# ###",
    "4": "#.# #.# ### ..# ..#",
    "5": "### #.. ### ..# ###",
    "6": "### #.. ### #.# ###",
    "7": "### ..# ..# .#. .#.",
    "8": "### #.# ### #.# ###",
    "9": "### #.# ### ..# ###",
    "A": ".#. #.# ### #.# #.#",
    "T": "### .#. .#. .#. .#.",
    "J": "..# ..# ..# #.# ###",
    "Q": "### #.# #.# ### ..#",
    "K": "#.# #.# ##. #.# #.#",
}
"""3 x 5 pixels each, rows from the top."""

SUITS = {
    "diamonds": "...#... ..###.. .#####. ####### .#####. ..###.. ...#...",
    "clubs": "..###.. ..###.. ####### ####### ##.#.## ...#... ..###..",
    "hearts": ".##.##. ####### ####### ####### .#####. ..###.. ...#...",
    "spades": "...#... ..###.. .#####. ####### ##.#.## ...#... ..###..",
}
"""7 x 7 pixels each."""

MINE = "..#.. .###. ##### .###. ..#.."


def stamp(bitmap: str, color: Any, ground: Any, side: int, scale: int = 1) -> np.ndarray:
    """A sprite uint8 `[side, side, 3]`: the bitmap, enlarged `scale` times, in the middle of a plain ground."""
    marks = np.array([[mark == "#" for mark in row] for row in bitmap.split()])
    marks = marks.repeat(scale, axis=0).repeat(scale, axis=1)
    top, left = (side - marks.shape[0]) // 2, (side - marks.shape[1]) // 2
    sprite = plain(ground, side)
    sprite[top : top + marks.shape[0], left : left + marks.shape[1]][marks] = color
    return sprite


def plain(color: Any, side: int) -> np.ndarray:
    """A sprite of one colour."""
    return np.broadcast_to(np.asarray(color, np.uint8), (side, side, 3)).copy()


def framed(sprite: np.ndarray, color: Any) -> np.ndarray:
    """The sprite with a border one pixel wide at its top and left: neighbours are told apart."""
    sprite = sprite.copy()
    sprite[0], sprite[:, 0] = color, color
    return sprite
