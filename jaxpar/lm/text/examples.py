"""One line of JSONL to the tokens of its documents, and which of them count in the loss.

A document is one text with spans of characters that count. It is encoded once, so its ids are the
tokenizer's on the whole text; a token counts if it holds a character that does. A prompt is
therefore the beginning of what was trained, unless a token lies over the border between prompt and
answer. That token holds some of the answer, and counts.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from jaxpar._renamed import warn_of_older
from jaxpar.lm.hub.keys import brief
from jaxpar.lm.text.chat import ChatTemplate, text_of
from jaxpar.lm.text.tokenizer import Bytes, Tokenizer
from jaxpar.types import UsageError

__all__ = ["Template", "chat_ml"]

Document = tuple[list[tuple[str, bool]], bool]
"""(text, whether it counts) in order, one text when joined; and whether EOS belongs behind it."""

Template = Callable[[Sequence[dict], bool], str]
"""(messages, whether the beginning of an answer follows) -> text."""

ROLES = "system", "developer", "user", "assistant", "tool", "function", "ipython"
"""Roles of turns. The assistant's count: any other name for it would leave a run nothing to learn."""

_REASONING = "reasoning_content", "reasoning", "thinking"

_KINDS = 'legal are {"text"}, {"prompt", "completion"} and {"messages"}'


def chat_ml(messages: Sequence[dict], answer: bool) -> str:
    """Writes messages as ChatML, the template where none is given.

    Raises:
      UsageError: If a message has calls of tools or reasoning, which ChatML does not write.
    """
    text = ""
    for message in messages:
        for key in ("tool_calls", *_REASONING):
            if message.get(key):
                raise UsageError(
                    f"a message has {key}={brief(message[key])}, and ChatML writes none; "
                    "data.template= gives a template that does."
                )
        text += f"<|im_start|>{message['role']}\n{text_of(message.get('content'))}<|im_end|>\n"
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


def documents_of(line: bytes, where: str, template: Template = chat_ml) -> list[Document]:
    """Reads one line of JSONL.

    Args:
      line: A JSON object with "text"; "prompt" and "completion"; or "messages", a list of {"role", "content"}, the role
        one of `ROLES`, and optionally "tools". Other keys are left alone.
      where: What errors call the line: its file and number.
      template: How messages become text.

    Returns:
      All of a text counts, the completion, and what the assistant wrote, to the end of its turn or
      in the template's `{% generation %}` blocks. EOS belongs behind texts and completions, as
      messages have their own. A line is one document, unless the template writes early turns in
      another way once others follow: then each such turn has a document of its own, which ends with
      it.

    Raises:
      UsageError: If the line is none of these, or a turn is not written behind its prompt.
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
        return [([(value["text"], True)], True)]
    if "prompt" in value:
        return [([(value["prompt"], False), (value["completion"], True)], True)]
    tools = tools_of(value, where)
    _check_messages(value["messages"], where)
    written = _Written(value["messages"], tools, where, template)
    return [(pieces, False) for pieces in _conversations(written)]


def pieces_of(line: bytes, where: str, template: Template = chat_ml) -> Document:
    """Reads one line of JSONL that is one document: the older name of `documents_of`.

    Raises:
      UsageError: As of `documents_of`, or the line is several documents.
    """
    warn_of_older("pieces_of", "documents_of", level=2)
    documents = documents_of(line, where, template)
    if len(documents) != 1:
        raise UsageError(f"{where} is {len(documents)} documents; legal is one.")
    return documents[0]


def pair_of(line: bytes, where: str) -> list[Document]:
    """Reads one line of preferences, {"prompt", "chosen", "rejected"}: two documents.

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


def tools_of(value: Mapping[str, object], where: str) -> list[dict] | None:
    """Returns the tools of a record, which tables may hold as text in JSON.

    Raises:
      UsageError: They are something else.
    """
    tools = value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            pass  # the sentence below shows the text
    if tools is not None and not _are_objects(tools):
        raise UsageError(
            f"{where} has tools={brief(tools)}; legal are a list of objects, in JSON as well, and "
            "null."
        )
    return cast(list[dict] | None, tools)


def _check_messages(messages: object, where: str) -> None:
    """Refuses what are no messages."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(
            f"{where} has messages={brief(messages)}; legal is a list of at least one."
        )
    for message in messages:
        _check_message(message, where)


def _check_message(message: object, where: str) -> None:
    """Refuses what is no message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _no_message(message, where)
    calls = message.get("tool_calls")
    if calls is not None and not _are_objects(calls):
        raise UsageError(
            f"{where} has tool_calls={brief(calls)}; legal are a list of objects and null."
        )
    content = message.get("content")
    if not isinstance(content, str | list) and (content is not None or not calls):
        raise _no_message(message, where)
    if message["role"] not in ROLES:
        raise UsageError(
            f"{where} has the role {brief(message['role'])}; legal are {', '.join(ROLES)}."
        )


def _no_message(message: object, where: str) -> UsageError:
    return UsageError(
        f"{where} has the message {brief(message)}; legal are role and content, a string and a "
        "string or parts of text, or null with tool_calls."
    )


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(x, dict) for x in value)


class _Written:
    """The beginnings of a conversation as a template writes them, each once."""

    def __init__(
        self, messages: Sequence[dict], tools: Sequence[dict] | None, where: str, template: Template
    ):
        self.messages = messages
        self.where = where
        self._template = template
        self._tools = tools or None
        self._texts: dict[tuple[int, bool], str] = {}
        try:
            self.marks = isinstance(template, ChatTemplate) and template.has_answers
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        if self._tools and not isinstance(template, ChatTemplate):
            raise UsageError(
                f"{where} has tools={brief(tools)}, and no template to write them; data.template= "
                "gives one."
            )

    def text(self, upto: int, asks: bool = False) -> str:
        """Returns the text of the messages before number `upto`, with or without an answer's head."""
        if (upto, asks) not in self._texts:
            messages = self.messages[:upto]
            try:
                if isinstance(self._template, ChatTemplate):
                    text = self._template.render(messages, asks=asks, tools=self._tools)
                else:
                    text = self._template(messages, asks)
            except UsageError as error:
                raise UsageError(f"{self.where}: {error}") from None
            self._texts[upto, asks] = text
        return self._texts[upto, asks]

    def marked(self, number: int) -> list[tuple[int, int]]:
        """Returns the spans that the template marks in a message, in the text that ends with it."""
        assert isinstance(self._template, ChatTemplate)
        try:
            text, spans = self._template.render_answers(
                self.messages[: number + 1], tools=self._tools
            )
        except UsageError as error:
            raise UsageError(f"{self.where}: {error}") from None
        first = len(os.path.commonprefix([self.text(number), text]))
        return [(max(start, first), stop) for start, stop in spans or () if stop > first]


def _conversations(written: _Written) -> list[list[tuple[str, bool]]]:
    """Returns the texts of a conversation in pieces; each turn of the assistant counts in one."""
    messages = written.messages
    left = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    whole = written.text(len(messages))
    if not left:
        return [[(whole, False)]]
    for number in left:
        _check_turn(written, number)
    out = []
    upto = len(messages)
    while left:
        text = written.text(upto)
        # What comes later has not changed these turns, nor what comes before them.
        held = [i for i in left if text.startswith(written.text(i + 1))]
        if held:
            spans = [span for i in held for span in _spans(written, i)]
            out.append(_pieces(text, spans))
        left = [i for i in left if i not in held]
        upto = max(left, default=-1) + 1
    return out[::-1]


def _spans(written: _Written, number: int) -> list[tuple[int, int]]:
    """Returns the characters that count in a message, in the text that ends with it."""
    if written.marks:
        return written.marked(number)
    return [(len(written.text(number, asks=True)), len(written.text(number + 1)))]


def _check_turn(written: _Written, number: int) -> None:
    """Refuses a turn of the assistant that the template does not write behind its prompt."""
    text = written.text(number + 1)
    if not written.marks and not text.startswith(written.text(number, asks=True)):
        raise UsageError(
            f"{written.where}: message {number + 1} cannot be trained, as the chat template does not "
            "write it behind its prompt; legal are templates that do, or that mark it by "
            "{% generation %}."
        )
    message = written.messages[number]
    for key in _REASONING:
        value = message.get(key)
        if isinstance(value, str) and value.strip() not in text:
            raise _unwritten(written, number, key)
    for call in message.get("tool_calls") or ():
        if _name(call) not in text:
            raise _unwritten(written, number, "tool_calls")


def _name(call: Mapping[str, object]) -> str:
    """Returns the name of the function that is called."""
    function = call.get("function")
    if isinstance(function, dict):
        call = function
    return str(call.get("name", ""))


def _unwritten(written: _Written, number: int, key: str) -> UsageError:
    return UsageError(
        f"{written.where}: message {number + 1} has {key}, which the chat template does not write; "
        "legal are templates that do, or messages without it."
    )


def _pieces(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """Returns a text in pieces: what is in none of the spans does not count."""
    pieces = []
    done = 0
    for start, stop in spans:
        start = max(start, done)
        pieces.append((text[done:start], False))
        pieces.append((text[start:stop], True))
        done = max(stop, done)
    return [*pieces, (text[done:], False)]


def encode_pieces(
    pieces: Sequence[tuple[str, bool]],
    ends: bool,
    tokenizer: Tokenizer,
    *,
    special_tokens: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a document: ids int32 [n], and 1 where a token counts as a target, uint8 [n].

    The pieces are one text, encoded once. A token counts if it holds a character that counts. The
    tokenizer's BOS comes first, and does not count, unless the text begins with it.

    Args:
      pieces: A document's text, as `documents_of` returns it.
      ends: Whether the tokenizer's EOS comes last, and counts.
      tokenizer: The tokenizer.
      special_tokens: Whether special tokens that a text without a template spells become tokens. In
        messages they do: the template's own and the contents' look the same once they are rendered.
    """
    ids, counts = encode_prompted(pieces, tokenizer, special_tokens=special_tokens or not ends)
    if not ends and not any(text for text, _ in pieces):
        return np.zeros(0, np.int32), np.zeros(0, np.uint8)
    if not ends:
        return ids, counts
    return with_eos(ids, counts, tokenizer)


def with_bos(
    ids: np.ndarray, counts: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the tokenizer's BOS first, which does not count, unless it is there already.

    Args:
      ids: int32 [n].
      counts: uint8 [n], 1 where a token counts as a target.
      tokenizer: The tokenizer.
    """
    bos_ids = np.array(tokenizer.bos_ids, np.int32)
    if not len(bos_ids) or np.array_equal(ids[: len(bos_ids)], bos_ids):
        return ids, counts
    ids = np.concatenate([bos_ids, ids])
    return ids, np.concatenate([np.zeros(len(bos_ids), np.uint8), counts])


def with_eos(
    ids: np.ndarray, counts: np.ndarray, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the tokenizer's first EOS last, which counts; for arguments as of `with_bos`."""
    if not tokenizer.eos_ids:
        return ids, counts
    end = np.array(tokenizer.eos_ids[:1], np.int32)
    ids = np.concatenate([ids, end])
    return ids, np.concatenate([counts, np.ones(len(end), np.uint8)])


def encode_prompted(
    pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer, *, special_tokens: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes a document as `encode_pieces` does, without an end."""
    options = {"special_tokens": False}
    if special_tokens:  # older tokenizers have no such argument
        options = {}
    if type(tokenizer) is Bytes:  # no byte lies over a border, and this is faster
        ids, counts = _encoded_apart(pieces, tokenizer, options)
    elif hasattr(tokenizer, "encode_spans"):
        ids, counts = _encoded_whole(pieces, tokenizer, options)
    else:
        if len({counts for piece, counts in pieces if piece}) > 1:
            warnings.warn(
                "a tokenizer without encode_spans encodes pieces apart; it has to have it from the "
                "first release on.",
                FutureWarning,
                stacklevel=3,
            )
        ids, counts = _encoded_apart(pieces, tokenizer, options)
    ids, counts = with_bos(ids, counts, tokenizer)
    return ids.astype(np.int32, copy=False), counts


def _encoded_whole(
    pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer, options: Mapping[str, bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes pieces as one text, without BOS."""
    text = "".join(piece for piece, _ in pieces)
    kinds = {counts for piece, counts in pieces if piece}
    if len(kinds) < 2:  # no offsets are needed
        ids = tokenizer.encode(text, **options)
        return ids, np.full(len(ids), any(kinds), np.uint8)
    ids, starts, stops = tokenizer.encode_spans(text, **options)
    sizes = [len(piece) for piece, _ in pieces]
    flags = np.repeat(np.array([counts for _, counts in pieces]), sizes)
    before = np.concatenate([[0], np.cumsum(flags)])  # characters that count
    return ids, (before[stops] > before[starts]).astype(np.uint8)


def _encoded_apart(
    pieces: Sequence[tuple[str, bool]], tokenizer: Tokenizer, options: Mapping[str, bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes each piece by itself, without BOS."""
    parts = [(tokenizer.encode(piece, **options), counts) for piece, counts in pieces if piece]
    if len(parts) == 1:  # most texts: no copy
        ((ids, count),) = parts
        return ids, np.full(len(ids), count, np.uint8)
    counts = [np.full(len(ids), counts, np.uint8) for ids, counts in parts]
    ids = [ids for ids, _ in parts]
    empty = np.zeros(0, np.uint8)
    return np.concatenate([empty, *ids]).astype(np.int32), np.concatenate([empty, *counts])
