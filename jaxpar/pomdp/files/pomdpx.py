"""Reads and writes POMDPX, the factored XML format of SARSOP (version 1.0 of its documentation).

Variables of states, actions and observations, any number of each, become one state, action and observation by their
product, the first variable the slowest. A state variable that is fully observed is an observation, too. Tables (TBL)
with `*`, `-`, `uniform` and `identity`, where later entries overwrite earlier ones, and decision diagrams (DD) are
read; rewards of several functions are summed, and averaged over observations, as `load_pomdp` does.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from jax.typing import ArrayLike

from jaxpar.pomdp.files._xml import Element, parse
from jaxpar.pomdp.files.cassandra import decimal, is_numbered
from jaxpar.pomdp.model import LARGEST
from jaxpar.pomdp.tabular import SUM_TOLERANCE, TabularPomdp
from jaxpar.types import UsageError

__all__ = ["load_pomdpx", "save_pomdpx"]

LARGEST_TABLE = 2**27
"""Entries of an array: a factored model is easily too large to be written out."""


def load_pomdpx(source: str | os.PathLike) -> TabularPomdp:
    """The model of a POMDPX file.

    Args:
        source: a path, or the text itself where it has more than one line.

    Raises:
        UsageError: the file cannot be read, is malformed (then the sentence names line and reason), or its arrays
            would have more than 2^27 entries.
    """
    return _Reader(parse(source, "pomdpx")).model()


def save_pomdpx(model: TabularPomdp, path: str | os.PathLike) -> None:
    """Writes a model, of one variable each, so that `load_pomdpx` gives it back: shortest exact decimals."""
    names = {"states": model.states, "actions": model.actions, "observations": model.observations}
    for kind, values in names.items():
        if bad := [name for name in values if name in ("*", "-") or len(name.split()) != 1]:
            raise UsageError(
                f"{kind} cannot be written with the name {bad[0]!r}: it must be one word, and no * or -"
            )

    def values_of(kind: str) -> str:
        values = names[kind]
        if is_numbered(values):
            return f"<NumValues>{len(values)}</NumValues>"
        return f"<ValueEnum>{escape(' '.join(values))}</ValueEnum>"

    def table(
        tag: str,
        var: str,
        parents: str,
        rows: Sequence[tuple[str, ArrayLike]],
        of: str = "CondProb",
    ) -> list[str]:
        entries = [
            f"<Entry><Instance>{escape(where)}</Instance>"
            f"<{tag}>{' '.join(decimal(x) for x in np.ravel(numbers))}</{tag}></Entry>"
            for where, numbers in rows
        ]
        head = f'<{of}><Var>{var}</Var><Parent>{parents}</Parent><Parameter type="TBL">'
        return [head, *entries, f"</Parameter></{of}>"]

    transition, observation, reward = (
        np.asarray(x) for x in (model.transition, model.observation, model.reward)
    )
    pairs = list(itertools.product(enumerate(model.actions), enumerate(model.states)))
    next_too = " -" if reward.ndim == 3 else ""
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        '<pomdpx version="1.0" id="model">',
        f"<Discount>{decimal(model.discount)}</Discount>",
        "<Variable>",
        f'<StateVar vnamePrev="state_0" vnameCurr="state_1" fullyObs="false">{values_of("states")}</StateVar>',
        f'<ObsVar vname="observation">{values_of("observations")}</ObsVar>',
        f'<ActionVar vname="action">{values_of("actions")}</ActionVar>',
        '<RewardVar vname="reward"/>',
        "</Variable>",
        "<InitialStateBelief>",
        *table("ProbTable", "state_0", "null", [("-", np.asarray(model.start))]),
        "</InitialStateBelief>",
        "<StateTransitionFunction>",
        *table(
            "ProbTable",
            "state_1",
            "action state_0",
            [(f"{a} {s} -", transition[i, j]) for (i, a), (j, s) in pairs],
        ),
        "</StateTransitionFunction>",
        "<ObsFunction>",
        *table(
            "ProbTable",
            "observation",
            "action state_1",
            [(f"{a} {s} -", observation[i, j]) for (i, a), (j, s) in pairs],
        ),
        "</ObsFunction>",
        "<RewardFunction>",
        *table(
            "ValueTable",
            "reward",
            "action state_0" + (" state_1" if next_too else ""),
            [
                (f"{a} {s}{next_too}", reward[i, j])
                for (i, a), (j, s) in pairs
                if reward[i, j].any()
            ],
            of="Func",
        ),
        "</RewardFunction>",
        "</pomdpx>",
    ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclasses.dataclass
class _Variable:
    """A variable: its values, and what it is: "action", "prev", "curr" or "obs"."""

    name: str
    values: tuple[str, ...]
    kind: str
    letter: str

    def index(self, word: str, element: Element) -> int:
        numbered = is_numbered(self.values)
        plain = word[1:] if numbered and word[:1] == self.letter else word
        if plain not in self.values:
            shown = (
                f"{self.letter}0 to {self.letter}{len(self.values) - 1}"
                if numbered
                else " ".join(self.values)
            )
            element.refuse(f"{self.name} has no value {word!r}; it has {shown}")
        return self.values.index(plain)


class _Reader:
    def __init__(self, root: Element):
        self.root, self.variables, self.curr_of = root, {}, {}
        self.fully: list[tuple[str, str]] = []
        given = root.one("Variable")
        for element in given.all("StateVar"):
            self.state_variable(element)
        for tag, kind, letter in (("ActionVar", "action", "a"), ("ObsVar", "obs", "o")):
            for element in given.all(tag):
                self.add(element, element.get("vname"), kind, letter)
        for tag, kind in (("StateVar", "prev"), ("ActionVar", "action")):
            if not self.of(kind):
                given.refuse(f"<Variable> needs a <{tag}>")
        for _, curr in self.fully:
            name = f"{curr} (seen)"
            self.variables[name] = dataclasses.replace(self.variables[curr], name=name, kind="obs")
        if not self.of("obs"):
            self.variables["nothing"] = _Variable("nothing", ("0",), "obs", "o")
        sizes = {
            kind: math.prod(len(v.values) for v in self.of(kind))
            for kind in ("action", "prev", "obs")
        }
        most = sizes["action"] * sizes["prev"] * max(sizes["prev"], sizes["obs"])
        if most > LARGEST_TABLE:
            given.refuse(
                f"{sizes['prev']} states, {sizes['action']} actions and {sizes['obs']} observations make an array of "
                f"{most} entries, more than {LARGEST_TABLE}"
            )

    def state_variable(self, element: Element) -> None:
        prev, curr = element.get("vnamePrev"), element.get("vnameCurr")
        self.add(element, prev, "prev", "s")
        self.add(element, curr, "curr", "s")
        self.curr_of[prev] = curr
        if element.attributes.get("fullyObs", "false").strip() == "true":
            self.fully.append((prev, curr))

    def add(self, element: Element, name: str, kind: str, letter: str) -> None:
        if name in self.variables or name == "null":
            element.refuse(f"there are two variables {name!r}, or it is a word of the format")
        counts, enums = element.all("NumValues"), element.all("ValueEnum")
        if len(counts) + len(enums) != 1:
            element.refuse(f"{name} needs one <NumValues> or one <ValueEnum>")
        words = (counts or enums)[0].words()
        if counts:
            if len(words) != 1 or not words[0].isdigit() or not 0 < int(words[0]) <= LARGEST_TABLE:
                counts[0].refuse(
                    f"the number of values of {name} must be a whole number, at least 1"
                )
            words = [str(i) for i in range(int(words[0]))]
        if not words or len(set(words)) != len(words) or {"*", "-"} & set(words):
            enums[0].refuse(f"the values of {name} must be different words, and no * or -")
        self.variables[name] = _Variable(name, tuple(words), kind, letter)

    def of(self, kind: str) -> list[_Variable]:
        return [variable for variable in self.variables.values() if variable.kind == kind]

    def model(self) -> TabularPomdp:
        prevs, currs, actions, seen = (self.of(kind) for kind in ("prev", "curr", "action", "obs"))
        start = self.product("InitialStateBelief", prevs, prevs, {"prev"})
        transition = self.product(
            "StateTransitionFunction", [*actions, *prevs, *currs], currs, {"action", "prev", "curr"}
        )
        observation = self.product(
            "ObsFunction", [*actions, *currs, *seen], seen, {"action", "curr", "obs"}
        )
        s, a, o = (math.prod(len(v.values) for v in some) for some in (prevs, actions, seen))
        observation = observation.reshape(a, s, o)
        discount = self.root.one("Discount")
        words = discount.words()
        value = self.number(words[0] if len(words) == 1 else discount.text, discount)
        if not 0 < value <= 1:
            discount.refuse(f"the discount must be in (0, 1], not {value:g}")
        return TabularPomdp.of(
            transition.reshape(a, s, s),
            observation,
            self.reward(observation),
            start.reshape(s),
            value,
            states=_names(prevs),
            actions=_names(actions),
            observations=_names(seen),
        )

    def product(
        self, tag: str, axes: list[_Variable], wanted: list[_Variable], kinds: set[str]
    ) -> np.ndarray:
        """The product of the conditional probabilities of all `wanted` variables, broadcast over `axes`."""
        total = np.ones([len(v.values) for v in axes])
        missing = {v.name: v for v in wanted}
        section = self.root.all(tag)
        for element in section[0].all("CondProb") if section else []:
            names, table = self.factor(element, "ProbTable", kinds)
            if missing.pop(names[-1], None) is None:
                element.refuse(f"<{tag}> gives {names[-1]} a second time, or it is not its to give")
            wrong = (np.abs(table.sum(-1) - 1) > SUM_TOLERANCE) | (table < 0).any(-1)
            if wrong.any():
                where = np.argwhere(wrong)[0]
                given = [
                    f"{n}={self.variables[n].values[i]}" for n, i in zip(names, where, strict=False)
                ]
                element.refuse(
                    f"{names[-1]} given {', '.join(given) or 'nothing'} sums to {table[tuple(where)].sum():g}, "
                    "not to one, or has a negative entry"
                )
            total = total * _spread(names, table, [v.name for v in axes])
        for prev, curr in self.fully:
            if missing.pop(f"{curr} (seen)", None):
                same = np.eye(len(self.variables[prev].values))
                total = total * _spread([curr, f"{curr} (seen)"], same, [v.name for v in axes])
        missing.pop("nothing", None)
        if missing:
            (section[0] if section else self.root).refuse(
                f"<{tag}> says nothing of {next(iter(missing))}"
            )
        return total

    def reward(self, observation: np.ndarray) -> np.ndarray:
        """`[A, S]`, or `[A, S, S]` where next states or observations are told apart."""
        groups = [self.of(kind) for kind in ("action", "prev", "curr", "obs")]
        axes = [v.name for some in groups for v in some]
        total = np.zeros([1] * len(axes))
        section = self.root.all("RewardFunction")
        for element in section[0].all("Func") if section else []:
            names, table = self.factor(element, "ValueTable", {"action", "prev", "curr", "obs"})
            total = total + _spread(names, table, axes)
        wide = [any(total.shape[axes.index(v.name)] > 1 for v in some) for some in groups]
        sizes = [math.prod(len(v.values) for v in some) for some in groups]
        if math.prod(n for n, is_wide in zip(sizes, wide, strict=True) if is_wide) > LARGEST_TABLE:
            self.root.refuse(f"the rewards make an array of more than {LARGEST_TABLE} entries")
        shape = [
            len(v.values) if keep else 1
            for some, keep in zip(groups, (True, True, *wide[2:]), strict=True)
            for v in some
        ]
        full = np.broadcast_to(total, shape).reshape(
            sizes[0], sizes[1], sizes[2] if wide[2] else 1, sizes[3] if wide[3] else 1
        )
        if wide[3]:  # a table that tells no next states apart is one for all of them
            return np.einsum(
                "asto,ato->ast", np.broadcast_to(full, (*sizes[:3], sizes[3])), observation
            )
        return full[..., 0] if wide[2] else full[:, :, 0, 0]

    def factor(self, element: Element, tag: str, kinds: set[str]) -> tuple[list[str], np.ndarray]:
        """The variables of one table, the one that it is of last (none of a reward), and its numbers."""
        parents = [word for word in element.one("Parent").words() if word != "null"]
        own = element.one("Var").words()
        names = parents if tag == "ValueTable" else [*parents, *own]
        for name in names:
            if name not in self.variables or self.variables[name].kind not in kinds:
                element.refuse(f"{name!r} is no variable that can stand here")
        if len(own) != 1 or len(set(names)) != len(names):
            element.refuse("a table is of one variable, and names none twice")
        parameter = element.one("Parameter")
        table = np.zeros([len(self.variables[name].values) for name in names])
        kind = parameter.attributes.get("type", "TBL")
        if kind == "TBL":
            for entry in parameter.all("Entry"):
                self.entry(entry, tag, names, table)
        elif kind == "DD":
            for child in parameter.one("DAG").children:
                self.diagram(child, names, table, {}, parameter)
        else:
            parameter.refuse(f"type={kind!r} is unknown; legal are TBL, DD")
        return names, table

    def entry(self, entry: Element, tag: str, names: list[str], table: np.ndarray) -> None:
        instance, numbers = entry.one("Instance"), entry.one(tag)
        words = instance.words()
        if len(words) != len(names):
            instance.refuse(
                f"{len(names)} words are needed, for {' '.join(names)}, not {len(words)}"
            )
        place = tuple(
            slice(None) if word in ("*", "-") else self.variables[name].index(word, instance)
            for word, name in zip(words, names, strict=True)
        )
        free = [
            len(self.variables[name].values)
            for word, name in zip(words, names, strict=True)
            if word == "-"
        ]
        given = numbers.words()
        if given == ["uniform"] and tag == "ProbTable":
            values = np.full(free, 1 / free[-1]) if free else np.ones(())
        elif given == ["identity"] and tag == "ProbTable":
            if len(free) != 2 or free[0] != free[1]:
                numbers.refuse("'identity' needs two - of equally many values")
            values = np.eye(free[0])
        else:
            values = np.asarray([self.number(word, numbers) for word in given])
            if values.size != math.prod(free):
                numbers.refuse(f"{math.prod(free)} numbers are needed, not {values.size}")
        # A * takes an axis of its own, along which all is the same.
        shape = [
            n if word == "-" else 1
            for word, n in zip(words, table.shape, strict=True)
            if word in ("*", "-")
        ]
        table[place] = values.reshape(shape)

    def diagram(
        self,
        node: Element,
        names: list[str],
        table: np.ndarray,
        known: dict[str, int],
        top: Element,
    ) -> None:
        """What a decision diagram says where the variables `known` have these values."""
        place = tuple(known.get(name, slice(None)) for name in names)
        if node.tag == "Terminal":
            words = node.words()
            table[place] = self.number(words[0] if len(words) == 1 else node.text, node)
            return
        if node.tag == "SubDAG" and "idref" in node.attributes:
            found = [
                t
                for t in top.all("SubDAGTemplate")
                if t.attributes.get("id") == node.attributes["idref"]
            ]
            if len(found) != 1:
                node.refuse(f"there is no one <SubDAGTemplate> {node.attributes['idref']!r}")
            for child in found[0].children:
                self.diagram(child, names, table, known, dataclasses.replace(top, children=[]))
            return
        name = node.get("var")
        if node.tag not in ("Node", "SubDAG") or name not in names or name in known:
            node.refuse(f"<{node.tag}> of {name!r} cannot stand here")
        if node.tag == "Node":
            for edge in node.all("Edge"):
                at = self.variables[name].index(edge.get("val"), edge)
                for child in edge.children:
                    self.diagram(child, names, table, known | {name: at}, top)
        elif node.get("type") == "uniform":
            table[place] = 1 / len(self.variables[name].values)
        elif node.get("type") == "deterministic":
            self.point(
                table, names, known | {name: self.variables[name].index(node.get("val"), node)}
            )
        elif node.get("type") == "persistent":
            before = next((prev for prev, curr in self.curr_of.items() if curr == name), None)
            if before not in names:
                node.refuse(f"{name} cannot persist: its previous value is no parent")
            for i in range(len(self.variables[name].values)):
                if known.get(before, i) == i:
                    self.point(table, names, known | {before: i, name: i})
        else:
            node.refuse(
                f"type={node.get('type')!r} is unknown; legal are uniform, deterministic, persistent"
            )

    def point(self, table: np.ndarray, names: list[str], known: dict[str, int]) -> None:
        table[tuple(known.get(name, slice(None)) for name in names)] = 1

    def number(self, word: str, element: Element) -> float:
        try:
            value = float(word)
        except ValueError:
            element.refuse(f"expected a number, not {word!r}")
        if not abs(value) <= LARGEST:
            element.refuse(
                f"{word} is too large a number, or none; at most {LARGEST:g} in size can be planned with"
            )
        return value


def _spread(names: list[str], table: np.ndarray, axes: list[str]) -> np.ndarray:
    """A table over `names` with its axes in the order of `axes`, and 1 for the others."""
    order = sorted(range(len(names)), key=lambda i: axes.index(names[i]))
    return table.transpose(order).reshape(
        [table.shape[names.index(name)] if name in names else 1 for name in axes]
    )


def _names(variables: list[_Variable]) -> tuple[str, ...]:
    """The values of one variable, or those of the product, joined by commas."""
    if len(variables) == 1:
        return variables[0].values
    return tuple(",".join(words) for words in itertools.product(*[v.values for v in variables]))
