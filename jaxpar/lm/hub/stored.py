"""Blocks of safetensors files, read ahead by threads and laid into leaves on their devices.

Files hold Linear weights [out, in] one layer at a time, leaves are [layers, in, out]: what is copied on the host is the
bytes as the file has them, and the device turns, widens and stacks them.
"""

import collections
import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxpar.types import Device

FILE_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}  # fmt: skip
"""Numbers that a tensor may be of, by the names of safetensors."""

THREADS = 8
UNDER_WAY = 2**31
"""Bytes of the host that are read ahead, or one block if it is larger."""

LARGE = 2**24
"""Bytes from which a leaf's block is stacked on its device; the program that does it costs more than small ones do."""

ALIGNMENT = 64
"""Bytes whose multiples are addresses that XLA's CPU device takes as they are."""


class Stored(NamedTuple):
    """A tensor of a safetensors file, of which parts are read."""

    path: Path
    dtype: str  # as the file names it
    shape: tuple[int, ...]
    begin: int  # byte of the file

    def read(self, cuts: tuple[slice, ...]) -> np.ndarray:
        """Reads a part into memory of its own: only rows of the first axis that it needs, of step 1."""
        dtype = FILE_DTYPES[self.dtype]
        (start, stop), *_ = ranges = [
            cut.indices(size)[:2] for cut, size in zip(cuts, self.shape, strict=True)
        ]
        row = dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        if all(ends == (0, size) for ends, size in zip(ranges[1:], self.shape[1:], strict=True)):
            out = np.empty((stop - start, *self.shape[1:]), dtype)
            read_into(self.path, self.begin + start * row, out)
            return out
        whole = np.memmap(self.path, np.uint8, "r", self.begin, (self.shape[0] * row,)).view(dtype)
        return np.array(whole.reshape(self.shape)[tuple(slice(*ends) for ends in ranges)])


def read_into(path: Path, begin: int, out: np.ndarray) -> None:
    """Fills an array with bytes of a file; other threads go on meanwhile."""
    left = memoryview(out.reshape(-1).view(np.uint8))
    file = os.open(path, os.O_RDONLY)
    try:
        while len(left):
            count = os.preadv(file, [left[: 2**26]], begin)
            if not count:
                raise OSError(f"{path} ends at byte {begin}, within a tensor")
            begin, left = begin + count, left[count:]
    finally:
        os.close(file)


def stored(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a file that safetensors has found to be whole."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: Stored(path, each["dtype"], tuple(each["shape"]), 8 + size + each["data_offsets"][0])
        for name, each in header.items()
    }


def is_finite(x: np.ndarray) -> bool:
    """Whether no number is NaN or infinity, by their bits: NumPy's own test of bfloat16 holds all threads up."""
    kind = np.dtype(f"u{x.dtype.itemsize}")
    bits, infinity = (
        np.ascontiguousarray(x).reshape(-1).view(kind),
        np.array(np.inf, x.dtype).view(kind)[()],
    )
    sign, part = kind.type(1 << (8 * x.dtype.itemsize - 1)), 2**17
    return all((bits[at : at + part] & ~sign).max() < infinity for at in range(0, bits.size, part))


def exact(block: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns a block as it is if `dtype` holds all numbers of its kind, which a device then makes of it; else that."""
    with np.errstate(over="ignore"):  # what is infinite then, is told
        return block if jnp.promote_types(block.dtype, dtype) == dtype else block.astype(dtype)


class Part(NamedTuple):
    """What one tensor gives to a leaf."""

    at: tuple[int, ...]  # of the leaf's first axes
    num_bytes: int
    read: Callable[[], np.ndarray]  # the tensor's part, its axes in the file's order
    order: (
        tuple[int, ...] | None
    )  # which of them are the leaf's, in turn; None for a whole block as it shall be
    begins: tuple[int, ...] = ()  # of the leaf's other axes; () for all of them from 0


class Wanted(NamedTuple):
    """A block of a leaf, and on which devices it lies; None for JAX's default."""

    leaf: int
    shape: tuple[int, ...]
    dtype: DTypeLike
    devices: tuple[Device | None, ...]
    parts: Iterable[Part]  # in any order; all of them fill the block


def laid(wanted: Iterable[Wanted], on_host: bool = False) -> Iterator[tuple[int, jax.Array]]:
    """Reads blocks and lays them on their devices, in turn.

    Host memory is that of `UNDER_WAY`, or of the largest part; a device holds one block and the parts that came early.
    What a part's `read` raises is raised here.

    Args:
      wanted: The blocks.
      on_host: Whether the devices are the host's, which then takes each block where it was made, and
        no more memory than it and the parts that are being read. Nothing reuses such memory when
        the array is donated.

    Yields:
      The leaf, and a block of it, one for each of its devices.
    """
    waiting: collections.deque = collections.deque()
    under_way, held = 0, []
    is_wide = (
        jax.config.jax_enable_x64
    )  # which a thread of its own does not take from a context of this one

    def put(part: Part, devices: tuple[Device | None, ...]) -> list[jax.Array]:
        with jax.enable_x64(is_wide):
            return _put(part, devices)

    def oldest() -> Iterator[tuple[int, jax.Array]]:
        nonlocal under_way, held
        block, part, is_last, found = waiting.popleft()
        under_way, pieces = under_way - part.num_bytes, found.result()
        if part.order is None:
            held = pieces
        else:
            held = held or [
                jnp.zeros(block.shape, block.dtype, device=device) for device in block.devices
            ]
            at = tuple(np.int32(i) for i in part.at)
            for place, (device, piece) in enumerate(zip(block.devices, pieces, strict=True)):
                # A program of one device, whatever mesh is ambient.
                with (
                    contextlib.nullcontext()
                    if device is None
                    else jax.set_mesh(Mesh(np.array([device]), ("all",)))
                ):
                    held[place] = _place(held[place], piece, at, part.order)
        if is_last:
            done, held = held, []
            yield from ((block.leaf, array) for array in done)

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for block in wanted:
                *_, last = parts = _sized(block, on_host)
                for part in parts:
                    while waiting and under_way + part.num_bytes > UNDER_WAY:
                        yield from oldest()
                    under_way += part.num_bytes
                    waiting.append(
                        (block, part, part is last, pool.submit(put, part, block.devices))
                    )
            while waiting:
                yield from oldest()
        finally:
            pool.shutdown(cancel_futures=True)


def _sized(block: Wanted, on_host: bool) -> list[Part]:
    """Returns what is put on the devices at once: the parts of a large block, or all of a small one."""
    dtype = np.dtype(block.dtype)
    size = math.prod(block.shape) * dtype.itemsize
    if size >= LARGE and not on_host:
        return list(block.parts)

    def whole() -> np.ndarray:
        out = _aligned(block.shape, dtype)
        for part in block.parts:
            assert part.order is not None
            piece = part.read().transpose(part.order)
            begins = part.begins or (0,) * piece.ndim
            ranges = zip(begins, piece.shape, strict=True)
            out[(*part.at, *(slice(begin, begin + count) for begin, count in ranges))] = piece
        return out

    return [Part(at=(), num_bytes=size, read=whole, order=None)]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array of no values yet at an address that XLA's CPU device can take as its own."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + size].view(dtype).reshape(shape)


def _put(part: Part, devices: tuple[Device | None, ...]) -> list[jax.Array]:
    """Reads a part and copies it to the devices; returns when the host's memory is free again."""
    block = part.read()
    return jax.block_until_ready([jax.device_put(block, device) for device in devices])


@functools.partial(jax.jit, static_argnames="order", donate_argnums=0)
def _place(out: jax.Array, block: jax.Array, at: tuple, order: tuple[int, ...]) -> jax.Array:
    block = block.transpose(order).astype(out.dtype)
    block = block.reshape((1,) * len(at) + block.shape)
    return jax.lax.dynamic_update_slice(out, block, (*at, *(np.int32(0),) * (out.ndim - len(at))))
