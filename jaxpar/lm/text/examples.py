"""One line of JSONL to the tokens of one document, and which of them count in the loss."""

import json
from collections.abc import Callable, Sequence

import numpy as np

from jaxpar.lm.hub.keys import brief
from jaxpar.lm.text.tokenizer import Tokenizer
from jaxpar.types import UsageError

Template = Callable[[Sequence[dict], bool], str]
"""(messages, whether the beginning of an answer follows) -> text."""

ROLES = "system", "developer", "user", "assistant", "tool", "function", "ipython"
"""Whose turns there are. Those of the assistant count: any other name for it would leave a run nothing to learn."""

_KINDS = 'legal are {"text"}, {"prompt", "completion"} and {"messages"}'


def chat_ml(messages: Sequence[dict], answer: bool) -> str:
    """Writes messages as ChatML, the template where none is given."""
    text = "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )
    return text + "<|im_start|>assistant\n" * answer


def object_of(line: bytes, where: str, legal: str) -> dict:
    """Returns the JSON object that a line is.

    Raises:
      UsageError: It is none; `where` is the line's file and number, and `legal` says what it may be.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(
            f"{where} is not JSON: {brief(line.decode(errors='replace').rstrip())}"
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object; {legal}.")
    return value


def pieces_of(
    line: bytes, where: str, template: Template = chat_ml
) -> tuple[list[tuple[str, bool]], bool]:
    """Reads one line of JSONL.

    Args:
      line: A JSON object with "text"; "prompt" and "completion"; or "messages", a list of {"role", "content"}, the role
        one of `ROLES`. Other keys are left alone.
      where: What errors call the line: its file and number.
      template: How messages become text.

    Returns:
      (text, whether its tokens count) in turn: all of a text, the completion, the turns of the assistant; and whether
      the tokenizer's BOS and EOS belong around them, as messages have their own.

    Raises:
      UsageError: If the line is none of these, or the template does not write a conversation turn by turn.
    """
    value = object_of(line, where, _KINDS)
    if len({"text", "prompt", "messages"} & value.keys()) != 1 or ("prompt" in value) != (
        "completion" in value
    ):
        raise UsageError(f"{where} has the keys {', '.join(value) or 'none'}; {_KINDS}.")
    for key in ("text", "prompt", "completion"):
        if key in value and not isinstance(value[key], str):
            raise UsageError(f"{where} has {key}={brief(value[key])}; legal is a string.")
    if "text" in value:
        return [(value["text"], True)], True
    if "prompt" in value:
        return [(value["prompt"], False), (value["completion"], True)], True
    return _turns(value["messages"], where, template), False


def pair_of(line: bytes, where: str) -> list[tuple[list[tuple[str, bool]], bool]]:
    """Reads one line of preferences, {"prompt", "chosen", "rejected"}: the two documents, as `pieces_of` returns one.

    Raises:
      UsageError: It is none, or both completions are the same.
    """
    legal = (
        'legal are {"prompt", "chosen", "rejected"}, strings of which the latter two are not empty'
    )
    value = object_of(line, where, legal)
    for key in ("prompt", "chosen", "rejected"):
        if not isinstance(value.get(key), str) or (key != "prompt" and not value[key]):
            raise UsageError(f"{where} has {key}={brief(value.get(key))}; {legal}.")
    if value["chosen"] == value["rejected"]:
        raise UsageError(
            f"{where} rejects what it chooses, {brief(value['chosen'])}; {legal}, and not the same."
        )
    return [
        ([(value["prompt"], False), (value[key], True)], True) for key in ("chosen", "rejected")
    ]


def _turns(messages: object, where: str, template: Template) -> list[tuple[str, bool]]:
    """The text of messages in pieces; what the assistant wrote, to the end of its turn, counts."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(
            f"{where} has messages={brief(messages)}; legal is a list of at least one."
        )
    for message in messages:
        known = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not known:
            raise UsageError(
                f"{where} has the message {brief(message)}; legal are role and content, both strings."
            )
        if message["role"] not in ROLES:
            raise UsageError(
                f"{where} has the role {brief(message['role'])}; legal are {', '.join(ROLES)}."
            )
    pieces, done = [], 0

    def written(messages: Sequence[dict], answer: bool) -> str:
        try:
            return template(messages, answer)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None

    whole = written(messages, False)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for upto, answer, counts in ((number, True, False), (number + 1, False, True)):
            text = written(messages[:upto], answer)
            if len(text) < done or not whole.startswith(text):
                raise UsageError(
                    f"{where}: the chat template writes early turns by what comes after them."
                )
            pieces.append((text[done:], counts))
            done = len(text)
    return [*pieces, (whole[done:], False)]


def encode_pieces(
    pieces: list[tuple[str, bool]], ends: bool, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes what `pieces_of` returns: ids int32 [n], and 1 where a token counts as a target, uint8 [n].

    Each piece is encoded by itself, so that no token lies on both sides of a border. BOS does not count, EOS does.
    """
    parts = [(tokenizer.encode(text), counts) for text, counts in pieces if text]
    if ends:
        parts = [(np.array(tokenizer.bos_ids, np.int32), False), *parts, (_end(tokenizer), True)]
    if not parts:
        return np.zeros(0, np.int32), np.zeros(0, np.uint8)
    counts = np.concatenate([np.full(len(ids), counts, np.uint8) for ids, counts in parts])
    return np.concatenate([ids for ids, _ in parts]).astype(np.int32), counts


def _end(tokenizer: Tokenizer) -> np.ndarray:
    return np.array(tokenizer.eos_ids[:1], np.int32)
