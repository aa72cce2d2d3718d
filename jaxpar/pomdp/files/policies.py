"""Reads and writes policies of alpha vectors: pomdp-solve's `.alpha` files and SARSOP's `.policy` files (XML).

Both hold vectors over the states with the number of an action each, in the order of the model's file.
"""

import bisect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp
import numpy as np

from jaxpar._encodings import decoded
from jaxpar.pomdp.exact.solver import Exact
from jaxpar.pomdp.files._xml import Element, parse, source_of
from jaxpar.pomdp.files.cassandra import decimal
from jaxpar.pomdp.model import LARGEST
from jaxpar.pomdp.tabular import TabularPomdp
from jaxpar.types import UsageError

__all__ = ["load_policy", "save_policy"]


def load_policy(source: str | os.PathLike, model: TabularPomdp) -> Exact:
    """The policy of a `.policy` (XML) or `.alpha` file, which `simulate` can play.

    Args:
        source: a path, or the text itself where it has more than one line.
        model: what it is a policy of: its states are counted, its start is valued (`value`, with `upper` infinite).

    Raises:
        UsageError: the file cannot be read, is malformed (then the sentence names line and reason), or does not fit.
    """
    content, name = source_of(source)
    if content.lstrip().startswith(b"<"):
        actions, vectors = _of_xml(parse(source, "Policy"), model)
    else:
        actions, vectors = _of_text(decoded(content, name), name, model)
    alphas = jnp.asarray(np.stack(vectors), model.start.dtype)
    value = (alphas @ model.start).max()
    upper = jnp.asarray(jnp.inf, value.dtype)
    return Exact(value, value, upper, alphas, jnp.asarray(actions, jnp.int32), False, 0)


def save_policy(policy: Exact, path: str | os.PathLike) -> None:
    """Writes the vectors so that `load_policy` gives them back, in the format that the suffix names.

    Raises:
        UsageError: the suffix is neither `.alpha` nor `.policy`.
    """
    rows = [
        (int(action), " ".join(decimal(x) for x in row))
        for action, row in zip(np.asarray(policy.actions), np.asarray(policy.alphas), strict=True)
    ]
    suffix = Path(path).suffix
    if suffix == ".alpha":
        text = "".join(f"{action}\n{row}\n\n" for action, row in rows)
    elif suffix == ".policy":
        sizes = f'vectorLength="{policy.alphas.shape[1]}" numObsValue="1" numVectors="{len(rows)}"'
        vectors = "".join(
            f'<Vector action="{action}" obsValue="0">{row}</Vector>\n' for action, row in rows
        )
        head = '<?xml version="1.0" encoding="ISO-8859-1"?>\n<Policy version="0.1" type="value">\n'
        text = f"{head}<AlphaVector {sizes}>\n{vectors}</AlphaVector>\n</Policy>\n"
    else:
        raise UsageError(f"{path} must end with .alpha (pomdp-solve) or .policy (SARSOP)")
    Path(path).write_text(text)


def _of_text(text: str, name: str, model: TabularPomdp) -> tuple[list[int], list[np.ndarray]]:
    """Reads actions, each followed by a number a state; `#` begins a comment."""
    words = [
        (word, line)
        for line, content in enumerate(text.splitlines(), start=1)
        for word in content.split("#", 1)[0].split()
    ]
    last, size = text.count("\n") + 1, len(model.states)
    actions, vectors = [], []

    def refuse(line: int, why: str) -> NoReturn:
        raise UsageError(f"{name}, line {line}: {why}")

    blank = [line for line, content in enumerate(text.splitlines(), start=1) if not content.strip()]
    for at in range(0, len(words), size + 1):
        (word, line), row = words[at], words[at + 1 : at + 1 + size]
        _check_whole(blank, [line, *(at for _, at in row)], size, refuse)
        if not re.fullmatch(r"\d+", word) or int(word) >= len(model.actions):
            refuse(line, f"expected an action, 0 to {len(model.actions) - 1}, not {word!r}")
        if len(row) < size:
            refuse(
                last,
                f"the vector after line {line} needs {size} numbers, one a state, and has {len(row)}",
            )
        actions.append(int(word))
        vectors.append(np.asarray([_number(word, line, refuse) for word, line in row]))
    if not vectors:
        refuse(last, "there is no vector in it")
    return actions, vectors


def _check_whole(
    blank: list[int], lines: list[int], size: int, refuse: Callable[[int, str], NoReturn]
) -> None:
    """Rejects a vector with a blank line in it, which divides vectors.

    Else vectors of another model could fill up by chance.
    """
    after = bisect.bisect(blank, lines[0])
    if after < len(blank) and blank[after] < lines[-1]:
        refuse(
            blank[after],
            f"a vector ends here, and needs {size} numbers, one a state; expected the policy of a "
            "model with its number of states",
        )


def _of_xml(root: Element, model: TabularPomdp) -> tuple[list[int], list[np.ndarray]]:
    given, size = root.one("AlphaVector"), len(model.states)
    if given.attributes.get("numObsValue", "1") != "1":
        given.refuse(
            "the policy is of a model with fully observed variables, whose vectors are over a part of the states"
        )
    if given.get("vectorLength") != str(size):
        given.refuse(
            f"the vectors have length {given.get('vectorLength')}, and the model has {size} states"
        )
    actions, vectors = [], []
    for element in given.children:

        def refuse(line: int, why: str, element: Element = element) -> NoReturn:
            element.refuse(why)

        word = element.get("action")
        if not re.fullmatch(r"\d+", word) or int(word) >= len(model.actions):
            element.refuse(f"expected an action, 0 to {len(model.actions) - 1}, not {word!r}")
        row = np.zeros(size)
        if element.tag == "Vector":
            words = element.words()
            if len(words) != size:
                element.refuse(f"a vector needs {size} numbers, one a state, and has {len(words)}")
            row[:] = [_number(word, 0, refuse) for word in words]
        elif element.tag == "SparseVector":
            for entry in element.all("Entry"):
                words = entry.words()
                if len(words) != 2 or not words[0].isdigit() or int(words[0]) >= size:
                    entry.refuse(f"an entry is a state, 0 to {size - 1}, and a number")
                row[int(words[0])] = _number(words[1], 0, refuse)
        else:
            element.refuse(f"expected <Vector> or <SparseVector>, not <{element.tag}>")
        actions.append(int(word))
        vectors.append(row)
    count = given.attributes.get("numVectors", str(len(vectors)))
    if not vectors or count != str(len(vectors)):
        given.refuse(f"there should be {count} vectors, at least one, and there are {len(vectors)}")
    return actions, vectors


def _number(word: str, line: int, refuse: Callable[[int, str], NoReturn]) -> float:
    try:
        value = float(word)
    except ValueError:
        refuse(line, f"expected a number, not {word!r}")
    if not abs(value) <= LARGEST:
        refuse(line, f"{word} is no finite number, or beyond {LARGEST:g} in size")
    return value
