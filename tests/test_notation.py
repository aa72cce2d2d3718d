"""docs/notation.md: every name that it tells is in the file that it tells, and keys stand where it says."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "notation.md").read_text()


def rows(head, below=""):
    """Cells of the first table below a line whose head begins so, but rows that only name a group."""
    lines = PAGE[PAGE.index(below) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return [row for row in table if any(row[1:])]
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return [row for row in table if any(row[1:])]


@functools.cache
def defined(path):
    """What a file of the tree defines: functions, classes, arguments, fields, variables; and words in quotes."""
    found = set()
    body = ast.parse((ROOT / path).read_text()).body
    exports = [
        node
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    for node in (node for top in body if top not in exports for node in ast.walk(top)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


TERMS = rows("the field's term")
KEPT = [[why, name, where] for name, where, why in rows("name")]


@pytest.mark.parametrize("row", TERMS + KEPT, ids=lambda row: row[1].replace("`", ""))
def test_a_name_is_where_the_page_says(row):
    why, cell, where = row
    names, files = re.findall(r"`(\w+)`", cell), re.findall(r"`([\w/]+\.py)`", where)
    assert (
        why
        and names
        and files
        and cell.count("`") == 2 * len(names)
        and where.count("`") == 2 * len(files)
    )
    there = {file: defined(file) & set(names) for file in files}
    assert set(names) <= set().union(*there.values()) and all(there.values())


def test_the_terms_of_seven_libraries_are_told():
    assert len(TERMS) > 70 and len(KEPT) > 10
    heads = " ".join(re.findall(r"^\| \*\*.*", PAGE, re.MULTILINE))
    peers = ("gymnax", "PureJaxRL", "mctx", "optimistix", "flax", "neat-python", "torch")
    assert [peer for peer in peers if peer not in heads] == []


def test_arrays_of_rollouts_are_fields():
    tree = [ast.parse(path.read_text()) for path in (ROOT / "jaxpar" / "rollout").glob("*.py")]
    classes = {
        node.name: node for module in tree for node in module.body if isinstance(node, ast.ClassDef)
    }
    told = []
    for _, code, *_ in rows("symbol", "## Arrays of rollouts"):
        owner = re.match(r"`(\w+)\.", code)[1]
        fields = {node.target.id for node in classes[owner].body if isinstance(node, ast.AnnAssign)}
        told += re.findall(r"`(?:\w+\.)?(\w+)`", code)
        assert set(re.findall(r"`(?:\w+\.)?(\w+)`", code)) <= fields
    assert len(told) > 8


def public_functions():
    """Each function of the library that others may call: its file, name and arguments with those that have defaults."""
    for path in sorted((ROOT / "jaxpar").rglob("*.py")):
        tree = ast.parse(path.read_text())
        owners = [
            tree,
            *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"),
        ]
        for node in [
            node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)
        ]:
            if not node.name.startswith("_") and not path.stem.startswith("_"):
                yield path.relative_to(ROOT), node


def test_keys_are_first_or_the_page_says_where_and_why():
    table = {
        name for functions, _, _ in rows("function") for name in re.findall(r"`(\w+)`", functions)
    }
    offences, used = [], set()
    for path, function in public_functions():
        given = [
            arg
            for arg in function.args.posonlyargs + function.args.args
            if arg.arg not in ("self", "cls")
        ]
        given += function.args.kwonlyargs
        late = [
            arg.arg
            for arg in given[1:]
            if arg.annotation and re.search(r"\bPRNGKey\b|\bKey\[", ast.unparse(arg.annotation))
        ]
        if late and not re.search(
            r"\bPRNGKey\b|\bKey\[", ast.unparse(given[0].annotation or ast.Constant(""))
        ):
            used.add(function.name)
            if function.name not in table:
                offences.append(f"{path}: {function.name}({', '.join(arg.arg for arg in given)})")
    assert offences == []
    assert table - used == {"first", "layer"}, (
        "these two are functions within one, the others are there"
    )
