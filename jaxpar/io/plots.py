"""The pictures of a run: its losses, gradient norm and learning rate over steps, and of a plan: its memory."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.io.metrics import read_jsonl
from jaxpar.types import UsageError

__all__ = ["plot_loss", "plot_memory"]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_BLUE, _VERMILION, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"


def plot_loss(metrics_jsonl: Path, out: Path, *, unit: str = "nats per token") -> None:
    """Draws `metrics_jsonl` into the PNG `out`: losses above, gradient norm and learning rate below.

    Reads "train/loss", "validation/loss", "train/grad_norm" and "train/learning_rate", whichever are there;
    numbers that are not finite leave gaps. `unit` is the unit of the losses.

    Raises:
      UsageError: The file is absent or holds neither loss, or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "jaxpar[experiments]"') from error
    rows = read_jsonl(metrics_jsonl)
    train, validation, norm, rate = (
        np.array([(row["step"], row[name]) for row in rows if name in row]).reshape(-1, 2).T
        for name in ("train/loss", "validation/loss", "train/grad_norm", "train/learning_rate")
    )
    if not train.size and not validation.size:
        raise UsageError(f'{metrics_jsonl} has neither "train/loss" nor "validation/loss"')
    # A Figure without pyplot chooses no backend and changes no global setting.
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    heights = [2, 1] if norm.size or rate.size else [1]
    panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_losses(panels[0], train, validation, unit)
    if len(heights) > 1:
        _draw_optimizer(panels[1], norm, rate)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.margins(x=0.01)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels(panels)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def _draw_losses(panel: Any, train: np.ndarray, validation: np.ndarray, unit: str) -> None:
    steps, loss = train
    if loss.size:
        panel.plot(steps, loss, color=_BLUE, alpha=0.25, linewidth=0.8)
        panel.plot(steps, _smoothed(loss), color=_BLUE, linewidth=1.8, label="training, smoothed")
    seen, held_out = validation
    if held_out.size:
        panel.plot(seen, held_out, "o--", color=_VERMILION, markersize=4.5, linewidth=1, label="validation")
    if np.isfinite(held_out).any():
        best = np.nanargmin(np.where(np.isfinite(held_out), held_out, np.nan))
        label = f"best validation: {held_out[best]:.4g} at step {int(seen[best])}"
        panel.plot(
            seen[best], held_out[best], "*", color=_VERMILION, markersize=15, markeredgecolor="white", label=label
        )
    panel.set_ylabel(f"loss ({unit})")
    panel.legend(frameon=False)


def _draw_optimizer(panel: Any, norm: np.ndarray, rate: np.ndarray) -> None:
    from matplotlib.ticker import LogLocator

    if norm.size:
        steps, norms = norm[0], np.where(norm[1] > 0, norm[1], np.nan)  # a logarithm has no zero
        panel.semilogy(steps, norms, color=_GREEN, alpha=0.25, linewidth=0.8)
        panel.semilogy(steps, np.exp(_smoothed(np.log(norms))), color=_GREEN, linewidth=1.8)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.set_ylabel("gradient norm", color=_GREEN)
        panel.tick_params(axis="y", colors=_GREEN, which="both")
    if rate.size:
        right = panel.twinx() if norm.size else panel
        right.plot(*rate, color=_PURPLE, linewidth=1.8)
        right.set_ylabel("learning rate", color=_PURPLE)
        right.tick_params(axis="y", colors=_PURPLE)
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


def plot_memory(plans: dict[str, dict[str, float]], capacity: float | None, out: Path) -> None:
    """Draws into the PNG `out` one bar a plan: its parts in GiB a device, and what a device has as a line.

    Args:
      plans: Name -> part -> bytes; all with the same parts.
      capacity: Bytes of a device, if known.
      out: A path.

    Raises:
      UsageError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "jaxpar[experiments]"') from error
    figure = Figure(figsize=(8, 1.7 + 0.45 * len(plans)), dpi=150, layout="constrained")
    panel = figure.subplots()
    names, left = list(plans), np.zeros(len(plans))
    colours = (_BLUE, _GREEN, _PURPLE, _VERMILION)
    for index, part in enumerate(next(iter(plans.values()))):
        width = np.array([plans[name][part] for name in names]) / 2**30
        panel.barh(names, width, left=left, color=colours[index % len(colours)], label=part, height=0.6)
        left += width
    if capacity is not None:
        panel.axvline(capacity / 2**30, color="black", linestyle="--", linewidth=1)
        panel.annotate("a device has", (capacity / 2**30, 1), (-4, -4), textcoords="offset points",
                       xycoords=("data", "axes fraction"), ha="right", va="top", rotation=90, fontsize=8)  # fmt: skip
        panel.set_xlim(0, 1.05 * max(capacity / 2**30, left.max()))
    panel.invert_yaxis()
    panel.set_xlabel("GiB a device")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
