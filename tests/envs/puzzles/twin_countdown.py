"""Countdown with lists and fractions of Python, and what can be made at all, by trying everything."""

import itertools
from fractions import Fraction

LIMIT = 2**31 - 1


class CountdownTwin:
    """Every number carries the text that made it; the twin never reads the mask of the environment."""

    def __init__(self, numbers, target, rules, use_all):
        self.items = {i: (Fraction(int(n)), str(int(n))) for i, n in enumerate(numbers)}
        self.size, self.target, self.rules, self.use_all = len(numbers), int(target), rules, use_all
        self.solved = self.illegal = False

    def moves(self):
        """(i, j, operator) in the order of actions."""
        pairs = list(itertools.combinations(range(self.size), 2))
        return [
            (j, i, op[0]) if op[1:] else (i, j, op)
            for op in ("+", "*", "-", "-'", "/", "/'")
            for i, j in pairs
        ]

    def value(self, i, j, op):
        """The result, or None where the move is illegal."""
        if i not in self.items or j not in self.items:
            return None
        (x, _), (y, _) = self.items[i], self.items[j]
        a, b, c, d = x.numerator, x.denominator, y.numerator, y.denominator
        if op == "/" and c == 0:
            return None
        steps = {
            "+": [a * d, c * b, a * d + c * b, b * d],
            "-": [a * d, c * b, a * d - c * b, b * d],
        }
        steps |= {"*": [a * c, b * d], "/": [a * d, b * c]}
        if any(abs(step) > LIMIT for step in steps[op]):
            return None
        result = {"+": x + y, "-": x - y, "*": x * y}[op] if op != "/" else x / y
        if (
            self.rules != "rational"
            and result.denominator != 1
            or self.rules == "natural"
            and result <= 0
        ):
            return None
        return result

    def legal(self):
        return [self.value(*move) is not None for move in self.moves()]

    def over(self):
        return self.solved or self.illegal or not any(self.legal())

    def step(self, action):
        if self.over():
            return
        i, j, op = self.moves()[action]
        result = self.value(i, j, op)
        if result is None:
            self.illegal = True
            return
        self.items[i] = result, f"({self.items[i][1]}{op}{self.items[j][1]})"
        del self.items[j]
        self.solved = result == self.target and (not self.use_all or len(self.items) == 1)
        self.made = self.items[i][1]


def reachable(numbers, rules, use_all):
    """Every value that a legal expression has, by splitting the multiset in two in every way."""
    cache = {}

    def values(items):
        if items not in cache:
            cache[items] = found = set()
            if len(items) == 1:
                found.add(Fraction(items[0]))
            for size in range(1, len(items)):
                for places in itertools.combinations(range(len(items)), size):
                    first = tuple(items[i] for i in places)
                    second = tuple(items[i] for i in range(len(items)) if i not in places)
                    for a in values(first):
                        for b in values(second):
                            found |= {a + b, a - b, a * b} | ({a / b} if b else set())
            if len(items) > 1 and rules != "rational":
                cache[items] = {
                    v for v in found if v.denominator == 1 and (rules == "integer" or v > 0)
                }
        return cache[items]

    numbers, result = tuple(sorted(numbers)), set()
    for size in range(len(numbers) if use_all else 2, len(numbers) + 1):
        for chosen in set(itertools.combinations(numbers, size)):
            result |= values(chosen)
    return result
