"""Many answers to Countdown judged at once: those of one shape, as `(n+n)*n`, are parsed once."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jaxpar.fields import OneOf, check_value
from jaxpar.types import UsageError

from .expressions import (
    AGAINST_RULES,
    NO_EXPRESSION,
    OTHER_NUMBERS,
    RANK,
    REASONS,
    RULES,
    WRONG_VALUE,
    ZERO_DIVISION,
    postfix,
    score,
)

__all__ = ["score_many"]

NUMBER = ord("n")


def score_many(
    texts: Sequence[str],
    numbers: Sequence[int] | np.ndarray,
    targets: int | Sequence[int] | np.ndarray,
    *,
    rules: str = "rational",
    use_all: bool = True,
) -> np.ndarray:
    """Judges B answers exactly as `score` does; over a million a second on a core where shapes repeat.

    Answers that differ only in their numbers (`(n+n)*n`) are parsed once and evaluated together in int64; where that
    could overflow, and for shapes that are rare, `score` judges them one by one.

    Args:
        texts: B answers.
        numbers: `[N]` for all, or `[B, N]`, whole numbers over 0 and below 10^9.
        targets: one for all, or `[B]`.
        rules: as `score` takes them.
        use_all: as `score` takes it.

    Returns:
        uint8 `[B]`, numbers of `REASONS`: 0 is solved.

    Raises:
        UsageError: the shapes do not fit, or the rules are unknown.
    """
    check_value("rules", rules, OneOf(RULES), str)
    count, given, target = len(texts), np.asarray(numbers, np.int64), np.asarray(targets, np.int64)
    if (
        given.ndim not in (1, 2)
        or target.ndim > 1
        or {count} != {count, *given.shape[:-1], *target.shape}
    ):
        raise UsageError(
            f"{count} answers take numbers [N] or [{count}, N] and targets [] or [{count}], "
            f"not {list(given.shape)} and {list(target.shape)}"
        )
    if given.size and not (given.min() > 0 and given.max() < 10**9):
        raise UsageError("numbers must be over 0 and below 10^9")
    given, target = (
        np.broadcast_to(given, (count, given.shape[-1])),
        np.broadcast_to(target, (count,)),
    )
    result = np.full(count, NO_EXPRESSION, np.uint8)

    def one_by_one(rows: np.ndarray) -> None:
        for row in rows:
            verdict = score(
                texts[row], given[row].tolist(), int(target[row]), rules=rules, use_all=use_all
            )
            result[row] = REASONS.index(verdict.reason)

    for start in range(0, count, CHUNK):
        tokens = _Tokens(texts[start : start + CHUNK])
        for rows, alike in tokens.groups():
            if len(rows) < 4 or not alike:
                one_by_one(rows + start)
            elif (order := postfix(tokens.shape(rows[0]))) is not None:
                values, rows = tokens.values(rows), rows + start
                same = _same_numbers(
                    values, given[rows], use_all
                )  # none was given that is too long: -1
                result[rows[~same]] = OTHER_NUMBERS
                rows, values = rows[same], values[same]
                codes = _evaluate(order, values, target[rows], rules) if len(rows) else result[:0]
                if codes is None:
                    one_by_one(rows)
                else:
                    result[rows] = codes
    return result


CHUNK = 1 << 17
"""Answers that are read at once: few enough for their bytes to stay near the core."""


class _Tokens:
    """The tokens of many answers in one flat array, each answer's ended by a newline.

    Attributes:
        codes: uint8 `[T]`, "n" for a number, "?" for what no expression has.
        figures: int64 `[T]`, the numbers; -1 where one is too long.
        first: int64 `[B]`, where an answer begins.
        lengths: int64 `[B]`, its number of tokens, with the newline.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        blob = "\n".join(texts)
        if blob.count("\n") != len(texts) - 1:
            blob = "\n".join(text.replace("\n", " ") for text in texts)
        if not blob.isascii():
            blob = blob.replace("×", "*").replace("÷", "/")
        read = (blob + "\n").encode("ascii", "replace")
        data, kind = np.frombuffer(read, np.uint8), np.frombuffer(read.translate(KIND), np.uint8)
        begins, figure = kind != 0, kind == NUMBER
        begins[1:] &= ~(figure[1:] & figure[:-1])  # the other figures of a number
        places = np.flatnonzero(begins)
        self.codes = kind[places]
        ends = np.flatnonzero(self.codes == NEWLINE)
        self.first = np.concatenate([[0], ends[:-1] + 1])
        self.lengths = ends + 1 - self.first
        self.figures = np.zeros(len(self.codes), np.int64)
        which = np.flatnonzero(self.codes == NUMBER)
        going = places[which]
        self.figures[which] = data[going] - 48
        for _ in range(9):
            going = going + 1
            more = figure[going]
            which, going = which[more], going[more]
            if not len(which):
                break
            self.figures[which] = self.figures[which] * 10 + data[going] - 48
        self.figures[which] = -1

    def groups(self) -> Iterator[tuple[np.ndarray, bool]]:
        """The answers of each shape, and whether they truly have one: found by a hash, confirmed token by token."""
        weights = np.random.default_rng(0).integers(
            1 << 63, size=self.lengths.max(), dtype=np.uint64
        )
        place = np.arange(len(self.codes)) - np.repeat(self.first, self.lengths)
        order = np.add.reduceat(weights[place] * self.codes, self.first)
        rows = np.argsort(order, kind="stable")
        for group in np.split(rows, np.flatnonzero(np.diff(order[rows])) + 1):
            length = self.lengths[group[0]]
            alike = self.lengths[group] == length
            begin = np.minimum(
                self.first[group], len(self.codes) - length
            )  # of others, which are not alike
            shape = self.codes[self.first[group[0]] : self.first[group[0]] + length]
            alike &= (sliding_window_view(self.codes, length)[begin] == shape).all(axis=1)
            yield group[alike], True
            if not alike.all():
                yield group[~alike], False

    def shape(self, row: int) -> str:
        """An answer with n for every number."""
        return (
            self.codes[self.first[row] : self.first[row] + self.lengths[row] - 1].tobytes().decode()
        )

    def values(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of answers of one shape, int64 `[R, K]`."""
        row = self.codes[self.first[rows[0]] : self.first[rows[0]] + self.lengths[rows[0]]]
        return self.figures[self.first[rows][:, None] + np.flatnonzero(row == NUMBER)]


def _kinds() -> bytes:
    """The code of every character, for `bytes.translate`; 0 for spaces."""
    table = np.full(256, ord("?"), np.uint8)
    table[np.frombuffer(b" \t\r\f\v", np.uint8)] = 0
    for character in b"+-*/()\n":
        table[character] = character
    table[48:58] = NUMBER
    return table.tobytes()


KIND, NEWLINE = _kinds(), 10


def _same_numbers(values: np.ndarray, given: np.ndarray, use_all: bool) -> np.ndarray:
    """Whether answers use what was given, int64 `[R, K]` and `[R, N]`, as often as it was."""
    if values.shape[1] > given.shape[1] or (use_all and values.shape[1] < given.shape[1]):
        return np.zeros(len(values), bool)
    if use_all:
        return (np.sort(values, axis=1) == np.sort(given, axis=1)).all(axis=1)
    used = (values[:, :, None] == values[:, None]).sum(axis=2)
    return (used <= (values[:, :, None] == given[:, None]).sum(axis=2)).all(axis=1)


def _evaluate(
    tokens: Sequence[str], values: np.ndarray, target: np.ndarray, rules: str
) -> np.ndarray | None:
    """What answers of one shape, with numbers int64 `[R, K]`, are, uint8 `[R]`; None where int64 may overflow.

    Fractions are not reduced; `top` and `low` bound numerators and denominators.
    """
    most, column, whole = int(values.max()), 0, rules != "rational"
    codes = np.zeros(len(values), np.uint8)
    stack: list[tuple[np.ndarray, np.ndarray | int, int, int]] = []
    for token in tokens:
        if token not in RANK:
            stack.append((values[:, column], 1, most, 1))
            column += 1
            continue
        (c, d, c_top, d_top), (a, b, a_top, b_top) = stack.pop(), stack.pop()
        if token == "/":
            codes[(codes == 0) & (c == 0)] = ZERO_DIVISION
            c = np.where(c == 0, 1, c)
            if whole:
                codes[(codes == 0) & (a % c != 0)] = AGAINST_RULES
                num, den, top, low = a // c, 1, a_top, 1
            else:
                num, den, top, low = a * d, b * c, a_top * d_top, b_top * c_top
        elif token == "*":
            num, den, top, low = a * c, b * d, a_top * c_top, b_top * d_top
        else:
            num = a * d + c * b if token == "+" else a * d - c * b
            den, top, low = b * d, a_top * d_top + c_top * b_top, b_top * d_top
        if max(top, low) * (int(abs(target).max()) + 1) >= 1 << 62:
            return None
        if rules == "natural":
            codes[(codes == 0) & (num <= 0)] = AGAINST_RULES
        stack.append((num, den, top, low))
    num, den, _, _ = stack[0]
    codes[(codes == 0) & (num != target * den)] = WRONG_VALUE
    return codes
