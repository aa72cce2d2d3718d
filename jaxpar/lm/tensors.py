"""Tensors of safetensors files, read slice by slice at the disk's rate.

A memory map is read through page faults, one at a time, while Python waits: a cold 3 GB file came at a thirtieth of the
disk's rate. Here threads read blocks of the bytes side by side, and what is not asked for stays on the disk.
"""

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpar.types import UsageError

FILE_DTYPES = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
"""Of tensors that can be read."""

BLOCK = 16 * 2**20
"""Bytes that a thread reads at once."""

ROWS = 64
"""Rows that are converted at once."""

_readers = ThreadPoolExecutor(8, "read-tensors")


class FileTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
      path: The file.
      begin: Where its bytes begin.
      kind: Its dtype, as the file names it.
      shape: Its shape.
    """

    path: Path
    begin: int
    kind: str
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a block by a slice for every axis; whole rows are read, of which other axes are cut."""
        dtype = np.dtype(FILE_DTYPES[self.kind])
        start, stop, _ = index[0].indices(self.shape[0])
        row = math.prod(self.shape[1:]) * dtype.itemsize
        data = np.empty((stop - start) * row, np.uint8)
        view, begin = memoryview(data), self.begin + start * row
        places = range(0, len(data), BLOCK)
        if len(places) < 2:
            self._read_into(view, begin)
        else:
            list(_readers.map(lambda place: self._read_into(view[place : place + BLOCK], begin + place), places))
        return data.view(dtype).reshape(stop - start, *self.shape[1:])[(slice(None), *index[1:])]

    def _read_into(self, view: memoryview, begin: int) -> None:
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            while view:
                got = file.readinto(view)
                if not got:
                    raise UsageError(f"{self.path} ends before its tensors do; it was cut while it was read.")
                view = view[got:]


def open_tensors(path: Path) -> dict[str, FileTensor]:
    """Returns the tensors of a safetensors file by their names, of which nothing is read yet.

    Raises:
      UsageError: If the file is not a whole one.
    """
    try:
        with safe_open(path, framework="numpy"):  # which judges the header, and whether all bytes are there
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is not a whole safetensors file: {error}") from error
    return {
        name: FileTensor(path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def fill(block: np.ndarray, out: np.ndarray) -> bool:
    """Writes `block` to the contiguous `out` of its shape, in its dtype; returns whether all numbers are finite there.

    A few rows at a time: of a transposed matrix these are whole lines of the processor's cache, which stay there.
    """
    step = max(1, ROWS // math.prod(out.shape[1:-1])) if out.ndim > 1 else len(out)
    pieces = range(0, len(out), step)
    return all([_fill(block[start : start + step], out[start : start + step]) for start in pieces])


def _fill(block: np.ndarray, out: np.ndarray) -> bool:
    # bfloat16 is moved as the bits it is: NumPy's own loops for it are slow, and keep other threads from running.
    bits = block.view(np.uint16) if block.dtype == jnp.bfloat16 else None
    if bits is not None and out.dtype == jnp.bfloat16:
        out.view(np.uint16)[...] = bits
    elif bits is not None and out.dtype == np.float32:
        np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        with np.errstate(over="ignore"):  # it is told
            out[...] = block
    if out.dtype == jnp.bfloat16:
        return not bool(((out.view(np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(out).all())


def workers() -> int:
    """How many tensors are read and converted side by side."""
    return min(8, os.cpu_count() or 1)
