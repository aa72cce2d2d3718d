"""The training harness on an algorithm of a few additions: it saves, resumes, tells, checks and closes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from experiments.app.harness import Run, TrainConfig, train
from experiments.app.runner import RunConfig, identity
from jaxpar.io import Checkpoints, ProgressLabels
from jaxpar.loop import Fit
from jaxpar.types import UsageError


@dataclasses.dataclass(frozen=True)
class Sum:
    """Adds each step's input to its state."""

    def init(self, key, inputs=None):
        return jnp.float32(0)

    def step(self, key, state, inputs):
        state = state + inputs
        return state, {"loss": state}

    def done(self, state):
        return state > 1e6


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    train: TrainConfig = TrainConfig(6, 1, 2)


def run_of(folder, told, config=None, **changes):
    config = config or Config()
    length = config.train
    plan = Fit(length.steps, length.chunk, save_every=length.save_every)
    progress = ProgressLabels(description="adding", unit="addition")
    return Run(config, folder, plan, progress, told.append, **changes)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def longer(steps):
    return Config(train=TrainConfig(steps, 1, 2))


def test_a_run_saves_tells_and_goes_on(tmp_path, capfd):
    told = []
    first = train(Sum(), jnp.float32, run_of(tmp_path, told))
    assert (first.step, float(first.state), told) == (6, 15.0, [0])
    assert sorted(Checkpoints(tmp_path / "checkpoints", read_only=True).on_disk()) == [
        4,
        6,
    ]  # the newest two
    assert {path.name for path in tmp_path.iterdir()} >= {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "checkpoints",
    }
    second = train(
        Sum(),
        jnp.float32,
        run_of(tmp_path, told, longer(8), evaluate=lambda state: {"twice": 2 * state}),
    )
    assert (second.step, float(second.state), told) == (8, 28.0, [0, 6])
    assert [row["step"] for row in rows(tmp_path) if "train/loss" in row] == list(range(1, 9))
    assert rows(tmp_path)[-1]["step"] == 8 and any(row.get("twice") == 56 for row in rows(tmp_path))
    assert "  steps: 8\n" in (tmp_path / "config.yaml").read_text()
    assert "adding" in capfd.readouterr().err


def test_a_run_cut_within_a_chunk_goes_on_at_the_steps_of_an_uncut_one(tmp_path):
    def events(folder, steps):
        run = run_of(folder, [], Config(train=TrainConfig(steps, 3, 3)), checkpoints={"keep": 9})
        run = dataclasses.replace(run, fit=dataclasses.replace(run.fit, eval_every=6))
        train(
            Sum(), jnp.float32, dataclasses.replace(run, evaluate=lambda state: {"eval/sum": state})
        )
        evals = [row["step"] for row in rows(folder) if "eval/sum" in row]
        return evals, sorted(Checkpoints(folder / "checkpoints", read_only=True).on_disk())

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    assert events(tmp_path / "whole", 14) == ([6, 12, 14], [3, 6, 9, 12, 14])
    assert events(tmp_path / "cut", 7) == ([6, 7], [3, 6, 7])
    assert events(tmp_path / "cut", 14) == ([6, 7, 12, 14], [3, 6, 7, 9, 12, 14])


def test_a_finished_run_says_how_to_extend_it(tmp_path, capfd):
    told = []
    train(Sum(), jnp.float32, run_of(tmp_path, told, extending="takes longer"))
    assert "is finished" not in capfd.readouterr().out
    again = train(Sum(), jnp.float32, run_of(tmp_path, told, extending="takes longer"))
    assert again.step == 6 and told == [0, 6]
    sentence = "this run is finished; extend it with train.steps=12 (which takes longer)."
    assert sentence in capfd.readouterr().out
    train(Sum(), jnp.float32, run_of(tmp_path, told))
    assert "is finished" not in capfd.readouterr().out


@pytest.mark.parametrize("other", [{"metadata": {"of": "another"}}, {"config": Config(seed=1)}])
def test_checkpoints_of_another_run_are_refused_before_anything_is_told(tmp_path, other):
    told = []
    train(Sum(), jnp.float32, run_of(tmp_path, told))
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(UsageError):
        train(Sum(), jnp.float32, run_of(tmp_path, told, **other))
    assert told == [0] and (tmp_path / "metrics.jsonl").read_text() == before


def test_what_check_raises_ends_the_run(tmp_path):
    def check(step, metrics):
        if metrics["train/loss"] > 5:
            raise UsageError(f"too much after step {step}")

    with pytest.raises(UsageError, match="too much after step 4"):
        train(Sum(), jnp.float32, run_of(tmp_path, [], check=check))


def test_where_checkpoints_live_and_how_many_are_kept(tmp_path):
    where = tmp_path / "elsewhere"
    train(
        Sum(),
        jnp.float32,
        run_of(tmp_path / "run", [], checkpoints={"where": str(where), "keep": 1}),
    )
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert sorted(Checkpoints(where, read_only=True).on_disk()) == [6]


def test_the_seed_is_that_of_the_flags(tmp_path):
    class Drawn(Sum):
        def step(self, key, state, inputs):
            return state, {"loss": jax.random.uniform(key)}

    draws = []
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        config = Config(seed=seed, train=TrainConfig(2, 1, 0))
        (tmp_path / name).mkdir()
        train(Drawn(), jnp.float32, run_of(tmp_path / name, [], config))
        draws.append([row["train/loss"] for row in rows(tmp_path / name) if "train/loss" in row])
    assert draws[0] == draws[2] != draws[1]
    assert identity(Config(seed=1)) == {"seed": 1}
