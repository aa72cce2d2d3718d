"""docs/environments.md: snippets print what it shows, tables name every environment and every part."""

import contextlib
import dataclasses
import io
import itertools
import re
from pathlib import Path

import envs
from jaxpar.env import Capabilities, Environment

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def expanded(name):
    """`A-{1,2}` as A-1 and A-2."""
    parts = re.split(r"\{(.*?)\}", name)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return {"".join(chosen) for chosen in itertools.product(*choices)}


def test_snippets_print_what_they_show():
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2) and len(
        blocks
    ) >= 16
    names = {}
    for (_, snippet), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(snippet, "snippet", "exec"), names)
        assert out.getvalue() == shown, snippet


def test_every_environment_is_named_once():
    rows = PAGE.split("| name | what | source |")[1].split("\n\n")[0].splitlines()[2:]
    named = [
        name
        for row in rows
        for cell in re.findall(r"`(.*?)`", row.split("|")[1])
        for name in expanded(cell)
    ]
    assert sorted(named) == sorted(envs.names())


def test_the_contract_names_every_part():
    table = PAGE.split("## The contract")[1].split("\n\n")[1]
    required = {name for name in vars(Environment) if not name.startswith("_")}
    optional = {field.name for field in dataclasses.fields(Capabilities)}
    assert {part for part in required | optional if not re.search(rf"`{part}\b", table)} == set()
    assert len(required) == 9 and {"truncated", "action_mask", "tabular", "num_agents"} <= optional
