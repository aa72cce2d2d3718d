"""Grouped products by a loop in float64, and the sequential twin of their kernels: program after program, in NumPy."""

import jax
import numpy as np

E, TOKENS, COPIES = 4, 20, 2
ROWS = TOKENS * COPIES
SIZES = {
    "even": [10, 10, 10, 10],
    "uneven": [1, 20, 11, 8],
    "all in one": [0, 0, 40, 0],
    "none": [0, 0, 0, 0],
    "first and last": [17, 0, 0, 23],
    "rows beyond": [0, 19, 1, 0],
    "whole tiles beyond": [3, 0, 0, 0],
}


def by_loop(x, w, sizes, read, write, copies, summed, g):
    """Results and both gradients, one row at a time; rows beyond the sum are not looked at."""
    group = np.repeat(np.arange(len(w)), sizes)
    y, dx, dw = np.zeros((g.shape[0], w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    for row, e in enumerate(group):
        source = row if read is None else read[row] // copies
        target = row if write is None else write[row] // summed
        y[target] += x[source] @ w[e]
        dx[source] += w[e] @ g[target]
        dw[e] += np.outer(x[source], g[target])
    return y, dx, dw


calls: list = []
"""The name and first array's shape of every call that was run."""


def stand_in(*arrays, out, grid, text, name, num_warps, num_stages, **sizes):
    """Has the signature of `jaxpar.lower.triton.call_kernel`."""
    assert f"def {name}(" in text and num_warps in (4, 8) and num_stages > 1

    def run(*arrays):
        calls.append((name, arrays[0].shape))
        y = np.full(out[0].shape, np.nan)  # what no program writes is seen
        for number in range(grid[0]):
            PROGRAMS[name](number, *(np.asarray(x) for x in arrays), y, **sizes)
        return y.astype(out[0].dtype)

    return [jax.pure_callback(run, out[0], *arrays)]


def place_of(number, rows, columns, band):
    """The tile and column of a program: bands of tiles, column after column."""
    order = [
        (tile, column)
        for first in range(0, rows, band)
        for column in range(columns)
        for tile in range(first, min(first + band, rows))
    ]
    return order[number]


def product(
    number, x, w, read, write, group, start, count, y, *, GROUPS, DEPTH, WIDTH, READ, WRITE, TRANSPOSED, TILES, COLUMNS,
    BAND, HIGH, WIDE, STEP, EXACT,
):  # fmt: skip
    """One tile of rows by one of columns."""
    assert (
        x.shape[1] == DEPTH
        and len(w) == GROUPS
        and len(group) == TILES
        and EXACT == "ieee"
        and STEP
    )
    tile, column = place_of(number, TILES, COLUMNS, BAND)
    columns = slice(column * WIDE, min((column + 1) * WIDE, WIDTH))
    assert 0 <= count[tile] <= HIGH
    for row in range(start[tile], start[tile] + count[tile]):
        source, target = read[row] // READ if READ else row, write[row] if WRITE else row
        if group[tile] == GROUPS:
            y[target, columns] = 0
        else:
            matrix = w[group[tile]].T if TRANSPOSED else w[group[tile]]
            assert np.isnan(y[target, columns]).all()  # nobody else writes here
            y[target, columns] = np.float64(x[source]) @ np.float64(matrix[:, columns])


def weight_gradient(
    number,
    x,
    g,
    read,
    write,
    bounds,
    dw,
    *,
    DEPTH,
    WIDTH,
    READ,
    WRITE,
    ROWS,
    COLUMNS,
    BAND,
    HIGH,
    WIDE,
    STEP,
    EXACT,
):
    """One tile of one group's gradient, over all of its rows."""
    assert (x.shape[1], g.shape[1]) == (DEPTH, WIDTH) and EXACT == "ieee" and STEP
    group, (tile, column) = (
        number // (ROWS * COLUMNS),
        place_of(number % (ROWS * COLUMNS), ROWS, COLUMNS, BAND),
    )
    deep, wide = slice(tile * HIGH, (tile + 1) * HIGH), slice(column * WIDE, (column + 1) * WIDE)
    rows = np.arange(bounds[group], bounds[group + 1])
    source, target = read[rows] // READ if READ else rows, write[rows] // WRITE if WRITE else rows
    assert np.isnan(dw[group, deep, wide]).all()
    dw[group, deep, wide] = np.float64(x[source][:, deep]).T @ np.float64(g[target][:, wide])


PROGRAMS = {"product": product, "weight_gradient": weight_gradient}
