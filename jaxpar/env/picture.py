"""Pictures of states, drawn by pure functions of arrays, so that a thousand environments are one `vmap`.

A renderer starts from `canvas`, paints shapes over it in turn and ends with `to_uint8`; a grid world looks its tiles up
in a table of sprites (`tiles`). Points are (x, y) in pixels from the upper left corner, y downwards, float32 and
traced; `to_pixels` makes them from coordinates of a world whose y points upwards. Edges are soft over one pixel.
"""

import base64
import dataclasses
import io
import math
import os
from collections.abc import Sequence
from typing import BinaryIO, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpar.fields import Positive, check_fields, field
from jaxpar.types import Array, UsageError

__all__ = [
    "Animation",
    "canvas",
    "captioned",
    "disc",
    "gif",
    "grid_of",
    "line",
    "polygon",
    "rectangle",
    "tiles",
    "to_pixels",
    "to_uint8",
]

Numbers: TypeAlias = "ArrayLike | Sequence[Numbers]"
"""What `jnp.asarray` takes: an array, or nested sequences of numbers and traced scalars."""

BLACK, WHITE, GRAY = (0, 0, 0), (255, 255, 255), (136, 136, 136)
RED, GREEN, BLUE = (214, 69, 65), (60, 160, 90), (58, 110, 190)
YELLOW, ORANGE, PURPLE, BROWN = (236, 190, 60), (232, 130, 50), (130, 85, 170), (150, 100, 60)


def canvas(height: int, width: int, color: Numbers = WHITE) -> Array:
    """An empty image, float32 `[height, width, 3]` with values 0 to 255; `color` is three such numbers."""
    return jnp.broadcast_to(jnp.asarray(color, jnp.float32), (height, width, 3))


def to_uint8(image: Array) -> Array:
    """The painted image, rounded to uint8 `[H, W, 3]`."""
    return jnp.clip(jnp.round(image), 0, 255).astype(jnp.uint8)


def to_pixels(points: Numbers, low: Numbers, high: Numbers, height: int, width: int) -> Array:
    """Pixels `[..., 2]` of world points `[..., 2]`; `low` is the world's lower left corner, `high` its upper right.

    The picture is stretched where its sides are not those of the world.
    """
    points, low, high = (jnp.asarray(x, jnp.float32) for x in (points, low, high))
    shape = (1,) * (points.ndim - 1) + (2,)
    share = (points - low.reshape(shape)) / (high - low).reshape(shape)
    return jnp.stack([share[..., 0] * width, (1 - share[..., 1]) * height], axis=-1)


def disc(
    image: Array, center: Numbers, radius: ArrayLike, color: Numbers, *, visible: ArrayLike = True
) -> Array:
    """A filled circle; `visible=False` (which may be traced) leaves the image as it is."""
    return _paint(
        image, jnp.linalg.norm(_pixels(image) - _point(center), axis=-1) - radius, color, visible
    )


def rectangle(
    image: Array, low: Numbers, high: Numbers, color: Numbers, *, visible: ArrayLike = True
) -> Array:
    """A filled upright rectangle between its upper left corner `low` and its lower right corner `high`."""
    points = _pixels(image)
    return _paint(
        image, jnp.maximum(_point(low) - points, points - _point(high)).max(-1), color, visible
    )


def line(
    image: Array,
    start: Numbers,
    end: Numbers,
    width: ArrayLike,
    color: Numbers,
    *,
    visible: ArrayLike = True,
) -> Array:
    """A line with round ends, `width` pixels thick."""
    distance = _to_segment(
        _pixels(image), jnp.asarray(start, jnp.float32), jnp.asarray(end, jnp.float32)
    )
    return _paint(image, distance - jnp.asarray(width, jnp.float32) / 2, color, visible)


def polygon(image: Array, corners: Numbers, color: Numbers, *, visible: ArrayLike = True) -> Array:
    """A filled polygon with `corners` `[N, 2]` in order, convex or not; costs N pictures of work."""
    points, corners = _pixels(image), jnp.asarray(corners, jnp.float32)
    distance, inside = jnp.full(image.shape[:2], jnp.inf), jnp.zeros(image.shape[:2], bool)
    for i in range(corners.shape[0]):
        start, end = corners[i - 1], corners[i]
        distance = jnp.minimum(distance, _to_segment(points, start, end))
        # Even-odd rule: a ray to the right of the point crosses this edge.
        height = jnp.where(end[1] == start[1], 1.0, end[1] - start[1])
        crossing = start[0] + (points[..., 1] - start[1]) / height * (end[0] - start[0])
        spans = (start[1] > points[..., 1]) != (end[1] > points[..., 1])
        inside ^= spans & (points[..., 0] < crossing)
    return _paint(image, jnp.where(inside, -distance, distance), color, visible)


def tiles(indices: Array, sprites: ArrayLike) -> Array:
    """The picture of a grid: integers `[R, C]` below N into sprites uint8 `[N, h, w, 3]` give uint8 `[R h, C w, 3]`."""
    sprites = jnp.asarray(sprites)
    rows, columns = indices.shape
    number, height, width, _ = sprites.shape
    lines = sprites.transpose(1, 0, 2, 3).reshape(
        height * number, width * 3
    )  # line y of sprite i at y N + i
    # Lines come in the order of the picture, so that nothing as large as it is transposed.
    which = (np.arange(height, dtype=np.int32) * number)[None, :, None] + indices[:, None]
    return jnp.take(lines, which, axis=0, mode="clip").reshape(rows * height, columns * width, 3)


def grid_of(frames: ArrayLike, columns: int | None = None, gap: int = 2) -> np.ndarray:
    """Several environments side by side: uint8 `[..., B, H, W, 3]` to one picture `[..., H', W', 3]`, on the host.

    Args:
        frames: one picture an environment; leading axes (time) stay.
        columns: environments in a row; about the square root of B by default.
        gap: white pixels between environments.
    """
    frames = np.asarray(frames)
    *lead, count, height, width, _ = frames.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    page = np.full(
        (*lead, rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8
    )
    for index in range(count):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        page[..., top : top + height, left : left + width, :] = frames[..., index, :, :, :]
    return page


def captioned(frames: ArrayLike, texts: Sequence[str]) -> np.ndarray:
    """Writes a text under each picture, in black on white: uint8 `[N, H, W, 3]` to `[N, H + h, W, 3]`, on the host.

    Letters are the largest, up to 12 pixels, in which every line is within the width; from 7 on they are legible.

    Args:
        frames: N pictures.
        texts: N of them, of one line or more; all pictures get room for the longest.

    Raises:
        UsageError: another number of texts, or Pillow is not installed.
    """
    frames = np.asarray(frames)
    if len(texts) != len(frames):
        raise UsageError(f"{len(frames)} pictures take as many texts, not {len(texts)}.")
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UsageError(
            "writing on pictures needs Pillow, which is not installed: pip install pillow"
        ) from None
    lines, width = [line for text in texts for line in text.splitlines()], frames.shape[2] - 4
    fits = (
        n
        for n in range(12, 7, -1)
        if max(map(ImageFont.load_default(n).getlength, lines), default=0) <= width
    )
    size = next(fits, 7)
    font = ImageFont.load_default(size)
    step = size + 2
    strip = np.full(
        (step * max(len(text.splitlines()) for text in texts) + 3, frames.shape[2], 3),
        255,
        np.uint8,
    )
    shown = []
    for frame, text in zip(frames, texts, strict=True):
        below = Image.fromarray(strip)
        draw = ImageDraw.Draw(below)
        for row, line in enumerate(text.splitlines()):
            draw.text((2, 1 + row * step), line, (0, 0, 0), font)
        shown.append(np.concatenate([frame, np.asarray(below)]))
    return np.stack(shown)


def gif(frames: ArrayLike, path: str | os.PathLike | BinaryIO, fps: float = 15) -> None:
    """Writes uint8 frames `[T, H, W, 3]` as an endless GIF to a path or an open binary file.

    GIF counts time in hundredths of a second, so `fps` is rounded to such a duration, 50 at most.

    Raises:
        UsageError: the frames are not such an array, or Pillow is not installed.
    """
    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise UsageError(
            f"a GIF is made of uint8 frames [T, H, W, 3] with T > 0, not of {frames.dtype} {list(frames.shape)}"
        )
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(
            "writing a GIF needs Pillow, which is not installed: pip install pillow"
        ) from None
    first, *rest = (Image.fromarray(frame) for frame in frames)
    duration = max(2, round(100 / fps)) * 10
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=duration, loop=0)


@dataclasses.dataclass(frozen=True)
class Animation:
    """Frames uint8 `[T, H, W, 3]` that a notebook shows as a moving picture when this is the value of a cell."""

    frames: Array | np.ndarray
    fps: float = field(15, Positive())

    __post_init__ = check_fields

    def _repr_html_(self) -> str:
        with io.BytesIO() as file:
            gif(self.frames, file, self.fps)
            data = base64.b64encode(file.getvalue()).decode()
        return f'<img src="data:image/gif;base64,{data}" alt="{len(self.frames)} frames">'


def _pixels(image: Array) -> Array:
    """The centre (x, y) of every pixel, `[H, W, 2]`."""
    y, x = np.mgrid[: image.shape[0], : image.shape[1]]
    return jnp.asarray(np.stack([x, y], axis=-1) + 0.5, jnp.float32)


def _point(point: Numbers) -> Array:
    """One (x, y) that broadcasts over an image."""
    return jnp.asarray(point, jnp.float32).reshape(1, 1, 2)


def _to_segment(points: Array, start: Array, end: Array) -> Array:
    """Distance of every pixel from a segment."""
    along, offset = end - start, points - start.reshape(1, 1, 2)
    share = jnp.clip((offset @ along) / jnp.maximum(along @ along, 1e-12), 0, 1)
    return jnp.linalg.norm(offset - share[..., None] * along.reshape(1, 1, 2), axis=-1)


def _paint(image: Array, distance: Array, color: Numbers, visible: ArrayLike) -> Array:
    """Covers what lies inside (negative distance), half of what lies on the edge."""
    cover = jnp.where(visible, jnp.clip(0.5 - distance, 0, 1), 0)[..., None]
    return image + cover * (jnp.asarray(color, jnp.float32).reshape(1, 1, 3) - image)
