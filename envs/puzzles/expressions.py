"""Answers to Countdown as text: a parser of its own, exact values, and a verdict.

An answer is one expression of whole numbers, `+ - * /` (or `× ÷`), parentheses and spaces, with at least one operation:
`(3 + 5) * 7 - 2`. There is no sign before a number, no power, no equals sign and no text around it. Nothing is ever
evaluated by Python, values are fractions without rounding, and numbers are counted: each given number is used once, as
often as it was given. `Countdown` accepts the same answers, move by move, as long as its int32 fractions last;
`answers.py` judges a million at once.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from jaxpar.fields import OneOf, check_value

__all__ = ["REASONS", "RULES", "Verdict", "postfix", "score", "solve"]

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
            while (
                waiting
                and waiting[-1] != "("
                and (token == ")" or RANK[waiting[-1]] >= RANK[token])
            ):
                out.append(waiting.pop())
            if token != ")":
                waiting.append(token)
            elif not waiting:
                return None
            else:
                waiting.pop()
            after_value = token == ")"
        elif after_value or not (
            token[0] in "0123456789" or token == "n"
        ):  # n: any number, in a shape
            return None
        else:
            out.append(token)
            after_value = True
    if not after_value or "(" in waiting or len(out) + len(waiting) < 3:
        return None
    return out + waiting[::-1]


def score(
    text: str, numbers: Sequence[int], target: int, *, rules: str = "rational", use_all: bool = True
) -> Verdict:
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
    if any(
        len(token) > 4000 for token in tokens
    ):  # Python refuses to read such numbers; nobody gave them
        return Verdict(REASONS[OTHER_NUMBERS])
    used, given = (
        Counter(int(token) for token in tokens if token not in RANK),
        Counter(map(int, numbers)),
    )
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
    return (
        a + b
        if operator == "+"
        else a - b
        if operator == "-"
        else a * b
        if operator == "*"
        else a / b
    )


def is_legal(value: Fraction, rules: str) -> bool:
    """Whether a value may stand between."""
    return rules == "rational" or (value.denominator == 1 and (rules == "integer" or value > 0))


def solve(
    numbers: Sequence[int], target: int, *, rules: str = "rational", use_all: bool = True
) -> str | None:
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
