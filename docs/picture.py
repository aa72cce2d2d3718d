"""Draws the pictures of docs/_static: `python docs/picture.py`."""

import pathlib

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "jaxpar"  # the same file from the same script

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon  # noqa: E402

OUT = pathlib.Path(__file__).resolve().parent / "_static"
INK, QUIET, PAPER = "#1f2933", "#66727f", "#fbfaf7"
BLUE, GREEN, ORANGE, PURPLE = "#dceaf7", "#dff1e6", "#fdead7", "#ebe3f5"
EDGE = {BLUE: "#4a86c0", GREEN: "#4c9f70", ORANGE: "#d9822b", PURPLE: "#8a63b5", "white": "#4a86c0"}


def canvas(width, height, bottom=0, paper=PAPER):
    """Returns an empty sheet whose units are hundredths of an inch, from `bottom` up."""
    figure = Figure(figsize=(width / 100, (height - bottom) / 100), facecolor=paper)
    sheet = figure.add_axes((0, 0, 1, 1))
    sheet.set(xlim=(0, width), ylim=(bottom, height))
    sheet.axis("off")
    return figure, sheet


def text(sheet, x, y, words, size=10, color=INK, **style):
    """Writes words centred at a point."""
    sheet.text(
        x, y, words, fontsize=size, color=color, **({"ha": "center", "va": "center"} | style)
    )


def box(sheet, x, y, width, height, title, lines=(), fill=BLUE):
    """Draws a rounded box with a title and smaller lines; (x, y) is its lower left corner."""
    style = "round,pad=0,rounding_size=9"
    sheet.add_patch(
        FancyBboxPatch((x, y), width, height, style, facecolor=fill, edgecolor=EDGE[fill], lw=1.4)
    )
    step = 15.5
    top = y + height / 2 + step * len(lines) / 2
    text(sheet, x + width / 2, top, title, 11, weight="bold")
    for number, line in enumerate(lines, 1):
        text(sheet, x + width / 2, top - step * number - 1.5, line, 8.6, QUIET)


def arrow(sheet, start, stop, label="", bend=0.0, shift=(0, 9), color=INK, **style):
    """Draws an arrow with a label at its middle."""
    style = {"lw": 1.5, "color": color, "arrowstyle": "-|>", "mutation_scale": 12} | style
    sheet.add_patch(
        FancyArrowPatch(
            start, stop, connectionstyle=f"arc3,rad={bend}", shrinkA=2, shrinkB=2, **style
        )
    )
    if label:
        middle = ((start[0] + stop[0]) / 2 + shift[0], (start[1] + stop[1]) / 2 + shift[1])
        text(sheet, *middle, label, 8.6, QUIET)


def cube(sheet, x, y, size, colours):
    """Draws one device as a small cube whose front's lower left corner is (x, y)."""
    front, top, side = colours
    d = 0.42 * size
    corners = {
        front: [(x, y), (x + size, y), (x + size, y + size), (x, y + size)],
        top: [
            (x, y + size),
            (x + size, y + size),
            (x + size + d, y + size + d),
            (x + d, y + size + d),
        ],
        side: [
            (x + size, y),
            (x + size + d, y + d),
            (x + size + d, y + size + d),
            (x + size, y + size),
        ],
    }
    for colour, points in corners.items():
        sheet.add_patch(
            Polygon(
                points, closed=True, facecolor=colour, edgecolor="white", lw=1.2, joinstyle="round"
            )
        )


def mesh(sheet, x, y, size=34):
    """Draws a mesh of 2 x 2 x 2 devices; (x, y) is its lower left corner."""
    pitch, deep = size + 6, 0.62 * size
    faces = {0: ("#5b9bd5", "#a9cdec", "#3f78ad"), 1: ("#f0a35e", "#f8d0aa", "#c97a33")}
    for back in (1, 0):
        for row in (0, 1):
            for column in (0, 1):
                cube(
                    sheet,
                    x + column * pitch + back * deep,
                    y + row * pitch + back * deep,
                    size,
                    faces[back],
                )


def lines(sheet, x, y, step, words, **style):
    """Writes lines one under the other, from their left end."""
    for number, line in enumerate(words):
        text(sheet, x, y - step * number, line, **({"ha": "left"} | style))


def dataflow():
    """From text on disk to a trained model, and what says that the layout does not matter."""
    figure, sheet = canvas(1060, 410, bottom=36)
    text(sheet, 530, 384, "one program, any layout, equal to its loop", 15, weight="bold")

    box(
        sheet,
        28,
        226,
        142,
        92,
        "corpus",
        ["bytes or BPE,", "mapped from disk,", "split by content"],
        GREEN,
    )
    box(
        sheet,
        226,
        226,
        152,
        92,
        "batch(step)",
        ["pure in (seed, step):", "a keyed bijection", "over windows"],
        GREEN,
    )
    box(sheet, 444, 122, 330, 230, "", fill="white")
    text(sheet, 609, 331, "Trainer.step on a mesh", 11.5, weight="bold")
    mesh(sheet, 478, 196)
    text(sheet, 515, 185, "tensor", 8.6, QUIET)
    text(sheet, 468, 233, "fsdp", 8.6, QUIET, rotation=90)
    text(sheet, 582, 200, "data", 8.6, QUIET, rotation=32)
    words = ["loss and gradient,", "clip, AdamW or Muon;", "arrays split by one", "table of rules:"]
    lines(sheet, 612, 298, 16.5, words, size=9)
    rules = ["batch → data, fsdp", "embed → fsdp", "heads → tensor", "mlp   → tensor"]
    lines(sheet, 612, 227, 14.5, rules, size=8, color=EDGE[BLUE], family="monospace")
    text(sheet, 609, 141, "key of a step = fold_in(root, step)", 8.6, QUIET)
    arrow(sheet, (172, 272), (224, 272))
    arrow(sheet, (380, 272), (442, 272), "[B, T]")

    outputs = {
        "metrics.jsonl": "fetched one step late",
        "plots/": "loss.png",
        "sample": "sharded KV cache",
        "checkpoints/": "the newest, the best",
    }
    for number, (name, line) in enumerate(outputs.items()):
        box(sheet, 876, 308 - 57 * number, 156, 46, name, [line], PURPLE)
        arrow(sheet, (776, 246), (874, 331 - 57 * number), color=EDGE[PURPLE], lw=1.2)
    text(sheet, 803, 322, "fit", 12, weight="bold", style="italic")

    arrow(sheet, (556, 121), (662, 121), bend=0.75, color=EDGE[BLUE])
    text(sheet, 609, 66, "state of step s → state of step s + 1", 9.4)
    arrow(sheet, (954, 136), (752, 121), bend=-0.35, color=EDGE[PURPLE], lw=1.2, ls=(0, (4, 3)))
    text(sheet, 872, 74, "resume, on any mesh", 8.6, QUIET)

    promise = [
        "without a mesh each constraint is the identity; tests",
        "compare loss, every gradient leaf and three steps:",
    ]
    box(
        sheet,
        28,
        60,
        350,
        98,
        "the same step on one device",
        [*promise, "1e-5 in float32, 1e-12 in float64"],
        ORANGE,
    )
    arrow(sheet, (443, 160), (379, 126), arrowstyle="<|-|>", color=EDGE[ORANGE])
    text(sheet, 407, 160, "=", 15, weight="bold", color=EDGE[ORANGE])
    return figure


def layers():
    """Which module may import which: arrows point one way, from left to right."""
    figure, sheet = canvas(1060, 250)
    text(sheet, 530, 226, "a file imports only from its left", 13, weight="bold")
    steps = [
        ("types", ["arrays, keys,", "Algorithm,", "UsageError"], BLUE),
        ("mesh", ["MeshSpec, the", "rule table,", "shard, constrain"], BLUE),
        ("io", ["checkpoints,", "metrics, progress,", "plots"], BLUE),
        ("loop", ["run, run_until,", "fit"], BLUE),
        ("lm", ["config, params,", "blocks, loss, data,", "sample, exchange"], GREEN),
        ("experiments", ["flags, presets,", "run folders"], ORANGE),
        ("notebooks", ["the same objects,", "drawn"], PURPLE),
    ]
    for number, (name, words, fill) in enumerate(steps):
        x = 24 + 147 * number
        box(sheet, x, 92, 130, 92, name, words, fill)
        if number:
            arrow(sheet, (x - 17, 138), (x, 138))
    spans = [
        (0, 4, "jaxpar, for every pillar", BLUE),
        (4, 5, "a pillar", GREEN),
        (5, 7, "used from a checkout", ORANGE),
    ]
    for first, last, words, fill in spans:
        left, right = 24 + 147 * first, 24 + 147 * (last - 1) + 130
        sheet.plot(
            [left, left, right, right],
            [78, 70, 70, 78],
            color=EDGE[fill],
            lw=1.4,
            solid_capstyle="round",
        )
        text(sheet, (left + right) / 2, 54, words, 9.4, EDGE[fill])
    text(
        sheet,
        530,
        22,
        "scan, solve, nn and pipeline will stand between loop and lm; other pillars beside lm",
        8.6,
        QUIET,
    )
    return figure


def tiles(sheet, x, y, fill, shares, size=38):
    """Draws four devices, each a square array of which the filled share (left, bottom, width, height) is its own."""
    for number, (left, bottom, wide, high) in enumerate(shares):
        corner = x + number * (size + 10)
        square = [(0, 0), (1, 0), (1, 1), (0, 1)]
        own = [(left + a * wide, bottom + b * high) for a, b in square]
        for points, colour in ((square, "white"), (own, fill)):
            at = [(corner + a * size, y + b * size) for a, b in points]
            sheet.add_patch(Polygon(at, closed=True, facecolor=colour, edgecolor=INK, lw=0.9))


def placements():
    """Split, broadcast and partial on four devices, and what converts each into the others."""
    figure, sheet = canvas(1060, 430)
    text(
        sheet, 530, 408, "what a device holds, and what it sends to change that", 14, weight="bold"
    )
    rows = [(0, 0.75 - 0.25 * i, 1, 0.25) for i in range(4)]
    nodes = [
        (60, 262, "Split(0)", "a block of rows", BLUE, rows, "#5b9bd5"),
        (780, 262, "Broadcast", "everything", GREEN, [(0, 0, 1, 1)] * 4, "#62b58a"),
        (420, 26, "Partial(sum)", "a summand of everything", ORANGE, [(0, 0, 1, 1)] * 4, "#f8d0aa"),
    ]
    for x, y, name, line, fill, shares, colour in nodes:
        box(sheet, x, y, 220, 112, "", fill=fill)
        text(sheet, x + 110, y + 94, name, 11, weight="bold")
        text(sheet, x + 110, y + 77, line, 8.6, QUIET)
        tiles(sheet, x + 19, y + 20, colour, shares)
    for number in range(3):
        text(sheet, 420 + 62 + 48 * number, 26 + 39, "+", 8, weight="bold")
    paid, free = {"color": EDGE[BLUE], "lw": 1.8}, {"color": QUIET, "lw": 1.2, "ls": (0, (4, 3))}
    arrow(sheet, (282, 342), (778, 342), "all-gather: (n-1)/n · T", **paid)
    arrow(sheet, (778, 300), (282, 300), "slice: 0", **free)
    arrow(sheet, (462, 140), (232, 260), **paid)
    arrow(sheet, (170, 260), (418, 112), **free)
    arrow(sheet, (598, 140), (828, 260), **paid)
    arrow(sheet, (890, 260), (642, 112), **free)
    text(sheet, 360, 212, "reduce-scatter: (n-1)/n · T", 8.6, QUIET, ha="left")
    text(sheet, 272, 172, "pad: 0", 8.6, QUIET, ha="right")
    text(sheet, 700, 168 + 44, "all-reduce: 2(n-1)/n · T", 8.6, QUIET, ha="right")
    text(sheet, 790, 172, "mask: 0", 8.6, QUIET, ha="left")
    arrow(sheet, (62, 344), (62, 290), bend=1.6, **paid)
    text(sheet, 40, 244, "to Split(1), all-to-all:", 8.6, QUIET, ha="left")
    text(sheet, 40, 228, "(n-1)/n · T/n", 8.6, QUIET, ha="left")
    text(
        sheet,
        1036,
        14,
        "n devices along the axis, T bytes of the whole array",
        8.6,
        QUIET,
        ha="right",
    )
    return figure


def logo():
    """The mesh alone."""
    figure, sheet = canvas(120, 120, paper="none")
    mesh(sheet, 5, 5)
    return figure


if __name__ == "__main__":
    for draw in (dataflow, layers, placements, logo):
        draw().savefig(OUT / f"{draw.__name__}.svg", metadata={"Date": None})
