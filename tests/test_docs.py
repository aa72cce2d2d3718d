"""What the documents promise: snippets run, flags exist, links lead somewhere, numbers are those of the tests."""

import contextlib
import functools
import importlib
import io
import re
import shlex
from pathlib import Path

import jax
import pytest

import jaxpar
from experiments import lm, module_of
from experiments.app import runner
from experiments.lm import compose, make_trainer
from jaxpar.aot.placement import Broadcast, Partial, Split, conversion
from jaxpar.experimental.product_chain import MATMUL_PLACEMENTS
from jaxpar.fields import leaf_fields
from jaxpar.lm import LMConfig
from jaxpar.lm.text.data import DataConfig
from jaxpar.mesh import RULES, MeshSpec, make_mesh, rules_from, use_mesh

ROOT = Path(__file__).parents[1]
OTHERS = (
    "compare digits env estimate generate life moving_digits neat own pipeline "
    "pipelined_speculation pomdp rl rnn step_speculation verify"
).split()
WRITTEN = {
    path for path in (ROOT / "docs").glob("**/*.md") if "_build" not in path.parts
}  # which `make docs` copies
PAGES = sorted([*ROOT.glob("*.md"), *WRITTEN])
PUBLIC = [*PAGES, ROOT / "CITATION.cff", *sorted((ROOT / "notebooks").glob("*.py"))]
FLAG_PAGES = [
    *PUBLIC,
    ROOT / "experiments" / "lm.py",
    *sorted(ROOT.glob("experiments/conf/lm/preset/*.yaml")),
]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page):
    """The flags of each `python -m experiments.lm ...` and `make run args="..."` on a page."""
    text = page.read_text()
    found = re.findall(r"python -m experiments\.lm\b([^\n`)]*)", text)
    found += re.findall(r'make run[^\n`]*args="([^"]*)"', text)
    return [shlex.split(flags.split("#")[0]) for flags in found]


@functools.cache
def composed(module, *flags):
    """What a command of these flags is; pages share many."""
    return module.compose(*flags)


def run(source, prelude=""):
    """Runs a snippet; returns what it printed and its names."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(prelude + source, "snippet", "exec"), names)
    return out.getvalue(), names


# ---------------------------------------------------------------- snippets


def test_readme_snippet_learns_the_same_on_both_meshes():
    (snippet,) = blocks(ROOT / "README.md", "python")
    other = re.search(
        r"`(data=2, [^`]*)` prints the same number", (ROOT / "README.md").read_text()
    )[1]
    losses = []
    for sizes in ("data=-1", other):
        out, names = run(snippet.replace("data=-1", sizes))
        losses.append(float(out))
        assert len(names["result"].state.params["layers"]["wq"].sharding.device_set) == 8
    assert (
        losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] < 4.0
    )  # an untrained model has 5.5


def test_quickstart_snippet_writes_its_sentence():
    (snippet,) = blocks(ROOT / "docs" / "quickstart.md", "python")
    out, _ = run(snippet)
    assert "all work " in out and float(out.split()[0]) < 1.0


def test_verify_of_ones_own_model_holds():
    snippet = blocks(ROOT / "docs" / "sharding.md", "python")[-1]
    out, names = run(snippet)
    assert out.count("holds") == len(names["rows"]) == 8 and len(jax.devices()) == 8
    assert all(0 < row.gradient for row in names["rows"])
    kinds = {str(row.layout): set(row.kinds) for row in names["rows"]}
    assert ("all-gather", "fsdp") in kinds["fsdp4.tensor2 zero3"] and (
        "all-gather",
        "inner",
    ) in kinds["fsdp8.inner4 hybrid"]


def test_a_model_of_ones_own_prints_its_table_and_learns():
    page = ROOT / "docs" / "own_model.md"
    first, second = blocks(page, "python")
    out, names = run(first)
    assert out == blocks(page, "text")[0] and len(first.strip().splitlines()) <= 14
    assert (
        names["result"].metrics["train/loss"] < 0.005
    )  # the mean square of a product of four is 0.012
    state = jax.eval_shape(
        run(second, first.split("result =")[0])[1]["model"].init, jax.random.key(0)
    )
    assert {"params"} == {"params"} | set(state.collections)


def test_placements_snippets_print_what_they_show():
    page = ROOT / "docs" / "placements.md"
    shown = blocks(page, "text")
    for snippet, text in zip(blocks(page, "python"), shown, strict=True):
        assert run(snippet)[0] == text


def test_checkpoints_snippet_agrees():
    (snippet,) = blocks(ROOT / "docs" / "checkpoints.md", "python")
    _, names = run(snippet)
    assert names["step"] == 7 and names["stall_s"] > 0


def test_decoding_snippet_prints_what_it_says():
    (snippet,) = blocks(ROOT / "docs" / "decoding.md", "python")
    assert run(snippet)[0] == re.search(r"print\(.*  # (.*)$", snippet, re.MULTILINE)[1] + "\n"


def test_entries_of_a_line_on_the_decoding_page_are_those_of_the_command():
    written = [
        name
        for row in table(ROOT / "docs" / "decoding.md", "entry")
        for name in re.findall(r"`(\w+)`", row[0])
    ]
    source = (ROOT / "experiments/app/lm/prompt_batches.py").read_text().split("def _line(")[1]
    assert sorted(written) == sorted(re.findall(r'^        "(\w+)": ', source, re.MULTILINE))


def test_flags_of_the_checkpoints_page_exist():
    for flag, _ in table(ROOT / "docs" / "checkpoints.md", "flag"):
        compose(flag.strip("`"))


# ---------------------------------------------------------------- flags


def test_pages_show_commands():
    assert sum(len(commands(page)) for page in FLAG_PAGES) > 20


@pytest.mark.parametrize("page", FLAG_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page):
    for flags in commands(page):
        sweep = "-m" in flags
        flags = [flag.split(",")[0] if sweep else flag for flag in flags if flag != "-m"]
        composed(lm, *[flag.replace("...", "1") for flag in flags])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_of_other_experiments_exist(page):
    for name, flags in re.findall(
        rf"python -m experiments\.(?:papers\.)?({'|'.join(OTHERS)})\b([^\n`)]*)", page.read_text()
    ):
        given = [
            flag
            for flag in shlex.split(flags.split("#")[0])
            if not re.search(r"\.\.\.$|^[A-Z]+$|=[A-Z]$", flag)
        ]
        composed(importlib.import_module(f"experiments.{module_of(name)}"), *given)


def test_an_unknown_flag_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\npython -m experiments.lm train.stepz=3\n```\n")
    with pytest.raises(ValueError, match="train.stepz"):
        test_flags_exist(page)


def test_collectives_script_takes_its_flags():
    for command in re.findall(
        r"^python docs/collectives\.py (.*)$", (ROOT / "docs/sharding.md").read_text(), re.M
    ):
        compose(*shlex.split(command))


# ---------------------------------------------------------------- times

COMMAND = re.compile(r"python (?:-m experiments|bench/|docs/)|^(?:jaxpar|make)\b", re.MULTILINE)
COUNT = r"(?:[\d.]+|an?|half an?|two|three|four|five|six|seven|eight|nine|ten|some|a few)"
STATED = re.compile(
    rf"\b{COUNT}(?: and a half)? (?:s|seconds?|minutes?|hours?)\b|\bcores\b|\baccelerators?\b"
    r"|\b(?:an?|one|each|\d+|two|of) (?:\w+ )?(?:GPU|TPU|H100|H200|v5e|card)s?\b"
)
"""Words that tell how long a command takes, or on what it is to run."""
TIMED = sorted(WRITTEN - {ROOT / "docs" / "benchmarks.md"})


def untimed(text):
    """The bash blocks of a page that run a command of ours, and neither whose comments, nor the paragraphs before and
    after, say how long that takes or on what hardware."""
    found = []
    for block in re.finditer(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if not COMMAND.search(block[1]):
            continue
        before, after = (
            text[: block.start()].rstrip().split("\n\n")[-1],
            text[block.end() :].lstrip().split("\n\n")[0],
        )
        near = [part for part in (before, after) if not part.startswith(("#", "```"))]
        comments = re.findall(r"(?: |^)#(.*)$", block[1], re.MULTILINE)
        if not any(STATED.search(" ".join(part.split())) for part in near + comments):
            found.append(block[1])
    return found


def test_a_command_without_a_time_is_found():
    shown = "Words.\n\n```bash\npython -m experiments.lm seconds=3{}\n```\n\nMore.{}\n\n## After a minute\n"
    assert untimed(shown.format("", "")) and untimed(shown.format("  # the second of two runs", ""))
    for comment, words in [
        ("  # 24 s", ""),
        ("  # about a minute", ""),
        ("", " Two CPU cores."),
        ("", " On one H100."),
    ]:
        assert untimed(shown.format(comment, words)) == []


@pytest.mark.parametrize("page", TIMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_say_how_long_they_take_or_on_what(page):
    """docs/benchmarks.md states the hardware of its sections."""
    assert untimed(page.read_text()) == []


# ---------------------------------------------------------------- links


def anchors(page):
    """What the renderers make of headings: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@each_page
def test_links_resolve(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            assert re.match(r"https://arxiv\.org/abs/\d{4}\.\d{5}$", target), target
            continue
        path, _, anchor = target.partition("#")
        goal = page if not path else (page.parent / path)
        assert goal.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(goal), f"{page.name} links to {target}"


def test_pictures_and_pages_of_the_index_exist():
    index = (ROOT / "docs" / "index.md").read_text()
    for picture in re.findall(r"```\{image\} (\S+)", index):
        assert (ROOT / "docs" / picture).exists()
    for entry in re.findall(r"^[\w/]+$", index, re.MULTILINE):
        assert any((ROOT / "docs" / f"{entry}{ending}").exists() for ending in (".md", ".py")), (
            entry
        )


# ---------------------------------------------------------------- what must not be said


@pytest.mark.parametrize("page", PUBLIC, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_host_of_a_registry_and_no_path_of_a_machine(page):
    text = page.read_text()
    assert not re.search(
        r"pypi\.|pythonhosted|anaconda|index-url|huggingface\.co|(?<!\.)github|github\.",
        text,
        re.IGNORECASE,
    )
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users|usr|mnt|opt)/", text)


# ---------------------------------------------------------------- numbers and tables


def table(page, first_column):
    """Rows of the Markdown table whose head begins so."""
    lines = page.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_collectives_of_the_sharding_page_are_those_of_the_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "distributed"))
    import test_layouts

    written = {}
    for sizes, *cells in table(ROOT / "docs" / "sharding.md", "data, fsdp, tensor"):
        entry = written.setdefault(tuple(map(int, sizes.split(","))), {})
        for kind, cell in zip(("all-gather", "all-reduce"), cells, strict=True):
            for count, over in re.findall(r"(\d+) over `([\w+]+)`", cell):
                entry[kind, tuple(over.split("+"))] = int(count)
    assert written == test_layouts.DECLARED


def test_rules_of_the_sharding_page_are_those_of_the_table():
    written = {}
    for names, axes, _ in table(ROOT / "docs" / "sharding.md", "logical axis"):
        written |= {
            name: tuple(re.findall(r"`(\w+)`", axes)) for name in re.findall(r"`(\w+)`", names)
        }
    assert written == RULES


@pytest.mark.parametrize(
    "flags, sentence",
    [row[:2] for row in table(ROOT / "docs" / "sharding.md", "flags on 8 devices")],
)
def test_errors_of_the_sharding_page_are_said(flags, sentence):
    config = compose(*flags.strip("`").split())
    spec = config.mesh if config.mesh != MeshSpec(data=-1) else MeshSpec(data=2, fsdp=2, tensor=2)
    with (
        pytest.raises(ValueError) as error,
        use_mesh(make_mesh(spec), rules_from(config.rules, config.layout)),
    ):
        make_trainer(config)
    assert str(error.value) == sentence


def test_costs_of_the_placements_page_are_those_of_the_search():
    words = {"Split": Split, "Broadcast": Broadcast, "Partial": Partial}
    rows = table(ROOT / "docs" / "placements.md", "from")
    for source, target, kind, cost in rows:
        pair = ({"data": eval(word.strip("`"), words)} for word in (source, target))
        steps = [step for step in conversion(*pair, (8, 8), "float32", {"data": 8}) if step.bytes]
        assert [step.kind for step in steps] == [kind] * (kind != "none"), (source, target)
        factor = {"0": 0, "(n-1)/n T/n": 7 / 64, "(n-1)/n T": 7 / 8, "2(n-1)/n T": 14 / 8}[cost]
        assert sum(step.bytes for step in steps) == factor * 8 * 8 * 4, (source, target)
    assert len(rows) == 13


def test_products_of_the_placements_page_are_those_of_the_planner():
    words = {"Split": Split, "Broadcast": Broadcast, "Partial": Partial}
    rows = table(ROOT / "docs" / "placements.md", "x")
    assert {
        (a, b): y for a, b, y in ([eval(cell.strip("`"), words) for cell in row] for row in rows)
    } == MATMUL_PLACEMENTS


def test_notation_names_fields_that_exist():
    known = {path for path, _, _ in leaf_fields(LMConfig())}
    known |= {f"data.{name}" for name in DataConfig.__dataclass_fields__}
    for row in table(ROOT / "docs" / "notation.md", "letter"):
        assert set(re.findall(r"`([\w.]+)`", row[2])) - {"max_new_tokens"} <= known
        assert set(re.findall(r"`(\w+)`", row[3])) <= RULES.keys()


def test_every_preset_is_named_in_the_quick_start():
    text = (ROOT / "docs" / "quickstart.md").read_text()
    assert all(path.stem in text for path in ROOT.glob("experiments/conf/lm/preset/*.yaml"))


def test_the_run_folder_shown_is_the_one_of_the_default_run():
    shown = {name for page in PAGES for name in re.findall(r"tiny-[0-9a-f]{8}", page.read_text())}
    assert shown == {runner.folder_name(compose())}


def test_the_version_is_the_same_everywhere():
    assert f"version: {jaxpar.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert jaxpar.__version__ in (ROOT / "CHANGELOG.md").read_text()
