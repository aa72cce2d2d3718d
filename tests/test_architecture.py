"""The shape of the library: who imports whom, and how long things are. Each file is parsed once, by `files`."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PILLARS = {"lm", "pomdp", "neat", "rl"}

# Left to right: a part imports only from parts on its left, and from itself. Parts in one entry do not know each other.
ORDER = [
    {"types"},
    {"fields"},
    {"mesh", "processes"},
    {"lower"},
    {"io", "aot"},
    {"verify"},
    {"loop"},
    {"scan"},
    {"solve"},
    {"optim"},
    {"nn"},
    {"parallel"},
]
ALLOWED = {part: set().union(*ORDER[:place]) for place, entry in enumerate(ORDER) for part in entry}
ALLOWED["env"] = {"types", "fields"}
ALLOWED["rollout"] = {"types", "fields", "mesh", "env"}
ALLOWED |= {pillar: set().union(*ORDER) | {"env", "rollout"} for pillar in PILLARS}
ALLOWED["lm"] -= {"env", "rollout"}

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class File(NamedTuple):
    """What the tests ask of a source file; its tree, which is large, is forgotten."""

    name: str  # jaxpar/scan/affine.py
    num_lines: int
    imported: set[str]  # every module that it imports, relative ones resolved, with the names taken from it
    words: set[str]  # every variable and attribute, and every part of what it imports
    functions: list[tuple[str, int]]  # their names and numbers of lines
    undocumented: list[str]  # public names without a docstring; "the file" for itself

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


def undocumented(tree):
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    public = {"the file": tree} | {name: defined[name] for name in public_names(tree) if name in defined}
    return [name for name, node in public.items() if not ast.get_docstring(node)]


def read(path):
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    imported = set(imports_of(name, nodes))
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {part for module in imported for part in module.split(".")}
    functions = [(node.name, node.end_lineno - node.lineno + 1) for node in nodes if isinstance(node, FUNCTION)]
    return File(name, len(text.splitlines()), imported, words, functions, undocumented(tree))


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
    assert {"jaxpar", "envs", "experiments", "bench"} == {file.name.split("/")[0] for file in everything()}


def test_imports_point_one_way():
    def offences(file):
        parts = {name.split(".")[1] for name in file.imported if name.startswith("jaxpar.")}
        if file.part == "__init__":
            if wanted := sorted(name for name in file.imported if name.startswith("jaxpar")):
                yield f"importing jaxpar must import no part of it, but it imports {wanted}"
        elif file.part not in ALLOWED:
            yield f"jaxpar/{file.part} has no place in the order of imports; give it one here and in the design"
        elif wrong := sorted(parts - ALLOWED[file.part] - {file.part}):
            yield f"{file.name}: {file.part} must not import {wrong}"

    none_of(offence for file in library() for offence in offences(file))


def test_what_begins_with_an_underscore_belongs_to_its_room():
    def offences(file):
        own = "jaxpar." + file.part if file.name.startswith("jaxpar/") else None
        for name in sorted(file.imported):
            top, room, *inside = (*name.split("."), "", "")
            private = [part for part in inside if part.startswith("_") and not part.startswith("__")]
            if top == "jaxpar" and f"{top}.{room}" != own and private:
                yield f"{file.name} must not import {name}: {private[0]} belongs to jaxpar.{room} alone"

    none_of(offence for file in everything() for offence in offences(file))


def test_the_library_knows_no_configuration_framework_nor_its_users():
    strangers = {"hydra", "omegaconf", "experiments", "envs", "notebooks", "tests"}
    found = [(file, sorted({name.split(".")[0] for name in file.imported} & strangers)) for file in library()]
    none_of(f"{file.name} must not import {tops}" for file, tops in found if tops)


def test_environments_import_the_protocol_only():
    legal = ("jaxpar.env", "jaxpar.fields", "jaxpar.types", "envs")
    names = [(file, name) for file in files("envs") for name in sorted(file.imported)]
    ours = [(file, name) for file, name in names if name.split(".")[0] in ("jaxpar", "experiments", "envs")]
    none_of(f"{file.name} imports {name}" for file, name in ours if not name.startswith(legal) and name != "jaxpar")


def test_one_file_names_axis_types_and_none_pmap():
    none_of(f"{file.name} names pmap" for file in everything() if "pmap" in file.words)
    named = {file.name for file in everything() if "AxisType" in file.words}
    none_of(f"{name} names AxisType" for name in sorted(named - {"jaxpar/mesh.py"}))


def test_files_and_functions_are_short():
    none_of(f"{file.name} has {file.num_lines} lines" for file in everything() if file.num_lines > 450)
    functions = [(file, *function) for file in everything() for function in file.functions]
    none_of(f"{file.name}: {name} has {length} lines" for file, name, length in functions if length > 70)


def test_the_language_model_stays_small():
    # Tokens, embedding, head, loss, data and files of others; layers, attention and optimizers are not its own.
    assert sum(file.num_lines for file in library() if file.part == "lm") < 2600


def test_public_names_are_documented():
    none_of(f"{file.name}: {name} has no docstring" for file in library() for name in file.undocumented)
