"""`mode=eval eval.kind=...`: a model judged on a user's JSONL."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpar.decode import NoDraft
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.lm import evaluation
from jaxpar.lm.text import Tokenizer
from jaxpar.types import PyTree, UsageError

from ..mesh_flags import check_split
from ..run_folder import replace_text
from ..runner import say
from .prompt_batches import Job, Saved, continued, make_tasks
from .requests import Request

KINDS = ("split", "documents", "choices", "exact")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What mode=eval measures.

    Attributes:
      kind: "split", the loss over the validation split; "documents", the perplexity of each document as training
        reads it; "choices", how often the likeliest of {"prompt", "choices", "answer"} is right; "exact", how often the
        greedy continuation is that of {"prompt", "answer"}.
      path: File or folder of records, of any kind that data.path reads, for all but "split"; texts for "documents".
      batch_size: Records at once.
      length: Tokens that are predicted of a document before what came before is forgotten; 0 takes documents whole.
      stop: Strings that end a continuation, for "exact".
    """

    kind: str = field("split", OneOf(KINDS))
    path: str = ""
    batch_size: int = field(8, AtLeast(1))
    length: int = field(0, AtLeast(0))
    stop: tuple[str, ...] = ("\n",)

    def __post_init__(self):
        """Refuses a kind without a file, and a file without a kind."""
        check_fields(self, "eval.")
        object.__setattr__(self, "stop", tuple(self.stop))  # flags are lists
        if (self.kind == "split") == bool(self.path):
            raise UsageError(
                f"eval.kind={self.kind} with eval.path={self.path!r}; legal are split without a file, and documents, "
                "choices and exact with one."
            )
        if "" in self.stop:
            raise UsageError(
                "eval.stop has an empty string; give strings of at least one character."
            )


def evaluate(config: Any, params: PyTree, tokenizer: Tokenizer) -> dict[str, float]:
    """Prints and returns what `config.eval` asks, each number beside its standard error, `name_error`."""
    check_split("eval.batch_size", config.eval.batch_size, "batch")
    measured, lines = {"documents": _documents, "choices": _choices, "exact": _exact}[
        config.eval.kind
    ](config, params, tokenizer)
    if config.out and jax.process_index() == 0:
        replace_text(pathlib.Path(config.out), "".join(json.dumps(line) + "\n" for line in lines))
    for name, each in measured.items():
        say(
            f"{name:22} {each.value:.4f} ± {each.error:.4f} (standard error of {each.count} records)"
        )
    if config.out:
        say(f"written    {config.out}")
    pairs = [{name: each.value, f"{name}_error": each.error} for name, each in measured.items()]
    return {name: value for pair in pairs for name, value in pair.items()}


Found = tuple[Mapping[str, evaluation.Measurement], Sequence[Mapping[str, Any]]]


def _likelihoods(config: Any, params: PyTree, rows: Sequence[evaluation.Row], length: int = 0):
    largest = max(int(ids.max()) for ids, _ in rows)
    if largest >= config.model.vocab_size:
        raise UsageError(
            f"the tokenizer's token {largest} is none of the model's {config.model.vocab_size} symbols."
        )
    options = {"batch_size": config.eval.batch_size, "length": length}
    return evaluation.log_likelihoods(params, rows, config.model, **options)


def _documents(config: Any, params: PyTree, tokenizer: Tokenizer) -> Found:
    rows = evaluation.read_documents(
        config.eval.path,
        tokenizer,
        config.data.template,
        special_tokens=config.data.special_tokens,
    )
    sums, nums = _likelihoods(config, params, rows, config.eval.length)
    lines = [
        {
            "document": number,
            "log_likelihood": float(total),
            "tokens": int(count),
            "perplexity": _grown(-total / count),
        }
        for number, (total, count) in enumerate(zip(sums, nums, strict=True))
    ]
    return evaluation.document_perplexity(sums, nums), lines


def _grown(loss: float) -> float:
    return float(np.exp(min(loss, 700.0)))  # a float64 holds no more


def _choices(config: Any, params: PyTree, tokenizer: Tokenizer) -> Found:
    questions = evaluation.read_questions(config.eval.path)
    rows = evaluation.rows_of_questions(
        questions, tokenizer, special_tokens=config.data.special_tokens
    )
    sums, nums = _likelihoods(config, params, rows)
    ends = np.cumsum([len(question.choices) for question in questions])[:-1]
    lines = [
        {
            "prompt": question.prompt,
            "answer": question.answer,
            "log_likelihoods": totals.tolist(),
            "tokens": n.tolist(),
        }
        for question, totals, n in zip(
            questions, np.split(sums, ends), np.split(nums, ends), strict=True
        )
    ]
    return evaluation.rate_choices(questions, sums, nums), lines


def _exact(config: Any, params: PyTree, tokenizer: Tokenizer) -> Found:
    answers, evaluated = evaluation.read_answers(config.eval.path), config.eval
    greedy = dataclasses.replace(config.sampling, temperature=0.0)
    job = Job(
        target=Saved(model=config.model, params=params, tokenizer=tokenizer),
        key=jax.random.key(config.seed),
        sampling=greedy,
        num_samples=1,
        stop=evaluated.stop,
        draft=NoDraft(),
        draft_params=None,
        rule="coupled",
        batch_size=evaluated.batch_size,
        special_tokens=config.data.special_tokens,
    )
    requests = [
        Request(each.prompt, id=number, where=each.where) for number, each in enumerate(answers)
    ]
    texts = {
        line["id"]: line["text"]
        for batch in continued(job, make_tasks(job, requests, {}))
        for line in batch.lines
    }
    got = [texts[number] for number in range(len(answers))]
    lines = [
        {"prompt": a.prompt, "answer": a.answer, "text": t}
        for a, t in zip(answers, got, strict=True)
    ]
    return {"exact_match": evaluation.exact_matches(got, answers)}, lines
