"""The benchmark of policies: that its tasks are what it says, that answers are counted right, and that it runs."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_modules import bench_modules
from fast import noisy_params
from flat_decoding import lm_generate as generate
from lm_configs import lm_config

from jaxpar.decode import ModelDraft, ModelSizes, Sampling, SinksAndWindow, decoding_cost
from jaxpar.lm import Decoder, apply, num_params

ROOT = Path(__file__).parents[2]
CONFIG = lm_config(
    vocab_size=288, num_layers=2, embed_dim=16, mlp_dim=16, num_heads=2, dtype="float32"
)
LARGE = lm_config(
    vocab_size=16, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=2, dtype="float32"
)
SMALL = lm_config(
    vocab_size=16, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=1, dtype="float32"
)


@pytest.fixture(scope="module")
def bench():
    """The benchmark's module, forgotten afterwards."""
    with bench_modules("decode_policies") as modules:
        yield modules["decode_policies"]


def records_of(row):
    """The (key, value) of each record of a text; a value's symbol tells its key."""
    assert (row[::2] < 32).all() and ((row[1::2] - 32) // 8 == row[::2]).all()
    return list(zip(row[::2].tolist(), ((row[1::2] - 32) % 8).tolist(), strict=True))


def test_keys_come_again_with_their_values_and_those_count(bench):
    rng = np.random.default_rng(0)
    batch = bench.records_batch(rng, 5, 20)
    text = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], 1)
    np.testing.assert_array_equal(text[:, 1:], batch["targets"])
    for row, weights in zip(text, batch["weights"], strict=True):
        seen, counted = {}, np.zeros(40)
        for place, (key, value) in enumerate(records_of(row)):
            assert seen.setdefault(key, value) == value
            counted[2 * place + 1] = key in [before for before, _ in records_of(row)[:place]]
        np.testing.assert_array_equal(weights, counted[1:])
        assert 3 < len(seen) < 20 and len(set(seen.values())) > 2


@pytest.mark.parametrize("size", ["cpu", "full"])
@pytest.mark.parametrize("again", [True, False])
def test_what_is_asked_again_lies_behind_the_window(bench, size, again):
    case = bench.SIZES[size]["heavy"]
    pairs, asked, times, new = (case[name] for name in ("pairs", "asked", "times", "new"))
    order = bench.asked_order(np.random.default_rng(0), 4, pairs, asked, times, new, again)
    for row in bench.written(np.random.default_rng(1), order):
        keys = [key for key, _ in records_of(row)]
        assert len(set(keys)) == pairs + new
        hot, last = keys[pairs : pairs + asked * times], keys[-asked:]
        assert set(collections.Counter(hot).values()) == {times} and len(set(last)) == asked
        assert (set(hot) == set(last)) == again and set(last) <= set(keys[:pairs])
        budget = (len(keys) - asked) // 2  # a quarter of two tokens each
        for place, key in enumerate(last, len(keys) - asked):
            before = max(i for i in range(place) if keys[i] == key)
            assert 2 * (place - before - 1) > budget, "a window would do"


def test_what_is_expected_token_after_token_is_what_the_whole_model_says(bench):
    params = noisy_params(CONFIG)
    text = bench.written(np.random.default_rng(0), np.array([[0, 1, 2, 1, 3, 0, 2, 1]] * 3))
    whole = np.asarray(apply(params, jnp.asarray(text), CONFIG)).argmax(-1)
    got = bench.expected(params, text, CONFIG, 9, None, 4)
    np.testing.assert_array_equal(got, whole[:, 8:-1])
    short = bench.expected(params, text, CONFIG, 9, SinksAndWindow(0, 4), 4)
    assert (np.asarray(short)[:, 0] == whole[:, 8]).all() and (short != got).any()


def is_solution(given, answer):
    """The verifier in plain words."""
    total, numbers = 10 * given[0] + given[1], collections.Counter(given[3 : 3 + 8])
    so_far = 0
    for number, tens, ones in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
        so_far += number
        if not numbers[number] or max(number, tens, ones) > 9 or 10 * tens + ones != so_far:
            return False
        numbers[number] -= 1
    return so_far == total


def test_answers_are_verified_as_in_plain_words(bench):
    rng = np.random.default_rng(0)
    given, answers = bench.problems(rng, 400)
    assert bench.verified(given, answers).all()
    others = answers.copy()
    places = rng.integers(bench.NEW, size=400)
    others[np.arange(400), places] = rng.integers(0, 12, 400)
    shuffled = np.roll(answers, 1, axis=0)  # right totals, of other problems
    forged = np.concatenate([others, shuffled])
    want = [
        is_solution(*map(np.ndarray.tolist, pair))
        for pair in zip(np.tile(given, (2, 1)), forged, strict=True)
    ]
    np.testing.assert_array_equal(bench.verified(np.tile(given, (2, 1)), forged), want)
    assert 10 < sum(want[:400]) < 390
    twice = np.array([[3, 6, 10, *[9] * 8, 11]]), np.array([[9, 0, 9, 9, 1, 8, 9, 2, 7, 9, 3, 6]])
    assert bench.verified(*twice).all()
    fewer = twice[0].copy()
    fewer[0, 3:8] = 1  # three nines are left
    assert not bench.verified(fewer, twice[1]).any()
    given, answer = [2, 8, 10, 1, *[9] * 7, 11], [1, 0, 1, 9, 1, 0, 9, 1, 9, 9, 2, 8]
    carried = [*answer[:4], 0, 10, *answer[6:]]  # ten as no ten and one symbol that is no digit
    for each in (answer, carried):
        assert (
            bench.verified(np.array([given]), np.array([each]))
            == [is_solution(given, each)]
            == [each == answer]
        )
    batch = bench.sums_batch(np.random.default_rng(0), 3)
    counted = batch["targets"][batch["weights"] > 0].reshape(3, -1)
    assert bench.verified(batch["tokens"][:, : bench.GIVEN], counted).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("blocks", [None, 2])
def test_a_budget_buys_the_most_answers_that_it_pays_for(bench, blocks, shared):
    def price(samples):
        return bench.price(LARGE, blocks, samples, shared, 562.5)

    budget = None if blocks is None else 8
    cost = decoding_cost(
        ModelSizes(num_params(LARGE), 1, 2, 2, 8),
        12,
        12,
        samples=3,
        shared=shared,
        budget=budget,
        block=4,
    )
    assert price(3) == pytest.approx(cost.flops + 562.5 * cost.cache_bytes)
    for times in (0.5, 1.0, 3.0, 7.3):
        most = bench.affordable(times * price(1), price)
        assert price(most + 1) > times * price(1) and (
            most == 0 or price(most) <= times * price(1) * (1 + 1e-9)
        )


def test_coverage_is_that_of_the_law_that_problems_were_drawn_from(bench):
    rng = np.random.default_rng(0)
    for a, b in ((0.5, 2.0), (4.0, 1.0), (0.3, 9.0)):
        chances, counts = rng.beta(a, b, 4000), np.array([1, 8, 64])
        found = bench.coverage(rng.binomial(8, chances), 8, counts)
        want = 1 - ((1 - rng.beta(a, b, 200_000)[:, None]) ** counts).mean(0)
        np.testing.assert_allclose(found, want, atol=0.03)


def test_even_drafts_are_accepted_as_generation_accepts_them(bench):
    large, small = noisy_params(LARGE), noisy_params(SMALL)
    prompts = np.random.default_rng(0).integers(0, 16, (6, 5)).astype(np.int32)
    draw = jax.jit(generate, static_argnums=(3, 4), static_argnames="draft")
    sampling, key = Sampling(24, 0.0), jax.random.key(0)
    texts = np.asarray(draw(key, large, prompts, LARGE, sampling).tokens)
    right, sure = bench.guessed(small, SMALL, texts, 5, 3, rows=64)
    drafted = draw(
        key,
        large,
        prompts,
        LARGE,
        sampling,
        draft=ModelDraft(Decoder(SMALL), 3),
        draft_params=small,
    )
    for row in range(6):  # the first token is found by the pass over the prompt
        got = bench.passes(
            right[row : row + 1, 1:], sure[row : row + 1, 1:], lambda sure: np.full(1, 3)
        )
        assert got[2] == drafted.passes[row] and got[1] == 3 * got[2]
    assert 0.02 < right.mean() < 0.98
    law = np.asarray(jax.nn.log_softmax(apply(small, jnp.asarray(texts), SMALL)))
    np.testing.assert_allclose(sure[:, :, 0], np.exp(law.max(-1))[:, 4:-1], rtol=1e-4)
    chosen = law.argmax(-1)[:, 4:-1]
    np.testing.assert_array_equal(right[:, :, 0], chosen == texts[:, 5:])


def test_passes_are_counted_until_the_first_row_ends(bench):
    right = np.zeros((2, 5, 2), bool)
    right[0] = right[1, 0] = True  # the first row is at places 0 and 3, then over
    right[1, 2, 1] = True  # the guess before it is wrong, so it does not count
    assert bench.passes(right, right.astype(float), lambda sure: np.array([2, 1])) == (5, 6, 2)


@pytest.mark.slow  # two dozen programs to compile: a minute of a core
def test_every_case_runs(tmp_path):
    out = tmp_path / "policies.json"
    command = [
        sys.executable,
        str(ROOT / "bench" / "decode_policies.py"),
        "--tiny",
        "--out",
        str(out),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    table = json.loads(out.read_text())
    assert {"all", "Keyformer", "H2O", "window"} <= table["heavy"].keys() and table["share"]["each"]
    assert [len(each["rows"]) for each in table["cost"]["budgets"]] == [12] * 6
