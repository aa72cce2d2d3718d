"""`python -m experiments.env`: what it measures is what happened; changes by flags; sentences and exit codes."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import env
from experiments.app import runner
from experiments.app.env.policies import FirstAction, Shot, captions, save_film
from jaxpar.env import Box, Discrete, Fields
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.rollout import RolloutOptions, episode_stats, first_episodes, init, rollout
from jaxpar.types import UsageError

TINY = "env=CartPole-v1 num_envs=8 num_steps=12 frames=7 hydra.run.dir=run cpu_devices=8".split()


def policy_run_of(*flags):
    return env.make_policy_run(env.compose(*flags))


def walked(policy_run, num_calls, num_steps):
    with use_mesh(make_mesh(MeshSpec(data=8))):
        key = jax.random.key(0)
        return list(policy_run.calls(key, *policy_run.compiled(key, num_steps), num_calls))


# ---------------------------------------------------------------- the command


def test_it_counts_what_happened(main, tmp_path, monkeypatch):
    """No pole falls within five steps, so all is known beforehand."""
    image, image_sequence = (
        pytest.importorskip("PIL.Image"),
        pytest.importorskip("PIL.ImageSequence"),
    )
    monkeypatch.setattr(env, "divided", lambda num_steps, num_envs: (3, 4))
    said = main(*TINY, "params.max_steps=5", of="env")
    assert said.code == 0, said
    folder = tmp_path / "run"
    assert {".lock", "config.yaml", "env.json", "metrics.jsonl", "plots"} == {
        path.name for path in folder.iterdir()
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert [row["rollout/num_episodes"] for row in rows] == [0, 8, 8]
    assert [row["rollout/first_finished"] for row in rows] == [0, 1, 1]
    assert rows[-1]["rollout/first_length"] == rows[-1]["rollout/first_return"] == 5
    assert all(row["rollout/steps_per_s"] > 0 for row in rows)
    assert (
        "96 in " in said.out
        and "ended      16 episodes, at 16.667% of the steps; 100.0% were cut" in said.out
    )
    assert (
        "one episode each, ± standard deviation: return 5 ± 0 (5 to 5), length 5 ± 0 (5 to 5), 100.0% cut"
        in said.out
        and "favoured" not in said.out
    )
    assert (folder / "plots" / "episodes.png").stat().st_size > 1000
    with image.open(folder / "plots" / "environments.gif") as gif:
        shown = [
            np.asarray(frame.convert("RGB"))
            for frame in image_sequence.Iterator(gif)
            for _ in range(
                frame.info["duration"] // 100
            )  # equal frames became one that lasts longer
        ]
    pictures = [
        frame[: frame.shape[0] // 4] for frame in shown
    ]  # of the first row, above its caption
    assert [frame.min() >= 120 for frame in pictures] == [False] * 5 + [
        True,
        False,
    ]  # the end is faded


def test_what_did_not_finish_is_told(main):
    said = main(*TINY, "gif=false", "num_steps=4", of="env")
    assert said.code == 0, said
    assert (
        "no environment finished its first episode within 4 steps; raise num_steps" in said.out
    ), said
    assert "plot " not in said.out and "film" not in said.out


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("env=CartPole-v2", "there is no environment 'CartPole-v2'; the nearest are CartPole-v1"),
        ("num_envs=0", "num_envs=0 must be at least 1"),
        ("num_envs=-8", "num_envs=-8 must be at least 1"),
        ("num_envs=9", "num_envs=9 does not divide over .*; the nearest legal are 8 or 12"),
        ("num_steps=0", "num_steps=0 must be at least 1"),
        ("frames=0", "frames=0 must be at least 1"),
        ("policy=clever", "policy='clever' is unknown; legal are random, scripted, noop"),
        ("policy=scripted", "CartPole-v1 comes with no scripted play; legal are random and noop"),
        ("reset=sometimes", "reset='sometimes' is unknown; legal are chunked, same_step"),
        ("prng=twice", "prng='twice' is unknown; legal are env and batch"),
        ("params.gravty=5", "CartPole-v1 has no params.gravty; the nearest are gravity"),
        (
            "params.gravity=strong",
            "params.gravity='strong' does not fit CartPole-v1, where it is 9.8; give a number",
        ),
        ("params.gravity=nan", "params.gravity=nan must be a finite number"),
        (
            "params.max_steps=2.5",
            "params.max_steps=2.5 does not fit CartPole-v1, where it is 500; give an integer",
        ),
        ("env_fields.size=3", "CartPole-v1 has no env_fields.size; it has none"),
        ("env=Combat-3v3 params.reach=[1,2]", r"give a list of 3, each an integer"),
        (
            "env=DoorKey-8x8 env_fields.layout=3",
            "env_fields.layout=3 does not fit DoorKey-8x8: no flag can give a",
        ),
        ("polcy=random", "unknown flag 'polcy'; did you mean policy"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(sentence, main(*TINY, *flags.split(), of="env").sentence())


def test_how_long_and_how_shown_is_no_part_of_a_runs_identity():
    usual = env.compose()
    for flag in ("num_steps=5", "gif=false", "frames=3", "mesh.data=8"):
        assert runner.folder_name(env.compose(flag)) == runner.folder_name(usual)
    for flag in (
        "params.max_steps=9",
        "policy=noop",
        "num_envs=8",
        "reset=none",
        "prng=batch",
        "seed=2",
    ):
        assert runner.folder_name(env.compose(flag)) != runner.folder_name(usual)
    assert runner.folder_name(usual).startswith("DoorKey-8x8-")


# ---------------------------------------------------------------- the rollout


@pytest.mark.slow
def test_calls_together_are_one_rollout():
    policy_run = policy_run_of("env=CartPole-v1", "num_envs=8", "reset=same_step")
    calls, key = walked(policy_run, 3, 20), jax.random.key(0)
    env_state = init(key, policy_run.env, policy_run.params, 8)
    _, steps = rollout(
        key,
        env_state,
        policy_run.env,
        policy_run.params,
        policy_run.policy,
        policy_run.params,
        60,
        RolloutOptions(reset=policy_run.reset),
    )
    assert 0 < episode_stats(steps)["num_episodes"]
    jax.tree.map(np.testing.assert_array_equal, calls[-1].first, first_episodes(steps))
    found, wanted = env.totals(calls), jax.device_get(episode_stats(steps))
    for name in ("num_steps", "num_episodes", "return_mean", "length_mean"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6)
    assert found["done_rate"] == wanted["num_episodes"] / (8 * 60)
    everything = (steps.obs, steps.action, steps.reward, steps.terminated, steps.truncated)
    total = sum(np.asarray(leaf, np.float64).sum() for leaf in jax.tree.leaves(everything))
    np.testing.assert_allclose(found["checksum"], total, rtol=1e-5)


def test_scripted_play_knows_the_state_and_faults_are_told():
    policy_run, key = (
        policy_run_of("env=SpeakerListener", "num_envs=16", "policy=scripted"),
        jax.random.key(0),
    )
    with use_mesh(make_mesh(MeshSpec(data=8))):
        program, env_state = policy_run.compiled(key, 25)
        (call,) = policy_run.calls(key, program, env_state, 1)
        assert call.first.finished.all() and call.values["first_return"] > -15  # at random: -40
        broken = dataclasses.replace(
            policy_run, params=policy_run.params.replace(push=float("nan"))
        )
        with pytest.raises(
            UsageError,
            match=r"at step \d of environment 0 \(the first of \d+ such steps\) the reward is \[nan",
        ):
            list(broken.calls(key, program, env_state, 1))


def test_noop_takes_the_first_legal_action():
    policy_run = policy_run_of("env=CartPole-v1", "policy=noop")
    mask = jnp.array([[False, True, True], [True, False, False]])
    assert FirstAction(None)(None, None, None, (), action_mask=mask)[0].tolist() == [1, 0]
    assert policy_run.policy(None, policy_run.params, None, ())[0] == 0

    class Continuous:
        def action_space(self, params):
            return Fields.of(a=Box(1.0, 2.0, (2,)), b=Box(-1.0, 1.0))

    action = FirstAction(Continuous())(None, None, None, ())[0]
    assert action["a"].tolist() == [1, 1] and action["b"] == 0


def test_an_environment_without_a_picture_is_not_filmed(tmp_path, capsys):
    assert (
        save_film(0, policy_run_of("env=Breakout-MinAtar"), "Breakout-MinAtar", tmp_path, 5, fps=10)
        is None
    )
    assert "Breakout-MinAtar has no render" in capsys.readouterr().out


def test_captions_have_step_return_and_the_action_by_its_name():
    images, steps = np.zeros((2, 1, 4, 4, 3), np.uint8), np.array([[7], [8]])
    over, actions = np.array([[False], [True]]), np.array([[1], [0]])
    told = captions(
        Discrete(2, names=("left", "right")),
        Shot(images, steps, np.array([[2.5], [3]]), over, actions),
    )
    assert told == ["step 7  return 2.5\nright", "step 8  return 3\nended"]
    team = Shot(images[:1], steps[:1], np.array([[[1.0, 2.0]]]), over[:1], np.array([[[2, 1]]]))
    assert captions(Discrete(3, (2,)), team) == ["step 7  return 1.5 (mean)\n2, 1"]
    push = team._replace(actions=np.array([[[0.25]]], np.float32))
    assert captions(Box(-1.0, 1.0, (1,)), push) == ["step 7  return 1.5 (mean)\n0.25"]


def test_fields_and_parameters_are_changed():
    policy_run = policy_run_of(
        "env=Foraging-8x8-2p-2f", "env_fields.size=6", "params.max_steps=9", "params.penalty=1"
    )
    assert policy_run.env.size == 6 and policy_run.params.max_steps == 9
    assert policy_run.params.penalty == 1.0 and type(policy_run.params.penalty) is float
    assert policy_run_of("env=Combat-3v3", "params.reach=[1,2,3]").params.reach == (1, 2, 3)
