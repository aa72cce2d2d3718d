"""A user's mistake in one sentence: what the system says in a word or two, and Hydra in many lines."""

import dataclasses
import difflib
import importlib
import io
import itertools
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from jaxpar.types import UsageError, causes_of

from .. import module_of

CONF = pathlib.Path(__file__).resolve().parents[1] / "conf"
# What a flag that does not fit raises, by Hydra, by OmegaConf, and by a frozen dataclass that lacks it.
FLAG_ERRORS = (HydraException, OmegaConfBaseException, dataclasses.FrozenInstanceError)

HYDRA = ("--cfg", "--config-dir", "--config-name", "--config-path", "--experimental-rerun", "--hydra-help", "--info",
         "--multirun", "--package", "--resolve", "--run", "--shell-completion", "--version", "-c", "-cd", "-cn", "-cp",
         "-i", "-m", "-p", "-r", "-sc")  # fmt: skip
"""Hydra's own flags, which go on to it."""

RENAMED = {
    "generations": ("train.steps",),
    "steps": ("train.steps", "max_steps"),
    "chunk": ("train.chunk",),
    "save_every": ("train.save_every",),
    "seeds": ("num_seeds",),
    "protocol": ("preset",),
    "draw": ("prng",),
    "recall": ("last_action_reward",),
}
"""Flags by their old names, and what they are called now: the first of these that an experiment has."""

USUAL = {"lr": "learning_rate", "bs": "batch_size", "pop": "population"}
"""Short names of flags that other programs have, and the last word of ours."""


def conf_of(name: str) -> pathlib.Path:
    """Returns the folder that holds the configuration and the presets of an experiment, if it has any."""
    return next((path.parent for path in CONF.glob(f"*/{name}.yaml")), CONF / name)


def maker_of(saved: pathlib.Path) -> str:
    """Returns the experiment whose flags a saved configuration has, all of them, or ""."""
    try:
        given = set(yaml.safe_load(saved.read_text()))
    except (yaml.YAMLError, OSError, ValueError, TypeError, RecursionError):
        return ""
    for name in sorted(path.stem for path in CONF.glob("*/*.yaml")):
        known = importlib.import_module(f"..{module_of(name)}", __package__).Config
        if given == {flag.name for flag in dataclasses.fields(known)}:
            return name
    return ""


def presets_of(name: str, group: str) -> str:
    """Returns the names of an experiment's presets in a group, "" where it has no such group."""
    return ", ".join(sorted(path.stem for path in (conf_of(name) / group).glob("*.yaml")))


def with_presets(name: str, flags: list[str]) -> list[str]:
    """Returns the flags of an experiment with presets with `preset=tiny` for `model=tiny`, which people try first."""
    if not presets_of(name, "preset"):
        return flags
    return [re.sub(r"^model=(?=[A-Za-z]\w*(,[A-Za-z]\w*)*$)", "preset=", flag) for flag in flags]


def older_names(schema: type) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each part of a configuration whose fields had other names, and their paths by those."""
    for part in dataclasses.fields(schema):
        paths = getattr(part.type, "older_names", None)
        if paths:
            yield part.name, paths


def with_newer_names(schema: type, flags: list[str]) -> list[str]:
    """Returns flags with the names of today, and prints a note if one had an older name.

    `model.mixer=gla` is `model.mixer.kind=gla`: `model.mixer` is a group now, whose values are in
    braces.
    """
    paths = {
        f"{part}.{older}": f"{part}.{path}"
        for part, found in older_names(schema)
        for older, path in found.items()
    }
    renamed = []
    newer = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        prefix = "".join(itertools.takewhile(lambda character: character in "+~", name))
        path = paths.get(name[len(prefix) :])
        if equals and path and not value.startswith("{"):
            renamed.append(f"{name} is now {path}")
            flag = f"{prefix}{path}={value}"
        newer.append(flag)
    if renamed:
        names = ", ".join(dict.fromkeys(renamed))
        print(f"note: {names}; older names go with the first release.", file=sys.stderr)
    return newer


def with_newer_fields(schema: type, saved: Any) -> Any:
    """Returns a saved configuration with its fields where they are today."""
    if not isinstance(saved, dict):
        return saved
    newer = dict(saved)
    for part, paths in older_names(schema):
        fields = newer.get(part)
        if not isinstance(fields, dict):
            continue
        newer[part] = {}
        for name, value in fields.items():
            group, dot, leaf = paths.get(name, "").partition(".")
            if dot and not isinstance(value, dict):
                newer[part].setdefault(group, {})[leaf] = value
            elif isinstance(value, dict):
                newer[part][name] = newer[part].get(name, {}) | value
            else:
                newer[part][name] = value
    return newer


def with_quotes(flags: list[str]) -> list[str]:
    """Returns flags with quotes around values whose letters beyond ASCII Hydra's grammar does not know."""
    return [_quoted(flag) for flag in flags]


def _quoted(flag: str) -> str:
    name, _, value = flag.partition("=")
    if value.isascii() or _parsed(flag) is not None:
        return flag
    latin = re.sub(r"[^\x00-\x7f]", "x", value)
    parsed = _parsed(f"{name}={latin}")
    # Otherwise more than letters is wrong, and the sentence about it names what was typed.
    is_text = parsed is not None and not parsed.is_sweep_override() and parsed.value() == latin
    if not is_text:
        return flag
    return f"{name}='{value}'"


def _parsed(flag: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(flag)
    except HydraException:
        return None


def refuse_malformed(name: str, flags: list[str]) -> None:
    """Refuses flags such as =3, --seed=3 and preset=3, on which Hydra breaks or which it answers with its own flags."""
    for flag in flags:
        if (word := flag.partition("=")[0]).startswith("-") and word not in HYDRA:
            meant = flag.lstrip("-") + ("" if "=" in flag else "=value")
            raise UsageError(f"flag {flag!r} begins with -; flags have none: {meant}.")
        if re.match(r"[+~]*(=|$)", flag):
            raise UsageError(f"flag {flag!r} has no name; flags are name=value, such as seed=3.")
        group, _, preset = flag.partition("=")
        if not ("=" in flag and group.isidentifier() and (legal := presets_of(name, group))):
            continue
        if "/" in preset or re.fullmatch(r"null|true|false|[\[{-]?[\d.].*|", preset, re.IGNORECASE):
            raise UsageError(f"there is no preset {preset!r}; legal for {group}= are {legal}.")


def sentence_of(error: BaseException, schema: type | None = None) -> str:
    """Says in one sentence what the system says in a word or two, and Hydra in many lines."""
    if isinstance(error, BrokenPipeError):
        return "whatever read the output has ended; > file keeps all of it."
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        file = str(error.filename or _file_of(error) or "a file")
        hint = (
            "; hydra.run.dir= puts the run elsewhere"
            if pathlib.Path(file).parts[:1] == ("runs",)
            else ""
        )
        return f"{file} cannot be opened or written: {error.strerror or error}{hint}."
    for link in causes_of(error):
        if isinstance(link, UsageError):
            return _by_newer_names(str(link), schema)
    if isinstance(error, OverrideParseException):
        return (
            f"flag {error.override!r} cannot be read; flags are name=value, such as seed=3, and a value with brackets, "
            "commas or = in it is quoted, such as prompt='\"a, b\"'."
        )
    text, flags = str(error), dict(_flags(schema)) if schema else {}
    if wrong := re.match(r"Error merging override ([^=\s]*)=(.*)", text):
        whole = get_args(flags.get(wrong[1].rpartition(".")[0]))  # of rules, for rules.embed
        if kind := flags.get(wrong[1]) or (whole and whole[-1]):
            value = wrong[2].split(":")[0]
            listed = (
                f", such as {wrong[1]}=[{value}]"
                if get_origin(kind) is list and value[:1] not in "[{"
                else ""
            )
            return f"{wrong[1]}={value} is of the wrong type; {wrong[1]} takes {_type_name(kind)}{listed}."
    if unknown := re.search(
        r"Could not override '([^']*)'|Key '([^']*)' (?:is )?not in|assign to field '([^']*)'", text
    ):
        asked = unknown[1] or unknown[2] or unknown[3]
        if new := [name for name in RENAMED.get(asked, ()) if name in flags or name == "preset"]:
            return f"unknown flag {asked!r}, which is called {new[0]} now."
        meant = USUAL.get(asked, asked)
        near = [flag for flag in flags if flag.rpartition(".")[2] == meant][:3]
        near = near or difflib.get_close_matches(asked, list(flags), n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists them all."
        return f"unknown flag {asked!r}; {hint}"
    if missing := re.search(r"In '(.*)': Could not find '(.*)/(.*)'", text):
        name, group, preset = missing.groups()
        return f"there is no preset {preset!r}; legal for {group}= are {presets_of(name, group)}."
    if several := re.match(r"Ambiguous value for argument '(.*)'", text):
        return f"{several[1]} has several values; -m at the end makes a run of each."
    first = [str(link).strip().splitlines()[0] for link in causes_of(error) if str(link).strip()]
    return ": ".join(dict.fromkeys([first[0], first[-1]]))


def _by_newer_names(text: str, schema: type | None) -> str:
    """Returns a sentence with the flags of today, where it has those of a checkpoint's identity."""
    if schema is None:
        return text
    for part, paths in older_names(schema):
        for older, path in paths.items():
            text = re.sub(rf"\b{part}\.{older}(?==)", f"{part}.{path}", text)
    return text


def _file_of(error: OSError) -> str:
    """Names the file that was being written when the disk was full, of which the error itself says nothing."""
    place, found = error.__traceback__, ""
    while (
        place is not None
    ):  # from the outside in: the last file, or else path, that a function had at hand
        held = list(place.tb_frame.f_locals.values())
        names = [
            each.name
            for each in held
            if isinstance(each, io.IOBase) and isinstance(getattr(each, "name", 0), str)
        ]
        names += [str(each) for each in held if isinstance(each, pathlib.PurePath)]
        found, place = names[0] if names else found, place.tb_next
    return found


def _type_name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "no value but flags of its own, for " + ", ".join(
            field.name for field in dataclasses.fields(kind)
        )
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _flags(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each flag and its type."""
    for flag in dataclasses.fields(schema):
        yield prefix + flag.name, flag.type
        if dataclasses.is_dataclass(flag.type):
            yield from _flags(flag.type, f"{prefix}{flag.name}.")
