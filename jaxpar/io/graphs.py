"""Pictures of graphs, of what a population is made of over time, and of curves of many seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.io._figure import BLUE, COLORS, GREEN, VERMILION, empty_figure, save
from jaxpar.io.metrics import read_jsonl
from jaxpar.types import UsageError

__all__ = ["plot_graph", "plot_seeds", "plot_stream"]


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
    figure = empty_figure(6.5, 4.5)
    figure.set_layout_engine("none")  # arrows leave it no room to fit the axes
    panel = figure.subplots()
    shades = {"in": GREEN, "out": VERMILION, "hidden": BLUE}
    strongest = max(float(np.abs(weights).max(initial=0)), 1e-9)
    for (start, end), weight, off in zip(edges, weights, dashed, strict=True):
        bend = 0.6 if start == end else 0.12
        style: dict[str, Any] = dict(
            arrowstyle="-|>", color="0.7" if off else (BLUE if weight > 0 else VERMILION), shrinkA=9, shrinkB=9,
            linewidth=0.6 + 2 * abs(weight) / strongest, linestyle="--" if off else "-",
            connectionstyle=f"arc3,rad={bend}",
        )  # fmt: skip
        finish = places[end] + (0.02 if start == end else 0)
        panel.annotate("", tuple(finish), tuple(places[start]), arrowprops=style)
    panel.scatter(*np.asarray(places, float).T, s=280, c=[shades[c] for c in colors], edgecolors="white", zorder=3)
    for (x, y), label in zip(places, labels, strict=True):
        size = min(7.0, 24 / len(label)) if label else 7.0  # within its circle
        panel.text(x, y, label, ha="center", va="center", color="white", fontsize=size, zorder=4)
    panel.margins(0.12)
    panel.set_axis_off()
    figure.suptitle(title, fontsize=10)
    save(figure, out)


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
    figure = empty_figure(8, 3.2)
    panel = figure.subplots()
    panel.stackplot([row["step"] for row in rows], values, edgecolor="white", linewidth=0.2)
    panel.set(xlabel="step", ylabel=ylabel)
    panel.margins(0)
    panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    save(figure, out)


def plot_seeds(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    out: Path,
    *,
    xlabel: str = "step",
    ylabel: str = "",
    title: str = "",
) -> None:
    """Draws the mean over seeds of each curve, in a band where it lies with 95 %, into the PNG `out`.

    The band is a percentile bootstrap over seeds (1,000 resamples); a single seed has none. Values that are not finite
    are left out.

    Args:
      curves: Label -> steps `[T]` and values `[S, T]` of S seeds; at most seven.
      out: A path.
      xlabel: Of the steps.
      ylabel: Of the values.
      title: What stands above.

    Raises:
      UsageError: No curve has a finite value, or matplotlib is missing.
    """
    figure = empty_figure(7, 3.8)
    panel, rng, drawn = figure.subplots(), np.random.default_rng(0), 0
    for (label, (steps, values)), color in zip(curves.items(), COLORS, strict=False):
        values, steps = np.asarray(values, float), np.asarray(steps)
        known = np.isfinite(values).all(0)
        steps, values = steps[known], values[:, known]
        if not steps.size:
            continue
        drawn += 1
        shares = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), 1000) / len(values)
        low, high = np.percentile(shares @ values, (2.5, 97.5), axis=0)
        panel.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
        panel.plot(steps, values.mean(0), color=color, linewidth=1.6, label=f"{label} ({seeds})")
    if not drawn:
        raise UsageError(f"no finite values of {', '.join(curves)} to draw")
    panel.set(xlabel=xlabel, ylabel=ylabel)
    cast(Any, panel.xaxis.get_major_locator()).set_params(integer=True)
    panel.legend(frameon=False)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.margins(x=0.01)
    panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    save(figure, out)
