"""A genome as a picture."""

from pathlib import Path

import numpy as np

from jaxpar.io import plot_graph
from jaxpar.neat.config import NeatConfig
from jaxpar.neat.exchange import node_label, select_genome
from jaxpar.neat.genome import Genomes

__all__ = ["draw_network"]


def draw_network(
    config: NeatConfig, genomes: Genomes, out: Path, number: int = 0, *, title: str = ""
) -> None:
    """Draws a genome into the PNG `out`, inputs left and outputs right; disabled connections are dashed.

    Raises:
        UsageError: matplotlib is missing.
    """
    one = select_genome(genomes, number)
    slots = [int(slot) for slot in np.flatnonzero(one.node_on)]
    edges = np.array([(one.source[c], one.target[c]) for c in np.flatnonzero(one.on)], int).reshape(
        -1, 2
    )
    level = {slot: 0 for slot in slots}
    hidden = [slot for slot in slots if slot >= config.num_io]
    for _ in hidden:  # enough for the longest path; cycles stop there as well
        for source, target in edges:
            if target in hidden and source != target:
                level[target] = min(max(level[target], level[source] + 1), len(hidden))
    last = max(level.values()) + 1
    level |= {slot: last for slot in slots if config.num_inputs <= slot < config.num_io}
    columns = {
        column: [slot for slot in slots if level[slot] == column] for column in set(level.values())
    }

    def place(slot: int) -> tuple[float, float]:
        column = level[slot]
        # Neighbouring columns lie higher and lower in turns, so the edges of a chain do not cover each other.
        shift = (0.12 if column % 2 else -0.12) if slot in hidden else 0.0
        return column, (columns[column].index(slot) + 0.5 + shift) / len(columns[column])

    places = np.array([place(slot) for slot in slots])
    at = {slot: place for place, slot in enumerate(slots)}
    colors = [
        "in" if s < config.num_inputs else "out" if s < config.num_io else "hidden" for s in slots
    ]
    ends = np.array([[at[s], at[t]] for s, t in edges], int).reshape(-1, 2)
    labels = [node_label(config, one, slot) for slot in slots]
    plot_graph(
        places,
        labels,
        colors,
        ends,
        one.weight[one.on],
        ~one.enabled[one.on],
        Path(out),
        title=title,
    )
