"""docs/puzzles.md: snippets print what it shows."""

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "puzzles.md").read_text()


def test_snippets_print_what_they_show():
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2) and len(
        blocks
    ) >= 6
    names = {}
    for (_, snippet), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(snippet, "snippet", "exec"), names)
        assert out.getvalue() == shown, snippet
