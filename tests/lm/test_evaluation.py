"""Likelihoods, choices, exact answers and perplexities against plain loops; every refusal of a line."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from lm_configs import with_fields

from jaxpar.lm import apply, axes, init
from jaxpar.lm import evaluation as ev
from jaxpar.lm.objectives import token_log_likelihoods
from jaxpar.lm.text.tokenizer import Bytes
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.types import UsageError

CONFIG = with_fields(tiny.SHALLOW, vocab_size=256, loss_chunk=16)


class Begun(Bytes):
    bos_ids, eos_ids = (1,), (2,)


@pytest.fixture(scope="module")
def params():
    with jax.enable_x64(True):
        return init(jax.random.key(0), CONFIG, jnp.float64)


def write(tmp_path, *lines):
    path = tmp_path / "mine.jsonl"
    path.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return path


all_logits = jax.jit(apply, static_argnames="config")


def plain(params, ids, first):
    """The log-likelihood of tokens from number `first` on, one at a time, in NumPy but for the logits."""
    z = np.asarray(all_logits(params, jnp.asarray(np.pad(ids, (0, 48 - len(ids))))[None], CONFIG))[
        0
    ]
    total = 0.0
    for place in range(first, len(ids)):
        before = z[place - 1]
        total += before[ids[place]] - math.log(np.exp(before).sum())
    return total


QUESTIONS = [
    {"prompt": "2+2=", "choices": ["4", " five, I think"], "answer": 0},
    {"prompt": "the", "choices": ["n", "re is", "m"], "answer": 2, "id": 7},
    {"prompt": "a longer prompt than the others", "choices": ["x", "yz"], "answer": 1},
]


def test_choices_are_those_of_a_loop(params, tmp_path):
    questions = ev.read_questions(write(tmp_path, *QUESTIONS))
    with jax.enable_x64(True):
        rows = ev.rows_of_questions(questions, Begun())
        sums, nums = ev.log_likelihoods(params, rows, CONFIG, batch_size=3)
        want, right, right_mean, answers = [], [], [], []
        for question in QUESTIONS:
            own = []
            for choice in question["choices"]:
                ids = [1, *question["prompt"].encode(), *choice.encode()]
                own.append(plain(params, np.array(ids), 1 + len(question["prompt"].encode())))
            means = [
                x / len(choice.encode()) for x, choice in zip(own, question["choices"], strict=True)
            ]
            right.append(max(range(len(own)), key=own.__getitem__) == question["answer"])
            right_mean.append(max(range(len(own)), key=means.__getitem__) == question["answer"])
            answers.append(own[question["answer"]])
            want += own
    np.testing.assert_allclose(sums, want, rtol=1e-10)
    assert nums.tolist() == [1, 14, 1, 5, 1, 1, 2]
    found = ev.rate_choices(questions, sums, nums)
    for name, values in {
        "accuracy": right,
        "accuracy_normalised": right_mean,
        "answer_log_likelihood": answers,
    }.items():
        mean = sum(values) / 3
        error = math.sqrt(sum((x - mean) ** 2 for x in values) / 2 / 3)
        assert found[name] == pytest.approx((mean, error, 3), rel=1e-9)
    made_up = ev.rate_choices(
        questions, np.array([-3.0, -4, -1, -2, -3, -5, -6]), np.array([1, 4, 1, 1, 1, 1, 2])
    )
    assert (
        made_up["accuracy"].value == 1 / 3 and made_up["accuracy_normalised"].value == 1 / 3
    )  # rights: 0; 2


def test_documents_are_those_of_a_loop_whole_and_in_pieces(params, tmp_path):
    lines = [
        {"text": "hello there"},
        {"prompt": "q?", "completion": "an answer"},
        {"text": "a" * 21 + "b"},
    ]
    rows = ev.read_documents(write(tmp_path, *lines), Begun())
    streams = [[1, *b"hello there", 2], [1, *b"q?an answer", 2], [1, *b"a" * 21, *b"b", 2]]
    with jax.enable_x64(True):
        sums, nums = ev.log_likelihoods(params, rows, CONFIG, batch_size=2)
        want = [
            plain(params, np.array(ids), first)
            for ids, first in zip(streams, (1, 3, 1), strict=True)
        ]
        cut, cut_nums = ev.log_likelihoods(params, rows, CONFIG, batch_size=2, length=8)
        in_pieces = []
        for ids, counted in zip(streams, (1, 3, 1), strict=True):
            pieces = [(start, ids[start : start + 9]) for start in range(0, len(ids) - 1, 8)]
            in_pieces.append(
                sum(plain(params, np.array(p), max(1, counted - start)) for start, p in pieces)
            )
    np.testing.assert_allclose(sums, want, rtol=1e-10)
    np.testing.assert_allclose(cut, in_pieces, rtol=1e-10)
    assert nums.tolist() == cut_nums.tolist() == [12, 10, 23]
    found, ratio = ev.document_perplexity(sums, nums), -sum(want) / 45
    spread = sum((-x - ratio * n) ** 2 for x, n in zip(want, nums.tolist(), strict=True))
    error = math.sqrt(3 / 2 * spread) / 45
    assert found["loss"] == pytest.approx((ratio, error, 3), rel=1e-9)
    assert found["perplexity"] == pytest.approx(
        (math.exp(ratio), math.exp(ratio) * error, 3), rel=1e-9
    )
    assert math.isnan(ev.document_perplexity(sums[:1], nums[:1])["loss"].error)


def test_the_error_of_a_ratio_is_its_spread_over_corpora():
    rng = np.random.default_rng(0)
    nums = rng.integers(1, 30, (4000, 40))
    sums = -nums * rng.gamma(4.0, 0.5, nums.shape)
    found = [ev.document_perplexity(s, n)["loss"] for s, n in zip(sums, nums, strict=True)]
    spread = np.std([each.value for each in found])
    assert abs(np.mean([each.error for each in found]) / spread - 1) < 0.05


def test_devices_that_share_rows_symbols_and_tokens_find_the_same(tmp_path):
    config = with_fields(CONFIG, dtype="float32", loss_chunk=5)
    params, questions = (
        init(jax.random.key(0), config),
        ev.read_questions(write(tmp_path, *QUESTIONS)),
    )
    rows = ev.rows_of_questions(questions, Bytes())
    want = ev.log_likelihoods(params, rows, config, batch_size=4)[0]
    with use_mesh(make_mesh(MeshSpec(data=2, tensor=2, context=2))):
        found = ev.log_likelihoods(shard(params, axes(config)), rows, config, batch_size=4)[0]
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_the_gradient_is_that_of_all_logits_at_once(params):
    with jax.enable_x64(True):
        tokens = jax.random.randint(jax.random.key(1), (2, 11), 0, 256)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        weights = jnp.asarray(np.random.default_rng(0).standard_normal((2, 10)))

        def by_chunks(params):
            return (
                weights * token_log_likelihoods(params, batch, with_fields(CONFIG, loss_chunk=6))
            ).sum()

        def at_once(params):
            z = jax.nn.log_softmax(apply(params, batch["tokens"], CONFIG))
            return (weights * jnp.take_along_axis(z, batch["targets"][..., None], 2)[..., 0]).sum()

        got, want = (jax.jit(jax.value_and_grad(f))(params) for f in (by_chunks, at_once))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want
        )


def test_exact_matches_leave_space_around_out():
    answers = [ev.ShortAnswer("", text, "") for text in ("4", "four ", "5", "")]
    found = ev.exact_matches([" 4\n", "four", "55", "x"], answers)
    assert found == pytest.approx((0.5, math.sqrt(4 * 0.25 / 3 / 4), 4))


GOOD = {"prompt": "a", "choices": ["b", "c"], "answer": 1}


@pytest.mark.parametrize(
    ("read", "line", "sentence"),
    [
        (ev.read_questions, "{\n", "line 2 is not JSON"),
        (ev.read_questions, "[1]\n", "line 2 is not a JSON object; legal are .*choices"),
        (ev.read_questions, GOOD | {"prompt": ""}, "line 2 has prompt=''; .* not empty"),
        (
            ev.read_questions,
            GOOD | {"choices": ["b"]},
            "line 2 has choices=.*; legal are two strings or more",
        ),
        (ev.read_questions, GOOD | {"choices": ["b", ""]}, "line 2 has choices="),
        (
            ev.read_questions,
            GOOD | {"answer": 2},
            "line 2 has answer=2; legal are numbers from 0 to 1",
        ),
        (ev.read_questions, GOOD | {"answer": True}, "line 2 has answer=True"),
        (ev.read_answers, {"prompt": "a", "answer": 4}, "line 2 has answer=4; legal are .*strings"),
        (ev.read_answers, {"answer": "4"}, "line 2 has prompt=None"),
        (
            lambda path: ev.read_documents(path, Bytes()),
            {"text": "a"},
            "line 2 has no token that counts behind",
        ),
        (lambda path: ev.read_documents(path, Bytes()), {"txt": "a"}, "line 2 has the keys txt"),
    ],
)
def test_a_broken_line_is_named(tmp_path, read, line, sentence):
    good = GOOD if read is ev.read_questions else {"prompt": "a", "answer": "b"}
    good = good if read in (ev.read_questions, ev.read_answers) else {"text": "ab"}
    with pytest.raises(UsageError, match=f"mine.jsonl, {sentence}"):
        read(write(tmp_path, good, line))


def test_files_without_lines_and_rows_that_are_too_long_are_refused(tmp_path, params):
    for read in (ev.read_questions, ev.read_answers, lambda path: ev.read_documents(path, Bytes())):
        with pytest.raises(UsageError, match="has no lines"):
            read(write(tmp_path, "\n"))
        with pytest.raises(UsageError, match="there is no file"):
            read(tmp_path / "none.jsonl")
    learned = dataclasses.replace(CONFIG, positions="learned", max_seq_len=20)
    row = (np.zeros(22, np.int32), np.ones(22))
    with pytest.raises(UsageError, match="a record of 21 tokens is over model.max_seq_len=20"):
        ev.log_likelihoods(params, [row], learned)

    class Nothing(Bytes):
        def encode_spans(self, text, **options):
            return super().encode_spans(text.replace("c", ""))

    questions = ev.read_questions(write(tmp_path, GOOD))
    with pytest.raises(
        UsageError, match="mine.jsonl, line 1: the prompt or the choice 'c' has no tokens"
    ):
        ev.rows_of_questions(questions, Nothing())
