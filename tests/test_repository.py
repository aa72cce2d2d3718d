"""What a stranger meets besides code: CONTRIBUTING, the public forge's files and the citation say what is so."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from test_architecture import ALLOWED, ORDER, PILLARS

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
FORGE = sorted(path for path in (ROOT / ".github").rglob("*") if path.is_file())
FORMS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in FORGE
    if path.parent.name == "ISSUE_TEMPLATE"
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_order_of_imports_is_that_of_the_test():
    line, rooms = re.search(r"^(types -> .*)\n(env -> .*)$", CONTRIBUTING, re.MULTILINE).groups()
    assert [set(re.findall(r"\w+", entry)) for entry in line.split(" -> ")] == ORDER
    assert rooms == "env -> rollout" and ALLOWED["env"] == {"types", "fields"}
    assert ALLOWED["rollout"] == ALLOWED["env"] | {"env", "mesh"}
    above = set().union(*ORDER) | {"env", "rollout"}
    assert {pillar: above - ALLOWED[pillar] for pillar in PILLARS if ALLOWED[pillar] != above} == {
        "lm": {"env", "rollout"},
        "life": {"env", "rollout"},
        "own": {"env", "rollout"},
    }


def where_it_goes():
    """Rows of the table: what, files, tests, pages."""
    table = CONTRIBUTING.split("## Where does it go")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line[:2] == "| "
    ]
    assert rows[0] == ["I want to add", "file", "test", "docs"]
    return rows[1:]


@pytest.mark.parametrize("row", where_it_goes(), ids=lambda row: row[0])
def test_what_the_table_of_places_names_is_there(row):
    what, files, tests, pages = row
    named = re.findall(r"`([\w./-]+)`", files + tests)
    named += [f"docs/{page}" for page in re.findall(r"`([\w.]+\.md)`", pages)]
    assert named and [path for path in named if not (ROOT / path).exists()] == []
    assert tests and pages


def test_the_forge_runs_the_steps_of_ci():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    versions = {
        row["python"]: row["targets"].split() for row in job["strategy"]["matrix"]["include"]
    }
    *tested, _ = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert list(versions) == tested[::-1]
    steps = (ROOT / ".ci" / "run").read_text()
    for version, at in ((tested[-1], "newest"), (tested[0], "oldest")):
        ran = re.findall(rf'^ *make (\S+) .*VENV="\$environment/{at}"$', steps, re.MULTILINE)
        assert versions[version] == ran
    (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python["cache"] == "pip" and all(
        (ROOT / name).is_file() for name in python["cache-dependency-path"].split()
    )


def test_the_forge_keeps_programs_and_runs_everything_once_a_week():
    jobs = [
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]["test"]
        for name in ("ci", "weekly")
    ]
    (kept,) = [step["with"] for step in jobs[0]["steps"] if "actions/cache" in step.get("uses", "")]
    assert kept["path"] == "~/.cache/jaxpar/tests" and kept["key"].startswith(kept["restore-keys"])
    weekly = jobs[1]
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
    assert weekly["strategy"]["matrix"]["python"] == versions
    assert (
        weekly["env"]["JAXPAR_TEST_CACHE"] == "off"
        and "make test-all" in weekly["steps"][-1]["run"]
    )


def test_issue_forms_ask_for_what_is_needed():
    asked = {
        name: {
            part["id"]: part.get("validations", {}).get("required", False)
            for part in form["body"]
            if "id" in part
        }
        for name, form in FORMS.items()
        if name != "config"
    }
    assert asked.keys() == {"bug", "feature", "wrong_number"}
    assert asked["bug"]["command"] and asked["bug"]["printed"] and asked["bug"]["versions"]
    assert asked["wrong_number"]["twin"] and asked["wrong_number"]["value"]
    for name in asked:
        assert {"name", "description", "body"} <= FORMS[name].keys()
        assert all(
            part["type"] == "markdown" or part["attributes"]["label"]
            for part in FORMS[name]["body"]
        )
        kinds = {part["type"] for part in FORMS[name]["body"]}
        assert kinds <= {"markdown", "textarea", "input", "checkboxes", "dropdown"}


@pytest.mark.parametrize("path", FORGE, ids=lambda path: path.name)
def test_no_host_and_no_path_of_a_machine(path):
    text = path.read_text()
    assert not re.search(
        r"pypi\.|pythonhosted|anaconda|index-url|huggingface\.co|github\.com|https?:", text, re.I
    )
    assert not re.search(r"(?<![\w.$}])/(home|root|work|tmp|Users|usr|mnt|opt)/", text)


def test_the_citation_is_complete():
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    needed = {
        "cff-version",
        "message",
        "title",
        "abstract",
        "type",
        "authors",
        "version",
        "license",
        "keywords",
    }
    assert needed == set(said), "and no address or date that nobody knows yet"
    assert said["license"] == PROJECT["license"] and said["authors"] == [
        {"name": "The jaxpar authors"}
    ]
    assert said["type"] == "software" and len(said["abstract"].split()) > 40


def test_the_changelog_is_one_section_of_single_lines():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^##+ (.*)$", text, re.MULTILINE) == [
        "[Unreleased]",
        "Added",
        "Fixed",
        "Names",
    ]
    added, fixed = text.split("### Added")[1].split("### Names")[0].split("### Fixed")
    for part in (added, fixed):
        lines = [line for line in part.splitlines() if line and not line.startswith("**")]
        entries = [line for line in lines if line.startswith("- ")]
        assert len(entries) > 40 and [line for line in entries if len(line) > 160] == []
        assert [
            line for line in lines if line not in entries and not line.endswith((":", "."))
        ] == []
