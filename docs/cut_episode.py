"""Draws _static/cut_episode.svg, the last figure of notebook 07, by its own cells: `python docs/cut_episode.py`."""

import pathlib

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "jaxpar"  # the same file from the same script

HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    """Runs the cells that import, and those after the words on cut episodes."""
    cells = (HERE.parent / "notebooks" / "07_learning.py").read_text().split("\n# %%")
    chapter = next(
        place for place, cell in enumerate(cells) if "## What a cut episode is worth" in cell
    )
    wanted = [cell for cell in cells[:chapter] if "\nimport " in cell] + [cells[chapter + 1]]
    names: dict = {"__name__": "__main__"}
    for cell in wanted:
        exec(compile(cell, "notebook 07", "exec"), names)
    names["figure"].savefig(HERE / "_static" / "cut_episode.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
