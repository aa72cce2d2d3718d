"""`python -m experiments.neat`: it says solved when it is, goes on where it was, and tells mistakes in a sentence."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from experiments import neat
from experiments.app.env.champions import NetworkPolicy
from jaxpar.neat import GeneralizationTest, PlayOptions, from_json, init_carry, play
from jaxpar.rollout import EvaluateOptions, evaluate
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
    for name in (
        "plots/fitness.png",
        "plots/species.png",
        "plots/champion.png",
        "champion.dot",
        "config.yaml",
    ):
        assert (folder / name).stat().st_size > 50, name
    config, genomes = from_json((folder / "champion.json").read_text())
    assert (config.num_inputs, config.num_outputs, genomes.on.shape[0]) == (3, 1, 1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sizes = [
        sum(v for k, v in row.items() if k.startswith("train/size_"))
        for row in rows
        if "train/best" in row
    ]
    assert sizes == [16] * 2  # it looks up after a chunk
    played = main("mode=eval", "run=run", "cpu_devices=8", of="neat")
    assert (
        played.code == 0 and "checkpoint of generation 2 of run\nchampion   fitness " in played.out
    ), played
    fitness = said.out.split("best fitness so far ")[1].split()[0]
    assert f"champion   fitness {fitness}, solves it\npopulation 16 networks: " in played.out, (
        played
    )
    filmed = main("mode=film", "run=run", "cpu_devices=8", of="neat")
    assert "mode=film needs an environment, and task=xor is a table" in filmed.sentence()
    other = main("mode=film", "run=run", "cpu_devices=8", of="life")
    said = "run/config.yaml is not the configuration of such a run (it is of experiments.neat)"
    assert said in other.sentence()
    told = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text("task: xor\n")  # too little to know whose
    assert (
        "unknown flag 'task'" in main("mode=film", "run=run", "cpu_devices=8", of="life").sentence()
    )
    (folder / "config.yaml").write_text(told)
    (folder / "checkpoints").rename(folder / "elsewhere")
    untrained = main("mode=eval", "run=run", "cpu_devices=8", of="neat")
    assert "run has no checkpoint yet; train it first" in untrained.sentence()


def test_it_goes_on_where_it_was(main, tmp_path):
    flags = [*TINY, "task=regression"]
    first = main(*flags, "train.steps=4", of="neat", compiles=True)
    assert first.code == 0 and "unsolved   after 4 generations, 64 evaluations" in first.out, first
    second = main(*flags, "train.steps=8", of="neat", compiles=True)
    assert "resuming at generation 4" in second.out and "after 8 generations" in second.out
    whole = main(
        *flags[:-2], "hydra.run.dir=whole", flags[-1], "train.steps=8", of="neat", compiles=True
    )
    assert whole.code == 0
    champions = [
        json.loads((tmp_path / run / "champion.json").read_text()) for run in ("run", "whole")
    ]
    assert champions[0] == champions[1]


@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_how_many_seeds_solve_it_is_told(main, tmp_path, together):
    sizes = "population=16 max_nodes=8 max_conns=12 max_species=4 cpu_devices=8".split()
    said = main(
        *sizes,
        "rates.target=0.5",
        "train.steps=3",
        "num_seeds=4",
        f"together={together}",
        of="neat",
        compiles=True,
    )
    assert said.code == 0 and "solved     4 of 4" in said.out, said
    assert "mean 16.00, standard error 0.00" in said.out
    [path] = tmp_path.glob("runs/neat/neat-*/seeds.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["seed"], row["solved"], row["evaluations"]) for row in rows] == [
        (k, True, 16) for k in range(4)
    ]
    assert len({row["best"] for row in rows}) == 4


@pytest.mark.parametrize(
    "preset", ["paper_xor", "double_pole_velocities", "double_pole_no_velocities"]
)
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
        (["mode=eval"], "mode=eval needs run= to name the folder of a run, not ''"),
        (
            ["mode=film", "run=nowhere"],
            "mode=film needs run= to name the folder of a run, not 'nowhere'",
        ),
        (["mode=eval", "run=."], "is no run folder: it has no config.yaml"),
        (["mode=evil"], "mode='evil' is unknown; legal are fast, canonical, eval, film"),
        (["run=run"], "run is of mode=eval and mode=film; hydra.run.dir= moves a new run"),
        (["num_seeds=4", "together=3"], "together=3 must divide num_seeds=4"),
        (["preset=xorr"], "there is no preset 'xorr'"),
    ],
)
def test_mistakes_are_told(main, flags, words):
    said = main(*TINY, *flags, of="neat")
    assert said.code == 2 and words in said.err, said


def test_a_saved_network_acts_as_where_it_was_evolved():
    """The poles start upright and nothing is random, so both ways play one episode."""
    search, params = neat.make_search(
        neat.compose("task=DoublePole-Discrete", "population=4", "max_steps=40")
    )
    problem, state = search.problem, search.init(jax.random.key(5), None)
    networks = search.express(state.genomes)

    @jit
    def both(networks):
        options = PlayOptions(compacts=False)
        played = play(jax.random.key(0), networks, problem.env, params, 1, 4, 40, options)
        played = played.lengths[:, 0]

        def alone(i):
            one = jax.tree.map(lambda x: x[i][None] if jnp.ndim(x) else x, networks)
            policy = NetworkPolicy(problem)
            options = EvaluateOptions(carry=init_carry(one))
            key = jax.random.key(1)
            weights = one, params
            return evaluate(key, problem.env, params, policy, weights, 1, 40, options).lengths[0]

        return played, jax.lax.map(alone, jnp.arange(4))

    played, alone = both(networks)
    np.testing.assert_array_equal(played, alone)
    assert len(set(np.asarray(played).tolist())) > 1


@pytest.mark.slow  # 40 s
def test_a_champion_plays_fresh_episodes_and_is_filmed(main, tmp_path):
    flags = "task=CartPole-v1 max_steps=30 goal=1000 train.steps=2".split()
    assert main(*TINY, *flags, of="neat", compiles=True).code == 0
    asked = "run=run cpu_devices=8 eval_episodes=20".split()
    said = [
        main("mode=eval", *asked, *seed, of="neat").out.split("champion ")[1]
        for seed in ([], [], ["seed=3"])
    ]
    assert "(standard error of 20 episodes)" in said[0] and said[0] == said[1] != said[2], said
    filmed = main("mode=film", "run=run", "cpu_devices=8", "frames=3", of="neat")
    assert filmed.code == 0 and "film       run/plots/champion.gif" in filmed.out, filmed
    assert (
        main(
            "mode=film",
            "run=run",
            "cpu_devices=8",
            "frames=3",
            "hydra.run.dir=elsewhere",
            of="neat",
        ).code
        == 0
    )
    assert (tmp_path / "elsewhere/plots/champion.gif").stat().st_size > 1000


def test_environments_by_name():
    search, params = neat.make_search(
        neat.compose("task=DoublePole-NoVelocities", "kind=recurrent", "goal=50")
    )
    assert (search.config.num_inputs, search.config.num_outputs, search.problem.goal) == (4, 1, 50)
    assert params.max_steps == 100_000
    state = jax.eval_shape(lambda: search.init(jax.random.key(0), None))
    networks = search.express(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state.genomes))
    assert init_carry(networks).shape == (150, 32)
    search, trials = neat.make_search(
        neat.compose("task=DoublePole-NoVelocities", "kind=recurrent")
    )
    assert isinstance(search.problem, GeneralizationTest)
    assert search.problem.training.env.damping and not search.problem.env.damping
    assert (search.problem.training.max_steps, trials.test_params.max_steps) == (1000, 100_000)
    assert trials.levels.x.shape == (625,)
    with pytest.raises(UsageError, match="no environment"):
        neat.make_search(neat.compose("task=Nowhere-v1"))
