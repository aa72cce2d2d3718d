"""Pictures of graphs, and of what a population is made of over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.io.metrics import read_jsonl
from jaxpar.io.plots import _BLUE, _GREEN, _VERMILION, _figure, _save
from jaxpar.types import UsageError

__all__ = ["plot_graph", "plot_stream"]


def plot_graph(
    places: np.ndarray, labels: Sequence[str], colors: Sequence[str], edges: np.ndarray, weights: np.ndarray,
    dashed: np.ndarray, out: Path, *, title: str = "",
) -> None:  # fmt: skip
    """Draws a directed graph into the PNG `out`: blue edges are positive, red ones negative, thick ones strong.

    Args:
      places: `[N, 2]`, where nodes are.
      labels: Of the nodes.
      colors: Of the nodes: "in", "out" or "hidden".
      edges: int `[E, 2]`, from node to node.
      weights: `[E]`.
      dashed: bool `[E]`, edges that are off.
      out: A path.
      title: What stands above.

    Raises:
      UsageError: matplotlib is missing.
    """
    figure = _figure(6.5, 4.5)
    figure.set_layout_engine("none")  # arrows leave it no room to fit the axes
    panel = figure.subplots()
    shades = {"in": _GREEN, "out": _VERMILION, "hidden": _BLUE}
    strongest = max(float(np.abs(weights).max(initial=0)), 1e-9)
    for (start, end), weight, off in zip(edges, weights, dashed, strict=True):
        bend = 0.6 if start == end else 0.12
        style: dict[str, Any] = dict(
            arrowstyle="-|>", color="0.7" if off else (_BLUE if weight > 0 else _VERMILION), shrinkA=9, shrinkB=9,
            linewidth=0.6 + 2 * abs(weight) / strongest, linestyle="--" if off else "-",
            connectionstyle=f"arc3,rad={bend}",
        )  # fmt: skip
        finish = places[end] + (0.02 if start == end else 0)
        panel.annotate("", finish, places[start], arrowprops=style)
    panel.scatter(*np.asarray(places, float).T, s=280, c=[shades[c] for c in colors], edgecolors="white", zorder=3)
    for (x, y), label in zip(places, labels, strict=True):
        size = min(7.0, 24 / len(label)) if label else 7.0  # within its circle
        panel.text(x, y, label, ha="center", va="center", color="white", fontsize=size, zorder=4)
    panel.margins(0.12)
    panel.set_axis_off()
    figure.suptitle(title, fontsize=10)
    _save(figure, out)


def plot_stream(metrics_jsonl: Path, out: Path, prefix: str, *, ylabel: str, title: str = "") -> None:
    """Stacks the metrics whose names begin with `prefix` over the steps, into the PNG `out`.

    Raises:
      UsageError: The file is absent or holds no such metric, or matplotlib is missing.
    """
    rows = [row for row in read_jsonl(metrics_jsonl) if any(name.startswith(prefix) for name in row)]
    if not rows:
        raise UsageError(f"{metrics_jsonl} has no metric that begins with {prefix}")
    names = sorted({name for row in rows for name in row if name.startswith(prefix)})
    values = np.array([[row.get(name, 0.0) for row in rows] for name in names])
    figure = _figure(8, 3.2)
    panel = figure.subplots()
    panel.stackplot([row["step"] for row in rows], values, edgecolor="white", linewidth=0.2)
    panel.set(xlabel="step", ylabel=ylabel)
    panel.margins(0)
    panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    _save(figure, out)
