"""What is to be continued, from a file: one prompt a line, as text or as JSON."""

import json
import pathlib
from typing import NamedTuple

from jaxpar.types import UsageError

KEYS = ("prompt", "seed", "id")


class Request(NamedTuple):
    """A prompt to continue.

    Attributes:
      prompt: Its text.
      seed: That of its noise: two requests of one prompt and one seed get the same texts.
      id: What its lines shall be known by, if anything.
      where: What a sentence about it calls it.
    """

    prompt: str
    seed: int = 0
    id: str | int | None = None
    where: str = "the prompt"


def read_requests(path: pathlib.Path) -> list[Request]:
    """Reads a file of prompts: JSON objects where its name ends in .jsonl, else plain text; empty lines are none.

    Raises:
      UsageError: A line cannot be read, or there is none; it names the line.
    """
    requests = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        where = f"line {number} of {path.name}"
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{where} is not UTF-8.") from None
        if path.suffix == ".jsonl" and text.strip():
            requests.append(_read(text, where))
        elif path.suffix != ".jsonl" and text:
            requests.append(Request(text, where=where))
    if not requests:
        raise UsageError(f"prompts={path} has no prompt; give one a line.")
    return requests


def _read(text: str, where: str) -> Request:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be read as JSON ({error}).") from None
    if not isinstance(content, dict) or not isinstance(content.get("prompt"), str):
        raise UsageError(
            f'{where} must be an object with a text as its "prompt", and may have a "seed" and an "id".'
        )
    if unknown := sorted(content.keys() - set(KEYS)):
        raise UsageError(
            f"{where} has {unknown[0]!r}, which nothing heeds; legal are {', '.join(KEYS)}."
        )
    seed, name = content.get("seed", 0), content.get("id")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UsageError(
            f"{where} has seed={seed!r}; legal are whole numbers from 0 to {2**32 - 1}."
        )
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise UsageError(f"{where} has id={name!r}; legal are texts and whole numbers.")
    return Request(content["prompt"], seed, name, where)
