"""Pictures: losses, gradient norm, learning rate; experts; frames; distributions; layouts' cost, errors; memory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.io.figure import BLUE, COLORS, GRAY, GREEN, PURPLE, VERMILION, empty_figure, save, tidy
from jaxpar.io.metrics import read_jsonl
from jaxpar.types import UsageError

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes

__all__ = [
    "plot_areas", "plot_experts", "plot_fits", "plot_frames", "plot_histograms", "plot_layouts", "plot_loss",
    "plot_memory", "plot_metrics",
]  # fmt: skip


def plot_loss(
    metrics_jsonl: Path, out: Path, *, unit: str = "nats per token", title: str = ""
) -> None:
    """Draws `metrics_jsonl` into the PNG `out`: losses above, gradient norm and learning rate below.

    Reads "train/loss", "validation/loss", "train/grad_norm" and "train/learning_rate", whichever are there;
    numbers that are not finite leave gaps. `unit` is the unit of the losses, `title` is the text above.

    Raises:
      UsageError: The file is absent or holds neither loss, or matplotlib is missing.
    """
    figure = empty_figure(8, 5.5)
    rows = read_jsonl(metrics_jsonl)
    train, validation, norm, rate = (
        np.array([(row["step"], row[name]) for row in rows if name in row]).reshape(-1, 2).T
        for name in ("train/loss", "validation/loss", "train/grad_norm", "train/learning_rate")
    )
    if not train.size and not validation.size:
        raise UsageError(f'{metrics_jsonl} has neither "train/loss" nor "validation/loss"')
    heights = [2, 1] if norm.size or rate.size else [1]
    panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_losses(panels[0], train, validation, unit)
    if len(heights) > 1:
        _draw_optimizer(panels[1], norm, rate)
    for panel in panels:
        tidy(panel)
        panel.margins(x=0.01)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels(panels)
    save(figure, out, title)


def plot_metrics(
    metrics_jsonl: Path,
    out: Path,
    panels: Mapping[str, Sequence[str]],
    *,
    along: str = "step",
    title: str = "",
) -> None:
    """Draws `metrics_jsonl` into the PNG `out`: a panel for each entry of `panels`, from its label to its metrics.

    Metrics of every step are drawn with their running mean, seldom ones as points. Panels without any are left out.
    `along` says what the steps are, `title` is the text above.

    Raises:
      UsageError: The file is absent or holds none of the metrics, or matplotlib is missing.
    """
    rows = read_jsonl(metrics_jsonl)
    series = {
        label: {
            name: found
            for name in names
            if (found := [(row["step"], row[name]) for row in rows if name in row])
        }
        for label, names in panels.items()
    }
    series = {label: found for label, found in series.items() if found}
    if not series:
        wanted = ", ".join(name for names in panels.values() for name in names)
        raise UsageError(f"{metrics_jsonl} has none of {wanted}")
    figure = empty_figure(8, 1 + 2 * len(series))
    axes = figure.subplots(len(series), sharex=True, squeeze=False)[:, 0]
    for panel, (label, found) in zip(axes, series.items(), strict=True):
        # Thinner and thinner, so that those that coincide are all seen.
        for (name, points), color, thin in zip(
            found.items(), (BLUE, VERMILION, GREEN, PURPLE), range(4), strict=False
        ):
            steps, values = np.array(points).T
            if len(steps) > 50:
                panel.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
                panel.plot(
                    steps,
                    _smoothed(values),
                    color=color,
                    linewidth=2.2 - 0.5 * thin,
                    label=f"{name}, smoothed",
                )
            else:
                size = {"markersize": 6 - 1.4 * thin, "linewidth": 2 - 0.5 * thin}
                panel.plot(steps, values, "o-", color=color, **size, label=name)
        panel.set_ylabel(label)
        panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        tidy(panel)
        panel.margins(x=0.01)
    axes[-1].set_xlabel(along)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels(axes)
    save(figure, out, title)


def plot_experts(metrics_jsonl: Path, loads: ArrayLike, out: Path, *, title: str = "") -> None:
    """Draws into the PNG `out` how evenly experts are used: each layer's loads above, and below how they came about.

    Reads "train/expert_load", "train/expert_load_min", "train/dropped" and "train/balance_loss", whichever are there.

    Args:
      metrics_jsonl: Of a run.
      loads: [L, E], the load of each expert over the mean one.
      out: A path.
      title: Text above the panels.

    Raises:
      UsageError: matplotlib is missing.
    """
    rows, grid = read_jsonl(metrics_jsonl), np.asarray(loads)
    lines = {
        "load over the mean": {"largest": "expert_load", "smallest": "expert_load_min"},
        "dropped": {"share of choices": "dropped"},
        "balance loss": {"of all layers": "balance_loss"},
    }
    series = {
        label: {
            name: np.array(found).T
            for name, key in names.items()
            if (
                found := [
                    (row["step"], row[f"train/{key}"]) for row in rows if f"train/{key}" in row
                ]
            )
        }
        for label, names in lines.items()
    }
    series = {label: found for label, found in series.items() if found}
    high = min(0.3 * len(grid) + 0.9, 5.0)
    figure = empty_figure(8, high + 1.9 * len(series))
    panels = figure.subplots(
        1 + len(series), height_ratios=[high, *[1.9] * len(series)], squeeze=False
    )[:, 0]
    image = panels[0].imshow(
        grid, aspect="auto", cmap="viridis", vmin=0, vmax=max(2.0, float(grid.max()))
    )
    figure.colorbar(image, ax=panels[0], label="load over the mean", fraction=0.05)
    panels[0].set(
        xlabel="expert", ylabel="layer", title="Loads of the trained model on a batch of validation"
    )
    for axis in (panels[0].xaxis, panels[0].yaxis):
        axis.get_major_locator().set_params(integer=True)
    for panel, (label, found) in zip(panels[1:], series.items(), strict=True):
        for (name, (steps, values)), color in zip(found.items(), (BLUE, VERMILION), strict=False):
            panel.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            panel.plot(steps, _smoothed(values), color=color, linewidth=1.8, label=name)
        panel.set(ylabel=label, xlabel="step")
        panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        tidy(panel)
        panel.margins(x=0.01)
    save(figure, out, title)


def plot_fits(
    runs: Mapping[str, Sequence[tuple[ArrayLike, float, float]]],
    out: Path,
    *,
    along: str,
    value: str,
    title: str = "",
) -> None:
    """Draws points of several runs into the PNG `out`, x logarithmic, and of each a line: thin, its kind's mean thick.

    The legend names the mean lines, in the order of their ends.

    Args:
      runs: Label -> of each run points [N, 2], slope over log2(x), and the line's value at the last x.
      out: A path.
      along: What x is.
      value: What y is.
      title: Text above the panels.

    Raises:
      UsageError: matplotlib is missing.
    """
    figure = empty_figure(8, 5)
    panel = figure.subplots()
    shown, styles = [], [(color, mark) for mark in "o^sD" for color in COLORS]
    for (label, each), (color, mark) in zip(runs.items(), styles, strict=False):
        ends, lines = [], []
        for points, slope, end in each:
            x, y = np.asarray(points).T
            panel.plot(x, y, mark, color=color, markersize=3, alpha=0.5)
            x = np.array([x[0], x[-1]])
            ends.append(x)
            lines.append(end + slope * np.log2(x / x[-1]))
            panel.plot(x, lines[-1], color=color, linewidth=0.6, alpha=0.5)
        mean = np.mean(lines, 0)
        (line,) = panel.plot(
            np.mean(ends, 0), mean, color=color, linewidth=1.8, marker=mark, label=label
        )
        shown.append((mean[-1], line))
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set(xlabel=along, ylabel=value)
    tidy(panel)
    downwards = [line for _, line in sorted(shown, key=lambda end: -end[0])]
    several = any(len(each) > 1 for each in runs.values())
    lines_are = (
        "a thin line is fitted to a seed's points,\na thick one is the mean of those"
        if several
        else "lines are fitted"
    )
    figure.legend(handles=downwards, loc="outside right upper", frameon=False, fontsize=8,
                  title=f"points are measured,\n{lines_are}", title_fontsize=7)  # fmt: skip
    save(figure, out, title)


def plot_frames(films: Mapping[str, ArrayLike], out: Path, *, title: str = "") -> None:
    """Draws films [T, H, W] of numbers from 0 to 1 into the PNG `out`: a row for each, from its label to its frames.

    Above stand `title` and the frames' numbers, from 1.
    """
    rows = {label: np.asarray(film) for label, film in films.items()}
    num, height, width = next(iter(rows.values())).shape
    figure = empty_figure(
        0.9 * num + 0.4, (0.9 * height / width + 0.12) * len(rows) + (0.55 if title else 0.3)
    )
    grid = figure.subplots(len(rows), num, squeeze=False)
    for line, (label, film) in zip(grid, rows.items(), strict=True):
        for panel, frame in zip(line, film, strict=True):
            panel.imshow(frame, cmap="gray", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
        line[0].set_ylabel(label, fontsize=8)
    for number, panel in enumerate(grid[0]):
        panel.set_title(f"frame {number + 1}" if not number else str(number + 1), fontsize=8)
    save(figure, out, title)


def plot_layouts(layouts_json: Path, out: Path, tolerance: dict[str, float]) -> None:
    """Draws what `experiments.verify` wrote into the PNG `out`: errors against one device, and bytes between devices.

    Above, a point for each layout's loss, worst gradient leaf and worst leaf after the steps in each dtype, and the
    tolerance of the dtype as a line; an error of 0 lies on the bottom. Below, the bytes of arrays that cross
    devices in a step, on one device, by mesh axis.
    """
    rows = [row for row in json.loads(layouts_json.read_text()) if not row["refused"]]
    names = list(dict.fromkeys(row["layout"] for row in rows))
    figure = empty_figure(max(7.0, 0.2 * len(names) + 3), 6.5)
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    bottom = 1e-18
    for dtype, marker in zip(tolerance, "os^", strict=False):
        for what, color in (("loss", BLUE), ("gradient", VERMILION), ("steps", GREEN)):
            points = [
                (names.index(row["layout"]), max(row[what], bottom))
                for row in rows
                if row["dtype"] == dtype
            ]
            if points:
                above.scatter(
                    *zip(*points, strict=True),
                    s=16,
                    marker=marker,
                    color=color,
                    label=f"{what}, {dtype}",
                )
        above.axhline(tolerance[dtype], color="black", linewidth=0.8, linestyle="--")
        above.text(0, tolerance[dtype] * 1.6, f"tolerance of {dtype}", fontsize=8)
    above.set(yscale="log", ylabel="error against one device")
    if above.collections:  # of programs in few bits there are no errors
        above.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    first = {row["layout"]: row["transfers"] for row in reversed(rows)}
    axes = sorted({key.split()[1] for transfers in first.values() for key in transfers})
    base = np.zeros(len(names))
    for axis, color in zip(axes, COLORS, strict=False):
        size = [
            sum(v[1] for key, v in first[name].items() if key.split()[1] == axis) / 2**20
            for name in names
        ]
        below.bar(range(len(names)), size, bottom=base, color=color, label=axis, width=0.7)
        base += size
    below.set(ylabel="MiB a step and device", xlim=(-0.7, len(names) - 0.3))
    below.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    below.legend(
        title="over axis",
        fontsize=7,
        title_fontsize=7,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
    for panel in (above, below):
        tidy(panel, "y")
    save(figure, out, f"{len(names)} layouts beside one device")


def _draw_losses(panel: "Axes", train: np.ndarray, validation: np.ndarray, unit: str) -> None:
    steps, loss = train
    if loss.size:
        panel.plot(steps, loss, color=BLUE, alpha=0.25, linewidth=0.8)
        panel.plot(steps, _smoothed(loss), color=BLUE, linewidth=1.8, label="training, smoothed")
    seen, held_out = validation
    if held_out.size:
        panel.plot(
            seen, held_out, "o--", color=VERMILION, markersize=4.5, linewidth=1, label="validation"
        )
    if np.isfinite(held_out).any():
        best = np.nanargmin(np.where(np.isfinite(held_out), held_out, np.nan))
        label = f"best validation: {held_out[best]:.4g} at step {int(seen[best])}"
        panel.plot(
            seen[best],
            held_out[best],
            "*",
            color=VERMILION,
            markersize=15,
            markeredgecolor="white",
            label=label,
        )
    panel.set_ylabel(f"loss ({unit})")
    panel.legend(frameon=False)


def _draw_optimizer(panel: "Axes", norm: np.ndarray, rate: np.ndarray) -> None:
    from matplotlib.ticker import LogLocator

    if norm.size:
        steps, norms = norm[0], np.where(norm[1] > 0, norm[1], np.nan)  # a logarithm has no zero
        panel.semilogy(steps, norms, color=GREEN, alpha=0.25, linewidth=0.8)
        panel.semilogy(steps, np.exp(_smoothed(np.log(norms))), color=GREEN, linewidth=1.8)
        if np.isfinite(norms).any():
            low = np.nanmin(norms)
            high = np.nanmax(norms)
            if high < 1.001 * low:  # of one step: the smoothed one differs by a rounding
                panel.set_ylim(0.9 * low, 1.1 * high)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.set_ylabel("gradient norm", color=GREEN)
        panel.tick_params(axis="y", colors=GREEN, which="both")
    if rate.size:
        right = panel.twinx() if norm.size else panel
        right.plot(*rate, color=PURPLE, linewidth=1.8)
        right.set_ylabel("learning rate", color=PURPLE)
        right.tick_params(axis="y", colors=PURPLE)
        right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        right.set_ylim(bottom=0)
        right.spines[["top"]].set_visible(False)


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Averages over a Hann window of a twenty-fifth of the run, cut at its ends and over gaps."""
    window = np.hanning(2 * max(1, len(values) // 50) + 1)
    is_there = np.isfinite(values)
    weight = np.convolve(is_there, window)[len(window) // 2 :][: len(values)]
    total = np.convolve(np.where(is_there, values, 0), window)[len(window) // 2 :][: len(values)]
    return np.divide(total, weight, out=np.full(len(values), np.nan), where=weight > 0)


def plot_memory(
    estimates: dict[str, dict[str, float]], capacity: float | None, out: Path, *, title: str = ""
) -> None:
    """Draws into the PNG `out` one bar an estimate: its parts in GiB a device, and what a device has as a line.

    Args:
      estimates: Name -> part -> bytes; all with the same parts.
      capacity: Bytes of a device, if known.
      out: A path.
      title: Text above the panels.

    Raises:
      UsageError: matplotlib is missing.
    """
    figure = empty_figure(8, 1.7 + 0.45 * len(estimates))
    panel = figure.subplots()
    names, left = list(estimates), np.zeros(len(estimates))
    colours = (BLUE, GREEN, PURPLE, VERMILION)
    for index, part in enumerate(next(iter(estimates.values()))):
        width = np.array([estimates[name][part] for name in names]) / 2**30
        panel.barh(
            names, width, left=left, color=colours[index % len(colours)], label=part, height=0.6
        )
        left += width
    if capacity is not None:
        panel.axvline(capacity / 2**30, color="black", linestyle="--", linewidth=1)
        panel.annotate("a device has", (capacity / 2**30, 1), (0, 2), textcoords="offset points",
                       xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)  # fmt: skip
        panel.set_xlim(0, 1.05 * max(capacity / 2**30, left.max()))
    panel.invert_yaxis()
    panel.set_xlabel("GiB a device")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    tidy(panel, "x")
    save(figure, out, title)


def plot_areas(
    x: ArrayLike,
    areas: Mapping[str, ArrayLike],
    out: Path,
    *,
    colours: Sequence[tuple[float, float, float] | None],
    labels: tuple[str, str],
    title: str = "",
) -> None:
    """Draws into the PNG `out` how amounts add up over time, as stacked areas with a legend.

    Args:
      x: Increasing numbers `[N]`.
      areas: Name -> amounts `[N]`, at least 0, the lowest area first.
      out: A path.
      colours: Red, green and blue of each area, from 0 to 1; None for gray.
      labels: Labels of the two axes.
      title: Text above the panel.

    Raises:
      UsageError: matplotlib is missing.
    """
    figure = empty_figure(8, 3.5)
    panel = figure.subplots()
    shown = [GRAY if colour is None else colour for colour in colours]
    rows = [np.asarray(amounts) for amounts in areas.values()]
    panel.stackplot(np.asarray(x), rows, colors=shown, labels=list(areas))
    panel.set(xlabel=labels[0], ylabel=labels[1], ylim=(0, None))
    panel.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    tidy(panel)
    panel.margins(x=0)
    save(figure, out, title)


def plot_histograms(
    panels: Mapping[str, ArrayLike], out: Path, *, title: str = "", counted: str = "count"
) -> None:
    """Draws into the PNG `out`, side by side, how often each value occurs, and the mean as a line.

    Args:
      panels: Label of an axis -> finite numbers `[N]`, N > 0. Bars of integers hold equally many.
      out: A path.
      title: Text above all panels.
      counted: What the bars count.

    Raises:
      UsageError: matplotlib is missing.
    """
    figure = empty_figure(4 * len(panels), 3.2)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, (label, values) in zip(axes, panels.items(), strict=True):
        values = np.asarray(values, float)
        low, high = values.min(), values.max()
        varies = high - low > 1e-6 * max(abs(low), abs(high))  # more than by rounding
        bins: Any = np.linspace(low, high, 41) if varies else np.array([low - 0.5, high + 0.5])
        if np.array_equal(values, np.round(values)):  # as many integers in each bar
            width = np.ceil((high - low + 1) / 40)
            bins = np.arange(low - 0.5, high + width, width)
            panel.xaxis.get_major_locator().set_params(integer=True)
        count, _, _ = panel.hist(values, bins, color=BLUE, edgecolor="white", linewidth=0.4)
        if count.max() > 50 * np.median(count[count > 0]):  # the others would be invisible
            panel.set(yscale="log", ylim=(0.5, 2 * count.max()))
        panel.axvline(
            values.mean(), color=VERMILION, linewidth=1.5, label=f"mean {values.mean():.4g}"
        )
        panel.set(xlabel=label, ylabel=counted)
        if not varies:
            panel.set_xlim(low - 2, high + 2)
        panel.legend(
            frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0
        )
        tidy(panel, "y")
    save(figure, out, title)
