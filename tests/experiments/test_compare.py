"""`python -m experiments.compare`: equal seconds, a line for each seed, and no finished row trained twice."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from experiments import compare
from experiments.app import runner
from jaxpar.lm import num_params
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

TINY = (
    "model.num_layers=1 model.embed_dim=8 model.attention.num_heads=2 "
    "model.attention.num_kv_heads=2 model.mlp.dim=8 data.seq_len=16 "
    "data.batch_size=8 evaluations=4 eval_batches=1 optimizer.warmup_steps=2 hydra.run.dir=run cpu_devices=8"
).split()
SPEEDS = {"attention": 640.0, "min_gru": 1280.0}  # tokens a second, of steps of 128


def test_rows_get_what_their_speed_makes_of_the_budget_and_are_trained_once(
    main, text, tmp_path, monkeypatch
):
    asked, judged, make_evaluate = [], [], compare.lm.make_evaluate

    def recorded(config, corpus):
        judged.append(config.seed)
        return make_evaluate(config, corpus)

    monkeypatch.setattr(compare.lm, "make_evaluate", recorded)

    def measure(config, mixers, corpus):
        asked.append(list(mixers))
        return {mixer: SPEEDS[mixer] for mixer in mixers}

    monkeypatch.setattr(compare, "measure", measure)
    usual = [*TINY, f"data.path={text}", "seconds=1"]
    assert main(*usual, "mixers=[min_gru]", "num_seeds=1", of="compare", compiles=True).code == 0
    first = (tmp_path / "run" / "min_gru" / "seed-0" / "metrics.jsonl").read_bytes()
    said = main(*usual, "mixers=[attention,min_gru]", "num_seeds=2", of="compare", compiles=True)
    assert said.code == 0, said
    assert asked == [["min_gru"], ["attention"]]
    assert judged == [0] * 4, "all seeds are judged by the same windows"
    assert (tmp_path / "run" / "min_gru" / "seed-0" / "metrics.jsonl").read_bytes() == first
    assert re.findall(r"^(\w+), seed (\d): ", said.out, re.M) == [
        ("attention", "0"),
        ("attention", "1"),
        ("min_gru", "1"),
    ]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert [(row["mixer"], row["seed"]) for row in rows] == [
        (m, s) for s in (0, 1) for m in ("attention", "min_gru")
    ]
    for row in rows:
        steps = round(SPEEDS[row["mixer"]] / 128)
        assert (row["steps"], row["tokens"]) == (steps, 128 * steps) and row["took_s"] > 0
        seconds, losses = np.array(row["points"]).T
        every = -(-steps // 4)
        np.testing.assert_allclose(seconds, np.array([*range(every, steps, every), steps]) / steps)
        assert row["loss"] == losses[-1]
        want = np.polyfit(np.log2(seconds), losses, 1)
        np.testing.assert_allclose([row["slope"], row["line_at_end"]], want, rtol=1e-6)
    one = [row["loss"] for row in rows if row["mixer"] == "min_gru"]
    assert len(set(one)) == 2 and f"{np.mean(one):.4f} ± {np.std(one, ddof=1):.4f}" in said.out
    assert (tmp_path / "run" / "plots" / "fits.png").stat().st_size > 1000


def test_a_speed_is_the_median_of_rounds_in_which_all_take_turns(monkeypatch, text):
    """A clock of our own: the first step compiles, the second tells how many fill a round, one round is disturbed."""
    turns, seconds = [], {"min_lstm": 0.25, "min_gru": 0.5}

    def timed(step, key, state, batch, count):
        turns.append((step, count))
        disturbed = 10.0 if len(turns) in (1, 3, 7) else 1.0
        return count * seconds[step] * disturbed, state

    monkeypatch.setattr(compare, "_timed", timed)
    monkeypatch.setattr(compare, "compile_step", lambda trainer, *_, **__: trainer.model.mixer.kind)
    config = compare.compose(*TINY, f"data.path={text}", "timed_s=5")
    corpus = compare.open_corpus(config.data, text.parent / "data")
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        got = compare.measure(config, ["min_lstm", "min_gru"], corpus)
    assert got == {"min_lstm": 128 / 0.25, "min_gru": 128 / 0.5}
    assert turns[:4] == [("min_lstm", 1), ("min_lstm", 1), ("min_gru", 1), ("min_gru", 1)]
    assert turns[4:] == [("min_lstm", 4), ("min_gru", 2)] * compare.ROUNDS


def test_a_line_of_least_squares_in_log_time():
    seconds = np.array([1.0, 2, 4, 8])
    slope, end = compare.fitted(np.stack([seconds, 5 - 0.25 * np.log2(seconds)], 1))
    assert (slope, end) == pytest.approx((-0.25, 4.25))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("mixers=[]", r"mixers=\[\] must name one at least, and each once"),
        ("mixers=[gla,gla]", "must name one at least, and each once"),
        ("mixers=[gla,lstn]", "model.mixer.kind='lstn' is unknown; legal are attention"),
        (
            "mixers=[gla] model.mixer.kind=lmu",
            r"model.mixer.kind=lmu is not among mixers=\[gla\]; add it",
        ),
        ("seconds=0", "seconds=0.0 must be over 0"),
        ("num_seeds=0", "num_seeds=0 must be"),
        ("evaluations=1", "evaluations=1 must be at least 2"),
    ],
)
def test_mistakes_end_in_a_sentence(flags, sentence):
    with pytest.raises(UsageError, match=sentence):
        compare.compose(*flags.split())


def test_fields_of_one_mixer_are_given_to_all_that_read_them():
    config = compare.compose(
        "mixers=[attention,lmu,windowed,gla]", "model.mixer.kind=lmu", "model.mixer.window=32"
    )
    models = {mixer: config.row(mixer, 0, 4).model for mixer in config.mixers}
    assert {mixer: model.mixer.window for mixer, model in models.items()} == {
        "attention": 128, "lmu": 32, "windowed": 32, "gla": 128,
    }  # fmt: skip
    usual = compare.compose().row("gla", 0, 4).model
    assert models["gla"] == usual  # not of the size that lmu has
    free, plain = (compare.compose().row(mixer, 0, 4).model for mixer in ("matmul_free", "hgrn"))
    assert free == dataclasses.replace(plain, weights="ternary") and plain.weights != "ternary"


def test_states_of_a_block_recurrent_row_are_carried():
    """Over four windows of a row, unless it is said otherwise, at about attention's size."""
    config = compare.compose("data.seq_len=64")
    model, attention = (config.row(mixer, 0, 4).model for mixer in ("block_recurrent", "attention"))
    assert (model.mixer.window, model.mixer.states) == (16, 16)
    assert abs(num_params(model) / num_params(attention) - 1) < 0.05
    given = (
        "mixers=[block_recurrent]",
        "model.mixer.kind=block_recurrent",
        "model.mixer.window=64",
        "model.mixer.states=7",
    )
    model = compare.compose(*given, "data.seq_len=64").row("block_recurrent", 0, 4).model
    assert (model.mixer.window, model.mixer.states) == (64, 7)


def test_more_mixers_and_seeds_are_the_same_run():
    usual = runner.identity(compare.compose())
    assert runner.identity(compare.compose("mixers=[gla]", "num_seeds=9", "timed_s=1")) == usual
    for flag in (
        "seconds=3",
        "evaluations=4",
        "model.embed_dim=32",
        "optimizer.learning_rate=1e-4",
        "seed=2",
    ):
        assert runner.identity(compare.compose(flag)) != usual
