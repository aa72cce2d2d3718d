"""What is to be continued, from a file: one prompt a line, as text or as JSON."""

import collections
import hashlib
import json
import pathlib
from typing import NamedTuple

from jaxpar.types import UsageError

KEYS = ("prompt", "seed", "id")
DEFAULT_SEEDS = ("prompt", "zero")


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


def default_seed(prompt: str, name: str | int | None, repeats: int) -> int:
    """Returns the seed of a request that gives none: a function of what it is, not of its line.

    Args:
      prompt: Its text.
      name: Its id.
      repeats: How many requests before it had the same prompt and id, and no seed either.
    """
    words = json.dumps([prompt, name, repeats]).encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:4], "big")


def read_requests(path: pathlib.Path, seeds: str = "prompt") -> list[Request]:
    """Reads a file of prompts: JSON objects where its name ends in .jsonl, else plain text; empty lines are none.

    Args:
      path: File of prompts.
      seeds: Seeds of requests that give none, by `DEFAULT_SEEDS`. "prompt" is `default_seed`: prompts
        differ in their noise, and lines that are added or moved change no other's. "zero" is 0.

    Raises:
      UsageError: A line cannot be read, or there is none; it names the line.
    """
    requests = []
    repeats = collections.Counter()
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        where = f"line {number} of {path.name}"
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{where} is not UTF-8.") from None
        if path.suffix == ".jsonl" and text.strip():
            prompt, seed, name = _read(text, where)
        elif path.suffix != ".jsonl" and text:
            prompt = text
            seed = None
            name = None
        else:
            continue
        if seed is None and seeds == "prompt":
            seed = default_seed(prompt, name, repeats[prompt, name])
            repeats[prompt, name] += 1
        requests.append(Request(prompt=prompt, seed=seed or 0, id=name, where=where))
    if not requests:
        raise UsageError(f"prompts={path} has no prompt; give one a line.")
    return requests


def _read(text: str, where: str) -> tuple[str, int | None, str | int | None]:
    """Returns prompt, seed (None where it gives none) and id of a line."""
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
    seed = content.get("seed", 0)
    name = content.get("id")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise UsageError(
            f"{where} has seed={seed!r}; legal are whole numbers from 0 to {2**32 - 1}."
        )
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise UsageError(f"{where} has id={name!r}; legal are texts and whole numbers.")
    return content["prompt"], content.get("seed"), name
