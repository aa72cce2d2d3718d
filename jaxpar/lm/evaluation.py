"""Judges a model on a user's JSONL: likelihood of choices, exact answers, perplexity by document, with their errors.

Example:
    import json, pathlib, tempfile

    import jax

    from jaxpar.lm import LMConfig, init
    from jaxpar.lm.evaluation import log_likelihoods, rate_choices, read_questions, rows_of_questions
    from jaxpar.lm.text.tokenizer import Bytes

    config = LMConfig(num_layers=1, embed_dim=8, dtype="float32")
    path = pathlib.Path(tempfile.mkdtemp()) / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2 =", "choices": [" 4", " five"], "answer": 0}))
    questions = read_questions(path)
    sums, nums = log_likelihoods(init(jax.random.key(0), config), rows_of_questions(questions, Bytes()), config)
    accuracy = rate_choices(questions, sums, nums)["accuracy"]  # of one question: 0 or 1, its error unknown
    assert accuracy.count == 1 and nums.tolist() == [2, 5]
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import replace_nested
from jaxpar.lm.config import LMConfig
from jaxpar.lm.hub.keys import brief
from jaxpar.lm.objectives import token_log_likelihoods
from jaxpar.lm.text.batches import check_batch
from jaxpar.lm.text.chat import open_template
from jaxpar.lm.text.examples import (
    chat_ml,
    encode_pieces,
    encode_prompted,
    object_of,
    with_bos,
    with_eos,
)
from jaxpar.lm.text.files import (
    COLUMNS,
    Source,
    files_at,
    kind_of,
    lines_of_source,
    sort_sources,
    texts_of_source,
)
from jaxpar.lm.text.long_texts import encode_texts
from jaxpar.lm.text.shards import read_line
from jaxpar.lm.text.tokenizer import Tokenizer
from jaxpar.mesh import constrain, mesh_axes, place_rows
from jaxpar.nn.attention.context import in_order
from jaxpar.types import Array, PyTree, UsageError

__all__ = [
    "Measurement",
    "Question",
    "ShortAnswer",
    "document_perplexity",
    "exact_matches",
    "log_likelihoods",
    "rate_choices",
    "read_answers",
    "read_documents",
    "read_questions",
    "rows_of_questions",
]

Row = tuple[np.ndarray, np.ndarray]
"""Token ids int [n], and 1 where a token counts, [n]; the first has nothing before it and never counts."""


class Measurement(NamedTuple):
    """A mean over records, its standard error (NaN of a single record), and how many records there were."""

    value: float
    error: float
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # a field: tuple.count is not used

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Measurement":
        """Returns the mean of numbers, s / sqrt(n) its error."""
        x = np.asarray(values, np.float64)
        return cls(
            float(x.mean()),
            float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan,
            len(x),
        )


class Question(NamedTuple):
    """A prompt with choices, of which number `answer` is right; `where` is its file and line."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    where: str


class ShortAnswer(NamedTuple):
    """A prompt and the text that should follow it; `where` is its file and line."""

    prompt: str
    answer: str
    where: str


def _sources(path: str | Path, legal: str) -> tuple[list[str], Path]:
    """Returns the files that a path names, and the path; tokens are none."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UsageError(f"there is no file {path}; {legal}.")
    if path.suffix == ".npy" or (path / "tokens.npy").is_file():
        raise UsageError(f"{path} has tokens; {legal}.")
    return [name for name, *_ in files_at(str(path))], path


def _lines(sources: Sequence[Source], columns: Sequence[str]) -> Iterator[tuple[bytes, str]]:
    """Yields the records of files as lines of JSONL that are not blank, each with its name."""
    for source in sources:
        unit = "line" if source.kind.form == "lines" else "record"
        for number, line in enumerate(lines_of_source(source, columns), 1):
            if line.strip():
                yield line, f"{source.path}, {unit} {number}"


def _records(path: str | Path, legal: str, columns: Sequence[str]) -> Iterator[tuple[dict, str]]:
    """Yields the records of a file, or of the files of a folder, each with its name."""
    names, path = _sources(path, f"{legal}, one a line")
    sources = [Source(path=name, kind=kind_of(name)) for name in names]
    records = [source for source in sources if source.kind.form != "text"]
    if not records:
        raise UsageError(f"{path} is text; {legal}, one a line.")
    empty = True
    for line, where in _lines(records, columns):
        empty = False
        yield object_of(line, where, legal), where
    if empty:
        raise UsageError(f"{path} has no lines; {legal}, one a line.")


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def read_questions(path: str | Path) -> list[Question]:
    """Reads {"prompt", "choices": [...], "answer": number from 0}, one a record; other keys are left alone.

    Args:
      path: A file of JSONL, or other records that training reads, or a folder of these.

    Raises:
      UsageError: A line is none of these; it is named by file and number.
    """
    legal, found = 'legal are {"prompt", "choices", "answer"}', []
    for value, where in _records(path, legal, ("prompt", "choices", "answer")):
        prompt, choices, answer = (value.get(key) for key in ("prompt", "choices", "answer"))
        if not _text(prompt):
            raise UsageError(
                f"{where} has prompt={brief(prompt)}; {legal}, and a prompt is a string that is not empty."
            )
        if not isinstance(choices, list) or len(choices) < 2 or not all(map(_text, choices)):
            raise UsageError(
                f"{where} has choices={brief(choices)}; legal are two strings or more, none empty."
            )
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise UsageError(
                f"{where} has answer={brief(answer)}; legal are numbers from 0 to {len(choices) - 1}."
            )
        found.append(Question(str(prompt), tuple(choices), answer, where))
    return found


def read_answers(path: str | Path) -> list[ShortAnswer]:
    """Reads {"prompt", "answer": text}, one a record; other keys are left alone.

    Args:
      path: A file of JSONL, or other records that training reads, or a folder of these.

    Raises:
      UsageError: A line is none of these; it is named by file and number.
    """
    legal, found = 'legal are {"prompt", "answer"}, both strings that are not empty', []
    for value, where in _records(path, legal, ("prompt", "answer")):
        for key in ("prompt", "answer"):
            if not _text(value.get(key)):
                raise UsageError(f"{where} has {key}={brief(value.get(key))}; {legal}.")
        found.append(ShortAnswer(value["prompt"], value["answer"], where))
    return found


def read_documents(
    path: str | Path,
    tokenizer: Tokenizer,
    template: str = "",
    *,
    special_tokens: bool = True,
) -> list[Row]:
    """Reads documents as training does, by `jaxpar.lm.text.examples.documents_of`.

    What counts there counts here. A record is one document, unless the template writes early
    messages in another way once others follow. Of a folder of texts each file is one, with BOS and
    EOS; a single text has neither, as it is a stream in training.

    Args:
      path: A file or a folder of records or texts, of any kind that training reads.
      tokenizer: The tokenizer.
      template: Template of messages, as `jaxpar.lm.text.chat.open_template` opens it; by default
        ChatML.
      special_tokens: Whether special tokens that a text spells become tokens.

    Raises:
      UsageError: A record cannot be read, or has no token that counts behind another; it is named
        by file and number.
    """
    written = chat_ml
    if template:
        written = open_template(template)
    names, path = _sources(path, "expected texts or records")
    is_records, sources = sort_sources(names, str(path), flag="eval.path")
    if not is_records:
        return [_row_of_text(x, tokenizer, len(names) > 1, special_tokens) for x in sources]
    found = []
    for line, where in _lines(sources, COLUMNS):
        for pieces, ends in read_line(where, 0, line, written, where_of=lambda _, at=where: at):
            ids, counts = encode_pieces(pieces, ends, tokenizer, special_tokens=special_tokens)
            if not counts[1:].any():
                raise UsageError(f"{where} has no token that counts behind another.")
            found.append((ids, counts))
    if not found:
        raise UsageError(f"{path} has no lines; give one document a line.")
    return found


def _row_of_text(source: Source, tokenizer: Tokenizer, ends: bool, special_tokens: bool) -> Row:
    """Encodes the text of a file, with `ends` between BOS and EOS."""
    texts = texts_of_source(source)
    parts = encode_texts(texts, tokenizer, special_tokens=special_tokens)
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    counts = np.ones(len(ids), np.uint8)
    if ends:
        ids, counts = with_bos(ids, counts, tokenizer)
        ids, counts = with_eos(ids, counts, tokenizer)
    if not counts[1:].any():
        raise UsageError(f"{source.path} has no token that counts behind another.")
    return ids, counts


def rows_of_questions(
    questions: Sequence[Question], tokenizer: Tokenizer, *, special_tokens: bool = True
) -> list[Row]:
    """Encodes each choice behind its prompt: a row a choice, question by question; the choice's tokens count.

    Both are one text, as a completion is in training, so a choice that continues a sentence begins
    with its space. A token that holds characters of both counts. BOS comes first.

    Args:
      questions: Prompts with choices, as `read_questions` returns them.
      tokenizer: The tokenizer.
      special_tokens: Whether special tokens that a text spells become tokens.

    Raises:
      UsageError: A prompt or a choice has no tokens.
    """
    rows = []
    for question in questions:
        for choice in question.choices:
            pieces = [(question.prompt, False), (choice, True)]
            ids, counts = encode_prompted(pieces, tokenizer, special_tokens=special_tokens)
            if not len(counts) or counts[0] or not counts.any():
                raise UsageError(
                    f"{question.where}: the prompt or the choice {brief(choice)} has no tokens."
                )
            rows.append((ids, counts))
    return rows


@functools.partial(jax.jit, static_argnames="config")
def _sums(params: PyTree, batch: dict[str, Array], config: LMConfig) -> Array:
    likely = token_log_likelihoods(params, batch, config)
    return constrain(jnp.where(batch["weights"] > 0, likely, 0).sum(-1), None)


def log_likelihoods(
    params: PyTree,
    rows: Sequence[Row],
    config: LMConfig,
    *,
    batch_size: int = 8,
    length: int = 0,
    say: Callable[[int], None] = lambda done: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the log-likelihood, in nats, of the tokens of each row that count, given those before them.

    Rows of similar length are padded to a power of two together, so that few programs are compiled; a row counts no
    padding, and a row's number depends on no other (a router's capacity is left out, as in decoding).

    Args:
      params: The model's, on the ambient mesh.
      rows: Tokens and which count.
      config: The model.
      batch_size: Rows at once, a multiple of those that the mesh's devices share.
      length: Longer rows are cut into pieces of so many tokens that are predicted, of which each forgets what came
        before but for one token; 0 cuts none.
      say: Is told how many pieces are done.

    Returns:
      Sums float64 [N], and how many tokens counted, int64 [N].

    Raises:
      UsageError: A row is over the learned positions, and `length` does not cut it; or it has a
        token outside of the model's vocabulary.
    """
    pieces = [
        (number, *piece) for number, row in enumerate(rows) for piece in _pieces(*row, length)
    ]
    pieces.sort(key=lambda piece: len(piece[1]))
    if config.experts.num_experts:
        whole = {"experts.capacity": None, "experts.capacity_group": 0}
        config = replace_nested(config, whole)
    sums, nums = np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    mesh = jax.sharding.get_abstract_mesh().shape
    shares = math.prod(mesh[axis] for axis in mesh_axes("seq_layer"))
    for start in range(0, len(pieces), batch_size):
        part = pieces[start : start + batch_size]
        size = _padded_length(len(part[-1][1]) - 1, shares, config)
        batch = {
            name: np.zeros((batch_size, size), np.int32)
            for name in ("tokens", "targets", "weights")
        }
        for row, (number, ids, counts) in enumerate(part):
            n = len(ids) - 1
            batch["tokens"][row, :n], batch["targets"][row, :n], batch["weights"][row, :n] = (
                ids[:-1],
                ids[1:],
                counts[1:],
            )
            nums[number] += int(np.count_nonzero(counts[1:]))
        batch = in_order(check_batch(batch, config.vocab_size), config.order(size), shares)
        placed = place_rows(
            lambda cut, batch=batch: {k: v[cut] for k, v in batch.items()},
            batch_size,
            ("batch", "seq_layer"),
        )
        found = np.asarray(_sums(params, placed, config), np.float64)
        np.add.at(sums, [number for number, *_ in part], found[: len(part)])
        say(start + len(part))
    return sums, nums


def _pieces(ids: np.ndarray, counts: np.ndarray, length: int) -> Iterator[Row]:
    """Cuts a row where it is longer; a token at a border is seen by both pieces, and predicted by the first."""
    if not length or len(ids) <= length + 1:
        yield ids, counts
        return
    for start in range(0, len(ids) - 1, length):
        yield ids[start : start + length + 1], counts[start : start + length + 1]


def _padded_length(size: int, shares: int, config: LMConfig) -> int:
    """The next power of two that the devices which share a sequence divide, within the learned positions."""
    length = max(16, 2 * shares, 1 << max(size - 1, 0).bit_length())
    if config.positions == "learned" and size <= config.max_seq_len < length:
        length = config.max_seq_len
    if config.positions == "learned" and length > config.max_seq_len:
        raise UsageError(
            f"a record of {size} tokens is over model.max_seq_len={config.max_seq_len}; shorten it."
        )
    return length


def rate_choices(
    questions: Sequence[Question], sums: np.ndarray, nums: np.ndarray
) -> dict[str, Measurement]:
    """Returns how often the right choice is the likeliest: by its sum, and by its mean over its tokens.

    Args:
      questions: N of them.
      sums: Log-likelihoods of all choices in turn, as `log_likelihoods` gives them for `rows_of_questions`.
      nums: Their tokens.

    Returns:
      "accuracy", "accuracy_normalised", and "answer_log_likelihood", that of the right choice in nats; of equal ones
      the first is taken.
    """
    best, best_mean, right, start = [], [], [], 0
    for question in questions:
        end = start + len(question.choices)
        best.append(int(np.argmax(sums[start:end])) == question.answer)
        best_mean.append(int(np.argmax(sums[start:end] / nums[start:end])) == question.answer)
        right.append(sums[start + question.answer])
        start = end
    named = {"accuracy": best, "accuracy_normalised": best_mean, "answer_log_likelihood": right}
    return {name: Measurement.of(values) for name, values in named.items()}


def document_perplexity(sums: np.ndarray, nums: np.ndarray) -> dict[str, Measurement]:
    """Returns "loss", nats a token over all documents, and "perplexity", exp(loss).

    The loss is the ratio r of sums over documents, and its error sqrt(D / (D - 1) sum (s_i - r n_i)^2) / sum n_i: that
    of a ratio by its first-order expansion, as documents, not tokens, are what is independent. That of the perplexity
    is exp(r) times it.
    """
    total, count = nums.sum(), len(nums)
    r = -sums.sum() / total
    spread = float(np.square(-sums - r * nums).sum())
    error = math.sqrt(count / (count - 1) * spread) / total if count > 1 else math.nan
    grown = math.exp(min(r, 700.0))  # a float64 holds no more
    return {
        "loss": Measurement(float(r), float(error), count),
        "perplexity": Measurement(grown, grown * error, count),
    }


def exact_matches(texts: Sequence[str], answers: Sequence[ShortAnswer]) -> Measurement:
    """Returns how often a generated text is the answer that was asked for, space around both left out."""
    return Measurement.of(
        [text.strip() == answer.answer.strip() for text, answer in zip(texts, answers, strict=True)]
    )
