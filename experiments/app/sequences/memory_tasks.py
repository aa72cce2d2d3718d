"""Sequences of symbols that tell mixers apart: what is right follows from the symbols before, and only from them.

Each function draws rows of symbols [B, T], what is right at each place, and where it is asked. Keys, values and what
fills the rest are told apart by number: keys 0 .. KEYS - 1, then as many values, then blank.
"""

import itertools

import numpy as np

__all__ = [
    "BLANK",
    "KEYS",
    "associative_recall",
    "compose_permutations",
    "delayed_copy",
    "mqar",
    "permutations",
]

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
KEYS = 16  # and as many values
BLANK = 2 * KEYS
GAP_EXPONENT = 0.01  # of the power law of Arora et al. 2023, Appendix E, as in their code


def associative_recall(rng: np.random.Generator, rows: int, pairs: int, silence: int) -> Rows:
    """Draws pairs of a key and a value, a silence, and a key that was shown: its last value is right.

    A key that comes again has another value, so that what was stored under it must be replaced (the recall of Ba et al.
    2016, arXiv:1610.06258, has each key once). T = 2 pairs + silence + 1.
    """
    keys, values = rng.integers(0, KEYS, (rows, pairs)), rng.integers(0, KEYS, (rows, pairs))
    asked = np.take_along_axis(keys, rng.integers(0, pairs, (rows, 1)), 1)
    newest = pairs - 1 - (keys == asked)[:, ::-1].argmax(1)
    shown = np.full((rows, 2 * pairs + silence + 1), BLANK)
    shown[:, : 2 * pairs : 2], shown[:, 1 : 2 * pairs : 2], shown[:, -1:] = (
        keys,
        KEYS + values,
        asked,
    )
    right = np.broadcast_to(values[np.arange(rows), newest][:, None], shown.shape)
    judged = np.zeros(shown.shape, bool)
    judged[:, -1] = True
    return shown, right, judged


def mqar(rng: np.random.Generator, rows: int, pairs: int, length: int) -> Rows:
    """Draws pairs of different keys and a value each, and then `length` places in which each key is asked for once.

    Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927, section 3): places follow a power law of the
    distance from the pairs, the others are blank. T = 2 pairs + length; pairs are at most `KEYS` and `length`.
    """
    keys = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :pairs]
    values = rng.integers(0, KEYS, (rows, pairs))
    shown, right = (
        np.full((rows, 2 * pairs + length), BLANK),
        np.zeros((rows, 2 * pairs + length), np.int64),
    )
    shown[:, : 2 * pairs : 2], shown[:, 1 : 2 * pairs : 2] = keys, KEYS + values
    # The largest of logarithms plus Gumbel noise are a draw without replacement.
    scores = (GAP_EXPONENT - 1) * np.log1p(np.arange(length))[None] + rng.gumbel(
        size=(rows, length)
    )
    places = 2 * pairs + np.argsort(-scores, 1)[:, :pairs]
    np.put_along_axis(shown, places, keys, 1)
    np.put_along_axis(right, places, values, 1)
    judged = np.zeros(shown.shape, bool)
    np.put_along_axis(judged, places, True, 1)
    return shown, right, judged


def delayed_copy(rng: np.random.Generator, rows: int, count: int, delay: int) -> Rows:
    """Draws `count` + `delay` values; at each but the first `delay`, the value that many places before is right.

    Nothing tells what to keep: the state must hold `delay` values at any time.
    """
    values = rng.integers(0, KEYS, (rows, count + delay))
    right = np.zeros_like(values)
    right[:, delay:] = values[:, :count]
    return KEYS + values, right, np.broadcast_to(np.arange(count + delay) >= delay, values.shape)


def permutations(size: int) -> np.ndarray:
    """Returns all orders of `size` things [size!, size]; the first leaves them as they are."""
    return np.array(list(itertools.permutations(range(size))))


def generators(size: int, count: int) -> np.ndarray:
    """Returns the numbers of `count` permutations of at least two things: a swap and a cycle, which make all, first."""
    table = permutations(size).tolist()
    swap, cycle = [1, 0, *range(2, size)], [*range(1, size), 0]
    first = list(dict.fromkeys((table.index(swap), table.index(cycle))))
    return np.array([*first, *(number for number in range(len(table)) if number not in first)])[
        :count
    ]


def compose_permutations(
    rng: np.random.Generator, rows: int, length: int, size: int, count: int
) -> Rows:
    """Draws numbers of permutations, at each of which that of all up to there is right, the first done first.

    The word problem of the symmetric group: of 5 things it is complete for NC^1, which no mixer whose state follows a
    diagonal recurrence solves at all lengths (Merrill et al. 2024, arXiv:2404.08819). Those of `generators` are drawn,
    `count` of them; two make all others, so that a state is as hard to follow, but fewer steps are to be learned.
    """
    table = permutations(size)
    number = {tuple(row): index for index, row in enumerate(table)}
    shown = rng.choice(generators(size, count), (rows, length))
    right, now = np.zeros_like(shown), np.tile(np.arange(size), (rows, 1))
    for step in range(length):
        now = np.take_along_axis(table[shown[:, step]], now, 1)
        right[:, step] = [number[tuple(row)] for row in now]
    return shown, right, np.ones(shown.shape, bool)
