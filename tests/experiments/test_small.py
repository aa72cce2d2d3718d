"""Commands of a few flags: help and refusals as those of the others, and each runs."""

import importlib
import re
import sys

import pytest
from jaxpar.commands.__main__ import commands

from experiments import _help, _run, _small, scattered_attention, volunteer_experts
from jaxpar.types import UsageError

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
MODULES = [importlib.import_module(f"experiments.{name}") for name in NAMES]

each = pytest.mark.parametrize("module", MODULES, ids=NAMES)


def help_of(module):
    name = module.__name__.split(".")[-1]
    return _help.text_of(name, module.Config, module.Config(), _small.SmallConfig)


def test_every_command_has_flags_of_its_own_or_a_configuration():
    from experiments._mistakes import CONF

    configured = {path.stem for path in CONF.glob("*/*.yaml")}
    assert set(commands()) - set(NAMES) - configured == {"launch"}


@each
def test_its_help_has_five_legal_examples_and_a_line_for_each_flag(module):
    name, text = module.__name__.split(".")[-1], help_of(module)
    shown = re.findall(
        rf"^  python -m experiments\.{name}\b([^#\n]*)(?:# (.*))?$", text, re.MULTILINE
    )
    assert len(shown) >= 5
    for flags, _ in shown:
        _small.read(name, module.Config, flags.split())
    assert re.search(r"two CPU cores, .*\b(?:seconds|minutes?)\b", shown[0][1]), (
        "how long it takes, and on what"
    )
    rows = list(_help.flags(module.Config, module.Config()))
    assert [flag for flag, _, _, said in rows if len(said) < 6] == []
    assert [flag for flag, _, legal, _ in rows if not legal] == []
    assert "such as preset=" not in text


@each
def test_mistakes_are_refused_in_a_sentence(module):
    name = module.__name__.split(".")[-1]
    first = next(iter(_help.flags(module.Config, module.Config())))[0]
    for flag, sentence in (
        (f"--{first}=3", f"flag '--{first}=3' begins with -; flags have none: {first}=3."),
        (f"{first}z=3", f"unknown flag '{first}z'; did you mean {first}?"),
        (first, f"flag '{first}' has no value; flags are name=value, such as cache=false."),
        (f"{first}=x", f"{first}=x is of the wrong type; {first} takes .*"),
    ):
        with pytest.raises(UsageError) as error:
            _small.read(name, module.Config, [flag])
        assert re.fullmatch(sentence.replace("?", r"\?"), str(error.value)), flag


def test_ranges_and_values_are_read():
    config = _small.read(
        "volunteer_experts", volunteer_experts.Config, ["failures=[0.5]", "delays=[0,3]", "k=2"]
    )
    assert (config.failures, config.delays, config.k, config.cache) == ([0.5], [0, 3], 2, True)
    for flag in ("steps=0", "failures=[2]", "k=17", "seeds=[-1]"):
        with pytest.raises(UsageError, match=flag.split("=")[0]):
            _small.read("volunteer_experts", volunteer_experts.Config, [flag])


def run(module, monkeypatch, capsys, *flags):
    """What a command of these flags prints."""
    name = module.__name__.split(".")[-1]
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.setattr(_run, "simulate_devices", lambda count: None)  # this process has its eight
    _small.launch(name, module.Config, module.execute)
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
