"""A run's configuration names the method of its recurrence, and a resumed run keeps it."""

import pytest

from experiments import lm, rl, rnn
from experiments.app import runner

RNN = ("model.cell=gru", "model.size=4", "data.batch_size=2")
RL = ("memory=gru", "memory_size=4", "num_envs=4", "num_steps=4")
LM = (
    "model.mixer.kind=gru",
    "model.num_layers=1",
    "model.embed_dim=8",
    "model.attention.num_heads=2",
    "data.batch_size=2",
)


def by_rnn(folder, *flags):
    config = rnn.compose(*RNN, *flags)
    config = rnn.with_method(config, folder, rnn.open_task(config.data, config.seed))
    return config, config.model.method


def by_rl(folder, *flags):
    config = rl.with_method(rl.compose(*RL, *flags), folder)
    return config, config.method_taken or config.method


def by_lm(folder, *flags):
    config = lm.with_solver(lm.compose(*LM, *flags), folder)
    return config, config.model.execution.solver


CASES = [(by_rnn, "model.method"), (by_rl, "method"), (by_lm, "model.execution.solver")]


@pytest.mark.parametrize(("made", "flag"), CASES, ids=["rnn", "rl", "lm"])
def test_a_run_names_its_method_and_keeps_it(made, flag, tmp_path):
    assert made(tmp_path, f"{flag}=quasi")[1] == "quasi"
    name = made(tmp_path)[1]
    assert name == "sequential", "what a CPU takes"

    # As if another machine had begun the run.
    taken = flag
    if made is by_rl:
        taken = "method_taken"
    runner.write_start(tmp_path, made(tmp_path, f"{taken}=newton")[0])
    assert made(tmp_path)[1] == "newton"
    assert made(tmp_path, f"{flag}=quasi")[1] == "quasi"

    # A run from before configurations named it.
    runner.write_start(tmp_path, {by_rnn: rnn, by_rl: rl, by_lm: lm}[made].compose())
    assert made(tmp_path)[1] == name


def test_closed_forms_and_cells_that_differ_stay_with_the_platform(tmp_path):
    assert by_rnn(tmp_path, "model.cell=min_gru")[1] == "auto"
    assert by_rl(tmp_path, "memory=min_gru")[1] == "auto"
    assert (
        by_lm(
            tmp_path,
            "model.mixer.kind=attention",
            "model.mixer.in_turn=[min_gru,gru]",
            "model.num_layers=2",
        )[1]
        == "auto"
    )
    assert by_lm(tmp_path, "model.mixer.kind=attention")[1] == "auto"
