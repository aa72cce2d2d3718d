"""Encodes a text of any length in bounded memory, to the ids that it has as a whole.

A long text is encoded in chunks that overlap. Two neighbours are joined where their tokens agree
over half of the overlap, so neither the beginning of one nor the end of the other has any influence
there. For byte-pair encoding this is exact, by the following argument.

Let both chunks have a token border at p, with the same token T before it, and let the whole text
merge two symbols over p. At the first such merge both sides are as they would be alone. The left
symbol is then a part of T, as T has a border at its beginning in the text before p. The right one
is the second chunk's. Merges of both sides are made in the order of their ranks, so the second
chunk would have merged the same two symbols, and has not.

Pre-tokenisers that read from left to right go on in the same way once they agree on a border. The
chunks' ends, where a normaliser may prepend a symbol or strip a space, are not compared.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxpar.lm.text.tokenizer import Tokenizer
from jaxpar.types import UsageError

WHOLE = 2**20
"""Characters of the longest text that is encoded at once."""

CHUNK = 2**18
OVERLAP = 2**13
LARGEST = 2**26
"""Characters of the longest chunk, where neighbours agree nowhere."""


class _Chunk(NamedTuple):
    """A part of a text, and its tokens from index `done` on, which are not written yet."""

    text: str
    ids: np.ndarray
    starts: np.ndarray
    done: int


def encode_texts(
    texts: Iterator[str],
    tokenizer: Tokenizer,
    *,
    special_tokens: bool = True,
) -> Iterator[np.ndarray]:
    """Encodes the concatenation of texts.

    Memory is bounded: some 200 bytes for each of `WHOLE` characters, and the longest of the
    texts. A longer text costs 1.03 times the encoding of its chunks.

    Args:
      texts: Parts of one text, of at least one character.
      tokenizer: The tokenizer. One without `encode_spans`, as of before the first release, encodes
        each part apart.
      special_tokens: Whether special tokens that the text spells become tokens.

    Yields:
      Ids int32 [n]; joined they are what `tokenizer.encode` returns for the whole text.

    Raises:
      UsageError: Neighbours of `LARGEST` characters agree nowhere.
    """
    options = {"special_tokens": False}
    if special_tokens:  # older tokenizers have no such argument
        options = {}
    if not hasattr(tokenizer, "encode_spans"):
        yield from (tokenizer.encode(text, **options) for text in texts)
        return
    head = _read_until(texts, "", WHOLE + 1)
    if len(head) <= WHOLE:
        yield tokenizer.encode(head, **options)
        return
    yield from _joined(head, texts, tokenizer, options)


def _read_until(texts: Iterator[str], begun: str, size: int) -> str:
    """Returns a text with what follows it, until it has `size` characters or nothing follows."""
    parts = [begun]
    length = len(begun)
    while length < size:
        part = next(texts, None)
        if part is None:
            break
        parts.append(part)
        length += len(part)
    return "".join(parts)


def _joined(
    head: str, texts: Iterator[str], tokenizer: Tokenizer, options: Mapping[str, bool]
) -> Iterator[np.ndarray]:
    """Encodes a text in chunks that overlap."""
    spans_of = functools.partial(tokenizer.encode_spans, **options)
    rest = head[CHUNK:]
    ids, starts, _ = spans_of(head[:CHUNK])
    chunk = _Chunk(text=head[:CHUNK], ids=ids, starts=starts, done=0)
    size = CHUNK
    while rest := _read_until(texts, rest, size):
        begin = _begin_of_overlap(chunk)
        text = chunk.text[begin:] + rest[:size]
        ids, starts, _ = spans_of(text)
        seam = _seam(chunk, begin, ids, starts)
        if seam is not None:
            yield chunk.ids[chunk.done : seam[0]]
            chunk = _Chunk(text=text, ids=ids, starts=starts, done=seam[1])
            rest = rest[size:]
            size = CHUNK
        else:  # a chunk that holds both is right for certain
            chunk = _extended(chunk, rest[:size], spans_of)
            rest = rest[size:]
            size = len(chunk.text)
    yield chunk.ids[chunk.done :]


def _begin_of_overlap(chunk: _Chunk) -> int:
    """Returns the character that the next chunk begins with, where a token of this one begins.

    Chunks with a border in common agree the sooner, even in a run of one character.
    """
    if chunk.done == len(chunk.starts):
        return 0
    index = np.searchsorted(chunk.starts, len(chunk.text) - OVERLAP, "right") - 1
    return int(chunk.starts[max(index, chunk.done)])


def _seam(chunk: _Chunk, begin: int, ids: np.ndarray, starts: np.ndarray) -> tuple[int, int] | None:
    """Returns the token at which a chunk may end and the next may go on, as an index into each.

    None where their tokens differ in the middle half of the overlap.
    """
    low = len(chunk.text) - 3 * OVERLAP // 4
    high = len(chunk.text) - OVERLAP // 4
    ours, end = np.searchsorted(chunk.starts, [low, high])
    theirs, their_end = np.searchsorted(starts, [low - begin, high - begin])
    if ours < chunk.done or end - ours < 2 or end - ours != their_end - theirs:
        return None
    if not np.array_equal(chunk.ids[ours:end], ids[theirs:their_end]):
        return None
    if not np.array_equal(chunk.starts[ours:end], starts[theirs:their_end] + begin):
        return None
    middle = (end - ours) // 2
    return int(ours + middle), int(theirs + middle)


def _extended(
    chunk: _Chunk, rest: str, spans_of: Callable[[str], tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> _Chunk:
    """Returns a chunk with the text that follows it."""
    text = chunk.text + rest
    if len(text) > LARGEST:
        raise UsageError(
            f"a text has {len(text):,} characters with tokens that depend on all before them; "
            "expected a text that may be encoded in parts, such as one with spaces."
        )
    ids, starts, _ = spans_of(text)
    return _Chunk(text=text, ids=ids, starts=starts, done=chunk.done)
