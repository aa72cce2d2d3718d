"""Pages for strangers: what a how-to page runs prints what it shows, and names lead to what people import."""

import ast
import contextlib
import io
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOWTO = sorted((ROOT / "docs" / "howto").glob("*.md"))
# What this page shows needs a real model: tests/lm/test_smollm2.py types it, in the slow suite.
HOWTO.remove(ROOT / "docs" / "howto" / "real_model.md")
BESIDE = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in BESIDE]


def run(page):
    """Runs a page's snippets one by one, sharing names; what they print is the block behind them."""
    names = {}
    found = re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page.read_text(), re.M | re.S
    )
    for snippet, shown in found:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(snippet, page.name, "exec"), names)
        assert out.getvalue() == shown, snippet
    return len(found)


@pytest.mark.parametrize(
    "page", [*HOWTO, ROOT / "docs" / "install.md", *SLOW], ids=lambda page: page.stem
)
def test_snippets_print_what_they_show(page):
    assert run(page) >= 1


@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.stem)
def test_a_page_of_ones_own_has_its_parts(page):
    headings = re.findall(r"^## (.*)$", page.read_text(), re.M)
    parts = [
        "The smallest complete one",
        "What the contract demands",
        "Show that it equals its loop",
    ]
    assert [heading for heading in headings if heading in parts] == parts
    assert headings[-1] == "Mistakes and their sentences"


@pytest.mark.parametrize("page", BESIDE, ids=lambda page: page.stem)
def test_a_page_beside_a_peer_says_what_the_peer_has(page):
    headings = re.findall(r"^## (.*)$", page.read_text(), re.M)
    assert headings[:3] == ["Side by side", "The same, run", "What differs, and why"]
    assert headings[3].endswith("that this lacks") and "benchmarks.md" in page.read_text()


def test_the_address_of_the_install_page_is_the_project_s():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert f'git+{urls["urls"]["Repository"]}"' in page
    extras = {
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.M)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert urls["optional-dependencies"].keys() <= extras


def test_commands_of_the_choice_exist():
    page = (ROOT / "docs" / "choose.md").read_text()
    named = set(re.findall(r"`jaxpar ([a-z_]+)", page))
    assert len(named) > 10 and all((ROOT / "experiments" / f"{name}.py").exists() for name in named)
    for module in re.findall(r"`(jaxpar\.[\w.]+)`", page):
        path = ROOT / module.replace(".", "/")
        parent = path.parent / "__init__.py"
        assert (
            path.is_dir() or path.with_suffix(".py").exists() or path.name in parent.read_text()
        ), module


def test_names_on_the_pages_are_those_that_people_import():
    """As docs/names.py finds them, without Sphinx."""
    source = ast.parse((ROOT / "docs" / "names.py").read_text())
    wanted = [
        node
        for node in source.body
        if getattr(node, "name", None) in ("public_names", "as_imported")
    ]
    names = {
        "ast": ast,
        "re": re,
        "pathlib": __import__("pathlib"),
        "functools": __import__("functools"),
        "ROOT": ROOT,
    }
    exec(compile(ast.Module(wanted, []), "names.py", "exec"), names)
    as_imported = names["as_imported"]
    assert as_imported("jaxpar.scan.affine.affine_scan") == "jaxpar.scan.affine_scan"
    assert as_imported("jaxpar.nn.attention.mixer.Attention") == "jaxpar.nn.attention.Attention"
    assert as_imported("jaxpar.solve.newton.Newton.update") == "jaxpar.solve.Newton.update"
    assert as_imported("jaxpar.scan.dispatch.IMPL_RULES") == "jaxpar.scan.dispatch.IMPL_RULES"
