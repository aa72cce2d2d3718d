"""Batches of prompts through one program a shape, and what each of their texts is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpar.decode import Beams, Decoding, Draft, ModelDraft, Prompts, Sampling
from jaxpar.lm import Decoder, LMConfig
from jaxpar.lm.text import Tokenizer
from jaxpar.mesh import place_rows
from jaxpar.types import PRNGKey, PyTree, UsageError

from ..mesh_flags import shares
from .completions import name_of
from .requests import Request
from .text_codec import draw, encode, ending, ending_sequences, ending_tokens, search

CHUNK = 8
"""Passes between two looks at whether all texts have ended, which an accelerator waits for."""
SHORTEST = 16
"""Tokens that shorter prompts are padded to, so that they share a program."""


class Saved(NamedTuple):
    """A model that was trained before.

    Attributes:
      model: Its configuration.
      params: Its parameters.
      tokenizer: Its tokenizer.
      trained_length: Longest T that it was trained on, by its folder; None where that is unknown.
    """

    model: LMConfig
    params: PyTree
    tokenizer: Tokenizer
    trained_length: int | None = None


class Job(NamedTuple):
    """By what prompts are continued, and how: fields are those of `jaxpar.lm.generate` and of the flags."""

    target: Saved
    key: PRNGKey
    sampling: Sampling
    num_samples: int
    stop: tuple[str, ...]
    draft: Draft
    draft_params: PyTree
    rule: str
    batch_size: int
    beams: Beams | None = None  # of a search, whose texts are samples in order of their scores
    special_tokens: bool = True  # whether prompts that spell special tokens hold these


class Task(NamedTuple):
    """A prompt to continue.

    Attributes:
      request: What is asked for.
      tokens: Its prompt's.
      length: What these are padded to.
      samples: Which of its samples are wanted.
    """

    request: Request
    tokens: np.ndarray
    length: int
    samples: tuple[int, ...]


class Batch(NamedTuple):
    """What came of a batch.

    Attributes:
      lines: One a text.
      tokens: How many tokens its passes found, the first of each text not counted: that comes with the prompt.
      passes: Of the model, summed over texts.
    """

    lines: list[dict[str, Any]]
    tokens: int
    passes: int


def make_tasks(job: Job, requests: Sequence[Request], done: Mapping[Any, int]) -> list[Task]:
    """Returns the requests as tokens, each padded to a power of two, without those of which all samples are done.

    Args:
      job: What continues them.
      requests: Prompts.
      done: How many texts there are already, by `name_of`.

    Raises:
      UsageError: A prompt has no tokens, foreign ones, or too many for a model's positions.
    """
    target, room, there = job.target, job.sampling.max_new_tokens, dict(done)
    models = [("the model", target.model)]
    if isinstance(job.draft, ModelDraft) and isinstance(job.draft.model, Decoder):
        models.append(("the draft", job.draft.model.config))
    most, whose = min(((each.max_seq_len, what) for what, each in models if each.positions == "learned"),
                      default=(2**31 - 1, ""))  # fmt: skip
    tasks = []
    for request in requests:
        tokens, _ = encode(
            target.tokenizer,
            request.prompt,
            target.model.vocab_size,
            request.where,
            special_tokens=job.special_tokens or request.is_chat,
        )
        if len(tokens) + room > most:
            raise UsageError(
                f"{request.where} has {len(tokens)} tokens, which with sampling.max_new_tokens={room} are over the "
                f"{most} positions of {whose}."
            )
        samples = tuple(
            number
            for number in range(job.num_samples)
            if not _take(there, name_of(request, number))
        )
        if samples:
            length = max(SHORTEST, _power_of_two(len(tokens)))
            tasks.append(Task(request, tokens, min(length, most - room), samples))
    return tasks


def beyond_training(job: Job, tasks: Sequence[Task]) -> str:
    """Returns a sentence where texts of rotary positions may outgrow the trained length, or ""."""
    model = job.target.model
    trained = job.target.trained_length
    kinds = model.mixer.in_turn or (model.mixer.kind,)
    if trained is None or model.positions != "rope" or "attention" not in kinds:
        return ""
    room = job.sampling.max_new_tokens
    ends = [len(task.tokens) + room for task in tasks]
    longer = sum(end > trained for end in ends)
    if not longer:
        return ""
    return (
        f"{longer} of {len(ends)} prompts with sampling.max_new_tokens={room} reach up to "
        f"{max(ends)} tokens, over the {trained} that the model was trained on; "
        "rotary positions continue there, and texts may get worse."
    )


def _take(there: dict[Any, int], name: Any) -> bool:
    """Takes one text of this name, if there is one."""
    left = there.get(name, 0)
    there[name] = max(left - 1, 0)
    return left > 0


def _power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << (number - 1).bit_length()


def in_batches(tasks: Sequence[Task], size: int) -> Iterator[list[Task]]:
    """Yields at most `size` tasks of one padded length at a time: that it is a row's own keeps company out of it."""
    same: dict[int, list[Task]] = {}
    for task in tasks:
        same.setdefault(task.length, []).append(task)
    for group in same.values():
        for start in range(0, len(group), size):
            yield group[start : start + size]


def continued(job: Job, tasks: Sequence[Task]) -> Iterator[Batch]:
    """Yields what comes of one batch after the other, the samples of a prompt side by side."""
    target, parts = job.target, shares("batch")
    stop_tokens = tuple(
        sorted({*target.tokenizer.eos_ids, *ending_tokens(target.tokenizer, job.stop)})
    )
    for batch in in_batches(tasks, job.batch_size):
        # Rows are a power of two as well, on each share of a mesh; what is added is the last prompt again.
        rows = min(job.batch_size, parts * _power_of_two(-(-len(batch) // parts)))
        filled = [*batch, *[batch[-1]] * (rows - len(batch))]
        arrays = {
            "tokens": np.stack(
                [np.pad(task.tokens, (0, task.length - len(task.tokens))) for task in filled]
            ),
            "lengths": np.array([len(task.tokens) for task in filled], np.int32),
            "seeds": np.array([task.request.seed for task in filled], np.uint32),
        }
        placed = place_rows(
            lambda rows, arrays=arrays: {name: x[rows] for name, x in arrays.items()}, rows
        )
        run = _drawn if job.beams is None else _searched
        try:
            yield run(job, batch, placed, stop_tokens)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UsageError(
                f"{rows} prompts of up to {batch[0].length} tokens, {job.num_samples} x "
                f"{job.sampling.max_new_tokens} new ones each, do not fit into memory; lower batch_size, num_samples "
                "or sampling.max_new_tokens."
            ) from None


def _drawn(
    job: Job, batch: Sequence[Task], placed: Mapping[str, jax.Array], stop_tokens: tuple[int, ...]
) -> Batch:
    """Returns texts that are drawn, the samples of a prompt side by side."""
    target = job.target
    decoding = Decoding(
        num_samples=job.num_samples,
        draft=job.draft,
        rule=job.rule,
        stop_tokens=stop_tokens,
        chunk=1 if jax.default_backend() == "cpu" else CHUNK,
    )
    drawn = draw(
        job.key,
        target.params,
        Prompts(**placed),
        target.model,
        job.sampling,
        decoding,
        sequences=ending_sequences(target.tokenizer, job.stop),
        draft_params=job.draft_params,
    )
    tokens, lengths, log_probs, passes = map(np.asarray, drawn)
    lines = []
    begun = np.repeat([len(task.tokens) for task in batch], job.num_samples)
    for number, task in enumerate(batch):
        for sample in task.samples:
            row = number * job.num_samples + sample
            new = tokens[row, len(task.tokens) : lengths[row]]
            lines.append(_line(job, task, sample, new, log_probs[row], passes[row]))
    count = len(begun)
    num_tokens = int((lengths[:count] - begun - 1).sum())
    return Batch(lines=lines, tokens=num_tokens, passes=int(passes[:count].sum()))


def _searched(
    job: Job, batch: Sequence[Task], placed: Mapping[str, jax.Array], stop_tokens: tuple[int, ...]
) -> Batch:
    """Returns the most likely texts of each prompt, the best first."""
    assert job.beams is not None
    stops = stop_tokens
    if job.sampling.stop_token >= 0:
        stops = tuple(sorted({*stop_tokens, job.sampling.stop_token}))
    found = search(
        job.target.params,
        placed["tokens"],
        placed["lengths"],
        model=job.target.model,
        beams=job.beams,
        stop_tokens=stops,
    )
    tokens, lengths, log_probs, scores = map(np.asarray, found)
    lines = []
    num_tokens = 0
    for row, task in enumerate(batch):
        for sample in task.samples:
            new = tokens[row, sample, len(task.tokens) : lengths[row, sample]]
            if np.isnan(scores[row, sample]):
                raise UsageError(
                    f"{task.request.where} makes the model's logits NaN; its weights may be damaged."
                )
            room = job.sampling.max_new_tokens
            text, reason, count = ending(job.target.tokenizer, task.tokens, new, stops, (), room)
            num_tokens += count
            lines.append(
                {
                    "prompt": task.request.prompt,
                    "text": text,
                    "finish_reason": reason,
                    "tokens": new[:count].tolist(),
                    "log_prob": round(float(log_probs[row, sample]), 6),
                    "score": round(float(scores[row, sample]), 6),
                    "passes": count,
                    "seed": task.request.seed,
                    "sample": sample,
                    "id": task.request.id,
                }
            )
    return Batch(lines=lines, tokens=num_tokens, passes=num_tokens)


def _line(
    job: Job, task: Task, sample: int, new: np.ndarray, log_probs: np.ndarray, passes: int
) -> dict[str, Any]:
    """A text as a line of a file."""
    tokenizer, request = job.target.tokenizer, task.request
    # A token that holds a stop string ends a row, but no text by itself: what stands before the string is kept.
    ends = {*tokenizer.eos_ids, job.sampling.stop_token}
    room = job.sampling.max_new_tokens
    text, reason, count = ending(tokenizer, task.tokens, new, tuple(ends), job.stop, room)
    if not np.isfinite(log_probs[:count]).all():
        raise UsageError(
            f"{request.where} makes the model's logits infinite or NaN; its weights may be damaged."
        )
    return {
        "prompt": request.prompt,
        "text": text,
        "finish_reason": reason,
        "tokens": new[:count].tolist(),
        "log_probs": [round(x, 6) for x in log_probs[:count].tolist()],
        "passes": int(passes),
        "seed": request.seed,
        "sample": sample,
        "id": request.id,
    }
