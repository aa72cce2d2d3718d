"""Frames of a world that a run keeps, and the film and the lineages that are drawn of them."""

import dataclasses
import functools
import os
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.env import captioned, gif
from jaxpar.io import plot_areas
from jaxpar.life import WorldState, draw_world, lineage_colours

NAMED_LINEAGES = 10
"""Lineages that have an area of their own; all others share one."""


class Frame(NamedTuple):
    """Picture of a step, uint8 `[H, W, 3]`, and the lineages of agents alive, int32 `[alive]`."""

    step: int
    image: np.ndarray
    lineages: np.ndarray


def frame_interval(steps: int, chunk: int, most: int) -> int:
    """Returns the steps between frames: chunk times the least power of two for at most `most`.

    A longer run has a multiple of it, so that a run that is extended has the frames of one that was
    as long from the beginning.
    """
    interval = chunk
    while steps > interval * most:
        interval *= 2
    return interval


@dataclasses.dataclass(frozen=True)
class Frames:
    """Frames of a run in its folder, a file each.

    Attributes:
      folder: Where the files are.
      interval: Steps between frames; other steps are dropped, but for the last.
      scale: Pixels of a cell's side.
    """

    folder: pathlib.Path
    interval: int
    scale: int

    def keep(self, step: int, state: WorldState) -> None:
        """Writes the frame of a state; all processes call it, and the first writes."""
        bare = state._replace(agents=state.agents._replace(genome=(), carry=()))
        image = _draw(bare, self.scale)
        image, alive, lineage = jax.device_get((image, bare.agents.alive, bare.agents.lineage))
        if jax.process_index():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / ".partial.npz"
        np.savez_compressed(partial, image=image, lineages=lineage[alive])
        os.replace(partial, self._path(step))

    def read(self, last: int) -> list[Frame]:
        """Returns the frames up to step `last`, in order; deletes other ones."""
        found = []
        for path in sorted(self.folder.glob("[0-9]*.npz")):
            step = int(path.stem)
            if step > last or (step % self.interval and step != last):
                path.unlink()
                continue
            with np.load(path) as arrays:
                found.append(Frame(step, arrays["image"], arrays["lineages"]))
        return found

    def has(self, step: int) -> bool:
        """Returns whether there is a frame of this step."""
        return self._path(step).is_file()

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / f"{step:010}.npz"


@functools.partial(jax.jit, static_argnums=1)
def _draw(state: WorldState, scale: int) -> jax.Array:
    return draw_world(state, scale)


def save_film(frames: list[Frame], path: pathlib.Path) -> None:
    """Writes frames of one size as a GIF, ten a second."""
    images = np.stack([frame.image for frame in frames])
    key = "green: energy; small dark: robots\ncoloured: agents, by lineage"
    texts = []
    for frame in frames:
        texts.append(f"step {frame.step:,}, {len(frame.lineages):,} agents live\n{key}")
    path.parent.mkdir(parents=True, exist_ok=True)
    gif(captioned(images, texts), path, fps=10)


def count_lineages(frames: list[Frame], most: int) -> tuple[list[int], np.ndarray]:
    """Counts agents of the `most` largest lineages over all frames, and of the rest.

    Returns:
      Their numbers, oldest first; agents alive, int `[lineages + 1, frames]`, others last.
    """
    numbers, totals = np.unique(np.concatenate([f.lineages for f in frames]), return_counts=True)
    largest = np.sort(numbers[np.argsort(-totals, kind="stable")[:most]])
    counts = np.zeros((len(largest) + 1, len(frames)), int)
    for column, frame in enumerate(frames):
        counts[:-1, column] = [np.sum(frame.lineages == number) for number in largest]
        counts[-1, column] = len(frame.lineages) - counts[:-1, column].sum()
    return largest.tolist(), counts


def plot_lineages(frames: list[Frame], path: pathlib.Path, title: str = "") -> None:
    """Draws agents alive by lineage, descendants of one newcomer, as stacked areas over time."""
    numbers, counts = count_lineages(frames, NAMED_LINEAGES)
    colours = np.asarray(lineage_colours(np.asarray(numbers))) / 255
    areas = dict(zip((f"lineage {number}" for number in numbers), counts[:-1], strict=True))
    areas["all others"] = counts[-1]
    steps = np.asarray([frame.step for frame in frames])
    plot_areas(
        steps,
        areas,
        path,
        colours=[*map(tuple, colours.tolist()), None],
        labels=("step", "agents alive, by lineage"),
        title=title,
    )
