"""`python -m experiments.papers.step_speculation`: lines, scores and counts of tokens are those of a plain loop."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit, noisy_params
from flat_decoding import lm_generate as generate

from experiments.app.sequences import sums
from experiments.papers import step_speculation
from experiments.papers.step_speculation import answer
from jaxpar.decode import Sampling
from jaxpar.lm import apply

FLAGS = "terms=3 target_layers=1 target_width=32 draft_width=32 questions=5".split()
END, ROOM = ord("\n"), 9


@pytest.fixture(scope="module")
def world():
    """Two models that were never trained, but for a bias to end lines, their parameters, and questions."""
    config = step_speculation.compose(*FLAGS)
    models = {name: config.sizes(name) for name in ("target", "draft")}
    params = {name: noisy_params(model) for name, model in models.items()}
    params["draft"] = jax.tree.map(
        lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size).reshape(x.shape)), params["draft"]
    )
    return config, models, params, sums.draw(np.random.default_rng(3), 5, 3, 1)


@pytest.fixture(scope="module")
def law(world):
    """`law(name, text)` is the log-probabilities of what follows a text, and of each of its own bytes."""
    _, models, params, _ = world
    wide = 2 * ROOM + 6 + ROOM
    whole = {
        name: jit(lambda p, x, m=model: jax.nn.log_softmax(apply(p, x, m)))
        for name, model in models.items()
    }

    def call(name, text):
        rows = np.asarray(whole[name](params[name], np.pad(text, (0, wide - len(text)))[None]))[0]
        return rows[len(text) - 1], [
            rows[place - 1, byte] for place, byte in enumerate(text) if place
        ]

    return call


def plain(law, prompt, steps, judge, threshold):
    """One question by a loop without batches or caches: text, which lines were rewritten, target's tokens, scores."""
    text, rewritten, scores, read, cached = list(prompt), [], [], 0, 0

    def line(name, text):
        text = list(text)
        for _ in range(ROOM):
            text.append(int(law(name, text)[0].argmax()))
            if text[-1] == END:
                break
        return text

    for _ in range(steps):
        drafted = line("draft", text)
        score = np.mean(law(judge, drafted)[1][len(text) - 1 :])
        scores.append(score)
        if judge == "target":
            read += len(drafted) - cached
            cached = len(drafted)
        rewritten.append(bool(np.exp(score) < threshold))
        if rewritten[-1]:
            own = line("target", text)
            read += len(own) - (len(text) if judge == "target" else cached)
            cached, text = len(own), own
        else:
            text = drafted
    return text, rewritten, read, scores


@pytest.mark.parametrize("judge", ["draft", "target"])
def test_texts_lines_and_counts_are_those_of_a_plain_loop(world, law, judge):
    config, models, params, numbers = world
    config = step_speculation.compose(*FLAGS, f"score={judge}")
    texts, prompt = sums.written(numbers, 1)
    first = [plain(law, text[:prompt].tolist(), 2, judge, 0.0) for text in texts]
    scores = np.sort([score for _, _, _, scores in first for score in scores])
    kinds = set()
    for threshold in (0.0, *np.exp((scores[[2, 5, 7]] + scores[[3, 6, 8]]) / 2), 2.0):
        found = answer(config, models, params, numbers, "threshold", threshold)
        for row, text in enumerate(texts):
            want, rewritten, read, _ = plain(law, text[:prompt].tolist(), 2, judge, threshold)
            assert found.texts[row, : found.lengths[row]].tolist() == want, (threshold, row)
            assert found.rewritten[row].tolist() == rewritten and found.target_tokens[row] == read
            kinds.add(tuple(rewritten))
    assert len(kinds) > 2, "or thresholds would not be tested"


def test_a_score_is_the_mean_over_the_lines_bytes(world, law):
    """Of lines after any bytes, some of which end early."""
    _, models, params, _ = world
    rng = np.random.default_rng(5)
    texts, starts = rng.integers(0, 64, (48, 24)), rng.integers(6, 15, 48).astype(np.int32)
    texts = np.where(np.arange(24) < starts[:, None], texts, 0).astype(np.int32)
    (_, (made, ends)), scores = step_speculation.step(
        ROOM, models["target"], models["draft"], params, texts, starts
    )
    assert (ends - starts < ROOM).any() and (ends - starts == ROOM).any()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for name in ("target", "draft"):
            want = np.mean(law(name, made[row, :end])[1][start - 1 :])
            assert scores[name][row] == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_where_all_is_rejected_tokens_are_those_of_the_target_alone(world):
    """And where nothing is, those of the draft; the models' own continuation knows of no lines."""
    config, models, params, numbers = world
    texts, prompt = sums.written(numbers, 1)
    sampling = Sampling(2 * ROOM, temperature=0)
    alone = {
        name: jit(
            lambda p, m=model: generate(jax.random.key(1), p, texts[:, :prompt], m, sampling)
        )(params[name])
        for name, model in models.items()
    }
    cases = [("target", "threshold", 2.0), ("target", "conformal", 1.0)]
    cases += [("draft", "threshold", 0.0), ("draft", "conformal", 0.0)]
    for name, rule, level in cases:
        found = answer(config, models, params, numbers, rule, level)
        for row, end in enumerate(found.lengths):
            np.testing.assert_array_equal(found.texts[row, :end], alone[name].tokens[row, :end])
        assert found.rewritten.all() if name == "target" else not found.rewritten.any()
        assert name == "target" or not found.target_tokens.any()


def test_conformal_shares_are_those_that_are_asked_for(monkeypatch):
    """Scores that are exchangeable, of steps that differ from each other; of 20 seeds."""
    count, steps = 300, 2
    rng = np.random.default_rng(0)

    def step(room, target, draft, params, texts, lengths):
        number = (lengths[0] - 6) // 3
        scores = (1 + number) * rng.standard_normal(count).astype(np.float32) - 5 * number
        return ((texts, lengths + 3), (texts, lengths + 3)), {"draft": scores, "target": scores}

    monkeypatch.setattr(step_speculation, "step", step)
    config, numbers = (
        step_speculation.compose(*FLAGS),
        sums.draw(np.random.default_rng(0), count, steps + 1, 1),
    )
    for alpha in (0.1, 0.4):
        bound = 3 * np.sqrt(alpha * (1 - alpha) / count)
        for seed in range(20):
            found = answer(
                dataclasses.replace(config, seed=seed),
                dict(target=0, draft=0),
                {},
                numbers,
                "conformal",
                alpha,
            )
            assert (abs(found.rewritten.mean(0) - alpha) <= bound).all(), "of each step"


@pytest.mark.parametrize("digits", [1, 2])
def test_sums_are_right(digits):
    numbers = sums.draw(np.random.default_rng(0), 40, 4, digits)
    texts, prompt = sums.written(numbers, digits)
    line = sums.line_length(digits)
    assert (
        texts.shape == (40, prompt + 3 * line)
        and texts.max() < sums.VOCAB
        and numbers.max() == 10**digits - 1
    )
    for row, text in zip(numbers.tolist(), texts, strict=True):
        first, *lines = bytes(text.astype(np.uint8)).decode().splitlines()
        assert [int(number[::-1]) for number in first.split("+")] == row
        total = row[0]
        for said, number in zip(lines, row[1:], strict=True):
            left, more, total = total, number, total + number
            assert [int(part[::-1]) for part in re.split("[+=]", said)] == [left, more, total]
    assert sums.answered(texts, numbers, digits).all()
    later = np.pad(texts, ((0, 0), (0, 5)), constant_values=ord("7"))
    assert sums.answered(later, numbers, digits).all(), "what follows the last line does not count"
    wrong = texts.copy()
    wrong[::2, -2] = ord("9")  # the first digit
    assert (sums.answered(wrong, numbers, digits) == (np.arange(40) % 2 == 1)).all()
    assert not sums.answered(texts[:, :-line], numbers, digits).any()
    made = sums.batch(np.random.default_rng(0), 40, 4, digits)
    assert (made["tokens"] == texts[:, :-1]).all() and (made["targets"] == texts[:, 1:]).all()
    assert (made["weights"].sum(1) == 3 * line).all() and (made["weights"][:, -1] == 1).all()


def test_the_command_trains_tells_and_goes_on(main, tmp_path):
    flags = [
        *FLAGS,
        *"target_steps=2 draft_steps=2 batch_size=4 thresholds=[2.0] alphas=[1.0]".split(),
    ]
    flags += ["cpu_devices=8", "hydra.run.dir=run"]
    said = main(*flags, of="step_speculation", compiles=True)
    assert said.code == 0, said
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    alone, drafted, every, conformal = rows
    assert (
        alone["flops"] == alone["target_tokens"] == 1
        and drafted["target_tokens"] == drafted["rewritten"] == 0
    )
    assert (
        every["rewritten"] == conformal["rewritten"] == 1
        and every["target_tokens"] == 1 < every["flops"]
    )
    assert every["right"] == conformal["right"] == alone["right"]
    assert (tmp_path / "run" / "plots" / "steps.png").stat().st_size > 1000
    again = main(*flags, "score=target", of="step_speculation")  # trains nothing
    assert again.code == 0 and "judged by the target" in again.out
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[2]["target_tokens"] > 1, "a target that reads every line and writes it again"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("target_width=40", "target_width=40 must be a multiple of 32"),
        ("score=me", "score='me' is unknown; legal are draft, target"),
        ("alphas=[1.5]", "alphas=.* has an entry that must be at least 0 and at most 1"),
        ("terms=11", "terms=11 must be at least 2 and at most 10"),
        ("mesh.data=8 cpu_devices=8", "speculation by steps has nothing along data"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(
        sentence, main("hydra.run.dir=run", *flags.split(), of="step_speculation").sentence()
    )
