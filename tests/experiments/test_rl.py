"""`python -m experiments.rl`: it learns, goes on where it was, and tells mistakes in a sentence."""

import contextlib
import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import OPTIMISED

from envs.puzzles.rubiks_cube import RubiksCube, Scramble
from experiments import rl
from experiments.app import runner
from jaxpar.io import Checkpoints
from jaxpar.io.reading import flatten, nest
from jaxpar.rl import Pqn, Seeds, train
from jaxpar.types import UsageError

TINY = (
    "num_seeds=2 num_envs=4 num_steps=8 train.chunk=2 hidden=[8] eval_episodes=4 eval_steps=40 gif=false cpu_devices=8 "
    "hydra.run.dir=run"
).split()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder for what one test makes and others only copy."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def first(main, kept, tmp_path):
    """A run of four updates in tmp_path / "run", made once."""
    if not (kept / "run").exists():
        said = main(
            *TINY, "anneal=false", "train.steps=128", "gif=true", "frames=3", of="rl", compiles=True
        )
        assert said.code == 0 and "return     " in said.out, said
        shutil.copytree(tmp_path / "run", kept / "run")
    else:
        shutil.copytree(kept / "run", tmp_path / "run")


def test_it_learns_and_goes_on_where_it_was(main, first, tmp_path):
    flags = [*TINY, "anneal=false"]
    second = main(*flags, "train.steps=256", of="rl", compiles=True)
    assert second.code == 0 and "resuming at update 4" in second.out, second
    whole = main(
        *flags[:-2],
        "anneal=false",
        "hydra.run.dir=whole",
        "train.steps=256",
        of="rl",
        compiles=True,
    )
    assert whole.code == 0, whole
    for name in ("plots/returns.png", "plots/learning.png", "plots/agent.gif", "config.yaml"):
        assert (tmp_path / "run" / name).stat().st_size > 50, name
    rows = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
            for run in ("run", "whole")]  # fmt: skip
    seeds = [
        [(row["step"], row["train/seed_00"]) for row in run if "train/seed_00" in row]
        for run in rows
    ]
    assert seeds[0] == seeds[1] and len(seeds[0]) == 8, "a run that was ended makes the same bits"
    tails = [said.out.split("return     ")[1].splitlines()[0] for said in (second, whole)]
    assert tails[0] == tails[1]


def test_a_saved_policy_is_filmed_and_plays_again(main, first, tmp_path):
    film = tmp_path / "run/plots/agent.gif"
    before = film.read_bytes()
    film.unlink()
    said = main("mode=film", "run=run", "frames=3", "cpu_devices=8", of="rl")
    assert (
        said.code == 0
        and "checkpoint of update 4 of run\nfilm       run/plots/agent.gif\n" in said.out
    ), said
    assert film.read_bytes() == before, "the same film as at the end of training"
    assert main("mode=film", "run=run", "frames=3", "cpu_devices=8", "seed=3", of="rl").code == 0
    assert film.read_bytes() != before
    (tmp_path / "run/config.yaml").write_text("env: CartPole-v1\npolicy: random\n")
    said = main("mode=eval", "run=run", "cpu_devices=8", of="rl")
    assert (
        "run/config.yaml is not the configuration of such a run (unknown flag 'policy'"
        in said.sentence()
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["exploit_every=2", "num_seeds=1"],
            "a population of num_seeds=1 has nobody to take after",
        ),
        (["algorithm=pop"], "algorithm='pop' is unknown; legal are ppo, a2c"),
        (["minibatches=5"], "minibatches=5 does not divide 32 steps"),
        (["memory=gru", "minibatches=3"], "minibatches=3 does not divide 4 environments"),
        (["algorithm=dqn", "epochs=2"], "epochs=2 does not apply: algorithm=dqn has none"),
        (["algorithm=pqn", "env=Pendulum-v1"], "Pendulum"),
        (["algorithm=qmix"], "agents"),
        (["algorithm=dqn", "memory=gru", "num_steps=0"], "memor"),
        (
            ["conv=[16]"],
            "conv=[16] reads boards [height, width, channels] of at least 3 x 3; this observation is [4]",
        ),
        (["memory=gur"], "memory='gur' is unknown"),
        (["rates.entropie=1"], "has no rates.entropie"),
        (["rates.trace=0.9"], "rates.trace is called rates.gae_lambda now"),
        (["algorithm=pqn", "rates.trace=0.9"], "rates.trace is called rates.q_lambda now"),
        (
            ["algorithm=dqn", "fields.gradients=2"],
            "fields.gradients is called fields.gradient_steps now",
        ),
        (["env=CartPole"], "there is no environment 'CartPole'"),
        (["num_envs=3", "minibatches=1"], "does not divide"),
        (["train.steps=0"], "train.steps=0 must be at least 1"),
        (["rates.learning_rate=-1"], "rates.learning_rate=-1.0 must be over 0"),
        (["rates.discount=2"], "rates.discount=2.0 must be at least 0 and at most 1"),
        (["rates.entropy_coef=nan"], "rates.entropy_coef=nan must be a finite number"),
        (["rates.anneal=5"], "rates.anneal needs anneal=false"),
        (
            ["self_play.pol=3", "env=Foraging-8x8-2p-2f"],
            "self-play has no self_play.pol; the nearest are pool",
        ),
        (["self_play.pool=3"], "CartPole-v1 has one agent; self-play needs a game of two or more"),
        (
            ["self_play.pool=3", "algorithm=dqn"],
            "self_play does not apply: algorithm=dqn has none; legal: ppo, a2c",
        ),
        (
            ["self_play.pool=3", "exploit_every=2", "env=Foraging-8x8-2p-2f"],
            "self_play and exploit_every exclude",
        ),
        (["algorithm=alpha_zero", "env=Pendulum-v1"], "not of one agent with Discrete actions"),
        (
            ["algorithm=alpha_zero", "prng=batch"],
            "prng=batch does not apply: algorithm=alpha_zero has none",
        ),
        (["algorithm=alpha_zero", "fields.noise=2"], "noise=2.0 must be at least 0 and at most 1"),
        (["mode=evall"], "mode='evall' is unknown; legal are train, eval, film"),
        (
            ["search.simulations=3"],
            "search is of mode=eval; a search to learn from is algorithm=alpha_zero",
        ),
        (["run=run"], "run is of mode=eval and mode=film; hydra.run.dir= moves a new run"),
        (
            ["mode=film", "run=nowhere"],
            "mode=film needs run= to name the folder of a run, not 'nowhere'",
        ),
        (["mode=eval"], "mode=eval needs run= to name the folder of a run, not ''"),
        (
            ["algorithm=dqn", "train.steps=64"],
            "train.steps=64 end before the warmup of 4096 experiences",
        ),
    ],
)
def test_mistakes_are_told(main, flags, words):
    said = main(*TINY, *flags, of="rl")
    assert words in said.sentence(), said


def test_a_run_that_diverges_ends_with_a_sentence(main):
    said = main(*TINY, "rates.learning_rate=1e30", "train.steps=256", of="rl", compiles=True)
    assert "the gradient is not finite after update" in said.sentence(), said


def test_a_buffer_that_fills_is_no_divergence(main):
    flags = "algorithm=dqn train.steps=256 fields.warmup=128 fields.capacity=512 fields.batch_size=8".split()
    said = main(*TINY, *flags, "fields.gradient_steps=1", of="rl", compiles=True)
    assert said.code == 0 and "return     " in said.out, said


@pytest.mark.slow  # 30 s
def test_self_play_learns_and_goes_on_where_it_was(main):
    flags = "env=Foraging-8x8-2p-2f self_play.pool=2 minibatches=2 anneal=false eval_steps=50 env_fields.size=5".split()
    first = main(*TINY, *flags, "train.steps=128", of="rl", compiles=True)
    again = main(*TINY, *flags, "train.steps=128", of="rl", compiles=True)
    assert first.code == 0 and "rivals by chance" in first.out and "itself     " in first.out, first
    assert (
        "resuming at update 4" in again.out
        and again.out.split("return ")[1] == first.out.split("return ")[1]
    ), again


@pytest.mark.slow  # 30 s
def test_a_saved_policy_leads_a_search(main, tmp_path):
    flags = (
        "env=SlidingTile-3x3 algorithm=alpha_zero fields.simulations=2 "
        "minibatches=2 train.chunk=1 num_steps=4"
    ).split()
    said = main(*TINY, *flags, "params.max_steps=6", "train.steps=32", "env_fields.rewards=sparse", of="rl",
                compiles=True)  # fmt: skip
    assert (
        said.code == 0
        and "return     " in said.out
        and (tmp_path / "run/plots/learning.png").is_file()
    ), said
    asked = "mode=eval run=run cpu_devices=8 eval_episodes=4 eval_steps=6".split()
    plain = main(*asked, of="rl", compiles=True)
    found = main(*asked, "search.simulations=3", of="rl", compiles=True)
    assert (
        plain.out.split("return ")[1].splitlines()[0]
        == said.out.split("return ")[1].splitlines()[0]
    ), plain
    assert "checkpoint of update 2 of run" in found.out and "searched   " in found.out, found
    wrong = main(*asked, "search.simulation=3", of="rl", compiles=True)
    assert (
        "a guided search has no search.simulation; the nearest are simulations" in wrong.sentence()
    ), wrong


def test_a_search_solves_what_its_policy_does_not():
    """A cube one turn away, by a policy that always turns the same face and a value that says nothing."""
    config = rl.compose(
        "env=RubiksCube-2", "num_seeds=2", "eval_episodes=16", "eval_steps=1", "hidden=[8]"
    )
    config = dataclasses.replace(config, mode="eval", search={"simulations": 40})
    learner, params = rl.make_learner(config)
    learner = dataclasses.replace(learner, env=RubiksCube(Scramble(2, 1)))
    weights = jax.vmap(learner.agent().init)(jax.random.split(jax.random.key(0), 2))
    state = SimpleNamespace(weights=jax.tree.map(jnp.zeros_like, weights))
    assert (rl.evaluation_returns(config, learner, params, state) < 0.5).all()
    np.testing.assert_array_equal(rl.evaluation_by_search(config, learner, params, state), [1, 1])
    with pytest.raises(
        UsageError, match="needs a policy and a value: algorithm=ppo, a2c or alpha_zero, not pqn"
    ):
        config = dataclasses.replace(config, algorithm="pqn", hidden=[])
        rl.evaluation_by_search(config, *rl.make_learner(config), state)


def test_flags_make_the_learner():
    config = rl.compose(
        "algorithm=vdn", "env=Spread-3", "num_envs=8", "rates.q_lambda=0.5", "activation=tanh"
    )
    learner, _ = rl.make_learner(config)
    assert isinstance(learner, Pqn) and learner.decomposition == "vdn" and learner.num_envs == 8
    assert learner.rates.q_lambda == 0.5 and learner.rates.anneal == rl.num_updates(config, learner)
    assert (
        learner.network.activation == "tanh"
        and learner.network.hidden == Pqn(learner.env).network.hidden
    )
    config = rl.compose(
        "algorithm=alpha_zero", "fields.simulations=5", "fields.num_envs=3", "rates.td_lambda=0.5"
    )
    learner, _ = rl.make_learner(config)
    assert (
        learner.search.simulations == 5 and learner.search.noise == 0.25 and learner.num_envs == 3
    )
    assert learner.rates.td_lambda == 0.5 and learner.rates.anneal == rl.num_updates(
        config, learner
    )


def test_trials_are_told(main, tmp_path):
    flags = "preset=rl2 num_steps=8 minibatches=2 train.steps=64 env_fields.num_tasks=3 params.trials=2".split()
    said = main(*TINY, *flags, "params.trial_steps=5", of="rl", compiles=True)
    assert said.code == 0, said
    told = [
        float(word.split(" ")[0])
        for word in said.out.split("trials     ")[1].splitlines()[0].split(", ")
    ]
    whole = float(said.out.split("return     ")[1].split(" ")[0])
    assert len(told) == 2 and sum(told) == pytest.approx(whole, rel=0.02, abs=1e-3)
    assert (tmp_path / "run" / "plots" / "trials.png").stat().st_size > 1000


@pytest.mark.slow
def test_chance_and_scripted_play_are_told_beside(main):
    flags = "preset=combat train.steps=64 minibatches=2 eval_episodes=16 params.max_steps=8".split()
    said = main(*flags, *TINY, "eval_steps=8", of="rl", compiles=True)
    assert said.code == 0, said
    least, most = (
        float(said.out.split(f"\n{name} ")[1].split("±")[0]) for name in ("random", "scripted")
    )
    assert least < most and "standard errors above" in said.out and "learned / scripted" in said.out


def test_scripted_play_beats_chance_and_shares_are_those_of_arithmetic():
    config = rl.compose("env=Spread-3", "eval_episodes=16", "eval_steps=25")
    chance, scripted = rl.compared(config, *rl.make_learner(config))
    assert chance.shape == scripted.shape == (16,) and scripted.mean() > chance.mean() + 10
    lines = rl.comparison_lines(np.array([0.0, 0.2]), np.array([-1.0, -1.0]), np.array([0.4, 0.6]))
    assert "is 11.0 standard errors above" in lines[0] and "learned / scripted 0.2, " in lines[1], (
        lines
    )
    assert lines[1].endswith("(scripted - random) 0.733")
    assert rl.comparison_lines(np.ones(2), np.zeros(2), None)[0].endswith(
        "is inf standard errors above"
    )


def learned(*flags, seeds):
    """The state after a whole run by these flags, and what goes with it."""
    config = rl.compose(*flags, f"num_seeds={seeds}", "gif=false")
    learner, params = rl.make_learner(config)
    many = Seeds(learner, seeds, params)
    program = jax.jit(
        lambda key: train(many, key, params, rl.num_updates(config, learner)),
        compiler_options=OPTIMISED,
    )
    state, _ = program(jax.random.key(0))
    return config, learner, params, state


@pytest.mark.slow
def test_what_one_trial_taught_serves_in_the_next():
    """RL^2: later trials return more than the first by three standard errors, and without a memory they do not."""
    rise = {}
    for memory in ("gru", "none"):
        flags = ("preset=rl2", f"memory={memory}", "train.steps=1_000_000", "eval_episodes=512")
        trials = rl.evaluation_by_trial(*learned(*flags, seeds=2))
        rise[memory] = trials[:, 1:].mean(1) - trials[:, 0]
    # A trial pays 0 to 1, so that a mean over 512 episodes errs by 0.5 / sqrt(512) at most.
    error = 0.5 * np.sqrt(2 / 512)
    assert (rise["gru"] > 3 * error).all() and (np.abs(rise["none"]) < 3 * error).all(), rise


@pytest.mark.slow  # 40 s of processor time
def test_a2c_leaves_chance_on_tours():
    small = (
        "env=TSP-10",
        "items.width=32",
        "items.heads=2",
        "num_envs=64",
        "num_steps=9",
        "anneal=false",
    )
    learner, params = rl.make_learner(rl.compose("preset=puzzle_tsp_a2c", *small))
    _, info = jax.jit(lambda key: train(learner, key, params, 400))(jax.random.key(0))
    returns = np.asarray(info["return_mean"])
    assert returns[:20].mean() < -5 and returns[-20:].mean() > -4, (
        "tours by chance are 5.2 long, the shortest 2.9"
    )


@pytest.mark.slow  # four minutes on busy cores
def test_a_team_learns_to_fight():
    flags = ("preset=combat", "train.steps=1_000_000", "num_envs=128", "hidden=[64,64]")
    config, learner, params, state = learned(*flags, seeds=3)
    returns, (chance, scripted) = (
        rl.evaluation_returns(config, learner, params, state),
        rl.compared(config, learner, params),
    )
    error = np.hypot(returns.std(ddof=1) / np.sqrt(3), chance.std() / np.sqrt(len(chance)))
    assert returns.mean() > chance.mean() + 3 * error and scripted.mean() > chance.mean() + 1, (
        returns,
        chance.mean(),
    )


@pytest.mark.parametrize(
    "path", sorted((runner.CONF / "rl" / "preset").glob("*.yaml")), ids=lambda path: path.stem
)
def test_each_preset_makes_a_learner_and_opens_with_its_command(path):
    name = path.stem
    learner, _ = rl.make_learner(rl.compose(f"preset={name}"))
    assert learner.num_steps > 1
    command = path.read_text().splitlines()[1]
    assert command.startswith("# python -m experiments.rl") and (
        f"preset={name}" in command or name == "cartpole"
    )


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ("", "CartPole-v1-8a2fc571"),
        ("preset=spread_team", "Spread-3-1e347e59"),
        ("preset=rl2", "XLand-R1-5x5-Pick-2e9cff68"),
    ],
)
def test_a_run_goes_on_in_the_folder_that_it_had_before_flags_were_renamed(flags, folder):
    """By `draw`, `recall`, `rates.trace` and the like, as they stand in the identity of runs made then."""
    assert runner.folder_name(rl.compose(*flags.split())) == folder


def test_a_run_whose_state_has_older_names_goes_on(main, first, tmp_path):
    flags, folder = [*TINY, "anneal=false"], tmp_path / "run" / "checkpoints"
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        state, metadata = flatten(checkpoints.numpy(4)), checkpoints.metadata(4)
    shutil.rmtree(folder)
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        older = {path.replace("env_state/", "lanes/").replace("rates/gae_lambda", "rates/trace"): leaf
                 for path, leaf in state.items()}  # fmt: skip
        older = {
            path.replace("episode_stats/", "known/").replace("_coef", ""): leaf
            for path, leaf in older.items()
        }
        checkpoints.save(4, nest(jax.tree.map(jnp.asarray, older)), {}, metadata)
    second = main(*flags, "train.steps=256", of="rl", compiles=True)
    assert second.code == 0 and "resuming at update 4" in second.out, second
