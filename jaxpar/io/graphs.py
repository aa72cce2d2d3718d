"""Pictures of graphs, of what a population is made of over time, and of curves of many seeds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.io.figure import BLUE, COLORS, GRAY, GREEN, VERMILION, empty_figure, save, tidy
from jaxpar.io.metrics import read_jsonl
from jaxpar.types import UsageError

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.figure import Figure

__all__ = ["plot_graph", "plot_seeds", "plot_stream"]


def plot_graph(
    places: np.ndarray, labels: Sequence[str], colors: Sequence[str], edges: np.ndarray, weights: np.ndarray,
    dashed: np.ndarray, out: Path, *, title: str = "",
) -> None:  # fmt: skip
    """Draws a directed graph into the PNG `out`: blue edges are positive, red ones negative, thick ones strong.

    Each edge bends so that it keeps clear of other nodes and of the edges before it, as far as one of a few bends does.

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
    panel = figure.add_axes((0.02, 0.1, 0.96, 0.82))
    shades = {"in": GREEN, "hidden": BLUE, "out": VERMILION}
    strongest = max(float(np.abs(weights).max(initial=0)), 1e-9)
    # Inches, in which bends are seen: the picture is wider than high.
    spread = np.maximum(np.ptp(places, axis=0), 1e-9)
    inches = (places - places.min(0, initial=0)) / spread * np.array([5.2, 3.0])
    drawn: list[np.ndarray] = []
    for (start, end), weight, off in zip(edges, weights, dashed, strict=True):
        bend = 0.6 if start == end else _clear_bend(inches, start, end, drawn)
        style: dict[str, Any] = dict(
            arrowstyle="-|>", color=GRAY if off else (BLUE if weight > 0 else VERMILION), shrinkA=9, shrinkB=9,
            linewidth=0.6 + 2 * abs(weight) / strongest, linestyle="--" if off else "-",
            connectionstyle=f"arc3,rad={bend}",
        )  # fmt: skip
        finish = places[end] + (0.02 if start == end else 0)
        panel.annotate("", tuple(finish), tuple(places[start]), arrowprops=style)
    panel.scatter(
        *np.asarray(places, float).T,
        s=280,
        c=[shades[c] for c in colors],
        edgecolors="white",
        zorder=3,
    )
    for (x, y), label in zip(places, labels, strict=True):
        size = min(7.0, 24 / len(label)) if label else 7.0  # within its circle
        panel.text(x, y, label, ha="center", va="center", color="white", fontsize=size, zorder=4)
    panel.margins(0.08)
    panel.set_axis_off()
    _explain(
        figure, {kind: shades[kind] for kind in shades if kind in colors}, bool(np.any(dashed))
    )
    save(figure, out, title)


def _clear_bend(places: np.ndarray, start: int, end: int, drawn: list[np.ndarray]) -> float:
    """Returns the flattest bend whose arc is clear of nodes and arcs, or the clearest; adds the arc to `drawn`."""
    t = np.linspace(0, 1, 33)[:, None]
    along = places[end] - places[start]
    aside = np.array([along[1], -along[0]])  # as matplotlib's arc3 bends
    others = np.delete(places, [start, end], axis=0)
    best: tuple[float, float, np.ndarray] | None = None
    for bend in (0.0, 0.12, -0.12, 0.25, -0.25, 0.4, -0.4):
        middle = (places[start] + places[end]) / 2 + bend * aside
        arc = (1 - t) ** 2 * places[start] + 2 * t * (1 - t) * middle + t**2 * places[end]
        inner = arc[8:25]  # ends meet at nodes anyway
        beyond = max(float((-arc).max()), float((arc - places.max(0)).max()))
        gaps = [np.linalg.norm(arc[:, None] - others, axis=-1).min()] if len(others) else [1.0]
        # The mean of an arc's distances: arcs may cross, but not lie on each other.
        gaps += [
            2 * np.linalg.norm(inner[:, None] - other, axis=-1).min(1).mean() for other in drawn
        ]
        clear = min(gaps) if beyond < 0.3 else 0.0
        if best is None or clear > best[0]:
            best = clear, bend, inner
        if clear >= 0.3:
            break
    assert best is not None
    drawn.append(best[2])
    return best[1]


def _explain(figure: "Figure", kinds: Mapping[str, str], has_dashed: bool) -> None:
    """Draws the legend of a graph below it."""
    from matplotlib.lines import Line2D

    words = {"in": "input", "hidden": "hidden", "out": "output"}
    handles = [
        Line2D([], [], marker="o", linestyle="", color=color, label=words[k])
        for k, color in kinds.items()
    ]
    handles += [
        Line2D([], [], color=BLUE, label="weight > 0"),
        Line2D([], [], color=VERMILION, label="weight < 0"),
    ]
    handles += [Line2D([], [], color=GRAY, linestyle="--", label="disabled")] if has_dashed else []
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8,
                  handlelength=1.4, columnspacing=1.4, title="thick: strong", title_fontsize=8)  # fmt: skip


def plot_stream(
    metrics_jsonl: Path,
    out: Path,
    prefix: str,
    *,
    ylabel: str,
    along: str = "step",
    title: str = "",
) -> None:
    """Stacks the metrics whose names begin with `prefix` over the steps, into the PNG `out`; colours come in turns.

    Raises:
      UsageError: The file is absent or holds no such metric, or matplotlib is missing.
    """
    rows = [
        row for row in read_jsonl(metrics_jsonl) if any(name.startswith(prefix) for name in row)
    ]
    if not rows:
        raise UsageError(f"{metrics_jsonl} has no metric that begins with {prefix}")
    names = sorted({name for row in rows for name in row if name.startswith(prefix)})
    values = np.array([[row.get(name, 0.0) for row in rows] for name in names])
    figure = empty_figure(8, 3.2)
    panel = figure.subplots()
    panel.stackplot(
        [row["step"] for row in rows], values, colors=COLORS, edgecolor="white", linewidth=0.4
    )
    panel.set(xlabel=along, ylabel=ylabel)
    panel.margins(0)
    cast(Any, panel.xaxis.get_major_locator()).set_params(integer=True)
    tidy(panel, "")
    save(figure, out, title)


def plot_seeds(
    curves: Mapping[str, tuple[ArrayLike, ArrayLike]],
    out: Path,
    *,
    xlabel: str = "step",
    ylabel: str = "",
    title: str = "",
) -> None:
    """Draws the mean over seeds of each curve, in a band of its 95 % interval, into the PNG `out`.

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
        shares = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), 1000) / len(
            values
        )
        low, high = np.percentile(shares @ values, (2.5, 97.5), axis=0)
        band = "" if len(values) == 1 else ", band: its 95 % interval over seeds"
        panel.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        seeds = "1 seed" if len(values) == 1 else f"{len(values)} seeds"
        panel.plot(
            steps,
            values.mean(0),
            color=color,
            linewidth=1.6,
            label=f"{label}: mean of {seeds}{band}",
        )
    if not drawn:
        raise UsageError(f"no finite values of {', '.join(curves)} to draw")
    panel.set(xlabel=xlabel, ylabel=ylabel)
    cast(Any, panel.xaxis.get_major_locator()).set_params(integer=True)
    panel.legend(
        frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0
    )
    panel.margins(x=0.01)
    tidy(panel)
    save(figure, out, title)
