"""docs/pomdp.md: snippets print what it shows, and its flags exist."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import envs
from experiments import pomdp
from jaxpar.pomdp import from_environment, save_policy, save_pomdp, solve_exact

PAGE = (Path(__file__).parents[2] / "docs" / "pomdp.md").read_text()


def test_snippets_print_what_they_show():
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2) and len(
        blocks
    ) == 8
    names = {}
    for (_, snippet), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(snippet, "snippet", "exec"), names)
        assert out.getvalue() == shown, snippet


def test_flags_exist(tmp_path, monkeypatch):
    model = from_environment(*envs.make("Tiger"))
    save_pomdp(model, tmp_path / "tiger.POMDP")
    for name in ("policy.alpha", "tiger.policy"):
        save_policy(solve_exact(model, tol=1.0), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[2]
    found = [
        flags
        for path in (
            root / "docs" / "pomdp.md",
            root / "README.md",
            root / "experiments" / "pomdp.py",
        )
        for flags in re.findall(r"python -m experiments\.pomdp\b([^\n`]*)", path.read_text())
    ]
    assert len(found) >= 6
    for flags in found:
        pomdp.make_setting(pomdp.compose(*shlex.split(flags.split("#")[0])))
