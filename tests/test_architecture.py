"""The structure of the library: which module imports which, and what they are called."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PILLARS = {"lm", "pomdp", "neat", "rl", "life", "own"}

# Left to right: a part imports only from parts on its left, and from itself. Parts in one entry do not know each other.
ORDER = [
    {"types"},
    {"fields", "_encodings"},
    {"mesh", "processes", "stage"},
    {"transfers"},
    {"lower"},
    {"io"},
    {"loop"},
    {"scan"},
    {"solve"},
    {"optim"},
    {"nn"},
    {"pipeline"},
    {"aot"},
    {"decode"},
]
ALLOWED = {part: set().union(*ORDER[:place]) for place, entry in enumerate(ORDER) for part in entry}
ALLOWED["env"] = {"types", "fields"}
ALLOWED["rollout"] = {"types", "fields", "mesh", "env"}
ALLOWED |= {pillar: set().union(*ORDER) | {"env", "rollout"} for pillar in PILLARS}
for pillar in ("lm", "life", "own"):
    ALLOWED[pillar] -= {"env", "rollout"}
# Systems of one paper may use all of the library, of which nothing uses them.
ALLOWED["experimental"] = set().union(*ORDER) | PILLARS | {"env", "rollout"}
ALLOWED["verify"] = {"aot"}
# In a checkout these are other names of folders beside the library, which wheels have inside of it.
ALIASES = {"jaxpar/envs.py": "envs", "jaxpar/commands.py": "experiments"}
ALLOWED |= {"_checkout": set(), "envs": {"_checkout"}, "commands": {"_checkout"}}
ALLOWED |= {"_renamed": set(), "_older_fields": {"types", "fields"}}
EVERYBODY = {"_renamed", "_older_fields"}  # any package may have lost a name or an argument

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

# Names that several rooms define, and why none is mistaken for the other. Everything else has a name of its own.
SHARED_NAMES = {
    "Tree": "nodes and their parents: what a planner searches, and what one pass of decoding verifies",
    "Model": "what is trained and verified, and what a planner simulates: the word of either field",
    "Outcome": "what came of a computation: of a solver's methods, and of steps that are compared",
    "Program": "what devices run: the tasks of a pipeline, and a step of training that is verified",
    "Problem": "a task to evolve networks for, and a recurrence to solve for: the word of either field",
    "Stage": "a part of a chain: of layers on devices, and of products of matrices",
    "Where": "positions of something: of keys in a sequence, and of a pipeline's devices",
    "matmul_flops": "operations of products: of a program, and of its compiled text",
    "merge_shares": "the sum of what devices have: of attention, and of a head's losses",
    "generate": "the continuation of prompts: with any model, and with a language model of this library",
    "apply": "flax's word for a model's outputs from its parameters",
    "init": "what makes parameters or a state from a key",
}
# Files of one name in several rooms: each does for its room what those of the others do for theirs.
SHARED_FILES = {
    "__init__": "Python's own",
    "check": "what users write, checked: environments, models",
    "config": "configurations",
    "dispatch": "which way a scan is computed, and which expert computes a token: the word of either field",
    "exchange": "other people's files",
    "kernels": "kernels of the room's own",
    "model": "what a language model computes, and what a planner and decoding ask of a model",
    "network": "networks and their parameters",
    "picture": "pictures",
    "policies": "what acts on observations, and on beliefs",
    "program": "what is run: the statements of a recurrence, and a step that is verified",
    "run": "a room's work from end to end: a pipeline's tasks, and the verification of layouts",
    "train": "trainers",
    "transfers": "what crosses devices: what a language model declares, and what a program has",
    "triton": "kernels of Triton: how they are launched, and one",
}
MOST_ANYS = 40


class File(NamedTuple):
    """What the tests ask of a source file; its tree, which is large, is forgotten."""

    name: str  # jaxpar/scan/affine.py
    num_lines: int
    imported: set[
        str
    ]  # every module that it imports, relative ones resolved, with the names taken from it
    words: set[str]  # every variable and attribute, and every part of what it imports
    defined: list[str]  # classes and functions without a leading underscore
    exported: list[str]  # what `__all__` holds
    anys: list[
        tuple[int, str, bool]
    ]  # of each `Any` in a signature its line, the function, whether a comment is there

    @property
    def part(self):
        """What stands second in its path: the room of the library that it belongs to."""
        return self.name.removesuffix(".py").split("/")[1]


def imports_of(name, nodes):
    package = name.split("/")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def public_names(tree):
    """The names in `__all__`, or none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def defined(tree):
    """The classes and functions without a leading underscore."""
    nodes = [node for node in tree.body if isinstance(node, FUNCTION | ast.ClassDef)]
    return {node.name: node for node in nodes if not node.name.startswith("_")}


def annotations(function):
    a = function.args
    every = (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg)
    return [each for each in (function.returns, *(arg.annotation for arg in every if arg)) if each]


def anys(nodes, lines):
    for function in (node for node in nodes if isinstance(node, FUNCTION)):
        for annotation in annotations(function):
            for name in ast.walk(annotation):
                if isinstance(name, ast.Name) and name.id == "Any":
                    yield name.lineno, function.name, "#" in lines[name.lineno - 1]


def read(path):
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    imported = set(imports_of(name, nodes))
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {part for module in imported for part in module.split(".")}
    lines = text.splitlines()
    return File(
        name=name,
        num_lines=len(lines),
        imported=imported,
        words=words,
        defined=list(defined(tree)),
        exported=public_names(tree),
        anys=list(anys(nodes, lines)),
    )


@functools.cache
def files(*tops):
    """The source files below folders of the repository."""
    if len(tops) > 1:
        return [file for top in tops for file in files(top)]
    return [read(path) for path in sorted((ROOT / tops[0]).rglob("*.py"))]


def library():
    return files("jaxpar")


def everything():
    return files("jaxpar", "envs", "experiments", "bench")


def none_of(offences):
    """Fails with every offence that it is given, one a line."""
    offences = list(offences)
    assert not offences, "\n" + "\n".join(offences)


def test_there_is_a_library():
    assert {"types", "mesh", "lm", "io"} <= {file.part for file in library()}
    assert {"jaxpar", "envs", "experiments", "bench"} == {
        file.name.split("/")[0] for file in everything()
    }


def test_imports_point_one_way():
    def offences(file):
        parts = {name.split(".")[1] for name in file.imported if name.startswith("jaxpar.")}
        if file.part == "__init__":
            # Its ten names are read by type checkers alone: tests/test_public_names.py sees that
            # `import jaxpar` loads nothing.
            return
        elif file.part not in ALLOWED:
            yield f"jaxpar/{file.part} has no place in the order of imports; give it one here and in the design"
        elif wrong := sorted(parts - ALLOWED[file.part] - {file.part} - EVERYBODY):
            yield f"{file.name}: {file.part} must not import {wrong}"

    none_of(offence for file in library() for offence in offences(file))


def test_what_begins_with_an_underscore_belongs_to_its_room():
    def offences(file):
        own = "jaxpar." + file.part if file.name.startswith("jaxpar/") else None
        for name in sorted(file.imported):
            top, room, *inside = (*name.split("."), "", "")
            private = [
                part for part in inside if part.startswith("_") and not part.startswith("__")
            ]
            if top == "jaxpar" and f"{top}.{room}" != own and private:
                yield f"{file.name} must not import {name}: {private[0]} belongs to jaxpar.{room} alone"

    none_of(offence for file in everything() for offence in offences(file))


def test_the_library_knows_no_configuration_framework_nor_its_users():
    strangers = {"hydra", "omegaconf", "experiments", "envs", "notebooks", "tests"}
    found = [
        (file, {name.split(".")[0] for name in file.imported} & strangers) for file in library()
    ]
    found = [(file, sorted(tops - {ALIASES.get(file.name)})) for file, tops in found]
    none_of(f"{file.name} must not import {tops}" for file, tops in found if tops)


def test_two_short_files_are_other_names_of_folders():
    """And what else they would be, should they grow, belongs into the folders."""
    said = {file.name: file for file in library() if file.name in ALIASES}
    assert said.keys() == ALIASES.keys()
    for name, file in said.items():
        assert (
            file.num_lines <= 10
            and f'alias(__name__, "{ALIASES[name]}")' in (ROOT / name).read_text()
        )
    names = {"jaxpar." + file.part for file in said.values()} | {"jaxpar._checkout"}
    takers = [(file, taken) for file in library() for taken in file.imported if taken in names]
    none_of(
        f"{file.name} must not import {taken}"
        for file, taken in takers
        if file.name not in (*ALIASES, "jaxpar/__init__.py")
    )
    outside = [(file, taken) for file in everything() for taken in file.imported]
    assert [file.name for file, taken in outside if taken == "jaxpar._checkout.alias"] == sorted(
        ALIASES
    )


def test_environments_import_the_protocol_only():
    legal = ("jaxpar.env", "jaxpar.fields", "jaxpar.types", "envs")
    names = [(file, name) for file in files("envs") for name in sorted(file.imported)]
    ours = [
        (file, name)
        for file, name in names
        if name.split(".")[0] in ("jaxpar", "experiments", "envs")
    ]
    none_of(
        f"{file.name} imports {name}"
        for file, name in ours
        if not name.startswith(legal) and name != "jaxpar"
    )


def test_commands_and_environments_import_what_wheels_have():
    def offences(file):
        tops = {name.split(".")[0] for name in file.imported}
        for wrong in sorted(tops & {"envs", "experiments"}):
            absolute = rf"^ *(?:import|from) {wrong}\b"
            if re.search(absolute, (ROOT / file.name).read_text(), re.MULTILINE):
                yield f"{file.name} must import {wrong} as wheels have it, relatively or from jaxpar"

    none_of(offence for file in files("experiments", "envs") for offence in offences(file))


def test_commands_of_papers_are_leaves_and_helpers_know_no_command():
    commands = {f"experiments.{path.stem}" for path in (ROOT / "experiments").glob("[a-z]*.py")}

    def offences(file):
        is_paper = file.name.startswith("experiments/papers/")
        takes_experimental = is_paper or file.name.startswith(("jaxpar/experimental/", "bench/"))
        for name in sorted(file.imported):
            if name.startswith("experiments.papers") and not is_paper:
                yield f"{file.name} imports a paper's command: {name}"
            if name in commands and file.name.startswith("experiments/app/"):
                yield f"{file.name} imports a command: {name}"
            if name.startswith("jaxpar.experimental") and not takes_experimental:
                yield f"{file.name} imports {name}, which only commands of papers may"

    none_of(offence for file in everything() for offence in offences(file))


# Checks of values read them by `jaxpar.types.concrete_values`: an array that a jitted closure
# captures is no tracer, and what JAX computes from it is one. These files do something else.
NAMES_TRACERS = {
    "jaxpar/types.py": "has that function",
    "jaxpar/env/adapt.py": "hands parameters on, and computes spaces outside of the trace",
    "jaxpar/neat/_scalars.py": "rejects traced constants of a program",
    "jaxpar/solve/_emit.py": "rejects traced constants of a program",
    "jaxpar/solve/auto.py": "finds whether a trace is open, by an array that it makes",
    "jaxpar/solve/parallel.py": "reads results of a solve, which an open trace has traced",
}


def test_few_files_name_tracers():
    named = [file.name for file in everything() if "Tracer" in file.words]
    none_of(
        f"{name} names Tracer; read values by jaxpar.types.concrete_values"
        for name in sorted(set(named) - NAMES_TRACERS.keys())
    )


def test_one_file_names_axis_types_and_none_pmap():
    none_of(f"{file.name} names pmap" for file in everything() if "pmap" in file.words)
    named = {file.name for file in everything() if "AxisType" in file.words}
    none_of(f"{name} names AxisType" for name in sorted(named - {"jaxpar/mesh.py"}))


def shared(names):
    """name -> the files of several rooms that have it, each room's first."""
    places = defaultdict(dict)
    for file in library():
        for name in names(file):
            places[name].setdefault(file.part, file.name)
    return {name: sorted(rooms.values()) for name, rooms in places.items() if len(rooms) > 1}


def test_rooms_share_no_name_without_a_reason():
    found = shared(lambda file: file.defined)
    none_of(
        f"{name} is defined in {' and '.join(found[name])}"
        for name in sorted(found.keys() - SHARED_NAMES)
    )
    none_of(
        f"{name} has a reason and is not shared" for name in sorted(SHARED_NAMES.keys() - found)
    )


def test_rooms_share_no_file_name_without_a_reason():
    found = shared(
        lambda file: [re.fullmatch(r"(__init__|_*(\w+))", Path(file.name).stem)[0].lstrip("_")]
    )
    found = {{"init__": "__init__"}.get(name, name): places for name, places in found.items()}
    none_of(
        f"{' and '.join(found[name])} are called {name}"
        for name in sorted(found.keys() - SHARED_FILES)
    )
    none_of(
        f"{name} has a reason and is not shared" for name in sorted(SHARED_FILES.keys() - found)
    )


def published():
    """What the documentation shows: all that a module exports, or single names of it."""
    pages = "\n".join(
        page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    )
    whole, single = set(), set()
    for module, members in re.findall(r"automodule:: (jaxpar[\w.]*)\n   :members:(.*)", pages):
        whole |= set() if members.strip() else {module}
        single |= {f"{module}.{name.strip()}" for name in members.split(",")}
    for module, names in re.findall(r"from (jaxpar[\w.]*) import ([\w, ]+)", pages):
        single |= {f"{module}.{name.strip()}" for name in names.split(",")}
    return whole, single | set(re.findall(r"`(jaxpar\.[\w.]+)`", pages))


def test_modules_export_what_others_take():
    whole, single = published()
    takers = defaultdict(list)
    for file in everything() + files("notebooks"):
        for name in file.imported:
            takers[name].append(file)

    def offences(file):
        module, room = file.name.removesuffix(".py").replace("/", "."), f"jaxpar/{file.part}"

        def outside(name):
            users = takers[f"{module}.{name}"] + [
                user for user in takers[module] if name in user.words
            ]
            return [
                user.name
                for user in users
                if not user.name.startswith(room) or user.name.endswith("__init__.py")
            ]

        for name in file.exported:
            if not (outside(name) or module in whole or f"{module}.{name}" in single):
                yield f"{file.name} exports {name}, which nobody outside of its room takes"
        for name in sorted(set(file.defined) - set(file.exported)):
            if users := [user for user in outside(name) if f"{module}.{name}" in takers]:
                yield f"{file.name} does not export {name}, which {users[0]} takes"

    modules = [file for file in library() if not file.name.endswith("__init__.py")]
    none_of(offence for file in modules for offence in offences(file))


def test_signatures_rarely_say_any():
    found = [(file.name, *each) for file in library() for each in file.anys]
    none_of(f"{name}:{line}: {function} takes or returns Any without a reason beside it"
            for name, line, function, has_reason in found if not has_reason)  # fmt: skip
    assert len(found) < MOST_ANYS


# Optional abilities are asked for by name here alone; each with its reason beside it.
ASKED_BY_NAME = {
    "jaxpar/env/capabilities.py",
    "jaxpar/rollout/policies.py",
    "jaxpar/env/facade.py",  # a named tuple
    *(
        f"jaxpar/env/{name}.py" for name in ("adapt", "_suites", "_convert")
    ),  # environments of other suites
}


def test_abilities_are_resolved_in_one_place():
    def offences(path):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            by_string = name == "getattr" and isinstance(node.args[1], ast.Constant)
            if by_string or name in ("hasattr", "signature"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name} asks by name; take jaxpar.env.capabilities"

    rooms = ("env", "rollout", "rl", "neat", "pomdp")
    paths = [path for room in rooms for path in (ROOT / "jaxpar" / room).rglob("*.py")]
    none_of(
        row
        for path in paths
        if str(path.relative_to(ROOT)) not in ASKED_BY_NAME
        for row in offences(path)
    )
