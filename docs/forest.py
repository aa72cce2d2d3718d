"""Draws _static/forest.svg from arrays that the library computes: `python docs/forest.py`."""

import jax.numpy as jnp
import numpy as np
from matplotlib.patches import Rectangle
from picture import BLUE, EDGE, GREEN, INK, ORANGE, OUT, QUIET, arrow, canvas, text

from jaxpar.decode import Tree, coupled
from jaxpar.decode import forest as tables

COLOURS = {-1: "white", 0: BLUE, 1: GREEN, 2: ORANGE}
PROMPT = ["The", "cat", "sat", "on", "the", "mat"]
ENDS = [["and"], ["until", "noon"]]
NEXT = ["purred", "."]  # certain, and not yet read: the roots of the next windows
TREE, GUESSES = Tree((-1, 0, 1, 0, 3)), ["purred", ".", "Then", "and", "slept"]
CHOSEN = ["and", "Then", "it", "slept", "."]  # what the model chooses after each node
WORDS = sorted({*GUESSES, *CHOSEN})


def grown():
    """Returns the forest of a prompt with two samples, the view of both, and the token of each slot."""
    forest = tables.empty(rows=1, segments=3, blocks=6, block=4)
    forest, root = tables.spawn(forest)
    forest, _ = tables.reserve(forest, root, jnp.array([[8]]))
    forest, _, slots = tables.write(forest, tables.lineage_view(forest, root), jnp.array([[6]]), 6)
    held = dict(zip(np.ravel(slots).tolist(), PROMPT, strict=True))
    forest, children = tables.fork(forest, root[:, 0], 2)
    forest, _ = tables.reserve(forest, children, jnp.array([[4, 4]]))
    view = tables.lineage_view(forest, children)
    forest, view, slots = tables.write(forest, view, jnp.array([[1, 2]]), 2)
    for row, words in zip(np.asarray(slots)[0], ENDS, strict=True):
        held |= dict(zip(row.tolist(), words, strict=False))
    return forest, view, held


def tile(sheet, x, y, word, colour, width=46, edge=None, **style):
    """Draws a slot with its token; (x, y) is its lower left corner."""
    edge = edge or EDGE.get(colour, QUIET) if colour != "white" else "#c5cbd1"
    sheet.add_patch(Rectangle((x, y), width, 24, facecolor=colour, edgecolor=edge, lw=1.0, **style))
    text(sheet, x + width / 2, y + 12, word, 8.2)


def cache(sheet, forest, held, x, y):
    """The blocks of one row: whose they are, and what their slots hold."""
    text(
        sheet, x, y + 96, "the cache of one row: 6 blocks of 4 slots", 11, weight="bold", ha="left"
    )
    names = {
        -1: "free",
        0: "segment 0, the prompt",
        1: "segment 1, sample 0",
        2: "segment 2, sample 1",
    }
    for block, (owner, order) in enumerate(
        zip(*np.asarray((forest.owner[0], forest.order[0])), strict=True)
    ):
        left, low = x + 200 * (block % 3), y + 44 - 66 * (block // 3)
        for place in range(4):
            tile(
                sheet, left + 46 * place, low, held.get(4 * block + place, ""), COLOURS[int(owner)]
            )
        said = names[int(owner)] + (f", block {order}" if owner == 0 else "")
        text(sheet, left, low - 10, said, 8, QUIET, ha="left")


def views(sheet, forest, view, held, x, y):
    """What each reader sees, in the order of its positions."""
    text(
        sheet,
        x,
        y + 96,
        "two readers: what each sees, and where it goes on",
        11,
        weight="bold",
        ha="left",
    )
    owner, place = np.asarray(forest.owner[0]), np.asarray(forest.place[0])
    for reader in range(2):
        low = y + 44 - 66 * reader
        seen, offset = np.asarray(view.seen[0, reader]), np.asarray(view.offset[0, reader])
        for slot, word in held.items():
            segment, at = int(owner[slot // 4]), int(place[slot // 4, slot % 4])
            if at < seen[segment]:
                tile(sheet, x + 46 * (offset[segment] + at), low, word, COLOURS[segment])
        position, write = int(view.position[0, reader]), int(view.write[0, reader])
        tile(sheet, x + 46 * position, low, NEXT[reader], "white", ls=(0, (3, 2)))
        said = (
            f"seen {seen.tolist()}   offset {offset.tolist()}   position {position}   write {write}"
        )
        text(sheet, x, low - 10, said, 8, QUIET, ha="left", family="monospace")


def window(sheet, accepted, x, y):
    """One pass over a tree of guesses, and what is kept of it."""
    text(
        sheet,
        x,
        y + 208,
        "one pass of reader 0 over a window of 5 tokens",
        11,
        weight="bold",
        ha="left",
    )
    count, path = int(accepted.count[0]), np.asarray(accepted.path[0]).tolist()
    spots = {
        node: (x + 24 + 200 * int(TREE.depth[node]), y + (105, 150, 150, 48, 48)[node])
        for node in range(TREE.size)
    }
    for node, parent in enumerate(TREE.parents):
        left, low = spots[node]
        kept = node in path
        if node:
            start = (spots[parent][0] + 62, spots[parent][1] + 12)
            colour = EDGE[GREEN] if kept else "#c5cbd1"
            arrow(sheet, start, (left - 2, low + 12), color=colour, lw=2.2 if kept else 1.2)
        tile(sheet, left, low, GUESSES[node], GREEN if kept else "white", width=60)
        text(
            sheet, left + 30, low - 10, f"chosen next: “{CHOSEN[node]}”", 8, INK if kept else QUIET
        )
        text(
            sheet, left + 30, low + 33, f"node {node}" + (", certain" if not node else ""), 8, QUIET
        )
    left, low = spots[4]
    arrow(sheet, (left + 62, low + 12), (left + 118, low + 12), color=EDGE[GREEN], lw=2.2)
    tile(sheet, left + 120, low, CHOSEN[path[count - 1]], ORANGE, width=34)
    text(sheet, left + 137, low + 33, "the model’s own", 8, QUIET)
    new = [WORDS[token] for token in np.asarray(accepted.tokens[0, :count])]
    said = f"a guess is kept where it is what the model chooses after its parent: {count} new tokens, “{' '.join(new)}”"
    text(sheet, x, y + 8, said, 8.6, ha="left")


def mask(sheet, accepted, x, y):
    """Who sees whom in the window, and which keys and values are written."""
    text(sheet, x, y + 208, "who sees whom in it", 11, weight="bold", ha="left")
    path, size = np.asarray(accepted.path[0]).tolist(), 24
    for node, row in enumerate(TREE.ancestors):
        low = y + 160 - size * node
        for other, sees in enumerate(row):
            fill = EDGE[BLUE] if sees else "white"
            sheet.add_patch(
                Rectangle(
                    (x + 62 + size * other, low),
                    size,
                    size,
                    facecolor=fill,
                    edgecolor="#c5cbd1",
                    lw=0.8,
                )
            )
        text(sheet, x + 54, low + 12, GUESSES[node], 8.2, ha="right")
        stored = "written to segment 1" if node in path else "dropped: never in the cache"
        text(
            sheet, x + 196, low + 12, stored, 8.2, EDGE[GREEN] if node in path else QUIET, ha="left"
        )
    said = (
        "and every one of them sees all that reader 0 sees:",
        "each block is read once for both readers and all nodes",
    )
    for number, line in enumerate(said):
        text(sheet, x, y + 40 - 15 * number, line, 8.6, ha="left")


def drawing():
    """Returns the picture: a cache, its readers, and one pass of one of them."""
    forest, view, held = grown()
    ids = {word: number for number, word in enumerate(WORDS)}
    scores = jnp.stack([jnp.eye(len(WORDS))[ids[word]] for word in CHOSEN])[None]
    accepted = coupled(scores, jnp.array([[ids[word] for word in GUESSES]]), TREE)
    figure, sheet = canvas(1160, 450)
    cache(sheet, forest, held, 36, 328)
    views(sheet, forest, view, held, 670, 328)
    sheet.plot([36, 1124], [250, 250], color="#d9dde1", lw=1)
    window(sheet, accepted, 36, 12)
    mask(sheet, accepted, 670, 12)
    return figure


if __name__ == "__main__":
    drawing().savefig(OUT / "forest.svg", metadata={"Date": None})
