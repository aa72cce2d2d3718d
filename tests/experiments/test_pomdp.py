"""`python -m experiments.pomdp`: what it reports is what `simulate` gives; exact rocks; sentences and exit codes."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs.pomdp.mars import Mars
from envs.pomdp.rocksample import RockSample
from experiments import pomdp
from experiments.app import runner
from experiments.app.env.pomdp_film import _draw_tree, moves, planned
from experiments.app.env.regrets import Judge
from experiments.app.env.rock_beliefs import RockBelief
from jaxpar.env import reset, step
from jaxpar.pomdp import ExactBelief, from_environment, qmdp, save_policy, save_pomdp, solve_exact
from jaxpar.pomdp.planners.outline import Branch
from jaxpar.types import UsageError

TINY = (
    "env=Tiger planner.num_simulations=16 planner.iterations=3 planner.max_depth=3 planner.leaf=zero "
    "planner.max_nodes=256 belief.num_particles=32 episodes=3 max_steps=4 hydra.run.dir=run cpu_devices=8"
).split()

# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_batches_report_what_a_loop_of_single_steps_gives(main, tmp_path):
    said = main(*TINY, "gif=false", of="pomdp")
    assert said.code == 0, said
    setting = pomdp.make_setting(pomdp.compose(*TINY[:-2]))
    env, params, plan = (
        setting.env,
        setting.params,
        planned(setting.planner, setting.env, setting.params),
    )
    returns = []
    for i in range(3):
        key = jax.random.fold_in(jax.random.key(0), i)
        walk = list(moves(key, env, params, setting.updater, 4, plan))
        assert (
            all(move.tree.visits == 48 and not move.terminated for move in walk) and len(walk) == 4
        )
        returns.append(sum(move.reward * 0.95**t for t, move in enumerate(walk)))
    mean, error = pomdp.mean_and_error(np.asarray(returns))
    assert f"return     {mean:.4g} ± {error:.2g} (standard error of 3 episodes" in said.out, (
        said.out
    )
    assert "3 episode(s) together" in said.out and "film" not in said.out
    (row,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["step"] == 3 and row["episodes/return"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_a_budget_of_time_and_a_film(main, tmp_path):
    said = main(*TINY, "episodes=2", "max_steps=2", "budget_s=0.05", of="pomdp")
    assert said.code == 0 and "0.05 s a plan" in said.out, said
    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for name in ("returns.png", "episode.gif"):
        assert (folder / "plots" / name).stat().st_size > 1000


@pytest.mark.slow
def test_a_saved_planner_plans_other_episodes_and_is_filmed(main, tmp_path):
    first = main(*TINY, "gif=false", "seed=4", of="pomdp")
    files = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    again = [
        main("mode=eval", "run=run", "cpu_devices=8", *more, of="pomdp")
        for more in ([], ["seed=9"])
    ]
    told = [
        next(line for line in said.out.splitlines() if line.startswith("return"))
        for said in (first, *again)
    ]
    assert told[0] == told[1] != told[2], told
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == files, (
        "nothing is written"
    )
    filmed = main("mode=film", "run=run", "cpu_devices=8", "max_steps=2", of="pomdp")
    assert filmed.code == 0 and "film       run/plots/episode.gif" in filmed.out, filmed
    assert (tmp_path / "run/plots/episode.gif").stat().st_size > 1000


def test_losses_are_what_decisions_fall_short_by():
    """Tiger: listening twice with one answer, then the right door, loses nothing; a door at once 19.37 + 26.60."""
    judge = Judge(*envs.make("Tiger"))
    assert judge.value == pytest.approx(19.371368, abs=2e-3)
    actions = np.asarray(
        [[0, 0, 2], [1, 0, 0], [1, 1, 0]]
    )  # a door forgets, so the third loses it twice
    live = np.asarray([[True, True, True], [True, False, False], [True, True, False]])
    got, once = judge.losses(actions, np.zeros((3, 3), int), live), 19.371368 + 26.59720
    np.testing.assert_allclose(got, [0, once, once * 1.95], atol=1e-2)
    with pytest.raises(UsageError, match="at most 64 states"):
        Judge(*envs.make("Tag"))


def test_leaves_without_a_heuristic_are_played_out(capsys):
    setting = pomdp.make_setting(pomdp.compose("env=Tiger"))
    assert setting.planner.leaf == "rollout" and "Tiger has no heuristic" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["despot", "pft", "pomcpow", "pomcp", "fixed_reference"])
def test_every_planner_plans(main, tmp_path, planner):
    flags = {"despot": ["planner.num_scenarios=16", "planner.default=0"]}.get(
        planner, ["planner.num_simulations=8"]
    )
    flags += [
        f"planner={planner}",
        "planner.iterations=3",
        "planner.max_depth=3",
        "planner.leaf=zero",
        "episodes=2",
    ]
    said = main(TINY[0], *flags, "max_steps=2", "hydra.run.dir=run", "cpu_devices=8", of="pomdp")
    assert said.code == 0 and f"planner    {planner}" in said.out, said
    assert (tmp_path / "run" / "plots" / "episode.gif").stat().st_size > 1000


def test_trees_of_one_belief_are_merged(main, tmp_path):
    said = main(*TINY, "planner=pomcp", "trees=2", "episodes=1", "max_steps=2", of="pomdp")
    assert said.code == 0, said
    assert "planner    pomcp: " in said.out and "trees=2" in said.out
    assert (tmp_path / "run" / "plots" / "episode.gif").stat().st_size > 1000

    config = pomdp.compose(*TINY[:-2], "planner=pomcp", "trees=2")
    setting = pomdp.make_setting(config)
    belief = setting.updater.init(jax.random.key(0), setting.env, setting.params)
    plan = jax.jit(lambda key: setting.planner.plan(key, setting.env, setting.params, belief))
    _, info = plan(jax.random.key(1))
    assert int(info.visits.sum()) == 2 * 48
    usual = pomdp.compose(*TINY[:-2], "planner=pomcp")
    assert runner.folder_name(usual) != runner.folder_name(config)
    assert "trees" not in runner.identity(usual)
    flags = (
        "planner=despot",
        "planner.num_scenarios=16",
        "trees=2",
        "hydra.run.dir=run",
        "cpu_devices=8",
    )
    said = main("env=Tiger", *flags, of="pomdp")
    assert "Despot's roots cannot be merged" in said.sentence()


def test_actions_of_a_tree_have_room_for_their_names():
    from matplotlib.figure import Figure

    many = tuple(
        Branch("o", 9, 0.0, tuple(Branch("a", 3, 0.0) for _ in range(9))) for _ in range(3)
    )
    root = Branch(
        "belief",
        100,
        1.0,
        (Branch("left", 90, 1.0, many), Branch("stay", 7, 0.5), Branch("right", 3, -1.0)),
    )
    panel = Figure().subplots()
    _draw_tree(panel, root)
    labels = {text.get_text(): text.xy for text in panel.texts}
    assert labels.keys() == {"left\n1.0", "stay\n0.5", "right\n-1.0"} and {
        y for _, y in labels.values()
    } == {-1}
    assert np.diff([x for x, _ in labels.values()]).min() > 1 / 7, labels


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("env=Tigre", "there is no environment 'Tigre'; the nearest are Tiger"),
        ("env=CartPole-v1", "parameters have no discount"),
        ("episodes=0", "episodes=0 must be at least 1"),
        ("max_steps=0", "max_steps=0 must be at least 1"),
        ("mode=eval", "mode=eval needs run= to name the folder of a run, not ''"),
        (
            "mode=film run=nowhere",
            "mode=film needs run= to name the folder of a run, not 'nowhere'",
        ),
        ("mode=eval run=.", "is no run folder: it has no config.yaml"),
        ("mode=train", "mode='train' is unknown; legal are plan, eval, film"),
        ("run=run", "run is of mode=eval and mode=film"),
        ("budget_s=-1", "budget_s=-1.0 must be at least 0"),
        ("judge=true budget_s=1", "leave budget_s=0"),
        (
            "planner=pomcpp",
            "there is no preset 'pomcpp'; legal for planner= are despot, exact, fixed_reference, pft",
        ),
        (
            "planner.kind=sarsop",
            "planner.kind='sarsop' is unknown; legal are vopp, fixed_reference, pomcp, despot",
        ),
        (
            "planner.num_simulation=3",
            "vopp has no planner.num_simulation; the nearest are num_simulations",
        ),
        (
            "planner.eta=warm",
            "planner.eta='warm' does not fit vopp, where it is 2.0; give a number",
        ),
        ("planner.eta=-1", "eta=-1.0 must be over 0"),
        ("planner.leaf=rollouts", "leaf='rollouts' is unknown; legal are heuristic, rollout, zero"),
        ("planner.leaf=heuristic", "Tiger has no heuristic"),
        (
            "planner.discount=never",
            "planner.discount='never' does not fit vopp, where it is 0.95; give a number",
        ),
        ("belief.num_particles=0", "num_particles=0 must be at least 1"),
        ("belief.kind=table", "belief.kind='table' is unknown; legal are particles, exact, rocks"),
        ("belief.kind=rocks", "belief.kind=rocks is for RockSample and MARS, not for Tiger"),
        ("belief.flips=0.1", "belief.flips is for maps of Navigation, not for Tiger"),
        ("params.discount=2", "discount=2.0: out of range; expected 0 to 1"),
        ("params.acuracy=1", "Tiger has no params.acuracy; the nearest are accuracy"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(sentence, main(*TINY, *flags.split(), of="pomdp").sentence())


def test_a_model_from_a_file_is_solved_and_its_policy_is_read_again(main, tmp_path):
    save_pomdp(from_environment(*envs.make("Tiger")), tmp_path / "two doors.POMDP")
    flags = [
        "env=file:two doors.POMDP",
        "belief.kind=exact",
        "episodes=4",
        "max_steps=3",
        "gif=false",
        "cpu_devices=8",
    ]
    first = main(*flags, "planner=exact", "hydra.run.dir=run", of="pomdp", compiles=True)
    assert first.code == 0, first
    assert "value at the start [19.37" in first.out
    assert "belief     exact, state by state" in first.out
    read = main(
        *flags,
        "planner=exact",
        "planner.policy=run/policy.alpha",
        "hydra.run.dir=again",
        of="pomdp",
        compiles=True,
    )
    returns = [
        next(line for line in said.out.splitlines() if line.startswith("return"))
        for said in (first, read)
    ]
    assert returns[0] == returns[1]
    assert (tmp_path / "again" / "policy.alpha").read_text() == (
        tmp_path / "run" / "policy.alpha"
    ).read_text()


def test_a_model_from_a_file_has_its_own_name_discount_and_policy(tmp_path):
    model = from_environment(*envs.make("Tiger"))
    save_pomdp(model, tmp_path / "two doors.POMDP")
    flags = [f"env=file:{tmp_path / 'two doors.POMDP'}", "planner=exact", "params.discount=0.5"]
    config = pomdp.compose(*flags)
    assert config.name == "two doors"
    short = pomdp.make_setting(config)
    assert float(short.params.discount) == 0.5
    best = solve_exact(model.replace(discount=jnp.asarray(0.5)))
    np.testing.assert_allclose(short.planner.value, best.value, atol=1e-6)
    save_policy(short.planner, tmp_path / "short.alpha")
    read = pomdp.make_setting(
        pomdp.compose("env=Tiger", "planner=exact", f"planner.policy={tmp_path / 'short.alpha'}")
    )
    np.testing.assert_array_equal(read.planner.alphas, short.planner.alphas)
    assert np.isinf(float(read.planner.upper))


def test_solved_policies_are_those_of_the_library():
    """QMDP listens never: it takes the tiger to be seen after one step."""
    model = from_environment(*envs.make("Tiger"))
    setting = pomdp.make_setting(pomdp.compose("env=Tiger", "planner=qmdp", "belief.kind=exact"))
    np.testing.assert_allclose(setting.planner.alphas, qmdp(model), rtol=1e-6)
    assert setting.planner.actions.tolist() == [0, 1, 2]
    assert isinstance(setting.updater, ExactBelief)
    assert setting.params.states == model.states
    loose = pomdp.make_setting(pomdp.compose("env=Tiger", "planner=exact", "planner.tolerance=5"))
    assert 1e-3 < float(loose.planner.upper - loose.planner.lower) <= 5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("env=/data/x.POMDP", "env=/data/x.POMDP: no environment of that name; expected env=file:"),
        ("env=file:x.txt", "env=file:x.txt: a file of an unknown kind; expected one that ends in"),
        ("env=file:x.POMDP", "x.POMDP cannot be read"),
        ("env=Tiger planner=exact budget_s=1", "budget_s=1: planner=exact searches nothing"),
        ("env=Tiger planner=qmdp trees=2", "trees=2: planner=qmdp grows no tree; expected trees=1"),
        ("env=LightDark planner=exact", "LightDark has no part tabular"),
        ("env=Tiger planner=exact planner.tolerance=0", "planner.tolerance=0.0 must be over 0"),
    ],
    ids=["path", "kind", "absent", "budget", "trees", "arrays", "tolerance"],
)
def test_what_cannot_be_solved_ends_in_a_sentence(flags, sentence):
    with pytest.raises(UsageError, match=sentence):
        pomdp.make_setting(pomdp.compose(*flags.split()))


def test_how_shown_is_no_part_of_a_runs_identity():
    usual = pomdp.compose()
    assert runner.folder_name(pomdp.compose("gif=false")) == runner.folder_name(usual)
    for flag in (
        "planner=pomcp",
        "planner.eta=3",
        "belief.num_particles=9",
        "max_steps=3",
        "budget_s=1",
        "seed=2",
    ):
        assert runner.folder_name(pomdp.compose(flag)) != runner.folder_name(usual)
    with pytest.raises(UsageError, match="unknown flag"):
        pomdp.compose("plannner.eta=3")


# ---------------------------------------------------------------- exact rocks


@pytest.mark.parametrize("env", [RockSample(4, 3), Mars(4, 3)], ids=lambda env: env.name)
def test_rocks_are_what_bayes_says_of_all_maps(env):
    """A random walk, beside all 2^3 maps weighted by the environment's own likelihood."""
    params = env.default_params.replace(half_efficiency=3.0)
    model, maps = RockBelief(), jnp.asarray(list(itertools.product((False, True), repeat=3)))
    _, state = reset(jax.random.key(0), env, params)
    belief, weights = model.init(jax.random.key(1), env, params), np.full(8, 1 / 8)
    every = jax.vmap(lambda good: env.with_rocks(state, good))(maps)

    @jax.jit
    def advance(key, state, belief, every):
        choose, go, learn = jax.random.split(key, 3)
        action = jax.random.categorical(
            choose, jnp.where(env.action_mask(state, params), 0.0, -jnp.inf)
        )
        after = step(go, env, state, action, params)
        belief, evidence = model.update(learn, belief, action, after.obs, env, params)
        moved = jax.vmap(lambda s: env.transition(go, s, action, params))(every)
        likelihood = jax.vmap(lambda s, n: env.log_likelihood(after.obs, s, action, n, params))(
            every, moved
        )
        return after, belief, evidence, moved, jnp.exp(likelihood)

    for t in range(60):
        after, belief, evidence, every, likelihood = advance(
            jax.random.key(t), state, belief, every
        )
        joint = weights * np.asarray(likelihood)
        np.testing.assert_allclose(np.exp(evidence.log_evidence), joint.sum(), rtol=1e-4)
        weights, state = joint / joint.sum(), after.state
        good = np.asarray([[bool(b) for b in row] for row in _rocks(env, every)])
        np.testing.assert_allclose(belief.good, weights @ good, atol=1e-5)
        if after.terminated:
            break
    assert t > 5 and belief.good.min() < 0.3
    drawn = _rocks(env, belief.sample(jax.random.key(9), 4000))
    np.testing.assert_allclose(drawn.mean(0), belief.good, atol=0.04)
    _, evidence = model.update(
        jax.random.key(0), belief, jnp.asarray(0), jnp.asarray(2), env, params
    )
    assert bool(evidence.depleted) and evidence.log_evidence == -jnp.inf


def _rocks(env, states):
    if isinstance(env, RockSample):
        return np.asarray(states.good)
    return (np.asarray(states.good)[:, :1] >> np.arange(3) & 1).astype(bool)
