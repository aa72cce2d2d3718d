"""`python -m experiments.neat`: it says solved when it is, goes on where it was, and tells mistakes in a sentence."""

import json

import jax
import numpy as np
import pytest

from experiments import neat
from jaxpar.neat import GeneralizationTest, from_json, init_carry
from jaxpar.types import UsageError

TINY = (
    "population=16 max_nodes=8 max_conns=12 max_species=4 train.chunk=2 train.save_every=4 cpu_devices=8 "
    "hydra.run.dir=run"
).split()


def test_it_solves_and_tells(main, tmp_path):
    said = main(*TINY, "rates.target=0.5", "train.steps=8", of="neat", compiles=True)
    assert said.code == 0, said
    assert "solved     after 1 generations, 16 evaluations" in said.out
    folder = tmp_path / "run"
    for name in ("plots/fitness.png", "plots/species.png", "plots/champion.png", "champion.dot", "config.yaml"):
        assert (folder / name).stat().st_size > 50, name
    config, genomes = from_json((folder / "champion.json").read_text())
    assert (config.num_inputs, config.num_outputs, genomes.on.shape[0]) == (3, 1, 1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sizes = [sum(v for k, v in row.items() if k.startswith("train/size_")) for row in rows if "train/best" in row]
    assert sizes == [16] * 2  # it looks up after a chunk


def test_it_goes_on_where_it_was(main, tmp_path):
    flags = [*TINY, "task=regression"]
    first = main(*flags, "train.steps=4", of="neat", compiles=True)
    assert first.code == 0 and "unsolved   after 4 generations, 64 evaluations" in first.out, first
    second = main(*flags, "train.steps=8", of="neat", compiles=True)
    assert "resuming at generation 4" in second.out and "after 8 generations" in second.out
    whole = main(*flags[:-2], "hydra.run.dir=whole", flags[-1], "train.steps=8", of="neat", compiles=True)
    assert whole.code == 0
    champions = [json.loads((tmp_path / run / "champion.json").read_text()) for run in ("run", "whole")]
    assert champions[0] == champions[1]


@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_how_many_seeds_solve_it_is_told(main, tmp_path, together):
    sizes = "population=16 max_nodes=8 max_conns=12 max_species=4 cpu_devices=8".split()
    said = main(
        *sizes, "rates.target=0.5", "train.steps=3", "num_seeds=4", f"together={together}", of="neat", compiles=True
    )
    assert said.code == 0 and "solved     4 of 4" in said.out, said
    assert "mean 16.00, standard error 0.00" in said.out
    [path] = tmp_path.glob("runs/neat/neat-*/seeds.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["seed"], row["solved"], row["evaluations"]) for row in rows] == [(k, True, 16) for k in range(4)]
    assert len({row["best"] for row in rows}) == 4


@pytest.mark.parametrize("preset", ["paper_xor", "double_pole_velocities", "double_pole_no_velocities"])
def test_presets_are_the_papers(preset):
    config = neat.compose(f"preset={preset}")
    assert (config.name, config.mode) == (preset, "canonical")
    search, _ = neat.make_search(config)
    assert isinstance(search.problem, GeneralizationTest) == (preset == "double_pole_no_velocities")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["task=xro"], "nor an environment; did you mean xor?"),
        (["task=CartPol-v1"], "nor an environment; did you mean CartPole-v1?"),
        (["population=1"], "population=1 must be at least 2."),
        (["rates.treshold=3"], "there is no rates.treshold"),
        (["max_conns=2"], "max_conns=2 is too small"),
        (["population=9"], "does not divide"),
        (["activations=[blub]"], "'blub' is no activation"),
        (["train.steps=0"], "train.steps=0"),
        (["max_steps=-1"], "max_steps=-1"),
        (["num_seeds=4", "together=3"], "together=3 must divide num_seeds=4"),
        (["preset=xorr"], "there is no preset 'xorr'"),
    ],
)
def test_mistakes_are_told(main, flags, words):
    said = main(*TINY, *flags, of="neat")
    assert said.code == 2 and words in said.err, said


def test_environments_by_name():
    search, params = neat.make_search(neat.compose("task=DoublePole-NoVelocities", "kind=recurrent", "goal=50"))
    assert (search.config.num_inputs, search.config.num_outputs, search.problem.goal) == (4, 1, 50)
    assert params.max_steps == 100_000
    state = jax.eval_shape(lambda: search.init(jax.random.key(0), None))
    networks = search.express(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.genomes))
    assert init_carry(networks).shape == (150, 32)
    search, trials = neat.make_search(neat.compose("task=DoublePole-NoVelocities", "kind=recurrent"))
    assert isinstance(search.problem, GeneralizationTest)
    assert search.problem.training.env.damping and not search.problem.env.damping
    assert (search.problem.training.max_steps, trials.test_params.max_steps) == (1000, 100_000)
    assert trials.levels.x.shape == (625,)
    with pytest.raises(UsageError, match="no environment"):
        neat.make_search(neat.compose("task=Nowhere-v1"))
