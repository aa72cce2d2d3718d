"""`mode=eval eval.kind=...` on a folder: what is told is what the library computes, and `out=` holds each record."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from word_folders import MODEL, write_folder

from experiments import lm
from experiments.app.lm import benchmark
from jaxpar.lm import apply, from_hf
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "given", MODEL, [f"w{token}" for token in range(16)])


def evaluate(folder, kind, lines, *flags):
    path, out = folder.parent / f"{kind}.jsonl", folder.parent / f"{kind}.out"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (
        f"eval.kind={kind}",
        f"eval.path={path}",
        f"out={out}",
        "eval.batch_size=2",
        "model.dtype=float32",
        *flags,
    )
    config = lm.compose("mode=eval", f"run={folder}", *flags)
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        found = lm.evaluate(config, folder)
    return found, [json.loads(line) for line in out.read_text().splitlines()]


def test_each_kind_tells_what_the_model_says(folder, capsys):
    params = from_hf(folder, dtype="float32")[1]
    program = jax.jit(lambda tokens: jax.nn.log_softmax(apply(params, tokens, MODEL)))

    def likely(words):
        ids = [int(word[1:]) for word in words.split()]
        z = np.asarray(program(np.pad(ids, (0, 16 - len(ids)))[None]))[0]
        return [float(z[i, ids[i + 1]]) for i in range(len(ids) - 1)], ids, z

    found, lines = evaluate(
        folder, "documents", [{"text": "w1 w2 w3"}, {"prompt": "w4 w5", "completion": " w6"}]
    )
    sums = [sum(likely("w1 w2 w3")[0]), likely("w4 w5 w6")[0][-1]]
    assert [line["log_likelihood"] for line in lines] == pytest.approx(sums, rel=1e-4)
    assert [line["tokens"] for line in lines] == [2, 1]
    assert found["loss"] == pytest.approx(-sum(sums) / 3, rel=1e-4) and found["loss_error"] > 0

    question = {"prompt": "w1 w2", "choices": [" w3", " w4 w5"], "answer": 1}
    found, lines = evaluate(folder, "choices", [question])
    sums = [likely("w1 w2 w3")[0][-1], sum(likely("w1 w2 w4 w5")[0][1:])]
    assert lines[0]["log_likelihoods"] == pytest.approx(sums, rel=1e-4)
    assert found["accuracy"] == float(sums[1] > sums[0])

    text = []
    for _ in range(2):
        _, _, z = likely(" ".join(["w1", *text, "w0"]))
        text.append(f"w{int(z[len(text)].argmax())}")
    answers = [{"prompt": "w1", "answer": " ".join(text)}, {"prompt": "w1", "answer": "w0 w0 w0"}]
    found, lines = evaluate(folder, "exact", answers, "sampling.max_new_tokens=2")
    assert [line["text"].split() for line in lines] == [text, text] and found["exact_match"] == 0.5
    assert (
        "exact_match            0.5000 ± 0.5000 (standard error of 2 records)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("special_tokens", [True, False])
def test_every_kind_reads_special_tokens_as_training_does(folder, monkeypatch, special_tokens):
    """The prompts of exact answers, the choices and the documents spell w3, a special token."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(["w3"])
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(folder / "tokenizer.json"))
    rows = []
    make_tasks = benchmark.make_tasks
    likelihoods = benchmark._likelihoods

    def noting_tasks(*given):
        tasks = make_tasks(*given)
        rows.extend(task.tokens.tolist() for task in tasks)
        return tasks

    def noting_rows(config, params, given, *rest):
        rows.extend(ids.tolist() for ids, _ in given)
        return likelihoods(config, params, given, *rest)

    monkeypatch.setattr(benchmark, "make_tasks", noting_tasks)
    monkeypatch.setattr(benchmark, "_likelihoods", noting_rows)
    flag = f"data.special_tokens={str(special_tokens).lower()}"
    # Without the token a word that holds it is an unknown one.
    question = {"prompt": "w2", "choices": [" w1w3", " w4w3"], "answer": 0}
    evaluate(folder, "documents", [{"text": "w2 w1w3"}], flag)
    evaluate(folder, "choices", [question], flag)
    prompt = {"prompt": "w2 w1w3", "answer": "a"}
    evaluate(folder, "exact", [prompt], flag, "sampling.max_new_tokens=1")
    assert len(rows) == 4 and all((3 in row) == special_tokens for row in rows)


def test_what_cannot_be_measured_is_refused(folder):
    with pytest.raises(
        UsageError, match="eval.kind=choices with eval.path=''; legal are split without a file"
    ):
        lm.compose("mode=eval", f"run={folder}", "eval.kind=choices")
    with pytest.raises(
        UsageError, match="eval.kind='guess' is unknown; legal are split, documents, choices, exact"
    ):
        lm.compose("mode=eval", "eval.kind=guess", "eval.path=x")
    with pytest.raises(UsageError, match="eval.stop has an empty string"):
        lm.compose("mode=eval", "eval.kind=exact", "eval.path=x", "eval.stop=[a,'']")
    with pytest.raises(UsageError, match="choices.jsonl, line 2 has answer=3"):
        question = {"prompt": "w1 w2", "choices": [" w3", " w4 w5"], "answer": 1}
        evaluate(folder, "choices", [question, question | {"answer": 3}])
