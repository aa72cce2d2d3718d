"""What all pictures share, here and in other rooms: a figure without global state, colours, and how it is written."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.types import UsageError

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "COLORS", "GRAY", "VERMILION", "empty_figure", "save", "tidy"]

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, VERMILION, GREEN, PURPLE, GRAY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#999999"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, "#E69F00", "#56B4E9", GRAY)


def empty_figure(width: float, height: float) -> "Figure":
    """A Figure without pyplot, `width` x `height` inches: it chooses no backend and changes no global setting."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "jaxpar[experiments]"') from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def tidy(panel: "Axes", grid: str = "both") -> None:
    """Takes the frame's upper and right side away, and draws a pale grid along "x", "y", "both" or ""."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
    if grid:
        panel.grid(alpha=0.25, linewidth=0.6, axis=grid)  # pyright: ignore[reportArgumentType]


def save(figure: "Figure", out: Path, title: str = "") -> None:
    """Writes the PNG `out` with `title` above all, and its folder where there is none."""
    if title:
        figure.suptitle(title, fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")
