"""Sums in steps, a line each: the prompt holds the numbers, and every line adds the next one to what there is so far.

21+52+93        12 + 25 + 39, digits from the last on, so that a carry goes the way that text is written
210+52=730      12 + 25 = 37
730+93=670      37 + 39 = 76, the answer
"""

import numpy as np

__all__ = ["VOCAB", "answered", "batch", "draw", "line_length", "written"]

VOCAB = 64
"""Of digits, +, = and the line's end as bytes."""


def line_length(digits: int) -> int:
    """Returns the bytes of a right line, its end counted in."""
    return 3 * digits + 5


def draw(rng: np.random.Generator, count: int, terms: int, digits: int) -> np.ndarray:
    """Returns numbers of so many digits at most, int [count, terms]; at most 10 terms, whose sums have one more."""
    return rng.integers(0, 10**digits, (count, terms))


def written(numbers: np.ndarray, digits: int) -> tuple[np.ndarray, int]:
    """Returns whole texts as bytes, int32 [count, S], and how many of these the prompt has, its line's end counted."""
    texts = []
    for row in numbers.tolist():
        lines, total = ["+".join(_digits(number, digits) for number in row)], row[0]
        for number in row[1:]:
            left, more, both = (total, digits + 1), (number, digits), (total + number, digits + 1)
            lines.append(f"{_digits(*left)}+{_digits(*more)}={_digits(*both)}")
            total += number
        texts.append("".join(f"{line}\n" for line in lines).encode())
    return np.array([list(text) for text in texts], np.int32), (digits + 1) * numbers.shape[1]


def batch(rng: np.random.Generator, count: int, terms: int, digits: int) -> dict[str, np.ndarray]:
    """Returns tokens, targets and weights for `jaxpar.lm.loss`; what is in the prompt need not be foretold."""
    text, prompt = written(draw(rng, count, terms, digits), digits)
    weights = np.arange(1, text.shape[1]) >= prompt
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "weights": np.broadcast_to(weights, text[:, 1:].shape).astype(np.float32),
    }


def answered(texts: np.ndarray, numbers: np.ndarray, digits: int) -> np.ndarray:
    """Returns whether each text's last line holds the sum, bool [count]; what comes after that line does not count."""
    last = numbers.shape[1] - 1
    lines = [bytes(row.astype(np.uint8)).split(b"\n") for row in texts]
    said = [row[last].partition(b"=")[2].decode() if len(row) > last else "" for row in lines]
    return np.array(
        [
            text == _digits(total, digits + 1)
            for text, total in zip(said, numbers.sum(1).tolist(), strict=True)
        ]
    )


def _digits(number: int, count: int) -> str:
    return f"{number:0{count}d}"[::-1]
