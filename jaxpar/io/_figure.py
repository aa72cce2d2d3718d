"""What all pictures share: a figure without global state, colours, and how it is written."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxpar.types import UsageError

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.figure import Figure


# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, "#E69F00", "#56B4E9", "#999999")


def empty_figure(width: float, height: float) -> "Figure":
    """A Figure without pyplot: it chooses no backend and changes no global setting."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "jaxpar[experiments]"') from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save(figure: "Figure", out: Path) -> None:
    """Writes the PNG `out`, and its folder where there is none."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")
