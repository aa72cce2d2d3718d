"""GGUF files of llama.cpp, read as Hugging Face folders are and dequantised part by part."""

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxpar.lm.hub.gguf_architectures import (
    Contents,
    Placed,
    config_values,
    number_type,
    place_tensors,
)
from jaxpar.lm.hub.gguf_headers import read_header
from jaxpar.lm.hub.gguf_tokenizers import write_tokenizer
from jaxpar.types import UsageError

__all__ = ["folder_of"]

FILE = "model.gguf"
"""Name of the GGUF file in the folder that `folder_of` makes."""


class PackedTensor(NamedTuple):
    """A tensor of a GGUF file that is read and dequantised in parts.

    Attributes:
      data: Bytes of the file by rows, [..., bytes].
      kind: Type of the numbers, of `gguf.GGMLQuantizationType`.
      shape: Its shape as a Hugging Face folder has it.
      placed: Name there, and what the file changed.
    """

    data: np.ndarray
    kind: Any  # of a package that is not always there
    shape: tuple[int, ...]
    placed: Placed

    @property
    def dtype(self) -> str:
        """Type of what `read` returns, as safetensors names it."""
        return "F32"

    def read(self, cuts: tuple[slice, ...]) -> np.ndarray:
        """Returns a part in float32; whole rows are dequantised, and no others."""
        if len(self.shape) == 1:
            numbers = self._dequantise(self.data)
            return numbers[self._order()[cuts[0]]]
        rows = self.data[cuts[0]]
        if self.placed.num_heads:
            rows = self.data[self._order()[cuts[0]]]
        return np.ascontiguousarray(self._dequantise(rows)[(slice(None), *cuts[1:])])

    def _order(self) -> np.ndarray:
        """Returns where the file has each row.

        llama.cpp pairs the numbers that one angle rotates: its row 2 j + i of a head is row
        i K / 2 + j of a Hugging Face folder.
        """
        order = np.arange(self.shape[0])
        if not self.placed.num_heads:
            return order
        size = self.shape[0] // self.placed.num_heads
        return order.reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)

    def _dequantise(self, data: np.ndarray) -> np.ndarray:
        from gguf import quants

        try:
            numbers = quants.dequantize(np.ascontiguousarray(data), self.kind)
        except NotImplementedError:
            raise UsageError(
                f"tensor {self.placed.name} is of type {self.kind.name}, which the package gguf "
                "does not dequantise; expected floats or a type that it does, such as Q4_K."
            ) from None
        return numbers - np.float32(self.placed.added)


def folder_of(path: str | Path) -> Path:
    """Returns a Hugging Face folder of a GGUF file, and any other path as it is.

    The folder holds `config.json`, the files of the tokenizer and a link to the GGUF file, from
    which tensors are read. It is written once a process, in a few seconds, and removed at its
    end.

    Args:
      path: A GGUF file, known by its first bytes, or anything else.

    Raises:
      UsageError: The package `gguf` is absent, or the file is damaged, of another architecture, or
        of a tokenizer that cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        return path
    with path.open("rb") as file:
        begin = file.read(4)
    if begin == b"GGUF":
        stat = path.stat()
        return _unpack(path.resolve(), stat.st_size, stat.st_mtime_ns)
    if path.suffix.lower() == ".gguf":
        raise UsageError(f"{path}: it begins with {begin!r}; expected a GGUF file, with b'GGUF'.")
    return path


def packed_tensors(file: Path) -> dict[str, PackedTensor]:
    """Returns the tensors of a GGUF file by their names in a Hugging Face folder."""
    stat = file.stat()
    contents = _open(file.resolve(), stat.st_size, stat.st_mtime_ns)
    return {
        placed.name: PackedTensor(
            data=contents.arrays[name],
            kind=contents.kinds[name],
            shape=contents.shapes[name],
            placed=placed,
        )
        for name, placed in place_tensors(contents).items()
    }


@functools.cache
def _unpack(path: Path, size: int, changed: int) -> Path:
    """Writes the folder of a file; its size and time distinguish it from others of its name."""
    contents = _open(path, size, changed)
    config = config_values(contents)
    config["torch_dtype"] = number_type(contents)

    scratch = tempfile.mkdtemp(prefix="jaxpar-gguf-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    folder = Path(scratch) / path.name
    folder.mkdir()
    config |= write_tokenizer(contents, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / FILE).symlink_to(path)
    return folder


@functools.cache
def _open(path: Path, size: int, changed: int) -> Contents:
    """Reads all of a GGUF file but its tensors, which are mapped."""
    del changed  # of the key alone
    try:
        import gguf
    except ModuleNotFoundError:
        raise UsageError(
            f"{path} is a GGUF file, which needs the package gguf; pip install 'jaxpar[gguf]'."
        ) from None
    header = read_header(path)
    whole = np.memmap(path, np.uint8, "r").view(np.ndarray)
    kinds = {}
    arrays = {}
    for name, info in header.tensors.items():
        try:
            kind = gguf.GGMLQuantizationType(info.kind)
        except ValueError:
            raise UsageError(
                f"{path}: tensor {name} is of type {info.kind}, which the package gguf does "
                "not know; expected floats or a type that it does, such as Q4_K."
            ) from None
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        if info.shape[-1] % block:
            raise UsageError(
                f"{path}: rows of tensor {name} have {info.shape[-1]} numbers; "
                f"expected blocks of {block}."
            )
        shape = (*info.shape[:-1], info.shape[-1] // block * num_bytes)
        if info.begin + math.prod(shape) > size:
            raise UsageError(
                f"{path} is not a whole GGUF file: it ends at byte {size}, within tensor {name}."
            )
        kinds[name] = kind
        arrays[name] = whole[info.begin : info.begin + math.prod(shape)].reshape(shape)
    return Contents(
        path=path,
        values=header.values,
        arrays=arrays,
        kinds=kinds,
        shapes={name: info.shape for name, info in header.tensors.items()},
    )
