"""`--help` tells what an experiment does, examples that are legal, and every flag with its line."""

import dataclasses
import importlib
import re
import shlex

import pytest

from experiments import module_of
from experiments.app import help_text, runner
from jaxpar.fields import AtLeast, Each, OneOf, field

NAMES = sorted(path.stem for path in runner.CONF.glob("*/*.yaml"))


@pytest.fixture(params=NAMES, scope="module")
def asked(request):
    """An experiment, its configuration and its help."""
    schema = importlib.import_module(f"experiments.{module_of(request.param)}").Config
    config = runner.compose(request.param, schema, [])
    return (
        request.param,
        schema,
        config,
        help_text.text_of(request.param, schema, config, runner.RunConfig),
    )


def test_every_flag_has_a_line(asked):
    _, schema, config, text = asked
    rows = list(help_text.flags(schema, config))
    assert [name for name, _, _, said in rows if len(said) < 6] == []
    for name, _, legal, said in rows:
        shown = re.search(rf"^  {re.escape(name)}=(.*)\n      (.*)$", text, re.MULTILINE)
        assert shown and said.startswith(shown[2]), name
        assert shown[1].endswith(f"   ({legal})" if legal else "")
    assert len(rows) == len(
        re.findall(r"^  [\w.]+=.*\n      ", text.split("\nflags, ")[1], re.MULTILINE)
    )
    assert f"\n  seed={config.seed}   (whole number, at least 0 and at most 4294967295)\n" in text


def examples(name, text):
    """The flags of each example."""
    lines = text.split("\nexamples:\n")[1].split("\n\n")[0].splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    assert all(each[:3] == ["python", "-m", f"experiments.{module_of(name)}"] for each in words)
    return [each[3:] for each in words]


def test_examples_are_five_of_flags_that_exist(asked):
    name, schema, config, text = asked
    known = {flag for flag, *_ in help_text.flags(schema, config)} | {
        "preset",
        "adapter",
        "planner",
    }
    open_ended = {
        flag.name for flag in dataclasses.fields(schema) if flag.type not in (int, float, str, bool)
    }
    assert len(examples(name, text)) >= 5
    for flags in examples(name, text):
        names = [flag.split("=")[0] for flag in flags]
        assert [
            flag for flag in names if flag not in known and flag.split(".")[0] not in open_ended
        ] == []


@pytest.mark.slow  # 15 s: Hydra reads every file for each
def test_examples_are_legal(asked):
    name, schema, _, text = asked
    for flags in examples(name, text):
        runner.compose(name, schema, flags)


def test_presets_say_what_they_are(asked):
    name, _, _, text = asked
    for path in runner.conf_of(name).glob("*/*.yaml"):
        assert re.search(rf"^  {path.parent.name}={path.stem}\n      \S", text, re.MULTILINE), path


COUNT = r"(?:[\d.]+|an?|one|two|three|four|five|six|seven|eight|nine|ten|twenty|half an?|some \w+)"
TIME = re.compile(
    rf"\b(?:{COUNT}(?: and a half)? (?:s|seconds?|minutes?|hours?|days?)|half a minute)\b",
    re.IGNORECASE,
)
MACHINE = re.compile(r"\b(?:CPU cores?|busy cores?|H100|H200|a CPU|TPU)\b")


def test_each_preset_tells_its_time_and_on_what():
    """But for adapters, which are an entry of a run and not one themselves."""
    files = [path for path in runner.CONF.glob("*/*/*.yaml") if path.parent.name != "adapter"]
    assert len(files) > 50
    for path in files:
        said = " ".join(line[1:].strip() for line in help_text._opening(path.read_text()))
        assert TIME.search(said) and MACHINE.search(said), path


@pytest.mark.parametrize(
    ("text", "is_time"),
    [
        ("in half a minute", True),
        ("five and a half hours", True),
        ("80 s of processor time", True),
        ("a seed, three seeds", False),
        ("200 steps", False),
        ("never measured", False),
    ],
)
def test_what_counts_as_a_time(text, is_time):
    assert bool(TIME.search(text)) == is_time


def test_flags_beside_it_change_what_it_shows(monkeypatch, capsys):
    from experiments import neat

    monkeypatch.setattr("sys.argv", ["neat", "--help", "preset=paper_xor"])
    runner.launch("neat", neat.Config, None)
    out = capsys.readouterr().out
    assert out.startswith(
        "Evolves networks, structure and all, until the task is solved.\n\npython -m experiments.neat "
    )
    assert "\n  max_conns=40   (whole number, at least 1)\n      Capacity of a genome.\n" in out
    assert "\n  rates.excess=1.0   (number, at least 0)\n" in out, (
        "of the canonical mode, which the preset has"
    )


def test_what_is_legal_is_said_as_it_is_refused():
    @dataclasses.dataclass
    class Config:
        """Of a test.

        Attributes:
            count, others: how many,
                and of what.
            n: n, of all.
        """

        count: int = field(1, AtLeast(1))
        others: list[str] = field(legal=Each(OneOf(("a", "b"))), default_factory=list)
        n: bool = True

    assert list(help_text.flags(Config, Config())) == [
        ("count", 1, "whole number, at least 1", "How many, and of what."),
        ("others", [], "a list, each a, b", "How many, and of what."),
        ("n", True, "true or false", "n, of all."),
    ]
