"""Text to token ids and back: plain bytes, or byte-pair encoding by the `tokenizers` library."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxpar.lm.hub.gguf_files import folder_of
from jaxpar.lm.hub.keys import FLAG, IDS, brief, check, read_json
from jaxpar.types import UsageError

__all__ = ["Bpe", "Bytes", "Tokenizer", "load_tokenizer", "train_bpe", "vocab_size_of"]


# Byte-level vocabularies spell a byte as a character that can be seen: itself, or one of those from 256 on in turn.
_SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTES = {chr(byte): byte for byte in _SEEN} | {
    chr(256 + i): byte for i, byte in enumerate(_UNSEEN)
}


class Tokenizer(Protocol):
    """A mapping between text and ids below `vocab_size`; `identity` changes when the mapping does.

    A sample begins with `bos_ids` and ends at the first of `eos_ids`, which `encode` never adds.
    Where a text spells a special token it becomes that token, and with `special_tokens=False` stays
    text.
    """

    vocab_size: int
    identity: str
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, special_tokens: bool = True) -> np.ndarray: ...

    def encode_offsets(
        self, text: str, *, special_tokens: bool = True
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def encode_spans(
        self, text: str, *, special_tokens: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...

    def token_bytes(self) -> list[bytes | None]: ...


class Bytes:
    """The 256 bytes of UTF-8 as 256 symbols: nothing to train, nothing out of vocabulary."""

    vocab_size = 256
    identity = "bytes"
    bos_ids = eos_ids = ()

    def encode(self, text: str, *, special_tokens: bool = True) -> np.ndarray:
        """Maps text to its UTF-8 bytes, int32 `[n]`.

        Escaped bytes of a command line come back as they were. There are no special tokens, so
        `special_tokens` changes nothing.

        Raises:
          UsageError: If the text has half of a surrogate pair, which no encoding writes.
        """
        try:
            coded = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise _no_text(text, error.start) from None
        return np.frombuffer(coded, np.uint8).astype(np.int32)

    def encode_offsets(
        self, text: str, *, special_tokens: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Maps text as `encode` does, with the character that each byte belongs to, int64 `[n]`."""
        ids, starts, _ = self.encode_spans(text, special_tokens=special_tokens)
        return ids, starts

    def encode_spans(
        self, text: str, *, special_tokens: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Maps text as `encode` does; byte i is in characters `starts[i]:stops[i]`, int64 `[n]`."""
        ids = self.encode(text)
        if len(ids) == len(text):
            starts = np.arange(len(ids), dtype=np.int64)
        else:
            code = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
            sizes = 1 + (code > 0x7F) + (code > 0x7FF).astype(np.int64) + (code > 0xFFFF)
            sizes[(code >= 0xD800) & (code < 0xE000)] = 1  # an escaped byte
            starts = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
        return ids, starts, starts + 1

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Maps bytes to text, with U+FFFD for what is not UTF-8; an id above 255 is a `ValueError`."""
        return bytes(np.asarray(ids).tolist()).decode("utf-8", "replace")

    def token_bytes(self) -> list[bytes | None]:
        """Returns the bytes of each symbol."""
        return [bytes([byte]) for byte in range(256)]


class Bpe:
    """Any tokenizer of the `tokenizers` library, one trained here or that of a Hugging Face folder.

    Neither a beginning-of-text nor any other special token is added, and the library's truncation
    and padding are left out, as transformers leaves them out of plain calls. `vocab_size` is one
    more than the largest id; `identity` holds the sha256 of the JSON, however its file was
    formatted. `bos_ids` and `eos_ids` are what a sample begins with and ends at, such as the BOS
    and the EOS of a Hugging Face folder.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        bos_ids: tuple[int, ...] = (),
        eos_ids: tuple[int, ...] = (),
    ):
        self._tokenizer = _whole(tokenizer)
        self.bos_ids = bos_ids
        self.eos_ids = eos_ids
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        written = self._tokenizer.to_str().encode()
        self.identity = "bpe:" + hashlib.sha256(written).hexdigest()
        self._copies: dict[bool, tokenizers.Tokenizer] = {}

    def __getstate__(self) -> Mapping[str, object]:
        return self.__dict__ | {
            "_copies": {}
        }  # pickles of the library lose what the copies are for

    def encode(self, text: str, *, special_tokens: bool = True) -> np.ndarray:
        """Maps text to int32 ids `[n]`.

        Args:
          text: Encoded whole, however long it is.
          special_tokens: Whether special tokens that the text spells become tokens, or stay text.

        Raises:
          UsageError: If the text has half of a surrogate pair, which no encoding writes.
        """
        tokenizer = self._tokenizer
        if not special_tokens:
            tokenizer = self._copy(special_tokens)
        with _unicode_only(text):
            # The library's only function that keeps no offsets, which takes a sixth less time.
            (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, np.int32)

    def encode_offsets(
        self, text: str, *, special_tokens: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Maps text as `encode` does, and returns where tokens begin.

        Returns:
          Ids int32 `[n]`, and the first character of each token, int64 `[n]`. The bytes of one
          character have the same.
        """
        ids, starts, _ = self.encode_spans(text, special_tokens=special_tokens)
        return ids, starts

    def encode_spans(
        self, text: str, *, special_tokens: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Maps text as `encode` does, and returns which characters each token holds.

        Returns:
          Ids int32 `[n]`; token i holds the characters `starts[i]:stops[i]`, int64 `[n]`, at least
          one. A space that a token begins with is among them, whatever the tokenizer's
          `trim_offsets` says. A symbol that a normaliser adds before a text has the text's first
          character.
        """
        with _unicode_only(text):
            found = self._copy(special_tokens).encode(text, add_special_tokens=False)
        ends = chain.from_iterable(found.offsets)  # twice as fast as an array of pairs
        spans = np.fromiter(ends, np.int64).reshape(-1, 2)
        return np.array(found.ids, np.int32), spans[:, 0], np.maximum(spans[:, 1], spans[:, 0] + 1)

    def _copy(self, special_tokens: bool) -> tokenizers.Tokenizer:
        """Returns a copy with untrimmed offsets that reads special tokens, or leaves them text."""
        if special_tokens not in self._copies:
            copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            # Without special tokens of its own it only trims offsets.
            copy.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
            copy.encode_special_tokens = not special_tokens
            self._copies[special_tokens] = copy
        return self._copies[special_tokens]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Maps ids back to text, special tokens spelled out and bytes that are not UTF-8 as U+FFFD."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def token_bytes(self) -> list[bytes | None]:
        """Returns the bytes that each symbol adds to a text; None for special tokens and ids that are none.

        What regular expressions, stop strings and streams go by: a character may be cut between symbols. A space that
        a decoder takes from the beginning of a text is there.

        Raises:
          UsageError: If the decoder is neither byte-level nor SentencePiece's.
        """
        decoder: dict = json.loads(self._tokenizer.to_str())["decoder"] or {"type": "none"}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
        added = self._tokenizer.get_added_tokens_decoder()
        if not kinds & {"ByteLevel", "Metaspace", "ByteFallback"}:
            raise UsageError(
                f"the bytes of single symbols are not known where a tokenizer's decoder is {decoder['type']}."
            )

        def one(token: int) -> bytes | None:
            text = self._tokenizer.id_to_token(token)
            if text is None or token in added:
                return None if text is None or added[token].special else text.encode()
            if "ByteLevel" in kinds and _BYTES.keys() >= set(text):
                return bytes(_BYTES[char] for char in text)
            byte = re.fullmatch("<0x([0-9A-F]{2})>", text) if "ByteFallback" in kinds else None
            return bytes.fromhex(byte[1]) if byte else text.replace("\u2581", " ").encode()

        return [one(token) for token in range(self.vocab_size)]

    def save(self, path: str | Path) -> None:
        """Writes the JSON that `load_tokenizer` and the Hugging Face libraries read."""
        self._tokenizer.save(str(path))


def _whole(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer without truncation and padding; the one given is left as it is."""
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextlib.contextmanager
def _unicode_only(text: str) -> Iterator[None]:
    """Names the half of a surrogate pair that makes the library refuse a text."""
    try:
        yield
    except (TypeError, UnicodeEncodeError):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _no_text(text, error.start) from None
        raise


def _no_text(text: str, start: int) -> UsageError:
    return UsageError(
        f"a text has {brief(text[start])} at character {start}; legal is text that UTF-8 can write."
    )


def train_bpe(texts: Iterator[str], vocab_size: int) -> Bpe:
    """Learns a byte-level BPE of `vocab_size` symbols (fewer from a small text); same texts, same result."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes, so that any text round-trips
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Bpe(tokenizer)


def load_tokenizer(path: str | Path) -> Bpe:
    """Reads a `tokenizer.json`, or the one in a Hugging Face folder or GGUF file, with its BOS and EOS.

    Raises:
      UsageError: If there is none, it is damaged, or the folder's special tokens are none of its symbols.
    """
    path = folder_of(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"there is no tokenizer file {file}; give a tokenizer.json or a folder with one"
        )
    try:
        tokenizer = _whole(tokenizers.Tokenizer.from_str(file.read_text("utf-8")))
        added = tokenizer.encode("a").special_tokens_mask
    except Exception as error:  # the library raises no narrower class
        raise UsageError(f"{file} is not a tokenizer of the tokenizers library: {error}") from error
    if not path.is_dir():
        return Bpe(tokenizer)
    # What stands before the text, if there is anything of the text.
    before = tokenizer.encode("a").ids[: added.index(0)] if 0 in added else []
    return Bpe(tokenizer, _begin(path, tokenizer, before), _ends(path, tokenizer))


def _begin(folder: Path, tokenizer: tokenizers.Tokenizer, before: list[int]) -> tuple[int, ...]:
    """Returns what the folder's tokenizer puts before a text: `add_bos_token` decides, else tokenizer.json does."""
    settings = _values(folder, "tokenizer_config.json")
    adds = settings.get("add_bos_token", bool(before))
    check(folder / "tokenizer_config.json", "add_bos_token", adds, FLAG)
    if not adds or before:
        return tuple(before) if adds else ()
    named = _token(folder, tokenizer, settings, "bos_token")
    ids = [named] if named is not None else _ids(folder, "bos_token_id")
    if not ids:
        raise UsageError(
            f"{folder / 'tokenizer_config.json'} has add_bos_token=true, and nothing says which token it is."
        )
    return tuple(ids[:1])


def _ends(folder: Path, tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a text: of `generation_config.json`, else `config.json`, else the tokenizer's."""
    if ids := _ids(folder, "eos_token_id"):
        return tuple(ids)
    named = _token(folder, tokenizer, _values(folder, "tokenizer_config.json"), "eos_token")
    return () if named is None else (named,)


def _ids(folder: Path, key: str) -> list[int]:
    """Returns the ids that the folder's configurations give a special token, as transformers looks for them."""
    for name in ("generation_config.json", "config.json"):
        ids = _values(folder, name).get(key)
        if ids is not None:
            check(folder / name, key, ids, IDS)
            return cast(list[int], ids if isinstance(ids, list) else [ids])
    return []


def _token(
    folder: Path, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, object], key: str
) -> int | None:
    """Returns the id of a special token that `tokenizer_config.json` spells, plainly or in an object."""
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    found = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if found is None and value is not None:
        raise UsageError(
            f"{folder / 'tokenizer_config.json'} has {key}={brief(value)}; legal is a token of tokenizer.json, or null."
        )
    return found


def _values(folder: Path, name: str) -> dict[str, object]:
    """Returns what a file of the folder says, if it is there; null is as good as nothing."""
    values = read_json(folder / name) if (folder / name).is_file() else {}
    return {key: value for key, value in values.items() if value is not None}


def vocab_size_of(spec: str) -> int:
    """Reads a tokenizer's specification: 256 for `bytes`, N for `bpe:N`, else a `UsageError`."""
    match = re.fullmatch(r"bytes|bpe:([1-9][0-9]{2,5})", spec)
    size = int(match[1] or 256) if match else 0
    if spec != "bytes" and not 257 <= size <= 200_000:
        raise UsageError(
            f"tokenizer must be 'bytes' or 'bpe:N' with N in 257..200000, not {spec!r}"
        )
    return size
