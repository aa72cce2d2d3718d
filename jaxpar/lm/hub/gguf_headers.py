"""Header of a GGUF file: its metadata, and where its tensors lie.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little
endian. The package `gguf` reads a header of 100,000 strings in ten seconds, this in a tenth
of one; the numbers of tensors are left to the package.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.types import UsageError

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Types of numbers, as `struct` names them."""

STRING = 8
ARRAY = 9
ALIGNMENT = 32


class TensorInfo(NamedTuple):
    """Where a tensor lies.

    Attributes:
      shape: Its sizes, the longest stride first.
      kind: Number of the type, of `gguf.GGMLQuantizationType`.
      begin: Its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    begin: int


class Header(NamedTuple):
    """The part of a file before the numbers.

    Attributes:
      values: Metadata by name: numbers, texts, and lists of either.
      tensors: Tensors by name.
    """

    values: dict[str, Any]  # any of these types
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Reads the header of a GGUF file.

    Raises:
      UsageError: The file is damaged, ends too early, or has another version or byte order.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()
    except (OSError, OverflowError, UnicodeDecodeError, ValueError, struct.error) as error:
        raise UsageError(f"{path} is not a whole GGUF file: {error}") from error


class _Cursor:
    """A position in a file that moves on with what is read."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.at = 0

    def header(self) -> Header:
        """Reads all from the first byte on."""
        self.at = 4  # behind the letters GGUF
        version = self.number("I")
        if version not in (2, 3):
            raise UsageError(
                f"{self.path} is GGUF of version {version}; expected 2 or 3, little endian."
            )
        num_tensors = self.number("Q")
        num_values = self.number("Q")
        values = {}
        for _ in range(num_values):
            name = self.text()
            values[name] = self.value(self.number("I"))
        found = {}
        for _ in range(num_tensors):
            name = self.text()
            if name in found:
                raise UsageError(f"{self.path} has tensor {name} twice; expected it once.")
            sizes = self.numbers("Q", self.number("I"))
            found[name] = TensorInfo(
                shape=tuple(reversed(sizes)), kind=self.number("I"), begin=self.number("Q")
            )
        alignment = values.get("general.alignment", ALIGNMENT)
        first = -(-self.at // alignment) * alignment
        tensors = {name: info._replace(begin=first + info.begin) for name, info in found.items()}
        return Header(values=values, tensors=tensors)

    def value(self, kind: int) -> Any:  # a number, a text, or a list of either
        """Reads a value of a type."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind} before byte {self.at}")
        inner = self.number("I")
        count = self.number("Q")
        if inner in SCALARS:
            return list(self.numbers(SCALARS[inner], count))
        return [self.value(inner) for _ in range(count)]

    def number(self, kind: str) -> Any:  # int, float or bool by `kind`
        """Reads one number."""
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> tuple:
        """Reads numbers of a type."""
        size = struct.calcsize("<" + kind) * count
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, within its header")
        begin = self.at
        self.at += size
        return struct.unpack_from(f"<{count}{kind}", self.data, begin)

    def text(self) -> str:
        """Reads a string."""
        size = self.number("Q")
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, within its header")
        begin = self.at
        self.at += size
        return self.data[begin : self.at].decode("utf-8")
