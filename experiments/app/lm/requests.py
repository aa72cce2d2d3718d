"""Requests for continuations, from a file: one prompt a line, as text or as JSON."""

import collections
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpar._encodings import decoded
from jaxpar.lm.text import ChatTemplate, Template, chat_ml
from jaxpar.types import UsageError

KEYS = ("prompt", "messages", "tools", "seed", "id")
DEFAULT_SEEDS = ("prompt", "zero")


class Request(NamedTuple):
    """A prompt to continue.

    Attributes:
      prompt: Its text.
      seed: That of its noise: two requests of one prompt and one seed get the same texts.
      id: What its lines shall be known by, if anything.
      where: What a sentence about it calls it.
      is_chat: Whether a template wrote the prompt, whose special tokens are then its own.
    """

    prompt: str
    seed: int = 0
    id: str | int | None = None
    where: str = "the prompt"
    is_chat: bool = False


def default_seed(prompt: str, name: str | int | None, repeats: int) -> int:
    """Returns the seed of a request that gives none: a function of what it is, not of its line.

    Args:
      prompt: Its text.
      name: Its id.
      repeats: How many requests before it had the same prompt and id, and no seed either.
    """
    words = json.dumps([prompt, name, repeats]).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:4], "big")


def read_requests(
    path: pathlib.Path,
    seeds: str = "prompt",
    template_of: Callable[[], Template] = lambda: chat_ml,
) -> list[Request]:
    """Reads a file of prompts, one a line; empty lines are none.

    Lines are JSON objects where the first is one with "prompt" or "messages", or the name ends in .jsonl; else they are
    plain text.

    Args:
      path: File of prompts, with or without a byte-order mark.
      template_of: Returns the chat template; called where lines have "messages".
      seeds: Seeds of requests that give none, by `DEFAULT_SEEDS`. "prompt" is `default_seed`: prompts
        differ in their noise, and lines that are added or moved change no other's. "zero" is 0.

    Raises:
      UsageError: A line cannot be read, or there is none; it names the line.
    """
    requests = []
    repeats = collections.Counter()
    lines = [line.removesuffix("\r") for line in decoded(path.read_bytes(), path).split("\n")]
    has_objects = path.suffix.lower() == ".jsonl" or _is_object(lines)
    for number, text in enumerate(lines, 1):
        where = f"line {number} of {path.name}"
        seed = None
        if has_objects and text.strip():
            request, seed = _read(text, where, template_of)
        elif not has_objects and text:
            request = Request(prompt=text, where=where)
        else:
            continue
        if seed is None and seeds == "prompt":
            key = request.prompt, request.id
            seed = default_seed(*key, repeats[key])
            repeats[key] += 1
        requests.append(request._replace(seed=seed or 0))
    if not requests:
        raise UsageError(f"prompts={path} has no prompt; give one a line.")
    return requests


def _is_object(lines: list[str]) -> bool:
    """Returns whether the first line with text is a request in JSON."""
    first = next((line for line in lines if line.strip()), "")
    try:
        content = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and not {"prompt", "messages"}.isdisjoint(content)


def _read(text: str, where: str, template_of: Callable[[], Template]) -> tuple[Request, int | None]:
    """Returns the request of a line, and its seed, None where it gives none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be read as JSON ({error}).") from None
    _check_request(content, where)
    is_chat = "messages" in content
    if is_chat:
        prompt = _rendered(content["messages"], content.get("tools"), where, template_of)
    else:
        prompt = content["prompt"]
    request = Request(prompt=prompt, id=content.get("id"), where=where, is_chat=is_chat)
    return request, content.get("seed")


def _check_request(content: object, where: str) -> None:
    """Rejects what is no request: other keys, and values that are none of theirs."""
    is_object = isinstance(content, dict)
    if not is_object or not ("messages" in content or isinstance(content.get("prompt"), str)):
        raise UsageError(
            f'{where} must be an object with a text as its "prompt", or with "messages", and may have a "seed" '
            'and an "id".'
        )
    if "prompt" in content and "messages" in content:
        raise UsageError(f"{where} has a prompt and messages; expected one of them.")
    if unknown := sorted(content.keys() - set(KEYS)):
        raise UsageError(
            f"{where} has {unknown[0]!r}, which nothing heeds; legal are {', '.join(KEYS)}."
        )
    if content.get("tools") and "messages" not in content:
        raise UsageError(
            f"{where} has tools and a prompt; expected messages, which a template writes."
        )
    _check_labels(content, where)


def _check_labels(content: dict, where: str) -> None:
    """Rejects a seed or an id of another type."""
    seed = content.get("seed", 0)
    name = content.get("id")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UsageError(
            f"{where} has seed={seed!r}; legal are whole numbers from 0 to {2**32 - 1}."
        )
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise UsageError(f"{where} has id={name!r}; legal are texts and whole numbers.")


def _check_tools(tools: object, where: str) -> None:
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_list:
        raise UsageError(
            f"{where} has tools={tools!r:.60}; expected a list of objects, or null for none."
        )


def _check_messages(messages: object, where: str) -> None:
    """Rejects conversations that no template can write up to an answer."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where} has messages={messages!r:.60}; expected a list of at least one.")
    for message in messages:
        is_whole = isinstance(message, dict) and {"role", "content"} <= message.keys()
        if not is_whole or not isinstance(message["role"], str):
            raise UsageError(
                f"{where} has the message {message!r:.60}; expected an object with role and content."
            )
    if messages[-1]["role"] == "assistant":
        raise UsageError(
            f"{where} ends with a message of the assistant; expected one that it is to answer."
        )


def _rendered(messages: Any, tools: Any, where: str, template_of: Callable[[], Template]) -> str:
    """Returns the text of a conversation to the beginning of the answer."""
    _check_messages(messages, where)
    _check_tools(tools, where)
    template = template_of()
    if tools and template is chat_ml:
        raise UsageError(f"{where} has tools, which ChatML does not write; expected a template.")
    if template is chat_ml and not all(isinstance(each["content"], str) for each in messages):
        raise UsageError(f"{where} has a content that is no text; ChatML expects strings.")
    try:
        if isinstance(template, ChatTemplate):
            return template.render(messages, tools=tools or None)
        return template(messages, True)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
