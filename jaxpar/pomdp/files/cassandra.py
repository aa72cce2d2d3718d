"""Reads and writes Cassandra's `.POMDP` files.

The whole grammar of the format (pomdp.org, "POMDP file format" and "POMDP file grammar"): preamble in any order, four
kinds of start, entries, rows and matrices of T, O and R, wildcards, `uniform`, `identity`, `reset`, costs, entities by
name or number. What comes later overwrites what came before. Rewards by observation are averaged over the observations,
which changes no value: a planner never sees the reward.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
from jax.typing import ArrayLike

from jaxpar._encodings import decoded
from jaxpar.pomdp.model import LARGEST
from jaxpar.pomdp.tabular import SUM_TOLERANCE, TabularPomdp
from jaxpar.types import UsageError

__all__ = ["load_pomdp", "save_pomdp"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PREAMBLE = ("discount", "values", "states", "actions", "observations")
_STATEMENTS = {*_PREAMBLE, "start", "T", "O", "R"}
_RESERVED = {*_STATEMENTS, "include", "exclude", "uniform", "identity", "reset"}


def load_pomdp(source: str | os.PathLike) -> TabularPomdp:
    """The model of a `.POMDP` file.

    Args:
        source: a path, or the text itself where it has more than one line.

    Raises:
        UsageError: the file cannot be read, or is malformed: then the sentence names line and reason.
    """
    if isinstance(source, str) and "\n" in source:
        return _Parser(source, "text").model()
    path = Path(source)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    text = decoded(content, path)
    return _Parser(text, path.name).model()


def save_pomdp(model: TabularPomdp, path: str | os.PathLike) -> None:
    """Writes a model so that `load_pomdp` gives it back: entries that are not zero, shortest exact decimals."""
    counts = {"states": model.states, "actions": model.actions, "observations": model.observations}
    for kind, names in counts.items():
        if not is_numbered(names) and (bad := [name for name in names if _illegal(name)]):
            raise UsageError(
                f"{kind} cannot be written with the name {bad[0]!r}: it needs a letter first, and no : or #"
            )
    lines = [f"discount: {decimal(model.discount)}", "values: reward"]
    lines += [
        f"{kind}: {len(names) if is_numbered(names) else ' '.join(names)}"
        for kind, names in counts.items()
    ]
    lines += ["start: " + " ".join(map(decimal, np.asarray(model.start))), ""]
    for head, array in (("T", model.transition), ("O", model.observation), ("R", model.reward)):
        rest = {"T": "", "O": "", "R": " : *" * (4 - np.ndim(array))}[head]
        array = np.asarray(array)
        for place in np.argwhere(array):
            lines.append(
                f"{head}: {' : '.join(map(str, place))}{rest} {decimal(array[tuple(place)])}"
            )
    Path(path).write_text("\n".join(lines) + "\n")


def is_numbered(names: Sequence[str]) -> bool:
    """Whether names are the numbers 0, 1, ..., as those of values that were only counted."""
    return tuple(names) == tuple(str(i) for i in range(len(names)))


def _illegal(name: str) -> bool:
    return name in _RESERVED or not re.fullmatch(r"[A-Za-z][^\s:#]*", name)


def decimal(value: ArrayLike) -> str:
    """The fewest digits that give the same float of the same precision again."""
    return np.format_float_positional(
        cast(np.floating, np.asarray(value)[()]), unique=True, trim="0"
    )


class _Parser:
    """One pass over the tokens; `at` is the next one, each a pair of text and line."""

    def __init__(self, text: str, name: str):
        self.name, self.at = name, 0
        self.tokens = list(_tokens(text))
        self.end = text.count("\n") + 1
        self.given: dict[str, Any] = {}
        self.sizes: tuple[
            int, ...
        ] = ()  # of states, actions and observations, once the preamble is complete
        self.start: np.ndarray | None = None
        self.start_line = self.reset_line = 0
        self.is_observed = False
        self.rewards: list[tuple[tuple, np.ndarray]] = []

    def model(self) -> TabularPomdp:
        while self.at < len(self.tokens):
            word, line = self.next()
            if word in _PREAMBLE:
                self.preamble(word, line)
            elif word == "start":
                self.read_start(line)
            elif word in ("T", "O", "R"):
                self.need_observations(word, line)
                self.entry(word, line)
            else:
                self.refuse(
                    line,
                    f"{word!r} begins no statement; legal are {', '.join(_PREAMBLE)}, start, T, O, R",
                )
        self.need_preamble(self.end, "the end of the file")
        if self.start is None:
            self.start = np.full(self.sizes[0], 1 / self.sizes[0])
        for kind, rows, lines in (
            ("T", self.transition, self.transition_lines),
            ("O", self.observation, self.observation_lines),
        ):
            self.check_rows(kind, rows, lines)
        states, actions, observations = (
            self.given[kind] for kind in ("states", "actions", "observations")
        )
        return TabularPomdp.of(
            self.transition,
            self.observation,
            self.reward(),
            self.start,
            self.given["discount"],
            states=states,
            actions=actions,
            observations=observations,
        )

    # --- tokens -------------------------------------------------------------------------------------------------

    def refuse(self, line: int, why: str) -> NoReturn:
        raise UsageError(f"{self.name}, line {line}: {why}")

    def peek(self) -> str | None:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    def next(self) -> tuple[str, int]:
        if self.at == len(self.tokens):
            self.refuse(self.end, "the file ends in the middle of a statement")
        self.at += 1
        return self.tokens[self.at - 1]

    def colon(self, after: str) -> None:
        word, line = self.next()
        if word != ":":
            self.refuse(line, f"expected ':' after {after!r}, not {word!r}")

    def body(self) -> list[tuple[str, int]]:
        """Returns the words up to the next statement."""
        words = []
        while self.at < len(self.tokens) and not self.begins_statement():
            words.append(self.next())
        return words

    def begins_statement(self) -> bool:
        """Returns whether the next word begins a statement, known or not.

        It has a colon behind it, or is a word of the format at the beginning of a line.
        """
        word, line = self.tokens[self.at]
        following = ""
        if self.at + 1 < len(self.tokens):
            following = self.tokens[self.at + 1][0]
        if word == "start" and following in ("include", "exclude"):
            return True
        is_first = line != self.tokens[self.at - 1][1]
        return following == ":" or (is_first and word in _STATEMENTS)

    def numbers(self, words: list[tuple[str, int]], count: int, what: str, line: int) -> np.ndarray:
        values = [self.number(word, at) for word, at in words]
        if len(values) != count:
            self.refuse(
                words[-1][1] if words else line, f"{what} takes {count} numbers, not {len(values)}"
            )
        return np.asarray(values)

    def number(self, word: str, line: int) -> float:
        if not _NUMBER.fullmatch(word):
            self.refuse(line, f"expected a number, not {word!r}")
        if abs(float(word)) > LARGEST:
            self.refuse(
                line,
                f"{word} is too large a number; at most {LARGEST:g} in size can be planned with",
            )
        return float(word)

    # --- preamble and start -------------------------------------------------------------------------------------

    def preamble(self, kind: str, line: int) -> None:
        self.colon(kind)
        words = self.body()
        if kind in self.given:
            self.refuse(line, f"{kind} is given a second time")
        if self.sizes:
            self.refuse(line, f"{kind} must come before start, T, O and R")
        if kind == "discount":
            self.given[kind] = float(self.numbers(words, 1, kind, line)[0])
            if not 0 <= self.given[kind] <= 1:
                self.refuse(line, f"the discount must be in [0, 1], not {self.given[kind]:g}")
        elif kind == "values":
            if [word for word, _ in words] not in (["reward"], ["cost"]):
                self.refuse(
                    line,
                    f"values must be 'reward' or 'cost', not {' '.join(w for w, _ in words)!r}",
                )
            self.given[kind] = words[0][0]
        else:
            self.given[kind] = self.entities(kind, words, line)

    def entities(self, kind: str, words: list[tuple[str, int]], line: int) -> tuple[str, ...]:
        if len(words) == 1 and words[0][0].isdigit():
            if int(words[0][0]) == 0:
                self.refuse(line, f"{kind} must be at least one")
            return tuple(str(i) for i in range(int(words[0][0])))
        for word, at in words:
            if _illegal(word):
                self.refuse(
                    at,
                    f"{word!r} cannot be a name among {kind}: a letter first, and no word of the format",
                )
        names = tuple(word for word, _ in words)
        if not names or len(set(names)) != len(names):
            self.refuse(line, f"{kind} must be a number or a list of different names")
        return names

    def need_preamble(self, line: int, before: str) -> None:
        """Makes the arrays once everything that sizes them is known."""
        if self.sizes:
            return
        needed = [kind for kind in _PREAMBLE if kind != "observations"]
        if missing := [kind for kind in needed if kind not in self.given]:
            self.refuse(line, f"{missing[0]} must be given before {before}")
        is_observed = "observations" not in self.given
        if is_observed:  # as pomdp-solve reads such a file: the state itself is seen
            self.given["observations"] = self.given["states"]
        s, a, o = self.sizes = tuple(
            len(self.given[kind]) for kind in ("states", "actions", "observations")
        )
        self.transition, self.transition_lines = np.zeros((a, s, s)), np.zeros((a, s), int)
        self.observation, self.observation_lines = np.zeros((a, s, o)), np.zeros((a, s), int)
        if is_observed:
            self.observation = np.tile(np.eye(s), (a, 1, 1))
        self.is_observed = is_observed

    def need_observations(self, kind: str, line: int) -> None:
        """Rejects chances of observations that nothing counts."""
        self.need_preamble(line, kind)
        if kind == "O" and self.is_observed:
            self.refuse(line, "observations must be given before O")

    def read_start(self, line: int) -> None:
        self.need_preamble(line, "start")
        if self.start_line:
            self.refuse(line, f"start is given a second time, after line {self.start_line}")
        if self.reset_line:
            self.refuse(
                line,
                f"start must come before the 'reset' of line {self.reset_line}, which goes back to it",
            )
        self.start_line = line
        mode = self.next()[0] if self.peek() in ("include", "exclude") else None
        self.colon("start")
        words, num_states = self.body(), self.sizes[0]
        is_names = all(word[0].isalpha() for word, _ in words) or (
            len(words) == 1 and num_states > 1
        )
        if not words:
            self.refuse(line, "start names no state")
        if mode is None and [word for word, _ in words] == ["uniform"]:
            self.start = np.full(num_states, 1 / num_states)
        elif mode or is_names:
            chosen = np.full(num_states, mode == "exclude")
            for word, at in words:
                chosen[self.index("states", word, at)] = mode != "exclude"
            if not chosen.any():
                self.refuse(line, "start excludes every state")
            self.start = chosen / chosen.sum()
        else:
            self.start = self.numbers(words, num_states, "start", line)
            if (self.start < 0).any() or abs(self.start.sum() - 1) > SUM_TOLERANCE:
                self.refuse(
                    line, f"start sums to {self.start.sum():g}, not to one, or has a negative entry"
                )

    # --- T, O and R ---------------------------------------------------------------------------------------------

    def index(self, kind: str, word: str, line: int) -> int | slice:
        names = self.given[kind]
        if word == "*":
            return slice(None)
        if word.isdigit():
            if int(word) >= len(names):
                self.refuse(
                    line, f"{kind} are numbered 0 to {len(names) - 1}, so there is no {word}"
                )
            return int(word)
        if word not in names:
            self.refuse(line, f"there is no {word!r} among the {kind}")
        return names.index(word)

    def entry(self, kind: str, line: int) -> None:
        self.need_preamble(line, kind)
        last = {"T": ("states",), "O": ("observations",), "R": ("states", "observations")}[kind]
        axes = ("actions", "states", *last)
        self.colon(kind)
        place = []
        while True:
            word, at = self.next()
            if len(place) == len(axes):
                self.refuse(at, f"{kind} takes at most {len(axes)} of {', '.join(axes)}")
            place.append(self.index(axes[len(place)], word, at))
            if self.peek() != ":":
                break
            self.next()
        if kind == "R" and len(place) == 1:
            self.refuse(line, "R needs at least an action and a state")
        shape = tuple(self.size(axis) for axis in axes[len(place) :])
        values = self.values(kind, len(place), shape, line)
        if kind == "R":
            self.rewards.append((tuple(place), values))
            return
        if (values < 0).any() or (values > 1 + SUM_TOLERANCE).any():
            bad = values[(values < 0) | (values > 1 + SUM_TOLERANCE)][0]
            self.refuse(line, f"{bad:g} is no probability")
        array, lines = (
            (self.transition, self.transition_lines)
            if kind == "T"
            else (self.observation, self.observation_lines)
        )
        array[tuple(place)] = values
        lines[tuple(place[:2])] = line

    def size(self, kind: str) -> int:
        return self.sizes[("states", "actions", "observations").index(kind)]

    def values(self, kind: str, given: int, shape: tuple[int, ...], line: int) -> np.ndarray:
        """What follows the indices: numbers, or one word for a matrix or row of probabilities."""
        words = self.body()
        word = words[0][0] if len(words) == 1 else ""
        if word in ("uniform", "identity", "reset"):
            if kind == "R" or not shape:
                self.refuse(words[0][1], f"{word!r} is for matrices and rows of T and O")
            if word == "uniform":
                return np.full(shape, 1 / shape[-1])
            if word == "identity":
                if len(shape) != 2 or shape[0] != shape[1]:
                    self.refuse(words[0][1], "'identity' is for a square matrix")
                return np.eye(shape[0])
            if kind != "T":
                self.refuse(words[0][1], "'reset' is for T: it goes back to the start")
            if self.start is None:  # uniform, unless a start follows, which is refused
                self.reset_line = self.reset_line or words[0][1]
                return np.full(shape, 1 / shape[-1])
            return np.broadcast_to(self.start, shape)
        count = int(np.prod(shape))
        return self.numbers(words, count, f"{kind} with {given} indices", line).reshape(shape)

    def check_rows(self, kind: str, rows: np.ndarray, lines: np.ndarray) -> None:
        sums = rows.sum(-1)
        for action, state in np.argwhere(np.abs(sums - 1) > SUM_TOLERANCE):
            line = int(lines[action, state])
            row = f"{kind}: {self.given['actions'][action]} : {self.given['states'][state]}"
            if line == 0:
                self.refuse(self.end, f"{row} is nowhere given")
            self.refuse(
                line,
                f"{row} sums to {sums[action, state]:g}, not to one (this line is the last to set it)",
            )

    def reward(self) -> np.ndarray:
        """`[A, S]`, or `[A, S, S]` where some statement tells next states or observations apart."""
        s, a, o = self.sizes
        by_obs = any(
            len(p) == 4 and isinstance(p[3], int) or len(p) in (2, 3) for p, _ in self.rewards
        )
        by_next = by_obs or any(len(p) > 2 and isinstance(p[2], int) for p, _ in self.rewards)
        result = np.zeros((a, s, s) if by_next else (a, s))
        for action in range(a):
            full = np.zeros((s, s if by_next else 1, o if by_obs else 1))
            for place, values in self.rewards:
                if place[0] in (slice(None), action):
                    full[place[1 : 3 if not by_obs else 4]] = values
            if by_obs:
                result[action] = np.einsum("sto,to->st", full, self.observation[action])
            else:
                result[action] = full[:, :, 0] if by_next else full[:, 0, 0]
        return -result if self.given["values"] == "cost" else result


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Words, colons and their lines; a sign that stands alone joins the number after it."""
    sign = ""
    for line, content in enumerate(text.splitlines(), start=1):
        for word in re.findall(r":|[^\s:]+", content.split("#", 1)[0]):
            if word in ("+", "-"):
                sign = word
                continue
            yield sign + word, line
            sign = ""
