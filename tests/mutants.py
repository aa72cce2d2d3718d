"""Small wrong changes of the library; some test should find each of them.

Mutants are drawn from every operator, comparison, constant, keyword argument and term of the files
named. Each is applied in a copy of the checkout, where the tests that depend on its file run until
the first fails. What no test notices is printed at the end.

    python tests/mutants.py jaxpar/solve jaxpar/scan/affine.py --draw 20 --jobs 2
    python tests/mutants.py jaxpar --draw 200 --lines lines.json --report before.json
    python tests/mutants.py jaxpar/solve --draw 20 --list          # prints them, runs nothing

The seed and each mutant's own text alone decide which are drawn, so that a change of one file
leaves the mutants of all others. `--lines`, which `tests/covered.py` writes, leaves out tests that
never reach the line.
"""

import ast
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import py_compile
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from closure import Imports, described_parser
from covered import failed_tests, import_path, pinned_pool

ROOT = Path(__file__).parents[1]

BINARY = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
      file: Relative to the root of the checkout.
      line: Where the changed text begins, from 1.
      function: The function or class around it, empty at the top of the module.
      kind: operator, comparison, constant, keyword or term.
      start: Offset of the first changed character.
      end: Offset behind the last one.
      text: The new text.
      name: Unique, and the same wherever the file moves its lines to.
    """

    file: str
    line: int
    function: str
    kind: str
    start: int
    end: int
    text: str
    name: str

    def applied(self, source):
        """Returns the source with this change."""
        return source[: self.start] + self.text + source[self.end :]

    def described(self, source):
        """Returns a line for people."""
        before = " ".join(source[self.start : self.end].split())
        after = " ".join(self.text.split())
        return f"{self.file}:{self.line} {self.kind}: {before!r} -> {after!r}"


class Drawer(ast.NodeVisitor):
    """Collects every mutant of one file."""

    def __init__(self, file, source):
        self.file = file
        self.source = source
        self.mutants = []
        self._scopes = []
        self._counts = {}
        self._offsets = [0]
        for line in source.splitlines(keepends=True):
            self._offsets.append(self._offsets[-1] + len(line))
        self._lines = source.splitlines(keepends=True)
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node):
        """Enters a scope; annotations are not changed, since nothing reads them."""
        self._scopes.append(node.name)
        defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default]
        for child in (*node.decorator_list, *defaults, *node.body):
            self.visit(child)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node):
        """Leaves texts alone."""

    def visit_Raise(self, node):
        """Leaves the texts of errors alone."""

    def visit_Assign(self, node):
        if getattr(node.targets[0], "id", "") != "__all__":
            self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in BINARY:
            old, new = BINARY[type(node.op)]
            self._replace_operator("operator", node, node.left, node.right, old, new)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            self._add("term", node, node, self._parenthesised(node.left))
        if isinstance(node.op, ast.Add | ast.Mult):
            self._add("term", node, node, self._parenthesised(node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for index in range(len(node.values)):
            others = [self._parenthesised(x) for i, x in enumerate(node.values) if i != index]
            word = {ast.And: " and ", ast.Or: " or "}[type(node.op)]
            self._add("term", node, node, f"({word.join(others)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        is_constant = isinstance(node.operand, ast.Constant)
        if isinstance(node.op, ast.Not) or (isinstance(node.op, ast.USub) and not is_constant):
            self._add("operator", node, node, self._parenthesised(node.operand))
        self.generic_visit(node)

    def visit_Compare(self, node):
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if type(operator) in COMPARISONS:
                old, new = COMPARISONS[type(operator)]
                self._replace_operator("comparison", node, left, right, old, new)
            left = right
        self.generic_visit(node)

    def visit_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, node, str(not value))
        elif isinstance(value, int):
            self._add("constant", node, node, str(value + 1))
        elif isinstance(value, float):
            other = 2 * value or 1.0
            self._add("constant", node, node, repr(other))

    def visit_Call(self, node):
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._drop_keyword(keyword)
        self.generic_visit(node)

    def _drop_keyword(self, keyword):
        start, end = self._span(keyword)
        behind = re.match(r"\s*,", self.source[end:])
        if behind:
            end += behind.end()
        else:
            before = re.search(r",\s*$", self.source[:start])
            if before:
                start = before.start()
        self._add_span("keyword", keyword, start, end, "")

    def _replace_operator(self, kind, node, left, right, old, new):
        """Replaces the operator between two operands."""
        start = self._span(left)[1]
        end = self._span(right)[0]
        between = self.source[start:end]
        pattern = re.escape(old).replace(r"\ ", r"\s+")
        without_comments = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), between)
        found = re.search(pattern, without_comments)
        if found:
            self._add_span(kind, node, start + found.start(), start + found.end(), new)

    def _parenthesised(self, node):
        start, end = self._span(node)
        return f"({self.source[start:end]})"

    def _add(self, kind, node, replaced, text):
        self._add_span(kind, node, *self._span(replaced), text)

    def _add_span(self, kind, node, start, end, text):
        scope = ".".join(self._scopes)
        what = f"{scope} {kind} {self.source[start:end]} {text}"
        count = self._counts[what] = self._counts.get(what, 0) + 1
        self.mutants.append(
            Mutant(
                file=self.file,
                line=node.lineno,
                function=scope,
                kind=kind,
                start=start,
                end=end,
                text=text,
                name=f"{self.file} {what} {count}",
            )
        )

    def _span(self, node):
        """Returns the offsets of a node in characters; ast counts the bytes of its line."""
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _offset(self, line, column):
        before = self._lines[line - 1].encode()[:column].decode()
        return self._offsets[line - 1] + len(before)


def draw(root, files, number, seed):
    """Returns the `number` mutants of `files` with the smallest hashes of seed and text."""

    def rank(mutant):
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()

    sources = {file: (root / file).read_text() for file in files}
    found = []
    for file, source in sources.items():
        found += Drawer(file, source).mutants

    drawn = []
    for mutant in sorted(found, key=rank):
        if len(drawn) == number:
            break
        if changes(mutant, sources[mutant.file]):
            drawn.append(mutant)
    return drawn


def changes(mutant, source):
    """Returns true where a mutant is a program, and another one than its source."""
    try:
        changed = ast.parse(mutant.applied(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def tests_of(mutant, imports, lines):
    """Returns the tests that may notice a mutant, nearest first.

    Args:
      mutant: A mutant.
      imports: The graph of imports.
      lines: What `tests/covered.py` wrote, or None: `{file: {line: tests}}`.
    """
    tests = imports.tests_of(mutant.file)
    if lines is None:
        return tests
    executed = set(lines["lines"].get(mutant.file, {}).get(str(mutant.line), ()))
    reached = [test for test in tests if test in executed]
    far = sorted(executed - set(tests))
    seconds = lines.get("seconds", {})
    # A cheap test that is near comes before a slow one.
    near = sorted(reached, key=lambda test: seconds.get(test, 0.0) > 30)
    return near + far


@dataclasses.dataclass
class Outcome:
    """The fate of a mutant: killed, lived, unfinished (time ran out) or unreached by any test."""

    mutant: Mutant
    status: str
    by: str
    seconds: float


class Clean:
    """Tests that fail without any mutant, found where one of them seems to have noticed one."""

    def __init__(self, failed=()):
        self.failed = set(failed)
        self._passed = set()

    def fails(self, test, copy, limit_s):
        """Returns true where a test fails in a copy that nothing has changed."""
        if test not in self.failed | self._passed:
            code, _ = run_for(pytest_command([test]), copy, limit_s)
            if code in (1, 2):  # 2: it cannot be collected
                self.failed.add(test)
            else:
                self._passed.add(test)
        return test in self.failed


def pytest_command(tests, deselected=()):
    """Returns the command that runs tests, in their order, until the first fails.

    Args:
      tests: Files.
      deselected: Tests of these files that are left out.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    for test in sorted(deselected):
        command += ["--deselect", test]
    return command + list(tests)


def run_one(mutant, copy, tests, limit_s, clean):
    """Runs the tests of a mutant in a copy of the checkout, which is restored afterwards."""
    began = time.monotonic()
    if not tests:
        return Outcome(mutant=mutant, status="unreached", by="", seconds=0.0)

    path = copy / mutant.file
    source = path.read_text()
    while True:
        # A file that cannot be collected without the mutant either cannot be deselected.
        whole = [test for test in tests if test not in clean.failed]
        if not whole:
            seconds = time.monotonic() - began
            return Outcome(mutant=mutant, status="unreached", by="", seconds=seconds)
        path.write_text(mutant.applied(source))
        try:
            code, printed = run_for(pytest_command(whole, clean.failed), copy, limit_s)
        finally:
            path.write_text(source)
        failed = failed_tests(printed)
        # What fails in any case has noticed nothing: the others are run without it.
        if not (code and failed and clean.fails(failed[0], copy, limit_s)):
            break

    seconds = time.monotonic() - began
    if code is None:
        return Outcome(mutant=mutant, status="unfinished", by="", seconds=seconds)
    if code in (0, 5):  # 5: every test of these files is for another machine
        return Outcome(mutant=mutant, status="lived", by="", seconds=seconds)
    by = next(iter(failed), f"exit code {code}")
    return Outcome(mutant=mutant, status="killed", by=by, seconds=seconds)


def run_for(command, folder, limit_s):
    """Runs a command for at most `limit_s` seconds; returns its code, or None, and its output."""
    env = os.environ | {
        "PYTHONPATH": import_path(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    }
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        streams = {"stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **streams)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def copy_of(root, folder):
    """Copies the files that git knows; Python checks compiled modules there by their source's hash.

    By time and size, as it does otherwise, a mutant of the same second and length is not noticed.
    """
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True).stdout.split("\n")
    if not any(names):  # not a checkout of git's: a plain copy of one
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    for name in names:
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    for path in folder.rglob("*.py"):
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        py_compile.compile(str(path), invalidation_mode=mode, quiet=2)


def run_all(mutants, options):
    """Yields the outcome of each mutant, as they end."""
    imports = Imports(options.root)
    lines = None
    clean = Clean()
    if options.lines:
        lines = json.loads(options.lines.read_text())
        clean = Clean(lines["failed"])
    with tempfile.TemporaryDirectory() as temporary:
        copies = queue.SimpleQueue()
        first = Path(temporary) / "0"
        copy_of(options.root, first)
        copies.put(first)
        for index in range(1, options.jobs):
            copies.put(Path(shutil.copytree(first, Path(temporary) / str(index))))

        def run(mutant):
            copy = copies.get()
            try:
                tests = tests_of(mutant, imports, lines)
                return run_one(mutant, copy, tests, options.limit_s, clean)
            finally:
                copies.put(copy)

        with pinned_pool(options.jobs) as pool:
            running = [pool.submit(run, mutant) for mutant in mutants]
            for future in concurrent.futures.as_completed(running):
                yield future.result()


def files_below(root, names):
    """Returns the Python files that are named, or lie in folders that are."""
    found = []
    for name in names:
        path = root / name
        paths = [path]
        if path.is_dir():
            paths = sorted(path.rglob("*.py"))
        if not paths or not paths[0].exists():
            raise SystemExit(f"error: {name}: no such Python file or folder below {root}.")
        found += [path.relative_to(root).as_posix() for path in paths]
    return found


def main():
    parser = described_parser(__doc__)
    parser.add_argument("files", nargs="+", help="files and folders, relative to the root")
    parser.add_argument("--draw", type=int, default=20, help="number of mutants (20)")
    parser.add_argument("--seed", type=int, default=0, help="which of them (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds a mutant (600)")
    parser.add_argument("--lines", type=Path, help="lines that each test executes (covered.py)")
    parser.add_argument("--report", type=Path, help="a JSON file for the outcomes")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_intermixed_args()
    options.root = options.root.resolve()

    files = files_below(options.root, options.files)
    sources = {file: (options.root / file).read_text() for file in files}
    mutants = draw(options.root, sources, options.draw, options.seed)
    if options.list:
        for mutant in mutants:
            print(mutant.described(sources[mutant.file]))
        return

    outcomes = []
    for outcome in run_all(mutants, options):
        outcomes.append(outcome)
        described = outcome.mutant.described(sources[outcome.mutant.file])
        row = f"{len(outcomes):4} {outcome.seconds:6.0f} s {outcome.status:10}"
        print(row, described, outcome.by, flush=True)
        if options.report:
            rows = [dataclasses.asdict(each) for each in outcomes]
            options.report.write_text(json.dumps(rows, indent=1))

    statuses = [outcome.status for outcome in outcomes]
    print(f"\n{statuses.count('killed')} of {len(outcomes)} mutants killed. Not killed:")
    for outcome in sorted(outcomes, key=lambda each: each.mutant.name):
        if outcome.status != "killed":
            print(f"  {outcome.status:10} {outcome.mutant.described(sources[outcome.mutant.file])}")


if __name__ == "__main__":
    main()
