"""Files by their content: texts, and records in JSON, parquet or arrow, plain or compressed.

The suffix does not count: a wrong one would have compressed bytes or keys of JSON trained in silence.
Records become lines of JSONL, one at a time, and memory stays bounded by the largest of them.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import os
import re
import shutil
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from jaxpar._encodings import check_marks, not_utf8, other_encoding
from jaxpar.lm.hub.keys import brief
from jaxpar.types import UsageError

LEGAL = (
    'legal are {"text"}, {"prompt", "completion"}, {"messages"} and '
    '{"instruction", "input", "output"}'
)
"""The known forms of a record; pairs of preferences are {"prompt", "chosen", "rejected"}."""

_FORMS = (
    {"text"},
    {"messages"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"instruction", "output"},
)
COLUMNS = ("text", "messages", "tools", "prompt", "completion", "chosen", "rejected",
           "instruction", "input", "output")  # fmt: skip
"""Columns of a table that training reads."""
_HEAD = 2**16
_BLOCK = 2**20
_LARGEST = 2**28
"""Bytes of the largest record that is read."""
_ROWS = 256  # of a table at a time: texts of a megabyte each are still bounded
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BINARIES = {
    b"PK\x03\x04": "a ZIP archive",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ\0": "compressed by xz",
    b"7z\xbc\xaf": "a 7z archive",
    b"%PDF-": "a PDF",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GGUF": "weights in GGUF",
    b"SQLite format 3": "a database of SQLite",
    b"\x7fELF": "a program",
    b"\x93NUMPY": "an array of NumPy's, which needs a name that ends in .npy",
}
_STDLIB_SKIPS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")
_COMPANIONS = re.compile(
    r"(readme|license|licence|notice|citation)(\.\w+)?|(dataset_infos?|dataset_dict|state)\.json",
    re.I,
)
"""Files in folders of shards that hold no records, such as those by `datasets`."""
_JSON_NAME = re.compile(r"\.(json|jsonl|ndjson)(\.gz|\.zst)?$", re.I)
_LINES_NAME = re.compile(r"\.(jsonl|ndjson)(\.gz|\.zst)?$", re.I)


class Kind(NamedTuple):
    """A kind of file, by its content.

    Attributes:
      form: "text", "lines" (JSONL), "json" (an array, or objects of several lines), "parquet" or "arrow".
      packing: "gzip", "zstd" or "" for none.
      marked: Whether its text begins with a byte-order mark.
      keys: Keys of the first record, or the columns.
    """

    form: str
    packing: str = ""
    marked: bool = False
    keys: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Returns whether the records have a known form."""
        return any(form <= set(self.keys) for form in _FORMS)

    @property
    def is_direct(self) -> bool:
        """Returns whether its lines are read where they lie, from any byte on."""
        return self.form == "lines" and not self.packing and not _is_alpaca(self.keys)

    @property
    def is_plain(self) -> bool:
        """Returns whether its bytes are its text, as they are."""
        return not self.packing and not self.marked


class Source(NamedTuple):
    """A file and its kind."""

    path: str
    kind: Kind


def kind_of(path: str) -> Kind:
    """Returns what a file holds, by its first 64 KiB, or its first record where that is longer.

    Raises:
      UsageError: Its text is UTF-16, UTF-32 or no UTF-8 at all, it is binary, or it needs a package that is absent.
    """
    with open(path, "rb") as file:
        magic = file.read(16)
    if magic.startswith(b"PAR1"):
        return Kind(form="parquet", keys=_columns(path, "parquet"))
    if magic.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return Kind(form="arrow", keys=_columns(path, "arrow"))
    packing = _packing(magic)
    with _opened(path, packing) as file:
        head = file.read(_HEAD)
        if packing and (head.startswith((b"PAR1", b"ARROW1")) or _packing(head)):
            raise UsageError(f"{path} is compressed twice; expected one layer, unpack it first.")
        _check_text(path, head)
        marked = head.startswith(codecs.BOM_UTF8)
        begin = head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        form = "text"
        keys: tuple[str, ...] = ()
        if begin in (b"{", b"["):
            form, keys = _json_form(path, head, file, begin)
    if form == "text" and _LINES_NAME.search(path):
        form = "lines"  # and the line that is none is named
    return Kind(form=form, packing=packing, marked=marked, keys=keys)


def _packing(magic: bytes) -> str:
    if magic.startswith(_GZIP):
        return "gzip"
    if magic.startswith(_ZSTD):
        return "zstd"
    return ""


def _json_form(path: str, head: bytes, rest: BinaryIO, begin: bytes) -> tuple[str, tuple[str, ...]]:
    """Returns the form of what begins like JSON, and the keys of its first record; "text" if it is none."""
    if begin == b"{":
        text = head.removeprefix(codecs.BOM_UTF8).lstrip()
        line = text.split(b"\n", 1)[0]
        if b"\n" not in text:
            line += rest.readline(_LARGEST)
        try:
            return "lines", tuple(json.loads(line))
        except (ValueError, RecursionError):
            head = head if b"\n" in text else head[: len(head) - len(text)] + line
    blocks = itertools.chain([head], iter(lambda: rest.read(_BLOCK), b""))
    try:
        first = next(_values(path, blocks), None)
    except UsageError:
        return "text", ()
    if not isinstance(first, dict):
        return "text", ()
    return "json", tuple(first)


def _check_text(path: str, head: bytes) -> None:
    """Rejects what the beginning of a file shows to be no UTF-8 text."""
    check_marks(head, path)
    for magic, what in _BINARIES.items():
        if head.startswith(magic):
            raise _binary(path, what)
    if b"\0" in head:
        for name, ours, others in (("UTF-16LE", 1, 0), ("UTF-16BE", 0, 1)):
            zeros = head[ours::2].count(0)
            if 4 * zeros >= len(head) and not head[others::2].count(0):
                raise other_encoding(path, f"is {name}", name)
        raise _binary(path, "binary")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        if len(_CONTROLS.findall(head)) > len(head) // 100:
            raise _binary(path, "binary") from None
        raise not_utf8(path, error.start) from None


def _binary(path: str, what: str) -> UsageError:
    return UsageError(
        f"{path} is {what}; expected text in UTF-8, JSON, parquet or arrow, the former two plain or "
        "as .gz or .zst."
    )


def files_at(path: str) -> list[tuple[str, int, int]]:
    """Returns path, size and modification time of each file that is not empty, in order of paths.

    Args:
      path: A file or a folder; empty: this Python's standard library, without tests.

    Raises:
      UsageError: There is none.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"]).expanduser().resolve()
    if not root.is_file() and not root.is_dir():
        raise UsageError(f"data path {path!r} is neither a file nor a folder")
    skips = _STDLIB_SKIPS
    if path:
        skips = set()
    names: Iterator[str] = iter([str(root)])
    if not root.is_file():
        names = _regular_files(str(root), skips, set())
    stats = ((name, os.stat(name)) for name in names if path or name.endswith(".py"))
    files = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats if stat.st_size)
    if not files:
        raise UsageError(
            f"{root} holds no text; give a file or a folder with at least one that is not empty"
        )
    return files


def _regular_files(folder: str, skips: set[str], seen: set[str]) -> Iterator[str]:
    """Regular files that are not hidden, each real folder once however links lead to it."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(".") or name in skips:
            continue
        if os.path.isdir(path):
            yield from _regular_files(path, skips, seen)
        elif os.path.isfile(path):
            yield path


def sort_sources(
    files: Sequence[str], name: str, pairs: bool = False, *, flag: str = "data.path"
) -> tuple[bool, tuple[Source, ...]]:
    """Sorts files into records or texts.

    Files are records where one has records of a known form. Usual companions such as README.md are then left
    out, and a file of another kind is rejected. Else they are texts, JSON such as package.json among them.

    Args:
      files: A single one, or all in a folder.
      name: The flag's value, for sentences.
      pairs: Whether only preferences are legal.
      flag: The flag.

    Returns:
      (whether they are records, the files with their kinds).

    Raises:
      UsageError: Kinds are mixed, or the records have no known form.
    """
    sources = tuple(Source(path=path, kind=kind_of(path)) for path in files)
    records = tuple(each for each in sources if _has_records(each))
    if records:
        kept = {each.path for each in records}
        for other in sources:
            if other.path in kept or (
                len(sources) > 1 and _COMPANIONS.fullmatch(os.path.basename(other.path))
            ):
                continue
            raise UsageError(
                f"{flag}={name!r}: {records[0].path} has records and {other.path} {_described(other)}; "
                "expected one or the other, mix: reads both from folders of their own."
            )
        return True, records
    for each in sources:
        alone = len(sources) == 1 or all(other.kind.form != "text" for other in sources)
        if each.kind.form in ("parquet", "arrow") or (alone and each.kind.form != "text"):
            raise UsageError(f"{each.path} {_described(each)}; {LEGAL}.")
        if alone and _JSON_NAME.search(each.path):
            raise UsageError(f"{each.path} is not JSON that holds objects; {LEGAL}.")
    if pairs:
        raise UsageError(
            f'{flag}={name!r} has no pairs; expected records {{"prompt", "chosen", "rejected"}}.'
        )
    return False, sources


def _has_records(source: Source) -> bool:
    """Returns whether the records are known, or a name promises lines, which have better sentences."""
    named = source.kind.form == "lines" and _LINES_NAME.search(source.path) is not None
    return source.kind.is_known or named


def _described(source: Source) -> str:
    if source.kind.form == "text":
        return "is text"
    return f"has records with the keys {', '.join(source.kind.keys) or 'none'}"


def lines_of_source(source: Source, columns: Sequence[str] = COLUMNS) -> Iterator[bytes]:
    """Yields the records of a file as lines of JSONL, in order; lines of JSONL as they are, blank ones too.

    Records with "instruction" and "output" become conversations of two turns, an "input" below the instruction.

    Args:
      source: A file of records.
      columns: Columns that are read where it is a table.

    Raises:
      UsageError: The file ends early, is damaged, or a record cannot be read.
    """
    path, kind = source
    if kind.form in ("parquet", "arrow"):
        for number, row in enumerate(_rows(path, kind, columns), 1):
            yield _line_of(row, lambda at=number: f"{path}, record {at}")
        return
    with _opened(path, kind.packing) as file:
        if kind.form == "json":
            blocks = iter(lambda: file.read(_BLOCK), b"")
            for number, value in enumerate(_values(path, blocks), 1):
                if not isinstance(value, dict):
                    raise UsageError(f"{path}, record {number} is not a JSON object; {LEGAL}.")
                yield _line_of(value, lambda at=number: f"{path}, record {at}")
        elif _is_alpaca(kind.keys):
            for number, line in enumerate(file, 1):
                yield _conversation_line(line, lambda at=number: f"{path}, line {at}")
        else:
            yield from file


def copy_text(source: Source, out: Path) -> None:
    """Writes the text of a file, unpacked and without a byte-order mark.

    Raises:
      UsageError: The file ends early or is damaged.
    """
    with _opened(source.path, source.kind.packing) as file, out.open("wb") as plain:
        plain.write(file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8))
        shutil.copyfileobj(file, plain, _BLOCK)


def texts_of_source(source: Source) -> Iterator[str]:
    """Yields the text of a file, unpacked and without a byte-order mark, some MiB at a time.

    Raises:
      UsageError: The file ends early, is damaged or is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    with _opened(source.path, source.kind.packing) as file:
        block = file.read(_BLOCK)
        while block:
            following = file.read(_BLOCK)
            held = len(decoder.getstate()[0])  # bytes of a character that the block before cut
            try:
                yield decoder.decode(block, final=not following)
            except UnicodeDecodeError as error:
                raise not_utf8(source.path, offset - held + error.start) from None
            offset += len(block)
            block = following


def _is_alpaca(keys: Collection[str]) -> bool:
    """Returns whether a record is an instruction, and has no other known form."""
    found = set(keys)
    return {"instruction", "output"} <= found and not {"text", "prompt", "messages"} & found


def _conversation_line(line: bytes, where: Callable[[], str]) -> bytes:
    """Returns a line of Alpaca as one of messages, and any other as it is, for its own sentence."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    return _line_of(value, where) if isinstance(value, dict) and _is_alpaca(value) else line


def _line_of(record: Mapping[str, Any], where: Callable[[], str]) -> bytes:  # any JSON
    """Returns a record as a line of JSONL; `where` names it."""
    if _is_alpaca(record):
        parts = {name: record.get(name) for name in ("instruction", "input", "output")}
        parts["input"] = parts["input"] or ""
        for name, value in parts.items():
            if not isinstance(value, str):
                raise UsageError(f"{where()} has {name}={brief(value)}; legal is a string.")
        asked = "\n\n".join(filter(None, (parts["instruction"], parts["input"])))
        record = {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": parts["output"]},
            ]
        }
    try:
        return json.dumps(record).encode() + b"\n"
    except TypeError as error:
        raise UsageError(f"{where()} is no JSON: {error}.") from None


def _values(path: str, blocks: Iterator[bytes]) -> Iterator[Any]:  # any JSON
    """Yields the items of JSON arrays, and other values, one after the other; memory holds one and a block.

    Raises:
      UsageError: One cannot be read, or is over 256 MiB.
    """
    decode = json.JSONDecoder().raw_decode
    text = ""
    position = number = depth = 0
    ended = False
    comma = True
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    want = _BLOCK

    def rejection(why: str) -> UsageError:
        return UsageError(f"{path}, record {number + 1} cannot be read as JSON: {why}.")

    while True:
        position = _behind_spaces(text, position)
        char = text[position : position + 1]
        value = None
        end = position
        found = False
        if char and depth and char in ",]":
            if comma and (char == "," or number):
                raise rejection(f"{char!r} follows nothing")
            depth -= char == "]"
            comma = char == ","
            position += 1
            continue
        if char == "[" and not depth:
            depth = 1
            comma = True
            position += 1
            continue
        if char:
            if depth and not comma:
                raise rejection(f"a comma is missing before {char!r}")
            try:
                value, end = decode(text, position)
                found = True
            except RecursionError:
                raise rejection("it is nested too deep") from None
            except ValueError as error:
                # A value that the end of the block cuts fails there, or at the first quote of a string that is cut.
                fault = cast(json.JSONDecodeError, error)
                cut = fault.msg.startswith("Unterminated string") or fault.pos > len(text) - 16
                if ended or not cut:
                    raise rejection(fault.msg) from None
            if found and end == len(text) and not ended and not isinstance(value, dict | list):
                found = False  # a number may go on
        if found:
            position = end
            comma = False
            yield value
            number += 1
            want = _BLOCK
            continue
        if ended:
            if depth:
                raise rejection("the file ends before its array does")
            return
        if len(text) - position > _LARGEST:
            raise rejection(f"it is over {_LARGEST >> 20} MiB")
        pieces = [text[position:]]
        size = 0
        while size < want and not ended:
            block = next(blocks, b"")
            ended = not block
            try:
                pieces.append(decoder.decode(block, final=ended))
            except UnicodeDecodeError:
                raise other_encoding(path, "is not UTF-8", "LATIN1") from None
            size += len(block)
        want *= 2  # each block is read a bounded number of times, however long a record is
        text = "".join(pieces)
        position = 0


def _behind_spaces(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    if not match:
        return position
    return match.end()


_SPACES = re.compile(r"[ \t\r\n]*")


def _columns(path: str, form: str) -> tuple[str, ...]:
    pyarrow = _pyarrow(path)
    try:
        if form == "parquet":
            return tuple(pyarrow.parquet.read_schema(path).names)
        with pyarrow.memory_map(path) as file:
            return tuple(_arrow_reader(pyarrow, file, path).schema.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _rows(
    path: str, kind: Kind, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:  # values of any JSON
    """Yields the rows of a table, of the columns that are read; keys of structs that are null are left out."""
    pyarrow = _pyarrow(path)
    columns = [name for name in columns if name in kind.keys]
    try:
        if kind.form == "parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=_ROWS, columns=columns):
                    yield from map(_without_nulls, batch.to_pylist())
            return
        with pyarrow.memory_map(path) as file:
            reader = _arrow_reader(pyarrow, file, path)
            count = getattr(reader, "num_record_batches", None)
            batches = reader if count is None else map(reader.get_batch, range(count))
            for batch in batches:
                chosen = batch.select(columns)
                for start in range(0, len(chosen), _ROWS):
                    yield from map(_without_nulls, chosen.slice(start, _ROWS).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None


def _without_nulls(value: Any) -> Any:  # any JSON: a table has a null where a struct lacks a key
    if isinstance(value, dict):
        return {
            key: _without_nulls(each)
            for key, each in value.items()
            if each is not None or key == "content"
        }
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _arrow_reader(pyarrow: Any, file: Any, path: str) -> Any:  # pyarrow is not always there
    """Returns the reader of a file of arrow, or of a stream, as `datasets` writes it."""
    with open(path, "rb") as head:
        is_file = head.read(6) == b"ARROW1"
    return pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)


def _pyarrow(path: str) -> Any:  # a module that is not always there
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{path} needs pyarrow; pip install 'jaxpar[arrow]'.") from None
    return pyarrow


def _damaged(path: str, error: Exception) -> UsageError:
    sentence = " ".join(str(error).split())[:200] or type(error).__name__
    return UsageError(f"{path} is damaged or ends early: {sentence}.")


@contextlib.contextmanager
def _opened(path: str, packing: str) -> Iterator[BinaryIO]:
    """Opens a file, unpacked; damage is one sentence wherever it is met."""
    if not packing:
        with open(path, "rb", buffering=_BLOCK) as file:
            yield file
        return
    wrong: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
    if packing == "gzip":
        raw: Any = gzip.open(path)  # a raw reader to BufferedReader, though its type says otherwise
    else:
        try:
            import zstandard
        except ImportError:
            raise UsageError(f"{path} needs zstandard; pip install 'jaxpar[zstd]'.") from None
        wrong += (zstandard.ZstdError,)
        raw = _Unpacked(path, zstandard)
    try:
        with io.BufferedReader(raw, _BLOCK) as file:
            yield cast(BinaryIO, file)
    except wrong as error:
        raise _damaged(path, error) from None


class _Unpacked(io.RawIOBase):
    """The bytes of a file of zstd, frame by frame; one that ends early is an `EOFError`."""

    def __init__(self, path: str, zstandard: Any):  # a module that is not always there
        self._file = open(path, "rb")
        self._frames = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._frame = None
        self._left = b""
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:  # a writable buffer of bytes, which 3.11 cannot name
        while not self._out:
            packed = self._left or self._file.read(2**14)
            self._left = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("a frame of zstd is cut")
                return 0
            frame = self._frame or self._frames.decompressobj()
            self._out = memoryview(frame.decompress(packed))
            self._frame = None if frame.eof else frame
            self._left = frame.unused_data if frame.eof else b""
        count = min(len(buffer), len(self._out))
        buffer[:count] = self._out[:count]
        self._out = self._out[count:]
        return count
