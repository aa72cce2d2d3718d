"""The import closure of a file: every file of the repository that it imports, directly or not.

Imports are read from the text, those inside of functions included, so that nothing is executed.
Where a name is only known when the program runs, all that it may be is taken: the closure is too
large rather than too small.

    python tests/closure.py tests/nn/test_cells.py               # files that a test depends on
    python tests/closure.py --tests-of jaxpar/solve/iterate.py   # tests that depend on a file
"""

import argparse
import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxpar", "envs", "experiments", "bench", "notebooks", "tests")
# In a checkout these modules are other names of folders.
ALIASES = {"jaxpar.envs": "envs", "jaxpar.commands": "experiments"}

# These import a command by a name that they are given: a test that gives it has it as a string.
NAMED_BY_CALLERS = (
    "tests/experiments/conftest.py",
    "experiments/app/mistakes.py",
    "experiments/__main__.py",
)


class Imports:
    """The graph of imports of one checkout.

    Attributes:
      root: The checkout.
      files: Every Python file below the packages, relative to the root, in order of their names.
    """

    def __init__(self, root=ROOT):
        self.root = Path(root)
        found = [path for top in PACKAGES for path in sorted((self.root / top).rglob("*.py"))]
        self.files = [path.relative_to(self.root).as_posix() for path in found]
        self._by_module = {module_of(file): file for file in self.files}
        self._by_stem = defaultdict(list)
        self._by_name = defaultdict(list)
        for file in self.files:
            name = file.rsplit("/", maxsplit=1)[-1]
            self._by_name[name].append(file)
            if file.startswith("tests/"):
                self._by_stem[name.removesuffix(".py")].append(file)

    @functools.cached_property
    def direct(self):
        """The files that each file imports itself."""
        return {file: self._imports_of(file) for file in self.files}

    @functools.cached_property
    def importers(self):
        """The files that import each file themselves."""
        found = {file: set() for file in self.files}
        for importer, imported in self.direct.items():
            for file in imported:
                found[file].add(importer)
        return found

    def closure(self, file):
        """Returns what `file` depends on, itself included, and the number of imports between."""
        return distances_from(file, self.direct)

    def tests_of(self, file):
        """Returns the files of tests that depend on `file`, the nearest first."""
        distances = distances_from(file, self.importers)
        tests = [name for name in distances if re.search(r"(^|/)test_\w+\.py$", name)]
        return sorted(tests, key=lambda test: (distances[test], not is_namesake(test, file), test))

    def _imports_of(self, file):
        tree = ast.parse((self.root / file).read_text())
        package = file.split("/")[:-1]
        documentation = docstrings(tree)
        names = set()
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names.update(imported_names(node, package))
            elif is_text(node) and node not in documentation:
                names.update(self._modules_in(node.value, file))
                found.update(self._files_named(node.value))
            elif isinstance(node, ast.Call) and is_dynamic_import(node):
                found.update(self._all_that_may_be_imported(node, file))

        for name in names:
            found.update(self._files_of(name, file))

        if file.startswith("tests/"):
            found.update(self._conftests_of(file))
        return found - {file}

    def _modules_in(self, text, file):
        """Yields modules that a string names, also as the name of a command."""
        dotted = r"(?:jaxpar|envs|experiments|bench)(?:\.\w+)+"
        if re.fullmatch(dotted, text):
            yield text
        if file.startswith("tests/"):
            yield from re.findall(rf"(?:import|from|-m) ({dotted})", text)
        names_command = file.startswith("tests/experiments/") and file not in NAMED_BY_CALLERS
        if names_command and re.fullmatch(r"\w+", text):
            yield f"experiments.{text}"
            yield f"experiments.papers.{text}"

    def _files_named(self, text):
        """Returns files that a string names, as `bench/decode.py` or `decode.py`."""
        name = re.search(r"([\w/]+\.py)$", text)
        if not name:
            return []
        same = self._by_name[name[1].rsplit("/", maxsplit=1)[-1]]
        return [file for file in same if file.endswith(name[1])]

    def _all_that_may_be_imported(self, call, file):
        """Returns the files of the package that a computed name begins with, or of the caller's."""
        argument = call.args[0]
        prefix = ""
        if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
            prefix = argument.values[0].value
        if file in NAMED_BY_CALLERS:
            return []

        folder = file.rsplit("/", maxsplit=1)[0]
        if re.match(r"\w+\.", prefix):
            folder = prefix.rsplit(".", maxsplit=1)[0].replace(".", "/")
        return [other for other in self.files if other.startswith(f"{folder}/")]

    def _files_of(self, name, importer):
        """Yields the files that importing `name` executes: its module and its packages."""
        for alias, folder in ALIASES.items():
            if name == alias or name.startswith(f"{alias}."):
                yield self._by_module[alias]
                name = folder + name.removeprefix(alias)

        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            module = ".".join(parts[:length])
            if module in self._by_module:
                yield self._by_module[module]

        # Tests import helpers by their stem, from their own folder or from the top.
        if importer.startswith("tests/"):
            yield from self._by_stem.get(parts[0], [])

    def _conftests_of(self, file):
        folder = Path(file).parent
        for parent in (folder, *folder.parents):
            conftest = (parent / "conftest.py").as_posix()
            if (self.root / conftest).is_file():
                yield conftest


def distances_from(start, edges):
    """Returns the number of edges from `start` to each node that can be reached."""
    distances = {start: 0}
    todo = [start]
    for current in todo:
        for following in sorted(edges[current]):
            if following not in distances:
                distances[following] = distances[current] + 1
                todo.append(following)
    return distances


def module_of(file):
    """Returns the module of a file: `jaxpar.nn` for `jaxpar/nn/__init__.py`."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(node, package):
    """Returns the modules that an import names, and the names that it takes from one."""
    taken = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return taken

    parts = []
    if node.level:
        parts += package[: len(package) - node.level + 1]
    if node.module:
        parts.append(node.module)
    module = ".".join(parts)
    return [module, *(f"{module}.{name}" for name in taken)]


def is_text(node):
    """Returns true for a string in the code."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def docstrings(tree):
    """Returns the nodes of the docstrings in a module: their examples import nothing."""
    scopes = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, scopes) and node.body]
    return {node.value for node in first if isinstance(node, ast.Expr)}


def is_namesake(test, file):
    """Returns true for `test_cells.py` and `cells.py`: a test that is named after a file."""
    return Path(test).stem == f"test_{Path(file).stem.lstrip('_')}"


def is_dynamic_import(call):
    """Returns true for a call that imports a module by a computed name."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name not in ("import_module", "run_module") or not call.args:
        return False
    return not isinstance(call.args[0], ast.Constant)


def described_parser(description):
    """Returns a parser whose help shows `description` as it is."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=layout)


def main():
    parser = described_parser(__doc__)
    parser.add_argument("files", nargs="+", help="relative to the root of the checkout")
    parser.add_argument("--tests-of", action="store_true", help="print tests that depend on them")
    options = parser.parse_intermixed_args()

    imports = Imports()
    find = imports.closure
    if options.tests_of:
        find = imports.tests_of
    for file in options.files:
        print("\n".join(find(file)))


if __name__ == "__main__":
    main()
