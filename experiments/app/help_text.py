"""`--help`, written for people: what a command does, examples, presets, and every flag with its line.

All of it is read where it stands already: the command's file begins with what it does and its examples, a preset's file
with its command, time and result, a configuration's docstring has a line for each field, and the field says what is
legal.
"""

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from jaxpar.fields import Each

from .. import module_of
from .mistakes import conf_of

ASKED = ("--help", "-h")


def text_of(name: str, schema: type, config: Any, shared: type) -> str:
    """Returns the help of an experiment.

    Args:
      name: The experiment.
      schema: Its configuration's dataclass, in whose file it is described.
      config: What the flags beside `--help` give: these are the values shown.
      shared: The part of the schema that all experiments have, told last.
    """
    about = inspect.cleandoc(sys.modules[schema.__module__].__doc__ or "")
    first, _, rest = about.partition("\n")
    examples = [line.strip() for line in rest.splitlines() if line.startswith("    python -m ")]
    words = "\n".join(
        line for line in rest.splitlines() if not line.startswith("    python -m ")
    ).strip()
    module = module_of(name)
    in_checkout = f"python -m experiments.{module} [flag=value ...]"
    installed = f"jaxpar {module.replace('.', ' ')} [flag=value ...]"
    parts = [
        first,
        f"{in_checkout}, or, installed, {installed}",
        "\n".join(["examples:", *(f"  {example}" for example in examples)]),
        *_wrapped_paragraphs(words),
        *_presets(name),
        "\n\n".join(
            [
                "flags, with the values that they have if nothing is said:",
                *_groups(schema, config, shared),
            ]
        ),
        "Flags beside --help change what it shows"
        + (
            ", such as preset=; -m at the end runs each value of flag=a,b."
            if conf_of(name).exists()
            else "."
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def descriptions(kind: type) -> dict[str, str]:
    """Returns what the docstrings of a dataclass, and of those that it extends, say of each field."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        said = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("\nAttributes:\n")[2]
        section = re.split(r"\n(?=\S)", said)[0]
        indent = re.match(r" *", section)[0]
        for entry in re.split(rf"(?m)^{indent}(?=\w[\w, ]*: )", section)[1:]:
            names, _, line = entry.partition(": ")
            line = " ".join(line.split())
            line = (
                line[:1].upper() + line[1:] if re.match(r"\w+[ ,:;]", line[1:]) else line
            )  # and "n, in parallel" as it is
            found |= {name.strip(): line for name in names.split(",")}
    return found


def flags(
    kind: type, config: Any, prefix: str = "", whole: Any = None
) -> Iterator[tuple[str, Any, str, str]]:
    """Yields each flag: its name, value, what is legal and what is said of it; groups after single flags.

    Where the metadata of a dictionary's field have `of`, that gives, called with the whole configuration, the dataclass
    whose fields its entries change.
    """
    said, groups, whole = descriptions(kind), [], whole or config
    for declared in dataclasses.fields(kind):
        name, value = prefix + declared.name, getattr(config, declared.name, declared.default)
        if dataclasses.is_dataclass(declared.type):
            groups.append((name, declared.type, value))
        elif described := declared.metadata.get("of"):
            changed = described(whole)
            groups.append(
                (
                    name,
                    changed if isinstance(changed, type) else type(changed),
                    _Changed(changed, value),
                )
            )
        elif isinstance(value, dict) and value:
            yield from (
                (f"{name}.{key}", value[key], _noun(type(value[key])), said.get(declared.name, ""))
                for key in value
            )
        else:
            yield name, value, legal_text(declared), said.get(declared.name, "")
    for name, of, value in groups:
        if isinstance(value, _Changed):
            more = {
                key: value.changes[key] for key in value.changes.keys() - descriptions(of).keys()
            }
            yield from ((f"{name}.{key}", more[key], "", said.get(name, "")) for key in more)
        yield from flags(of, value, f"{name}.", whole)


class _Changed:
    """The fields of a configuration, or of a class of them, with some changed."""

    def __init__(self, usual: Any, changes: dict[str, Any]):
        self.usual, self.changes = usual, changes

    def __getattr__(self, name: str) -> Any:
        return self.changes[name] if name in self.changes else getattr(self.usual, name)


def legal_text(declared: dataclasses.Field) -> str:
    """Says which values a flag may have: its range, or else its type."""
    legal, noun = declared.metadata.get("legal"), _noun(declared.type)
    if isinstance(legal, Each):
        return f"a list, each {legal.legal}"
    if get_origin(declared.type) is dict:
        return f"as {declared.name}.NAME=value"
    if legal is None:
        return noun
    return (
        f"{noun}, {legal}"
        if str(legal) and noun in ("whole number", "number")
        else str(legal) or noun
    )


def _noun(kind: Any) -> str:
    nouns = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    found = [nouns[name] for name in re.findall(r"\w+", text) if name in nouns]
    if get_origin(kind) in (list, tuple):
        return f"a list, each {found[0]}" if found else "a list"
    return found[0] if found else ""


def _groups(schema: type, config: Any, shared: type) -> Iterator[str]:
    common = {declared.name for declared in dataclasses.fields(shared)}
    rows = list(flags(schema, config))
    own = [row for row in rows if row[0].split(".")[0] not in common]
    ours = [row for row in rows if row[0].split(".")[0] in common]
    yield "\n".join(_flag_text(*row) for row in own)
    yield "\n".join(["of every experiment:", *(_flag_text(*row) for row in ours)])


def _flag_text(name: str, value: Any, legal: str, said: str) -> str:
    if isinstance(value, bool) or value is None:
        value = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, list | tuple):
        value = f"[{','.join(map(str, value))}]".replace("\n", "\\n")
    return (
        f"  {name}={value}"
        + (f"   ({legal})" if legal else "")
        + (f"\n{_wrapped(said, '      ')}" if said else "")
    )


def _wrapped(text: str, indent: str = "") -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _wrapped_paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\n+", text):
        yield paragraph if paragraph.startswith(" ") else _wrapped(" ".join(paragraph.split()))


def _presets(name: str) -> Iterator[str]:
    """Yields each group of presets with what their files begin with: command, hardware, time, result."""
    for group in sorted(path for path in conf_of(name).glob("*") if path.is_dir()):
        rows = []
        for path in sorted(group.glob("*.yaml")):
            lines = [
                line[1:].strip()
                for line in _opening(path.read_text())
                if not line.startswith("# @")
            ]
            rows.append(f"  {group.name}={path.stem}")
            words = []
            for line in lines:
                is_command = line.startswith(("python -m ", "make "))
                command, _, line = line.partition(": ") if is_command else ("", "", line)
                rows += [f"      {command}"] if command else []
                words += [line] if line else []
            rows += [_wrapped(" ".join(words), "      ")] if words else []
        yield "\n".join(
            [
                "presets, values for many flags:" if group.name == "preset" else f"{group.name}:",
                *rows,
            ]
        )


def _opening(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line
