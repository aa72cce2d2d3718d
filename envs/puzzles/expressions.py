"""Answers to Countdown as text: a parser of its own, exact values, and a verdict; one at a time or a million at once.

An answer is one expression of whole numbers, `+ - * /` (or `× ÷`), parentheses and spaces, with at least one operation:
`(3 + 5) * 7 - 2`. There is no sign before a number, no power, no equals sign and no text around it. Nothing is ever
evaluated by Python, values are fractions without rounding, and numbers are counted: each given number is used once, as
often as it was given. `Countdown` accepts the same answers, move by move, as long as its int32 fractions last.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxpar.fields import OneOf, check_value
from jaxpar.types import UsageError

__all__ = ["REASONS", "RULES", "Verdict", "postfix", "score", "score_many", "solve"]

RULES = ("rational", "integer", "natural")
"""Which values may stand between: all fractions; whole numbers; whole numbers over 0, as on television."""

REASONS = (
    "solved",
    "not an expression",
    "other numbers",
    "division by zero",
    "a value against the rules",
    "wrong value",
)
"""What an answer can be; `score_many` gives their numbers."""
SOLVED, NO_EXPRESSION, OTHER_NUMBERS, ZERO_DIVISION, AGAINST_RULES, WRONG_VALUE = range(6)

RANK = {"+": 1, "-": 1, "*": 2, "/": 2}
TOKEN = re.compile(r"[0-9]+|\S", re.ASCII)
NUMBER = ord("n")


class Verdict(NamedTuple):
    """What became of an answer: one of `REASONS`, and its value where it has one."""

    reason: str
    value: Fraction | None = None

    @property
    def solved(self) -> bool:
        """Whether it is right."""
        return self.reason == REASONS[SOLVED]


def postfix(text: str) -> list[str] | None:
    """The expression's numbers and operators in the order of evaluation; None if it is no expression.

    Operators of one rank bind from the left. Takes time linear in the text and no recursion.
    """
    out: list[str] = []
    waiting: list[str] = []
    after_value = False
    for token in TOKEN.findall(text.replace("×", "*").replace("÷", "/")):
        if token == "(":
            if after_value:
                return None
            waiting.append(token)
        elif token in RANK or token == ")":
            if not after_value:
                return None
            while waiting and waiting[-1] != "(" and (token == ")" or RANK[waiting[-1]] >= RANK[token]):
                out.append(waiting.pop())
            if token != ")":
                waiting.append(token)
            elif not waiting:
                return None
            else:
                waiting.pop()
            after_value = token == ")"
        elif after_value or not (token[0] in "0123456789" or token == "n"):  # n: any number, in a shape
            return None
        else:
            out.append(token)
            after_value = True
    if not after_value or "(" in waiting or len(out) + len(waiting) < 3:
        return None
    return out + waiting[::-1]


def score(text: str, numbers: Sequence[int], target: int, *, rules: str = "rational", use_all: bool = True) -> Verdict:
    """Judges one answer exactly; 10 to 20 us.

    Args:
        text: the answer, as the module says.
        numbers: what was given, over 0.
        target: what it shall be.
        rules: which values are legal on the way, of `RULES`.
        use_all: whether every number must be used, or may be.

    Raises:
        UsageError: the rules are unknown.
    """
    check_value("rules", rules, OneOf(RULES), str)
    tokens = None if re.search("[nN]", text) else postfix(text)
    if tokens is None:
        return Verdict(REASONS[NO_EXPRESSION])
    if any(len(token) > 4000 for token in tokens):  # Python refuses to read such numbers; nobody gave them
        return Verdict(REASONS[OTHER_NUMBERS])
    used, given = Counter(int(token) for token in tokens if token not in RANK), Counter(map(int, numbers))
    if used != given if use_all else used - given:
        return Verdict(REASONS[OTHER_NUMBERS])
    values: list[Fraction] = []
    for token in tokens:
        if token not in RANK:
            values.append(Fraction(int(token)))
            continue
        b, a = values.pop(), values.pop()
        if token == "/" and b == 0:
            return Verdict(REASONS[ZERO_DIVISION])
        values.append(combine(a, b, token))
        if not is_legal(values[-1], rules):
            return Verdict(REASONS[AGAINST_RULES], values[-1])
    return Verdict(REASONS[SOLVED if values[0] == target else WRONG_VALUE], values[0])


def combine(a: Fraction, b: Fraction, operator: str) -> Fraction:
    """`a operator b`; b is not 0 where it divides."""
    return a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a / b


def is_legal(value: Fraction, rules: str) -> bool:
    """Whether a value may stand between."""
    return rules == "rational" or (value.denominator == 1 and (rules == "integer" or value > 0))


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
    if given.ndim not in (1, 2) or target.ndim > 1 or {count} != {count, *given.shape[:-1], *target.shape}:
        raise UsageError(
            f"{count} answers take numbers [N] or [{count}, N] and targets [] or [{count}], "
            f"not {list(given.shape)} and {list(target.shape)}"
        )
    if given.size and not (given.min() > 0 and given.max() < 10**9):
        raise UsageError("numbers must be over 0 and below 10^9")
    given, target = np.broadcast_to(given, (count, given.shape[-1])), np.broadcast_to(target, (count,))
    result = np.full(count, NO_EXPRESSION, np.uint8)

    def one_by_one(rows: np.ndarray) -> None:
        for row in rows:
            verdict = score(texts[row], given[row].tolist(), int(target[row]), rules=rules, use_all=use_all)
            result[row] = REASONS.index(verdict.reason)

    for start in range(0, count, CHUNK):
        tokens = _Tokens(texts[start : start + CHUNK])
        for rows, alike in tokens.groups():
            if len(rows) < 4 or not alike:
                one_by_one(rows + start)
            elif (order := postfix(tokens.shape(rows[0]))) is not None:
                values, rows = tokens.values(rows), rows + start
                same = _same_numbers(values, given[rows], use_all)  # none was given that is too long: -1
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
        data = np.frombuffer((blob + "\n").encode("ascii", "replace"), np.uint8)
        kind = KIND[data]
        begins = kind != 0
        begins[1:] &= ~((kind[1:] == NUMBER) & (kind[:-1] == NUMBER))  # the other figures of a number
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
            more = kind[going] == NUMBER
            which, going = which[more], going[more]
            if not len(which):
                break
            self.figures[which] = self.figures[which] * 10 + data[going] - 48
        self.figures[which] = -1

    def groups(self) -> Iterator[tuple[np.ndarray, bool]]:
        """The answers of each shape, and whether they truly have one: found by a hash, confirmed token by token."""
        weights = np.random.default_rng(0).integers(1 << 63, size=self.lengths.max(), dtype=np.uint64)
        place = np.arange(len(self.codes)) - np.repeat(self.first, self.lengths)
        order = np.add.reduceat(weights[place] * self.codes, self.first)
        rows = np.argsort(order, kind="stable")
        for group in np.split(rows, np.flatnonzero(np.diff(order[rows])) + 1):
            length = self.lengths[group[0]]
            alike = self.lengths[group] == length
            shape = self.codes[self.first[group[0]] : self.first[group[0]] + length]
            inside = np.minimum(self.first[group][:, None] + np.arange(length), len(self.codes) - 1)
            alike &= (self.codes[inside] == shape).all(axis=1)
            yield group[alike], True
            if not alike.all():
                yield group[~alike], False

    def shape(self, row: int) -> str:
        """An answer with n for every number."""
        return self.codes[self.first[row] : self.first[row] + self.lengths[row] - 1].tobytes().decode()

    def values(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of answers of one shape, int64 `[R, K]`."""
        row = self.codes[self.first[rows[0]] : self.first[rows[0]] + self.lengths[rows[0]]]
        return self.figures[self.first[rows][:, None] + np.flatnonzero(row == NUMBER)]


def _kinds() -> np.ndarray:
    """The code of every character; 0 for spaces."""
    table = np.full(256, ord("?"), np.uint8)
    table[np.frombuffer(b" \t\r\f\v", np.uint8)] = 0
    for character in b"+-*/()\n":
        table[character] = character
    table[48:58] = NUMBER
    return table


KIND, NEWLINE = _kinds(), 10


def _same_numbers(values: np.ndarray, given: np.ndarray, use_all: bool) -> np.ndarray:
    """Whether answers use what was given, int64 `[R, K]` and `[R, N]`, as often as it was."""
    if values.shape[1] > given.shape[1] or (use_all and values.shape[1] < given.shape[1]):
        return np.zeros(len(values), bool)
    if use_all:
        return (np.sort(values, axis=1) == np.sort(given, axis=1)).all(axis=1)
    used = (values[:, :, None] == values[:, None]).sum(axis=2)
    return (used <= (values[:, :, None] == given[:, None]).sum(axis=2)).all(axis=1)


def _evaluate(tokens: Sequence[str], values: np.ndarray, target: np.ndarray, rules: str) -> np.ndarray | None:
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


def solve(numbers: Sequence[int], target: int, *, rules: str = "rational", use_all: bool = True) -> str | None:
    """An answer that `score` accepts, by search through all pairs and operations; None if there is none.

    Multisets of values that were seen are not searched again. Four numbers take 5 ms, five 0.2 s, six several seconds.
    """
    check_value("rules", rules, OneOf(RULES), str)
    seen: set[tuple[Fraction, ...]] = set()

    def search(items: list[tuple[Fraction, str]]) -> str | None:
        for i, (a, left) in enumerate(items):
            for j, (b, right) in enumerate(items):
                for operator in RANK:
                    if i == j or (operator in "+*" and i > j) or (operator == "/" and b == 0):
                        continue
                    value, text = combine(a, b, operator), f"({left} {operator} {right})"
                    if not is_legal(value, rules):
                        continue
                    rest = [item for k, item in enumerate(items) if k not in (i, j)]
                    if value == target and not (use_all and rest):
                        return text[1:-1]
                    state = tuple(sorted([value, *(item[0] for item in rest)]))
                    if rest and state not in seen:
                        seen.add(state)
                        if found := search([*rest, (value, text)]):
                            return found
        return None

    return search([(Fraction(number), str(number)) for number in numbers])
