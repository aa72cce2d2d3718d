"""Tokens on disk: JSONL made into arrays by many processes, resumed part by part, and arrays that others made.

A folder of tokens holds NumPy's `tokens.npy`, unsigned [n]; `lengths.npy`, int64 [D], the tokens of each document in
turn; and optionally `counts.npy`, uint8 [n], 1 where a token counts as a target. All are mapped and never read whole,
but for the lengths: 8 bytes a document.
"""

import concurrent.futures
import functools
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxpar._encodings import not_utf8
from jaxpar.lm.text.examples import Document, Template, documents_of, encode_pieces, pair_of
from jaxpar.lm.text.files import Kind, Source, lines_of_source
from jaxpar.lm.text.tokenizer import Tokenizer
from jaxpar.types import UsageError

PART = 16 * 2**20
"""Bytes of JSONL that are tokenised at a time: what a process that is killed does again."""
_COPY = 2**20
_COUNTED = "texts, completions and turns of the assistant, of which one has a token"


class Shards(NamedTuple):
    """Content of a folder of tokens, and its `hash`; `counts` is None where all tokens count."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray | None
    validation: np.ndarray
    hash: str


class PartOfFile(NamedTuple):
    """A part of a file to tokenise: the lines that begin in bytes `start:stop`.

    Where a file is not read from any byte on, `content` holds these lines, and `first` is the number of the first one.
    """

    path: str
    start: int
    stop: int
    out: str
    tokenizer: Tokenizer
    template: Template
    limit: float
    pairs: bool = False
    content: bytes | None = None
    first: int = 1
    unit: str = "line"
    special_tokens: bool = True

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yields (offset or number, line) of the lines that are not blank."""
        if self.content is None:
            yield from lines_of(self.path, self.start, self.stop)
            return
        for number, line in enumerate(io.BytesIO(self.content), self.first):
            if line.strip():
                yield number, line

    def where(self, index: int) -> str:
        """Names the line or record that `lines` yields by this offset or number."""
        if self.content is None:
            return place_of(self.path, index)
        return f"{self.path}, {self.unit} {index}"


def lines_of(path: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line) of the lines that begin in bytes `start:stop`, without those that are blank."""
    with open(path, "rb") as file:
        file.seek(max(start - 1, 0))
        if start:
            file.readline()  # the rest of a line that begins before
        while (offset := file.tell()) < stop and (line := file.readline()):
            if line.strip():
                yield offset, line


def place_of(path: str, offset: int) -> str:
    """Names the line at an offset, which only an error needs: it counts those before."""
    number = 1
    with open(path, "rb") as file:
        while offset and (block := file.read(min(_COPY, offset))):
            number, offset = number + block.count(b"\n"), offset - len(block)
    return f"{path}, line {number}"


def read_line(
    path: str,
    offset: int,
    line: bytes,
    template: Template,
    pairs: bool = False,
    where_of: Callable[[int], str] | None = None,
) -> list[Document]:
    """Returns the documents of a line, with its number found where it is refused.

    `where_of` names the line by `offset`; None: it is the offset in a file of lines.
    """

    def read(where: str) -> list[Document]:
        return pair_of(line, where) if pairs else documents_of(line, where, template)

    try:
        return read("")
    except UsageError:
        where = place_of(path, offset) if where_of is None else where_of(offset)
        try:
            line.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(where, error.start, path) from None
        return read(where)


def _check_completion(job: PartOfFile, index: int, line: bytes) -> None:
    """Rejects a line without a token that counts, if it is a completion."""
    if "completion" in json.loads(line):
        raise UsageError(
            f"{job.where(index)} has a completion without a token; expected one that is not empty."
        )


def _check_pair(job: PartOfFile, index: int, documents: list[np.ndarray]) -> None:
    """Rejects preferences if both documents have the same tokens."""
    if np.array_equal(documents[0], documents[1]):
        raise UsageError(
            f"{job.where(index)}: what is chosen and what is rejected are the same tokens; expected completions "
            "that differ in their tokens."
        )


def tokenise_part(job: PartOfFile) -> str:
    """Tokenises a part into `job.out`, a folder that appears by one rename. Pure: processes may do the same part."""
    out = Path(job.out)
    if out.exists():
        return job.out
    partial = out.with_name(f".{uuid.uuid4().hex}")
    partial.mkdir()
    dtype = np.min_scalar_type(job.tokenizer.vocab_size - 1)
    digest, lengths, validation = hashlib.sha256(), [], []
    with (partial / "tokens").open("wb") as tokens, (partial / "counts").open("wb") as counts:
        for offset, line in job.lines():
            key = hashlib.sha256(line.strip()).digest()
            digest.update(key)
            read = []
            for document in read_line(job.path, offset, line, job.template, job.pairs, job.where):
                ids, count = _encoded(job, document, offset)
                read.append(ids)
                if not job.pairs and not count.any():
                    _check_completion(job, offset, line)
                if job.pairs and not count[1:].any():
                    raise UsageError(
                        f"{job.where(offset)} has a completion without a token behind another."
                    )
                tokens.write(ids.astype(dtype).tobytes())
                counts.write(count.tobytes())
                lengths.append(len(ids))
                validation.append(int.from_bytes(key[:8], "big") < job.limit)
            if job.pairs:
                _check_pair(job, offset, read)
    np.save(partial / "lengths.npy", np.array(lengths, np.int64))
    np.save(partial / "validation.npy", np.array(validation, bool))
    (partial / "digest").write_bytes(digest.digest())
    _reach_disk(partial)
    try:
        partial.rename(out)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not out.is_dir():
            raise
    return job.out


def _encoded(job: PartOfFile, document: Document, index: int) -> tuple[np.ndarray, np.ndarray]:
    pieces, ends = document
    try:
        return encode_pieces(pieces, ends, job.tokenizer, special_tokens=job.special_tokens)
    except UsageError as error:
        raise UsageError(f"{job.where(index)}: {error}") from None


def tokenise(
    path: str | Sequence[Source],
    entry: Path,
    tokenizer: Tokenizer,
    template: Template,
    split: tuple[str, float],
    workers: int = 1,
    say: Callable[[str], None] = lambda text: None,
    pairs: bool = False,
    *,
    special_tokens: bool = True,
) -> None:
    """Makes the folder of tokens `entry` of files of records; what was done before a kill is not done again.

    Files that have to be unpacked, or are no JSONL, are read again from their beginning after a kill, which takes a
    small part of the time; memory holds 16 MiB of their lines for each of the processes.

    Args:
      path: The file of JSONL, or sources of any kind in the order of their documents.
      entry: The folder, which appears by one rename when it is whole; parts lie beside it until then.
      tokenizer: Of the texts.
      template: Of messages.
      split: ("hash", f) holds out lines by their content, ("tail", f) the last lines.
      workers: Processes, each with a part of 16 MiB at a time.
      say: Is told the progress, a sentence a part.
      pairs: Whether lines are preferences, `jaxpar.lm.text.examples.pair_of`: two documents each, on
        one side of the split.
      special_tokens: Whether special tokens that a text without a template spells become tokens.

    Raises:
      UsageError: A line cannot be read, and is named by its file and number; or nothing counts in the loss.
    """
    kind, fraction = split
    sources = [Source(path=path, kind=Kind("lines"))] if isinstance(path, str) else list(path)
    name = sources[0].path if len(sources) == 1 else os.path.commonpath([x.path for x in sources])
    beside = entry.with_name(f"{entry.name}.parts")
    beside.mkdir(parents=True, exist_ok=True)
    limit = fraction * 2**64 if kind == "hash" else 0
    counts_known = all(source.kind.is_direct for source in sources)
    outs: list[Path] = []

    def numbered() -> Iterator[PartOfFile]:
        """Yields the parts that are not there, and notes the folders of all."""
        parts = itertools.chain.from_iterable(
            _parts(source, tokenizer, template, limit, pairs) for source in sources
        )
        parts = (part._replace(special_tokens=special_tokens) for part in parts)
        for number, part in enumerate(parts):
            out = beside / f"{number:06d}"
            outs.append(out)
            if not out.exists():
                yield part._replace(out=str(out))

    jobs: Iterable[PartOfFile] = numbered()
    before, total = 0, ""
    if counts_known:  # such parts hold no lines
        jobs = list(jobs)
        before = len(outs) - len(jobs)
        workers = min(workers, len(jobs))
        total = f" of {len(outs)}"
    if before:
        say(f"{before} of {len(outs)} parts of {name} were tokenised before")
    try:
        for number, _ in enumerate(_tokenised(jobs, workers), before + 1):
            say(f"{number}{total} parts of {name} are tokenised")
        counts = (
            np.fromfile(out / "counts", np.uint8).any() for out in outs
        )  # to the first that has some
        if not any(counts):
            raise UsageError(f"nothing in {name} counts in the loss; legal are {_COUNTED}.")
    except FileNotFoundError:  # another process has made the whole folder, and removed the parts
        if not entry.is_dir():
            raise
        return
    _join(
        outs,
        entry,
        tokenizer,
        fraction if kind == "tail" else 0.0,
        1 + pairs,
    )
    shutil.rmtree(beside, ignore_errors=True)


def _parts(
    source: Source, tokenizer: Tokenizer, template: Template, limit: float, pairs: bool
) -> Iterator[PartOfFile]:
    """Yields the parts of a file: packed lines have the parts of the same lines in a plain file."""
    part = functools.partial(
        PartOfFile,
        path=source.path,
        out="",
        tokenizer=tokenizer,
        template=template,
        limit=limit,
        pairs=pairs,
    )
    if source.kind.is_direct:
        size = os.path.getsize(source.path)
        for start in range(0, size, PART):
            yield part(start=start, stop=min(start + PART, size))
        return
    unit = "line" if source.kind.form == "lines" else "record"
    part = functools.partial(part, start=0, stop=0, unit=unit)
    held: list[bytes] = []
    first, offset, end = 1, 0, PART
    for number, line in enumerate(lines_of_source(source), 1):
        while offset >= end:
            yield part(content=b"".join(held), first=first)
            held = []
            first = number
            end += PART
        held.append(line)
        offset += len(line)
    while offset:
        yield part(content=b"".join(held), first=first)
        held = []
        if offset <= end:
            return
        end += PART


def _tokenised(jobs: Iterable[PartOfFile], workers: int) -> Iterator[str]:
    """Yields the folder of each part as it is done, by `workers` processes with one part in wait each."""
    if workers < 2:
        yield from map(tokenise_part, jobs)
        return
    context = multiprocessing.get_context(
        "spawn"
    )  # a fork would copy threads of JAX that hold locks
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        try:
            left = iter(jobs)
            running: set[concurrent.futures.Future[str]] = set()
            while True:
                for job in itertools.islice(left, 2 * workers - len(running)):
                    running.add(pool.submit(tokenise_part, job))
                if not running:
                    return
                done, running = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for each in done:
                    yield each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _join(parts: list[Path], entry: Path, tokenizer: Tokenizer, tail: float, together: int) -> None:
    """Puts the parts one behind the other, a block at a time; of a tail so many documents are on one side together."""
    partial = entry.with_name(f".partial-{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        lengths = np.concatenate([np.load(part / "lengths.npy") for part in parts])
        validation = np.concatenate([np.load(part / "validation.npy") for part in parts])
        if tail:
            validation = np.arange(len(lengths)) // together >= int(
                (1 - tail) * (len(lengths) // together)
            )
        total, dtype = int(lengths.sum()), np.min_scalar_type(tokenizer.vocab_size - 1)
        for name, kind in (("tokens", dtype), ("counts", np.dtype(np.uint8))):
            with (partial / f"{name}.npy").open("wb") as file:
                header = {
                    "descr": np.lib.format.dtype_to_descr(kind),
                    "fortran_order": False,
                    "shape": (total,),
                }
                np.lib.format.write_array_header_1_0(file, header)
                for part in parts:
                    with (part / name).open("rb") as source:
                        shutil.copyfileobj(source, file, _COPY)
        np.save(partial / "lengths.npy", lengths)
        np.save(partial / "validation.npy", validation)
        digest = hashlib.sha256(
            b"".join((part / "digest").read_bytes() for part in parts)
        ).hexdigest()
        record = {"format": 1, "tokenizer": tokenizer.identity, "hash": digest}
        (partial / "shards.json").write_text(json.dumps(record))
        _reach_disk(partial)
        partial.rename(entry)
    except OSError:  # another process may have made the same folder first, and removed the parts
        if not entry.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Extremes(NamedTuple):
    """The smallest and the largest token of an array, and the first position of each."""

    smallest: int
    smallest_at: int
    largest: int
    largest_at: int


def extremes_of(path: Path, tokens: np.ndarray, cache: Path) -> Extremes:
    """Returns the extremes of a file of tokens, which are kept in `cache` for its next use.

    The first time reads the file once, a block at a time, at the rate of the disk.

    Args:
      path: The file, in NumPy's format.
      tokens: What it holds, integers [n].
      cache: A folder; where it cannot be written nothing is kept.
    """
    stat = path.stat()
    key = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    record = cache / f"extremes-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    try:
        found = json.loads(record.read_text())
        return Extremes(
            smallest=int(found["smallest"]),
            smallest_at=int(found["smallest_at"]),
            largest=int(found["largest"]),
            largest_at=int(found["largest_at"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        found = _read_extremes(path, tokens)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f".partial-{uuid.uuid4().hex}"
        partial.write_text(json.dumps(found._asdict()))
        partial.rename(record)
    except OSError:
        pass
    return found


def _read_extremes(path: Path, tokens: np.ndarray) -> Extremes:
    # Read, not mapped: pages of a map would count as this process's memory.
    found = Extremes(smallest=int(tokens[0]), smallest_at=0, largest=int(tokens[0]), largest_at=0)
    with path.open("rb") as file:
        file.seek(path.stat().st_size - tokens.nbytes)
        position = 0
        while position < len(tokens):
            count = min(_COPY, len(tokens) - position)
            block = np.frombuffer(file.read(count * tokens.dtype.itemsize), tokens.dtype)
            if int(block.min()) < found.smallest:
                at = int(block.argmin())
                found = found._replace(smallest=int(block[at]), smallest_at=position + at)
            if int(block.max()) > found.largest:
                at = int(block.argmax())
                found = found._replace(largest=int(block[at]), largest_at=position + at)
            position += count
    return found


def _check_tokens(
    path: Path, tokens: np.ndarray, vocab_size: int, cache: Path, identity: str
) -> None:
    """Rejects tokens that are no symbols, wherever in the file they are.

    Reads nothing where the type has room for symbols alone, or this very tokenizer made the file.
    """
    if tokens.dtype.kind == "u" and np.iinfo(tokens.dtype).max < vocab_size:
        return
    record = path.with_name("shards.json")
    if path.name == "tokens.npy" and record.is_file():
        if json.loads(record.read_text()).get("tokenizer") == identity:
            return
    found = extremes_of(path, tokens, cache)
    if found.smallest < 0:
        token = found.smallest
        position = found.smallest_at
    elif found.largest >= vocab_size:
        token = found.largest
        position = found.largest_at
    else:
        return
    raise UsageError(
        f"{path} has the token {token} at position {position}; legal are 0 to {vocab_size - 1}."
    )


def open_shards(
    folder: Path, vocab_size: int, split: tuple[str, float], cache: Path, identity: str
) -> Shards:
    """Maps a folder of tokens, ours or another's, or a single `.npy` of tokens, which is one document.

    A folder without `validation.npy` is split here: "hash" by a hash of each document's number, as its content would
    have to be read; "tail" by the end of the documents, or of the tokens of a single one.

    Args:
      folder: The folder or the file.
      vocab_size: V, symbols of the tokenizer.
      split: Kind and fraction.
      cache: Folder for what was found of the tokens, so that they are read for it once.
      identity: Identity of the tokenizer.

    Raises:
      UsageError: If a file is absent, of another type or length, or some token is no symbol.
    """
    paths = {name: folder / f"{name}.npy" for name in ("tokens", "lengths", "counts", "validation")}
    if folder.suffix == ".npy":
        paths = {"tokens": folder}
    arrays = {name: _map(path) for name, path in paths.items() if path.is_file()}
    if "tokens" not in arrays or (folder.suffix != ".npy" and "lengths" not in arrays):
        raise UsageError(
            f"{folder} lacks tokens.npy or lengths.npy; legal is a folder with both, or one .npy of tokens."
        )
    tokens = arrays["tokens"]
    if tokens.dtype.kind not in "ui" or tokens.ndim != 1 or not len(tokens):
        raise UsageError(
            f"{paths['tokens']} is {tokens.dtype} {list(tokens.shape)}; legal are integers [n], n > 0."
        )
    _check_tokens(paths["tokens"], tokens, vocab_size, cache, identity)
    kind, fraction = split
    if "lengths" not in arrays:
        cut = int((1 - fraction) * len(tokens))
        lengths, validation = np.array([cut, len(tokens) - cut]), np.array([False, True])
    else:
        lengths = np.asarray(arrays["lengths"]).astype(np.int64)
        numbers = np.arange(len(lengths))
        validation = numbers >= int((1 - fraction) * len(lengths))
        if kind == "hash":
            mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            validation = (mixed ^ (mixed >> np.uint64(32))) % np.uint64(2**32) < np.uint64(
                fraction * 2**32
            )
    if "validation" in arrays:
        validation = np.asarray(arrays["validation"]).astype(bool)
    counts = arrays.get("counts")
    if (
        lengths.ndim != 1
        or (lengths < 0).any()
        or lengths.sum() != len(tokens)
        or len(validation) != len(lengths)
    ):
        raise UsageError(
            f"the lengths of {folder} sum to {lengths.sum()}; legal is {len(tokens)}, its tokens, none below 0."
        )
    if counts is not None and (counts.dtype != np.uint8 or counts.shape != tokens.shape):
        raise UsageError(
            f"{paths['counts']} is {counts.dtype} {list(counts.shape)}; legal is uint8 [{len(tokens)}]."
        )
    record = folder / "shards.json"
    if record.is_file():
        content = json.loads(record.read_text())["hash"]
    else:
        stats = [
            (name, os.path.getsize(path), path.stat().st_mtime_ns)
            for name, path in paths.items()
            if path.is_file()
        ]
        content = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    return Shards(tokens, lengths, counts, validation, content)


def _map(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)  # cheaper to slice
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is not an array of NumPy's: {error}") from None


def _reach_disk(folder: Path) -> None:
    """Contents must reach the disk before the folder's name does."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
