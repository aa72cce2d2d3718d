"""Text on disk to two streams of tokens, training and validation, without ever holding a file in memory.

Files are cut into *pieces*: stretches of continuous text that lie wholly in one split. Which piece goes
where depends on content alone, so every host and every copy of the data agrees.
"""

import functools
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxpar._encodings import not_utf8
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.lm.text.chat import ChatTemplate, open_template
from jaxpar.lm.text.examples import Document, Template, chat_ml
from jaxpar.lm.text.files import Source, copy_text, files_at, lines_of_source, sort_sources
from jaxpar.lm.text.long_texts import encode_texts
from jaxpar.lm.text.shards import open_shards, read_line, tokenise
from jaxpar.lm.text.tokenizer import Bytes, Tokenizer, load_tokenizer, train_bpe, vocab_size_of
from jaxpar.types import UsageError

__all__ = ["Corpus", "DataConfig", "Tokens", "open_corpus"]

_KIB, _MIB = 2**10, 2**20
_HASHED = 2**30
_CHECKED = 16  # records by which an older cache is known
LAYOUTS = ("stream", "rows", "packed")
"""Rows of a batch by name; `jaxpar.lm.text.row_layouts` makes them."""
_FORMAT = 2  # part of every cache key: raise it when the meaning of a cached file changes

_TEXT_ALONE = ["special tokens stay text"]


@dataclass(frozen=True)
class DataConfig:
    """Which text a run reads and how it is cut.

    Attributes:
        path: a text file, or a folder whose files are documents; records in JSONL, JSON arrays, parquet or arrow,
            or a folder of these; told by content, and text and JSON may be .gz or .zst; a folder with tokens.npy, or
            one .npy of tokens; mix:7*a.jsonl+3*b, several by share; empty: this Python's standard library.
        tokenizer: `bytes` or `bpe:N`.
        split: `hash:f` holds documents out with probability f, by their content; `tail:f` the stream's end.
        seq_len: tokens of a window.
        batch_size: windows of a step, over all hosts.
        pack: mark the documents within each window, so that attention can stay inside them.
        template: how the messages of JSONL become text: a file of Jinja, or a folder that has one; empty: ChatML.
        workers: processes that tokenise records.
        pairs: records are preferences, {"prompt", "chosen", "rejected"}; objective.kind=dpo says so.
        layout: `stream` (windows of the stream), `rows` (one document a row) or `packed` (whole documents that
            share rows). A mixture has one for all sources, or one for each, joined by +. Empty is packed where not
            all tokens count, such as chats and completions, rows for pairs, and stream for others.
        special_tokens: special tokens that a text, a prompt or a completion spells become tokens;
            false: they stay text. Those of messages always become tokens.
    """

    path: str = ""
    tokenizer: str = "bytes"
    split: str = "hash:0.1"
    seq_len: int = field(256, AtLeast(1))
    batch_size: int = field(64, AtLeast(1))
    pack: bool = False
    template: str = field("", identity="changed")
    workers: int = field(1, AtLeast(1), identity=False)
    pairs: bool = field(False, None, identity="changed")
    layout: str = field("", identity="changed")
    special_tokens: bool = field(True, identity="changed")

    def __post_init__(self):
        check_fields(self, "data.")
        _check_layout(self.layout, self.pairs)
        vocab_size_of(self.tokenizer)
        _split_of(self.split)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents, which are spans of a flat array on disk, seen as one stream.

    Attributes:
        data: every token of the corpus, unsigned `[n]`, memory-mapped.
        starts: first token of each document in `data`, int64 `[D]`.
        lengths: tokens of each document, positive, int64 `[D]`.
        counts: 1 where a token counts as a target, uint8 `[n]`, memory-mapped; None: all do.
    """

    data: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray | None = None

    @cached_property
    def begins(self) -> np.ndarray:
        """First token of each document in the stream, int64 `[D]`."""
        return np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return int((self.begins[-1:] + self.lengths[-1:]).sum())

    def read(self, offset: int | np.ndarray, length: int) -> np.ndarray:
        """Reads `length` tokens from each offset: int32 `[length]`, or `[b, length]` for offsets `[b]`."""
        return self._read(self.data, offset, length)

    def read_counts(self, offset: int | np.ndarray, length: int) -> np.ndarray:
        """Reads which of these tokens count as targets: float32, same shape."""
        if self.counts is None:
            return np.ones((*np.shape(offset), length), np.float32)
        return self._read(self.counts, offset, length).astype(np.float32)

    def _read(self, source: np.ndarray, offset: int | np.ndarray, length: int) -> np.ndarray:
        offsets = np.atleast_1d(np.asarray(offset, np.int64))
        if offsets.size and not 0 <= offsets.min() <= offsets.max() <= len(self) - length:
            raise IndexError(f"tokens {offset} + {length} are outside a stream of {len(self)}")
        spans = np.searchsorted(self.begins, offsets, "right") - 1
        skips = offsets - self.begins[spans]
        out = np.empty((len(offsets), length), np.int32)
        for row, span, skip in zip(out, spans.tolist(), skips.tolist(), strict=True):
            filled = 0
            while filled < length:
                count = min(length - filled, int(self.lengths[span]) - skip)
                first = int(self.starts[span]) + skip
                row[filled : filled + count] = source[first : first + count]
                filled, span, skip = filled + count, span + 1, 0
        return out.reshape(*np.shape(offset), length)

    def document_index(self, offset: int | np.ndarray, length: int) -> np.ndarray:
        """Numbers the document of each token that `read` gives: int64, same shape."""
        places = np.asarray(offset, np.int64)[..., None] + np.arange(length)
        return np.searchsorted(self.begins, places, "right") - 1


@dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenized text in two disjoint parts; `hash` changes with its content and with nothing else."""

    hash: str
    tokenizer: Tokenizer
    train: Tokens
    validation: Tokens

    def describe(self) -> str:
        """One line for the start of a run."""
        name, size = self.tokenizer.identity[:12], self.tokenizer.vocab_size
        counts = f"{len(self.train):,} training and {len(self.validation):,} validation tokens"
        return f"corpus {self.hash[:12]}: {counts}, {name} ({size} symbols)"


def open_corpus(
    config: DataConfig,
    cache: str | Path,
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Opens the corpus that `config` names, reading and tokenizing it unless `cache` holds the result.

    The text is hashed, split and (but for a single file of bytes, which is mapped where it lies) written
    as a flat token file into a folder of `cache` named after the source's paths, sizes and modification
    times, the tokenizer and the split. That folder appears by one rename, so it is whole or absent;
    `cache` may serve any number of corpora and processes at once. Memory stays bounded.

    Files are distinguished by content, `jaxpar.lm.text.files`. Tokens of the same files in `cache`
    are used as they were read then, so that older runs can be resumed.

    A `tokenizer` replaces `config.tokenizer`, such as the one of loaded weights. `say` is called
    with the progress of tokenisation. A `UsageError`
    says: no text there, not UTF-8, binary, records of no known form, damaged, a split under `seq_len + 1` tokens, a
    cache that is not writable.
    """
    if config.path.endswith(".npy") or (Path(config.path) / "tokens.npy").is_file():
        if config.pairs:
            raise UsageError(
                f"data.path={config.path!r} has no pairs; expected records, not tokens."
            )
        return _open_arrays(config, Path(cache), tokenizer)
    try:
        files = files_at(config.path)
        name = config.tokenizer if tokenizer is None else tokenizer.identity
        key = [_FORMAT, files, name, config.split, *_ends_of(config, files, tokenizer)]
        key += _TEXT_ALONE * (not config.special_tokens)
        paths = [path for path, _, _ in files]
        digest = functools.cache(lambda: _digest_of(paths))
        entry = _text_entry(config, Path(cache), key, paths, digest)
        if config.pairs or not entry.exists():
            opened = _open_sources(config, Path(cache), files, tokenizer, say, digest)
            if isinstance(opened, Corpus):
                return opened
            if opened:
                entry = _text_entry(config, Path(cache), [*key, "plain"], paths, digest)
            if not entry.exists():
                _build(entry, files, config, tokenizer, opened)
    except PermissionError as error:
        raise UsageError(
            f"{error.filename} cannot be opened; change its permissions or data path"
        ) from error

    record = json.loads((entry / "corpus.json").read_text())
    if tokenizer is None:
        tokenizer = Bytes() if config.tokenizer == "bytes" else load_tokenizer(entry)
    if record["data"] not in (
        "tokens.bin",
        files[0][0],
    ):  # or a cache that came with a run would lead anywhere
        raise UsageError(
            f"{entry / 'corpus.json'} names the tokens {record['data']!r}; remove that folder"
        )
    data = np.memmap(entry / record["data"], record["dtype"], "r", shape=(record["tokens"],))
    data = data.view(np.ndarray)  # cheaper to slice
    lengths = np.array(record["lengths"], np.int64)
    is_validation = np.array(record["validation"], bool)
    counts = _map_counts(entry / "counts.bin", len(data))
    train, validation = _streams(config, data, lengths, is_validation, counts)
    return Corpus(hash=record["hash"], tokenizer=tokenizer, train=train, validation=validation)


def _streams(
    config: DataConfig,
    data: np.ndarray,
    lengths: np.ndarray,
    validation: np.ndarray,
    counts: np.ndarray | None = None,
) -> tuple[Tokens, Tokens]:
    """The two sides of a split, each long enough for a window."""
    streams = []
    starts = np.cumsum(lengths) - lengths
    for side, chosen in (("training", ~validation), ("validation", validation)):
        chosen &= lengths > 0  # a tokenizer may find nothing in a document
        stream = Tokens(data=data, starts=starts[chosen], lengths=lengths[chosen], counts=counts)
        streams.append(stream)
        needed = _fewest_tokens(config)
        if len(streams[-1]) < needed:
            reader = "one window"
            remedy = f"lower seq_len={config.seq_len}, "
            if config.layout:
                reader = "a target"
                remedy = ""
            raise UsageError(
                f"the corpus has {len(data)} tokens, {len(streams[-1])} of them in the {side} split, "
                f"but {reader} needs {needed}; {remedy}change split={config.split!r} or add text"
            )
    return streams[0], streams[1]


def _fewest_tokens(config: DataConfig) -> int:
    """Returns the tokens that a split needs: a window's, or a target's where rows are filled up."""
    if config.pairs:
        return 1
    if config.layout:
        return 2
    return config.seq_len + 1


def _hashed(key: list) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _open_arrays(config: DataConfig, cache: Path, tokenizer: Tokenizer | None) -> Corpus:
    """Opens arrays of tokens."""
    path = Path(config.path).expanduser().resolve()
    if tokenizer is None and (path / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(path)
    if tokenizer is None and config.tokenizer != "bytes":
        raise UsageError(
            f"tokenizer={config.tokenizer!r} is not learnt from tokens; put tokenizer.json beside them"
        )
    return _open_tokens(config, cache, path, tokenizer or Bytes())


def _open_tokens(config: DataConfig, cache: Path, folder: Path, tokenizer: Tokenizer) -> Corpus:
    split = _split_of(config.split)
    found = open_shards(folder, tokenizer.vocab_size, split, cache, tokenizer.identity)
    train, validation = _streams(
        config, found.tokens, found.lengths, found.validation, counts=found.counts
    )
    return Corpus(hash=found.hash, tokenizer=tokenizer, train=train, validation=validation)


def _open_sources(
    config: DataConfig,
    cache: Path,
    files: list[tuple[str, int, int]],
    tokenizer: Tokenizer | None,
    say: Callable[[str], None],
    digest: Callable[[], str],
) -> Corpus | tuple[Source, ...]:
    """Opens records, tokenising them first; of texts it returns those whose bytes are not their text."""
    name = config.tokenizer if tokenizer is None else tokenizer.identity
    template = chat_ml
    if config.template:
        template = open_template(config.template)
    writes = [template.text, dict(template.tokens)] if isinstance(template, ChatTemplate) else ""
    key = [_FORMAT, *files[0], name, config.split, writes]
    if len(files) > 1:
        key[1:4] = [files]
    key += ["pairs"] if config.pairs else []
    key += _TEXT_ALONE * (not config.special_tokens)
    paths = [path for path, *_ in files]
    folder = _entry_of(cache / _hashed(key), paths, digest)
    if tokenizer is not None:
        ends = [tokenizer.bos_ids, tokenizer.eos_ids[:1]]
        other = _entry_of(cache / _hashed([*key, ends]), paths, digest)
        if other.exists() or not _serves(config, folder, tokenizer, paths, template):
            folder = other
    learnt = folder.with_suffix(".json")
    sources: tuple[Source, ...] = ()
    is_learnt = tokenizer is not None or config.tokenizer == "bytes" or learnt.is_file()
    if not folder.exists() or not is_learnt:
        if not config.path:
            return ()
        is_records, sources = sort_sources(paths, config.path, config.pairs)
        if len(sources) < len(files):
            say(
                f"{len(files) - len(sources)} files beside the records of {config.path} are left out"
            )
        if not is_records:
            odd = [source.path for source in sources if source.kind.form != "text"]
            if odd:
                say(f"{len(odd)} files are read as text though they are JSON, such as {odd[0]}")
            return tuple(source for source in sources if not source.kind.is_plain)
    tokenizer = tokenizer or _tokenizer(config, learnt, sources, template)
    if not folder.exists():
        try:
            tokenise(
                sources,
                folder,
                tokenizer,
                template,
                _split_of(config.split),
                config.workers,
                say,
                config.pairs,
                special_tokens=config.special_tokens,
            )
        except PermissionError as error:
            if error.filename in {path for path, *_ in files}:
                raise
            raise _not_writable(cache, error) from error
        except OSError as error:
            raise _not_writable(cache, error) from error
    return _open_tokens(config, cache, folder, tokenizer)


def _serves(
    config: DataConfig,
    folder: Path,
    tokenizer: Tokenizer,
    paths: list[str],
    template: Template,
) -> bool:
    """Returns whether tokens in a folder without BOS and EOS in its name have this tokenizer's.

    Such a folder is an older one, or its tokenizer has neither. The first records decide.
    """
    if not folder.exists():
        return not tokenizer.bos_ids and not tokenizer.eos_ids
    try:
        is_records, sources = sort_sources(paths, config.path, config.pairs)
        if not is_records:
            return True  # older code read other files as records
        lines = list(islice(_first_documents(sources, template, config.pairs), _CHECKED))
    except UsageError:
        return True
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    lengths = np.load(folder / "lengths.npy", mmap_mode="r")[: 2 * _CHECKED]
    bounds = np.cumsum([0, *lengths]).tolist()
    for number, documents in enumerate(lines):
        first = number * (1 + config.pairs)
        ids = tokens[bounds[first] : bounds[first + 1]].tolist()
        if not _has_ends(ids, documents[0], tokenizer):
            return False
        if len(documents) != 1 + config.pairs:
            break  # older code may have made one document of this line
    return True


def _has_ends(ids: list[int], document: Document, tokenizer: Tokenizer) -> bool:
    """Returns whether a document's ids are its text's between BOS and EOS, by the outermost ones."""
    pieces, ends = document
    bos_ids = list(tokenizer.bos_ids)
    eos_ids = list(tokenizer.eos_ids[: int(ends)])
    if ids[: len(bos_ids)] != bos_ids or ids[len(ids) - len(eos_ids) :] != eos_ids:
        return False
    inside = ids[len(bos_ids) : len(ids) - len(eos_ids)]
    bodies = _encodings(pieces, tokenizer)
    if not bodies or not inside:
        return True
    if ends and inside[-1] not in [body[-1] for body in bodies]:
        return False
    if bos_ids and bos_ids in [body[: len(bos_ids)] for body in bodies]:
        return True  # the text spells it
    return inside[0] in [body[0] for body in bodies]


def _encodings(pieces: list[tuple[str, bool]], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the ids that a document's text, its first and its last piece may have."""
    texts = [text for text, _ in pieces if text]
    # Older code encoded each piece by itself, and special tokens may be read as text.
    bodies = [tokenizer.encode(text) for text in ("".join(texts), *texts[:1], *texts[-1:])]
    if hasattr(tokenizer, "encode_spans"):
        bodies.append(tokenizer.encode("".join(texts), special_tokens=False))
    return [body.tolist() for body in bodies if len(body)]


def _not_writable(cache: Path, error: OSError) -> UsageError:
    return UsageError(f"the cache folder {cache} cannot be written: {error.strerror}")


def _tokenizer(
    config: DataConfig, file: Path, sources: Sequence[Source], template: Template
) -> Tokenizer:
    """The tokenizer that records are given, learnt from their first 64 MiB and kept in `file`."""
    if config.tokenizer == "bytes":
        return Bytes()
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".partial-{uuid.uuid4().hex}")
        read = (documents[-1] for documents in _first_documents(sources, template, config.pairs))
        texts = (text for pieces, _ in read for text, _ in pieces)
        train_bpe(texts, vocab_size_of(config.tokenizer)).save(partial)
        partial.rename(file)
    return load_tokenizer(file)


def _first_documents(
    sources: Sequence[Source], template: Template, pairs: bool
) -> Iterator[list[tuple[list[tuple[str, bool]], bool]]]:
    """Yields the documents of the lines that begin in the first 64 MiB."""
    left = 64 * _MIB
    for source in sources:
        unit = "line" if source.kind.form == "lines" else "record"
        for number, line in enumerate(lines_of_source(source), 1):
            if left <= 0:
                return
            left -= len(line)
            if line.strip():
                where = f"{source.path}, {unit} {number}"
                yield read_line(source.path, 0, line, template, pairs, lambda _, at=where: at)


class _Piece(NamedTuple):
    path: str
    start: int
    stop: int
    validation: bool


def _build(
    entry: Path,
    files: list,
    config: DataConfig,
    tokenizer: Tokenizer | None,
    wrapped: Sequence[Source] = (),
) -> None:
    """Makes the folder `entry`; what a crash leaves behind has another name and is never read.

    Of the files in `wrapped`, which are packed or begin with a byte-order mark, the text is read.
    """
    partial = entry.parent / f".partial-{uuid.uuid4().hex}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"the cache folder {entry.parent} cannot be written: {error.strerror}"
        ) from error
    try:
        files = _unwrapped(files, wrapped, partial / "texts")
        content, pieces = _content_and_pieces(files, config.split)
        if tokenizer is None and config.tokenizer == "bytes":
            tokenizer = Bytes()
        elif tokenizer is None:
            tokenizer = trained = train_bpe(
                _training_texts(pieces), vocab_size_of(config.tokenizer)
            )
            trained.save(partial / "tokenizer.json")
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        if len(files) == 1 and isinstance(tokenizer, Bytes) and not wrapped:
            data, lengths = files[0][0], [piece.stop - piece.start for piece in pieces]
        else:
            data = "tokens.bin"
            sizes = {path: size for path, size, _ in files}
            encoder = _Encoder(
                tokenizer=tokenizer,
                dtype=dtype,
                sizes=sizes,
                ends=_ends_of(config, files, tokenizer),
                whole=_reads_whole(config, tokenizer.identity),
                special_tokens=config.special_tokens,
            )
            lengths = encoder.write(partial, pieces)
        record = dict(
            hash=content, path=config.path, split=config.split, tokenizer=tokenizer.identity
        )
        record |= dict(data=data, dtype=dtype.name, tokens=sum(lengths), lengths=lengths)
        record |= dict(validation=[int(piece.validation) for piece in pieces])
        (partial / "corpus.json").write_text(json.dumps(record))
        shutil.rmtree(partial / "texts", ignore_errors=True)
        for path in partial.iterdir():  # contents must reach the disk before the name does
            with path.open("rb") as file:
                os.fsync(file.fileno())
        try:
            partial.rename(entry)
        except OSError:
            if not entry.is_dir():  # else another process made the same folder first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unwrapped(files: list, wrapped: Sequence[Source], folder: Path) -> list:
    """Returns the files with the text of those that are wrapped, which is written into `folder`."""
    if not wrapped:
        return files
    folder.mkdir()
    texts = {}
    for number, source in enumerate(wrapped):
        texts[source.path] = folder / str(number)
        copy_text(source, texts[source.path])
    found = []
    for path, size, modified in files:
        if path not in texts:
            found.append((path, size, modified))
        elif texts[path].stat().st_size:
            found.append((str(texts[path]), texts[path].stat().st_size, 0))
    if not found:
        raise UsageError(f"{wrapped[0].path} holds no text; expected a file that is not empty.")
    return found


def _content_and_pieces(files: list, split: str) -> tuple[str, list[_Piece]]:
    """Reads everything once: the hash of the content, and the pieces in stream order.

    Documents are the blocks of a single file, in its order, or whole files in the order of their digests,
    which makes both sides of a hash split contiguous. The hash is the sha256 of the documents' sha256s.
    """
    kind, fraction = _split_of(split)
    limit = fraction * 2**64 if kind == "hash" else 0
    documents = []
    if len(files) == 1:
        path, size, _ = files[0]
        for start, block in _blocks(path, 0, size, 4 * _KIB if size <= 256 * _MIB else 64 * _KIB):
            _text_of(path, start, block)
            documents.append((hashlib.sha256(block).digest(), path, start, start + len(block)))
    else:
        for path, size, _ in files:
            digest = hashlib.sha256()
            for start, block in _blocks(path, 0, size, _MIB):
                _text_of(path, start, block)
                digest.update(block)
            documents.append((digest.digest(), path, 0, size))
        documents.sort()
    content = hashlib.sha256(b"".join(document[0] for document in documents)).hexdigest()
    pieces = []
    for key, path, start, stop in documents:
        is_validation = int.from_bytes(key[:8], "big") < limit
        pieces.append(_Piece(path=path, start=start, stop=stop, validation=is_validation))
    if len(files) == 1:
        runs = [list(run) for _, run in groupby(pieces, lambda piece: piece.validation)]
        pieces = [run[0]._replace(stop=run[-1].stop) for run in runs]
    return content, pieces if kind == "hash" else list(_tail(pieces, fraction))


def _tail(pieces: list[_Piece], fraction: float) -> Iterator[_Piece]:
    """Cuts a stream of whole files so that its last `fraction` is validation, not inside a character."""
    left = int((1 - fraction) * sum(piece.stop for piece in pieces))
    for path, _, stop, _ in pieces:
        cut = min(left, stop)
        left -= cut
        if 0 < cut < stop:
            with open(path, "rb") as file:
                file.seek(max(cut - 4, 0))
                head = file.read(min(cut, 4))
            cut -= len(head) - len(_characters(head))
        yield _Piece(path=path, start=0, stop=cut, validation=False)
        yield _Piece(path=path, start=cut, stop=stop, validation=True)


def _blocks(path: str, start: int, stop: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Cuts bytes `start:stop` of a file into `(offset, block)`.

    A block ends at the first newline after `size` bytes or, for want of one, at about `2 * size`.
    """
    with open(path, "rb", buffering=4 * size) as file:
        while start < stop:
            file.seek(start)
            block = file.read(min(size, stop - start))
            block += file.readline(min(size, stop - start - len(block)))
            if start + len(block) < stop and not block.endswith(b"\n"):
                block = _characters(block)
            if not block:
                raise UsageError(f"{path} became shorter while it was read; start again")
            yield start, block
            start += len(block)


def _characters(block: bytes) -> bytes:
    """The block without a last UTF-8 character that may not be whole; ASCII stays as it is."""
    return re.sub(rb"[\xc0-\xff][\x80-\xbf]{0,3}\Z", b"", block)


def _texts(piece: _Piece) -> Iterator[str]:
    for offset, block in _blocks(*piece[:3], 16 * _KIB):
        yield _text_of(piece.path, offset, block)


def _text_of(path: str, offset: int, block: bytes) -> str:
    """The text of a block of whole characters, which begins at an offset of its file."""
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, offset + error.start) from None


def _training_texts(pieces: list[_Piece]) -> Iterator[str]:
    """The first 64 MiB or so of the training split: enough to count pairs, and bounded."""
    left = 64 * _MIB
    for text in chain.from_iterable(_texts(piece) for piece in pieces if not piece.validation):
        yield text
        left -= len(text)
        if left <= 0:
            return


def _entry_of(entry: Path, paths: list[str], digest: Callable[[], str]) -> Path:
    """Returns the cache's folder for the content of files.

    It is `entry`, named after their paths, sizes and times, for the first content under these, and
    has another name for any other content. A file next to it keeps the times of change and numbers
    that the system gives the files: they are read again only where these are new. Files of over
    1 GiB in all are not read: new numbers are other content, and are tokenised again.
    """
    record = entry.with_name(f"{entry.name}.source")
    stats = [os.stat(path) for path in paths]
    numbers = [[stat.st_ctime_ns, stat.st_ino] for stat in stats]
    state = hashlib.sha256(json.dumps(numbers).encode()).hexdigest()
    try:
        contents = json.loads(record.read_text())
    except (OSError, ValueError):
        contents = {}
    if state not in contents:
        contents[state] = state
        if sum(stat.st_size for stat in stats) <= _HASHED:
            contents[state] = digest()
        partial = record.with_name(f".partial-{uuid.uuid4().hex}")
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(contents))
            partial.rename(record)
        except OSError:
            pass  # a cache that is only read; one that cannot be made has a sentence later
    content = contents[state]
    if content == next(iter(contents.values())):
        return entry
    return entry.with_name(f"{entry.name}-{content[:16]}")


def _text_entry(
    config: DataConfig, cache: Path, key: list, paths: list[str], digest: Callable[[], str]
) -> Path:
    """Returns the cache's folder for texts: an older one that is there, or else one of whole texts.

    Older ones hold the tokens of blocks, which runs that began with them keep.
    """
    older = _entry_of(cache / _hashed(key), paths, digest)
    if older.exists() or not _reads_whole(config, key[2]):
        return older
    return _entry_of(cache / _hashed([*key, "whole texts"]), paths, digest)


def _reads_whole(config: DataConfig, identity: str) -> bool:
    """Returns whether texts are encoded whole; others are bytes, or from a run before layouts."""
    return bool(config.layout) and identity != Bytes.identity


def _digest_of(paths: list[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _ends_of(config: DataConfig, files: list, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Returns the BOS and the EOS that files of a folder get, as lines of JSONL do; empty for none."""
    # Without a layout a run is of before they got any; a single file is a stream, not a document.
    if tokenizer is None or not config.layout or len(files) == 1:
        return []
    if not tokenizer.bos_ids and not tokenizer.eos_ids:
        return []
    return [tokenizer.bos_ids, tokenizer.eos_ids[:1]]


def _map_counts(path: Path, size: int) -> np.ndarray | None:
    if not path.is_file():
        return None
    return np.memmap(path, np.uint8, "r", shape=(size,)).view(np.ndarray)


class _Encoder(NamedTuple):
    """Encodes pieces of texts into flat files.

    Attributes:
      tokenizer: The tokenizer.
      dtype: Type of the tokens on disk.
      sizes: Bytes of each file.
      ends: BOS and EOS of each file, or nothing; a BOS that the text spells is not written twice.
      whole: Whether pieces are encoded whole, or in blocks of 16 KiB, as before there were layouts.
      special_tokens: Whether special tokens that a text spells become tokens.
    """

    tokenizer: Tokenizer
    dtype: np.dtype
    sizes: dict[str, int]
    ends: list[tuple[int, ...]]
    whole: bool
    special_tokens: bool

    def write(self, folder: Path, pieces: list[_Piece]) -> list[int]:
        """Writes tokens, and which of them count if a BOS does not; returns lengths of pieces."""
        begin_ids: tuple[int, ...] = ()
        end_ids: tuple[int, ...] = ()
        if self.ends:
            begin_ids, end_ids = self.ends
        lengths = []
        counted = []
        with (folder / "tokens.bin").open("wb") as file:
            for piece in pieces:
                is_empty = piece.start == piece.stop
                length = 0
                added = 0
                for number, ids in enumerate(self._encoded(piece)):
                    if number == 0 and piece.start == 0:
                        added = len(begin_ids) * (tuple(ids[: len(begin_ids)]) != begin_ids)
                        length += self._put(file, begin_ids[:added])
                    length += self._put(file, ids)
                if piece.stop == self.sizes[piece.path] and not is_empty:
                    length += self._put(file, end_ids)
                lengths.append(length)
                counted.append((added, length - added))
        if begin_ids:
            _write_counts(folder / "counts.bin", counted)
        return lengths

    def _put(self, file: BinaryIO, ids: np.ndarray | Sequence[int]) -> int:
        """Writes tokens, and returns their number."""
        file.write(np.asarray(ids).astype(self.dtype).tobytes())
        return len(ids)

    def _encoded(self, piece: _Piece) -> Iterator[np.ndarray]:
        """Yields the tokens of a piece; nothing of an empty one."""
        if isinstance(self.tokenizer, Bytes):
            for _, block in _blocks(*piece[:3], _MIB):
                yield np.frombuffer(block, np.uint8)
        elif self.whole:
            blocks = _blocks(*piece[:3], _MIB)
            texts = (_text_of(piece.path, offset, block) for offset, block in blocks)
            if piece.start < piece.stop:
                yield from encode_texts(texts, self.tokenizer, special_tokens=self.special_tokens)
        else:
            options = {"special_tokens": False}
            if self.special_tokens:  # older tokenizers have no such argument
                options = {}
            for text in _texts(piece):
                yield self.tokenizer.encode(text, **options)


def _write_counts(path: Path, counted: Sequence[tuple[int, int]]) -> None:
    """Writes which tokens count: of each piece the first ones do not, and the others do."""
    with path.open("wb") as file:
        for added, rest in counted:
            file.write(bytes(added))
            file.write(np.ones(rest, np.uint8).tobytes())


def _check_layout(layout: str, pairs: bool) -> None:
    names = []
    if layout:
        names = layout.split("+")
    unknown = [name for name in names if name not in LAYOUTS]
    if unknown:
        raise UsageError(
            f"data.layout={layout!r}: {unknown[0]!r} is no layout; expected {', '.join(LAYOUTS)}, "
            "or one for each source of a mixture, joined by +."
        )
    if pairs and layout not in ("", "rows"):
        raise UsageError(
            f"data.layout={layout}: a pair is two rows, of one completion each; expected rows."
        )


def _split_of(split: str) -> tuple[str, float]:
    match = re.fullmatch(r"(hash|tail):(0?\.[0-9]+)", split)
    if not match or not float(match[2]):
        raise UsageError(f"split must be 'hash:f' or 'tail:f' with 0 < f < 1, not {split!r}")
    return match[1], float(match[2])
