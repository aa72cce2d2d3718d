"""Texts to tokens, tokens drawn, tokens to texts: what the sample of a run and a file of prompts share."""

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpar.decode import (
    Beams,
    Constraints,
    Decoding,
    Found,
    Generated,
    Prompts,
    Sampling,
    beam_search,
    cut_at_stop,
    stop_sequences,
)
from jaxpar.lm import Decoder, LMConfig, generate
from jaxpar.lm.text import Tokenizer
from jaxpar.mesh import constrain, mesh_axes
from jaxpar.nn.attention.context import merge_shares
from jaxpar.types import PyTree, UsageError


def encode(
    tokenizer: Tokenizer,
    prompt: str,
    vocab_size: int,
    where: str = "the prompt",
    *,
    special_tokens: bool = True,
) -> tuple[np.ndarray, int]:
    """Returns the tokens that a text of this tokenizer begins with, and how many of them the prompt does not spell.

    Args:
      tokenizer: Tokenizer of the model.
      prompt: A text.
      vocab_size: Symbols of the model.
      where: What a sentence calls the prompt.
      special_tokens: Whether special tokens that the prompt spells are read as such, or as text
        where the tokenizer has the option.

    Raises:
      UsageError: There are none, or they are none of the model's; `where` says which prompt it is.
    """
    options = {}
    if not special_tokens and "special_tokens" in inspect.signature(tokenizer.encode).parameters:
        options["special_tokens"] = False
    ids = tokenizer.encode(prompt, **options)
    bos_ids = np.array(tokenizer.bos_ids, np.int32)
    added = (
        0 if np.array_equal(ids[: len(bos_ids)], bos_ids) else len(bos_ids)
    )  # a prompt may spell it
    ids = np.concatenate([bos_ids, ids]) if added else ids
    if not len(ids):
        raise UsageError(f"{where} has no tokens; give at least one character.")
    if (largest := max([*ids, *tokenizer.eos_ids])) >= vocab_size:
        raise UsageError(
            f"the tokenizer's token {largest} is none of the model's {vocab_size} symbols; legal are 0 to "
            f"{vocab_size - 1}."
        )
    return ids, added


def decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Returns the text of tokens; a vocabulary that was rounded up may have drawn some that no text has."""
    return tokenizer.decode(ids[ids < tokenizer.vocab_size])


@functools.partial(
    jax.jit,
    static_argnames=("model", "sampling", "decoding", "sequences"),
)
def draw(
    key: jax.Array,
    params: PyTree,
    prompts: Prompts,
    model: LMConfig,
    sampling: Sampling,
    decoding: Decoding,
    *,
    sequences: tuple[tuple[int, ...], ...] = (),
    draft_params: PyTree = None,
) -> Generated:
    """Returns `jaxpar.lm.generate` of prompts, compiled once for a shape; every process has all of it.

    Args:
      key: Consumed.
      params: Parameters of the model.
      prompts: Prompts, their lengths and seeds.
      model: Configuration of the model.
      sampling: Distribution of a new token.
      decoding: Continuations, and how they are decoded.
      sequences: Sequences of new tokens that end a text.
      draft_params: Parameters of a draft.
    """
    stops = stop_sequences(sequences) if sequences else None
    if mesh_axes("slots"):  # devices share each cache
        decoding = dataclasses.replace(decoding, merge=merge_shares)
    drawn = generate(
        key,
        params,
        prompts,
        model,
        sampling,
        decoding,
        Constraints(sequences=stops),
        draft_params=draft_params,
    )
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), drawn)


@functools.partial(jax.jit, static_argnames=("model", "beams", "stop_tokens"))
def search(
    params: PyTree,
    prompt: jax.Array,
    prompt_lengths: jax.Array,
    *,
    model: LMConfig,
    beams: Beams,
    stop_tokens: tuple[int, ...],
) -> Found:
    """Returns the most likely texts of each prompt; every process has all of them."""
    found = beam_search(
        params,
        prompt,
        Decoder(model),
        beams,
        prompt_lengths=prompt_lengths,
        stop_tokens=stop_tokens,
    )
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), found)


class Ending(NamedTuple):
    """Where a text ends, and why.

    Attributes:
      text: What follows the prompt, without what it was stopped by.
      finish_reason: "stop" at a token or a string that stops, "length" where there was no room for
        more, "unfinished" where neither holds. There the row ended with the tokens that a stop
        string is cut into, and the text does not spell the string.
      num_tokens: How many tokens count: up to the one that stopped it, that one counted in.
    """

    text: str
    finish_reason: str
    num_tokens: int


def ending(
    tokenizer: Tokenizer,
    begun: np.ndarray,
    new: np.ndarray,
    stop_tokens: Sequence[int],
    stops: Sequence[str],
    room: int,
) -> Ending:
    """Returns the text of new tokens after those it begins with, cut before the first of `stops`.

    Args:
      tokenizer: Tokenizer of the tokens.
      begun: Tokens of the prompt.
      new: Those after it, a stop token counted in.
      stop_tokens: Tokens that end a text.
      stops: Strings that do.
      room: How many new tokens there could have been.
    """

    def text(count: int) -> str:
        whole, before = (
            decode(tokenizer, np.concatenate([begun, new[:count]])),
            decode(tokenizer, begun),
        )
        # Some tokenizers drop a space before the first token of a text, which these are not.
        return whole[len(before) :] if whole.startswith(before) else decode(tokenizer, new[:count])

    count = len(new) - (len(new) > 0 and int(new[-1]) in stop_tokens)
    cut, stopped = cut_at_stop(text(count), stops)
    if not stopped:
        if count < len(new):
            reason = "stop"
        elif count >= room:
            reason = "length"
        else:
            reason = "unfinished"
        return Ending(text=cut, finish_reason=reason, num_tokens=len(new))
    low, high = 1, count  # the fewest tokens whose text holds the stop
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut_at_stop(text(middle), stops)[1] else (middle + 1, high)
    return Ending(cut, "stop", low)


def ending_tokens(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[int, ...]:
    """Returns the tokens that hold a whole stop string: a row that draws one need not go on."""
    if not stops:
        return ()
    return tuple(
        number
        for number in range(tokenizer.vocab_size)
        if any(stop in tokenizer.decode(np.array([number])) for stop in stops)
    )


def ending_sequences(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens that stop strings are cut into, where several hold one: a row that ends so need not go on.

    A string that was drawn in other tokens ends no row, but its text all the same.
    """
    cut = [(stop, tokenizer.encode(stop)) for stop in stops]
    return tuple(
        tuple(ids.tolist()) for stop, ids in cut if len(ids) > 1 and stop in tokenizer.decode(ids)
    )


@jax.jit
def _first_numbers(params: PyTree) -> list[jax.Array]:
    return [x[(0,) * (x.ndim - 1)][:64] for x in jax.tree.leaves(params)]


def fingerprint(params: PyTree) -> str:
    """Returns eight digits that other parameters do not have: of the first numbers of each array."""
    # In float32, so that a folder in bfloat16 has the same digits however it was read.
    numbers = [np.asarray(x) for x in _first_numbers(params)]
    wide = [x.astype(np.float32) if x.dtype.itemsize == 2 else x for x in numbers]
    return hashlib.sha256(b"".join(x.tobytes() for x in wide)).hexdigest()[:8]
