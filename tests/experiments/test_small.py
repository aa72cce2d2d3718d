"""Commands of a few flags: help and refusals as those of the others, and each runs."""

import importlib
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
from jaxpar.commands.__main__ import commands, main, papers

from experiments import module_of
from experiments.app import help_text, runner, small_commands
from experiments.papers import scattered_attention, volunteer_experts
from jaxpar._renamed import PAPERS
from jaxpar.types import UsageError

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [
    "gru_svm",
    "hosted",
    "information_gain_trellis",
    "l2mu",
    "rl_scaling",
    "scattered_attention",
    "trading",
    "volunteer_experts",
]
MODULES = [importlib.import_module(f"experiments.{module_of(name)}") for name in NAMES]

each = pytest.mark.parametrize("module", MODULES, ids=NAMES)


def help_of(module):
    name = module.__name__.split(".")[-1]
    return help_text.text_of(name, module.Config, module.Config(), small_commands.SmallConfig)


def test_every_command_has_flags_of_its_own_or_a_configuration():
    from experiments.app.mistakes import CONF

    configured = {path.stem for path in CONF.glob("*/*.yaml")}
    assert {*commands(), *papers()} - set(NAMES) - configured == {"launch"}
    assert set(papers()) == set(PAPERS)


@each
def test_its_help_has_five_legal_examples_and_a_line_for_each_flag(module):
    name, text = module.__name__.split(".")[-1], help_of(module)
    shown = re.findall(
        rf"^  python -m experiments\.{module_of(name)}\b([^#\n]*)(?:# (.*))?$", text, re.MULTILINE
    )
    assert len(shown) >= 5
    for flags, _ in shown:
        small_commands.read(name, module.Config, flags.split())
    assert re.search(r"two CPU cores, .*\b(?:seconds|minutes?)\b", shown[0][1]), (
        "how long it takes, and on what"
    )
    rows = list(help_text.flags(module.Config, module.Config()))
    assert [flag for flag, _, _, said in rows if len(said) < 6] == []
    assert [flag for flag, _, legal, _ in rows if not legal] == []
    assert "such as preset=" not in text


@each
def test_mistakes_are_refused_in_a_sentence(module):
    name = module.__name__.split(".")[-1]
    first = next(iter(help_text.flags(module.Config, module.Config())))[0]
    for flag, sentence in (
        (f"--{first}=3", f"flag '--{first}=3' begins with -; flags have none: {first}=3."),
        (f"{first}z=3", f"unknown flag '{first}z'; did you mean {first}?"),
        (first, f"flag '{first}' has no value; flags are name=value, such as cache=false."),
        (f"{first}=x", f"{first}=x is of the wrong type; {first} takes .*"),
    ):
        with pytest.raises(UsageError) as error:
            small_commands.read(name, module.Config, [flag])
        assert re.fullmatch(sentence.replace("?", r"\?"), str(error.value)), flag


def test_ranges_and_values_are_read():
    config = small_commands.read(
        "volunteer_experts", volunteer_experts.Config, ["failures=[0.5]", "delays=[0,3]", "k=2"]
    )
    assert (config.failures, config.delays, config.k, config.cache) == ([0.5], [0, 3], 2, True)
    for flag in ("steps=0", "failures=[2]", "k=17", "seeds=[-1]"):
        with pytest.raises(UsageError, match=flag.split("=")[0]):
            small_commands.read("volunteer_experts", volunteer_experts.Config, [flag])


def run(module, monkeypatch, capsys, *flags):
    """What a command of these flags prints."""
    name = module.__name__.split(".")[-1]
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.setattr(
        runner, "simulate_devices", lambda count: None
    )  # this process has its eight
    small_commands.launch(name, module.Config, module.execute)
    return capsys.readouterr().out


def test_a_command_runs(monkeypatch, capsys):
    out = run(scattered_attention, monkeypatch, capsys, "voxels=64", "sides=[2]", "cache=false")
    assert re.match(r" +4 windows, mean +16\.0, longest .* Mop .*, apart by \d", out)


def test_a_mistake_ends_with_its_code(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(scattered_attention, monkeypatch, capsys, "voxels=1")
    assert (
        end.value.code == 2 and capsys.readouterr().err == "error: voxels=1 must be at least 2.\n"
    )
    assert (
        run(scattered_attention, monkeypatch, capsys, "voxels=64", "--help").count("voxels=64") == 1
    )


def test_commands_of_papers_are_listed_and_run_by_either_name(monkeypatch, capsys):
    ran = []
    record = lambda name, **kinds: ran.append((name, sys.argv))  # noqa: E731
    monkeypatch.setattr(runpy, "run_module", record)

    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxpar", *arguments])
        try:
            main()
        except SystemExit as end:
            code = end.code
        else:
            code = 0
        return code, capsys.readouterr()

    _, said = run_command()
    assert "papers" in said.out and "trading" not in said.out
    _, said = run_command("papers")
    assert all(name in said.out for name in PAPERS)
    _, new = run_command("papers", "trading", "--help")
    _, old = run_command("trading", "--help")
    assert ran == 2 * [("experiments.papers.trading", ["trading", "--help"])]
    assert new.err == ""
    assert old.err.startswith("note: jaxpar trading is now jaxpar papers trading;")
    code, said = run_command("papers", "tradin")
    assert (code, said.err) == (
        2,
        "error: there is no command 'tradin'; did you mean papers trading?\n",
    )


@pytest.mark.parametrize("package", ["experiments", "jaxpar.commands"])
def test_python_runs_a_command_of_a_paper_by_its_older_name(package, tmp_path):
    line = [sys.executable, "-m", f"{package}.trading", "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert said.returncode == 0, said.stderr
    assert "python -m experiments.papers.trading" in said.stdout
    # In a checkout, where both are one folder.
    assert "note: experiments.trading is now experiments.papers.trading;" in said.stderr
